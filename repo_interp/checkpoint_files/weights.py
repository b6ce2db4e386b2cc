"""The weights of a checkpoint: safetensors that fit a model, read once into the wanted dtype.

    stored weights -> chunks of 4 MB -> the parameter, on its device
    stored weights of the wanted dtype, on a processor -> the file, mapped: parts that are written
    to are copied, the others are the file's

A weight that is missing, or one too many, of another shape, not floating point or not finite, is
refused by name. Reading needs as much memory as the model, and one chunk.

Weights of a stock checkpoint that transformers renames or merges on loading - experts stored one by
one, for example - are read by transformers, just as strictly and without running code of the
checkpoint. This module knows nothing about layouts.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from repo_interp.checkpoint_files.architectures import tied_parameters
from repo_interp.checkpoint_files.released import released_key
from repo_interp.checkpoint_files.stored import (
    StoredWeight,
    file_key,
    require_fit,
    stored_weights,
)
from repo_interp.errors import InputError, as_input_errors

_CHUNK = 4 << 20
_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_REMADE = ".rotary_emb.inv_freq"
"""End of the name of a weight that older checkpoints store; its values follow from the
configuration, and Hugging Face skips it too.
"""


def fitting_weights(model: nn.Module, directory: Path, described: str) -> dict[str, StoredWeight]:
    """Match stored weights to parameters, by headers alone.

    A weight that several parts of the model share may be stored once.

    Args:
        model: Model, whose weights may be on the meta device.
        directory: Directory of the checkpoint.
        described: The model in words, for errors.

    Returns:
        Stored weight by name of the parameter.

    Raises:
        InputError: Names, shapes or dtypes do not fit.
    """
    # keep_vars gives the parameters themselves, so that tied ones are one object.
    state = model.state_dict(keep_vars=True)
    # Files name weights of schemes without the module that holds them here.
    parameters = {file_key(name): name for name in state}
    known = {released_key(key): name for key, name in parameters.items()} | parameters
    stored: dict[str, StoredWeight] = {}
    unexpected, misshaped = [], []
    prefix = getattr(model, "base_model_prefix", "")  # which transformers adds to names without it
    for weight in stored_weights(directory):
        key = file_key(weight.key)
        name = known.get(key) or known.get(f"{prefix}.{key}")
        # A second spelling of a name that was read already is one weight too many.
        if name is None or name in stored:
            unexpected += [] if _is_ignored(model, weight.key) else [weight.key]
            continue
        if weight.shape != state[name].shape:
            misshaped.append((weight.key, weight.shape, state[name].shape))
        stored[name] = weight
    tied = set(tied_parameters(model))
    # By identity: one of two tied names in the file is enough for both.
    present = {state[name] for name in (*stored, *(tied if tied & set(stored) else ()))}
    missing = [key for key, name in parameters.items() if state[name] not in present]
    require_fit(directory, described, misshaped, missing=missing, unexpected=unexpected)
    return stored


def _is_ignored(model: nn.Module, key: str) -> bool:
    """Tell whether transformers skips the weight `key` if such a model lacks it."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return key.endswith(_REMADE) or any(re.search(pattern, key) for pattern in patterns)


def is_converted(model: PreTrainedModel, directory: Path) -> bool:
    """Tell whether transformers renames or merges stored weights on loading.

    Args:
        model: A decoder.
        directory: Directory of the checkpoint.

    Returns:
        Whether names or shapes in the files are not those of `model`.
    """
    # Refuses types that are not floating point
    keys = {weight.key for weight in stored_weights(directory)}
    # Without a name in common transformers knows them by another prefix.
    return (
        bool(get_model_conversion_mapping(model, add_legacy=False))
        or not keys & model.state_dict().keys()
    )


def loaded_by_transformers(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, **placement: Any
) -> PreTrainedModel:
    """Load a stock model with transformers, a larger one whole.

    Args:
        directory: Directory of the checkpoint.
        config: Configuration of the model.
        dtype: Precision of the weights.
        **placement: `device_map` and `max_memory`; on the device "meta" no value is read, and names
            and shapes alone are held to the model.

    Returns:
        The model.

    Raises:
        InputError: The weights do not fit.
    """
    kind = AutoModelForMultimodalLM if "text_config" in config.sub_configs else AutoModelForCausalLM
    # by transformers, safetensors or accelerate
    with _quiet(), as_input_errors(f"{directory}: the weights do not load"):
        loaded: Any = kind.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below
            **placement,
        )
    model, report = loaded
    require_fit(
        directory,
        f"a {config.model_type}",
        sorted(report["mismatched_keys"]),
        missing=sorted(report["missing_keys"]),
        unexpected=sorted(report["unexpected_keys"]),
    )
    for name, parameter in model.named_parameters():
        # some routers stay in float32
        # A quantized model would be measured at another precision than the run states.
        if parameter.dtype not in (dtype, torch.float32) or getattr(model, "hf_quantizer", None):
            raise InputError(
                f"{directory}: transformers loads {name} as {parameter.dtype}, quantised or "
                f"not as asked; wanted {dtype}"
            )
        # On "meta" a weight waits on the disk, and its values are checked when they are read.
        if parameter.device.type != "meta":
            require_finite_weight(parameter.detach(), name, directory)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars and tables."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def read_weights(
    stored: Mapping[str, StoredWeight], dtype: torch.dtype, places: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Read the values of stored weights.

    Weights whose place is the disk are read once and dropped, so that damage is found now.

    Args:
        stored: Stored weights by name.
        dtype: Precision of the results.
        places: Device by name, or "disk"; None: the processor.

    Returns:
        Values by name, without those on the disk.

    Raises:
        InputError: A weight is not finite, too large for `dtype`, or cut off.
    """
    # One chunk for all: one per weight would leave gaps between them.
    chunk, values = torch.empty(_CHUNK, dtype=torch.uint8), {}
    # One mapping per file, which all its weights share
    map_file = cache(_mapped)
    for name, weight in stored.items():
        place = "cpu" if places is None else places[name]
        device = torch.device("cpu" if place == "disk" else place)
        if (
            device.type == "cpu"
            and _STORED[weight.stored_as] == dtype
            # torch wants memory aligned to its numbers; a safetensors file promises no alignment.
            and weight.offset % dtype.itemsize == 0
            # frombuffer refuses to read nothing, so weights without numbers go the other way.
            and all(weight.shape)
        ):
            read = _view(weight, map_file(weight.file), dtype)
        else:
            read = _read(weight, device, dtype, chunk)
        # Weights that Accelerate leaves on the disk are checked above, and not kept.
        if place != "disk":
            values[name] = read
    return values


def require_finite_weight(values: Tensor, key: str, directory: Path) -> tuple[Tensor, Tensor]:
    """Refuse values that are NaN or infinite.

    Args:
        values: Values of a weight.
        key: Name of the weight.
        directory: Directory of the checkpoint, for the message.

    Returns:
        Smallest and largest value.

    Raises:
        InputError: A value is not finite.
    """
    # One pass; both are NaN if any value is. A part of size 0 has no numbers (0 experts).
    smallest, largest = (values if values.numel() else values.new_zeros(1)).aminmax()
    if not (torch.isfinite(smallest) and torch.isfinite(largest)):
        raise InputError(
            f"{directory}: {key} holds values that are not finite; the checkpoint is damaged"
        )
    return smallest, largest


def _mapped(file: Path) -> mmap.mmap:
    """Map a file into memory; writes stay in this process."""
    with file.open("rb") as stream:
        # Copy on write: a change in place must never reach the checkpoint.
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _view(weight: StoredWeight, content: mmap.mmap, dtype: torch.dtype) -> Tensor:
    """A view of a weight that is stored as `dtype`, without a copy."""
    count = math.prod(weight.shape)
    # Memory beyond the end of a file that was cut would kill the process when it is touched.
    if weight.offset + count * dtype.itemsize > len(content):
        raise _cut_off(weight)
    values = torch.frombuffer(content, dtype=dtype, count=count, offset=weight.offset).view(
        weight.shape
    )
    require_finite_weight(values, weight.key, weight.file.parent)
    return values


def _cut_off(weight: StoredWeight) -> InputError:
    return InputError(
        f"{weight.file} ends within {weight.key}; the checkpoint was changed while it was read"
    )


def _read(weight: StoredWeight, device: torch.device, dtype: torch.dtype, memory: Tensor) -> Tensor:
    values = torch.empty(weight.shape, device=device, dtype=dtype)
    flat, chunk = values.view(-1), memory.view(_STORED[weight.stored_as])
    with weight.file.open("rb") as stream:
        stream.seek(weight.offset)
        for start in range(0, flat.numel(), chunk.numel()):
            # The rest of a weight is shorter than a chunk.
            part = chunk[: flat.numel() - start]
            bytes_read = stream.readinto(part.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
            if bytes_read != part.numel() * part.dtype.itemsize:
                raise _cut_off(weight)
            smallest, largest = require_finite_weight(part, weight.key, weight.file.parent)
            # A cast to a narrower dtype would silently make such numbers infinite.
            if max(-float(smallest), float(largest)) > torch.finfo(dtype).max:
                raise InputError(
                    f"{weight.file.parent}: {weight.key} holds values too large for {dtype}; "
                    "load it in float32"
                )
            flat[start : start + part.numel()].copy_(part)
    return values
