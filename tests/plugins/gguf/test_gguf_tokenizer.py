"""A text becomes the tokens that a GGUF file's `tokenizer.ggml.*` says, by llama.cpp's rules."""

import json
import random
import re
from itertools import pairwise

import pytest
import regex
from refusals import refused
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import CohereTokenizer, Qwen2Tokenizer

from repo_interp.checkpoint_files.tokenizer_files import read_tokenizer
from repo_interp.plugins.gguf.header import header_of
from repo_interp.plugins.gguf.splits import SPLIT_RULES
from repo_interp.plugins.gguf.tokenizer import end_ids, special_ids, tokenizer_of

gguf = pytest.importorskip("gguf")

PARTS = re.split(
    "¶",
    "a¶The¶WORLD¶camelCase¶é¶ß¶Жж¶ﬁ¶ǅ¶Σ¶𝔹¶e\u0301¶\u0301¶1¶22¶1984¶1234567¶٣¶Ⅷ¶ 10¶  2¶\n3¶\n\n4¶\t5"
    "¶.6¶ ¶  ¶   x¶\n¶\n\n¶\r\n¶\r\n\r\n¶\t\t¶\u00a0¶\u2003¶ \n ¶\x00¶'s¶'RE¶'ll¶'T¶don't¶I'LL¶'¶!¶ ("
    '¶$x¶+_¶|`¶--¶ -a¶/b¶。¶、¶…¶一龥¶が¶カナ¶한글¶ㄱ¶ก¶👩‍👩‍👧¶ 😀¶[{}]\\¶"#&~^¶<sentinel:12>¶IMGIMGAZ'
    "¶http://a.b/c?d=1¶def f(x):\n    return x\n",
)
_DRAWN = random.Random(0)
TEXTS = ["".join(_DRAWN.choices(PARTS, k=_DRAWN.randint(1, 12))) for _ in range(250)]
TEXTS += ["Three steps:\n\n1. Mix.\n\n2. Bake.", "x =  10\n    2", "plain words", "The year 1984"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def isolated(*expressions):
    return [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]


def by_bytes(*steps, **options):
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    return pre_tokenizers.Sequence([*steps, last])


DIGITS = pre_tokenizers.Digits(individual_digits=True)
GPT_2, DIGITS_FIRST = by_bytes(), by_bytes(DIGITS)
HAN = "[一-龥ࠀ-一가-퟿]+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "exaone4", "jais", "trillion"), GPT_2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        DIGITS_FIRST,
    ),
    "command-r": CohereTokenizer().backend_tokenizer.pre_tokenizer,
    **dict.fromkeys(
        ("qwen2", "megrez", "stablelm2"), Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "dbrx", "smaug-bpe", "chatglm-bpe"),
        by_bytes(*isolated(LLAMA_3), use_regex=False),
    ),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            GPT_2,
            pre_tokenizers.Digits(individual_digits=False),
            *isolated("[0-9][0-9][0-9]"),
        ]
    ),
    "deepseek-coder": by_bytes(
        *isolated(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN), DIGITS, use_regex=False
    ),
    "deepseek-v3": by_bytes(
        *isolated(
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        use_regex=False,
    ),
}
"""What the tokenizer.json of a family says, as `tokenizers` and transformers have it."""


def stored(file, tokens, **said):
    """The header of a GGUF file of a vocabulary, without tensors; None leaves a key out."""
    writer = gguf.GGUFWriter(file, "llama")
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in ({"model": "gpt2", "tokens": tokens} | said).items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if value is not None:
            kinds[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return header_of(file)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [
    *("▁", "a", "b", "c", "é", "1"),
    *("▁a", "ab", "▁ab", "bc", "abc", "aa", "aaa", "▁▁", "1a"),
]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, *LETTERS, "  ", "<tool>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(LETTERS), 4, 4]
SCORES = [0.0] * 259 + [-float(place) for place in range(len(LETTERS))] + [-1000.0] * 2


def pieces(file, **said):
    return stored(
        file,
        said.pop("tokens", PIECES),
        **{"model": "llama", "scores": SCORES, "token_type": TYPES} | said,
    )


def ids(tokenizer, text, **options):
    return tokenizer(text, **options)["input_ids"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_those_of_the_familys_tokenizer(tmp_path, name):
    right = Tokenizer(models.BPE())
    right.pre_tokenizer = PUBLISHED[name]
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=ALPHABET, show_progress=False)
    right.train_from_iterator(TEXTS, trainer)
    learned = json.loads(right.to_str())["model"]
    merges = [" ".join(pair) for pair in learned["merges"]]
    header = stored(
        tmp_path / "a.gguf",
        sorted(learned["vocab"], key=learned["vocab"].get),
        pre=name,
        merges=merges,
        add_bos_token=False,
    )
    tokenizer = tokenizer_of(header)
    for text in TEXTS:
        assert ids(tokenizer, text) == right.encode(text).ids, text
        assert tokenizer.decode(ids(tokenizer, text)) == text


def parts_of(piece, compiled):
    ends = [0, *(end for match in compiled.finditer(piece) for end in match.span()), len(piece)]
    return [piece[begin:end] for begin, end in pairwise(ends) if begin < end]


@pytest.mark.parametrize(
    "expressions", dict.fromkeys(rule.expressions for rule in SPLIT_RULES.values())
)
def test_every_expression_splits_the_pieces_of_the_one_before(expressions):
    """As llama.cpp's unicode_regex_split, with another engine for expressions."""
    together = pre_tokenizers.Sequence(isolated(*expressions))
    for text in TEXTS:
        found = [text]
        for expression in expressions:
            compiled = regex.compile(expression, regex.V1)
            found = [part for piece in found for part in parts_of(piece, compiled)]
        assert [piece for piece, _ in together.pre_tokenize_str(text)] == found, text


RULED = {
    # GPT-2's rule leaves the last of two line breaks to what follows, unless that was split off.
    "gpt-2": ["a", "Ċ", "Ċ", "19"],
    "exaone4": ["a", "Ċ", "Ċ", "19"],
    None: ["a", "Ċ", "Ċ", "19"],
    "default": ["a", "Ċ", "Ċ", "19"],
    "smollm": ["a", "ĊĊ", "1", "9"],
    "command-r": ["a", "ĊĊ", "1", "9"],
    "deepseek-llm": ["a", "Ċ", "Ċ", "19"],
    "deepseek-coder": ["a", "Ċ", "Ċ", "1", "9"],
    "deepseek-v3": ["a", "ĊĊ", "19"],
    "llama-bpe": ["a", "ĊĊ", "19"],
    "qwen2": ["a", "ĊĊ", "1", "9"],
    "tekken": ["a", "ĊĊ", "1", "9"],
    "gpt-4o": ["a", "ĊĊ", "19"],
    "viking": ["a", "ĊĊ", "1", "9"],
}


@pytest.mark.parametrize("name", RULED)
def test_digits_and_line_breaks_are_split_by_the_rule_that_is_named(tmp_path, name):
    header = stored(
        tmp_path / "a.gguf",
        [*ALPHABET, "ĊĊ", "19"],
        pre=name,
        merges=["Ċ Ċ", "1 9"],
        add_bos_token=False,
        # Read for SentencePiece alone
        add_space_prefix=True,
    )
    assert tokenizer_of(header).tokenize("a\n\n19") == RULED[name]


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "chameleon", "smollm", "llama"])
def test_whether_texts_begin_with_bos_follows_from_the_file_or_the_rule(tmp_path, name, said):
    given = {"add_bos_token": said, "add_eos_token": said}
    special = {"bos_token_id": 256, "eos_token_id": 257, "token_type": [1] * 256 + [3, 3, 1]}
    header = (
        pieces(tmp_path / "a.gguf", **given)
        if name == "llama"
        else stored(
            tmp_path / "a.gguf",
            [*ALPHABET, "<s>", "</s>", "ab"],
            pre=name,
            merges=["a b"],
            **special,
            **given,
        )
    )
    tokenizer = tokenizer_of(header)
    begins = name != "smollm" if said is None else said
    plain = ids(tokenizer, "ab", add_special_tokens=False)
    wanted = [tokenizer.bos_token_id] * begins + plain + [tokenizer.eos_token_id] * bool(said)
    assert ids(tokenizer, "ab") == wanted and None not in wanted
    tokenizer.save_pretrained(tmp_path)
    assert ids(read_tokenizer(tmp_path), "ab") == wanted


@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "minicpm5", "smollm", "qwen2"])
def test_a_word_of_the_vocabulary_needs_no_merges_where_the_rule_says_so(tmp_path, name):
    header = stored(
        tmp_path / "a.gguf",
        [*ALPHABET, "bc", "abc", "ab"],
        pre=name,
        merges=["b c", "a b"],
        add_bos_token=False,
    )
    whole = name in ("llama-bpe", "tekken", "minicpm5")
    assert tokenizer_of(header).tokenize("abc abc") == [
        *(["abc"] if whole else ["a", "bc"]),
        # A space before it makes it another word.
        *("Ġ", "a", "bc"),
    ]


def as_llama_cpp(text, prefixed):
    """llama.cpp's tokens of a text by `PIECES`: whole tokens first, then the best pair again and
    again, the first of equal ones.
    """
    known = {token: number for number, token in enumerate(PIECES)}
    whole = [token for token, kind in zip(PIECES, TYPES, strict=True) if kind in (2, 3, 4)]
    found = []
    for part in re.split("|".join(f"({re.escape(token)})" for token in whole), text):
        if part in whole:
            found.append(known[part])
        elif part:
            symbols = list(f"{' ' * prefixed}{part}".replace(" ", "▁"))
            while pairs := [
                (SCORES[known[joined]], -place)
                for place, joined in enumerate(map("".join, pairwise(symbols)))
                if joined in known
            ]:
                place = -max(pairs)[1]
                symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
            for symbol in symbols:
                lone = [f"<0x{byte:02X}>" for byte in symbol.encode()]
                found += [known[symbol]] if symbol in known else [known[byte] for byte in lone]
    return found


@pytest.mark.parametrize("prefixed", [True, False, None])
def test_pieces_are_merged_by_score_with_the_prefix_that_the_file_says(tmp_path, prefixed):
    header = pieces(tmp_path / "a.gguf", add_space_prefix=prefixed, add_bos_token=False)
    tokenizer_of(header).save_pretrained(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    draw = random.Random(1)
    parts = [
        *("a", "b", "c", " ", "  ", "aa", "é", "1", "\n", "日", "😀"),
        *PIECES[:3],
        "<tool>",
        "ab",
    ]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randint(0, 12)))
        assert ids(tokenizer, text) == as_llama_cpp(text, prefixed is not False), repr(text)
    said = tokenizer.decode(ids(tokenizer, "ab é日\n"))
    assert said == "ab é日\n"


def test_special_tokens_are_those_that_the_file_names(tmp_path):
    # Neither is spelled in the alphabet of bytes; user-defined ones are text, and whole.
    added = ["<｜begin▁of▁sentence｜>", "<｜end｜>", "<|turn|>", "<mask>", "two words", "日本"]
    tokens = [*ALPHABET, *added, "ĊĊ"]
    header = stored(
        tmp_path / "a.gguf",
        tokens,
        pre="deepseek-v3",
        merges=["Ċ Ċ", "Ċ Ċ"],
        token_type=[1] * 256 + [3, 3, 3, 3, 4, 4, 1],
        bos_token_id=256,
        eos_token_id=257,
        padding_token_id=257,
        eot_token_id=258,
        eom_token_id=257,
        fim_pre_token_id=258,
        add_bos_token=True,
        chat_template="{{ bos_token }}{{ messages }}",
    )
    assert special_ids(header) == {"bos": 256, "eos": 257, "pad": 257}
    assert end_ids(header) == [257, 258]
    tokenizer_of(header).save_pretrained(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    assert len(tokenizer) == len(tokens)
    text = "<｜begin▁of▁sentence｜>two words\n\n<|turn|>日本日"
    assert ids(tokenizer, text, add_special_tokens=False)[:5] == [256, 260, 262, 258, 261]
    assert tokenizer.decode(ids(tokenizer, text)[1:]) == text
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == "two words\n\n日本日"
    assert (tokenizer.bos_token, tokenizer.pad_token) == (added[0], added[1])
    assert (tokenizer.unk_token, tokenizer.mask_token) == (None, "<mask>")
    assert tokenizer.chat_template == "{{ bos_token }}{{ messages }}"


TWICE = {"tokens": [*ALPHABET, "a"], "pre": "gpt-2", "merges": ["a b"]}
PLAIN = {"tokens": [*ALPHABET, "ab"], "pre": "gpt-2", "merges": ["a b"]}
REFUSED = {
    "pre = 'smolm', a rule for splitting text that is not known; did you mean smollm": PLAIN
    | {"pre": "smolm"},
    "pre = 'gemma4', a rule": PLAIN | {"pre": "gemma4"},
    "pre = 3, a rule": PLAIN | {"pre": 3},
    "model = 't5'; wanted a tokenizer that is known: gpt2 or llama": PLAIN | {"model": "t5"},
    "model = 'bert'": PLAIN | {"model": "bert"},
    "model = 'gemma4'": PLAIN | {"model": "gemma4"},
    "model = None": PLAIN | {"model": None},
    "lacks tokenizer.ggml.tokens": PLAIN | {"tokens": None},
    "says tokenizer.ggml.remove_extra_whitespaces = True": PLAIN
    | {"remove_extra_whitespaces": True},
    "says tokenizer.ggml.precompiled_charsmap": PLAIN | {"precompiled_charsmap": [1, 2]},
    "says tokenizer.ggml.an_option_of_tomorrow = 1": PLAIN | {"an_option_of_tomorrow": 1},
    "bos_token_id = 257; wanted the place of one of 257 tokens": PLAIN | {"bos_token_id": 257},
    "eos_token_id = 'a'": PLAIN | {"eos_token_id": "a"},
    "tokens has 'a' twice, as 64 and 256": TWICE,
    "tokens, or it is no list of texts": PLAIN | {"tokens": [1, 2]},
    "lacks tokenizer.ggml.merges": PLAIN | {"merges": None},
    "merges has 'a b c'; wanted two tokens": PLAIN | {"merges": ["a b c"]},
    "merges has 'ab'": PLAIN | {"merges": ["ab"]},
    "merges has 'b a'": PLAIN | {"merges": ["a b", "b a"]},
    "token_type has 1 numbers; wanted one for each of 257 tokens": PLAIN | {"token_type": [1]},
    "add_bos_token = 1; wanted true or false": PLAIN | {"add_bos_token": 1},
    "texts get a token BOS by tokenizer.ggml.add_bos_token or by its default": PLAIN
    | {"pre": "llama-bpe"},
    "texts get a token EOS": PLAIN | {"add_eos_token": True},
    "lacks tokenizer.ggml.scores": {"model": "llama", "tokens": PIECES},
    "scores has 3 numbers": {"model": "llama", "tokens": PIECES, "scores": [0.0] * 3},
    # Spaces that are escaped in the text too, which llama.cpp merges by their score
    "scores has -1000 for '▁▁' and for '▁▁▁', so that none": {
        "model": "llama",
        "tokens": [*PIECES[:-2], "▁▁▁", "▁▁▁▁"],
        "token_type": [*TYPES[:-2], 4, 4],
        "scores": [*SCORES[: PIECES.index("▁▁")], -1000.0, -14.0, -1000.0, -1000.0],
    },
    "scores has 0 for '▁a' and for 'ab', so that none is merged first": {
        "model": "llama",
        "tokens": PIECES,
        "token_type": TYPES,
        "scores": [0.0] * len(PIECES),
    },
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_tokenizer_that_is_not_known_or_not_whole_is_refused_in_one_line(tmp_path, line):
    said = dict(REFUSED[line])
    header = stored(tmp_path / "a.gguf", said.pop("tokens"), **said)
    with refused(re.escape(line)):
        tokenizer_of(header)
