"""Effects of single rotary pairs, against transformers with one frequency changed."""

import math

import numpy as np
import pytest
import torch
import xarray as xr
from families import CONFIGS, repositioned, tiny
from numpy.testing import assert_allclose
from refusals import refused
from scipy import stats
from transformers import AutoModelForCausalLM

import repo_interp as ri
from repo_interp.checkpoint_files.shipped import zoo_path

PROMPTS = torch.randint(3, 64, (4, 20), generator=torch.Generator().manual_seed(2))
QUIET = {"progress": lambda *done: None}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return repositioned("rope")


def test_a_pair_costs_what_it_costs_in_stock_transformers():
    path, length = zoo_path("language/rope"), 256
    texts = [p.tokens for p in ri.tasks.make_task("language").prompts(3, seed=0, test_set="512")]
    found = ri.pair_effects(ri.open_model("language/rope"), texts, pairs=[1, 8], **QUIET)
    stock = AutoModelForCausalLM.from_pretrained(path).eval().float()
    inverse = stock.model.rotary_emb.inv_freq.clone()
    tokens = torch.tensor(texts)

    def by_band(factors):
        stock.model.rotary_emb.inv_freq = inverse * factors
        with torch.no_grad():
            logits = stock(tokens).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.mT.double(), tokens[:, 1:], reduction="none"
        )
        return torch.stack([losses[:, : length - 1].mean(1), losses[:, length - 1 :].mean(1)], 1)

    plain = by_band(1.0)
    assert found["band"].values.tolist() == ["0-255", "256-511"]
    assert_allclose(found["plain_loss"], plain.mean(0), rtol=1e-5)
    for pairs, name in (([1], "change"), ([8], "change"), ([1, 8], "together")):
        factors = torch.ones(16)
        factors[pairs] = 0.25
        change = (by_band(factors) - plain).numpy()
        here = found if name == "together" else found.sel(pair=pairs[0])
        half = stats.t.ppf(0.975, 2) * change.std(0, ddof=1) / math.sqrt(3)
        assert_allclose(here[name], change.mean(0), atol=2e-5)
        assert_allclose(here[f"{name}_high"] - here[name], half, atol=2e-5)
    turns = inverse[[1, 8]] * length / (2 * math.pi)
    assert_allclose(found["turns"], turns, rtol=1e-5)
    assert found.attrs["finding"].startswith("Pair 8, which turns 0.41 times within 256 positions")


def test_layers_one_by_one_have_a_row_each_and_all_at_once_are_their_sum_of_edits(model):
    iv = ri.interventions
    found = ri.pair_effects(model, PROMPTS, "stop", layers=[2, 0], bands=[(5, 19)], **QUIET)
    assert found["layer"].values.tolist() == [0, 2] and found.sizes["pair"] == 4
    assert found["change"].dims == ("layer", "pair", "band")
    edit = iv.rescaled(model, 2, function=lambda theta: theta * torch.tensor([1.0, 0.0, 1.0, 1.0]))
    with edit:
        changed = ri.loss(model, PROMPTS).values
    expected = np.nanmean((changed - ri.loss(model, PROMPTS).values)[:, 5:])
    assert_allclose(found["change"].sel(layer=2, pair=1), [expected], rtol=1e-4, atol=1e-6)
    whole = ri.pair_effects(model, PROMPTS, 0, bands=[(5, 19)], **QUIET)
    nope = ri.reposition(tiny("llama"), "nope")
    nope.load_state_dict(model.state_dict())
    change = np.nanmean((ri.loss(nope, PROMPTS) - ri.loss(model, PROMPTS)).values[:, 5:])
    assert_allclose(whole["together"], [change], rtol=1e-4, atol=1e-6)


def test_of_prompts_with_answers_the_answers_are_judged_and_an_interrupted_call_goes_on(tmp_path):
    model = ri.open_model("reversal/rope")
    prompts = ri.tasks.make_task("reversal").prompts(3, seed=1)
    ends: list[int] = []

    def stop(done, total):
        ends.append(total)
        if done == 4:
            raise KeyboardInterrupt

    asked = {"pairs": [0, 1, 5], "store": tmp_path / "store"}
    with pytest.raises(KeyboardInterrupt):
        ri.pair_effects(model, prompts, 0.5, **asked, progress=stop)
    found = ri.pair_effects(model, prompts, 0.5, **asked, **QUIET)
    assert ends[-1] == 5 and found["band"].values.tolist() == ["answer"]
    xr.testing.assert_identical(
        found, ri.pair_effects(model, prompts, 0.5, pairs=[0, 1, 5], **QUIET)
    )
    assert "of the answer" in found.attrs["finding"]


def test_costs_are_said_before(model, capsys):
    ri.pair_effects(model, PROMPTS, batch_size=2)
    assert "pair_effects: 6 times 80 tokens, in 12 passes" in capsys.readouterr().err


def test_what_has_no_effect_to_measure_is_refused(model):
    config = CONFIGS["gemma3"]()
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma = ri.reposition(AutoModelForCausalLM.from_config(config), "rope")
    for line, some, more in (
        ("a frequency times 1 is the same", model, {"change": 1.0}),
        ("the factor of a frequency", model, {"change": "half"}),
        ("pair 9 of layer 0 does not rotate; those that do are 0 to 3", model, {"pairs": [9]}),
        ("no pair was named", model, {"pairs": []}),
        ("no layer was named", model, {"layers": []}),
        ("layer 7 was asked for", model, {"layers": [7]}),
        (r"layer 0 \(nope\) does not rotate", ri.reposition(tiny("llama"), "nope"), {}),
        (r"different frequencies.*layers=range\(3\)", gemma, {}),
    ):
        with refused(line):
            ri.pair_effects(some, PROMPTS, **more, **QUIET)
    assert ri.pair_effects(gemma, PROMPTS, layers=range(3), **QUIET)["turns"].dims[0] == "layer"


def test_the_figure_has_a_line_or_a_map_for_every_band(model):
    found = ri.pair_effects(model, PROMPTS, "stop", bands=[(0, 9), (10, 19)], **QUIET)
    (ax,) = ri.plots.pair_effects(found).axes
    for band in range(2):
        (line,) = [each for each in ax.lines if each.get_gid() == f"band {band}"]
        assert_allclose(line.get_ydata(), found["change"][:, band])
        assert_allclose(line.get_xdata(), found["turns"])
    by_layer = ri.pair_effects(model, PROMPTS, layers=range(3), bands=[(0, 9), (10, 19)], **QUIET)
    maps = [image for each in ri.plots.pair_effects(by_layer).axes for image in each.images]
    drawn = {image.get_gid(): image.get_array() for image in maps}
    assert_allclose(drawn["band 1"], by_layer["change"].isel(band=1))
    with refused("effects of pairs are what ri.pair_effects returns"):
        ri.plots.pair_effects(found[["plain_loss"]])
