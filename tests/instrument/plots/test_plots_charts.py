"""One test per kind of chart: what is drawn, packed for the page and tabled is the array's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from drawn import artist, artists
from matplotlib.colors import to_rgb
from numpy.testing import assert_allclose

from repo_interp.plots import head_grid, paper_figure, style
from repo_interp.plots.marks import (
    Dots,
    HeadDots,
    Heads,
    Lines,
    Panels,
    charts_of,
    table_of,
    with_run_axis,
)
from repo_interp.plots.marks.head_map import MISSING, layer_table
from repo_interp.plots.style import SCHEME_COLOURS
from repo_interp.plugins.causes.effects_view import effects_of_sets
from repo_interp.plugins.head_tables.overview import MOST_NAMED_ROWS, atlas_overview
from repo_interp.plugins.heads.view import colours_of_names
from repo_interp.plugins.rotation.view import _number_places
from repo_interp.plugins.three_axis.view import fit_correlations

RUN = xr.DataTree()
RUN.attrs = {"checkpoint": "small", "layout": "rope,repo"}
HEADS = xr.DataArray(
    [[0.5, -1.0, np.nan], [2.0, 0.0, 1.0]],
    {"layer": [0, 3], "head": [0, 1, 2], "scheme": ("layer", ["rope", "repo"])},
    ("layer", "head"),
    "r",
    {"long_name": "r of heads", "units": "positions"},
)


def test_heads_are_a_map_in_figures_and_on_the_page():
    """The largest value has the last colour, a missing one is grey."""
    with style():
        ax = head_grid(HEADS, paper_figure(3.3, 3).subplots())
    assert_allclose(ax.images[0].get_array().filled(np.nan), HEADS.values)
    title = ax.get_title(loc="left")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "3"]
    assert ax.images[0].get_clim() == (-2, 2)
    chart = Heads(HEADS)
    data = chart.data()
    assert data["values"] == [[0.5, -1.0, None], [2.0, 0.0, 1.0]] and chart.live
    assert data["title"] == title == "r of heads (positions)"
    assert data["ends"] == [-2, 2] and data["control"] is None
    assert (data["colours"][1][0], data["colours"][0][2]) == (data["scale"][-1], MISSING)


def test_dots_of_heads_stand_over_their_control():
    prompts = xr.DataArray([0.5, 1.5, 4.0], dims="prompt")
    values = (abs(HEADS) + 1).where(HEADS["layer"] == 3) * prompts
    chart = HeadDots("r", {"one": (values, values / 100)}, "shuffled", "r", {"one": 7.0}, "length")
    (ax,) = chart.figure().axes
    assert not artists(ax, "heads 0") and "none" in [text.get_text() for text in ax.texts]
    assert_allclose(artist(ax, "heads 1").get_ydata(), [6, 2, 4])
    assert (abs(artist(ax, "heads 1").get_xdata() - 1) < 0.5).all()
    bars = artist(ax, "control 1").get_segments()
    assert_allclose([bar[0][1] for bar in bars], [0.06, 0.02, 0.04])
    assert_allclose(artist(ax, "level").get_ydata(), 7)
    # Nothing joins a dot to its null: it looked like the bar of an error
    ranges = artist(ax, "range 1").get_segments()
    assert_allclose([np.ptp(part[:, 1]) for part in ranges], [3.5 * 3, 3.5, 3.5 * 2])
    joined = [part for part in ax.collections if part.get_gid() not in ("control 1", "range 1")]
    assert not joined
    named = [text.get_text() for text in chart.figure().legends[0].get_texts()]
    assert named == ["RoPE", "RePo", "smallest to largest prompt", "shuffled", "length"]


def test_an_axis_that_is_logarithmic_on_both_sides_of_0_says_so():
    values = HEADS.fillna(0.0).assign_attrs(least=0.001) * [1e3, 1.0, 1.0]
    values.attrs["least"] = 0.001
    (ax,) = HeadDots("r", {"one": (values, values)}, "null", "r").figure().axes
    assert ax.get_yscale() == "symlog"
    assert ax.get_title(loc="left").endswith("logarithmic beyond ±1")
    change = xr.DataArray([-1e-2, 90.0], {"kind": ["a", "b"]}, ("kind",), "loss", {"least": 1e-3})
    (ax,) = Dots(*with_run_axis(RUN, change), "kind").figure().axes
    assert ax.get_xscale() == "symlog" and "logarithmic beyond ±0.001" in ax.get_xlabel()


def test_colors_end_at_what_was_measured_where_all_values_are_large():
    """Found: correlations from .62 to .99 on a scale from 0 on, two yellow sheets."""
    for least, start in ((0.62, 0.62), (0.2, 0.0)):
        data = Heads(xr.DataArray([[least, 0.99]], {"layer": [0], "head": [0, 1]})).data()
        assert data["ends"] == [start, 0.99]
    fits = {
        name: xr.Dataset({"r": (("prompt", "layer", "head"), [[[0.62, 0.99], [value, 0.9]]])})
        for name, value in (("three_axis", 0.8), ("fake_distance", 0.95))
    }
    run = xr.DataTree.from_dict(
        {
            name: fit.assign_coords(
                layer=[0, 1], head=[0, 1], prompt=[0], scheme=("layer", ["rope", "rope"])
            )
            for name, fit in fits.items()
        }
    )
    run.attrs = RUN.attrs
    one, two, _ = fit_correlations(run).axes
    assert one.images[0].get_clim() == two.images[0].get_clim() == (0.62, 0.99)


def test_no_name_of_a_head_is_gray():
    """Found: sinks were as gray as heads without a name."""
    shades = [to_rgb(colour) for colour in colours_of_names([str(n) for n in range(18)]).values()]
    assert len(set(shades)) == 18
    assert min(max(shade) - min(shade) for shade in shades) > 0.1


def test_a_grid_has_a_panel_per_title_numbers_in_cells_and_one_frame():
    cells = xr.DataArray(
        [[1.0, 2.0], [3.0, np.nan]], {"size": [8, 1024], "epsilon": [0.1, 0.5]}, ("size", "epsilon")
    )
    cells["size"].attrs["long_name"] = "chunk size"
    panels, bar = {"one": cells, "two": cells * 2}, {"label": "share"}
    figure = Panels("cells", panels, "above", ".1f", bar=bar, chosen=(1, 0)).figure()
    one, two, bar = figure.axes
    assert [text.get_text() for text in two.texts] == ["2.0", "4.0", "6.0"]
    assert one.images[0].get_clim() == two.images[0].get_clim() == (0, 6)
    assert [label.get_text() for label in one.get_yticklabels()] == ["8", "1,024"]
    assert (one.get_ylabel(), bar.get_ylabel()) == ("chunk size", "share")
    assert artist(one, "choice").get_xy() == (-0.5, 0.5) and figure.get_suptitle() == "above"


def test_lines_of_a_single_run_have_a_panel_per_layer_in_the_colour_of_its_scheme():
    far = xr.DataArray([1.0, 2, 3], {"distance": [1, 2, 4]}, attrs={"training_length": 2})
    distance = (far * HEADS.isel(head=slice(2))).assign_attrs(far.attrs)
    (chart,) = charts_of("by_distance", *with_run_axis(RUN, distance), live=True)
    assert isinstance(chart, Lines) and chart.live and chart.name == "by_distance"
    for ax, layer, scheme in zip(chart.figure().axes, (0, 3), ("rope", "repo"), strict=True):
        line = artist(ax, "mean small")
        assert_allclose(line.get_ydata(), distance.sel(layer=layer).mean("head"))
        assert line.get_color() == SCHEME_COLOURS[scheme]
        assert list(artist(ax, "training length").get_xdata()) == [2, 2]


def test_an_axis_that_doubles_names_the_places_whose_labels_have_room():
    """Found: tolerances of 0.05 to 0.8 were all called 0; octaves' labels ran into one another."""
    values = xr.DataArray([1.0, 2, 3], {"epsilon": [0.05, 0.4, 1024]}, ("epsilon",), "share")
    (chart,) = charts_of("share", *with_run_axis(RUN, values))
    labels = chart.figure().axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["0.05", "0.4", "1,024"]
    octaves = xr.DataArray(np.arange(10.0), {"octave": 2 ** np.arange(10)}, ("octave",), "mass")
    four = octaves.expand_dims(layer=range(4)).assign_coords(scheme=("layer", ["rope"] * 4))
    (chart,) = charts_of("mass", *with_run_axis(RUN, four))
    figure = chart.figure()
    figure.draw_without_rendering()
    for ax in figure.axes:
        drawn = [label for label in ax.get_xticklabels() if label.get_text()]
        assert drawn[0].get_text() == "1" and len(ax.get_xticks()) == 10 > len(drawn) > 3
        boxes = [label.get_window_extent() for label in drawn]
        assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_the_axis_of_lines_holds_what_was_measured_and_no_more():
    """Found: 480 distances on an axis to 8,192, the training length."""
    measured = np.where(np.arange(64) < 48, 1.0 * np.arange(64), np.nan)
    values = xr.DataArray(measured, {"distance": np.arange(64)}, ("distance",), "logit")
    for length, drawn in ((8192, False), (32, True)):
        (chart,) = charts_of(
            "logit", *with_run_axis(RUN, values.assign_attrs(training_length=length))
        )
        figure = chart.figure()
        (ax,) = figure.axes
        assert_allclose(ax.get_xlim(), (0, 47), atol=0.05 * 47)
        lines = [line for line in ax.lines if line.get_gid() == "training length"]
        assert bool(lines) == drawn != ("8,192 tokens" in figure.get_suptitle())


def test_a_legend_of_one_entry_is_written_in_words_and_not_drawn():
    lines = xr.DataArray(
        np.ones((1, 3)), {"band": ["high"], "distance": [1, 2, 3]}, ("band", "distance")
    )
    for names, drawn in ((["high"], 0), (["high", "low"], 1)):
        values, runs = with_run_axis(RUN, xr.concat([lines[0]] * len(names), "band"))
        chart = Lines(values.assign_coords(band=names).rename("vaf"), runs, "distance", "band")
        figure = chart.figure()
        assert len(figure.legends) == drawn != ("line: high" in figure.get_suptitle())
    one, two = HEADS.sel(layer=[0]), HEADS
    for values, drawn in ((one, 0), (two, 1)):
        figure = Heads(values).figure()
        assert len(figure.legends) == drawn
        assert figure.axes[0].get_ylabel() == ("layer" if drawn else "layer (RoPE)")


def test_dots_have_their_errors_and_a_small_change_is_not_blown_up():
    values = xr.DataArray([1e-9, 2e-9], {"kind": ["a", "b"]}, ("kind",), "loss", {"least": 0.01})
    ends = {"low": values - 1e-9, "high": values + 1e-9}
    (chart,) = charts_of("loss", *with_run_axis(RUN, values.assign_coords(ends)))
    assert isinstance(chart, Dots)
    (ax,) = chart.figure().axes
    assert_allclose(artist(ax, "mean small").get_xdata(), values)
    errors = artist(ax, "error small").get_segments()
    assert_allclose([part[:, 0] for part in errors], [[0, 2e-9], [1e-9, 3e-9]])
    assert ax.get_xlim()[0] < -0.009


def test_a_table_has_a_row_per_label_with_the_scheme_of_a_layer_and_none_without_a_number():
    text = xr.full_like(HEADS, "x", dtype=object)
    table = table_of("r", "R", [("r", HEADS), ("text", text)], names={"head": "number"})
    assert table.columns == ("layer", "number", "scheme", "r", "text") and len(table.rows) == 5
    assert table.rows[1] == (0, 1, "RoPE", -1.0, "x")
    layers = HEADS["layer"]
    assert table_of("n", "N", [("n", layers * 2)]).rows == ((0, "RoPE", 0), (3, "RePo", 6))


def test_a_table_by_layer_ends_with_a_mean_over_the_layers_of_every_scheme():
    rows = layer_table("r", "R", {"r": HEADS.fillna(2)}, "").rows
    assert rows[0] == ("0", "RoPE", -1, 2, 0.5)
    assert [row[:2] for row in rows[1:]] == [("3", "RePo"), ("all", "RoPE"), ("all", "RePo")]
    assert rows[3][2:] == (0, 2, 1)


def test_the_overview_of_many_heads_names_all_that_it_draws():
    """Found: 270 rows without a name."""
    random = np.random.default_rng(0)
    scores = {score: (("layer", "head"), random.normal(size=(30, 9))) for score in ("sink", "copy")}
    atlas = xr.Dataset(scores, {"layer": np.arange(30), "head": np.arange(9)})
    atlas["name"] = xr.full_like(atlas["sink"], "", object)
    atlas["name"][7, 3] = "sink"
    ax = artist(atlas_overview(xr.DataTree.from_dict({"/atlas": atlas})), "overview").axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(labels) == MOST_NAMED_ROWS and "L7 H3 sink" in labels
    assert ax.get_ylabel().startswith(f"{MOST_NAMED_ROWS} of 270 heads")


@pytest.mark.parametrize(
    ("changes", "scale", "reach"),
    [([-0.02, -0.03, -9.0], "symlog", 9), ([0, 1e-7, 0], "linear", 0.01)],
)
def test_one_long_bar_hides_no_change_and_rounding_is_not_blown_up(changes, scale, reach):
    """Found: a bar of nine nats left the others at 0; changes of 1e-7 nats filled the figure."""
    of_sets = xr.DataArray([changes] * 2, {"kind": ["a", "b", "c"]}, ("prompt", "kind"))
    controls = xr.zeros_like(of_sets).expand_dims(draw=2)
    variables = {
        f"{part}_{name}_change": array
        for name in ("log_probability", "score")
        for part, array in (("set", of_sets), ("control", controls))
    }
    effects = xr.Dataset(variables, attrs={"metric": "exact match", "set_heads": 1})
    left = effects_of_sets(xr.DataTree.from_dict({"/effects": effects})).axes[0]
    assert left.get_xscale() == scale and left.get_xlim()[0] <= -reach


def test_numbers_of_arrows_that_point_alike_keep_apart():
    """Found: numbers stood on each other."""
    places = list(_number_places({7: 1 + 0j, 3: 0.99 + 0j, 5: 0.98 + 0.01j}, 0.1).values())
    apart = [abs(one - other) for at, one in enumerate(places) for other in places[:at]]
    assert min(apart) >= 0.1 and all(abs(place) > 0.98 for place in places)
    # A number stands at the head of its arrow, or nowhere: found floating beyond those of others
    tips = dict.fromkeys(range(9), 1 + 0j)
    found = _number_places(tips, 0.1)
    assert 0 in found and len(found) < 9
    assert max(abs(place - tips[number]) for number, place in found.items()) < 0.1
