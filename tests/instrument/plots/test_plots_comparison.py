"""The figures, tables and page of a comparison: what is drawn, in which colours, and that every
measure has its figure.
"""

from __future__ import annotations

import numpy as np
import pytest
import structured_runs
import torch
import xarray as xr
from attention_inputs import random_inputs
from drawn import artist, artists, texts
from matplotlib.colors import to_hex
from run_fixture import small_run

import repo_interp as ri
from repo_interp.measures.catalogue import measure_named, measure_names
from repo_interp.measures.statistics import merge
from repo_interp.plots import comparison_figures
from repo_interp.plots.beside import _by_scheme
from repo_interp.plots.beside import beside as beside_view
from repo_interp.plots.catalogue import tables, view_of
from repo_interp.plots.marks.beside import charts_of
from repo_interp.plots.marks.runs import runs_of
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.style import SCHEME_COLOURS
from repo_interp.run import make_run, with_schemes
from repo_interp.values import with_field

ASKED = {
    "components": {"training_length": "24"},
    "rotation": {"training_length": "24"},
    "three_axis": {"axes": "first_prompt"},
    "fake_distance": {"axes": "first_prompt"},
}
"""Parameters under which a measure keeps all that is drawn."""


def array(values, dims, name="value", **coords):
    """A variable of a comparison: runs a, b, ..."""
    values = np.asarray(values, float)
    labels = {dim: np.arange(size) for dim, size in zip(dims, values.shape, strict=True)} | coords
    labels["run"] = [chr(97 + place) for place in range(values.shape[0])]
    return xr.DataArray(
        values, labels, dims, name=name, attrs={"long_name": f"the {name}", "units": "1"}
    )


def runs(*layouts, steps=None):
    """The runs a, b, ... of these layouts."""
    names = [chr(97 + place) for place in range(len(layouts))]
    root = xr.Dataset({"layout": ("run", list(layouts))}, {"run": names})
    if steps is not None:
        root["training_step"] = ("run", list(steps))
    return runs_of(xr.DataTree(root))


def only(variable, *of):
    """The only figure of a variable."""
    (chart,) = charts_of("", variable, *of)
    return chart.figure()


def drawn(variable, *of):
    """The figures of a variable by the ends of their names."""
    return {chart.name: chart.figure() for chart in charts_of("", variable, *of)}


def measured(scheme, seed):
    """A run of every measure that needs no gates, on random inputs of two layers."""
    spans = {name: torch.zeros(2, 24, dtype=torch.bool) for name in ("generated", "needle")}
    spans["generated"][:, -2:], spans["needle"][:, 4:7] = True, True
    layers = [random_inputs(scheme=scheme, layer=layer, seed=seed + layer) for layer in range(2)]
    groups = {}
    for name in measure_names():
        if name in ("gates", "segments", "predictions"):  # the last is no measure of attention
            continue
        measure = measure_named(name)
        for parameter, value in ASKED.get(name, {}).items():
            measure = with_field(measure, parameter, value, name)
        groups[name] = with_schemes(
            measure.conclude(merge([measure.observe(one, spans) for one in layers])), [scheme] * 2
        )
    return make_run(groups, {"layout": scheme, "checkpoint": scheme, "prompts_digest": "same"})


@pytest.fixture(scope="module")
def every_measure():
    """Two runs of all measures of the catalogue."""
    found = []
    for name, seed in (("rope", 0), ("repo", 5)):
        tree = measured(name, seed)
        structured = structured_runs.run()
        for group in ("gates", "segments"):
            changed = structured[group].to_dataset()
            tree[group] = changed.map(
                lambda values, seed=seed: (
                    values * (1 + seed / 50) if values.dtype.kind == "f" else values
                )
            )
        found.append(tree)
    return ri.compare(found)


def test_every_measure_of_the_catalogue_has_a_figure_and_a_table(every_measure):
    drawn = list(comparison_figures(every_measure))
    # of single tokens: nothing that runs could be averaged over
    one_prompt = {"attention_rows", "predictions"}
    assert {one.measure for one in drawn} == set(measure_names()) - one_prompt
    assert len({one.name for one in drawn}) == len(drawn)
    assert all(one.caption.endswith(".") for one in drawn)
    assert {table.name for table in tables(every_measure)} == set(measure_names()) - {
        "maps"
    } - one_prompt


def test_what_a_view_says_of_variables_is_of_variables_of_its_group(every_measure):
    for measure in every_measure.children:
        view = view_of(measure)
        assert view is not None and view.compared is not None
        assert {*view.compared, *view.not_averaged} <= set(every_measure[measure].data_vars)


def test_maps_of_heads_share_one_scale_and_the_difference_is_the_difference():
    values = array([[[0.0, 1.0], [2.0, 3.0]], [[4.0, 4.0], [1.0, 3.0]]], ("run", "layer", "head"))
    figure = only(values, runs("rope", "repo"))
    a, b, difference = (artist(figure, name) for name in ("map a", "map b", "difference b"))
    np.testing.assert_array_equal(b.get_array(), values.values[1])
    assert a.get_clim() == b.get_clim() == (0.0, 4.0)
    np.testing.assert_array_equal(difference.get_array(), [[4, 3], [-1, 0]])
    assert difference.get_clim() == (-4.0, 4.0)


def test_maps_over_decades_are_compared_by_their_ratio_and_a_run_without_values_says_so():
    values = array([[[np.nan, np.nan]], [[1.0, 100.0]], [[10.0, 1000.0]]], ("run", "layer", "head"))
    figure = only(values, runs("nope", "rope", "repo"))
    np.testing.assert_allclose(artist(figure, "difference c").get_array(), [[1, 1]])
    assert not artists(figure, "difference b") and not artists(figure, "difference a")
    assert "none" in texts(figure)


def test_curves_lie_over_each_other_in_the_colours_of_their_schemes_with_the_middle_half_of_heads():
    random = np.random.default_rng(0)
    values = array(random.normal(size=(2, 3, 5, 20)), ("run", "layer", "head", "distance"))
    figure = only(values, runs("rope", "repo"))
    panels = [ax for ax in figure.axes if ax.axison]
    assert [ax.get_title("left") for ax in panels] == ["layer 0", "layer 1", "layer 2"]
    line, other = (artist(panels[1], f"mean {name}") for name in "ab")
    np.testing.assert_allclose(line.get_ydata(), values.values[0, 1].mean(0))
    assert (to_hex(line.get_color()).upper(), to_hex(other.get_color()).upper()) == (
        SCHEME_COLOURS["rope"],
        SCHEME_COLOURS["repo"],
    )
    band = artist(panels[1], "middle half a")
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(
        np.quantile(values.values[0, 1], 0.75, axis=0).max()
    )


def test_names_are_dots_at_the_mean_of_layers_and_heads():
    values = array(
        np.arange(24.0).reshape(2, 2, 2, 3),
        ("run", "layer", "head", "span"),
        span=["rest", "needle", "generated"],
    )
    figure = only(values, runs("rope", "nope"))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "needle",
        "rest",
        "generated",
    ]
    dots = artist(figure, "mean b")
    np.testing.assert_allclose(dots.get_xdata(), values.values[1].mean((0, 1))[[1, 0, 2]])


def test_the_map_shown_is_of_the_head_in_which_runs_differ_most():
    values = np.zeros((2, 2, 2, 4, 4))
    values[1, 1, 0] = 2.0
    values[1, 0, 1, 0, 0] = 3.0
    figure = only(
        array(values, ("run", "layer", "head", "query_block", "key_block")), runs("rope", "repo")
    )
    assert "layer 1, head 0" in figure.get_suptitle()
    np.testing.assert_array_equal(artist(figure, "difference b").get_array(), np.full((4, 4), 2.0))


def test_steps_are_an_axis_from_pale_to_full_colour():
    steps = runs("repo", "repo", "repo", steps=(100, 200, 1000))
    shades = [
        np.mean(np.frombuffer(bytes.fromhex(steps.looks[name]["color"][1:]), np.uint8))
        for name in "abc"
    ]
    assert (
        shades[0] > shades[1] > shades[2]
        and steps.looks["c"]["color"].upper() == SCHEME_COLOURS["repo"]
    )
    values = array(np.arange(12.0).reshape(3, 2, 2), ("run", "layer", "head"))
    by_name = drawn(values, steps)
    line = artist(by_name["over_steps"].axes[0], "mean head 1")
    np.testing.assert_array_equal(line.get_xdata(), [100, 200, 1000])
    np.testing.assert_allclose(line.get_ydata(), values.values[:, 0, 1])
    of_spans = values.expand_dims(span=["needle"], axis=-1)
    line = artist(drawn(of_spans, steps)["needle_over_steps"].axes[0], "mean head 1")
    np.testing.assert_allclose(line.get_ydata(), [1, 5, 9])
    many = array(np.arange(54.0).reshape(3, 2, 9), ("run", "layer", "head"))
    line = artist(drawn(many, steps)["over_steps"], "mean 1")
    np.testing.assert_allclose(line.get_ydata(), many.values[:, 1].mean(1))
    named = array(np.arange(6.0).reshape(3, 2), ("run", "pattern"), pattern=["constant", "mono"])
    line = artist(only(named, steps), "mean mono")
    np.testing.assert_array_equal(line.get_ydata(), [1, 3, 5])


def test_kinds_of_heads_over_steps_are_shares_of_layers_and_named_in_a_table():
    kinds = np.full((3, 2, 2), "", dtype=object)
    kinds[:, 1] = "other"
    kinds[1:, 1, 0], kinds[2, 1, 1] = "counts tokens", "marks lines"
    named = array(
        np.zeros((3, 2, 2)), ("run", "layer", "head"), scheme=("layer", ["rope", "repo"])
    ).copy(data=kinds)
    root = xr.Dataset(
        {"layout": ("run", ["repo"] * 3), "training_step": ("run", [10, 20, 40])},
        {"run": ["a", "b", "c"]},
    )
    tree = xr.DataTree.from_dict({"/": root, "/position_sources": xr.Dataset({"kind": named})})
    beside = view_of("position_sources").beside  # pyright: ignore[reportOptionalMemberAccess]
    drawn = {chart.name: chart.figure() for chart in beside.charts(tree)}
    assert {"position_sources_kind", "position_sources_kind_share"} < {*drawn}
    counts = artist(drawn["position_sources_kind_by_layer"], "mean counts tokens")
    np.testing.assert_array_equal(counts.get_data(), [[10, 20, 40], [0, 0.5, 0.5]])
    (table,) = beside.tables(tree)
    assert table.rows == (
        ("counts tokens", "0  ", "1  L1 H0", "1  L1 H0"),
        ("marks lines", "0  ", "0  ", "1  L1 H1"),
    )
    # as of RoPE models
    tree["position_sources"] = xr.DataTree(xr.Dataset({"kind": named.where(False, "")}))
    assert not list(beside.charts(tree)) and not any(table.rows for table in beside.tables(tree))


def test_two_runs_agree_on_positions_by_the_order_of_tokens():
    """In the layer that learns: shifted and stretched, turned round, all equal, and the same."""
    run, other = structured_runs.run(), structured_runs.run()
    changed = other["positions"].to_dataset()
    learned = changed["position"].copy(data=np.sin(changed["position"] + changed["token"]))
    run["positions"] = run["positions"].to_dataset().assign(position=learned)
    factors = xr.DataArray([3.0, -1.0, 0.0, 1.0], dims="head")
    other["positions"] = changed.assign(position=factors * learned + 7)
    for name, one in (("a", run), ("b", other)):
        one.attrs |= {"prompts_digest": "same", "checkpoint": name}
    beside = view_of("positions").beside  # pyright: ignore[reportOptionalMemberAccess]
    drawn = {chart.name: chart for chart in beside.charts(ri.compare({"a": run, "b": other}))}
    (found,) = drawn["position_agreement"].panels.values()  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(found, [[np.nan] * 4] * 3 + [[1, -1, np.nan, 1]])
    one = {"a": run.sel(layer=[0, 1]), "b": run.sel(layer=[0, 1])}
    assert "position_agreement" not in [chart.name for chart in beside.charts(ri.compare(one))]


def test_a_run_without_the_group_names_no_layers_and_layers_of_the_index_are_left_out():
    """Found: rows of "RePo and  layers", and means over a RoPE layer beside learned ones."""
    runs = {name: structured_runs.run() for name in "abc"}
    del runs["c"]["positions"]
    for name, one in runs.items():
        one.attrs |= {"prompts_digest": "same", "checkpoint": name}
    tree = ri.compare(runs)
    (table, *_) = beside_view("positions", view_of).tables(tree)
    labels = {cell for row in table.rows for cell in row if "layers" in str(cell)}
    assert labels and not any(" and layers" in label for label in labels)
    charts = {chart.name: chart for chart in beside_view("positions", view_of).charts(tree)}
    drawn = charts["positions_position_range"].values
    assert drawn["layer"].values.tolist() == [1, 2, 3], "layer 0 is RoPE in every run"


def test_what_only_one_run_has_and_what_is_no_number_is_not_drawn():
    values = array(np.arange(8.0).reshape(2, 2, 2), ("run", "layer", "head"))
    assert not list(charts_of("", values.where(values["run"] == "a"), runs("rope", "repo")))
    assert not list(charts_of("", values.astype(int), runs("rope", "repo")))


def test_positions_are_drawn_only_where_the_prompts_are_the_same():
    one, other = small_run(), small_run()
    names = {one_drawn.name for one_drawn in comparison_figures(ri.compare({"a": one, "b": other}))}
    assert {"positions_by_token", "positions_position_range", "patterns_pattern_share"} <= names
    one.attrs["prompts_digest"], other.attrs["prompts_digest"] = "1", "2"
    names = {one_drawn.name for one_drawn in comparison_figures(ri.compare({"a": one, "b": other}))}
    assert "positions_by_token" not in names and "positions_position_range" in names


@pytest.mark.usefixtures("no_pictures")
def test_a_figure_that_cannot_be_drawn_costs_itself_alone(small, tmp_path):
    broken = ri.compare({"a": small, "b": small})
    # which the view of positions draws with
    broken["positions"] = broken["positions"].to_dataset().drop_vars("position_range")
    failures = write_report(broken, tmp_path / "page.html", tmp_path / "figures")
    assert [
        line for line in failures if line.startswith("the figures of 'positions': KeyError")
    ] == failures[:1]
    drawn = {file.name for file in (tmp_path / "figures").iterdir()}
    assert "attention_mass_mass.png" in drawn
    assert 'id="patterns"' in (tmp_path / "page.html").read_text()


def test_a_measure_of_another_package_is_drawn_by_the_rule(tmp_path):
    described = {"long_name": "<b>strange", "units": "1"}
    trees = {
        name: make_run(
            {
                "theirs": xr.Dataset(
                    {"strange": (("layer", "head"), np.full((2, 2), at), described)}
                )
            },
            {"layout": "rope"},
        )
        for name, at in (("a", 1.0), ("<i>b", 2.0))
    }
    found = ri.compare(trees)
    assert [one.name for one in comparison_figures(found)] == ["theirs_strange"]
    first, again = tmp_path / "page.html", tmp_path / "again.html"
    assert (
        write_report(found, first, tmp_path / "figures")
        == write_report(found, again, tmp_path / "figures")
        == []
    )
    page = first.read_text()
    assert page == again.read_text()
    assert (
        "<b>strange" not in page
        and "&lt;b&gt;strange" in page
        and "<i>b" not in page
        and page.count("data:image/svg+xml") == 1
    )


def test_no_mean_is_over_learned_and_given_positions():
    """Rows by the schemes that layers have in the runs; those of a kind that agree are named alone."""
    values = array(
        [[[10.0, 10.0], [2.0, 4.0]], [[10.0, 10.0], [6.0, 6.0]]], ("run", "layer", "head")
    )
    both = values.assign_coords(scheme=("layer", ["rope", "repo"])).rename("position_range")
    parts = _by_scheme(both)
    assert list(parts) == [", RoPE layers", ", RePo layers"]
    assert parts[", RePo layers"].mean(("layer", "head")).values.tolist() == [3.0, 6.0]
    # models that differ in a layer are compared there
    differ = values.assign_coords(scheme=(("run", "layer"), [["rope", "rope"], ["rope", "repo"]]))
    assert list(_by_scheme(differ)) == [", RoPE layers", ", RoPE and RePo layers"]
    alike = values.assign_coords(scheme=(("run", "layer"), [["rope", "rope"], ["repo", "repo"]]))
    assert list(_by_scheme(alike)) == [""]
