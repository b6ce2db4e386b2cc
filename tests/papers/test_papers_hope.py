"""HoPE's claims: the rules on curves whose answer is known, the driver over steps, and everything
end to end on tiny models.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from verdicts import judged, notes_of, results_of, verdicts_of

from position_papers.hope import mean_curves, over_training, replicates
from position_papers.hope.beyond import BEYOND, OUTSIDE, halves, shares
from position_papers.hope.beyond import CLAIMS as H4_CLAIMS
from position_papers.hope.component_figures import component_curves
from position_papers.hope.components import COMPONENTS, relative_swing
from position_papers.hope.logit_by_distance import BESIDE_NULL as H1_BESIDE_NULL
from position_papers.hope.logit_by_distance import CLAIMS as H1_CLAIMS
from position_papers.hope.logit_by_distance import LOGIT_BY_DISTANCE, UShape, errors_of, u_shape
from position_papers.hope.mean_curves import DRAWS, curve_vaf, random_phases, smoothed, turning
from position_papers.hope.over_training import (
    ENOUGH,
    FILE,
    H3,
    OVER_TRAINING,
    STEPS,
    fall,
    read_steps,
    saved_steps,
    write_steps,
)
from position_papers.hope.paper import PAPER, Options
from position_papers.hope.replicates import Sampling, is_analysed, random_prompts
from position_papers.hope.rotary_pairs import components_of_pair
from position_papers.hope.vaf import VAF, outstanding
from position_papers.kit.cache import Cache
from position_papers.kit.experiment import Drawing, Result
from position_papers.kit.judge.claims import FAILS, HOLDS, UNMEASURABLE, Verdict
from position_papers.kit.judge.outcomes import read_table
from position_papers.kit.paper_directory import write_paper
from position_papers.kit.subjects import Subject, subject
from repo_interp.analysis.analyze import analyze, stream
from repo_interp.cli import main
from repo_interp.errors import InputError
from repo_interp.measures.components import Components
from repo_interp.measures.positions import Positions
from repo_interp.models.fresh_weights import load_fresh
from repo_interp.models.load import load
from repo_interp.models.reposition import reposition
from repo_interp.models.saving import save

L = 16
H1, H1_NO_DECAY = H1_CLAIMS["independent"]
H4_WORDING = H4_CLAIMS["independent"][1]
OF_ROPE = {
    claim.label
    for experiment in (VAF, OVER_TRAINING, BEYOND, COMPONENTS)
    for claim in experiment.claims
}
OF_ROPE |= {claim.label for claim in H1_BESIDE_NULL.values()}
OF_ALL = {claim.label for claim in LOGIT_BY_DISTANCE.claims} - OF_ROPE
EXPERIMENTS = tuple(experiment.name for experiment in PAPER.experiments)
SIZES: dict[str, Any] = {
    "sequences": 4,
    "repeated_sequences": 2,
    "repeats": 2,
    "controls": 1,
    "step_sequences": 2,
    "batch_size": 2,
}
SMALL = Sampling(**SIZES)


def smooth(curve: Any) -> np.ndarray:
    """A curve over distances, or several, as the rules see it."""
    values = np.asarray(curve, dtype=float)
    return smoothed(
        xr.DataArray(
            values, {"distance": range(values.shape[-1])}, (*"ab"[: values.ndim - 1], "distance")
        ),
        256,
    ).values


def holds(shape: UShape, standard_error: float) -> bool:
    """Whether H1 holds of a curve of that shape."""
    return H1.rule.holds(shape.values((standard_error, standard_error), 100))


def results_on(
    paths: dict[str, object], options: Options, cache: Cache | None = None, drawn=EXPERIMENTS
) -> list[Result]:
    """The results of all experiments on the checkpoints, name -> path, with figures of those whose
    names are `drawn`.
    """
    subjects = [subject(name, str(path)) for name, path in paths.items()]
    experiments = [
        each if each.name in drawn else dataclasses.replace(each, draw=lambda data: iter(()))
        for each in PAPER.experiments
    ]
    return [
        result
        for experiment in experiments
        for result in results_of(experiment, subjects, options, cache)
    ]


# ---- the rules -----------------------------------------------------------------------------------


def test_a_parabola_is_a_u_and_a_decay_a_rise_and_a_line_are_none():
    t = np.linspace(-1, 1, 256)
    u = u_shape(smooth(t**2))
    assert holds(u, 0.001)
    assert u.ratio == pytest.approx(1, abs=0.05)
    assert abs(u.minimum / len(smooth(t)) - 0.5) < 0.04
    for other in (-t, t, np.zeros(256), np.exp(-4 * t), -(t**2)):
        assert not holds(u_shape(smooth(other)), 0.001)


def test_a_u_must_rise_by_a_quarter_and_stand_out_of_the_noise():
    t = np.arange(256.0)

    def dip(rise):
        return smooth(np.interp(t, [0, 128, 255], [1, 0, rise]))

    assert holds(u_shape(dip(0.4)), 0.01)
    assert not holds(u_shape(dip(0.15)), 0.01)
    assert not holds(u_shape(dip(0.4)), 0.2)


def test_errors_of_fall_and_rise_are_those_of_each_replicates_own():
    """Where replicates differ by a constant alone, fall and rise have no error; where their right
    ends differ, the rise has.
    """
    curve, end = np.abs(np.linspace(-1, 1, 256)), np.maximum(np.linspace(-1, 1, 256), 0)
    assert_allclose(errors_of(smooth([curve, curve + 5, curve - 3])), (0, 0), atol=1e-12)
    fall, rise = errors_of(smooth([curve + tilt * end for tilt in (-0.1, 0.0, 0.1)]))
    assert fall == pytest.approx(0, abs=0.003)
    assert rise == pytest.approx(0.1 / np.sqrt(3) * smooth(end)[-1], rel=0.05)


def test_what_a_token_has_with_itself_does_not_make_a_u():
    curve = np.linspace(0, 1, 64)
    curve[0] = 50
    assert not u_shape(smooth(curve)).inside


def test_smoothed_curves_are_means_over_windows_each_at_its_middle():
    t = np.arange(64)
    found = smoothed(
        xr.DataArray(2.0 * t + np.where(t == 0, 9, 0), {"distance": t}, ("distance",)), 128
    )
    assert_allclose(found, 2 * found["middle"])
    assert (found["middle"].values[0], found["middle"].values[1]) == (4.5, 6.5)


def test_vaf_of_curves_is_the_share_of_variance_left_without_a_component():
    random = np.random.default_rng(0)
    curves = random.normal(size=(5, 40)) * np.array([[5.0], [1], [1], [0], [0.1]])
    whole = curves.sum(0)
    expected = [100 * (1 - (whole - own).var() / whole.var()) for own in curves]
    assert_allclose(curve_vaf(curves), expected)
    assert curve_vaf(curves + 7)[3] == pytest.approx(0, abs=1e-9)
    assert np.isnan(curve_vaf(np.ones((2, 9)))).all()


def test_outstanding_is_in_deviations_of_the_others():
    vaf, activated = np.array([1.0, 3.0, 12.0]), np.array([False, False, True])
    assert outstanding(vaf, activated) == pytest.approx(10)


def test_a_course_falls_when_it_falls_by_more_than_its_error():
    course, noise = np.linspace(60, 20, 9)[:, None], np.array([[-0.1, 0, 0.1, 0]])
    # Replicates that go different ways: the mean falls, but not by more than chance.
    scattered = 50 + np.linspace(0, 1, 9)[:, None] * np.array([[-40.0, 30, -30, 35]])
    for steps, falls in ((course + noise, True), (course[::-1] + noise, False), (scattered, False)):
        assert H3.rule.holds(fall(steps) | {STEPS: ENOUGH}) is falls
    with pytest.raises(ValueError, match="unless the number of steps trained"):
        H3.rule.holds(fall(course + noise) | {STEPS: 1500})
    with pytest.raises(ValueError, match="at least 4 steps"):
        fall(np.ones((3, 2)))


def test_leaving_a_range_and_the_upper_half():
    t = np.arange(1, 257)
    theta = 1.45 * math.pi / 256
    within, beyond = np.cos(theta * t), np.cos(theta * (t + 256))
    # A cosine that passed its minimum has seen all values: the paper's wording holds, the range is
    # kept.
    assert shares(within, beyond)[OUTSIDE] == 0
    assert H4_WORDING.rule.holds(shares(within, beyond))
    line = 0.1 * t
    assert shares(line, line + 26)[OUTSIDE] > 0.9
    constant = np.cos(40 * math.pi / 256 * t)
    assert not H4_WORDING.rule.holds(shares(constant, constant))


def test_beyond_starts_at_the_training_length():
    near, far = halves(
        xr.DataArray(np.arange(512.0), {"distance": np.arange(512)}, ("distance",)), 256
    )
    assert near["middle"].max() < 256 < far["middle"].min() and far[0] == 256 + 7.5


def test_a_curve_that_rises_again_does_not_decay_even_where_it_is_no_u():
    falls = np.linspace(5, 0, 100)
    shallow = u_shape(smooth(np.concatenate([falls, np.linspace(0, 0.6, 28)])))
    assert not H1.rule.holds(shallow.values((0.01, 0.01), 4))
    assert H1_NO_DECAY.rule.holds(shallow.values((0.01, 0.01), 4))
    assert not H1_NO_DECAY.rule.holds(u_shape(smooth(falls)).values((0.01, 0.01), 4))


def curves_of(waves: np.ndarray, twin: np.ndarray, frequencies: np.ndarray) -> xr.DataTree:
    """What H1 is judged on: two replicates of one RoPE layer whose components over distances are
    `waves`, and a twin's curve.
    """
    length, replicas = waves.shape[-1], (2, 2)  # weights, repeats
    logit = np.stack([waves.sum(0), twin])[:, None] + np.zeros((2, 1, 1))
    logit = logit + 1e-3 * np.stack([np.zeros(length), np.sin(np.arange(length))])
    bands = ("weights", "repeat", "layer", "component")
    of_components = np.broadcast_to(frequencies, (*replicas, 1, len(frequencies)))
    data = xr.Dataset(
        {
            "logit": (("weights", "repeat", "layer", "distance"), logit[:, :, None]),
            "component_by_distance": (
                ("weights", "repeat", "component", "distance"),
                np.broadcast_to(waves, (*replicas, *waves.shape)),
            ),
            "frequency": (bands, of_components),
            "activated": (bands, of_components > 1),
            "low_frequency": (bands, of_components < 0.01),
        },
        {
            "weights": ["trained", "random 0"],
            "scheme": ("layer", ["rope"]),
            "layer": [0],
            "distance": range(length),
        },
        {"checkpoint": "a", "length": length, "training_length": length, "sequences": 4},
    )
    return xr.DataTree.from_dict({"within": data, "repeated": data})


def outcomes_of(*curves) -> dict[str, Verdict]:
    told = LOGIT_BY_DISTANCE.tabulate([curves_of(*curves)])
    return {each.claim.label: each for each in judged(told)}


def test_a_u_of_rope_counts_beyond_what_few_waves_show_at_random_phases():
    """Found: of every hundred sets of waves at random phases the rules of H1 hold on more than
    eighty.
    """
    frequencies, t = 10_000 ** (-np.arange(16) / 16), np.arange(256)
    waves = next(iter(random_phases_of(frequencies, 256)))
    assert H1.rule.holds(u_shape(smooth(waves.sum(0))).values((1e-3, 1e-3), 4))
    # no phases of the second make a deeper minimum
    together = -np.cos(np.multiply.outer(frequencies, t - 128))
    for drawn, beyond in ((waves, FAILS), (together, HOLDS)):
        found = outcomes_of(drawn, 0 * t, frequencies)
        assert (found["H1"].outcome, found["H1 (beyond random phases)"].outcome) == (HOLDS, beyond)


def random_phases_of(frequencies: np.ndarray, length: int):
    """Components at random phases whose sums are no more than uneven Us."""
    drawn: list[np.ndarray] = []
    random_phases(
        turning(frequencies, length).values, lambda waves: float(drawn.append(waves.copy()) or 0)
    )
    shapes = ((waves, u_shape(smooth(waves.sum(0)))) for waves in drawn)
    return (waves for waves, shape in shapes if 0.3 < shape.ratio < 0.5 and shape.inside)


def test_twins_stand_beside_the_same_distances():
    """Found: the control of the row without the last distances was that of all of them."""
    t = np.arange(256)
    curve, twin = np.abs(t - 128) / 128, np.where(t < 245, 0.0, 1.0)
    found = outcomes_of(np.stack([curve, 0 * curve]), twin, np.array([1.0, 0.1]))
    of_all, without_last = (
        float(found[label].estimate.control.removeprefix("random weights: "))
        for label in ("H1", "H1 (no decay)")
    )
    assert of_all > 0.3 and without_last < 0.001


def test_random_phases_have_equal_strength_and_turn_with_their_frequency():
    frequencies = np.array([1.0, 0.1, 0.0])
    waves = turning(frequencies, 64).values
    strengths = random_phases(waves, lambda curves: float((curves**2).mean(-1)[0]))
    assert len(strengths) == DRAWS
    assert abs(strengths.mean() - 1) < 4 * strengths.std() / math.sqrt(DRAWS)
    assert random_phases(waves, lambda curves: float(np.ptp(curves[2]))).max() < 1e-12
    # C(t + 2) = 2 cos(theta) C(t + 1) - C(t), whatever the phase.
    recurrence = random_phases(
        waves[:, :8],
        lambda curves: float(
            np.abs(curves[1, 2:] - 2 * math.cos(0.1) * curves[1, 1:-1] + curves[1, :-2]).max()
        ),
    )
    assert recurrence.max() < 1e-12


def test_one_token_is_repeated_after_the_beginning(checkpoints):
    prompts = list(random_prompts(load(checkpoints / "rope"), 12, 5, 0, "repeated"))
    assert all(len(set(prompt.tokens)) == 1 and len(prompt.tokens) == 12 for prompt in prompts)
    assert len({prompt.tokens[0] for prompt in prompts}) > 1


def test_swing_is_relative_to_the_activated_components():
    t = np.linspace(0, 1, 512)
    curves = np.stack([np.sin(60 * t), 4 * t, 0.2 * t, 5 + 0 * t])
    swing = relative_swing(
        smooth(curves), np.array([False, True, False, False]), np.array([False, False, True, True])
    )
    assert_allclose(swing, [0.05, 0], atol=1e-12)


# ---- tiny checkpoints ----------------------------------------------------------------------------


def tiny(scheme: str, seed: int = 0):
    """Two layers with one activated component (theta = 0.316 at L = 16), large enough weights that
    positions matter.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": L}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.3)
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


@pytest.fixture
def few_draws(monkeypatch):
    """A null of 50 draws, where what is judged does not depend on it."""
    monkeypatch.setattr(mean_curves, "DRAWS", 50)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What was measured of `checkpoints` with SIZES."""
    return Cache(tmp_path_factory.mktemp("kept"))


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


def test_what_is_measured_is_the_mean_over_replicates(checkpoints, kept):
    rope, learned = (subject(name, checkpoints / name) for name in ("rope", "learned"))
    within, beyond = replicates.within(rope, SMALL, kept), replicates.beyond(rope, SMALL, kept)
    assert (within.sizes["distance"], beyond.sizes["distance"]) == (L, 2 * L)
    assert within["weights"].values.tolist() == ["trained", "random 0"]
    for components, logit in (
        ("component_by_distance", within["logit"].mean("layer")),
        ("first_layer_by_distance", within["logit"].isel(layer=0)),
    ):
        assert_allclose(within[components].sum("component"), logit, rtol=1e-6)
    logits = within["logit"].sel(weights="trained").values
    assert not np.array_equal(logits[0], logits[1])
    assert replicates.beyond(learned, SMALL, kept) is None


def test_what_is_kept_goes_by_the_weights_and_not_by_their_name(checkpoints, kept):
    first, again = (
        replicates.within(subject(name, checkpoints / "rope"), SMALL, kept)
        for name in ("rope", "other name")
    )
    assert again.attrs.pop("checkpoint") == "other name"
    assert first.attrs.pop("checkpoint") == "rope"
    xr.testing.assert_identical(first, again)


def test_a_small_file_stands_in_for_the_saved_steps(checkpoints, tmp_path):
    finished, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(checkpoints / "rope", finished)
    assert read_steps(finished) is None and list(saved_steps(finished)) == [1, 2, 3, 4]
    sizes = "--sequences 2 --repeats 2 --batch-size 2"
    assert main(f"train steps {finished} {sizes}".split()) == 0
    shutil.copytree(finished, moved, ignore=shutil.ignore_patterns("steps"))
    from_file, from_steps = (
        over_training.measure([subject("rope", path)], SMALL, Cache())
        for path in (moved, checkpoints / "rope")
    )
    assert from_file["vaf"].attrs["sequences"] == 2
    assert from_file["step"].values.tolist() == [1, 2, 3, 4]
    for name in ("vaf", "frequency"):
        assert_allclose(from_file[name], from_steps[name])
    assert len(set(from_file["vaf"].sum(("repeat", "component")).values.tolist())) == 4
    (moved / FILE).write_bytes(b"no netCDF")
    with pytest.raises(InputError, match="repo-interp train steps"):
        read_steps(moved)
    with pytest.raises(InputError, match="kept no steps"):
        write_steps(moved, SMALL)
    with pytest.raises(InputError, match="does not have RoPE in every layer"):
        write_steps(checkpoints / "repo", SMALL)


@pytest.mark.usefixtures("few_draws")
def test_figures_on_tiny_models_end_to_end(checkpoints, kept, tmp_path):
    paths = {name: str(checkpoints / name) for name in ("rope", "learned", "repo")}
    results, out = results_on(dict(paths), Options(**SIZES), kept), tmp_path / "hope"
    write_paper(out, PAPER, results, paths, "repo-interp figures hope", {}, ("nc",))
    of_rope = ("components", "vaf", "vaf_over_training", "beyond_training_length", "norms", "pair")
    names = {"logit_by_distance", "turns_repo", *(f"{name}_rope" for name in of_rope)}
    page = ("README.md", "evidence.csv.gz", "verdicts.csv", "page.json", "numbers.csv.gz")
    left = {*page, "charts.nc.xz", *(f"{name}.nc" for name in names)}
    assert {file.name for file in out.iterdir()} == left
    rows = read_table(out / "verdicts.csv")
    verdicts = rows.set_index(["claim", "checkpoint"])["outcome"]
    judged = {(claim, name) for claim in OF_ALL for name in ("rope", "learned")}
    judged |= {(claim, "rope") for claim in OF_ROPE - {"H3"}}  # few steps
    assert {*verdicts.index[verdicts != UNMEASURABLE]} == judged
    assert verdicts["H1", "kerple"] == UNMEASURABLE
    assert {claim.label for claim in PAPER.claims} == {*rows["claim"]}
    with xr.open_dataset(out / "logit_by_distance.nc", engine="h5netcdf") as stored:
        assert stored["checkpoint"].values.tolist() == ["rope", "learned", "repo"]
        of_learned = stored["logit"].sel(checkpoint="learned", weights="trained")
        assert of_learned.sel(length=2 * L).isnull().all() and "caption" in stored.attrs


@pytest.mark.usefixtures("few_draws")
def test_a_capped_length_is_measured_once_for_all_claims_drawn_and_not_judged(
    tmp_path, monkeypatch
):
    lengths, of_model = [], replicates.of_model

    def counted(bridge, tokens, *given):
        lengths.append(tokens)
        return of_model(bridge, tokens, *given)

    monkeypatch.setattr(replicates, "of_model", counted)
    model = tiny("rope")
    model.config.max_position_embeddings = 4 * L
    save(model, tmp_path / "long")
    options, cache = Options(**SIZES, length=L), Cache(tmp_path / "kept")
    results = results_on({"long": tmp_path / "long"}, options, cache, drawn=EXPERIMENTS[:1])
    # of independent tokens and of a repeated one, of the trained model and a twin
    assert sorted(lengths) == [L] * 4 + [2 * L] * 4
    found = [each for each in verdicts_of(*results) if each.checkpoint == "long"]
    assert {each.claim.label for each in found} == OF_ALL | OF_ROPE - {"H3"}
    assert all(each.outcome == UNMEASURABLE and "length=0" in notes_of(each) for each in found)
    (drawing,) = (drawing for result in results for drawing in result.drawings)
    assert drawing.data.sizes["distance"] == 2 * L
    assert f"capped at {L} of the {4 * L} tokens" in drawing.caption


@pytest.mark.usefixtures("few_draws")
def test_of_a_long_model_twins_have_fewer_layers_and_the_claims_are_judged_all_the_same(
    checkpoints, tmp_path, monkeypatch
):
    monkeypatch.setattr(replicates, "LONG", L - 1)
    monkeypatch.setattr(replicates, "FIRST_LAYERS", 1)
    rope, cache = subject("rope", checkpoints / "rope"), Cache(tmp_path)
    within, beyond = replicates.within(rope, SMALL, cache), replicates.beyond(rope, SMALL, cache)
    layers = within["logit"].notnull().any(("repeat", "distance")).sum("layer")
    assert layers.sel(weights=["trained", "random 0"]).values.tolist() == [2, 1]
    assert (within.attrs["sequences"], beyond.sizes["layer"]) == (SMALL.repeats, 1)
    assert within["scheme"].values.tolist() == ["rope"] * 2 and within["activated"].dtype == bool
    twin = replicates.of_model(load_fresh(rope.path, 0), L, L, 1, SMALL, layers=[0])
    of_twin = within["component_by_distance"].sel(weights="random 0", repeat=0)
    assert_allclose(twin["component_by_distance"][0], of_twin)
    drawn, paths = ("vaf", "beyond"), {"rope": checkpoints / "rope"}
    results = results_on(paths, Options(**SIZES), cache, drawn)
    known = {each.claim.label for each in verdicts_of(*results) if each.outcome != UNMEASURABLE}
    assert known == OF_ALL | OF_ROPE - {"H3"}
    captions = {drawing.name: drawing.caption for result in results for drawing in result.drawings}
    assert "the first 1 of 2 layers" in captions["vaf_rope"]
    assert "The first 1 layers." in captions["beyond_training_length_rope"]


def test_a_layer_with_a_window_is_measured_within_it_and_not_beyond(tmp_path):
    """L is min(window, training length), whatever the length of the sequences: not capped, and
    bands are those of the window.
    """
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    lengths = {"max_position_embeddings": 4 * L, "sliding_window": L, "layer_types": kinds}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **lengths)).eval()
    save(reposition(model, "rope"), tmp_path / "windows")
    windows = subject("windows", tmp_path / "windows")
    options = dataclasses.replace(SMALL, length=2 * L)
    data = replicates.within(windows, options, Cache())
    assert data.sizes["distance"] == data.attrs["training_length"] == L
    assert data["layer"].values.tolist() == [0, 1]
    assert replicates.beyond(windows, options, Cache()) is None
    bands = replicates.bands(data)
    theta = bands["frequency"].values
    assert_allclose(bands["activated"], (theta > math.pi / L) & (theta < 2 * math.pi / L))


def test_checkpoints_that_copy_are_not_looked_at(tmp_path, checkpoints):
    shutil.copytree(checkpoints / "learned", tmp_path / "copying")
    (tmp_path / "copying" / "training.toml").write_text('task = "copying"\n')
    recorded = Subject("recorded", str(tmp_path), (), 0, "", None)
    copying, rope = subject("copying", tmp_path / "copying"), subject("rope", checkpoints / "rope")
    assert [is_analysed(each) for each in (copying, recorded, rope)] == [False, False, True]


# ---- what all papers have in common --------------------------------------------------------------


def test_a_failing_figure_leaves_nothing(tmp_path):
    chart = partial(component_curves, xr.Dataset(), "no components")
    result = Result(PAPER.experiments[0], (Drawing("broken", chart, "", xr.Dataset()),), ())
    with pytest.raises(KeyError):
        write_paper(tmp_path / "out", PAPER, [result], {}, "c", {})
    assert list(tmp_path.iterdir()) == []
