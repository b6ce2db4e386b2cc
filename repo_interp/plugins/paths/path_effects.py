"""Effects of sets of direct paths on the difference of two logits, many sets in one pass.

    change_s = logit difference without the paths of set s - logit difference of the model

A pass measures several sets, each on a copy of the prompts (`ablate_paths(sets=)`). It starts just
before the first layer that receives a path, because earlier layers are not affected: their outputs
come from one undisturbed pass. Source: path patching of Wang et al. (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from repo_interp.analysis.coercion import Prompts
from repo_interp.errors import InputError, quoted
from repo_interp.experiments.responses import batches_by_length
from repo_interp.intervals import half_interval
from repo_interp.measures.labels import described_group
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import intervention
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.resuming import Recording, record_pass, resume_pass
from repo_interp.models.side_by_side import WORTHWHILE, BatchSize
from repo_interp.plugins.edits.token_losses import checked_prompts
from repo_interp.plugins.paths.answers import Answer, asked_tokens, compared_tokens
from repo_interp.plugins.paths.direct_path import added_outputs
from repo_interp.plugins.paths.paths import (
    SITES,
    Outputs,
    Path,
    PathEdit,
    Route,
    Sent,
    checked_route,
)
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.store import Progress
from repo_interp.tasks.prompt import require_index

_TEXTS = {
    "change": "change of the logit difference without the paths [logits]",
    "change_low": "lower end of the 95 % interval of the change [logits]",
    "change_high": "upper end of the 95 % interval of the change [logits]",
    "change_by_prompt": "change of the logit difference without the paths [logits]",
    "logit_difference": "logit of the answer less that of the other [logits]",
}


@torch.no_grad()
def path_effects(
    model: nn.Module,
    prompts: Prompts,
    sets: Mapping[str, Sequence[Path]],
    for_: Answer,
    against: Answer,
    *,
    into: str | Sequence[str] = SITES[:3],
    means: Outputs | None = None,
    batch_size: BatchSize | Literal["auto"] = "auto",
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure how removing sets of direct paths changes the logit difference of two answers.

        paths = {f"L{layer} H{head}": [((layer, head), (23, 3), "queries")]
                 for layer in range(15) for head in range(9)}
        found = ri.path_effects(model, texts, paths, answers, others)
        print(found["change"].to_series().nsmallest(5))

    Args:
        model: Bridge or model.
        prompts: Prompts in any form that `analysis.coercion` takes, without position ids; the answer is
            read after the last token, or instead of the first generated one.
        sets: By name, paths to remove together: (sender, receiver) for all sites in `into`, or
            (sender, receiver, site), as for `ablate_paths`.
        for_: Right answer: a text of one token or its number, for all prompts or for each.
        against: The answer to compare it with.
        into: Sites of paths without a site: some of "queries", "keys", "values", "positions".
        means: Outputs that replace the senders' for the receivers: `ri.head_means(model, prompts)`;
            None: zeros.
        batch_size: Number of prompts per batch, its limits, or "auto"; every set adds a copy of the
            batch.
        progress: Called with finished and all pairs of set and prompt; None: a bar on standard
            error.

    Returns:
        `change [set]` in logits with its paired 95 % interval over prompts, `change_low` and
        `change_high`; `change_by_prompt [set, prompt]`; and `logit_difference [prompt]` of the
        unchanged model.

    Raises:
        InputError: As for `ablate_paths`, there is no set, an answer is no token of the model, or
            both are the same in a prompt.
    """
    decoder = as_decoder(model)
    prompt_list = checked_prompts(decoder, prompts)
    require_index(prompt_list)
    if not isinstance(sets, Mapping) or not sets:
        raise InputError(f"sets of paths are lists by name, at least one; got {quoted(sets)}")
    routes = [[checked_route(path, into) for path in paths] for paths in sets.values()]
    right, wrong = compared_tokens(decoder, for_, against, len(prompt_list))
    rows, added = (
        torch.tensor(asked_tokens(prompt_list), device=decoder.device),
        added_outputs(decoder),
    )
    sending = PathEdit(decoder, routes, added, means).sending  # refuses bad paths before any pass
    plain, changed = np.empty(len(prompt_list)), np.empty((len(sets), len(prompt_list)))
    with steps(Console(stderr=True)) as step:
        tell = partial(step, "removing paths") if progress is None else progress
        done, total = 0, changed.size
        for numbers in batches_by_length(decoder, prompt_list, batch_limit(decoder, batch_size)):
            tokens = [torch.tensor(prompt_list[number].tokens) for number in numbers]
            padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(decoder.device)
            some = torch.tensor(numbers, device=decoder.device)
            read = partial(_differences, decoder, rows[some], right[some], wrong[some])
            recording, sent = _recorded(decoder, padded, sending)
            plain[numbers] = read(recording.last_hidden)[0]
            for places in _together(routes, padded):
                copies = [routes[place] for place in places for _ in numbers]
                edit = PathEdit(decoder, copies, added, means)
                # Sets without a path change nothing, and run no layer
                hidden = recording.last_hidden.repeat(len(places), 1, 1)
                if edit.runs:
                    hidden = _resumed(decoder, edit, recording, sent, len(places))
                changed[np.ix_(places, numbers)] = read(hidden)
                done += len(copies)
                tell(done, total)
    change = changed - plain
    mean, half = change.mean(1), half_interval(change)
    values: dict[str, Any] = {
        "change": ("set", mean),
        "change_low": ("set", mean - half),
        "change_high": ("set", mean + half),
        "change_by_prompt": (("set", "prompt"), change),
        "logit_difference": ("prompt", plain),
    }
    coordinates = {"set": list(sets), "prompt": np.arange(len(prompt_list))}
    return described_group(values, _TEXTS, coordinates).assign_attrs(prompts=len(prompt_list))


def _differences(
    decoder: Decoder, rows: Tensor, right: Tensor, wrong: Tensor, hidden: Tensor
) -> np.ndarray:
    """Logit differences [copy, prompt]; the batch has all prompts of a copy one after the other."""
    read = []
    for copy in hidden.split(len(rows)):
        logits = next_token_logits(decoder, copy[torch.arange(len(rows)), rows]).double()
        read.append((logits.gather(1, right[:, None]) - logits.gather(1, wrong[:, None]))[:, 0])
    return torch.stack(read).cpu().numpy()


def _recorded(
    decoder: Decoder, tokens: Tensor, sending: set[int]
) -> tuple[Recording, dict[int, Sent]]:
    """Record the undisturbed pass, and the outputs of sending layers in it."""
    sent: dict[int, Sent] = {}
    with ExitStack() as hooks:
        for attention in decoder.attentions(sending):
            keep = partial(sent.__setitem__, attention.layer_idx)
            hooks.enter_context(PathEdit.sent_by(decoder, attention, keep))
        return record_pass(decoder, tokens), sent


def _together(routes: Sequence[Sequence[Route]], tokens: Tensor) -> Iterator[list[int]]:
    """Yield the numbers of sets that share a pass: their first receivers are in one layer."""
    firsts = [min((route[1][0] for route in paths), default=-1) for paths in routes]
    senders = [min((route[0] for route in paths), default=(-1, -1)) for paths in routes]
    # Sorted by sender within a layer: a pass recomputes the outputs of each of its sending layers.
    order = sorted(range(len(routes)), key=lambda place: (firsts[place], senders[place]))
    size = max(1, WORTHWHILE.get(tokens.device.type, 1) // tokens.numel())
    for first in sorted(set(firsts)):
        of_layer = [place for place in order if firsts[place] == first]
        yield from (of_layer[start : start + size] for start in range(0, len(of_layer), size))


def _resumed(
    decoder: Decoder,
    edit: PathEdit,
    recording: Recording,
    sent: Mapping[int, Sent],
    copies: int,
) -> Tensor:
    """Last hidden states under an edit."""
    # The layer before the first receiver, which runs twice: both runs must not get recorded states
    first = min(edit.runs) - 1
    with intervention(decoder) as undo:
        for attention in decoder.attentions(edit.sending):
            layer = attention.layer_idx
            if layer >= first:
                undo.enter_context(PathEdit.sent_by(decoder, attention, edit.send))
                continue
            _, *tensors = sent[layer]
            plain, given, wrote = (part.repeat(copies, *(1,) * (part.ndim - 1)) for part in tensors)
            edit.send((attention, plain, given, wrote))
        edit.lead(undo)
        return resume_pass(decoder, recording, first, copies)
