"""What every measure must keep to, whoever wrote it: parametrised over all measures that are known
by name.

A measure of which nothing is said here must have every property in every variable. `DIFFERS` says
what else is right; `OPTIONS` asks a measure for all that it can measure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import places
import pytest
import torch
import xarray as xr
from attention_inputs import cope_inputs, random_inputs
from causal_reference import LargestTensor
from numpy.testing import assert_allclose

from repo_interp import entry_points
from repo_interp.analysis.faults import fault_in
from repo_interp.entry_points import OWN
from repo_interp.inputs import select_heads, select_prompts
from repo_interp.measures.border import as_measure
from repo_interp.measures.measure_catalogue import measure_named, measure_names
from repo_interp.measures.statistics import merge, of_training_length

MEASURES = tuple(
    name for name in measure_names() if not as_measure(measure_named(name)).needs.predictions
)
"""Of what layers compute; what reads the outputs of the pass alone has no positions and no heads.
"""
ON_PROCESSOR = ("gates", "segments", "maps")
"""Measures that gather some of their numbers on the processor, where the default device is."""
DOCS = places.DOCS / "measures.md"
TOKENS, LENGTHS, TRAINED_ON = 36, (36, 29, 33), 24
"""Three prompts, two of them padded on the right, of a model that was trained on shorter ones."""
SHIFT, SCALE = 17.0, 4.0
"""A power of two, so that scaled floating-point numbers are exactly scaled."""

OPTIONS: dict[str, dict[str, Any]] = {
    "patterns": {"chunk_size": 8},
    "attention_rows": {"keys": 5},
    "components": {"curves": "head"},
    "three_axis": {
        "axes": "first_prompt",
        "extras": ("attention", "position", "shuffled", "held_out"),
    },
    "fake_distance": {"queries": 2},
    # every component dominates, slowly
    "rotation": {"prominence": 0.0, "stability": 100.0, "slow": 1e9, "still": 1e9},
    "gates": {"maps": 1, "draws": 8},
    "segments": {"draws": 8},
}
SCALED_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "patterns": ({"epsilon": 0.2}, {"epsilon": 0.2 * SCALE}),  # is in positions
    "three_axis": ({"position_width": 1.0}, {"position_width": SCALE}),  # is in positions
    # a training length stands for the positions of RoPE
    **dict.fromkeys(
        ("components", "rotation", "stability"),
        ({"training_length": TRAINED_ON}, {"training_length": int(SCALE) * TRAINED_ON}),
    ),
    # in tokens they have no scale that could change
    "fake_distance": ({"distances": "positions"}, {"distances": "positions"}),
}
"""Parameters that are in positions, before and after positions are scaled."""

BY_NUMBER = {
    "gates": (
        "separator_share_shuffled",
        "separator_share_chance",
        "last_segment_shuffled",
        "last_segment_chance",
    ),
    "segments": (
        "variance_between_shuffled",
        "variance_between_chance",
        "boundary_f1_shuffled",
        "boundary_f1_chance",
        # jumps of one size, of which the index has no others, come in an order that is drawn
        "boundary_f1",
        "boundary_f1_index",
    ),
}
"""Controls that are drawn by the seed and the prompt's number."""

DIFFERS: dict[str, dict[str, dict[str, Callable[[xr.DataArray], xr.DataArray] | None]]] = {
    "shift": {"positions": {"position": lambda z: z + SHIFT, "negative_share": None}},
    "scale": {
        "positions": dict.fromkeys(("position", "position_range"), lambda z: z * SCALE),
        "patterns": {
            # its grid of tolerances is in positions: 4 times is two on
            "sensitivity": lambda grid: grid.shift(epsilon=2),
            "trend_slope": lambda slope: slope * SCALE,  # in positions per token
        },
        "components": {
            "position_reach": lambda reach: reach * SCALE,
            "frequency": lambda theta: theta / SCALE,  # in rad per position
            "decay_bound": None,  # its distances are in positions
            # L is a window where that is shorter, in tokens
            **dict.fromkeys(("band_length", "activated", "low_frequency", "vaf_band")),
        },
        "maps": {"fake_map": None},  # its distances are in tokens, whatever is learned
        # per position; and L of `high_share` as above
        "stability": dict.fromkeys(("positional_sensitivity", "random_sensitivity", "high_share")),
    },
    "duplication": {
        "components": {"distance_pairs": lambda pairs: 2 * pairs},
        **{name: dict.fromkeys(variables) for name, variables in BY_NUMBER.items()},
        # twice as many texts hold twice as many spans, and so judge longer distances
        "patterns": dict.fromkeys(("order_told", "order_prompts", "resolution", "counts_tokens")),
    },
    # over all layers, or of the layer that sees most
    "layers": {
        "patterns": dict.fromkeys(("pattern_share_all", "sensitivity")),
        "attention_mass": {"table": None},
        "components": {"distance_pairs": None},
    },
}
"""By property, measure and variable: what is expected of it instead; None: nothing."""


@cache
def layers(dtype=torch.float64):
    """A RoPE layer, one that learns positions and attends within a window, one that counts: all
    that a measure may meet.
    """
    valid = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    shape: dict[str, Any] = {
        "prompts": len(LENGTHS),
        "tokens": TOKENS,
        "kv_heads": 2,
        "valid": valid,
    }
    rope = random_inputs(scheme="rope", position_rows=1, **shape)
    index = torch.arange(TOKENS, dtype=torch.float64).expand(rope.positions.shape)
    steps = random_inputs(layer=1, seed=1, window=11, **shape)
    # 0.2 a step: constant, mono and hybrid chunks
    learned = replace(steps, positions=(0.02 * steps.positions).cumsum(-1))
    made = [replace(rope, positions=index), learned, replace(cope_inputs(seed=2, **shape), layer=2)]
    ids = torch.randint(0, 9, (len(LENGTHS), TOKENS), generator=torch.Generator().manual_seed(3))
    return tuple(cast(replace(inputs, tokens=ids), dtype) for inputs in made)


def cast(inputs, dtype):
    names = ("queries", "keys", "positions", "frequencies", "gate_features")
    logits = inputs.position_logits
    return replace(
        inputs,
        **{
            name: None if getattr(inputs, name) is None else getattr(inputs, name).to(dtype)
            for name in names
        },
        position_logits=None if logits is None else lambda rows: logits(rows).to(dtype),
    )


def spans_of(kinds):
    """Marks of every kind, at other places in every prompt, none on padding."""
    token, prompt = torch.arange(TOKENS), torch.arange(len(LENGTHS))[:, None]
    length = torch.tensor(LENGTHS)[:, None]
    spans = {
        "needle": (token >= 3 + prompt) & (token < 7),
        "query": (token >= length - 9) & (token < length - 5),
        "generated": (token >= length - 3) & (token < length),
    }
    spans["rest"] = (token < length) & ~sum(spans.values())
    spans["separator"] = (token == 8) | (token == 15 + prompt)
    for number, kind in enumerate(kinds):
        starts = (token == number) | (token == 9 + number) | (token == 16 + prompt) | (token == 23)
        spans[f"segments.{kind}"] = (token >= number) & (token < length - 2)
        spans[f"segments.{kind}.starts"] = starts
    return spans


def made(name, **options):
    measure = of_training_length(as_measure(measure_named(name)), TRAINED_ON)
    return replace(measure, **(OPTIONS.get(name, {}) | options))


def concluded(measure, given, spans=None):
    spans = spans or spans_of(measure.needs.segments)
    return measure.conclude(merge([measure.observe(inputs, spans) for inputs in given]))


def assert_same(group, expected, differs=None, rtol=1e-5, atol=1e-6):
    """The same variables with the same axes, labels and values, or those that `differs` says."""
    assert set(group.data_vars) == set(expected.data_vars)
    compared = 0
    for name, values in expected.data_vars.items():
        change = (differs or {}).get(name, lambda same: same)
        if change is None:
            continue
        got = group[name]
        wanted = change(values).transpose(*got.dims)
        if "epsilon" in wanted.dims:  # a shifted grid knows nothing at its ends
            wanted = wanted.dropna("epsilon")
            got = got.sel(epsilon=wanted["epsilon"])
        for axis, labels in wanted.coords.items():
            assert got[axis].values.tolist() == labels.values.tolist(), f"{name}: labels of {axis}"
        assert got.dtype == wanted.dtype, name
        if wanted.dtype.kind in "fiub":
            assert_allclose(got.values, wanted.values, rtol=rtol, atol=atol, err_msg=str(name))
            compared += 1
    assert compared, "no variable was compared"


@pytest.fixture(params=MEASURES)
def name(request):
    return request.param


@cache
def observed(name):
    """Statistics of the run, layer by layer."""
    measure = made(name)
    return [measure.observe(inputs, spans_of(measure.needs.segments)) for inputs in layers()]


@cache
def group_of(name):
    return made(name).conclude(merge(observed(name)))


@pytest.fixture
def whole(name):
    """The group of the run, as the other tests expect it."""
    return group_of(name).copy()


def test_something_is_measured(whole):
    """Else the tests below compare NaN with NaN."""
    for name, values in whole.data_vars.items():
        # Of no head here: test_fake_distance has a reach. Nulls of more tokens than these prompts
        # have are in test_position_sources
        if name in ("reach", "alone_null", "segments_ahead_null"):
            continue
        assert values.size and bool(values.notnull().any()), name


def repositioned(change):
    """The layers, with changed fields where they have positions."""
    return [
        inputs if inputs.positions is None else replace(inputs, **change(inputs))
        for inputs in layers()
    ]


def of_rows(axis, rows, group):
    """Some rows of an axis, with the labels of the first."""
    return xr.Dataset(
        {
            key: values.isel({axis: rows}).assign_coords({axis: range(len(rows))})
            if axis in values.dims
            else values
            for key, values in group.data_vars.items()
        }
    )


@pytest.mark.parametrize("name", [name for name in MEASURES if name not in ON_PROCESSOR])
def test_tensors_are_made_on_the_device_of_the_layers(name, whole):
    """Not on a default device: beside a tensor of another device every operation raises."""
    measure, given = made(name), layers.__wrapped__()
    spans = spans_of(measure.needs.segments)
    with torch.device("meta"):
        found = [measure.observe(inputs, spans) for inputs in given]
    assert_same(measure.conclude(merge(found)), whole)


def test_shift_of_positions(name, whole):
    """Attention sees differences of positions alone."""
    shifted = repositioned(lambda inputs: {"positions": inputs.positions + SHIFT})
    assert_same(concluded(made(name), shifted), whole, DIFFERS["shift"].get(name))


def test_scale_of_positions(name):
    """Positions in another unit, with frequencies per that unit, are the same attention."""
    before, after = SCALED_OPTIONS.get(name, ({}, {}))
    scaled = repositioned(
        lambda inputs: {
            "positions": inputs.positions * SCALE,
            "frequencies": inputs.frequencies / SCALE,
        }
    )
    expected = concluded(made(name, **before), layers()) if before else group_of(name)
    assert_same(concluded(made(name, **after), scaled), expected, DIFFERS["scale"].get(name))


def test_permutation_of_heads(name, whole):
    """Heads have no order, and sharing a key is the same as having a copy of it."""
    order = [2, 0, 3, 1]
    group = concluded(made(name), [select_heads(inputs, order) for inputs in layers()])
    assert_same(group, of_rows("head", order, whole))


@pytest.mark.parametrize("noise", [0.0, 1e-7], ids=["constant", "rounding"])
@pytest.mark.parametrize("tokens", [TOKENS, 1])
def test_heads_whose_positions_do_not_vary_are_lost_alone(name, noise, tokens):
    """NaN in them or a value; nothing stops, and other heads have what they had."""
    measure, given = made(name), prompts_of(layers()[1], [0], [0])
    if tokens < measure.needs.tokens or (tokens == 1 and "generated" in measure.needs.spans):
        return  # refused before
    given = replace(given, valid=given.valid & (torch.arange(TOKENS) < tokens))
    constant = given.positions.clone()
    constant[:, 0] = 2.5 + noise * torch.sign(constant[:, 0])
    spans = {
        kind: mask if kind != "generated" else (torch.arange(TOKENS) == tokens - 1)[None]
        for kind, mask in with_spans(measure, [0]).items()
    }
    observed = measure.observe(replace(given, positions=constant), spans)
    assert fault_in(observed, measure, without=False, padded=tokens < TOKENS) is None
    group, whole = measure.conclude(observed), concluded(measure, [given], spans)
    # all heads decide which token is a sink, and which distances are tried
    of_all = {"sink_mass"} if name != "stability" else {*group}
    for variable in {*group} - of_all:
        values = group[variable]
        if "head" in values.dims and values.dtype.kind == "f":
            others = values.isel(head=[2, 3])
            wanted = whole[variable].isel(head=[2, 3])
            assert_allclose(others, wanted, rtol=1e-6, atol=1e-9, err_msg=str(variable))


def prompts_of(inputs, rows, numbers):
    return replace(select_prompts(inputs, list(rows)), prompts=torch.tensor(numbers))


def with_spans(measure, rows):
    return {name: mask[list(rows)] for name, mask in spans_of(measure.needs.segments).items()}


def test_duplication_of_prompts(name, whole):
    """Means do not change, and a copy of another number has what the original has."""
    rows, measure = (0, 1, 2, 0, 1, 2), made(name)
    spans = with_spans(measure, rows)
    group = concluded(measure, [prompts_of(inputs, rows, range(6)) for inputs in layers()], spans)
    differs = DIFFERS["duplication"].get(name, {})
    assert_same(of_rows("prompt", [0, 1, 2], group), whole, differs)
    first = {"position_attention"} & {*whole}  # the map of the first prompt alone
    copies = of_rows("prompt", [3, 4, 5], group).drop_vars(first)
    assert_same(copies, whole.drop_vars(first), differs)


def test_batches_merge_in_any_order_without_their_padding(name, whole):
    """Order of prompts and of merging, and a batch as wide as its longest prompt."""
    measure, parts = made(name), []
    for inputs in reversed(layers()):
        for rows in ((2,), (1, 0)):
            width = max(LENGTHS[row] for row in rows)
            spans = {key: mask[:, :width] for key, mask in with_spans(measure, rows).items()}
            parts.append(measure.observe(trimmed(prompts_of(inputs, rows, rows), width), spans))
    assert_same(measure.conclude(merge(parts)), whole)


def along_tokens(inputs, change, logits):
    """Inputs with `change(tensor, axis)` of all that has an axis of tokens."""
    axes = {"queries": -2, "keys": -2, "gate_features": -2}
    axes |= {"positions": -1, "valid": -1, "tokens": -1}
    given = {name: getattr(inputs, name) for name in axes}
    return replace(
        inputs,
        **{
            name: tensor if tensor is None else change(tensor, axes[name])
            for name, tensor in given.items()
        },
        position_logits=inputs.position_logits and logits,
        read_residual=lambda: change(inputs.residual, -2),
        read_values=lambda: change(inputs.values, -2),
    )


def trimmed(inputs, width):
    return along_tokens(
        inputs,
        lambda tensor, axis: tensor.narrow(axis, 0, width),
        lambda rows: inputs.position_logits(rows)[..., :width],
    )


LEFT, RIGHT = 3, 4


def padded(inputs):
    """Padding on both sides, with NaN where nothing may look."""

    def pad(tensor, axis):
        value = torch.nan if tensor.is_floating_point() else 0
        sides = (0, 0) * (-1 - axis) + (LEFT, RIGHT)
        return torch.nn.functional.pad(tensor, sides, value=value)

    def logits(rows):
        inner = inputs.position_logits((rows - LEFT).clamp(0, TOKENS - 1))
        return torch.nn.functional.pad(inner, (LEFT, RIGHT))

    return along_tokens(inputs, pad, logits)


OF_TOKENS = ("token", "query", "key", "query_block", "key_block")
NUMBERS = ("key", "prompt_key", "sink_token", "largest_token")
OF_LENGTHS = ("distance", "chunk", "distance_block", "rank")


def test_padding(name, whole):
    """Padding is as if it were not there: axes of tokens begin later, axes of distances stay where
    they are.
    """
    measure = made(name)
    spans = {
        key: torch.nn.functional.pad(mask, (LEFT, RIGHT))
        for key, mask in spans_of(measure.needs.segments).items()
    }
    wide = concluded(measure, [padded(inputs) for inputs in layers()], spans)
    narrow = {}
    for key, values in wide.data_vars.items():
        moved = {axis: values[axis] - LEFT for axis in values.dims if axis in OF_TOKENS}
        kept = {
            axis: whole[key][axis].values
            for axis in values.dims
            if axis in (*OF_TOKENS, *OF_LENGTHS)
        }
        values = values.assign_coords(moved).sel(kept)
        if key in NUMBERS:
            values = values.where(values < 0, values - LEFT).astype(values.dtype)
        narrow[key] = values
    assert_same(xr.Dataset(narrow), whole)


def test_float32_against_float64(name, whole):
    group = concluded(made(name), layers(torch.float32))
    assert_same(group, whole, rtol=2e-3, atol=2e-4)


def test_layers_that_were_asked_for(name, whole):
    """A layer has the same values whichever other layers are measured."""
    for layer, statistics in enumerate(observed(name)):
        group = made(name).conclude(merge([statistics]))
        assert_same(group, whole.sel(layer=[layer]), DIFFERS["layers"].get(name))


@pytest.mark.parametrize(
    "name", [name for name in MEASURES if name not in ("maps", "gates", "segments")], indirect=True
)
def test_tensors_are_made_where_the_inputs_are(name):
    """What is made without a device lands on the default one: here one that holds no data."""
    measure, spans = made(name), spans_of(made(name).needs.segments)
    capped = replace(layers()[1], softcap=1.0, layer=3)
    with torch.device("meta"):
        elsewhere = [measure.observe(each, spans) for each in (*layers()[:2], capped)]
    here = [*observed(name)[:2], measure.observe(capped, spans)]
    assert_same(measure.conclude(merge(elsewhere)), measure.conclude(merge(here)))


@pytest.mark.parametrize(
    "name", [name for name in MEASURES if name not in ("attention_rows", "gates")], indirect=True
)
@pytest.mark.parametrize("scheme", ["repo", "nope"])
def test_nothing_of_the_size_of_a_map_is_made(name, scheme):
    """The two left out make as many rows at a time as a budget allows."""
    tokens = 480
    inputs = random_inputs(
        1, 1, 1, tokens, d_head=4, scheme=scheme, window=420, dtype=torch.float32
    )

    def mark(begin, end, step=1):
        mask = torch.zeros_like(inputs.valid)
        mask[:, begin:end:step] = True
        return mask

    measure = made(name)
    spans = dict.fromkeys(spans_of(measure.needs.segments), mark(4, 460, 9)) | {
        "needle": mark(3, 9),
        "generated": mark(tokens - 5, tokens),
        "rest": mark(9, 420),
    }
    with LargestTensor() as largest:
        measure.observe(inputs, spans)
    assert largest.elements < tokens * tokens / 2


def documented(name):
    """Axes, unit and long name of the variables of a measure of ours, as the tables of
    docs/measures.md have them.
    """
    page = DOCS.read_text(encoding="utf-8")
    _, begin, rest = page.partition(f"<!-- made: variables {name} -->")
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*) \|$",
        rest.partition("<!-- end -->")[0],
        re.MULTILINE,
    )
    assert rows or not begin
    return {variable: tuple(cells) for variable, *cells in rows}


def test_every_variable_is_named_and_as_documented(name, whole):
    table = documented(name)
    for variable, values in whole.data_vars.items():
        unit, text = values.attrs["units"], values.attrs["long_name"]
        assert unit and text, variable
        if variable in table:
            assert (", ".join(values.dims) or "-", unit, text.replace("|", "\\|")) == table[
                variable
            ], variable
    assert name not in OWN[entry_points.MEASURES] or len(set(table) & set(whole.data_vars)) > 1
