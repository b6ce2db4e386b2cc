"""Pairs of queries and keys are set to their means by hooks on the projections."""

import inspect
import textwrap
from functools import partial

import torch
from plain_transformers import hooked, losses, open_plain, projected, width

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
keys = torch.stack(projected(model, tokens)["k_proj"])  # [layer, kv_head, token, d_head]
norms = torch.stack(keys.chunk(2, dim=-1)).norm(dim=0).mean((0, 1, 2))
order = norms.argsort()
median = (norms.sort().values[[(len(norms) - 1) // 2, len(norms) // 2]]).mean()
print(f"largest pair {order[-1]}: {norms[order[-1]] / median:.1f} times the median norm of keys")
projections = [
    project
    for layer in model.model.layers
    for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
]
means: dict[torch.nn.Module, torch.Tensor] = {}


def keep_mean(module, arguments, output):
    """Keep the mean of every head over the tokens of the undisturbed pass."""
    means[module] = output.unflatten(-1, (-1, width(model))).mean(1, keepdim=True)


def at_mean(entries: torch.Tensor, module, arguments, output):
    """Replace some entries of every head by the mean."""
    heads = output.unflatten(-1, (-1, width(model))).clone()
    heads[..., entries] = means[module][..., entries]
    return heads.flatten(-2)


with hooked(*((project, keep_mean) for project in projections)):
    print(f"loss {losses(model, tokens).mean():.2f}")
for name, pairs in (("four largest pairs", order[-4:]), ("four middle pairs", order[12:16])):
    change = partial(at_mean, torch.cat((pairs, pairs + width(model) // 2)))
    with hooked(*((project, change) for project in projections)):
        print(f"{name} to their mean: {losses(model, tokens).mean():.2f}")
