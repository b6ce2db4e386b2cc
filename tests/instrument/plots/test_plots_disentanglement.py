"""Figures of disentanglement, rotation, perturbation and extrapolation: what is drawn is what the
run holds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import artist, starting
from families import tiny
from matplotlib.patches import Arc, Circle

import repo_interp as ri
from position_papers.position_generalization.length_figures import extrapolation_by_length
from repo_interp.errors import InputError, Note
from repo_interp.experiments.extrapolation import Extrapolation, output_traces
from repo_interp.experiments.perturbation import Perturbation
from repo_interp.experiments.prompt_sets import cut
from repo_interp.measures.fake_distance import FakeDistance
from repo_interp.measures.maps import Maps
from repo_interp.measures.rotation import Rotation
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.models.outputs import layer_tensors, outputs_over_windows
from repo_interp.plots.catalogue import view_of
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.views import three_axis as fits
from repo_interp.plots.views.extrapolation import output_traces as traces_in_plane
from repo_interp.plots.views.fake_distance import fake_distance_fit
from repo_interp.plots.views.perturbation import perturbation_grid
from repo_interp.plots.views.rotation import rotating_pairs, rotation_grid
from repo_interp.plots.views.three_axis import fit_correlations
from repo_interp.run import read_run, write_run
from repo_interp.tasks import make_task


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Every group of these figures, on a small random model, written and read back."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(
        "\n".join(
            f"sentence {number} says that {number * 7 % 101} comes next." for number in range(4000)
        )
    )
    task = make_task("language", corpus=str(path), tokens=300, length=32, longest_test=64)
    stock = tiny("llama")
    stock.resize_token_embeddings(task.vocabulary_size, mean_resizing=False)
    model = ri.reposition(stock, "repo@2")
    prompts = task.prompts(8, seed=0, test_set="64")
    perturbed = Perturbation(gammas=(0.2,), l_maxes=(1, 5)).measured(model, task, prompts[:2])
    asked = Extrapolation(("plain", "lm_infinite"))
    with pytest.warns(Note, match="most of extrapolation.kl is noise"):
        longer = asked.measured(model, task, cut(task.describe, prompts, (32, 64)), 32)
    traces = output_traces(model, prompts, prompts[0], 32, 1, queries=3, step=8)
    measures = (
        ThreeAxis(axes="first_prompt", extras=("position", "shuffled", "held_out")),
        FakeDistance(),
        Maps(side=20),
        Rotation(prominence=1.0, stability=9.0),
    )
    run = ri.analyze(ri.bridge(model), prompts[:2], measures=measures)
    for name, group in (
        ("perturbation", perturbed),
        ("extrapolation", longer),
        ("output_traces", traces),
    ):
        run[name] = xr.DataTree(group)
    file = tmp_path_factory.mktemp("run") / "run.nc"
    write_run(run, file)
    return read_run(file)


@pytest.mark.parametrize("edges", [(0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 6, 7), (0, 7), (0, 5, 7)])
def test_means_of_axes_over_blocks_are_those_of_the_dense_map(edges):
    distance, query, key = np.random.default_rng(0).normal(size=(3, 7))
    rows, columns = np.indices((7, 7))
    dense = np.where(rows >= columns, distance[rows - columns] + query[rows] + key[columns], np.nan)
    found = fits.additive_means(distance, query, key, edges)
    for row, column in np.ndindex(found.shape):
        block = dense[edges[row] : edges[row + 1], edges[column] : edges[column + 1]]
        expected = block[np.isfinite(block)].mean() if np.isfinite(block).any() else np.nan
        np.testing.assert_allclose(found[row, column], expected, atol=1e-12)


def test_the_logit_map_its_axes_and_their_sum_stand_side_by_side(run):
    figure = fits.three_axis_fit(run, 1, 2)
    (logits,), (rebuilt,) = starting(figure, "map Logits"), starting(figure, "map Sum")
    chosen = {"layer": 1, "head": 2}
    np.testing.assert_array_equal(
        logits.get_array().filled(np.nan), run["maps"]["logit_map"].sel(chosen)
    )
    assert logits.get_clim() == rebuilt.get_clim()
    # Block means leave out what happens within a block: the correlation of the two maps is at least
    # that of the logits.
    one, other = logits.get_array().compressed(), rebuilt.get_array().compressed()
    r = run["three_axis"]["r"].sel(prompt=0, **chosen)
    assert np.corrcoef(one, other)[0, 1] > float(r) - 0.05
    drawn = artist(figure, "axis key").get_ydata()
    np.testing.assert_array_equal(drawn, run["three_axis"]["key_axis"].sel(chosen))


def test_the_fake_map_stands_between_its_axes(run):
    figure = fake_distance_fit(run, 2, 0)
    fake, rebuilt = (image.get_array() for ax in figure.axes for image in ax.images)
    chosen = run["maps"]["fake_map"].sel(layer=2, head=0).values
    np.testing.assert_array_equal(fake, chosen)
    # The sum of the axes of a map is the mean row and column of it: block means of both agree.
    additive = chosen.mean(1, keepdims=True) + chosen.mean(0, keepdims=True) - chosen.mean()
    sizes = np.diff(np.append(run["maps"]["key_block"].values, 64))
    if len(set(sizes)) == 1:
        np.testing.assert_allclose(rebuilt, additive, atol=1e-4)
    assert np.corrcoef(np.ravel(fake), np.ravel(rebuilt))[0, 1] > 0


def test_pairs_are_arrows_with_numbers_deviations_and_arcs(run):
    group = run["rotation"].sel(layer=0, head=1)
    figure = rotating_pairs(run, 0, 1)
    assert len(starting(figure, "arrow")) == group.sizes["component"] == 4
    for component in range(4):
        pair = group.sel(component=component)
        query, key = (
            complex(pair[f"{part}_mean_re"], pair[f"{part}_mean_im"]) for part in ("query", "key")
        )
        tip = query * key.conjugate() / np.sqrt(8)
        assert artist(figure, f"arrow {component}").xy == pytest.approx((tip.real, tip.imag))
        circle, arc = (
            next(one for one in starting(figure, f"{name} {component}") if isinstance(one, kind))
            for name, kind in (("deviation", Circle), ("arc", Arc))
        )
        spread = abs(query) * float(pair["key_deviation"]) / np.sqrt(8)
        assert circle.radius == pytest.approx(spread)
        turned = min(360, np.degrees(float(pair["max_rotation"])))
        assert arc.theta2 - arc.theta1 == pytest.approx(turned)
    assert len([ax for ax in rotation_grid(run, most=5).axes if ax.get_visible()]) == 5


def test_fits_and_divergence_are_charts_of_their_numbers(run):
    """Grids and lines, which test_plots_charts.py tests: of which numbers, and in which panel."""
    for ax, name in zip(fit_correlations(run).axes, ("three_axis", "fake_distance"), strict=False):
        np.testing.assert_allclose(ax.images[0].get_array(), run[name]["r"].mean("prompt"))
    cells = run["perturbation"]["log_perplexity"].transpose("kind", "l_max", "gamma").values
    for ax, wanted in zip(perturbation_grid(run).axes, cells, strict=False):
        assert [text.get_text() for text in ax.texts] == [f"{each:.3f}" for each in wanted.ravel()]
    exact = xr.ones_like(run["fake_distance"]["r"])
    made = xr.DataTree.from_dict({"fake_distance": xr.Dataset({"r": exact})})
    assert "by construction" in fit_correlations(made).axes[0].get_title("left")
    drawn = dict(view_of("extrapolation").figures(run))
    kl = run["extrapolation"]["kl"].sel({"method": "lm_infinite"})
    for name, wanted in (("kl", kl.mean("layer")), ("kl_by_layer", kl.sel(length=64))):
        line = artist(drawn[f"extrapolation_{name}"], "mean LM-Infinite")
        np.testing.assert_allclose(line.get_ydata(), wanted)


def test_extrapolation_is_drawn_by_method_and_length(run):
    group = run["extrapolation"]
    of_length, _, of_layer = extrapolation_by_length(run).axes
    longer, plain = (group.sel({"method": method}) for method in ("lm_infinite", "plain"))
    for ax, name, wanted in (
        (of_length, "LM-Infinite", longer["kl"].mean("layer")),
        (of_layer, "plain", plain["kl"].sel(length=64)),
    ):
        np.testing.assert_allclose(artist(ax, f"mean {name}").get_ydata(), wanted)
    ends = [longer[f"kl_above_noise_{end}"].values for end in ("low", "high")]
    drawn = [segment[:, 1] for segment in artist(of_length, "error LM-Infinite").get_segments()]
    np.testing.assert_allclose(drawn, np.transpose(ends) + float(plain["kl"][0].mean()))


def test_traces_wander_in_the_plane_of_the_reference(run):
    figure = traces_in_plane(run)
    group = run["output_traces"]
    panels, lines = starting(figure, "reference"), starting(figure, "trace")
    assert len(lines) == len(panels) == 3
    traces = group["pca_trace"].transpose("trace", "step", "axis").values
    for dots, line, trace in zip(panels, lines, traces, strict=True):
        np.testing.assert_allclose(dots.get_xydata(), group["pca_reference"])
        np.testing.assert_allclose([part[0] for part in line.get_segments()], trace[:-1])
    np.testing.assert_allclose(group["pca_reference"].mean("point"), 0, atol=1e-3)


@pytest.mark.parametrize("scheme", ["rope", "repo", "repo_alibi", "alibi"])
def test_a_query_over_its_own_window_puts_out_what_the_model_does(scheme):
    model = ri.reposition(tiny("qwen3"), scheme)
    tokens, outputs = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1)), []
    from repo_interp.models.outputs import attention_outputs

    with (
        torch.no_grad(),
        layer_tensors(model, 1) as tensors,
        attention_outputs(model, lambda _, out: outputs.append(out), [1]),
    ):
        model(tokens)
        found = outputs_over_windows(model, 1, tensors, 11, [0], 12)
    torch.testing.assert_close(found[0], outputs[0][0, -1], atol=1e-5, rtol=1e-5)


def test_a_run_gives_all_of_them_as_figures_and_sections(run, no_pictures, tmp_path):
    names: list[str] = []
    assert (
        write_report(run, tmp_path / "report.html", tmp_path / "figures", drawn=names.append) == []
    )
    assert {"fit_correlations", "rotating_pairs", "output_traces"} <= set(names)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for name in ("three_axis", "fake_distance", "rotation"):
        assert f'<section id="{name}"' in page
        (table,) = view_of(name).tables(run)
        assert [row[0] for row in table.rows] == ["0", "1", "2", "all", "all"]
        assert np.shape(view_of(name).head_maps(run)[0].data()["values"]) == (3, 4)
    # the mean over layers of one scheme, never over both
    rows = view_of("three_axis").tables(run)[0].rows[-2:]
    for row, (scheme, layers) in zip(rows, (("RoPE", [0, 1]), ("RePo", [2])), strict=True):
        assert row[1] == scheme
        assert row[4] == pytest.approx(run["three_axis"]["r"].sel(layer=layers).mean().item())


def test_what_is_missing_is_said(run):
    bare = xr.DataTree.from_dict(
        {"maps": run["maps"].to_dataset(), "three_axis": run["three_axis"].to_dataset()[["r"]]}
    )
    with pytest.raises(InputError, match="first_prompt"):
        fits.three_axis_fit(bare, 0, 0)
    with pytest.raises(InputError, match="fake_distance"):
        fake_distance_fit(bare, 0, 0)
    nope = run["rotation"].to_dataset().copy()
    nope["slow_dominating"] = nope["slow_dominating"] * 0 - 1
    with pytest.raises(InputError, match="rotates nothing"):
        rotating_pairs(xr.DataTree.from_dict({"rotation": nope}), 0, 0)
    with pytest.raises(InputError, match="values of perturbation"):
        perturbation_grid(run, "loss")
