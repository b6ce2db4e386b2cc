"""Whether the batch that a model is trained on keeps its documents apart.

    documents       runs of valid tokens of a row; one begins wherever position_ids do not increase,
                    cu_seq_lens_q or cu_seq_lens_k say so, or seq_idx changes
    leak            largest change of a document's logits when all tokens of the documents next to it
                    are replaced by others
    difference      largest difference of its logits from those of the document alone, as positions
                    from 0 on give them

Padding-free batches rely on position_ids alone to tell documents apart, and kernels differ in
whether they look. So the model is asked, by three passes over the batch and one per document.

Knows nothing about tokenizers, collators or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import at_rest
from repo_interp.values import shortened

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


_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of kernels with the ends of documents, rows one after the other."""


class _Document(NamedTuple):
    """Tokens of a row from `start` to before `end`."""

    row: int
    start: int
    end: int
    number: int
    """Number of the document in its row."""

    @property
    def place(self) -> tuple[int, slice]:
        """Indices of its tokens in the batch."""
        return self.row, slice(self.start, self.end)

    @property
    def name(self) -> str:
        """Its name in findings."""
        return f"row {self.row}, tokens {self.start} to {self.end - 1}"


def verify_batch(model: nn.Module, batch: Mapping[str, Any]) -> xr.Dataset:
    """Find out whether documents of a batch start at position 0 and see no other document.

    Args:
        model: Bridge, Hugging Face model or `Decoder`, in evaluation or training mode.
        batch: Arguments of the model as a collator gives them: `input_ids` [row, token], and
            `attention_mask`, `position_ids`, or arguments of its kernels, such as `cu_seq_lens_q`.
            `labels` are not used.

    Returns:
        One entry per document, and the findings as lines of the attribute `findings`; empty where
        all is well. The attribute `documents_from` names the arguments that say where documents
        begin; "none": every row is taken for one document.

    Raises:
        InputError: The batch lacks `input_ids`, or shapes disagree.
    """
    decoder = as_decoder(model)
    if not isinstance(batch, Mapping):
        raise InputError(
            f"a batch is {type(batch).__name__}; wanted arguments by name, such as "
            "{'input_ids': tokens}"
        )
    owner = decoder.owner
    # Collators leave their tensors on the processor.
    given = {
        name: _tensor(value, decoder.device)
        for name, value in dict(batch).items()
        if value is not None
    }
    tokens, mask, positions = _checked(given)
    starts, told_by = _starts(given, tokens)
    documents = _documents(positions, mask, starts)
    others = {name: value for name, value in given.items() if name not in ("input_ids", "labels")}

    def logits(some: Int[Tensor, "row token"], **arguments: Any) -> Tensor:
        # float32, as differences in half precision would be rounded once more.
        return owner(input_ids=some, use_cache=False, **arguments).logits.float()

    with torch.no_grad(), at_rest(decoder):
        whole = logits(tokens, **others)
        vocabulary = int(owner.get_input_embeddings().weight.shape[0])
        # Two passes for any number of documents: every second one of a row is replaced, so a
        # document that keeps its tokens has others on both sides.
        changed = []
        for parity in (0, 1):
            replaced = tokens.clone()
            for document in documents:
                if document.number % 2 == parity:
                    # The next token of the vocabulary: certainly another one, at every place.
                    replaced[document.place] = (tokens[document.place] + 1) % vocabulary
            changed.append(logits(replaced, **others))
        scale = float(whole.abs().max())
        entries = []
        for document in documents:
            here, (row, start, end, number) = whole[document.place], document
            # The pass in which the other parity was replaced.
            apart = changed[(number + 1) % 2][document.place]
            # Without positions and mask, the model counts from 0 by itself.
            alone = logits(tokens[document.place][None])[0]
            leak, difference = (float((some - here).abs().max()) for some in (apart, alone))
            entries.append((row, start, end - start, int(positions[row, start]), leak, difference))
    findings = [line for document in documents for line in _of_positions(document, positions)]
    for document, (*_, leak, difference) in zip(documents, entries, strict=True):
        if leak > TOLERANCE * scale:
            findings.append(
                f"{document.name}: the document sees others, whose tokens change its logits by up "
                f"to {leak:.2g} (the largest logit is {scale:.2g})"
            )
        # A leak makes a difference as well, which then needs no line.
        elif difference > TOLERANCE * scale:
            findings.append(
                f"{document.name}: other tokens next to the document change nothing, yet its "
                f"logits differ by up to {difference:.2g} from those of the document alone (the "
                f"largest logit is {scale:.2g}); look at its positions, and at documents further "
                "away"
            )
    columns = zip(*entries, strict=True)
    return xr.Dataset(
        {
            name: ("document", np.array(values), {"long_name": text, "units": units})
            for (name, (text, units)), values in zip(_TEXTS.items(), columns, strict=True)
        },
        attrs={
            "findings": "\n".join(findings),
            "largest_logit": scale,
            "documents_from": ", ".join(told_by) or "none",
        },
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


def _starts(
    given: Mapping[str, Any], tokens: Int[Tensor, "row token"]
) -> tuple[Bool[Tensor, "row token"], list[str]]:
    """Find where kernel arguments begin documents, and name all arguments that tell them apart."""
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    told_by = [name for name in ("position_ids", *_LENGTHS, "seq_idx") if name in given]
    for name in _LENGTHS:
        if name in given:
            ends = given[name]
            if (
                not isinstance(ends, Tensor)
                or ends.ndim != 1
                or ends.is_floating_point()
                or len(ends) < 2
                or (int(ends[0]), int(ends[-1])) != (0, tokens.numel())
                or bool((ends.diff() < 0).any())
            ):
                raise InputError(
                    f"{name} is {shortened(repr(ends))}; wanted ends of documents, from 0 to the "
                    f"{tokens.numel()} tokens of the batch"
                )
            # Kernels take the rows for one; a document without tokens begins with the next one.
            starts.view(-1)[ends[:-1][ends.diff() > 0].long()] = True
    if "seq_idx" in given:
        numbers = given["seq_idx"]
        if not isinstance(numbers, Tensor) or numbers.shape != tokens.shape:
            raise InputError(f"seq_idx has no shape {list(tokens.shape)}, that of input_ids")
        starts[:, 1:] |= numbers[:, 1:] != numbers[:, :-1]
    return starts, told_by


def _documents(positions: Tensor, mask: Tensor, starts: Tensor) -> list[_Document]:
    """Find runs of valid tokens whose positions increase and that no token of `starts` breaks."""
    found: list[_Document] = []
    rows = zip(positions.tolist(), mask.tolist(), starts.tolist(), strict=True)
    for row, (at, valid, begins) in enumerate(rows):
        of_row: list[_Document] = []
        for place in (place for place in range(len(at)) if valid[place]):
            if place and valid[place - 1] and at[place] > at[place - 1] and not begins[place]:
                of_row[-1] = of_row[-1]._replace(end=place + 1)
            else:
                of_row.append(_Document(row, place, place + 1, len(of_row)))
        found += of_row
    return found


def _of_positions(document: _Document, positions: Tensor) -> Iterator[str]:
    at = positions[document.place].tolist()
    if at[0] != 0:
        yield f"{document.name}: the document starts at position {at[0]}; wanted 0"
    jump = next((place for place, (a, b) in enumerate(pairwise(at)) if b != a + 1), None)
    if jump is not None:
        yield (
            f"{document.name}: position {at[jump + 1]} of token {document.start + jump + 1} "
            f"follows position {at[jump]}; wanted {at[jump] + 1}"
        )
