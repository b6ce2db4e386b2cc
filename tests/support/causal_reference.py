"""The slow, obvious way: make every map. For tests of kernels that make none."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from repo_interp.inputs import AttentionInputs


def seen(valid, window=None):
    """[prompt, query, key]: which pairs count."""
    distance = torch.arange(valid.shape[-1])[:, None] - torch.arange(valid.shape[-1])
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask & valid[:, None, :] & valid[:, :, None]


def component_maps(queries, keys):
    """[prompt, head, component, query, key], of all pairs, float64; NaN features count as zero."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    queries, keys = queries.double().nan_to_num(0.0), keys.double().nan_to_num(0.0)
    half = queries.shape[-1] // 2
    products = torch.einsum("phic,phjc->phcij", queries, keys)
    return products[:, :, :half] + products[:, :, half:]


def diagonal_sums(maps):
    """Sums of the diagonals i - j = 0 .. n-1 of the last two axes."""
    return torch.stack([maps.diagonal(-t, -2, -1).sum(-1) for t in range(maps.shape[-1])], -1)


def random_features(
    tokens, kv_heads=4, seed=0, mean=0.5, dtype=torch.float64, heads=4, d_head=12, prompts=3
):
    """Queries, keys and a mask with padding on the right, on the left, and a token left out."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        noise = torch.randn(
            prompts, count, tokens, d_head, generator=generator, dtype=torch.float64
        )
        return noise + mean * torch.randn(
            prompts, count, 1, d_head, generator=generator, dtype=torch.float64
        )

    queries, keys = draw(heads), draw(kv_heads)
    valid = torch.ones(prompts, tokens, dtype=torch.bool)
    valid[0, tokens - tokens // 5 :] = False
    if prompts > 1:
        valid[1, : tokens // 3] = False
    if prompts > 2:
        valid[2, tokens // 2] = False
    return queries.to(dtype), keys.to(dtype), valid


def inputs_of(queries, keys, valid=None, window=None, scale=1.0):
    """A layer that rotates nothing, with these features."""
    prompts, _, tokens, _ = queries.shape
    return AttentionInputs(
        layer=0,
        scheme="nope",
        queries=queries,
        keys=keys,
        positions=None,
        frequencies=None,
        attention_scaling=1.0,
        logit_scale=scale,
        valid=torch.ones(prompts, tokens, dtype=torch.bool, device=queries.device)
        if valid is None
        else valid,
        prompts=torch.arange(prompts),
        window=window,
    )


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor has that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result
