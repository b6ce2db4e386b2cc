"""What a checkpoint is, from config.json and the headers of its weights alone: no torch, no model, no values.

That the weights fit the decoder, and how its layers rotate, is checked when it is loaded; `repo-interp verify` measures the rotation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from repo_interp.checkpoint_files.architectures import native_layout, require_family
from repo_interp.checkpoint_files.fetched import PACKAGED
from repo_interp.checkpoint_files.gguf_header import FACTORS, SUFFIX, header_of
from repo_interp.checkpoint_files.gguf_metadata import keys_of
from repo_interp.checkpoint_files.stated import HUGGING_FACE, Checkpoint, described, described_base, outlined
from repo_interp.checkpoint_files.stored import file_key, stored_weights
from repo_interp.errors import InputError
from repo_interp.positions.layouts import CONTEXTUAL, LEARNED, NO_ATTENTION, PARAMETERS, SCHEMES

_UNROTATED = ("nope", "learned", NO_ATTENTION)
_TABLE, _EMBEDDING, _UNEMBEDDING = "model.position_table.weight", "model.embed_tokens.weight", "lm_head.weight"
_IN_LAYER = ".layers.{}.self_attn."
_IN_ANY_LAYER = re.compile(r"\.layers\.(\d+)\.self_attn\.(.+)")
_TEXT_PART = re.compile(r"(?:model\.)*(?:language_model|text_model|llm)\.(?:(?:model|backbone)\.)?(.+)")
_TELLING = (*PARAMETERS["repo"], *PARAMETERS["continuous"], *PARAMETERS["cope"], *PARAMETERS["kerple"])
"""Names under `self_attn` that no stock decoder has."""


@dataclass(frozen=True)
class Inspected:
    """A checkpoint, and the shapes of its weights."""

    checkpoint: Checkpoint
    shapes: Mapping[str, tuple[int, ...]]
    """By the names in its files; of an adapter, those of its base too."""
    note: str = ""
    """What a model that was fetched is; empty for others."""

    def require_fit(self) -> None:
        """Raise InputError where weights of a scheme belong to a layer that has another scheme, or are missing from one that has it."""
        layout, directory, config = self.checkpoint.layout, self.checkpoint.directory, self.checkpoint.config
        rows = {1, config.num_attention_heads, config.num_key_value_heads}
        keys = [file_key(name) for name in self.shapes]
        found = ((name, shape, _IN_ANY_LAYER.search(file_key(name))) for name, shape in self.shapes.items())
        for name, shape, layer, part in ((name, shape, int(place[1]), place[2]) for name, shape, place in found if place):
            if layer >= len(layout):
                raise InputError(f"{directory}: {name} is of layer {layer}, and config.json has {len(layout)} layers; mend it")
            scheme, own = layout[layer], part.partition(".")[0]
            if own in _TELLING and scheme in SCHEMES and own not in PARAMETERS.get(scheme, ()):
                raise InputError(
                    f"{directory}: layer {layer} has the scheme {scheme}, which has no {own} ({name}); mend config.json"
                )
            if own in ("gate_map", "content_map") and shape[-1] != config.hidden_size:
                raise InputError(
                    f"{directory}: {name} has shape {list(shape)}; wanted {config.hidden_size} columns, the model's width"
                )
            if own in ("final_map", "dynamic_map") and shape[0] not in rows:
                raise InputError(
                    f"{directory}: {name} has shape {list(shape)}; wanted one row, or one for each of {config.num_attention_heads} heads "
                    f"or {config.num_key_value_heads} key-value heads"
                )
            if keys.count(file_key(name)) > 1:
                raise InputError(f"{directory}: {file_key(name)} stands twice in the weights, under two names; leave one out")
        for layer, scheme in enumerate(layout):
            learned = {name.partition(".")[0] for name in self._learned(layer)}
            lacking = [name for name in PARAMETERS.get(scheme, ()) if scheme in LEARNED and name not in learned]
            if lacking:
                raise InputError(f"{directory}: layer {layer} has the scheme {scheme}, and the weights lack its {lacking[0]}")

    @property
    def parameters(self) -> int:
        """Numbers that the model has; an unembedding that is the embedding counts once, matrices that change others do not count."""
        tied = getattr(self.checkpoint.config, "tie_word_embeddings", False)
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if ".lora_" not in name and name != FACTORS and not (tied and name == _UNEMBEDDING and _EMBEDDING in self.shapes)
        )

    @property
    def for_positions(self) -> int:
        """Numbers that the schemes have learned."""
        layers = (self.parameters_of(layer) or 0 for layer in range(len(self.checkpoint.layout)))
        return sum(layers) + math.prod(self.shapes.get(_TABLE, (0,)))

    def parameters_of(self, layer: int) -> int | None:
        """Numbers that the scheme of `layer` has learned; None for a scheme of another package."""
        if self.checkpoint.layout[layer] not in (*SCHEMES, NO_ATTENTION):
            return None
        return sum(math.prod(shape) for shape in self._learned(layer).values())

    def representation(self, layer: int) -> int | None:
        """Width of f_phi in `layer`; None without one."""
        return self._learned(layer).get("gate_map.weight", (None,))[0]

    def rows(self, layer: int) -> str:
        """Which heads share positions in `layer`, in words."""
        scheme, config = self.checkpoint.layout[layer], self.checkpoint.config
        if scheme in CONTEXTUAL and scheme != "cope_rope":
            return "counted by gates"
        if scheme in _UNROTATED:
            return "none"
        learned = self._learned(layer)
        last = learned.get("final_map.weight") or learned.get("dynamic_map.weight")
        if last is None or last[0] == 1:
            return "one for all heads"
        return "one per head" if last[0] == config.num_attention_heads else "one per key-value head"

    def window(self, layer: int) -> int | None:
        """Tokens that `layer` sees; None: all."""
        config = self.checkpoint.config
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if kinds:
            return window if kinds[layer] == "sliding_attention" else None
        return None if getattr(config, "use_sliding_window", True) is False else window

    def _learned(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what the scheme of `layer` has learned, by their names under `self_attn`."""
        own = PARAMETERS.get(self.checkpoint.layout[layer], ())
        parts = ((file_key(name).partition(_IN_LAYER.format(layer))[2], shape) for name, shape in self.shapes.items())
        return {name: shape for name, shape in parts if name and name.partition(".")[0] in own}


def _text_key(name: str) -> str:
    """The name of a weight in the text part of a larger model; empty for weights of its other parts."""
    if name.startswith("lm_head."):
        return name
    part = _TEXT_PART.match(name)
    return "" if part is None else part[1] if part[1].startswith("lm_head.") else f"model.{part[1]}"


def inspected(path: str) -> Inspected:
    """The checkpoint at `path`, as `stated.described` finds it, or a GGUF file. Raises InputError for what cannot be read."""
    file = Path(path)
    if file.suffix.lower() == SUFFIX and file.is_file():
        header = header_of(file)
        config = outlined(keys_of(header), path)
        require_family(config)
        return Inspected(Checkpoint(file, HUGGING_FACE, config, native_layout(config)), header.shapes)
    checkpoint = described(path)
    directories = [checkpoint.directory]
    if checkpoint.base is not None:
        directories.append(described_base(checkpoint.directory, checkpoint.base).directory)
    shapes = {weight.key: weight.shape for directory in directories for weight in stored_weights(directory)}
    if checkpoint.larger is not None:
        shapes = {key: shape for name, shape in shapes.items() if (key := _text_key(name))}
    found = Inspected(checkpoint, shapes, PACKAGED[path].described if path in PACKAGED else "")
    found.require_fit()
    return found
