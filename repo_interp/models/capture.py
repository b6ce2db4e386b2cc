"""A forward pass becomes a stream of `AttentionInputs`, one layer at a time.

The receiver is called inside the pass, as soon as a layer has its queries, keys and positions. No
tensor of a layer is kept after it returns, so memory does not grow with layers. The inputs include
interventions by hooks before this point (hook_q, hook_k, hook_positions), but not by later hooks
(hook_rot_q, hook_rot_k and after). Observers are removed when the pass ends, also if it raises.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, NotFinite
from repo_interp.inputs import AttentionInputs, Predictions, join_sinks
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.models.feed_forward import in_blocks
from repo_interp.models.lasting import at_rest
from repo_interp.models.layer_pass import LogitsOfRows
from repo_interp.models.layer_probe import differs_by_pair, keys_apart, logits_by_content
from repo_interp.models.masks import visible
from repo_interp.models.padding import known_padding
from repo_interp.models.precision import overflow_remedy
from repo_interp.models.rotation_numbers import of_heads
from repo_interp.models.tables import position_table, positions_in
from repo_interp.positions.contextual import ContextualPositions
from repo_interp.positions.logits import exact
from repo_interp.positions.rotary import expand_heads


@torch.no_grad()
def capture(
    decoder: Decoder,
    tokens: Int[Tensor, "prompt token"],
    valid: Bool[Tensor, "prompt token"],
    prompts: Int[Tensor, "prompt"],
    receive: Callable[[AttentionInputs], None],
    layers: Collection[int] | None = None,
    position_ids: Int[Tensor, "*axis prompt token"] | None = None,
) -> None:
    """Run tokens through a model and call a receiver with the attention inputs of its layers.

    The pass ends inside the last of `layers`, before it attends. Queries, keys and positions arrive in float32 or
    wider.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids [prompt, token].
        valid: Tokens that are no padding [prompt, token]; padding may be on either side.
        prompts: Numbers of the prompts [prompt].
        receive: Called inside the pass, once a layer.
        layers: Layers to observe; None: all.
        position_ids: Positions of the tokens; None: the token index.

    Raises:
        NotFinite: A value is NaN or infinite; the message names layer and prompt.
    """

    def receive_finite(inputs: AttentionInputs) -> None:
        require_finite(inputs)
        receive(replace(inputs, tokens=tokens))

    with observing(decoder, valid, prompts, receive_finite, layers, position_ids):
        last = None if layers is None else max(layers, default=None)
        decode(decoder, tokens, valid, last, position_ids)


def layers_by_pair(decoder: Decoder) -> list[int]:
    """List the layers that give a token several positions: its rotary pairs, or query and key.

    Args:
        decoder: Decoder of the model.

    Returns:
        Numbers of layers.
    """
    return [
        layer
        for layer, attention in decoder.by_layer.items()
        if differs_by_pair(attention) or keys_apart(attention)
    ]


class _EndOfPass(Exception):
    """Ends a pass before its last layer is computed."""


def decode(
    decoder: Decoder,
    tokens: Int[Tensor, "prompt token"],
    valid: Bool[Tensor, "prompt token"] | None = None,
    last_layer: int | None = None,
    position_ids: Int[Tensor, "*axis prompt token"] | None = None,
    attention_mask: Int[Tensor, "prompt token"] | None = None,
) -> Tensor:
    """Return last hidden states: a pass without the unembedding, the largest array at long prompts.

    Feed-forward parts work in blocks of tokens.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids [prompt, token].
        valid: Tokens that are no padding [prompt, token]; None: all.
        last_layer: The pass ends inside this layer, once its queries, keys and values were
            observed; None: after the final norm.
        position_ids: Positions of the tokens [prompt, token]; None: the token index.
        attention_mask: 1 for tokens that are no padding; None: none is given where padding is on
            the right, and transformers takes jumps of `position_ids` for documents.

    Returns:
        Hidden states [prompt, token, width]: the last ones, or the inputs of `last_layer`.

    Raises:
        InputError: Prompts are padded, or several have position ids, and frequencies depend on the
            length of the pass; or the decoder takes no such position ids.
    """
    valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    if position_ids is not None:
        _require_taken(decoder, position_ids)
    with at_rest(decoder), in_blocks(decoder, tokens.numel()), known_padding(valid):
        return _run_stack(decoder, tokens, valid, last_layer, position_ids, attention_mask)


def _require_taken(decoder: Decoder, position_ids: Tensor) -> None:
    """Raise InputError for position ids that a decoder ignores or has no vectors for."""
    stack = decoder.stack
    if position_ids.ndim == 3 and all(layer.rotation.axes is None for layer in decoder.layers):
        raise InputError(
            f"{type(stack).__name__} takes one position id per token, and a prompt has "
            "three axes (an image's)"
        )
    if "position_ids" not in inspect.signature(stack.forward).parameters:
        raise InputError(
            f"{type(stack).__name__} takes no position ids; leave them out of the prompts"
        )
    table = position_table(stack)
    if table is not None and int(position_ids.max()) >= positions_in(table):
        raise InputError(
            f"a prompt has position id {int(position_ids.max())}; the table of the model has "
            f"positions 0 to {positions_in(table) - 1}"
        )
    if decoder.length_matters and position_ids.shape[-2] > 1:
        raise InputError(
            "frequencies of this model depend on the largest position of a pass; give prompts "
            "with position ids one by one (batch_size=1)"
        )


def _run_stack(
    decoder: Decoder,
    tokens: Tensor,
    valid: Tensor,
    last_layer: int | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> Tensor:
    # One question to the device
    whole, starts_early = torch.stack([valid.all(), valid[:, 0].all()]).tolist()
    if not whole and decoder.length_matters:
        raise InputError(
            "frequencies of this model depend on the length of a pass; give prompts of equal "
            "length to one pass"
        )
    starts_late = not starts_early
    # Right padding needs no mask, since no token sees a later one: then the fused causal kernel
    # runs.
    mask = valid.to(torch.long) if starts_late else attention_mask
    if position_ids is None and starts_late:
        position_ids = (valid.cumsum(1) - 1).clamp_min(0)
    inputs = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": position_ids,
        "use_cache": False,
    }
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if last_layer is None:
        return decoder.stack(**inputs).last_hidden_state
    observers = decoder.by_layer[last_layer].observers

    def finish(*observed: Any) -> None:
        raise _EndOfPass

    # An exception ends the pass: the rest would cost time and memory.
    observers.append(finish)
    entered = deque[Tensor](maxlen=1)
    with entering(decoder, entered.append):
        try:
            decoder.stack(**inputs)
        except _EndOfPass:
            return entered[0]
        finally:
            observers.remove(finish)
    raise AssertionError(f"the pass did not reach the attention of layer {last_layer}")


def next_token_logits(
    decoder: Decoder, hidden: Float[Tensor, "row width"]
) -> Float[Tensor, "row token_id"]:
    """Return the logits of the next token.

    Args:
        decoder: Decoder of the model.
        hidden: Last hidden states, as `decode` gives them [row, width].

    Returns:
        Logits [row, token_id], float32.
    """
    owner: Any = decoder.owner
    # The head's forward applies soft caps, scales and biases of a family. No hook
    # on the decoder is called.
    prefix = owner.base_model_prefix
    name = prefix if prefix in owner._modules else "model"  # Llama 4's prefix names another model
    stack = owner._modules[name]
    owner._modules[name] = _FixedDecoder(hidden[None], stack)
    try:
        return owner(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
    finally:
        owner._modules[name] = stack


class _FixedDecoder:
    """Replacement of a decoder that returns known hidden states; has its constants (Falcon H1)."""

    def __init__(self, hidden: Tensor, decoder: nn.Module) -> None:
        self._hidden, self._decoder = hidden, decoder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._decoder, name)
        return self if isinstance(found, nn.Module) else found  # OPT has its decoder inside

    def __call__(self, *arguments: Any, **keywords: Any) -> _FixedStates:
        return _FixedStates((self._hidden,))


class _FixedStates(tuple):
    """Output of a decoder with only the last hidden states."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


def predictions_of(
    decoder: Decoder,
    hidden: Float[Tensor, "prompt token width"],
    tokens: Int[Tensor, "prompt token"],
    valid: Bool[Tensor, "prompt token"],
    prompts: Int[Tensor, "prompt"],
) -> Predictions:
    """Return the predictions of a model for the next tokens.

    Args:
        decoder: Decoder of the model.
        hidden: Last hidden states [prompt, token, width].
        tokens: Token ids [prompt, token].
        valid: Tokens that are no padding [prompt, token].
        prompts: Numbers of the prompts [prompt].

    Returns:
        Predictions; their logits are computed row by row on demand.
    """
    vocabulary = decoder.vocabulary_size
    return Predictions(
        tokens,
        valid,
        prompts,
        vocabulary,
        lambda row, rows: next_token_logits(decoder, hidden[row, rows]),
    )


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
        """Positions of every prompt, in as many rows as those `beside` them."""
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
            if isinstance(scheme, ContextualPositions):
                features = scheme.counted_by(content.keys, content.values, content.gate_keys)
                if features is not None:
                    inputs = replace(
                        inputs,
                        gate_features=exact(features),
                        largest_position=scheme.position_map.maximum,
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
