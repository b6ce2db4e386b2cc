"""The slow, obvious way of the three-axis fit: the design matrix and the paper's dense ridge solve.

For tests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from attention_inputs import with_holes
from scipy.linalg import null_space

RIDGE = 1e-6


def design(seen, label=None):
    """Design matrix [pair, unknown] of a map over the `seen` pairs [n, n]: columns of a (by
    `label`), of b and of c.
    """
    n = len(seen)
    query, key = np.nonzero(seen)
    label = query - key if label is None else label[query, key] - label[query, key].min()
    distances = n if label.size == 0 else max(n, label.max() + 1)
    matrix = np.zeros((len(query), distances + 2 * n))
    pair = np.arange(len(query))
    matrix[pair, label] = 1
    matrix[pair, distances + query] = 1
    matrix[pair, distances + n + key] = 1
    return matrix


def ridge_solve(matrix, values, ridge=RIDGE):
    """The paper's solve of the normal equations; what rounding puts into their null space is taken
    out again.
    """
    normal = matrix.T @ matrix
    solution = np.linalg.solve(normal + ridge * np.eye(len(normal)), matrix.T @ values)
    null = null_space(normal, rcond=1e-12)
    return solution - null @ (null.T @ solution)


def correlation(values, fitted):
    """Pearson correlation of two lists."""
    return np.corrcoef(values, fitted)[0, 1]


def maps(inputs):
    """Every logit [prompt, head, query, key], float64, and which are seen [prompt, query, key]."""
    rows = torch.arange(inputs.valid.shape[1])
    return inputs.logits(rows).double().numpy(), inputs.visible(rows).numpy()


def dense_r(weights, pairs, labels=None):
    """r [prompt, head] of the fit of every map; labels [prompt, head, query, key]."""
    found = np.empty(weights.shape[:2])
    for prompt, head in np.ndindex(*found.shape):
        matrix = design(pairs[prompt], None if labels is None else labels[prompt, head])
        values, normal = weights[prompt, head][pairs[prompt]], matrix.T @ matrix
        # what rounding puts into the null space is nothing in the fit
        unknowns = np.linalg.solve(normal + RIDGE * np.eye(len(normal)), matrix.T @ values)
        found[prompt, head] = correlation(values, matrix @ unknowns)
    return found


def of_kind(inputs, kind):
    """Inputs with holes, with logits that are capped or added to; as they are for other kinds."""
    if kind == "holes":
        return with_holes(inputs)
    if kind == "softcap":
        return replace(inputs, softcap=1.5)
    if kind == "bias":
        prompts, heads, tokens = inputs.queries.shape[:3]
        added = torch.randn(prompts, heads, tokens, tokens, dtype=torch.float64)
        return replace(inputs, position_logits=lambda rows: added[:, :, rows])
    return inputs


def rounded(inputs):
    """Inputs in float32, and with the same numbers in float64."""
    names = ("queries", "keys", "positions", "frequencies")
    given = {name: value for name in names if (value := getattr(inputs, name)) is not None}
    narrow = {name: value.float() for name, value in given.items()}
    wide = {name: value.double() for name, value in narrow.items()}
    return replace(inputs, **narrow), replace(inputs, **wide)
