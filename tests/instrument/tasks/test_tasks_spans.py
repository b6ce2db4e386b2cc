"""Which tokens a span of characters has: closed forms, a slow reference on real tokenizers, and
spans that do not fit together.
"""

import numpy as np
import pytest
from refusals import refused
from task_tokenizers import FAMILIES, tokenizer

from repo_interp.tasks import prompt_from_text
from repo_interp.tasks.prompt.text import MarkedText, encode, token_spans

HARD = "Die Straße: One of the special magic numbers for naïve-café🙂 is: 7654321.東京は大きい。 Привет"
"""A needle at the edges of tokens, with no space before or after it, and characters of two to four
bytes.
"""


def test_tokens_of_no_width_belong_to_nothing_and_shared_characters_to_all():
    offsets = [(0, 0), (0, 1), (0, 1), (0, 1), (1, 2), (2, 2)]
    assert token_spans(offsets, {"needle": ((0, 1),), "query": ((1, 2),)}, 2) == {
        "needle": (1, 2, 3),
        "query": (4,),
    }


def test_parts_keep_to_their_parent_and_may_overlap():
    offsets = [(0, 2), (2, 4), (4, 6)]
    characters = {
        "needle": ((0, 3),),
        "needle.1": ((0, 3),),
        "needle.1.key": ((0, 3),),
        "needle.1.value": ((1, 3),),
        "query": ((3, 6),),
    }
    spans = token_spans(offsets, characters, 6)
    assert spans["needle"] == (0, 1)  # a tie of one character each: the first
    assert spans["needle.1.key"] == spans["needle.1.value"] == (0, 1)
    assert spans["query"] == (2,)
    # most of token 1 is of the query, so that no part of the needle has it
    spans = token_spans([(0, 2), (2, 5), (5, 6)], characters, 6)
    assert spans["needle"] == spans["needle.1.key"] == (0,)
    assert spans["query"] == (1, 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_against_the_obvious_reference(family, seed):
    """Cut the text into named and unnamed stretches at random characters; compare with counting
    characters one by one.
    """
    rng = np.random.default_rng(seed)
    cuts = sorted(rng.choice(np.arange(1, len(HARD)), size=6, replace=False).tolist())
    names = ["needle", "", "query", "", "distractor", "needle", ""]
    characters, owner = {}, []
    for name, start, end in zip(names, [0, *cuts], [*cuts, len(HARD)], strict=True):
        owner += [name] * (end - start)
        if name:
            characters[name] = (*characters.get(name, ()), (start, end))
    offsets = encode(HARD, tokenizer(family)).offsets
    wanted: dict = {}
    for token, (start, end) in enumerate(offsets):
        inside = [name for name in owner[start:end] if name]
        if inside:
            best = max(dict.fromkeys(inside), key=inside.count)
            wanted[best] = (*wanted.get(best, ()), token)
    if set(wanted) < set(characters):
        with refused("covers no token"):
            token_spans(offsets, characters, len(HARD))
    else:
        assert token_spans(offsets, characters, len(HARD)) == wanted


def test_offsets_with_and_without_the_leading_space_name_the_same_tokens():
    text = "hidden One of the special magic numbers"
    characters = {"needle": ((7, len(text)),)}
    with_space, without = (
        tokenizer(family) for family in ("byte_level_bpe", "byte_level_bpe_trimmed")
    )
    spaced, trimmed = (prompt_from_text(text, characters, one) for one in (with_space, without))
    assert spaced.tokens == trimmed.tokens
    assert spaced.token_text != trimmed.token_text
    assert spaced.spans == trimmed.spans


def test_a_token_of_white_space_alone_covers_it_even_when_its_offsets_are_trimmed():
    for family in ("byte_level_bpe", "byte_level_bpe_trimmed"):
        encoded = encode("is: ä5  0é x ", tokenizer(family))
        covered = sorted({at for start, end in encoded.offsets for at in range(start, end)})
        assert covered == list(range(13))


def test_added_tokens_behind_a_text_are_dropped():
    from tokenizers import processors

    source = tokenizer("words")
    backend = type(source.backend_tokenizer).from_str(source.backend_tokenizer.to_str())
    backend.add_special_tokens(["<eos>"])
    pairs = [("<bos>", backend.token_to_id("<bos>")), ("<eos>", backend.token_to_id("<eos>"))]
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=pairs
    )
    ending = type(source)(tokenizer_object=backend)
    assert encode("The sky", ending).token_text == ("<bos>", "The", "sky")


def test_a_tokenizer_without_offsets_and_no_tokenizer_are_refused():
    class Slow:
        is_fast = False

    with refused("Slow has none"):
        encode("text", Slow())
    with refused("there is none"):
        encode("text", None)


def test_marked_text_gives_a_piece_to_its_names_and_their_parents():
    text = MarkedText()
    text.add("ab", "needle.1.key")
    text.add("", "query")
    text.add("cd", "needle.1.value")
    text.add("ef")
    text.add("gh", "needle.2")
    assert text.text == "abcdefgh"
    assert text.characters == {
        "needle": ((0, 4), (6, 8)),
        "needle.1": ((0, 4),),
        "needle.1.key": ((0, 2),),
        "needle.1.value": ((2, 4),),
        "needle.2": ((6, 8),),
    }
