"""The adapter merged into Llama by hand, f_phi by three matrices; kinds of heads are left out."""

import inspect
import textwrap

import numpy as np
import torch
from plain_repo import open_repo, positioned

model, tokenizer, maps = open_repo("smollm2-135m/repo")
source = inspect.getsource(textwrap)[:1500]
prose = " ".join(
    inspect.getdoc(value) or "" for value in vars(textwrap).values() if callable(value)
)[:1500]
ranges = {}
for name, text in (("code", source), ("prose", prose)):
    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad(), positioned(model, maps) as found:
        model(tokens)
    positions = torch.stack([found[layer][0] for layer in sorted(found)]).double().numpy()
    ranges[name] = np.ptp(positions, axis=-1)  # [layer, head]
    index = np.arange(tokens.shape[1])
    rows = positions.reshape(-1, len(index))
    straight = np.median([np.corrcoef(row, index)[0, 1] ** 2 for row in rows])
    print(f"{name}: {len(index)} tokens within {ranges[name].mean():.1f} positions; ", end="")
    print(f"R2 on the index {straight:.2f}")
wider = int((ranges["code"] > ranges["prose"]).sum())
print(f"wider on code in {wider} of {ranges['code'].size} heads")
