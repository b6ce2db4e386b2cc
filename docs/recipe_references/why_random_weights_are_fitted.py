"""The design matrix of the fit by distance, query and key, solved by least squares."""

import inspect
import textwrap

import numpy as np
import torch
from plain_transformers import group, open_plain, projected, rotate, width
from scipy.sparse import csr_array
from transformers import AutoModelForCausalLM, set_seed

trained, tokenizer = open_plain("smollm2-135m")
text = tokenizer(inspect.getsource(textwrap))["input_ids"]
drawn = torch.randperm(
    trained.config.vocab_size, generator=torch.Generator().manual_seed(0)
).tolist()


def fitted(logits: np.ndarray, design: csr_array) -> float:
    """Correlation of logits [pair, head] with their fit, mean over heads."""
    normal = (design.T @ design).toarray() + 1e-6 * np.eye(design.shape[1])
    fit = design @ np.linalg.solve(normal, design.T @ logits)
    return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(logits.T, fit.T, strict=True)]))


for deviation in (0.02, 0.04):
    trained.config.initializer_range = deviation
    set_seed(0)
    model = AutoModelForCausalLM.from_config(trained.config).eval()
    last = trained.config.num_hidden_layers
    for kind, tokens in (("random tokens", drawn), ("source code", text)):
        for length in (128, 256, 512):
            vectors = projected(model, torch.tensor([tokens[:length]]))
            angles = torch.arange(length)[:, None] * model.model.rotary_emb.inv_freq
            query, key = np.tril_indices(length)
            pairs, ones = np.arange(len(query)), np.ones(3 * len(query))
            columns = np.concatenate((query - key, length + query, 2 * length + key))
            design = csr_array((ones, (np.tile(pairs, 3), columns)))
            found = []
            for layer in (0, 1, last // 2, last - 1):
                keys = vectors["k_proj"][layer].repeat_interleave(group(model), 0)
                queries = vectors["q_proj"][layer]
                logits = rotate(queries, angles) @ rotate(keys, angles).mT / width(model) ** 0.5
                found.append(fitted(logits[:, query, key].T.double().numpy(), design))
            layers = " ".join(f"{r:.2f}" for r in found)
            chance = (6 / length) ** 0.5
            print(f"deviation {deviation}, {length} {kind}: r {layers}, by chance {chance:.2f}")
