"""Whatever a file or a flag holds, it is read as a value or refused in one line; what is written is
read back as it was.

Examples are few and the same each time. `make fuzz` is the profile `fuzz`: minutes, and others each
time.
"""

import argparse
import json
import warnings
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import OFFICIAL
from families import repositioned
from hypothesis import example, given, settings
from hypothesis import strategies as st
from task_tokenizers import tokenizer
from transformers import DynamicCache

import repo_interp as ri
from position_papers.card.columns import columns_of
from position_papers.card.directory import require_card_of
from position_papers.kit.cache import Cache
from repo_interp import installed_points
from repo_interp.cli.arguments import name_list, number_list, setting
from repo_interp.cli.scheme_files import layout_of_files
from repo_interp.errors import InputError, Note
from repo_interp.measures.measure_catalogue import measure_named, measure_names
from repo_interp.models.configuration import identify
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.layouts import NO_ATTENTION, SCHEMES, parse_layout
from repo_interp.run import make_run, read_run, write_run
from repo_interp.runtime.option_texts import with_field
from repo_interp.storage.store import Store
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.jsonl import read_prompts, write_prompts

LONGEST_LINE = 2000
TOKENS = torch.arange(3, 11)[None]


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


flips = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=6)
cuts = st.none() | st.integers(0, 10**6)


def damaged(whole, flips, end):
    """Bytes, some of them changed, cut off at `end`."""
    content = bytearray(whole)
    for at, byte in flips:
        content[at % len(content)] ^= byte
    return bytes(content if end is None else content[: end % len(content)])


@given(flips, cuts, st.just(b"") | st.sampled_from([b"\x89HDF\r\n\x1a\n", b"CDF\x01"]))
def test_runs_with_wrong_bytes(place, whole_file, flips, end, magic):
    (place / "broken.nc").write_bytes(magic + damaged(whole_file, flips, end))
    value_or_refusal(read_run, place / "broken.nc")


any_text = st.text(st.characters(exclude_categories=("Cs",)))


@given(st.lists(st.tuples(any_text, st.floats()), min_size=1, max_size=6))
def test_runs_are_read_back(place, content):
    run = small_run(*zip(*content, strict=True))
    write_run(run, place / "run.nc")
    xr.testing.assert_identical(read_run(place / "run.nc"), run)


# what is kept to go on from: points of `try_edits` and experiments, measurements of `figures --cache`
# --------------------------------------------------------------------------------------------------

POINT = {"loss": [[1.5, 2.5]], "answer": [1.0]}


@given(flips, cuts)
def test_points_with_wrong_bytes_are_right_or_computed_again(place, flips, end):
    Store(place / "points").get_or_compute({"a": lambda: POINT})
    file = place / "points/a.json"
    file.write_bytes(damaged(file.read_bytes(), flips, end))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        found = Store(place / "points").get_or_compute({"a": lambda: {"again": 0}})
    assert found["a"] in (POINT, {"again": 0})
    file.unlink()


def measured():
    return xr.Dataset({"value": ("token", np.arange(4.0))})


@given(flips, cuts)
def test_measurements_with_wrong_bytes_are_right_or_refused(place, flips, end):
    cache = Cache(place / "cache")
    right = cache.get(measured, {})
    (file,) = (place / "cache").glob("*.nc")
    whole = file.read_bytes()
    file.write_bytes(damaged(whole, flips, end))
    found = value_or_refusal(Cache(place / "cache").get, measured, {})
    assert found is None or found.identical(right)
    file.write_bytes(whole)


# schemes of a file, and what their functions give
# --------------------------------------------------------------------------------------------------

lines_of_python = st.sampled_from(
    [
        "import torch",
        "import nosuch",
        "1 / 0",
        "raise SystemExit(3)",
        "raise ValueError('two\\nlines \\x1b[31m')",
        "build = 3",
        "def build(builder): return None",
        "def build(builder, rotation, d_head): return rotation",
        "    return",
        "\0",
        "def f(",
        "\ud800",
    ]
) | st.text(max_size=8)
scheme_texts = st.lists(
    st.sampled_from(["own.py", "none.py", ":", "build", "other", "@", "1/3", ",", "rope", ".py"]),
    max_size=6,
).map("".join)


@given(st.lists(lines_of_python, max_size=4), scheme_texts | st.just("own.py:build"))
def test_files_of_schemes(place, lines, text):
    source = "\n".join(lines).encode("utf-8", "surrogatepass")
    (place / "own.py").write_bytes(source)
    with pytest.MonkeyPatch.context() as changed:
        changed.chdir(place)
        changed.setattr(installed_points, "_REGISTERED", {})
        with warnings.catch_warnings():  # of the source, as Python has them
            warnings.simplefilter("ignore", SyntaxWarning)
            value_or_refusal(layout_of_files, text)


odd_parts = st.sampled_from(
    [
        *(None, "x", 0, 1.0, float("nan"), [], object()),
        *(
            torch.ones(3),
            torch.ones(4) * torch.nan,
            torch.ones(1, 4),
            torch.ones(4, dtype=torch.cfloat),
        ),
        *(torch.nn.Identity(), torch.nn.Linear(2, 2)),
    ]
)


@given(
    st.dictionaries(
        st.sampled_from(["assigner", "frequencies", "attention_scaling", "components"])
        | st.sampled_from(["position_logits", "transform", "remainder"]),
        odd_parts,
        max_size=2,
    )
)
@settings(max_examples=max(8, settings.default.max_examples // 50))  # each is a whole audit
def test_parts_of_a_scheme(changes):
    def build(builder, rotation, d_head):
        given = {"assigner": TokenIndex(), "frequencies": rotation.frequencies}
        return SchemeParts("own", **(given | changes))

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(installed_points, "_REGISTERED", {})
        ri.register_scheme("own", build)
        value_or_refusal(ri.verify_scheme, "own")


@given(
    st.binary(max_size=30)
    | any_json.map(lambda value: f"scheme = {value!r}".encode("utf-8", "replace"))
)
@example(b"scheme = 3")
@example(b'scheme = "own"')
def test_directories_of_cards(place, content):
    (place / "card").mkdir(exist_ok=True)
    (place / "card/card.toml").write_bytes(content)
    value_or_refusal(require_card_of, place / "card", "own")


@given(
    st.lists(st.sampled_from(["reversal", "niah", "language"]) | st.text(max_size=5), max_size=3)
)
def test_tasks_of_cards(tasks):
    value_or_refusal(columns_of, tasks)


# edits and caches of a small model
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    return repositioned("rope")


numbers = st.integers(-2, 9) | st.sampled_from(odd_numbers)
pairs = st.lists(st.tuples(numbers, numbers) | any_json, max_size=2) | any_json


@given(pairs, numbers | any_json, numbers | st.sampled_from(["auto", "x", None]))
@example([(0, 3), (4, 7)], 4, 1)
@example(True, 4, 1)
@example([3], 4, 1)
def test_bands_and_blocks_of_edits(small, bands, block, batch_size):
    found = value_or_refusal(
        lambda: ri.try_edits(
            small,
            TOKENS,
            {"own": ri.interventions.scaled(small, 2.0)},
            bands=bands,
            block=block,
            batch_size=batch_size,
            progress=lambda done, total: None,
        )
    )
    assert found is None or np.isfinite(found["change"].values[:, found["units"] > 0]).all()


@given(
    st.lists(st.integers(-1, 70), max_size=10) | any_json,
    st.lists(st.integers(0, 7), max_size=10),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]),
    st.sampled_from([None, 0.0, float("nan"), 1e30]),
)
@example(list(range(3, 11)), list(range(8)), torch.float32, None)
@example([0], [0], torch.float32, None)  # padding, whose keys are 0
def test_tokens_and_keys_of_caches(small, tokens, kept, dtype, factor):
    cache = DynamicCache(config=small.config)
    with torch.no_grad():
        small(torch.arange(3, 11)[None], past_key_values=cache, use_cache=True)
    keys = [layer.keys[:, :, kept].to(dtype) for layer in cache.layers]
    given = [(part if factor is None else part * factor, part) for part in keys]
    found = value_or_refusal(ri.verify_cache, small, tokens, given)
    if (tokens, kept, dtype, factor) == (list(range(3, 11)), list(range(8)), torch.float32, None):
        assert found is not None and not found.attrs["findings"]


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
