"""f_phi's positions of Llama with attention by matrices; rank correlations by numpy."""

import numpy as np
import torch
from plain_repo import open_repo, positioned
from scipy.stats import rankdata

import repo_interp as ri  # the prompts alone

prompts = ri.tasks.make_task("reversal").prompts(20, test_set="12")
ranks = []
for name in ("reversal/repo", "reversal/repo/seed-1"):
    model, _, maps = open_repo(name)
    with torch.no_grad(), positioned(model, maps) as positions:
        model(torch.tensor([prompt.tokens for prompt in prompts]))
    values = torch.stack([positions[layer][:, 0] for layer in sorted(positions)])
    ranks.append(rankdata(values.double().numpy(), axis=-1))  # [layer, prompt, token]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Correlation of the ranks of each prompt, mean over prompts."""
    return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(one, other, strict=True)]))


for layer, one in enumerate(ranks[0]):
    same = [correlation(one, other) for other in ranks[1]]
    best = int(np.argmax(np.abs(same)))
    null = correlation(one, np.roll(ranks[1][best], 1, axis=0))
    print(f"layer {layer}: most like layer {best} of the other seed, {same[best]:+.2f}", end="")
    print(f" ({null:+.2f} between different prompts)")
