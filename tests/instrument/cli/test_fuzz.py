"""Whatever a file or a flag holds, it is read as a value or refused in one line; what is written is
read back as it was.

Examples are few and the same each time. `make fuzz` is the profile `fuzz`: minutes, and others each
time.
"""

import argparse
import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import xarray as xr
from attention_inputs import OFFICIAL
from hypothesis import example, given
from hypothesis import strategies as st
from task_tokenizers import tokenizer

from repo_interp.cli.arguments import name_list, number_list, setting
from repo_interp.errors import InputError
from repo_interp.measures.measure_catalogue import measure_named, measure_names
from repo_interp.models.configuration import identify
from repo_interp.positions.layouts import NO_ATTENTION, SCHEMES, parse_layout
from repo_interp.run import make_run, read_run, write_run
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.jsonl import read_prompts, write_prompts
from repo_interp.values import with_field

LONGEST_LINE = 2000


def one_line(message):
    """Whether a message is one line that a terminal shows as it is."""
    return 0 < len(message) <= LONGEST_LINE and not any(c in message for c in "\n\r\x1b")


def value_or_refusal(read, *arguments, errors=InputError):
    """What `read` returns, None where it refuses; any other error is the finding."""
    try:
        return read(*arguments)
    except errors as error:
        refusal = str(error)
    assert one_line(refusal), f"no line: {refusal[:200]!r}"
    return None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


any_json = st.recursive(
    st.sampled_from([None, True, 10**400, -1, "\ud800", "\0"])
    | st.integers()
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


# the layout language
# --------------------------------------------------------------------------------------------------

layout_words = st.lists(
    st.sampled_from([*SCHEMES, "r2n1", "n2r1", *"@/, 013٣-", "00", "9" * 30, "9" * 5000]),
    max_size=7,
).map("".join)


@given(layout_words | st.text(max_size=20), st.integers(1, 40))
@example("repo@1/00", 4)
@example("repo@" + "9" * 5000, 4)
@example("repo@1/" + "9" * 5000, 4)
def test_layouts(text, layers):
    schemes = value_or_refusal(parse_layout, text, layers, errors=ValueError)
    assert schemes is None or (len(schemes) == layers and set(schemes) <= {*SCHEMES, NO_ATTENTION})


# prompts
# --------------------------------------------------------------------------------------------------

indices = st.lists(st.integers(-1, 12) | st.just(10**400), max_size=5) | any_json
records = st.dictionaries(
    st.sampled_from(
        ["text", "tokens", "spans", "generated", "answers", "attributes", "token_text", "other"]
    ),
    st.one_of(
        st.lists(st.integers(0, 70), max_size=12),
        st.dictionaries(
            st.sampled_from(["needle", "needle.1", "query", "rest", "\ud800", ".", ""]),
            indices,
            max_size=3,
        ),
        st.lists(st.lists(st.integers(-1, 30), max_size=3), max_size=3),
        st.text(max_size=30),
        any_json,
    ),
    max_size=4,
)


@given(
    st.lists((records | any_json).map(json.dumps) | st.text(max_size=30), max_size=3).map(
        lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")
    )
    | st.binary(max_size=60),
    st.booleans(),
)
@example(b'{"tokens": [1, 2], "spans": {"a": [' + b"9" * 400 + b"]}}", False)
@example(b'{"text": "\\u0000 \\ud800", "spans": {"needle": [[0, 1]]}}', True)
@example(b"[" * 100_000, False)
def test_prompts(place, content, as_text):
    file = place / "prompts.jsonl"
    file.write_bytes(content)
    prompts = value_or_refusal(read_prompts, file, tokenizer("words") if as_text else None, 64)
    for prompt in prompts or ():
        assert prompt.tokens and all(0 <= token < 64 for token in prompt.tokens)
        assert all(
            0 <= place < len(prompt.tokens)
            for places in prompt.all_spans().values()
            for place in places
        )


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=10)
plain_json = st.recursive(
    st.sampled_from([None, True, 2**53, -(2**53)])
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def whole_prompts(draw):
    count = draw(st.integers(1, 10))

    def each(part):
        return st.lists(part, min_size=count, max_size=count)

    owners = draw(each(st.sampled_from(["needle", "query", "generated", None])))
    spans: dict = dict.fromkeys(owners, ())
    for at, owner in enumerate(owners):
        spans[owner] += (at,)
    spans.pop(None, None)
    return Prompt(
        tokens=tuple(draw(each(st.integers(0, 63)))),
        generated=spans.pop("generated", ()),
        spans=spans,
        token_text=draw(st.none() | each(words).map(tuple)),
        answers=tuple(draw(st.lists(words, max_size=2))),
        attributes=draw(st.dictionaries(words, plain_json, max_size=2)),
    )


@given(st.lists(whole_prompts(), min_size=1, max_size=3))
def test_prompts_are_read_back(place, prompts):
    value_or_refusal(write_prompts, prompts, place / "written.jsonl")
    assert read_prompts(place / "written.jsonl") == prompts


# config.json
# --------------------------------------------------------------------------------------------------

RELEASED = json.loads((OFFICIAL / "repo_mha" / "config.json").read_text())
STOCK = {key: value for key, value in RELEASED.items() if key != "pe_config"}
OURS = STOCK | {
    "model_type": "repo_interp",
    "decoder_type": "olmo2",
    "position_layout": {"layers": ["repo"] * 6},
}
odd_numbers = [0, -1, 1, 2.5, 1e308, 10**400, float("nan"), float("inf")]
odd = st.sampled_from([*odd_numbers, "x", "", None, [], {}, True, "\0", "\ud800"])


@pytest.mark.filterwarnings("ignore::repo_interp.errors.Note")
@given(
    st.sampled_from([RELEASED, STOCK, OURS]),
    st.dictionaries(
        st.sampled_from([*RELEASED, *OURS, "sliding_window", "rope_scaling", "layer_types"]),
        odd | any_json,
        max_size=3,
    ),
    st.sets(st.sampled_from([*RELEASED]), max_size=2),
    st.dictionaries(
        st.sampled_from([*RELEASED["pe_config"], "layers", "repo"]), odd | any_json, max_size=2
    ),
)
def test_configurations(place, base, changes, without, inside):
    raw = {key: value for key, value in {**base, **changes}.items() if key not in without}
    for part in ("pe_config", "position_layout"):
        if isinstance(raw.get(part), dict) and inside:
            raw[part] = raw[part] | inside
    (place / "config.json").write_text(json.dumps(raw))
    checkpoint = value_or_refusal(identify, place)
    assert checkpoint is None or len(checkpoint.layout) == checkpoint.config.num_hidden_layers > 0


# runs
# --------------------------------------------------------------------------------------------------


def small_run(texts=("a", "b"), values=(1.0, 2.0)):
    stated = {"long_name": "what stands there", "units": "1"}
    group = xr.Dataset(
        {
            "value": ("token", np.array(values), stated),
            "text": ("token", np.array(texts, dtype=object), stated),
        },
        {"token": np.arange(len(values))},
    )
    return make_run({"positions": group}, {"checkpoint": "none", "layout": "rope"})


@pytest.fixture(scope="module")
def whole_file(place):
    write_run(small_run(), place / "whole.nc")
    return (place / "whole.nc").read_bytes()


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=6),
    st.none() | st.integers(0, 10**6),
    st.just(b"") | st.sampled_from([b"\x89HDF\r\n\x1a\n", b"CDF\x01"]),
)
def test_runs_with_wrong_bytes(place, whole_file, flips, end, magic):
    content = bytearray(whole_file)
    for at, byte in flips:
        content[at % len(content)] ^= byte
    if end is not None:
        del content[end % len(content) :]
    (place / "broken.nc").write_bytes(magic + content)
    value_or_refusal(read_run, place / "broken.nc")


any_text = st.text(st.characters(exclude_categories=("Cs",)))


@given(st.lists(st.tuples(any_text, st.floats()), min_size=1, max_size=6))
def test_runs_are_read_back(place, content):
    run = small_run(*zip(*content, strict=True))
    write_run(run, place / "run.nc")
    xr.testing.assert_identical(read_run(place / "run.nc"), run)


# flags
# --------------------------------------------------------------------------------------------------

MEASURES = [measure_named(name) for name in measure_names()]
FIELDS = [
    (each, field.name)
    for each in MEASURES
    if is_dataclass(each)
    for field in fields(each)
    if field.name != "name"
]
odd_texts = st.sampled_from(
    ["9" * 5000, "\0", "\x1b[31m", "nan", "-1", "1e999", "none", ",", "0x10", "１", "1_0", "drop"]
)


@given(
    st.sampled_from(FIELDS),
    odd_texts | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str),
)
def test_settings_of_measures(field, text):
    measure, option = field
    changed = value_or_refusal(with_field, measure, option, text, measure.name)
    assert changed is None or type(changed) is type(measure)


@given(
    st.sampled_from([setting, number_list, name_list]),
    odd_texts | st.text("0123456789-,= .²٣", max_size=9) | st.text(),
)
def test_flags(read, text):
    value_or_refusal(read, text, errors=(argparse.ArgumentTypeError, InputError))
