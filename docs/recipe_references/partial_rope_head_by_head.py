"""Attention by matrices, with separate frequencies for each head."""

import inspect
import textwrap

import torch
from plain_transformers import (
    attending,
    blocks,
    group,
    interval,
    losses,
    open_plain,
    projected,
    rotate,
)

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
vectors = projected(model, tokens)


def norms(name: str) -> torch.Tensor:
    """Norms of rotary pairs [layer, head, pair], mean over tokens."""
    sides = torch.stack(vectors[name]).double()
    return torch.stack(sides.chunk(2, dim=-1)).norm(dim=0).mean(2)


products = norms("q_proj") * norms("k_proj").repeat_interleave(group(model), 1)
layers, heads, pairs = products.shape
first = torch.arange(pairs) < pairs // 4


def largest(values: torch.Tensor) -> torch.Tensor:
    """Mark the quarter of the pairs with the largest values."""
    order = values.argsort(dim=-1, descending=True)
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, order, first.expand_as(order))


keep = {
    "largest norms of each head": largest(products),
    "largest norms, mean over heads": largest(products.mean((0, 1))).expand_as(products),
    "fastest": first.expand_as(products),
}
index = torch.arange(tokens.shape[1])[:, None]
plain = blocks(losses(model, tokens)[0])
print(f"all {pairs} pairs turn: {plain.mean():.2f}")
for name, kept in keep.items():

    def logits(layer, states, queries, keys, kept=kept):
        """Logits of RoPE without rotation of the other pairs."""
        angles = index * (model.model.rotary_emb.inv_freq * kept[layer][:, None])
        return rotate(queries, angles) @ rotate(keys, angles).mT

    with attending(model, logits):
        found = blocks(losses(model, tokens)[0])
    _, low, high = interval(found - plain)
    print(f"{pairs // 4} pairs, {name}: {found.mean():.2f}, which is {low:.2f} to {high:.2f} more")
