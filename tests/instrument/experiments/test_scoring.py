"""Scores as a run: the same numbers as the model gives without a bridge, hooks that take part, what
the command leaves, what is drawn.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import artist
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from task_tokenizers import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import repo_interp as ri
from repo_interp import cli
from repo_interp.analysis.score import score_few_shot, task_of
from repo_interp.experiments.responses import generated_responses
from repo_interp.experiments.task_scores import task_scores
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.models.provenance import identity
from repo_interp.plots.views.task_scores import VIEW, map_table, score_grid, score_table
from repo_interp.shipped import zoo_path
from repo_interp.store import OtherQuestion
from repo_interp.tasks import make_task

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}


@pytest.fixture(scope="module")
def bridge():
    return ri.zoo("reversal/repo")


@pytest.fixture(scope="module")
def reversal(bridge):
    return ri.score(bridge, test_sets=["5", "20", "21", "30"], count=8)


@pytest.fixture(scope="module")
def niah():
    return ri.score(ri.zoo("niah/rope"), test_sets=["256", "1024"], count=12)


def test_a_bridge_has_the_scores_of_its_model_bit_for_bit(reversal):
    model = load_model(zoo_path("reversal/repo"))
    alone = task_scores(model, make_task("reversal"), ["5", "20", "21", "30"], count=8)
    assert_array_equal(reversal["scores"]["score"], alone["score"])
    assert_array_equal(reversal["scores"]["log_perplexity"], alone["log_perplexity"])
    assert reversal.attrs["checkpoint"] == "reversal/repo"
    assert reversal.attrs["layout"] == "repo,repo,repo,repo"
    # <bos>, 4 words, the text, Answer:, the text
    assert_array_equal(reversal["scores"]["tokens"], [16, 46, 48, 66])


def test_hooks_on_the_bridge_take_part_and_are_gone_after(bridge, reversal):
    def right():
        return ri.score(bridge, test_sets=["20"], count=8)["scores"]["mean_score"].item()

    names = [f"blocks.{layer}.attn.hook_positions" for layer in range(4)]
    with bridge.hooks(fwd_hooks=[(name, lambda z, hook: 0 * z) for name in names]):
        assert right() == 0
    assert right() == float(reversal["scores"]["mean_score"].sel(test_set="20")) == 1


def test_needles_in_tokens_of_the_model_have_a_function_of_their_own(bridge):
    with pytest.raises(ri.InputError, match="score_needles"):
        ri.score(bridge, "ruler")


def test_a_model_knows_its_task_and_other_tasks_are_asked_for_by_name(bridge):
    path = zoo_path("reversal/repo")
    assert task_of(path).options() == make_task("reversal").options()
    assert task_of(path, longest_test=40).options()["longest_test"] == 40
    assert task_of(path, "niah", "paper").options() == make_task("niah", "paper").options()
    with refused(r"the task niah has \d+ tokens, the checkpoint 39"):
        ri.score(bridge, "niah")
    config = LlamaConfig(vocab_size=39, num_hidden_layers=1, **SIZES)
    nameless = ri.reposition(LlamaForCausalLM(config).eval(), "rope")
    with refused("the model does not say which task it was trained on"):
        ri.score(nameless)
    scores = ri.score(nameless, make_task("reversal"), ["3"], count=2)["scores"]["score"]
    assert scores.shape == (1, 2)


def slow_answer(bridge, tokens, count):
    """Greedy text behind a prompt, without a cache, one token after the other."""
    new = torch.tensor([tokens])
    for _ in range(count):
        with torch.no_grad():
            logits = bridge.original_model(new, use_cache=False).logits
        new = torch.cat((new, logits[:, -1:].argmax(-1)), dim=1)
    return bridge.tokenizer.decode(new[0, len(tokens) :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A decoder as others publish it, with a tokenizer of its own."""
    directory = tmp_path_factory.mktemp("hub")
    given = tokenizer("byte_level_bpe")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(given),
        initializer_range=0.5,
        max_position_embeddings=700,
        num_hidden_layers=2,
        **SIZES,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    given.save_pretrained(directory)
    return directory


def test_needles_are_asked_for_in_a_checkpoints_own_tokens_and_judged_as_generated(hub):
    bridge = ri.load(hub)
    run = ri.score_needles(bridge, [600, 700], count=2, dialect="repo")
    scores = run["scores"]
    assert scores["score"].shape == (2, 2) and (scores["tokens"].values <= [600, 700]).all()
    for row, length in zip(scores["score"].values, (600, 700), strict=True):
        prompts = ri.tasks.niah(
            bridge.tokenizer, length=length, count=2, dialect="repo", answer="none"
        )
        for score, prompt in zip(row, prompts, strict=True):
            said = slow_answer(bridge, prompt.tokens, prompt.attributes["new_tokens"])
            assert score == ri.tasks.niah_score([said], [prompt]) / 100
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
            found.append(any(answer.startswith(each) for each in prompt.attributes["labels"]))
    assert run["scores/score"].values.ravel().tolist() == found
    assert 0 < sum(found) < len(found)
    by_shots = np.reshape(found, (2, 2, 4)).mean(-1).T
    assert run["scores/score_map"].dims == ("shots", "length")
    assert_array_equal(run["scores/score_map"], by_shots)
    assert run["scores"].attrs["rows"] == "rows.tsv"
    assert [name for name, _ in VIEW.figures(run)] == ["scores", "score_map"]
    with refused("wanted at least one number of shots"):
        score_few_shot(bridge, [300], ())


def test_what_a_store_keeps_of_needles_is_of_the_same_haystack(hub, tmp_path):
    """A text that goes on otherwise behind the words of the shortest prompt is another question,
    too.
    """
    essay, shared = tmp_path / "essay.txt", "The dog ran away. " * 25
    asked = partial(
        ri.score_needles, ri.load(hub), [500, 700], variant="single_2", count=1, essay=essay
    )
    essay.write_text(shared + "The cat sat. " * 90)
    asked(store=tmp_path / "store")
    essay.write_text(shared + "A bird flew. " * 90)
    with pytest.warns(OtherQuestion):
        asked(store=tmp_path / "store")


def test_several_needles_have_no_one_depth_and_so_no_map(hub):
    scores = ri.score_needles(ri.load(hub), [700], variant="multivalue", count=2)["scores"]
    assert "score_map" not in scores and np.isin(4 * scores["score"], range(5)).all()
    with refused("tokens"):
        ri.score_needles(ri.load(hub), [20], count=1)


@pytest.mark.usefixtures("no_figures")
def test_the_command_asks_any_checkpoint_for_needles(hub, tmp_path, capsys):
    words = ["ruler", "--test-sets", "600", "--count", "2", "--set", "dialect=repo", "--out"]
    assert cli.main(["score", str(hub), *words, str(tmp_path / "out")]) == 0
    assert "on ruler" in capsys.readouterr().out
    assert cli.main(["score", str(hub), "--out", str(tmp_path / "none")]) == 2
    assert "does not say which task it was trained on" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_dots_are_means_bars_their_errors_and_the_dotted_line_is_where_training_ends(reversal):
    ax = dict(VIEW.figures(reversal))["scores"].axes[0]
    scores = reversal["scores"]
    assert_allclose(artist(ax, "mean reversal/repo").get_xdata(), [5, 20, 21, 30])
    assert_allclose(artist(ax, "mean reversal/repo").get_ydata(), scores["mean_score"])
    bars = np.array(artist(ax, "error reversal/repo").get_segments())
    assert_allclose(bars[:, 1, 1] - bars[:, 0, 1], 2 * scores["standard_error"], atol=1e-12)
    assert artist(ax, "training length").get_xdata()[0] == 20
    assert ax.get_xlabel() == "length (words)"


def test_the_map_writes_per_cent_and_only_where_a_task_has_two_axes(niah, reversal):
    found = {
        text.get_position(): text.get_text() for text in score_grid(niah).figure().axes[0].texts
    }
    cells = np.ndenumerate(niah["scores"]["score_map"].values)
    assert found == {place[::-1]: f"{100 * mean:.0f}" for place, mean in cells if mean == mean}
    with refused("two axes"):
        score_grid(reversal)


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
    mapped = scores["scores"]["score_map"]
    depth, length = first_failing(mapped)
    passes = []
    with as_decoder(bridge).stack.register_forward_hook(lambda *_: passes.append(1)):
        found = ri.explain_cell(scores, depth, length, bridge, most=2)
    compared, layers = found.attrs["passing"], found.dropna()["layer"].nunique()
    # one undisturbed pass of each prompt, not one a head
    assert len(passes) <= found.attrs["failing"] + compared * (2 + layers)
    prompts = task_of(zoo_path("niah/rope"), "niah").prompts(12, 0, str(length))
    right = scores["scores"]["score"].sel(test_set=str(length)).values >= 1
    here = [
        number
        for number, one in enumerate(prompts)
        if round(one.attributes["depth"], -1) == depth and not right[number]
    ]
    failed = [prompts[number] for number in here]
    assert found.attrs["failing"] == len(here) > 0 and compared >= 5
    assert [one.tokens for one in found.attrs["prompts"]][: len(here)] == [
        one.tokens for one in failed
    ]
    assert len(found.attrs["prompts"]) == len(here) + compared
    assert [number for _, number in found.attrs["failing_prompts"]] == here
    lost = ri.analyze(bridge, failed, ("attention_mass",))["attention_mass"]["mass"]
    by_head = 100 * lost.sel(span="needle").mean("prompt")
    for row in found.itertuples():
        assert row.failing == pytest.approx(float(by_head.sel(layer=row.layer, head=row.head)))
        assert row.change == pytest.approx(row.failing - row.passing)
    assert len(found) == 16 and found["effect"].notna().sum() == 2 and found["effect"][0] < -0.5
    assert abs(found["change"][0]) >= found["change"][2:].abs().max()


def test_effects_over_few_passing_prompts_come_with_a_warning(failing):
    scores, bridge = failing
    group = scores["scores"].to_dataset().copy(deep=True)
    passed = np.argwhere(group["score"].values >= 1)
    for place in passed[2:]:
        group["score"][tuple(place)] = 0.0
    few = xr.DataTree.from_dict({"/": scores.to_dataset(), "/scores": group})
    depth, length = first_failing(group["score_map"])
    with pytest.warns(UserWarning, match="2 of the run's prompts passed"):
        ri.explain_cell(few, depth, length, bridge, most=1)


def test_the_map_gives_the_call_for_each_failing_cell(failing):
    scores, _ = failing
    table = map_table(scores)
    failed = np.argwhere(scores["scores"]["score_map"].values < 1)
    assert {*table.calls} == {(row, column + 1) for row, column in failed.tolist()}
    (row, column), call = next(iter(table.calls.items()))
    asked = f"depth={table.rows[row][0]}, length={table.columns[column]}"
    assert call == f'ri.explain_cell(ri.read_run("run.nc"), {asked})'


def test_a_cell_that_cannot_be_explained_is_refused_in_one_line(failing, reversal, hub):
    scores, bridge = failing
    with refused("no prompt fails at depth 100 and length 256"):
        ri.explain_cell(scores, 100, 256, bridge)
    with refused("no map of scores by depth and length"):
        ri.explain_cell(reversal, 0, 12, bridge)
    with refused("scored other weights of niah/rope"):
        ri.explain_cell(scores, 0, 512, ri.zoo("niah/repo"))
    wrong = scores.copy()
    wrong["scores"] = xr.DataTree(scores["scores"].to_dataset().assign_attrs(seed=1))
    with refused("cannot be made again as they were scored"):
        ri.explain_cell(wrong, 0, 512, bridge)
    bridge = ri.load(hub)
    asked = ri.score_needles(bridge, [300], variant="single_1", count=2)
    with refused("no prompt of this run passes"):
        ri.explain_cell(asked, int(asked["scores"]["depth"][0]), 300, bridge)


def test_perplexity_is_drawn_for_tasks_in_nats_alone(niah):
    run = ri.score(ri.zoo("language/rope"), test_sets=["256", "512"], count=3)
    scores = run["scores"]
    assert scores["mean_score"].attrs["units"] == "nat"
    drawn = dict(VIEW.figures(run))
    assert [*drawn] == ["scores", "perplexity_by_length"]
    line = artist(drawn["perplexity_by_length"].axes[0], "mean language/rope").get_ydata()
    assert_allclose(line, np.exp(scores["mean_score"]))
    assert [name for name, _ in VIEW.figures(niah)] == ["scores", "score_map"]


def test_the_table_has_a_row_a_test_set_and_says_what_was_asked(reversal):
    table = score_table(reversal)
    assert table.columns[:2] == ("test set", "exact match") and len(table.columns) == 5
    means = reversal["scores"]["mean_score"].values
    assert [row[:2] for row in table.rows] == [*zip(("5", "20", "21", "30"), means, strict=True)]
    assert table.note == "seed 0, 8 prompts of each set, answers forced."
    assert table in ri.plots.tables(reversal)


def test_a_run_says_which_prompts_each_test_set_had_and_no_path():
    """Found: an absolute path to the tokenizer stood in the run file."""
    asked = {"test_sets": ["256", "512"], "count": 2}
    rope, repo = (
        ri.score(ri.zoo(name), **asked)["scores"] for name in ("language/rope", "language/repo")
    )
    assert_array_equal(rope["prompts_digest"], repo["prompts_digest"])
    assert len(set(rope["prompts_digest"].values)) == 2
    others = ri.score(ri.zoo("language/rope"), **asked, seed=1)["scores"]
    assert not (others["prompts_digest"] == rope["prompts_digest"]).any()
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


def test_answers_are_read_in_the_order_of_the_text():
    task = make_task("reversal")
    model, prompts = load_model(zoo_path("reversal/repo")), task.prompts(4, 0, "3")
    turned = [replace(prompt, generated=prompt.generated[::-1]) for prompt in prompts]
    assert [*map(task.targets, turned)] == [*map(task.targets, prompts)]
    assert task.score(generated_responses(model, task, turned), turned).tolist() == [1, 1, 1, 1]


def test_runs_of_a_scaled_model_say_so():
    plain, scaled = (
        ri.load(zoo_path("niah/rope"), **given) for given in ({}, {"rope_scaling": YARN})
    )
    assert "scaling" not in identity(plain) and identity(scaled)["scaling"] == "yarn 2.0"


def test_test_sets_are_named_by_one_or_several_numbers_or_texts_each_once(bridge):
    for one in ("12", 12, [12], ("012",)):
        scores = ri.score(bridge, test_sets=one, count=2)["scores"]
        assert scores["test_set"].values.tolist() == ["12"]


def test_arguments_of_another_kind_are_refused(bridge):
    language = ri.zoo("language/rope")
    score, needles = partial(ri.score, bridge), partial(ri.score_needles, language, count=1)
    haystack = partial(ri.tasks.niah, language.tokenizer, length=1024)
    for call in (partial(score, test_sets=["3"]), make_task("reversal").prompts, haystack):
        with refused("wanted at least one prompt, got 2.5"):
            call(count=2.5)
        with refused("wanted a seed of 0 or more, got 'zero'"):
            call(count=1, seed="zero")
    for line, call, given in (
        ("^test sets: none was given", score, {"test_sets": []}),
        ("^test sets: 3 was asked for twice", score, {"test_sets": [3, "03"]}),
        ("wanted a depth of 0 to 100", haystack, {"count": 1, "depth": "x"}),
        ("so nothing is", partial(ri.score, language), {"answers": "generated"}),
        *(("number", needles, {"lengths": one}) for one in (300.5, [300, 300])),
    ):
        with refused(line):
            call(**given)
