"""Whether heads that share keys attend like heads with separate, equal keys.

    difference = max | log p - log p' |    p: 4 heads with 2 key-value heads, head h of the query
                                           shares head h // 2; p': 4 heads with 4, of equal weights

Every tensor with entries of key-value heads is repeated for the heads of a group: projections,
and parameters, buffers and frequencies of the scheme.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.verify_scheme.traced_passes import (
    TOLERANCE,
    TracedPass,
    differing_scores,
    first_difference,
    pass_difference,
    run_pass,
)


def grouped_heads(
    model: PreTrainedModel, build: Callable[[], PreTrainedModel], tokens: Tensor
) -> tuple[float, list[str]]:
    """Compare a model whose heads share keys with one in which every head has the same key.

    Args:
        model: Repositioned model with groups of heads.
        build: Function that makes the same model without groups; its weights are replaced.
        tokens: Token ids [prompt, token].

    Returns:
        The largest difference of log-probabilities, and at most one finding. NaN without a finding
        if the sizes of a tensor do not determine which entries belong to which head.
    """
    wanted, ungrouped = run_pass(model, tokens), build()
    # Entries may go head by head, or heads may lie innermost.
    found: list[TracedPass] = []
    for outermost in (True, False):
        if not _repeat(model, ungrouped, outermost):
            return float("nan"), []
        found.append(run_pass(ungrouped, tokens))
        if pass_difference(found[-1], wanted) <= TOLERANCE:
            break
    best = min(found, key=lambda each: pass_difference(each, wanted))
    difference = pass_difference(best, wanted)
    if difference <= TOLERANCE:
        return difference, []
    _, differs = next(differing_scores(best, wanted, TOLERANCE / 10), (0, torch.zeros(1, 0, 1, 1)))
    heads = differs.any(0).flatten(1).any(1).nonzero().flatten().tolist()
    group = as_decoder(model).layers[0].num_key_value_groups
    return difference, [
        "grouped: heads that share keys attend otherwise than heads that have equal keys each, by "
        f"up to {difference:.2g} nats, {first_difference(wanted, best, TOLERANCE / 10)}, where "
        f"heads {', '.join(map(str, heads))} differ; head h of the query shares key-value head "
        f"h // {group} (expand_heads repeats so), and rows of positions are one, one for every "
        "key-value head, or one for every head of the query"
    ]


def _repeat(grouped: PreTrainedModel, ungrouped: PreTrainedModel, outermost: bool) -> bool:
    """Give a model the weights of one with groups; False where sizes do not fit."""
    ours, theirs = as_decoder(grouped), as_decoder(ungrouped)
    of_scheme = {id(part) for module in theirs.scheme_modules for part in _tensors(module).values()}
    for mine, yours in zip(ours.layers, theirs.layers, strict=True):
        learned = mine.module.rotation_parameters or {}
        if yours.frequencies is None or "frequencies" in learned:
            continue
        made = _repeated(mine.frequencies, yours.frequencies, mine.kv_heads, True)
        if made is None:
            return False
        yours.frequencies = made
    sources = _tensors(grouped)
    for name, target in _tensors(ungrouped).items():
        first = outermost or id(target) not in of_scheme
        made = _repeated(sources[name], target, ours.layers[0].kv_heads, first)
        if made is None:
            return False
        target.data.copy_(made)
    return True


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _repeated(source: Tensor, target: Tensor, kv_heads: int, outermost: bool) -> Tensor | None:
    """Entries of key-value heads, repeated for the heads of their groups; None: they do not fit."""
    if source.ndim != target.ndim:
        return None
    for axis, (few, many) in enumerate(zip(source.shape, target.shape, strict=True)):
        if few == many:
            continue
        if few % kv_heads or many % few:
            return None
        sizes = (kv_heads, few // kv_heads)
        split = source.unflatten(axis, sizes if outermost else sizes[::-1])
        repeated = split.repeat_interleave(many // few, axis if outermost else axis + 1)
        source = repeated.flatten(axis, axis + 1)
    return source
