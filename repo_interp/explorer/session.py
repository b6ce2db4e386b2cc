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
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from transformers import DynamicCache

from repo_interp.analysis.batches import describe_predictions
from repo_interp.analysis.coercion import indexed_prompts, tokens
from repo_interp.entry_points import SUGGESTIONS, find, names
from repo_interp.errors import InputError, NotFinitePrediction
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.experiments.readings import AnswerBatch
from repo_interp.experiments.responses import logits_at
from repo_interp.explorer.orders import orders
from repo_interp.explorer.passes import Pass, Passes
from repo_interp.explorer.session_edits import MEANS, Edit, listed
from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.heads import WHOLE_PATTERN
from repo_interp.measures.kernels.mirror import mirror, mirror_score
from repo_interp.measures.labels import described_group, with_attrs
from repo_interp.models.attention import cache_argument
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.generation import end_tokens
from repo_interp.models.lasting import at_rest
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.positions.sinks import weights_of
from repo_interp.run import with_schemes
from repo_interp.tasks import Prompt
from repo_interp.tasks.prompt import REST, copies_next
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, checked

NEXT = 10
"""Likeliest next tokens."""
LOOKED = 64
"""Most tokens with compared attention, to find one that an edit changes."""
POINTS = 32
"""Tokens at which the map of heads samples positions."""
MOST_NEW = 512
"""Most tokens of a continuation by default."""
STATES = ("clean", "changed")
LOOKS = ("attention to token 0", "attention to the previous token")
"""Scores of `passes.looked`."""
RANGE = "position range"
"""Score of the measure `positions`."""
ORDER = "order"
"""Order that positions tell at the largest distance of `orders`."""
_TEXTS = {
    "position": ("position of each token", "positions"),
    "logit": ("logit of each key", "logits"),
    "weight": ("attention to each key", "1"),
    "span_mass": ("attention to each span", "1"),
    "probability": ("of the next token", "1"),
    "next_token": ("likeliest next tokens", "1"),
    "log_probability": ("log-probability of the answer", "nat"),
    "logit_difference": ("the answer's logit less the next one's", "logit"),
}
_COMPARED = {
    "weight_difference": ("attention under the edits less attention without them", "1"),
    "curve": ("log-probability of the answer, mean over its tokens, after each edit", "nat"),
}
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
                "the prompt has one token, and nothing is to be expected after others; give "
                "at least two"
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
        """How the answer is scored."""
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
        """Map the heads: scores, and positions at up to `POINTS` tokens.

        Scores are from the measures `positions` and `attention_mass`, the attention from
        `passes.looked`, and, if the prompt names the source of each generated token, the mirror
        score from `measures.kernels.mirror`.

        Args:
            edited: Whether the edits act.

        Returns:
            `head_score` [score, layer, head], `outline` [layer, head, point], and where some head
            has other positions than the token index `order` [layer, head, distance].
        """
        passed = self._passes.of(self.active if edited else (), self.check)
        return passed.result("heads", lambda: self._heads(passed)).copy()

    def _heads(self, passed: Pass) -> xr.Dataset:
        groups = passed.groups
        # [layer, head, token]
        position = groups["positions"]["position"].isel(prompt=0)
        axes = ("prompt", "layer", "head")
        # By name, [layer, head]
        scores = {RANGE: groups["positions"]["position_range"].transpose(*axes)[0].values}
        if "attention_mass" in groups:
            mass = groups["attention_mass"]["mass"].transpose(..., "span").transpose(*axes, ...)
            scores |= {
                f"attention to {span}": mass.values[0, ..., place]
                for place, span in enumerate(map(str, mass["span"].values))
            }
        looks = [passed.looks[int(layer)] for layer in position["layer"].values]
        scores |= dict(zip(LOOKS, torch.stack(looks, dim=1).numpy(), strict=True))
        rows = position.transpose("layer", "head", "token").values
        distances, order = orders(rows)
        # Whatever the edits are, so that both states have the same scores
        if not {*self.decoder.schemes}.isdisjoint(self.decoder.learned_schemes):
            far = order[..., -1] if len(distances) else np.full(rows.shape[:-1], np.nan)
            scores = {ORDER: far} | scores
        if self.prompt.sources is not None:
            mirrored = [[self._mirror(row) for row in of_layer] for of_layer in rows]
            scores = {"mirror": np.array(mirrored)} | scores
        stacked = xr.DataArray(
            np.stack(list(scores.values())).astype("float64"),
            {
                "score": list(scores),
                **{axis: position[axis].variable for axis in ("layer", "head")},
            },
            ("score", "layer", "head"),
        )
        # A short prompt has fewer tokens than points, and rounding would repeat some
        sampled = position.isel(
            token=np.unique(np.linspace(0, self.count - 1, POINTS).round().astype(int)), drop=True
        )
        sampled = (
            sampled.reset_coords(drop=True)
            .transpose("layer", "head", "token")
            .rename(token="point")
        )
        named = {
            "head_score": with_attrs(stacked, "score of each head", "1"),
            "outline": with_attrs(sampled, "position at evenly spaced tokens", "positions"),
        }
        if len(distances):
            by_distance = xr.DataArray(
                order,
                {
                    **{axis: position[axis].variable for axis in ("layer", "head")},
                    "distance": distances,
                },
                ("layer", "head", "distance"),
            )
            named["order"] = with_attrs(by_distance, "order that positions tell by distance", "1")
        decoder = self.decoder
        return with_schemes(xr.Dataset(named), decoder.schemes, decoder.learned_schemes)

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
        # Stacked by hand: `xr.concat` would align coordinates that are the same in both
        both: dict[Any, Any] = {
            name: (
                ("state", *array.dims),
                np.stack([array.values, edited[name].values]),
                array.attrs,
            )
            for name, array in clean.data_vars.items()
        }
        difference = edited["weight"].values - clean["weight"].values
        both["weight_difference"] = (clean["weight"].dims, difference)
        both["curve"] = ("edit", curve)
        group = xr.Dataset(
            both,
            {"state": list(STATES), **clean.coords, "edit": np.arange(len(curve))},
            clean.attrs,
        )
        for name, (long_name, units) in _COMPARED.items():
            group[name].attrs.update(long_name=long_name, units=units)
        return group

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
        """Generate greedy tokens after the prompt, or in place of its answer; close it to stop.

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
        model: Any = self._passes.model
        ends = end_tokens(self.decoder)
        argument = cache_argument(model.forward)
        # A fresh cache: one of an earlier pass would hold keys that were rotated without edits
        cache, given = DynamicCache(config=model.config), self._passes.batch.tokens[:, :start]
        for _ in range(count):
            self.check()
            # Entered anew for every token: in between the caller may use the model
            with torch.no_grad(), at_rest(self.decoder), ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                logits = model(given, **{argument: cache}, use_cache=True, logits_to_keep=1).logits[
                    0, -1
                ]
            if not bool(logits.isfinite().all()):
                raise NotFinitePrediction(0)
            given = logits.argmax()[None, None]
            yield int(given)
            if int(given) in ends:
                return

    @property
    def start(self) -> int:
        """The first token that a continuation replaces.

        That is the first of the answer where it is the end of the prompt, else none.
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
        name = self.name or ("CHECKPOINT" if source is None else str(source.directory))
        calls = [
            edit.python(self._passes.model, edit.tokens_in(spans, self.count))
            for edit in self.active
        ]
        return _CELL.format(
            name=name,
            ends=end_tokens(self.decoder) or None,
            tokens=list(self.prompt.tokens),
            answer=listed(self._places),
            heads=list(heads),
            token=token,
            count=count,
            start=self.start,
            most=min(MOST_NEW, self.count - self.start or 32),
            weight=_WEIGHT
            if self.count <= WHOLE_PATTERN
            else "        # attention: patterns are made of up to 512 tokens\n",
            means="".join(
                f"{name} = {call}\n"
                for kind, (name, call) in MEANS.items()
                if any(edit.kind == kind for edit in self.active)
            ),
            edits="\n".join(f"    edits.enter_context({call})" for call in calls)
            or "    # no edit is on",
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

    def _next(self, token: int) -> dict[str, list[int]]:
        """Needle and query of a row whose next token copies another token (`AttentionMass`)."""
        generated, sources = self.prompt.generated, self.prompt.sources
        if sources is None or not copies_next([self.prompt]) or token + 1 not in generated:
            return {}
        return {"needle": [sources[generated.index(token + 1)]], "query": [token]}

    def _row(
        self,
        passed: Pass,
        edits: tuple[Edit, ...],
        heads: Sequence[Head],
        token: int,
        selection: tuple[int, int] | None,
        count: int,
    ) -> xr.Dataset:
        position = (
            passed.groups["positions"]["position"].isel(prompt=0, drop=True).reset_coords(drop=True)
        )
        spans = {name: list(places) for name, places in self.prompt.all_spans().items()}
        spans |= self._next(token)
        if selection is not None:
            first, last = sorted(selection)
            self._require((), last)
            selected = range(first, last + 1)
            # The rest is of no span, also not of this one; so a table does not count twice
            if REST in spans:
                spans[REST] = [place for place in spans[REST] if place not in selected]
            spans = {"selection": list(selected), **spans}
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
        logits, weights, masses = [], [], []
        for layer, head in heads:
            logit, weight = row_of(self._passes.inputs(edits, layer, self.check), head, token)
            logits.append(logit)
            weights.append(weight)
            # NaN: keys that this row does not see
            masses.append([float(np.nansum(weight[places])) for places in spans.values()])
        rows = np.stack([position.sel(layer=layer, head=head).values for layer, head in heads])
        expected = (
            next_token_logits(self.decoder, passed.recording.last_hidden[0, [token]])[0]
            .double()
            .log_softmax(-1)
        )
        largest, ids = expected.topk(min(count, len(expected)))
        log_probability, logit_difference, score = self._readings(passed)
        seen = described_group(
            {
                "position": (("shown", "token"), rows),
                "logit": (("shown", "key"), np.stack(logits)),
                "weight": (("shown", "key"), np.stack(weights)),
                "span_mass": (("shown", "span"), masses),
                "probability": ("rank", largest.exp().cpu().numpy()),
                "next_token": ("rank", ids.cpu().numpy()),
                "log_probability": log_probability,
                "logit_difference": logit_difference,
                "score": score,
            },
            _TEXTS | {"score": (self.scoring.metric, self.scoring.units)},
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

    def _mirror(self, position: np.ndarray) -> float:
        if not np.isfinite(position).all():
            return np.nan
        return mirror_score(
            mirror(position, self.prompt.tokens, self.prompt.sources or (), self.prompt.generated)
        )

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


def row_of(inputs: AttentionInputs, head: int, token: int) -> tuple[np.ndarray, np.ndarray]:
    """Read logits and attention of one row of one head.

    Args:
        inputs: Inputs of attention of one prompt.
        head: Number of the head.
        token: The query token.

    Returns:
        Logits and weights [key]; NaN for keys that the row does not see.
    """
    rows = torch.tensor([token], device=inputs.queries.device)
    logits = inputs.logits(rows)
    seen = inputs.visible(rows)[0, 0]

    def plain(values: Tensor) -> np.ndarray:
        return values[0, head, 0].masked_fill(~seen, torch.nan).float().cpu().numpy()

    return plain(logits), plain(weights_of(logits, inputs.sinks_of(rows)))


_WEIGHT = """\
        "weight": {
            (layer, head): ri.attention_pattern(bridge, tokens[0], layer, head).sel(query=token) for layer, head in heads
        },
"""
_CELL = '''\
import torch
import repo_interp as ri
from contextlib import ExitStack
from transformers import GenerationConfig

bridge = ri.load({name!r})
bridge.original_model.generation_config = GenerationConfig(eos_token_id={ends})  # no other settings
tokens = torch.tensor([{tokens}])
answer, token, heads = list({answer}), {token}, {heads}


def measured():
    """The answer's log-probability, the likeliest next tokens, and positions and attention of the chosen heads."""
    with torch.no_grad():
        expected = bridge(tokens)[0].double().log_softmax(-1)
    positions = ri.interventions.positions_of(bridge, tokens)
    rows = {{layer: z[0].repeat_interleave(bridge.cfg.n_heads // z.shape[1], 0) for layer, z in positions.items()}}
    return {{
        "log_probability": float(expected[[place - 1 for place in answer], tokens[0, answer]].mean()),
        "next": expected[token].exp().topk({count}),
        "position": {{(layer, head): rows[layer][head] for layer, head in heads if layer in rows}},
{weight}        "continuation": bridge.original_model.generate(tokens[:, :{start}], max_new_tokens={most}, do_sample=False)[0, {start}:],
    }}


clean = measured()
{means}with ExitStack() as edits:
{edits}
    changed = measured()
print(clean["log_probability"], "->", changed["log_probability"])
'''
