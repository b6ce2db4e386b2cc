"""RePo (Li et al. 2026): figures 1 to 8 and tables 1, 4 and 6, made again on any checkpoints.

    text reversal          R1 by length; R2, R3 from positions                         reversal, mirror
    learned positions      R2, R3, R5 when positions are taken away                    causes
    needle in a haystack   R4 attention mass, R5 ranges, R6 chunks, R9 scores          attention, ranges, chunks, haystack
    language               R5, R6, and R8 segments                                     ranges, chunks, segments
    fresh models           R7 cost                                                     efficiency
    every training seed    R2, R3, R5, R6 and R8, by seed                              seeds

A checkpoint is asked what its task has an answer to; one of no task of ours, such as the authors',
is given RULER's needle in a haystack, few-shot prompts, and words to reverse in its own tokens.
Checkpoints are compared within a task and training length.
"""

from __future__ import annotations

from position_papers.kit.experiment import Paper
from position_papers.repo.attention import ATTENTION
from position_papers.repo.causes import CAUSES
from position_papers.repo.chunks import CHUNKS
from position_papers.repo.efficiency import EFFICIENCY
from position_papers.repo.haystack import HAYSTACK
from position_papers.repo.mirror import MIRROR
from position_papers.repo.options import Options
from position_papers.repo.ranges import RANGES
from position_papers.repo.reversal import REVERSAL
from position_papers.repo.segments import SEGMENTS

PAPER = Paper(
    name="repo",
    title="RePo's experiments and analyses, made again",
    experiments=(
        REVERSAL,
        MIRROR,
        ATTENTION,
        RANGES,
        CAUSES,
        CHUNKS,
        EFFICIENCY,
        SEGMENTS,
        HAYSTACK,
    ),
    options=Options,
    not_made=(
        "Table 1, multi-query and multi-value needles: a RePo that finds RULER's needles. "
        "The adapter here finds none with a single value "
        "(R9), and our own tasks have one value per key.",
        "Table 1 and figure 5, 7B; table 5; figure 4, MMLU-Pro: the paper's models on a GPU, "
        "and the evaluation suite olmes.",
        "Table 1, N2R1 above RoPE: needles that RoPE misses. Of niah_keys' R2N1 finds .990, "
        "N2R1 .790 and RoPE .995 at the training length "
        "(records of seeds 4 to 7): R2N1 is .200 above N2R1 (standard error .092 over 4 "
        "paired seeds, too few to decide), and neither can "
        "be above RoPE.",
        "Tables 2 and 3: HybridQA and LongBench, and models that answer questions about them.",
        "R2N1 and N2R1 on text: more seeds than the one of each that is recorded, since "
        "their losses differ by less than seeds do.",
        "Table 6, time in vLLM: a GPU. Times here are of fresh small models on a CPU (R7, time).",
        "Footnote 2, the token index as another input of the position module: a module with "
        "that input, and its training.",
        "Figure 8, MMLU-Pro's prompts: a model that reads them. Here, few-shot prompts of "
        "sentences with labels.",
    ),
    terms="dz: difference of two positions. Chunks of 16 positions: constant, all within 0.2 "
    "of their mean; mono, strictly rising or "
    "falling; else hybrid.",
    fast={
        "prompts": 16,
        "score_prompts": 24,
        "controls": 1,
        "efficiency_layers": 4,
        "efficiency_width": 256,
        "efficiency_rounds": 7,
    },
)
