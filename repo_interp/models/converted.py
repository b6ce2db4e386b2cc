"""Stock checkpoints whose weights transformers renames or merges on loading: experts stored one by one, for example.

transformers reads them, strictly: safetensors only, no code of the checkpoint, and a weight that is missing, unexpected, of another shape
or not finite is refused by name. Knows nothing about position schemes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from repo_interp.errors import InputError, one_line
from repo_interp.models.stored import stored_weights
from repo_interp.models.weights import require_finite_weight, require_fit


def is_converted(model: PreTrainedModel, directory: Path) -> bool:
    """Whether the weights in `directory` are not stored under the names and in the shapes that `model` has."""
    if get_model_conversion_mapping(model, add_legacy=False):
        return True
    names = model.state_dict().keys()
    return not any(weight.key in names for weight in stored_weights(directory))


def loaded_by_transformers(directory: Path, config: PretrainedConfig, dtype: torch.dtype, **placement: Any) -> PreTrainedModel:
    """The stock model of a checkpoint in `directory`; `placement`: `device_map` and `max_memory`.

    Raises InputError where its weights do not fit.
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **placement,
        )
        model, report = loaded
    except Exception as error:  # of transformers, safetensors or accelerate
        raise InputError(f"{directory}: the weights do not load: {one_line(error)}") from None
    finally:
        if shown:
            logging.enable_progress_bar()
    faults = {what: sorted(map(_name, report[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")}
    require_fit(directory, f"a {config.model_type}", **faults)
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            require_finite_weight(parameter.detach(), name, directory)
    return model


def _name(reported: str | tuple) -> str:
    """The name of a weight, which transformers reports alone or beside its shapes."""
    return reported if isinstance(reported, str) else str(reported[0])
