"""Text becomes a value of the wanted type or is refused in one line; numbers become what people and
JSON read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Optional

import numpy as np
import pytest
from annotated_types import MinLen
from refusals import refused

from repo_interp.errors import one_line, quoted
from repo_interp.plots.marks.arrays import json_number
from repo_interp.runtime.option_texts import value_of, with_field
from repo_interp.values import (
    Count,
    Positive,
    Seed,
    Share,
    check_fields,
    checked,
    duration,
    in_words,
)

READ = [
    (" -3 ", int, -3),
    ("1e-3", float, 1e-3),
    ("true", bool, True),
    ("no", bool, False),
    ("3", str, "3"),
    ("a, b,", tuple[str, ...], ("a", "b")),
    ("", tuple[int, ...], ()),
    ("1,2", tuple[int, float], (1, 2.0)),
    ("7", int | None, 7),
    ("None", Optional[float], None),  # noqa: UP045
    ("none", str, "none"),
    ("mean", Literal["mean", "each"], "mean"),
]


@pytest.mark.parametrize(("text", "kind", "value"), READ)
def test_text_is_read_as_its_type(text, kind, value):
    # 1 == 1.0 == True, and their texts differ
    assert repr(value_of(text, kind, "option")) == repr(value)


def test_a_type_without_a_plain_name_is_said_as_it_is_written():
    assert in_words(tuple[str, ...]) == "words with commas between them"
    assert in_words(dict[str, int]) == "dict[str, int]"


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, int), (True, bool), ({"longest": 20, "kind": "repo"}, Mapping[str, int | str])],
)
def test_a_value_of_the_type_is_taken_as_it_is(value, kind):
    assert checked(value, kind, "option") == value


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        (3.0, int, "a whole number"),
        (True, int, "a whole number"),
        (math.nan, float, "a number"),
        (0, Count, "a whole number from 1 to 1,000,000"),
        (1.5, Share, "a number from 0 to 1"),
        (0, Positive, "a number above 0 and of at most 1,000,000,000"),
        (-1, Seed, "a whole number of at least 0 and below 2^63"),
        (
            (),
            Annotated[tuple[int, ...], MinLen(1)],
            "whole numbers with commas between them, at least one",
        ),
        (1, bool, "true or false"),
        (3, str, "a word"),
        ([1], Mapping[str, int], "a table of numbers and words"),
    ],
)
def test_a_value_of_another_type_is_not_converted(value, kind, wanted):
    with refused(f"^{re.escape(f'longest is {value!r}; wanted {wanted}')}$"):
        checked(value, kind, "longest")


@dataclass(frozen=True)
class Ranged:
    share: Share = 0.5
    counts: tuple[Count, ...] = (1,)

    def __post_init__(self) -> None:
        check_fields(self, "ranged")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("share", math.nan, "nan"),
        ("share", True, "yes"),
        ("counts", (10**9,), "1000000000"),
        ("counts", (1.5,), "1.5"),
    ],
)
def test_python_and_text_are_held_to_the_same_range(name, value, text):
    with refused(f"^ranged.{name} is .*; wanted .*number") as in_python:
        Ranged(**{name: value})
    wanted = re.escape(str(in_python.value).partition("wanted")[2])
    with refused(f"^ranged.{name}={text}: wanted{wanted}$"):
        with_field(Ranged(), name, text, "ranged")


def test_whole_numbers_are_taken_for_floats_and_lists_for_tuples():
    assert Ranged(share=1, counts=[np.int64(3), 4]) == Ranged(share=1.0, counts=(3, 4))
    assert type(Ranged(share=1).share) is float


@dataclass(frozen=True)
class Options:
    epsilon: float = 0.2
    sizes: tuple[int, ...] = (1, 2)
    last: int | None = None
    name: str = "options"
    derived: int = field(init=False, default=3)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("epsilon", "1", 1.0), ("sizes", "4,5", (4, 5)), ("last", "none", None), ("name", "b", "b")],
)
def test_a_field_is_read_as_its_type_and_the_others_stay(name, text, value):
    before = Options(last=7)
    assert with_field(before, name, text, "patterns") == replace(before, **{name: value})
    assert before == Options(last=7)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0, "1 s"), (89.4, "89 s"), (90, "2 min"), (5760, "1.6 h")]
)
def test_durations_are_said_in_the_unit_that_fits(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "digits", "number"),
    [(123456.789, 6, 123457.0), (math.nan, 6, None), (-math.inf, 6, None)],
)
def test_json_holds_a_number_or_nothing(value, digits, number):
    assert str(json_number(value, digits)) == str(number)


@pytest.mark.parametrize("longest", [20, 80, 103, 200, 300])
def test_a_long_line_loses_its_middle(longest):
    """Found: of less than 103 characters nothing was left out."""
    line = "".join(chr(97 + number % 26) for number in range(2000))
    cut = one_line(line, longest)
    begin, end = cut.split("...")
    assert len(cut) == longest and line.startswith(begin) and line.endswith(end)
    assert abs(len(begin) - len(end)) <= 1 or len(end) == 100


def test_a_value_is_quoted_where_it_is_short_and_else_by_its_type():
    assert quoted([1, "a"]) == "[1, 'a']" and quoted(None) == "None"
    assert quoted("x" * 100, 21) == "'xxxxxxxx...xxxxxxxx'"
    assert quoted([*range(100)]) == "a list" and quoted(np.eye(3)) == "a ndarray"
