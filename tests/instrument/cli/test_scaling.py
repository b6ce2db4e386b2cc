"""`--scaling`: other frequencies in `analyze` and `score`, said in the run and on its page."""

import warnings

import numpy as np
import pytest
import torch
from families import TOKENS
from own_schemes import OWN, OfPairs, model_of, ones, parts, register_all
from torch import nn

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import main
from repo_interp.cli.arguments import rope_scaling
from repo_interp.models.decoder import as_decoder
from repo_interp.models.rescaling import IdleScaling
from repo_interp.positions.assigners import TokenIndex


def frequencies(bridge):
    return torch.stack([layer.frequencies for layer in as_decoder(bridge).layers])


def test_every_kind_gives_the_frequencies_of_rescaled():
    path = zoo_path("niah/rope")
    plain = ri.load(path)
    for text in ("yarn:2", "linear:4", "ntk:2", "theta:500000"):
        kind, factor = text.split(":")
        scaled = ri.load(path, rope_scaling=rope_scaling(text, plain.original_model.config))
        with iv.rescaled(plain, **{kind: float(factor)}):
            torch.testing.assert_close(frequencies(scaled), frequencies(plain), rtol=1e-5, atol=0)
        assert not torch.equal(frequencies(scaled), frequencies(plain))


@pytest.mark.usefixtures("no_figures")
def test_analyze_measures_the_scaled_model_and_says_so(tmp_path, capsys):
    command = (
        "analyze niah/rope --measures rotation --count 1 --length 128 --scaling linear:2 --out"
    )
    assert main([*command.split(), str(tmp_path)]) == 0
    scaled = ri.read_run(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert scaled.attrs["scaling"] == "linear:2" and ", scaling linear:2</title>" in page
    prompts = ri.tasks.make_task("niah").prompts(1, test_set="128")
    plain = ri.analyze(ri.load("niah/rope"), prompts, ("rotation",))
    whole, half = (run["rotation/max_rotation"] for run in (plain, scaled))
    np.testing.assert_allclose(half, whole / 2, rtol=1e-6)


class Fixed(OfPairs):
    """Positions by pair with the frequencies of the checkpoint, which are not learned."""

    def __init__(self, frequencies):
        nn.Module.__init__(self)
        self.log = frequencies.log()[None]


OF_UNSCALED = {
    "fixed_pairs": lambda b, r, d: parts(Fixed(r.frequencies), ones(d)),
    "unscaled": lambda b, r, d: parts(TokenIndex(), r.unscaled),
}
TURNED = ("rope", "repo", "hope", "hope_ab3", "rope_high", "repo_attention", "cope_rope")
TURNED += ("turned", "far_turned", "as_term", "term_and_turned", "learned_scaling", "fixed_pairs")
STILL = ("nope", "learned", "alibi", "fire", "kerple", "repo_alibi", "cope", "forgetting", "path")
STILL += ("pope", "selective_rope", *({*OWN} - {*TURNED}))


@torch.no_grad()
@pytest.mark.parametrize("layout", [*TURNED, "unscaled", *sorted(STILL)])
def test_a_scaling_that_changes_no_logit_is_said_when_it_is_loaded(layout, tmp_path, monkeypatch):
    """Found: on positions by pair, and in Python at all, without a word."""
    register_all(monkeypatch)
    for name, build in OF_UNSCALED.items():
        ri.register_scheme(name, build)
    model = model_of(layout)
    ri.save(model, tmp_path / "saved")
    for text in ("yarn:4", "theta:500000"):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", IdleScaling)
            scaled = ri.open_model(
                tmp_path / "saved", rope_scaling=rope_scaling(text, model.config)
            )
        still = torch.equal(scaled(TOKENS).logits, model(TOKENS).logits)
        assert still == (layout in STILL or (layout == "unscaled" and text == "yarn:4"))
        said = [str(each.message) for each in found]
        assert len(said) == still and all("changes nothing: no layer of" in line for line in said)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("layout", ["selective_rope", "rope,selective_rope,alibi"])
def test_the_command_says_which_layers_a_scaling_leaves_as_they_are(layout, tmp_path, capsys):
    ri.save(model_of(layout), tmp_path / "saved")
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [3, 4, 5, 6, 7, 8]}\n', encoding="utf-8")
    given = f"--prompts {tmp_path / 'prompts.jsonl'} --measures octaves --scaling yarn:4 --out"
    assert main(["analyze", str(tmp_path / "saved"), *given.split(), str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    run, whole = ri.read_run(tmp_path / "run"), layout == "selective_rope"
    line = "scaling (yarn 4.0) changes nothing" + (
        ": no layer of the layout selective_rope rotates by the checkpoint's frequencies"
        if whole
        else " in layers 1 (selective_rope), 2 (alibi), which do not rotate"
    )
    assert shown.count(line) == 1 and line in run.attrs["notes"]
    assert run.attrs.get("scaling") == (None if whole else "yarn:4")
