"""HoPE's claims: the rules on curves whose answer is known, the driver over steps, and everything end to end on tiny models."""

from __future__ import annotations

import csv
import math
import shutil

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose
from transformers import LlamaConfig, LlamaForCausalLM

from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.streaming import stream
from repo_interp.cli import main
from repo_interp.errors import InputError
from repo_interp.experiments.training_steps import over_steps, saved_steps
from repo_interp.measures.components import Components
from repo_interp.measures.positions import Positions
from repo_interp.models.checkpoints import save
from repo_interp.models.fresh import load_fresh
from repo_interp.models.load import load
from repo_interp.models.reposition import layout, reposition
from repo_interp.papers.hope import recipe as hope
from repo_interp.papers.hope.lots import Sampling, random_prompts
from repo_interp.papers.hope.measurements import components_of_pair, measure_checkpoint
from repo_interp.papers.hope.rules import (
    curve_vaf,
    fall,
    in_upper_half,
    outside_share,
    outstanding,
    relative_swing,
    u_shape,
    upper_shares,
)
from repo_interp.papers.hope.steps import FILE, read_steps, write_steps
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import FAILS, HOLDS, UNMEASURED, Claim, Verdict, markdown_table, verdict_rows
from repo_interp.papers.kit.figure_directory import require_free, write_figures

L = 16
SIZES = {"sequences": 4, "repeats": 2, "controls": 1, "step_sequences": 2, "batch_size": 2}
SMALL = Sampling(**SIZES)


def quiet(said: str) -> None:
    """Progress that nobody sees."""


# ---- the rules ------------------------------------------------------------------------------------------------------


def test_a_parabola_is_a_u_and_a_decay_a_rise_and_a_line_are_none():
    t = np.linspace(-1, 1, 256)
    u = u_shape(t**2)
    assert u.holds(0.001)
    assert u.ratio == pytest.approx(1, abs=0.05)
    assert abs(u.minimum - 128) <= 8
    for other in (-t, t, np.zeros(256), np.exp(-4 * t), -(t**2)):
        assert not u_shape(other).holds(0.001)


def test_a_u_must_rise_by_a_quarter_and_stand_out_of_the_noise():
    t = np.arange(256.0)

    def dip(rise):
        return np.interp(t, [0, 128, 255], [1, 0, rise])

    assert u_shape(dip(0.4)).holds(0.01)
    assert not u_shape(dip(0.15)).holds(0.01)
    assert not u_shape(dip(0.4)).holds(0.2)


def test_what_a_token_has_with_itself_does_not_make_a_u():
    curve = np.linspace(0, 1, 64)
    curve[0] = 50
    assert not u_shape(curve).inside


def test_vaf_of_curves_is_the_share_of_variance_left_without_a_component():
    random = np.random.default_rng(0)
    curves = random.normal(size=(5, 40)) * np.array([[5.0], [1], [1], [0], [0.1]])
    whole = curves.sum(0)
    expected = [100 * (1 - np.mean((whole - c - (whole - c).mean()) ** 2) / np.mean((whole - whole.mean()) ** 2)) for c in curves]
    assert_allclose(curve_vaf(curves), expected)
    assert curve_vaf(curves + 7)[3] == pytest.approx(0, abs=1e-9)
    assert np.isnan(curve_vaf(np.ones((2, 9)))).all()


def test_outstanding_is_in_deviations_of_the_others():
    vaf, activated = np.array([1.0, 3.0, 12.0]), np.array([False, False, True])
    assert outstanding(vaf, activated) == pytest.approx(10)


def test_a_course_falls_when_it_falls_by_more_than_its_error():
    steps = np.linspace(60, 20, 9)[:, None]
    noise = np.array([[-1.0, 0, 1, 0]])
    assert fall(steps + 0.1 * noise).holds
    assert not fall(steps[::-1] + 0.1 * noise).holds
    # Lots that go different ways: the mean falls, but not by more than chance.
    assert not fall(50 + np.linspace(0, 1, 9)[:, None] * np.array([[-40.0, 30, -30, 35]])).holds
    with pytest.raises(ValueError, match="four steps"):
        fall(np.ones((3, 2)))


def test_leaving_a_range_and_the_upper_half():
    t = np.arange(1, 257)
    theta = 1.45 * math.pi / 256
    within, beyond = np.cos(theta * t), np.cos(theta * (t + 256))
    # A cosine that passed its minimum has seen all values: the paper's wording holds, the range is kept.
    assert outside_share(within, beyond) == 0
    assert in_upper_half(upper_shares(within, beyond))
    line = 0.1 * t
    assert outside_share(line, line + 26) > 0.9
    constant = np.cos(40 * math.pi / 256 * t)
    assert not in_upper_half(upper_shares(constant, constant))


def test_swing_is_relative_to_the_activated_components():
    t = np.linspace(0, 1, 512)
    curves = np.stack([np.sin(60 * t), 4 * t, 0.2 * t, 5 + 0 * t])
    swing = relative_swing(curves, np.array([False, True, False, False]), np.array([False, False, True, True]))
    assert_allclose(swing, [0.05, 0], atol=1e-12)


def test_a_verdict_stands_on_a_number():
    claim = Claim("X1", "a | b", "nowhere", "1", "never")
    with pytest.raises(InputError, match="number"):
        Verdict(claim, "rope", HOLDS, "nothing")
    with pytest.raises(InputError, match="verdict is"):
        Verdict(claim, "rope", "perhaps", "nothing", 1.0)
    rows = verdict_rows([Verdict(claim, "rope", FAILS, "x", 0.12345, n=3), Verdict(claim, "hope", UNMEASURED, "")])
    assert [row["ours"] for row in rows] == ["0.123", ""]
    assert "| a \\| b | 0.123 |" in markdown_table(rows, {"statement": "claim", "ours": "ours"})


# ---- tiny checkpoints -----------------------------------------------------------------------------------------------


def tiny(scheme: str, seed: int = 0):
    """Two layers with one activated component (theta = 0.316 at L = 16), large enough weights that positions matter."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=L,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return reposition(LlamaForCausalLM(config).eval(), scheme)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for scheme in ("rope", "learned", "repo"):
        save(tiny(scheme), root / scheme)
    for step in (1, 2, 3, 4):
        save(tiny("rope", step), root / "rope" / "steps" / f"{step:06d}")
    (root / "rope" / "steps" / "000009.unfinished").mkdir()
    return root


def test_streamed_prompts_are_the_prompts_of_one_analysis(checkpoints):
    bridge = load(checkpoints / "rope")
    prompts = list(random_prompts(bridge, 12, 5, 0))
    measure = Components(L, prompts="mean")
    streamed = stream(bridge, iter(prompts), [measure], batch_size=2)["components"]
    whole = analyze(bridge, prompts, [measure])["components"].to_dataset()
    xr.testing.assert_allclose(streamed, whole, rtol=1e-5, atol=1e-6)
    assert streamed["scheme"].values.tolist() == ["rope", "rope"]
    with pytest.raises(InputError, match="no prompts"):
        stream(bridge, [], [measure])
    with pytest.raises(InputError, match="of every prompt"):
        stream(bridge, prompts, [Positions()])


def test_saved_steps_are_found_in_order_and_measured(checkpoints):
    steps = saved_steps(checkpoints / "rope")
    assert list(steps) == [1, 2, 3, 4]
    assert saved_steps(checkpoints / "learned") == {}

    def first_weight(bridge) -> xr.Dataset:
        return xr.Dataset({"weight": float(next(bridge.parameters()).detach().flatten()[-1])})

    found = over_steps(steps, first_weight)
    assert found["step"].values.tolist() == [1, 2, 3, 4]
    assert len(set(found["weight"].values.tolist())) == 4


def test_a_fresh_twin_has_the_layout_and_other_weights(checkpoints):
    trained, fresh, again = load(checkpoints / "repo"), load_fresh(checkpoints / "repo", 7), load_fresh(checkpoints / "repo", 7)
    assert layout(fresh) == layout(trained)
    for one, other, same in zip(trained.parameters(), fresh.parameters(), again.parameters(), strict=True):
        assert torch.equal(other, same)
        assert one.ndim < 2 or not torch.equal(one, other)


def test_components_of_a_pair_add_up_to_the_logit_of_the_model(checkpoints):
    bridge = load(checkpoints / "rope")
    tokens = tuple(range(3, 13))
    found = components_of_pair(bridge, tokens, 8, 2)
    _, cache = bridge.run_with_cache(torch.tensor([tokens]))
    for layer in range(2):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0, :, 8, 2] * math.sqrt(16)
        assert_allclose(found.sel(layer=layer).sum("component"), scores, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="pair"):
        components_of_pair(bridge, tokens, 2, 8)


def test_what_is_measured_is_the_mean_over_lots(checkpoints):
    one = measure_checkpoint("rope", checkpoints / "rope", SMALL, quiet, Cache())
    assert one.training_length == L
    assert one.within.sizes["distance"] == L
    assert one.beyond is not None
    assert one.beyond.sizes["distance"] == 2 * L
    assert one.steps is not None
    assert one.within["weights"].values.tolist() == ["trained", "random 0"]
    total = one.within["component_by_distance"].sum("component")
    assert_allclose(total, one.within["logit"], rtol=1e-6)
    lots = one.within["logit"].sel(weights="trained").values
    assert not np.array_equal(lots[0], lots[1])
    assert measure_checkpoint("learned", checkpoints / "learned", SMALL, quiet, Cache()).beyond is None


def test_what_is_kept_is_what_was_measured(checkpoints, tmp_path):
    first = measure_checkpoint("rope", checkpoints / "rope", SMALL, quiet, Cache(tmp_path))
    kept = measure_checkpoint("other name", checkpoints / "rope", SMALL, quiet, Cache(tmp_path))
    measured = measure_checkpoint("rope", checkpoints / "rope", SMALL, quiet, Cache())
    for name in ("within", "beyond", "steps"):
        xr.testing.assert_identical(getattr(first, name), getattr(kept, name))
        xr.testing.assert_equal(getattr(first, name), getattr(measured, name))


def test_a_small_file_stands_in_for_the_saved_steps(checkpoints, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(checkpoints / "rope", run)
    assert read_steps(run) is None
    assert main(["steps", str(run), "--sequences", "2", "--repeats", "2", "--batch-size", "2"]) == 0
    once = (run / FILE).read_bytes()
    assert write_steps(run, SMALL).read_bytes() == once
    shutil.copytree(run, moved, ignore=shutil.ignore_patterns("steps"))
    from_file, from_steps = (
        measure_checkpoint("rope", path, SMALL, quiet, Cache()).steps for path in (moved, checkpoints / "rope")
    )
    assert from_file is not None
    assert from_steps is not None
    assert from_file["vaf"].attrs["sequences"] == 2
    assert_allclose(from_file["vaf"], from_steps["vaf"])
    assert from_file["step"].values.tolist() == [1, 2, 3, 4]
    assert_allclose(from_file["frequency"], from_steps["frequency"])
    (moved / FILE).write_bytes(b"no netCDF")
    with pytest.raises(InputError, match="repo-interp steps"):
        read_steps(moved)
    with pytest.raises(InputError, match="kept no steps"):
        write_steps(moved, SMALL)
    with pytest.raises(InputError, match="rotates"):
        write_steps(checkpoints / "repo", SMALL)


def test_figures_on_tiny_models_end_to_end(checkpoints, tmp_path, capsys):
    command = ["figures", "hope", "--no-zoo", "--out", str(tmp_path)]
    command += [word for name in ("rope", "learned", "repo") for word in ("--checkpoint", f"{name}={checkpoints / name}")]
    command += [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    assert main(command) == 0
    assert "verdicts and figures" in capsys.readouterr().out
    out = tmp_path / "hope"
    names = {"logit_by_distance", "turns_repo"} | {
        f"{name}_rope" for name in ("components", "vaf", "vaf_over_training", "beyond_training_length", "norms", "pair")
    }
    assert {file.name for file in out.iterdir()} == {"README.md", "verdicts.csv", "figures.csv", "provenance.json"} | {
        f"{name}.{kind}" for name in names for kind in ("png", "svg", "pdf", "nc")
    }
    with (out / "verdicts.csv").open() as stream_of_rows:
        rows = list(csv.DictReader(stream_of_rows))
    found = {(row["claim"], row["checkpoint"]): row["verdict"] for row in rows}
    judged = {("H1", "rope"), ("H1", "learned"), *((claim, "rope") for claim in ("H2", "H3", "H4", "H4 (wording)", "H5"))}
    assert {key for key, verdict in found.items() if verdict in (HOLDS, FAILS)} == judged
    assert found["H1", "kerple"] == UNMEASURED
    assert {claim.id for claim in hope.CLAIMS} == {claim for claim, _ in found}
    page = (out / "README.md").read_text()
    for row in rows:
        assert row["ours"] in page
    with xr.open_dataset(out / "logit_by_distance.nc", engine="h5netcdf") as stored:
        assert stored["checkpoint"].values.tolist() == ["rope", "learned", "repo"]
        beyond = stored["logit"].sel(checkpoint="learned", weights="trained").sel(length=2 * L)
        assert beyond.isnull().all()
        assert "caption" in stored.attrs


def test_what_nothing_was_found_about_is_not_measurable(checkpoints):
    results = hope.figures({"learned": checkpoints / "learned"}, hope.Options(**SIZES), quiet, Cache())
    missing = {(verdict.claim.id, verdict.checkpoint) for verdict in hope.unmeasured(results) if verdict.claim.id < "H6"}
    assert missing == {("H1", "rope"), ("H1", "kerple"), *((name, "rope") for name in ("H2", "H3", "H4", "H4 (wording)", "H5"))}


def test_checkpoints_that_copy_are_not_looked_at(tmp_path, checkpoints):
    shutil.copytree(checkpoints / "learned", tmp_path / "copying")
    (tmp_path / "copying" / "training.toml").write_text('task = "copying"\n')
    (tmp_path / "recorded").mkdir()
    paths = {"copying": tmp_path / "copying", "recorded": tmp_path / "recorded", "rope": checkpoints / "rope", "hub": "some/name"}
    assert list(hope.analysed(paths)) == ["rope", "hub"]


def test_other_directories_and_options_are_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="other things"):
        require_free(tmp_path)
    with pytest.raises(InputError, match="lots"):
        Sampling(repeats=1)
    with pytest.raises(InputError, match="at least one a lot"):
        Sampling(sequences=2, repeats=4)


def test_a_failing_figure_leaves_nothing(tmp_path):
    class Broken:
        name, verdicts = "broken", ()

        @property
        def figure(self):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        write_figures(tmp_path / "out", "t", [Broken()], [], "c", {})
    assert list(tmp_path.iterdir()) == []
