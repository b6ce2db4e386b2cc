"""The probe of the token index: closed forms, nulls that a walk passes, a slow reference, models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs
from numpy.testing import assert_allclose
from refusals import refused

import repo_interp as ri
from repo_interp.measures.statistics import merge
from repo_interp.plugins.probe.held_out_index import DRAWS, PENALTIES, held_out_index
from repo_interp.plugins.probe.probe_measure import PositionProbe
from repo_interp.plugins.probe.view import VIEW


def stream(kind, prompts=12, tokens=48, width=10, seed=0):
    """Vectors of tokens of prompts, their prompts and their index."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=(prompts, tokens, width))
    index = np.tile(np.arange(tokens), (prompts, 1))
    line = (index / index.std())[..., None]
    made = {
        "noise": noise,
        "walk": noise.cumsum(1),
        "index": noise + 5 * line * np.eye(width)[0] - noise * np.eye(width)[0],
        "noisy": noise + line * np.eye(width)[0],
        # Every prompt has a slope of its own, as likely up as down
        "slopes": noise + 3 * line * random.choice((-1, 1), (prompts, 1, width)),
    }[kind]
    number = np.repeat(np.arange(prompts), tokens)
    return made.reshape(-1, width), number, index.ravel()


def test_an_index_in_the_stream_is_known_and_with_noise_to_the_share_of_its_variance():
    known = held_out_index(*stream("index"))
    assert known["r_squared"] > 1 - 1e-6 and known["error"] < 0.02
    # The entry is the index over its deviation, plus noise of variance 1
    half = held_out_index(*stream("noisy", prompts=60))
    assert half["r_squared"] == pytest.approx(0.5, abs=0.02)
    assert half["r_squared_low"] < 0.5 < half["r_squared_high"]
    assert half["error"] == pytest.approx(np.sqrt(0.5) * np.arange(48).std(), rel=0.03)
    for found in (known, half):
        assert (found["r_squared_low"] > found["null_high"]).all()


def test_noise_is_within_both_nulls():
    found = held_out_index(*stream("noise"))
    assert (found["r_squared"] <= found["null_high"]).all() and found["r_squared"] < 0.01


@pytest.mark.parametrize("kind", ["walk", "slopes"])
def test_a_stream_that_moves_without_knowing_where_is_within_the_smooth_null(kind):
    found = [held_out_index(*stream(kind, 8, 24, 4, seed)) for seed in range(60)]
    beyond = sum(bool(one["r_squared"] > one["null_high"][1]) for one in found)
    # Of 60 draws 3 are expected, and 9 or more have a probability of .003
    assert beyond < 9
    # Each follows the walks of its training prompts, and is wrong about others
    assert np.median([one["r_squared"] for one in found]) < 0


def test_of_few_prompts_nothing_is_beyond_the_smooth_null():
    for prompts in (3, 4, 5):
        found = held_out_index(*stream("index", prompts))
        assert found["r_squared"] > 0.99
        assert found["null_high"][1] == pytest.approx(found["r_squared"], abs=1e-6)
    assert held_out_index(*stream("index", 8))["null_high"][1] < 0.9
    for prompts in (1, 2):
        found = held_out_index(*stream("index", prompts))
        assert all(np.isnan(value).all() for value in found.values())
    empty = np.zeros(0, dtype=int)
    assert np.isnan(held_out_index(np.zeros((0, 3)), empty, empty)["r_squared"])


def slow(vectors, prompts, index, folds):
    """The same by least squares with rows for the penalty, one fit at a time; errors of tokens."""
    x = (vectors - vectors.mean(0)) / vectors.std(0)
    fold = prompts % folds

    def predicted(fitted, asked, penalty):
        means = x[fitted].mean(0), index[fitted].mean()
        rows = np.sqrt(penalty * fitted.sum()) * np.eye(x.shape[1])
        left = np.vstack([x[fitted] - means[0], rows])
        right = np.append(index[fitted] - means[1], np.zeros(len(rows)))
        weights = np.linalg.lstsq(left, right, rcond=None)[0]
        return (x[asked] - means[0]) @ weights + means[1]

    errors = np.zeros(len(index))
    for held in range(folds):
        by_penalty = [
            sum(
                np.square(
                    index[fold == inner]
                    - predicted((fold != held) & (fold != inner), fold == inner, penalty)
                ).sum()
                for inner in range(folds)
                if inner != held
            )
            for penalty in PENALTIES
        ]
        penalty = PENALTIES[np.argmin(by_penalty)]
        errors[fold == held] = index[fold == held] - predicted(fold != held, fold == held, penalty)
    return errors


@pytest.mark.parametrize("width", [6, 200], ids=["narrow", "wider than samples"])
def test_it_is_what_one_fit_at_a_time_gives(width):
    vectors, prompts, index = stream("noisy", 9, 16, width)
    found = held_out_index(vectors, prompts, index, 4)
    errors = np.square(slow(vectors, prompts, index, 4))
    by_prompt = 1 - errors.reshape(9, -1).sum(1) / np.square(np.arange(16) - 7.5).sum()
    assert found["r_squared"] == pytest.approx(by_prompt.mean(), abs=1e-9)
    assert found["error"] == pytest.approx(np.sqrt(errors.mean()), rel=1e-9)
    # Of equally long prompts, Student's interval of the mean; t of 8 degrees of freedom
    half = 2.306004 * by_prompt.std(ddof=1) / 3
    assert found["r_squared_high"] - found["r_squared"] == pytest.approx(half, rel=1e-5)
    assert found["r_squared"] - found["r_squared_low"] == pytest.approx(half, rel=1e-5)


def test_units_and_shifts_of_entries_and_a_constant_one_change_nothing():
    vectors, prompts, index = stream("noisy")
    random = np.random.default_rng(1)
    moved = vectors * random.uniform(1e-3, 1e4, 10) + random.normal(size=10)
    moved = np.hstack([moved, np.full((len(moved), 1), 7e3)])
    for name, value in held_out_index(vectors, prompts, index).items():
        assert_allclose(held_out_index(moved, prompts, index)[name], value, atol=1e-8)


def inputs_of(lengths, layer=0, noise=1.0):
    """Attention inputs whose residual stream has the index in an entry; token ids are random."""
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    made = random_inputs(len(lengths), tokens=max(lengths), valid=valid, layer=layer)
    index = torch.arange(max(lengths)) / max(lengths)
    state = noise * made.residual + index[:, None] * torch.eye(6)[0]
    return replace(made, read_residual=lambda: state.masked_fill(~valid[..., None], torch.nan))


def test_the_measure_leaves_out_the_first_token_and_equal_prompts():
    inputs = inputs_of((30, 22, 30, 1, 25, 28, 30))
    measure = PositionProbe(tokens=16)
    kept = measure.observe(inputs, {}).per_prompt
    assert kept["index"].values.min() == -1 and not (kept["index"] == 0).any()
    # The middles of 16 equal parts of 29 tokens, and 21 and more are sampled too
    assert kept["index"][0, 0].values.tolist()[:4] == [1, 3, 5, 7]
    assert int((kept["index"][3] >= 0).sum()) == 0
    group = measure.conclude(merge([measure.observe(inputs, {})]))
    assert (int(group["probed_prompts"]), int(group["probed_tokens"])) == (6, 96)
    again = [0, 1, 2, 3, 4, 5, 6, 0, 2]
    doubled = replace(
        inputs,
        prompts=torch.arange(9),
        read_residual=lambda: inputs.residual[again],
        **{name: getattr(inputs, name)[again] for name in ("queries", "valid", "tokens")},
    )
    assert measure.conclude(measure.observe(doubled, {})).identical(group)
    with refused("position_probe needs the ids of tokens"):
        measure.observe(replace(inputs, tokens=None), {})


def test_nope_knows_its_place_by_attention_and_the_finding_says_where():
    model, prompts = ri.open_model("reversal/nope"), ri.tasks.make_task("reversal").prompts(12)
    found = ri.position_probe(model, prompts)
    run = ri.analyze(model, prompts, ["position_probe"], experiments=())
    assert run["position_probe"].to_dataset()["r_squared"].equals(found["r_squared"])
    # Layer 0 reads words, which say which side of the separator they are on
    assert found["r_squared"][0] < 0.4 and found["r_squared"].max() > 0.95
    assert float(found["null_high"].max()) < 0.5
    best = int(found["r_squared"].idxmax())
    assert f"where it enters layer {best}" in found.attrs["finding"]
    assert f"{float(found['r_squared'][0]):.2f} [" in found.attrs["finding"]
    (said,) = VIEW.findings(run)
    assert said.sentence == found.attrs["finding"] and said.layer == best
    for given in (found, run):
        (ax,) = ri.plots.position_probe(given).axes
        lines = {line.get_gid(): line for line in ax.lines}
        assert_allclose(lines["r_squared"].get_ydata(), found["r_squared"])
        bands = {band.get_gid(): band for band in ax.collections}
        assert {"shuffled", "smooth", "interval"} <= set(bands)
        drawn = bands["smooth"].get_paths()[0].vertices[:, 1]
        expected = found["null_high"].sel(null="smooth").max()
        assert drawn.max() == pytest.approx(float(expected), abs=1e-9)
    (chart,) = VIEW.charts(run)
    assert chart.name == "position_probe"
    with refused("a probe of positions is what ri.position_probe returns"):
        ri.plots.position_probe(found[["r_squared"]])


def test_where_nothing_is_known_the_finding_says_so_and_two_prompts_are_refused():
    torch.manual_seed(0)
    model = ri.open_model("language/rope")
    prompts = ri.tasks.make_task("language").prompts(8)
    found = ri.position_probe(model, prompts, tokens=40)
    assert found.attrs["finding"].startswith("No layer's residual stream tells much")
    assert int(found["probed_tokens"]) == 320 and found["null_high"].sizes["null"] == 2
    with refused("2 different prompts were given"):
        ri.position_probe(model, [prompts[0], prompts[1], prompts[0]])
    assert DRAWS == 99
