"""RePo's models without this package: Llama of transformers, with attention by positions of f_phi.

z_i = (silu(h_i Wg) * (h_i Wc)) Wz        rows of key-value heads, or one for a layer
logit_ij = rotate(q_i, z_i theta) . rotate(k_j, z_j theta) / sqrt(d_head)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from plain_transformers import attending, directory, open_plain, open_tokenizer, rotate
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

Maps = dict[int, tuple[Tensor, Tensor, Tensor]]
"""Wg, Wc and Wz by layer."""
NAMES = ("gate_map", "content_map", "final_map")


def open_repo(name: str) -> tuple[Any, Any, Maps]:
    """Open a checkpoint of RePo, or an adapter of one: model, tokenizer, and its maps."""
    path = directory(name)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if (adapter := path / "adapter_model.safetensors").is_file():
        model, tokenizer = open_plain(config["adapter"]["name"])
        weights = in_float32(load_file(adapter))
        scale = 2.0  # lora_alpha / r
        model.load_state_dict(_merged(model.state_dict(), weights, scale))
    else:
        weights = in_float32(load_file(path / "model.safetensors"))
        layers = config["position_layout"]["layers"]
        chosen = LlamaConfig().to_dict().keys() & config.keys() - {
            "num_hidden_layers",
            "model_type",
        }
        fields = {key: config[key] for key in chosen}
        model = LlamaForCausalLM(LlamaConfig(**fields, num_hidden_layers=len(layers)))
        model.load_state_dict(
            {key: value for key, value in weights.items() if key.split(".")[-2] not in NAMES}
        )
        tokenizer = open_tokenizer(path)
    maps = {}
    for layer in range(model.config.num_hidden_layers):
        found = {
            key.split(".")[-2]: value
            for key, value in weights.items()
            if f".layers.{layer}." in key and key.split(".")[-2] in NAMES
        }
        if found:
            maps[layer] = tuple(found[one] for one in NAMES)
    return model.eval(), tokenizer, maps


def in_float32(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that may be stored in half precision."""
    return {name: value.float() for name, value in weights.items()}


def _merged(
    state: dict[str, Tensor], adapter: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """W + scale B A."""
    for key, up in adapter.items():
        if key.endswith("lora_B.weight"):
            down = adapter[key.replace("lora_B", "lora_A")]
            name = key.removeprefix("base_model.model.").replace("lora_B.", "")
            state[name] = state[name] + scale * up @ down
    return state


@contextmanager
def positioned(
    model: Any,
    maps: Maps,
    edit: Callable[[int, Tensor], Tensor] = lambda layer, positions: positions,
) -> Iterator[dict[int, Tensor]]:
    """Attend by learned positions inside a context.

    Yields the positions of the last pass, by layer [prompt, head, token], as `edit` leaves them.
    """
    found: dict[int, Tensor] = {}
    frequencies = model.model.rotary_emb.inv_freq

    def logits(layer: int, states: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        heads, tokens = queries.shape[1:3]
        if layer in maps:
            gate, content, final = maps[layer]
            hidden = torch.nn.functional.silu(states @ gate.mT) * (states @ content.mT)
            rows = (hidden @ final.mT).transpose(1, 2)  # [prompt, row, token]
            found[layer] = edit(layer, rows.repeat_interleave(heads // rows.shape[1], 1))
            positions = found[layer]
        else:
            positions = torch.arange(tokens)[None, None].float()
        angles = positions[..., None] * frequencies
        return rotate(queries, angles) @ rotate(keys, angles).mT

    with attending(model, logits):
        yield found
