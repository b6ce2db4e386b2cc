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
from verdicts import judged, notes_of, results_of, verdicts_of

from position_papers.kit import learned_positions
from position_papers.kit.cache import Cache
from position_papers.kit.experiment import run
from position_papers.kit.judge.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNMEASURABLE,
)
from position_papers.kit.judge.differences import Sample
from position_papers.kit.scores import Scored
from position_papers.kit.subjects import Given, subject
from position_papers.repo import attention, chunks, haystack, mirror, ranges, segments
from position_papers.repo.checkpoints import longest_trained, needles, reads_text
from position_papers.repo.efficiency import OLMO_2, configuration, counts
from position_papers.repo.haystack import HAYSTACK
from position_papers.repo.mirror import MIRRORS, QUANTITIES, Mirror, flatness
from position_papers.repo.needles import Searched, found_without_positions, search
from position_papers.repo.options import Options
from position_papers.repo.paper import PAPER
from position_papers.repo.ranges import FAR_BELOW, GROWS, R5, UNEVEN, spreading
from position_papers.repo.reversal import REVERSAL
from position_papers.repo.segments import SEGMENTS, prompts_for
from position_papers.training.trained import recorded_scores
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.models.reposition import reposition
from repo_interp.models.saving import save
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


BY_WORD = np.array([0, 5, 0, 9, 9, 0, 5, 0]) + 0.1 * np.sin(np.arange(8.0) ** 2)
"""Every copy is at its source, since every word has one position."""


@pytest.mark.parametrize(
    ("positions", "is_mirror"),
    [
        ([0, 1, 2, 3, 3, 2, 1, 0], True),
        (BY_WORD, False),
        (range(8), False),
        (np.zeros(8), False),
    ],
)
def test_positions_that_run_back_mirror_and_others_do_not(positions, is_mirror):
    assert mirrors(measured(positions)) is is_mirror


def test_mirror_distances_are_those_of_a_loop():
    z = np.random.default_rng(0).normal(size=8)
    distances: dict[str, list[float]] = {"copies": [], "random": [], "elsewhere": []}
    for place, copy in enumerate(COPY):
        for source in SOURCE:
            kind = "elsewhere" if source != SOURCE[place] else "copies"
            kind = kind if TEXT[copy] == TEXT[source] else "random"
            distances[kind].append(abs(z[copy] - z[source]))
    found = measured(z)
    assert_allclose(found[:3], [np.mean(each) for each in distances.values()])
    assert_allclose(found.correlation, np.corrcoef(z[COPY], z[SOURCE])[0, 1])
    assert Mirror._fields == tuple(QUANTITIES) == (*distances, "correlation")


def test_flatness_compares_with_as_many_consecutive_words():
    z = np.array([5.0, 5.5, 0, 1, 2, 3, 4])
    assert flatness(z, [0, 1], range(2, 7)) == pytest.approx(0.5)
    assert np.isnan(flatness(np.array([1.0, 2, 3, 3, 3]), [0, 1], [2, 3, 4]))


def test_spreading_wants_growth_room_and_unevenness():
    rng = np.random.default_rng(0)
    heads = np.array([1.0, 5.0, 20.0])
    short, long = (scale * heads + 0.01 * rng.normal(size=(16, 3)) for scale in (1.0, 1.5))
    assert R5.rule.holds(spreading(short, long, (100, 200)))
    for one, other, lengths, decided in (
        (long, short, (100, 200), [False, True, True]),
        (short, long, (20, 40), [True, False, True]),
        (np.full((4, 3), 99.0), np.full((4, 3), 199.0), (100, 200), [True, False, False]),
    ):
        values = spreading(one, other, lengths)
        assert [rule.holds(values) for rule in (GROWS, FAR_BELOW, UNEVEN)] == decided


def test_the_number_of_ranges_and_its_spread_are_over_the_same_prompts():
    """Found: the largest of 128 prompts of two lengths stood beside the spread of 64 of one."""
    rng = np.random.default_rng(0)
    values = rng.uniform(1, 40, (2, 16, 3))
    axes = ("length", "prompt", "unit")
    data = xr.Dataset(
        {
            "range": (axes, values),
            "random_range": (("weights", "judged", "prompt", "unit"), values[None] / 2),
        },
        {"length": [50, 100], "judged": [50, 100]},
        {"training_length": 100, "checkpoint": "a"},
    )
    found, _ = judged(ranges.tabulate(data))
    largest = values[1].max(axis=1) / 100
    shown = found.estimate.value, found.interval.spread, found.estimate.n
    assert_allclose(shown, (largest.mean(), largest.std(ddof=1), 16))
    assert_allclose(ranges.units(data)["largest_range"].sel(length=100) / 100, largest)


@pytest.mark.parametrize(("hybrid", "agreeing"), [(0.9, 3), (1.0, 0)])
def test_beside_the_papers_chunks_stands_with_how_many_others_the_rule_holds(
    hybrid: float, agreeing: int
):
    """Found: where the rule fails at the paper's own chunks, "the same" was said of those at which
    it holds.
    """
    shares, labels = np.array([1 - hybrid, 0.0, hybrid]), np.full((2, 1, 1, 10), 2)
    labels[..., : round(10 * (1 - hybrid))] = 0
    data = xr.Dataset(
        {
            "pattern_share_all": ("pattern", shares),
            "chunk_pattern": (("prompt", "layer", "head", "chunk"), labels),
            "sensitivity": (
                ("chunk_size", "epsilon", "pattern"),
                [[shares, shares], [shares, [0.9, 0.1, 0.0]]],
            ),
            "random_share": (("weights", "pattern"), [shares, shares]),
        },
        {"pattern": ["constant", "mono", "hybrid"], "layer": [0]},
        {"checkpoint": "a", "learned": [0]},
    )
    evidence, cells, _ = judged(chunks.tabulate(data))
    assert evidence.outcome == (HOLDS if agreeing else FAILS)
    assert cells.estimate.value == agreeing / 4 and cells.outcome == FAILS
    assert (chunks.units(data)["share_by_prompt"].sel(pattern="hybrid") == hybrid).all()


def test_attention_is_compared_over_seeds_with_nope_where_it_finds_the_needles():
    """R4: needle RePo > RoPE > NoPE, query RePo lowest; the prompts of one pair of models are one
    seed.
    """
    spans = {"repo": (3.0, 1.0, 0.0), "rope": (2.0, 2.0, 0.0), "nope": (1.0, 3.0, 0.0)}

    def verdict(
        found: float = 0.6, seeds: int = 3, **changed: tuple[float, float, float]
    ) -> list[str]:
        means = np.array(list((spans | changed).values()))[:, None, None, None]
        axes = ("checkpoint", "seed", "rows", "prompt", "span")
        data = xr.Dataset(
            {"mass_per_token": (axes, means + np.zeros((3, seeds, 2, 8, 3)))},
            {
                "checkpoint": list(spans),
                "seed": list(range(seeds)),
                "rows": ["generated", "producing"],
                "span": ["needle", "query", "rest"],
                "layout": ("checkpoint", list(spans)),
                "learned_layers": ("checkpoint", [4, 0, 0]),
            },
            {"found_by_nope": found, "why_not": "" if found < 0.9 else "NoPE finds them"},
        )
        return [evidence.outcome for evidence in judged(attention.tabulate(data))]

    # both halves, the needle, the query, both from producing rows, NoPE's variance
    assert verdict() == verdict(found=0.1) == [HOLDS, HOLDS, HOLDS, HOLDS, FAILS]
    assert verdict(repo=(2.0, 1.0, 0.0))[:4] == [FAILS, FAILS, HOLDS, FAILS]
    assert verdict(repo=(3.0, 2.0, 0.0))[:4] == [FAILS, HOLDS, FAILS, FAILS]
    assert verdict(nope=(2.0, 3.0, 1.0)) == [FAILS, FAILS, HOLDS, FAILS, HOLDS]
    assert verdict(found=0.1, nope=(1.0, 0.5, 0.6))[:4] == [HOLDS] * 4, "then it is no rival"
    # its attention can be read, needles that need no positions cannot
    assert verdict(found=0.9) == [UNMEASURABLE] * 4 + [FAILS]
    assert verdict(seeds=1) == [UNDECIDED] * 5


@pytest.mark.parametrize(
    ("nope", "rope", "repo", "verdict"),
    [
        (0.89, 0.91, 0.98, HOLDS),
        (0.2, 0.98, 0.91, FAILS),
        (0.2, 0.98, 0.05, UNMEASURABLE),  # it has not the task
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
    first, longer = judged(HAYSTACK.tabulate(given))
    wanted = (HOLDS, UNMEASURABLE) if verdict is None else (verdict, verdict)
    assert (first.outcome, longer.outcome) == wanted
    assert verdict is not None or "rope 0.500" in notes_of(longer)
    assert nope != 0.9 or "nope finds 0.900 without positions" in notes_of(first)
    recorded = [dataclasses.replace(each, recorded=made_up_scores(each)) for each in given]
    assert ("no NoPE was given" in found_without_positions(recorded)[1]) is (nope is None)


def made_up_scores(searched: Searched) -> Scored:
    """What makes a checkpoint one of our task: scores of it, with no other seed."""
    live = searched.scores.rename(length="test_set").assign_coords(test_set=["256", "512", "1024"])
    known = searched.subject
    return Scored(known.name, known.layout, known.configuration, 256, "exact match", live, ())


def test_a_row_of_positions_that_heads_share_is_counted_once():
    """R8: found "24 of 180 heads" of a model whose heads share 60 rows of positions."""
    rows = np.random.default_rng(0).normal(size=(2, 1, 3, 8))  # prompt, layer, row, token
    position = xr.DataArray(
        np.repeat(rows, 2, axis=2),
        {"layer": [1], "head": range(6)},
        ("prompt", "layer", "head", "token"),
    )
    first = segments.first_of_row(position)
    assert first.values.tolist() == [[True, False] * 3]
    chance = xr.DataArray(
        np.array([[0.01, 0.01, 0.9, 0.9, 0.02, 0.02], [0.9] * 6])[:, None, None],
        {"weights": ["trained", "random 0"], "layer": [1], "head": range(6)},
        ("weights", "prompt", "layer", "head"),
    )
    data = xr.Dataset({"variance_between_chance": chance, "first_of_row": first})
    (found,) = judged([segments._by_heads(data.assign_attrs(checkpoint="a"))])
    assert (found.outcome, found.estimate.value) == (HOLDS, 2)
    assert found.estimate.measured == "rows of positions of 3 that follow the examples"


# ---- cost ----------------------------------------------------------------------------------------


def test_the_papers_model_gets_nine_parameters_in_a_thousand_more_and_the_flops_of_table_6():
    rope, with_repo = counts(configuration(*OLMO_2))
    width, layers, heads = 2048, 11, 16
    assert with_repo - rope == layers * (2 * width * width // 8 + width // 8 * heads)
    flops = [6 * count * 50e9 for count in (rope, with_repo)]
    assert_allclose(flops, [3.84e20, 3.87e20], rtol=2e-3)


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


@pytest.fixture(scope="module")
def results(given):
    """Everything that comes of all experiments."""
    told: list[str] = []
    subjects, cache = Given(given).subjects(), Cache()
    found = [
        result
        for experiment in PAPER.experiments
        for result in run(experiment, subjects, TINY, cache, told.append)
    ]
    assert any("niah/repo" in text for text in told)
    names = [drawing.name for result in found for drawing in result.drawings]
    assert len(set(names)) == len(names)
    return found


def verdicts(results):
    return {(each.claim.label, each.checkpoint): each for each in verdicts_of(*results)}


def drawn(results, beginning):
    drawings = (drawing for result in results for drawing in result.drawings)
    return next(each for each in drawings if each.name.startswith(beginning)).data


def test_every_claim_has_a_verdict_and_those_without_a_checkpoint_say_why(results):
    by_claim = verdicts(results)
    assert {label for label, _ in by_claim} == {claim.label for claim in PAPER.claims}
    missing = {label: notes_of(own) for (label, name), own in by_claim.items() if name == "none"}
    reasons = dict.fromkeys(("R8", "R8 (outlying positions)", "R8 (mean over heads)"), "examples")
    reasons |= {"R9 (hybrids)": "R2N1", "R9 (later start)": "", "R2 (strength by seed)": "5 seeds"}
    assert missing.keys() == reasons.keys()
    for label, reason in reasons.items():
        assert by_claim[label, "none"].outcome == UNMEASURABLE and reason in missing[label]


def test_scores_of_other_seeds_count_and_give_the_spread(results):
    repo = verdicts(results)["R1 (trained lengths)", "reversal/repo"]
    assert (repo.outcome, repo.interval.over) == (FAILS, "2 seeds")
    assert_allclose((repo.estimate.value, repo.interval.spread), (0.75, np.sqrt(0.125)))
    score = drawn(results, "reversal_by_length")["score"]
    repo, rope = (score.sel(checkpoint=f"reversal/{name}") for name in ("repo", "rope"))
    assert repo.sel(test_set=2).dropna("seed").values.tolist() == [1.0, 0.5]
    recorded = len(recorded_scores(zoo_path("reversal/rope")))
    assert rope.dropna("seed", how="all").sizes["seed"] == recorded


def test_without_nope_reversal_does_not_hold_and_says_so(given):
    paths = {name: given[name] for name in ("reversal/repo", "reversal/rope")}
    found = verdicts(results_of(REVERSAL, Given(paths).subjects(), TINY))["R1", "reversal/repo"]
    assert found.outcome == FAILS and "RoPE or NoPE is missing" in notes_of(found)


def test_the_shipped_checkpoint_mirrors_and_random_weights_do_not(results):
    repo = verdicts(results)["R2", "reversal/repo"]
    assert repo.outcome == HOLDS and repo.estimate.value <= 0.25
    assert "(random weights: 0)" in notes_of(repo)


def test_taking_the_mirror_away_breaks_reversal_and_flat_instructions_break_nothing(results):
    found = verdicts(results)
    mirror, instruction = (found[f"{id} (needed)", "reversal/repo"] for id in ("R2", "R3"))
    assert mirror.outcome == HOLDS and mirror.estimate.value == pytest.approx(1, abs=0.05)
    assert instruction.outcome == FAILS and "not needed" in notes_of(instruction)
    data = drawn(results, "causes_reversal_repo")
    assert (data["plain"] == 1).all()
    assert float(data["score"].sel(kind="frozen", where="layer 1").mean()) == pytest.approx(1)


def test_what_both_find_cannot_tell_them_apart(results):
    found, late = verdicts(results), "niah/repo_from_1"
    rows = [(label, "niah/repo") for label in ("R9", "R9 (longer)", "R4")] + [("R9", late)]
    for row in (*rows, ("R9 (start layer)", f"niah/repo, {late}")):
        assert found[row].outcome == UNMEASURABLE
        assert "niah/nope finds 1.000 without positions" in notes_of(found[row])


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
    assert (later.outcome, later.estimate.seeds) == (outcome, 3)
    assert later.estimate.value == pytest.approx(change, abs=1e-3)


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


@pytest.mark.parametrize(
    ("scores", "verdict"), [([0.2, 0.3, 0.5, 0.7, 0.9], HOLDS), ([0.5, 0.3, 0.9, 0.2, 0.7], FAILS)]
)
def test_a_stronger_mirror_must_go_with_better_scores_more_than_in_other_orders_of_the_seeds(
    scores, verdict
):
    by_seed = {}
    for seed, score in enumerate(scores):
        mirrors = [[[[9.0], [4 / (seed + 1)]], [[4.0], [4.0]]]]  # layer 0 does not count
        by_seed[seed] = xr.Dataset(
            {"mirror": (("weights", "kind", "layer", "prompt"), mirrors), "longer": score},
            {"weights": ["trained"], "kind": ["copies", "random"], "layer": [0, 1]},
            {"checkpoint": "reversal/repo"},
        )
        assert float(mirror.strengths(by_seed[seed]).max()) == seed + 1
    (evidence,) = judged(mirror.across(by_seed))
    assert evidence.estimate.value == pytest.approx(spearmanr(range(5), scores)[0])
    assert evidence.outcome == verdict and evidence.estimate.seeds == 5
    assert len(evidence.estimate.values[mirror.STRENGTH].null) == 120
    assert not list(mirror.across({0: by_seed[0]}))


def test_the_numbers_of_every_seed_and_what_its_positions_are_used_for_stand_beside_the_first_figure(
    results,
):
    data = drawn(results, "mirror_reversal_repo")
    assert data["share"].dims == ("seed", "layer", "prompt")
    lost = data["used_loss_frozen"] - data["used_loss"]
    assert lost.dims == ("seed", "used_prompt") and float(lost.mean()) > 1
    ranges = drawn(results, "ranges_niah_keys_repo")
    assert_allclose(ranges["largest_range"], ranges["range"].max("unit"))
    # 32 tokens are too few; beyond training ranges stop at nothing but what the task can make
    assert ranges["length"].values.tolist() == [64, 128, 256, 512] and ranges.sizes["unit"] == 6


def test_a_checkpoint_of_no_task_of_ours_gets_text(tmp_path):
    words = tokenizer("words")
    mine = subject("mine", checkpoint(tmp_path / "model", "repo@1", len(words), 512, words))
    assert (mine.kind, mine.layout, mine.learned) == ("text", "repo@1", (1, 2))
    assert attention.ATTENTION.needs.groups([mine]) == [[mine]]
    prompts = prompts_for(mine, TINY)
    assert len(prompts) == 2
    for many in prompts:
        assert sum(name.count(".") == 1 for name in many.spans) > 5 and len(many.tokens) <= 512
    (result,) = results_of(SEGMENTS, [mine], TINY)
    scores, best = (drawing.data for drawing in result.drawings)
    assert scores["variance_between"].sel(weights="trained").dims[-1] == "head"
    assert best["position"].size == best.sizes["token"]
    claims = [segments.R8, segments.R8_OUTLYING, segments.R8_MEAN]
    assert [verdict.claim for verdict in verdicts_of(result)] == claims


def test_outlying_positions_are_counted_by_the_words_that_they_belong_to():
    """A comma far away in one head; in the other a word, and positions of which half are
    negative.
    """
    words = ["the", "cat", "sat", ",", "on", "it", "dog", "ran"]
    z = np.array([[0, 1, 2, 99, 3, 4, 5, 6], [-4, -3, -2, -1, 0, 1, 2, 99.0]])
    axes = ("prompt", "layer", "head", "token")
    position = xr.DataArray(z[None, None], {"layer": [1], "head": [0, 1]}, axes)

    def found(decode):
        prompts, tokenizer = [SimpleNamespace(tokens=range(8))], SimpleNamespace(decode=decode)
        return segments._outlying(position, prompts, tokenizer)

    counted = found(lambda tokens: f" {words[tokens[0]]}")
    assert counted["function_words"].values.tolist() == [[0.5, 0.5]]
    assert counted["negative"].values.tolist() == [[0, 0.5]]
    position[..., 1, 7] = 3
    counted = found(lambda tokens: words[tokens[0]].title())
    assert counted["function_words"].values.tolist() == [[1, 0.5]]


def test_a_checkpoint_of_no_task_of_ours_is_asked_for_rulers_needles(tmp_path):
    words = tokenizer("words")
    mine = subject("mine", checkpoint(tmp_path / "model", "nope", len(words), 320, words))
    searched = search(mine, TINY, Cache())
    assert searched.lengths == [320, 640, 1280] and searched.scores["score"].shape == (1, 3, 2)
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
    subjects = []
    for name, scheme in {"repo": "repo@1", "rope": "rope", "nope": "nope@1"}.items():
        file = trained(tmp_path / name, "language", scheme, **tuned) / "config.json"
        # windows may be shorter than RULER's shortest prompt; the model was made for longer ones
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 320}))
        subjects.append(subject(name, file.parent, str(corpus)))
    repo, _, nope = subjects
    assert all(each.kind == "language" and reads_text(each) for each in subjects)
    for experiment in (HAYSTACK, attention.ATTENTION):
        assert experiment.needs.groups(subjects) == [subjects]
    prompts = needles(repo, 320, 2, 0)
    assert prompts == needles(nope, 320, 2, 0) and {"needle", "query"} <= {*prompts[0].spans}
    cache = Cache()
    data = attention.measure(subjects, TINY, cache)
    stated = {name: data.attrs[name] for name in ("task", "training_length", "found_by_nope")}
    assert stated == {"task": "text", "training_length": 320, "found_by_nope": 0}
    # NoPE, whose variance is not judged, finds none
    assert attention.ATTENTION.needs.why_not(nope, TINY, cache)
    found = {each.claim.label: each for each in judged(attention.tabulate(data))}
    for each in (found["R4"], found["R4 (producing rows)"]):
        assert "RoPE" in each.estimate.control and "NoPE from layer 1" in each.estimate.control
        assert "rope finds 0.000 of the needles" in each.notes[0], "its attention says nothing"
    searched = [search(each, TINY, cache) for each in subjects]
    assert found_without_positions(searched[2:]) == (0, "")
    assert searched[2].scores["method"].values.tolist() == ["plain", "yarn"]  # layer 0 rotates
    # the base knows longer ones
    assert searched[2].lengths == [320] and longest_trained(nope) == 1280
    at_length, longer = judged(HAYSTACK.tabulate(searched))
    assert at_length.outcome == longer.outcome == UNMEASURABLE, "both find none"
    assert "trained on 1,280 tokens" in notes_of(longer)
    (by_length,) = HAYSTACK.draw(searched)
    assert by_length.data["method"].values.tolist() == ["without scaling"]
    shutil.copy(tmp_path / "rope" / "training.toml", base)  # now it says that it was trained here
    assert not reads_text(repo) and not reads_text(subject("rope", zoo_path("language/rope")))


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
    assert found["R3"].outcome == UNMEASURABLE, "positions of what it does not do decide nothing"
    example, source = data["example_text"].values, data["example_source"].values
    assert (example[source[source >= 0]] == example[source >= 0]).all()
    (figure,) = mirror.draw(data)
    assert len(figure.figure.axes) == 2 and "Of 2 layers" not in figure.caption


def test_of_many_layers_those_that_mirror_most_are_drawn(results):
    few = drawn(results, "mirror_reversal_repo").isel(seed=0)
    means = few["mirror"].sel(weights="trained").mean("prompt")
    ratio = means.sel(kind="copies") / means.sel(kind="random")
    best = [int(layer) for layer in ratio.sortby(ratio)["layer"].values[:2]]
    more = few.assign_coords(layer=few["layer"] + 10)
    many = xr.concat([few, more], dim="layer", data_vars="minimal")
    (figure,) = mirror.draw(many.assign_attrs(few.attrs))
    titles = [ax.get_title(loc="left").partition(":")[0] for ax in figure.figure.axes]
    wanted = sorted(best) + sorted(layer + 10 for layer in best)
    assert titles == [f"Layer {layer}" for layer in wanted]


def test_several_questions_about_keyed_needles_are_searched_and_drawn(tmp_path):
    """Nobody finds anything after two steps, NoPE neither: so R9 is judged and R4 is not."""
    size = {"length": 32, "first_length": 32, "longest_test": 64, "needles": 2, "doubled": 1}
    size |= {"questions": 1, "test_questions": 1}
    subjects = [
        subject(scheme, trained(tmp_path / scheme, "niah_keys", scheme, task_options=size))
        for scheme in ("repo", "rope", "nope")
    ]
    cache = Cache()
    results = [
        result
        for experiment in (HAYSTACK, attention.ATTENTION)
        for result in results_of(experiment, subjects, TINY, cache)
    ]
    found = verdicts(results)
    assert found["R9", "repo"].outcome == UNMEASURABLE, "RoPE finds none of two needles"
    for label in ("R4", "R4 (producing rows)"):
        assert "finds 0" in notes_of(found[label, "repo"])
    drawings = {drawing.name: drawing for result in results for drawing in result.drawings}
    drawings["haystack_by_length_niah_keys_32"].figure.draw_without_rendering()
    mass = drawings["attention_mass_niah_keys_32"].data
    assert mass["span"].values.tolist()[:2] == ["needle", "query"]


@pytest.mark.parametrize(("followed", "verdict"), [(6, HOLDS), (2, FAILS)])
def test_heads_that_follow_examples_count_beyond_random_weights(followed, verdict):
    chance = np.full((4, 3, 2, 5), 0.5)  # the trained model and three twins, prompts, layers, heads
    chance[0].reshape(3, -1)[:, :followed] = 0.0
    chance[1:, :, 0, :3] = 0.01
    chance[0, 0, 1, 4] = 0.0  # on one prompt alone
    chance[0, :, 1, 3] = np.nan  # a head whose positions are constant
    data = xr.Dataset(
        {
            "variance_between_chance": (("weights", "prompt", "layer", "head"), chance),
            "first_of_row": (("layer", "head"), np.ones((2, 5), bool)),
        },
        {"weights": ["trained", "random 0", "random 1", "random 2"], "layer": [1, 2]},
        {"checkpoint": "mine"},
    )
    (found,) = judged([segments._by_heads(data.assign_coords(head=range(5)))])
    assert (found.estimate.value, found.outcome) == (followed, verdict)
    assert found.estimate.control == "random weights 3"
    assert "layer 1, head 0 follows them most: 0.0 %" in notes_of(found)


@pytest.mark.parametrize(("random", "verdict"), [(0.1, HOLDS), (0.5, FAILS)])
def test_segments_are_followed_beyond_random_weights(random, verdict):
    """Above shuffled edges is not enough where random weights are as far above them."""
    spread = np.linspace(0, 0.02, 4)[:, None, None] + np.zeros((4, 1, 2))  # prompts, layer, heads
    above = np.stack([0.3 + spread, random + spread, random - spread])
    axes = ("weights", "prompt", "layer", "head")
    weights = {"weights": ["trained", "random 0", "random 1"]}
    chance = xr.DataArray(np.zeros_like(above), weights, axes)
    of_edges = {"": chance + 0.2 + above, "_shuffled": chance + 0.2}
    kinds = ("variance_between", "boundary_f1")
    data = {f"{kind}{more}": values for kind in kinds for more, values in of_edges.items()}
    data["variance_between_chance"] = chance
    (found,) = judged([segments._aligned(xr.Dataset(data, attrs={"checkpoint": "mine"}))])
    assert found.outcome == verdict and found.claim is segments.R8_MEAN
    assert f"0.31 beside 2 of the null: mean {random:g}" in notes_of(found)


def test_where_prompts_of_half_the_length_cannot_be_made_r5_is_left_out(tmp_path):
    words = tokenizer("words")
    mine = subject("mine", checkpoint(tmp_path / "model", "repo", len(words), 320, words))
    assert ranges.measure([mine], TINY, Cache()) is None
