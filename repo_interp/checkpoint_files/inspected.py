"""A checkpoint from config.json and the headers of its weights: no torch, no model, no values.

Only for a plain decoder (`is_plain`) it shows whether the weights fit. Loading checks the rotation
of layers, and `repo-interp verify` measures it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from repo_interp.checkpoint_files.architectures import native_layout, require_family
from repo_interp.checkpoint_files.directories import known_models
from repo_interp.checkpoint_files.readers import reader_for
from repo_interp.checkpoint_files.released import released_key
from repo_interp.checkpoint_files.stated import (
    HUGGING_FACE,
    Checkpoint,
    Configure,
    base_directory,
    light_config,
    read_checkpoint,
)
from repo_interp.checkpoint_files.stored import BYTES, StoredWeight, file_key, stored_weights
from repo_interp.positions.layouts import CONTEXTUAL, NO_ATTENTION, PARAMETERS, SCHEMES

# Schemes without rotation, whose heads therefore share nothing
_UNROTATED = ("nope", "learned", NO_ATTENTION)
_CHUNK = 2**22
"""Bytes of a matrix that are compared at a time."""
_TABLE, _EMBEDDING, _UNEMBEDDING = (
    "model.position_table.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
)
_IN_LAYER = ".layers.{}.self_attn."
_OUTSIDE = {"model.embed_tokens": "VD", "model.norm": "D", "lm_head": "VD"}
_LAYER = {
    "self_attn.q_proj": "QD",
    "self_attn.k_proj": "KD",
    "self_attn.v_proj": "KD",
    "self_attn.o_proj": "DQ",
    "mlp.gate_proj": "FD",
    "mlp.up_proj": "FD",
    "mlp.down_proj": "DF",
    "post_attention_layernorm": "D",
}
_OF_FAMILY = {
    "llama": {"input_layernorm": "D"},
    "olmo2": {"post_feedforward_layernorm": "D", "self_attn.q_norm": "Q", "self_attn.k_norm": "K"},
}
_PHI = {"self_attn.gate_map": "PD", "self_attn.content_map": "PD", "self_attn.final_map": "RP"}
"""Weights of plain decoders, of their layers, and of f_phi, with axes: vocabulary V, width D,
queries Q, keys K, feed-forward F, representation P, rows R.
"""

# Larger models nest their text part under one of several names, some of them twice.
_TEXT_PART = re.compile(
    r"(?:model\.)*(?:language_model|text_model|llm)\.(?:(?:model|backbone)\.)?(.+)"
)


@dataclass(frozen=True)
class Inspection:
    """A checkpoint, and the shapes of its weights."""

    checkpoint: Checkpoint
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by the names in its files; for an adapter, the weights of its base too."""
    note: str = ""
    """Description of a fetched model; empty for others."""

    @property
    def is_plain(self) -> bool:
        """Whether the weights fit a Llama or OLMo 2, with or without f_phi, by names and shapes."""
        config = self.checkpoint.config
        # The tables above have no biases, so with some the shapes would not match.
        if config.model_type not in _OF_FAMILY or any(
            getattr(config, name, False) for name in ("attention_bias", "mlp_bias")
        ):
            return False
        heads, kv_heads, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.hidden_size,
        )
        head = getattr(config, "head_dim", None) or width // heads
        rows = {"head": heads, "layer": 1}.get(
            self.checkpoint.options.get("assignment", ""), kv_heads
        )
        sizes = {
            "V": config.vocab_size,
            "D": width,
            "F": config.intermediate_size,
            "Q": heads * head,
            "K": kv_heads * head,
        }
        # RePo's f_phi has an eighth of the model's width.
        sizes |= {"P": width // 8, "R": rows}
        names = {
            name: axes
            for name, axes in _OUTSIDE.items()
            if not (name == "lm_head" and config.tie_word_embeddings)
        }
        # The tables contain only f_phi; other schemes match if they learn nothing.
        for layer, scheme in enumerate(self.checkpoint.layout):
            in_layer = _LAYER | _OF_FAMILY[config.model_type] | (_PHI if scheme == "repo" else {})
            names |= {f"model.layers.{layer}.{name}": axes for name, axes in in_layer.items()}
        wanted = {
            f"{name}.weight": tuple(sizes[axis] for axis in axes) for name, axes in names.items()
        }
        # As sorted pairs, so that a name stored twice is seen
        return sorted((file_key(name), shape) for name, shape in self.shapes.items()) == sorted(
            wanted.items()
        )

    @property
    def parameters(self) -> int:
        """Count of numbers; tied embeddings count once, matrices of LoRA do not count."""
        tied = getattr(self.checkpoint.config, "tie_word_embeddings", False)
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if ".lora_" not in name
            and not (tied and name == _UNEMBEDDING and _EMBEDDING in self.shapes)
        )

    @property
    def for_positions(self) -> int:
        """Numbers that the schemes have learned."""
        layers = (self.parameters_of(layer) or 0 for layer in range(len(self.checkpoint.layout)))
        return sum(layers) + math.prod(self.shapes.get(_TABLE, (0,)))

    def parameters_of(self, layer: int) -> int | None:
        """Count the numbers that the scheme of a layer has learned.

        Args:
            layer: Index of the layer.

        Returns:
            The count; None for a scheme of another package.
        """
        # Schemes of other packages may have parameters under any name, so they are not counted.
        if self.checkpoint.layout[layer] not in (*SCHEMES, NO_ATTENTION):
            return None
        return sum(math.prod(shape) for shape in self._learned(layer).values())

    def representation(self, layer: int) -> int | None:
        """Return the width of f_phi.

        Args:
            layer: Index of the layer.

        Returns:
            The width; None without f_phi.
        """
        return self._learned(layer).get("gate_map.weight", (None,))[0]

    def rows(self, layer: int) -> str:
        """Say which heads share positions.

        Args:
            layer: Index of the layer.

        Returns:
            Words for the table of `repo-interp inspect`.
        """
        scheme, config = self.checkpoint.layout[layer], self.checkpoint.config
        if scheme in CONTEXTUAL and scheme != "cope_rope":
            return "counted by gates"
        if scheme in _UNROTATED:
            return "none"
        if scheme not in (*SCHEMES, NO_ATTENTION):
            return "?"
        learned = self._learned(layer)
        last = learned.get("final_map.weight") or learned.get("dynamic_map.weight")
        # One row of the last map per set of heads that share positions
        if last is None or last[0] == 1:
            return "one for all heads"
        return "one per head" if last[0] == config.num_attention_heads else "one per key-value head"

    def window(self, layer: int) -> int | None:
        """Return the window of attention.

        Args:
            layer: Index of the layer.

        Returns:
            Tokens that a query sees at most; None: all.
        """
        config = self.checkpoint.config
        kinds, window = (
            getattr(config, "layer_types", None),
            getattr(config, "sliding_window", None),
        )
        # Types of layers show which layers have windows; without types all layers have the window.
        if kinds:
            if kinds[layer] == "chunked_attention":
                return config.attention_chunk_size
            # sliding_attention, and Inkling's hybrid_sliding
            return window if "sliding" in kinds[layer] else None
        return None if getattr(config, "use_sliding_window", True) is False else window

    def _learned(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the scheme's weights in `layer`, by name under `self_attn`."""
        inside = _IN_LAYER.format(layer)
        learned = {f"{inside}{part}" for part in PARAMETERS.get(self.checkpoint.layout[layer], ())}
        learned |= {released_key(name) for name in learned}
        found = {}
        for name, shape in self.shapes.items():
            key = file_key(name).partition(inside)[2]
            if inside + key.partition(".")[0] in learned:
                found[key] = shape
        return found


def _text_key(name: str) -> str:
    """Name a weight within the text part of a larger model; empty for other parts."""
    if name.startswith("lm_head."):
        return name
    part = _TEXT_PART.match(name)
    return "" if part is None else part[1] if part[1].startswith("lm_head.") else f"model.{part[1]}"


def _same_bytes(one: StoredWeight, other: StoredWeight) -> bool:
    """Whether two weights of one shape and precision hold the same numbers."""
    if (one.shape, one.stored_as) != (other.shape, other.stored_as):
        return False
    count = math.prod(one.shape) * BYTES[one.stored_as]
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        sizes = (min(_CHUNK, count - start) for start in range(0, count, _CHUNK))
        return all(first.read(size) == second.read(size) for size in sizes)


def inspect_checkpoint(path: str, configure: Configure) -> Inspection:
    """Read a checkpoint's configuration and the shapes of its weights.

    Args:
        path: Checkpoint as `read_checkpoint` takes it, or a file that has a reader.
        configure: Makes the configuration, such as `light_config`.

    Returns:
        The checkpoint and its shapes.

    Raises:
        InputError: It cannot be read.
    """
    if (reader := reader_for(path)) is not None:
        # A file is described as it would be converted.
        file, outline = Path(path), reader.outline(Path(path))
        config = light_config(outline.keys, path)
        require_family(config)
        return Inspection(
            Checkpoint(file, HUGGING_FACE, config, native_layout(config)), outline.shapes
        )
    checkpoint = read_checkpoint(path, configure)
    directories = [checkpoint.directory]
    # An adapter stores its changes alone; the other shapes are its base's.
    if checkpoint.base is not None:
        directories.append(base_directory(checkpoint.directory, checkpoint.base))
    stored = {
        weight.key: weight for directory in directories for weight in stored_weights(directory)
    }
    if {_EMBEDDING, _UNEMBEDDING} <= stored.keys() and not _same_bytes(
        stored[_EMBEDDING], stored[_UNEMBEDDING]
    ):
        # As loading does: the configuration may state ties that the files do not have.
        checkpoint.config.tie_word_embeddings = False
    shapes = {name: weight.shape for name, weight in stored.items()}
    if checkpoint.larger is not None:
        shapes = {key: shape for name, shape in shapes.items() if (key := _text_key(name))}
    return Inspection(checkpoint, shapes, known_models().get(str(path), ""))
