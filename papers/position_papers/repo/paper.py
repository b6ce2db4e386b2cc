"""RePo (Li et al. 2026): figures 1 to 8 and tables 1, 4 and 6, made again on any checkpoints.

    text reversal          R1 by length; R2, R3 from positions                         reversal, mirror
    learned positions      R2, R3, R5 when positions are removed                       causes
    needle in a haystack   R4 attention mass, R5 ranges, R6 chunks, R9 scores          attention, ranges, chunks, haystack
    language               R5, R6, and R8 segments; R10 inputs of f_phi                ranges, chunks, segments, assigners
    training runs          R9 where RoPE does not find all, R11 layers that learn      harder_needles, placement
    fresh models           R7 cost                                                     efficiency
    every training seed    R2, R3, R5, R6 and R8, by seed                              seeds

A checkpoint gets prompts of the task on which it was trained. A checkpoint without one of our
tasks, such as the authors', gets RULER's needle in a haystack, few-shot prompts, and words to
reverse, encoded by its tokenizer. Checkpoints are compared within a task and training length.
"""

from __future__ import annotations

from pathlib import Path

from position_papers.kit import Paper, read_items
from position_papers.repo.assigners import ASSIGNERS
from position_papers.repo.attention import ATTENTION
from position_papers.repo.causes import CAUSES
from position_papers.repo.chunks import CHUNKS
from position_papers.repo.efficiency import EFFICIENCY
from position_papers.repo.harder_needles import HARDER_NEEDLES
from position_papers.repo.haystack import HAYSTACK
from position_papers.repo.mirror import MIRROR
from position_papers.repo.options import Options
from position_papers.repo.placement import PLACEMENT
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
        HARDER_NEEDLES,
        HAYSTACK,
        ASSIGNERS,
        PLACEMENT,
    ),
    options=Options,
    items=read_items(Path(__file__).with_name("items.csv")),
    terms="dz: difference of positions. Chunks of 16 positions: constant, within 0.2 of their "
    "mean; mono, strictly rising or falling; else hybrid.",
    fast={
        "prompts": 16,
        "score_prompts": 24,
        "controls": 1,
        "efficiency_layers": 4,
        "efficiency_width": 256,
        "efficiency_rounds": 7,
    },
)
