"""Values of `v_proj`, attention that transformers returns, and a hook that scales a value."""

import inspect
import textwrap

import torch
from plain_transformers import (
    blocks,
    group,
    hooked,
    losses,
    open_plain,
    patterns,
    projected,
)

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
# The middles of 512 equal parts of the queries; of up to 512, all
later = tokens.shape[1] - 1
count = min(later, 512)
rows = 1 + (2 * torch.arange(count) + 1) * later // (2 * count)
attention = patterns(model, tokens)[:, :, rows].double()  # [layer, head, query, key]
values = torch.stack(projected(model, tokens)["v_proj"]).double()
norms = values.norm(dim=-1).repeat_interleave(group(model), 1)  # [layer, head, key]
weight = attention[..., 0].mean(-1)
moved = attention * norms[:, :, None]
share = (moved[..., 0] / moved.sum(-1)).mean(-1)
ratio = norms[..., 0] / norms[..., 1:].sort(-1).values[..., (later - 1) // 2]
resting = weight > weight.flatten().quantile(0.8)
words = {"attention": weight, "what is moved": share, "its norm over the median": ratio}
for name, found in words.items():
    mean = found[resting].mean()
    print(f"{name}: {mean:.2f} for the first token, mean over the fifth of heads that rest most")
plain = blocks(losses(model, tokens)[0])


def change(factor: float, token: int) -> float:
    """Change of the loss, with the values of a token times a factor."""

    def scaled(module, arguments, output):
        output = output.clone()
        output[:, token] *= factor
        return output

    with hooked(*((layer.self_attn.v_proj, scaled) for layer in model.model.layers)):
        return float((blocks(losses(model, tokens)[0]) - plain).mean())


for name, factor in (("zero", 0.0), ("twice", 2.0)):
    print(f"its values {name}: {change(factor, 0):+.2f} nats; ", end="")
    print(f"those of token 7: {change(factor, 7):+.2f}")
