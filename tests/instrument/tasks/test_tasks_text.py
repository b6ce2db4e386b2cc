"""Tasks on any tokenizer's tokens and on text: copying, random tokens, few-shot rows, and language
modelling on a corpus.
"""

import copy
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from copied import assert_copied, picked
from refusals import refused
from task_tokenizers import tokenizer
from tokenizers import Regex, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from position_papers.tasks.corpus import corpus
from repo_interp.tasks import Response, make_task, read_prompts, write_prompts
from repo_interp.tasks.copying import copying_prompts, ordinary_tokens
from repo_interp.tasks.essay import standard_library_sources
from repo_interp.tasks.few_shot_text import (
    GRIM,
    KIND,
    few_shot_prompts,
    following,
    own_rows,
    read_rows,
)
from repo_interp.tasks.random_tokens import random_token_prompts
from repo_interp.tasks.reversal import reversal_prompts

SOME = ["byte_level_bpe", "metaspace_unigram"]
GLUE = {
    "sst2.tsv": 'sentence\tlabel\na gorgeous , witty film\t1\nno "movement , no yuks\t0\nall '
    "of it dull\t0\n",
    "qnli.tsv": "index\tquestion\tsentence\tlabel\n0\tWho came?\tShe "
    "came.\tentailment\n1\tWhen?\tNever so.\tnot_entailment\n"
    "2\tWhy?\tBecause.\tentailment\n",
}


def text_of(prompt, span):
    return prompt.text[slice(*prompt.characters[span][0])].strip()


@pytest.mark.parametrize("family", SOME)
def test_prompts_of_ordinary_tokens(family, tmp_path):
    one = tokenizer(family)
    bos = one.bos_token_id
    for prompt in copying_prompts(one, sequences=9, count=3):
        assert len(prompt.tokens) == 1 + 12 * 10 and prompt.tokens[0] == bos
        assert not set(prompt.tokens[1:]) & set(one.all_special_ids)
        assert_copied(prompt)
        key = picked(prompt.tokens, prompt.spans["needle.1.key"])
        assert picked(prompt.tokens, prompt.spans["query"]) == key
    prompts = random_token_prompts(one, length=1000, count=40)
    write_prompts(prompts, tmp_path / "p.jsonl")
    assert read_prompts(tmp_path / "p.jsonl", one) == prompts
    assert random_token_prompts(one, length=1000, count=1) == prompts[:1]
    drawn = np.array([prompt.tokens for prompt in prompts])
    assert (drawn[:, 0] == bos).all() and drawn.shape == (40, 1000)
    assert set(drawn[:, 1:].ravel()) == set(ordinary_tokens(one))
    for make, size in ((copying_prompts, "sequences"), (random_token_prompts, "length")):
        with refused("wanted at least one of"):
            make(one, **{size: 0})


@pytest.mark.parametrize("family", SOME)
def test_words_to_reverse(family):
    one = tokenizer(family)
    prompts = reversal_prompts(one, words=12, count=3, seed=2)
    for prompt in prompts:
        assert prompt.tokens[0] == one.bos_token_id and prompt.tokens.count(one.bos_token_id) == 1
        said = [text_of(prompt, f"words.{n}") for n in range(1, 13)]
        assert prompt.answers == (" ".join(reversed(said)),)
        assert prompt.text.endswith(f"{' '.join(said)} Answer: {prompt.answers[0]}")
        assert_copied(prompt)
        source = prompt.attributes["source"]
        assert sorted(source) == sorted(prompt.spans["words"])
        assert tuple(source[: len(prompt.spans["words.12"])]) == prompt.spans["words.12"]
        assert prompt.spans["instruction"][0] == 1
    assert reversal_prompts(one, words=12, count=1, seed=2) == prompts[:1]
    with refused("words"):
        reversal_prompts(one, words=0)


def test_words_to_reverse_stand_behind_a_bos_that_the_tokenizer_does_not_put_there():
    """As SmolLM2's has it: else the instruction's first token is the one that attention rests
    on.
    """
    backend = copy.deepcopy(tokenizer("byte_level_bpe").backend_tokenizer)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    assert bare("Answer:")["input_ids"][0] != bare.bos_token_id
    (with_one,), (prompt,) = (
        reversal_prompts(each, words=5, count=1) for each in (tokenizer("byte_level_bpe"), bare)
    )
    assert (prompt.tokens, prompt.spans) == (with_one.tokens, with_one.spans)
    assert prompt.attributes == with_one.attributes


def test_words_that_are_split_otherwise_in_the_answer_are_refused():
    backend = copy.deepcopy(tokenizer("byte_level_bpe").backend_tokenizer)
    together = pre_tokenizers.Split(Regex("Answer: ."), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [together, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    one = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    with refused("no token has a source"):
        reversal_prompts(one, words=3)


@pytest.mark.parametrize("family", ["byte_level_bpe", "words"])
def test_few_shot_text(family):
    one = tokenizer(family)
    prompts = few_shot_prompts(one, length=256, count=4)
    assert few_shot_prompts(one, length=256, count=1) == prompts[:1]
    for prompt in prompts:
        assert 256 - 40 < len(prompt.tokens) <= 256
        shown = {text_of(prompt, f"examples.{n}.label") for n in range(1, 6)}
        assert sorted(shown) == prompt.attributes["labels"] == ["0", "1"]
        assert prompt.text.endswith(f"Label: {prompt.answers[0]}")
        asked = text_of(prompt, "query")
        adjective = asked.split(" is ")[1].split(".")[0]
        assert adjective in (KIND if prompt.answers[0] == "1" else GRIM)
        assert prompt.text.count(asked) == 1
        assert text_of(prompt, "padding").startswith("The grass is green. The sky is blue.")


def test_our_own_rows_are_balanced_and_distinct():
    rows = own_rows()
    assert len(rows) == len(set(rows)) > 300
    assert sum(row.label == "1" for row in rows) * 2 == len(rows)
    assert not set(KIND) & set(GRIM)
    for row in rows:
        ((_, text),) = row.texts
        assert text.split()[1] != text.split()[-1].removesuffix(".")


@pytest.mark.parametrize("name", GLUE)
def test_glue_rows(name, tmp_path):
    path = tmp_path / name
    path.write_text(GLUE[name], encoding="utf-8")
    labels = [row.label for row in read_rows(path)]
    assert len(labels) == 3
    prompts = few_shot_prompts(tokenizer("byte_level_bpe"), rows=path, length=256, count=6, shots=2)
    for prompt in prompts:
        assert prompt.attributes["labels"] == sorted(set(labels)) and prompt.answers[0] in labels
    found = [f"{column}: " in prompts[0].text for column in ("Sentence", "Question", "Index")]
    assert found == [True, name == "qnli.tsv", False]


def test_following_counts_any_label_of_the_set():
    prompts = few_shot_prompts(tokenizer("words"), length=200, count=4)
    assert following([" 1\n", "0", "positive", ""], prompts).tolist() == [1, 1, 0, 0]
    with refused("one output per prompt"):
        following(["1"], prompts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text\tclass\na\tb\n", "wanted a header with `label`"),
        (b"label\n1\n", "columns of text"),
        (b"sentence\tlabel\na\t1\nb\n", "line 3: wanted 2 cells, got 1"),
        (b"sentence\tlabel\na\t1\nb\t\n", "line 3: a text or the label is empty"),
        (b"sentence\tlabel\na\t1\nb\t1\n", "rows of at least two labels"),
        (b"sentence\tlabel\ncaf\xe9\t1\n", "byte 18 is not UTF-8"),
    ],
)
def test_broken_tables(content, message, tmp_path):
    (tmp_path / "rows.tsv").write_bytes(content)
    with refused(message):
        few_shot_prompts(tokenizer("words"), rows=tmp_path / "rows.tsv", length=256, count=1)


def test_few_shot_text_that_cannot_be_made(tmp_path):
    (tmp_path / "rows.tsv").write_text(GLUE["sst2.tsv"])
    for arguments, message in (
        ({"rows": tmp_path / "absent.tsv"}, "there is no file"),
        ({"rows": tmp_path / "rows.tsv", "shots": 3}, "wanted more rows than the 3 shots, got 3"),
        ({"length": 40}, "5 examples take at least"),
        ({"count": 0}, "at least one prompt"),
    ):
        with refused(message):
            few_shot_prompts(tokenizer("words"), **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty documents of words that count up, so that every window can be placed."""
    path = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        lines = [
            f"document {number} line {line} über {line * 7 % 13} <pad> <bos>" for line in range(60)
        ]
        (path / f"{number:02}.txt").write_text("\n".join(lines), encoding="utf-8")
    (path / "ignored.bin").write_bytes(b"\xff\xfe")
    return path


def language(folder, **options):
    if "tokenizer_file" not in options:
        options["tokens"] = 300
    return make_task("language", corpus=str(folder), length=32, longest_test=128, **options)


@pytest.mark.parametrize(
    ("family", "named"),
    [
        (None, "bos_token"),
        ("byte_level_bpe", "bos_token"),
        ("metaspace_unigram", "eos_token"),
    ],
)
def test_language_windows_are_of_the_corpus(folder, tmp_path, family, named):
    """In tokens of its own and of any checkpoint, whose documents begin with its beginning of text,
    or its end of text; found: only tokenizers of ours were taken.
    """
    if family:
        saved_tokenizer(tokenizer(family), tmp_path, **{"bos_token": None, named: "<bos>"})
        options = {"tokenizer_file": str(tmp_path / "tokenizer.json")}
    else:
        options = {"tokens": 300}
    task = language(folder, **options)
    known, data = task.tokenizer(), task.data
    first = known.convert_tokens_to_ids("<bos>")
    assert task.vocabulary_size == len(known) == (len(tokenizer(family)) if family else 300)
    batch = task.batch(np.random.default_rng(0), 64)
    assert batch.tokens.shape == (64, 32) and batch.targets[:, 1:].all()
    assert (batch.tokens[:, 0] == first).all()
    assert family or not (batch.tokens == 0).any()  # "<pad>" in a document is text
    counts = [(tokens == first).sum() for tokens in (data.training, data.held_out)]
    assert counts == [38, 2] and data.start == first
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.txt"))]
    held_out = [texts.pop(39), texts.pop(19)][::-1]
    # the last one may be joined to what follows
    own = known(held_out[0].split(" <pad>")[0], add_special_tokens=False)["input_ids"][:-1]
    assert data.held_out[1 : 1 + len(own)].tolist() == own
    for prompt in task.prompts(5, test_set="128"):
        assert len(prompt.tokens) == 128 and task.targets(prompt) == tuple(range(1, 128))
        assert prompt.tokens[0] == first and first not in prompt.tokens[1:]
        whole = known.decode(prompt.tokens[1:]).strip("\ufffd")
        if "<unk>" not in whole:
            # a leading space, half a character
            assert abs(prompt.attributes["bytes"] - len(whole.encode())) <= 4
            assert sum(whole in document for document in held_out) == 1
            assert not any(whole in document for document in texts)
    if family is None:
        assert sum(data.bytes[token] for token in data.held_out) == len("".join(held_out).encode())


def test_language_is_deterministic_and_scored_in_nats(folder):
    task = language(folder)
    state, tokens = task.tokenizer().backend_tokenizer.to_str(), task.data.training
    corpus.cache_clear()
    again = language(folder)
    assert again.tokenizer().backend_tokenizer.to_str() == state
    assert np.array_equal(again.data.training, tokens)
    assert again.prompts(2, seed=1) == task.prompts(2, seed=1)
    prompts = task.prompts(2)
    responses = [Response(prompt.tokens[1:], tuple(np.linspace(-2, 0, 31))) for prompt in prompts]
    assert task.score(responses, prompts) == pytest.approx([1.0, 1.0])


def test_language_with_the_tokenizer_of_an_earlier_task(folder, tmp_path):
    given = language(folder).tokenizer()
    given.save_pretrained(tmp_path)
    (tmp_path / "more.txt").write_text("other text altogether\n" * 1000)
    loaded = make_task(
        "language",
        corpus=str(tmp_path / "more.txt"),
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        length=32,
    )
    ours = loaded.tokenizer()
    assert ours.get_vocab() == given.get_vocab()
    assert "other" in ours.decode(loaded.batch(np.random.default_rng(0), 1).tokens[0][2:])
    bare = given("line 7", add_special_tokens=False)["input_ids"]
    assert ours("line 7")["input_ids"] == [1, *bare]
    assert loaded.test_sets == ("32", "64", "128", "256", "512", "1024")
    with refused("no held-out document has 1023 tokens"):
        loaded.prompts(1, test_set="1024")


def saved_tokenizer(given, folder, **changed):
    """Save a tokenizer with keys of its configuration changed."""
    given.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def test_language_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 5000)
    saved_tokenizer(tokenizer("words"), tmp_path / "nameless", bos_token=None)
    whole = (tmp_path / "nameless" / "tokenizer.json").read_bytes()
    (tmp_path / "alone.json").write_bytes(whole)
    for option, path, message in (
        ("corpus", "absent", "No such file"),
        ("corpus", "short.txt", "at least 10,000 characters"),
        ("corpus", "latin.txt", "it is not UTF-8"),
        ("tokenizer_file", "absent.json", "wanted a tokenizer.json"),
        ("tokenizer_file", "alone.json", "with its tokenizer_config.json beside it"),
        ("tokenizer_file", "nameless/tokenizer.json", "neither a beginning nor an end of text"),
    ):
        options = {"corpus": str(folder), option: str(tmp_path / path)}
        with refused(message):
            make_task("language", **options).batch(np.random.default_rng(0), 1)


def test_the_standard_library_is_a_corpus_without_its_tests():
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.relative_to(root) for path in standard_library_sources(root)]
    assert {Path("argparse.py"), Path("json/decoder.py")} <= set(sources)
    parts = {part for path in sources for part in path.parts}
    assert not {"test", "tests", "site-packages", "encodings"} & parts
    assert len(sources) == len(set(sources)) > 300
