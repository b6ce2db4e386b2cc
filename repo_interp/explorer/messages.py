"""Requests of a page, held to types and ranges, and the answers as JSON.

The same over HTTP and in a notebook.

    {"ask": "open", "model": 0}                       the model, its heads, how many prompts there are, kinds of edits, a table of heads
    {"ask": "prompt", "prompt": 0}                    tokens, spans, the map of heads, and which head and token to begin with
    {"ask": "view", "heads": [[2, 0]], "token": 17, "edits": [...], ...}     `Session.look`, or with edits that are on `Session.changed`
    {"ask": "continue", ...}  {"ask": "suggest", ...}                        events, one after the other
    {"ask": "python", ...}  {"ask": "csv", ...}  {"ask": "netcdf", ...}      the cell, and the numbers of the view as files

A model is a number of those that are compared. A prompt is a number of those that were given, or a
text. A message names no file and holds no code; one that does not fit is an InputError.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, lru_cache
from typing import Annotated, Any, Literal

import matplotlib as mpl
import numpy as np
import xarray as xr
from annotated_types import Interval, Len
from matplotlib.colors import Colormap
from pydantic import BaseModel, BeforeValidator, ConfigDict
from torch import nn

from repo_interp.analysis.coercion import indexed_prompts, require_known_tokens
from repo_interp.analysis.memory_needed import require_memory_for_pass
from repo_interp.errors import InputError
from repo_interp.explorer.passes import Passes
from repo_interp.explorer.session import LOOKS, NEXT, ORDER, RANGE, Session
from repo_interp.explorer.session_edits import (
    POSITIONS,
    Edit,
    Index,
    as_tuple,
    count_rotating_pairs,
    parameter_of,
)
from repo_interp.explorer.steps import Steps
from repo_interp.measures.kernels.mirror import MEANING
from repo_interp.models.decoder import as_decoder
from repo_interp.plots.marks.arrays import ranked_heads
from repo_interp.plots.marks.drawing import contiguous
from repo_interp.plots.marks.panels import MISSING, scale, shades
from repo_interp.plots.marks.reading import described_prompts, ordered_spans, prompt_tokens
from repo_interp.plots.style import scheme_colour, scheme_name, span_colours
from repo_interp.plots.view_catalogue import view_of_heads
from repo_interp.run import require_run
from repo_interp.storage.json_values import as_json
from repo_interp.storage.records import validate
from repo_interp.tasks import Prompt, prompt_from_text
from repo_interp.tasks.prompt import GENERATED, REST, main_span

MOST_TOKENS = 8192
"""Tokens of a prompt."""
MOST_TEXT = 1 << 20
"""Characters of a text."""
# Of one message: edits, and heads side by side
MOST_EDITS, MOST_SHOWN = 64, 6
PROMPTS = 2
"""Prompts whose passes are kept."""
PROBED: tuple[tuple[Any, float | None], ...] = (("ranked", None), ("linear", 1.0), ("yarn", 1.0))
"""Edits whose refusals, by layer, stand for those of all kinds: a kind and its value."""
MEANINGS = {
    "mirror": MEANING,
    RANGE: "the largest less the smallest position that the head gives",
    ORDER: (
        "of two tokens that stand far apart, how often the later one has the higher position: "
        "1 always, -1 never, 0 as often as not"
    ),
}
"""Scores of the map of heads whose name does not say what they are."""


class Asked(BaseModel):
    """A message: the question, and the whole state of its page."""

    # Strict: values from a browser are not converted, so that a text never passes for a number
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    ask: Literal["open", "prompt", "view", "continue", "suggest", "python", "csv", "netcdf"]
    tab: Annotated[str, Len(0, 64)] = ""
    """Which page asks: its newer view ends its older one."""
    model: Index = 0
    """0, or the place of one that the explored model is compared with."""
    prompt: Index = 0
    text: Annotated[str, Len(0, MOST_TEXT)] | None = None
    """Read in place of a numbered prompt."""
    heads: Annotated[
        tuple[tuple[Index, Index], ...], Len(0, MOST_SHOWN), BeforeValidator(as_tuple)
    ] = ()
    token: Index = 0
    selection: Annotated[tuple[Index, Index], BeforeValidator(as_tuple)] | None = None
    """The first and the last of the tokens that are selected."""
    looking: Literal["token", "answer"] = "token"
    """Whose attention to the selection the answer to "view" has for every head."""
    answer: Annotated[tuple[Index, ...], Len(0, MOST_TOKENS), BeforeValidator(as_tuple)] = ()
    edits: Annotated[tuple[Edit, ...], Len(0, MOST_EDITS), BeforeValidator(as_tuple)] = ()
    count: Annotated[int, Interval(ge=1, le=100)] = NEXT
    """Likeliest next tokens."""


class Explored:
    """A bridge and its prompts, as a page explores them.

    One answer is made at a time; whoever calls sees to that.
    """

    def __init__(
        self,
        bridge: nn.Module,
        prompts: Any,
        name: str = "",
        run: xr.DataTree | None = None,
        others: Sequence[Explored] = (),
    ) -> None:
        """Open a model for the explorer.

        `name`: the argument of `ri.load`; `run`: its table of heads is shown; `others`: models to
        compare with, over the same texts.

        Raises InputError where there is no prompt, or where one has a token that the model lacks.
        """
        self.bridge, self.name, self.others = bridge, name, others
        self.decoder = as_decoder(bridge)
        self.prompts = indexed_prompts(prompts, self.decoder.tokenizer)
        if not self.prompts:
            raise InputError("there are no prompts to explore; give one, or a text")
        # Those of a run come from a file, which may be of another model
        require_known_tokens(
            [prompt.tokens for prompt in self.prompts], self.decoder.vocabulary_size
        )
        self.run = run
        # By number or text, which are never equal
        self._passes = lru_cache(PROMPTS)(self._read)

    @property
    def title(self) -> str:
        """The name of the model on a page."""
        origin = self.decoder.origin
        return self.name or ("a model" if origin is None else origin.name)

    def answer(self, asked: Asked, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Answer a message that has one answer.

        Args:
            asked: The message.
            check: Function that is called before each layer; its exception ends the answer.

        Returns:
            The answer as JSON has it.

        Raises:
            InputError: The message does not fit the model or the prompt.
        """
        model = self._model(asked)
        answers = {
            "open": model._open,
            "prompt": model._prompt,
            "view": model._view,
            "python": model._python,
            "csv": model._file,
            "netcdf": model._file,
        }
        if asked.ask not in answers:
            raise InputError(f"{asked.ask} is answered by events; read them one by one")
        return answers[asked.ask](asked, check)

    def events(
        self, asked: Asked, check: Callable[[], None] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of "continue" and "suggest".

        Args:
            asked: The message.
            check: Function that is called before each layer; its exception ends the answer.

        Yields:
            Events as JSON has them.
        """
        model = self._model(asked)
        session = model.session(asked, check)
        if asked.ask == "suggest":
            # Closed also where the page stops asking: the thread of the work would wait forever
            with closing(Steps(session.suggest)) as steps:
                yield from ({"done": done, "total": total} for done, total in steps)
            suggested = steps.result
            yield {
                "suggested": [
                    {
                        "edit": edit.model_dump(mode="json", exclude_defaults=True),
                        "sentence": edit.sentence(),
                        "effect": effect,
                        "moves": _moved(session, edit),
                    }
                    for edit, effect in suggested
                ]
            }
            return
        # Both in step, so that the page can show where they part
        streams = {"clean": session.continuation(edited=False), "changed": session.continuation()}
        given = [session.prompt.tokens[place] for place in range(session.start, session.count)]
        # As many tokens as `continuation` generates by default
        for number in range(len(given) or 32):
            for state in ("clean", "changed") if session.active else ("clean",):
                if (token := next(streams[state], None)) is not None:
                    right = token == given[number] if given else None
                    yield {
                        "state": state,
                        "token": token,
                        "text": model._text(session.prompt, token),
                        "right": right,
                    }

    def _model(self, asked: Asked) -> Explored:
        if asked.model > len(self.others):
            raise InputError(f"there is no model {asked.model}; models are 0 to {len(self.others)}")
        return (self, *self.others)[asked.model]

    def session(self, asked: Asked, check: Callable[[], None] = lambda: None) -> Session:
        """Make the session of a message, with the passes of earlier ones over the same prompt.

        Args:
            asked: The message.
            check: Function that is called before each layer; its exception ends the answer.

        Returns:
            The session.
        """
        passes = self._passes(asked.prompt if asked.text is None else asked.text)
        return Session(
            self.bridge, passes.prompt, asked.edits, asked.answer, self.name, passes, check
        )

    def _read(self, given: int | str) -> Passes:
        """The passes of a numbered prompt, or of a text."""
        if isinstance(given, int):
            if given >= len(self.prompts):
                raise InputError(
                    f"there is no prompt {given}; prompts are 0 to {len(self.prompts) - 1}"
                )
            prompt = self.prompts[given]
        else:
            if self.decoder.tokenizer is None:
                raise InputError(
                    "this checkpoint has no tokenizer, so it reads no text; choose a "
                    "numbered prompt"
                )
            (prompt,) = indexed_prompts(given, self.decoder.tokenizer)
        if len(prompt.tokens) > MOST_TOKENS:
            raise InputError(
                f"the prompt has {len(prompt.tokens):,} tokens; the explorer shows up to "
                f"{MOST_TOKENS:,}: give a part of it"
            )
        # A page may send any text, and a process that is out of memory is killed without a word
        require_memory_for_pass(self.decoder, len(prompt.tokens), 1)
        return Passes(self.bridge, prompt)

    def _open(self, asked: Asked, check: Callable[[], None]) -> dict[str, Any]:
        table = None
        run = self.run
        view = None if run is None else view_of_heads(run)
        if run is not None and view is not None and view.heads is not None:
            frame = view.heads(run)
            if view.head_columns:
                columns = ("layer", "head", *view.head_columns)
                frame = frame[[name for name in columns if name in frame]]
            table = {
                "columns": list(frame.columns),
                "rows": as_json([*frame.itertuples(index=False)]),
            }
        schemes = self.decoder.schemes
        return {
            "checkpoint": self.title,
            "models": [self.title, *(other.title for other in self.others)],
            "layers": [
                {
                    "layer": attention.layer_idx,
                    "name": scheme_name(schemes[attention.layer_idx]),
                    "colour": scheme_colour(schemes[attention.layer_idx]),
                    "heads": attention.heads,
                    "pairs": count_rotating_pairs(attention),
                    "refused": {
                        kind: Edit(kind=kind, layer=attention.layer_idx, value=value).refusal(
                            self.bridge
                        )
                        for kind, value in PROBED
                    },
                }
                for attention in self.decoder.layers
            ],
            "edits": {
                kind: vars(edit.form) | {"field": parameter_of(kind)[0]}
                for kind, edit in POSITIONS.items()
            },
            "prompts": [len(prompt.tokens) for prompt in self.prompts],
            "reads_text": self.decoder.tokenizer is not None,
            "head_table": table,
        }

    def _prompt(self, asked: Asked, check: Callable[[], None]) -> dict[str, Any]:
        session = self.session(asked, check)
        prompt, heads = session.prompt, session.heads()
        spans = prompt.all_spans()
        names = [name for name in ordered_spans(spans) if name != REST]
        colours = span_colours(names)
        scores = _scores(heads)
        about = ("" if self.run is None else self.run.attrs.get("main_span")) or main_span([prompt])
        known = [
            str(name)
            for name in scores["score"].values
            # A map of one value in all heads shows nothing to begin with
            if np.ptp(scores.sel(score=name).fillna(0.0).values) > 0
        ]
        first = next(
            (
                name
                for name in ("mirror", f"attention to {about}", ORDER, RANGE, LOOKS[1])
                if name in known
            ),
            LOOKS[1],
        )
        by_first = scores.sel(score=first, drop=True)
        # A clock may run backwards
        ranked = ranked_heads(abs(by_first) if first == ORDER else by_first) or [
            (layer, 0) for layer in self.decoder.by_layer
        ]
        texts = (
            [self._text(prompt, token) for token in prompt.tokens]
            if prompt.token_text is None
            else list(prompt.token_text)
        )
        return {
            "tokens": texts,
            # Tokens of text carry their blanks; others, such as ids, are set apart by one
            "joint": ""
            if any(character.isspace() for text in texts for character in text)
            else " ",
            "spans": {
                name: {
                    "at": [list(map(int, ends)) for ends in contiguous(spans[name])],
                    "colour": colours[name],
                }
                for name in names
            },
            "answer": list(session.scoring.targets(prompt)),
            "start": session.start,
            # The token that predicts the answer
            "token": max(0, session.start - 1),
            "head": list(map(int, ranked[0])),
            "score": first,
            "heads": _map(heads),
        }

    def _view(self, asked: Asked, check: Callable[[], None]) -> dict[str, Any]:
        session = self.session(asked, check)
        seen = self._seen(asked, session)
        numbers = {
            name: {"dims": list(map(str, array.dims)), "values": as_json(array.values)}
            for name, array in seen.data_vars.items()
        }
        numbers["span"] = {"dims": ["span"], "values": [str(name) for name in seen["span"].values]}
        return {
            "numbers": numbers,
            "sentences": [edit.sentence() for edit in session.edits],
            "heads": self._edited_map(session, check) if session.active else None,
            "looking": None if asked.selection is None else self._looking(asked, session),
        }

    def _looking(self, asked: Asked, session: Session) -> dict[str, Any]:
        """Attention to the selection, by state [layer, head]."""
        assert asked.selection is not None
        token = asked.token if asked.looking == "token" else None
        return {
            state: as_json(session.attention_to(asked.selection, token, edited).values)
            for state, edited in (("clean", False), ("changed", True))
            if session.active or not edited
        }

    def _edited_map(self, session: Session, check: Callable[[], None]) -> dict[str, Any]:
        assert session.passes is not None
        # Kept: moving to another token asks for the same map again
        return session.passes.of(session.active, check).result(
            "map", lambda: _map(session.heads(edited=True), session.heads())
        )

    def _seen(self, asked: Asked, session: Session) -> xr.Dataset:
        if not asked.heads:
            raise InputError("no head is chosen; choose one in the map")
        call = session.changed if session.active else session.look
        return call(asked.heads, asked.token, asked.selection, asked.count)

    def _python(self, asked: Asked, check: Callable[[], None]) -> dict[str, Any]:
        return {
            "python": self.session(asked, check).as_python(asked.heads, asked.token, asked.count)
        }

    def _file(self, asked: Asked, check: Callable[[], None]) -> dict[str, Any]:
        """Return the numbers of the view as netCDF with its cell, or as CSV.

        CSV has one row per state, head and token.
        """
        session = self.session(asked, check)
        seen = self._seen(asked, session)
        if asked.ask == "csv":
            table = seen[["position", "weight", "logit"]].rename(key="token_of_key")
            rows = xr.merge(
                [
                    table["position"],
                    *(table[name].rename(token_of_key="token") for name in ("weight", "logit")),
                ],
                compat="override",
            )
            content = (
                rows.to_dataframe().reset_index().to_csv(index=False, lineterminator="\n").encode()
            )
        else:
            attributes = {
                "python": session.as_python(asked.heads, asked.token, asked.count),
                "token": asked.token,
            }
            # netCDF has no attribute without a value
            attributes["edits"] = [edit.sentence() for edit in session.active] or "none"
            # This engine writes to memory: the answer goes to a browser, not to a disk
            content = bytes(seen.assign_attrs(attributes).to_netcdf(engine="h5netcdf"))
        return {
            "name": f"explored.{'csv' if asked.ask == 'csv' else 'nc'}",
            "base64": base64.b64encode(content).decode(),
        }

    def _text(self, prompt: Prompt, token: int) -> str:
        if prompt.token_text is not None and token in prompt.tokens:
            return prompt.token_text[prompt.tokens.index(token)]
        tokenizer = self.decoder.tokenizer
        return f"⟨{token}⟩" if tokenizer is None else str(tokenizer.decode([token]))


def over_the_same_texts(explored: Explored, bridge: nn.Module, name: str = "") -> Explored:
    """Compare an explored model with another one over the same texts.

    The tokens are the same where both have one vocabulary.

    Args:
        explored: Model and prompts.
        bridge: The other model.
        name: Name for `ri.load`.

    Returns:
        Both models, with the prompts of each.

    Raises:
        InputError: The two have neither tokens nor texts in common.
    """
    first, second = explored.decoder, as_decoder(bridge)
    reads, other = first.tokenizer, second.tokenizer
    if (reads is None) != (other is None) or (
        reads is None and first.vocabulary_size != second.vocabulary_size
    ):
        raise InputError(
            "the two checkpoints have no tokens and no texts in common; compare those of one "
            "tokenizer, or two that read text"
        )
    prompts = explored.prompts
    # With one vocabulary the tokens are compared one to one, and need no way through text
    if reads is not None and other is not None and reads.get_vocab() != other.get_vocab():
        prompts = [_in_other_tokens(prompt, reads, other) for prompt in prompts]
    others = (*explored.others, Explored(bridge, prompts, name))
    return Explored(explored.bridge, explored.prompts, explored.name, explored.run, others)


def _moved(session: Session, edit: Edit) -> dict[str, Any]:
    """Return the head and the token to show after an edit: those whose attention it moves most."""
    head, token = session.moves(edit)
    return {"heads": [head], "token": token}


def _in_other_tokens(prompt: Prompt, reads: Any, other: Any) -> Prompt:
    """`prompt` with the tokens of another tokenizer, with spans where it was made from text."""
    if prompt.text is None or prompt.characters is None:
        return prompt_from_text(reads.decode(prompt.tokens, skip_special_tokens=True), {}, other)
    return prompt_from_text(prompt.text, prompt.characters, other)


def message(value: Any) -> Asked:
    """Read a message.

    Args:
        value: The message as JSON gives it.

    Returns:
        The message, its fields checked.

    Raises:
        InputError: A field is unknown, of another type or out of range.
    """
    return validate(value, Asked, "the request")


def prompts_in(run: xr.DataTree) -> list[Prompt]:
    """Read the prompts that a run describes.

    Args:
        run: A run of `ri.analyze`.

    Returns:
        The prompts.

    Raises:
        InputError: The run does not hold them.
    """
    require_run(run)
    group = described_prompts(run)
    if group is None or "token_id" not in group:
        raise InputError(
            "this run does not hold its prompts; analyze again with the measure positions or "
            "attention_rows"
        )
    prompts = []
    for number in map(int, group["prompt"].values):
        told = prompt_tokens(group, number)
        ids = group["token_id"].sel(prompt=number).values[: told.count].tolist()
        spans = {
            name: tuple(places)
            for name, places in told.spans.items()
            # A Prompt derives the rest, and takes generated tokens apart
            if name not in (REST, GENERATED)
        }
        texts = told.texts if told.texts_are == "text" else None
        given = (
            group["position_id"].sel(prompt=number).transpose("token", ...)
            if "position_id" in group
            else None
        )
        prompts.append(
            Prompt(
                tuple(ids),
                spans,
                tuple(told.spans.get(GENERATED, ())),
                token_text=texts,
                position_ids=None if given is None else given.values[: told.count].tolist(),
                documents=1,
            )
        )
    return prompts


@cache
def _color_map(name: str) -> Colormap:
    # Matplotlib makes a copy whenever it is asked, whose table costs more than its colors
    return mpl.colormaps[name]


def _map(heads: xr.Dataset, clean: xr.Dataset | None = None) -> dict[str, Any]:
    """Return scores with their colors by name, and outlines [layer, head, point].

    The colors of edited scores are those of `clean` ones.
    """
    scores = {}
    # [score, layer, head] each. Both states share a scale, or halving all scores would leave the
    # map as it was
    states = [_scores(state).values for state in (heads, clean) if state is not None]
    for number, name in enumerate(heads["score"].values):
        values, *others = (state[number] for state in states)
        color_map, norm = scale(np.stack([values, *others]))
        # Levels of all heads at once, as matplotlib's `to_hex` gives them one by one
        levels = np.round(_color_map(color_map)(norm(values))[..., :3] * 255).astype(int)
        colors = [["#{:02x}{:02x}{:02x}".format(*one) for one in row] for row in levels.tolist()]
        for layer, head in np.argwhere(~np.isfinite(values)).tolist():
            colors[layer][head] = MISSING
        scores[str(name)] = {
            "values": as_json(values),
            "colours": colors,
            "scale": shades(color_map),
            "ends": [float(norm.vmin or 0.0), float(norm.vmax or 0.0)],
            "meaning": MEANINGS.get(str(name), ""),
        }
    outline, index = heads["outline"], _by_index(heads)
    return {
        "scores": scores,
        # One line in all heads tells nothing
        "outlines": as_json(outline.where(~index).values),
        "by_index": index.values.tolist(),
        "orders": _orders(heads),
    }


def _orders(heads: xr.Dataset) -> dict[str, Any] | None:
    """Orders by distance: a row for every layer and all its heads with the same positions.

    None where all positions are the token index.
    """
    if "order" not in heads:
        return None
    order, rows = heads["order"].transpose("layer", "head", "distance"), {}
    for layer, of_layer in zip(order["layer"].values.tolist(), order.values, strict=True):
        for head, values in zip(order["head"].values.tolist(), of_layer, strict=True):
            if np.isfinite(values).any():
                row = rows.setdefault((layer, values.tobytes()), {"heads": [], "values": values})
                row["heads"].append([layer, head])
    return {
        "distances": order["distance"].values.tolist(),
        "rows": [
            {"heads": row["heads"], "values": as_json(row["values"])} for row in rows.values()
        ],
    }


def _by_index(heads: xr.Dataset) -> xr.DataArray:
    """Whether positions are the token index [layer, head]."""
    outline = heads["outline"]
    return (outline == outline["point"]).all("point").transpose("layer", "head")


def _scores(heads: xr.Dataset) -> xr.DataArray:
    """Scores [score, layer, head], without the ranges that hide those of learned positions.

    The token index ranges over the prompt, beside which learned ranges are next to 0.
    """
    scores, index = heads["head_score"], _by_index(heads)
    return scores if index.all() else scores.where(~(index & (scores["score"] == RANGE)))
