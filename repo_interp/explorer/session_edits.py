"""One change of positions, frequencies or outputs, as data: the heads and the kind of change.

    kind                change of heads, for all tokens                      parameter  function
    linear              frequencies divided by a factor                      value      rescaled
    ntk, yarn           NTK-aware frequencies, YaRN's                        value      rescaled
    stopped             frequency 0 for some rotary pairs, the fastest is 0  pairs      rescaled
    zero_ablated        output 0                                                        ablate
    mean_ablated        output at its mean over the tokens of the prompt                ablate
    pairs_ablated       queries 0 in some rotary pairs                       pairs      ablate
    pairs_mean_ablated  queries and keys at their means in some rotary pairs pairs      ablate

Changes of positions are the classes of `interventions.edits` with a `form`. A parameter has a field
with its name (`source`, `seed`, `starts`), or else is `value`.

An edit from a page and an edit from Python are checked against the same types. An edit names no
file and contains no code. Functions of `interventions` apply it. This module knows nothing about
prompts except their spans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, Field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from torch import Tensor, nn

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.ablation import HeadMeans, PairMeans, ablate
from repo_interp.interventions.frequencies import require_rotation, rescaled
from repo_interp.interventions.position_edit import KINDS, PositionEdit, first_of
from repo_interp.interventions.replacing import token_table
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import as_decoder
from repo_interp.values import Finite, Seed

POSITIONS: Mapping[str, type[PositionEdit]] = {
    name: kind for name, kind in KINDS.items() if kind.form
}
"""Kinds of edits of positions in the form."""
_OTHERS: Mapping[str, tuple[str, str]] = {
    "linear": ("value", "frequencies divided by {:g}"),
    "ntk": ("value", "NTK-aware frequencies, factor {:g}"),
    "yarn": ("value", "YaRN's frequencies, factor {:g}"),
    "stopped": ("pairs", "frequency 0 for pairs {}"),
    "zero_ablated": ("", "output 0"),
    "mean_ablated": ("", "the mean output over the prompt"),
    "pairs_ablated": ("pairs", "queries 0 in pairs {}"),
    "pairs_mean_ablated": ("pairs", "mean queries and keys in pairs {}"),
}
"""By kind of the other edits: the parameter, and the edit in words."""
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[(*POSITIONS, *_OTHERS)]
# 4 million: beyond any prompt, and small enough for a table of tokens
Index = Annotated[int, Interval(ge=0, lt=1 << 22)]
"""Number of a layer, head or token."""
MOST_HEADS = 4096
"""Most heads of one edit."""
MEANS: Mapping[str, tuple[str, str]] = {
    "mean_ablated": ("means", "ri.head_means(bridge, tokens[0])"),
    "pairs_mean_ablated": ("pair_means", "ri.interventions.query_key_means(bridge, tokens)"),
}
"""By kind that needs means of the prompt: their name and the call that makes them, in Python."""


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
    """A change of positions, frequencies or outputs of heads.

    Name `heads` as (layer, head) pairs, or a `layer`; name `tokens`, or a `span`, or neither for
    all tokens; frequencies and outputs change for all tokens.
    """

    # Frozen, so that edits are keys of kept passes; strict, since edits come from a web page
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Kind
    heads: Heads = ()
    named: Annotated[str, Len(0, 80)] = ""
    """The name of the heads in words; it chooses none."""
    layer: Index | None = None
    tokens: Tokens = ()
    span: str = ""
    value: Finite | None = None
    """The constant (None: the mean over the tokens), the factor, or the number of positions."""
    source: Index | None = None
    """The token whose position the other tokens get."""
    seed: Seed | None = None
    starts: Annotated[Tokens, Len(1)] | None = None
    """The first token of every segment after the first one."""
    pairs: Annotated[Tokens, Len(1)] | None = None
    """Numbers of rotary pairs, the fastest first."""
    on: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Edit:
        # Both, or neither
        if bool(self.heads) == (self.layer is not None):
            raise ValueError(
                "an edit names heads as (layer, head) pairs or a layer; give one of the two"
            )
        if self.tokens and self.span:
            raise ValueError("an edit names tokens or a span; give one of the two")
        given = list(self._given)
        name, needed = parameter_of(self.kind)
        # Only the parameter is allowed, and it may be absent if it is not needed.
        if given != [name] and (needed or given):
            takes = f"{'needs' if needed else 'takes'} {name or 'no parameter'}"
            raise ValueError(f"{self.kind} {takes}; got {', '.join(given) or 'none'}")
        if (self.tokens or self.span) and not self.changes_positions:
            raise ValueError(f"{self.kind} is for all tokens; name no tokens and no span")
        return self

    @property
    def changes_positions(self) -> bool:
        """Whether positions change, not frequencies or outputs."""
        return self.kind in POSITIONS

    @property
    def first_layer(self) -> int:
        """The first layer that changes."""
        return min(layer for layer, _ in self.heads) if self.layer is None else self.layer

    @property
    def parameter(self) -> Any:
        """The constant, factor, shift, token, seed, starts or pairs; None if there is none."""
        if asked := self._asked:
            # Without a value in the message, the edit uses its default.
            return getattr(self._change(None), asked.name)
        return next(iter(self._given.values()), None)

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
                f"the prompt has no span {quoted(self.span)}; it has {', '.join(spans) or 'none'}"
            )
        tokens = tuple(spans[self.span]) if self.span else self.tokens
        # Token 0 is in every prompt, so it can replace a missing source
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
        where = self.named or first_of(heads) if self.layer is None else f"layer {self.layer}"
        if self.span:
            where += f", span {self.span}"
        elif self.tokens:
            where += f", token{'s' if len(self.tokens) > 1 else ''} {first_of(self.tokens)}"
        if self.changes_positions:
            return f"{where}: {self._change(None).in_words()}"
        value = self.parameter
        words = _OTHERS[self.kind][1].format(first_of(value) if isinstance(value, tuple) else value)
        return f"{where}: {words}"

    def python(self, model: nn.Module, tokens: Sequence[int] | None) -> str:
        """Write the call of the library that makes the same change.

        Args:
            model: Repositioned model or bridge.
            tokens: Result of `tokens_in` for the prompt.

        Returns:
            Code, with the model as `bridge` and means of the prompt as `MEANS` names them.
        """
        if not self.changes_positions:
            function, keywords = self._call(model)
            given = [f"{name}={value!r}" for name, value in keywords.items()]
            given += [f"means={MEANS[self.kind][0]}"] if self.kind in MEANS else []
            return f"ri.interventions.{function.__name__}(bridge, {', '.join(given)})"
        by_name = f"{self._asked.name}=" if self._asked and self._asked.kw_only else ""
        arguments = [
            "bridge",
            *([] if self.parameter is None else [f"{by_name}{self.parameter!r}"]),
            f"heads={list(self.heads)}" if self.layer is None else f"layer={self.layer}",
            *([] if tokens is None else [f"tokens={listed(tokens)}"]),
        ]
        return f"ri.interventions.{self.kind}({', '.join(arguments)})"

    def context(
        self,
        model: nn.Module,
        tokens: Sequence[int] | None,
        means: HeadMeans | PairMeans | None = None,
    ) -> Callable[[], AbstractContextManager[None]]:
        """Prepare the edit for a prompt, to be applied again and again.

        A continuation applies it again for every token.

        Args:
            model: Repositioned model or bridge.
            tokens: Result of `tokens_in` for the prompt; None: all tokens, also generated ones.
            means: Mean outputs of heads, or means of queries and keys, for the kinds of `MEANS`.

        Returns:
            Function without arguments that returns a context; the context applies the edit.

        Raises:
            InputError: The model lacks the layer or the pairs, or the layer does not rotate; the
                context itself refuses the rest.
        """
        if not self.changes_positions:
            function, keywords = self._call(model)
            if self.kind in MEANS:
                keywords["means"] = means
            return partial(function, model, **keywords)
        # The edit has the tokens: the argument `tokens` of `replaced` warns about tokens that a
        # prompt does not reach yet.
        edit = self._change(None if tokens is None else token_table(tokens))
        return partial(edit.on, model, self.heads or None, layer=self.layer)

    @property
    def _given(self) -> dict[str, Any]:
        """The parameters that the message names: one at most."""
        names = ("value", "source", "seed", "starts", "pairs")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def _asked(self) -> Field | None:
        """The parameter of an edit of positions."""
        return POSITIONS[self.kind].asked() if self.changes_positions else None

    def _change(self, tokens: Tensor | None) -> PositionEdit:
        """The edit of positions, with its default if the message has no parameter."""
        asked, given = self._asked, [*self._given.values()]
        named = {asked.name: given[0]} if asked and given else {}
        return POSITIONS[self.kind](**named, tokens=tokens)

    def _call(self, model: nn.Module) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function for frequencies or outputs, and its arguments except model and means."""
        # Only the first layer is checked here: the others are checked when the context is entered
        (attention,) = as_decoder(model).attentions([self.first_layer])
        heads = list(self.heads or ((self.first_layer, head) for head in range(attention.heads)))
        count = count_rotating_pairs(attention)
        if self.pairs is not None:
            require_rotation(attention)
            if max(self.pairs) >= count:
                raise InputError(
                    f"pairs of layer {attention.layer_idx} are 0 to {count - 1}; got "
                    f"{max(self.pairs)}"
                )
        if self.kind.endswith("ablated"):
            return ablate, {"heads": heads} | ({"pairs": list(self.pairs)} if self.pairs else {})
        where: dict[str, Any] = {"heads": heads} if self.heads else {"layer": self.layer}
        if self.pairs is None:
            return rescaled, where | {self.kind: self.value}
        factors = [float(pair not in self.pairs) for pair in range(count)]
        return rescaled, where | {"factors": factors}

    def refusal(self, model: nn.Module) -> str:
        """Say why a model does not take the edit.

        Args:
            model: Repositioned model or bridge.

        Returns:
            One line; empty if it takes the edit.
        """
        try:
            # Entering the context makes all checks, and no pass is needed
            with self.context(model, None)():
                return ""
        except InputError as error:
            return str(error)


def parameter_of(kind: str) -> tuple[str, bool]:
    """Return the field of an `Edit` that holds the parameter of a kind.

    Args:
        kind: Kind of edit.

    Returns:
        Name of the field, "" if there is no parameter, and whether it is needed.
    """
    if kind not in POSITIONS:
        name = _OTHERS[kind][0]
        return name, bool(name)
    asked = POSITIONS[kind].asked()
    if asked is None:
        return "", False
    return asked.name if asked.name in Edit.model_fields else "value", asked.default is MISSING


def count_rotating_pairs(attention: RepositionedAttention) -> int:
    """Count the rotary pairs of a layer that rotate.

    Args:
        attention: A layer.

    Returns:
        Number of pairs of a head with a frequency other than 0.
    """
    return int((attention.rotation.frequencies != 0).sum())


def listed(numbers: Sequence[int]) -> str:
    """Write numbers as Python, as a range where they are one.

    Args:
        numbers: Indices, at least one.

    Returns:
        Code of a list or a range.
    """
    whole = range(min(numbers), max(numbers) + 1)
    return repr(whole if list(numbers) == list(whole) and len(whole) > 2 else list(numbers))
