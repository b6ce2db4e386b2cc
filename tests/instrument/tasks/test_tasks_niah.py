"""RULER's needle in a haystack: its facts, exact lengths and depths, spans that hold what they say,
scores.
"""

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from task_tokenizers import tokenizer

from repo_interp.tasks import niah, niah_score, niah_scores
from repo_interp.tasks.essay import SENTENCE_END, essay
from repo_interp.tasks.haystacks import DEPTHS, NOISE, join_names
from repo_interp.tasks.niah import VARIANTS
from repo_interp.tasks.prompt.text import count_tokens, largest_size

WORD = r"[a-z]+-[a-z]+"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
PATTERNS = {"words": WORD, "numbers": r"[1-9]\d{6}", "uuids": UUID}


def characters(prompt, span):
    return [prompt.text[start:end] for start, end in prompt.characters[span]]


def haystack(prompt):
    """The text between the first line and the question."""
    return before(prompt, "query")[:-1]


def before(prompt, span):
    """The text between the first line and a span."""
    return prompt.text[prompt.text.index("\n") + 1 : prompt.characters[span][0][0]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ruler_s_facts(variant):
    """Needles, keys, values and questions by the benchmark's description, read back with regular
    expressions.
    """
    facts = VARIANTS[variant]
    singular = facts.values * facts.queries == 1
    for prompt in niah(tokenizer("words"), variant, 1200, 3, seed=5):
        kind = facts.value_type.removesuffix("s") if singular else facts.value_type
        a, be, what = ("A", "is", "is") if singular else ("Some", "are", "are all")
        noun = f"special magic {kind}"
        assert prompt.text.split("\n")[0] == (
            f"{a} {noun} {be} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards."
        )
        needles = re.findall(
            rf"One of the special magic {facts.value_type} for ({PATTERNS[facts.key_type]}) is: "
            rf"({PATTERNS[facts.value_type]})\.",
            haystack(prompt),
        )
        assert len({value for _, value in needles}) == len(needles)
        lines = haystack(prompt).split("\n")
        size = prompt.attributes["haystack_size"]
        assert {
            "needle": len(needles) == len(lines) == size + 1,
            "noise": lines.count(NOISE) == len(lines) - 1 == size and len(needles) == 1,
            "essay": len(lines) == 1 and len(needles) == facts.keys * facts.values,
        }[facts.haystack]
        question, prefix = (
            characters(prompt, f"query.{part}")[0] for part in ("question", "prefix")
        )
        asked = re.fullmatch(
            rf"What {what} the {noun} for (.*) mentioned in the provided text\?", question
        )[1]
        assert prefix == f" The {noun} for {asked} mentioned in the provided text {be}"
        keys = re.findall(PATTERNS[facts.key_type], asked)
        assert len(keys) == facts.queries and asked == join_names(keys)
        found = tuple(value for key in keys for name, value in needles if name == key)
        assert prompt.answers == found and len(found) == facts.values * facts.queries
        assert prompt.text.endswith(f"{prefix} {join_names(prompt.answers)}")


@pytest.mark.parametrize("variant", ["single_1", "multikey_3", "multivalue"])
@pytest.mark.parametrize("family", ["byte_level_bpe", "metaspace_unigram"])
def test_spans_hold_what_they_say(variant, family):
    """Read with the naked eye: the characters of a span; tokens of any are in test_tasks_spans."""
    for prompt in niah(tokenizer(family), variant, 1000, 2):
        numbers = range(1, len(prompt.answers) + 1)
        assert len(prompt.attributes["depths"]) == len(numbers)
        for number in numbers:
            sentence, key, value = (
                characters(prompt, f"needle.{number}{part}")[0] for part in ("", ".key", ".value")
            )
            assert re.fullmatch(
                rf"One of the special magic [a-z]+ for {key} is: {value}\.", sentence
            )
            assert value in prompt.answers
            assert key in characters(prompt, "query.key")[0]
        starts = [prompt.characters[f"needle.{number}"][0][0] for number in numbers]
        assert starts == sorted(starts)
        others = characters(prompt, "distractor") if variant.startswith("multikey") else []
        assert all(text.startswith("One of the special") for text in others)
        assert prompt.spans["query"][-1] + 1 == prompt.generated[0]
        assert prompt.generated == tuple(range(prompt.generated[0], len(prompt.tokens)))


@pytest.mark.parametrize(
    ("family", "length", "reserve"),
    [("byte_level_bpe", 2048, 128), ("metaspace_unigram", 600, 0)],
)
@pytest.mark.parametrize("variant", ["single_1", "single_2", "multikey_3"])
def test_lengths_are_exact(variant, family, length, reserve):
    """Prompt, prefix and the reserve fit; one more word or line would not."""
    count = partial(count_tokens, tokenizer=tokenizer(family))
    for prompt in niah(tokenizer(family), variant, length, 2, answer="none", reserve=reserve):
        # of a Python version's docstrings: some have forty tokens
        *_, word = essay().words(prompt.attributes["haystack_size"] + 1)
        # keys differ in tokens
        line = count(haystack(prompt).split("\n")[0]) + 12
        unit = {"noise": count(NOISE + "\n"), "essay": count(f" {word}"), "needle": line}
        assert prompt.generated == ()
        assert prompt.text.endswith(prompt.attributes["prefix"])
        assert len(prompt.tokens) == count(prompt.text)
        slack = length - reserve - len(prompt.tokens)
        assert 0 <= slack < max(unit[VARIANTS[variant].haystack], 12)


def test_the_search_finds_the_edge_in_few_calls():
    for slope, budget in ((26.0, 3968), (0.4, 99), (30.0, 130_944), (5.0, 5), (5.0, 0)):
        calls = []

        def count(size, slope=slope, calls=calls):
            calls.append(size)
            return int(slope * size) + (size % 7 == 3)

        size = largest_size(count, budget)
        assert size == 0 if count(1) > budget else count(size) <= budget < count(size + 1)
        assert len(calls) < 20


def in_dialects(variant):
    return (
        niah(tokenizer("words"), variant, 800, 1, dialect=name)[0] for name in ("ruler", "repo")
    )


def test_dialects():
    ruler, repo = in_dialects("multiquery")
    assert ruler.attributes["prefix"].startswith(" The special magic numbers for ")
    assert repo.attributes["prefix"] == "\n" + ruler.attributes["prefix"][1:]
    assert (ruler.attributes["new_tokens"], repo.attributes["new_tokens"]) == (128, 50)


def assert_behind_the_sentences_of(prompt, number, depth):
    """A needle stands where its depth says, whatever other needles stand before it."""
    sentences = essay().sentences(prompt.attributes["haystack_size"])
    wanted = sentences[: int(len(sentences) * depth / 100)]
    found = before(prompt, f"needle.{number}")
    found = re.sub(r"One of the special magic numbers for \S+ is: \d+\. ", "", found)
    assert found == "".join(f"{sentence} " for sentence in wanted)


def test_essay_depths_are_ruler_s():
    assert tuple(np.round(np.linspace(0, 100, 40)).astype(int)) == DEPTHS
    prompts = niah(tokenizer("words"), "multiquery", 1500, 12)
    assert len({depth for prompt in prompts for depth in prompt.attributes["depths"]}) > 15
    for prompt in prompts:
        depths = prompt.attributes["depths"]
        assert depths == sorted(set(depths)) and set(depths) <= set(DEPTHS)
        for number, depth in enumerate(depths, start=1):
            assert_behind_the_sentences_of(prompt, number, depth)


@pytest.mark.parametrize("variant", ["single_1", "multikey_1", "multikey_2"])
@pytest.mark.parametrize("depth", [0, 25, 100])
def test_a_depth_can_be_asked_for(variant, depth):
    for prompt in niah(tokenizer("words"), variant, 1500, 2, depth=depth):
        assert prompt.attributes["depth"] == depth
        if variant == "multikey_1":
            assert_behind_the_sentences_of(prompt, 1, depth)
        else:
            lines = round(prompt.attributes["haystack_size"] * depth / 100)
            assert before(prompt, "needle.1").count("\n") == lines


def test_lines_are_drawn_uniformly():
    prompts = niah(tokenizer("words"), "single_1", 400, 30)
    depths = [prompt.attributes["depth"] for prompt in prompts]
    assert min(depths) < 15 and max(depths) > 80 and 35 < np.mean(depths) < 65


def test_a_prompt_depends_on_its_seed_and_number_alone():
    asked = partial(niah, tokenizer("words"), "multikey_2", 600)
    first = asked(3, seed=1)
    assert asked(1, seed=1) == first[:1]
    assert len({prompt.text for prompt in [*first, *asked(1, seed=2)]}) == 4


def test_scores():
    """Substring, any case, mean over references; the second dialect counts the prefix as output."""
    ruler, repo = in_dialects("multivalue")
    one, two, three, four = ruler.answers
    assert niah_score([f"{four}, {three}; {two}\n{one}!"], [ruler]) == 100
    several = niah_scores([f"{one}", "", f"{one}{two}{three}"], [ruler, ruler, repo])
    assert several.tolist() == [25, 0, 75]
    (uuid,) = niah(tokenizer("words"), "multikey_3", 800, 1)
    assert niah_score([uuid.answers[0].upper()], [uuid]) == 100
    key = characters(repo, "query.key")[0]
    for dialect, score in ((repo, 100), (ruler, 0)):
        in_prefix = SimpleNamespace(answers=(key,), attributes=dialect.attributes)
        assert niah_score([""], [in_prefix]) == score
    with refused("one output per prompt, got 0 for 1"):
        niah_score([], [ruler])


def test_essays_from_a_file_and_from_docstrings(tmp_path):
    path = tmp_path / "essay.txt"
    path.write_text("First one.  Second\n\n(one)? Third e.g. Bob. ünd so", encoding="utf-8")
    words = "First one. Second (one)? Third e.g. Bob. ünd so First one. Second"
    assert essay(path).words(12) == words.split()
    assert essay(path).sentences(9) == ["First one.", "Second (one)?", "Third e.g. Bob. ünd so"]
    prompt = niah(tokenizer("words"), "single_2", 600, 1, essay=path)[0]
    assert "ünd so First one. Second" in prompt.text
    path.write_bytes(b"\xef\xbb\xbfAnother text now.\r\n")
    assert essay(path).words(3) == ["Another", "text", "now."], (
        "a file is read again, without the mark of its encoding"
    )
    assert essay().words(3000)[:40] == essay().words(40)
    sentences = essay().sentences(3000)
    assert np.median([len(sentence.split()) for sentence in sentences]) > 6
    assert all(SENTENCE_END.split(sentence) == [sentence] for sentence in sentences)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"answer": "yes"}, "as the answer"),
        ({"length": 200}, r"a multikey_1 prompt takes at least \d+ tokens"),
        ({"count": 0}, "at least one prompt"),
        ({"variant": "multivalue", "depth": 50}, "asks for several needles"),
        ({"essay": "absent.txt"}, r"absent\.txt: .*No such file"),
        ({"tokenizer": None}, "there is none"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, message):
    with refused(message):
        niah(**{"tokenizer": tokenizer("words"), "length": 600, "count": 1, **arguments})


@pytest.mark.parametrize(
    ("content", "message"), [(b" \n", "the file is empty"), (b"caf\xe9", "not UTF-8")]
)
def test_an_essay_without_text_is_refused(tmp_path, content, message):
    (tmp_path / "essay.txt").write_bytes(content)
    with refused(message):
        niah(tokenizer("words"), "single_2", 600, 1, essay=tmp_path / "essay.txt")
