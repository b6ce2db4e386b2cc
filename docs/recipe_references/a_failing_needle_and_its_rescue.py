"""Greedy answers, attention to the needle and heads without outputs, with transformers alone."""

from typing import Any

import numpy as np
import torch
from plain_transformers import directory, losses, open_plain, patterns, width
from transformers import AutoModelForCausalLM

import repo_interp as ri  # the prompts alone

model, _ = open_plain("niah/rope")
task = ri.tasks.make_task("niah")
prompts = {length: task.prompts(40, test_set=str(length)) for length in (256, 512)}


def passed(prompt: Any) -> bool:
    """Whether every token of the answer is the likeliest after those before it."""
    rows = torch.tensor(prompt.generated)
    with torch.no_grad():
        likeliest = chosen(torch.tensor([prompt.tokens])).logits[0, rows - 1].argmax(-1)
    return bool((likeliest == torch.tensor(prompt.tokens)[rows]).all())


chosen = model
right = {length: np.array([passed(prompt) for prompt in some]) for length, some in prompts.items()}
print("found:", {str(length): round(float(some.mean()), 2) for length, some in right.items()})

depths = {
    length: np.array([round(float(prompt.attributes["depth"]), -1) for prompt in some])
    for length, some in prompts.items()
}
scores = {depth: right[512][depths[512] == depth].mean() for depth in sorted({*depths[512]})}
depth = min(scores, key=lambda one: scores[one])
failing = np.flatnonzero(~right[512] & (depths[512] == depth))
print(f"depth {int(depth)} %, 512 tokens: {len(failing)} failing prompts")
# Passing prompts: the nearest depths of this length, whole cells until there are five
near = np.sort(abs(depths[512] - depth)[right[512]])[4]
passing = np.flatnonzero(right[512] & (abs(depths[512] - depth) <= near))


def mass(prompt: Any) -> torch.Tensor:
    """Attention [layer, head] of the rows that produce the answer to the needle, per cent."""
    rows = torch.tensor(prompt.generated) - 1
    attention = patterns(model, torch.tensor([prompt.tokens]))[:, :, rows]
    return 100 * attention[..., list(prompt.spans["needle"])].sum(-1).mean(-1)


def answers() -> np.ndarray:
    """Log-probability of the answers of the passing prompts."""
    found = []
    for number in passing:
        prompt = prompts[512][number]
        rows = torch.tensor(prompt.generated) - 1
        found.append(-float(losses(model, torch.tensor([prompt.tokens]))[0, rows].sum()))
    return np.array(found)


means = [
    torch.stack([mass(prompts[512][number]) for number in some]).mean(0)
    for some in (failing, passing)
]
change = (means[0] - means[1]).flatten()
heads = [divmod(int(place), means[0].shape[1]) for place in (-change.abs()).argsort()[:3]]
whole, effects = answers(), {}
for layer, head in heads:

    def without(module, arguments, head=head):
        """Leave the outputs of one head out."""
        outputs = arguments[0].clone()
        outputs[..., head * width(model) : (head + 1) * width(model)] = 0
        return (outputs,)

    handle = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(without)
    effects[layer, head] = float((answers() - whole).mean())
    handle.remove()
print(" layer  head  failing  passing  effect")
for layer, head in sorted(effects, key=lambda one: -abs(effects[one])):
    values = (*(float(mean[layer, head]) for mean in means), effects[layer, head])
    print("{:6d}{:6d}{:9.2f}{:9.2f}{:8.2f}".format(layer, head, *values))

model.config.rope_parameters |= {"rope_type": "yarn", "factor": 2.0}
model.config.rope_parameters["original_max_position_embeddings"] = 256
chosen = AutoModelForCausalLM.from_pretrained(directory("niah/rope"), config=model.config).eval()
print("with YaRN:", {"512": round(float(np.mean([passed(one) for one in prompts[512]])), 2)})
