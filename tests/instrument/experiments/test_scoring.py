"""Scores as a run: the same numbers as the model gives without a bridge, hooks that take part, what
the command leaves, what is drawn.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import artist
from families import model_for
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from task_tokenizers import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import repo_interp as ri
from repo_interp import cli
from repo_interp.analysis.score import score_few_shot
from repo_interp.analysis.trained_task import task_of
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.experiments.responses import generated_responses
from repo_interp.experiments.test_set_scores import task_scores
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.models.provenance import identity
from repo_interp.plots.views.task_scores import VIEW, map_table, score_grid, score_table
from repo_interp.storage.store import OtherQuestion
from repo_interp.tasks import make_task


@pytest.fixture(scope="module")
def bridge():
    return ri.zoo("reversal/repo")


@pytest.fixture(scope="module")
def reversal(bridge):
    return ri.score(bridge, test_sets=["5", "20", "21", "30"], count=8)


def test_a_bridge_has_the_scores_of_its_model_bit_for_bit(reversal):
    model, found = load_model(zoo_path("reversal/repo")), reversal["scores"]
    alone = task_scores(as_decoder(model), make_task("reversal"), ["5", "20", "21", "30"], count=8)
    for name in ("score", "log_perplexity"):
        assert_array_equal(found[name], alone[name])
    assert reversal.attrs["checkpoint"] == "reversal/repo"
    assert reversal.attrs["layout"] == "repo,repo,repo,repo"
    # <bos>, 4 words, the text, Answer:, the text
    assert_array_equal(found["tokens"], [16, 46, 48, 66])


def test_hooks_on_the_bridge_take_part_and_are_gone_after(bridge):
    def right():
        return ri.score(bridge, test_sets=["20"], count=4)["scores"]["mean_score"].item()

    names = [f"blocks.{layer}.attn.hook_positions" for layer in range(4)]
    with bridge.hooks(fwd_hooks=[(name, lambda z, hook: 0 * z) for name in names]):
        assert right() == 0
    assert right() == 1


def test_a_model_knows_its_task_and_other_tasks_are_asked_for_by_name(bridge):
    path = zoo_path("reversal/repo")
    assert task_of(path).options() == make_task("reversal").options()
    assert task_of(path, longest_test=40).options()["longest_test"] == 40
    assert task_of(path, "niah", "paper").options() == make_task("niah", "paper").options()
    with refused(r"the task niah has \d+ tokens, the checkpoint 39"):
        ri.score(bridge, "niah")
    nameless = model_for(make_task("reversal"))
    with refused("the model does not say which task it was trained on"):
        ri.score(nameless)
    scores = ri.score(nameless, make_task("reversal"), ["3"], count=2)["scores"]["score"]
    assert scores.shape == (1, 2)


@torch.no_grad()
def slow_answer(bridge, tokens, count):
    """Greedy text behind a prompt, without a cache, one token after the other."""
    new = torch.tensor([tokens])
    for _ in range(count):
        logits = bridge.original_model(new, use_cache=False).logits
        new = torch.cat((new, logits[:, -1:].argmax(-1)), dim=1)
    return bridge.tokenizer.decode(new[0, len(tokens) :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A decoder as others publish it, with a tokenizer of its own."""
    directory, given = tmp_path_factory.mktemp("hub"), tokenizer("byte_level_bpe")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(given),
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        initializer_range=0.5,
        max_position_embeddings=700,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    given.save_pretrained(directory)
    return directory


def test_needles_are_asked_for_in_a_checkpoints_own_tokens_and_judged_as_generated(hub):
    bridge, lengths = ri.load(hub), [350, 400]
    asked = {"count": 2, "dialect": "repo"}
    run = ri.score_needles(bridge, lengths, **asked)
    scores, found = run["scores"], []
    for length in lengths:
        for prompt in ri.tasks.niah(bridge.tokenizer, length=length, answer="none", **asked):
            said = slow_answer(bridge, prompt.tokens, prompt.attributes["new_tokens"])
            found.append(ri.tasks.niah_score([said], [prompt]) / 100)
    assert scores["score"].values.tolist() == [found[:2], found[2:]]
    assert (scores["tokens"].values <= lengths).all()
    assert scores["score_map"].dims == ("depth", "length")
    assert [name for name, _ in VIEW.figures(run)] == ["scores", "score_map"]


def test_answers_to_few_shot_prompts_follow_where_they_begin_with_a_label(hub, tmp_path):
    """Beside a greedy loop without a cache; with many labels some answers follow by chance."""
    bridge, rows = ri.load(hub), tmp_path / "rows.tsv"
    table = [f"The {noun}\t{label}" for noun in ("cat", "dog") for label in "aehiprstu"]
    rows.write_text("\n".join(["sentence\tlabel", *table]) + "\n")
    run = score_few_shot(bridge, [300, 400], (1, 9), rows, count=4)
    found = []
    for length, shots in product((300, 400), (1, 9)):
        for prompt in ri.tasks.few_shot_prompts(bridge.tokenizer, rows, length, 4, shots):
            text = prompt.text[: prompt.characters["generated"][0][0]]
            assert text.endswith("Label:")
            answer = slow_answer(bridge, bridge.tokenizer(text).input_ids, 3).lstrip()
            found.append(answer.startswith(tuple(prompt.attributes["labels"])))
    assert run["scores/score"].values.ravel().tolist() == found
    assert 0 < sum(found) < len(found)
    mapped = run["scores/score_map"]
    assert_array_equal(mapped.transpose("length", "shots"), np.reshape(found, (2, 2, 4)).mean(-1))
    assert run["scores"].attrs["rows"] == "rows.tsv"
    assert [name for name, _ in VIEW.figures(run)] == ["scores", "score_map"]


def test_what_a_store_keeps_of_needles_is_of_the_same_haystack(hub, tmp_path):
    """A text that goes on otherwise behind the words of the shortest prompt is another question,
    too.
    """
    bridge, essay = ri.load(hub), tmp_path / "essay.txt"
    asked = {"variant": "single_2", "count": 1, "essay": essay, "store": tmp_path / "store"}
    for rest, warns in (
        ("The cat sat. ", nullcontext()),
        ("A bird flew. ", pytest.warns(OtherQuestion)),
    ):
        essay.write_text("The dog ran away. " * 25 + rest * 90)
        with warns:
            ri.score_needles(bridge, [500, 700], **asked)


def test_several_needles_have_no_one_depth_and_so_no_map(hub):
    scores = ri.score_needles(ri.load(hub), [500], variant="multivalue", count=2)["scores"]
    assert "score_map" not in scores and np.isin(4 * scores["score"], range(5)).all()


@pytest.mark.usefixtures("no_figures")
def test_the_command_asks_any_checkpoint_for_needles(hub, tmp_path, capsys):
    words = ["ruler", "--test-sets", "350", "--count", "1", "--set", "dialect=repo", "--out"]
    assert cli.main(["score", str(hub), *words, str(tmp_path / "out")]) == 0
    assert "on ruler" in capsys.readouterr().out
    assert cli.main(["score", str(hub), "--out", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


def test_dots_are_means_and_bars_their_errors(reversal):
    ax, scores = dict(VIEW.figures(reversal))["scores"].axes[0], reversal["scores"]
    means, bars = (artist(ax, f"{of} reversal/repo") for of in ("mean", "error"))
    assert_allclose(means.get_xydata(), np.transpose([[5, 20, 21, 30], scores["mean_score"]]))
    ends = np.array(bars.get_segments())[..., 1]
    assert_allclose(np.diff(ends)[:, 0], 2 * scores["standard_error"], atol=1e-12)
    assert ax.get_xlabel() == "length (words)"


@pytest.fixture(scope="module")
def failing():
    """Scores of a model that fails beyond its training length, and the model."""
    bridge = ri.zoo("niah/rope")
    return ri.score(bridge, "niah", ["256", "512"], count=12), bridge


def first_failing(mapped):
    row, column = np.argwhere(mapped.values < 1)[0]
    return int(mapped["depth"][row]), int(mapped["length"][column])


def test_a_failing_cell_names_the_heads_that_lose_the_needle(failing):
    scores, bridge = failing
    depth, length = first_failing(scores["scores"]["score_map"])
    passes = []
    with as_decoder(bridge).stack.register_forward_hook(lambda *_: passes.append(1)):
        found = ri.explain_cell(scores, depth, length, bridge, most=2)
    attrs, layers = found.attrs, found.dropna()["layer"].nunique()
    # one undisturbed pass of each prompt, not one a head
    assert len(passes) <= attrs["failing"] + attrs["passing"] * (2 + layers)
    prompts = make_task("niah").prompts(12, 0, str(length))
    right = scores["scores"]["score"].sel(test_set=str(length)).values >= 1
    here = [
        number
        for number, one in enumerate(prompts)
        if round(one.attributes["depth"], -1) == depth and not right[number]
    ]
    failed = [prompts[number] for number in here]
    assert attrs["failing"] == len(here) > 0 and attrs["passing"] >= 5
    tokens = [one.tokens for one in attrs["prompts"]]
    assert tokens[: len(here)] == [one.tokens for one in failed]
    assert len(tokens) == len(here) + attrs["passing"]
    assert [number for _, number in attrs["failing_prompts"]] == here
    lost = ri.analyze(bridge, failed, ("attention_mass",))["attention_mass"]["mass"]
    by_head = 100 * lost.sel(span="needle").mean("prompt").transpose("layer", "head")
    ordered = found.sort_values(["layer", "head"])
    assert_allclose(ordered["failing"], by_head.values.ravel(), rtol=1e-6)
    assert_allclose(found["change"], found["failing"] - found["passing"])
    assert len(found) == 16 and found["effect"].notna().sum() == 2 and found["effect"][0] < -0.5
    assert abs(found["change"][0]) >= found["change"][2:].abs().max()


def test_effects_over_few_passing_prompts_come_with_a_warning(failing):
    scores, bridge = failing
    few = scores.copy(deep=True)
    group = few["scores"]
    for place in np.argwhere(group["score"].values >= 1)[2:]:
        group["score"][tuple(place)] = 0.0
    with pytest.warns(UserWarning, match="2 of the run's prompts passed"):
        ri.explain_cell(few, *first_failing(group["score_map"]), bridge, most=1)


def test_the_map_gives_the_call_for_each_failing_cell(failing, reversal):
    table = map_table(failing[0])
    failed = np.argwhere(failing[0]["scores"]["score_map"].values < 1)
    assert {*table.calls} == {(row, column + 1) for row, column in failed.tolist()}
    (row, column), call = next(iter(table.calls.items()))
    asked = f"depth={table.rows[row][0]}, length={table.columns[column]}"
    assert call == f'ri.explain_cell(ri.read_run("run.nc"), {asked})'
    with refused("two axes"):
        score_grid(reversal)


def test_a_cell_that_cannot_be_explained_is_refused_in_one_line(failing, reversal, hub):
    scores, bridge = failing
    wrong, other = scores.copy(), ri.load(hub)
    group = scores["scores"].to_dataset()
    wrong["scores"] = xr.DataTree(group.assign_attrs(seed=1))
    asked = ri.score_needles(other, [300], variant="single_1", count=2)
    first = int(asked["scores"]["depth"][0])
    for line, run, depth, length, model in (
        ("no prompt fails at depth 100 and length 256", scores, 100, 256, bridge),
        ("no map of scores by depth and length", reversal, 0, 12, bridge),
        ("scored other weights of niah/rope", scores, 0, 512, ri.zoo("niah/repo")),
        ("cannot be made again as they were scored", wrong, 0, 512, bridge),
        ("no prompt of this run passes", asked, first, 300, other),
    ):
        with refused(line):
            ri.explain_cell(run, depth, length, model)


ASKED = {"test_sets": ["256", "512"], "count": 2}


@pytest.fixture(scope="module")
def language():
    return ri.score(ri.zoo("language/rope"), **ASKED)


def test_perplexity_is_drawn_for_tasks_in_nats(language):
    drawn, scores = dict(VIEW.figures(language)), language["scores"]
    assert scores["mean_score"].attrs["units"] == "nat"
    assert [*drawn] == ["scores", "perplexity_by_length"]
    line = artist(drawn["perplexity_by_length"].axes[0], "mean language/rope").get_ydata()
    assert_allclose(line, np.exp(scores["mean_score"]))


def test_the_table_has_a_row_a_test_set_and_says_what_was_asked(reversal):
    table, means = score_table(reversal), reversal["scores"]["mean_score"].values
    assert table.columns[:2] == ("test set", "exact match")
    assert [row[:2] for row in table.rows] == [*zip(("5", "20", "21", "30"), means, strict=True)]
    assert table.note == "seed 0, 8 prompts of each set, answers forced."


def test_a_run_says_which_prompts_each_test_set_had_and_no_path(language):
    """Found: an absolute path to the tokenizer stood in the run file."""
    rope = language["scores"]
    repo, others = (
        ri.score(ri.zoo("language/repo"), **ASKED, seed=seed)["scores"] for seed in (0, 1)
    )
    assert_array_equal(rope["prompts_digest"], repo["prompts_digest"])
    assert len({*rope["prompts_digest"].values, *others["prompts_digest"].values}) == 4
    assert rope.attrs["task_tokenizer_file"] == "tokenizer.json"
    assert not [name for name, value in rope.attrs.items() if str(value).startswith("/")]


def test_what_a_store_keeps_is_of_the_model_as_it_computes_now(tmp_path, bridge):
    """No name says that an intervention is under way or that weights were edited."""
    asked = {"test_sets": ["5"], "count": 4, "store": tmp_path}
    plain = ri.score(bridge, **asked)
    with ri.interventions.frozen(bridge), pytest.warns(OtherQuestion, match="another question"):
        frozen = ri.score(bridge, **asked)
    assert plain["scores"]["mean_score"][0] == 1 and frozen["scores"]["mean_score"][0] < 1
    with pytest.warns(OtherQuestion, match="another question"):
        again = ri.score(bridge, **asked)
    assert_array_equal(again["scores"]["log_perplexity"], plain["scores"]["log_perplexity"])


def test_answers_are_read_in_the_order_of_the_text(bridge):
    task, model = make_task("reversal"), bridge.original_model
    turned = [replace(one, generated=one.generated[::-1]) for one in task.prompts(4, 0, "3")]
    assert all([*task.targets(one)] == sorted(one.generated) for one in turned)
    assert task.score(generated_responses(model, task, turned), turned).tolist() == [1, 1, 1, 1]


def test_runs_of_a_scaled_model_say_so(bridge):
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    scaled = ri.load(zoo_path("niah/rope"), rope_scaling=yarn)
    assert (
        "scaling" not in identity(as_decoder(bridge))
        and identity(as_decoder(scaled))["scaling"] == "yarn 2.0"
    )


@pytest.mark.parametrize("one", ["12", 12, ("012",)])
def test_test_sets_are_named_by_one_or_several_numbers_or_texts(one, bridge):
    scores = ri.score(bridge, test_sets=one, count=1)["scores"]
    assert scores["test_set"].values.tolist() == ["12"]


def test_arguments_of_another_kind_are_refused(bridge, hub):
    language, hub = ri.zoo("language/rope"), ri.load(hub)
    score, needles = partial(ri.score, bridge), partial(ri.score_needles, hub)
    haystack = partial(ri.tasks.niah, hub.tokenizer, length=1024)
    for line, call in (
        *(
            ("wanted at least one prompt, got 2.5", partial(call, count=2.5))
            for call in (score, make_task("reversal").prompts, haystack)
        ),
        ("wanted a seed of 0 or more, got 'zero'", partial(score, seed="zero")),
        ("^test sets: none was given", partial(score, test_sets=[])),
        ("^test sets: 3 was asked for twice", partial(score, test_sets=[3, "03"])),
        ("wanted a depth of 0 to 100", partial(haystack, count=1, depth="x")),
        ("so nothing is", partial(ri.score, language, answers="generated")),
        ("number", partial(needles, [300.5])),
        ("number", partial(needles, [300, 300])),
        ("tokens", partial(needles, [20], count=1)),
        ("at least one number of shots", partial(score_few_shot, hub, [300], ())),
        ("score_needles", partial(score, "ruler")),
    ):
        with refused(line):
            call()
