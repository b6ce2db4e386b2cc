"""The named changes of positions whose effects are measured, for prompts side by side.

    linearised     the token index                               nothing, in layers that rotate by the index
    frozen         the mean over the prompt's tokens             no rotation: the head as in NoPE
    permuted       the prompt's tokens in a random order         drawn by the seed and the prompt's number
    swapped        each token and its neighbour change places
    scaled         s z                                           s = `scale`
    rounded        multiples of d                                d = `step`, in positions
    clipped        to the middle half of the head's range over the prompt
    shifted        the tokens of `span` alone, by `shift` times the head's range over the prompt
    transplanted   those of the next prompt with as many tokens or more

They are those of `models.interventions`, on the prompt's own tokens: padding is left alone, and no
mean or range sees it. Knows nothing about what their effects are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.interventions.positions import (
    from_recorded,
    positions_of,
    reordered,
    to_index,
    to_mean,
    to_multiples,
)
from repo_interp.interventions.replacing import Change, Here
from repo_interp.models.decoder import as_decoder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.tasks import Prompt

PositionChange = Literal[
    "linearised",
    "frozen",
    "permuted",
    "swapped",
    "scaled",
    "rounded",
    "clipped",
    "shifted",
    "transplanted",
]
KINDS: tuple[PositionChange, ...] = get_args(PositionChange)


@dataclass(frozen=True)
class Strength:
    """How strongly positions are changed."""

    scale: float = 0.5
    step: float = 1.0
    shift: float = 0.5
    span: str = ""
    """Whose tokens are shifted; "": the needle, else the first span that a prompt names."""
    seed: int = 0


@dataclass(frozen=True)
class PlacedChange:
    """A change for prompts side by side, and the tokens of each that it is about."""

    change: Change
    tokens: list[Sequence[int]]


def default_kinds(model: nn.Module) -> tuple[str, ...]:
    """Linearised where a layer learns positions; frozen and permuted."""
    learned = not all(isinstance(assigner, TokenIndex) for assigner in as_decoder(model).assigners)
    return ("linearised", "frozen", "permuted") if learned else ("frozen", "permuted")


def require_kinds(kinds: Sequence[str], prompts: Sequence[Prompt], span: str) -> None:
    """Raise InputError for prompts that lack what a kind needs; `span` is that whose tokens are
    shifted.
    """
    for number, prompt in enumerate(prompts):
        if "shifted" in kinds and _span(prompt, span) is None:
            named = repr(span) if span else "at all"
            raise InputError(
                f"prompt {number} has no span {named}, whose tokens are shifted; mark it, or "
                "leave the kind out"
            )
        if "transplanted" in kinds:
            partner(prompts, number)


def partner(prompts: Sequence[Prompt], number: int) -> int:
    """The prompt whose positions prompt `number` is given: the next other one, in order and around,
    with as many tokens or more.
    """
    own, others = prompts[number].tokens, [*range(number + 1, len(prompts)), *range(number)]
    longer = (
        other
        for other in others
        if len(prompts[other].tokens) >= len(own) and prompts[other].tokens != own
    )
    found = next(longer, None)
    if found is None:
        raise InputError(
            f"no other prompt has as many tokens as prompt {number}, to transplant positions "
            "from; leave the kind out"
        )
    return found


def placed(
    model: nn.Module,
    kind: str,
    prompts: Sequence[Prompt],
    numbers: Sequence[int],
    strength: Strength,
) -> PlacedChange:
    """`kind` for the prompts `numbers`, side by side and padded on the right."""
    some = [prompts[number] for number in numbers]
    longest = max(len(prompt.tokens) for prompt in some)
    tokens: list[Sequence[int]] = [range(len(prompt.tokens)) for prompt in some]
    valid = torch.arange(longest) < torch.tensor([[len(prompt.tokens)] for prompt in some])
    if kind == "shifted":
        spans = [_span(prompt, strength.span) for prompt in some]
        return PlacedChange(
            _by_range(valid, lambda z, low, high: z + strength.shift * (high - low)),
            [span or () for span in spans],
        )
    if kind == "transplanted":
        rows = torch.zeros(len(some), longest, dtype=torch.long)
        for row, number in enumerate(numbers):
            given = prompts[partner(prompts, number)].tokens[: len(prompts[number].tokens)]
            rows[row, : len(given)] = torch.tensor(given)
        heads = as_decoder(model).heads
        return PlacedChange(from_recorded(positions_of(model, rows), heads), tokens)
    changes: dict[str, Callable[[], Change]] = {
        "linearised": lambda: to_index,
        "frozen": to_mean,
        "permuted": lambda: reordered(_orders(numbers, tokens, longest, strength.seed)),
        "swapped": lambda: reordered(_neighbours(tokens, longest)),
        "scaled": lambda: lambda positions, here: strength.scale * positions,
        "rounded": lambda: to_multiples(strength.step),
        "clipped": lambda: _by_range(
            valid, lambda z, low, high: z.clamp((3 * low + high) / 4, (low + 3 * high) / 4)
        ),
    }
    return PlacedChange(changes[kind](), tokens)


def _by_range(valid: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Change:
    """A change that is given the smallest and the largest position of each row over the prompt's
    own tokens.
    """

    def changed(positions: Tensor, here: Here) -> Tensor:
        padding = ~valid.to(positions.device)[:, None]
        low = positions.masked_fill(padding, torch.inf).amin(-1, keepdim=True)
        high = positions.masked_fill(padding, -torch.inf).amax(-1, keepdim=True)
        return change(positions, low, high)

    return changed


def _orders(
    numbers: Sequence[int], tokens: Sequence[Sequence[int]], longest: int, seed: int
) -> Tensor:
    orders = np.tile(np.arange(longest), (len(numbers), 1))
    for row, (number, own) in enumerate(zip(numbers, tokens, strict=True)):
        orders[row, : len(own)] = np.random.default_rng([seed, number]).permutation(len(own))
    return torch.from_numpy(orders)


def _neighbours(tokens: Sequence[Sequence[int]], longest: int) -> Tensor:
    orders = torch.arange(longest).repeat(len(tokens), 1)
    for row, own in zip(orders, tokens, strict=True):
        pairs = len(own) // 2 * 2
        row[:pairs] = row[:pairs].view(-1, 2).flip(1).reshape(-1)
    return orders


def _span(prompt: Prompt, name: str) -> tuple[int, ...] | None:
    spans = prompt.spans
    chosen = name or ("needle" if "needle" in spans else next(iter(spans), ""))
    return tuple(spans.get(chosen, ())) or None
