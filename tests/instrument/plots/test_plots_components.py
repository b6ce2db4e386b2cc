"""What the figures and the page of components draw: curves, bands, VAF, norms, a pair of tokens,
turns.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr
from drawn import artist, artists, texts
from matplotlib.colors import to_hex
from numpy.testing import assert_allclose

from position_papers.hope.component_figures import (
    beyond_training_length,
    component_curves,
    logit_by_distance,
    pair_of_tokens,
    vaf_by_component,
    vaf_over_training,
)
from repo_interp.errors import InputError
from repo_interp.plots import report_page
from repo_interp.plots.catalogue import figures_of, view_of
from repo_interp.plots.view import PageOptions
from repo_interp.plots.views.components import (
    BAND_COLOURS,
    FEW_PAIRS,
    _band_names,
    band_of,
    component_data,
    component_table,
    rotating_layers,
    turns_grid,
)
from repo_interp.plots.views.rotation import norms_grid

L, LAYERS, HEADS, COMPONENTS = 32, 3, 2, 6
FREQUENCIES = np.array([1.0, 0.5, 0.15, 0.05, 0.01, 0.001])
NAMES = ["high", "high", "activated", "low", "low", "low"]


def components(length: int = L, schemes=("rope",) * LAYERS, seed: int = 0) -> xr.Dataset:
    """A group `components` with cosines of growing size."""
    random = np.random.default_rng(seed)
    distance = np.arange(length)
    size = random.uniform(0.5, 2, (LAYERS, COMPONENTS, 1))
    rotates = np.array([scheme != "nope" for scheme in schemes])
    curves = size * np.cos(FREQUENCIES[:, None] * distance)
    frequency = np.where(rotates[:, None], FREQUENCIES, np.nan)
    turn = [0.0, 0.1, math.pi / 4, math.pi]
    share = random.dirichlet(np.ones(4), (LAYERS, HEADS, COMPONENTS))
    return xr.Dataset(
        {
            "frequency": (("layer", "component"), frequency),
            "activated": (
                ("layer", "component"),
                (frequency > math.pi / L) & (frequency < 2 * math.pi / L),
            ),
            "low_frequency": (("layer", "component"), frequency <= math.pi / L),
            "component_by_distance": (("layer", "component", "distance"), curves),
            "logit_by_distance": (
                ("layer", "head", "distance"),
                np.repeat(curves.sum(1)[:, None], HEADS, 1),
            ),
            "vaf": (
                ("prompt", "layer", "head", "component"),
                random.normal(20, 9, (2, LAYERS, HEADS, COMPONENTS)),
            ),
            "turn_share": (("layer", "head", "component", "turn"), share),
            "turn_upper": ("turn", [0.1, math.pi / 4, math.pi, np.inf]),
        },
        coords={
            "layer": np.arange(LAYERS),
            "scheme": ("layer", list(schemes)),
            "head": np.arange(HEADS),
            "component": np.arange(COMPONENTS),
            "distance": distance,
            "prompt": [0, 1],
            "turn": turn,
        },
        attrs={"training_length": L},
    )


def as_run(group: xr.Dataset, **groups: xr.Dataset) -> xr.DataTree:
    tree = xr.DataTree.from_dict(
        {
            "/": xr.Dataset(),
            "/components": group,
            **{f"/{name}": one for name, one in groups.items()},
        }
    )
    tree.attrs = {"checkpoint": "made up"}
    return tree


def averaged(group: xr.Dataset) -> xr.Dataset:
    one = group.isel(layer=0)
    return one[["frequency", "activated", "low_frequency"]].assign(
        component_by_distance=group["component_by_distance"].mean("layer")
    )


def logits() -> xr.DataArray:
    values = np.full((2, 2, 2, 2 * L), np.nan)
    values[:, :, 0, :L] = np.arange(L)
    values[0, :, 1] = np.arange(2 * L)
    coords = {
        "checkpoint": ["plain", "table"],
        "weights": ["trained", "random 0"],
        "length": [L, 2 * L],
        "distance": np.arange(2 * L),
    }
    return xr.DataArray(values, coords, list(coords)).assign_coords(
        scheme=("checkpoint", ["rope", "learned"]), training_length=("checkpoint", [L, L])
    )


def test_logits_of_several_checkpoints_within_and_beyond_the_training_length():
    figure = logit_by_distance(logits())
    first, second = figure.axes
    for curve, length in (("trained", L), ("trained", 2 * L), ("random 0", 2 * L)):
        many, few = (
            artist(first, f"{curve} {length}{part}").get_ydata() for part in ("", ", few pairs")
        )
        assert_allclose(np.concatenate((many, few[1:])), np.arange(1, length))
        assert few[0] == length - length // FEW_PAIRS
    assert not artists(second, f"trained {2 * L}"), "what was not measured is not drawn"
    for ax in figure.axes:
        assert list(artist(ax, "training length").get_xdata()) == [L, L]
    with pytest.raises(InputError, match="trained"):
        logit_by_distance(logits().sel(weights=["random 0"]))


def test_components_are_coloured_by_band_and_add_up():
    data = averaged(components())
    assert band_of(data).tolist() == NAMES
    above, below = component_curves(data).axes
    curves = data["component_by_distance"].values[:, 1:]
    curves = curves - curves.mean(-1, keepdims=True)
    for place, band in enumerate(NAMES):
        line = artist(above, f"component {place}")
        assert to_hex(line.get_color()) == BAND_COLOURS[band].lower()
        assert_allclose(line.get_ydata(), curves[place])
    assert_allclose(artist(below, "sum").get_ydata(), curves.sum(0), atol=1e-12)
    assert_allclose(artist(below, "sum low").get_ydata(), curves[3:].sum(0), atol=1e-12)
    for ax in (above, below):
        few = artist(ax, "few pairs").get_extents().transformed(ax.transData.inverted())
        assert_allclose(few.intervalx, [L - L // 16, L])


def test_vaf_bars_spread_and_controls_over_components_and_cells_over_training():
    data = averaged(components())
    vaf = xr.DataArray(
        [np.arange(6.0), np.ones(6)],
        dims=("weights", "component"),
        coords={"weights": ["trained", "random 0"]},
    )
    (ax,) = vaf_by_component(data.assign(vaf=vaf, spread=("component", np.full(6, 0.5)))).axes
    bars = [bar for bar in ax.patches if abs(bar.get_width() - 0.42) < 1e-9]
    assert_allclose([bar.get_height() for bar in bars], np.arange(6.0))
    controls = artist(ax, "random 0")
    assert_allclose(controls.get_ydata(), 1)
    ends = [bar.get_x() + bar.get_width() for bar in bars]
    assert (controls.get_xdata() > ends).all(), "no control hides a bar"
    vaf = xr.DataArray(np.arange(24.0).reshape(4, 6), {"step": range(4)}, ("step", "component"))
    (ax,) = vaf_over_training(data.assign(vaf=vaf - 0.4)).figure().axes
    assert_allclose(ax.images[0].get_array(), vaf.values.T)
    assert ax.texts[0].get_text() == "0", "not -0"


def test_beyond_the_training_length_the_first_layer_and_the_later_ones():
    group = components(2 * L)
    data = xr.Dataset(
        {
            "component_by_distance": group["component_by_distance"].isel(layer=0, drop=True),
            "logit_by_distance": group["logit_by_distance"].mean("head"),
        }
    )
    band = averaged(group)[["activated", "low_frequency"]]
    figure = beyond_training_length(data.assign(band.data_vars), L)
    top, first, *later = figure.axes
    activated = [line for line in top.get_lines() if len(line.get_xdata()) > 2]
    within = [line.get_ydata()[line.get_xdata() < L] for line in activated]
    assert [(min(values), max(values)) for values in within] == [(0, 1)] * NAMES.count("activated")
    curve = artist(first, "layer 0")
    mean = data["logit_by_distance"].isel(layer=0).rolling(distance=L // 16, center=True).mean()
    assert_allclose(curve.get_ydata(), mean.sel(distance=curve.get_xdata()))
    figure.draw_without_rendering()
    assert len(later) == 2
    assert figure.legends[0].get_window_extent().y1 < later[-1].bbox.y0  # over no line


def rotation(layers: int = LAYERS, heads: int = HEADS) -> xr.Dataset:
    values = np.random.default_rng(1).uniform(0.1, 3, (2, layers, heads, COMPONENTS))
    values[:, 0] = np.nan
    shape = ("layer", "head", "component")
    group = xr.Dataset({"query_norm": (shape, values[0]), "key_norm": (shape, values[1])})
    return group.assign_coords({dim: np.arange(size) for dim, size in group.sizes.items()})


def test_a_pair_of_tokens_adds_up_to_its_logit_and_turns_are_shares_in_per_cent():
    logit = xr.DataArray([1.0, -2, 3, 0.5, 0, 1], dims="component")
    (ax,) = pair_of_tokens(averaged(components()).assign(logit=logit)).axes
    assert_allclose(artist(ax, "sum so far").get_ydata(), logit.cumsum())
    group = components()
    share = group["turn_share"].mean(("layer", "head")).transpose("turn", "component")
    ax = turns_grid(group, list(range(LAYERS))).figure().axes[0]
    assert_allclose(ax.images[0].get_array(), 100 * share.values[::-1])
    group["turn_share"].loc[{"turn": group["turn"].values[2:]}] = 0
    ax = turns_grid(group, list(range(LAYERS))).figure().axes[0]
    assert len(ax.images[0].get_array()) == 2, "angles that no pair turns by are not drawn"


def test_a_run_gets_the_figures_that_it_allows():
    plain = ["logit_by_distance", "components_by_distance", "component_vaf"]
    learned = [*plain, "beyond_training_length", "component_turns"]
    for group, names in (
        (components(), plain),
        (components(2 * L, ("rope", "repo", "repo")), learned),
        (components(schemes=("nope",) * 3), plain[:1]),
    ):
        assert [one.name for one in figures_of(as_run(group))] == names
    norms = rotation()
    parts = {
        f"{side}_mean_{part}": norms["query_norm"]
        for side in ("query", "key")
        for part in ("re", "im")
    }
    still = norms.assign(
        slow_dominating=xr.full_like(norms["query_norm"], -1, int),
        closed_form_r=norms["query_norm"].sum("component"),
        **parts,
    )
    run = as_run(components(), rotation=still)
    assert [name for name, _ in view_of("rotation").figures(run)] == ["pair_norms"]


def test_bands_are_about_the_training_length_and_about_the_longest_prompt():
    """In closed form: of theta = 2 pi / 32 one turn takes 32 tokens, half a turn 16."""
    names = _band_names(2 * np.pi / np.array([16.0, 32.0, 40.0, 63.9, 64.0, 90.0]), 32)
    assert names == ["high", "high", "activated", "activated", "low", "low"]
    short = components()
    short["logit_by_distance"] = short["logit_by_distance"].where(short["distance"] < 8)
    table = component_table(as_run(short))
    assert [column[-10:] for column in table.columns[3:5]] == ["32 tokens)", "(8 tokens)"]
    assert [row[3] for row in table.rows] != [row[4] for row in table.rows]


def test_a_layer_with_a_window_stands_apart_with_the_l_of_its_bands():
    group = components()
    group["band_length"] = "layer", [8, 8, L]
    run = as_run(group)
    assert rotating_layers(group) == [0, 1] and rotating_layers(components()) == [0, 1, 2]
    assert "over the window (8 tokens)" in component_table(run).columns[3]
    figures = {drawn.name: drawn.figure for drawn in figures_of(run)}
    for name in ("components_by_distance", "component_vaf"):
        assert any("L = 8 tokens" in text for text in texts(figures[name])), name
    data, _ = component_data(run, PageOptions())
    assert data is not None and data["training_length"] == 8


def test_the_page_has_every_component_with_frequency_and_wavelength(no_pictures, tmp_path):
    run = as_run(components())
    data, _ = component_data(run, PageOptions())
    assert data is not None and data["start"] == 2 and data["components"][2]["band"] == "activated"
    assert_allclose(
        [one["wavelength"] for one in data["components"]], 2 * np.pi / FREQUENCIES, rtol=1e-5
    )
    mean = run["components"]["component_by_distance"].mean("layer").values
    assert data["distance"] == list(range(1, L)) and len(data["layers"]) == 1 + LAYERS
    assert_allclose(data["layers"][0]["components"], mean[:, 1:], rtol=1e-3)
    assert 'data-section="components"' in report_page(run, tmp_path / "page.html").read_text()
    long, _ = component_data(as_run(components(3000)), PageOptions())
    assert long is not None and len(long["distance"]) == 256 and long["distance"][-1] == 2999
    still = as_run(components(schemes=("nope",) * 3))
    assert component_data(still, PageOptions()) == (None, ())
    assert "rotates" in report_page(still, tmp_path / "still.html").read_text()


@pytest.mark.parametrize("heads", [HEADS, 60])
def test_the_grid_of_norms_is_drawn_for_few_heads_and_for_many(heads):
    """SmolLM2's 270 heads have a row a layer, whose schemes the legend names."""
    pairs = rotation(heads=heads).assign_coords(
        scheme=("layer", ["nope", *["rope"] * (LAYERS - 1)])
    )
    figure = norms_grid(pairs).figure()
    drawn = figure.axes[0].images[0].get_array()
    norms = pairs["query_norm"].values[1:]
    expected = norms.reshape(-1, COMPONENTS) if heads == HEADS else norms.mean(1)
    assert_allclose(drawn, expected)
    queries, keys = (ax.images[0].get_clim() for ax in figure.axes[:2])
    assert queries == keys, "one scale"
