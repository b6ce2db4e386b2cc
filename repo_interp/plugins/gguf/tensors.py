"""The tensors that a decoder has in a GGUF file, by name and shape. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repo_interp.checkpoint_files.readers import Outline
from repo_interp.checkpoint_files.stored import require_fit
from repo_interp.errors import InputError
from repo_interp.plugins.gguf.header import FACTORS, Header, header_of
from repo_interp.plugins.gguf.metadata import architecture_of, keys_of

_OUTSIDE = {"token_embd.weight": "VD", "output_norm.weight": "D", "output.weight": "VD"}
_IN_BLOCK = {
    "attn_q.weight": "QD",
    "attn_k.weight": "KD",
    "attn_v.weight": "KD",
    "attn_output.weight": "DQ",
    "ffn_gate.weight": "FD",
    "ffn_up.weight": "FD",
    "ffn_down.weight": "DF",
    "attn_norm.weight": "D",
    "ffn_norm.weight": "D",
}


def tensor_outline(file: Path) -> Outline:
    """Read a GGUF file without its values.

    Args:
        file: The GGUF file.

    Returns:
        Configuration, without factors of frequencies, and shapes.

    Raises:
        InputError: The file is not a GGUF, its family cannot be opened, or its tensors do not fit.
    """
    header = header_of(file)
    keys = keys_of(header)
    require_tensors(header, keys)
    # Factors of frequencies are stored as a tensor, and belong to the rotation.
    shapes = {name: shape for name, shape in header.shapes.items() if name != FACTORS}
    return Outline(keys, shapes)


def require_tensors(header: Header, config: Mapping[str, Any]) -> None:
    """Refuse a file with other tensors than its decoder has.

    Args:
        header: Header of the file.
        config: Its metadata as `metadata.keys_of` translates them.

    Raises:
        InputError: Names or shapes differ.
    """
    file, shapes = header.file, header.shapes
    architecture = architecture_of(header.metadata, str(file))
    blocks, head = config["num_hidden_layers"], config["head_dim"]
    sizes = {
        "V": config["vocab_size"],
        "D": config["hidden_size"],
        "F": config["intermediate_size"],
        "Q": config["num_attention_heads"] * head,
        "K": config["num_key_value_heads"] * head,
        "H": head,
        "P": head // 2,
    }
    in_block = _IN_BLOCK | dict(architecture.tensors)
    for option, tensors in architecture.biases.items():
        in_block |= tensors if config.get(option) else {}
    axes = {
        f"blk.{block}.{name}": axes for block in range(blocks) for name, axes in in_block.items()
    }
    axes |= _OUTSIDE
    # A tied unembedding is not stored a second time.
    if config["tie_word_embeddings"]:
        del axes["output.weight"]
    # llama.cpp reads factors of frequencies for only one architecture.
    if FACTORS in shapes and architecture.interleaved:
        axes[FACTORS] = "P"
    described = f"a {header.metadata['general.architecture']} of {blocks} blocks"
    # A tensor that nothing uses would mean that the model computes something else.
    require_fit(
        file,
        described,
        missing=[name for name in axes if name not in shapes],
        unexpected=sorted(shapes.keys() - axes.keys()),
    )
    for name, letters in axes.items():
        wanted = [sizes[letter] for letter in letters]
        if list(shapes[name]) != wanted:
            raise InputError(
                f"{file}: {name} has shape {list(shapes[name])}; {described} wants {wanted}"
            )
