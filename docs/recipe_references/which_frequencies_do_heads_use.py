"""Norms of rotary pairs from the projections; position scores with permuted keys."""

import inspect
import textwrap

import numpy as np
import torch
from plain_transformers import group, open_plain, projected, rotate

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
vectors = projected(model, tokens)
queries = torch.stack(vectors["q_proj"]).double()  # [layer, head, token, d_head]
keys = torch.stack(vectors["k_proj"]).double().repeat_interleave(group(model), 1)


def norms(sides: torch.Tensor) -> torch.Tensor:
    """Norms of rotary pairs [layer, head, pair], mean over tokens."""
    return torch.stack(sides.chunk(2, dim=-1)).norm(dim=0).mean(2)


share = norms(queries) * norms(keys)
share /= share.sum(-1, keepdim=True)
pairs = share.shape[-1]
fast, slow = share[..., : pairs // 4].sum(-1), share[..., -(pairs // 4) :].sum(-1)
print(f"slowest quarter of the pairs: {100 * slow.mean():.0f} % of the norms, mean over heads")
print(f"fastest quarter: {100 * fast.mean():.0f} %")

# Keys of the first three quarters change places and positions stay: do logits stay, too?
count = tokens.shape[1]
angles = torch.arange(count)[:, None] * model.model.rotary_emb.inv_freq.double()
rows = np.unique(np.linspace(int(0.75 * count), count - 1, 8).round().astype(int))
moving = torch.arange(1, rows[0] + 1)
asked = rotate(queries, angles)[:, :, rows]


def logits(keys: torch.Tensor) -> torch.Tensor:
    """Logits of some queries and the permuted keys, minus their mean, [layer, head, row, key]."""
    found = asked @ rotate(keys, angles)[:, :, moving].mT
    return found - found.mean(-1, keepdim=True)


before, generator, scores = logits(keys), torch.Generator().manual_seed(0), []
for _ in range(4):
    order = moving[torch.randperm(len(moving), generator=generator)]
    torch.randperm(len(moving), generator=generator)  # ours draws one more, for its null
    moved = keys.clone()
    moved[:, :, moving] = keys[:, :, order]
    scores.append(torch.cosine_similarity(logits(moved), before, dim=-1))
score = torch.cat(scores, -1).mean(-1)
for name, values in (("fast pairs", fast), ("positions alone", score)):
    layer, head = divmod(int(values.argmax()), values.shape[1])
    print(f"most by {name}: L{layer} H{head}, fast share {fast[layer, head]:.2f}, ", end="")
    print(f"position score {score[layer, head]:.2f}")
