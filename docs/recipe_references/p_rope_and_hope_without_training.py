"""transformers' model with some of its frequencies at 0."""

import inspect
import math
import textwrap

import torch
from plain_transformers import losses, open_plain

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:3000])["input_ids"]])
frequencies = model.model.rotary_emb.inv_freq.clone()
pairs = len(frequencies)


def loss(kept: torch.Tensor) -> float:
    """Mean negative log-probability of the text's tokens if these pairs rotate, in nats."""
    model.model.rotary_emb.inv_freq = frequencies * kept
    return float(losses(model, tokens).mean())


print(f"as it is: {loss(torch.ones(pairs)):.3f}")
for stopped in (pairs // 8, pairs // 4, pairs // 2, 3 * pairs // 4):
    found = loss(torch.arange(pairs) < pairs - stopped)
    print(f"p-RoPE, {stopped} of {pairs} pairs stopped: {found:.3f}")
for length in (8192, 2048, 512, 128):
    found = loss(length * frequencies >= 2 * math.pi)
    print(f"HoPE, training length {length}: {found:.3f}")
