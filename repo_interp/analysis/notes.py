"""Remarks on a run that a reader needs in addition to its numbers, one line per remark.

They are printed before an analysis begins, and kept in the run as `notes`.

This module knows why a measurement may say less than it seems to, and nothing about how it is
made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from repo_interp.analysis.gaps import Gaps
from repo_interp.errors import Note
from repo_interp.measures.statistics import Measure
from repo_interp.models.changes import changes
from repo_interp.models.decoder import Decoder
from repo_interp.models.rescaling import scaling_remark
from repo_interp.tasks.prompt import Prompt


class Remark(Note):
    """A warning that the run's `notes` hold too."""


class RoundedPositions(Remark):
    """Learned positions are measured in a precision that rounds them."""


class SilentMeasure(Remark):
    """A measure has no result in any layer."""


def notes_on(
    decoder: Decoder,
    prompts: Sequence[Prompt] = (),
    measures: Sequence[Measure] = (),
    changed: str | None = None,
    gaps: Gaps | None = None,
) -> tuple[str, ...]:
    """Return remarks on measuring prompts on a model.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts of the analysis.
        measures: Measures of the analysis.
        changed: Changes of the model since it was loaded, if known; None: they are determined here.
        gaps: Gaps of the measures; None: no remark on gaps.

    Returns:
        One line per remark; empty where there is none.
    """
    notes = []
    origin, trained = decoder.origin, decoder.training_length
    changed = changes(decoder) if changed is None else changed
    if changed:
        notes.append(
            f"the model is not as it was loaded or configured ({changed}): what is measured "
            "is what it computes now"
        )
    rounded, padded = rounded_positions(decoder), padded_prompts(decoder, prompts)
    notes += [remark for remark in (rounded, padded) if remark is not None]
    of_model, of_positions = decoder.dtype, decoder.positions_dtype
    if of_positions != of_model:
        named = [str(dtype).removeprefix("torch.") for dtype in (of_model, of_positions)]
        notes.append(
            f"computed in {named[0]}, learned positions in {named[1]}: what they are "
            "computed from is rounded, they are not"
        )
    if origin is not None and (idle := scaling_remark(decoder, origin.scaling)):
        notes.append(idle)
    notes += _on_position_ids(prompts)
    lengths = [len(prompt.tokens) for prompt in prompts]
    following = next((layer for layer in decoder.layers if layer.follows_length), None)
    if (
        following is not None
        and len({tuple(following.frequencies_at(length).flatten().tolist()) for length in lengths})
        > 1
    ):
        notes.append(
            "frequencies depend on the length of a pass, and prompts of this run have "
            "different ones: `components` gives no frequency "
            "for all (NaN); `prompt_frequency` has those of every prompt"
        )
    longer = sum(length > trained for length in lengths)
    if longer:
        which = "the prompt is" if len(lengths) == 1 else f"{longer} of {len(lengths)} prompts are"
        notes.append(
            f"{which} longer (up to {max(lengths)} tokens) than the training length, "
            f"{trained} tokens"
        )
    repeated = len(prompts) - len({(prompt.tokens, prompt.position_ids) for prompt in prompts})
    if repeated:
        notes.append(
            f"{repeated} of {len(prompts)} prompts repeat others: errors and intervals count them "
            "as further prompts, and are too narrow"
        )
    return (*notes, *(() if gaps is None else gaps.notes))


def _on_position_ids(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Explain how position ids that do not increase by 1 are read."""
    for several, words in (
        (True, "for documents, which do not see each other; say documents=1 where it is one text"),
        (False, "for one text; say documents=N where every jump begins one of N documents"),
    ):
        some = [
            number
            for number, prompt in enumerate(prompts)
            if prompt.jumps and (prompt.document_count > 1) == several
        ]
        if some:
            more = f" and of {len(some) - 1} more" if len(some) > 1 else ""
            yield f"position ids of prompt {some[0]}{more} do not count on, and are taken {words}"


def run_notes(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    measures: Sequence[Measure],
    changed: str,
    gaps: Gaps | None = None,
) -> tuple[str, ...]:
    """Return the attribute `notes` of a run: remarks of loading, then `notes_on`.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts of the analysis.
        measures: Measures of the analysis.
        changed: Changes of the model since it was loaded.
        gaps: Gaps of the measures; None: no remark on gaps.

    Returns:
        One line per remark.
    """
    origin = decoder.origin
    remarks = (f"config.json {origin.remarks}",) if origin is not None and origin.remarks else ()
    return (*remarks, *notes_on(decoder, prompts, measures, changed, gaps))


def rounded_positions(decoder: Decoder) -> str | None:
    """Return a remark where learned positions are computed in 16 bits.

    Args:
        decoder: Decoder of the model.

    Returns:
        The remark, or None.
    """
    dtype = decoder.positions_dtype
    # A token index is exact in 16 bits up to 256 or 2,048, but learned positions are fractions
    if dtype.itemsize > 2 or not decoder.learned_layers:
        return None
    return (
        f"positions are rounded in {str(dtype).removeprefix('torch.')}; measure them in "
        "float32 (positions_dtype)"
    )


def padded_prompts(decoder: Decoder, prompts: Sequence[Prompt]) -> str | None:
    """Return a remark where prompts begin or end in several pad tokens.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts of the analysis.

    Returns:
        The remark, or None.
    """
    owners = (decoder.tokenizer, decoder.owner.config)
    pads = {getattr(owner, "pad_token_id", None) for owner in owners} - {None}
    for number, prompt in enumerate(prompts):
        # One such token may be BOS or EOS, if the padding has no separate token
        for ends, tokens in (("ends", prompt.tokens[::-1]), ("begins", prompt.tokens)):
            if tokens[0] in pads and tokens[:2] == 2 * tokens[:1]:
                count = len([*takewhile(tokens[0].__eq__, tokens)])
                return (
                    f"prompt {number} {ends} in {count} pad tokens ({tokens[0]}), which are measured "
                    "like others; leave them out, or give what the tokenizer returns, with its "
                    "attention_mask"
                )
    return None
