"""Attention inputs of every layer, handed on inside a forward pass.

The receiver is called as soon as a layer has its queries, keys and positions. No tensor of a layer
is kept after it returns, so memory does not grow with layers. The inputs include interventions by
hooks before this point (hook_q, hook_k, hook_positions), but not by later hooks (hook_rot_q,
hook_rot_k and after). Observers are removed when the context ends, also if it raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, NotFinite
from repo_interp.inputs import AttentionInputs
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.models.layer_pass import LogitsOfRows, PassRotation
from repo_interp.models.layer_probe import logits_by_content
from repo_interp.models.masks import visible
from repo_interp.models.precision import overflow_remedy
from repo_interp.models.rotation_numbers import of_heads
from repo_interp.positions.logits import exact
from repo_interp.positions.rotary import expand_heads
from repo_interp.positions.sinks import join_sinks

_ROTATED = ("queries", "keys", "positions", "frequencies", "attention_scaling", "key_positions")
"""Fields of attention inputs by which their queries and keys are rotated."""


@contextmanager
def observing(
    decoder: Decoder,
    valid: Bool[Tensor, "prompt token"],
    prompts: Int[Tensor, "prompt"],
    receive: Callable[[AttentionInputs], None],
    layers: Collection[int] | None = None,
    position_ids: Int[Tensor, "*axis prompt token"] | None = None,
) -> Iterator[None]:
    """Hand attention inputs of every forward pass to a receiver while the context lasts.

    Args:
        decoder: Decoder of the model.
        valid: Tokens that are no padding [prompt, token].
        prompts: Numbers of the prompts [prompt].
        receive: Called inside the pass, once a layer, with finite values or not.
        layers: Layers to observe; None: all.
        position_ids: Positions that the passes are given; None: the token index.

    Yields:
        None.

    Raises:
        InputError: A layer computes with positions other than `position_ids`, or hides keys of the
            same document.
    """

    def placed(positions: Tensor | None, beside: Tensor | None) -> Tensor | None:
        """Positions of every prompt, with as many rows as `beside`."""
        if positions is None:
            return None
        rows = max(positions.shape[1], 1 if beside is None else beside.shape[1])
        return expand_heads(exact(positions), rows).expand(len(valid), rows, *positions.shape[2:])

    def observe(
        attention: RepositionedAttention,
        queries: Tensor,
        keys: Tensor,
        positions: Tensor | None,
        logits_of_rows: LogitsOfRows | None,
    ) -> None:
        values, of_keys = attention.active_pass.new_values, attention.active_pass.of_keys
        assert values is not None
        (stream,) = entered
        here = queries.device  # with several devices, the device of this layer
        inputs = AttentionInputs(
            layer=attention.layer_idx,
            scheme=attention.scheme,
            learned=attention.learned,
            queries=exact(queries),
            keys=exact(keys),
            positions=placed(positions, of_keys),
            key_positions=None if of_keys is None else placed(of_keys, positions),
            frequencies=_detached(of_heads(attention.frequencies, attention.heads)),
            attention_scaling=_detached(attention.attention_scaling),
            logit_scale=attention.scaling,
            valid=valid.to(here),
            prompts=prompts,
            window=attention.sliding_window,
            softcap=attention.attn_logit_softcapping,
            sinks=attention.active_pass.sinks,
            read_values=lambda: exact(values.clone()),  # else a measure could change the pass
            read_residual=lambda: exact(stream.clone()),
            by_axis=attention.active_pass.by_axis,
            reads_content=lambda: logits_by_content(attention),
        )
        rotation = attention.active_pass.rotation
        if rotation is not None and inputs.queries is queries and inputs.keys is keys:
            known = inputs  # whose tensors are rotated so; others made of them are not

            def of_pass(asking: AttentionInputs) -> PassRotation | None:
                same = all(getattr(asking, name) is getattr(known, name) for name in _ROTATED)
                return rotation if same else None

            inputs = replace(inputs, rotation_of_pass=of_pass)
        if position_ids is not None:
            inputs = _with_documents(inputs, attention, position_ids.to(here))
        hidden = attention.active_pass.hidden
        if hidden is not None:
            if hidden.shape[1] > 1:
                raise InputError(
                    f"keys are hidden from single heads of layer {attention.layer_idx} "
                    "(hidden_keys), which measures do not know; hide them from all of its heads, "
                    "or measure outside of it"
                )
            hidden = inputs.visible(torch.arange(valid.shape[1], device=here)) & hidden[:, 0]
            inputs = replace(inputs, hidden=hidden if bool(hidden.any()) else None)
        seen_by, rest = inputs.visible, attention.active_pass.remainder
        if rest is not None:
            sinks = inputs.sinks

            def remainder(rows: Tensor) -> Tensor:
                of_rows = join_sinks(sinks, exact(rest(rows, seen_by(rows)[:, None])))
                return of_rows.expand(len(valid), attention.heads, len(rows))

            inputs = replace(inputs, remainder=remainder)
        # Measures ask for the logits of some rows at a time, never for a whole map.
        if logits_of_rows is not None:
            inputs = replace(
                inputs, position_logits=lambda rows: logits_of_rows(rows, seen_by(rows)[:, None])
            )
            scheme, content = logits_of_rows.position_logits, logits_of_rows.content
            # None: the family itself adds logits.
            if scheme is not None:
                features = scheme.counted_by(content.keys, content.values, content.gate_keys)
                if features is not None:
                    inputs = replace(
                        inputs,
                        gate_features=exact(features),
                        largest_position=scheme.largest_position,
                    )
        receive(inputs)

    entered = deque[Tensor](maxlen=1)  # by the layer that runs
    with entering(decoder, entered.append), ExitStack() as undo:
        for attention in decoder.layers:
            if layers is None or attention.layer_idx in layers:
                attention.observers.append(observe)
                undo.callback(attention.observers.remove, observe)
        yield


def _detached(number: Any) -> Any:
    """Numbers of the rotation without their gradient, which measures do not take."""
    return number.detach() if isinstance(number, Tensor) and number.requires_grad else number


@contextmanager
def entering(decoder: Decoder, receive: Callable[[Tensor], object]) -> Iterator[None]:
    """Hand the hidden states that enter every layer to a receiver while the context lasts.

    Args:
        decoder: Decoder of the model.
        receive: Called before a layer, with [prompt, token, d_model].

    Yields:
        None.
    """

    def enter(block: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        # Families call their layers by position or by keyword.
        receive(arguments[0] if arguments else keywords["hidden_states"])

    with ExitStack() as undo:
        for block in decoder.blocks:
            undo.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        yield


def _with_documents(
    inputs: AttentionInputs, attention: RepositionedAttention, position_ids: Tensor
) -> AttentionInputs:
    """Inputs with the documents that the mask of the pass keeps apart, if it does.

    transformers hides documents from each other where position ids do not count on and no
    attention mask is given; some families do not, so the mask of the pass decides.
    """
    current, valid, layer = attention.active_pass, inputs.valid, f"layer {inputs.layer}"
    by_axis = position_ids.ndim == 3  # a text with images
    first = position_ids[0] if by_axis else position_ids
    uses_index = attention.assigner is not None or attention.position_logits is not None
    if uses_index and not bool(((current.index == first) | ~valid).all()):
        raise InputError(
            f"{layer} ({inputs.scheme}) is not given the position ids of the prompts by this "
            "decoder; leave them out of the prompts"
        )
    begins = (first.diff(prepend=first[:, :1] - 1) != 1) & valid
    if not bool(begins.any()):
        return inputs
    if attention.config._attn_implementation not in ("eager", "sdpa"):
        raise InputError(
            f"{attention.config._attn_implementation} keeps documents apart unseen; set attention "
            "to sdpa or eager for prompts with position ids of several documents"
        )
    tokens = valid.shape[1]
    rows = torch.arange(tokens, device=valid.device)
    seen = visible(tokens, tokens, current.attention_mask, valid.device)[:, 0]
    for documents in (None,) if by_axis else (begins.cumsum(1), None):
        known = replace(inputs, documents=documents)
        expected = known.visible(rows)
        if torch.equal(seen & valid[:, None] & valid[..., None], expected):
            return known
    raise InputError(
        f"{layer} hides other keys than those of other documents, which measures do not know; "
        "leave the position ids out"
    )


def require_finite(inputs: AttentionInputs) -> None:
    """Refuse attention inputs with values that are NaN or infinite.

    Args:
        inputs: Attention inputs of one layer.

    Raises:
        NotFinite: The message names tensor, layer, head and prompt.
    """
    for fault in inputs.faults.values():
        raise NotFinite(
            f"{fault}, the first place where that happens{overflow_remedy(inputs.queries.dtype)}"
        )
