"""Whole decoders with random weights in the shape of released ones: their forward pass, their analysis, TransformerLens on them.

Llama type for SmolLM2-135M (HuggingFaceTB/SmolLM2-135M), OLMo-2 type with RePo from layer 5 on for OLMo-2-1B
(allenai/OLMo-2-0425-1B). Costs do not depend on what the weights are; only what the model says does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from repo_interp.analysis.analyze import analyze, default_measures
from repo_interp.benchmark.cost import Cost, cost, resident
from repo_interp.benchmark.layer import MEASURES
from repo_interp.benchmark.parts import FORWARD, OLMO2, PROCESS, STOCK, WITH_ALL, WITH_DEFAULT, Line, Part, Shape, shape_of
from repo_interp.benchmark.prompt import prompt_of
from repo_interp.measures.attention_mass import AttentionMass
from repo_interp.measures.attention_rows import AttentionRows
from repo_interp.models.bridge import bridge
from repo_interp.models.capture import decode
from repo_interp.models.provenance import Origin, mark
from repo_interp.models.reposition import layout, reposition

_LONGEST = 32_768
_LONG = 2048
"""Tokens beyond which the stock model, and the measures by default, are left out."""


def model_of_shape(shape: Shape, name: str, dtype: str = "float32") -> PreTrainedModel:
    """A stock decoder of `shape` with random weights on the CPU. OLMo-2's type where `name` is its, else Llama's with tied embeddings."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": _LONGEST,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with no_init_weights():
            if name == OLMO2:
                model: Any = Olmo2ForCausalLM(Olmo2Config(**sizes, tie_word_embeddings=False))
            else:
                model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
        draw_weights(model)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Give every matrix of `model` small random numbers, the same few million again and again, which is quick; norms are 1."""
    drawn = 0.02 * torch.randn(2**21, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        flat = parameter.view(-1)
        for start in range(0, len(flat), len(drawn)):
            flat[start : start + len(drawn)] = drawn[: len(flat) - start]


def lines(part: Part, folder: Path) -> list[Line]:
    """The model's own forward pass; the analysis by the measures that `analyze` takes by itself, and by all."""
    shape, device = shape_of(part.subject), part.device
    stock = model_of_shape(shape, part.subject, part.dtype).to(device)  # pyright: ignore[reportArgumentType]
    tokens = torch.tensor([prompt_of(part.tokens, shape.vocabulary).tokens], device=device)
    repeats = 2 if part.tokens <= 1024 and part.subject != OLMO2 else 1
    measured: list[Line] = []

    @torch.inference_mode()
    def stock_pass() -> Tensor:
        return stock.model(input_ids=tokens, use_cache=False).last_hidden_state

    stock_pass() if repeats > 1 else stock.model(input_ids=tokens[:, :64], use_cache=False)
    if part.subject != OLMO2 and part.tokens <= _LONG:
        operations = shape.layers * shape.layer_operations(part.tokens)
        measured.append(Line(STOCK, cost(stock_pass, repeats, device), operations=operations))
    made, own_pass = _bridged(stock, shape, tokens)
    beside = STOCK if measured else ""
    measured.append(Line(FORWARD, cost(own_pass, repeats, device), beside, shape.layers * shape.layer_operations(part.tokens)))
    prompt = prompt_of(part.tokens, shape.vocabulary)
    by_default = default_measures([prompt], layout(made))
    for what, measures in ((WITH_DEFAULT, by_default), (WITH_ALL, list(MEASURES.values()))):
        if what == WITH_DEFAULT and (part.subject == OLMO2 or part.tokens > _LONG):
            continue  # minutes more
        spent = cost(lambda measures=measures: analyze(made, [prompt], measures), repeats, device)
        measured.append(Line(what, spent, FORWARD))
    return measured


def pattern_lines(part: Part, folder: Path) -> list[Line]:
    """TransformerLens' cache of all patterns, and an analysis of where tokens look, on the same weights."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    shape = shape_of(part.subject)
    prompt = prompt_of(part.tokens, shape.vocabulary)
    tokens, repeats = torch.tensor([prompt.tokens]), 2 if part.tokens < 1024 else 1
    made, own_pass = _bridged(model_of_shape(shape, part.subject), shape, tokens)
    measures = [AttentionMass(), AttentionRows()]
    own_pass()
    ours = cost(lambda: analyze(made, [prompt], measures), repeats)
    passing = cost(own_pass, repeats)
    stock = model_of_shape(shape, part.subject)
    theirs = build_bridge_from_module(stock, "LlamaForCausalLM", hf_config=stock.config, model_name=part.subject)

    @torch.inference_mode()
    def patterns() -> object:
        return theirs.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_pattern"))[1]

    theirs(tokens[:, :64])
    operations = shape.layers * shape.layer_operations(part.tokens)
    return [
        Line(FORWARD, passing, operations=operations, note="SDPA, without the unembedding"),
        Line("analyze: attention_mass, attention_rows", ours, FORWARD),
        Line(
            "TransformerLens run_with_cache of patterns",
            cost(patterns, repeats),
            "analyze: attention_mass, attention_rows",
            note="with the unembedding, which it does not leave out",
        ),
    ]


def long_lines(part: Part, folder: Path) -> list[Line]:
    """An analysis of one long prompt by all measures, and the most that its process held."""
    shape = shape_of(part.subject)
    prompt = prompt_of(part.tokens, shape.vocabulary)
    made, _ = _bridged(model_of_shape(shape, part.subject, part.dtype), shape, torch.tensor([prompt.tokens]))
    before, held = resident("VmHWM"), resident("VmRSS")
    analysis = cost(lambda: analyze(made, [prompt], list(MEASURES.values())))
    operations = shape.layers * shape.layer_operations(part.tokens)
    return [
        Line(
            WITH_ALL, analysis, operations=operations, note="operations are those of the forward pass; memory is beyond the model"
        ),
        Line(PROCESS, Cost(megabytes=max(before, resident("VmHWM"))), note=f"with {held:,.0f} MB of model and libraries"),
    ]


def _bridged(stock: PreTrainedModel, shape: Shape, tokens: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """`stock` repositioned and bridged, and its forward pass as a call."""
    repositioned = reposition(stock, shape.layout)
    made = bridge(repositioned)
    mark(
        made, Origin("random weights", "", tokens.shape[1], Path())
    )  # else they would be digested, which is no part of an analysis
    valid = torch.ones_like(tokens, dtype=torch.bool)

    @torch.inference_mode()
    def own_pass() -> Tensor:
        return decode(made, tokens, valid)

    return made, own_pass
