"""Place a model that exceeds one device on accelerators, memory and disk, by Accelerate.

    device map "auto"     accelerators are filled, then memory, then the disk; `most_memory`
                          limits them
    offloaded weights     matrices of layers without a place on an accelerator; read in every pass,
                          from the checkpoint's files if on the disk, so that nothing is copied
    never offloaded       the token embeddings, norms, and parameters of position schemes: small,
                          and read by other modules too

A pass through an offloaded layer takes at least as long as reading its weights. This module knows
nothing about layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import convert_file_size_to_int, get_max_memory
from transformers import PreTrainedModel

from repo_interp.checkpoint_files.architectures import tied_parameters
from repo_interp.checkpoint_files.stored import StoredWeight
from repo_interp.errors import InputError, quoted
from repo_interp.models.checkpoints import DeviceMap, MostMemory
from repo_interp.models.decoder import as_decoder

_OFFLOADED = ("cpu", "disk")


def device_of_weights(
    model: PreTrainedModel,
    device_map: DeviceMap,
    most_memory: MostMemory | None,
    dtype: torch.dtype,
) -> dict[str, str | int]:
    """Choose a device for every weight of a model.

    Args:
        model: Model, which may be without weights.
        device_map: "auto", or a device for every part by the name of its module.
        most_memory: Largest memory by device; None: all.
        dtype: Precision of the weights.

    Returns:
        Devices by name of weight; "disk" for offloaded ones.

    Raises:
        InputError: The map or the memory is invalid.
    """
    if isinstance(device_map, str) and device_map != "auto":
        raise InputError(
            f"device map {quoted(device_map)} is unknown; wanted auto, or in Python a device for "
            "every module"
        )
    if device_map == "auto":
        # A layer on two devices would move its hidden states within.
        classes = model._no_split_modules or []
        memory = get_max_memory(None if most_memory is None else _sizes(most_memory))  # pyright: ignore[reportArgumentType]
        device_map = infer_auto_device_map(
            model, memory, no_split_module_classes=list(classes), dtype=dtype
        )  # pyright: ignore
    assert not isinstance(device_map, str)
    main = _main_device(device_map)
    resident = _resident(model)
    devices = {}
    for name in model.state_dict():
        module = max(
            (
                part
                for part in device_map
                if part == "" or name == part or name.startswith(f"{part}.")
            ),
            key=len,
            default=None,
        )
        if module is None:
            raise InputError(f"the device map has no place for {name}")
        # Small weights that other modules read are never offloaded.
        devices[name] = (
            main if name in resident and device_map[module] in _OFFLOADED else device_map[module]
        )
    return devices


def dispatch(
    model: PreTrainedModel,
    stored: Mapping[str, StoredWeight],
    devices: Mapping[str, str | int],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Prepare a model to run: hooks load offloaded weights for use, and unload them afterwards.

    Args:
        model: Model whose weights are in place, except those on the disk.
        stored: Where weights are stored, by name.
        devices: Devices by name of weight.
        dtype: Precision of the weights.

    Returns:
        The model.
    """
    index = {
        name: {
            "safetensors_file": str(weight.file),
            "weight_name": weight.key,
            "dtype": str(dtype).removeprefix("torch."),
        }
        for name, weight in stored.items()
        if devices[name] == "disk"
    }
    level = logging.getLogger("accelerate.big_modeling")
    before, level.disabled = (
        level.disabled,
        True,
    )  # it would warn about the offloading that the user chose
    try:
        modules = {name.rpartition(".")[0]: device for name, device in devices.items()}
        return dispatch_model(  # pyright: ignore[reportReturnType]
            model,
            modules,  # pyright: ignore[reportArgumentType]
            main_device=_main_device(modules),
            offload_index=index or None,  # pyright: ignore[reportArgumentType]
            offload_dir="" if index else None,
        )
    finally:
        level.disabled = before


def _resident(model: PreTrainedModel) -> set[str]:
    """Names of the weights that are never offloaded."""
    schemes = as_decoder(model).scheme_parameters
    embedding = model.get_input_embeddings().weight
    tied = {
        *tied_parameters(model),
        *(name for name, weight in model.named_parameters() if weight is embedding),
    }
    return {
        name
        for name, weight in model.state_dict(keep_vars=True).items()
        if name in tied or weight.ndim < 2 or weight in schemes
    }


def _main_device(device_map: Mapping[str, Any]) -> Any:
    """Where a pass begins: the first accelerator that holds anything, else the processor."""
    return next((device for device in device_map.values() if device not in _OFFLOADED), "cpu")


def _sizes(most_memory: MostMemory) -> dict[str | int, int]:
    sizes: dict[str | int, int] = {}
    for device, size in most_memory.items():
        key = int(device) if str(device).isdecimal() else str(device)
        if key != "cpu" and not (isinstance(key, int) and key < torch.cuda.device_count()):
            raise InputError(
                f"there is no device {quoted(device)} here to set memory apart on; wanted cpu or "
                "the number of an accelerator"
            )
        try:
            sizes[key] = convert_file_size_to_int(size)
        except ValueError:
            raise InputError(
                f"memory of device {device} is {quoted(size)}; wanted a size such as 20GiB"
            ) from None
    return sizes
