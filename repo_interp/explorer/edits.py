"""One change of positions, as data: which heads, which tokens, and what their positions become.

    kind         position of token i becomes           parameter        function of `ri.interventions`
    linearised   i, the token index                                     linearised
    frozen       one constant                          value            frozen
    copied       that of token j                       source = j       copied
    permuted     those of the same tokens, shuffled    seed             permuted
    scaled       value times as much                   value            scaled
    shifted      value more                            value            shifted
    ranked       its rank among those of the prompt                     ranked
    segmented    the number of its segment             starts           segmented

An edit comes from a page or from Python and is checked against the same types either way. It names
no file and holds no code. `interventions.edits` applies it. Knows nothing about prompts beyond the
spans that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from torch import nn

from repo_interp.errors import InputError
from repo_interp.interventions.edits import PositionEdit
from repo_interp.interventions.replacing import replaced, token_table
from repo_interp.values import Finite, Seed

Kind = Literal[
    "linearised", "frozen", "copied", "permuted", "scaled", "shifted", "ranked", "segmented"
]
Index = Annotated[int, Interval(ge=0, lt=1 << 22)]
"""The number of a layer, of a head or of a token."""
MOST_HEADS = 4096
"""Heads of one edit."""


def as_tuple(value: Any) -> Any:
    """Turn lists of JSON into tuples, at every level.

    Args:
        value: Any value of JSON.

    Returns:
        Tuples for lists, and other values unchanged.
    """
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
    starts: Annotated[Tokens, Len(1)] | None = None
    """The first token of every segment after the first one."""
    on: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Edit:
        if bool(self.heads) == (self.layer is not None):
            raise ValueError(
                "an edit names heads as (layer, head) pairs or a layer; give one of the two"
            )
        if self.tokens and self.span:
            raise ValueError("an edit names tokens or a span; give one of the two")
        given = [
            name
            for name in ("value", "source", "seed", "starts")
            if getattr(self, name) is not None
        ]
        name, needed, *_ = _KINDS[self.kind]
        if given != [name] and (needed or given):
            takes = f"{'needs' if needed else 'takes'} {name or 'no parameter'}"
            raise ValueError(f"{self.kind} {takes}; got {', '.join(given) or 'none'}")
        return self

    @property
    def first_layer(self) -> int:
        """The first layer whose positions change."""
        return min(layer for layer, _ in self.heads) if self.layer is None else self.layer

    @property
    def parameter(self) -> Any:
        """The constant, factor, shift, token, seed or starts; None where there is none."""
        return (
            self.seed or 0 if self.kind == "permuted" else getattr(self, _KINDS[self.kind][0], None)
        )

    def tokens_in(self, spans: Mapping[str, Sequence[int]], count: int) -> tuple[int, ...] | None:
        """Find the tokens that change in a prompt.

        Args:
            spans: Indices of tokens by the name of their span.
            count: Tokens of the prompt.

        Returns:
            Indices; None for all tokens.

        Raises:
            InputError: The prompt lacks the span or a token.
        """
        if self.span and self.span not in spans:
            raise InputError(
                f"the prompt has no span {self.span!r}; it has {', '.join(spans) or 'none'}"
            )
        tokens = tuple(spans[self.span]) if self.span else self.tokens
        last = max((*tokens, *(self.starts or ()), self.source or 0))
        if last >= count:
            raise InputError(
                f"an edit names token {last}; the prompt's tokens are 0 to {count - 1}"
            )
        return tokens or None

    def sentence(self) -> str:
        """Describe the edit: "layer 2: the token index".

        Returns:
            One line without a full stop.
        """
        heads = [f"L{layer} H{head}" for layer, head in self.heads]
        where = self.named or _first(heads) if self.layer is None else f"layer {self.layer}"
        if self.span:
            where += f", span {self.span}"
        elif self.tokens:
            where += f", token{'s' if len(self.tokens) > 1 else ''} {_first(self.tokens)}"
        words = _KINDS[self.kind][2]
        if (self.kind, self.value) == ("frozen", None):
            words = "the mean position"
        return f"{where}: {words.format(self.parameter)}"

    def python(self, tokens: Sequence[int] | None) -> str:
        """Write the call of the library that makes the same change.

        Args:
            tokens: Result of `tokens_in` for the prompt.

        Returns:
            Code, with the model as `bridge`.
        """
        arguments = [
            "bridge",
            *([] if self.parameter is None else [_KINDS[self.kind][3].format(self.parameter)]),
            f"heads={list(self.heads)}" if self.layer is None else f"layer={self.layer}",
            *([] if tokens is None else [f"tokens={listed(tokens)}"]),
        ]
        return f"ri.interventions.{self.kind}({', '.join(arguments)})"

    def position_edit(self, tokens: Sequence[int] | None) -> PositionEdit:
        """Make the edit of a prompt, to be applied again and again.

        A continuation applies it anew for every token.

        Args:
            tokens: Result of `tokens_in` for the prompt; None: all, also those that are generated.

        Returns:
            The edit as `interventions` has it. It names its tokens itself: the `tokens` of
            `replaced` warns of those that a prompt does not reach yet.
        """
        table = None if tokens is None else token_table(tokens)
        value = self.parameter
        if self.kind == "segmented":
            value = token_table(value), 0.0, 1.0
        return PositionEdit(self.kind, value, table)

    def applied(self, model: nn.Module, change: PositionEdit) -> AbstractContextManager[None]:
        """Apply the edit while a context lasts.

        Args:
            model: Repositioned model or bridge.
            change: Result of `position_edit`.

        Returns:
            The context manager.
        """
        return replaced(model, change, self.heads or None, layer=self.layer)


_KINDS: Mapping[str, tuple[str, bool, str, str]] = {
    "linearised": ("", False, "the token index", ""),
    "frozen": ("value", False, "position {:.4g} for every token", "value={!r}"),
    "copied": ("source", True, "the position of token {}", "{}"),
    "permuted": ("seed", False, "shuffled, seed {}", "seed={}"),
    "scaled": ("value", True, "times {:g}", "{!r}"),
    "shifted": ("value", True, "shifted by {:g}", "{!r}"),
    "ranked": ("", False, "ranks of the positions", ""),
    "segmented": ("starts", True, "numbers of segments that begin at tokens {}", "{}"),
}
"""By kind: the parameter, whether it is needed, the edit in words, and the argument in Python."""


def _first(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:4])) + (" ..." if len(names) > 4 else "")


def listed(numbers: Sequence[int]) -> str:
    """Write numbers as Python, as a range where they are one.

    Args:
        numbers: Indices, at least one.

    Returns:
        Code of a list or a range.
    """
    whole = range(min(numbers), max(numbers) + 1)
    return repr(whole if list(numbers) == list(whole) and len(whole) > 2 else list(numbers))
