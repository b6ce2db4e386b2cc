"""Computation Mechanism Behind LLM Position Generalization (Han and Ji 2025): its experiments on
small checkpoints, claims P1 to P7.

The paper speaks of approximations and marginal effects; every threshold is the weakest reading of
its words.
"""

from __future__ import annotations

from pathlib import Path

from position_papers.kit import Paper, read_items
from position_papers.position_generalization.extrapolation import EXTRAPOLATION, SHARE_OF_PLAIN
from position_papers.position_generalization.fits import FITS
from position_papers.position_generalization.measured import Options
from position_papers.position_generalization.random_weights import RANDOM_WEIGHTS
from position_papers.position_generalization.rotation import ROTATION
from position_papers.position_generalization.tolerance import TOLERANCE

PAPER = Paper(
    "position-generalization",
    "Position Generalization, made again",
    (FITS, RANDOM_WEIGHTS, ROTATION, TOLERANCE, EXTRAPOLATION),
    Options,
    {
        "sequences": 4,
        "length": 256,
        "controls": 1,
        "gammas": (0.05, 0.1, 0.5),
        "l_maxes": (5, 100),
        "longer": 32,
        "reach": 2,
    },
    items=read_items(Path(__file__).with_name("items.csv")),
    terms="r: correlation of the logits with their fit. LM-Infinite: distances capped at L; "
    "plain: without. P7 holds where the KL with LM-Infinite, however large, is at most "
    f"{SHARE_OF_PLAIN:g} of the plain one, by means over layers that few of them rule, and the "
    "perplexity lower.",
)
