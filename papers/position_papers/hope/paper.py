"""HoPE's analysis of RoPE (Chen et al. 2025, sec. 3), its scores and its ablations (sec. 4 and 5),
made again: claims H1 to H7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from position_papers.hope.beyond import BEYOND
from position_papers.hope.components import COMPONENTS
from position_papers.hope.copying import COPYING
from position_papers.hope.logit_by_distance import LOGIT_BY_DISTANCE
from position_papers.hope.over_training import OVER_TRAINING
from position_papers.hope.perplexity import PERPLEXITY
from position_papers.hope.replicates import Sampling
from position_papers.hope.rotary_pairs import ROTARY_PAIRS
from position_papers.hope.vaf import VAF
from position_papers.kit import Paper, Scale, ScoreOptions, read_items
from position_papers.kit.learning_curves import LEARNING_CURVES

EXPERIMENTS = (
    *(LOGIT_BY_DISTANCE, VAF, OVER_TRAINING, BEYOND, COMPONENTS, ROTARY_PAIRS, COPYING, PERPLEXITY),
    LEARNING_CURVES,
)
SCALE = Scale(12, 768, 512, "50,000 steps of 512 sequences")
"""The paper's models (table 6): all experiments are about them."""


@dataclass(frozen=True)
class Options(Sampling, ScoreOptions):
    """How much is measured and scored."""

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        ScoreOptions.__post_init__(self)


PAPER = Paper(
    "hope",
    "HoPE: which parts of RoPE matter, made again",
    tuple(replace(experiment, scale=SCALE) for experiment in EXPERIMENTS),
    Options,
    {
        "sequences": 32,
        "controls": 1,
        "step_sequences": 8,
        "length": 512,
        "count": 50,
        "language_count": 12,
    },
    read_items(Path(__file__).with_name("items.csv")),
    terms="L: training length. VAF: share of the variance of the mean logit by distance due to a "
    "rotary component; those with theta in (pi/L, 2 pi/L) are activated. AB1, AB2: "
    "HoPE that replaces the activated, the low ones alone.",
)
