"""Attention that transformers returns; a head is removed from the input of `o_proj`."""

import torch
from plain_transformers import open_plain, patterns, width

model, _ = open_plain("smollm2-135m")
drawn = torch.randint(
    200, model.config.vocab_size // 2, (1, 64), generator=torch.Generator().manual_seed(0)
)
tokens = torch.cat([drawn, drawn], dim=1)


def scores(offset: int) -> torch.Tensor:
    """Attention [layer, head] from the second half to `offset` tokens back."""
    return patterns(model, tokens).diagonal(-offset, -2, -1)[..., 64 - offset :].mean(-1)


heads = model.config.num_attention_heads
found = scores(63)
layer, head = divmod(int(found.argmax()), heads)
feeding = scores(1)[:layer].flatten()
previous = [divmod(int(place), heads) for place in feeding.argsort(descending=True)[:3]]
before = float(found[layer, head])
print(f"induction: L{layer} H{head}, {before:.2f} of its attention; one token back: {previous}")
for other, number in previous:

    def without(module, arguments, number=number):
        """Leave the outputs of one head out."""
        outputs = arguments[0].clone()
        outputs[..., number * width(model) : (number + 1) * width(model)] = 0
        return (outputs,)

    handle = model.model.layers[other].self_attn.o_proj.register_forward_pre_hook(without)
    print(f"without L{other} H{number}: {float(scores(63)[layer, head]):.2f}")
    handle.remove()
