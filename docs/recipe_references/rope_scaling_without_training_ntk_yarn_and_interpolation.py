"""transformers' scaling, by its configuration; NTK by the base from its authors."""

import inspect
import textwrap
from typing import Any

import torch
from plain_transformers import directory, losses, open_plain
from transformers import AutoModelForCausalLM

name = "smollm2-135m"
model, tokenizer = open_plain(name)
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:1500])["input_ids"]])
plain = float(losses(model, tokens).mean())
print(f"as it is: {plain:.3f} nats per token")
config, width = model.config, model.config.head_dim
base = config.rope_parameters["rope_theta"]
yarn = {"rope_type": "yarn", "original_max_position_embeddings": config.max_position_embeddings}
changes: dict[str, dict[str, Any]] = {
    "interpolation": {"rope_type": "linear", "factor": 4.0},
    "NTK": {"rope_theta": base * 4.0 ** (width / (width - 2))},
    "YaRN": {**yarn, "factor": 4.0},
}
for words, change in changes.items():
    config.rope_parameters = {"rope_type": "default", "rope_theta": base} | change
    scaled: Any = AutoModelForCausalLM.from_pretrained(directory(name), config=config)
    print(f"{words} by 4: {float(losses(scaled.eval(), tokens).mean()) - plain:+.3f}")

# One layer: the cosines and sines that it is given are those of a quarter of the index
quarter = model.model.rotary_emb(torch.zeros(1), torch.arange(tokens.shape[1])[None] / 4)
rises = {}
for layer, block in enumerate(model.model.layers):
    handle = block.self_attn.register_forward_pre_hook(
        lambda module, arguments, given: (arguments, given | {"position_embeddings": quarter}),
        with_kwargs=True,
    )
    rises[layer] = float(losses(model, tokens).mean()) - plain
    handle.remove()
worst = {layer: round(rises[layer], 3) for layer in sorted(rises, key=lambda one: rises[one])[-3:]}
print("interpolation in one layer alone costs most in", worst)
