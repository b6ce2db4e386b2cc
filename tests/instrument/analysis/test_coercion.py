"""Prompts of tokens, of texts and of chats, with named spans."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from task_tokenizers import tokenizer

import repo_interp as ri


def test_a_prompt_of_tokens_has_spans_of_tokens():
    bridge = ri.load("niah/repo")
    numbers = list(range(3, 40))
    made = ri.prompt(numbers, bridge, needle=(3, 6), query=[(10, 12), (14, 15)], generated=-2)
    assert made.tokens == tuple(numbers) and made.generated == (35, 36)
    assert made.spans == {"needle": (3, 4, 5), "query": (10, 11, 14)}
    assert made.token_text is not None and len(made.token_text) == 37
    pairs = (10, np.int64(12)), (14, 15)
    for given in (torch.arange(3, 40), np.arange(3, 40)):
        same = ri.prompt(given, bridge, query=pairs, answers="c1")
        assert same.tokens == made.tokens and same.spans == {"query": (10, 11, 14)}
        assert same.answers == ("c1",)


def test_spans_that_no_prompt_of_tokens_has():
    bridge = ri.load("niah/repo")
    wrong = {"needle": ("x", (3, 99), (5, 5), 4, [(1, 2), 7]), "generated": (3, -37, "x")}
    for name, values in wrong.items():
        for value in values:
            with refused(name):
                ri.prompt(list(range(3, 40)), bridge, **{name: value})


@pytest.fixture(scope="module")
def chat_model():
    """What `ri.prompt` reads of a model: a tokenizer whose template writes the BOS, as Llama's."""
    ours = copy.deepcopy(tokenizer("byte_level_bpe"))
    ours.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return SimpleNamespace(tokenizer=ours)


ASKED = [{"role": "user", "content": "The code is 4917. What is the code?"}]


def test_messages_are_what_the_template_makes_of_them(chat_model):
    """Against the tokenizer's own `apply_chat_template`."""
    ours = chat_model.tokenizer
    answered = [*ASKED, {"role": "assistant", "content": "4917"}]
    for messages, begins in ((ASKED, True), (answered, False)):
        made = ri.prompt(messages, chat_model)
        encoded = ours.apply_chat_template(messages, add_generation_prompt=begins)
        assert list(made.tokens) == list(encoded["input_ids"])
        assert made.text.endswith("[assistant]") == begins
    made = ri.prompt(answered, chat_model, needle="4917", generated="4917\n")
    assert [made.text[slice(*ends)] for ends in made.characters["needle"]] == ["4917"]
    assert made.text.index("4917") == made.characters["needle"][0][0]


def test_messages_without_a_template_and_odd_ones_are_one_line(chat_model):
    with refused("a list of messages needs a chat template, and its tokenizer has none"):
        ri.prompt(ASKED, ri.load("reversal/repo"))
    with refused("needs a chat template, and this model has no tokenizer"):
        ri.prompt(ASKED, SimpleNamespace(tokenizer=None))
    for wrong in ({"role": "user"}, {"content": "a"}, {"role": "user", "content": ["a"]}):
        with refused("message 1 of the chat is"):
            ri.prompt([*ASKED, wrong], chat_model)
    with refused("prompt 0 is a message of a chat; ri.prompt"):
        ri.analyze(ri.load("reversal/repo"), ASKED, ("positions",))


def test_a_part_that_the_answer_repeats_is_the_one_outside_of_it(chat_model):
    text = "The code is 4917. What is the code? 4917"
    last = len(ri.prompt(text, chat_model, generated="? 4917").generated) - 1
    for generated in (-last, (" 4917" if text.count(" 4917") == 1 else "? 4917")):
        made = ri.prompt(text, chat_model, needle="4917", generated=generated)
        assert made.characters["needle"] == ((12, 16),)
    with refused("'4917' occurs 2 times"):
        ri.prompt(text, chat_model, needle="4917")
    with refused("'4917' occurs 3 times"):
        ri.prompt(f"4917. {text}", chat_model, needle="4917", generated=-last)
    with refused("'?' occurs 2 times"):
        ri.prompt("What? And? Yes", chat_model, needle="?", generated=-1)
