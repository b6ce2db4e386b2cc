"""Direct path from a head to a logit (Elhage et al. 2021), with norms taken as factors.

    c_h(i, t) = sum_{j in S} A^h_ij v_j G_i W_O^h . r N_i (u_t - mean_t' u_t') s
    S         the tokens that the head moves something from

u_t is token t's row of the unembedding minus the mean of all rows, which does not affect the
softmax; s is the factor of the logits. N_i is the final norm, which is linear once its factor at
row i is fixed (a layer norm also subtracts a mean). If a family norms attention's output before
adding it to the residual stream (OLMo-2, Gemma 3, GLM-4), that norm is applied before N_i. r is the
factor of the output when it is added (Granite), G_i a gate between the heads and W_O (Qwen3-Next).
A soft cap on the logits, and later layers that read the head's output, are left out.

Norms and factors of a family are measured on one short pass, not listed: `_added` searches for the
tensor that is the sum of a layer's input and its attention's output. If there is none (a
convolution behind attention, experts as its output projection, several streams), the layer has no
direct path. This module does not know which rows, tokens and sources are of interest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.models.offloading import parameter_value
from repo_interp.models.outputs import attention_values

LARGE = 1e4
"""Input that reveals the gain of a norm; so large that the norm's epsilon has no effect."""
SMALL = 1e-3
"""Factor of hidden states, so small that a soft cap on the logits has no effect."""
TOLERANCE = 1e-3
"""Relative error up to which two tensors are the same."""
ROUNDING = 1e-6
"""Relative error of a sum in float32."""
TOKENS = 8
"""Length of the pass on which norms and factors are measured."""


@dataclass(frozen=True)
class Norm:
    """A norm in one pass: norm(x) = gain * factor * (x - mean of x, if `centred`) + constant."""

    gain: Float[Tensor, "width"]
    factor: Float[Tensor, "prompt token"]
    centred: bool
    constant: Float[Tensor, "width"]

    def pull_back(
        self, directions: Float[Tensor, "row width"], places: tuple[Any, Int[Tensor, "row"]]
    ) -> Float[Tensor, "row width"]:
        """Pull directions back through the norm.

        Args:
            directions: Directions behind the norm [row, width].
            places: Their prompts in the pass, and their tokens.

        Returns:
            Directions before the norm with the same effect [row, width].
        """
        before = directions * self.gain * self.factor[places][:, None]
        return before - before.mean(-1, keepdim=True) if self.centred else before


@dataclass
class DirectPath:
    """Tensors of the latest pass, from which contributions to logits are computed."""

    decoder: Decoder
    factors: dict[int, float]
    """Factor of attention's output when it is added to the residual stream, by layer."""
    logit_factor: float
    values: dict[int, Float[Tensor, "prompt kv_head token d_head"]] = field(default_factory=dict)
    """By layer; callers remove them when done, to free memory."""
    gates: dict[int, Float[Tensor, "prompt token width"]] = field(default_factory=dict)
    final: Norm | None = None
    last: Float[Tensor, "prompt token width"] | None = None
    """The residual stream that enters the final norm."""
    after_attention: dict[int, Norm] = field(default_factory=dict)

    @property
    def layers(self) -> Collection[int]:
        """The layers whose attention has a direct path to the logits."""
        return self.factors.keys()

    def contributions(
        self,
        layer: int,
        moved: Float[Tensor, "row head d_head"],
        rows: Int[Tensor, "row"],
        answers: Int[Tensor, "row"],
        prompts: Int[Tensor, "row"] | int = 0,
    ) -> Float[Tensor, "row head"]:
        """Compute how much moved values add to logits, once the pass has ended.

        Args:
            layer: One of `layers`.
            moved: Sums of weighted values [row, head, d_head].
            rows: Tokens [row].
            answers: Token ids of the logits [row].
            prompts: Prompt of every row in the pass: one for all, or [row].

        Returns:
            Contributions of every head [row, head], in logits.
        """
        places = (prompts, rows)
        directions = self.directions(self.unembedding[answers] - self._mean_row, places)
        return self.of_heads(layer, directions, moved, places)

    def directions(
        self, vectors: Float[Tensor, "row width"], places: tuple[Any, Int[Tensor, "row"]]
    ) -> Float[Tensor, "row width"]:
        """Pull vectors of the unembedding back through the final norm, once the pass has ended.

        Args:
            vectors: Rows of the unembedding, or their differences [row, width].
            places: Prompts of the pass, and tokens, of the logits.

        Returns:
            Directions of the residual stream in which these logits grow [row, width].
        """
        assert self.final is not None
        return self.final.pull_back(vectors.float(), places) * self.logit_factor

    def of_heads(
        self,
        layer: int,
        directions: Float[Tensor, "row width"],
        moved: Float[Tensor, "row head d_head"],
        places: tuple[Any, Int[Tensor, "row"]],
    ) -> Float[Tensor, "row head"]:
        """Project the outputs of heads on directions of the residual stream.

        Args:
            layer: One of `layers`.
            directions: Directions [row, width].
            moved: Sums of weighted values [row, head, d_head].
            places: Prompts of the pass, and tokens.

        Returns:
            Contributions of every head [row, head].
        """
        # Back to the head: norm after attention, Wo
        directions = directions * self.factors[layer]
        if layer in self.after_attention:
            directions = self.after_attention[layer].pull_back(directions, places)
        (attention,) = self.decoder.attentions([layer])
        projection = inner(attention.output_projection)
        written = (
            _pull_back(projection, directions, self.gates[layer].shape[-1])
            * self.gates[layer][places]
        )
        return (written.unflatten(-1, (attention.heads, -1)) * moved.float()).sum(-1)

    def of_bias(
        self,
        layer: int,
        directions: Float[Tensor, "row width"],
        places: tuple[Any, Int[Tensor, "row"]],
    ) -> Float[Tensor, "row"]:
        """Compute the contribution of the biases of the output projection and of a norm after it.

        Args:
            layer: One of `layers`.
            directions: Directions of the residual stream [row, width].
            places: Prompts of the pass, and tokens.

        Returns:
            Contributions [row].
        """
        (attention,) = self.decoder.attentions([layer])
        projection: Any = inner(attention.output_projection)
        nothing = directions.new_zeros(1, self.gates[layer].shape[-1])
        with torch.no_grad():
            bias = projection.forward(nothing.to(projection.weight.dtype))[0].float()
        directions, added = directions * self.factors[layer], 0.0
        if (norm := self.after_attention.get(layer)) is not None:
            added, directions = directions @ norm.constant, norm.pull_back(directions, places)
        return directions @ bias + added

    @cached_property
    def unembedding(self) -> Float[Tensor, "token_id width"]:
        """The weight of the unembedding."""
        return _vectors_of_words(self.decoder)

    @cached_property
    def _mean_row(self) -> Tensor:
        """Cached, since the mean takes the whole unembedding."""
        return self.unembedding.mean(0)


@contextmanager
def direct_path(decoder: Decoder) -> Iterator[DirectPath]:
    """Record the direct path of passes.

    Args:
        decoder: Decoder of the model.

    Yields:
        The path of the latest pass.
    """
    final, added = _measure(decoder)
    path = DirectPath(
        decoder, {layer: factor for layer, (_, factor) in added.items()}, _logit_factor(decoder)
    )

    def store_final(norm: Norm) -> None:
        path.final = norm

    def store_last(module: nn.Module, arguments: tuple) -> None:
        path.last = arguments[0]

    with ExitStack() as hooks:
        hooks.enter_context(attention_values(decoder, path.values.__setitem__))
        for attention in decoder.layers:
            if attention.layer_idx not in added:
                continue
            after = added[attention.layer_idx][0]
            if after is not None:
                store = norm_hook(
                    lambda norm, layer=attention.layer_idx: path.after_attention.__setitem__(
                        layer, norm
                    )
                )
                hooks.callback(after.register_forward_hook(store).remove)
            _remember_gate(attention, path.gates, hooks)
        if final is not None:
            hooks.callback(final.register_forward_hook(norm_hook(store_final)).remove)
            hooks.callback(final.register_forward_pre_hook(store_last).remove)
        yield path


def added_outputs(decoder: Decoder) -> dict[int, tuple[nn.Module | None, float]]:
    """Find how attention's outputs are added to the residual stream; costs one short pass.

    Args:
        decoder: Decoder of the model.

    Returns:
        By layer, the norm of attention's output (None: no norm) and its factor. Layers without
        such an addition are missing.
    """
    return _measure(decoder)[1]


def norm_hook(store: Callable[[Norm], None]) -> Callable:
    """Return a forward hook of a norm that measures its gain and its factor in a pass.

    Args:
        store: Called with gain and factor.

    Returns:
        The hook.
    """

    def hook(module: nn.Module, arguments: tuple, normed: Tensor) -> None:
        given, norm = arguments[0].float(), inner(module).forward  # `forward` calls no hooks
        signs = torch.ones_like(arguments[0][:1, :1])
        signs[..., 1::2] = -1  # without a mean; a width is even
        up, down, flat = (
            norm(LARGE * probe)[0, 0].float() for probe in (signs, -signs, torch.ones_like(signs))
        )
        constant, gain = (up + down) / 2, (up - down) / 2 * signs[0, 0].float()
        centred = bool(((flat - constant).abs() < TOLERANCE * gain.abs().clamp_min(1e-6)).all())
        straight = gain * (given - given.mean(-1, keepdim=True) if centred else given)
        # Least squares over the width: the factor of the pass, one number per token.
        scaled = normed.float() - constant
        factor = (straight * scaled).sum(-1) / straight.square().sum(-1).clamp_min(1e-30)
        store(Norm(gain, factor, centred, constant))

    return hook


def _remember_gate(
    attention: RepositionedAttention, gates: dict[int, Tensor], hooks: ExitStack
) -> None:
    """Keep the gate between the heads' outputs and their projection; 1 without a gate."""
    attended: list[Tensor] = []
    projection = attention.output_projection
    assert projection is not None  # `_added` has seen it

    def heads(output: Tensor) -> None:
        attended[:] = [output.flatten(2)]

    def projected(module: nn.Module, arguments: tuple) -> None:
        # The gate is the quotient of Wo's input and the heads' outputs.
        (plain,) = attended
        # Some modules flatten prompts and tokens into one axis.
        gated = arguments[0].reshape(plain.shape)
        if gated.data_ptr() == plain.data_ptr():
            # The same memory: there is no gate, and one number serves all tokens.
            gate = torch.ones((), device=plain.device).expand(plain.shape)
        else:
            gate = torch.where(plain == 0, 1.0, gated / plain).float()
        gates[attention.layer_idx] = gate

    hooks.callback(attention.sites.call("attended", heads))
    hooks.callback(projection.register_forward_pre_hook(projected).remove)


def _pull_back(
    projection: Any, directions: Float[Tensor, "row width"], width: int
) -> Float[Tensor, "row inner"]:
    """Multiply `directions` by the matrix of a linear map, however the map stores it."""
    # The derivative of a linear map is its matrix, whatever its storage or quantization.
    with torch.enable_grad():
        zeros = (
            directions.new_zeros(len(directions), width)
            .to(inner(projection).weight.dtype)
            .requires_grad_()
        )
        (pulled,) = torch.autograd.grad(
            projection.forward(zeros), zeros, directions.to(zeros.dtype)
        )
    return pulled.float()


def _hands_on(module: nn.Module) -> bool:
    """Whether a module has neither weights nor parts: a hook point of a bridge, an activation."""
    return not (module._parameters or module._modules)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _vectors_of_words(decoder: Decoder) -> Tensor:
    """The weight of the unembedding, also if it is offloaded."""
    module = inner(decoder.owner.get_output_embeddings())
    value = parameter_value(module, "weight", module.weight)
    return value.to(decoder.device) if module.weight.is_meta else value


def _logit_factor(decoder: Decoder) -> float:
    """Factor of the logits over the product of unembedding and last hidden states."""
    unembedding = _vectors_of_words(decoder)
    hidden = SMALL * unembedding[:TOKENS]
    with torch.no_grad():
        plain = (hidden @ unembedding.mT).float()
        # The difference removes a bias of the unembedding.
        logits = next_token_logits(decoder, hidden) - next_token_logits(
            decoder, torch.zeros_like(hidden)
        )
    return float((plain * logits).sum() / plain.square().sum())


@torch.no_grad()
def _measure(
    decoder: Decoder,
) -> tuple[nn.Module | None, dict[int, tuple[nn.Module | None, float]]]:
    """Return the final norm, the last that a pass calls outside of layers, and `_added` by layer.

    Costs one pass of `TOKENS` tokens, in which `calls` are noted in the order in which they end.
    """
    layers = [{*block.modules()} for block in decoder.blocks]
    inside = set().union(*layers)
    within = {module for attention in decoder.layers for module in attention.module.modules()}
    unseen = within - {attention.output_projection for attention in decoder.layers}
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def see(module: nn.Module, arguments: tuple, keywords: dict[str, Any], output: Any) -> None:
        module_input = next(
            (value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)), None
        )
        gave = output[0] if isinstance(output, tuple) else output
        if module_input is not None and isinstance(gave, Tensor):
            calls.append((module, module_input.float(), gave.float()))

    with ExitStack() as hooks:
        for module in decoder.stack.modules():
            if module not in unseen and (
                _is_norm(module) or (module in inside and not _hands_on(module))
            ):
                hooks.callback(module.register_forward_hook(see, with_kwargs=True).remove)
        tokens = torch.arange(TOKENS, device=decoder.device)[None] % decoder.vocabulary_size
        decode(decoder, tokens)
    width = inner(decoder.owner.get_output_embeddings()).weight.shape[-1]
    # The last of these stands before the unembedding, and so has its width.
    final = [
        module for module, _, gave in calls if module not in inside and gave.shape[-1] == width
    ]
    if not final:
        return None, {}
    found = {}
    for attention in decoder.layers:
        (block,) = [modules for modules in layers if attention.module in modules]
        added = _added([call for call in calls if call[0] in block], attention.output_projection)
        if added is not None:
            found[attention.layer_idx] = added
    return final[-1], found


def _added(
    calls: Sequence[tuple[nn.Module, Tensor, Tensor]], projection: nn.Module | None
) -> tuple[nn.Module | None, float] | None:
    """Return the norm of attention's output, if any, and the factor r; None if there is no sum.

    Searches for x + r w among the inputs of the layer's parts and the layer's output, also minus
    the output of one part (a feed-forward part parallel to attention). x is the layer's input, w
    attention's output, after a norm if one is applied to it alone.
    """
    _, entered, left = calls[-1]  # the layer itself ends last
    wrote = next((gave for module, _, gave in calls if module is projection), None)
    if wrote is None:
        return None
    norm = next(
        (module for module, given, _ in calls if _is_norm(module) and _same(given, wrote)), None
    )
    written = wrote if norm is None else next(gave for module, _, gave in calls if module is norm)
    if written.numel() != entered.numel():
        return None
    # Residual streams are found by value, since families name and order their parts differently.
    # Several parts may get the same tensor, and parts of a bridge wrap other parts.
    given = {id(tensor): tensor for _, tensor, _ in calls}.values()
    gave = {id(tensor): tensor for _, _, tensor in calls if tensor.shape == left.shape}.values()
    places = chain(given, [left], (left - tensor for tensor in gave))
    # Some modules flatten prompts and tokens into one axis.
    whole = (place.reshape(entered.shape) for place in places if place.numel() == entered.numel())
    factors = (_multiple(place, entered, written.reshape(entered.shape)) for place in whole)
    factor = next((factor for factor in factors if factor is not None), None)
    return None if factor is None else (norm, factor)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= TOLERANCE * other.norm())


def _multiple(place: Tensor, entered: Tensor, written: Tensor) -> float | None:
    """Solve `place` = `entered` + r `written` for r; exactly 1 within rounding, None if unsolvable."""
    difference = place - entered
    measured = float((difference * written).sum() / written.square().sum().clamp_min(1e-30))
    # 1 first: the measured factor of a plain addition is off by rounding, and would scale all
    # results.
    for factor in (1.0, measured):
        added = factor * written
        if (
            factor
            and (difference - added).norm() <= TOLERANCE * added.norm() + ROUNDING * entered.norm()
        ):
            return factor
    return None


def inner(module: Any) -> Any:
    """Return the Hugging Face module inside a part of a bridge.

    Args:
        module: Part of a bridge, or a module.

    Returns:
        The module inside; `module` itself where there is none.
    """
    return getattr(module, "original_component", None) or module
