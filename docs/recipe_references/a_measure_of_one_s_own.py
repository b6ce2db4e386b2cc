"""Attention that transformers returns."""

import inspect
import textwrap

import torch
from plain_transformers import open_plain, patterns

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
strongest = patterns(model, tokens)[:, :, 1:].argmax(-1)
share = (strongest == torch.arange(tokens.shape[1] - 1)).double().mean(-1)  # [layer, head]
for place in share.flatten().argsort(descending=True, stable=True)[:3]:
    layer, head = divmod(int(place), share.shape[1])
    print(f"{layer} {head} {share[layer, head]:.2f}")
