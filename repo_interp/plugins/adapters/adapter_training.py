"""Train an adapter: freeze a model except its schemes and low-rank updates, and save these.

`adapters` defines adapters and merges them. This module knows nothing about training itself.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from repo_interp.checkpoint_files.fields import Base
from repo_interp.checkpoint_files.position_layout import OURS
from repo_interp.checkpoint_files.stored import ADAPTER
from repo_interp.errors import InputError
from repo_interp.models.configuration import written_configuration
from repo_interp.models.decoder import as_decoder
from repo_interp.models.scheme_parts import PARTS
from repo_interp.models.tables import TABLE
from repo_interp.plugins.adapters.adapters import CONFIGURATION, POSITIONED, PREFIX
from repo_interp.storage.files import replace_whole, write_text

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
STORED = torch.float16
"""Precision of a stored adapter. It takes as much space as bfloat16 with eight times finer steps,
and the small weights of an adapter do not need the range of bfloat16.
"""
_LEARNED = (*PARTS, "rotation_parameters", TABLE)
"""Names of the modules that position schemes learn."""


def attach(model: PreTrainedModel, rank: int, first_layer: int = 0) -> None:
    """Freeze a repositioned model, in place, except for its schemes and updates of attention.

    Args:
        model: Repositioned model, on any device.
        rank: Dimensions of the updates of the projections, r.
        first_layer: Attention below this layer gets no update.

    Raises:
        InputError: The package peft is missing, the model lacks `first_layer` or a projection, or
            the rank exceeds the size of a matrix.
    """
    layers = model.config.num_hidden_layers
    if first_layer >= layers:
        raise InputError(
            f"the adapter is to begin at layer {first_layer}; the model's are 0 to {layers - 1}"
        )
    names = [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(first_layer, layers)
        for name in PROJECTIONS
    ]
    # Checked here, so that the message names the family and the projection.
    lacking = sorted(set(names) - {name for name, _ in model.named_modules()})
    if lacking:
        raise InputError(
            f"an adapter changes the projections {', '.join(PROJECTIONS)}, and a "
            f"{model.config.model_type} lacks {lacking[0]}"
        )
    # A rank above a side of the matrix adds parameters and no freedom.
    most = min(min(model.get_submodule(name).weight.shape) for name in names)  # type: ignore[union-attr]
    if rank > most:
        raise InputError(
            f"the adapter is to have rank {rank:,}; the smallest matrix that it changes has "
            f"{most:,}, so wanted at most that"
        )
    if find_spec("peft") is None:
        raise InputError(
            "an adapter is trained with the package peft; install it: pip install "
            "'repo-interp[adapter]'"
        )
    # Imported here: peft takes seconds to import, and only training needs it.
    from peft import LoraConfig, inject_adapter_in_model

    changed = {
        "target_modules": list(PROJECTIONS),
        "layers_to_transform": list(range(first_layer, layers)),
    }
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, **changed), model)
    for module in as_decoder(model).scheme_modules:
        module.requires_grad_(True)


def round_trained(model: nn.Module) -> None:
    """Round trainable parameters, in place, to the values that an adapter stores.

    Args:
        model: A model after `attach`.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.to(STORED))


def save_adapter(model: PreTrainedModel, directory: Path, base: Base) -> None:
    """Write the parameters that `attach` left trainable; equal values give equal bytes.

    Args:
        model: A model after `attach`.
        directory: Where the adapter is written; made if missing.
        base: The checkpoint below the adapter.
    """
    trained = {
        name.replace(".default.", "."): value
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    ranks = {name: value.shape[0] for name, value in trained.items() if ".lora_A." in name}
    rank = next(iter(ranks.values()))
    learned = [name for name in _LEARNED if any(f".{name}." in key for key in trained)]
    configuration = written_configuration(model)
    # peft would load "LORA" and ignore the positions.
    kind = POSITIONED if configuration["model_type"] == OURS else "LORA"
    lora = {
        "peft_type": kind,
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(PROJECTIONS),
        "layers_to_transform": sorted({int(name.split(".")[2]) for name in ranks}),
        "modules_to_save": learned or None,
        "base_model_name_or_path": base.name,
        "inference_mode": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    values = {
        PREFIX + name: value.detach().to("cpu", STORED).contiguous()
        for name, value in trained.items()
    }
    with replace_whole(directory / ADAPTER) as unfinished:
        save_file(values, unfinished, metadata={"format": "pt"})
    write_text(
        directory / CONFIGURATION,
        json.dumps(lora, indent=1, sort_keys=True) + "\n",
    )
    write_text(
        directory / "config.json",
        json.dumps(configuration | {"adapter": base.model_dump()}, indent=1, sort_keys=True) + "\n",
    )
