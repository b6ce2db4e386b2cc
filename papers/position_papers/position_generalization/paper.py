"""Computation Mechanism Behind LLM Position Generalization (Han and Ji 2025): its experiments on small checkpoints, claims P1 to P7.

The paper speaks of approximations and marginal effects; every threshold is the weakest reading of its words.
"""

from __future__ import annotations

from position_papers.kit.experiment import Paper
from position_papers.kit.over_seeds import over_seeds
from position_papers.position_generalization.extrapolation import EXTRAPOLATION
from position_papers.position_generalization.fits import FITS
from position_papers.position_generalization.measured import Options
from position_papers.position_generalization.rotation import ROTATION
from position_papers.position_generalization.shapes import SHAPES_OF_MODELS
from position_papers.position_generalization.tolerance import TOLERANCE

PAPER = Paper(
    "position-generalization",
    "Position Generalization, made again",
    (FITS, SHAPES_OF_MODELS, ROTATION, TOLERANCE, EXTRAPOLATION, *map(over_seeds, (ROTATION, EXTRAPOLATION))),
    Options,
    {
        "sequences": 4,
        "length": 256,
        "prompts": 50,
        "controls": 1,
        "gammas": (0.05, 0.1, 0.5),
        "l_maxes": (5, 100),
        "longer": 32,
        "reach": 2,
    },
)
