"""Attention outputs in their principal plane, and how they wander as keys slide by (Position Generalization fig. 6).

Dots: outputs of a layer at all tokens of prompts of the training length, run plainly; the plane is that of their two largest
variances (PCA). Lines: a token beyond the training length of one longer prompt - run by LM-Infinite, so that its features are in
distribution; its query over every `step`-th window of the training length's keys and values (see `models.outputs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.experiments.extrapolation import GLOBAL_TOKENS, extended
from repo_interp.measures.kernels.gaussians import principal_plane, vector_sums
from repo_interp.models.capture import decode
from repo_interp.models.outputs import attention_outputs, layer_tensors, outputs_over_windows
from repo_interp.models.reposition import attentions
from repo_interp.tasks import Prompt

POINTS = 2000
"""Reference outputs that are kept for drawing, evenly spaced; the plane is made from all."""


@torch.inference_mode()
def output_traces(
    model: PreTrainedModel,
    reference: Sequence[Prompt],
    longer: Prompt,
    training_length: int,
    layer: int,
    queries: int = 4,
    step: int = 32,
    method: str = "lm_infinite",
    global_tokens: int = GLOBAL_TOKENS,
) -> xr.Dataset:
    """The group `output_traces` of a run: `pca_reference [point, axis]`, `pca_trace [trace, step, axis]`, `pca_share [axis]`, and
    `trace_outside [trace]`: the share of a trace's outputs further from the mean than 99 % of the reference, in the whole space, by
    Mahalanobis' distance.

    `reference`: prompts, cut to the training length. `queries`: how many tokens of `longer`, evenly spaced beyond the training
    length. Raises InputError for a prompt that is not longer, and an unknown layer.
    """
    found = len(list(attentions(model)))
    if not 0 <= layer < found:
        raise InputError(f"layer {layer} was asked for; the model's are 0 to {found - 1}")
    tokens = len(longer.tokens)
    if tokens <= training_length:
        raise InputError(f"a prompt longer than {training_length} tokens, the training length, was wanted; got {tokens}")
    outputs: list[Tensor] = []
    with attention_outputs(model, lambda _, some: outputs.append(some[0]), [layer]):
        for prompt in reference:
            _run(model, prompt.tokens[:training_length])
    normal = torch.cat(outputs).double()
    sums = vector_sums(normal)
    plane, shares = principal_plane(sums)
    with layer_tensors(model, layer) as tensors, extended(model, method, tokens, training_length, global_tokens):
        _run(model, longer.tokens)
    starts = range(0, tokens - training_length + 1, step)
    asked = np.unique(np.linspace(training_length, tokens - 1, queries).round().astype(int))
    traces = torch.stack(
        [outputs_over_windows(model, layer, tensors, int(query), starts, training_length) for query in asked]
    ).double()
    limit = torch.quantile(_distances(normal[:: max(1, len(normal) // POINTS)], sums), 0.99)
    outside = (_distances(traces.flatten(0, 1), sums) > limit).double().unflatten(0, traces.shape[:2]).mean(-1)
    kept = normal[:: max(1, len(normal) // POINTS)]
    variables = {
        "pca_reference": (("point", "axis"), (kept - sums.mean) @ plane, "attention outputs at training lengths in their plane"),
        "pca_trace": (("trace", "step", "axis"), (traces - sums.mean) @ plane, "outputs of a query over sliding windows"),
        "pca_share": (("axis",), shares, "share of the variance of outputs at training lengths"),
        "trace_outside": (("trace",), outside, "share of a trace beyond 99 % of outputs at training lengths"),
    }
    units = {"pca_share": "1", "trace_outside": "1"}
    group = xr.Dataset(
        {
            name: (axes, values.cpu().numpy(), {"long_name": text, "units": units.get(name, "output units")})
            for name, (axes, values, text) in variables.items()
        },
        coords={"trace": asked, "step": list(starts)},
    )
    group["trace"].attrs = {"long_name": "token whose query it is", "units": "tokens"}
    group["step"].attrs = {"long_name": "first key of the window", "units": "tokens"}
    return group.assign_attrs(layer=layer, window=training_length, method=method, length=tokens)


def _run(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    row = torch.tensor([tokens], device=next(model.parameters()).device)
    decode(model, row, torch.ones_like(row, dtype=torch.bool))


def _distances(vectors: Tensor, sums) -> Tensor:
    """Mahalanobis distance from the Gaussian fitted to `sums`, slightly widened where it is flat."""
    covariance = sums.covariance
    covariance = covariance + 1e-4 * covariance.trace() / len(covariance) * torch.eye(len(covariance), dtype=torch.float64)
    factor = torch.linalg.cholesky(covariance)
    return torch.linalg.solve_triangular(factor, (vectors - sums.mean).mT, upper=False).norm(dim=0)
