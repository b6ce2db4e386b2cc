"""An edit of positions: one class holds its parameter, its words and its arithmetic.

The kinds are subclasses of `PositionEdit` in `edits`, and what is offered of a kind follows from its class:

    function of `ri.interventions`        named as the class, in lower case; arguments are its fields (`as_function`)
    row of the explorer's form            where it has a `form`
    kind of the experiment `effects`      where it says what positions `become`

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
    """The kind, in the list of kinds."""
    parameter: str = ""
    """The field of the edit that is asked for; "": none."""
    label: str = ""
    hint: str = ""


def bounded(named: str, *, default: Any = MISSING, kw_only: bool = False) -> Any:
    """Declare a field that is held to its type and range.

    Args:
        named: Its name in messages.
        default: Its default, if any.
        kw_only: Whether it is given by name alone.

    Returns:
        The field.
    """
    return field(default=default, kw_only=kw_only, metadata={"named": named})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field, bounded))
@dataclass(frozen=True, eq=False)
class PositionEdit:
    """A change of positions, ready for `replaced`; it may be entered again for every new token.

    The fields of a subclass are its parameters. Raises InputError for a value that it does not take.
    """

    kind: ClassVar[str] = ""
    words: ClassVar[str] = ""
    """The new positions in a sentence of the explorer, with fields in braces."""
    form: ClassVar[FormRow | None] = None
    """Its row of the explorer's form; None: it has none."""
    become: ClassVar[str] = ""
    """The new positions as tables and charts of `effects` name them; "": it measures none."""
    does: ClassVar[str] = ""
    """The change in a sentence of `effects`, as in "freezing them costs 2 nats"."""
    needs: ClassVar[str] = ""
    """What `of_prompts` needs of each prompt: a method of `EditedPrompts`."""
    is_function: ClassVar[bool] = True
    """Whether `ri.interventions` has a function of this name."""

    _: KW_ONLY
    tokens: Tensor | None = None
    """The tokens that change (`replacing.token_table`), which no pass needs to reach; None: all."""
    _of_prompt: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Results of `of_prompt` by layer and rows."""

    def __init_subclass__(cls, is_kind: bool = True) -> None:
        """Make the class a dataclass, and enter it among the kinds."""
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
            New positions, which broadcast to `positions` where no `tokens` are named.

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
        """Compute once, of the tokens of a prompt, what its new tokens in later passes need too.

        Args:
            z: Positions of the chosen rows.
            here: Layer, heads and tokens of the pass.
            compute: Function of both.

        Returns:
            Its result for the prompt.

        Raises:
            InputError: The prompt is in the cache, and was there before the edit.
        """
        # One edit serves all its layers, and each has positions of a prompt that it must remember
        rows = here.layer, here.heads
        # No token is cached: this pass is the prompt. Later ones find its positions here
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
        """Number of prompts that the edit has values of; 1: any."""
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
            layer: One layer or several, in place of `heads`; None: all that assign positions.
            tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

        Returns:
            A context manager; positions are changed while it lasts.
        """
        return replaced(model, self, heads, layer=layer, tokens=tokens, prompts=self.prompts)

    def in_words(self) -> str:
        """Say what positions become: "times 0.5".

        Returns:
            The words, with the parameters.
        """
        return self.words.format(**vars(self))

    @classmethod
    def asked(cls) -> Field | None:
        """Return the field that the form asks for.

        Returns:
            The field; None where it asks for none.
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
        The words, with dots where there are more.
    """
    return ", ".join(map(str, names[:4])) + (" ..." if len(names) > 4 else "")


_FAMILY = """
    model: Repositioned model or bridge.
    heads: (layer, head) pairs, one or several; None: all heads of the layers.
    layer: One layer or several, in place of `heads`; None: all that assign positions.
    tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

Returns:
    A context manager; positions are changed while it lasts.

Raises:
    InputError: A parameter has another type or is out of its range, or the model lacks the layers,
        heads or tokens, or they have no positions; or, in the pass, the edit does not fit the
        prompts, or the prompt is in the cache.
"""
"""What is said of every function of an edit, after its summary and its parameters."""


@cache
def as_function(kind: type[PositionEdit]) -> Callable[..., ModelEdit]:
    """Make the function of `ri.interventions` that applies a kind of edit.

    Args:
        kind: Class of the edit.

    Returns:
        Function of the model, the fields that may be given by place, `heads`, and by name `layer`,
        `tokens` and all other fields.
    """
    on, edit = inspect.signature(PositionEdit.on), inspect.signature(kind)
    _, model, heads, *where = on.parameters.values()
    given = [each for name, each in edit.parameters.items() if name != "tokens"]
    # By name alone last, as Python asks
    order = sorted([model, *given, heads, *where], key=lambda each: each.kind)
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
