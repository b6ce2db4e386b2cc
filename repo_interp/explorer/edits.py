"""One change of positions, as data: which heads, which tokens, and what their positions become.

    kind         position of token i becomes           parameter        function of `ri.interventions`
    linearised   i, the token index                                     linearised
    frozen       one constant                          value            frozen
    copied       that of token j                       source = j       copied
    permuted     those of the same tokens, shuffled    seed             permuted
    scaled       value times as much                   value            scaled
    shifted      value more                            value            shifted

An edit comes from a page or from Python and is held to the same types either way. It names no file
and holds no code. Knows nothing about prompts beyond the spans that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval, Len
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.interventions.positions import shuffled, to_index, to_mean, to_token, to_value
from repo_interp.interventions.replacing import Change, Here, changed_rows, replaced
from repo_interp.values import Finite, Seed

Kind = Literal["linearised", "frozen", "copied", "permuted", "scaled", "shifted"]
Index = Annotated[int, Interval(ge=0, lt=1 << 22)]
"""The number of a layer, of a head or of a token."""
MOST_HEADS = 4096
"""Heads of one edit."""


def as_tuple(value: Any) -> Any:
    """Lists of JSON as tuples, at every level."""
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value


Heads = Annotated[tuple[tuple[Index, Index], ...], Len(0, MOST_HEADS), BeforeValidator(as_tuple)]
Tokens = Annotated[tuple[Index, ...], Len(0, 1 << 16), BeforeValidator(as_tuple)]


class Edit(BaseModel):
    """A change of positions.

    Name `heads` as (layer, head) pairs, or a `layer`; name `tokens`, or a `span`, or neither for
    all tokens.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Kind
    heads: Heads = ()
    named: Annotated[str, Len(0, 80)] = ""
    """What the heads are called in words; it chooses none."""
    layer: Index | None = None
    tokens: Tokens = ()
    span: str = ""
    value: Finite | None = None
    """The constant (None: the mean over the tokens), the factor, or the number of positions."""
    source: Index | None = None
    """The token whose position the others get."""
    seed: Seed | None = None
    on: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Edit:
        if bool(self.heads) == (self.layer is not None):
            raise ValueError(
                "an edit names heads as (layer, head) pairs or a layer; give one of the two"
            )
        if self.tokens and self.span:
            raise ValueError("an edit names tokens or a span; give one of the two")
        given = {name for name in ("value", "source", "seed") if getattr(self, name) is not None}
        wanted, optional = _PARAMETERS[self.kind]
        if not wanted <= given <= wanted | optional:
            needs = (
                f"needs {', '.join(wanted)}"
                if wanted
                else f"takes {', '.join(optional) or 'no parameter'}"
            )
            raise ValueError(f"{self.kind} {needs}; got {', '.join(sorted(given)) or 'none'}")
        return self

    @property
    def first_layer(self) -> int:
        """The first layer whose positions change."""
        return min(layer for layer, _ in self.heads) if self.layer is None else self.layer

    def tokens_in(self, spans: Mapping[str, Sequence[int]], count: int) -> tuple[int, ...] | None:
        """The tokens in a prompt of `count` tokens with `spans`; None for all.

        Raises InputError for those that it lacks.
        """
        if self.span and self.span not in spans:
            raise InputError(
                f"the prompt has no span {self.span!r}; it has {', '.join(spans) or 'none'}"
            )
        tokens = tuple(spans[self.span]) if self.span else self.tokens
        beyond = [
            token
            for token in (*tokens, *(() if self.source is None else (self.source,)))
            if token >= count
        ]
        if beyond:
            raise InputError(
                f"an edit names token {beyond[0]}; the prompt's tokens are 0 to {count - 1}"
            )
        return tokens or None

    def sentence(self) -> str:
        """The edit in words: "layer 2: the token index"."""
        named = ", ".join(f"L{layer} H{head}" for layer, head in self.heads[:4])
        where = (
            f"layer {self.layer}"
            if self.layer is not None
            else self.named or named + (" ..." if len(self.heads) > 4 else "")
        )
        shown = ", ".join(map(str, self.tokens[:4])) + (" ..." if len(self.tokens) > 4 else "")
        which = (
            f", span {self.span}"
            if self.span
            else f", token{'s' if len(self.tokens) > 1 else ''} {shown}"
            if shown
            else ""
        )
        number = None if self.value is None else f"{self.value:g}"
        what = {
            "linearised": "the token index",
            "frozen": f"the constant {number}" if number is not None else "the mean position",
            "copied": f"the position of token {self.source}",
            "permuted": f"shuffled, seed {self.seed or 0}",
            "scaled": f"times {number}",
            "shifted": f"shifted by {number}",
        }
        return f"{where}{which}: {what[self.kind]}"

    def python(self, tokens: Sequence[int] | None) -> str:
        """The call of the library that makes the same change, given `tokens_in` of the prompt."""
        arguments = [
            "bridge",
            *([] if self.kind not in _FIRST else [repr(getattr(self, _FIRST[self.kind]))]),
        ]
        arguments.append(
            f"layer={self.layer}" if self.layer is not None else f"heads={list(self.heads)}"
        )
        arguments += [] if tokens is None else [f"tokens={listed(tokens)}"]
        arguments += (
            [f"value={self.value!r}"] if self.kind == "frozen" and self.value is not None else []
        )
        arguments += [f"seed={self.seed or 0}"] if self.kind == "permuted" else []
        return f"ri.interventions.{self.kind}({', '.join(arguments)})"


_PARAMETERS: Mapping[str, tuple[set[str], set[str]]] = {
    "linearised": (set(), set()),
    "frozen": (set(), {"value"}),
    "copied": ({"source"}, set()),
    "permuted": (set(), {"seed"}),
    "scaled": ({"value"}, set()),
    "shifted": ({"value"}, set()),
}
"""By kind, the parameters that it needs, and those that it may have."""
_FIRST = {"copied": "source", "scaled": "value", "shifted": "value"}
"""Parameters that the functions of `ri.interventions` take in the second place."""


class Placed:
    """An edit for one prompt, ready to be entered again and again: a continuation enters it anew
    for every token.
    """

    def __init__(self, model: nn.Module, edit: Edit, tokens: Sequence[int] | None) -> None:
        """`tokens`: of the prompt; None: all, also those that are generated."""
        self.model, self.edit, self.tokens = (
            model,
            edit,
            None if tokens is None else torch.tensor(tokens),
        )
        self._change = self._made()

    def applied(self) -> AbstractContextManager[None]:
        """The context in which the change is in force."""
        return replaced(self.model, self._of_tokens, self.edit.heads or None, layer=self.edit.layer)

    def _made(self) -> Change:
        value, source = self.edit.value or 0.0, self.edit.source or 0
        changes: dict[str, Any] = {
            "linearised": lambda: to_index,
            "frozen": lambda: to_mean() if self.edit.value is None else to_value(value),
            "copied": lambda: to_token(source),
            "permuted": lambda: shuffled(self.edit.seed or 0),
            "scaled": lambda: lambda positions, here: value * positions,
            "shifted": lambda: lambda positions, here: positions + value,
        }
        return changes[self.edit.kind]()

    def _of_tokens(self, positions: Tensor, here: Here) -> Tensor:
        """The change of the chosen tokens alone.

        Not the `tokens` of `replaced`, which notes those that a prompt does not reach yet.
        """
        if self.tokens is None:
            return self._change(positions, here)
        chosen = torch.isin(here.index, self.tokens.to(here.index.device)).expand(
            len(positions), -1
        )
        chosen = chosen if here.chosen is None else chosen & here.chosen
        return changed_rows(positions, self._change, replace(here, chosen=chosen))


def listed(numbers: Sequence[int]) -> str:
    """Numbers as Python: a range where they are one."""
    first, last = min(numbers), max(numbers)
    whole = list(numbers) == list(range(first, last + 1)) and len(numbers) > 2
    return f"range({first}, {last + 1})" if whole else str(list(numbers))
