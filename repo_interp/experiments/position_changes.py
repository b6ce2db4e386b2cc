"""The named changes of positions whose effects are measured, for prompts side by side.

    linearised     the token index                               nothing, in layers that rotate by the index
    straightened   the line fitted to the head's positions       RoPE with a slope by head
    frozen         the mean over the prompt's tokens             no rotation: the head as in NoPE
    permuted       the prompt's tokens in a random order         drawn by the seed and the prompt's number
    swapped        each token and its neighbour change places
    scaled         s z                                           s = `scale`
    rounded        multiples of d                                d = `step`, in positions
    clipped        to the middle half of the head's range over the prompt
    shifted        the tokens of `span` alone, by `shift` times the head's range over the prompt
    transplanted   those of the next prompt with as many tokens or more
    ranked         their rank over the prompt: the order remains, the spacing does not
    segmented      the number of the token's segment: spans, and the text between them

Each is a row of `interventions.edits`, on the tokens of the prompt: padding is left alone, and no
mean or range sees it. Knows nothing about their effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.interventions.edits import PositionEdit
from repo_interp.interventions.positions import positions_of
from repo_interp.interventions.replacing import token_table
from repo_interp.models.decoder import Decoder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.rotary import expand_heads
from repo_interp.tasks import Prompt

PositionChange = Literal[
    "linearised",
    "straightened",
    "frozen",
    "permuted",
    "swapped",
    "scaled",
    "rounded",
    "clipped",
    "shifted",
    "transplanted",
    "ranked",
    "segmented",
]
KINDS: tuple[PositionChange, ...] = get_args(PositionChange)
_EDITS: dict[str, Any] = {
    "permuted": "reordered",
    "swapped": "reordered",
    "clipped": "middle_half",
    "shifted": "shifted_range",
}
"""Names in `interventions.edits` of the kinds that have another name there."""


@dataclass(frozen=True)
class Strength:
    """How strongly positions are changed."""

    scale: float = 0.5
    step: float = 1.0
    shift: float = 0.5
    span: str = ""
    """Whose tokens are shifted; "": the needle, else the first span that a prompt names."""
    seed: int = 0


def default_kinds(decoder: Decoder) -> tuple[str, ...]:
    """Return the default kinds of changes for a model.

    Args:
        decoder: Decoder of the model.

    Returns:
        "frozen" and "permuted"; before them "linearised" where a layer learns positions.
    """
    # Where all layers go by the index, linearising changes nothing and would cost passes.
    learned = not all(isinstance(assigner, TokenIndex) for assigner in decoder.assigners)
    return ("linearised", "frozen", "permuted") if learned else ("frozen", "permuted")


def require_kinds(kinds: Sequence[str], prompts: Sequence[Prompt], span: str) -> None:
    """Check that prompts have all that kinds of changes need.

    Args:
        kinds: Kinds of changes.
        prompts: Prompts to change.
        span: Span whose tokens are shifted.

    Raises:
        InputError: A prompt lacks the span or any span, or no other prompt is long enough to transplant from.
    """
    for number, prompt in enumerate(prompts):
        if "shifted" in kinds and _span(prompt, span) is None:
            named = repr(span) if span else "at all"
            raise InputError(
                f"prompt {number} has no span {named}, whose tokens are shifted; mark it, or "
                "leave the kind out"
            )
        if "segmented" in kinds and not prompt.spans:
            raise InputError(
                f"prompt {number} has no spans, which are its segments; mark some, or leave the "
                "kind out"
            )
        if "transplanted" in kinds:
            partner(prompts, number)


def partner(prompts: Sequence[Prompt], number: int) -> int:
    """Return the prompt whose positions a prompt is given.

    The next other prompt, in order and around, with as many tokens or more.

    Args:
        prompts: Prompts of the experiment.
        number: Index of the prompt that is changed.

    Returns:
        Index of the partner.

    Raises:
        InputError: No other prompt has as many tokens.
    """
    tokens, others = prompts[number].tokens, [*range(number + 1, len(prompts)), *range(number)]
    longer = (
        # Positions of the same tokens are the same, so such a partner would change nothing.
        other
        for other in others
        if len(prompts[other].tokens) >= len(tokens) and prompts[other].tokens != tokens
    )
    found = next(longer, None)
    if found is None:
        raise InputError(
            f"no other prompt has as many tokens as prompt {number}, to transplant positions "
            "from; leave the kind out"
        )
    return found


def edit_prompts(
    decoder: Decoder,
    kind: str,
    prompts: Sequence[Prompt],
    numbers: Sequence[int],
    strength: Strength,
) -> PositionEdit:
    """Make the edit of one kind for prompts side by side, padded on the right.

    Args:
        decoder: Decoder of the model.
        kind: One of `KINDS`.
        prompts: All prompts.
        numbers: The prompts that are side by side.
        strength: How strongly positions change.

    Returns:
        The edit, of the tokens of each prompt.

    Raises:
        InputError: No other prompt has positions to transplant.
    """
    some = [prompts[number] for number in numbers]
    tokens = [range(len(prompt.tokens)) for prompt in some]
    # [prompt, token]; padding keeps its index, and the edit leaves it alone anyway.
    index = torch.arange(max(map(len, tokens))).repeat(len(some), 1)
    value: Any = {"scaled": strength.scale, "rounded": strength.step}.get(kind)
    if kind == "permuted":
        for number, row, places in zip(numbers, index, tokens, strict=True):
            # By the prompt's number, so that its order does not depend on the prompts beside it.
            random = np.random.default_rng([strength.seed, number])
            row[: len(places)] = torch.from_numpy(random.permutation(len(places)))
        value = index
    elif kind == "swapped":
        # ^ 1 exchanges 2k and 2k + 1. An odd last token has no neighbour and stays.
        pairs = torch.tensor([[len(places) // 2 * 2] for places in tokens])
        value = torch.where(index < pairs, index ^ 1, index)
    elif kind == "shifted":
        spans = [_span(prompt, strength.span) or () for prompt in some]
        value = torch.zeros_like(index, dtype=torch.float64)
        for row, span in zip(value, spans, strict=True):
            row[list(span)] = strength.shift
    elif kind == "segmented":
        # A segment begins where a span begins and right after it ends.
        ends = [
            [end for span in prompt.spans.values() if span for end in (min(span), max(span) + 1)]
            for prompt in some
        ]
        # Step 0 within a segment and a jump of 1 between them: the
        # position is the segment's number.
        value = token_table([starts or [0] for starts in ends]), 0.0, 1.0
    elif kind == "transplanted":
        value = _positions_of_partners(decoder, prompts, numbers, torch.zeros_like(index))
    return PositionEdit(_EDITS.get(kind, kind), value, token_table(tokens))


def _positions_of_partners(
    decoder: Decoder, prompts: Sequence[Prompt], numbers: Sequence[int], rows: Tensor
) -> dict[int, Tensor]:
    for row, number in zip(rows, numbers, strict=True):
        # Causal: the partner's first tokens have the positions that they have in the whole prompt.
        given = prompts[partner(prompts, number)].tokens[: len(prompts[number].tokens)]
        row[: len(given)] = torch.tensor(given)
    return {
        # One row per head, since edits choose heads while layers may share rows.
        layer: expand_heads(positions, decoder.by_layer[layer].heads)
        for layer, positions in positions_of(decoder.module, rows).items()
    }


def _span(prompt: Prompt, name: str) -> tuple[int, ...] | None:
    spans = prompt.spans
    # An answer depends on the needle; other prompts have their first span.
    chosen = name or ("needle" if "needle" in spans else next(iter(spans), ""))
    return tuple(spans.get(chosen, ())) or None
