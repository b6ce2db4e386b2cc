"""Activation patching of `hook_positions`, in the manner of TransformerLens' `patching`.

Between a clean and a corrupted prompt:

    clean cache = run_with_cache(clean tokens)
    result[layer, head] = metric(logits of the corrupted tokens, with that head's positions from the
    clean cache)

`transformer_lens.patching.generic_activation_patch` does the work, with all its options (`reduce`,
`baseline`, several metrics). It uses the names "blocks.{layer}.hook_{activation}", so each block
has this name as an alias while it runs. Positions that heads share are first expanded to one row
per head. A layer without positions keeps the corrupted prompt's metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.edits import HOOK
from repo_interp.interventions.positions import token_ids
from repo_interp.interventions.replacing import heads_with_positions
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import intervention, patch_attribute
from repo_interp.positions.rotary import expand_heads

_SHORT = "blocks.{}.hook_positions"


def get_act_patch_positions_all_pos(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    patching_metric: Any,
    **options: Any,
) -> Any:
    """Patch the positions of every head, over all tokens, from a clean prompt.

    Args:
        model: Bridge of this library.
        corrupted_tokens: Ids of the prompts that run.
        clean_cache: Cache of the clean prompts, with `hook_positions`.
        patching_metric: Function from logits to a number, or several by name.
        **options: Options of `transformer_lens.patching.generic_activation_patch`.

    Returns:
        The metric [layer, head], as in `get_act_patch_attn_head_out_all_pos`.

    Raises:
        InputError: The model is not a bridge of this library, the prompts differ in length, or the
            cache has other prompts or lacks the axis of prompts.
    """
    return _patched(
        model, corrupted_tokens, clean_cache, patching_metric, ("layer", "head"), options
    )


def get_act_patch_positions_by_pos(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    patching_metric: Any,
    **options: Any,
) -> Any:
    """Patch the position of one token in one head from a clean prompt, for all tokens and heads.

    Args:
        model: Bridge of this library.
        corrupted_tokens: Ids of the prompts that run.
        clean_cache: Cache of the clean prompts, with `hook_positions`.
        patching_metric: Function from logits to a number, or several by name.
        **options: Options of `transformer_lens.patching.generic_activation_patch`.

    Returns:
        The metric [layer, token, head], as in `get_act_patch_attn_head_out_by_pos`.

    Raises:
        InputError: As for `get_act_patch_positions_all_pos`.
    """
    return _patched(
        model, corrupted_tokens, clean_cache, patching_metric, ("layer", "pos", "head"), options
    )


def _patched(
    model: Any,
    tokens: Tensor,
    cache: Mapping[str, Tensor],
    metric: Any,
    axes: tuple[str, ...],
    options: dict[str, Any],
) -> Any:
    # Imported here, since only bridges need TransformerLens; a caller with a bridge has imported
    # it.
    from transformer_lens.patching import generic_activation_patch

    from repo_interp.models.bridge import RepositionedBridge

    if not isinstance(model, RepositionedBridge):
        raise InputError(
            "patching needs a bridge of repo_interp; give the result of ri.load or ri.bridge"
        )
    decoder = as_decoder(model)
    tokens = token_ids(
        decoder, tokens[None] if isinstance(tokens, Tensor) and tokens.ndim == 1 else tokens
    )
    heads = int(model.cfg.n_heads)
    clean = {
        _SHORT.format(layer): cache[HOOK.format(layer)]
        for layer in range(model.cfg.n_layers)
        if HOOK.format(layer) in cache
    }
    for name, positions in clean.items():
        if positions.ndim != 3 or len(positions) not in (1, len(tokens)):
            raise InputError(
                f"clean positions are {list(positions.shape)} at {name}; wanted [prompt, "
                f"row, token] of 1 or {len(tokens)} prompts, as the "
                "corrupted ones: record with run_with_cache(tokens), which keeps the batch "
                "dimension"
            )
        if positions.shape[-1] != tokens.shape[-1]:
            raise InputError(
                f"the clean prompt has {positions.shape[-1]} tokens at {name}, the corrupted "
                f"one {tokens.shape[-1]}; give prompts alike"
            )
    lacking = [
        layer for layer, _ in heads_with_positions(model) if _SHORT.format(layer) not in clean
    ]
    if lacking:
        raise InputError(
            f"the clean cache has no positions of layer {lacking[0]}; record with "
            "run_with_cache(tokens), all names or these"
        )
    for layer in range(model.cfg.n_layers):
        # `generic_activation_patch` looks up all layers, also layers whose hook never fires.
        clean.setdefault(_SHORT.format(layer), torch.empty(0))

    def set_rows(corrupted: Tensor, index: Sequence[int], from_clean: Tensor) -> Tensor:
        # `index` is (layer, head) or (layer, token, head), in the order of `axes`
        token, head = (index[1] if "pos" in axes else slice(None)), index[-1]
        # A copy: the expanded rows are views of one tensor
        patched = expand_heads(corrupted, heads).clone()
        patched[:, head, token] = expand_heads(from_clean, heads)[:, head, token]
        return patched

    def judged(given: Any, logits: Tensor) -> Any:
        value = given(logits)
        several = (
            options.get("reduce", "scalar") == "scalar"
            and math.prod(getattr(value, "shape", ())) != 1
        )
        if several or not hasattr(value, "__float__"):
            raise InputError(
                f"the metric of patching gives {quoted(value)}; wanted one number of the logits"
            )
        return value

    if isinstance(metric, Mapping):
        metric = {name: partial(judged, function) for name, function in metric.items()}
    elif callable(metric):
        metric = partial(judged, metric)
    with _named_shortly(decoder):
        # Its annotations name classes of TransformerLens, but any mapping and callable works.
        patch: Any = generic_activation_patch
        return patch(
            model, tokens, clean, metric, set_rows, "positions", index_axis_names=axes, **options
        )


@contextmanager
def _named_shortly(decoder: Decoder) -> Iterator[None]:
    """Give every block the alias "hook_positions" for "attn.hook_positions" while it lasts."""
    with intervention(decoder) as undo:
        for block in decoder.module.blocks:
            patch_attribute(
                undo,
                block,
                "hook_aliases",
                lambda aliases: dict(aliases) | {"hook_positions": "attn.hook_positions"},
            )
        yield
