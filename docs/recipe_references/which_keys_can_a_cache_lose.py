"""Keys of `k_proj`, their norms, and an additive mask of each head."""

import inspect
import textwrap

import torch
from plain_transformers import blocks, group, hiding, losses, of_heads, open_plain

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
layers = range(2, model.config.num_hidden_layers)
index = torch.arange(tokens.shape[1])
old = index[:, None] - index >= 32


def by_norm(sign: int):
    """Hide keys whose norm, times the sign, is above the median of their head."""

    def hidden(layer: int, states: torch.Tensor) -> torch.Tensor:
        keys = of_heads(model, model.model.layers[layer].self_attn.k_proj(states))[0]
        norms = sign * keys.norm(dim=-1).repeat_interleave(group(model), 0)  # [head, key]
        lost = norms > norms.sort(-1).values[:, (len(index) - 1) // 2, None]
        return lost[:, None] & old

    return hidden


generator = torch.Generator().manual_seed(0)
drawn = torch.rand(model.config.num_attention_heads, 1, 4096, generator=generator) < 0.5
edits = {
    "keeping low norms": by_norm(1),
    "keeping high norms": by_norm(-1),
    "at random": lambda layer, states: drawn[..., : len(index)] & old,
}
print(f"as it is: {blocks(losses(model, tokens)[0]).mean():.2f}")
for name, hidden in edits.items():
    with hiding(model, hidden, layers):
        print(f"{name}: {blocks(losses(model, tokens)[0]).mean():.2f}")
