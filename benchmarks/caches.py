"""`python -m benchmarks.caches [FAMILY ...]`: test the verdicts of `ri.verify_cache` on caches with
one mistake each, in tiny models of many families.

The exit code is 1 if a mistake gets a wrong verdict, or a correct cache has a finding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import repo_interp as ri
from benchmarks.tiny_models import small_configuration, small_model
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import observable
from repo_interp.positions.rotary import rotate

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "phi",
    "cohere",
    "olmo2",
    "glm4",
    "smollm3",
    "stablelm",
    "granite",
    "gpt_oss",
)
TOKENS = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(5))
HALF, COUNT = 20, 40
INDEX = torch.arange(COUNT)
Keys = dict[int, Tensor]
"""Keys by layer [kv_head, slot, entry]."""


@dataclass(frozen=True)
class Caches:
    """A model, and the keys from which mistakes are made."""

    model: Any
    by_layer: Any
    keys: Keys
    """Keys of a pass over all tokens."""

    def passed(self, tokens: Tensor, start: int = 0) -> Keys:
        """Keys of a pass over some tokens, at positions from `start` on."""
        cache: Any = DynamicCache()  # without a configuration all layers keep all tokens
        index = torch.arange(start, start + len(tokens))[None]
        arguments = {} if start == 0 else {"position_ids": index}
        with torch.no_grad():
            self.model(tokens[None], past_key_values=cache, use_cache=True, **arguments)
        return {layer: held.keys[0] for layer, held in enumerate(cache.layers)}

    def turned(self, positions: Tensor, layers: Sequence[int] = (), power: float = 1.0) -> Keys:
        """The keys, rotated further by `positions` of their slots, in some layers (empty: all)."""
        found = {}
        for layer, keys in self.keys.items():
            attention, width = self.by_layer[layer], keys.shape[-1]
            frequencies = attention.frequencies
            if frequencies is None or (layers and layer not in layers):
                found[layer] = keys
                continue
            order = torch.arange(width) if attention.order is None else attention.order
            theta = torch.where(frequencies > 0, frequencies.double() ** power, 0.0)
            halves = rotate(keys[..., order].double(), positions.double(), theta)
            found[layer] = halves[..., order.argsort()].to(keys.dtype)
        return found

    def other_order(self, layer: int) -> Tensor:
        """Entries of a key in the other order of pairs, and in the model's order."""
        attention = self.by_layer[layer]
        width, turning = attention.d_head, attention.rotation.turning
        order = torch.arange(width) if attention.order is None else attention.order
        inverse = torch.arange(width)
        halves = int(order[width // 2] - order[0]) != 1
        entries = torch.arange(2 * turning)
        inverse[: 2 * turning] = (
            entries.view(2, -1).T.flatten() if halves else entries.view(-1, 2).T.flatten()
        )
        return inverse


def _chosen(keys: Keys, slots: Tensor) -> Keys:
    return {layer: of_layer[:, slots] for layer, of_layer in keys.items()}


def _joined(*parts: Keys) -> Keys:
    return {layer: torch.cat([part[layer] for part in parts], 1) for layer in parts[0]}


def _each(keys: Keys, change: Callable[[Tensor], Tensor]) -> Keys:
    return {layer: change(of_layer) for layer, of_layer in keys.items()}


def _rounded(keys: Tensor) -> Tensor:
    """Keys rounded to 15 steps per channel, as in a cache of 4 bits."""
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    step = (high - low).clamp_min(1e-9) / 15
    return ((keys - low) / step).round() * step + low


def _exchanged(caches: Caches) -> Keys:
    """Keys rotated in other pairs of entries: back by the model's pairs, then forward by others."""
    found = {}
    for layer, keys in caches.turned(-INDEX).items():
        attention = caches.by_layer[layer]
        frequencies = attention.frequencies
        other = _other_pairs(attention)
        if frequencies is not None:
            halves = rotate(keys[..., other].double(), INDEX.double(), frequencies.double())
            keys = halves[..., other.argsort()].to(keys.dtype)
        found[layer] = keys
    return found


def _other_pairs(attention: Any) -> Tensor:
    """Half-split order by pairs of neighbors if the model pairs halves, else by halves."""
    turning, half = attention.rotation.turning, attention.d_head // 2
    entries, rest = torch.arange(2 * turning), torch.arange(2 * turning, attention.d_head)
    halves = attention.order is None or int(attention.order[half] - attention.order[0]) != 1
    first, second = (entries[0::2], entries[1::2]) if halves else entries.split(turning)
    return torch.cat([first, rest[: half - turning], second, rest[half - turning :]])


def _one_head(caches: Caches) -> Keys:
    """Keys whose last head in the last rotating layer is five positions too late."""
    layer = max(layer for layer, one in caches.by_layer.items() if one.frequencies is not None)
    keys = dict(caches.keys)
    moved = caches.turned(torch.full((COUNT,), 5), (layer,))[layer]
    keys[layer] = torch.cat([keys[layer][:-1], moved[-1:]])
    return keys


def _last_layer(caches: Caches) -> Keys:
    layer = max(layer for layer, one in caches.by_layer.items() if one.frequencies is not None)
    return caches.turned(torch.full((COUNT,), 5), (layer,))


def _with_tokens(caches: Caches, slots: Tensor) -> Keys:
    """Keys of other tokens in some slots."""
    others = caches.passed((TOKENS + 1 - 3) % 117 + 3)
    mine = torch.isin(INDEX, slots)
    return {
        layer: torch.where(mine[:, None], others[layer], keys)
        for layer, keys in caches.keys.items()
    }


KEPT = torch.cat([INDEX[:4], INDEX[15:]])
SECOND = torch.where(INDEX < HALF, 0, INDEX)
MISTAKES: dict[str, tuple[str, Callable[[Caches], Keys]]] = {
    "none": ("contiguous", lambda caches: caches.keys),
    "entries in the other order": (
        "contiguous",
        lambda caches: {
            layer: keys[..., caches.other_order(layer)] for layer, keys in caches.keys.items()
        },
    ),
    "zeros behind": (
        "contiguous",
        lambda caches: _each(caches.keys, lambda keys: torch.nn.functional.pad(keys, (0, 0, 0, 9))),
    ),
    "bfloat16": ("contiguous", lambda caches: _each(caches.keys, lambda keys: keys.bfloat16())),
    "4 bits": ("contiguous", lambda caches: _each(caches.keys, _rounded)),
    "halves swapped": (
        "contiguous",
        lambda caches: _chosen(caches.keys, INDEX.roll(HALF)),
    ),
    "one late": ("shifted by +1", lambda caches: caches.passed(TOKENS, 1)),
    "1,000 late": ("shifted by +1,000", lambda caches: caches.passed(TOKENS, 1000)),
    "3 early": ("shifted by -3", lambda caches: caches.turned(torch.full((COUNT,), -3))),
    "two joined": (
        "fragments",
        lambda caches: _joined(caches.passed(TOKENS[:HALF]), caches.passed(TOKENS[HALF:])),
    ),
    "three joined": (
        "fragments",
        lambda caches: _joined(*(caches.passed(part) for part in TOKENS.split(14))),
    ),
    "joined, one late": (
        "fragments",
        lambda caches: _joined(
            caches.passed(TOKENS[:HALF]), caches.passed(TOKENS[HALF:], HALF + 1)
        ),
    ),
    "turned twice": ("turned twice", lambda caches: caches.turned(INDEX)),
    "second half twice": ("turned twice", lambda caches: caches.turned(SECOND)),
    "not turned": ("not turned", lambda caches: caches.turned(-INDEX)),
    "second half not turned": ("not turned", lambda caches: caches.turned(-SECOND)),
    "turned back": ("turned back", lambda caches: caches.turned(-2 * INDEX)),
    "evicted": ("evicted", lambda caches: _chosen(caches.keys, KEPT)),
    "evicted and moved together": (
        "evicted, fragments",
        lambda caches: _chosen(caches.turned(torch.where(INDEX < 4, 0, -11)), KEPT),
    ),
    "evicted and moved one too far": (
        "evicted, fragments",
        lambda caches: _chosen(caches.turned(torch.where(INDEX < 4, 0, -12)), KEPT),
    ),
    "one other token": ("wrong token", lambda caches: _with_tokens(caches, torch.tensor([7]))),
    "five other tokens": ("wrong token", lambda caches: _with_tokens(caches, INDEX[10:15])),
    "one token twice": (
        "repeated",
        lambda caches: _chosen(caches.keys, torch.cat([INDEX, INDEX[9:10]])),
    ),
    "other base": ("other angles", lambda caches: caches.turned(INDEX, power=1.3)),
    "interpolated": ("other angles", lambda caches: caches.turned(-0.75 * INDEX)),
    "other pairs": ("other pairs", _exchanged),
    "one layer late": ("shifted by +5", _last_layer),
    "one head late": ("shifted by +5", _one_head),
    "attention factor": (
        "other length",
        lambda caches: _each(caches.keys, lambda keys: 1.2 * keys),
    ),
}
"""By name, the right verdict, and the function that makes the cache."""


def caches_of(family: str, dtype: torch.dtype = torch.float32) -> Caches:
    """A tiny model of a family, and its keys of `TOKENS`."""
    # Heads of 32 entries: a quarter of them, which some families turn, still has four pairs.
    config = small_configuration(family, hidden_size=128, head_dim=32)
    config.max_position_embeddings = 2048
    if getattr(config, "sliding_window", None):
        config.sliding_window = 2 * COUNT  # else tokens that are evicted would not be needed
    model = small_model(family, config).to(dtype)
    caches = Caches(model, as_decoder(observable(model)).by_layer, {})
    return Caches(model, caches.by_layer, caches.passed(TOKENS))


def judged(caches: Caches) -> Iterator[tuple[str, str, str]]:
    """Name, right verdict, and the verdict of `ri.verify_cache`, of every mistake."""
    for name, (wanted, make) in MISTAKES.items():
        arrays = {f"keys_{layer}": keys for layer, keys in make(caches).items()}
        given = [(keys[None], None) for keys in arrays.values()]
        try:
            found = ri.verify_cache(caches.model, TOKENS, given).attrs["verdict"]
        except ri.InputError as error:
            found = str(error)
        yield name, wanted, found


def main(families: Sequence[str]) -> int:
    """Print the wrong verdicts, and the number of right ones."""
    tried = wrong = 0
    for family in families or FAMILIES:
        for name, wanted, found in judged(caches_of(family)):
            tried += 1
            if found != wanted:
                wrong += 1
                sys.stdout.write(f"{family}: {name}: wanted {wanted}, found {found}\n")
    sys.stdout.write(f"{tried - wrong} of {tried} caches named rightly\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
