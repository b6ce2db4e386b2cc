"""Residual of a function after projection on a basis of waves: a closed form of the error."""

import json

import numpy as np
from plain_transformers import directory

config = json.loads((directory("smollm2-135m") / "config.json").read_text(encoding="utf-8"))
width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
base = config["rope_parameters"]["rope_theta"]
frequencies = (base ** (-np.arange(0, width, 2) / width)).astype(np.float32).astype(float)
distance = np.arange(1024.0)
functions = {
    "a step at 100": (distance < 100).astype(float),
    "exp(-d / 200)": np.exp(-distance / 200),
    "a bump at 500": np.exp(-(((distance - 500) / 50) ** 2)),
}
angles = distance[:, None] * frequencies
for name, wanted in functions.items():
    errors = []
    for pairs in (4, 8, 16, 32):
        waves = np.concatenate((np.cos(angles[:, -pairs:]), np.sin(angles[:, -pairs:])), 1)
        basis, sizes, _ = np.linalg.svd(waves, full_matrices=False)
        basis = basis[:, sizes > sizes[0] * len(waves) * np.finfo(float).eps]
        left = wanted - basis @ (basis.T @ wanted)
        errors.append(np.linalg.norm(left) / np.linalg.norm(wanted))
    print(f"{name}, error with 4, 8, 16, 32 pairs:", " ".join(f"{error:.3f}" for error in errors))
