"""The textbook way of each measure: make the maps, as the formulas in the papers read.

What would take minutes or gigabytes is done for some heads or components, and its time multiplied: a `Sample` says how often
its work occurs in the whole. Memory is what the part took. Float32 maps; the ridge fit is solved in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans


@dataclass(frozen=True)
class Sample:
    """Work of which the whole has `times` as much."""

    call: Callable[[], object]
    times: float
    what: str


def attention_mass(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The softmax of the whole map of every head; four heads are made."""
    queries, keys = inputs.rotated_queries[0, :4], inputs.rotated_keys[0, :4]
    later = _later(inputs)
    masks = torch.stack([mask[0] for mask in spans.values()]).float()

    def run() -> Tensor:
        logits = queries @ keys.transpose(-1, -2) * inputs.logit_scale
        weights = torch.softmax(logits.masked_fill(later, float("-inf")), -1)
        return (weights[:, spans["generated"][0]] @ masks.T).mean(1)

    return [Sample(run, inputs.heads / 4, f"4/{inputs.heads} heads")]


def components(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The map of every component of every head: its mean along each diagonal, its VAF over pairs. Two of one head are made."""
    queries, keys = inputs.rotated_queries[0, 0], inputs.rotated_keys[0, 0]
    tokens, half, causal = queries.shape[0], queries.shape[1] // 2, ~_later(inputs)

    def logits() -> Tensor:
        return queries @ keys.T

    made = logits()

    def component() -> list[Tensor]:
        results = []
        for first in (0, half - 1):
            pair = [first, first + half]
            values = queries[:, pair] @ keys[:, pair].T
            results += [values.diagonal(-distance).mean() for distance in range(tokens)]
            results.append(1 - (made - values)[causal].var() / made[causal].var())
        return results

    each = inputs.heads * half
    return [
        Sample(logits, inputs.heads, f"1/{inputs.heads} heads"),
        Sample(component, each / 2, f"2/{each} components"),
    ]


def three_axis(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The normal equations of the ridge fit, 3 n unknowns, solved densely for every head; one is made."""
    queries, keys = inputs.rotated_queries[0, 0], inputs.rotated_keys[0, 0]
    tokens = queries.shape[0]

    def run() -> Tensor:
        logits = (queries @ keys.T * inputs.logit_scale).double()
        row, column = torch.tril_indices(tokens, tokens, device=queries.device)
        values = logits[row, column]
        lines = [(row - column), tokens + row, 2 * tokens + column]
        normal = values.new_zeros(9 * tokens**2)
        right = values.new_zeros(3 * tokens)
        for one in lines:
            right.index_add_(0, one, values)
            for other in lines:
                normal.index_add_(0, one * 3 * tokens + other, torch.ones_like(values))
        normal = normal.view(3 * tokens, 3 * tokens)
        normal.diagonal().add_(1e-6)
        axes = torch.linalg.solve(normal, right)
        fitted = torch.stack([axes[line] for line in lines]).sum(0)
        return torch.corrcoef(torch.stack((values, fitted)))[0, 1]

    return [Sample(run, inputs.heads, f"1/{inputs.heads} heads")]


def fake_distance(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The logits of the last query at every distance with every key, two heads."""
    assert inputs.frequencies is not None
    queries, keys = inputs.queries[0, :2, -1], inputs.keys[0, :2]
    tokens, half = keys.shape[1], keys.shape[2] // 2
    angles = torch.arange(tokens, device=keys.device)[:, None] * inputs.frequencies

    def run() -> list[Tensor]:
        results = []
        for query, key in zip(queries, keys, strict=True):
            first, second = query[:half], query[half:]
            turned = torch.cat(
                (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()),
                -1,
            )
            logits = turned @ key.T * inputs.logit_scale
            fitted = logits.mean(1)[:, None] + logits.mean(0) - logits.mean()
            results.append(torch.corrcoef(torch.stack((logits.flatten(), fitted.flatten())))[0, 1])
        return results

    return [Sample(run, inputs.heads / 2, f"2/{inputs.heads} heads")]


def _later(inputs: AttentionInputs) -> Tensor:
    tokens = inputs.valid.shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool, device=inputs.valid.device).triu(1)
