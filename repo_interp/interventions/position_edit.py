"""Base class of position edits: one class has the parameters, words and arithmetic of a kind.

The kinds are subclasses of `PositionEdit` in `edits`. Everything else follows from the class:

    function of `ri.interventions`        has the name of the class in lower case; arguments are its fields (`as_function`)
    row of the explorer's form            if the class has a `form`
    kind of the experiment `effects`      if the class has the words `become`

An edit is a `Change` of `replaced`, which chooses layers and heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, replace
from functools import cache, wraps
from typing import Any, ClassVar, dataclass_transform, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.interventions.replacing import (
    Heads,
    Layers,
    PassContext,
    Tokens,
    replaced,
    tokens_at,
)
from repo_interp.models.lasting import ModelEdit
from repo_interp.values import checked

KINDS: dict[str, type[PositionEdit]] = {}
"""Kinds of edits by name, in the order in which they are defined."""


@dataclass(frozen=True)
class FormRow:
    """A row of the explorer's form."""

    says: str
    """Label of the kind in the list of kinds."""
    parameter: str = ""
    """The field of the edit that the form has an input for; "": none."""
    label: str = ""
    hint: str = ""


def bounded(named: str, *, default: Any = MISSING, kw_only: bool = False) -> Any:
    """Declare a field whose type and range are checked.

    Args:
        named: Name of the field in messages.
        default: Default, if any.
        kw_only: Whether the field is a keyword argument only.

    Returns:
        The field.
    """
    return field(default=default, kw_only=kw_only, metadata={"named": named})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field, bounded))
@dataclass(frozen=True, eq=False)
class PositionEdit:
    """A change of positions for `replaced`, which calls it in every pass.

    The fields of a subclass are its parameters. Raises InputError for an invalid value.
    """

    kind: ClassVar[str] = ""
    words: ClassVar[str] = ""
    """Phrase for the new positions in sentences of the explorer, with fields in braces."""
    form: ClassVar[FormRow | None] = None
    """The row of the explorer's form; None: no row."""
    become: ClassVar[str] = ""
    """Phrase for the new positions in tables and charts of `effects`; "": not a kind of `effects`.
    """
    does: ClassVar[str] = ""
    """Phrase for the change in sentences of `effects`, as in "freezing them costs 2 nats"."""
    needs: ClassVar[str] = ""
    """Method of `EditedPrompts` with the data that `of_prompts` needs of each prompt."""
    is_function: ClassVar[bool] = True
    """Whether `ri.interventions` has a function of this name."""

    _: KW_ONLY
    tokens: Tensor | None = None
    """The tokens to change (`replacing.token_table`); a pass may lack them. None: all."""
    _of_prompt: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Results of `of_prompt` by layer and rows."""

    def __init_subclass__(cls, is_kind: bool = True) -> None:
        """Make the class a dataclass, and register it as a kind."""
        dataclass(frozen=True, eq=False)(cls)
        if is_kind:
            cls.kind = cls.__name__.lower()
            KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        """Check the numbers."""
        kinds = get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            if each.metadata:
                value = checked(getattr(self, each.name), kinds[each.name], each.metadata["named"])
                object.__setattr__(self, each.name, value)  # the class is frozen

    def __call__(
        self, positions: Float[Tensor, "prompt row token"], here: PassContext
    ) -> Float[Tensor, "prompt row token"]:
        """Return `positions` after the edit.

        Args:
            positions: Positions of the chosen rows.
            here: Layer, heads and tokens of the pass.

        Returns:
            New positions; without `tokens` they broadcast to `positions`.

        Raises:
            InputError: The value does not fit the prompts, or the prompt is in the cache.
        """
        if self.tokens is None:
            return self.edited(positions, here)
        chosen = tokens_at(self.tokens, here.index)
        here = replace(here, chosen=chosen if here.chosen is None else chosen & here.chosen)
        return torch.where(chosen[:, None], self.edited(positions, here), positions)

    def edited(self, z: Float[Tensor, "prompt row token"], here: PassContext) -> Tensor:
        """Return the new positions of all tokens: the arithmetic of the kind.

        Args:
            z: Positions of the chosen rows.
            here: Layer, heads and tokens of the pass.

        Returns:
            New positions, which broadcast to `z`.

        Raises:
            InputError: The parameters do not fit the prompts, or the prompt is in the cache.
        """
        raise NotImplementedError

    def of_prompt(
        self, z: Tensor, here: PassContext, compute: Callable[[Tensor, PassContext], Tensor]
    ) -> Tensor:
        """Compute a quantity of the prompt once, and keep it for new tokens in later passes.

        Args:
            z: Positions of the chosen rows.
            here: Layer, heads and tokens of the pass.
            compute: Function of `z` and `here`.

        Returns:
            The result of `compute` for the prompt.

        Raises:
            InputError: The prompt was in the cache before the edit began.
        """
        # One edit serves several layers, so results are kept by layer and rows.
        rows = here.layer, here.heads
        # Without cached tokens, this pass is the prompt; later passes use its result.
        if here.start == 0:
            self._of_prompt[rows] = compute(z, here)
        elif len(self._of_prompt.get(rows, ())) != len(z):
            raise InputError(
                f"positions of a prompt in the cache are not known, so none are {self.kind}; "
                "enter the context before the prompt"
            )
        return self._of_prompt[rows]

    @property
    def prompts(self) -> int:
        """Number of prompts for which the edit has values; 1: any number."""
        return 1

    def on(
        self,
        model: nn.Module,
        heads: Heads = None,
        *,
        layer: Layers = None,
        tokens: Tokens = None,
    ) -> ModelEdit:
        """Apply the edit to a model.

        Args:
            model: Repositioned model or bridge.
            heads: (layer, head) pairs, one or several; None: all heads of the layers.
            layer: One layer or several, instead of `heads`; None: all that assign positions.
            tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

        Returns:
            A context manager; positions are changed while it lasts.
        """
        return replaced(model, self, heads, layer=layer, tokens=tokens, prompts=self.prompts)

    def in_words(self) -> str:
        """Describe the new positions in words, such as "times 0.5".

        Returns:
            The words, with the parameters.
        """
        return self.words.format(**vars(self))

    @classmethod
    def asked(cls) -> Field | None:
        """Return the field that the form has an input for.

        Returns:
            The field; None without an input.
        """
        return next((e for e in fields(cls) if cls.form and e.name == cls.form.parameter), None)

    @classmethod
    def of_prompts(cls, prompts: Any) -> PositionEdit:
        """Make the edit that `effects` measures.

        Args:
            prompts: An `experiments.position_changes.EditedPrompts`.

        Returns:
            The edit for all tokens.
        """
        return cls()


def first_of(names: Sequence[Any]) -> str:
    """List the first four of several.

    Args:
        names: Numbers or words.

    Returns:
        The names, followed by dots if there are more.
    """
    return ", ".join(map(str, names[:4])) + (" ..." if len(names) > 4 else "")


_FAMILY = """
    model: Repositioned model or bridge.
    heads: (layer, head) pairs, one or several; None: all heads of the layers.
    layer: One layer or several, instead of `heads`; None: all that assign positions.
    tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

Returns:
    A context manager; positions are changed while it lasts.

Raises:
    InputError: A parameter has a wrong type or is out of range, or the model lacks the layers,
        heads or tokens, or they have no positions; or, in the pass, the edit does not fit the
        prompts, or the prompt was cached before the edit began.
"""
"""End of the docstring of every function of an edit."""


@cache
def as_function(kind: type[PositionEdit]) -> Callable[..., ModelEdit]:
    """Make the function of `ri.interventions` that applies a kind of edit.

    Args:
        kind: Class of the edit.

    Returns:
        Function of the model, the positional fields and `heads`; `layer`, `tokens` and all other
        fields are keyword arguments.
    """
    on, edit = inspect.signature(PositionEdit.on), inspect.signature(kind)
    _, model, heads, *where = on.parameters.values()
    parameters = [each for name, each in edit.parameters.items() if name != "tokens"]
    # Keyword-only parameters must come last.
    order = sorted([model, *parameters, heads, *where], key=lambda each: each.kind)
    signature = on.replace(parameters=order)

    @wraps(kind, updated=())
    def function(*arguments: Any, **by_name: Any) -> ModelEdit:
        values = signature.bind(*arguments, **by_name).arguments
        applied = {name: values.pop(name) for name in on.parameters if name in values}
        return kind(**values).on(**applied)

    text = inspect.cleandoc(kind.__doc__ or "")
    function.__doc__ = text + ("" if "Args:" in text else "\n\nArgs:") + _FAMILY
    function.__name__ = kind.kind
    function.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return function
