"""Whether the batch that a model is trained on keeps its documents apart.

    documents       runs of valid tokens of a row; one begins wherever position_ids do not increase
    leak            largest change of a document's logits when all tokens of the documents next to it
                    are replaced by others
    difference      largest difference of its logits from those of the document alone, as positions
                    from 0 on give them

Padding-free batches rely on position_ids alone to tell documents apart, and kernels differ in
whether they look. So the model is asked, by three passes over the batch and one per document.

Knows nothing about tokenizers, collators or losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.decoder import as_decoder, require_model
from repo_interp.models.reposition import at_rest
from repo_interp.models.wrapped import model_of

TOLERANCE = 1e-3
"""Change of logits, as a share of the largest one, that is rounding."""
_TEXTS = {
    "row": ("row of the batch", "1"),
    "start": ("first token in the row", "tokens"),
    "length": ("tokens of the document", "tokens"),
    "first_position": ("position of its first token", "positions"),
    "leak": ("largest change of its logits by tokens of other documents", "1"),
    "difference": ("largest difference of its logits from those of the document alone", "1"),
}


def verify_batch(model: nn.Module, batch: Mapping[str, Any]) -> xr.Dataset:
    """Find out whether documents of a batch start at position 0 and see no other document.

    Args:
        model: Bridge, Hugging Face model or `Decoder`, in evaluation or training mode.
        batch: Arguments of the model as a collator gives them: `input_ids` [row, token], and
            `attention_mask`, `position_ids`, or arguments of its kernels, such as `cu_seq_lens_q`.
            `labels` are not used.

    Returns:
        One entry per document, and the findings as lines of the attribute `findings`; empty where
        all is well.

    Raises:
        InputError: The batch lacks `input_ids`, or shapes disagree.
    """
    require_model(model)
    owner: Any = model_of(model)
    # Collators leave their tensors on the processor.
    device = as_decoder(model).device
    given = {
        name: _tensor(value, device) for name, value in dict(batch).items() if value is not None
    }
    tokens, mask, positions = _checked(given)
    documents = _documents(positions, mask)
    others = {name: value for name, value in given.items() if name not in ("input_ids", "labels")}

    def logits(some: Int[Tensor, "row token"], **arguments: Any) -> Tensor:
        # float32, as differences in half precision would be rounded once more.
        return owner(input_ids=some, use_cache=False, **arguments).logits.float()

    with torch.no_grad(), at_rest(model):
        whole = logits(tokens, **others)
        vocabulary = int(owner.get_input_embeddings().weight.shape[0])
        # Two passes for any number of documents: every second one of a row is replaced, so a
        # document that keeps its tokens has others on both sides.
        changed = [
            logits(_replaced(tokens, documents, parity, vocabulary), **others) for parity in (0, 1)
        ]
        scale = float(whole.abs().max())
        entries, before = [], (-1, 0)
        for row, start, end in documents:
            number = before[1] + 1 if row == before[0] else 0
            before = (row, number)
            # The pass in which the other parity was replaced.
            place, apart = (row, slice(start, end)), changed[(number + 1) % 2]
            # Without positions and mask, the model counts from 0 by itself.
            alone = logits(tokens[row, start:end][None])[0]
            entries.append(
                (
                    *(row, start, end - start, int(positions[row, start])),
                    float((apart[place] - whole[place]).abs().max()),
                    float((alone - whole[place]).abs().max()),
                )
            )
    findings = [*_of_positions(documents, positions), *_of_entries(entries, scale)]
    columns = zip(*entries, strict=True)
    return xr.Dataset(
        {
            name: ("document", np.array(values), {"long_name": text, "units": units})
            for (name, (text, units)), values in zip(_TEXTS.items(), columns, strict=True)
        },
        attrs={"findings": "\n".join(findings), "largest_logit": scale},
    )


def _tensor(value: Any, device: torch.device) -> Any:
    is_array = isinstance(value, Tensor | np.ndarray | list | tuple)
    return torch.as_tensor(value, device=device) if is_array else value


def _checked(
    given: Mapping[str, Any],
) -> tuple[Int[Tensor, "row token"], Bool[Tensor, "row token"], Int[Tensor, "row token"]]:
    """Tokens, which of them are valid, and positions: those given, or counted by the mask."""
    tokens = given.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
        raise InputError("a batch has no input_ids [row, token]; give what your collator returns")
    mask = given.get("attention_mask")
    # A mask of pairs (4-D) does not say which tokens are padding.
    mask = torch.ones_like(tokens) if mask is None or mask.ndim != 2 else mask
    positions = given.get("position_ids")
    positions = (mask.cumsum(1) - 1).clamp_min(0) if positions is None else positions
    for name, part in (("attention_mask", mask), ("position_ids", positions)):
        # One row may stand for all rows.
        if part.shape[1:] != tokens.shape[1:] or len(part) not in (1, len(tokens)):
            raise InputError(
                f"{name} is {list(part.shape)} where input_ids are {list(tokens.shape)}"
            )
    mask, positions = (part.expand(tokens.shape) for part in (mask, positions))
    if not bool((mask != 0).any()):
        raise InputError("attention_mask hides every token of the batch")
    return tokens, mask != 0, positions


def _documents(positions: Tensor, mask: Tensor) -> list[tuple[int, int, int]]:
    """Row, first token and last token + 1 of every document."""
    found = []
    for row in range(len(positions)):
        places, at = mask[row].nonzero()[:, 0].tolist(), positions[row].tolist()
        # A document begins after padding too; the token before any other one is valid, so that its
        # position can be compared.
        starts = [
            place
            for number, place in enumerate(places)
            if number == 0 or place != places[number - 1] + 1 or at[place] <= at[place - 1]
        ]
        # Behind the last valid token before the next start: padding belongs to no document.
        ends = [places[places.index(start) - 1] + 1 for start in starts[1:]] + [
            place + 1 for place in places[-1:]
        ]
        found += [(row, start, end) for start, end in zip(starts, ends, strict=True)]
    return found


def _replaced(
    tokens: Tensor, documents: list[tuple[int, int, int]], parity: int, vocabulary: int
) -> Tensor:
    """The batch with other tokens in every second document of a row."""
    replaced, number, last = tokens.clone(), -1, -1
    for row, start, end in documents:
        number, last = (number + 1 if row == last else 0), row
        if number % 2 == parity:
            # The next token of the vocabulary: certainly another one, at every place.
            replaced[row, start:end] = (tokens[row, start:end] + 1) % vocabulary
    return replaced


def _of_positions(documents: list[tuple[int, int, int]], positions: Tensor) -> list[str]:
    found = []
    for row, start, end in documents:
        at = positions[row, start:end].tolist()
        named = f"row {row}, tokens {start} to {end - 1}"
        if at[0] != 0:
            found.append(f"{named}: the document starts at position {at[0]}; wanted 0")
        jump = next((place for place, (a, b) in enumerate(pairwise(at)) if b != a + 1), None)
        if jump is not None:
            found.append(
                f"{named}: position {at[jump + 1]} of token {start + jump + 1} follows position "
                f"{at[jump]}; wanted {at[jump] + 1}"
            )
    return found


def _of_entries(entries: list[tuple], scale: float) -> list[str]:
    found = []
    for row, start, length, _, leak, difference in entries:
        named = f"row {row}, tokens {start} to {start + length - 1}"
        if leak > TOLERANCE * scale:
            found.append(
                f"{named}: the document sees others, whose tokens change its logits by up to "
                f"{leak:.2g} (the largest logit is {scale:.2g})"
            )
        # A leak makes a difference as well, which then needs no line.
        elif difference > TOLERANCE * scale:
            found.append(
                f"{named}: other tokens next to the document change nothing, yet its logits differ "
                f"by up to {difference:.2g} from those of the document alone (the largest logit is "
                f"{scale:.2g}); look at its positions, and at documents further away"
            )
    return found
