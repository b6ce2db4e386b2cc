"""Load the model of a checkpoint, strictly, and let Hugging Face's Auto classes do so too.

Weights are safetensors only. A checkpoint whose weights do not fit its layout - one missing, one
too many, one of another shape, one not finite - is refused by name: there is no fallback to RoPE.

Importing this module, as `ri.load_model`, `ri.reposition` and `ri.save` do, registers our format
with AutoConfig and AutoModelForCausalLM; without it they refuse it, since its model_type is
"repo_interp", and so does every stock class (`COUNTED`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from repo_interp.checkpoint_files.architectures import native_layout, tied_parameters
from repo_interp.checkpoint_files.fields import DTYPES, SpecialTokens
from repo_interp.checkpoint_files.position_layout import OURS
from repo_interp.checkpoint_files.readers import reader_for
from repo_interp.checkpoint_files.stated import (
    HUGGING_FACE,
    Checkpoint,
    json_object,
    plain_keys,
    stated,
    text_keys,
    tokens_of,
)
from repo_interp.checkpoint_files.stored import StoredWeight
from repo_interp.checkpoint_files.tokenizer_files import read_tokenizer
from repo_interp.checkpoint_files.weights import (
    fitting_weights,
    is_converted,
    loaded_by_transformers,
    read_weights,
)
from repo_interp.entry_points import LOADERS, PLACEMENTS, find, names
from repo_interp.errors import InputError, as_input_errors, one_line, quoted
from repo_interp.models.configuration import (
    RepositionedConfig,
    identify,
    make_config,
    scaled_configuration,
)
from repo_interp.models.decoder import as_decoder
from repo_interp.models.precision import float32_by_default
from repo_interp.models.reposition import (
    reposition,  # noqa: F401 - `ri.reposition` is found here
    with_layout,
)
from repo_interp.models.repositioned_config import REGISTER, own_layout_of, stock_config
from repo_interp.positions.layouts import format_layout
from repo_interp.storage.records import validate

DeviceMap = str | Mapping[str, str | int]
"""`auto`, or one device per part of the model, by the name of its module."""
MostMemory = Mapping[str | int, str | int]
"""Bytes, or a text such as "20GiB", by device: the number of an accelerator, or "cpu"."""


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load_model` that `load` and `open_model` accept too."""

    rope_scaling: Mapping[str, Any] | None
    device_map: DeviceMap | None
    most_memory: MostMemory | None
    positions_dtype: str | None


class Loader(NamedTuple):
    """Functions of a plug-in for checkpoints with one field (group `repo_interp.loaders`)."""

    load: Callable[[Checkpoint, str, str, LoadOptions], PreTrainedModel]
    """Loads from the checkpoint, device, precision, and the other options of `load_model`."""
    require_headers: Callable[[Checkpoint, PretrainedConfig], None]
    """Refuses weights that do not fit; reads no values."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint without its weights; a file such as GGUF is not converted.

    Args:
        path: Directory, name of the zoo, hub id, or GGUF file.

    Returns:
        Configuration and layout of the checkpoint.
    """
    reader = reader_for(path)
    if reader is None:
        return identify(path)
    # Conversion would write all weights.
    config = reader.read(Path(path)).config
    return Checkpoint(Path(path), HUGGING_FACE, config, native_layout(config))


@float32_by_default()
def load_model(
    checkpoint: Checkpoint | str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "float32",
    rope_scaling: Mapping[str, Any] | None = None,
    device_map: DeviceMap | None = None,
    most_memory: MostMemory | None = None,
    positions_dtype: str | None = None,
) -> PreTrainedModel:
    """Load a checkpoint as a repositioned Hugging Face model in evaluation mode.

    All weights are checked against the layout. Needs as much memory as the model.

    Args:
        checkpoint: Directory, name of the zoo, or hub id; or a checkpoint that was identified.
        device: Such as "cpu" or "cuda:1"; "auto": cuda if there is one.
        dtype: Precision of the weights; "auto": bfloat16 on an accelerator if the checkpoint has
            it.
        rope_scaling: Replaces the scaling of frequencies, such as {"rope_type": "yarn", "factor":
            2.0, "original_max_position_embeddings": 4096}, in every layer that rotates; None: as
            configured.
        device_map: "auto", or a device for every module, instead of `device` (`plugins.placement`).
        most_memory: Largest memory by device, with `device_map`.
        positions_dtype: Precision of the maps that assign positions, and of positions; None:
            `dtype`.

    Returns:
        The model, with the layout of the checkpoint.

    Raises:
        InputError: The weights do not fit the layout, or an argument is invalid.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = identify(checkpoint)
    if dtype == "auto":
        half = device_named(device).type != "cpu" and checkpoint.config.dtype in (
            torch.bfloat16,
            "bfloat16",
        )
        dtype = "bfloat16" if half else "float32"
    precision, of_positions = (dtype_named(name) for name in (dtype, positions_dtype or dtype))
    loader = _loader_of(checkpoint)
    if loader is not None:
        options: LoadOptions = {
            "rope_scaling": rope_scaling,
            "device_map": device_map,
            "most_memory": most_memory,
            "positions_dtype": positions_dtype,
        }
        return loader.load(checkpoint, device, dtype, options)
    place, generation = device_named(device), generation_settings(checkpoint.directory)
    config = checkpoint.config
    if rope_scaling is not None:
        config = scaled_configuration(config, rope_scaling)
    placement = {
        "device_map": place if device_map is None else device_map,
        "max_memory": most_memory,
    }
    model, stored = _skeleton(checkpoint, config)
    # Only stock checkpoints have weights that transformers converts on loading.
    if stored is None:
        loaded = loaded_by_transformers(checkpoint.directory, config, precision, **placement)
        return ready_model(with_layout(loaded, None), generation)
    places: dict[str, Any] = dict.fromkeys(stored, place)
    placing = None if device_map is None else find(PLACEMENTS, "device_map")
    if placing is not None:
        places = placing.device_of_weights(model, device_map, most_memory, precision)
    # Maps of positions may have a higher precision than other weights. Frequencies, learned or not,
    # in half precision would give wrong angles at long distances.
    decoder, values = as_decoder(model), {}
    exact, turning = decoder.assigner_parameters, decoder.rotation_parameters
    for chosen, wanted in (
        (stored.keys() - exact.keys() - turning, precision),
        (stored.keys() & exact.keys(), of_positions),
        (stored.keys() & turning, torch.promote_types(precision, torch.float32)),
    ):
        values |= read_weights(
            {name: stored[name] for name in stored if name in chosen}, wanted, places
        )
    _resolve_tied(model, values)
    # assign: the skeleton has no memory to copy into. Names were compared before, and of tied
    # weights one is missing on purpose, so strictness would refuse good files.
    model.load_state_dict(values, strict=False, assign=True)
    model.tie_weights()
    # Otherwise it would state the precision of the files.
    model.config.dtype = precision
    if placing is None:
        model = model.to(place)  # pyright: ignore[reportArgumentType]
    else:
        model = placing.dispatch(model, stored, places, precision)
    return ready_model(model, generation)


def _loader_of(checkpoint: Checkpoint) -> Loader | None:
    """The loader of a plug-in for such checkpoints, by the field that they have; else None."""
    having = (name for name in names(LOADERS) if getattr(checkpoint, name, None) is not None)
    return next((find(LOADERS, name) for name in having), None)


def ready_model(model: PreTrainedModel, generation: GenerationConfig) -> PreTrainedModel:
    """Set evaluation mode; `generate` uses the checkpoint's sampling settings, measures do not.

    Args:
        model: Model that was loaded.
        generation: Settings of the checkpoint.

    Returns:
        The model.
    """
    if model.generation_config is not None:  # a model that generates
        model.generation_config = generation
    return model.eval()


def generation_settings(directory: Path) -> GenerationConfig:
    """Read generation settings as transformers does: without a file, from config.json, old names too.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        The settings.

    Raises:
        InputError: The file holds no such settings.
    """
    name: str = "generation_config.json"
    options: dict[str, Any] = {}
    if not (directory / name).is_file():
        name, options = "config.json", {"_from_model_config": True}
    file = directory / name
    # A text instead of a token id would never end an answer.
    validate(json_object(file), SpecialTokens, str(file))
    with as_input_errors(f"{file} holds no settings of generation"):
        return GenerationConfig.from_pretrained(
            directory, config_file_name=name, local_files_only=True, **options
        )


def dtype_named(name: str) -> torch.dtype:
    """Return the precision of a name.

    Args:
        name: Such as "bfloat16".

    Returns:
        The precision.

    Raises:
        InputError: The name is unknown.
    """
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(f"dtype {quoted(name)} is unknown; wanted one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def device_named(name: str) -> torch.device:
    """Return the device of a name.

    Args:
        name: Such as "cpu" or "cuda:1"; "auto": cuda if there is one, else cpu (mps lacks
            float64).

    Returns:
        The device.

    Raises:
        InputError: The device is not available, or holds no numbers.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = one_line(str(error).partition("\n")[0])
        reason = reason if len(reason) < 80 else "no such kind of device"
        raise InputError(
            f"device {quoted(name)} is not available here ({reason}); use cpu"
        ) from None


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a checkpoint; for an adapter, the tokenizer of the base.

    Args:
        checkpoint: A checkpoint.

    Returns:
        The tokenizer; None if the directory has none.
    """
    directory = tokens_of(checkpoint.directory)
    if not any(
        (directory / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        return None
    with as_input_errors(f"{directory} has a tokenizer that does not load"):
        return read_tokenizer(directory, checkpoint.config)


def _skeleton(
    checkpoint: Checkpoint, config: PretrainedConfig
) -> tuple[PreTrainedModel, dict[str, StoredWeight] | None]:
    """Model without weights, and the stored weights; None if they are converted."""
    stock = checkpoint.format == HUGGING_FACE
    model = empty_model(config, None if stock else checkpoint.layout, checkpoint.options)
    if stock and is_converted(model, checkpoint.directory):
        return model, None
    described = f"the layout {format_layout(checkpoint.layout)}"
    return model, fitting_weights(model, checkpoint.directory, described)


def empty_model(
    config: PretrainedConfig, schemes: tuple[str, ...] | None, options: Mapping[str, Any]
) -> PreTrainedModel:
    """Build a repositioned model without weights: they are on "meta", buffers are not.

    Args:
        config: Configuration of the stock decoder.
        schemes: Scheme of every layer; None: as the stock decoder has it.
        options: Choices within schemes.

    Returns:
        The model.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        return with_layout(model, None if schemes is None else ",".join(schemes), **options)


def require_fitting_headers(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint if weights in its headers do not fit its decoder; reads no values.

    Args:
        checkpoint: A checkpoint.

    Raises:
        InputError: Names or shapes differ.
    """
    directory, source = checkpoint.directory, str(checkpoint.directory / "config.json")
    config = make_config(plain_keys(text_keys(stated(directory), source), source), source)
    loader, meta = _loader_of(checkpoint), torch.device("meta")
    if loader is not None:
        loader.require_headers(checkpoint, config)
    elif _skeleton(replace(checkpoint, config=config), config)[1] is None:
        loaded_by_transformers(directory, config, torch.float32, device_map=meta)


def _resolve_tied(model: PreTrainedModel, values: dict[str, Tensor]) -> None:
    """Tie as Hugging Face does: equal weights become one, others stay, one serves twice."""
    stored = [name for name in tied_parameters(model) if name in values]
    # The configuration may state ties that the files do not have.
    if len(stored) == 2:
        embedding, unembedding = stored
        if torch.equal(values[embedding], values[unembedding]):
            del values[unembedding]
        else:
            model.config.tie_word_embeddings = False
    elif len(stored) == 1 and stored[0] == tied_parameters(model)[1]:
        values[tied_parameters(model)[0]] = values.pop(stored[0])


class RepositionedForCausalLM:
    """Makes the models that AutoModelForCausalLM gives for our format; it has no instances."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        config: PretrainedConfig,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        attn_implementation: str | None = None,
        **options: Any,
    ) -> PreTrainedModel:
        """Load the checkpoint at `path`, for AutoModelForCausalLM.

        Args:
            path: Directory or hub id.
            config: Configuration that AutoConfig gave.
            dtype: Precision of the weights; None or "auto": that of the configuration.
            device_map: A device; "auto" or a mapping for several.
            attn_implementation: Attention function; None: the default.
            **options: Further options of transformers.

        Returns:
            The model as `load_model` gives it.

        Raises:
            InputError: An option is not supported, such as quantization.
        """
        most_memory = options.pop("max_memory", None)
        hub = {name: options.pop(name, None) for name in _HUB_OPTIONS}
        unknown = [
            name
            for name, value in options.items()
            if name not in _IDLE_OPTIONS and value not in (None, False, "")
        ]
        if unknown:
            raise InputError(f"repositioned checkpoints take no {unknown[0]}; leave it out")
        several = device_map if device_map == "auto" or isinstance(device_map, Mapping) else None
        stored = identify(path, **{name: value for name, value in hub.items() if value is not None})
        checkpoint = Checkpoint(
            stored.directory, OURS, stock_config(config), *own_layout_of(config), stored.base
        )
        wanted = config.dtype if dtype in (None, "auto") else dtype
        name = "float32" if wanted is None else str(wanted).removeprefix("torch.")
        one = "cpu" if device_map is None or several is not None else str(device_map)
        model = load_model(checkpoint, one, name, device_map=several, most_memory=most_memory)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        return model

    @classmethod
    def _from_config(cls, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_config(stock_config(config), **options)
        schemes, choices = own_layout_of(config)
        return with_layout(model, ",".join(schemes), **choices)


_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_IDLE_OPTIONS = (
    "trust_remote_code",
    "adapter_kwargs",
    "use_safetensors",
    "low_cpu_mem_usage",
    "weights_only",
)

AutoConfig.register(OURS, RepositionedConfig, exist_ok=True)
REGISTER.append(
    lambda kind: AutoModelForCausalLM.register(kind, RepositionedForCausalLM, exist_ok=True)
)  # pyright: ignore[reportArgumentType]
