"""Make configurations of transformers from config.json, and the content of config.json from them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from repo_interp.checkpoint_files.architectures import class_name, require_family
from repo_interp.checkpoint_files.fields import OF_FAMILIES
from repo_interp.checkpoint_files.position_layout import (
    OURS,
    function_remark,
    read_layout,
    resolve_layers,
)
from repo_interp.checkpoint_files.stated import (
    Checkpoint,
    plain_keys,
    read_checkpoint,
    require_decoder,
    require_keys,
)
from repo_interp.errors import InputError, as_input_errors, quoted, warn
from repo_interp.models.repositioned_config import repositioned, repositioned_class_named
from repo_interp.storage.records import abbreviate


def identify(path: str | os.PathLike[str], **hub: Any) -> Checkpoint:
    """Read a checkpoint with its configuration of transformers.

    Args:
        path: Directory, name of the zoo, or hub id.
        **hub: Options of `huggingface_hub.snapshot_download`.

    Returns:
        The checkpoint.

    Raises:
        InputError: As `stated.read_checkpoint`.
    """
    return read_checkpoint(path, make_config, **hub)


def scaled_configuration(
    config: PretrainedConfig, rope_scaling: Mapping[str, Any]
) -> PretrainedConfig:
    """Replace the scaling of frequencies; base and rotated share stay unless given.

    Args:
        config: Configuration of a decoder.
        rope_scaling: Table such as {"rope_type": "yarn", "factor": 2.0}.

    Returns:
        A new configuration.

    Raises:
        InputError: The table is no scaling, or types of layers have different ones.
    """
    if not isinstance(rope_scaling, Mapping):
        raise InputError(
            f"rope_scaling is {quoted(rope_scaling)}; wanted a table such as {{'rope_type': "
            f"'yarn', 'factor': 2.0}}"
        )
    raw = config.to_dict()
    base = raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in base.values()):
        raise InputError(
            f"{config.model_type} scales each kind of layer by itself; rope_scaling cannot "
            "be exchanged for it"
        )
    kept = {name: base[name] for name in ("partial_rotary_factor", *OF_FAMILIES) if name in base}
    parameters = {"rope_theta": base.get("rope_theta"), **kept, **rope_scaling}
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    if "rope_type" not in parameters:
        raise InputError(
            f"rope_scaling is {abbreviate(dict(rope_scaling))}; wanted a rope_type, such as yarn "
            "or linear, beside the factor"
        )
    raw["rope_parameters"] = parameters
    scaled = make_config(raw, "rope_scaling")
    require_family(scaled)
    return scaled


class RepositionedConfig(PretrainedConfig):
    """Reads config.json of our format for `AutoConfig`, as the decoder inside with its layout."""

    model_type = OURS

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of the decoder, with its layout.

        Args:
            config_dict: Keys of config.json.
            **kwargs: Options of `AutoConfig`.

        Returns:
            The configuration; with `return_unused_kwargs`, unused options too.

        Raises:
            InputError: The keys describe no decoder.
        """
        raw = resolve_layers(
            {key: value for key, value in config_dict.items() if not key.startswith("_")},
            "config.json",
        )
        layers, options = read_layout(raw, int(raw.get("num_hidden_layers", 0)), "config.json")
        if remark := function_remark(raw):
            warn(f"config.json {remark}")
        return_unused = kwargs.pop("return_unused_kwargs", False)
        config = make_config(plain_keys(raw, "config.json"), "config.json")
        config.name_or_path = kwargs.pop("name_or_path", "")
        for name in [name for name in kwargs if name in raw or name.startswith("_")]:
            value = kwargs.pop(name)
            if name in raw:
                setattr(config, name, value)
        require_family(config)
        repositioned(config, layers, options)
        return (config, kwargs) if return_unused else config


def written_configuration(decoder: Any) -> dict[str, Any]:
    """Return the content of config.json for a repositioned model.

    Args:
        decoder: A repositioned model.

    Returns:
        Keys and values.
    """
    dtype = str(decoder.dtype).removeprefix("torch.")
    config = decoder.config.to_dict() | {
        "dtype": dtype,
        "architectures": [class_name(decoder.config.model_type)],
    }
    config.pop("_name_or_path", None)
    # Infinity is no JSON, and limits of state space layers are infinite.
    return PretrainedConfig._encode_special_floats(config)


def make_config(raw: Mapping[str, Any], source: str) -> PretrainedConfig:
    """Make the Hugging Face configuration of a decoder's keys.

    Args:
        raw: Keys of config.json.
        source: The file, for errors.

    Returns:
        The configuration.

    Raises:
        InputError: The keys describe no decoder.
    """
    require_keys(raw, source)
    with as_input_errors(f"{source} describes no decoder"):
        # transformers writes into it
        raw = dict(PretrainedConfig._decode_special_floats(copy.deepcopy(dict(raw))))
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    require_decoder(raw, config, source)
    return config


def __getattr__(name: str) -> Any:
    """Find a class of configurations that an earlier version pickled by this module's name."""
    return repositioned_class_named(name, __name__)
