"""Figures of disentanglement, rotation, perturbation and extrapolation: what is drawn is what the
run holds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import artist, artists, starting
from families import tiny
from matplotlib.patches import Arc, Circle
from numpy.testing import assert_allclose, assert_array_equal

import repo_interp as ri
from position_papers.position_generalization.length_figures import extrapolation_by_length
from repo_interp.errors import InputError
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.fake_distance.view import fake_distance_fit
from repo_interp.plugins.lengths.extrapolation import output_traces
from repo_interp.plugins.lengths.extrapolation_view import output_traces as traces_in_plane
from repo_interp.plugins.lengths.perturbation_view import perturbation_grid
from repo_interp.plugins.rotation.view import rotating_pairs, rotation_grid
from repo_interp.plugins.three_axis import fit_figure
from repo_interp.plugins.three_axis import view as fits
from repo_interp.tasks import Prompt


@pytest.mark.parametrize("edges", [(0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 6, 7)])
def test_means_of_axes_over_blocks_are_those_of_the_dense_map(edges):
    distance, query, key = np.random.default_rng(0).normal(size=(3, 7))
    rows, columns = np.indices((7, 7))
    dense = np.where(rows >= columns, distance[rows - columns] + query[rows] + key[columns], np.nan)
    found = fit_figure.additive_means(distance, query, key, edges)
    for row, column in np.ndindex(found.shape):
        block = dense[edges[row] : edges[row + 1], edges[column] : edges[column + 1]]
        expected = block[np.isfinite(block)].mean() if np.isfinite(block).any() else np.nan
        assert_allclose(found[row, column], expected, atol=1e-12)


def test_the_logit_map_its_axes_and_their_sum_stand_side_by_side(measured):
    figure = fit_figure.three_axis_fit(measured, 1, 2)
    (logits,), (rebuilt,) = starting(figure, "map Logits"), starting(figure, "map Sum")
    chosen = {"layer": 1, "head": 2}
    assert_array_equal(logits.get_array().filled(np.nan), measured["maps"]["logit_map"].sel(chosen))
    assert logits.get_clim() == rebuilt.get_clim()
    # Block means leave out what happens within a block: the correlation of the two maps is at least
    # that of the logits.
    both = [image.get_array().compressed() for image in (logits, rebuilt)]
    assert np.corrcoef(both)[0, 1] > measured["three_axis"]["r"].sel(prompt=0, **chosen) - 0.05
    drawn = artist(figure, "axis key").get_ydata()
    assert_array_equal(drawn, measured["three_axis"]["key_axis"].sel(chosen))


def test_the_fake_map_stands_between_its_axes(measured):
    figure = fake_distance_fit(measured, 2, 0)
    fake, rebuilt = (image.get_array() for ax in figure.axes for image in ax.images)
    assert_array_equal(fake, measured["maps"]["fake_map"].sel(layer=2, head=0))
    assert np.corrcoef(np.ravel(fake), np.ravel(rebuilt))[0, 1] > 0


def test_pairs_are_arrows_with_deviations_and_arcs(measured):
    group = measured["rotation"].sel(layer=0, head=1)
    figure = rotating_pairs(measured, 0, 1)
    assert len(starting(figure, "arrow")) == group.sizes["component"]
    pair = group.sel(component=3)
    query, key = (
        complex(pair[f"{part}_mean_re"], pair[f"{part}_mean_im"]) for part in ("query", "key")
    )
    width = np.sqrt(2 * group.sizes["component"])
    tip = query * key.conjugate() / width
    assert artist(figure, "arrow 3").xy == pytest.approx((tip.real, tip.imag))
    around = {type(one): one for name in ("deviation 3", "arc 3") for one in artists(figure, name)}
    spread = abs(query) * float(pair["key_deviation"]) / width
    assert around[Circle].radius == pytest.approx(spread)
    turned = min(360, np.degrees(float(pair["max_rotation"])))
    assert around[Arc].theta2 - around[Arc].theta1 == pytest.approx(turned)
    assert len([ax for ax in rotation_grid(measured, most=5).axes if ax.get_visible()]) == 5


def test_the_fit_of_positions_that_are_sums_is_by_construction(measured):
    exact = measured["fake_distance"].to_dataset()[["r"]] * 0 + 1
    figure = fits.fit_correlations(xr.DataTree.from_dict({"fake_distance": exact}))
    assert "by construction" in figure.axes[0].get_title("left")


def test_extrapolation_is_drawn_by_method_and_length():
    axes = {"method": ["plain", "lm_infinite"], "length": [32, 64], "layer": [0, 1]}
    described = {"long_name": "KL", "units": "nats"}
    kl = xr.DataArray(np.arange(8.0).reshape(2, 2, 2), axes, list(axes), attrs=described)
    above, nats = kl.mean("layer"), kl.mean("layer").assign_attrs(described)
    values = {"kl": kl, "log_perplexity": nats}
    values |= {"kl_above_noise_low": above - 1, "kl_above_noise_high": above + 1}
    group = xr.Dataset(values, attrs={"judged": 8, "training_length": 32})
    of_length, *_ = extrapolation_by_length(xr.DataTree.from_dict({"extrapolation": group})).axes
    assert_allclose(artist(of_length, "mean LM-Infinite").get_ydata(), above[1])
    errors = [part[:, 1] for part in artist(of_length, "error LM-Infinite").get_segments()]
    assert_allclose(errors, [[each - 0.5, each + 1.5] for each in above.values[1]])


def test_traces_wander_in_the_plane_of_the_reference():
    prompts = [Prompt(tuple(torch.randint(3, 64, (64,)).tolist())) for _ in range(4)]
    model = ri.reposition(tiny("llama"), "repo@2")
    group = output_traces(as_decoder(model), prompts, prompts[0], 32, 1, queries=3, step=8)
    figure = traces_in_plane(xr.DataTree.from_dict({"output_traces": group}))
    panels, lines = starting(figure, "reference"), starting(figure, "trace")
    traces = group["pca_trace"].transpose("trace", "step", "axis").values
    assert len(lines) == len(traces) == 3
    for dots, line, trace in zip(panels, lines, traces, strict=True):
        assert_allclose(dots.get_xydata(), group["pca_reference"])
        assert_allclose([part[0] for part in line.get_segments()], trace[:-1])
    assert_allclose(group["pca_reference"].mean("point"), 0, atol=1e-3)


def test_what_is_missing_is_said(measured):
    bare = measured.copy()
    bare["three_axis"] = measured["three_axis"].to_dataset()[["r"]]
    bare["rotation/slow_dominating"] = measured["rotation/slow_dominating"] * 0 - 1
    for draw, lacking in (
        (lambda: fit_figure.three_axis_fit(bare, 0, 0), "first_prompt"),
        (lambda: fake_distance_fit(bare.drop_nodes("fake_distance"), 0, 0), "fake_distance"),
        (lambda: rotating_pairs(bare, 0, 0), "rotates nothing"),
        (lambda: perturbation_grid(measured, "loss"), "values of perturbation"),
    ):
        with pytest.raises(InputError, match=lacking):
            draw()
