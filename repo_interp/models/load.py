"""A checkpoint as a model, or as a TransformerBridge: identified, loaded strictly, with its
tokenizer and a record of where it came from.

TransformerLens is imported where a bridge is made, and nowhere else: `analyze` and the commands
need none, and importing it takes seconds. `load_fresh` and `fresh_twin` give the same decoder and
layout with freshly drawn weights: the control for every claim about what training did to a model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from repo_interp.errors import InputError
from repo_interp.models.changes import remember_computation
from repo_interp.models.checkpoints import LoadOptions, load_model, load_tokenizer
from repo_interp.models.configuration import identify, own_layout_of, plain
from repo_interp.models.decoder import as_decoder
from repo_interp.models.outputs import parity_errors
from repo_interp.models.provenance import Origin, mark, origin
from repo_interp.models.reposition import longest_prompt, with_layout
from repo_interp.models.tokenizing import reads_with
from repo_interp.models.wrapped import model_of
from repo_interp.shipped import zoo_path

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_TOKENS = 12
_TOLERANCE, _TOLERANCE_HALF = 5e-3, 0.5
"""Largest difference of outputs over the largest output: rounding of large logits stays below,
another window or scale does not.
"""


def open_model(
    path: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "float32",
    **options: Unpack[LoadOptions],
) -> PreTrainedModel:
    """The checkpoint at `path` as the model that `load` puts into a bridge, to measure: with its
    tokenizer, and without TransformerLens.

        model = ri.open_model("smollm2-135m")
        run = ri.analyze(model, "some text", ("attention_mass",))

    Arguments and errors as of `load`; the results of `analyze` are the same.
    """
    model, tokenizer, source = _open(path, device, dtype, options)
    reads_with(model, tokenizer)
    remember_computation(model)
    mark(model, source)
    return model


def load(
    path: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "float32",
    **options: Unpack[LoadOptions],
) -> TransformerBridge:
    """The checkpoint at `path` - a directory, a name of the zoo, a hub id; released, ours or stock
    - as a TransformerBridge.

    Positions are analysed in float32 for good reason: in bfloat16 a position near 100 is rounded to
    steps of 0.5. Of a model in bfloat16, `positions_dtype` "float32" keeps learned positions
    unrounded. `rope_scaling` exchanges how frequencies are scaled, `device_map` and `most_memory`
    spread a model that is larger than a device (see `load_model`). Raises InputError, naming what
    is wrong, for anything that would not run exactly as it was trained.
    """
    from repo_interp.models.bridge import bridge

    model, tokenizer, source = _open(path, device, dtype, options)
    wrapped = bridge(model, tokenizer)
    mark(wrapped, source)
    wrapped.cfg.model_name = source.name
    return wrapped


def _open(
    path: str | os.PathLike[str], device: str, dtype: str, options: LoadOptions
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, Origin]:
    """The model of a checkpoint, which attends as measures see it, its tokenizer, and where it came
    from.
    """
    checkpoint = identify(path)
    # before the weights: what reading it needs and gives back is theirs then
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, device, dtype, **options)
    require_parity(model)
    return model, tokenizer, origin(checkpoint, path, options.get("rope_scaling"))


def zoo(name: str, device: str = "cpu", dtype: str = "float32") -> TransformerBridge:
    """A checkpoint that ships, such as "niah/repo", as a TransformerBridge.

    Raises InputError naming those there are.
    """
    return load(zoo_path(name), device, dtype)


def require_parity(model: nn.Module) -> None:
    """Raise InputError where measures would see other attention than that which the model computes,
    tried on a few tokens.

    Windows longer than 64 tokens are not reached by them.
    """
    layers = as_decoder(model).layers
    windows = [
        layer.sliding_window
        for layer in layers
        if layer.sliding_window is not None and layer.sliding_window <= 64
    ]
    count = min(
        max([_TOKENS, *(window + 4 for window in windows)]), longest_prompt(model) or sys.maxsize
    )
    weight = as_decoder(model).weight
    tokens = torch.arange(count, device=weight.device)[None] * 7919 % layers[0].config.vocab_size
    tolerance = _TOLERANCE if torch.finfo(weight.dtype).bits >= 32 else _TOLERANCE_HALF
    for layer, error in zip(layers, parity_errors(model, tokens), strict=True):
        if not error <= tolerance:
            raise InputError(
                f"layer {layer.layer_idx} ({layer.scheme}) attends otherwise than its "
                "captured queries, keys and positions say "
                f"(outputs differ by {error:.2g} of their size): measures would be wrong; "
                "report it with the checkpoint's config.json"
            )


def load_fresh(
    path: str | os.PathLike[str], seed: int = 0, device: str = "cpu"
) -> TransformerBridge:
    """The checkpoint at `path` with freshly drawn weights instead of its own, in float32, as a
    bridge; `seed` decides them.

    The state of torch's random numbers is left as it was. Raises InputError where there is no
    checkpoint to read.
    """
    from repo_interp.models.bridge import bridge

    checkpoint = identify(path)
    model = drawn(checkpoint.config, checkpoint.layout, checkpoint.options, seed)
    return bridge(model.to(torch.device(device)).eval(), load_tokenizer(checkpoint))  # pyright: ignore[reportArgumentType]


def fresh_twin(model: nn.Module, seed: int = 0) -> PreTrainedModel:
    """A repositioned model like `model` (or the one inside a bridge), with freshly drawn weights,
    in float32, on its device.

    The state of torch's random numbers is left as it was.
    """
    config = model_of(model).config
    twin = drawn(plain(config), as_decoder(model).schemes, own_layout_of(config)[1], seed)
    return twin.to(as_decoder(model).device).eval()  # pyright: ignore[reportArgumentType]


def drawn(
    config: PretrainedConfig, schemes: Sequence[str], options: Mapping[str, Any], seed: int
) -> PreTrainedModel:
    """A repositioned model of that configuration with freshly drawn weights, in float32; torch's
    random numbers are left as they were.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return with_layout(model, ",".join(schemes), **options)
