"""Read the keys of a cache of transformers, of a legacy tuple, or of another runtime's file.

    keys[layer]    [kv_head, slot, entry], float64

Caches of transformers may be dynamic, static, sliding, offloaded or quantized (quantized keys are
dequantized). A .npz file, or a mapping, has `keys_L` [kv_head, slot, entry] for every layer L.
Zeros after the last key, as in a static cache, are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import cache_utils

from repo_interp.errors import InputError, as_input_errors, quoted
from repo_interp.plugins.verify.dumped_tables import read_arrays
from repo_interp.storage.files import path_of, regular
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.jsonl import read_prompts
from repo_interp.values import shortened

Keys = Float[Tensor, "kv_head slot entry"]
_NAME = re.compile(r"keys_(\d{1,5})")
_ROUNDED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)
"""Cache layers that round their keys."""


def read_keys(cache: Any) -> dict[int, Keys]:
    """Read the keys of every layer of a cache.

    Args:
        cache: Cache of transformers; tuple of (keys, values) [1, kv_head, slot, entry] by layer;
            path of a .npz file, or mapping, with `keys_L` [kv_head, slot, entry].

    Returns:
        Keys by number of layer, in the precision of the cache, on the processor.

    Raises:
        InputError: `cache` is not a cache, or it holds no key, several prompts, or numbers that are
            not finite.
    """
    if isinstance(cache, str | os.PathLike):
        path = path_of(cache, "a cache or a file of keys")
        if path.suffix != ".npz":
            raise InputError(f"{path} does not end in .npz; wanted a file with keys_0, keys_1, ...")
        found = _of_arrays(read_arrays(path), str(path))
    elif isinstance(cache, Mapping):
        found = _of_arrays(cache, "the mapping")
    elif isinstance(cache, cache_utils.EncoderDecoderCache):
        raise InputError("this is the cache of an encoder and a decoder; decoders are supported")
    elif isinstance(cache, cache_utils.Cache):
        found = _of_layers(cache.layers)
    elif isinstance(cache, Sequence):
        found = enumerate(_first(layer, number) for number, layer in enumerate(cache))
    else:
        raise InputError(
            "a cache of transformers, a tuple of keys and values, or a .npz file with keys_0, "
            f"keys_1, ... was wanted; got {quoted(cache)}"
        )
    keys = {layer: _checked(of_layer, layer) for layer, of_layer in found}
    if not any(of_layer.shape[1] for of_layer in keys.values()):
        raise InputError("the cache holds no key")
    return dict(sorted(keys.items()))


def _of_arrays(arrays: Mapping[str, Any], name: str) -> Iterator[tuple[int, Any]]:
    named = {text: match for text in arrays if (match := _NAME.fullmatch(str(text)))}
    if not named:
        raise InputError(
            f"{name} holds {', '.join(map(str, arrays)) or 'nothing'}; wanted keys_0, keys_1, ... "
            "[kv_head, slot, entry]"
        )
    for text, match in named.items():
        yield int(match[1]), torch.as_tensor(np.asarray(arrays[text]))[None]


def _of_layers(layers: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    for number, layer in enumerate(layers):
        keys = getattr(layer, "keys", None)
        parts = [keys] if isinstance(keys, Tensor) and keys.ndim == 4 else []
        if isinstance(layer, _ROUNDED) and hasattr(layer, "_quantized_keys"):
            parts = [layer._dequantize(layer._quantized_keys), *parts]
        if parts:  # no parts: a layer without attention, or one that reads another layer's keys
            yield number, torch.cat([part.to(parts[0].device) for part in parts], 2)


def _first(layer: Any, number: int) -> Any:
    if not isinstance(layer, Sequence) or not layer:
        raise InputError(f"layer {number} of the cache is {quoted(layer)}; wanted keys and values")
    return layer[0]


def _checked(keys: Any, layer: int) -> Keys:
    """Check the keys of one prompt, and drop the zeros after them."""
    if not isinstance(keys, Tensor) or keys.ndim != 4 or not keys.is_floating_point():
        shape = f"{list(keys.shape)}, {keys.dtype}" if isinstance(keys, Tensor) else quoted(keys)
        raise InputError(
            f"keys of layer {layer} are {shape}; wanted real numbers [kv_head, slot, entry] of "
            "one prompt"
        )
    if len(keys) != 1:
        raise InputError(
            f"the cache holds {len(keys)} prompts; give the cache of one, as "
            "cache.batch_select_indices leaves it"
        )
    held = keys[0].detach().cpu()
    if not bool(torch.isfinite(held).all()):
        raise InputError(f"keys of layer {layer} are NaN or infinite at places")
    used = (held != 0).any(-1).any(0).nonzero().flatten()
    return held[:, : int(used[-1]) + 1 if len(used) else 0]


def read_prompt(path: Path) -> list[int] | Prompt:
    """Read token ids from a text file, or a prompt.

    Args:
        path: File with whole numbers, as a JSON list or with spaces between them; or a .jsonl file
            with one prompt, as `repo-interp analyze --prompts` reads it.

    Returns:
        Token ids; or the prompt, with its position ids.

    Raises:
        InputError: The file cannot be read, or holds something else.
    """
    if path.suffix == ".jsonl":
        prompts = read_prompts(path)
        if len(prompts) != 1:
            raise InputError(f"{path} holds {len(prompts)} prompts; a cache is of one")
        return prompts[0]
    with as_input_errors(f"{path} cannot be read", 120):
        text = regular(path).read_text(encoding="utf-8")
    if not re.fullmatch(r"[\[\]\s,0-9]*", text) or not (
        numbers := re.findall(r"[0-9]{1,18}", text)
    ):
        raise InputError(f"{path} holds {shortened(repr(text), 40)}; wanted token ids: [5, 17, 3]")
    return [int(number) for number in numbers]
