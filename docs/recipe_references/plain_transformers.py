"""Models opened by transformers alone, and hooks that the references of the recipes share.

A reference computes the output of its recipe with `AutoModelForCausalLM`, torch and hooks. It uses
repo_interp only to find the directory of a checkpoint. Everything here is slow and obvious: whole
maps of attention, one pass for each edit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from repo_interp.checkpoint_files.directories import known_directory
from repo_interp.checkpoint_files.shipped import zoo_path

Hidden = Callable[[int, Tensor], Tensor]
"""Function of a layer and the hidden states that enter its attention: true for hidden keys,
broadcastable to [head, query, key]."""
Logits = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Function of a layer, the hidden states that enter it, and queries and keys [prompt, head, token,
d_head] before rotation: logits [prompt, head, query, key] before the mask."""


def directory(name: str) -> Path:
    """Find the directory of a fetched model, or of one of the zoo."""
    return known_directory(name) or zoo_path(name)


def open_plain(name: str) -> tuple[Any, Any]:
    """Open a checkpoint with stock positions: the model, in float32, and its tokenizer."""
    path = directory(name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval(), open_tokenizer(path)


def open_tokenizer(path: Path) -> Any:
    """Open the tokenizer of a checkpoint; checkpoints of a task share one in the folder above."""
    while not (path / "tokenizer.json").is_file():
        path = path.parent
    return AutoTokenizer.from_pretrained(path)


@contextmanager
def hooked(*hooks: tuple[torch.nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside a context, call functions of (module, arguments, output) after modules ran."""
    with ExitStack() as stack:
        for module, function in hooks:
            stack.callback(module.register_forward_hook(function).remove)
        yield


@torch.no_grad()
def losses(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    """Return -log p of tokens 1, 2, ... of prompts, [prompt, token - 1] in nats."""
    logits = model(tokens, **options).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")


@torch.no_grad()
def patterns(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    """Return attention [layer, head, query, key] of one prompt."""
    return torch.stack(model(tokens, output_attentions=True, **options).attentions)[:, 0]


@torch.no_grad()
def projected(model: Any, tokens: Tensor) -> dict[str, list[Tensor]]:
    """Return queries, keys and values before rotation, [head, token, d_head] by layer."""
    found: dict[str, list[Tensor]] = {"q_proj": [], "k_proj": [], "v_proj": []}

    def keep(name: str, output: Tensor) -> None:
        found[name].append(of_heads(model, output)[0])

    with hooked(
        *(
            (getattr(layer.self_attn, name), lambda _, __, output, name=name: keep(name, output))
            for layer in model.model.layers
            for name in found
        )
    ):
        model(tokens)
    return found


def of_heads(model: Any, projection: Tensor) -> Tensor:
    """Split [prompt, token, head * d_head] into [prompt, head, token, d_head]."""
    return projection.unflatten(-1, (-1, width(model))).transpose(1, 2)


def width(model: Any) -> int:
    """Return d_head."""
    config = model.config
    return getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads


def group(model: Any) -> int:
    """Return how many heads share a key."""
    return model.config.num_attention_heads // model.config.num_key_value_heads


@contextmanager
def hiding(model: Any, hidden: Hidden, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Inside a context, hide keys by adding the smallest number to their logits."""

    def mask(layer: int, module: Any, arguments: Any, given: dict[str, Any]) -> Any:
        states = given["hidden_states"]
        later = causal(states.shape[1])
        unseen = later | hidden(layer, states)
        while unseen.ndim < 4:
            unseen = unseen[None]
        least = torch.finfo(states.dtype).min
        return arguments, given | {
            "attention_mask": torch.zeros(unseen.shape).masked_fill(unseen, least)
        }

    with ExitStack() as stack:
        for number in range(len(model.model.layers)) if layers is None else layers:
            module = model.model.layers[number].self_attn
            handle = module.register_forward_pre_hook(
                lambda *given, number=number: mask(number, *given), with_kwargs=True
            )
            stack.callback(handle.remove)
        yield


def causal(count: int) -> Tensor:
    """Return which keys come after a query, [query, key]."""
    return torch.ones(count, count, dtype=torch.bool).triu(1)


def rotate(vectors: Tensor, angles: Tensor) -> Tensor:
    """Turn rotary pairs (r, r + d_head / 2) of vectors by angles [..., pair]."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ),
        dim=-1,
    )


@contextmanager
def attending(model: Any, logits: Logits) -> Iterator[None]:
    """Let every layer compute attention by matrices, from given logits."""
    times = group(model)

    def forward(layer: int, module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys, values = (
            of_heads(model, project(hidden_states))
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        keys, values = (part.repeat_interleave(times, 1) for part in (keys, values))
        scores = logits(layer, hidden_states, queries, keys) / math.sqrt(width(model))
        scores = scores.masked_fill(causal(scores.shape[-1]), -torch.inf)
        weights = scores.softmax(-1)
        return module.o_proj((weights @ values).transpose(1, 2).flatten(2)), weights

    with ExitStack() as stack:
        for number, block in enumerate(model.model.layers):
            module = block.self_attn
            module.forward = lambda hidden_states, number=number, module=module, **_: forward(
                number, module, hidden_states
            )
            stack.callback(module.__dict__.pop, "forward")
        yield


def blocks(values: Tensor, first: int = 0, size: int = 32) -> np.ndarray:
    """Return means of blocks of `size` tokens from token `first` on.

    `values` are losses of tokens 1, 2, ... of a text; its first token has none.
    """
    whole = [math.nan, *values.double().tolist()]
    return np.array(
        [np.nanmean(whole[start : start + size]) for start in range(first, len(whole), size)]
    )


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return a mean, and the ends of its 95 % interval (Student's)."""
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)
