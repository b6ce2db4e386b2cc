"""Change of every token's loss when all heads of one kind have frozen positions.

    change       -log p(token | heads of the kind frozen at their mean positions) + log p(token),
                 in nats
    controls     the same for as many other heads with learned positions, drawn at random without
                 repeating a set; mean over draws
    difference   change - controls, token by token

Kinds are groups (`names.GROUPS`) of the kinds of `position_sources` on the same prompts: clocks by
their resolution, readers of words and of segments, and others. Heads that share positions are
frozen together, in controls too. `EVERY` are all heads that learn positions; they, and a kind of
more than half of them, have no controls. `CASES` are RePo's special cases, which change all heads
that learn positions at once: a constant (NoPE), the line fitted to each head's positions, and the
token index (RoPE).

Intervals are Student's 95 % intervals of a ratio: with x_b the sum of changes over the n_b tokens
of block b of B,

    m = sum x_b / sum n_b        s^2 = B / (B - 1)  sum (x_b - m n_b)^2 / (sum n_b)^2

With at least `PROMPTS` prompts a block is a prompt, else a stretch of at least `BLOCK` tokens of a
prompt. Intervals are about other text; the draws show how much other controls would differ. A token
belongs to the first class that fits: generated, a number (its text has a digit), the first of a
line, a copy (the token and its predecessor occur side by side earlier in the prompt), others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import ceil
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.experiments.draws import drawn_sets
from repo_interp.experiments.experiment import (
    QUICK,
    Experiment,
    Plan,
    Progress,
    Unasked,
    require_targets,
)
from repo_interp.experiments.grid import Grid
from repo_interp.experiments.prompt_sets import Windows
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.intervals import student_quantile
from repo_interp.interventions import frozen, linearised, straightened
from repo_interp.measures.fitting import Layers
from repo_interp.measures.kernels.segmentation import INSIDE, STARTS
from repo_interp.measures.labels import described_group
from repo_interp.measures.statistics import Statistics, merge
from repo_interp.models.capture import capture
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.resuming import Recording, record_pass, resume_pass
from repo_interp.models.side_by_side import batches
from repo_interp.plugins.sources.names import GROUP_OF, GROUPS
from repo_interp.plugins.sources.position_sources import PositionSources
from repo_interp.storage.store import Store
from repo_interp.tasks import Prompt, Response
from repo_interp.tasks.prompt.structure import prompt_structure
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, Seed

EVERY = "all heads"
CASES = {
    EVERY: frozen,
    "all heads, straight lines": straightened,
    "all heads, token index": linearised,
}
"""Kinds of all heads, and the changes of their positions; heads of other kinds are frozen."""
CLASSES = ("generated", "numbers", "first of lines", "copies", "others")
"""Classes of tokens; a token belongs to the first that fits."""
PROMPTS = 10
"""Least number of prompts for which every prompt is a block."""
BLOCK = 32
"""Least number of tokens of a block, with fewer prompts."""
AT_ONCE = 256
"""Tokens with logits at a time, since logits over the vocabulary are large."""
Heads = list[tuple[int, int]]


def _side_by_side(decoder: Decoder, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Numbers of the prompts of every pass. A pass has prompts of one length, without padding."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lengths.__getitem__)
    limits = replace(batch_limit(decoder, "auto"), padding=0)
    return [tuple(numbers) for numbers in batches(order, lengths, limits)]


def rows_by_kind(decoder: Decoder, prompts: Sequence[Prompt]) -> list[tuple[str, Heads]]:
    """Find the kind of every set of heads that share learned positions.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts; each costs a forward pass.

    Returns:
        Pairs of a group of kinds and the heads that share their positions.
    """
    measure, parts, shared = PositionSources(), list[Statistics](), dict[int, int]()
    # The marked spans of a prompt; its structure (lines, words and so on) is read from its text.
    named = [
        # The spans of an analysis, so that both find the same kinds
        {**prompt.spans, "generated": prompt.generated}
        | prompt_structure(measure.kinds, len(prompt.tokens), prompt.spans, prompt.token_text)
        for prompt in prompts
    ]
    device = decoder.device

    def receive(spans: Spans, inputs: AttentionInputs) -> None:
        parts.append(measure.observe(inputs, spans))
        assert inputs.positions is not None
        # Heads per row of positions; heads that share a row cannot be frozen separately.
        shared[inputs.layer] = inputs.heads // inputs.positions.shape[1]

    for numbers in _side_by_side(decoder, prompts):
        tokens = torch.tensor([prompts[number].tokens for number in numbers], device=device)
        # Every prompt gets a mask for every span, so that statistics of all prompts have equal
        # columns.
        spans = {name: torch.zeros(tokens.shape, dtype=torch.bool) for name in set().union(*named)}
        for row, number in enumerate(numbers):
            for name, places in named[number].items():
                spans[name][row, list(places)] = True
        valid, receiver = torch.ones_like(tokens, dtype=torch.bool), partial(receive, spans)
        # Kinds are about learned positions, so other layers are not observed.
        capture(decoder, tokens, valid, torch.tensor(numbers), receiver, decoder.learned_layers)
    kind = measure.conclude(merge(parts))["kind"]
    return [
        (
            GROUP_OF[str(kind.sel(layer=layer, head=first).values)],
            [(layer, head) for head in range(first, first + size)],
        )
        for layer, size in shared.items()
        for first in range(0, kind.sizes["head"], size)
    ]


def token_classes(prompt: Prompt) -> list[str]:
    """Classify the tokens of a prompt.

    Args:
        prompt: Prompt.

    Returns:
        One of `CLASSES` for every token.
    """
    # Pairs of a token and its predecessor. The first token gets a pair with ids that do not exist.
    pairs = [(-1, -1), *pairwise(prompt.tokens)]
    structure = prompt_structure(("lines",), len(pairs), prompt.spans, prompt.token_text)
    texts, lines = (
        prompt.token_text or [""] * len(pairs),
        structure.get(f"{INSIDE}lines{STARTS}", ()),
    )
    return [
        # The first class that is true; the last is always true.
        CLASSES[
            [
                place in prompt.generated,
                any(map(str.isdigit, texts[place])),
                place in lines,
                # `index` finds the first occurrence; if it is earlier, this pair is a copy.
                pairs.index(pair) < place,
                True,
            ].index(True)
        ]
        for place, pair in enumerate(pairs)
    ]


def blocks_of(lengths: Sequence[int]) -> list[Int[np.ndarray, " token"]]:
    """Assign tokens to the blocks that intervals are computed from.

    Args:
        lengths: Tokens of every prompt.

    Returns:
        The block of every token but the first of every prompt, numbered over prompts.
    """
    counts = [1 if len(lengths) >= PROMPTS else max(1, length // BLOCK) for length in lengths]
    return [
        # Equal lengths, so that no block is a short remainder; the first token has no loss.
        sum(counts[:number]) + np.arange(length - 1) * counts[number] // (length - 1)
        for number, length in enumerate(lengths)
    ]


def intervals(changes: xr.DataArray) -> xr.DataArray:
    """Compute means and 95 % intervals of changes.

    Args:
        changes: Changes [..., draw, sample] with a coordinate `block` of the samples; draw 0 is of
            the kind, the others are controls.

    Returns:
        Mean, lower and upper end [kind, ..., of, bound], for the kind, the controls and the
        difference; ends are NaN if all blocks are equal.
    """
    of_kind, controls = changes.isel(draw=0), changes.isel(draw=slice(1, None)).mean("draw")
    # All three are grouped by block, since the interval of a difference is not the difference of
    # intervals.
    groups = xr.concat([of_kind, controls, of_kind - controls], "of").groupby("block")
    sums, counts = groups.sum(), groups.count()
    # A block without tokens of the class counts neither in the mean nor among the blocks.
    mean, blocks = sums.sum("block") / counts.sum("block"), (counts > 0).sum("block")
    error = (
        ((sums - mean * counts) ** 2).sum("block") * blocks / (blocks - 1)
    ) ** 0.5 / counts.sum("block")
    # NaN if all blocks are equal: an interval of width 0 would claim certainty.
    reach = error.where(error > 0) * student_quantile(blocks - 1)
    return xr.concat([mean, mean - reach, mean + reach], "bound").transpose(
        "kind", ..., "of", "bound"
    )


@torch.no_grad()
def _read(
    decoder: Decoder,
    scoring: Scoring,
    prompts: Sequence[Prompt],
    recording: Callable[[], Recording],
    heads: Heads | None,
    change: Callable[[PreTrainedModel, Heads], AbstractContextManager],
) -> Float[np.ndarray, "token prompt"]:
    """Scores of prompts of one length, and losses of their tokens, with `heads` changed.

    `heads` None changes nothing; [] gives NaN.
    """
    # First, so that the undisturbed pass is recorded before any change.
    clean = recording()
    count, length = clean.tokens.shape
    # A missing set: there may be fewer drawn sets than `draws`.
    if heads == []:
        return np.full((length, count), np.nan)
    with nullcontext() if heads is None else change(decoder.module, heads):
        # Layers below the first changed one do not change.
        hidden = clean.last_hidden if heads is None else resume_pass(decoder, clean, min(heads)[0])
    losses, likeliest = list[Tensor](), list[Tensor]()
    for states, following in zip(
        hidden[:, :-1].flatten(0, 1).split(AT_ONCE),
        clean.tokens[:, 1:].flatten().split(AT_ONCE),
        strict=True,
    ):
        logits = next_token_logits(decoder, states)
        losses.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
        likeliest.append(logits.argmax(-1))
    # Losses begin with token 1, so the loss of token t is at t - 1.
    lost = torch.cat(losses).reshape(count, -1).tolist()
    likeliest_tokens = torch.cat(likeliest).reshape(count, -1).tolist()
    responses = [
        Response(
            *zip(*((says[t - 1], -loses[t - 1]) for t in scoring.targets(prompt)), strict=True)
        )
        for prompt, says, loses in zip(prompts, likeliest_tokens, lost, strict=True)
    ]
    # The score, then the losses of all tokens but the first: one number per token
    return np.vstack([scoring.score(responses, prompts), np.transpose(lost)])


@dataclass(frozen=True)
class Kinds(Experiment):
    """The experiment `kinds`: the use of the positions of each kind of heads (ours)."""

    draws: Count = 3
    """Largest number of controls; each is a different random set of the same number of other heads.
    """
    seed: Seed = 0
    """Seed of the controls."""
    name: ClassVar[str] = "kinds"
    describes: ClassVar[str] = "effect of freezing the positions of each kind of heads"

    def unasked(self, layers: Layers, task: Scoring | None) -> Unasked | None:
        """Return it where positions are learned."""
        # Half of QUICK: by default it must not double the time of an analysis of 1e8 parameters
        return Unasked(self, QUICK / 2) if layers.learned else None

    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """Plan passes for all possible kinds.

        Raises InputError if no layer learns positions, or nothing is predicted.
        """
        decoder = as_decoder(model)
        learned = decoder.learned_layers
        if not learned:
            schemes = ", ".join(dict.fromkeys(decoder.schemes))
            raise InputError(
                "kinds depend on learned positions, and no layer of this model "
                f"({schemes}) learns any; leave them out"
            )
        _ = decoder.heads  # refuses layers with different numbers of heads
        # Also as text: the loss of every token is read besides the score of the answer.
        for judge in (scoring, Windows()):
            require_targets(self.name, judge, prompts)
        count, sets = decoder.layer_count, len(CASES) + len(GROUPS) * (1 + self.draws)
        # Sets in whole passes: at most the layers from the first learned layer on run again.
        changed = sets * (count - learned[0]) / count

        return Plan(
            self,
            tuple(len(prompt.tokens) for prompt in prompts) * (2 + ceil(changed)),
            # Two more passes: one to find the kinds, one undisturbed
            partial(self._measured, decoder, scoring, prompts),
        )

    def _measured(
        self,
        decoder: Decoder,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        batch_size: int,
        store: Store,
        progress: Progress | None,
    ) -> dict[str, xr.Dataset]:
        rows, sets = rows_by_kind(decoder, prompts), dict[str, list[list[Heads]]]()
        for kind in (*CASES, *GROUPS):
            members = [heads for known, heads in rows if kind == known or kind in CASES]
            others = [heads for _, heads in rows if heads not in members]
            drawn = drawn_sets(others, len(members), self.draws, self.seed)
            # Padded with empty sets to 1 + draws per kind, since `changes` reshapes. Kinds without
            # heads are left out.
            sets |= {kind: [members, *drawn, *[[]] * (self.draws - len(drawn))]} if members else {}
        heads = [sum(some, start=Heads()) for of_kind in sets.values() for some in of_kind]
        edits = [CASES.get(kind, frozen) for kind, of_kind in sets.items() for _ in of_kind]
        device, cut = decoder.device, _side_by_side(decoder, prompts)
        longest = max(len(prompt.tokens) for prompt in prompts)
        # The grid runs batch by batch, so one recording serves all sets of a batch.
        recording = lru_cache(1)(
            lambda numbers: record_pass(
                decoder,
                torch.tensor([prompts[number].tokens for number in numbers], device=device),
            )
        )

        def point(numbers: tuple[int, ...], place: int) -> dict[str, Any]:
            # Set 0 changes nothing: it is the reference
            some = None if place == 0 else heads[place - 1]
            asked, clean = [prompts[number] for number in numbers], partial(recording, numbers)
            read = _read(decoder, scoring, asked, clean, some, edits[place - 1])
            # NaN after the end of shorter prompts
            missing = np.full((longest - len(read), len(numbers)), np.nan)
            return {"reading": np.vstack([read, missing]).tolist()}

        grid = Grid(
            {"set": range(1 + len(heads))},
            point,
            {"reading": ("token", "prompt")},
            batches=cut,
            name="batch",
        )
        found = grid.compute(store, progress)["reading"].values
        read = [found[:, : len(prompt.tokens), number] for number, prompt in enumerate(prompts)]

        def changes(readings: list[np.ndarray], block: Any) -> xr.DataArray:
            # [set, token] of every prompt, joined along tokens, then split: [kind, draw, sample]
            values = np.concatenate([rows[1:] - rows[0] for rows in readings], axis=1).reshape(
                len(sets), 1 + self.draws, -1
            )
            return xr.DataArray(
                values, {"kind": [*sets], "block": ("sample", block)}, ("kind", "draw", "sample")
            )

        losses = changes(
            [rows[:, 1:] for rows in read],
            np.concatenate(blocks_of([len(prompt.tokens) for prompt in prompts])),
        )
        scores = changes([rows[:, :1] for rows in read], np.arange(len(prompts)))
        named = np.concatenate([token_classes(prompt)[1:] for prompt in prompts])
        # Class 0 is all tokens.
        in_class = xr.DataArray(
            [named != "", *(named == name for name in CLASSES)], dims=("token_class", "sample")
        )
        ends = (
            "of the kind, of controls, and the difference; mean and ends of the 95 % interval over"
        )
        block = (
            "prompt"
            if len(prompts) >= PROMPTS
            else f"stretch of {BLOCK} tokens, or the answer of a prompt that has fewer"
        )
        group = described_group(
            {
                # Of every 1 + draws sets the first is the kind, the others are its controls.
                "heads": ("kind", [len(some) for some in heads[:: 1 + self.draws]]),
                "loss": ((), np.concatenate([rows[0, 1:] for rows in read]).mean()),
                "tokens": in_class.sum("sample"),
                "block_change": losses.groupby("block").mean(),
                "loss_change": intervals(losses.where(in_class)),
                "score_change": intervals(scores),
            },
            {
                "heads": "heads of the kind [heads]",
                "loss": "mean -log p of a token, positions as the model assigns them [nat]",
                "tokens": "tokens of the class [tokens]",
                "block_change": (
                    "change of the mean -log p of a block; draw 0: of the kind, "
                    "then of controls [nat]"
                ),
                "loss_change": f"change of -log p of a token, {ends} blocks [nat]",
                "score_change": (
                    f"change of the {scoring.metric}, {ends} prompts [{scoring.units}]"
                ),
            },
            {
                "token_class": ["all", *CLASSES],
                "of": ["change", "controls", "difference"],
                "bound": ["mean", "low", "high"],
            },
        )
        return {self.name: group.assign_attrs(scoring.attributes | {"block": block})}
