"""Every synthetic task: the answer is determined by the prompt (a brute-force solver finds it), samplers and
prompts agree.
"""

import numpy as np
import pytest

from repo_interp.errors import InputError
from repo_interp.tasks import Response, Task, digest, make_task, read_prompts, task_names, write_prompts


def solve_reversal(words):
    at = words.index("Answer:")
    return words[at + 1 :], words[5:at][::-1]


def solve_niah(words):
    asked = [at for at, word in enumerate(words) if word == "Q"]
    found = [words[at + 2] for at in range(len(words) - 3) if words[at] == words[at + 1] == "M"]
    solved = [[value for value in found if value.split("v")[0] == words[at + 1]] for at in asked]
    return [words[at + 2] for at in asked], [value for (value,) in solved]


SOLVERS = {"reversal": solve_reversal, "niah": solve_niah}
SYNTHETIC = tuple(SOLVERS)


def words_of(task, row):
    return list(task.vocabulary.text(row))


def sequences(batch):
    """Rows without their padding, with their targets."""
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        length = int(np.flatnonzero(tokens)[-1]) + 1
        assert (tokens[:length] != 0).all()  # padding on the right only
        assert not targets[length:].any()
        yield tokens[:length].tolist(), np.flatnonzero(targets).tolist()


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_the_targets_of_a_batch_follow_from_what_is_before_them(name, progress):
    task = make_task(name)
    batch = task.batch(np.random.default_rng(3), 64, progress)
    assert batch.tokens.dtype == np.int64
    assert batch.targets.dtype == bool
    assert batch.tokens.shape == batch.targets.shape
    assert batch.tokens.shape[1] <= task.training_length
    assert not batch.targets[:, 0].any()
    assert (batch.tokens[:, 0] == 1).all()
    assert batch.tokens.max() < task.vocabulary_size
    for tokens, targets in sequences(batch):
        words = words_of(task, tokens)
        given, solved = SOLVERS[name](words)
        assert [words[at] for at in targets] == given == solved


@pytest.mark.parametrize("name", SYNTHETIC)
def test_batches_reach_the_training_length_and_are_all_different(name):
    task = make_task(name)
    batch = task.batch(np.random.default_rng(0), 256, 1.0)
    assert batch.tokens.shape[1] == task.training_length
    assert len({tuple(row) for row in batch.tokens.tolist()}) > 240
    again = task.batch(np.random.default_rng(0), 256, 1.0)
    assert (again.tokens == batch.tokens).all()


@pytest.mark.parametrize("name", SYNTHETIC)
def test_prompts_of_every_test_set(name, tmp_path):
    task = make_task(name)
    for test_set in task.test_sets[:4] + task.test_sets[-1:]:
        prompts = task.prompts(4, seed=7, test_set=test_set)
        for prompt in prompts:
            words = list(prompt.token_text)
            given, solved = SOLVERS[name](words)
            assert [words[at] for at in task.targets(prompt)] == given == solved
            assert prompt.attributes["test_set"] == test_set
            assert prompt.attributes["task"] == name
            assert set(task.axes) <= prompt.attributes.keys()
            assert prompt.generated
        write_prompts(prompts, tmp_path / "p.jsonl")
        assert read_prompts(tmp_path / "p.jsonl", task.tokenizer()) == prompts


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_sequence_of_a_batch_reads_back_as_a_prompt_with_the_same_targets(name):
    task = make_task(name)
    for tokens, targets in sequences(task.batch(np.random.default_rng(5), 32)):
        prompt = task.describe(tokens)
        assert list(prompt.tokens) == tokens
        assert list(task.targets(prompt)) == targets


@pytest.mark.parametrize("name", SYNTHETIC)
def test_prompts_depend_on_seed_set_and_number_alone(name):
    task = make_task(name)
    prompts = task.prompts(5, seed=3)
    assert task.prompts(2, seed=3) == prompts[:2]
    assert make_task(name, **task.options()).prompts(5, seed=3) == prompts
    assert len({prompt.tokens for prompt in prompts}) > 1
    assert digest(task.prompts(5, seed=4)) != digest(prompts)
    assert digest(task.prompts(5, seed=3, test_set=task.test_sets[-1])) != digest(prompts)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_score_of_right_and_wrong_responses(name):
    task = make_task(name)
    prompts = task.prompts(6)
    right = [Response(tuple(p.tokens[at] for at in task.targets(p))) for p in prompts]
    wrong = [Response(tuple(0 for _ in response.tokens)) for response in right]
    best, worst = task.score(right, prompts), task.score(wrong, prompts)
    assert best.shape == worst.shape == (6,)
    assert (best == 1).all()
    assert (worst == 0).all()
    with pytest.raises(ValueError, match="one response a prompt"):
        task.score(right[:1], prompts)
    with pytest.raises(ValueError, match="tokens in a response"):
        task.score([Response((*right[0].tokens, 1)), *right[1:]], prompts)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_tokenizer_is_the_vocabulary(name, tmp_path):
    """Text of words and back, saved and loaded again; unknown words are refused."""
    from transformers import PreTrainedTokenizerFast

    task = make_task(name)
    task.tokenizer().save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    prompt = task.prompts(1)[0]
    text = " ".join(prompt.token_text[1:])
    assert tuple(loaded(text)["input_ids"]) == prompt.tokens
    assert loaded.decode(prompt.tokens[1:]) == text
    assert len(loaded) == task.vocabulary_size
    assert (loaded.pad_token_id, loaded.bos_token_id) == (0, 1)
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "unknown-word"}')
    with pytest.raises(InputError, match="line 1: the tokenizer cannot encode the text"):
        read_prompts(path, loaded)


@pytest.mark.parametrize("name", task_names())
def test_both_sizes_can_be_made(name):
    for size in ("small", "paper"):
        task = make_task(name, size)
        assert isinstance(task, Task)
        assert task.name == name
        assert task.training_length > 1
        assert task.test_sets


def test_unknown_names_and_options_are_refused():
    for arguments, message in (
        (("reversing", {}), "wanted a task, one of reversal, "),
        (("reversal", {"size": "huge"}), "task reversal: wanted a size, one of small, paper; got 'huge'"),
        (("reversal", {"length": 3}), "task reversal has no option 'length'; it has words, "),
        (("reversal", {"longest": "3"}), "longest is '3'; wanted a int like 20"),
        (("reversal", {"longest": True}), "longest is True"),
        (("reversal", {"longest": 40}), "task reversal: wanted 1 <= shortest"),
        (("reversal", {"words": 1}), "task reversal: wanted 2 to"),
        (("niah", {"needles": 20}), "task niah: wanted 1 to 16 needles, got 20"),
        (("niah", {"questions": 9}), "task niah: wanted 1 to 8 questions, got 9"),
        (("niah", {"first_length": 20}), "task niah: wanted 49 <= first_length"),
    ):
        with pytest.raises(InputError, match=message):
            make_task(arguments[0], **arguments[1])
    for test_set in ("0", "-3", "x", "", "²"):
        with pytest.raises(InputError, match="wanted a test set named by"):
            make_task("reversal").prompts(1, test_set=test_set)
    with pytest.raises(InputError, match="at least 28 tokens, got 20"):
        make_task("niah").prompts(1, test_set="20")
    with pytest.raises(InputError, match="at least one prompt"):
        make_task("niah").prompts(0)


def test_reversal_curriculum_lengths_and_mirror():
    task = make_task("reversal")
    for progress, longest in ((0.0, 6), (0.5, 13), (1.0, 20)):
        batch = task.batch(np.random.default_rng(0), 2000, progress)
        lengths = batch.targets.sum(axis=1)
        assert set(lengths) == set(range(2, longest + 1))
    (prompt,) = task.prompts(1, test_set="25")
    source = prompt.attributes["source"]
    assert [prompt.tokens[at] for at in source] == [prompt.tokens[at] for at in prompt.generated]
    assert source == list(prompt.spans["words"])[::-1]
    assert [prompt.token_text[at] for at in prompt.spans["instruction"]] == [
        "Reverse",
        "the",
        "following",
        "words:",
    ]
    batch = task.sample(np.random.default_rng(0), 500, "20")
    words = batch.tokens[:, 5:25]
    assert len(np.unique(words)) == 32
    assert any(len(set(row)) < 20 for row in words.tolist())  # with replacement


def test_small_niah_is_what_it_says():
    task = make_task("niah")
    assert task.test_sets == ("256", "512", "1024")
    assert task.batch(np.random.default_rng(0), 4, 0.0).tokens.shape == (4, 64)
    assert task.batch(np.random.default_rng(0), 4, 0.5).tokens.shape == (4, 160)
    batch = task.batch(np.random.default_rng(0), 60)
    assert (batch.targets.sum(axis=1) == 8).all()
    for row in batch.tokens.tolist():
        prompt = task.describe(row)
        assert "distractor" not in prompt.spans
        assert len(prompt.spans["needle"]) == len(prompt.spans["query"]) * 3 // 2 == 24
        assert sorted(prompt.tokens[at] for n in range(1, 9) for at in prompt.spans[f"needle.{n}.value"]) == sorted(
            prompt.tokens[at] for at in prompt.generated
        )
    batch = task.sample(np.random.default_rng(0), 600, "256")
    needles, depths = [], []
    for row in batch.tokens:
        prompt = task.describe(row.tolist())
        words = prompt.token_text
        assert [words[at] for at in prompt.spans["needle.1.key"]] == ["M", "M"]
        assert words[prompt.spans["needle.1.value"][0]] == words[-1]
        assert len(prompt.spans["distractor"]) == 21
        assert words.count("M") == 16
        classes = [words[at].split("v")[0] for at in range(len(words) - 3) if words[at - 1] == words[at - 2] == "M"]
        assert len(set(classes)) == 8
        needles.append(words[-1])
        depths.append(prompt.attributes["depth"])
    assert len(set(needles)) > 110
    assert min(depths) < 3
    assert max(depths) > 97
    assert 45 < np.mean(depths) < 55
    tight = make_task("niah", first_length=49, length=49, longest_test=49)
    assert (tight.batch(np.random.default_rng(0), 8).tokens == tight.vocabulary["M"]).sum() == 8 * 16
    alone = make_task("niah", needles=1, questions=1).prompts(1)[0]
    assert "distractor" not in alone.spans
