"""Extend a model beyond its training length without training, while a context lasts.

Methods change how its distances count:

    interpolated     theta_r <- theta_r / s                                                     (Chen et al. 2023)
    yarn             theta_r <- YaRN's, cosines and sines times 0.1 ln s + 1                    (Peng et al. 2024)
    lm_infinite      query i sees keys j < G and keys i - j < L, at distance min(z_i - z_j, L)  (Han et al. 2024)
    infllm           query i sees all keys j <= i, at distance min(z_i - z_j, L)                (Xiao et al. 2024)

InfLLM's retrieval is left out: all keys beyond its local window of L tokens are seen, not the most
relevant blocks alone, at the one distance that it gives those. Schemes that add a function of the
distance are given divided indices, or the capped distance.

LM-Infinite's capped distance is no position of a token: it depends on the pair. Only the G global
keys are ever further than L, so their logits alone are computed anew, rotate(q_i, min(z_i - z_j,
L)) . k_j - the authors get them from a second pass with the query at L and global keys at 0 - in
O(n G d); the other far keys are never computed. For InfLLM all keys are global. ROWS queries at a time meet the keys that they may
see: ROWS (L + G + ROWS) scores per head at once, n (L + G) in all; the whole map where a hook asks
for it, or a scheme adds to the logits. Learned positions are masked by the index; of global keys
their difference is capped to +-L.

By name: `METHODS`, those that a model's positions allow (`allowed_methods`), and the context of one
of them (`extended`).

Whole prompts only, padded on the right, without cached keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

import torch
from annotated_types import Interval
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.fields import Length
from repo_interp.errors import InputError, quoted
from repo_interp.interventions.replacing import (
    MOST_TOKENS,
    Heads,
    Layers,
    choose_heads,
    finite_positions,
    number_of,
)
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import intervention, patch_attribute
from repo_interp.models.layer_probe import differs_by_pair, logits_by_content
from repo_interp.models.masks import visible
from repo_interp.positions.logits import cap_logits
from repo_interp.positions.rotary import expand_heads, rotate
from repo_interp.positions.scaling import (
    interpolate,
    ntk_frequencies,
    with_base,
    yarn_attention_scaling,
    yarn_frequencies,
)
from repo_interp.values import TokensOrNone, checked

_Factor = Annotated[float, Interval(ge=1e-9, le=1e9)]
"""Divisors of distances."""
Method = Literal["plain", "lm_infinite", "interpolation", "yarn", "infllm"]
METHODS: tuple[Method, ...] = get_args(Method)
_BY_BASE = ("yarn", "theta", "ntk")
"""Changes that read theta_r as a rate of one position."""
GLOBAL_TOKENS = 10
"""First tokens that LM-Infinite always shows, by default."""
ROWS = 256
"""Queries whose scores LM-Infinite makes at a time."""


def extended(
    model: nn.Module,
    method: str,
    length: int,
    training_length: int,
    global_tokens: int = GLOBAL_TOKENS,
) -> AbstractContextManager[None]:
    """Run prompts of one length by a named method of extrapolation.

    Args:
        model: Repositioned model or bridge.
        method: One of `METHODS`.
        length: Tokens of the prompts.
        training_length: Tokens of the prompts of training.
        global_tokens: First tokens that LM-Infinite always shows.

    Returns:
        A context manager.

    Raises:
        InputError: The method is unknown.
    """
    # Prompts within the training length need no extension: a factor below 1 would spread distances
    factor = max(1.0, length / training_length)
    ways: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
        "plain": nullcontext,
        "lm_infinite": lambda: lm_infinite(model, training_length, global_tokens),
        "interpolation": lambda: interpolated(model, factor),
        "yarn": lambda: yarn(model, factor, training_length),
        "infllm": lambda: infllm(model, training_length),
    }
    if method not in ways:
        raise InputError(f"methods of extrapolation are {', '.join(METHODS)}, not {quoted(method)}")
    return ways[method]()


def allowed_methods(decoder: Decoder) -> tuple[str, ...]:
    """List the methods that the positions of a model allow.

    Args:
        decoder: Decoder of the model.

    Returns:
        Names from `METHODS`, in their order.
    """
    layers = decoder.layers
    rotates = any(layer.frequencies is not None for layer in layers)
    # Contextual positions (CoPE) and positions by pair have no distance to cap
    capped = not any(_reason_against_a_cap(layer) for layer in layers)
    allowed = {
        "plain": True,
        "lm_infinite": capped,
        "interpolation": rotates or any(map(_adds_by_position, layers)),
        "yarn": any(_rotates(layer) and not differs_by_pair(layer) for layer in layers),
        "infllm": capped,
    }
    return tuple(method for method in METHODS if allowed[method])


@contextmanager
def interpolated(model: nn.Module, factor: float) -> Iterator[None]:
    """Divide every distance by a factor (position interpolation) while the context lasts.

    Args:
        model: Repositioned model or bridge.
        factor: Factor s of the extension.

    Yields:
        None.

    Raises:
        InputError: No layer has distances, or the factor is no positive number.
    """
    decoder = as_decoder(model)
    factor = checked(factor, _Factor, "the factor of an extension")
    rotating, biased = _with_distances(decoder, "position interpolation")
    with intervention(decoder) as undo:
        for attention in rotating:
            _retune(undo, attention, lambda frequencies: interpolate(frequencies, factor), 1.0)
        for attention in biased:
            assert attention.position_logits is not None
            handle = attention.position_logits.register_forward_pre_hook(
                # PositionLogits takes queries, keys, index of queries, index of keys, ...
                lambda module, given: (*given[:2], given[2] / factor, given[3] / factor, *given[4:])
            )
            undo.callback(handle.remove)
        yield


@contextmanager
def yarn(model: nn.Module, factor: float, training_length: int) -> Iterator[None]:
    """Apply YaRN in every layer that rotates by one position per token while the context lasts.

    Args:
        model: Repositioned model or bridge.
        factor: Factor s of the extension.
        training_length: Tokens before the extension.

    Yields:
        None.

    Raises:
        InputError: No layer rotates, or a number is out of range.
    """
    decoder = as_decoder(model)
    factor = checked(factor, _Factor, "the factor of an extension")
    training_length = checked(training_length, Length, "the training length")
    rotating, _ = _with_distances(decoder, "YaRN")
    rotating = [layer for layer in rotating if not differs_by_pair(layer)]
    if not rotating:
        raise InputError(
            "YaRN changes how layers rotate by one position per token, and no layer of this model "
            "does; leave the method out"
        )
    scaling = yarn_attention_scaling(factor)
    with intervention(decoder) as undo:
        for attention in rotating:
            _retune(
                undo,
                attention,
                lambda frequencies: yarn_frequencies(frequencies, factor, training_length),
                scaling,
            )
        yield


@contextmanager
def rescaled(
    model: nn.Module,
    layer: Layers = None,
    head: int | None = None,
    *,
    heads: Heads = None,
    yarn: float | None = None,
    theta: float | None = None,
    linear: float | None = None,
    ntk: float | None = None,
    factors: Sequence[float] | Tensor | None = None,
    function: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """Rotate heads, layers or the whole model by other frequencies while the context lasts.

        with iv.rescaled(model, factors=[1.0] * 24 + [0.0] * 8):  # p-RoPE: no slow pairs

    Args:
        model: Repositioned model or bridge.
        layer: One layer or several; None: all that rotate.
        head: One head of one `layer`; None: all heads.
        heads: (layer, head) pairs, in place of `layer` and `head`.
        yarn: Factor of YaRN, from the model's training length.
        theta: Another base, theta_r = theta^(-r/n) of n pairs.
        linear: Factor of position interpolation.
        ntk: Factor of NTK-aware scaling (`positions.scaling.ntk_frequencies`).
        factors: One number per pair, the fastest pair first as in `inv_freq`; 0 stops the pair.
        function: New frequencies [pair] in radians per position, given the present ones.

    Yields:
        None.

    Raises:
        InputError: Not exactly one change was given, a layer or the model does not rotate, or by
            a position of each pair, which has no base; the change leaves all frequencies as they
            are; the model lacks a head; or the frequencies are not finite or not one per pair.
    """
    named: dict[str, Any] = {"yarn": yarn, "theta": theta, "linear": linear, "ntk": ntk}
    given = {
        name: value
        # 0 is a value too, refused below, and a tensor has no truth value
        for name, value in (*named.items(), ("factors", factors), ("function", function))
        if value is not None
    }
    if len(given) != 1:
        raise InputError(
            f"one of {', '.join(named)}, factors and function was wanted; got "
            f"{', '.join(given) or 'none'}"
        )
    name: str
    value: Any
    ((name, value),) = given.items()
    if name in named:
        value = checked(value, _Factor, "the factor of an extension")
    if head is not None:
        several = isinstance(layer, Sequence) or isinstance(head, Sequence)
        if heads is not None or layer is None or several:
            raise InputError("a head of one layer was wanted; give heads=[(layer, head), ...]")
        heads, layer = [(layer, number_of(head, "a head"))], None  # pyright: ignore[reportAssignmentType]
    decoder = as_decoder(model)
    by_base = name in _BY_BASE
    rotating = [
        attention.layer_idx
        for attention in decoder.layers
        if _rotates(attention) and not (by_base and differs_by_pair(attention))
    ]
    if heads is None and layer is None and not rotating:
        schemes = ", ".join(dict.fromkeys(decoder.schemes))
        how = " by one position for all pairs of a token" if by_base else ""
        raise InputError(f"no layer of this model ({schemes}) rotates{how}; choose another model")
    chosen = choose_heads(decoder, heads, layer, rotating)
    scaling = yarn_attention_scaling(value) if name == "yarn" else 1.0
    same = name in named and value != 1 and scaling == 1.0
    with intervention(decoder) as undo:
        for attention in decoder.attentions(chosen):
            require_rotation(attention)
            if by_base and differs_by_pair(attention):
                raise InputError(
                    f"layer {attention.layer_idx} ({attention.scheme}) gives every rotary pair its "
                    f"own position, so it has no frequencies of a base for {name} to change; give "
                    "linear, factors or a function"
                )
            before = attention.frequencies
            change = partial(_changed_frequencies, attention, name, value)
            some = None if heads is None else chosen[attention.layer_idx]
            _retune(undo, attention, change, scaling, some)
            now = attention.frequencies
            same = same and torch.equal(now, before.expand_as(now))
        if same:
            raise InputError(
                f"{name}={value:g} changes nothing: the frequencies of "
                f"{', '.join(dict.fromkeys(decoder.schemes))} stay as they are; leave it out"
            )
        yield


def _rotates(attention: RepositionedAttention) -> bool:
    return attention.frequencies is not None and attention.assigner is not None


def _adds_by_position(attention: RepositionedAttention) -> bool:
    """Whether a layer adds a function of positions to its logits."""
    return attention.position_logits is not None and not logits_by_content(attention)


def _reason_against_a_cap(attention: RepositionedAttention) -> str:
    """What a layer does that leaves no distance of two tokens; empty where there is one."""
    if logits_by_content(attention):
        return "counts positions by context, or adds other logits by contents"
    return "gives every rotary pair its own position" if differs_by_pair(attention) else ""


def require_rotation(attention: RepositionedAttention) -> None:
    """Refuse a layer that does not rotate.

    Args:
        attention: A layer.

    Raises:
        InputError: Its scheme rotates nothing.
    """
    if not _rotates(attention):
        raise InputError(
            f"layer {attention.layer_idx} ({attention.scheme}) does not rotate, so it has no "
            "frequencies to change"
        )


def _changed_frequencies(
    attention: RepositionedAttention, name: str, value: Any, frequencies: Tensor
) -> Tensor:
    changes: Mapping[str, Callable[[], Any]] = {
        "yarn": lambda: yarn_frequencies(frequencies, value, training_length(attention.config)),
        "linear": lambda: interpolate(frequencies, value),
        "theta": lambda: with_base(frequencies, attention.rotation.unscaled.to(frequencies), value),
        "ntk": lambda: ntk_frequencies(frequencies, value),
        "factors": lambda: value,
        "function": lambda: value(frequencies),
    }
    new = finite_positions(
        changes[name](), frequencies, f"the {name} of layer {attention.layer_idx}"
    )
    count, rotating = len(frequencies), int((attention.rotation.frequencies != 0).sum())
    if new.ndim != 1 or len(new) not in (count, rotating):
        raise InputError(
            f"the {name} of layer {attention.layer_idx} are {list(new.shape)}; wanted one number "
            f"for each of {rotating} pairs"
        )
    # Pairs beyond those that rotate have the frequency 0, and keep it.
    new = torch.nn.functional.pad(new.to(frequencies), (0, count - len(new)))
    return frequencies * new if name == "factors" else new


def lm_infinite(
    model: nn.Module, length: int, global_tokens: int = GLOBAL_TOKENS
) -> AbstractContextManager[None]:
    """Apply LM-Infinite's mask and capped distance while the context lasts.

    Of two such contexts the one that was entered last acts.

    Args:
        model: Repositioned model or bridge.
        length: Tokens of the window, and the largest distance.
        global_tokens: First tokens that every query sees.

    Returns:
        A context manager.

    Raises:
        InputError: Positions are contextual; or, in the pass, keys are cached.
    """
    global_tokens = checked(global_tokens, TokensOrNone, "the number of global tokens")
    return _capped(as_decoder(model), "LM-Infinite", length, global_tokens)


def infllm(model: nn.Module, length: int) -> AbstractContextManager[None]:
    """Put all keys beyond a local window at one distance (InfLLM) while the context lasts.

    Every query sees all keys before it: there is no retrieval. Distances are min(z_i - z_j, length).

    Args:
        model: Repositioned model or bridge.
        length: Tokens of the local window, and the distance of all keys beyond it.

    Returns:
        A context manager.

    Raises:
        InputError: Positions are contextual; or, in the pass, keys are cached.
    """
    return _capped(as_decoder(model), "InfLLM", length, MOST_TOKENS)


@contextmanager
def _capped(decoder: Decoder, method: str, length: int, global_tokens: int) -> Iterator[None]:
    length = checked(length, Length, f"the window of {method}")
    with intervention(decoder) as undo:
        for attention in decoder.layers:
            if reason := _reason_against_a_cap(attention):
                raise InputError(
                    f"layer {attention.layer_idx} ({attention.scheme}) {reason}: {method} has no "
                    "distance to cap"
                )
            # The lambda below binds it as a default: a plain closure would see the last layer's
            instead = _Lambda(attention, method, length, global_tokens)
            patch_attribute(
                undo, attention, "attend", lambda present, instead=instead: instead.attend
            )
        yield


@dataclass
class _Lambda:
    """LM-Infinite or InfLLM in one layer."""

    attention: RepositionedAttention
    method: str
    length: int
    global_tokens: int

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        added: Tensor | None,
        keywords: dict,
    ) -> tuple[Float[Tensor, "batch token head d_head"], Tensor | None]:
        """Attend from every row over its window and the global keys, with a pattern for hooks.

        Replaces the `attend` of the layer.
        """
        attention, tokens = self.attention, queries.shape[2]
        now = attention.active_pass
        assert now.content is not None
        if keys.shape[2] != tokens or now.turning is not None:
            raise InputError(
                f"{self.method} is offered for whole prompts, not with cached keys; pass "
                "use_cache=False"
            )
        # A first token that does not see itself is padding
        if attention_mask is not None and not bool(
            visible(1, tokens, attention_mask[..., :1, :], queries.device)[..., 0].all()
        ):
            raise InputError(
                f"{self.method} shows the first tokens of every prompt, and one is padded "
                "there; pad prompts on the right"
            )
        index = torch.arange(tokens, device=queries.device)
        dropout = keywords.get("dropout") or 0.0
        # A hook on the pattern gets all rows at once, as from the layer's `attend`
        whole = attention.sites.needs_eager
        parts, pattern = [], None
        for rows in index.split(tokens if whole else ROWS):
            begin, end = int(rows[0]), int(rows[-1]) + 1
            window = max(0, begin - self.length + 1)
            # the global keys come first
            # Keys that some row of this block may see: no other key is computed
            shown = torch.cat([index[: min(self.global_tokens, window)], index[window:end]])
            distance = rows[:, None] - shown
            seen = (distance >= 0) & ((distance < self.length) | (shown < self.global_tokens))
            if attention_mask is not None:
                seen = (
                    seen
                    & visible(
                        end - begin, tokens, attention_mask[..., begin:end, :], queries.device
                    )[..., shown]
                )
            scores = attention.scores(
                queries[:, :, begin:end],
                keys[:, :, shown],
                seen,
                None if added is None else added[:, :, begin:end, shown],
            )
            # From queries and keys before rotation: the rotated ones hold the true distance
            if count := min(self.global_tokens, end):
                far, capped = self._capped_scores(
                    now.content.queries[:, :, begin:end],
                    now.content.keys[:, :, :count],
                    now.positions,
                    rows,
                )
                scores[..., :count] = torch.where(
                    far & seen[..., :count], capped.to(scores.dtype), scores[..., :count]
                )
            attended, of_rows = attention.weigh(scores, values[:, :, shown], dropout, now.sinks)
            parts.append(attended)
            pattern = of_rows if whole else None
        return torch.cat(parts, dim=1), pattern

    def _capped_scores(
        self, queries: Tensor, keys: Tensor, positions: Tensor | None, rows: Int[Tensor, "row"]
    ) -> tuple[Tensor, Float[Tensor, "batch head row key"]]:
        """Return pairs of `rows` with the first keys that are too far apart, and scores.

        The scores of all pairs are at the largest distance.
        """
        attention, heads, count = self.attention, queries.shape[1], keys.shape[2]
        if positions is None:
            tokens = max(count, int(rows[-1]) + 1)
            # Layers that only add a bias have no positions: the index gives their distance
            positions = torch.arange(tokens, dtype=torch.float32, device=queries.device)[None, None]
        positions = expand_heads(positions, heads)
        of_keys = positions[..., :count]
        distance = positions[..., rows, None] - of_keys[..., None, :]
        # Without a rotation and without a bias no logit depends on the distance.
        far = (distance.abs() > self.length) & (
            attention.frequencies is not None or attention.position_logits is not None
        )
        # Only the difference counts, so a query at `end` meets keys at 0, which need no rotation
        by_head, at_ends = expand_heads(keys, heads).mT, []
        for end in (self.length, -self.length):  # a learned position may be beyond its query's
            turned = queries
            if attention.frequencies is not None:
                turned = rotate(
                    queries,
                    torch.full_like(positions[..., rows], end),
                    attention.frequencies,
                    # YaRN scales queries and keys, and these keys are as they were before that
                    attention.attention_scaling**2,
                )
            scores = cap_logits(
                turned @ by_head * attention.scaling, attention.attn_logit_softcapping
            )
            if attention.position_logits is not None:
                # A bias depends on the distance alone. As many imagined queries as keys: query k is
                # `end` away from key k, and the diagonal has one bias per key
                pairs = torch.ones(1, 1, count, count, dtype=torch.bool, device=queries.device)
                added = attention.position_logits(
                    queries, keys, of_keys + end, of_keys, pairs, attention.scaling
                )
                # key by key, of a query at that distance from it
                scores = scores + added.diagonal(dim1=-2, dim2=-1)[..., None, :]
            at_ends.append(scores)
        return far, torch.where(distance > 0, *at_ends)


def _with_distances(
    decoder: Decoder, method: str
) -> tuple[list[RepositionedAttention], list[RepositionedAttention]]:
    """Layers that rotate, and layers that add a function of positions alone."""
    layers = decoder.layers
    rotating = [layer for layer in layers if layer.frequencies is not None]
    biased = [layer for layer in layers if _adds_by_position(layer)]
    if not rotating and not biased:
        raise InputError(
            f"{method} changes how distances count, and no layer of this model rotates or adds "
            "logits by distance alone; leave the method out"
        )
    return rotating, biased


def _retune(
    undo: ExitStack,
    attention: RepositionedAttention,
    change: Callable[[Tensor], Tensor],
    scaling: float,
    heads: frozenset[int] | None = None,
) -> None:
    """Change the frequencies of some heads (None: all), and scale their attention scaling."""

    def changed(present: Tensor) -> Tensor:
        if present.ndim == 1 and heads is None:
            return change(present)
        # [head, 1, component], the form in which `rotate` takes frequencies that differ by head
        by_head = present.expand(attention.heads, 1, -1)
        return torch.stack(
            [
                change(row[0]) if heads is None or number in heads else row[0]
                for number, row in enumerate(by_head)
            ]
        )[:, None]

    factors: Any = attention.rotation.by_pair(scaling)
    if heads is not None:
        sizes = attention.heads, 1, attention.d_head // 2
        of_heads, factors = factors, torch.ones(sizes, dtype=torch.float32)
        factors[sorted(heads)] = of_heads
    patch_attribute(undo, attention, "frequencies", changed)
    patch_attribute(undo, attention, "attention_scaling", lambda present: present * factors)
