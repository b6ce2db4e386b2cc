"""Every option, parameter and key that states a type or a range is held to it, and refused by its
name: found by reading the parsers, the dataclasses and the pydantic models, so that a new one is
tried as soon as it is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Interval, MinLen, MultipleOf
from pydantic import BaseModel

from position_papers import PAPERS, paper
from position_papers.kit.figure_plan import Row
from position_papers.training.configuration import TrainingConfiguration
from repo_interp.checkpoint_files.fields import Fields, Released, Rope, SpecialTokens
from repo_interp.checkpoint_files.options import SchemeOptions
from repo_interp.cli import _parser
from repo_interp.errors import InputError
from repo_interp.experiments.experiment_catalogue import experiment_named, experiment_names
from repo_interp.explorer.messages import Asked
from repo_interp.explorer.session_edits import Edit
from repo_interp.measures.measure_catalogue import measure_named, measure_names
from repo_interp.runtime.option_texts import with_field
from repo_interp.storage.records import validate
from repo_interp.tasks import make_task, task_names
from repo_interp.tasks.prompt.jsonl import TextLine, TokenLine

OTHER = {
    int: ("1.5", 1.5, True),
    float: ("nan", float("nan"), "wide"),
    bool: ("maybe", 3),
    str: (3,),
    dict: (3,),
}
"""By type, values and texts of another type."""
OWNERS = {
    **{f"measure {name}": functools.partial(measure_named, name) for name in measure_names()},
    **{
        f"experiment {name}": functools.partial(experiment_named, name)
        for name in experiment_names()
    },
    **{f"task {name}": functools.partial(make_task, name) for name in task_names()},
    **{f"figures {name}": lambda name=name: paper(name).options() for name in PAPERS},
    "schemes": SchemeOptions,
    "training": lambda: TrainingConfiguration("reversal"),
}
"""Whatever has options, by what it is."""


def refused(kind):
    """Values that a field of the type `kind` must not take: of another type, and beside each end of
    its range, which a number has.
    """
    marks: list[Any] = []
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        if get_origin(kind) is Annotated:
            kind, *stated = get_args(kind)
            marks += stated
        else:
            kind = next(part for part in get_args(kind) if part is not types.NoneType)
    assert kind not in (int, float) or any(isinstance(mark, Interval) for mark in marks), (
        "a number states its range"
    )
    if get_origin(kind) in (tuple, list):
        yield from ((value,) for value in refused(get_args(kind)[0]))
        yield from ((),) if any(isinstance(mark, MinLen) for mark in marks) else ()
    elif get_origin(kind) is Literal:
        yield "no such word"
    else:
        yield from OTHER[
            dict if get_origin(kind) in (dict, Mapping) or issubclass(kind, BaseModel) else kind
        ]
    for mark in marks:
        if isinstance(mark, Interval):
            ends = ((mark.ge, -1), (mark.gt, 0), (mark.le, 1), (mark.lt, 0))
            yield from (end + beyond for end, beyond in ends if end is not None)
        elif isinstance(mark, MultipleOf):
            yield mark.multiple_of + 1


def as_text(value):
    return ",".join(map(str, value)) or "," if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_is_held_to_what_it_states(owner):
    options = OWNERS[owner]()
    kinds = get_type_hints(type(options), include_extras=True)
    names = [
        field.name for field in dataclasses.fields(options) if field.init and field.name != "name"
    ]
    for name in names:
        for value in refused(kinds[name]):
            if not owner.startswith("figures"):  # whose options are made of texts alone
                with pytest.raises(InputError, match=rf"\b{name} is "):
                    dataclasses.replace(options, **{name: value})
            if "str" not in str(kinds[name]):
                with pytest.raises(InputError, match=rf"^own\.{name}="):
                    with_field(options, name, as_text(value), "own", fixed=("name",))


WANTED = {
    TextLine: {"text": "a"},
    TokenLine: {"tokens": [1]},
    Edit: {"kind": "linearised"},
    Asked: {"ask": "open"},
    Row: {"out": "new"},
}
"""What a model needs beside the key that is tried."""


@pytest.mark.parametrize("model", [Fields, Rope, Released, SpecialTokens, *WANTED])
def test_every_key_of_a_file_or_a_message_is_held_to_what_it_states(model):
    given = WANTED.get(model, {})
    for name, field in model.model_fields.items():
        key, kind = field.alias or name, field.annotation
        for value in refused(Annotated[kind, *field.metadata] if field.metadata else kind):
            with pytest.raises(InputError, match=f'^a file: (there is no )?"{key}"'):
                validate(
                    given | {key: list(value) if isinstance(value, tuple) else value},
                    model,
                    "a file",
                )


def test_every_option_of_a_command_is_held_to_its_type():
    (commands,) = (
        action for action in _parser([])._actions if isinstance(action, argparse._SubParsersAction)
    )
    for command, parser in commands.choices.items():
        for action in parser._actions:
            if action.option_strings and (action.choices or action.type not in (None, str)):
                with pytest.raises(
                    InputError, match=f"argument {'/'.join(action.option_strings)}: "
                ):
                    _parser([command]).parse_args([command, f"{action.option_strings[-1]}=,"])
