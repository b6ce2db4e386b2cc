"""Sums over rows of attention; scores of head patterns are these sums divided by counts.

    previous_token     A_{i, i-1}
    duplicate_token    sum over j < i with t_j = t_i of A_ij
    induction          sum over 1 <= j <= i with t_{j-1} = t_i of A_ij
    sink               A_{i, 0}
    distance           sum_j A_ij (i - j)
    departure          ln(keys seen) - entropy of A_i, nats

The first three are the detection patterns of TransformerLens' `head_detector`. Its score "mul"
divides the sum by the number of all rows; our scores divide it by the number of rows in which the
pattern has a pair (`detection_rows`). On a sequence that is repeated once, only the second half of
the rows has a duplicate or an induction target: a perfect head scores 1 here and about one half
in TransformerLens.

    place        mass in the first, the middle three and the last fifth of the keys 1 .. i, divided
                 by the mass of equal weights there
    content      1 - sum_D N_D (mean of x at distance D)^2 / sum x^2,
                 x_ij = W_ij - mean over j of W_ij,    1 <= j <= i

x_ij are the logits of row i minus their mean, without the first token, which is often a sink.
`content` is the share of their variance that distance does not explain. Kernels on [prompt, head,
row, key]; sums in float64. This module knows nothing about models and prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.measures.kernels.rounding import RELATIVE

FIFTH = 5
# Two keys in each fifth at least
FEWEST = 10
"""Least number of keys, without the first, for a row to be split into fifths."""


def detection_sums(
    weights: Float[Tensor, "prompt head row key"],
    rows: Int[Tensor, "row"],
    tokens: Int[Tensor, "prompt key"],
) -> dict[str, Float[Tensor, "prompt head"]]:
    """Sum the attention on the pairs of every detector.

    Args:
        weights: Attention [prompt, head, row, key].
        rows: Token numbers of the rows [row].
        tokens: Token ids [prompt, key].

    Returns:
        Sums over rows [prompt, head] by detector, float64.
    """
    same, _ = _earlier_pairs(rows, tokens)
    # the key after an earlier copy of the row's token
    after = torch.nn.functional.pad(same, (1, -1))
    # One key per row; row 0 has none
    index = (rows - 1).clamp_min(0)[:, None].expand(*weights.shape[:-1], 1)
    before = weights.gather(-1, index)[..., 0].masked_fill(rows == 0, 0.0)
    return {
        "previous_token": before.sum(-1, dtype=torch.float64),
        "duplicate_token": _on(weights, same),
        "induction": _on(weights, after),
        "sink": weights[..., 0].sum(-1, dtype=torch.float64),
    }


def detection_rows(
    rows: Int[Tensor, "row"], tokens: Int[Tensor, "prompt key"]
) -> dict[str, Float[Tensor, "prompt"]]:
    """Count the rows in which each detector's pattern has a pair.

    Args:
        rows: Token numbers of the rows [row].
        tokens: Token ids [prompt, key].

    Returns:
        Numbers of rows [prompt] by detector, float64.
    """
    same, before = (pairs.any(-1).sum(-1).double() for pairs in _earlier_pairs(rows, tokens))
    every = torch.full_like(same, len(rows))
    # An earlier copy always has a key after it, so induction counts the same rows
    return {"previous_token": before, "duplicate_token": same, "induction": same, "sink": every}


def _earlier_pairs(
    rows: Int[Tensor, "row"], tokens: Int[Tensor, "prompt key"]
) -> tuple[Bool[Tensor, "prompt row key"], Bool[Tensor, "prompt row key"]]:
    """Pairs of a row with earlier copies of its token, and with the token before it."""
    keys = torch.arange(tokens.shape[1], device=rows.device)
    same = (tokens[:, rows, None] == tokens[:, None]) & (keys < rows[:, None])
    return same, (keys == rows[:, None] - 1).expand_as(same)


def distance_sums(
    weights: Float[Tensor, "prompt head row key"], rows: Int[Tensor, "row"]
) -> Float[Tensor, "prompt head"]:
    """Sum the mean distance that rows attend to.

    Args:
        weights: Attention [prompt, head, row, key]. Rows of a head with a sink sum to less than
            1; the share of the sink counts as distance 0.
        rows: Token numbers of the rows [row].

    Returns:
        Sums [prompt, head], float64, in tokens.
    """
    keys = torch.arange(weights.shape[-1], device=rows.device, dtype=weights.dtype)
    # One product for the attention on keys, and for their mean
    on_keys, mean_key = (weights @ torch.stack((torch.ones_like(keys), keys), -1)).unbind(-1)
    return (rows * on_keys - mean_key).sum(-1, dtype=torch.float64)


def position_distance_sums(
    weights: Float[Tensor, "prompt head row key"],
    rows: Int[Tensor, "row"],
    positions: Float[Tensor, "prompt head key"],
) -> Float[Tensor, "prompt head"]:
    """Sum the mean |z_i - z_j| that rows attend to.

    Args:
        weights: Attention [prompt, head, row, key].
        rows: Token numbers of the rows [row].
        positions: [prompt, head, key].

    Returns:
        Sums [prompt, head], float64, in positions.
    """
    apart = (positions[..., rows, None] - positions[..., None, :]).abs().to(weights.dtype)
    return (weights * apart).sum(-1).sum(-1, dtype=torch.float64)


def departure_sums(
    weights: Float[Tensor, "prompt head row key"], logits: Float[Tensor, "prompt head row key"]
) -> Float[Tensor, "prompt head"]:
    """Sum how far the attention of rows is from equal weights on the keys they see.

    Args:
        weights: Attention [prompt, head, row, key].
        logits: Logits [prompt, head, row, key]; -inf where a key is not seen.

    Returns:
        Sums [prompt, head], float64, in nats.
    """
    seen = logits > float("-inf")
    # 0 instead of -inf, since 0 * -inf is NaN; H = logsumexp(W) - sum w W needs no log of a weight
    mean = (weights * logits.masked_fill(~seen, 0.0)).sum(-1).double()
    entropy = torch.logsumexp(logits, -1).double() - mean
    return (seen.sum(-1).double().log() - entropy).sum(-1)


def place_sums(
    weights: Float[Tensor, "prompt head row key"], rows: Int[Tensor, "row"]
) -> tuple[Float[Tensor, "prompt head part"], int]:
    """Sum the mass on the first, middle and last part of the keys, relative to equal weights.

    Args:
        weights: Attention [prompt, head, row, key].
        rows: Token numbers of the rows [row]; rows with fewer than `FEWEST` keys are left out.

    Returns:
        Sums [prompt, head, part], float64, and the number of rows.
    """
    keys = torch.arange(weights.shape[-1], device=rows.device)
    enough = rows >= FEWEST
    rows, weights = rows[enough], weights[..., enough, :]
    # Row i sees i keys after the first token, which is left out as a sink
    width = torch.div(rows, FIFTH, rounding_mode="floor")[:, None]
    first = (keys >= 1) & (keys <= width)
    last = (keys > rows[:, None] - width) & (keys <= rows[:, None])
    middle = (keys >= 1) & (keys <= rows[:, None]) & ~first & ~last
    # Relative to equal weights: the mass divided by the part's share of the i keys
    parts = [
        (weights * part).sum(-1).double() * (rows / part.sum(-1)) for part in (first, middle, last)
    ]
    return torch.stack([part.sum(-1) for part in parts], dim=-1), len(rows)


@dataclass
class ContentSums:
    """Running sums over rows and prompts, for the share `content` of every head."""

    squares: Float[Tensor, "head"]
    by_distance: Float[Tensor, "head distance"]
    pairs: Float[Tensor, "distance"]

    @classmethod
    def empty(cls, heads: int, distances: int, device: torch.device) -> ContentSums:
        """Return zero sums.

        Args:
            heads: Number of heads.
            distances: Number of distances.
            device: Device of the sums.

        Returns:
            Zeros, float64.
        """
        made = [
            torch.zeros(shape, dtype=torch.float64, device=device)
            for shape in ((heads,), (heads, distances), (distances,))
        ]
        return cls(*made)

    def add(self, logits: Float[Tensor, "prompt head row key"], rows: Int[Tensor, "row"]) -> None:
        """Add rows of prompts; rows with fewer than two keys after the first token are skipped.

        Args:
            logits: [prompt, head, row, key], -inf where a key is not seen.
            rows: Token numbers of the rows [row], on the processor.
        """
        keys = torch.arange(logits.shape[-1])
        earlier = (keys >= 1) & (keys <= rows[:, None]) & (rows >= 2)[:, None]
        # On the processor: selecting by a mask would wait for an accelerator
        row, key = earlier.nonzero(as_tuple=True)
        pair, distance = (
            places.to(logits.device) for places in (row * len(keys) + key, rows[row] - key)
        )
        # One head suffices: all see the same keys
        seen = (logits[:, :1] > float("-inf")) & (keys >= 1).to(logits.device)
        values = logits.masked_fill(~seen, 0.0)
        # Before the mean is subtracted: rounding is relative to the original logits
        size = values.abs().amax(-1, keepdim=True)
        values = values - values.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
        # 0 too where a key is not seen, so that it adds nothing
        values = values.masked_fill(~seen | (values.abs() <= RELATIVE * size), 0.0)
        of_pairs = values.flatten(-2).gather(-1, pair.expand(*values.shape[:2], -1))
        self.squares += of_pairs.square().sum(-1, dtype=torch.float64).sum(0)
        # The rows of a prompt are summed in their dtype, prompts and calls in float64. This
        # avoids a float64 copy of all pairs.
        by_distance = of_pairs.new_zeros(*of_pairs.shape[:2], self.by_distance.shape[-1])
        self.by_distance += by_distance.index_add_(2, distance, of_pairs).double().sum(0)
        self.pairs.index_add_(0, distance, seen.flatten(1)[:, pair].sum(0).double())

    def share(self) -> Float[Tensor, "head"]:
        """Return 1 minus the share of variance that distance explains.

        Returns:
            [head], float64; NaN for heads whose logits do not vary.
        """
        explained = (self.by_distance.square() / self.pairs.clamp_min(1)).sum(-1)
        return torch.where(self.squares > 0, 1 - explained / self.squares, torch.nan)


def _on(
    weights: Float[Tensor, "prompt head row key"], pairs: Tensor
) -> Float[Tensor, "prompt head"]:
    return (weights * pairs[:, None]).sum(-1).sum(-1, dtype=torch.float64)
