"""A tiny random model of any family of transformers, in which positions matter.

Sizes are those of families.toml, under the names that the family's configuration has; norms and
biases, which begin as ones and zeros, are changed by random numbers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.running import read_toml

SIZES = read_toml(Path(__file__).with_name("families"))
TOKENS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(1))
"""Two prompts, longer than any window."""


def small_configuration(family: str, **changes: Any) -> Any:
    """A configuration of `family` with small sizes, and with `changes` if it has such fields."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    sizes = (
        SIZES["every"] | (SIZES["latent"] if hasattr(default, "qk_rope_head_dim") else {}) | changes
    )
    small = {name: value for name, value in sizes.items() if _settable(default, name, value)}
    for name in SIZES["lists"]:
        named = getattr(default, name, None)
        if isinstance(named, list | tuple) and _settable(default, name, named):
            small[name] = _varied(list(named))
    return kind(
        **small
        | SIZES["family"].get(family, {})
        | {name: value for name, value in changes.items() if name in small}
    )


def _settable(default: Any, name: str, value: Any) -> bool:
    """Whether a configuration has `name`, and not as something that is computed of other names."""
    name = type(default).attribute_map.get(name, name)
    try:
        setattr(copy.copy(default), name, value)
    except Exception:
        return False
    return hasattr(type(default), name) or name in vars(default)


def _varied(named: list[Any]) -> list[Any]:
    """Four entries in which every kind of `named` occurs."""
    kinds = list(dict.fromkeys(named))
    return [*kinds, *named[: 4 - len(kinds)]][:4] if len(kinds) < 4 else kinds[:4]


def small_model(family: str, config: Any = None) -> Any:
    """A tiny random model of `family` (of `config`), in which positions matter."""
    torch.manual_seed(0)
    config = config or small_configuration(family)
    config.initializer_range = 0.15
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # norms and biases, which begin as ones and zeros
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def computed(stock: Any) -> tuple[torch.Tensor, str]:
    """Logits of a stock model, and the shapes of its weights."""
    shapes = {name: tuple(weight.shape) for name, weight in stock.named_parameters()}
    return stock(TOKENS, use_cache=False).logits, str(shapes)
