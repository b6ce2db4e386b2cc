"""`--scaling`: other frequencies in `analyze` and `score`, said in the run and on its page."""

import numpy as np
import pytest
import torch

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.cli import main
from repo_interp.cli.options import rope_scaling
from repo_interp.models.decoder import as_decoder
from repo_interp.shipped import zoo_path


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
