"""A session: one model, one prompt and a list of edits.

Its methods are the answers that the explorer shows.

    session = ri.explorer.Session(bridge, prompt, [Edit(kind="linearised", layer=2)])
    session.look([(2, 0)], token=25)      positions, attention and logits of heads, next tokens,
                                          without edits
    session.changed([(2, 0)], token=25)   the same without and with the edits, the difference, and
                                          the answer by edit
    session.attention_to((9, 11), token=25)         attention of every head to tokens 9 to 11
    session.continuation()                          greedy tokens under the edits, one by one
    session.suggest()                               the edits with the largest effect on the answer
    print(session.as_python([(2, 0)], token=25))    a notebook cell with the same numbers

Edits that are off are kept and have no effect. Between two calls no hook is attached, also between
two tokens of a continuation. Each answer is an `xarray.Dataset` with units. This module knows
nothing about pages and servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from torch import nn

from repo_interp.analysis.batches import describe_predictions
from repo_interp.analysis.coercion import indexed_prompts, tokens
from repo_interp.entry_points import SUGGESTIONS, find, names
from repo_interp.errors import InputError
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.experiments.readings import AnswerBatch
from repo_interp.experiments.responses import logits_at
from repo_interp.explorer.continuation import greedy_tokens
from repo_interp.explorer.head_scores import scores_of_heads
from repo_interp.explorer.passes import Pass, Passes
from repo_interp.explorer.python_cell import python_cell
from repo_interp.explorer.session_edits import MEANS, Edit, listed
from repo_interp.explorer.token_row import TEXTS, attention_of, spans_of_row, with_difference
from repo_interp.measures.labels import described_group, with_attrs
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.generation import end_tokens
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, checked

NEXT = 10
"""Likeliest next tokens."""
LOOKED = 64
"""Most tokens with compared attention, to find one that an edit changes."""
MOST_NEW = 512
"""Most tokens of a continuation by default."""
Head = tuple[int, int]


@dataclass(frozen=True)
class Marked(Scoring):
    """The tokens that a reader marked as the answer, scored by exact match."""

    places: tuple[int, ...] = ()
    name: ClassVar[str] = "marked answer"

    def targets(self, prompt: Prompt) -> tuple[int, ...]:
        """The marked tokens."""
        return self.places


@dataclass
class Session:
    """One prompt through one bridge, with edits."""

    bridge: nn.Module
    prompt: Any
    edits: Sequence[Edit] = ()
    answer: Sequence[int] = ()
    """Tokens of the answer; empty: the generated ones, else the last one."""
    name: str = ""
    """The argument of `ri.load` in `as_python`; empty: the directory of the bridge."""
    passes: Passes | None = None
    """Passes of another session with the same bridge and prompt, to reuse."""
    check: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called before every layer of a pass; its exception ends the answer that is being made."""

    def __post_init__(self) -> None:
        """Raises InputError for several prompts, edits or answers that do not fit the prompt."""
        given = indexed_prompts(self.prompt, as_decoder(self.bridge).tokenizer)
        if len(given) != 1:
            raise InputError(f"a session has one prompt; got {len(given)}")
        (self.prompt,) = given
        tokens(given, self.bridge)  # refuses tokens outside of the vocabulary
        if self.count < 2:
            raise InputError(
                "the prompt has one token, and no token can be predicted; give at least two"
            )
        if not isinstance(self.edits, Sequence) or not all(
            isinstance(edit, Edit) for edit in self.edits
        ):
            raise InputError(
                "edits of a session are a list of Edits, such as [Edit(kind='linearised', layer=2)]"
            )
        self.answer = tuple(dict.fromkeys(sorted(checked(self.answer, tuple[int, ...], "answer"))))
        # Nothing predicts token 0
        if self.answer and not 1 <= self.answer[0] <= self.answer[-1] < self.count:
            raise InputError(
                f"an answer has tokens from 1 to {self.count - 1}; got {listed(self.answer)}"
            )
        if self.passes is None:
            self.passes = Passes(self.bridge, self.prompt)
        # All edits, also switched-off ones: a bad edit is refused before it is switched on
        self._passes.contexts(tuple(self.edits))

    @property
    def count(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.tokens)

    @property
    def active(self) -> tuple[Edit, ...]:
        """The edits that are on."""
        return tuple(edit for edit in self.edits if edit.on)

    @property
    def decoder(self) -> Decoder:
        """Decoder of the model."""
        return self._passes.decoder

    @property
    def _passes(self) -> Passes:
        assert self.passes is not None
        return self.passes

    @cached_property
    def scoring(self) -> Scoring:
        """The scoring of the answer."""
        return (
            scoring_of([self.prompt])
            if self.prompt.generated and not self.answer
            else Marked(self._places)
        )

    @property
    def _places(self) -> tuple[int, ...]:
        """The tokens of the answer."""
        return tuple(self.answer) or tuple(sorted(self.prompt.generated)) or (self.count - 1,)

    def heads(self, edited: bool = False) -> xr.Dataset:
        """Map the heads: scores, and positions at some tokens.

        Args:
            edited: Whether the edits act.

        Returns:
            `head_score` [score, layer, head], `outline` [layer, head, point], and, if some head
            has other positions than the token index, `order` [layer, head, distance]
            (`head_scores.scores_of_heads`).
        """
        passed = self._passes.of(self.active if edited else (), self.check)
        return passed.result(
            "heads", lambda: scores_of_heads(passed, self.prompt, self.decoder)
        ).copy()

    def look(
        self,
        heads: Sequence[Head],
        token: int,
        selection: tuple[int, int] | None = None,
        count: int = NEXT,
    ) -> xr.Dataset:
        """Return the row of one token in some heads, and the next tokens, without edits.

        Args:
            heads: (layer, head) pairs.
            token: The query token.
            selection: First and last token of an extra span.
            count: Likeliest next tokens.

        Returns:
            `position` [shown, token], `weight` and `logit` [shown, key], `span_mass` [shown, span],
            `probability`, `next_token` and `next_text` [rank], and `log_probability` of the answer.
            The span `rest` has the tokens outside of all other spans and the selection.
        """
        return self._seen((), heads, token, selection, count)

    def changed(
        self,
        heads: Sequence[Head],
        token: int,
        selection: tuple[int, int] | None = None,
        count: int = NEXT,
    ) -> xr.Dataset:
        """Compare `look` without and with the edits.

        Args:
            heads: (layer, head) pairs.
            token: The query token.
            selection: First and last token of an extra span.
            count: Likeliest next tokens.

        Returns:
            `look` with the axis `state`; `weight_difference` [shown, key]; and `curve` [edit], the
            log-probability of the answer after each edit that is on, in order.
        """
        passed = self._passes.of(self.active, self.check)
        return passed.result(
            ("changed", *self._asked(heads, token, selection, count)),
            lambda: self._changed(heads, token, selection, count),
        ).copy()

    def _changed(self, *asked: Any) -> xr.Dataset:
        clean, edited = (self._seen(edits, *asked) for edits in ((), self.active))
        # Mostly kept from when its last edit was the newest, so that it costs no pass
        prefixes = [self.active[:length] for length in range(len(self.active) + 1)]
        curve = [self.log_probability(edits) for edits in prefixes]
        return with_difference(clean, edited, curve)

    def attention_to(
        self, selection: tuple[int, int], token: int | None = None, edited: bool = False
    ) -> xr.DataArray:
        """Sum the attention of every head to selected tokens.

            sum over selected j of A_ij, i the token; or its mean over the rows i that produced the
            answer

        Args:
            selection: First and last token.
            token: The query token; None: the tokens that predict the answer.
            edited: Whether the edits act.

        Returns:
            Shares [layer, head]; NaN for heads that other layers have.
        """
        first, last = sorted(selection)
        self._require((), first)
        self._require((), last)
        if token is not None:
            self._require((), token)
        # The row before a token predicts it; nothing predicts token 0
        rows = tuple(place - 1 for place in self._places if place) if token is None else (token,)
        means = self._passes.rows(self.active if edited else (), rows, self.check)
        attentions = self.decoder.layers
        values = np.full((len(attentions), max(one.heads for one in attentions)), np.nan)
        for number, one in enumerate(attentions):
            given = means[one.layer_idx][:, first : last + 1].sum(-1)
            values[number, : one.heads] = given.numpy()
        shares = xr.DataArray(
            values,
            {
                "layer": [one.layer_idx for one in attentions],
                "head": np.arange(values.shape[1]),
            },
            ("layer", "head"),
        )
        whence = "the answer" if token is None else f"token {token}"
        return with_attrs(shares, f"attention from {whence} to tokens {first} to {last}", "1")

    def continuation(self, edited: bool = True, most: int | None = None) -> Iterator[int]:
        """Generate greedy tokens after the prompt, or instead of its answer; close it to stop.

        Args:
            edited: Whether the edits act.
            most: Most tokens; None: as many as the answer has, else 32.

        Yields:
            Tokens, up to one that ends a text.

        Raises:
            NotFinitePrediction: The logits are NaN or infinite.
        """
        start = self.start
        count = (
            min(MOST_NEW, self.count - start or 32)
            if most is None
            else int(checked(most, Count, "most"))
        )
        contexts = self._passes.contexts(self.active if edited else ())
        given = self._passes.batch.tokens[:, :start]
        yield from greedy_tokens(self.decoder, given, count, contexts, self.check)

    @property
    def start(self) -> int:
        """The first token that a continuation replaces.

        The first token of the answer if the answer ends the prompt, else none.
        """
        answer = tuple(self.answer) or tuple(sorted(self.prompt.generated))
        return answer[0] if answer and answer == tuple(range(answer[0], self.count)) else self.count

    def suggest(
        self, progress: Callable[[int, int], None] | None = None
    ) -> list[tuple[Edit, float]]:
        """Find edits that lower the log-probability of the answer most.

        The functions of the entry points `repo_interp.suggestions` find them.

        Args:
            progress: Function of the points that are done and of all.

        Returns:
            Edits with their effects in nats.

        Raises:
            InputError: No layer assigns positions.
        """

        def advance(done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(done, total)

        return [
            suggested
            for name in names(SUGGESTIONS)
            for suggested in find(SUGGESTIONS, name)(self, advance)
        ]

    def moves(self, edit: Edit) -> tuple[Head, int]:
        """Find where an edit moves attention most, in its first layer.

        Args:
            edit: The edit, applied without others.

        Returns:
            The (layer, head) and the token whose row changes most (half the sum of absolute
            differences), of up to `LOOKED` tokens that predict the answer.
        """
        # The row before a token predicts it
        before = [place - 1 for place in self._places if place] or range(self.count)
        # Every k-th one, k rounded up, so that no more than `LOOKED` remain
        layer, places = edit.first_layer, list(before)[:: -(-len(before) // LOOKED)]
        rows = []
        for edits in ((), (edit,)):
            inputs = self._passes.inputs(edits, layer, self.check)
            at = torch.tensor(places, device=inputs.queries.device)
            rows.append(inputs.pattern(at)[0].float().nan_to_num())
        # [head, place]; half of it would be the share of attention that moved, but only ranks count
        moved = (rows[1] - rows[0]).abs().sum(-1)
        head, place = divmod(int(moved.argmax()), len(places))
        return (layer, head), places[place]

    def log_probability(self, edits: tuple[Edit, ...]) -> float:
        """Return the log-probability of the answer under some edits.

        Args:
            edits: Edits that are on.

        Returns:
            Mean over the tokens of the answer, in nats.
        """
        return float(self._readings(self._passes.of(edits, self.check))[0])

    def as_python(self, heads: Sequence[Head], token: int, count: int = NEXT) -> str:
        """Write a notebook cell that computes the numbers of `changed` with the library only.

        Args:
            heads: (layer, head) pairs.
            token: The query token.
            count: Likeliest next tokens.

        Returns:
            Code that defines `clean` and `changed`.
        """
        self._require(heads, token)
        spans = self.prompt.all_spans()
        source = self.decoder.origin
        calls = [
            edit.python(self._passes.model, edit.tokens_in(spans, self.count))
            for edit in self.active
        ]
        return python_cell(
            name=self.name or ("CHECKPOINT" if source is None else str(source.directory)),
            tokens=self.prompt.tokens,
            answer=self._places,
            heads=heads,
            token=token,
            count=count,
            start=self.start,
            most=min(MOST_NEW, self.count - self.start or 32),
            ends=end_tokens(self.decoder),
            edits=calls,
            means=dict(
                MEANS[kind] for kind in MEANS if any(edit.kind == kind for edit in self.active)
            ),
        )

    @torch.no_grad()
    def _seen(
        self,
        edits: tuple[Edit, ...],
        heads: Sequence[Head],
        token: int,
        selection: tuple[int, int] | None,
        count: int,
    ) -> xr.Dataset:
        self._require(heads, token)
        passed = self._passes.of(edits, self.check)
        return passed.result(
            ("row", *self._asked(heads, token, selection, count)),
            lambda: self._row(passed, edits, heads, token, selection, count),
        ).copy()

    def _asked(self, *of: Any) -> tuple[Any, ...]:
        """Key of a kept result: everything it depends on, except the edits of the pass."""
        heads, *others = of
        return (tuple(self.answer), tuple(map(tuple, heads)), *others)

    def _row(
        self,
        passed: Pass,
        edits: tuple[Edit, ...],
        heads: Sequence[Head],
        token: int,
        selection: tuple[int, int] | None,
        count: int,
    ) -> xr.Dataset:
        if selection is not None:
            self._require((), max(selection))
        spans = spans_of_row(self.prompt, token, selection)
        shown = {
            name: ("shown", [head[place] for head in heads])
            for place, name in enumerate(("layer", "head"))
        }
        coords = {
            **shown,
            "key": np.arange(self.count),
            "token": np.arange(self.count),
            "span": list(spans),
        }
        rows = [passed.positions.sel(layer=layer, head=head).values for layer, head in heads]
        attention = attention_of(
            heads, token, spans, lambda layer: self._passes.inputs(edits, layer, self.check)
        )
        expected = (
            next_token_logits(self.decoder, passed.recording.last_hidden[0, [token]])[0]
            .double()
            .log_softmax(-1)
        )
        largest, ids = expected.topk(min(count, len(expected)))
        log_probability, logit_difference, score = self._readings(passed)
        seen = described_group(
            {
                "position": (("shown", "token"), np.stack(rows)),
                **attention,
                "probability": ("rank", largest.exp().cpu().numpy()),
                "next_token": ("rank", ids.cpu().numpy()),
                "log_probability": log_probability,
                "logit_difference": logit_difference,
                "score": score,
            },
            TEXTS | {"score": (self.scoring.metric, self.scoring.units)},
            coords,
        )
        return describe_predictions(seen, self.prompt, self.decoder.tokenizer)

    @torch.no_grad()
    def _readings(self, passed: Pass) -> np.ndarray:
        """Log-probability, logit difference and score of the answer."""

        def compute() -> np.ndarray:
            batch = AnswerBatch(self.decoder, self.scoring, [self.prompt])
            logits = logits_at(self.decoder, passed.recording.last_hidden, batch.question)
            return batch.readings(logits)[:, 0]

        # Keyed by answer: other tokens may be read from the same pass
        return passed.result(("readings", tuple(self.answer)), compute)

    def _require(self, heads: Sequence[Head], token: int) -> None:
        """Raise InputError for a token or a head that there is not."""
        if not 0 <= token < self.count:
            raise InputError(
                f"token {token} was chosen; the prompt's tokens are 0 to {self.count - 1}"
            )
        known = {attention.layer_idx: attention.heads for attention in self.decoder.layers}
        for layer, head in heads:
            if not 0 <= head < known.get(layer, 0):
                raise InputError(
                    f"layer {layer}, head {head} was chosen; layers are {min(known)} to "
                    f"{max(known)}, heads 0 to {max(known.values()) - 1}"
                )
