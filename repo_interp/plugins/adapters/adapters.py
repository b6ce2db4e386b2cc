"""Adapters: the few MB that training changed, on top of an unchanged base checkpoint.

    W <- W + (alpha / r) B A      projections of attention: LoRA (Hu et al. 2021), A [r, in],
                                  B [out, r], alpha = 2 r
    phi                           parameters of the position schemes (f_phi), in full

A directory in peft's format - adapter_config.json, adapter_model.safetensors in float16 - beside
our config.json, which states the layout, the configuration, and the base by name and by the SHA-256
of its weights: a base with other weights, or with a configuration that changes the computation, is
refused. B starts at zero, so a fresh adapter changes only positions. Loading merges the adapter
into the weights, with sums in float64, so only training needs peft. This module knows nothing about
training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from repo_interp.checkpoint_files.fields import Base, Fields, SpecialTokens
from repo_interp.checkpoint_files.stated import Checkpoint, read_base, require_base
from repo_interp.checkpoint_files.stored import StoredWeight, stored_digest, stored_weights
from repo_interp.checkpoint_files.weights import read_weights
from repo_interp.errors import InputError
from repo_interp.models.checkpoints import (
    Loader,
    LoadOptions,
    dtype_named,
    empty_model,
    load_model,
    require_fitting_headers,
)
from repo_interp.models.configuration import make_config
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import with_layout
from repo_interp.storage.records import abbreviate, read_json, validate
from repo_interp.values import shortened

CONFIGURATION = "adapter_config.json"
"""The file that states the options of peft."""
POSITIONED = "LORA of repo_interp; load it with repo_interp, since peft has none of its positions"
"""The peft_type of an adapter that changes positions. peft does not know this type; as type LORA it
would load the adapter and run plain RoPE.
"""
PREFIX = "base_model.model."
"""Prefix of the names of weights in the file of an adapter."""
_NOT_THE_BASE = {
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
    "dtype",
    "torch_dtype",
    "attn_implementation",
}
_NOT_THE_BASE |= {*SpecialTokens.model_fields, "pe_config", "adapter"}
"""Fields in which an adapter's config.json may differ from its base's: its weights define them, or
they change no result.
"""


class _LoRA(BaseModel):
    """adapter_config.json of peft.

    All other options may change numbers, so they must be off: false, null or empty.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    peft_type: Literal["LORA", POSITIONED]  # pyright: ignore[reportInvalidTypeForm]
    r: Annotated[int, Interval(ge=1, le=65_536)]
    lora_alpha: Annotated[float, Interval(gt=0, le=1e6)]
    target_modules: list[str]
    layers_to_transform: list[int] | None = None
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, "gaussian"] = True
    """Other ways to begin change the base's weights too."""
    task_type: Any = None
    base_model_name_or_path: Any = None
    revision: Any = None
    peft_version: Any = None
    inference_mode: Any = None
    lora_dropout: Any = None
    modules_to_save: Any = None
    megatron_core: Any = None
    qalora_group_size: Any = None

    @model_validator(mode="after")
    def _off(self) -> _LoRA:
        on = [name for name, value in (self.model_extra or {}).items() if value]
        if on:
            raise ValueError(
                f"{shortened(on[0])} is on, an option of LoRA that is not supported here; "
                "wanted it off"
            )
        return self


def load_adapter(
    checkpoint: Checkpoint, device: str, dtype: str, options: LoadOptions
) -> PreTrainedModel:
    """Load the base of an adapter, and merge the adapter into it.

    Args:
        checkpoint: An adapter.
        device: As for `load_model`.
        dtype: Precision of the weights.
        options: Further options, as for `load_model`.

    Returns:
        The model, with the layout and weights of the adapter.

    Raises:
        InputError: The base or the adapter does not fit, or a device map is given.
    """
    # Merging reads and writes all weights, which offloaded ones do not allow.
    if options.get("device_map") is not None:
        raise InputError(
            f"{checkpoint.directory} is an adapter, which is merged in memory; save it "
            "whole, then give a device map"
        )
    base = load_model(base_of(checkpoint), device, dtype, options.get("rope_scaling"))
    return merge_adapter(base, checkpoint, dtype_named(options.get("positions_dtype") or dtype))


def require_adapter_headers(checkpoint: Checkpoint, config: PretrainedConfig) -> None:
    """Refuse an adapter if weights in its headers, or its base's, do not fit; reads no values.

    Args:
        checkpoint: An adapter.
        config: Configuration of the decoder.

    Raises:
        InputError: Names or shapes differ.
    """
    assert checkpoint.base is not None
    require_fitting_headers(read_base(checkpoint.directory, checkpoint.base, make_config))
    model = empty_model(config, checkpoint.layout, checkpoint.options)
    fitting_changes(model, checkpoint.directory)


@dataclass(frozen=True)
class Changes:
    """Stored weights of the parameters that an adapter changes, by name in the whole model."""

    full: Mapping[str, StoredWeight]
    down: Mapping[str, StoredWeight]
    """A of the matrices with a low-rank update."""
    up: Mapping[str, StoredWeight]
    """B of the same matrices."""
    scale: float
    """alpha / r."""


def base_of(checkpoint: Checkpoint) -> Checkpoint:
    """Find the base checkpoint of an adapter.

    Args:
        checkpoint: An adapter.

    Returns:
        The checkpoint that the adapter was trained on.

    Raises:
        InputError: The base is missing, has other weights or another configuration, or is an
            adapter.
    """
    base = checkpoint.base
    assert base is not None
    known = read_base(checkpoint.directory, base, make_config)
    base_reference(known, base.name)  # refuses an adapter
    require_base(checkpoint.directory, base, known.directory)
    # A base that computes otherwise would run the same weights and give other numbers.
    for name in sorted(Fields.model_fields.keys() - _NOT_THE_BASE):
        trained_on, found = (
            getattr(config, name, None) for config in (checkpoint.config, known.config)
        )
        if trained_on != found:
            raise InputError(
                f"{checkpoint.directory} is an adapter on top of a model whose {name} is "
                f"{abbreviate(trained_on)}; that of {base.name} is "
                f"{abbreviate(found)}; wanted the checkpoint that it was trained on, as it was"
            )
    return known


def base_reference(checkpoint: Checkpoint, name: str) -> Base:
    """Return the record by which an adapter on top of a checkpoint names it.

    Args:
        checkpoint: The base, a whole checkpoint.
        name: The name that the user gave it; paths of existing files are made absolute.

    Returns:
        Name and digest of the weights, for the adapter's config.json.

    Raises:
        InputError: `checkpoint` is itself an adapter.
    """
    if checkpoint.base is not None:
        raise InputError(
            f"{name} is an adapter itself; wanted a whole checkpoint, such as "
            f"{checkpoint.base.name}"
        )
    name = os.path.abspath(name) if os.path.exists(name) else name
    return Base(name=name, weights_digest=stored_digest(checkpoint.directory))


def merge_adapter(
    model: PreTrainedModel, checkpoint: Checkpoint, of_positions: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Merge an adapter into its loaded base, in place.

    Args:
        model: The base model.
        checkpoint: The adapter.
        of_positions: Precision of the maps that assign positions.

    Returns:
        `model`, with the layout and weights of the adapter.

    Raises:
        InputError: The adapter does not fit the model.
    """
    # Fresh weights of schemes are drawn, then replaced by the stored ones.
    with torch.random.fork_rng():
        with_layout(model, ",".join(checkpoint.layout), **checkpoint.options)
    for parameter in as_decoder(model).assigner_parameters.values():
        parameter.data = parameter.data.to(of_positions)
    changes = fitting_changes(model, checkpoint.directory)
    model.config.max_position_embeddings = checkpoint.config.max_position_embeddings
    parameters = dict(model.named_parameters())
    # In float64, so that a sum is rounded once.
    down, up = (read_weights(part, torch.float64) for part in (changes.down, changes.up))
    values = read_weights(changes.full, torch.float32)
    values |= {
        name: parameters[name].cpu().double() + changes.scale * (up[name] @ down[name])
        for name in down
    }
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return model


def fitting_changes(model: nn.Module, directory: Path) -> Changes:
    """Match the weights of an adapter to the parameters of a model by file headers only.

    Args:
        model: Base model with the adapter's layout; its weights may be on "meta".
        directory: Directory of the adapter.

    Returns:
        The stored changes of every parameter.

    Raises:
        InputError: A weight belongs to no parameter, has another shape or comes twice, or a
            parameter of the schemes or of LoRA is missing.
    """
    file = directory / CONFIGURATION
    lora = validate(read_json(file, "the configuration that peft writes"), _LoRA, str(file))
    learned = as_decoder(model).scheme_parameters
    full, down, up = {}, {}, {}
    # By name in the file: the kind of change, the parameter, and its shape
    wanted: dict[str, tuple[dict[str, StoredWeight], str, tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if parameter in learned:
            wanted[name] = full, name, shape
        elif _is_changed(name, lora):
            stem = name.removesuffix("weight")
            # Leave a parameter that is not a matrix without a fit, so that it is refused.
            rows, columns = shape if len(shape) == 2 else (0, 0)
            wanted[f"{stem}lora_A.weight"] = down, name, (lora.r, columns)
            wanted[f"{stem}lora_B.weight"] = up, name, (rows, lora.r)
    # Every stored weight must find its parameter, and every parameter its weight.
    for weight in stored_weights(directory):
        key = weight.key.removeprefix(PREFIX)
        if key not in wanted:
            raise InputError(
                f"{directory}: the adapter holds {weight.key}, which changes nothing that "
                "such a model has"
            )
        place, name, shape = wanted[key]
        if name in place:
            raise InputError(
                f"{directory}: the adapter holds {weight.key} twice, under two names; keep one"
            )
        if weight.shape != shape:
            raise InputError(
                f"{directory}: {weight.key} has shape {list(weight.shape)}; wanted {list(shape)}"
            )
        place[name] = weight
    absent = sorted({name for place, name, _ in wanted.values() if name not in place})
    if absent:
        raise InputError(
            f"{directory}: the adapter lacks {len(absent)} of its weights (first: "
            f"{absent[0]}); nothing was loaded"
        )
    return Changes(full, down, up, lora.lora_alpha / lora.r)


def _is_changed(name: str, lora: _LoRA) -> bool:
    """Whether the weight `name` is one of the matrices that LoRA is to change."""
    path = name.split(".")
    if (
        path[-1] != "weight"
        or path[:2] != ["model", "layers"]
        or path[-2] not in lora.target_modules
    ):
        return False
    return lora.layers_to_transform is None or int(path[2]) in lora.layers_to_transform


LOADER = Loader(load_adapter, require_adapter_headers)
