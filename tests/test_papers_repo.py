"""RePo's claims: the rules on positions and scores whose answer is known, the cost at the paper's size, and the recipe end to end."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from repo_interp.papers.kit.figure_directory import write_figures
from repo_interp.papers.repo.claims import CLAIMS
from repo_interp.papers.repo.rules import Mirror, flatness, grid_agreement, hybrid_dominates, is_mirror, mirror, spreading
from repo_interp.papers.repo.scores import search
from task_tokenizers import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from repo_interp.errors import InputError
from repo_interp.models.checkpoints import save
from repo_interp.models.reposition import reposition
from repo_interp.papers.kit import lead, paired_lead
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import FAILS, HOLDS, UNMEASURED
from repo_interp.papers.kit.subjects import Options, subjects
from repo_interp.papers.repo import ranges
from repo_interp.papers.repo import recipe as repo
from repo_interp.papers.repo.efficiency import SIZES, _config, counts
from repo_interp.papers.repo.segments import segment_prompts, segments
from repo_interp.shipped import zoo_path
from repo_interp.tasks import make_task
from repo_interp.training.zoo import zoo_entry

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


# ---- the rules ------------------------------------------------------------------------------------------------------


def test_positions_that_run_back_mirror():
    found = mirror(np.array([0, 1, 2, 3, 3, 2, 1, 0.0]), TEXT, SOURCE, COPY)
    assert found.copies == 0
    assert found.elsewhere == 2
    assert found.correlation == pytest.approx(1)
    assert is_mirror(*found)


def test_a_position_a_word_is_no_mirror_though_every_copy_has_the_position_of_its_source():
    by_word = {"a": 0.0, "b": 5.0, "c": 9.0}
    found = mirror(np.array([by_word[word] for word in TEXT]), TEXT, SOURCE, COPY)
    assert found.copies == found.elsewhere == 0
    assert found.correlation == pytest.approx(1)
    assert mirror(np.arange(8.0), TEXT, SOURCE, COPY).correlation == pytest.approx(-1)
    noisy = mirror(np.array([by_word[word] for word in TEXT]) + 0.1 * np.sin(np.arange(8.0) ** 2), TEXT, SOURCE, COPY)
    assert not is_mirror(*noisy)


def test_the_index_and_a_constant_are_no_mirrors():
    assert not is_mirror(*mirror(np.arange(8.0), TEXT, SOURCE, COPY))
    assert not is_mirror(*mirror(np.zeros(8), TEXT, SOURCE, COPY))


def test_mirror_distances_are_those_of_a_loop():
    z = np.random.default_rng(0).normal(size=8)
    found = mirror(z, TEXT, SOURCE, COPY)
    random = [abs(z[c] - z[s]) for c in COPY for s in SOURCE if TEXT[c] != TEXT[s]]
    elsewhere = [abs(z[c] - z[s]) for k, c in enumerate(COPY) for s in SOURCE if TEXT[c] == TEXT[s] and s != SOURCE[k]]
    assert_allclose(found[:3], [np.mean(abs(z[COPY] - z[SOURCE])), np.mean(random), np.mean(elsewhere)])
    assert Mirror._fields == ("copies", "random", "elsewhere", "correlation")


def test_flatness_compares_with_as_many_consecutive_words():
    z = np.array([5.0, 5.5, 0, 1, 2, 3, 4])
    assert flatness(z, [0, 1], range(2, 7)) == pytest.approx(0.5)
    assert flatness(np.arange(7.0), [0, 1], range(2, 7)) == pytest.approx(1)
    assert np.isnan(flatness(np.array([1.0, 2, 3, 3, 3]), [0, 1], [2, 3, 4]))


def test_a_lead_is_judged_over_seeds_where_both_have_several_and_else_over_the_same_prompts():
    prompts = np.array([1.0, 1, 1, 0]), np.array([0.0, 0, 1, 0])
    seeds = lead(np.array([0.9, 0.8, 1.0]), np.array([0.2, 0.3]), *prompts)
    assert seeds.margin == pytest.approx(0.65)
    assert seeds.standard_error == pytest.approx(np.sqrt(0.01 / 3 + 0.005 / 2))
    assert seeds.holds
    single = lead(np.array([0.75]), np.array([0.25, 0.2]), *prompts)
    assert single == paired_lead(*prompts)
    assert single.margin == 0.5
    assert not single.holds
    assert not paired_lead(np.ones(8), np.ones(8)).holds
    assert paired_lead(np.ones(8), np.zeros(8)).holds


def test_spreading_wants_growth_room_and_unevenness():
    rng = np.random.default_rng(0)
    heads = np.array([1.0, 5.0, 20.0])
    short, long = (scale * heads + 0.01 * rng.normal(size=(16, 3)) for scale in (1.0, 1.5))
    assert spreading(short, long, 100, 200).holds
    assert not spreading(long, short, 100, 200).grows
    assert not spreading(short, long, 30, 60).below
    assert not spreading(short[:, :1], long[:, :1], 100, 200).uneven
    index = spreading(np.full((4, 3), 99.0), np.full((4, 3), 199.0), 100, 200)
    assert (index.grows, index.below, index.uneven) == (True, False, False)


def test_the_papers_shares_are_hybrid_dominated_and_those_of_rope_are_not():
    assert hybrid_dominates(0.22, 0.04, 0.74)
    assert not hybrid_dominates(0.0, 1.0, 0.0)
    assert not hybrid_dominates(0.04, 0.08, 0.88)
    assert grid_agreement(np.array([[0.22, 0.04, 0.74], [0.9, 0.0, 0.1]])).tolist() == [True, False]


# ---- cost -----------------------------------------------------------------------------------------------------------


def test_the_papers_model_gets_nine_parameters_in_a_thousand_more_and_the_flops_of_table_6():
    rope, with_repo = counts(_config(SIZES["OLMo-2 1B"]))
    width, layers, heads = 2048, 11, 16
    assert with_repo - rope == layers * (2 * width * width // 8 + width // 8 * heads)
    assert 100 * (with_repo / rope - 1) == pytest.approx(0.9, abs=0.05)
    assert 6 * rope * 50e9 == pytest.approx(3.84e20, rel=2e-3)
    assert 6 * with_repo * 50e9 == pytest.approx(3.87e20, rel=2e-3)


# ---- end to end -----------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The shipped checkpoints, one of them with another seed beside it, and a random one with RePo from layer 1."""
    directory = tmp_path_factory.mktemp("checkpoints")
    paths = {f"reversal/{scheme}": zoo_path(f"reversal/{scheme}") for scheme in ("rope", "nope")}
    paths |= {f"niah/{scheme}": zoo_path(f"niah/{scheme}") for scheme in ("repo", "rope", "nope")}
    seeded = shutil.copytree(zoo_path("reversal/repo"), directory / "reversal")
    for seed in range(1, 4):
        shutil.rmtree(seeded / f"seed-{seed}", ignore_errors=True)
    other = seeded / "seed-1"
    other.mkdir()
    stated = json.loads((seeded / "scores.json").read_text())
    stated["test_sets"] = {name: 0.5 * value for name, value in stated["test_sets"].items()}
    (other / "scores.json").write_text(json.dumps(stated))
    (other / "training.toml").write_text((seeded / "training.toml").read_text().replace("seed = 0", "seed = 1"))
    task = make_task("niah")
    late = checkpoint(directory / "late", "repo@1", task.vocabulary_size, 256, task.tokenizer())
    shutil.copy(zoo_path("niah/repo") / "training.toml", late)
    return paths | {"reversal/repo": seeded, "niah/repo_from_1": late}


@pytest.fixture(scope="module")
def results(given, tmp_path_factory):
    told = []
    cache = Cache(tmp_path_factory.mktemp("cache"))
    found = repo.figures(given, TINY, told.append, cache)
    assert any("niah/repo" in text for text in told)
    return found, cache


def verdicts(results):
    return {(verdict.claim.id, verdict.checkpoint): verdict for result in results for verdict in result.verdicts}


def test_every_claim_has_a_verdict_and_those_without_a_checkpoint_say_why(results):
    found, _ = results
    missing = repo.unmeasured(found)
    assert {verdict.claim.id for verdict in missing} == {"R8", "R8 (lines of code)"}
    assert all(verdict.verdict == UNMEASURED and verdict.note for verdict in missing)
    assert {claim for claim, _ in verdicts(found)} | {verdict.claim.id for verdict in missing} == {claim.id for claim in CLAIMS}
    assert {verdict.claim.id for verdict in repo.unmeasured([])} == {claim.id for claim in CLAIMS}


def test_scores_of_other_seeds_count_and_give_the_spread(results):
    one = verdicts(results[0])["R1 (trained lengths)", "reversal/repo"]
    assert one.ours == pytest.approx(0.75)
    assert one.spread == pytest.approx(np.sqrt(0.125))
    assert one.spread_over == "2 seeds"
    assert one.verdict == FAILS
    table = next(result.data for result in results[0] if result.name == "reversal_by_length")
    assert table["score"].sel(checkpoint="reversal/repo", test_set=2).dropna("seed").values.tolist() == [1.0, 0.5]
    recorded = 1 + len(zoo_entry("reversal/rope").seeds)
    assert table["score"].sel(checkpoint="reversal/rope").dropna("seed", how="all").sizes["seed"] == recorded


def test_the_shipped_checkpoint_mirrors_and_random_weights_do_not(results):
    one = verdicts(results[0])["R2", "reversal/repo"]
    assert one.verdict == HOLDS
    assert one.ours is not None and one.ours <= 0.25
    assert "(random weights: 0)" in one.note


def test_what_both_find_cannot_tell_them_apart(results):
    found = verdicts(results[0])
    assert found["R9", "niah/repo"].verdict == found["R9 (longer)", "niah/repo"].verdict == UNMEASURED
    assert found["R9", "niah/repo_from_1"].verdict == FAILS


def test_the_start_layers_are_compared_where_there_are_several(results):
    found = verdicts(results[0])["R9 (start layer)", "niah/repo, niah/repo_from_1"]
    assert found.verdict == FAILS
    data = next(result.data for result in results[0] if result.name.startswith("haystack_start_layer"))
    assert data["start"].values.tolist() == [0, 1]
    assert data["length"].values.tolist() == [256, 512, 1024]


def test_attention_is_measured_in_both_readings_on_the_same_prompts(results):
    data = next(result.data for result in results[0] if result.name.startswith("attention_mass"))
    mass = data["mass_per_token"]
    assert mass["rows"].values.tolist() == ["generated", "producing"]
    assert mass.sizes["prompt"] == 2
    assert float(mass.sel(checkpoint="niah/repo", rows="producing", span="needle").mean()) > float(
        mass.sel(checkpoint="niah/repo_from_1", rows="producing", span="needle").mean()
    )


def test_ranges_stop_at_nothing_but_what_the_task_can_make(results):
    data = next(result.data for result in results[0] if result.name == "ranges_niah_repo")
    assert data["length"].values.tolist() == [64, 128, 256, 512, 1024]
    assert data.sizes["unit"] == 16


def test_figures_are_written_with_their_data_and_a_second_time_comes_from_the_cache(results, given, tmp_path):
    found, cache = results
    some = [result for result in found if result.name in ("haystack_map_niah_256", "mirror_reversal_repo")]
    files = write_figures(tmp_path / "repo", repo.TITLE, some, repo.unmeasured(found), "make figures", {})
    assert {f"{result.name}.{kind}" for result in some for kind in ("png", "svg", "pdf", "nc")} <= {file.name for file in files}
    assert len(some) == 2
    names = {result.name for result in found}
    assert len(names) == len(found)
    again = repo.figures({"niah/repo": given["niah/repo"]}, TINY, lambda text: None, cache)
    first = next(result.data for result in found if result.name == "efficiency")
    second = next(result.data for result in again if result.name == "efficiency")
    assert_allclose(first["seconds"].values, second["seconds"].values, rtol=0)


def test_options_that_allow_no_spread_are_refused():
    with pytest.raises(InputError, match="spread"):
        Options(prompts=1)
    with pytest.raises(InputError, match="random weights"):
        Options(controls=0)


def test_a_checkpoint_of_no_task_of_ours_gets_text(tmp_path):
    words = tokenizer("words")
    path = checkpoint(tmp_path / "model", "repo@1", len(words), 512, words)
    (one,) = subjects({"mine": path})
    assert (one.kind, one.layout, one.learned) == ("text", "repo@1", (1, 2))
    assert repo.haystacks([one]) == [[one]]
    prompts = segment_prompts(one, "examples", TINY)
    assert len(prompts) == 2 and segment_prompts(one, "lines", TINY) == []
    (result,) = segments(one, TINY, Cache(None))
    assert result.data["variance_between"].sel(weights="trained").dims[-1] == "head"
    assert result.verdicts[0].claim.id == "R8"


def test_a_checkpoint_of_no_task_of_ours_is_asked_for_rulers_needles(tmp_path):
    words = tokenizer("words")
    (one,) = subjects({"mine": checkpoint(tmp_path / "model", "nope", len(words), 320, words)})
    searched = search(one, TINY, Cache(None))
    assert searched.lengths == [320, 640, 1280]
    assert searched.scores["method"].values.tolist() == ["plain"]
    assert searched.scores["score"].shape == (1, 3, 2)
    assert searched.scores["map"].dims == ("method", "depth", "length")
    assert searched.sample([640], "yarn").mean == searched.sample([640], "plain").mean


def test_where_prompts_of_half_the_length_cannot_be_made_r5_is_left_out(tmp_path):
    words = tokenizer("words")
    path = checkpoint(tmp_path / "model", "repo", len(words), 320, words)
    (one,) = subjects({"mine": path})
    assert ranges(one, TINY, Cache(None)) is None
