"""RePo's claims: rules on positions whose answer is known, the cost at the paper's size, and the
experiments end to end.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose
from scipy.stats import spearmanr
from task_tokenizers import tokenizer
from trained_tiny import left_by_training, trained
from transformers import LlamaConfig, LlamaForCausalLM
from verdicts import judged, notes_of, results_of, unmeasured, verdict, verdicts_of

from position_papers.kit import learned_positions
from position_papers.kit.cache import Cache
from position_papers.kit.experiment import run
from position_papers.kit.judge.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNMEASURABLE,
    Interval,
    Kind,
    Reason,
    Verdict,
    together,
)
from position_papers.kit.judge.differences import Sample, share_difference
from position_papers.kit.paper_directory import write_paper
from position_papers.kit.scores import Scored
from position_papers.kit.subjects import Given, subject
from position_papers.repo import attention, causes, chunks, haystack, mirror, ranges, segments
from position_papers.repo.checkpoints import longest_trained, needles, reads_text
from position_papers.repo.chunks import PATTERNS, same_as_claimed
from position_papers.repo.efficiency import EFFICIENCY, OLMO_2, configuration, counts
from position_papers.repo.haystack import HAYSTACK
from position_papers.repo.mirror import MIRRORS, QUANTITIES, Mirror, flatness
from position_papers.repo.needles import Searched, found_without_positions, search
from position_papers.repo.options import Options
from position_papers.repo.paper import PAPER
from position_papers.repo.ranges import FAR_BELOW, GROWS, R5, UNEVEN, spreading
from position_papers.repo.reversal import REVERSAL
from position_papers.repo.segments import SEGMENTS, prompts_for
from position_papers.training.trained import recorded_scores
from repo_interp.models.checkpoints import save
from repo_interp.models.reposition import reposition
from repo_interp.shipped import zoo_path
from repo_interp.tasks import make_task

TINY = Options(
    prompts=2,
    score_prompts=2,
    controls=1,
    example_words=4,
    efficiency_layers=3,
    efficiency_width=32,
    efficiency_heads=2,
    efficiency_context=8,
    efficiency_tokens=2,
    efficiency_rounds=2,
)
WORDS = ["a", "b", "a", "c"]
"""Four words, one of them twice, then their reverse."""
SOURCE, COPY = [3, 2, 1, 0], [4, 5, 6, 7]
TEXT = [*WORDS, *reversed(WORDS)]


# ---- the rules -----------------------------------------------------------------------------------


def measured(positions) -> Mirror:
    """The mirror that the positions of TEXT make."""
    return mirror.mirror(np.asarray(positions, dtype=float), TEXT, SOURCE, COPY)


def mirrors(measured: Mirror) -> bool:
    return MIRRORS.holds({name: getattr(measured, kind) for kind, name in QUANTITIES.items()})


def test_positions_that_run_back_mirror():
    found = measured([0, 1, 2, 3, 3, 2, 1, 0])
    assert (found.copies, found.elsewhere) == (0, 2)
    assert found.correlation == pytest.approx(1)
    assert mirrors(found)


def test_a_position_per_word_is_no_mirror_though_every_copy_has_the_position_of_its_source():
    by_word = np.array([{"a": 0.0, "b": 5.0, "c": 9.0}[word] for word in TEXT])
    found = measured(by_word)
    assert found.copies == found.elsewhere == 0
    assert found.correlation == pytest.approx(1)
    assert not mirrors(measured(by_word + 0.1 * np.sin(np.arange(8.0) ** 2)))


def test_the_index_and_a_constant_are_no_mirrors():
    assert measured(range(8)).correlation == pytest.approx(-1)
    assert not mirrors(measured(range(8)))
    assert not mirrors(measured(np.zeros(8)))


def test_mirror_distances_are_those_of_a_loop():
    z = np.random.default_rng(0).normal(size=8)
    distances: dict[str, list[float]] = {"copies": [], "random": [], "elsewhere": []}
    for place, copy in enumerate(COPY):
        for source in SOURCE:
            kind = "elsewhere" if source != SOURCE[place] else "copies"
            kind = kind if TEXT[copy] == TEXT[source] else "random"
            distances[kind].append(abs(z[copy] - z[source]))
    assert_allclose(measured(z)[:3], [np.mean(each) for each in distances.values()])
    assert Mirror._fields == tuple(QUANTITIES) == (*distances, "correlation")


def test_flatness_compares_with_as_many_consecutive_words():
    z = np.array([5.0, 5.5, 0, 1, 2, 3, 4])
    assert flatness(z, [0, 1], range(2, 7)) == pytest.approx(0.5)
    assert flatness(np.arange(7.0), [0, 1], range(2, 7)) == pytest.approx(1)
    assert np.isnan(flatness(np.array([1.0, 2, 3, 3, 3]), [0, 1], [2, 3, 4]))


def test_spreading_wants_growth_room_and_unevenness():
    rng = np.random.default_rng(0)
    heads = np.array([1.0, 5.0, 20.0])
    short, long = (scale * heads + 0.01 * rng.normal(size=(16, 3)) for scale in (1.0, 1.5))
    assert R5.rule.holds(spreading(short, long, (100, 200)))
    assert not GROWS.holds(spreading(long, short, (100, 200)))
    assert not FAR_BELOW.holds(spreading(short, long, (30, 60)))
    assert not UNEVEN.holds(spreading(short[:, :1], long[:, :1], (100, 200)))
    index = spreading(np.full((4, 3), 99.0), np.full((4, 3), 199.0), (100, 200))
    assert [rule.holds(index) for rule in (GROWS, FAR_BELOW, UNEVEN)] == [True, False, False]


def test_the_papers_shares_are_hybrid_dominated_and_those_of_rope_are_not():
    assert PATTERNS == ("constant", "mono", "hybrid")
    shares = [[0.22, 0.04, 0.74], [0.0, 1.0, 0.0], [0.04, 0.08, 0.88], [0.9, 0.0, 0.1]]
    assert same_as_claimed(np.array(shares)).tolist() == [True, False, False, False]


@pytest.mark.parametrize(("hybrid", "agreeing"), [(0.9, 3), (1.0, 0)])
def test_beside_the_papers_chunks_stands_with_how_many_others_the_rule_holds(
    hybrid: float, agreeing: int
):
    """Found: where the rule fails at the paper's own chunks, "the same" was said of those at which
    it holds.
    """
    shares = np.array([1 - hybrid, 0.0, hybrid])
    grid = np.array([[shares, shares], [shares, [0.9, 0.1, 0.0]]])
    labels = np.full((2, 1, 1, 10), 2)
    labels[..., : round(10 * (1 - hybrid))] = 0
    data = xr.Dataset(
        {
            "pattern_share_all": ("pattern", shares),
            "chunk_pattern": (("prompt", "layer", "head", "chunk"), labels),
            "sensitivity": (("chunk_size", "epsilon", "pattern"), grid),
            "random_share": (("weights", "pattern"), np.array([shares, shares])),
        },
        {"pattern": list(PATTERNS), "layer": [0]},
        {"checkpoint": "a", "learned": [0]},
    )
    evidence, cells, _ = judged(chunks.tabulate(data))
    assert evidence.outcome == (HOLDS if agreeing else FAILS)
    assert cells.estimate.value == agreeing / 4 and cells.outcome == FAILS
    assert chunks.units(data)["share_by_prompt"].sel(pattern="hybrid").values.tolist() == [
        hybrid,
        hybrid,
    ]


def test_attention_is_compared_over_seeds_with_nope_where_it_finds_the_needles():
    """R4: needle RePo > RoPE > NoPE, query RePo lowest; the prompts of one pair of models are one
    seed.
    """
    spans = {"repo": (3.0, 1.0, 0.0), "rope": (2.0, 2.0, 0.0), "nope": (1.0, 3.0, 0.0)}

    def verdict(
        found: float = 0.6, seeds: int = 3, **changed: tuple[float, float, float]
    ) -> list[str]:
        means = np.array([[[values]] for values in (spans | changed).values()])[
            ..., None, :
        ] + np.zeros((3, seeds, 2, 8, 3))
        coords = {
            "checkpoint": list(spans),
            "seed": list(range(seeds)),
            "rows": ["generated", "producing"],
            "span": ["needle", "query", "rest"],
            "layout": ("checkpoint", list(spans)),
            "learned_layers": ("checkpoint", [4, 0, 0]),
        }
        known = {"found_by_nope": found, "why_not": "" if found < 0.9 else "NoPE finds them"}
        data = xr.Dataset(
            {"mass_per_token": (("checkpoint", "seed", "rows", "prompt", "span"), means)},
            coords,
            known,
        )
        return [evidence.outcome for evidence in judged(attention.tabulate(data))]

    assert verdict() == verdict(found=0.1) == [HOLDS, HOLDS, FAILS]
    for changed in ({"repo": (2.0, 1.0, 0.0)}, {"repo": (3.0, 2.0, 0.0)}):
        assert verdict(**changed)[:2] == verdict(found=0.1, **changed)[:2] == [FAILS, FAILS]
    assert verdict(nope=(2.0, 3.0, 1.0)) == [FAILS, FAILS, HOLDS]
    assert verdict(nope=(1.0, 0.5, 0.6)) == [FAILS, FAILS, HOLDS]
    assert verdict(found=0.1, nope=(1.0, 0.5, 0.6))[:2] == [HOLDS, HOLDS], "then it is no rival"
    assert verdict(found=0.9) == [UNMEASURABLE, UNMEASURABLE, FAILS], (
        "its attention can be read, needles that need no positions cannot"
    )
    assert verdict(seeds=1) == [UNDECIDED, UNDECIDED, UNDECIDED]


@pytest.mark.parametrize(
    ("nope", "rope", "repo", "verdict"),
    [
        (0.89, 0.91, 0.98, HOLDS),
        (0.2, 0.98, 0.91, FAILS),
        (0.9, 0.91, 0.98, UNMEASURABLE),
        (None, 0.91, 0.98, HOLDS),
        (0.2, 1.0, 1.0, UNMEASURABLE),
        (0.2, 0.5, 0.98, None),
    ],
)
def test_needles_that_are_found_without_positions_say_nothing(nope, rope, repo, verdict):
    """R9 on RULER's needles; of a task of ours the same, and nothing where NoPE was not given.

    Longer lengths need a model that has learned the task.
    """

    def found(layout: str, share: float) -> Searched:
        right = (np.arange(100) < round(100 * share)).astype(float)
        scores = xr.DataArray(
            np.broadcast_to(right, (1, 3, 100)),
            {"method": ["plain"], "length": [256, 512, 1024], "prompt": np.arange(100)},
            ("method", "length", "prompt"),
        )
        own = subject(layout, zoo_path(f"niah/{layout}"))
        return Searched(own, scores.to_dataset(name="score"), None)

    shares = {"repo": repo, "rope": rope, "nope": nope}
    given = [found(layout, share) for layout, share in shares.items() if share is not None]
    verdicts = judged(HAYSTACK.tabulate(given))
    outcomes = [each.outcome for each in verdicts]
    if verdict is None:
        assert outcomes == [HOLDS, UNMEASURABLE]
        assert "rope 0.500" in notes_of(verdicts[1])
    else:
        assert outcomes == [verdict, verdict]
    if nope == 0.9:
        assert all("nope finds 0.900 without positions" in notes_of(each) for each in verdicts)
    recorded = [dataclasses.replace(each, recorded=made_up_scores(each)) for each in given]
    assert ("no NoPE was given" in found_without_positions(recorded)[1]) is (nope is None)


def made_up_scores(searched: Searched) -> Scored:
    """What makes a checkpoint one of our task: scores of it, with no other seed."""
    live = searched.scores.rename(length="test_set").assign_coords(test_set=["256", "512", "1024"])
    known = searched.subject
    return Scored(known.name, known.layout, known.configuration, 256, "exact match", live, ())


# ---- cost ----------------------------------------------------------------------------------------


def test_the_papers_model_gets_nine_parameters_in_a_thousand_more_and_the_flops_of_table_6():
    rope, with_repo = counts(configuration(*OLMO_2))
    width, layers, heads = 2048, 11, 16
    assert with_repo - rope == layers * (2 * width * width // 8 + width // 8 * heads)
    assert 100 * (with_repo / rope - 1) == pytest.approx(0.9, abs=0.05)
    assert 6 * rope * 50e9 == pytest.approx(3.84e20, rel=2e-3)
    assert 6 * with_repo * 50e9 == pytest.approx(3.87e20, rel=2e-3)


# ---- end to end ----------------------------------------------------------------------------------


def checkpoint(directory, layout: str, vocabulary: int, length: int, words):
    """A random tiny checkpoint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )
    save(reposition(LlamaForCausalLM(config), layout), directory, words)
    return directory


@pytest.fixture(scope="module", autouse=True)
def few_prompts():
    """Fewer prompts for the check that learned positions are used, which has a test of its own
    (test_learned_positions).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned_positions, "PROMPTS", 8)
        patch.setattr(learned_positions, "WINDOWS", 4)
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The shipped checkpoints, one of them with another seed beside it, and a random one with RePo
    from layer 1.
    """
    directory = tmp_path_factory.mktemp("checkpoints")
    paths = {f"reversal/{scheme}": zoo_path(f"reversal/{scheme}") for scheme in ("rope", "nope")}
    paths |= {f"niah/{scheme}": zoo_path(f"niah/{scheme}") for scheme in ("repo", "rope", "nope")}
    seeded = left_by_training("reversal/repo", directory / "reversal")
    other = seeded / "seed-1"
    other.mkdir()
    stated = json.loads((seeded / "scores.json").read_text())
    stated["test_sets"] = {name: 0.5 * value for name, value in stated["test_sets"].items()}
    (other / "scores.json").write_text(json.dumps(stated))
    (other / "training.toml").write_text(
        (seeded / "training.toml").read_text().replace("seed = 0", "seed = 1")
    )
    task = make_task("niah")
    late = checkpoint(directory / "late", "repo@1", task.vocabulary_size, 256, task.tokenizer())
    shutil.copy(zoo_path("niah/repo") / "training.toml", late)
    keyed = left_by_training("niah_keys/repo", directory / "keyed")
    return paths | {"reversal/repo": seeded, "niah/repo_from_1": late, "niah_keys/repo": keyed}


def test_language_models_read_the_text_that_is_named_and_others_their_task(tmp_path):
    """Found: ranges, chunks and segments of the adapter depended on the packages that are
    installed.
    """
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"zebra {number} quagga" for number in range(2000)))
    paths = {name: str(zoo_path(name)) for name in ("language/rope", "reversal/repo")}
    own, other = Given(paths).subjects(str(text))
    (prompt,) = own.prompts(64, 1, 0)
    assert (
        "quagga" in own.tokenizer.decode(prompt.tokens)
        and other.task == Given(paths).subjects()[1].task
    )


def results_on(paths, cache, told, experiments=PAPER.experiments):
    """Everything that comes of all experiments."""
    subjects = Given(paths).subjects()
    return [
        result
        for experiment in experiments
        for result in run(experiment, subjects, TINY, cache, told.append)
    ]


@pytest.fixture(scope="module")
def results(given, tmp_path_factory):
    told: list[str] = []
    cache = Cache(tmp_path_factory.mktemp("cache"))
    found = results_on(given, cache, told)
    assert any("niah/repo" in text for text in told)
    return found, cache


def verdicts(results):
    return {
        (verdict.claim.label, verdict.checkpoint): verdict
        for result in results
        for verdict in verdicts_of(result)
    }


def drawn(results, beginning):
    return next(
        drawing
        for result in results
        for drawing in result.drawings
        if drawing.name.startswith(beginning)
    )


def test_every_claim_has_a_verdict_and_those_without_a_checkpoint_say_why(results):
    by_claim = verdicts(results[0])
    assert {label for label, _ in by_claim} == {claim.label for claim in PAPER.claims}
    missing = {label: verdict for (label, name), verdict in by_claim.items() if name == "none"}
    few_shot = {"R8", "R8 (outlying positions)", "R8 (mean over heads)"}
    assert set(missing) == {*few_shot, "R9 (hybrids)", "R9 (later start)", "R2 (strength by seed)"}
    assert all(verdict.outcome == UNMEASURABLE for verdict in missing.values())
    reasons = {label: notes_of(verdict) for label, verdict in missing.items()}
    assert "five examples" in reasons["R8"]
    assert "5 seeds" in reasons["R2 (strength by seed)"] and "R2N1" in reasons["R9 (hybrids)"]


def test_scores_of_other_seeds_count_and_give_the_spread(results):
    repo = verdicts(results[0])["R1 (trained lengths)", "reversal/repo"]
    assert repo.estimate.value == pytest.approx(0.75)
    assert repo.interval.spread == pytest.approx(np.sqrt(0.125))
    assert repo.interval.over == "2 seeds"
    assert repo.outcome == FAILS
    table = drawn(results[0], "reversal_by_length").data
    assert table["score"].sel(checkpoint="reversal/repo", test_set=2).dropna(
        "seed"
    ).values.tolist() == [1.0, 0.5]
    recorded = len(recorded_scores(zoo_path("reversal/rope")))
    assert (
        table["score"].sel(checkpoint="reversal/rope").dropna("seed", how="all").sizes["seed"]
        == recorded
    )


def test_without_nope_reversal_does_not_hold_and_says_so(given):
    paths = {
        name: path for name, path in given.items() if name in ("reversal/repo", "reversal/rope")
    }
    found = verdicts(results_of(REVERSAL, Given(paths).subjects(), TINY))
    assert found["R1", "reversal/repo"].outcome == FAILS
    assert "RoPE or NoPE is missing" in notes_of(found["R1", "reversal/repo"])


def test_the_shipped_checkpoint_mirrors_and_random_weights_do_not(results):
    repo = verdicts(results[0])["R2", "reversal/repo"]
    assert repo.outcome == HOLDS
    assert repo.estimate.value <= 0.25
    assert "(random weights: 0)" in notes_of(repo)


def test_taking_the_mirror_away_breaks_reversal_and_flat_instructions_break_nothing(results):
    found = verdicts(results[0])
    mirror_taken, instruction_taken = (
        found["R2 (needed)", "reversal/repo"],
        found["R3 (needed)", "reversal/repo"],
    )
    assert mirror_taken.outcome == HOLDS and mirror_taken.estimate.value == pytest.approx(
        1, abs=0.05
    )
    assert instruction_taken.outcome == FAILS and "not needed" in notes_of(instruction_taken)
    data = drawn(results[0], "causes_reversal_repo").data
    np.testing.assert_array_equal(data["plain"], 1)
    assert float(data["score"].sel(kind="frozen", where="layer 1").mean()) == pytest.approx(1)


def test_scores_under_changed_positions_are_drawn_beside_the_score_as_it_is_with_the_error_of_their_fall():
    """Found: the axis began at 0.83, and marks had the spread of prompts, not that of what
    positions change.
    """
    plain = np.array([1.0, 0.0, 1.0, 1.0])
    score = np.broadcast_to(plain, (3, 2, 4)).copy()
    score[0, 1] = [1, 0, 0, 1]
    axes = {"kind": list(causes.KINDS), "where": ["layer 1", causes.EVERYWHERE]}
    data = xr.Dataset(
        {"score": (("kind", "where", "prompt"), score, {"units": "1"}), "plain": ("prompt", plain)},
        axes,
        {"metric": "exact match", "sign": 1, "checkpoint": "a/b", "stem": "a_b"},
    )
    (drawing,) = causes.draw(data)
    (ax,) = drawing.figure.axes
    assert ax.get_ylim() == (-0.03, 1.03)
    bars = {
        bar.get_gid(): bar.get_segments()
        for bar in ax.collections
        if str(bar.get_gid()).startswith("error")
    }
    of_three, of_two = (
        share_difference(0.75, share, (4, 4)).standard_error for share in (0.75, 0.5)
    )
    for kind, errors in {
        "as it is": [0, 0],
        "linearised": [of_three, of_two],
        "frozen": [of_three] * 2,
    }.items():
        np.testing.assert_allclose(
            [np.ptp(bar[:, 1]) / 2 for bar in bars[f"error {kind}"]], errors, atol=1e-12
        )


@pytest.mark.parametrize(
    ("claim", "checkpoint"),
    [
        ("R9", "niah/repo"),
        ("R9 (longer)", "niah/repo"),
        ("R9", "niah/repo_from_1"),
        ("R4", "niah/repo"),
        ("R9 (start layer)", "niah/repo, niah/repo_from_1"),
    ],
)
def test_what_both_find_cannot_tell_them_apart(results, claim, checkpoint):
    found = verdicts(results[0])[claim, checkpoint]
    assert found.outcome == UNMEASURABLE
    assert "niah/nope finds 1.000 without positions" in notes_of(found)


@pytest.mark.parametrize(
    ("last", "change", "outcome"), [(0.6, -0.2, HOLDS), (1.0, 0.0, UNDECIDED), (1.4, 0.2, FAILS)]
)
def test_a_later_start_finds_fewer_needles_or_not_seed_by_seed(last, change, outcome):
    """A start at 0 does not count; of seeds that differ, the change of each does."""
    base = {0: 0.1, 1: 1.0, 2: (1.0 + last) / 2, 3: last}
    starts = {
        start: of_seeds([share + 0.01 * seed + 0.002 * start * (seed == 1) for seed in range(3)])
        for start, share in base.items()
    }
    robust, later = judged(haystack._start_layers(starts, 0.2, ""))
    assert robust.outcome == UNMEASURABLE and "not shown to use" in robust.notes[0]
    assert (
        later.outcome == outcome
        and later.estimate.value == pytest.approx(change, abs=1e-3)
        and later.estimate.seeds == 3
    )


def of_seeds(shares):
    """Needles found by seeds, at every length, without and with YaRN."""
    own = subject("niah/repo", zoo_path("niah/repo"))
    scores = xr.Dataset(
        {"score": (("method", "length", "prompt"), np.zeros((1, 2, 3)))},
        {"method": ["plain"], "length": [256, 512]},
    )
    sample = Sample(np.array(shares), np.empty(0), 3, True, tuple(range(len(shares))))
    found = Searched(own, scores, None, is_unused=True)
    return SimpleNamespace(
        **vars(found), name=own.name, lengths=found.lengths, sample=lambda lengths, method: sample
    )


def test_attention_is_measured_in_both_readings_on_the_same_prompts(results):
    mass = drawn(results[0], "attention_mass_niah_256").data["mass_per_token"]
    assert mass["rows"].values.tolist() == ["generated", "producing"]
    assert mass.sizes["prompt"] == 2
    assert float(mass.sel(checkpoint="niah/repo", rows="producing", span="needle").mean()) > float(
        mass.sel(checkpoint="niah/repo_from_1", rows="producing", span="needle").mean()
    )


def test_ranges_stop_at_nothing_but_what_the_task_can_make(results):
    data = drawn(results[0], "ranges_niah_keys_repo").data
    assert data["length"].values.tolist() == [64, 128, 256, 512]  # 32 tokens are too few
    assert data.sizes["unit"] == 6


def test_figures_are_written_with_their_data_and_a_second_time_comes_from_the_cache(
    results, given, tmp_path
):
    found, cache = results
    names = [drawing.name for result in found for drawing in result.drawings]
    assert len(set(names)) == len(names)
    some = [drawn(found, name) for name in ("haystack_by_length_niah_256", "mirror_reversal_repo")]
    kept = [
        result
        for result in found
        if any(drawing is each for drawing in result.drawings for each in some)
    ]
    files = {
        file.name for file in write_paper(tmp_path / "repo", PAPER, kept, given, "make figures", {})
    }
    assert {f"{drawing.name}.png" for drawing in some} | {"numbers.csv.gz"} <= files
    (again,) = results_of(EFFICIENCY, [], TINY, cache)
    first, second = drawn(found, "efficiency").data, again.drawings[0].data
    assert_allclose(first["seconds"].values, second["seconds"].values, rtol=0)


@pytest.mark.parametrize(
    ("scores", "verdict"), [([0.2, 0.3, 0.5, 0.7, 0.9], HOLDS), ([0.5, 0.3, 0.9, 0.2, 0.7], FAILS)]
)
def test_a_stronger_mirror_must_go_with_better_scores_more_than_in_other_orders_of_the_seeds(
    scores, verdict
):
    def seed(strength: int, score: float) -> xr.Dataset:
        copies = [[[[9.0], [4 / strength]]]]  # layer 0 does not count
        mirrors = np.concatenate([copies, np.full((1, 1, 2, 1), 4.0)], axis=1)
        data = xr.Dataset(
            {"mirror": (("weights", "kind", "layer", "prompt"), mirrors), "longer": score},
            {"weights": ["trained"], "kind": ["copies", "random"], "layer": [0, 1]},
        )
        return data.assign_attrs(checkpoint="reversal/repo")

    by_seed = {number: seed(number + 1, score) for number, score in enumerate(scores)}
    assert [float(mirror.strengths(data).max()) for data in by_seed.values()] == [1, 2, 3, 4, 5]
    (evidence,) = judged(mirror.across(by_seed))
    assert evidence.estimate.value == pytest.approx(spearmanr(range(5), scores)[0])
    assert evidence.outcome == verdict and evidence.estimate.seeds == 5
    assert len(evidence.estimate.values[mirror.STRENGTH].null) == 120
    assert not list(mirror.across({0: by_seed[0]}))


def test_seeds_are_an_axis_and_what_holds_has_to_hold_in_each_that_can_be_judged():
    claim = mirror.R3

    silent = unmeasured(claim, "a", "it is silent")

    def of(value: float, outcome: str = HOLDS) -> Verdict:
        known = verdict(claim, "a", "", {mirror.FLATNESS: value}, value)
        return dataclasses.replace(known, outcome=outcome)

    both = together({0: of(0.1), 1: silent, 3: of(0.2)})
    assert (both.outcome, both.estimate.seeds) == (HOLDS, 2)
    assert both.estimate.value == pytest.approx(0.15)
    assert both.interval == Interval(pytest.approx(np.std([0.1, 0.2], ddof=1)), "2 seeds")
    assert both.notes == ("holds: 0 (0.1), 3 (0.2)", "not measurable: 1 (it is silent)")
    assert both.reasons[0] == Reason(Kind.SEEDS, count=2, of=2)
    for first, second, outcome in (
        (HOLDS, HOLDS, HOLDS),
        (HOLDS, UNDECIDED, UNDECIDED),
        (UNDECIDED, FAILS, FAILS),
        (HOLDS, FAILS, FAILS),
    ):
        assert together({0: of(0.1, first), 1: of(0.3, second)}).outcome == outcome
    alone = of(0.1)
    assert together({0: alone}) is alone
    one = together({0: silent, 1: alone})
    assert (one.outcome, one.interval, one.estimate) == (HOLDS, alone.interval, alone.estimate)
    assert together({0: silent, 1: silent}).outcome == UNMEASURABLE


def test_the_numbers_of_every_seed_and_what_its_positions_are_used_for_stand_beside_the_first_figure(
    results,
):
    data = drawn(results[0], "mirror_reversal_repo").data
    assert (
        data["share"].dims == ("seed", "layer", "prompt") and data["mirror"].sizes["weights"] == 2
    )
    lost = data["used_loss_frozen"] - data["used_loss"]
    assert lost.dims == ("seed", "used_prompt") and float(lost.mean()) > 1
    ranges = drawn(results[0], "ranges_niah_keys_repo").data
    assert_allclose(ranges["largest_range"], ranges["range"].max("unit"))


def test_a_checkpoint_of_no_task_of_ours_gets_text(tmp_path):
    words = tokenizer("words")
    mine = subject("mine", checkpoint(tmp_path / "model", "repo@1", len(words), 512, words))
    assert (mine.kind, mine.layout, mine.learned) == ("text", "repo@1", (1, 2))
    assert attention.ATTENTION.needs.groups([mine]) == [[mine]]
    prompts = prompts_for(mine, TINY)
    assert len(prompts) == 2
    for many in prompts:
        examples = [
            name for name in many.spans if name.startswith("examples.") and name.count(".") == 1
        ]
        assert len(examples) > 5 and len(many.tokens) <= 512
    (result,) = results_of(SEGMENTS, [mine], TINY)
    scores, best = (drawing.data for drawing in result.drawings)
    assert (
        scores["variance_between"].sel(weights="trained").dims[-1] == "head"
        and best["position"].size == best.sizes["token"]
    )
    assert [verdict.claim for verdict in verdicts_of(result)] == [
        segments.R8,
        segments.R8_OUTLYING,
        segments.R8_MEAN,
    ]


def test_outlying_positions_are_counted_by_the_words_that_they_belong_to():
    """A comma far away in one head; in the other a word, and positions of which half are
    negative.
    """
    words = ["the", "cat", "sat", ",", "on", "it", "dog", "ran"]
    z = np.array([[0, 1, 2, 99, 3, 4, 5, 6], [-4, -3, -2, -1, 0, 1, 2, 99.0]])
    position = xr.DataArray(
        z[None, None], {"layer": [1], "head": [0, 1]}, ("prompt", "layer", "head", "token")
    )
    prompts = [SimpleNamespace(tokens=range(8))]
    found = segments._outlying(
        position, prompts, SimpleNamespace(decode=lambda tokens: f" {words[tokens[0]]}")
    )
    assert found["function_words"].values.tolist() == [[0.5, 0.5]] and found[
        "negative"
    ].values.tolist() == [[0, 0.5]]
    position[..., 1, 7] = 3
    found = segments._outlying(
        position, prompts, SimpleNamespace(decode=lambda tokens: words[tokens[0]].title())
    )
    assert found["function_words"].values.tolist() == [[1, 0.5]]


def test_a_checkpoint_of_no_task_of_ours_is_asked_for_rulers_needles(tmp_path):
    words = tokenizer("words")
    searched = search(
        subject("mine", checkpoint(tmp_path / "model", "nope", len(words), 320, words)),
        TINY,
        Cache(),
    )
    assert searched.lengths == [320, 640, 1280]
    assert searched.scores["method"].values.tolist() == ["plain"]
    assert searched.scores["score"].shape == (1, 3, 2)
    assert searched.sample([640], "yarn").mean == searched.sample([640], "plain").mean


def test_adapters_of_text_on_a_checkpoint_of_no_task_of_ours_are_asked_for_rulers_needles(tmp_path):
    """As the paper continues one model with several schemes: RePo, RoPE, and NoPE in the layers
    where RePo's positions are learned.
    """
    words = tokenizer("words")
    base = checkpoint(tmp_path / "base", "rope", len(words), 1280, words)
    corpus = tmp_path / "text.txt"
    corpus.write_text(" ".join(f"word {number} of many" for number in range(4000)))
    options = {"corpus": str(corpus), "length": 16, "grown_length": 64, "longest_test": 64}
    tuned = {"continue_from": str(base), "adapter": 2, "task_options": options}
    paths = {
        name: trained(tmp_path / name, "language", scheme, **tuned)
        for name, scheme in {"repo": "repo@1", "rope": "rope", "nope": "nope@1"}.items()
    }
    # windows may be shorter than RULER's shortest prompt; the model was made for longer ones
    for path in paths.values():
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 320}))
    subjects = [subject(name, path, str(corpus)) for name, path in paths.items()]
    assert all(each.kind == "language" and reads_text(each) for each in subjects)
    for experiment in (HAYSTACK, attention.ATTENTION):
        assert experiment.needs.groups(subjects) == [subjects]
    prompts = needles(subjects[0], 320, 2, 0)
    assert prompts == needles(subjects[2], 320, 2, 0) and {"needle", "query"} <= set(
        prompts[0].spans
    )
    cache = Cache()
    data = attention.measure(subjects, TINY, cache)
    stated = {name: data.attrs[name] for name in ("task", "training_length", "found_by_nope")}
    assert stated == {"task": "text", "training_length": 320, "found_by_nope": 0}
    *evidence, _ = judged(attention.tabulate(data))
    assert attention.ATTENTION.needs.why_not(subjects[2], TINY, cache), (
        "NoPE, whose variance is not judged, finds none"
    )
    for each in evidence:
        assert "RoPE" in each.estimate.control and "NoPE from layer 1" in each.estimate.control
        assert "rope finds 0.000 of the needles" in each.notes[0], "its attention says nothing"
    without = search(subjects[2], TINY, cache)
    assert without.scores["method"].values.tolist() == ["plain", "yarn"]  # layer 0 rotates
    assert found_without_positions([without]) == (0, "")
    # the base knows longer ones
    assert without.lengths == [320] and longest_trained(subjects[2]) == 1280
    searched = [search(each, TINY, cache) for each in subjects]
    at_length, longer = judged(HAYSTACK.tabulate(searched))
    assert at_length.outcome == UNMEASURABLE, "both find none"
    assert longer.outcome == UNMEASURABLE and "trained on 1,280 tokens" in notes_of(longer)
    (drawn_by_length,) = HAYSTACK.draw(searched)
    assert drawn_by_length.data["method"].values.tolist() == ["plain"]
    shutil.copy(paths["rope"] / "training.toml", base)  # now it says that it was trained here
    assert not reads_text(subjects[0])
    assert not reads_text(subject("rope", zoo_path("language/rope")))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("byte_level_bpe", "when it is to reverse 20 words"),
        ("words", "does not tell the words apart"),
    ],
)
def test_a_model_that_reads_text_is_asked_to_reverse_words_and_says_nothing_of_mirrors_where_it_does_not(
    tmp_path, family, reason
):
    words = tokenizer(family)
    own = subject("mine", checkpoint(tmp_path / "model", "repo@1", len(words), 320, words))
    assert mirror.MIRROR.needs.groups([own]) == [[own]]
    data = mirror.measure([own], TINY, Cache())
    found = {each.claim.label: each for each in judged(mirror.tabulate(data))}
    assert found["R2"].outcome == UNMEASURABLE and reason in notes_of(found["R2"])
    assert found["R3"].outcome != UNMEASURABLE or family == "words"
    example, source = data["example_text"].values, data["example_source"].values
    assert [example[at] for at in source[source >= 0]] == [
        example[at] for at in np.flatnonzero(source >= 0)
    ]
    (figure,) = mirror.draw(data)
    assert len(figure.figure.axes) == 2 and "Of 2 layers" not in figure.caption


def test_of_many_layers_those_that_mirror_most_are_drawn(results):
    few = drawn(results[0], "mirror_reversal_repo").data.isel(seed=0)
    means = few["mirror"].sel(weights="trained").mean("prompt")
    ratio = means.sel(kind="copies") / means.sel(kind="random")
    many = xr.concat(
        [few, few.assign_coords(layer=few["layer"] + 10)], dim="layer", data_vars="minimal"
    )
    (figure,) = mirror.draw(many.assign_attrs(few.attrs))
    best = [int(layer) for layer in ratio.sortby(ratio)["layer"].values[:2]]
    titles = [
        int(ax.get_title(loc="left").removeprefix("Layer ").partition(":")[0])
        for ax in figure.figure.axes
    ]
    assert titles == sorted([*best, *(layer + 10 for layer in best)])


@pytest.mark.parametrize(("followed", "verdict"), [(6, HOLDS), (2, FAILS)])
def test_heads_that_follow_examples_count_beyond_random_weights(followed, verdict):
    chance = np.full((4, 3, 2, 5), 0.5)  # the trained model and three twins, prompts, layers, heads
    chance[0].reshape(3, -1)[:, :followed] = 0.0
    chance[1:, :, 0, :3] = 0.01
    chance[0, 0, 1, 4] = 0.0  # on one prompt alone
    chance[0, :, 1, 3] = np.nan  # a head whose positions are constant
    data = xr.Dataset(
        {"variance_between_chance": (("weights", "prompt", "layer", "head"), chance)},
        {
            "weights": ["trained", "random 0", "random 1", "random 2"],
            "layer": [1, 2],
            "head": range(5),
        },
        {"checkpoint": "mine"},
    )
    (found,) = judged([segments._by_heads(data)])
    assert (
        found.estimate.value == followed
        and found.outcome == verdict
        and found.estimate.control == "random weights 3"
    )
    assert "layer 1, head 0 follows them most: 0.0 %" in notes_of(found)


@pytest.mark.parametrize(("random", "verdict"), [(0.1, HOLDS), (0.5, FAILS)])
def test_segments_are_followed_beyond_random_weights(random, verdict):
    """Above shuffled edges is not enough where random weights are as far above them."""
    spread = np.linspace(0, 0.02, 4)[:, None, None] + np.zeros((4, 1, 2))  # prompts, layer, heads
    above = np.stack([0.3 + spread, random + spread, random - spread])
    chance = xr.DataArray(
        np.zeros_like(above),
        {"weights": ["trained", "random 0", "random 1"]},
        ("weights", "prompt", "layer", "head"),
    )
    shuffled = chance + 0.2
    data = xr.Dataset(
        {
            "variance_between": shuffled + above,
            "variance_between_shuffled": shuffled,
            "boundary_f1": shuffled + above,
            "boundary_f1_shuffled": shuffled,
            "variance_between_chance": chance,
        },
        attrs={"checkpoint": "mine"},
    )
    (found,) = judged([segments._aligned(data)])
    assert found.outcome == verdict and found.claim is segments.R8_MEAN
    assert f"0.31 beside 2 of the null: mean {random:g}" in notes_of(found)


def test_several_questions_about_keyed_needles_go_through_every_experiment(tmp_path):
    """Nobody finds anything after two steps, NoPE neither: so R9 is judged and R4 is not."""
    size = {
        "length": 32,
        "first_length": 32,
        "longest_test": 64,
        "needles": 2,
        "doubled": 1,
        "questions": 1,
        "test_questions": 1,
    }
    paths = {
        f"niah_keys/{scheme}": trained(tmp_path / scheme, "niah_keys", scheme, task_options=size)
        for scheme in ("repo", "rope", "nope")
    }
    of_checkpoints = [
        experiment for experiment in PAPER.experiments if experiment is not EFFICIENCY
    ]
    results = results_on(paths, Cache(), [], of_checkpoints)
    found = verdicts(results)
    assert found["R9", "niah_keys/repo"].outcome == UNMEASURABLE, "RoPE finds none of two needles"
    assert (
        "is not shown to use learned positions" in found["R9 (longer)", "niah_keys/repo"].notes[0]
    )
    attention = [found[label, "niah_keys/repo"] for label in ("R4", "R4 (producing rows)")]
    assert all(
        verdict.outcome == UNMEASURABLE and "finds 0" in notes_of(verdict) for verdict in attention
    )
    assert {result.experiment.name for result in results if result.drawings} >= {
        "needles in a haystack",
        "attention mass",
    }
    mass = drawn(results, "attention_mass_niah_keys_32").data
    assert mass.attrs["found_by_nope"] < 0.9 and mass["span"].values.tolist()[:2] == [
        "needle",
        "query",
    ]


def test_where_prompts_of_half_the_length_cannot_be_made_r5_is_left_out(tmp_path):
    words = tokenizer("words")
    mine = subject("mine", checkpoint(tmp_path / "model", "repo", len(words), 320, words))
    assert ranges.measure([mine], TINY, Cache()) is None
