"""Cost of edits of a model in loss or in answers, relative to the unchanged model.

    loss_eu      mean of -log p over the tokens of unit u in a band, under edit e       nats
    change_e     mean over u of loss_eu - loss_0u           0: the unchanged model
    interval     Student's, of the differences of the units: paired

A unit is a prompt; a single text is cut into blocks of tokens as units, since neighboring tokens
are not independent. A band is a range of token numbers in the prompt. A control is another edit
that should cost less, such as the same edit of other heads; `beyond_control` is the paired
difference of the two. In prompts with answers, only the tokens of the answer count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Float
from torch import nn

from repo_interp.analysis.coercion import Prompts
from repo_interp.analysis.computed import store_of
from repo_interp.errors import InputError, quoted
from repo_interp.experiments.grid import Grid
from repo_interp.intervals import half_interval
from repo_interp.measures.labels import described_group
from repo_interp.models.decoder import as_decoder
from repo_interp.models.side_by_side import BatchSize
from repo_interp.plugins.edits.edit_digest import edit_digest
from repo_interp.plugins.edits.token_losses import (
    PromptLosses,
    checked_prompts,
    losses_of_batch,
    prompt_batches,
)
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.store import Progress
from repo_interp.tasks import Prompt
from repo_interp.tasks.prompt import digest
from repo_interp.values import Tokens, checked

Edit = (
    AbstractContextManager[Any]
    | Callable[[], AbstractContextManager[Any]]
    | Sequence[AbstractContextManager[Any] | Callable[[], AbstractContextManager[Any]]]
)
"""A reusable context manager, a function that makes one, or several to enter in order."""
PLAIN = "as it is"
BLOCK = 32
"""Default number of tokens of a block of a single text."""
_TEXTS = {
    "loss": "loss of a unit: a prompt, or a block of a text [nat]",
    "answer": "1 where all tokens of the answer are the likeliest ones",
    "mean_loss": "loss [nat]",
    "change": "change of the loss by the edit [nat]",
    "change_low": "lower end of the 95 % interval of the change [nat]",
    "change_high": "upper end of the 95 % interval of the change [nat]",
    "control_change": "change of the loss by the control [nat]",
    "control_change_low": "lower end of the 95 % interval of the control's change [nat]",
    "control_change_high": "upper end of the 95 % interval of the control's change [nat]",
    "beyond_control": "change of the loss by the edit less that by its control [nat]",
    "beyond_control_low": "lower end of the 95 % interval of the difference [nat]",
    "beyond_control_high": "upper end of the 95 % interval of the difference [nat]",
    "answers": "share of prompts whose answer is the likeliest",
    "units": "units that have tokens in the band",
}


def try_edits(
    model: nn.Module,
    prompts: Prompts,
    edits: Mapping[str, Edit],
    *,
    controls: Mapping[str, Edit] | None = None,
    bands: Sequence[tuple[int, int]] | None = None,
    block: int = BLOCK,
    batch_size: BatchSize | Literal["auto"] = "auto",
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure the cost of edits: the change of the loss of texts, or of answers.

        iv = ri.interventions
        found = ri.try_edits(model, text, {
            "window": iv.hidden_keys(model, lambda pair: pair.distance >= 64),
            "window, sinks": iv.hidden_keys(
                model, lambda pair: (pair.distance >= 64) & (pair.key >= 4)),
        }, bands=[(0, 127), (128, 255)])
        ri.plots.edit_costs(found)

    Args:
        model: Bridge or model.
        prompts: Prompts in any form that `analysis.coercion` takes. If all have generated tokens,
            only the loss of these counts.
        edits: Edits by name: a context manager of `ri.interventions` or another reusable one, which
            is entered once per batch; a function without arguments that makes one; or several.
        controls: By name of an edit, another edit to compare it with.
        bands: First and last token of every band, both included; None: one band of all tokens.
        block: Length in tokens of the units into which a single text is cut.
        batch_size: Number of prompts per forward pass, its limits, or "auto".
        store: Directory that keeps finished batches of every edit, so that a repeated call continues
            after an interruption; it is emptied at the end. None: nothing is kept.
        progress: Called with finished points and all points; None: a bar on standard error.

    Returns:
        `change [edit, band]` in nats with its 95 % interval `change_low` to `change_high`; the
        first edit, "as it is", is the unchanged model. With `controls` also `control_change` and
        `beyond_control` with intervals, NaN for an edit without a control. `mean_loss`, `loss
        [edit, band, block, prompt]` of the units, and `units [band]`, their number. For prompts
        with answers also `answers [edit]`, the share of right answers.

    Raises:
        InputError: Prompts, bands or names do not fit, or an edit cannot be entered again.
        NotFinitePrediction: A loss is NaN or infinite.
    """
    decoder = as_decoder(model)
    prompt_list = checked_prompts(decoder, prompts)
    block = checked(block, Tokens, "the tokens of a block")
    answered = all(prompt.generated for prompt in prompt_list)
    limits = _limits(bands, prompt_list, answered)
    named = _checked_edits(edits, controls or {})
    size = (
        block
        if len(prompt_list) == 1 and not answered
        else max(len(one.tokens) for one in prompt_list)
    )
    cut = prompt_batches(decoder, prompt_list, batch_size)
    by_numbers = {batch.numbers: batch for batch in cut}
    contexts = list(named.values())

    def point(numbers: Sequence[int], edit: int) -> Mapping[str, Any]:
        with entered(contexts[edit]):
            losses = losses_of_batch(decoder, prompt_list, by_numbers[tuple(numbers)])
        units = [
            _units(one, prompt_list[number], limits, size, answered)
            for one, number in zip(losses, numbers, strict=True)
        ]
        right = [
            float(all(one.likeliest[list(prompt_list[number].generated)]))
            for one, number in zip(losses, numbers, strict=True)
        ]
        longest = max(unit.shape[-1] for unit in units)
        padded = [
            np.pad(unit, ((0, 0), (0, longest - unit.shape[-1])), constant_values=np.nan)
            for unit in units
        ]
        return {"loss": np.stack(padded, -1).tolist(), "answer": right}

    question = {
        "edits": {name: edit_digest(edit) for name, edit in named.items()},
        "prompts": digest(prompt_list),
        "bands": limits,
        "block": size,
        "batches": [batch.numbers for batch in cut],
    }
    grid = Grid(
        {"edit": range(len(named))},
        point,
        {"loss": ("band", "block", "prompt"), "answer": ("prompt",)},
        [batch.numbers for batch in cut],
    )
    kept = store_of(decoder, prompt_list[0], question, store)
    with steps(Console(stderr=True)) as step:
        tell = partial(step, "trying edits") if progress is None else progress
        measured = grid.compute(kept, tell)
    bands_named = ["answer"] if answered else [f"{first}-{last}" for first, last in limits]
    measured = measured.assign_coords(edit=[*named], band=bands_named)
    found = _compared(measured, [PLAIN, *edits], controls or {}, answered)
    kept.clear()
    unit = "prompts" if size != block or len(prompt_list) > 1 else f"blocks of {block} tokens"
    return found.assign_attrs(unit=unit, prompts=len(prompt_list))


@contextmanager
def entered(edit: Any) -> Iterator[None]:
    """Apply an edit, or several in order, inside a `with` block.

    Args:
        edit: Edit, as for `try_edits`.

    Yields:
        None.
    """
    with ExitStack() as stack:
        for one in edit if isinstance(edit, list | tuple) else [edit]:
            stack.enter_context(one if hasattr(one, "__enter__") else one())
        yield


def _checked_edits(edits: Any, controls: Any) -> dict[str, Any]:
    """Edits and controls by unique names, the unchanged model first."""
    for given, what in ((edits, "edits"), (controls, "controls")):
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise InputError(f"{what} are contexts by name; got {quoted(given)}")
    if not edits:
        raise InputError("no edit was given; give some by name")
    if PLAIN in edits:
        raise InputError(f"{PLAIN!r} is the name of the model without an edit; choose another")
    if missing := [name for name in controls if name not in edits]:
        raise InputError(f"there is a control of {missing[0]!r} and no such edit; name its edit")
    named = {PLAIN: (), **edits, **{_control_of(name): one for name, one in controls.items()}}
    for name, edit in named.items():
        for one in edit if isinstance(edit, list | tuple) else [edit]:
            # A context of @contextmanager can be entered only once.
            if hasattr(one, "gen") or not (hasattr(one, "__enter__") or callable(one)):
                raise InputError(
                    f"{name!r} is entered once for every batch, and {quoted(one, 60)} is no "
                    "context that may be entered again; give a function that makes it, "
                    "lambda: ..."
                )
            if not hasattr(one, "__enter__") and (needs := _arguments(one)):
                raise InputError(
                    f"the function of {name!r} is called without arguments, and it needs "
                    f"{', '.join(needs)}; give one that has the model already, "
                    "lambda: ri.interventions.frozen(model, layer=1)"
                )
    return named


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the required arguments of a function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []  # some built-in functions have no signature
    gathers = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in gathers]


def _control_of(name: str) -> str:
    return f"control of {name}"


def _limits(bands: Any, prompts: Sequence[Prompt], answered: bool) -> list[tuple[int, int]]:
    """First and last tokens of the bands."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    if bands is None:
        return [(0, longest - 1)]
    if answered:
        raise InputError("bands are of texts, and the answers of these prompts are judged")
    found = []
    wanted = "a band is the numbers of its first and last token, (0, 255)"
    try:
        pairs = [tuple(band) for band in bands]
    except TypeError:
        raise InputError(f"{wanted}; got {quoted(bands)} as bands") from None
    for band in pairs:
        pair = checked(band, tuple[int, ...], "a band")
        if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
            raise InputError(f"{wanted}; got {quoted(band)}")
        if max(1, pair[0]) >= longest or pair[1] == 0:
            raise InputError(
                f"the band {pair[0]}-{pair[1]} has no token with a loss: prompts have up to "
                f"{longest} tokens, and the first one is not predicted"
            )
        found.append(pair)
    if not found:
        raise InputError("no band was given; leave bands out for all tokens")
    return found


def _units(
    losses: PromptLosses,
    prompt: Prompt,
    limits: Sequence[tuple[int, int]],
    size: int,
    answered: bool,
) -> Float[np.ndarray, "band block"]:
    """Mean losses of the units of a prompt; NaN where a unit has no token in a band."""
    if answered:
        return np.array([[losses.loss[list(prompt.generated)].mean(dtype=np.float64)]])
    count = len(prompt.tokens)
    blocks = max(-(-(last + 1 - first) // size) for first, last in limits)
    found = np.full((len(limits), min(blocks, -(-count // size))), np.nan)
    for band, (first, last) in enumerate(limits):
        for number, start in enumerate(range(first, min(last + 1, count), size)):
            some = losses.loss[start : min(start + size, last + 1)].astype(np.float64)
            if (known := some[np.isfinite(some)]).size:
                found[band, number] = known.mean()
    return found


def _compared(
    measured: xr.Dataset, names: Sequence[str], controls: Mapping[str, Any], answered: bool
) -> xr.Dataset:
    """Means and paired differences of the units of all edits."""
    loss = measured["loss"]
    plain = loss.sel(edit=PLAIN)
    of_edits = loss.sel(edit=names)
    # An edit without a control gets NaN.
    of_controls = loss.reindex(edit=[_control_of(name) for name in names]).assign_coords(edit=names)
    differences = {
        "change": of_edits - plain,
        "control_change": of_controls - plain,
        "beyond_control": of_edits - of_controls,
    }
    values: dict[str, Any] = {
        "loss": of_edits,
        "mean_loss": of_edits.mean(("block", "prompt")),
        "units": plain.notnull().sum(("block", "prompt")),
    }
    for name, each in differences.items() if controls else [("change", differences["change"])]:
        units = each.transpose("edit", "band", "block", "prompt").values
        units = units.reshape(*units.shape[:2], -1)
        mean, half = (np.full(units.shape[:2], np.nan) for _ in range(2))
        for place in np.ndindex(*units.shape[:2]):
            if (known := units[place][np.isfinite(units[place])]).size:
                mean[place], half[place] = known.mean(), half_interval(known)
        for end, value in (("", mean), ("_low", mean - half), ("_high", mean + half)):
            values[f"{name}{end}"] = (("edit", "band"), value)
    if answered:
        values["answers"] = measured["answer"].sel(edit=names).mean("prompt")
    order = [name for name in _TEXTS if name in values]
    group = xr.Dataset({name: values[name] for name in order}, {"edit": list(names)})
    return described_group(group, _TEXTS)
