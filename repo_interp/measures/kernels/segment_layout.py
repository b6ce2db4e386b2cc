"""Segments of a prompt as the places where they begin, and other layouts with the same lengths to compare with.

    edges e_1 < ... < e_k of n tokens: token e_m begins segment m; segment 0 begins at token 0

A shuffled layout has the segments in random order, and then all edges moved by one random number of tokens,

    e' = e + r,    r = 1 - n_0 .. n_k - 1    (n_0, n_k: tokens of the first and of the last segment)

so that it has as many edges at the same distances; moved too, since segments of one length are the same in any order. Draws depend
on the seed, the prompt's number and the kind alone.

Knows nothing about positions or attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import Spans

INSIDE, STARTS = "segments.", ".starts"
"""Spans `segments.K` and `segments.K.starts` of a kind K of segments."""


def segment_edges(spans: Spans, kind: str, row: int) -> tuple[Int[Tensor, "member"], Int[Tensor, "edge"]]:
    """Tokens of prompt `row` that lie in segments of `kind`, and of these the numbers of those that begin one, without the first."""
    inside = spans.get(INSIDE + kind)
    starts = spans.get(INSIDE + kind + STARTS)
    if inside is None or starts is None:
        nothing = torch.zeros(0, dtype=torch.long)
        return nothing, nothing
    members = inside[row].nonzero()[:, 0]
    begins = starts[row][members].nonzero()[:, 0]
    return members, begins[begins > 0]


def shuffled_edges(edges: Int[Tensor, "edge"], tokens: int, draws: int, random: np.random.Generator) -> Int[Tensor, "draw edge"]:
    """Edges of `draws` shuffled layouts of the same `tokens`, ascending."""
    lengths = np.diff(edges.cpu().numpy(), prepend=0, append=tokens)
    orders = np.stack([random.permutation(lengths) for _ in range(draws)])
    moved = random.integers(1 - orders[:, 0], orders[:, -1])
    return torch.as_tensor(np.cumsum(orders[:, :-1], axis=1) + moved[:, None], device=edges.device)


def generator(seed: int, prompt: int, kind: str = "") -> np.random.Generator:
    """Random numbers of one prompt and kind, the same in whatever batch it stands."""
    return np.random.default_rng([seed, prompt, *kind.encode()])


def chance(drawn: Tensor, observed: Tensor) -> Tensor:
    """(1 + draws that are at least as high) / (1 + draws), over axis 0 of `drawn`; NaN where `observed` is."""
    at_least = (drawn >= observed - 1e-12).sum(0).double()
    return ((1 + at_least) / (1 + drawn.shape[0])).masked_fill(observed.isnan(), torch.nan)


def check_draws(kinds: Sequence[str], draws: int) -> None:
    """Raises InputError where there is no kind or no draw."""
    if not kinds:
        raise InputError("no kind of segment was asked for; name at least one, such as lines")
    if draws < 1:
        raise InputError(f"the control needs at least one draw, not {draws}")
