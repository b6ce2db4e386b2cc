"""Costs of edits against losses by hand, with intervals of scipy; resumed; refused."""

from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from families import TOKENS, repositioned
from numpy.testing import assert_allclose
from refusals import refused
from scipy import stats

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.plugins.edits.edit_digest import edit_digest

BANDS = [(0, 7), (8, 19)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return repositioned("rope")


PROMPTS = torch.randint(3, 64, (5, 20), generator=torch.Generator().manual_seed(2))


def edits_of(model):
    return {
        "window": iv.hidden_keys(model, lambda pair: pair.distance >= 4),
        "both": [iv.scaled(model, 2.0), iv.ablate(model, (0, 1))],
        "made": lambda: iv.scaled(model, 2.0) + iv.ablate(model, (0, 1)),
    }


def test_changes_are_paired_differences_of_losses_by_hand(model):
    edits, control = edits_of(model), iv.hidden_keys(model, lambda pair: pair.distance >= 9)
    found = ri.try_edits(
        model, PROMPTS, edits, controls={"window": control}, bands=BANDS, batch_size=2
    )
    plain = ri.loss(model, PROMPTS).values
    assert found["edit"].values.tolist() == ["as it is", *edits]
    assert found["band"].values.tolist() == ["0-7", "8-19"] and found.attrs["unit"] == "prompts"
    with edits["window"]:
        window = ri.loss(model, PROMPTS).values
    with control:
        other = ri.loss(model, PROMPTS).values
    for band, (first, last) in enumerate(BANDS):
        of_prompts = [np.nanmean(each[:, first : last + 1], 1) for each in (window, plain, other)]
        for name, one, two in (
            ("change", 0, 1),
            ("control_change", 2, 1),
            ("beyond_control", 0, 2),
        ):
            expected = stats.ttest_rel(of_prompts[one], of_prompts[two])
            low, high = expected.confidence_interval()
            here = found.sel(edit="window").isel(band=band)
            mean = (of_prompts[one] - of_prompts[two]).mean()
            assert_allclose(here[name], mean, rtol=1e-4, atol=1e-6)
            assert_allclose(
                [here[f"{name}_low"], here[f"{name}_high"]], [low, high], rtol=1e-3, atol=1e-6
            )
        assert_allclose(found["mean_loss"][0, band], of_prompts[1].mean(), rtol=1e-5)
        assert_allclose(found["loss"][1, band, 0], of_prompts[0], rtol=1e-5)
    xr.testing.assert_equal(
        found["change"].sel(edit="both"),
        found["change"].sel(edit="made").assign_coords(edit="both"),
    )
    assert (found["change"].sel(edit="as it is") == 0).all()
    assert found["control_change"].sel(edit="both").isnull().all()
    assert found["units"].values.tolist() == [5, 5]


def test_of_one_text_units_are_blocks_of_tokens(model):
    edit = {"window": edits_of(model)["window"]}
    found = ri.try_edits(model, PROMPTS[0], edit, bands=[(0, 9), (10, 19)], block=4)
    with edit["window"]:
        change = ri.loss(model, PROMPTS[0]).values[0]
    change = change - ri.loss(model, PROMPTS[0]).values[0]
    assert found.attrs["unit"] == "blocks of 4 tokens" and found["units"].values.tolist() == [3, 3]
    for band, starts in enumerate(((0, 4, 8), (10, 14, 18))):
        ends = (4, 8, 10, 14, 18, 20)[3 * band :]
        of_blocks = [np.nanmean(change[a:b]) for a, b in zip(starts, ends, strict=False)]
        here = found.sel(edit="window").isel(band=band)
        assert_allclose(here["change"], np.mean(of_blocks), rtol=1e-4)
        half = stats.t.ppf(0.975, 2) * np.std(of_blocks, ddof=1) / np.sqrt(3)
        assert_allclose(here["change_high"] - here["change"], half, rtol=1e-4)
    one = ri.try_edits(model, PROMPTS[0], edit, block=512)
    assert one["change"].notnull().all() and one["change_low"].sel(edit="window").isnull().all()


def test_of_prompts_with_answers_the_answers_are_judged():
    model = ri.open_model("reversal/repo")
    prompts = ri.tasks.make_task("reversal").prompts(4, seed=1)
    found = ri.try_edits(model, prompts, {"frozen": iv.frozen(model, layer=2)})
    assert found["band"].values.tolist() == ["answer"]
    assert found["answers"].values.tolist() == [1.0, 0.0]
    places = [list(prompt.generated) for prompt in prompts]
    losses = ri.loss(model, prompts).values
    expected = [row[some].mean() for row, some in zip(losses, places, strict=True)]
    assert_allclose(found["loss"][0, 0, 0], expected, rtol=1e-5)
    with refused("bands are of texts"):
        ri.try_edits(model, prompts, {"frozen": iv.frozen(model)}, bands=BANDS)


ENTERED = []


def counting():
    ENTERED.append(1)
    return nullcontext()


def test_an_interrupted_trial_goes_on_with_the_same_edits_alone(model, tmp_path):
    store = tmp_path / "store"

    def asked(cap, **more):
        edits = {
            "one": counting,
            "other": iv.distances(model, lambda distance, pair: distance.clamp(max=cap)),
        }
        return ri.try_edits(model, PROMPTS, edits, batch_size=2, store=store, **more)

    def stop(done, total):
        assert total == 9
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(4, progress=stop)
    assert len(ENTERED) == 2
    found = asked(4, progress=lambda *done: None)
    assert len(ENTERED) == 3, "finished batches are not computed again"
    xr.testing.assert_identical(found, asked(4))
    assert not store.exists()
    with pytest.raises(KeyboardInterrupt):
        asked(4, progress=stop)
    with pytest.warns(match="another question"):
        asked(5)


def test_digests_tell_edits_apart(model):
    def cap(size):
        return iv.distances(model, lambda distance, pair: distance.clamp(max=size))

    made = {
        "cap": cap(4),
        "another cap": cap(5),
        "scaled": iv.scaled(model, 2.0),
        "of a head": iv.scaled(model, 2.0, (0, 1)),
        "more": iv.scaled(model, 3.0),
        "mask": iv.hidden_keys(model, torch.zeros(3, 3, dtype=torch.bool)),
        "another mask": iv.hidden_keys(model, torch.eye(3, dtype=torch.bool)),
        "several": [cap(4), cap(5)],
        "sum": cap(4) + cap(5),
        "function": lambda: cap(4),
        "partial": partial(iv.frozen, model),
    }
    digests = {name: edit_digest(edit) for name, edit in made.items()}
    assert len({*digests.values()}) == len(made)
    assert digests["cap"] == edit_digest(cap(4)) and digests["more"] == edit_digest(
        iv.scaled(model, 3.0)
    )


@contextmanager
def once():
    yield


def test_what_cannot_be_tried_is_refused(model):
    window = edits_of(model)["window"]
    for line, edits, more in (
        ("no edit was given", {}, {}),
        ("edits are contexts by name", [window], {}),
        ("'as it is' is the name of the model", {"as it is": window}, {}),
        ("a control of 'other' and no such edit", {"one": window}, {"controls": {"other": window}}),
        ("no context that may be entered again; give a function", {"one": once()}, {}),
        ("no context that may be entered again", {"one": 3}, {}),
        ("called without arguments, and it needs model", {"one": lambda model: window}, {}),
        ("has no token with a loss", {"one": window}, {"bands": [(20, 40)]}),
        ("has no token with a loss", {"one": window}, {"bands": [(0, 0)]}),
        ("a band is the numbers", {"one": window}, {"bands": [(9, 3)]}),
        ("a band", {"one": window}, {"bands": [(9, 3.5)]}),
        ("no band was given", {"one": window}, {"bands": []}),
        ("the tokens of a block", {"one": window}, {"block": 0}),
    ):
        with refused(line):
            ri.try_edits(model, TOKENS, edits, **more)


def test_the_figure_has_a_mark_for_every_edit_band_and_control(model):
    edits = edits_of(model)
    found = ri.try_edits(model, PROMPTS, edits, controls={"window": edits["both"]}, bands=BANDS)
    (ax,) = ri.plots.edit_costs(found).axes
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [*edits]
    for band in found["band"].values:
        for kind in ("change", "control_change"):
            (line,) = [each for each in ax.lines if each.get_gid() == f"{kind} {band}"]
            assert_allclose(line.get_xdata(), found[kind].sel(band=band).values[1:])
    with refused("costs of edits are what ri.try_edits returns"):
        ri.plots.edit_costs(found[["loss"]])
