"""Contextual Position Encoding (Golovneva et al. 2024): its experiments on small trained
checkpoints, claims C1 to C6.

Which experiment a checkpoint is part of, the task says that its training.toml names; others are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from position_papers.cope.error_tasks import COUNTING, FLIP_FLOP, SELECTIVE_COPY, CountingOptions
from position_papers.cope.gates import GATES, GateOptions
from position_papers.cope.perplexity import PERPLEXITY
from position_papers.kit.experiment import Paper


@dataclass(frozen=True)
class Options(GateOptions, CountingOptions):
    """How much is measured: prompts to score, and texts whose gates are measured."""


PAPER = Paper(
    "cope",
    "Contextual Position Encoding (CoPE), made again",
    (FLIP_FLOP, SELECTIVE_COPY, COUNTING, PERPLEXITY, GATES),
    Options,
    {"count": 50, "counting_count": 100, "language_count": 12, "gate_texts": 8, "draws": 20},
    not_made=(
        "Tables 1 and 6 (large models count words in the last sentence): need GPT-4 and "
        "Llama-2 70B Chat.",
        "Figure 2 (counting error by size of the training data): needs models trained on "
        "2,000 to 10,000 fixed sequences, about 1,500 s a "
        "seed of CoPE and 600 s of a rival for each size; ours are trained on new sequences "
        "at every step.",
        "Figure 5 (flip-flop error every 500 steps): needs flip_flop/*_256 trained again "
        "with its scores kept, 300 to 2,700 s a seed; the "
        "zoo records the last score of a run.",
        "Tables 2, 3 and 4, relative positions: need models with open gates, about 1,500 s a "
        "seed; RoPE stands for them here.",
        "Figure 3, relative positions without a limit, and capped at the training length: "
        "need models with 256 vectors and open gates, "
        "about 1,000 s a seed. C5 compares with open gates capped at 64 positions, in "
        "training too.",
        "Table 5, CoPE + relative, and code, CoPE + RoPE: need a model each, about 1,000 s a seed.",
        "Table 7, other sizes, CoPE-MLP and CoPE-ALiBi: need 12 sizes or variants, 300 to "
        "2,700 s a seed each; ours have 4 layers of 4 "
        "heads and width 64.",
        "Table 8, gates from values, position vectors shared by all layers, p_max = T, and "
        "CoPE-ALiBi: need a model each, about 1,000 s a "
        "seed.",
    ),
)
