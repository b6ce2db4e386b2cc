"""The decoder, weights and tokenizer of a GGUF file, strictly.

Every tensor of the model comes from the file, and every tensor of the file is used, in the model's
shape; otherwise the file is refused by name. `metadata` reads rotation and attention. Weights of a
quantized file are dequantized to float32. A file is data: no code in it is run, and no other file
next to it is read.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from repo_interp.errors import InputError, as_input_errors
from repo_interp.plugins.gguf.header import FACTORS, Header, header_of
from repo_interp.plugins.gguf.metadata import architecture_of, keys_of
from repo_interp.plugins.gguf.tensors import require_tensors
from repo_interp.plugins.gguf.tokenizer import end_ids, tokenizer_of

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Values of all releases of Llama 3.1 to 3.3. llama.cpp's converter uses them if a configuration
states none.
"""
# Tokens that Llama 3 was trained on before its frequencies were scaled
_LLAMA_3_LENGTH = 8192


class GGUF:
    """The checkpoint in a GGUF file."""

    def __init__(self, file: Path) -> None:
        self._header = header_of(file)
        # On "meta", so that shapes are known without memory; buffers are small and stay.
        with init_empty_weights(include_buffers=False):
            self._model = AutoModelForCausalLM.from_config(
                _configuration(self._header), dtype=torch.float32
            )

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the decoder."""
        return self._model.config

    @property
    def generation(self) -> GenerationConfig | None:
        """Settings of generation, which ends at the tokens of the file's tokenizer."""
        settings = self._model.generation_config
        if settings is not None:
            ends = end_ids(self._header)
            settings.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
        return settings

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Build the tokenizer.

        Returns:
            The tokenizer.

        Raises:
            InputError: The tokenizer is unknown, or its lists do not fit each other.
        """
        with self._readable():
            return tokenizer_of(self._header)

    def weights(self) -> dict[str, torch.Tensor]:
        """Dequantize all tensors.

        Returns:
            Values in float32 by transformers' names.

        Raises:
            InputError: A tensor cannot be read.
        """
        with self._readable():
            return {
                name: torch.from_numpy(
                    _as_hugging_face(self._header.values(stored), stored, self._header, self.config)
                )
                for name, stored in _stored_names(self._model, self._header).items()
            }

    def _readable(self) -> AbstractContextManager[None]:
        return as_input_errors(f"{self._header.file} cannot be read as GGUF", 200)


def _configuration(header: Header) -> PretrainedConfig:
    """Make the configuration of the decoder in a GGUF file."""
    raw = keys_of(header)
    with as_input_errors(f"{header.file} describes no decoder"):
        config = AutoConfig.for_model(**raw)
    require_tensors(header, raw)
    if not _has_factors(header):
        return config
    factors = header.values(FACTORS)
    # Factors of 1 change nothing, so the configuration stays without scaling.
    return (
        config
        if np.array_equal(factors, np.ones(config.head_dim // 2))
        else _with_factors(config, factors, str(header.file))
    )


def _has_factors(header: Header) -> bool:
    """Return whether factors divide frequencies; llama.cpp reads them for only one architecture."""
    return (
        FACTORS in header.tensors and architecture_of(header.metadata, str(header.file)).interleaved
    )


def _with_factors(config: PretrainedConfig, factors: Any, file: str) -> PretrainedConfig:
    """Find the llama3 rule that divides the frequencies by `factors`, or raise InputError."""
    plain, config = config.rope_parameters, copy.deepcopy(config)
    # Factors multiply with another scaling in llama.cpp.
    if plain.get("rope_type") != "default":
        raise InputError(
            f"{file}: {FACTORS} is combined with another scaling, which no Hugging Face decoder "
            "combines; refused"
        )
    # In float64, so that the comparison below sees the file's rounding and not ours
    frequencies = plain["rope_theta"] ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    )
    factors = torch.as_tensor(np.array(factors, dtype=np.float64))
    # The lowest frequencies are divided by the whole factor.
    largest = float(factors.max())
    low, high = _LLAMA_3.values()
    # Between the two ends 1 / factor = (1 - s) / largest + s, and s = (length * frequency / 2 pi -
    # low) / (high - low).
    share = (1 / factors - 1 / largest) / (1 - 1 / largest)
    # Away from both ends, where the share is flat and does not depend on the length
    between = (share > 1e-3) & (share < 1 - 1e-3)
    lengths = ((low + share * (high - low)) * 2 * math.pi / frequencies)[between]
    # The usual length first; else the one that follows from the first pair between the ends.
    for length in (
        (_LLAMA_3_LENGTH, *(max(1, round(float(length))) for length in lengths[:1]))
        if largest > 1
        else ()
    ):
        config.rope_parameters = (
            plain
            | {"rope_type": "llama3", "factor": largest, "original_max_position_embeddings": length}
            | _LLAMA_3
        )
        # Checked with the function of transformers that the model calls too
        given, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if torch.allclose(given.double() * factors, frequencies, rtol=1e-4, atol=0):
            return config
    raise InputError(
        f"{file}: {FACTORS} does not follow the rule of Llama 3.1, the only one that Hugging "
        "Face's decoders know; refused"
    )


def _stored_names(model: PreTrainedModel, header: Header) -> dict[str, str]:
    """Names of the file's tensors by names of the weights of `model`."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = header.metadata["general.architecture"]
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(number, model.config.num_hidden_layers)
    # The table knows modules: it maps the name before ".weight" or ".bias".
    names = {
        name: f"{known.get_name(name.rpartition('.')[0])}.{name.rpartition('.')[2]}"
        for name in model.state_dict()
    }
    return {name: stored for name, stored in names.items() if stored in header.tensors}


def _as_hugging_face(array: np.ndarray, stored: str, header: Header, config: Any) -> np.ndarray:
    """Convert the values of the tensor `stored` to Hugging Face's order and meaning."""
    architecture = architecture_of(header.metadata, str(header.file))
    # llama.cpp stores 1 + weight of Gemma's norms, transformers adds the 1 itself.
    if architecture.offset_norms and stored.endswith("norm.weight"):
        return array - 1
    maps = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    heads = next((count for part, count in maps.items() if part in stored), None)
    if not architecture.interleaved or heads is None:
        return array
    # llama.cpp has the partners of a pair side by side, transformers half a head apart.
    rows = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(rows.reshape(array.shape))
