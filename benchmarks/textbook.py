"""The textbook way of four measures: make the maps, as the formulas in the papers read.

Work that would take minutes or gigabytes is done only for some heads or components, and its time is
multiplied: a sample is a call, the number of times its work occurs in the whole, and its result in
words. Memory is that of the call. Maps are float32; the ridge fit is solved in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.running import Cost, Row, cost, row
from repo_interp.inputs import AttentionInputs, Spans

Sample = tuple[Callable[[], object], float, str]


def textbook_rows(inputs: AttentionInputs, spans: Spans) -> Iterator[Row]:
    """One row per measure, and one for all, each compared with ours."""
    made: list[tuple[float, Cost]] = []
    for way in (attention_mass, components, three_axis, fake_distance):
        samples = way(inputs, spans)
        spent = _together([(times, cost(call)) for call, times, _ in samples])
        made.append((1.0, spent))
        note = f"made: {' and '.join(what for *_, what in samples)}; time multiplied"
        yield row(f"{way.__name__}, textbook", way.__name__, **spent, note=note)
    yield row("all measures, textbook", "all measures", **_together(made))


def _together(costs: Sequence[tuple[float, Cost]]) -> Cost:
    """The cost of consecutive calls, each multiplied by its number."""
    seconds = {
        unit: sum(times * spent[unit] for times, spent in costs)
        for unit in ("cpu_seconds", "wall_seconds")
    }
    return seconds | {"megabytes": max(spent["megabytes"] for _, spent in costs)}


def attention_mass(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The softmax of the whole map of every head; four heads are made."""
    queries, keys, causal = (
        inputs.rotated_queries[0, :4],
        inputs.rotated_keys[0, :4],
        _causal(inputs),
    )
    masks = torch.stack([mask[0] for mask in spans.values()]).float()

    def run() -> Tensor:
        logits = queries @ keys.transpose(-1, -2) * inputs.logit_scale
        weights = torch.softmax(logits.masked_fill(~causal, float("-inf")), -1)
        return (weights[:, spans["generated"][0]] @ masks.T).mean(1)

    return [(run, inputs.heads / len(queries), f"{len(queries)}/{inputs.heads} heads")]


def components(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The map of every component of every head: its mean along each diagonal, its VAF over pairs.

    Two of one head are made.
    """
    queries, keys, causal = inputs.rotated_queries[0, 0], inputs.rotated_keys[0, 0], _causal(inputs)
    tokens, half = queries.shape[0], queries.shape[1] // 2
    made = queries @ keys.T

    def component() -> list[Tensor]:
        results = []
        for first in (0, half - 1):
            pair = [first, first + half]
            values = queries[:, pair] @ keys[:, pair].T
            results += [values.diagonal(-distance).mean() for distance in range(tokens)]
            results.append(1 - (made - values)[causal].var() / made[causal].var())
        return results

    every = inputs.heads * half
    made_once = (lambda: queries @ keys.T, inputs.heads, f"1/{inputs.heads} heads")
    return [made_once, (component, every / 2, f"2/{every} components")]


def three_axis(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The normal equations of the ridge fit, 3 n unknowns, solved densely for every head; one is
    made.
    """
    queries, keys = inputs.rotated_queries[0, 0], inputs.rotated_keys[0, 0]
    tokens = queries.shape[0]

    def run() -> Tensor:
        logits = (queries @ keys.T * inputs.logit_scale).double()
        row, column = torch.tril_indices(tokens, tokens)
        values = logits[row, column]
        lines = [(row - column), tokens + row, 2 * tokens + column]
        normal, right = values.new_zeros(9 * tokens**2), values.new_zeros(3 * tokens)
        for one in lines:
            right.index_add_(0, one, values)
            for other in lines:
                normal.index_add_(0, one * 3 * tokens + other, torch.ones_like(values))
        normal = normal.view(3 * tokens, 3 * tokens)
        normal.diagonal().add_(1e-6)
        axes = torch.linalg.solve(normal, right)
        fitted = torch.stack([axes[line] for line in lines]).sum(0)
        return torch.corrcoef(torch.stack((values, fitted)))[0, 1]

    return [(run, inputs.heads, f"1/{inputs.heads} heads")]


def fake_distance(inputs: AttentionInputs, spans: Spans) -> list[Sample]:
    """The logits of the last query at every distance with every key, two heads."""
    assert inputs.frequencies is not None
    queries, keys = inputs.queries[0, :2, -1], inputs.keys[0, :2]
    tokens, half = keys.shape[1], keys.shape[2] // 2
    angles = torch.arange(tokens)[:, None] * inputs.frequencies

    def run() -> list[Tensor]:
        results = []
        for query, key in zip(queries, keys, strict=True):
            first, second = query[:half], query[half:]
            turned = torch.cat(
                (
                    first * angles.cos() - second * angles.sin(),
                    second * angles.cos() + first * angles.sin(),
                ),
                -1,
            )
            logits = turned @ key.T * inputs.logit_scale
            fitted = logits.mean(1)[:, None] + logits.mean(0) - logits.mean()
            results.append(torch.corrcoef(torch.stack((logits.flatten(), fitted.flatten())))[0, 1])
        return results

    return [(run, inputs.heads / 2, f"2/{inputs.heads} heads")]


def _causal(inputs: AttentionInputs) -> Tensor:
    tokens = inputs.valid.shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()
