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
from repo_interp.plots.marks import HeadCurves
from repo_interp.plots.view import PageOptions
from repo_interp.plots.view_catalogue import figures_of
from repo_interp.plots.views.component_bands import BAND_COLOURS, FEW_PAIRS, bands_over
from repo_interp.plots.views.component_slider import component_data
from repo_interp.plots.views.components import VIEW, component_table, turns_grid
from repo_interp.plugins.rotation.view import norms_grid

L, LAYERS, HEADS, COMPONENTS = 32, 3, 2, 6
FREQUENCIES = np.array([1.0, 0.5, 0.15, 0.05, 0.01, 0.001])
NAMES = ["high", "high", "activated", "low", "low", "low"]
HEAD_AXES = ("layer", "head", "component")


def components(length: int = L, schemes=("rope",) * LAYERS) -> xr.Dataset:
    """A group `components` with cosines of growing size."""
    random = np.random.default_rng(0)
    distance = np.arange(length)
    size = random.uniform(0.5, 2, (LAYERS, COMPONENTS, 1))
    curves = size * np.cos(FREQUENCIES[:, None] * distance)
    rotates = np.array([scheme != "nope" for scheme in schemes])
    frequency = xr.DataArray(np.where(rotates[:, None], FREQUENCIES, np.nan), dims=HEAD_AXES[::2])
    logits = np.repeat(curves.sum(1)[:, None], HEADS, 1)
    group = xr.Dataset(
        {
            "frequency": frequency,
            "activated": (frequency > math.pi / L) & (frequency < 2 * math.pi / L),
            "low_frequency": frequency <= math.pi / L,
            "component_by_distance": (("layer", "component", "distance"), curves),
            "logit_by_distance": (("layer", "head", "distance"), logits),
            "vaf": (("prompt", *HEAD_AXES), random.normal(20, 9, (2, LAYERS, HEADS, COMPONENTS))),
            "turn_share": (
                (*HEAD_AXES, "turn"),
                random.dirichlet(np.ones(4), (LAYERS, HEADS, COMPONENTS)),
            ),
        },
        {"scheme": ("layer", list(schemes)), "turn": [0.0, 0.1, math.pi / 4, math.pi]},
        {"training_length": L},
    )
    axes = (*HEAD_AXES, "distance", "prompt")
    return group.assign_coords({axis: np.arange(group.sizes[axis]) for axis in axes})


def as_run(group: xr.Dataset) -> xr.DataTree:
    return xr.DataTree.from_dict({"components": group})


def averaged(group: xr.Dataset) -> xr.Dataset:
    one = group[["frequency", "activated", "low_frequency"]].isel(layer=0)
    return one.assign(component_by_distance=group["component_by_distance"].mean("layer"))


def test_logits_of_a_checkpoint_within_and_beyond_the_training_length():
    coords = {"checkpoint": ["plain"], "weights": ["trained", "random 0"]}
    coords |= {"length": [L, 2 * L], "distance": np.arange(2 * L)}
    logits = xr.DataArray(np.full((1, 2, 2, 2 * L), np.arange(2.0 * L)), coords, list(coords))
    logits[:, :, 0, L:] = np.nan
    logits = logits.assign_coords(
        scheme=("checkpoint", ["rope"]), training_length=("checkpoint", [L])
    )
    figure = logit_by_distance(logits)
    for curve, length in (("trained", L), ("trained", 2 * L), ("random 0", 2 * L)):
        many = artist(figure, f"{curve} {length}").get_ydata()
        few = artist(figure, f"{curve} {length}, few pairs").get_ydata()
        assert_allclose([*many, *few[1:]], np.arange(1, length))
        assert few[0] == length - length // FEW_PAIRS
    assert not artists(figure, f"random 0 {L}")
    with pytest.raises(InputError, match="trained"):
        logit_by_distance(logits.sel(weights=["random 0"]))


def test_components_are_coloured_by_band_and_add_up():
    data = averaged(components())
    above, below = component_curves(data).axes
    curves = data["component_by_distance"].values[:, 1:]
    curves = curves - curves.mean(-1, keepdims=True)
    for place, band in enumerate(NAMES):
        line = artist(above, f"component {place}")
        assert to_hex(line.get_color()) == BAND_COLOURS[band].lower()
        assert_allclose(line.get_ydata(), curves[place])
    assert_allclose(artist(below, "sum").get_ydata(), curves.sum(0), atol=1e-12)
    assert_allclose(artist(below, "sum low").get_ydata(), curves[3:].sum(0), atol=1e-12)
    assert artist(below, "few pairs").get_x() == L - L // 16


def test_beyond_the_training_length_activated_components_keep_their_range_within():
    group = components(2 * L)
    first = group["component_by_distance"].isel(layer=0, drop=True)
    band = averaged(group)[["activated", "low_frequency"]].drop_vars(["layer", "scheme"])
    data = band.assign(
        component_by_distance=first, logit_by_distance=group["logit_by_distance"].mean("head")
    )
    top, *layers = beyond_training_length(data, L).axes
    lines = [line for line in top.get_lines() if len(line.get_xdata()) > 2]
    within = [line.get_ydata()[line.get_xdata() < L] for line in lines]
    assert [(min(values), max(values)) for values in within] == [(0, 1)] * NAMES.count("activated")
    mean = data["logit_by_distance"].isel(layer=0).rolling(distance=L // 16, center=True).mean()
    curve = artist(layers[0], "layer 0")
    assert_allclose(curve.get_ydata(), mean.sel(distance=curve.get_xdata()))


def test_vaf_is_bars_beside_controls_and_cells_over_training():
    data = averaged(components())
    vaf = xr.DataArray(np.arange(12.0).reshape(2, 6), dims=("weights", "component"))
    vaf = vaf.assign_coords(weights=["trained", "random 0"])
    (ax,) = vaf_by_component(data.assign(vaf=vaf, spread=vaf[0])).axes
    bars = [bar for bar in ax.patches if abs(bar.get_width() - 0.42) < 1e-9]
    assert_allclose([bar.get_height() for bar in bars], vaf[0])
    assert_allclose(artist(ax, "random 0").get_ydata(), vaf[1])
    (grid,) = vaf_over_training(data.assign(vaf=vaf.rename(weights="step"))).panels.values()
    assert_allclose(grid, vaf.T)


def rotation(heads: int = HEADS) -> xr.Dataset:
    """Norms of pairs; the first layer does not rotate."""
    values = np.random.default_rng(1).uniform(0.1, 3, (2, LAYERS, heads, COMPONENTS))
    values[:, 0] = np.nan
    group = xr.Dataset({"query_norm": (HEAD_AXES, values[0]), "key_norm": (HEAD_AXES, values[1])})
    group = group.assign_coords(scheme=("layer", ["nope", "rope", "rope"]))
    return group.assign_coords({dim: np.arange(size) for dim, size in group.sizes.items()})


def test_a_pair_of_tokens_adds_up_to_its_logit():
    logit = xr.DataArray([1.0, -2, 3, 0.5, 0, 1], dims="component")
    (ax,) = pair_of_tokens(averaged(components()).assign(logit=logit)).axes
    assert_allclose(artist(ax, "sum so far").get_ydata(), logit.cumsum())


def test_turns_are_shares_in_per_cent_and_angles_that_no_pair_turns_by_are_not_drawn():
    group = components()
    group["turn_share"][..., 3] = 0
    share = group["turn_share"].mean(("layer", "head")).transpose("turn", "component")
    (cells,) = turns_grid(group, [*range(LAYERS)]).panels.values()
    assert_allclose(cells, 100 * share[2::-1])


def test_a_run_gets_the_figures_that_it_allows():
    plain = ["logit_by_distance", "components_by_distance", "component_vaf"]
    learned = [*plain, "beyond_training_length", "component_turns"]
    for group, names in (
        (components(), plain),
        (components(2 * L, ("rope", "repo", "repo")), learned),
        (components(schemes=("nope",) * 3), plain[:1]),
    ):
        assert [one.name for one in figures_of(as_run(group))] == names


def test_bands_are_about_the_training_length_and_about_the_longest_prompt():
    """In closed form: of theta = 2 pi / 32 one turn takes 32 tokens, half a turn 16."""
    names = bands_over(2 * np.pi / np.array([16.0, 32.0, 40.0, 63.9, 64.0, 90.0]), 32)
    assert names == ["high", "high", "activated", "activated", "low", "low"]
    short = components()
    short["logit_by_distance"] = short["logit_by_distance"].where(short["distance"] < 8)
    table = component_table(as_run(short))
    assert [column[-10:] for column in table.columns[3:5]] == ["32 tokens)", "(8 tokens)"]
    assert [row[3] for row in table.rows] != [row[4] for row in table.rows]


def test_a_layer_with_a_window_stands_apart_with_the_l_of_its_bands():
    run = as_run(components().assign(band_length=("layer", [8, 8, L])))
    assert "over the window (8 tokens)" in component_table(run).columns[3]
    assert "of 2 layers" in component_table(run).note
    figures = {drawn.name: drawn.figure for drawn in figures_of(run)}
    for name in ("components_by_distance", "component_vaf"):
        assert any("L = 8 tokens" in text for text in texts(figures[name])), name
    data, _ = component_data(run, PageOptions())
    assert data is not None and data["training_length"] == 8


def test_the_page_opens_on_the_component_that_accounts_for_most():
    """Found: it opened on a flat one, the first of those that are activated."""
    for most in (4, 0):
        group = components()
        group["vaf"] = group["vaf"] + 90.0 * (group["component"] == most)
        data, _ = component_data(as_run(group), PageOptions())
        assert data is not None and data["start"] == most
        assert data["start"] == np.argmax(data["layers"][0]["vaf"])


def test_means_over_few_pairs_are_on_no_chart_of_distances():
    """Found: the largest distance is one pair, the last token at the sink: components jumped there."""
    group = components(64)
    for name in ("component_by_distance", "logit_by_distance"):
        group[name] = group[name].where(group["distance"] < 63, 1e6)
    run = as_run(group)
    data, _ = component_data(run, PageOptions())
    assert data is not None and data["distance"][-1] == 63 - 64 // FEW_PAIRS
    assert np.abs([layer["components"] for layer in data["layers"]]).max() < 1e3
    (curves,) = [chart for chart in VIEW.charts(run) if isinstance(chart, HeadCurves)]
    assert curves.at.max() == 63 - 64 // FEW_PAIRS == curves.curves["mean logit"]["distance"].max()
    figure = dict(VIEW.figures(run))["logit_by_distance"]
    for ax in figure.axes:
        assert artist(ax, "mean a model").get_ydata().max() < 1e3
        assert ax.get_xlim()[1] < 63


def test_the_page_has_every_component_with_frequency_and_wavelength(no_pictures, tmp_path):
    run = as_run(components())
    data, _ = component_data(run, PageOptions())
    assert data is not None and data["components"][2]["band"] == "activated"
    wavelengths = [one["wavelength"] for one in data["components"]]
    assert_allclose(wavelengths, 2 * np.pi / FREQUENCIES, rtol=1e-5)
    mean = run["components"]["component_by_distance"].mean("layer").values
    assert data["distance"] == list(range(1, L - L // FEW_PAIRS))
    assert len(data["layers"]) == 1 + LAYERS
    assert_allclose(data["layers"][0]["components"], mean[:, 1 : L - L // FEW_PAIRS], rtol=1e-3)
    still = as_run(components(schemes=("nope",) * 3))
    assert component_data(still, PageOptions()) == (None, ())
    assert "rotates" in report_page(still, tmp_path / "still.html").read_text()


@pytest.mark.parametrize("heads", [HEADS, 60])
def test_the_grid_of_norms_is_drawn_for_few_heads_and_for_many(heads):
    """SmolLM2's 270 heads have a row a layer, whose schemes the legend names."""
    pairs = rotation(heads)
    queries, keys, *_ = norms_grid(pairs).figure().axes
    norms = pairs["query_norm"].values[1:]
    expected = norms.reshape(-1, COMPONENTS) if heads == HEADS else norms.mean(1)
    assert_allclose(queries.images[0].get_array(), expected)
    assert queries.images[0].get_clim() == keys.images[0].get_clim(), "one scale"
