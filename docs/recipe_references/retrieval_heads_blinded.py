"""Attention that transformers returns, and the fact behind an additive mask of some heads."""

import inspect
import random
import textwrap

import torch
from plain_transformers import hiding, losses, open_plain, patterns

model, tokenizer = open_plain("smollm2-135m")
code = inspect.getsource(textwrap)[:1500]
fact, question = "The secret code of the vault is 7391.", "\nThe secret code of the vault is 7391"
given = tokenizer(code[:700] + fact + code[700:1000] + question, return_offsets_mapping=True)
tokens = torch.tensor([given["input_ids"]])
start = 700 + fact.index("7391")
needle = [
    place
    for place, (first, end) in enumerate(given["offset_mapping"])
    if first < start + 4 and end > start and end > first
]
answer = torch.arange(tokens.shape[1])[-4:]
mass = patterns(model, tokens)[:, :, answer - 1][..., needle].double().sum(-1).mean(-1)
count = mass.shape[1]
places = mass.flatten().argsort()
heads = [divmod(int(place), count) for place in places.flip(0)[: min(12, mass.numel() // 2)]]
random.seed(0)
others = [divmod(place, count) for place in range(mass.numel())]
others = random.sample([pair for pair in others if pair not in heads], len(heads))
index = torch.arange(tokens.shape[1])
pair = (index >= needle[0]) & (index <= needle[-1]) & (index[:, None] > needle[-1])


def loss(blind: list[tuple[int, int]]) -> float:
    """Loss of the answer, with heads that do not see the fact."""
    chosen = torch.zeros_like(mass, dtype=torch.bool)
    for layer, head in blind:
        chosen[layer, head] = True
    with hiding(model, lambda layer, states: chosen[layer][:, None, None] & pair):
        return float(losses(model, tokens)[0, answer - 1].mean())


named = ", ".join(f"L{layer} H{head}" for layer, head in heads[:4])
print(f"most attention to the fact: {named}")
plain = loss([])
print(f"loss of the answer {plain:.2f}; blinded {loss(heads) - plain:+.2f}; ", end="")
print(f"{len(others)} other heads blinded {loss(others) - plain:+.2f}")
