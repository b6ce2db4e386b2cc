"""Edits of positions as data, and the one place that applies them.

    linearised     z_i <- i                         the token index
    straightened   z_i <- a + b i                   least squares over the chosen tokens, by row
    frozen         z_i <- c                         None: the mean over the chosen tokens
    copied         z_i <- z_j                       of one token j of the same prompt
    permuted       z_i <- z_s(i)                    the chosen tokens in a random order s
    reordered      z_i <- z_order(i)
    swapped_heads  z^h <-> z^g                      the two rows that are chosen
    scaled         z_i <- c z_i
    rounded        z_i <- c round(z_i / c)
    clipped        z_i <- min(max(z_i, low), high)
    middle_half    z_i clipped to the middle half of its range over the chosen tokens
    shifted        z_i <- z_i + c
    shifted_range  z_i <- z_i + c_i (max z - min z)     the range over the chosen tokens
    transplanted   z_i <- recorded positions of the same layer, head and index
    segmented      z_i <- step (i - s_i) + jump s_i    s_i: segments that begin among tokens 1 .. i
    ranked         z_i <- the number of positions below z_i over the chosen tokens, ties at their mean
    set            z_i <- given values, or a function of the positions

`positions` has a function for most of them, the explorer reads them from the messages of its page,
and the experiment `effects` lists them as rows. An edit is a `Change` of `replaced`, which chooses
layers and heads.

With a cache new tokens get: their index (linearised), the last segment (segmented), the rank among
the positions of the prompt (ranked), a place on the line of the prompt (straightened), the constant
of the prompt (frozen, copied), the edit of the position that they have (scaled, rounded, clipped,
shifted), the recorded position where there is one (transplanted), and their present position
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.interventions.replacing import PassContext, finite_positions, tokens_at
from repo_interp.values import Finite, Seed, TokensOrNone, checked

EditKind = Literal[
    "linearised",
    "straightened",
    "frozen",
    "copied",
    "permuted",
    "reordered",
    "swapped_heads",
    "scaled",
    "rounded",
    "clipped",
    "middle_half",
    "shifted",
    "shifted_range",
    "transplanted",
    "segmented",
    "ranked",
    "set",
]


@dataclass(frozen=True, eq=False)
class PositionEdit:
    """A change of positions, ready for `replaced`; it may be entered again for every new token.

    Raises InputError for a value that the kind does not take.
    """

    kind: EditKind
    value: Any = None
    """By kind: constant, token, seed, order, factor, step, (low, high), shift, positions."""
    tokens: Bool[Tensor, "prompt token"] | None = None
    """The tokens that change (`replacing.token_table`), which no pass needs to reach; None: all."""
    _of_prompt: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Positions that hold for a whole prompt, by layer and rows, for its new tokens."""

    def __post_init__(self) -> None:
        """Check the value."""
        wanted, name, _ = _KINDS[self.kind]
        # The class is frozen
        object.__setattr__(self, "value", checked(self.value, wanted, name))

    def __call__(
        self, positions: Float[Tensor, "prompt row token"], here: PassContext
    ) -> Float[Tensor, "prompt row token"]:
        """Return `positions` after the edit.

        Args:
            positions: Positions of the chosen rows.
            here: Layer, heads and tokens of the pass.

        Returns:
            New positions, which broadcast to `positions` where no `tokens` are named.

        Raises:
            InputError: The value does not fit the prompts, or the prompt is in the cache.
        """
        if self.tokens is None:
            return self._edited(positions, here)
        chosen = tokens_at(self.tokens, here.index)
        here = replace(here, chosen=chosen if here.chosen is None else chosen & here.chosen)
        return torch.where(chosen[:, None], self._edited(positions, here), positions)

    def _edited(self, positions: Tensor, here: PassContext) -> Tensor:
        # One edit serves all its layers, and each has positions of a prompt that it must remember
        edit, rows = _KINDS[self.kind][2], (here.layer, here.heads)
        # Other kinds need no positions of the prompt when new tokens come
        if self.kind not in _BY_PROMPT and (self.kind, self.value) != ("frozen", None):
            return edit(self.value, positions, here)
        # No token is cached: this pass is the prompt. Later ones find its positions here
        if here.start == 0:
            self._of_prompt[rows] = edit(self.value, positions, here)
        elif len(self._of_prompt.get(rows, ())) != len(positions):
            raise InputError(
                f"positions of a prompt in the cache are not known, so none are {self.kind}; "
                "enter the context before the prompt"
            )
        apply = _BY_PROMPT.get(self.kind)
        of_prompt = self._of_prompt[rows]
        return apply(of_prompt, positions, here) if apply else of_prompt


def recorded_at(recorded: Mapping[int, Tensor], layer: int) -> Float[Tensor, "prompt head token"]:
    """Return the recorded positions of `layer`.

    Args:
        recorded: Positions by layer.
        layer: Number of a layer.

    Returns:
        Positions of every head.

    Raises:
        InputError: There are none of this layer.
    """
    if layer not in recorded:
        raise InputError(
            f"positions of layer {layer} were not recorded; there are those of "
            f"{', '.join(map(str, recorded)) or 'none'}"
        )
    return recorded[layer]


def _from_tokens(
    positions: Tensor, source: Int[Tensor, "prompt token"], here: PassContext
) -> Tensor:
    """The positions of tokens `source` of the same prompts."""
    # The last token is in the last column, whatever the padding.
    # `gather` needs columns of this pass, and with padding on the left these are not token indices
    column = source + positions.shape[-1] - 1 - here.index[:, -1:]
    return positions.gather(-1, column[:, None].expand(-1, positions.shape[1], -1))


def _freeze(value: float | None, positions: Tensor, here: PassContext) -> Tensor:
    if value is not None:
        return torch.full_like(positions, value)
    # [prompt, 1, token]
    weight = torch.ones_like(positions[:, :1]) if here.chosen is None else here.chosen[:, None]
    weight = weight.to(positions)
    # A prompt may lack the chosen tokens: its positions stay, whatever the mean is
    return (positions * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1)


def _fit_line(_: None, positions: Tensor, here: PassContext) -> Tensor:
    """Intercept and slope of every row over the chosen tokens [prompt, row, 2]."""
    mean = partial(_freeze, None, here=here)
    # float64: squares of indices lose digits in float32 above some thousand tokens
    z, index = positions.double(), here.index[:, None].double()
    offsets = index - mean(index)
    # One chosen token has no spread; the slope is 0 then, and the line its position
    slope = mean(offsets * (z - mean(z))) / mean(offsets**2).clamp_min(1e-9)
    return torch.cat((mean(z) - slope * mean(index), slope), -1)


def _on_line(line: Tensor, positions: Tensor, here: PassContext) -> Tensor:
    return (line[..., :1] + line[..., 1:] * here.index[:, None]).to(positions)


def _copy(source: int, positions: Tensor, here: PassContext) -> Tensor:
    shortest = int(here.index[:, -1].min()) + 1
    if shortest <= source:
        raise InputError(
            f"token {source} gives its position, and a prompt has {shortest} tokens; "
            "name an earlier one"
        )
    return _from_tokens(positions, here.index.new_full((len(here.index), 1), source), here)


def _permute(seed: int, positions: Tensor, here: PassContext) -> Tensor:
    if here.start > 0:
        return positions
    # On the processor, whose random numbers are the same on every machine
    columns = torch.arange(positions.shape[-1]).repeat(len(positions), 1)
    chosen = torch.ones_like(columns).bool() if here.chosen is None else here.chosen.cpu()
    for row, tokens in zip(columns, chosen, strict=True):
        # Prompts with as many chosen tokens are permuted alike: the draw does not depend on the
        # other prompts of a batch.
        generator = torch.Generator().manual_seed(seed)
        row[tokens] = row[tokens][torch.randperm(int(tokens.sum()), generator=generator)]
    return positions.gather(-1, columns.to(positions.device)[:, None].expand_as(positions))


def _reorder(order: Tensor, positions: Tensor, here: PassContext) -> Tensor:
    count, index = order.shape[-1], here.index
    if order.ndim == 2 and len(order) not in (1, len(positions)):
        raise InputError(
            f"orders of {len(order)} prompts came to {len(positions)}; give one for all, "
            "or one per prompt"
        )
    if here.start > 0:
        if int(index.min()) < count:
            raise InputError(
                "positions of tokens in the cache cannot change places with new ones; "
                "generate without a cache"
            )
        return positions
    shortest = int(index[:, -1].min()) + 1
    if shortest < count:
        raise InputError(
            f"an order of {count} tokens came to a prompt of {shortest}; give one that is no longer"
        )
    # Clamped for `gather` alone: tokens beyond the order are put back by `where` below
    source = order.to(index.device).expand(len(index), -1).gather(1, index.clamp_max(count - 1))
    return _from_tokens(positions, torch.where(index < count, source, index), here)


def _transplant(recorded: Mapping[int, Tensor], positions: Tensor, here: PassContext) -> Tensor:
    source = recorded_at(recorded, here.layer).to(positions)[:, list(here.heads)]
    count, longest = source.shape[-1], int(here.index.max()) + 1
    if here.start == 0 and longest < count:
        raise InputError(
            f"positions of {count} tokens came to prompts of {longest}; cut them to as many"
        )
    if len(source) not in (1, len(positions)):
        raise InputError(
            f"positions of {len(source)} prompts came to {len(positions)}; give those of one "
            "prompt, or of all"
        )
    index = here.index[:, None].expand_as(positions)
    source = source.expand(len(positions), -1, -1).gather(-1, index.clamp_max(count - 1))
    return torch.where(index < count, source, positions)


def _segment(value: tuple[Tensor, float, float], positions: Tensor, here: PassContext) -> Tensor:
    starts, step, jump = value
    # Token 0 begins the first segment, whether it is named or not.
    # [prompt or 1, token]: how many segments began among tokens 1 .. i
    passed = starts.to(here.index.device)[:, 1:].cumsum(-1)
    if not passed.shape[1]:
        return step * here.index[:, None].to(positions)
    rows = torch.nn.functional.pad(passed, (1, 0)).expand(len(here.index), -1)
    # Tokens beyond the table, such as generated ones, belong to the last segment
    segments = rows.gather(1, here.index.clamp_max(rows.shape[1] - 1))
    return (step * (here.index - segments).to(positions) + jump * segments.to(positions))[:, None]


def _in_order(_: None, positions: Tensor, here: PassContext) -> Tensor:
    if here.chosen is not None:
        # Sorted to the end, where no finite position is ranked among them
        positions = positions.masked_fill(~here.chosen[:, None], torch.inf)
    return positions.sort(-1).values


def _ranks(in_order: Tensor, positions: Tensor, here: PassContext) -> Tensor:
    """The numbers of `positions` among those of a prompt in order, from 0; ties at their mean."""
    # searchsorted copies other layouts and warns
    values = positions.contiguous()
    ends = [torch.searchsorted(in_order, values, right=right) for right in (False, True)]
    # Equal positions take the ranks left .. right - 1, whose mean is this
    return (ends[0] + ends[1] - 1).to(positions) / 2


def _set(values: Any, positions: Tensor, here: PassContext) -> Tensor:
    given = values(positions) if callable(values) else values
    new = finite_positions(given, positions, f"positions to set in layer {here.layer}")
    return new[:, None] if new.ndim == 2 else new


def _ends(positions: Tensor, here: PassContext) -> tuple[Tensor, Tensor]:
    """The lowest and the highest position of every row over the chosen tokens."""
    # The experiments that make these kinds name their tokens
    assert here.chosen is not None
    others = ~here.chosen[:, None]
    low = positions.masked_fill(others, torch.inf).amin(-1, keepdim=True)
    return low, positions.masked_fill(others, -torch.inf).amax(-1, keepdim=True)


def _middle_half(_: None, positions: Tensor, here: PassContext) -> Tensor:
    low, high = _ends(positions, here)
    return positions.clamp((3 * low + high) / 4, (low + 3 * high) / 4)


def _shift_range(shares: Tensor, positions: Tensor, here: PassContext) -> Tensor:
    low, high = _ends(positions, here)
    return positions + shares.to(positions)[:, None] * (high - low)


_Step = Annotated[float, Interval(ge=1e-30, le=1e9)]
_Constant = Finite | None  # pyright: ignore[reportOperatorIssue]
_KINDS: Mapping[str, tuple[Any, str, Callable[[Any, Tensor, PassContext], Tensor]]] = {
    # [prompt, 1, token] broadcasts over the rows
    "linearised": (None, "value", lambda value, z, here: here.index[:, None]),
    "straightened": (None, "value", _fit_line),
    "frozen": (_Constant, "the value that positions are frozen at", _freeze),
    "copied": (TokensOrNone, "source", _copy),
    "permuted": (Seed, "seed", _permute),
    "reordered": (Any, "order", _reorder),
    # `replaced` hands over the chosen rows alone, and these are the two heads
    "swapped_heads": (None, "value", lambda value, z, here: z.flip(1)),
    "scaled": (
        Finite,
        "the factor that positions are scaled by, given before the heads,",
        lambda factor, z, here: factor * z,
    ),
    "rounded": (
        _Step,
        "the step that positions are rounded to multiples of, given before the heads,",
        lambda step, z, here: step * torch.round(z / step),
    ),
    "clipped": (Any, "ends", lambda ends, z, here: z.clamp(*ends)),
    "middle_half": (None, "value", _middle_half),
    "shifted": (
        Finite,
        "the number of positions that tokens are shifted by",
        lambda by, z, here: z + by,
    ),
    "shifted_range": (Any, "shares", _shift_range),
    "transplanted": (Any, "recorded", _transplant),
    "segmented": (Any, "segments", _segment),
    "ranked": (None, "value", _in_order),
    "set": (Any, "values", _set),
}
"""By kind: the type of its value, the name of the value in messages, and how it is applied."""
_BY_PROMPT: Mapping[str, Callable[[Tensor, Tensor, PassContext], Tensor] | None] = {
    "copied": None,
    "ranked": _ranks,
    "straightened": _on_line,
}
"""Kinds whose edit is computed once for a prompt, and how its tokens get positions from it; None:
it is their position.
"""
