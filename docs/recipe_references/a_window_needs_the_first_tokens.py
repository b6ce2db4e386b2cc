"""Keys hidden by an additive mask; greedy generation without a cache."""

import inspect
import textwrap

import torch
from plain_transformers import blocks, hiding, interval, losses, open_plain

model, tokenizer = open_plain("smollm2-135m")
tokens = torch.tensor([tokenizer(inspect.getsource(textwrap)[:3000])["input_ids"]])


def hidden(window: int, sinks: int):
    """Hide keys at least `window` tokens back, except the first ones."""

    def mask(layer: int, states: torch.Tensor) -> torch.Tensor:
        index = torch.arange(states.shape[1])
        return (index[:, None] - index >= window) & (index >= sinks)

    return hiding(model, mask)


whole = blocks(losses(model, tokens)[0], first=256)
print(f"all keys: {whole.mean():.3f}")
for name, sinks in (("window 128", 0), ("with 4 sinks", 4)):
    with hidden(128, sinks):
        found = blocks(losses(model, tokens)[0], first=256)
    _, low, high = interval(found - whole)
    print(f"{name}: {found.mean():.3f}, which is {low:.2f} to {high:.2f} more")
text = tokens[:, :150]
with hidden(128, 4), torch.no_grad():
    for _ in range(10):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
# Without a cache; one would have all keys before the last token, or a window and four sinks
seen = text.shape[1] - 1
for name, keys in (("DynamicCache", seen), ("StreamingCache", min(seen, 127 + 4))):
    print(f"{name} of {keys} keys:", *text[0, 150:].tolist())
