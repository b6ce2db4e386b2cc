"""Remove what heads write: their output, before the output projection, becomes zero or a mean while a context lasts.

    o_h = sum_j w_ij v_j   <-   0, or m_h      at `hook_z`; all other heads of the layer keep theirs

With all heads of a layer at zero the layer writes the bias of its output projection alone. What the heads look at is still computed, so
that measures see it. Knows no task and no measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.errors import InputError, one_line
from repo_interp.models.interventions.lasting import lasting
from repo_interp.models.interventions.replacing import layer_and_head
from repo_interp.models.reposition import attentions_of

HeadMeans = Mapping[int, Float[Tensor, "head d_head"]]
"""By layer, what each head writes on average."""


@contextmanager
def ablate(
    model: nn.Module, heads: Sequence[tuple[int, int]] | tuple[int, int], means: HeadMeans | None = None
) -> Iterator[None]:
    """While the context lasts, `heads`, (layer, head) pairs, write nothing (zero), or what `means` says, as `ri.head_means` gives it.

        with ri.ablate(bridge, [(0, 1), (2, 3)]):
            logits, cache = bridge.run_with_cache(tokens)

    Takes repositioned models and bridges. Raises InputError for heads that the model lacks, and for means of other shapes.
    """
    chosen: dict[int, list[int]] = {}
    for layer, head in head_pairs(heads):
        chosen.setdefault(layer, []).append(head)
    layers = attentions_of(model, chosen)
    values = [_value(attention, chosen[attention.layer_idx], means) for attention in layers]
    with lasting(model) as hooks:
        for attention, (mask, value) in zip(layers, values, strict=True):

            def put(module: nn.Module, arguments: tuple, attended: Tensor, mask: Tensor = mask, value: Tensor = value) -> Tensor:
                return torch.where(mask.to(attended.device), value.to(attended), attended)  # [batch, token, head, d_head]

            hooks.callback(attention.sites.attended.register_forward_hook(put).remove)
        yield


def head_pairs(heads: Any) -> list[tuple[int, int]]:
    """`heads`, one (layer, head) pair or several, each once, in order. Raises InputError for what is none."""
    one = isinstance(heads, tuple) and len(heads) == 2 and not hasattr(heads[0], "__len__")
    pairs = [heads] if one else list(heads) if isinstance(heads, Iterable) else []
    if not pairs:
        raise InputError(f"heads are (layer, head) pairs, such as [(2, 0), (2, 3)]; got {one_line(repr(heads), 160)}")
    return list(dict.fromkeys(layer_and_head(pair) for pair in pairs))


def _value(attention: Any, heads: Sequence[int], means: HeadMeans | None) -> tuple[Tensor, Tensor]:
    """Which heads of a layer are chosen [head, 1], and what they write."""
    count, layer = attention.heads, attention.layer_idx
    for head in heads:
        if not 0 <= head < count:
            raise InputError(f"head {head} was asked for; the model's are 0 to {count - 1}")
    mask = torch.zeros(count, 1, dtype=torch.bool)
    mask[list(heads)] = True
    if means is None:
        return mask, torch.zeros(())
    value = means.get(layer) if isinstance(means, Mapping) else None
    if not isinstance(value, Tensor) or value.ndim != 2 or len(value) != count or not bool(value[list(heads)].isfinite().all()):
        raise InputError(
            f"means lack finite ones of the {count} heads of layer {layer}; give what ri.head_means(bridge, prompts) returns"
        )
    return mask, value
