"""Rotate heads, layers or a whole model by other frequencies inside a `with` block.

    theta_r   <-   theta_r / s, theta'^(-r/n), YaRN's, NTK's, f_r theta_r, or function(theta)

Frequencies may differ by head, layer and rotary pair. With YaRN, cosines and sines are scaled too.
Factors f_r of 1 and 0 rotate a part of the pairs, for instance in some heads only. This module
knows nothing about prompts beyond the training length (`extension`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.errors import InputError
from repo_interp.interventions.replacing import (
    Heads,
    Layers,
    choose_heads,
    finite_positions,
    number_of,
)
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import intervention, model_edit, patch_attribute
from repo_interp.models.layer_probe import differs_by_pair
from repo_interp.models.rotation_numbers import of_heads
from repo_interp.positions.scaling import (
    interpolate,
    ntk_frequencies,
    with_base,
    yarn_attention_scaling,
    yarn_frequencies,
)
from repo_interp.values import checked

Factor = Annotated[float, Interval(ge=1e-9, le=1e9)]
"""Factors that `rescaled` takes."""
_BY_BASE = ("yarn", "theta", "ntk")
"""Changes that need one position per token, since positions by pair have no base."""


@model_edit
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
    factors: Sequence[Any] | np.ndarray | Tensor | None = None,
    function: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """Rotate heads, layers or the whole model by other frequencies inside a `with` block.

        with iv.rescaled(model, factors=[1.0] * 24 + [0.0] * 8):  # p-RoPE: no slow pairs

    Args:
        model: Repositioned model or bridge.
        layer: One layer or several; None: all that rotate.
        head: One head of one `layer`; None: all heads.
        heads: (layer, head) pairs, instead of `layer` and `head`.
        yarn: Factor of YaRN, relative to the model's training length.
        theta: Another base: theta_r = theta^(-r/n) for n pairs.
        linear: Factor of position interpolation.
        ntk: Factor of NTK-aware scaling (`positions.scaling.ntk_frequencies`).
        factors: One factor per pair, the fastest pair first as in `inv_freq`; 0 stops the pair.
            [pair], [head, pair] or [layer, head, pair], where the axes of layers and heads have
            all layers and heads of the model, or length 1. Heads that are not chosen keep their
            frequencies.
        function: Function from frequencies [pair] to new ones, in radians per position.

    Yields:
        None.

    Raises:
        InputError: Not exactly one change is given; a layer or the model does not rotate; every
            pair has a separate position, so there is no base to change; the change leaves all
            frequencies unchanged; the model lacks a head; frequencies are not finite or not one
            per pair; or factors do not cover all heads or layers.
    """
    named: dict[str, Any] = {"yarn": yarn, "theta": theta, "linear": linear, "ntk": ntk}
    changes = {
        name: value
        # Compared with None: 0 is refused below, and a tensor has no truth value.
        for name, value in (*named.items(), ("factors", factors), ("function", function))
        if value is not None
    }
    if len(changes) != 1:
        raise InputError(
            f"one of {', '.join(named)}, factors and function was wanted; got "
            f"{', '.join(changes) or 'none'}"
        )
    name: str
    value: Any
    ((name, value),) = changes.items()
    if name in named:
        value = checked(value, Factor, "the factor of an extension")
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
        if rotates(attention) and not (by_base and differs_by_pair(attention))
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
            some = None if heads is None else chosen[attention.layer_idx]
            if name == "factors":
                by = _factors_of(attention, value, decoder.layer_count, some)
                patch_attribute(undo, attention, "frequencies", partial(torch.mul, by))
                continue
            change = partial(_changed_frequencies, attention, name, value)
            retune(undo, attention, change, scaling, some)
            now = attention.frequencies
            same = same and torch.equal(
                *(of_heads(each, attention.heads) for each in (now, before))
            )
        if same:
            raise InputError(
                f"{name}={value:g} changes nothing: the frequencies of "
                f"{', '.join(dict.fromkeys(decoder.schemes))} stay as they are; leave it out"
            )
        yield


def rotates(attention: RepositionedAttention) -> bool:
    """Return whether a layer rotates by positions.

    Args:
        attention: A layer.

    Returns:
        True if it has frequencies and assigns positions.
    """
    return attention.frequencies is not None and attention.assigner is not None


def require_rotation(attention: RepositionedAttention) -> None:
    """Refuse a layer that does not rotate.

    Args:
        attention: A layer.

    Raises:
        InputError: The layer does not rotate.
    """
    if not rotates(attention):
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
        "function": lambda: value(frequencies),
    }
    what = f"the {name} of layer {attention.layer_idx}"
    new = finite_positions(changes[name](), frequencies, what)
    return _of_all_pairs(attention, what, new.to(frequencies), new.ndim == 1, frequencies)


def _of_all_pairs(
    attention: RepositionedAttention,
    what: str,
    new: Tensor,
    fits: bool,
    present: Tensor,
    more: str = "",
) -> Tensor:
    """Expand numbers of the rotating pairs to all pairs [..., component]; others keep frequency 0."""
    count = present.shape[-1]
    rotating = int((attention.rotation.frequencies != 0).sum())
    if not fits or new.shape[-1] not in (count, rotating):
        raise InputError(
            f"{what} are {list(new.shape)}; wanted one number for each of {rotating} pairs{more}"
        )
    return torch.nn.functional.pad(new, (0, count - new.shape[-1]))


def _factors_of(
    attention: RepositionedAttention, given: Any, layers: int, chosen: frozenset[int] | None
) -> Tensor:
    """Factors of a layer [component], or [head, 1, component] where heads differ."""
    present, heads = attention.frequencies, attention.heads
    what = f"the factors of layer {attention.layer_idx}"
    new = finite_positions(given, present, what).to(present)
    # Axes are counted from the back, since [head, pair] has no axis of layers.
    sizes = zip(new.shape[-2::-1], (heads, layers), strict=False)
    fits = 1 <= new.ndim <= 3 and all(size in (1, whole) for size, whole in sizes)
    more = f", [pair], or by [{heads} heads, pair] or [{layers} layers, {heads} heads, pair]"
    new = _of_all_pairs(attention, what, new, fits, present, more)
    if new.ndim == 3:
        new = new[attention.layer_idx if len(new) > 1 else 0]
    if new.ndim == 1 and chosen is None:
        return new
    kept = [chosen is not None and head not in chosen for head in range(heads)]
    by_head = new.expand(heads, -1).masked_fill(torch.tensor(kept, device=new.device)[:, None], 1)
    # [head, 1, component], the form in which `rotate` takes frequencies that differ by head
    return by_head[:, None]


def retune(
    undo: ExitStack,
    attention: RepositionedAttention,
    change: Callable[[Tensor], Tensor],
    scaling: float,
    heads: frozenset[int] | None = None,
) -> None:
    """Change the frequencies of heads, and multiply their attention scaling.

    Args:
        undo: Stack that gets the callbacks to undo the change.
        attention: The layer.
        change: Maps frequencies [component] to new ones.
        scaling: Factor of cosines and sines.
        heads: Indices of heads; None: all.
    """

    def changed(present: Tensor) -> Tensor:
        if present.ndim == 1 and heads is None:
            return change(present)
        # [head, 1, component], the form in which `rotate` takes frequencies that differ by head
        by_head = present if heads is None else of_heads(present, attention.heads)
        by_head = by_head if by_head.ndim == 3 else by_head.expand(attention.heads, 1, -1)
        return torch.stack(
            [
                change(row[0]) if heads is None or number in heads else row[0]
                for number, row in enumerate(by_head)
            ]
        )[:, None]

    factors: Any = attention.rotation.by_pair(scaling)
    if heads is not None:
        sizes = attention.heads, 1, attention.d_head // 2
        of_all, factors = factors, torch.ones(sizes, dtype=torch.float32)
        factors[sorted(heads)] = of_all
    patch_attribute(undo, attention, "frequencies", changed)
    patch_attribute(undo, attention, "attention_scaling", lambda present: present * factors)
