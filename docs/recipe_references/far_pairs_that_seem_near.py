"""The methods as their authors write them: two sets of logits, one for near and one for far pairs."""

import torch
from plain_transformers import attending, losses, open_plain, rotate

import repo_interp as ri  # the texts alone

model, _ = open_plain("language/rope")
length = model.config.max_position_embeddings
prompts = ri.tasks.make_task("language").prompts(8, seed=0, test_set="1024")
tokens = torch.tensor([prompt.tokens for prompt in prompts])
index = torch.arange(tokens.shape[1])
apart = index[:, None] - index
frequencies = model.model.rotary_emb.inv_freq


def turned(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Vectors [prompt, head, token] rotated to these positions."""
    return rotate(vectors, positions[:, None] * frequencies)


def plain(layer, states, queries, keys):
    """Logits of RoPE."""
    return turned(queries, index) @ turned(keys, index).mT


def interpolation(layer, states, queries, keys):
    """Half of the position."""
    return turned(queries, index / 2) @ turned(keys, index / 2).mT


def self_extend(layer, states, queries, keys):
    """Grouped positions beyond the neighbors, shifted so that both meet."""
    near, group = length // 2, 8
    far = turned(queries, index // group + near - near // group) @ turned(keys, index // group).mT
    return torch.where(apart < near, plain(layer, states, queries, keys), far)


def rerope(layer, states, queries, keys):
    """One distance for all far pairs: queries at that position, keys at 0."""
    most = length // 2
    far = turned(queries, torch.full_like(index, most)) @ keys.mT
    return torch.where(apart < most, plain(layer, states, queries, keys), far)


def lm_infinite(layer, states, queries, keys):
    """The same distances, and only the first ten of the far keys."""
    lost = (apart >= length // 2) & (index >= 10)
    return rerope(layer, states, queries, keys).masked_fill(lost, -torch.inf)


methods = {
    "as it is": plain,
    "Self-Extend": self_extend,
    "ReRoPE": rerope,
    "LM-Infinite": lm_infinite,
    "interpolation": interpolation,
}
for name, logits in methods.items():
    with attending(model, logits):
        # prompt by prompt: maps of all would need gigabytes
        found = torch.cat([losses(model, one[None]) for one in tokens])
    print(f"{name} {found[:, : length - 1].mean():.2f} {found[:, 2 * length - 1 :].mean():.2f}")
