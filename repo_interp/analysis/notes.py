"""What a reader of a run must know beside its numbers, one line each: said before it begins, and kept in the run as `notes`.

Knows what makes a measurement say less than it seems to; knows nothing about how it is made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from torch import nn

from repo_interp.errors import InputError
from repo_interp.measures.statistics import Measure, as_measure
from repo_interp.models.provenance import length_trained, loaded_from, positions_dtype
from repo_interp.models.reposition import attentions, layout
from repo_interp.positions.layouts import LEARNED, SCHEMES, format_layout
from repo_interp.tasks.prompt import Prompt

_BYTES_PER_TOKEN = 150
"""Of a prompt: its token as a number and as text."""


class RoundedPositions(UserWarning):
    """Learned positions are measured in a precision that rounds them."""


def notes_on(bridge: nn.Module, prompts: Sequence[Prompt] = (), measures: Sequence[Measure] = ()) -> tuple[str, ...]:
    """Lines about measuring `measures` of `prompts` on a repositioned model or bridge; empty where there is nothing to say."""
    schemes, trained, notes = layout(bridge), length_trained(bridge), []
    rounded = rounded_positions(bridge)
    if rounded is not None:
        notes.append(rounded)
    of_model, of_positions = next(bridge.parameters()).dtype, positions_dtype(bridge)
    if of_positions != of_model:
        named = [str(dtype).removeprefix("torch.") for dtype in (of_model, of_positions)]
        notes.append(
            f"computed in {named[0]}, learned positions in {named[1]}: what they are computed from is rounded, they are not"
        )
    origin = loaded_from(bridge)
    if origin is not None and origin.scaling and all(attention.frequencies is None for attention in attentions(bridge)):
        notes.append(f"scaling ({origin.scaling}) changes nothing: no layer of the layout {format_layout(schemes)} rotates")
    lengths = [len(prompt.tokens) for prompt in prompts]
    longer = sum(length > trained for length in lengths)
    if longer:
        which = "the prompt is" if len(lengths) == 1 else f"{longer} of {len(lengths)} prompts are"
        notes.append(f"{which} longer (up to {max(lengths)} tokens) than the training length, {trained} tokens")
    for measure in measures:
        wanted = as_measure(measure).schemes
        if wanted and set(schemes) <= set(SCHEMES) and not set(schemes) & set(wanted):
            notes.append(
                f"{measure.name} says nothing here: it is about {', '.join(wanted)}, and the layout is {format_layout(schemes)}"
            )
    return tuple(notes)


def rounded_positions(bridge: nn.Module) -> str | None:
    """What to say where learned positions are computed in 16 bits; None where they are not."""
    dtype = positions_dtype(bridge)
    if dtype.itemsize > 2 or not set(layout(bridge)) & set(LEARNED):
        return None
    return f"positions are rounded in {str(dtype).removeprefix('torch.')}; measure them in float32 (positions_dtype)"


def require_memory(needed: float, what: str) -> None:
    """Raise InputError where `what` needs more bytes than the machine has."""
    present = _memory()
    if needed > present:
        raise InputError(
            f"{what} would need about {needed / 2**30:,.0f} GiB of memory, and there are {present / 2**30:,.0f}; "
            "ask for fewer or shorter prompts"
        )


def require_room_for_prompts(count: int, length: int) -> None:
    """Raise InputError where `count` prompts of `length` tokens do not fit into memory."""
    require_memory(_BYTES_PER_TOKEN * count * length, f"{count:,} prompts of {length:,} tokens")


def require_memory_for_pass(bridge: nn.Module, tokens: int, prompts: int) -> None:
    """Raise InputError where a forward pass of `prompts` prompts of `tokens` tokens side by side does not fit into memory.

    What a layer holds at once: the residual stream, queries, keys, values and its feed-forward part.
    """
    config, weight = next(attentions(bridge)).config, next(bridge.parameters())
    if weight.device.type == "cpu":
        per_token = weight.dtype.itemsize * (8 * config.hidden_size + 4 * config.intermediate_size)
        require_memory(tokens * prompts * per_token, f"a pass of {prompts} prompts of {tokens:,} tokens side by side")


def _memory() -> float:
    """Bytes of memory of the machine, or of the container that this process may use."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            return min(physical, float(limit.read().replace("max", "inf")))
    except (OSError, ValueError):
        return physical
