"""The figures, tables and page of a comparison: what is drawn, in which colours, and that every
measure has its figure.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import structured_runs
import xarray as xr
from drawn import artist, artists, texts
from matplotlib.colors import to_hex, to_rgb
from run_fixture import small_run

import repo_interp as ri
from repo_interp.measures.measure_catalogue import measure_names
from repo_interp.plots import comparison_figures
from repo_interp.plots.compared import _by_scheme
from repo_interp.plots.compared import view_of_runs as beside_view
from repo_interp.plots.marks.beside import charts_of
from repo_interp.plots.marks.runs import runs_of
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.style import SCHEME_COLOURS, rendered
from repo_interp.plots.view_catalogue import tables, view_of
from repo_interp.run import make_run


def array(values, *dims, **coords):
    """A variable [run, ...] of a comparison: runs a, b, ..."""
    values, dims = np.asarray(values, float), ("run", *dims)
    labels = {dim: np.arange(size) for dim, size in zip(dims, values.shape, strict=True)}
    labels |= {"run": list("abcdef"[: len(values)]), **coords}
    attrs = {"long_name": "the value", "units": "1"}
    return xr.DataArray(values, labels, dims, "value", attrs)


def runs(*layouts, steps=None):
    """The runs a, b, ... of these layouts."""
    root = {"layout": ("run", list(layouts)), "run": list("abcdef"[: len(layouts)])}
    root |= {} if steps is None else {"training_step": ("run", list(steps))}
    return runs_of(xr.DataTree(xr.Dataset(root)))


def only(variable, *of):
    """The only figure of a variable."""
    (chart,) = charts_of("", variable, *of)
    return chart.figure()


@pytest.fixture(scope="module")
def every_measure(measured):
    """Two runs of all measures of the catalogue."""
    structured = structured_runs.run(asked=structured_runs.prompts((40, 32)))
    one = measured.filter(lambda node: node.name in (None, *measure_names()))
    one = one.assign({name: structured[name] for name in ("gates", "segments")})

    def other(group: xr.Dataset) -> xr.Dataset:
        floats = [name for name, array in group.items() if array.dtype.kind == "f"]
        return group.assign(group[floats] * 1.1)

    with xr.set_options(keep_attrs=True):
        return ri.compare({"a": one, "b": one.map_over_datasets(other)})


def test_every_measure_of_the_catalogue_has_a_figure_and_a_table(every_measure):
    drawn = list(comparison_figures(every_measure))
    # of single tokens: nothing that runs could be averaged over; a probe needs three prompts
    averaged = set(measure_names()) - {"attention_rows", "predictions", "position_probe"}
    assert {one.measure for one in drawn} == averaged
    assert all(one.caption.endswith(".") for one in drawn)
    assert {table.name for table in tables(every_measure)} >= averaged - {"maps"}


def test_what_a_view_says_of_variables_is_of_variables_of_its_group(every_measure):
    for measure in every_measure.children:
        view = view_of(measure)
        assert view is not None and view.compared is not None
        assert {*view.compared, *view.not_averaged} <= set(every_measure[measure].data_vars)


def test_maps_of_heads_share_one_scale_and_the_difference_is_the_difference():
    values = array([[[0, 1], [2, 3]], [[4, 4], [1, 3]]], "layer", "head")
    figure = only(values, runs("rope", "repo"))
    a, b, difference = (artist(figure, name) for name in ("map a", "map b", "difference b"))
    np.testing.assert_array_equal(b.get_array(), values.values[1])
    assert a.get_clim() == b.get_clim() == (0.0, 4.0)
    np.testing.assert_array_equal(difference.get_array(), [[4, 3], [-1, 0]])
    assert difference.get_clim() == (-4.0, 4.0)


def test_maps_over_decades_are_compared_by_their_ratio_and_a_run_without_values_says_so():
    values = array([[[np.nan, np.nan]], [[1, 100]], [[10, 1000]]], "layer", "head")
    figure = only(values, runs("nope", "rope", "repo"))
    np.testing.assert_allclose(artist(figure, "difference c").get_array(), [[1, 1]])
    assert not artists(figure, "difference b") and not artists(figure, "difference a")
    assert "none" in texts(figure)


def test_curves_lie_over_each_other_in_the_colours_of_their_schemes_with_the_middle_half_of_heads():
    random = np.random.default_rng(0)
    values = array(random.normal(size=(2, 3, 5, 20)), "layer", "head", "distance")
    figure = only(values, runs("rope", "repo"))
    panels = [ax for ax in figure.axes if ax.axison]
    assert [ax.get_title("left") for ax in panels] == ["layer 0", "layer 1", "layer 2"]
    line, heads = artist(panels[1], "mean b"), values.values[1, 1]
    np.testing.assert_allclose(line.get_ydata(), heads.mean(0))
    assert to_hex(line.get_color()).upper() == SCHEME_COLOURS["repo"]
    top = artist(panels[1], "middle half b").get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(np.quantile(heads, 0.75, axis=0).max())


def test_the_map_shown_is_of_the_head_in_which_runs_differ_most():
    values = np.zeros((2, 2, 2, 4, 4))
    values[1, 1, 0] = 2.0
    values[1, 0, 1, 0, 0] = 3.0
    blocks = array(values, "layer", "head", "query_block", "key_block")
    figure = only(blocks, runs("rope", "repo"))
    assert "layer 1, head 0" in figure.get_suptitle()
    np.testing.assert_array_equal(artist(figure, "difference b").get_array(), np.full((4, 4), 2.0))


def test_steps_are_from_pale_to_full_colour():
    looks = runs("repo", "repo", "repo", steps=(100, 200, 1000)).looks
    shades = [sum(to_rgb(looks[name]["color"])) for name in "abc"]
    assert shades[0] > shades[1] > shades[2]
    assert looks["c"]["color"].upper() == SCHEME_COLOURS["repo"]


def test_steps_are_an_axis_of_lines_of_heads_and_of_names():
    """A line is a head, or their mean where these are many."""
    heads = array(np.arange(12).reshape(3, 2, 2), "layer", "head")
    many = array(np.arange(54).reshape(3, 2, 9), "layer", "head")
    named = array(np.arange(6).reshape(3, 2), "pattern", pattern=["constant", "mono"])
    steps = runs("repo", "repo", "repo", steps=(100, 200, 1000))
    for values, end, mark, expected in (
        (heads, "over_steps", "head 1", heads[:, 0, 1]),
        (
            heads.expand_dims(span=["needle"], axis=-1),
            "needle_over_steps",
            "head 1",
            heads[:, 0, 1],
        ),
        (many, "over_steps", "0", many[:, 0].mean("head")),
        (named, "", "mono", named[:, 1]),
    ):
        (figure,) = (one.figure() for one in charts_of("", values, steps) if one.name == end)
        line = artist(figure.axes[0], f"mean {mark}")
        np.testing.assert_allclose(line.get_data(), [[100, 200, 1000], expected])


def test_kinds_of_heads_over_steps_are_shares_of_layers_and_named_in_a_table():
    kinds = np.full((3, 1, 2), "other", dtype=object)
    kinds[1:, 0, 0], kinds[2, 0, 1] = "counts tokens", "marks lines"
    named = array(np.zeros((3, 1, 2)), "layer", "head", layer=[1], scheme=("layer", ["repo"]))
    root = {"layout": ("run", ["repo"] * 3), "training_step": ("run", [10, 20, 40])}
    tree = xr.DataTree(xr.Dataset(root, {"run": named["run"]}))
    tree["position_sources/kind"] = named.copy(data=kinds)
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
    tree["position_sources/kind"] = named.copy(data=np.full_like(kinds, ""))  # as of RoPE models
    assert not list(beside.charts(tree)) and not any(table.rows for table in beside.tables(tree))


def positioned() -> xr.DataTree:
    """A run of positions alone, layer 0 of which is RoPE, 1 and 2 CoPE and 3 RePo."""
    run = structured_runs.run(asked=structured_runs.prompts((40, 32)))
    run.attrs |= {"prompts_digest": "same"}
    return run.drop_nodes(["gates", "segments"])


def test_two_runs_agree_on_positions_by_the_order_of_tokens():
    """In the layer that learns: shifted and stretched, turned round, all equal, and the same."""
    run, other = positioned(), positioned()
    positions = run["positions"].to_dataset()
    run["positions/position"] = learned = np.sin(positions["position"] + positions["token"])
    factors = xr.DataArray([3.0, -1.0, 0.0, 1.0], dims="head")
    other["positions/position"] = factors * learned + 7
    beside = view_of("positions").beside  # pyright: ignore[reportOptionalMemberAccess]
    drawn = {chart.name: chart for chart in beside.charts(ri.compare({"a": run, "b": other}))}
    (found,) = drawn["position_agreement"].panels.values()  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(found, [[np.nan] * 4] * 3 + [[1, -1, np.nan, 1]])
    one = run.sel(layer=[0, 1])
    charts = beside.charts(ri.compare({"a": one, "b": one}))
    assert "position_agreement" not in [chart.name for chart in charts]


def test_a_run_without_the_group_names_no_layers_and_layers_of_the_index_are_left_out():
    """Found: rows of "RePo and  layers", and means over a RoPE layer beside learned ones."""
    bare = positioned()
    bare["other"] = bare["positions"]
    tree = ri.compare({"a": bare, "b": bare, "c": bare.drop_nodes("positions")})
    view = beside_view("positions", view_of)
    labels = {cell for row in view.tables(tree)[0].rows for cell in row if "layers" in str(cell)}
    assert labels and not any(" and layers" in label for label in labels)
    drawn = {chart.name: chart for chart in view.charts(tree)}["positions_position_range"].values
    assert drawn["layer"].values.tolist() == [1, 2, 3], "layer 0 is RoPE in every run"


def test_what_only_one_run_has_and_what_is_no_number_is_not_drawn():
    values = array(np.arange(8).reshape(2, 2, 2), "layer", "head")
    assert not list(charts_of("", values.where(values["run"] == "a"), runs("rope", "repo")))
    assert not list(charts_of("", values.astype(int), runs("rope", "repo")))


def test_positions_are_drawn_only_where_the_prompts_are_the_same():
    one, other = small_run(), small_run()
    view = beside_view("positions", view_of)
    for digest, same in (("1", True), ("2", False)):
        one.attrs["prompts_digest"], other.attrs["prompts_digest"] = "1", digest
        names = {chart.name for chart in view.charts(ri.compare({"a": one, "b": other}))}
        assert "positions_position_range" in names and ("positions_by_token" in names) == same


@pytest.mark.usefixtures("no_pictures")
def test_a_figure_that_cannot_be_drawn_costs_itself_alone(small, tmp_path):
    part = small.drop_nodes("patterns")
    broken = ri.compare({"a": part, "b": part})
    # which the view of positions draws with
    broken["positions"] = broken["positions"].to_dataset().drop_vars("position_range")
    failures = write_report(broken, tmp_path / "page.html", tmp_path)
    said = "the figures of 'positions': positions/position_range is missing in the run; "
    assert failures[0].startswith(said)
    assert not any("attention_mass" in line for line in failures)
    assert (tmp_path / "attention_mass_mass.png").exists()
    assert 'id="attention_mass"' in (tmp_path / "page.html").read_text()


def test_a_measure_of_another_package_is_drawn_by_the_rule(tmp_path):
    described = {"long_name": "<b>strange", "units": "1"}

    def run(value):
        group = xr.Dataset({"strange": (("layer", "head"), np.full((2, 2), value), described)})
        return make_run({"theirs": group}, {"layout": "rope"})

    found = ri.compare({"a": run(1.0), "<i>b": run(2.0)})
    assert [one.name for one in comparison_figures(found)] == ["theirs_strange"]
    assert write_report(found, tmp_path / "page.html", tmp_path) == []
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;strange" in page and not re.search("<b>strange|<i>b", page)
    assert page.count("data:image/svg+xml") == 1


def test_no_mean_is_over_learned_and_given_positions():
    """Rows by the schemes that layers have in the runs; those of a kind that agree are named alone."""
    values = array([[[10, 10], [2, 4]], [[10, 10], [6, 6]]], "layer", "head")
    both = values.assign_coords(scheme=("layer", ["rope", "repo"]))
    assert list(parts := _by_scheme(both)) == [", RoPE layers", ", RePo layers"]
    assert parts[", RePo layers"].mean(("layer", "head")).values.tolist() == [3.0, 6.0]
    # models that differ in a layer are compared there
    differ = values.assign_coords(scheme=(("run", "layer"), [["rope", "rope"], ["rope", "repo"]]))
    assert list(_by_scheme(differ)) == [", RoPE layers", ", RoPE and RePo layers"]
    alike = values.assign_coords(scheme=(("run", "layer"), [["rope", "rope"], ["repo", "repo"]]))
    assert list(_by_scheme(alike)) == [""]


def test_names_of_any_length_leave_room_for_what_is_drawn(small):
    """Found: matplotlib's warning that no room was left, with a line of ours; legends alone."""
    names = [f"runs/{place}/{'n' * 200}/last" for place in ("here", "there")]
    compared = ri.compare(dict.fromkeys(names, small))
    labels = [runs_of(compared).title(name) for name in names]
    assert len({*labels}) == 2 and max(map(len, labels)) <= 43
    assert all(label.endswith("/last") for label in labels)
    alike = ri.compare({f"{'n' * 200}{middle}{'n' * 200}": small for middle in "ab"})
    assert runs_of(alike).title(str(alike["run"].values[1])).startswith("2: nnn")
    for one in comparison_figures(compared):
        rendered(one.figure, ["png"])
