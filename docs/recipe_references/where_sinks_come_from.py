"""Attention that transformers returns, also for given positions."""

import inspect
import textwrap

import torch
from plain_transformers import open_plain, patterns

text = inspect.getsource(textwrap)[:1500]


def sinks(title: str, prompt: list[int], first_position: int = 0) -> None:
    """Print the attention to the first token, and to the sink among the others."""
    count = len(prompt)
    positions = torch.arange(count)
    positions[0] += first_position
    # A mask of its own: by positions that do not follow each other transformers splits documents
    tokens = torch.tensor([prompt])
    attention = patterns(model, tokens, position_ids=positions[None], **masks(count)).double()
    # The middles of 512 equal parts of the queries; of up to 512, all
    asked = min(count - 1, 512)
    rows = 1 + (2 * torch.arange(asked) + 1) * (count - 1) // (2 * asked)
    attention = attention[:, :, rows]
    first = attention[..., 0].mean()
    later = (rows[:, None] > torch.arange(count)).double()
    queries = later.sum(0)  # later queries of every key
    received = ((attention * later).sum(2) / queries).mean(1)  # [layer, key]
    even = (later / (1 + rows)[:, None]).sum(0) / queries
    if window := getattr(model.config, "sliding_window", None):
        assert count <= window
    above = (received - even).masked_fill(queries < max(8, 0.25 * asked), -torch.inf)
    above[:, 0] = -torch.inf
    token = above.argmax(-1)  # by layer
    mass = received.gather(1, token[:, None])[:, 0]
    layer = int(mass.argmax())
    layers = int((token == token[layer]).sum())
    print(
        f"  {title}: {100 * first:.1f} % on the first token, mean over heads; of the others",
        end=" ",
    )
    print(
        f"token {token[layer]} has most, {100 * mass[layer]:.0f} % in layer {layer}, and", end=" "
    )
    print(f"leads in {layers} layers")


def masks(count: int) -> dict:
    """The causal mask; also for layers with a window if the prompt fits into it."""
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    kinds = {*(getattr(model.config, "layer_types", None) or [])}
    return {"attention_mask": dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask}


for name in ("gemma3-270m", "smollm2-135m"):
    model, tokenizer = open_plain(name)
    tokens = tokenizer(text)["input_ids"]
    bos = model.config.bos_token_id or tokens[0]
    words = tokens[tokens[0] == bos :]
    print(f"{name}, {model.config.num_hidden_layers} layers")
    sinks("BOS first", [bos, *words])
    sinks("BOS first, its position 300 further on", [bos, *words], 300)
    sinks("BOS as token 99", [*words[:99], bos, *words[99:]])
    sinks("no BOS", words)
