"""The paper's experiments on small random models of every kind of position: verdicts by rule, and
none where there is nothing to judge.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from families import tiny
from trained_tiny import trained
from verdicts import notes_of, results_of, verdicts_of

import repo_interp as ri
from position_papers.kit.cache import Cache
from position_papers.kit.judge.claims import UNMEASURABLE
from position_papers.kit.paper_directory import write_paper
from position_papers.kit.subjects import Subject, subject
from position_papers.position_generalization import disturbed
from position_papers.position_generalization.extrapolation import EXTRAPOLATION, P7, P7_WINDOWS
from position_papers.position_generalization.fits import FITS, of_heads
from position_papers.position_generalization.measured import Measured, Options, of_tokens
from position_papers.position_generalization.paper import PAPER
from position_papers.position_generalization.rotation import _slow
from position_papers.position_generalization.tolerance import TOLERANCE, with_rope_twins
from position_papers.training.configuration import TrainingConfiguration
from repo_interp.experiments import perturbation
from repo_interp.tasks import Prompt, Task, make_task

LENGTH = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    home = tmp_path_factory.mktemp("language")
    text = home / "text.txt"
    text.write_text(
        "\n".join(
            f"sentence {number} says that {number * 7 % 101} comes next." for number in range(4000)
        )
    )
    task = make_task(
        "language", corpus=str(text), tokens=300, length=LENGTH, longest_test=2 * LENGTH
    )
    checkpoints = {}

    def save(name: str, scheme: str, of: Task) -> Path:
        model = tiny("llama")
        model.resize_token_embeddings(of.vocabulary_size, mean_resizing=False)
        model.config.max_position_embeddings = LENGTH
        checkpoints[name] = home / name.replace("@", "_")
        ri.save(ri.reposition(model, scheme), checkpoints[name], of.tokenizer())
        return checkpoints[name]

    for scheme in ("rope", "repo@1", "learned", "nope"):
        save(scheme, scheme, task)
    for scheme in ("rope", "repo"):  # trained on another task, as far as they say
        directory = save(
            f"reversal {scheme}", scheme, make_task("reversal", longest=6, longest_test=12)
        )
        (directory / "training.toml").write_text(
            'task = "reversal"\n[task_options]\nlongest = 6\nlongest_test = 12\n'
        )
    options = Options(
        sequences=2,
        controls=1,
        draws=2,
        gammas=(0.5,),
        l_maxes=(5,),
        longer=8,
        reach=2,
        corpus=str(text),
    )
    subjects = [subject(name, path) for name, path in checkpoints.items()]
    recorded = TrainingConfiguration(task="language")
    (home / "scores").mkdir()
    (home / "scores" / "scores.json").write_text("{}")
    alone = Subject("scores alone", str(home / "scores"), (), 0, "", None, recorded)
    subjects.append(alone)
    return subjects, options, home


@pytest.fixture(scope="module")
def results(made):
    subjects, options, home = made
    return measured(subjects, options, Cache(home / "cache"))


def measured(subjects, options, cache, experiments=PAPER.experiments):
    with warnings.catch_warnings():
        # P7 is judged by what is above it
        warnings.filterwarnings("ignore", "most of extrapolation.kl is noise")
        return [
            result
            for experiment in experiments
            for result in results_of(experiment, subjects, options, cache)
        ]


@pytest.fixture(scope="module")
def rope(made):
    return next(one for one in made[0] if one.name == "rope")


def test_every_claim_is_judged_where_it_can_be(made, results):
    verdicts = {
        (verdict.claim.label, verdict.checkpoint): verdict
        for result in results
        for verdict in verdicts_of(result)
    }
    judged = {label: {name for (of, name) in verdicts if of == label} for label, _ in verdicts}
    others = {"reversal rope", "reversal repo"}
    checkpoints = {one.name for one in made[0]} - others - {"scores alone"}
    assert judged["P1"] == judged["P3"] == judged["P6"] == judged["P6 (features)"] == checkpoints
    # the others' fake logits are additive by construction
    assert judged["P2"] == {"rope", "repo@1"}
    assert judged["P4"] == judged["P4 (near pi)"] == {"rope", "repo@1"}
    assert judged["P1"] == judged["P1 (beyond nulls)"]
    assert judged["P2"] == judged["P2 (beyond random weights)"]
    assert judged["P6 (learned)"] == {"repo@1"}
    # its table ends at the training length
    assert judged["P7"] == judged["P7 (sliding windows)"] == checkpoints - {"learned"}
    assert judged["P6 (positions)"] == judged["P6 (positions, as in table 1)"]
    assert judged["P6 (positions)"] == checkpoints - {"nope"}
    assert judged["P6 (positions, 1 %)"] == judged["P6 (positions)"]
    assert judged["P6 (untouched)"] == judged["P6 (1 % within 1,000)"] == checkpoints
    assert set(judged) == {claim.label for claim in PAPER.claims}
    measured = {place for place, verdict in verdicts.items() if verdict.outcome != UNMEASURABLE}
    without = set(verdicts) - measured
    # of 32 tokens
    assert {name for label, name in without if label == "P6 (1 % within 1,000)"} == checkpoints
    allowed = {"P4 (near pi)", "P6 (1 % within 1,000)", "P6 (learned)"}
    assert {label for label, _ in without if not label.startswith("P5")} <= allowed
    assert all(np.isfinite(verdicts[place].estimate.value) for place in measured)
    assert all(verdicts[place].notes for place in without)
    # half of the eight are the reference
    assert "of 4 sequences, compared with the others" in notes_of(verdicts["P7", "rope"])


def test_verdicts_can_be_recomputed_from_what_is_drawn(results):
    """Numbers, spreads and what they are compared with: by prompt, by weights, by draw."""
    known = {
        verdict.claim.label: verdict
        for result in results
        for verdict in verdicts_of(result)
        if verdict.checkpoint == "rope"
    }
    drawn = {drawing.name: drawing.data for result in results for drawing in result.drawings}
    fits, rotation, moved = (drawn[f"{name}_rope"] for name in ("fits", "rotation", "perturbation"))
    rises = 100 * np.expm1(moved["judged_log_perplexity"] - moved["judged_plain"]).sel(
        disturbance="text_order"
    )
    units = {
        "P1": fits["three_axis_r_of_prompts"],
        "P2": fits["fake_distance_r_of_layers"].mean("layer"),
        "P6": rises,
        "P7 (sliding windows)": drawn["output_traces_rope"]["trace_outside"],
    }
    for label, values in units.items():
        assert known[label].estimate.value == pytest.approx(float(values.mean()))
        assert known[label].interval.spread == pytest.approx(float(values.std(ddof=1)))
    of_weights, heads = (
        fits["three_axis_r_of_weights"],
        rotation["slow_heads"].mean("layer").isel(seed=0),
    )
    assert known["P3"].estimate.value == pytest.approx(float(of_weights.sel(weights="random 0")))
    assert known["P1"].estimate.value == pytest.approx(float(of_weights.sel(weights="trained")))
    assert known["P4"].estimate.value == pytest.approx(float(heads.sel(weights="trained")))
    assert (fits["tokens"], fits["training_tokens"]) == (LENGTH, LENGTH)


def test_components_are_slow_over_the_training_length(rope, results):
    """As the measure has them where sequences are as long as in training; else as if they turned as
    much farther.
    """
    (group,) = (
        each.data for result in results for each in result.drawings if each.name == "rotation_rope"
    )
    whole = Measured(rope, LENGTH, xr.DataTree())
    for prominence in (group.attrs["prominence"], 0.3):
        chosen = group.assign_attrs(prominence=prominence, stability=2.0, near_pi=2.0)
        slow, near, still = _slow(whole, chosen)
        assert near.any() or prominence > 1
        assert (slow & near <= still).all()
        assert (slow <= (group["max_rotation"] <= chosen.attrs["slow"])).all()
        cut = _slow(dataclasses.replace(whole, length=LENGTH // 4), chosen)
        farther = chosen.assign(max_rotation=4 * group["max_rotation"])
        assert all(map(np.array_equal, cut, _slow(whole, farther)))
    assert (_slow(whole, group)[0] == (group["slow_dominating"] == 1)).all()


def test_figures_and_verdicts_are_written(made, results):
    home = made[2]
    names = {drawing.name for result in results for drawing in result.drawings}
    for stem in (
        "fits",
        "three_axis",
        "fake_distance",
        "rotation",
        "perturbation",
        "extrapolation",
        "output_traces",
    ):
        assert f"{stem}_rope" in names
    assert {"rotation_learned", "output_traces_learned", "fits_reversal rope"} & names == set()
    few = [each for each in results if "perturbation_rope" in [own.name for own in each.drawings]]
    paths = {one.name: one.path for one in made[0]}
    files = {file.name for file in write_paper(home / "figures", PAPER, few, paths, "command", {})}
    assert {"README.md", "verdicts.csv", "perturbation_rope.png"} < files
    page = (home / "figures" / "README.md").read_text()
    assert "Position Generalization" in page and "is at most 2 %" in page


def test_what_was_measured_is_not_measured_again(made, results):
    subjects, options, home = made
    kept = {file: file.stat().st_mtime_ns for file in (home / "cache").glob("*.nc")}
    undrawn = [
        dataclasses.replace(experiment, draw=lambda data: iter(()))
        for experiment in (FITS, TOLERANCE)
    ]
    again = measured(subjects, options, Cache(home / "cache"), undrawn)
    assert {file: file.stat().st_mtime_ns for file in (home / "cache").glob("*.nc")} == kept
    before = [result for result in results if result.experiment in (FITS, TOLERANCE)]
    verdicts = [
        [verdict for result in some for verdict in verdicts_of(result)] for some in (before, again)
    ]
    assert verdicts[0] == verdicts[1] != []


def test_shorter_sequences_say_nothing_about_longer_ones(made, rope):
    _, options, _ = made
    longer = dataclasses.replace(rope, training_length=2 * LENGTH)
    cut = dataclasses.replace(options, length=LENGTH)
    (result,) = results_of(EXTRAPOLATION, [longer], cut)
    verdicts = verdicts_of(result)
    assert [verdict.claim for verdict in verdicts] == [P7, P7_WINDOWS] and not result.drawings
    for verdict in verdicts:
        assert verdict.outcome == UNMEASURABLE
        assert f"{LENGTH} of its {2 * LENGTH} training tokens" in notes_of(verdict)


def test_the_undisturbed_pass_is_made_once_for_all_kinds_and_draws(made, rope, monkeypatch):
    (_, options, _), passes = made, []
    for module in (disturbed, perturbation):

        def count(*given, original=module.forced_responses):
            passes.append(len(given[2]))
            return original(*given)

        monkeypatch.setattr(module, "forced_responses", count)
    monkeypatch.setattr(disturbed, "GRID_TOKENS", LENGTH)  # still two sequences: one has no spread
    TOLERANCE.measure([rope], options, Cache())
    grid, judged = 3 * 1 * 1, 5 * options.draws
    # beside every point that is drawn an undisturbed pass, for the change of attention outputs
    assert passes == [2] * (1 + 2 * grid + judged)


def test_tokens_move_as_far_as_the_paper_moves_them_in_longer_text_alone(made, rope):
    options, few = made[1], {"table", "few_positions"}
    long = dataclasses.replace(rope, training_length=2048)
    assert set(disturbed.groups_of_text(rope, options)) == few
    for length, groups in ((1000, few), (1024, few | {"few_tokens"})):
        cut = dataclasses.replace(options, length=length)
        assert set(disturbed.groups_of_text(long, cut)) == groups


def test_of_long_text_fewer_sequences_are_drawn_than_judged():
    text = [Prompt(tokens=(1,) * 1024)] * 8
    assert len(of_tokens(text, 2048)) == len(of_tokens(text, 1)) == 2
    assert len(of_tokens(text, 4096)) == 4 and of_tokens(text[:3], 1 << 20) == text[:3]


def test_the_twin_is_a_rope_model_of_the_same_task_and_budget():
    def given(name, schemes, task="language", continued=False, length=16):
        configuration = TrainingConfiguration(
            task=task, continue_from="another" if continued else ""
        )
        return Subject(name, name, schemes, length, "the same tokens", None, configuration)

    def twin(of, *others):
        groups = {group[0].name: group[1:] for group in with_rope_twins([of, *others])}
        return [one.name for one in groups[of.name]]

    rope, mixed = ("rope", "rope"), given("mixed", ("rope", "repo"), continued=True)
    fresh, continued = given("fresh", rope), given("continued", rope, continued=True)
    other = given("other", rope, "niah", True)
    assert twin(mixed, other, fresh, continued) == ["continued"]
    assert twin(given("own", ("repo", "repo")), other, mixed, fresh, continued) == ["fresh"]
    table = given("table", ("learned", "learned"))
    assert twin(table, fresh) == [], "its table is not learned from context"
    assert twin(mixed, other, fresh) == ["fresh"]
    assert twin(mixed, other) == [] == twin(fresh, continued)
    longer = given("longer", rope, continued=True, length=32)
    assert twin(mixed, longer) == [], "it would be given other prompts"


def test_an_adapter_is_judged_in_the_tokens_of_its_base(made, tmp_path):
    """Found: it was refused for a tokenizer.json, which an adapter has in its base alone."""
    _, options, home = made
    corpus = {"corpus": options.corpus, "length": LENGTH, "longest_test": 2 * LENGTH}
    tuned = {"continue_from": str(home / "rope"), "adapter": 2, "task_options": corpus}
    places = {
        name: str(trained(tmp_path / name, "language", name, **tuned)) for name in ("repo", "rope")
    }
    repo, rope = (subject(name, place, options.corpus) for name, place in places.items())
    results = results_of(TOLERANCE, [repo, rope], options)
    judged = {
        (verdict.claim.label, verdict.checkpoint)
        for result in results
        for verdict in verdicts_of(result)
    }
    assert {("P6", "repo"), ("P6", "rope"), ("P6 (learned)", "repo")} <= judged


def test_what_is_said_of_heads_is_of_their_means_over_prompts():
    """Found: the lowest and the highest of single sequences stood as those of heads."""
    values = xr.DataArray([[[0.2, 0.8]], [[0.4, 1.0]]], dims=("prompt", "layer", "head"))
    assert of_heads(values) == "0.3 to 0.9"
    assert of_heads(values.where(values != 0.2)) == "0.4 to 0.9", (
        "a sequence where a head has no such components says nothing"
    )
