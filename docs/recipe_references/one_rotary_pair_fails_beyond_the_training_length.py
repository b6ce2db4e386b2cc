"""transformers' model with other frequencies in its buffer, and its own YaRN."""

import math

import numpy as np
import torch
from plain_transformers import directory, interval, losses, open_plain
from transformers import AutoModelForCausalLM

import repo_interp as ri  # the texts alone

model, _ = open_plain("language/rope")
model.set_attn_implementation("sdpa")
length = model.config.max_position_embeddings
prompts = ri.tasks.make_task("language").prompts(8, seed=0, test_set="1024")
tokens = torch.tensor([prompt.tokens for prompt in prompts])
rotary = model.model.rotary_emb
frequencies = rotary.inv_freq.clone()


def measured(factors: torch.Tensor) -> np.ndarray:
    """Loss [band, prompt] of tokens within the training length, and far beyond it."""
    rotary.inv_freq = frequencies * factors
    found = losses(model, tokens).double().numpy()
    return np.stack([found[:, : length - 1].mean(1), found[:, 2 * length - 1 :].mean(1)])


plain = measured(torch.ones(len(frequencies)))
changes = []
for pair in range(len(frequencies)):
    factors = torch.ones(len(frequencies))
    factors[pair] = 0.25
    changes.append(measured(factors) - plain)
together = measured(torch.full_like(frequencies, 0.25))
turns = (frequencies * length / (2 * math.pi)).tolist()
most = int(np.argmax([abs(change[1].mean()) for change in changes]))


def told(values: np.ndarray) -> str:
    """Mean and interval."""
    return "{:+.3f} [{:+.3f}, {:+.3f}] nats".format(*interval(values))


print(
    f"Pair {most}, which turns {turns[most]:.2g} times within {length:,} positions, at 0.25 of its "
    f"frequency changes the loss of tokens {2 * length}-{4 * length - 1} by "
    f"{told(changes[most][1])}, the most of {len(changes)}; all of these pairs together change it by "
    f"{told((together - plain)[1])}"
)
for pair in range(6, 11):
    within, beyond = changes[pair].mean(1)
    print(f"pair {pair}, {turns[pair]:.2f} turns: {within:+.2f} within, {beyond:+.2f} beyond")
model.config.rope_parameters |= {"rope_type": "yarn", "factor": 4.0}
yarn = AutoModelForCausalLM.from_pretrained(directory("language/rope"), config=model.config).eval()
of_yarn = losses(yarn, tokens)
of_yarn = torch.stack([of_yarn[:, : length - 1].mean(), of_yarn[:, 2 * length - 1 :].mean()])
for name, (within, beyond) in {
    "as it is": plain.mean(1),
    "interpolation": together.mean(1),
    "YaRN": of_yarn.tolist(),
}.items():
    print(f"{name}: {within:.2f} within, {beyond:.2f} beyond")
