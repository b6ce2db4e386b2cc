"""Experiments over training seeds: what single seeds give, put together, and real seeds of the zoo
beside themselves alone.
"""

from __future__ import annotations

import platform
import shutil

import numpy as np
import pytest
import xarray as xr
from trained_tiny import left_by_training
from verdicts import results_of, verdicts_of

from position_papers.kit.cache import Cache
from position_papers.kit.experiment import Drawing, Experiment, Needs, each
from position_papers.kit.judge.claims import (
    FAILS,
    HOLDS,
    UNMEASURABLE,
    Claim,
    Kind,
    Reason,
    Verdict,
    evidence,
)
from position_papers.kit.judge.rules import AtLeast
from position_papers.kit.scores import ScoreOptions, score_subject
from position_papers.kit.seeds import over_seeds
from position_papers.kit.subjects import records_of, seeds_of, subject
from position_papers.training.trained import on_texts_of_seed_0, recorded_scores
from position_papers.zoo_directory import DIRECTORY as ZOO
from repo_interp.checkpoint_files.shipped import zoo_path

CLAIM = Claim("X1", "the share is large", "nowhere", "0.9", AtLeast("the share", 0.5), "part")


def experiment(shares: dict[int, float], silent: tuple[int, ...] = ()) -> Experiment:
    """One whose number is known by seed; of the seeds in `silent` nothing can be said."""

    def measure(subjects, options, cache):
        return xr.Dataset(
            {"share": shares[subjects[0].configuration.seed]},
            attrs={"checkpoint": subjects[0].name},
        )

    def judge(data):
        share = float(data["share"])
        yield evidence(CLAIM, data.attrs["checkpoint"], "share", {"the share": share}, share)

    def draw(data):
        yield Drawing("never", None, "Shares.", data)  # pyright: ignore[reportArgumentType]

    def why_not(of, options, cache):
        return ("it is silent",) if of.configuration.seed in silent else ()

    needs = Needs(each(lambda of: True), "none", why_not=why_not)
    return over_seeds(
        Experiment("shares", (CLAIM,), needs, measure, judge, draw), lambda data: data[["share"]]
    )


def seeded(directory, name: str, seeds: tuple[int, ...], of: str = "language/rope"):
    """A checkpoint of the zoo with copies of itself that say they are other seeds."""
    left_by_training(of, directory)
    for seed in seeds:
        other = directory / f"seed-{seed}"
        shutil.copytree(directory, other, ignore=shutil.ignore_patterns("seed-*"))
        text = (other / "training.toml").read_text()
        (other / "training.toml").write_text(text.replace("seed = 0", f"seed = {seed}"))
    return subject(name, directory)


def test_a_claim_holds_in_every_seed_or_not(tmp_path):
    mine = seeded(tmp_path / "mine", "mine", (1, 10))
    of_seeds = {seed: of.configuration.seed for seed, of in seeds_of(mine).items()}
    assert of_seeds == {0: 0, 1: 1, 10: 10}
    shares = {0: 0.6, 1: 0.8, 10: 1.0}
    (result,) = results_of(experiment(shares), [mine])
    (found,) = verdicts_of(result)
    known = found.estimate
    assert (found.claim, found.outcome) == (CLAIM, HOLDS)
    assert (known.seeds, known.n, known.measured) == (3, 3, "share")
    assert (known.value, found.interval.spread) == (pytest.approx(0.8), pytest.approx(0.2))
    assert found.reasons == (
        Reason(Kind.SEEDS, count=3, of=3),
        Reason(Kind.NOTE, "holds: 0 (0.6), 1 (0.8), 10 (1)"),
    )
    assert result.drawings[0].data["share"].to_series().to_dict() == shares
    (found,) = verdicts_of(*results_of(experiment(shares | {1: 0.4}), [mine]))
    assert found.outcome == FAILS and found.reasons[0] == Reason(Kind.SEEDS, count=2, of=3)
    assert found.notes == ("holds: 0 (0.6), 10 (1)", "fails: 1 (0.4)")


def test_seeds_that_say_nothing_do_not_count(tmp_path):
    mine, shares = seeded(tmp_path / "mine", "mine", (1, 2)), {0: 0.6, 1: 0.1, 2: 0.8}

    def found(*silent: int) -> Verdict:
        return verdicts_of(*results_of(experiment(shares, silent), [mine]))[0]

    assert (found(1).outcome, found(1).estimate.seeds) == (HOLDS, 2)
    assert found(1).notes[-1] == "not measurable: 1 (it is silent)"
    assert (found(1, 2).outcome, found(1, 2).estimate.value) == (HOLDS, 0.6)
    assert found(0, 1, 2).outcome == UNMEASURABLE


def test_a_directory_of_seeds_alone_is_the_first_of_them_with_the_others(tmp_path):
    """As `train --seeds 3,4 --out DIR` leaves it: DIR itself holds nothing."""
    home = tmp_path / "mine"
    seeded(home / "all", "one", (3, 4), "reversal/repo")
    for seed in (3, 4):
        (home / "all" / f"seed-{seed}").rename(home / f"seed-{seed}")
    shutil.rmtree(home / "all")
    mine = subject("mine", home)
    assert mine.path.endswith("seed-3") and records_of(mine) == home
    scored = score_subject(mine, ScoreOptions(count=2), Cache())
    assert list(seeds_of(mine)) == [3, 4] and scored.sample(["2"]).seeds.size == 2


def test_other_seeds_of_a_language_model_are_scored_on_the_texts_of_the_first():
    """Found: training scores every seed on other windows, whose perplexities differ by more than
    seeds do.
    """
    options = ScoreOptions(language_count=2)
    together = score_subject(subject("mine", zoo_path("language/rope")), options, Cache())
    for seed in (1, 2):
        (run,) = (run for run in together.recorded if run.seed == seed)
        alone = score_subject(
            subject("alone", zoo_path(f"language/rope/seed-{seed}")), options, Cache()
        )
        for name in alone.test_sets:
            assert run.means[name] == float(
                alone.live["score"].sel({"method": "plain", "test_set": name}).mean()
            )
    without = score_subject(subject("records", ZOO / "language" / "nope"), options, Cache())
    assert [run.seed for run in without.recorded] == [0]


def test_a_seed_without_weights_counts_by_what_was_recorded_on_the_texts_of_the_first():
    """Found: means over 64 windows stood beside means over the 2 that were asked for, and windows
    differ by more than seeds do.
    """
    learned = subject("learned", zoo_path("language/learned"))
    for count, seed, counted in ((2, 0, [0, 1, 2]), (2, 1, [0]), (65, 0, [0])):
        runs = score_subject(
            learned, ScoreOptions(language_count=count, seed=seed), Cache()
        ).recorded
        assert [run.seed for run in runs] == counted
        for other in runs[1:]:
            assert other.means == {
                "256": pytest.approx(np.mean(other.same_texts["scores"]["256"][:count]))
            }
    runs = recorded_scores(zoo_path("language/learned"))
    assert (
        on_texts_of_seed_0(runs[1], "2.7.18", 2) is None
        and on_texts_of_seed_0(runs[0], platform.python_version(), 2) is None
    )
