"""CoPE's claims and the scores they stand on: rules on closed forms, recorded runs, and every
figure on tiny trained models.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from scipy import stats
from trained_tiny import trained, without_weights
from verdicts import judged, notes_of, results_of
from verdicts import verdicts_of as of_results

from position_papers.cope import gates
from position_papers.cope.error_tasks import (
    C1,
    C2_ABSOLUTE,
    C3_BALANCED,
    COUNTING,
    FLIP_FLOP,
    SELECTIVE_COPY,
)
from position_papers.cope.errors import Alike, always_the_same, from_record
from position_papers.cope.gates import Chosen, stands_out
from position_papers.cope.other_windows import C5_WINDOWS, OTHER_WINDOWS
from position_papers.cope.paper import PAPER, Options
from position_papers.cope.perplexity import (
    C4,
    C4_KEYS,
    C4_POSITIONS,
    C4_ROPE,
    C5,
    C5_ROPE,
    PERPLEXITY,
)
from position_papers.kit.cache import Cache
from position_papers.kit.experiment import Experiment
from position_papers.kit.judge.claims import FAILS, HOLDS, UNDECIDED, UNMEASURABLE, Verdict
from position_papers.kit.judge.differences import NOTHING, Sample, between, between_rises
from position_papers.kit.perplexities import differences
from position_papers.kit.scores import (
    FREE,
    PLAIN,
    Scored,
    ScoreOptions,
    score_subject,
    score_table,
    unequal_budgets,
)
from position_papers.kit.subjects import subject
from position_papers.training.configuration import TrainingConfiguration, replaced
from position_papers.training.trained import Recorded, recorded_scores
from position_papers.zoo_directory import DIRECTORY
from repo_interp.errors import InputError
from repo_interp.tasks import make_task

SMALL = Options(count=4, counting_count=4, language_count=4, gate_texts=4, draws=4, batch_size=4)
FLIP_FLOP_SIZE = {"length": 8, "first_length": 8, "longest_test": 16}
COPY = {"symbols": 3, "copied": 2, "first_copied": 2, "blanks": 2}
COUNT = {"operations": 6, "fewest": 3, "first_operations": 6}


def made(
    name: str,
    seeds,
    prompts=None,
    metric: str = "exact match",
    layout: str = "",
    task: str = "flip_flop",
    **options,
) -> Scored:
    """A checkpoint with given scores: `seeds` [seed, test_set] by test set, `prompts` [test_set,
    prompt] of the first.
    """
    stated = replaced(
        TrainingConfiguration(task=task), {"scheme": layout or name, "task_options": options}
    )
    runs = []
    for seed in range(len(next(iter(seeds.values())))):
        means = {key: one[seed] for key, one in seeds.items()}
        runs.append(Recorded(seed, metric, 100, 10, means, replaced(stated, {"seed": seed})))
    live = None
    if prompts is not None:
        values = np.stack([prompts[key] for key in seeds])[None]
        tokens = [int(key) if key.isdigit() else 8 for key in seeds]
        live = xr.Dataset(
            {"score": (("method", "test_set", "prompt"), values), "tokens": ("test_set", tokens)},
            coords={"method": [PLAIN], "test_set": list(seeds)},
        )
    return Scored(name, layout or name, stated, 32, metric, live, tuple(runs))


def verdicts_of(experiment: Experiment, data) -> tuple[Verdict, ...]:
    """What the rules say of what was measured."""
    return tuple(judged(experiment.tabulate(data)))


# ---- comparing scores ----------------------------------------------------------------------------


def sample(*seeds: float, prompts=(), count: int = 100, is_share: bool = True) -> Sample:
    """Scores of seeds, and of the prompts of the first where they are kept."""
    return Sample(np.array(seeds), np.array(prompts), count, is_share)


def test_the_error_of_a_difference_is_over_prompts_then_at_most():
    one, other = np.array([1.0, 1, 0, 1]), np.array([0.0, 1, 0, 1])
    prompts = between(sample(0.75, prompts=one, count=4), sample(0.5, prompts=other, count=4))
    found = prompts.margin, prompts.standard_error
    assert_allclose(found, (0.25, np.std(one - other, ddof=1) / 2))
    bound = between(sample(0.5), sample(0.1, prompts=one, count=4))
    assert bound.over == "100 and 4 prompts" and not bound.exceeds()
    unknown = between(sample(3.0, is_share=False), sample(1.0, is_share=False))
    assert unknown.over == NOTHING and not unknown.exceeds()
    # Wald's would be 0
    z = stats.norm.isf(0.025)
    assert sample(0.0, prompts=np.zeros(100)).spread == pytest.approx(z**2 / (100 + z**2) / 2)


def test_rises_are_compared_seed_by_seed_or_with_both_lengths_errors():
    short, long = np.array([2.0, 2.2, 2.1, 2.3]), np.array([2.5, 2.9, 2.6, 2.8])

    def rise(more) -> tuple[Sample, Sample]:
        return tuple(
            sample(values.mean(), prompts=values, count=4, is_share=False)
            for values in (short, long + more)
        )

    for more, error in ((1, 0), (np.array([0, 2, 0, 2]), np.std([0, 2, 0, 2], ddof=1) / 2)):
        found = between_rises(rise(more), rise(0))
        assert_allclose([found.margin, found.standard_error], [1, error], atol=1e-12)
    first, second = sample(1.0, 2, is_share=False), sample(3.0, 5, is_share=False)
    assert between_rises((first, second), (first, first)).margin == pytest.approx(2.5)


# ---- the rules -----------------------------------------------------------------------------------


def marks_separators(trained: Chosen) -> bool:
    return gates.C6_SEPARATORS.rule.holds({gates.REACHED: trained.chance})


def stays_within(trained: Chosen) -> bool:
    return gates.C6.rule.holds({gates.WITHIN: trained.observed, gates.KEPT: trained.chance})


def test_a_head_is_chosen_on_one_half_and_judged_on_the_other():
    observed = np.full((8, 2, 2), 0.1)
    observed[::2, 0, 1] = 0.9  # only where it is chosen
    observed[:, 1, 0] = 0.5
    control = np.full((8, 2, 2), 0.1)
    chosen = stands_out(observed, control, np.zeros((8, 2, 2)))
    assert chosen.place == (0, 1)
    assert_allclose([chosen.observed, chosen.control], 0.1)
    assert not stays_within(chosen)
    observed[1::2, 0, 1] = 0.8
    chosen = stands_out(observed, control, np.zeros((8, 2, 2)))
    assert marks_separators(chosen) and stays_within(chosen)
    # what it was chosen by, and what its numbers are means of
    assert np.unravel_index(chosen.margins.argmax(), (2, 2)) == chosen.place
    assert_allclose(chosen.margins, (observed - control)[::2].mean(0))
    assert_allclose(chosen.by_prompt.mean(1), (chosen.observed, chosen.control, chosen.chance))


def test_a_head_that_chance_reaches_or_that_is_nowhere_does_not_stand_out():
    observed = np.full((6, 1, 1, 2), 0.9)
    observed[..., 1] = np.nan
    chosen = stands_out(observed, observed / 3, np.full(observed.shape, 0.3))
    assert chosen.place == (0, 0, 0)
    assert not marks_separators(chosen) and not stays_within(chosen)
    assert stands_out(np.full((6, 1, 1), np.nan), observed[..., 0], observed[..., 0]) is None
    assert stands_out(observed[:2], observed[:2], observed[:2]) is None


def alike(right: dict[str, dict], floor: float = 90.0, title: str = "task", **fields) -> Alike:
    """Checkpoints by scheme with the scores of their seeds by test set; the most frequent answer
    everywhere errs in `floor` per cent.
    """
    scored = [made(f"{name}_1", seeds, layout=name, **fields) for name, seeds in right.items()]
    return Alike(title, scored, {key: floor for each in scored for key in each.test_sets})


@pytest.mark.parametrize(("count", "outcome"), [(2, UNDECIDED), (5, HOLDS)])
def test_flip_flop_is_judged_on_the_sparse_set_over_as_many_seeds_as_there_are(count, outcome):
    off = np.linspace(-0.01, 0.01, count)

    def judged(cope_sparse, names=("cope", "rope", "learned")):
        right = {"cope": cope_sparse + off, "rope": 0.8 + 2 * off, "learned": 0.75 - 2 * off}
        rows = {
            name: {"in_distribution": [1.0] * count, "sparse": right[name].tolist()}
            for name in names
        }
        return verdicts_of(FLIP_FLOP, [alike(rows, metric="accuracy of reads")])

    verdict, longer = judged(0.96)
    assert longer.outcome == UNMEASURABLE and "long_sparse" in notes_of(longer)
    assert (verdict.claim, verdict.outcome, verdict.estimate.n) == (C1, outcome, 100)
    assert verdict.interval.over == f"{count} seeds"
    assert f"over {count} paired seeds" in verdict.notes[1]
    shown = verdict.estimate.value, verdict.interval.spread
    assert_allclose(shown, (4, 100 * off.std(ddof=1)))
    assert judged(0.6)[0].outcome == FAILS
    assert judged(0.96, ("cope",))[0].outcome == UNMEASURABLE
    assert "no checkpoint of learned" in notes_of(judged(0.96, ("cope", "rope"))[0])


def test_a_rival_without_scores_is_not_one_that_was_not_given():
    """Found: of a rival that was given, but ends at the training length, it was said that none was
    given.
    """
    right = {"cope": [1.0, 0.99], "rope": [0.7, 0.72], "learned": [np.nan, np.nan]}
    ends = {
        name: {"in_distribution": [1.0] * 2, "sparse": [0.9] * 2, "long_sparse": values}
        for name, values in right.items()
    }
    note = notes_of(verdicts_of(FLIP_FLOP, [alike(ends)])[1])
    assert "learned_1 without a score on long_sparse" in note and "was given" not in note


def test_errors_are_judged_where_a_scheme_learned_the_task_and_some_are_large():
    """Found: three and five variables were undecided, "114 seeds would decide", where no scheme had
    learned to count.
    """
    sets = ("in_distribution", "longer", "shorter")

    def judged(cope, rope, floor=90.0, sets=sets):
        given = {"cope": cope, "rope": rope}
        right = {name: {key: [value] for key in sets} for name, value in given.items()}
        return verdicts_of(COUNTING, [alike(right, floor)])

    first = [(verdict.claim.label, verdict.outcome) for verdict in judged(1.0, 0.5)[:3]]
    assert first == [("C3", HOLDS), ("C3 (contexts)", HOLDS), ("C3 (contexts)", HOLDS)]
    easy = judged(1.0, 0.99)[0].notes
    assert "too easy" in easy[0] and "1 points below rope" in easy[1]
    for rope, is_ceiling in ((0.97, True), (0.9, False)):
        assert ("a ceiling" in notes_of(judged(1.0, rope)[0])) is is_ceiling
    control = "rope 70 %, always the most frequent answer 82 %"
    assert judged(0.6, 0.3, 82.0)[0].estimate.control == control
    unlearned = judged(0.6, 0.3, 78.0)
    assert {verdict.outcome for verdict in unlearned} == {UNMEASURABLE}
    assert "no scheme learned the task, errors in distribution: cope 40 %" in unlearned[0].notes[0]
    balanced = judged(0.6, 0.3, sets=(*sets, "balanced_in_distribution"))
    assert (balanced[3].claim, balanced[3].outcome) == (C3_BALANCED, HOLDS)


def test_the_most_frequent_answer_is_scored_as_a_model_is():
    counting, flip_flop, copy = (
        make_task(name) for name in ("counting", "flip_flop", "selective_copy")
    )
    prompts = counting.prompts(50)
    counts = Counter(prompt.answers for prompt in prompts)
    assert always_the_same(counting, prompts) == max(counts.values()) / 50
    assert 0.4 < always_the_same(flip_flop, flip_flop.prompts(50)) < 0.6
    assert always_the_same(copy, copy.prompts(5)) == 0


def test_selective_copy_needs_no_errors_of_one_and_failure_of_the_other():
    sets = ("in_distribution", "dense", "sparse")

    def judged(**right):
        rows = {
            name: {key: [value] for key, value in zip(sets, values, strict=True)}
            for name, values in right.items()
        }
        return verdicts_of(SELECTIVE_COPY, [alike(rows, 100.0, task="selective_copy")])

    for cope, rope, outcome in (
        ((1, 1, 0.995), (0.6, 0, 0.1), HOLDS),
        ((1, 1, 0.9), (0.6, 0, 0.1), FAILS),
        ((1, 1, 1), (0.6, 0.9, 0.1), FAILS),
    ):
        assert judged(cope=cope, rope=rope)[0].outcome == outcome
    worst, *absolute = judged(cope=(1, 0.98, 1), rope=(0.6, 0, 0), learned=(0.9, 0.1, np.nan))
    assert worst.estimate.value == pytest.approx(2)
    assert {each.claim for each in absolute} == {C2_ABSOLUTE}
    assert [each.outcome for each in absolute] == [HOLDS, UNMEASURABLE]


def language(rows: dict[str, tuple[float, ...]], **options) -> list[Scored]:
    """Language models with log perplexities by length 32, 64, 128, on four windows of each."""
    windows = np.array([-0.3, -0.1, 0.1, 0.3])
    scored = []
    for name, values in rows.items():
        seeds = {str(32 << place): [value] for place, value in enumerate(values)}
        prompts = {key: value[0] + windows for key, value in seeds.items()}
        scored.append(
            made(
                name,
                seeds,
                prompts,
                "log perplexity",
                name.split("_")[0],
                "language",
                length=32,
                longest_test=128,
            )
        )
    return scored


def test_perplexities_in_order_and_the_smallest_rise():
    def judged(rope):
        rows = {"cope": (2.0, 2.1, 2.2), "rope": rope, "learned": (2.2,), "alibi": (2.1, 2.1, 2.05)}
        return {each.claim: each for each in verdicts_of(PERPLEXITY, language(rows))}

    found = judged((2.1, 2.5, 3.5))
    ordered, degrades = found[C4_ROPE], found[C5_ROPE]
    assert (ordered.outcome, degrades.outcome) == (HOLDS, HOLDS)
    assert found[C4].outcome == found[C5].outcome == UNMEASURABLE
    assert "CoPE with every gate open" in found[C4].notes[0] and "alibi" in notes_of(degrades)
    assert_allclose((ordered.estimate.value, degrades.estimate.value), (np.exp(2), 0.2))
    worse = judged((1.9, 1.9, 1.95))
    assert (worse[C4_ROPE].outcome, worse[C5_ROPE].outcome) == (FAILS, FAILS)
    alone = verdicts_of(PERPLEXITY, language({"cope": (2.0, 2.1)}))
    assert {verdict.outcome for verdict in alone} == {UNMEASURABLE}


def test_c5_is_judged_again_on_windows_that_every_seed_has_of_its_own():
    """Windows move all rises of a seed alike, so that only differences by seed say something."""

    def judged(less):
        rises = np.array([0.3, -0.2, 0.1])
        models = []
        for name, gates_of, above in (("cope", "keys", 0.0), ("open", "open", np.array(less))):
            ends = (2.0 + rises + above).tolist()
            means = {"32": [2.0] * 3, "128": ends}
            scored = made(name, means, None, "log perplexity", "cope", "language")
            options = {"scheme_options": {"gates": gates_of}}
            configuration = replaced(scored.configuration, options)
            models.append(dataclasses.replace(scored, configuration=configuration))
        (found,) = verdicts_of(OTHER_WINDOWS, models)
        return found

    holds = judged([0.03, 0.04, 0.05])
    assert (holds.claim, holds.outcome) == (C5_WINDOWS, HOLDS)
    assert_allclose(holds.estimate.value, -0.04)
    assert judged([-0.03, -0.04, -0.05]).outcome == FAILS
    assert judged([0.03, -0.04, 0.05]).outcome == UNDECIDED
    (alone,) = verdicts_of(OTHER_WINDOWS, language({"cope": (2.0, 2.1)}))
    assert alone.outcome == UNMEASURABLE and "every gate open" in alone.notes[0]


def test_another_method_of_the_same_models_is_compared_with_them_seed_by_seed():
    """Found: drawn with the spread of independent models, so that a method which changes nothing
    had an error.
    """
    seeds, rises = np.array([2.0, 2.3, 2.6]), np.array([0.1, 0.2, 0.3])
    live = {
        seed: xr.Dataset(
            {
                "score": (("method", "test_set", "prompt"), values[:, None, None] + [-0.5, 0.5]),
                "tokens": ("test_set", [32]),
            },
            {"method": [PLAIN, "yarn"], "test_set": ["32"]},
        )
        for seed, values in enumerate(np.stack([seeds, seeds + rises], 1))
    }
    recorded = made("rope", {"32": seeds.tolist()}, metric="log perplexity", task="language")
    rope = dataclasses.replace(recorded, live=live.pop(0), other_seeds=live)
    table = xr.Dataset(coords={"checkpoint": ["plain", "yarn"], "test_set": [32]})
    drawn = differences([(rope, PLAIN), (rope, "yarn")], rope, "RoPE", table)
    assert_allclose(drawn["difference"], [[0], [rises.mean()]], atol=1e-12)
    error = rises.std(ddof=1) / np.sqrt(3)
    assert_allclose(drawn["difference_error"], [[0], [error]], atol=1e-12)


def test_sixteen_positions_suffice_where_perplexity_hardly_rises():
    def verdict(log_perplexity):
        few, most = language({"cope_16": (log_perplexity,), "cope": (2.0,)})
        few = dataclasses.replace(
            few, configuration=replaced(few.configuration, {"scheme_options": {"p_max": 16}})
        )
        verdicts = verdicts_of(PERPLEXITY, [few, most])
        return next(each for each in verdicts if each.claim is C4_POSITIONS)

    assert verdict(2.005).outcome == HOLDS
    assert verdict(2.05).outcome == FAILS
    assert verdict(2.05).estimate.value == pytest.approx(np.exp(2.05))


@pytest.mark.parametrize(
    ("opened", "verdicts"),
    [((2.1, 2.5), [HOLDS, HOLDS]), ((2.004, 2.104), [FAILS, FAILS]), ((1.9, 2.5), [FAILS, HOLDS])],
)
def test_the_papers_relative_positions_are_cope_with_open_gates(opened, verdicts):
    """They are in every layer CoPE by name; C4 and C5 are of the one with gates, against those."""
    shorter = {"cope_open": opened, "cope": (2.0, 2.1), "cope_sep": (2.0, 2.3)}
    scored = language(shorter | {"rope": (2.1, 2.5), "learned": (2.2,)})
    for place, gates_of in enumerate(("open", "keys", "separate_keys")):
        options = {"scheme_options": {"p_max": 64, "gates": gates_of}}
        configuration = replaced(scored[place].configuration, options)
        scored[place] = dataclasses.replace(scored[place], configuration=configuration)
    found = {verdict.claim: verdict for verdict in verdicts_of(PERPLEXITY, scored)}
    keys = found.pop(C4_KEYS)
    assert (keys.checkpoint, keys.outcome) == ("cope_sep", FAILS)
    assert {verdict.checkpoint for verdict in found.values()} == {"cope"}
    wanted = [*verdicts, HOLDS, HOLDS, UNMEASURABLE]
    claims = (C4, C5, C4_ROPE, C5_ROPE, C4_POSITIONS)
    assert [found[claim].outcome for claim in claims] == wanted
    _, variants = PERPLEXITY.draw(scored)
    assert variants.data["difference"].attrs["from"] == "open gates"


def test_unequal_budgets_are_named():
    one = TrainingConfiguration(task="flip_flop")
    assert unequal_budgets({"a": one, "b": replaced(one, {"seed": 3, "scheme": "rope"})}) == ""
    said = unequal_budgets({"a": one, "b": replaced(one, {"steps": 7}), "c": one})
    assert said == "budgets differ: steps 1000 (a, c), 7 (b)"


@pytest.mark.parametrize(
    "option", dataclasses.fields(TrainingConfiguration), ids=lambda option: option.name
)
def test_every_field_is_of_the_budget_or_free(option):
    """Found: feed_forward, kv_heads, precision, clip and six others differed without a word."""
    others = {
        **{"task": "counting", "task_size": "paper", "continue_from": "somewhere"},
        **{"task_options": {"longest": 4}, "scheme_options": {"p_max": 8}, "kv_heads": 2},
        **{"precision": "bfloat16", "execution": "compiled", "device": "cuda"},
        **{"feed_forward": 1024, "scheme": "rope", "adapter_from": 1, "deterministic": False},
        **{"index_share_until": 0.5, "curriculum": 0.5, "final_share": 0.5},
        **{"width": 128, "heads": 8, "beta_1": 0.5, "beta_2": 0.5},
    }
    one = TrainingConfiguration(task="flip_flop")
    # an adapter asks for a checkpoint beside
    with_base = {"continue_from": "somewhere"} if option.name == "adapter" else {}
    base = replaced(one, with_base)
    other = others[option.name] if option.name in others else 1 + getattr(one, option.name)
    said = unequal_budgets({"a": base, "b": replaced(base, {option.name: other})})
    named = {part.split()[0] for part in said.removeprefix("budgets differ: ").split("; ") if part}
    # both follow from another field where they are left out
    following = {"width": {"feed_forward"}, "heads": {"kv_heads"}}.get(option.name, set())
    assert named == (set() if option.name in FREE else {option.name} | following)


def test_a_width_that_is_left_out_is_the_width_that_it_means():
    one = TrainingConfiguration(task="flip_flop", width=64, heads=4)
    same = replaced(one, {"kv_heads": 4, "feed_forward": 176})
    assert unequal_budgets({"a": one, "b": same}) == ""


# ---- trained checkpoints -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    text = root / "corpus"
    text.mkdir()
    random = np.random.default_rng(0)
    for number in range(20):
        words = random.choice(["the", "cat", "sees", "a", "tree"], (10, 3, 5))
        lines = ("\n".join(" ".join(line) + "." for line in part) for part in words)
        (text / f"{number:02d}.txt").write_text("\n\n".join(lines))
    options = {"corpus": str(text), "tokens": 280, "length": 24, "longest_test": 48}
    sizes = {"flip_flop": FLIP_FLOP_SIZE, "counting": COUNT, "selective_copy": COPY}
    for task, size in (sizes | {"language": options}).items():
        for scheme in ("cope", "rope", "learned"):
            place = root / task / scheme
            if scheme != "learned" or task in ("flip_flop", "counting"):
                trained(place, task, scheme, task_options=size)
            if task == "flip_flop":
                trained(place / "seed-1", task, scheme, task_options=size, seed=1)
            if task == "selective_copy" and place.is_dir():
                without_weights(place)
    recorded = root / "language" / "recorded"
    shutil.copytree(root / "language" / "rope", recorded)
    without_weights(recorded)
    return root


def names(root: Path) -> dict[str, str]:
    return {
        file.parent.relative_to(root).as_posix(): str(file.parent)
        for file in sorted(root.glob("*/*/training.toml"))
    }


def test_recorded_runs_of_a_directory_and_its_seeds(root, tmp_path):
    runs = recorded_scores(root / "flip_flop" / "cope")
    assert [(run.seed, run.prompts, run.steps) for run in runs] == [(0, 4, 2), (1, 4, 2)]
    stated = json.loads((root / "flip_flop" / "cope" / "seed-1" / "scores.json").read_text())
    assert runs[1].means["sparse"] == stated["test_sets"]["sparse"]
    assert recorded_scores(tmp_path) == []
    assert np.isnan(recorded_scores(root / "flip_flop" / "learned")[0].means["long_sparse"])
    (tmp_path / "scores.json").write_text("{}")
    with pytest.raises(InputError, match=r"no training\.toml"):
        recorded_scores(tmp_path)
    (tmp_path / "training.toml").write_text('task = "flip_flop"\n')
    with pytest.raises(InputError, match="no record of scores"):
        recorded_scores(tmp_path)


def scored_at(path: Path, options: ScoreOptions) -> Scored:
    return score_subject(subject("given", str(path)), options, Cache())


def test_live_scores_are_those_that_training_recorded(root):
    scored = scored_at(root / "flip_flop" / "cope", ScoreOptions(count=4, language_count=4))
    recorded = recorded_scores(root / "flip_flop" / "cope")
    for name in scored.test_sets:
        assert_allclose(scored.sample([name]).seeds, [record.means[name] for record in recorded])
    assert score_table([scored])["score"].shape == (1, 6, 2)
    assert scored.sample(["sparse", "dense"]).count == 8
    own, asked = subject("given", str(root / "flip_flop" / "cope")), ((4, 0), (5, 0), (4, 1))
    kept = [
        from_record(own, ScoreOptions(count=count, seed=seed)).has_weights for count, seed in asked
    ]
    assert kept == [False, True, True]


def test_scores_of_other_weights_are_refused_and_those_of_unknown_ones_are_measured(root, tmp_path):
    options = ScoreOptions(count=4)
    place = shutil.copytree(root / "counting" / "cope", tmp_path / "cope")
    scores, weights = place / "scores.json", place / "model.safetensors"
    own, stated = subject("given", place), json.loads(scores.read_text())
    assert not from_record(own, options).has_weights
    shutil.copy(root / "counting" / "learned" / weights.name, weights)
    with pytest.raises(InputError, match=r"scores\.json has the scores of other weights"):
        from_record(own, options)
    del stated["weights"]
    scores.write_text(json.dumps(stated))
    assert from_record(own, options).has_weights
    assert recorded_scores(without_weights(place))[0].means == stated["test_sets"]


def test_records_of_a_zoo_are_of_the_weights_in_its_registry(tmp_path):
    options, name = ScoreOptions(count=4), "flip_flop/cope"
    assert not from_record(subject(name, DIRECTORY / name), options).has_weights
    place = shutil.copytree(DIRECTORY / name, tmp_path / name)
    for file in (
        "registry.csv",
        "flip_flop/runs.jsonl",
        "flip_flop/tokenizer.json",
        "flip_flop/tokenizer_config.json",
    ):
        shutil.copy(DIRECTORY / file, tmp_path / file)
    assert not from_record(subject(name, place), options).has_weights
    shutil.copy(DIRECTORY / "flip_flop" / "cope_256" / "model.safetensors", place)
    assert from_record(subject(name, place), options).has_weights


def test_records_alone_are_enough_and_too_little_is_refused(root, tmp_path):
    scored = scored_at(root / "selective_copy" / "cope", ScoreOptions())
    assert (
        scored.live is None and scored.training_length == 8 and scored.sample(["dense"]).count == 4
    )
    (tmp_path / "training.toml").write_text('task = "flip_flop"\n')
    with pytest.raises(InputError, match="neither weights nor"):
        scored_at(tmp_path, ScoreOptions())


def results_on(root: Path, cache: Cache, experiments=PAPER.experiments):
    subjects = [subject(name, path, str(root / "corpus")) for name, path in names(root).items()]
    return [
        result
        for experiment in experiments
        for result in results_of(experiment, subjects, SMALL, cache)
    ]


def test_every_figure_and_claim_of_tiny_checkpoints(root, tmp_path):
    results = results_on(root, Cache(tmp_path))
    drawings = {drawing.name: drawing for result in results for drawing in result.drawings}
    # the tiny runs keep their logs
    tasks = ("counting", "flip_flop", "language")
    assert list(drawings) == [
        "flip_flop_8",
        "selective_copy",
        "counting_6",
        "perplexity",
        "position_attention_cope",
        "gates_cope",
        *(f"learning_curves_{task}" for task in tasks),
    ]
    verdicts = [verdict for result in results for verdict in of_results(result)]
    assert {verdict.claim for verdict in verdicts} == set(PAPER.claims)
    silent = {verdict.claim for verdict in verdicts if verdict.outcome == UNMEASURABLE}
    assert silent >= {C4, C4_POSITIONS}, "no third, no p_max"
    for drawing in drawings.values():
        drawing.figure.draw_without_rendering()
    shown = drawings["position_attention_cope"].data["position_attention"].values
    assert_allclose(np.nanmax(shown, axis=1), 1)
    # not the one recorded
    compared = drawings["perplexity"].data["checkpoint"].values.tolist()
    assert compared == ["language/cope", "language/rope"]
    measured = set(tmp_path.glob("*-*.nc"))
    undrawn = [
        dataclasses.replace(experiment, draw=lambda data: iter(()))
        for experiment in PAPER.experiments
    ]
    again = results_on(root, Cache(tmp_path), undrawn)
    assert [verdict for result in again for verdict in of_results(result)] == verdicts
    assert set(tmp_path.glob("*-*.nc")) == measured
