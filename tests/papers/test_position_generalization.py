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
from numpy.testing import assert_allclose
from trained_tiny import trained
from verdicts import judged, notes_of, results_of, verdicts_of

import repo_interp as ri
from position_papers.kit.cache import Cache
from position_papers.kit.judge.claims import FAILS, HOLDS, UNMEASURABLE
from position_papers.kit.subjects import Subject, subject
from position_papers.position_generalization import disturbed, random_weights
from position_papers.position_generalization.extrapolation import EXTRAPOLATION, P7, P7_WINDOWS
from position_papers.position_generalization.fits import FITS, PAPER_LENGTH, by_chance, of_heads
from position_papers.position_generalization.measured import (
    Measured,
    Options,
    of_tokens,
    prompts_of,
)
from position_papers.position_generalization.paper import PAPER
from position_papers.position_generalization.random_weights import RANDOM_WEIGHTS
from position_papers.position_generalization.rotation import _slow
from position_papers.position_generalization.tolerance import (
    TOLERANCE,
    _accuracy,
    with_rope_twins,
)
from position_papers.training.configuration import TrainingConfiguration
from position_papers.zoo_directory import DIRECTORY
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.lengths import disturbance, perturbation
from repo_interp.tasks import Prompt, Task, make_task

LENGTH = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    home = tmp_path_factory.mktemp("language")
    text = home / "text.txt"
    lines = (f"sentence {n} says that {n * 7 % 101} comes next." for n in range(4000))
    text.write_text("\n".join(lines))
    sizes = {"tokens": 300, "length": LENGTH, "longest_test": 2 * LENGTH}
    task = make_task("language", corpus=str(text), **sizes)
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
    # trained on another task, as far as it says
    other = save("reversal repo", "repo", make_task("reversal", longest=6, longest_test=12))
    stated = 'task = "reversal"\n[task_options]\nlongest = 6\nlongest_test = 12\n'
    (other / "training.toml").write_text(stated)
    counts = {"sequences": 2, "controls": 1, "draws": 2, "longer": 8, "reach": 2}
    options = Options(**counts, gammas=(0.5,), l_maxes=(5,), corpus=str(text))
    subjects = [subject(name, path) for name, path in checkpoints.items()]
    (home / "scores").mkdir()
    (home / "scores" / "scores.json").write_text("{}")
    recorded = TrainingConfiguration(task="language")
    alone = Subject("scores alone", str(home / "scores"), (), 0, "", None, recorded)
    return [*subjects, alone], options, home


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


def test_every_claim_is_judged_where_it_can_be(results):
    verdicts = {(each.claim.label, each.checkpoint): each for each in verdicts_of(*results)}
    by_label = {label: {name for of, name in verdicts if of == label} for label, _ in verdicts}
    assert set(by_label) == {claim.label for claim in PAPER.claims}
    every, rotary = {"rope", "repo@1", "learned", "nope"}, {"rope", "repo@1"}
    # the others' fake logits are additive by construction
    wanted = dict.fromkeys(("P2", "P2 (beyond random weights)", "P4", "P4 (near pi)"), rotary)
    of_all = ("P1", "P1 (beyond nulls)", "P3", "P6", "P6 (features)")
    of_all = (*of_all, "P6 (untouched)", "P6 (all targets)")
    wanted |= dict.fromkeys((*of_all, "P6 (1 % within 1,000)"), every)
    # its table ends at the training length
    wanted |= dict.fromkeys(("P7", "P7 (sliding windows)"), every - {"learned"})
    moved = ("positions", "positions, as in table 1", "positions, 1 %")
    wanted |= dict.fromkeys([f"P6 ({kind})" for kind in moved], every - {"nope"})
    assert {label: by_label[label] for label in wanted} == wanted
    assert by_label["P6 (learned)"] == {"repo@1"}
    without = {place for place, each in verdicts.items() if each.outcome == UNMEASURABLE}
    # of 32 tokens
    assert {name for label, name in without if label == "P6 (1 % within 1,000)"} == every
    # random weights may predict nothing
    allowed = {"P4 (near pi)", "P6", "P6 (1 % within 1,000)", "P6 (learned)"}
    # of models that were trained on a task of ours
    allowed |= {"P3 (by layer, length and text)"}
    assert {label for label, _ in without if not label.startswith("P5")} <= allowed
    assert all(each.notes or place not in without for place, each in verdicts.items())
    # half of the eight are the reference
    assert "of 4 sequences, compared with the others" in notes_of(verdicts["P7", "rope"])
    names = {drawing.name for result in results for drawing in result.drawings}
    kinds = ("fits", "three_axis", "fake_distance", "rotation", "perturbation", "extrapolation")
    assert {f"{kind}_rope" for kind in (*kinds, "output_traces")} <= names
    assert not {"rotation_learned", "output_traces_learned", "fits_reversal repo"} & names


def test_verdicts_can_be_recomputed_from_what_is_drawn(results):
    """Numbers, spreads and what they are compared with: by prompt, by weights, by draw."""
    known = {each.claim.label: each for each in verdicts_of(*results) if each.checkpoint == "rope"}
    drawn = {drawing.name: drawing.data for result in results for drawing in result.drawings}
    fits, rotation, moved = (drawn[f"{name}_rope"] for name in ("fits", "rotation", "perturbation"))
    rises = np.expm1(moved["judged_log_perplexity"] - moved["judged_plain"])
    units = {
        "P1": fits["three_axis_r_of_prompts"],
        "P2": fits["fake_distance_r_of_layers"].mean("layer"),
        "P6 (all targets)": 100 * rises.sel(disturbance="text_order"),
        "P7 (sliding windows)": drawn["output_traces_rope"]["trace_outside"],
    }
    for label, values in units.items():
        assert known[label].estimate.value == pytest.approx(float(values.mean()))
        assert known[label].interval.spread == pytest.approx(float(values.std(ddof=1)))
    of_weights = fits["three_axis_r_of_weights"]
    heads = rotation["slow_heads"].mean("layer").isel(seed=0)
    for label, values, weights in (
        ("P3", of_weights, "random 0"),
        ("P1", of_weights, "trained"),
        ("P4", heads, "trained"),
    ):
        wanted = float(values.sel(weights=weights))
        assert known[label].estimate.value == pytest.approx(wanted)
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


def test_what_was_measured_is_not_measured_again(made, results):
    subjects, options, home = made
    kept = {file: file.stat().st_mtime_ns for file in (home / "cache").glob("*.nc")}
    undrawn = dataclasses.replace(FITS, draw=lambda data: iter(()))
    again = measured(subjects, options, Cache(home / "cache"), [undrawn])
    assert {file: file.stat().st_mtime_ns for file in (home / "cache").glob("*.nc")} == kept
    before = [result for result in results if result.experiment is FITS]
    assert verdicts_of(*before) == verdicts_of(*again) != []


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
    """Whatever length is asked for, if the model was trained on as much."""
    options, few = made[1], {"table", "few_positions"}
    assert set(disturbed.groups_of_text(rope, options)) == few
    for trained_on, groups in ((1000, few), (1024, few | {"few_tokens"})):
        long = dataclasses.replace(rope, training_length=trained_on)
        for length in (256, 1024):
            cut = dataclasses.replace(options, length=length)
            assert set(disturbed.groups_of_text(long, cut)) == groups


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [(0.5, 0.495, HOLDS), (0.5, 0.485, FAILS), (0.0, 0.0, UNMEASURABLE), (0.5, 0.51, HOLDS)],
)
def test_a_fall_of_accuracy_is_a_share_of_it(before, after, outcome):
    """The paper's is of 0.4 %, from 42.53 to 42.34."""
    data = xr.Dataset(
        {"accuracy_before": ("draw", [before] * 3), "accuracy": ("draw", [after] * 3)}
    )
    (found,) = judged([_accuracy("a", data.assign_attrs(prompts=2))])
    assert found.outcome == outcome
    if before:
        assert found.estimate.value == pytest.approx(100 * (before - after) / before)


def test_accuracy_is_that_of_the_targets_that_no_move_touched(made):
    """By plain transformers, target by target."""
    rope = subject("rope", DIRECTORY / "language/rope")
    options = dataclasses.replace(made[1], length=64)
    plain = disturbed.measure_undisturbed(rope, options)
    point = ("text_order", *disturbed.TEXT)
    found = disturbed.measure_judged(rope, options, plain, *point).isel(kind=0)
    model, prompts = load_model(rope.path, "cpu"), prompts_of(rope, options)
    for draw in range(options.draws):
        places = tuple(range(len(as_decoder(model).layers)))
        moves = disturbance.Disturbance(*point, places, "range", options.seed + 1 + draw)
        changed, _, moved = disturbance.disturbed(
            as_decoder(model), prompts, range(len(prompts)), moves
        )
        right = {"accuracy": [], "accuracy_before": []}
        for prompt, other, away in zip(prompts, changed, moved[:, 0], strict=True):
            for name, tokens in (("accuracy", other.tokens), ("accuracy_before", prompt.tokens)):
                with torch.no_grad():
                    likeliest = model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
                right[name] += [
                    likeliest[place - 1] == tokens[place]
                    for place in range(1, len(tokens))
                    if not (away[place] or away[place - 1])
                ]
        for name, values in right.items():
            assert float(found[name][draw]) == pytest.approx(np.mean(values)), name
    assert not found["accuracy"].equals(found["accuracy_before"])


def test_random_text_is_uniform_or_falls_as_the_rank():
    """Never token 0, which pads."""
    count, vocabulary = 40_000, 51
    harmonic = (1 / np.arange(1, vocabulary)).sum()
    for text, share in (("uniform", 1 / 50), ("Zipf", 1 / harmonic)):
        tokens = np.array(random_weights.random_text(vocabulary, count, text, [0]).tokens)
        assert (tokens == 1).mean() == pytest.approx(share, abs=5 * np.sqrt(share / count))
        assert set(tokens.tolist()) == set(range(1, vocabulary))


def test_logits_by_chance_are_fitted_to_the_root_of_six_over_n():
    """Least squares on independent logits, as an obvious reference of `by_chance`."""
    n, rng = 96, np.random.default_rng(0)
    query, key = np.tril_indices(n)
    columns = np.zeros((len(query), 3 * n))
    for axis, index in enumerate((query - key, query, key)):
        columns[np.arange(len(query)), axis * n + index] = 1
    projection = columns @ np.linalg.pinv(columns)
    found = []
    for _ in range(8):
        logits = rng.normal(size=len(query))
        found.append(np.corrcoef(logits, projection @ logits)[0, 1])
    assert np.mean(found) == pytest.approx(by_chance(n), rel=0.05)
    assert by_chance(PAPER_LENGTH) > 0.028


def test_random_weights_are_fitted_by_layer_length_and_text(monkeypatch):
    """On the zoo's decoder, of two of its kind the first alone."""
    monkeypatch.setattr(random_weights, "LENGTHS", (32, 128))
    names = ("language/rope", "language/rope_continued", "language/alibi")
    subjects = [subject(name, str(DIRECTORY / name)) for name in names]
    (result,) = results_of(RANDOM_WEIGHTS, subjects, Options())
    (found,), (drawing,) = verdicts_of(result), result.drawings
    r = drawing.data["r"]
    assert (found.checkpoint, dict(r.sizes)) == (
        "language/rope",
        {"text": 2, "length": 2, "draw": 2, "layer": 4},
    )
    first = r.isel(layer=0)
    shown = first.sel(text="uniform", length=128)
    assert found.estimate.value == pytest.approx(float(shown.mean()))
    # by chance where no token is as frequent as another, above it where some are, and in later layers
    assert_allclose(
        first.sel(text="uniform").mean("draw"), [by_chance(32), by_chance(128)], rtol=0.1
    )
    assert (r.mean("draw").diff("layer") > 0).all()
    assert (first.mean("draw").sel(text="Zipf", length=128) > 1.1 * by_chance(128)).all()


def test_of_long_text_fewer_sequences_are_drawn_than_judged():
    text = [Prompt(tokens=(1,) * 1024)] * 8
    assert len(of_tokens(text, 2048)) == len(of_tokens(text, 1)) == 2
    assert len(of_tokens(text, 4096)) == 4 and of_tokens(text[:3], 1 << 20) == text[:3]


def test_the_twin_is_a_rope_model_of_the_same_task_and_budget():
    def given(name, schemes, task="language", continued=False, length=16):
        start = "another" if continued else ""
        configuration = TrainingConfiguration(task=task, continue_from=start)
        return Subject(name, name, schemes, length, "the same tokens", None, configuration)

    def twin(of, *others):
        groups = {group[0].name: group[1:] for group in with_rope_twins([of, *others])}
        return [one.name for one in groups[of.name]]

    rope, mixed = ("rope", "rope"), given("mixed", ("rope", "repo"), continued=True)
    fresh, continued = given("fresh", rope), given("continued", rope, continued=True)
    other = given("other", rope, "niah", True)
    assert twin(mixed, other, fresh, continued) == ["continued"]
    assert twin(given("own", ("repo", "repo")), other, mixed, fresh, continued) == ["fresh"]
    assert twin(mixed, other, fresh) == ["fresh"]
    assert twin(mixed, other) == [] == twin(fresh, continued)
    # a table is not learned from context, and a longer model would be given other prompts
    assert twin(given("table", ("learned", "learned")), fresh) == []
    assert twin(mixed, given("longer", rope, continued=True, length=32)) == []


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
