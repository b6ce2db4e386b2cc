"""Make transformers configurations from config.json, and save them for repositioned models.

The configuration of a repositioned model is saved in our format by any code (`repositioned_class`).
Another library could read all other keys and run plain RoPE, so our format has a number of layers
that is no number, which makes it fail.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from repo_interp.checkpoint_files.architectures import class_name, native_layout, require_family
from repo_interp.checkpoint_files.fields import OF_FAMILIES
from repo_interp.checkpoint_files.options import functions_of
from repo_interp.checkpoint_files.stated import (
    COUNTED,
    OURS,
    Checkpoint,
    function_remark,
    plain_keys,
    read_checkpoint,
    read_layout,
    require_decoder,
    require_keys,
    resolve_layers,
)
from repo_interp.errors import InputError, as_input_errors, quoted, warn
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


def repositioned(
    config: PretrainedConfig, schemes: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    """Make a configuration, in place, that of a repositioned decoder.

    Args:
        config: Configuration; it is written in our format from now on.
        schemes: Scheme by layer.
        options: Options of schemes by name.
    """
    # Not a new object: modules of the decoder reference this one, and the user may set attributes
    # on it.
    config.__class__ = repositioned_class(config.model_type)
    functions = functions_of(schemes)
    config.position_layout = {
        "layers": list(schemes),
        **options,
        **({"functions": functions} if functions else {}),
    }


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


def stock_config(config: PretrainedConfig) -> PretrainedConfig:
    """Copy a configuration as the stock decoder's, without a layout.

    Args:
        config: Configuration of a repositioned model.

    Returns:
        The copy.
    """
    stock = copy.deepcopy(config)
    # Not built anew: a constructor of a family may change its arguments, and fills in others.
    stock.__class__ = CONFIG_MAPPING[config.model_type]
    stock.__dict__.pop("position_layout", None)
    return stock


def own_layout_of(config: PretrainedConfig) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Read the layout of a repositioned model's configuration.

    Args:
        config: Configuration of a repositioned model.

    Returns:
        Scheme by layer, and options by name.
    """
    return read_layout(
        {"position_layout": config.position_layout}, config.num_hidden_layers, "the configuration"
    )


REGISTER: list[Callable[[type[PretrainedConfig]], None]] = []
"""Called with every class that `repositioned_class` makes: `checkpoints` gives it to Auto classes.
"""


@cache
def repositioned_class(family: str) -> type[PretrainedConfig]:
    """Derive the family's configuration class that writes our format.

    A layout that is the stock decoder's is written as a stock checkpoint.

    Args:
        family: The `model_type`.

    Returns:
        The class, registered with Auto classes.
    """
    stock = CONFIG_MAPPING[family]

    def to_dict(self: PretrainedConfig) -> dict[str, Any]:
        raw = stock.to_dict(self)
        given = raw.get("position_layout") or {"layers": native_layout(self)}
        if tuple(given["layers"]) == native_layout(self):
            raw.pop("position_layout", None)
            return raw
        return raw | {"model_type": OURS, "base_model_type": family, "num_hidden_layers": COUNTED}

    name = f"Repositioned{stock.__name__}"
    made = type(
        name,
        (stock,),
        {"to_dict": to_dict, "__module__": __name__, "__doc__": f"{stock.__name__} with a layout."},
    )
    for register in REGISTER:
        register(made)
    return made


def __getattr__(name: str) -> Any:
    """Make a class of `repositioned_class` by its name: configurations are unpickled with it."""
    stock = name.removeprefix("Repositioned")
    families = [
        family for family, kind in CONFIG_MAPPING_NAMES.items() if kind == stock and stock != name
    ]
    if families:
        return repositioned_class(families[0])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
