"""The task `word_count`: prose of the standard library, counted in another way."""

import re
from collections import Counter

import numpy as np
import pytest
from refusals import refused
from task_tokenizers import tokenizer

from position_papers.tasks.word_count import LARGEST, WordCount
from repo_interp.tasks import Response
from repo_interp.tasks.essay import SENTENCE_END


def in_tokens(family, folder):
    tokenizer(family).save_pretrained(folder)
    return WordCount(tokenizer_file=str(folder / "tokenizer.json"), length=16_384)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return in_tokens("byte_level_bpe", tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize("sentences", [2, 8])
def test_the_answer_is_how_often_the_word_stands_in_the_last_sentence(task, sentences):
    for prompt in task.prompts(12, test_set=str(sentences)):
        context, question = prompt.text.split("\n\nNow, tell me how many times word ")
        (word,) = re.findall('^"([a-z]+)" is mentioned in the last sentence. Answer: ', question)
        *earlier, last = (
            re.split(r"[^\w'-]+", part.lower()) for part in SENTENCE_END.split(context)
        )
        value = last.count(word)
        assert len(earlier) == sentences - 1 and any(word in words for words in earlier)
        assert prompt.answers == (str(value),) and prompt.attributes["value"] == value
        read = {
            name: "".join("".join(prompt.token_text[at] for at in places).lower().split())
            for name, places in prompt.all_spans().items()
        }
        assert read["generated"] == str(value)
        assert [read.get(f"needle.{number}") for number in (1, 2)] == [
            word if value >= number else None for number in (1, 2)
        ]
        assert read.get("needle", "") == word * value
        assert read["distractor"] == word * (len(read["distractor"]) // len(word)) != ""
        whole = "".join(SENTENCE_END.split(context)[-1].lower().split())
        assert Counter(read["last"] + word * value) == Counter(whole)
        assert read["query"].startswith("now,tellme") and read["query"].endswith("answer:")


def test_answers_are_equally_frequent_and_no_word_gives_one_away(task):
    prompts = [task.describe(row[row > 0]) for row in task.sample(drawing(), 300, "4").tokens]
    values = Counter(prompt.attributes["value"] for prompt in prompts)
    assert sorted(values) == list(range(LARGEST + 1)) and min(values.values()) > 75
    words = [re.findall('word "([a-z]+)"', prompt.text)[0] for prompt in prompts]
    by_word = {
        word: {p.attributes["value"] for p, of in zip(prompts, words, strict=True) if of == word}
        for word, count in Counter(words).items()
        if count > 6
    }
    assert by_word and all(len(seen) > 1 for seen in by_word.values())


def drawing():
    return np.random.default_rng(0)


def test_prompts_are_scored_and_depend_on_their_number_alone(task):
    prompts = task.prompts(4)
    assert task.prompts(2) == prompts[:2]
    right = [Response(tuple(p.tokens[at] for at in task.targets(p))) for p in prompts]
    assert task.score(right, prompts).tolist() == [1] * 4
    wrong = [Response(tuple(token + 1 for token in response.tokens)) for response in right]
    assert task.score(wrong, prompts).tolist() == [0] * 4
    batch = task.batch(drawing(), 3)
    assert [tuple(np.flatnonzero(row)) for row in batch.targets] == [
        task.describe(row[row > 0]).generated for row in batch.tokens
    ]


def test_a_tokenizer_that_loses_text_is_refused(tmp_path):
    with refused("this tokenizer does not give back the text that it encodes"):
        in_tokens("words", tmp_path).prompts(1)
    with refused("wanted a test set, one of 2, 4, 8; got '3'"):
        in_tokens("byte_level_bpe", tmp_path / "b").prompts(1, test_set="3")
