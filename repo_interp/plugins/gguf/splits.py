"""Rules of byte-level tokenizers in GGUF files for splitting text, by `tokenizer.ggml.pre`.

    smollm -> every digit alone, then GPT-2's rule
    llama-bpe -> Llama 3's rule; whole words of the vocabulary need no merges; texts begin with BOS

The names, and the names that share a rule, are from llama.cpp's src/llama-vocab.cpp (commit
00ad355e): `llama_vocab::impl::load` and `llm_tokenizer_bpe`. Each expression splits the pieces of
the previous one; text without a match is a piece too. Expressions have the syntax of Oniguruma,
which `tokenizers` uses. If llama.cpp quotes the rule of a tokenizer.json but runs an approximation
(upper and lower case outside ASCII, classes that exclude Han), the quoted rule is used here, as in
transformers. Names of llama.cpp that are missing here split no byte-level text: gemma4,
granite-embed-multi-311m, sarvam-moe and whitespace.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitRule:
    """The rule of a name in `tokenizer.ggml.pre`."""

    expressions: tuple[str, ...]
    """Each expression splits the pieces of the previous one."""
    ignore_merges: bool = False
    """A piece that is a token is not built from merges."""
    add_bos: bool = False
    """Whether texts begin with BOS if the file does not state it."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN_2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_JAIS_SPACES = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")
)

# Words in which upper case comes before lower case
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str = "", but: str = "") -> str:
    """Words of upper case, then lower case; not with the characters `but`."""
    first = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return f"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}"


_CASED_WORD, _CASED_SIGNS = _cased(f"{_CONTRACTION}?"), r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_cased()}|\p{{N}}|{_CASED_SIGNS}|{_SPACES}"
_GPT_4O = rf"{_CASED_WORD}|\p{{N}}{{1,3}}|{_CASED_SIGNS}|{_SPACES}"
_YOUTU = rf"{_CASED_WORD}|\p{{N}}|{_CASED_SIGNS}|{_SPACES}"
_NO_HAN = _cased(f"{_CONTRACTION}?", r"&&[^\p{Han}]")
_KIMI = rf"\p{{Han}}+|{_NO_HAN}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"

_HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_HAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASCII_SIGN_AND_LETTERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_3 = rf"{_ASCII_SIGN_AND_LETTERS}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_NO_SENTENCE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"

_RULES = {
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat "
    "a.x-4.0 mellum modern-bert mpt olmo exaone4 jais trillion granite-docling": (_GPT_2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT_2),
    "default": (r"[\p{P}$+<=>\^~|]+", _GPT_2, r"\p{N}+", _THREE_DIGITS),
    "falcon": (r"[\p{P}$+<=>\^~|`]+", _GPT_2, _THREE_DIGITS),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
    "glm4 chatglm-bpe": (_LLAMA_3,),
    "minicpm5": (
        r"\p{N}{1,3}",
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}",
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (_QWEN_2,),
    "qwen35": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "laguna": (r"[^\n]+|[\n]+", _QWEN_2),
    "ufakzeka": (rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",),
    "seed-coder": (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "bailingmoe bailingmoe2 llada-moe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "jais-2": (
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_JAIS_SPACES}|\s{{1}}",
    ),
    "tekken": (_TEKKEN,),
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (_GPT_4O,),
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O),
    "youtu": (
        f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN_AND_KANA}",
        _YOUTU,
    ),
    "kimi-k2": (_KIMI,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _DEEPSEEK_HAN,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}"),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": (r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_3),
    "spark2_5": (
        r"\p{N}{1,3}",
        _HAN_AND_KANA,
        rf"{_ASCII_SIGN_AND_LETTERS}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    "afmoe": (
        # Groups of three digits from the right; the first one with all that stands before it
        r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[一-鿿㐀-䶿\uf900-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _DEEPSEEK_3,
    ),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "poro-chat bloom gpt3-finnish": (_NO_SENTENCE_MARKS,),
    "viking": (_NO_SENTENCE_MARKS, r"\p{N}"),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT_2,
    ),
}
_WHOLE_WORDS_WITH_BOS = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
)
_IGNORING_MERGES = {*_WHOLE_WORDS_WITH_BOS.split(), "minicpm5", "youtu", "granite-embed-multi-97m"}
_BEGINNING = {*_WHOLE_WORDS_WITH_BOS.split(), "chameleon"}
SPLIT_RULES = {
    name: SplitRule(expressions, name in _IGNORING_MERGES, name in _BEGINNING)
    for names, expressions in _RULES.items()
    for name in names.split()
}
"""By `tokenizer.ggml.pre`."""
