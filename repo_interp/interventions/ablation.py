"""Remove what heads write: their output, before the output projection, becomes zero or a mean while
a context lasts.

    o_h = sum_j w_ij v_j   <-   0, or m_h      at `hook_z`; all other heads of the layer keep theirs

With all heads of a layer at zero the layer writes the bias of its output projection alone. What the
heads look at is still computed, so that measures see it. Knows no task and no measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.interventions.replacing import heads_by_layer
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import attentions_of
from repo_interp.models.lasting import intervention
from repo_interp.models.reposition import called_at

HeadMeans = Mapping[int, Float[Tensor, "head d_head"]]
"""By layer, what each head writes on average."""


@contextmanager
def ablate(
    model: nn.Module,
    heads: Sequence[tuple[int, int]] | tuple[int, int] = (),
    means: HeadMeans | None = None,
    *,
    sets: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Iterator[None]:
    """While the context lasts, `heads`, (layer, head) pairs, write nothing (zero), or what `means`
    says, as `ri.head_means` gives it.

        with ri.ablate(bridge, [(0, 1), (2, 3)]):
            logits, cache = bridge.run_with_cache(tokens)

    `sets`: in place of `heads`, those of each prompt of the batch. Takes repositioned models and
    bridges. Raises InputError for heads that the model lacks, and for means of other shapes.
    """
    given = [heads] if sets is None else sets
    by_prompt = [heads_by_layer(model, some) if some or sets is None else {} for some in given]
    chosen = sorted({layer for some in by_prompt for layer in some})
    written = {
        each.layer_idx: _written(
            each, [sorted(some.get(each.layer_idx, ())) for some in by_prompt], means
        )
        for each in attentions_of(model, chosen)
    }

    def put(attention: RepositionedAttention, attended: Tensor) -> Tensor:
        mask, value = written[attention.layer_idx]
        if value.ndim and value.shape[-1] != attended.shape[-1]:
            raise InputError(
                f"means of layer {attention.layer_idx} have {value.shape[-1]} numbers per "
                f"head, which writes {attended.shape[-1]}; "
                "give what ri.head_means(bridge, prompts) returns for this model"
            )
        # [batch, token, head, d_head]
        return torch.where(mask.to(attended.device), value.to(attended), attended)

    with intervention(model), called_at(model, "attended", put, chosen):
        yield


def _written(
    attention: RepositionedAttention, by_prompt: list[list[int]], means: HeadMeans | None
) -> tuple[Tensor, Tensor]:
    """Which heads of a layer are chosen [prompt, 1, head, 1], and what they write."""
    count, layer, heads = (
        attention.heads,
        attention.layer_idx,
        sorted({head for some in by_prompt for head in some}),
    )
    mask = torch.tensor([[[[head in some] for head in range(count)]] for some in by_prompt])
    if means is None:
        return mask, torch.zeros(())
    value = means.get(layer) if isinstance(means, Mapping) else None
    if (
        not isinstance(value, Tensor)
        or value.ndim != 2
        or len(value) != count
        or not bool(value[heads].isfinite().all())
    ):
        raise InputError(
            f"means lack finite ones of the {count} heads of layer {layer}; give what "
            "ri.head_means(bridge, prompts) returns"
        )
    return mask, value
