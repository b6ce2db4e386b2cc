"""What is measured of a layer follows from what it is, whatever its scheme is called."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from own_schemes import OWN, Distance, OfPairs, model_of, ones, parts, register_all
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.notes import SilentMeasure
from repo_interp.models.decoder import as_decoder
from repo_interp.models.layer_probe import differs_by_pair, logits_by_content
from repo_interp.models.scheme_parts import SchemeParts

TOKENS = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
OF_LAYERS = ("components", "three_axis", "fake_distance", "rotation", "stability", "symbols")
OF_LAYERS += ("octaves", "activations", "maps", "positions")
BY_CONTENT = ("as_term", "term_and_turned", "forgetting", "path", "pope", "cope", "cope_rope")
BY_DISTANCE = ("sloped", "far", "fire", "kerple", "repo_alibi")
BY_PAIR = ("by_pair", "by_head_and_pair", "selective_rope")
quiet = pytest.mark.filterwarnings("ignore::repo_interp.analysis.notes.SilentMeasure")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register_all(monkeypatch)


def analysis(layout, *measures):
    return ri.analyze(model_of(layout), TOKENS, measures, experiments=())


@pytest.mark.parametrize(("own", "ours"), [("turned", "rope"), ("sloped", "alibi")])
@quiet
def test_a_scheme_by_another_name_has_the_numbers_of_ours(own, ours):
    """Found: `symbols` was NaN for every scheme of another package."""
    runs = [analysis(layout, *OF_LAYERS) for layout in (own, ours)]
    for name in OF_LAYERS:
        of_own, of_ours = (run[name].to_dataset().drop_vars("scheme") for run in runs)
        # names the scheme
        named = [group.attrs.pop("left_out", "") for group in (of_own, of_ours)]
        assert named[0].replace(own, ours) == named[1]
        xr.testing.assert_identical(of_own, of_ours)
    assert runs[0].attrs.get("notes", "").replace(own, ours) == runs[1].attrs.get("notes", "")


@pytest.mark.parametrize("scheme", BY_PAIR)
def test_positions_by_pair_have_no_frequency_and_the_run_says_so(scheme):
    """Found: frequency 1 for all pairs, all variance in the band "high", no turn at all."""
    run = analysis(scheme, *("components", "three_axis", "symbols", "activations", "maps"))
    found = run["components"]
    for name in ("frequency", "decay_bound", "turn_mean", "turn_share", "vaf_band", "still_share"):
        assert found[name].isnull().all(), name
    assert not found["activated"].any() and not found["low_frequency"].any()
    line = f"frequencies, bands, turns and decay bounds in layers 0-2 ({scheme}), which give every"
    assert line in found.attrs["left_out"] and f"components gives no {line}" in run.attrs["notes"]
    assert "maps gives no fake maps in layers 0-2" in run.attrs["notes"]
    assert found["vaf"].notnull().all() and run["symbols/position_score"].notnull().all()
    assert ri.findings(run) is not None


@pytest.mark.parametrize("scheme", ["by_pair", "by_head_and_pair"])
def test_what_pairs_have_to_do_with_nothing_is_as_of_the_same_rotation(scheme):
    names = ("components", "three_axis", "symbols", "activations", "maps", "octaves")
    of_pairs, of_rope = (analysis(layout, *names) for layout in (scheme, "rope"))
    for group, variables in {
        "components": ("logit_by_distance", "vaf", "component_by_distance"),
        "three_axis": ("r",),
        "symbols": ("position_score", "symbol_score", "logit_spread"),
        "activations": ("largest", "sink_token"),
        "maps": ("logit_map",),
        "octaves": ("mass",),
    }.items():
        for name in variables:
            xr.testing.assert_allclose(
                of_pairs[group][name].drop_vars("scheme"),
                of_rope[group][name].drop_vars("scheme"),
                rtol=1e-3,
                atol=1e-3,
            )


def test_other_layers_of_a_model_keep_their_numbers():
    mixed, rope = (analysis(layout, "components") for layout in ("rope,by_pair,nope", "rope"))
    for name in ("frequency", "turn_mean", "vaf_band", "decay_bound"):
        first, second, third = (mixed["components"][name].sel(layer=layer) for layer in range(3))
        expected = rope["components"][name].sel(layer=0)
        xr.testing.assert_equal(first.drop_vars("scheme"), expected.drop_vars("scheme"))
        assert second.isnull().all() and third.isnull().all()
    assert "in layers 1 (by_pair), which" in mixed.attrs["notes"]


@pytest.mark.parametrize("scheme", BY_CONTENT)
@quiet
def test_logits_by_content_have_no_fake_distance_and_no_symbols(scheme):
    """Found: r = 1 for every logit that depends on contents."""
    run = analysis(scheme, "fake_distance", "symbols", "maps")
    assert run["fake_distance/r"].isnull().all() and run["maps/fake_map"].isnull().all()
    assert run["fake_distance/position_axis"].isnull().all()
    assert run["symbols"].to_dataset().isnull().all().to_array().all()
    for name in ("fake_distance", "symbols"):
        line = f"{name} gives nothing here: layers 0-2 ({scheme}) have logits that depend on "
        assert line in run.attrs["notes"]
    mixed = analysis(f"rope,{scheme},nope", "fake_distance")
    r = mixed["fake_distance/r"]
    assert r.sel(layer=[0, 2]).notnull().all() and r.sel(layer=1).isnull().all()
    assert f"fake_distance gives nothing in layers 1 ({scheme}), which" in mixed.attrs["notes"]
    assert mixed["fake_distance"].attrs["left_out"].startswith(f"nothing in layers 1 ({scheme})")
    assert ri.findings(mixed) is not None


@pytest.mark.parametrize("scheme", BY_DISTANCE)
def test_logits_by_distance_alone_are_separable(scheme):
    run = analysis(scheme, "fake_distance", "symbols")
    np.testing.assert_allclose(run["fake_distance/r"], 1.0, atol=1e-9)
    assert run["symbols/position_score"].notnull().all() and "notes" not in run.attrs
    turned = analysis("far_turned", "fake_distance")["fake_distance/r"]
    assert bool((turned < 0.9999).all())


def test_layers_are_known_by_their_parts():
    for scheme in (*OWN, *BY_CONTENT, *BY_DISTANCE, *BY_PAIR, "rope", "nope", "repo_attention"):
        for layer in as_decoder(model_of(scheme)).layers:
            assert differs_by_pair(layer) == (scheme in BY_PAIR), scheme
            assert logits_by_content(layer) == (scheme in BY_CONTENT), scheme


@pytest.mark.parametrize("layout", ["repo", "rope", "nope", "turned", "by_pair"])
def test_a_measure_that_gives_nothing_says_so(layout):
    """Found: all NaN without a word."""
    with pytest.warns(SilentMeasure, match="gates gives nothing here: layers 0-2") as warned:
        run = analysis(layout, "gates", "octaves")
    assert str(warned[0].message) in run.attrs["notes"] and f"({layout})" in run.attrs["notes"]
    mixed = analysis(f"{layout},cope,cope", "gates")
    assert f"gates gives nothing in layers 0 ({layout}), which count" in mixed.attrs["notes"]
    assert mixed["gates/gate_sum"].sel(layer=[1, 2]).notnull().any()
    # attention by position alone is measured all the same
    assert "gates gives no gates in layers 0-2 (alibi)" in analysis("alibi", "gates").attrs["notes"]


@pytest.mark.parametrize("layout", ["nope", "path", "forgetting", "as_term"])
def test_sources_of_positions_that_no_layer_has_are_refused(layout):
    """Found: numpy could not reshape an array."""
    line = rf"position_sources gives nothing here: layers 0-2 \({layout}\) assign no positions"
    with refused(line):
        analysis(layout, "position_sources", "octaves")
    assert "position_sources" in analysis(f"repo,{layout},repo", "position_sources")


@pytest.mark.parametrize("layout", ["far_turned", "term_and_turned", "forgetting", "by_pair"])
@pytest.mark.filterwarnings("ignore:without the atlas")
def test_an_analysis_that_names_no_measure_takes_those_that_say_something(layout):
    run = ri.analyze(model_of(layout), TOKENS, experiments=())
    assert "gives nothing here" not in run.attrs.get("notes", "")
    assert "attention_rows" in run and "fake_distance" not in run


@pytest.mark.parametrize("scheme", ["by_pair", "by_head_and_pair"])
def test_a_logit_is_explained_without_a_frequency_that_no_pair_has(scheme):
    of_pairs, of_rope = (
        ri.explain_logit(model_of(layout), TOKENS[0], 1, 2, 20, 17) for layout in (scheme, "rope")
    )
    assert of_pairs["frequency"].isnull().all()
    for name in ("pair", "pair_at_equal_positions", "angle", "logit"):
        np.testing.assert_allclose(of_pairs[name], of_rope[name], rtol=1e-3, atol=1e-4)


def test_learned_positions_by_pair_are_no_learned_positions(monkeypatch):
    ri.register_scheme(
        "learned_pairs",
        lambda b, r, d: SchemeParts("", OfPairs(r.frequencies, 1), ones(d), learned=True),
    )
    run = analysis("learned_pairs", "three_axis")
    assert run["three_axis/r_position"].isnull().all() and run["three_axis/r"].notnull().all()


def test_the_probe_draws_no_random_number_of_the_user():
    layer = as_decoder(model_of("far")).layers[0]
    state = torch.get_rng_state()
    assert not logits_by_content(layer)
    assert torch.equal(torch.get_rng_state(), state)
    ri.register_scheme("tiny", lambda b, r, d: parts(logits=Nearly()))
    assert logits_by_content(as_decoder(model_of("tiny")).layers[0])


class Nearly(Distance):
    """A bias with a hundredth of content."""

    def forward(self, queries, keys, *given, **further):
        added = super().forward(queries, keys, *given, **further)
        return added * (1 + keys.mean() / 100)
