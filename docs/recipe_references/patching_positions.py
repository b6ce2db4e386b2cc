"""Attention by matrices, whose positions are f_phi's or, in one head or layer, the index."""

import torch
from plain_repo import open_repo, positioned
from plain_transformers import losses

import repo_interp as ri  # the prompt alone

model, _, maps = open_repo("reversal/repo")
prompt = ri.tasks.make_task("reversal").prompts(1, test_set="12")[0]
tokens, rows = torch.tensor([prompt.tokens]), torch.tensor(prompt.generated) - 1


def answer(layer: int = -1, head: slice = slice(None)) -> float:
    """Mean log-probability of the answer's tokens, with the index in some heads of a layer."""

    def edit(number: int, positions: torch.Tensor) -> torch.Tensor:
        changed = positions.clone()
        if number == layer:
            changed[:, head] = torch.arange(tokens.shape[1]).float()
        return changed

    with positioned(model, maps, edit):
        return -float(losses(model, tokens)[0, rows].mean())


plain = answer()
print(f"as it is: {plain:.3f} nats per token")
for layer in range(model.config.num_hidden_layers):
    heads = range(model.config.num_attention_heads)
    changes = [answer(layer, slice(head, head + 1)) - plain for head in heads]
    together = answer(layer) - plain
    print(
        f"layer {layer}:",
        " ".join(f"{one:+.2f}" for one in changes),
        f"all together: {together:+.2f}",
    )
