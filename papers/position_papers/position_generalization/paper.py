"""Computation Mechanism Behind LLM Position Generalization (Han and Ji 2025): its experiments on
small checkpoints, claims P1 to P7.

The paper speaks of approximations and marginal effects; every threshold is the weakest reading of
its words.
"""

from __future__ import annotations

from position_papers.kit.experiment import Paper
from position_papers.position_generalization.extrapolation import EXTRAPOLATION
from position_papers.position_generalization.fits import FITS
from position_papers.position_generalization.measured import Options
from position_papers.position_generalization.rotation import ROTATION
from position_papers.position_generalization.tolerance import TOLERANCE

PAPER = Paper(
    "position-generalization",
    "Position Generalization, made again",
    (FITS, ROTATION, TOLERANCE, EXTRAPOLATION),
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
    not_made=(
        "Figure 5, attention outputs: needs the outputs of every layer under each "
        "disturbance compared with those without it, about as "
        "long as its log perplexities take.",
        "Section 3.3 on ALiBi: its fake logits are a sum by construction. P1 and P6 are "
        "measured on language/alibi; MPT-7B needs 28 GB.",
        "Tables 1 and 2 (accuracy on Qasper, perplexity and KL of Llama-2-7B to 5,120 "
        "tokens): need models of 7 billion parameters; P6 "
        "and P7 stand for them here on text.",
    ),
    terms="r: correlation of the logits with what is fitted to them. LM-Infinite: distances "
    "capped at L; plain: without.",
)
