"""Extend a model beyond its training length without training: change how its distances count, while
a context lasts.

    interpolated     theta_r <- theta_r / s                                                     (Chen et al. 2023)
    yarn             theta_r <- YaRN's, cosines and sines times 0.1 ln s + 1                    (Peng et al. 2024)
    lm_infinite      query i sees keys j < G and keys i - j < L, at distance min(z_i - z_j, L)  (Han et al. 2024)

Schemes that add a function of the distance are given divided indices, or the capped distance.

LM-Infinite's capped distance is no position of a token: it depends on the pair. Only the G global
keys are ever further than L, so their logits alone are computed anew, rotate(q_i, min(z_i - z_j,
L)) . k_j - what the authors get from a second pass with the query at L and global keys at 0 - in
O(n G d); the other far keys are never computed. ROWS queries at a time meet the keys that they may
see: ROWS (L + G + ROWS) scores per head at once, n (L + G) in all; the whole map where a hook asks
for it, or a scheme adds to the logits. Learned positions are masked by the index; of global keys
their difference is capped to +-L.

By name: `METHODS`, those that a model's positions allow (`allowed_methods`), and the context of one
of them (`extended`).

Whole prompts only, padded on the right, without cached keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from annotated_types import Interval
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.fields import Length
from repo_interp.errors import InputError
from repo_interp.interventions.replacing import number_of
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import as_decoder, attentions_of
from repo_interp.models.lasting import intervention, patch_attribute
from repo_interp.models.masks import visible
from repo_interp.positions.biases import PositionBias
from repo_interp.positions.logits import cap_logits
from repo_interp.positions.rotary import expand_heads, rotate
from repo_interp.positions.scaling import (
    interpolate,
    with_base,
    yarn_attention_scaling,
    yarn_frequencies,
)
from repo_interp.values import TokensOrNone, checked

_Factor = Annotated[float, Interval(ge=1e-9, le=1e9)]
"""What distances may be divided by."""
Method = Literal["plain", "lm_infinite", "interpolation", "yarn"]
METHODS: tuple[Method, ...] = get_args(Method)
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
    """The context in which `model` runs prompts of `length` tokens by `method`.

    Raises InputError for an unknown one.
    """
    factor = max(1.0, length / training_length)
    ways: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
        "plain": nullcontext,
        "lm_infinite": lambda: lm_infinite(model, training_length, global_tokens),
        "interpolation": lambda: interpolated(model, factor),
        "yarn": lambda: yarn(model, factor, training_length),
    }
    if method not in ways:
        raise InputError(f"methods of extrapolation are {', '.join(METHODS)}, not {method!r}")
    return ways[method]()


def allowed_methods(model: nn.Module) -> tuple[str, ...]:
    """The methods that this model's positions allow."""
    layers = as_decoder(model).layers
    rotates = any(layer.frequencies is not None for layer in layers)
    added = [layer.position_logits for layer in layers if layer.position_logits is not None]
    by_distance = [isinstance(position_logits, PositionBias) for position_logits in added]
    allowed = {
        "plain": True,
        "lm_infinite": all(by_distance),
        "interpolation": rotates or any(by_distance),
        "yarn": rotates,
    }
    return tuple(method for method in METHODS if allowed[method])


@contextmanager
def interpolated(model: nn.Module, factor: float) -> Iterator[None]:
    """Position interpolation by `factor`: every distance counts as 1 / factor of it.

    Raises InputError where nothing has distances.
    """
    factor = checked(factor, _Factor, "the factor of an extension")
    rotating, biased = _with_distances(model, "position interpolation")
    with intervention(model) as undo:
        for attention in rotating:
            _retune(undo, attention, lambda frequencies: interpolate(frequencies, factor), 1.0)
        for attention in biased:
            assert attention.position_logits is not None
            handle = attention.position_logits.register_forward_pre_hook(
                lambda module, given: (*given[:2], given[2] / factor, given[3] / factor, *given[4:])
            )
            undo.callback(handle.remove)
        yield


@contextmanager
def yarn(model: nn.Module, factor: float, training_length: int) -> Iterator[None]:
    """YaRN by `factor` from `training_length` tokens, in every layer that rotates.

    Raises InputError where none does.
    """
    factor = checked(factor, _Factor, "the factor of an extension")
    training_length = checked(training_length, Length, "the training length")
    rotating, _ = _with_distances(model, "YaRN")
    if not rotating:
        raise InputError(
            "YaRN changes how layers rotate, and no layer of this model does; leave the method out"
        )
    scaling = yarn_attention_scaling(factor)
    with intervention(model) as undo:
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
    layer: int,
    head: int | None = None,
    *,
    yarn: float | None = None,
    theta: float | None = None,
    linear: float | None = None,
) -> Iterator[None]:
    """While the context lasts, one head of `layer` (None: all) rotates by other frequencies.

    `yarn`, `linear`: the factor of YaRN (from the model's training length) or of position
    interpolation. `theta`: another base, theta_r = theta^(-r/n) of n pairs. Raises InputError
    unless one of them is given, and where the layer does not rotate.
    """
    given = {
        name: value
        for name, value in (("yarn", yarn), ("theta", theta), ("linear", linear))
        if value is not None
    }
    if len(given) != 1:
        raise InputError(
            f"one of yarn, theta and linear was wanted; got {', '.join(given) or 'none'}"
        )
    ((name, value),) = given.items()
    value = checked(value, _Factor, "the factor of an extension")
    layer, head = number_of(layer, "a layer"), None if head is None else number_of(head, "a head")
    (attention,) = attentions_of(model, [layer])
    if attention.frequencies is None or attention.assigner is None:
        raise InputError(
            f"layer {layer} ({attention.scheme}) does not rotate, so it has no frequencies "
            "to change"
        )
    if head is not None and not 0 <= head < attention.heads:
        raise InputError(
            f"head {head} was named; the heads of layer {layer} are 0 to {attention.heads - 1}"
        )
    length = training_length(attention.config)
    changes: Mapping[str, Callable[[Tensor], Tensor]] = {
        "yarn": lambda frequencies: yarn_frequencies(frequencies, value, length),
        "linear": lambda frequencies: interpolate(frequencies, value),
        "theta": lambda frequencies: with_base(
            frequencies, attention.rotation.unscaled.to(frequencies), value
        ),
    }
    scaling = yarn_attention_scaling(value) if name == "yarn" else 1.0
    with intervention(model) as undo:
        _retune(undo, attention, changes[name], scaling, head)
        yield


@contextmanager
def lm_infinite(
    model: nn.Module, length: int, global_tokens: int = GLOBAL_TOKENS
) -> Iterator[None]:
    """LM-Infinite's Lambda-shaped mask and capped distance: window and cap of `length` tokens, and
    `global_tokens` first ones.

    Of two such contexts the one that was entered last acts.

    Raises InputError for a model with contextual positions, and inside it for cached keys.
    """
    length = checked(length, Length, "the window of LM-Infinite")
    global_tokens = checked(global_tokens, TokensOrNone, "the number of global tokens")
    with intervention(model) as undo:
        for attention in as_decoder(model).layers:
            if attention.position_logits is not None and not isinstance(
                attention.position_logits, PositionBias
            ):
                raise InputError(
                    f"layer {attention.layer_idx} counts positions by context "
                    f"({attention.scheme}): LM-Infinite has no distance to cap"
                )
            instead = _Lambda(attention, length, global_tokens)
            patch_attribute(
                undo, attention, "attend", lambda present, instead=instead: instead.attend
            )
        yield


@dataclass
class _Lambda:
    """LM-Infinite in one layer."""

    attention: RepositionedAttention
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
        """In place of the layer's own `attend`: every row over its window and the global keys; the
        pattern where a hook asks for one.
        """
        attention, tokens = self.attention, queries.shape[2]
        now = attention.active_pass
        assert now.content is not None
        if keys.shape[2] != tokens:
            raise InputError(
                "LM-Infinite is offered for whole prompts, not with cached keys; pass "
                "use_cache=False"
            )
        if attention_mask is not None and not bool(
            visible(1, tokens, attention_mask[..., :1, :], queries.device)[..., 0].all()
        ):
            raise InputError(
                "LM-Infinite shows the first tokens of every prompt, and one is padded "
                "there; pad prompts on the right"
            )
        index = torch.arange(tokens, device=queries.device)
        dropout = keywords.get("dropout") or 0.0
        whole = attention.sites.needs_eager
        parts, pattern = [], None
        for rows in index.split(tokens if whole else ROWS):
            begin, end = int(rows[0]), int(rows[-1]) + 1
            window = max(0, begin - self.length + 1)
            # the global keys come first
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
            for key in range(min(self.global_tokens, end)):
                far, capped = self._global_scores(
                    now.content.queries[:, :, begin:end], now.content.keys, now.positions, rows, key
                )
                scores[..., key] = torch.where(
                    far & seen[..., key], capped.to(scores.dtype), scores[..., key]
                )
            attended, of_rows = attention.weigh(scores, values[:, :, shown], dropout, now.sinks)
            parts.append(attended)
            pattern = of_rows if whole else None
        return torch.cat(parts, dim=1), pattern

    def _global_scores(
        self,
        queries: Tensor,
        keys: Tensor,
        positions: Tensor | None,
        rows: Int[Tensor, "row"],
        key: int,
    ) -> tuple[Tensor, Float[Tensor, "batch head row"]]:
        """Which pairs of `rows` with the global token `key` are too far apart, and all their scores
        at the capped distance.
        """
        attention, heads = self.attention, queries.shape[1]
        its_key = expand_heads(keys[:, :, key, None], heads).mT
        if positions is None:
            positions = torch.arange(keys.shape[2], dtype=torch.float32, device=queries.device)[
                None, None
            ]
        its_position = positions[..., key, None]
        distance = expand_heads(positions[..., rows] - its_position, heads)
        # Without a rotation and without a bias no logit depends on the distance.
        far = (distance.abs() > self.length) & (
            attention.frequencies is not None or attention.position_logits is not None
        )
        distance = distance.clamp(-self.length, self.length)
        if attention.frequencies is not None:
            queries = rotate(
                queries, distance, attention.frequencies, attention.attention_scaling**2
            )
        scores = cap_logits(
            (queries @ its_key)[..., 0] * attention.scaling, attention.attn_logit_softcapping
        )
        if attention.position_logits is not None:
            its_position = expand_heads(its_position, heads)
            added = attention.position_logits(
                queries,
                keys[:, :, key, None],
                its_position + distance,
                its_position,
                torch.ones(1, 1, len(rows), 1, dtype=torch.bool, device=queries.device),
                attention.scaling,
            )
            scores = scores + added[..., 0]
        return far, scores


def _with_distances(
    model: nn.Module, method: str
) -> tuple[list[RepositionedAttention], list[RepositionedAttention]]:
    """Layers that rotate, and layers that add a function of the distance."""
    layers = as_decoder(model).layers
    rotating = [layer for layer in layers if layer.frequencies is not None]
    biased = [layer for layer in layers if isinstance(layer.position_logits, PositionBias)]
    if not rotating and not biased:
        raise InputError(
            f"{method} changes how distances count, and no layer of this model has any; "
            "leave the method out"
        )
    return rotating, biased


def _retune(
    undo: ExitStack,
    attention: RepositionedAttention,
    change: Callable[[Tensor], Tensor],
    scaling: float,
    head: int | None = None,
) -> None:
    """Rotate one head (None: all) by what `change` makes of its frequencies, their attention
    scaling times `scaling`.
    """

    def changed(present: Tensor) -> Tensor:
        if present.ndim == 1 and head is None:
            return change(present)
        by_head = present.expand(attention.heads, 1, -1)
        return torch.stack(
            [
                change(row[0]) if head in (None, number) else row[0]
                for number, row in enumerate(by_head)
            ]
        )[:, None]

    factors: Any = attention.rotation.by_pair(scaling)
    if head is not None:
        of_head, factors = factors, torch.ones(attention.heads, 1, attention.d_head // 2)
        factors[head] = of_head
    patch_attribute(undo, attention, "frequencies", changed)
    patch_attribute(undo, attention, "attention_scaling", lambda present: present * factors)
