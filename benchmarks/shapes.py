"""What is benchmarked: decoders with random weights in the shape of released ones, and a prompt.

Costs do not depend on what the weights are. SmolLM2-135M (HuggingFaceTB/SmolLM2-135M) is of the
Llama type, OLMo-2-1B (allenai/OLMo-2-0425-1B) of the OLMo-2 type with RePo from layer 5 on, as in
RePo's paper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

import repo_interp as ri
from benchmarks.running import read_toml, time_command
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Origin, as_decoder
from repo_interp.models.load import remember_origin
from repo_interp.tasks.prompt import Prompt

_STATED = read_toml(__file__)


def _shape(layout: str, **sizes: Any) -> tuple[Any, str]:
    """A configuration, and the layout: which layers assign positions how."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    return AutoConfig.for_model(**_STATED["every"], **ends, **sizes), layout


SHAPES = {name: _shape(**sizes) for name, sizes in _STATED["shapes"].items()}


def operations(config: Any, tokens: int) -> float:
    """Floating point operations of a forward pass with causal attention, L (2 P n + 2 h d n^2).

    L layers of P parameters each, with h heads of size d; n tokens.
    """
    width, heads, kv_heads = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    size = getattr(config, "head_dim", None) or width // heads
    parameters = 2 * width * size * (heads + kv_heads) + 3 * width * config.intermediate_size
    return config.num_hidden_layers * (2.0 * parameters * tokens + 2.0 * heads * size * tokens**2)


def prompt_of(tokens: int, vocabulary: int) -> Prompt:
    """A prompt of `tokens` random tokens with a needle, a query, and generated tokens at the
    end.
    """
    drawn = np.random.default_rng([0, tokens]).integers(3, vocabulary, tokens)
    size = max(1, min(32, tokens // 8))
    end = tokens - 2 * size
    spans = {
        "needle": tuple(range(tokens // 3, tokens // 3 + size)),
        "query": tuple(range(end - size, end)),
    }
    return Prompt(tokens=tuple(drawn.tolist()), spans=spans, generated=tuple(range(end, tokens)))


@torch.no_grad()
def model_of(config: Any, dtype: str = "float32") -> PreTrainedModel:
    """A stock decoder on the CPU.

    Every matrix has the same few million random numbers, which is quick; norms are 1.
    """
    with no_init_weights():
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    drawn = 0.02 * torch.randn(2**21, generator=torch.Generator().manual_seed(0))
    for parameter in made.parameters():
        flat = parameter.view(-1)
        for start in range(0, len(flat), len(drawn)):
            flat[start : start + len(drawn)] = (
                drawn[: len(flat) - start] if parameter.dim() > 1 else 1.0
            )
    return made.eval()


def bridged(
    stock: PreTrainedModel, layout: str, prompt: Prompt
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """`stock` repositioned and bridged, and its own forward pass over `prompt` as a call."""
    made = ri.bridge(ri.reposition(stock, layout))
    # else an analysis digests the weights
    remember_origin(as_decoder(made), Origin("random weights", "", len(prompt.tokens), Path()))
    tokens = torch.tensor([prompt.tokens], device=stock.device)

    @torch.inference_mode()
    def own_pass() -> Tensor:
        return decode(as_decoder(made), tokens, torch.ones_like(tokens, dtype=torch.bool))

    return made, own_pass


def checkpoint_of(subject: str, dtype: str, folder: str) -> str:
    """A checkpoint that comes with the package, or one with random weights in the shape of
    `subject`, written by another process.
    """
    if "/" in subject:
        return subject
    directory = str(Path(folder) / subject)
    time_command(f"-m benchmarks.shapes '{subject}' {dtype} '{directory}'")
    return directory


if __name__ == "__main__":  # NAME DTYPE DIRECTORY: write a checkpoint of that shape
    made, layout = SHAPES[sys.argv[1]]
    ri.save(ri.reposition(model_of(made, sys.argv[2]), layout), sys.argv[3])
