"""Configuration classes of repositioned models: the family's, with a layout.

The configuration of a repositioned model is saved in our format by any code (`repositioned_class`).
Another library could read all other keys and run plain RoPE, so our format has a number of layers
that is no number, which makes it fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from repo_interp.checkpoint_files.architectures import native_layout
from repo_interp.checkpoint_files.options import functions_of
from repo_interp.checkpoint_files.position_layout import COUNTED, OURS, read_layout

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


def stock_config(config: PretrainedConfig) -> PretrainedConfig:
    """Copy a configuration as the stock decoder's, without a layout.

    Args:
        config: Configuration of a repositioned model.

    Returns:
        The copy.
    """
    stock = copy.deepcopy(config)
    # Not built again: a constructor of a family may change its arguments, and fills in others.
    stock.__class__ = CONFIG_MAPPING[config.model_type]
    stock.__dict__.pop("position_layout", None)
    return stock


def repositioned_class_named(name: str, module: str) -> Any:
    """Make a class of `repositioned_class` by its name.

    Args:
        name: Such as "RepositionedLlamaConfig".
        module: Name of the module that is asked for it.

    Returns:
        The class.

    Raises:
        AttributeError: There is no such class.
    """
    stock = name.removeprefix("Repositioned")
    families = [
        family for family, kind in CONFIG_MAPPING_NAMES.items() if kind == stock and stock != name
    ]
    if families:
        return repositioned_class(families[0])
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    """Make a class by its name: configurations are unpickled with it."""
    return repositioned_class_named(name, __name__)
