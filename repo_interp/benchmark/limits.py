"""What the measures of a layer cannot do without, done alone, as fast as this machine does it: their physical limit, in the same process.

    transforms   5 d / 2 per head of N = 2 n numbers in float64, 5/2 N log2 N operations each: every dimension of queries and keys, and
                 back every component
    products     n (5 c d + 9/2 d^2) operations per head, c tokens per chunk: logits within chunks, the same times keys, those of the
                 smaller bands (half of the dimensions); Grams of queries, keys and keys before rotation, of which symmetry leaves 3/4;
                 in float32, timed as a large product
    memory       queries and keys read once

What is between their sum and `all measures`: rotating, copies into float64, sums along lines, statistics, fits, sorting, Python.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2

import torch

from repo_interp.benchmark.cost import Cost, cost
from repo_interp.benchmark.parts import FORWARD, MEMORY, PRODUCTS, TRANSFORMS, Line, Shape
from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import chunk_size

_TOGETHER = 16
"""Transforms that are made by one call."""
_SIDE = 1024
"""Of the matrices of the large product."""


def limits(shape: Shape, inputs: AttentionInputs, repeats: int, device: str) -> list[Line]:
    """A line each; operations of memory are bytes."""
    tokens, d_head = inputs.queries.shape[-2:]
    length, chunk = 2 * tokens, chunk_size(d_head)
    padded = torch.randn(_TOGETHER, length, dtype=torch.float64, device=device)
    spectra = torch.fft.rfft(padded)
    forward, back = (shape.heads * count // _TOGETHER for count in (2 * d_head, d_head // 2))

    def transform() -> None:
        for _ in range(forward):
            torch.fft.rfft(padded, out=spectra)
        for _ in range(back):
            torch.fft.irfft(spectra, n=length, out=padded)

    operations = shape.heads * tokens * (5.0 * chunk * d_head + 4.5 * d_head**2)
    matrix = torch.randn(_SIDE, _SIDE, device=device)
    times = operations / (2.0 * _SIDE**3)
    multiplied = times * cost(lambda: matrix @ matrix, 3, device)
    read = cost(lambda: (inputs.queries.sum(), inputs.keys.sum()), repeats, device)
    of_transforms = 2.5 * length * log2(length) * _TOGETHER * (forward + back)
    moved = inputs.queries.element_size() * (inputs.queries.numel() + inputs.keys.numel())
    return [
        Line(TRANSFORMS, _without_memory(cost(transform, repeats, device)), FORWARD, of_transforms),
        Line(PRODUCTS, _without_memory(multiplied), FORWARD, operations, f"{times:.3g} times a product of matrices of {_SIDE:,}"),
        Line(MEMORY, _without_memory(read), FORWARD, float(moved), "operations are bytes"),
    ]


def _without_memory(spent: Cost) -> Cost:
    return replace(spent, megabytes=float("nan"))
