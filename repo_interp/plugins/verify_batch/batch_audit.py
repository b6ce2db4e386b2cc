"""Test whether the documents of a training batch are independent of each other.

    documents       runs of valid tokens of a row; one begins wherever no axis of position_ids
                    increases, cu_seq_lens_q or cu_seq_lens_k has a boundary, or seq_idx or the
                    numbers of attention_mask change
    leak            largest change of a document's logits when all tokens of another document of
                    its row are replaced
    difference      largest difference of its logits from a pass over the document alone, with
                    positions from 0 on

Padding-free batches separate documents by position_ids alone. Some kernels do not check these, and
neither does a pass that makes a cache. Therefore the test runs the training call itself: one pass
over the batch, two per binary digit of the number of documents in a row, and one per document.

This module knows nothing about tokenizers, collators or losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, NotFinite, as_input_errors
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import at_rest
from repo_interp.models.rotation import rotaries
from repo_interp.models.tables import position_table
from repo_interp.plugins.verify_batch.batch_arguments import (
    PLACING,
    call_arguments,
    fits,
    require_positions,
    unpadded,
)
from repo_interp.values import shortened

TOLERANCE = 1e-3
"""Change of logits, relative to the largest one, that counts as rounding in any precision."""
LEAK_STEPS = 4
"""The same for leaks in half precision, in steps of the least precise weights. Hidden tokens change
none of a document's sums, except in experts (MoE), which sum tokens of several documents.
"""
DIFFERENCE_STEPS = 16
"""The same for differences: the sums of a single document run in another order. Trained models
showed up to 3 steps, random ones of 2 to 32 layers up to 13. A larger difference still counts as
rounding if it is less than twice the effect of rounding the document's embeddings differently, for
instance if other experts are chosen.
"""
DRAWS = 4
"""Number of roundings of embeddings to try."""
_TEXTS = {
    "row": ("row of the batch", "1"),
    "start": ("first token in the row", "tokens"),
    "length": ("tokens of the document", "tokens"),
    "first_position": ("position of its first token", "positions"),
    "leak": ("largest change of its logits by tokens of other documents", "1"),
    "difference": ("largest difference of its logits from those of the document alone", "1"),
}
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of kernels with the ends of documents, for the concatenated rows."""


class _Document(NamedTuple):
    """Tokens of a row from `start` to before `end`."""

    row: int
    start: int
    end: int
    number: int
    """Index of the document in its row."""

    @property
    def place(self) -> tuple[int, slice]:
        """Indices of the document's tokens in the batch."""
        return self.row, slice(self.start, self.end)

    @property
    def name(self) -> str:
        """Name of the document in findings."""
        return f"row {self.row}, tokens {self.start} to {self.end - 1}"


@dataclass(frozen=True)
class _Call:
    """The user's call of a model."""

    decoder: Decoder
    arguments: Mapping[str, Any]
    """All arguments but the tokens."""

    def logits(
        self, tokens: Int[Tensor, "row token"], valid: Bool[Tensor, "row token"]
    ) -> Float[Tensor, "row token token_id"]:
        """Compute the logits of `tokens`; InputError if the model cannot run, or has no logits."""
        name, mask = type(self.decoder.owner).__name__, self.arguments.get("attention_mask")
        several = ", whose attention_mask is a dict" if isinstance(mask, Mapping) else ""
        with as_input_errors(f"{name} cannot run this batch{several}"):
            found = self.decoder.owner(input_ids=tokens, **self.arguments).logits
        # float32, since differences in half precision would be rounded again.
        found = found.float()
        finite = found.isfinite().all(-1) | ~valid
        if not bool(finite.all()):
            row, token = (~finite).nonzero()[0].tolist()
            raise NotFinite(f"logits of {name} at token {token} of row {row} are NaN or infinite")
        return found


def verify_batch(model: nn.Module, batch: Mapping[str, Any]) -> xr.DataTree:
    """Test whether documents of a batch start at position 0 and see no other document.

    The test runs the call `model(**batch)` of a training step, without dropout. The call makes a
    cache if the batch has `use_cache=True`, or if the batch does not state it and a model in
    training mode makes one by its configuration. (In evaluation mode the configuration says nothing
    about training.)

    Args:
        model: Bridge, Hugging Face model or `Decoder`, in evaluation or training mode.
        batch: Arguments of the model from a collator: `input_ids` [row, token], and
            `attention_mask`, `position_ids` ([row, token], or [axis, row, token] with images), or
            arguments of kernels, such as `cu_seq_lens_q`. `labels` are not used.

    Returns:
        One entry per document. The attribute `findings` has one line per finding, and is empty if
        there are none. The attribute `documents_from` names the arguments that give the starts of
        documents; "none": every row counts as one document.

    Raises:
        InputError: The batch lacks `input_ids`, an argument has another name or shape than the
            model's, or the model cannot run the batch.
        NotFinite: Logits are NaN or infinite.
    """
    if isinstance(model, Mapping) and isinstance(batch, nn.Module):
        raise InputError("verify_batch takes the model first, then the batch")
    decoder = as_decoder(model)
    given = call_arguments(decoder, batch)
    tokens = given.pop("input_ids")
    valid = unpadded(given.get("attention_mask"), tokens)
    call, stated = _Call(decoder, given), given.get("position_ids")
    require_positions(decoder, stated, valid)
    with torch.no_grad(), _without_dropout(decoder):
        with _token_index(decoder, tokens) as counted:
            whole = call.logits(tokens, valid)
        positions = _by_axis(counted[0] if stated is None else stated, tokens)
        starts, told_by = _starts(given, tokens)
        documents = _documents(positions, valid, starts)
        leaks = _leaks(call, whole, documents, tokens, valid)
        alone = [_Call(decoder, _alone(given, positions, document)) for document in documents]
        differences = []
        for document, call_alone in zip(documents, alone, strict=True):
            some = tokens[document.place][None]
            change = (call_alone.logits(some, some >= 0)[0] - whole[document.place]).abs().max()
            differences.append(float(change))
        step, scale = _step(decoder), float(whole[valid].abs().max())
        largest_leak = max(TOLERANCE, LEAK_STEPS * step) * scale
        remedy = ""
        if max(leaks) > largest_leak and given.get("use_cache") is not False:
            uncached = _Call(decoder, given | {"use_cache": False})
            without = uncached.logits(tokens, valid)
            if max(_leaks(uncached, without, documents, tokens, valid)) <= largest_leak:
                remedy = "; a call without a cache (use_cache=False) keeps it apart"
        differs = [
            difference > max(TOLERANCE, DIFFERENCE_STEPS * step) * scale
            and difference > 2 * _rounding(call_alone, tokens[document.place][None], step)
            for difference, call_alone, document in zip(differences, alone, documents, strict=True)
        ]
    findings = _of_positions(decoder, documents, positions, stated is not None)
    # A mask of pairs may hide more than other documents, or less than the model's window does.
    reasons = "its positions" + " or its mask" * (
        getattr(given.get("attention_mask"), "ndim", 4) == 4
    )
    if decoder.length_matters:
        reasons += ", or at frequencies that depend on the longest document"
    for document, leak, difference, is_other in zip(
        documents, leaks, differences, differs, strict=True
    ):
        if leak > largest_leak:
            findings.append(
                f"{document.name}: the document sees others, whose tokens change its logits by up "
                f"to {leak:.2g} (the largest logit is {scale:.2g}){remedy}"
            )
        # A leak also causes a difference, which needs no separate finding.
        elif is_other:
            findings.append(
                f"{document.name}: other documents of the row change nothing, yet its logits "
                f"differ by up to {difference:.2g} from those of the document alone (the largest "
                f"logit is {scale:.2g}); look at {reasons}"
            )
    columns = (
        *zip(*((row, start, end - start) for row, start, end, _ in documents), strict=True),
        [int(positions[0, document.row, document.start]) for document in documents],
        leaks,
        differences,
    )
    audited = xr.Dataset(
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
    return xr.DataTree(audited)


def _by_axis(positions: Tensor, tokens: Tensor) -> Int[Tensor, "axis row token"]:
    """Return positions with an axis of axes: one for text, three with images."""
    shape = (-1, len(tokens), tokens.shape[1])
    return (positions if positions.ndim == 3 else positions[None]).expand(shape)


@contextmanager
def _without_dropout(decoder: Decoder) -> Iterator[None]:
    """Set evaluation mode, in the precision of the user's call."""
    kinds = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        entered = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        stack.enter_context(at_rest(decoder))
        # `at_rest` ends autocast, which chooses kernels too.
        for kind, dtype in entered:
            stack.enter_context(torch.autocast(kind, dtype))
        yield


def _step(decoder: Decoder) -> float:
    """Relative step of the least precise numbers in the model's computation."""
    computed = {weight.dtype for weight in decoder.owner.parameters()}
    computed |= {
        torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda", "mps")
        if torch.is_autocast_enabled(kind)
    }
    # Weights of 8 bits are unpacked before use, so their precision does not count.
    return max(
        torch.finfo(dtype).eps
        for dtype in {*computed, torch.float32}
        if dtype.is_floating_point and dtype.itemsize > 1
    )


@contextmanager
def _token_index(decoder: Decoder, tokens: Tensor) -> Iterator[list[Tensor]]:
    """Collect the positions that a model counts by itself, in a pass over `tokens`.

    These are the inputs of its rotary modules or its table; without either, the places in a row.
    """
    found: list[Tensor] = []

    def note(module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        names = inspect.signature(module.forward).parameters
        by_name = dict(zip(names, arguments, strict=False)) | keywords
        # Names of this argument in OPT and rotary modules, in our table, and in nn.Embedding
        # (GPT-2)
        for index in map(by_name.get, ("position_ids", "index", "input")):
            if isinstance(index, Tensor) and fits(index, tokens):
                found.append(index)

    table = position_table(decoder.stack)
    with ExitStack() as undo:
        for part in [*rotaries(decoder.stack), *([] if table is None else [table])]:
            undo.callback(part.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield found
    found.append(torch.arange(tokens.shape[1], device=tokens.device)[None])


def _alone(given: Mapping[str, Any], positions: Tensor, document: _Document) -> dict[str, Any]:
    """Arguments for a pass over one document alone."""
    row, tokens = document.place
    length = positions.shape[2:]
    # Token types have a table in the model, like positions.
    beside = {
        name: value[row % len(value), tokens][None]
        for name, value in given.items()
        if name not in PLACING and isinstance(value, Tensor) and value.shape[1:] == length
    }
    # Without positions and mask a model counts from 0; with images it counts by axis.
    here = positions[:, row, tokens][:, None]
    axes = {"position_ids": here - here[..., :1]} if len(here) > 1 else {}
    return {**beside, **axes, "use_cache": False}


def _leaks(
    call: _Call, whole: Tensor, documents: Sequence[_Document], tokens: Tensor, valid: Tensor
) -> list[float]:
    """Largest change of each document's logits by tokens of another document of its row."""
    vocabulary = int(call.decoder.owner.get_input_embeddings().weight.shape[0])
    found = [0.0] * len(documents)
    digits = max(document.number for document in documents).bit_length()
    # Indices of two documents differ in some binary digit: in one of the two passes for this digit,
    # one document keeps its tokens while those of the other are replaced.
    for digit, value in ((digit, value) for digit in range(digits) for value in (0, 1)):
        kept = [document.number >> digit & 1 == value for document in documents]
        replaced = tokens.clone()
        for document, keeps in zip(documents, kept, strict=True):
            if not keeps:
                # The next token of the vocabulary, which always differs.
                replaced[document.place] = (tokens[document.place] + 1) % vocabulary
        changes = (call.logits(replaced, valid) - whole).abs()
        found = [
            max(leak, float(changes[document.place].max())) if keeps else leak
            for document, keeps, leak in zip(documents, kept, found, strict=True)
        ]
    return found


def _rounding(call: _Call, tokens: Tensor, step: float) -> float:
    """Largest change of logits if embeddings are rounded differently; experts may change."""
    valid, drawn = tokens >= 0, torch.Generator().manual_seed(0)
    whole, largest = call.logits(tokens, valid), 0.0

    def round_otherwise(module: nn.Module, arguments: tuple, embedded: Tensor) -> Tensor:
        noise = torch.randn(embedded.shape, generator=drawn, dtype=torch.float32)
        return embedded * (1 + step * noise).to(embedded)

    handle = call.decoder.owner.get_input_embeddings().register_forward_hook(round_otherwise)
    try:
        for _ in range(DRAWS):
            largest = max(largest, float((call.logits(tokens, valid) - whole).abs().max()))
    finally:
        handle.remove()
    return largest


def _starts(
    given: Mapping[str, Any], tokens: Int[Tensor, "row token"]
) -> tuple[Bool[Tensor, "row token"], list[str]]:
    """Find starts of documents by arguments other than positions, and name these arguments."""
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
            # Kernels treat all rows as one; an empty document begins with the next one.
            starts.view(-1)[ends[:-1][ends.diff() > 0].long()] = True
    if "seq_idx" in given:
        numbers = given["seq_idx"]
        if not isinstance(numbers, Tensor) or numbers.shape != tokens.shape:
            raise InputError(f"seq_idx has no shape {list(tokens.shape)}, that of input_ids")
        starts[:, 1:] |= numbers[:, 1:] != numbers[:, :-1]
    mask = given.get("attention_mask")
    # Some kernels number documents in the padding mask.
    if isinstance(mask, Tensor) and mask.ndim == 2 and len(mask[mask != 0].unique()) > 1:
        told_by.append("attention_mask")
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    return starts, told_by


def _documents(
    positions: Int[Tensor, "axis row token"], valid: Tensor, starts: Tensor
) -> list[_Document]:
    """Find runs of valid tokens along which some axis increases, split at `starts`."""
    found: list[_Document] = []
    goes_on = ~starts
    goes_on[:, 1:] &= (positions.diff() > 0).any(0) & valid[:, :-1]
    rows = zip(valid.tolist(), goes_on.tolist(), strict=True)
    for row, (is_valid, continues) in enumerate(rows):
        of_row: list[_Document] = []
        for place in (place for place in range(len(is_valid)) if is_valid[place]):
            if place and continues[place]:
                of_row[-1] = of_row[-1]._replace(end=place + 1)
            else:
                of_row.append(_Document(row, place, place + 1, len(of_row)))
        found += of_row
    return found


def _of_positions(
    decoder: Decoder, documents: Sequence[_Document], positions: Tensor, are_stated: bool
) -> list[str]:
    """Report faults of the positions of documents."""
    found = []
    counts = "" if are_stated else "; the model counts them so by itself: give position_ids"
    # Padding before the first document, which a model counts, only matters for learned vectors.
    is_shifted = are_stated or position_table(decoder.stack) is not None
    for document in documents:
        axes = positions[:, document.row, document.place[1]]
        at = axes[0].tolist()
        if int(axes[:, 0].abs().max()) and (is_shifted or document.number):
            found.append(
                f"{document.name}: the document starts at position {at[0]}; wanted 0{counts}"
            )
        # Within images, axes repeat positions and differ from each other.
        jump = next((place for place, (a, b) in enumerate(pairwise(at)) if b != a + 1), None)
        if jump is not None and len(axes) == 1:
            found.append(
                f"{document.name}: position {at[jump + 1]} of token {document.start + jump + 1} "
                f"follows position {at[jump]}; wanted {at[jump] + 1}"
            )
    return found
