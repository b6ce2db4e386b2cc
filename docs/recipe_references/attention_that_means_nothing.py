"""Attention that transformers returns, and the first token behind an additive mask of some heads."""

import inspect
import textwrap

import torch
from plain_transformers import blocks, hiding, losses, open_plain, patterns

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
index = torch.arange(tokens.shape[1])
# The middles of 512 equal parts of the queries; of up to 512, all
later = len(index) - 1
count = min(later, 512)
rows = 1 + (2 * torch.arange(count) + 1) * later // (2 * count)


def attention() -> torch.Tensor:
    """Attention of these rows, [layer, head, query, key]."""
    return patterns(model, tokens)[:, :, rows].double()


resting = attention()[..., 0].mean(-1)
chosen = resting > 0.5
print(f"on the first token: {100 * resting.mean():.0f} % of attention, ", end="")
print(f"{int(chosen.sum())} heads more than half")
if not chosen.any():
    chosen.view(-1)[resting.argmax()] = True
plain = blocks(losses(model, tokens)[0])


def without(token: int, heads: torch.Tensor):
    """Hide a token from heads [layer, head], at later tokens."""
    pair = (index == token) & (index[:, None] > token)
    return hiding(model, lambda layer, states: heads[layer][:, None, None] & pair)


everything = torch.ones_like(chosen)
for name, heads in (("those heads", chosen), ("all heads", everything)):
    changes = []
    for token in (0, 7):
        with without(token, heads):
            changes.append((blocks(losses(model, tokens)[0]) - plain).mean())
    print(f"{name} without the first token: {changes[0]:+.2f} nats; ", end="")
    print(f"without token 7: {changes[1]:+.2f}")
with without(0, everything):
    found = attention()
after = rows[:, None] > index
received = ((found * after).sum(2) / after.sum(0)).mean((0, 1))  # of every key, from later rows
most = int(received.nan_to_num(0).argmax())
print(f"hidden from all heads, most attention rests on token {most}, {100 * received[most]:.0f} %")
