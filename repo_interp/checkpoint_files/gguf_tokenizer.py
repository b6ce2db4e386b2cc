"""How a GGUF file's tokenizer splits text, by the name that `tokenizer.ggml.pre` gives.

    tokenizer.ggml.pre = "smollm" -> every digit alone, then GPT-2's rule

The rules are llama.cpp's: `llm_tokenizer_bpe` and `llama_vocab::impl::load` of src/llama-vocab.cpp,
commit 00ad355e. Each expression splits the pieces of the one before. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from repo_interp.errors import InputError
from repo_interp.values import shortened

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_BY_RULE = {
    (_GPT_2,): "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum mpt olmo "
    "exaone4 jais trillion granite-docling",
    (r"\p{N}", _GPT_2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (_LLAMA_3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe",
    (_QWEN_2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open",
}
SPLITS = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
"""Regular expressions by `tokenizer.ggml.pre`."""


def splits_of(metadata: Mapping[str, Any], file: str) -> tuple[str, ...]:
    """Find the expressions that split text before its merges.

    Args:
        metadata: Metadata of a GGUF file with a byte-level tokenizer.
        file: Name of the file, for errors.

    Returns:
        Regular expressions; each splits the pieces of the one before.

    Raises:
        InputError: The file names a rule that is not known.
    """
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in SPLITS:
        raise InputError(
            f"{file} says tokenizer.ggml.pre = {shortened(str(name))}, a rule for splitting text "
            f"that is not known; known are {', '.join(SPLITS)}"
        )
    return SPLITS[name]
