"""Answers of a model and its prompts to the messages of a page, as JSON.

    Explored(bridge, prompts).answer(message)    the answer to a message that has one
    Explored(bridge, prompts).events(message)    events of "continue" and "suggest"

Passes of the last `PROMPTS` prompts are kept. This module knows nothing about servers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

import xarray as xr
from torch import nn

from repo_interp.analysis.coercion import indexed_prompts, require_known_tokens
from repo_interp.analysis.memory_needed import require_memory_for_pass
from repo_interp.errors import InputError
from repo_interp.explorer.explored_run import head_table
from repo_interp.explorer.head_map_json import map_json, opening
from repo_interp.explorer.messages import MOST_TOKENS, Asked
from repo_interp.explorer.passes import Passes
from repo_interp.explorer.row_files import as_csv, as_netcdf
from repo_interp.explorer.session import Session
from repo_interp.explorer.session_edits import POSITIONS, Edit, count_rotating_pairs, parameter_of
from repo_interp.explorer.steps import Steps
from repo_interp.models.decoder import as_decoder
from repo_interp.plots.marks.drawing import contiguous
from repo_interp.plots.marks.reading import ordered_spans
from repo_interp.plots.style import scheme_colour, scheme_name, span_colours
from repo_interp.storage.json_values import as_json
from repo_interp.tasks import Prompt
from repo_interp.tasks.prompt import REST, main_span

PROMPTS = 2
"""Prompts whose passes are kept."""
PROBED: tuple[tuple[Any, float | None], ...] = (("ranked", None), ("linear", 1.0), ("yarn", 1.0))
"""Edits whose refusals, by layer, represent those of all kinds: a kind and its value."""


class Explored:
    """A bridge and its prompts, as a page explores them.

    One answer is computed at a time; the caller is responsible for that.
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

        Raises InputError if there is no prompt, or if one has a token that the model lacks.
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
            # Also closed if the page stops asking; else the thread of the work would wait forever.
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
        # Both advance together, so that the page can show the first difference.
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
            "head_table": None if self.run is None else head_table(self.run),
        }

    def _prompt(self, asked: Asked, check: Callable[[], None]) -> dict[str, Any]:
        session = self.session(asked, check)
        prompt, heads = session.prompt, session.heads()
        spans = prompt.all_spans()
        names = [name for name in ordered_spans(spans) if name != REST]
        colours = span_colours(names)
        attributes = {} if self.run is None else self.run.attrs
        about = str(attributes.get("main_span") or main_span([prompt]))
        first, head = opening(heads, about)
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
            "head": list(map(int, head or (next(iter(self.decoder.by_layer)), 0))),
            "score": first,
            "heads": map_json(heads),
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
            "map", lambda: map_json(session.heads(edited=True), session.heads())
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
        """The numbers of the view as a file."""
        session = self.session(asked, check)
        seen = self._seen(asked, session)
        if asked.ask == "csv":
            content = as_csv(seen)
        else:
            cell = session.as_python(asked.heads, asked.token, asked.count)
            content = as_netcdf(seen, cell, asked.token, session.active)
        return {
            "name": f"explored.{'csv' if asked.ask == 'csv' else 'nc'}",
            "base64": base64.b64encode(content).decode(),
        }

    def _text(self, prompt: Prompt, token: int) -> str:
        if prompt.token_text is not None and token in prompt.tokens:
            return prompt.token_text[prompt.tokens.index(token)]
        tokenizer = self.decoder.tokenizer
        return f"⟨{token}⟩" if tokenizer is None else str(tokenizer.decode([token]))


def _moved(session: Session, edit: Edit) -> dict[str, Any]:
    """Return the head and the token to show after an edit: those whose attention it moves most."""
    head, token = session.moves(edit)
    return {"heads": [head], "token": token}
