"""Scores side by side: what is drawn, in which colours, and where spread comes from."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import xarray as xr
from drawn import artist
from matplotlib.colors import rgb_to_hsv, to_rgb
from numpy.testing import assert_allclose

from position_papers.kit.score_figures import method_panels, score_by_length, score_panels
from repo_interp.plots.marks.scores import layout_colour, layout_name, looks
from repo_interp.plots.style import SCHEME_COLOURS
from repo_interp.plots.views.task_scores import VIEW


def scores(values: np.ndarray, layouts: list[str], test_sets: list, **attributes) -> xr.Dataset:
    """`values` [checkpoint, test_set, seed] as the module draws them."""
    names, described = [f"task/{number}" for number in range(len(layouts))], {"long_name": "match"}
    return xr.Dataset(
        {
            "score": (("checkpoint", "test_set", "seed"), values, described | {"units": "1"}),
            "standard_error": (("checkpoint", "test_set"), np.full(values.shape[:2], 0.1)),
        },
        {"checkpoint": names, "layout": ("checkpoint", layouts), "test_set": test_sets},
        attributes,
    )


def test_layouts_have_their_schemes_colours_and_names_and_dashes_within_a_colour():
    """Mixed layouts have the colour of the more frequent scheme, variants that of their family;
    equal layouts the checkpoint's name.
    """
    for layout, scheme, name in (
        ("repo@2", "repo", "RePo from layer 2"),
        ("r2n1@1/3", "rope", "R2N1 after 1/3"),
        ("n2r1", "nope", "N2R1"),
    ):
        assert (layout_colour(layout), layout_name(layout)) == (SCHEME_COLOURS[scheme], name)
    layouts = ["hope", "hope_ab1", "rope_high", "rope", "r2n1", "repo", "repo"]
    found = [*looks(scores(np.zeros((7, 1, 1)), layouts, [5])).values()]
    shown = [look["color"] for look in found]
    assert shown[::5] == [SCHEME_COLOURS["hope"], SCHEME_COLOURS["repo"]]
    assert len(set(shown)) == 7, "colors tell those of one scheme apart"
    assert [look["label"] for look in found[-4:]] == ["RoPE", "R2N1", "task/5", "task/6"]


def test_checkpoints_of_one_scheme_are_no_shades_of_one_color():
    """Found: four browns, RePo from four layers, that no reader could match with the legend."""
    layouts = ["repo@1/3", "rope", "nope", "repo@0", "repo@2", "repo@3"]
    found = [look["color"] for look in looks(scores(np.zeros((6, 1, 1)), layouts, [5])).values()]
    assert found[0] == SCHEME_COLOURS["repo"]
    rgb = np.array([to_rgb(colour) for colour in found])
    apart = [np.linalg.norm(one - other) for one, other in combinations(rgb, 2)]
    hues = [rgb_to_hsv(rgb[place])[0] for place in (0, 3, 4, 5)]
    assert min(apart) > 0.3
    assert min(abs(one - other) for one, other in combinations(hues, 2)) > 0.07


def test_lines_are_means_over_the_seeds_that_are_there_and_dots_all_of_them():
    seeds = [[0.2, 0.6, np.nan], [0.1, 0.3, 0.5]]
    values = np.array([seeds, [[0.9, np.nan, np.nan], [0.8, np.nan, np.nan]]])
    data = scores(values, ["rope", "repo"], [21, 22], axis="words", training_length=20)
    (ax,) = score_by_length(data).axes
    assert_allclose(artist(ax, "score task/0").get_data(), [[21, 22], [0.4, 0.3]])
    ends = [segment[:, 1] for segment in artist(ax, "seeds task/0").get_segments()]
    assert_allclose(ends, [[0.2, 0.6], [0.1, 0.5]])
    dots = artist(ax, "seed dots task/0").get_ydata()
    assert_allclose(sorted(dots[np.isfinite(dots)]), [0.1, 0.2, 0.3, 0.5, 0.6])
    (bar, _) = artist(ax, "error task/1").get_segments()
    assert_allclose(bar, [[21, 0.8], [21, 1.0]])
    assert (ax.get_xlabel(), artist(ax, "training length").get_xdata()[0]) == ("length (words)", 20)
    assert "1 to 3 seeds" in ax.get_title(loc="left")


def test_doubling_lengths_are_on_an_axis_that_doubles_and_every_method_has_a_panel():
    data = scores(np.ones((1, 3, 1)), ["rope"], [256, 512, 1024])
    ax = score_by_length(data).axes[0]
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["256", "512", "1,024"]
    panels = method_panels(data.expand_dims(method=["plain", "YaRN"])).axes
    assert [ax.get_title(loc="left").split(":")[0] for ax in panels] == ["plain", "YaRN"]


def test_a_legend_of_many_long_names_is_no_wider_than_the_figure():
    """Found: with an eleventh checkpoint it was cut on both sides, and the axes shrank to make room
    for it.
    """
    names = [f"a checkpoint of a long name, number {number}" for number in range(11)]
    data = scores(np.full((11, 2, 1), 30.0), ["rope"] * 11, [256, 512], training_length=256)
    figure = score_by_length(data.assign_coords(label=("checkpoint", names)))
    figure.draw_without_rendering()
    (ax,), (legend,) = figure.axes, figure.legends
    legend = legend.get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.width
    assert ax.bbox.width > 0.8 * figure.bbox.width


def test_perplexities_have_their_differences_with_paired_errors_below():
    values = np.array([[[30.0], [40.0]], [[33.0], [36.0]]])
    data = scores(values, ["rope", "hope"], [256, 512], training_length=256)
    margin = data["standard_error"] * [[0.0, 0.0], [1, -1]]
    margin.attrs["from"] = "RoPE"
    data = data.assign(difference=margin, difference_error=abs(margin) / 10)
    above, below = score_panels({"text": data}).axes
    assert_allclose(artist(above, "score task/1").get_ydata(), [33, 36])
    assert not [each for each in above.collections if str(each.get_gid()).startswith("error")]
    errors = [segment[:, 1] for segment in artist(below, "error task/1").get_segments()]
    assert_allclose(np.sort(errors), [[0.08, 0.12], [-0.12, -0.08]])
    assert "RoPE" in below.get_ylabel()


def test_a_dotted_line_ends_the_lengths_of_training_of_a_scored_run():
    found = "test_set", [0.9, 0.5, 0.2], {"long_name": "mean score", "units": "1"}
    scores = {"mean_score": found, "standard_error": found, "tokens": ("test_set", [70, 140, 300])}
    run = xr.DataTree.from_dict({"scores": xr.Dataset(scores, {"test_set": ["64", "128", "256"]})})
    run.attrs = {"training_length": 256, "layout": "rope,repo", "checkpoint": "small"}
    line = artist(dict(VIEW.figures(run))["scores"].axes[0], "training length")
    assert list(line.get_xdata()) == [128, 128]
