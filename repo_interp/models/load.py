"""Open a checkpoint as a model or as a TransformerBridge, with its tokenizer and origin.

TransformerLens is imported where a bridge is made, and nowhere else: `analyze` and the commands
need none, and importing it takes seconds. `load_fresh` and `fresh_twin` give the same decoder and
layout with freshly drawn weights: the control for claims about training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.errors import InputError, warn
from repo_interp.models.changes import remember_computation
from repo_interp.models.checkpoints import LoadOptions, load_model, load_tokenizer
from repo_interp.models.configuration import identify, own_layout_of, stock_config
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.outputs import parity_errors
from repo_interp.models.provenance import Origin, origin, remember_origin
from repo_interp.models.reposition import with_layout
from repo_interp.models.rescaling import IdleScaling, scaling_remark
from repo_interp.models.tokenizing import set_tokenizer
from repo_interp.runtime.collection import collection_paused

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_TOKENS = 12
_TOLERANCE, _TOLERANCE_HALF = 5e-3, 0.5
"""Largest difference of outputs over the largest output: rounding of large logits stays below,
another window or scale does not.
"""


@collection_paused()
def open_model(
    path: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "float32",
    **options: Unpack[LoadOptions],
) -> PreTrainedModel:
    """Open a checkpoint as the model that `load` puts into a bridge, to measure it.

    The results of `analyze` are the same. Needs no TransformerLens.

        model = ri.open_model("smollm2-135m")
        run = ri.analyze(model, "some text", ("attention_mass",))

    Args:
        path: Directory, name of the zoo, or hub id.
        device: Such as "cpu" or "cuda:1"; "auto": cuda where there is one.
        dtype: Precision of the weights, or "auto"; see `load_model`.
        **options: `rope_scaling`, `device_map`, `most_memory`, `positions_dtype`; see `load_model`.

    Returns:
        The model in evaluation mode, with its tokenizer as `model.tokenizer`.

    Raises:
        InputError: The checkpoint would not run exactly as it was trained, or an argument is
            invalid.
    """
    model, tokenizer, source = _open(path, device, dtype, options)
    decoder = as_decoder(model)
    set_tokenizer(decoder, tokenizer)
    remember_computation(decoder)
    remember_origin(decoder, source)
    return model


@collection_paused()
def load(
    path: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "float32",
    **options: Unpack[LoadOptions],
) -> TransformerBridge:
    """Open a checkpoint as a TransformerBridge: a released one, one of ours, or a stock one.

    Positions are analyzed in float32 for good reason: in bfloat16 a position near 100 is rounded to
    steps of 0.5. Of a model in bfloat16, `positions_dtype` "float32" keeps learned positions
    unrounded.

    Args:
        path: Directory, name of the zoo, or hub id.
        device: Such as "cpu" or "cuda:1"; "auto": cuda where there is one.
        dtype: Precision of the weights, or "auto"; see `load_model`.
        **options: `rope_scaling`, `device_map`, `most_memory`, `positions_dtype`; see `load_model`.

    Returns:
        The bridge, with tokenizer and origin.

    Raises:
        InputError: The checkpoint would not run exactly as it was trained, or an argument is
            invalid.
    """
    from repo_interp.models.bridge import bridge

    model, tokenizer, source = _open(path, device, dtype, options)
    wrapped = bridge(model, tokenizer)
    remember_origin(as_decoder(wrapped), source)
    wrapped.cfg.model_name = source.name
    return wrapped


def _open(
    path: str | os.PathLike[str], device: str, dtype: str, options: LoadOptions
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, Origin]:
    """Model of a checkpoint, which attends as measures see it, its tokenizer and its origin."""
    checkpoint = identify(path)
    # Before the weights, which can then use the memory that reading it took.
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, device, dtype, **options)
    require_parity(as_decoder(model))
    source = origin(checkpoint, path, options.get("rope_scaling"))
    if idle := scaling_remark(as_decoder(model), source.scaling):
        warn(idle, IdleScaling)
    return model, tokenizer, source


def zoo(name: str, device: str = "cpu", dtype: str = "float32") -> TransformerBridge:
    """Open a checkpoint that ships as a TransformerBridge.

    Args:
        name: Such as "niah/repo".
        device: Such as "cpu" or "cuda:1"; "auto": cuda where there is one.
        dtype: Precision of the weights.

    Returns:
        The bridge.

    Raises:
        InputError: There is no such checkpoint; the message lists all of them.
    """
    return load(zoo_path(name), device, dtype)


def require_parity(decoder: Decoder) -> None:
    """Refuse a model that attends otherwise than measures would see, tried on a few tokens.

    Windows longer than 64 tokens are not reached by them.

    Args:
        decoder: Decoder of the model.

    Raises:
        InputError: Outputs of a layer differ from the outputs recomputed from its captured inputs.
    """
    layers = decoder.layers
    # A window is confirmed only by prompts that are longer.
    windows = [
        layer.sliding_window
        for layer in layers
        if layer.sliding_window is not None and layer.sliding_window <= 64
    ]
    # A decoder with a learned table cannot take more tokens than that holds.
    count = min(
        max([_TOKENS, *(window + 4 for window in windows)]), decoder.longest_prompt or sys.maxsize
    )
    weight = decoder.weight
    # A stride by a prime spreads the tokens over the vocabulary.
    tokens = torch.arange(count, device=decoder.device)[None] * 7919 % layers[0].config.vocab_size
    tolerance = _TOLERANCE if torch.finfo(weight.dtype).bits >= 32 else _TOLERANCE_HALF
    for layer, error in zip(layers, parity_errors(decoder, tokens), strict=True):
        # So written, NaN is refused too.
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
    """Open a checkpoint with freshly drawn weights, in float32.

    The state of torch's random numbers stays.

    Args:
        path: Directory, name of the zoo, or hub id.
        seed: Seed of the weights.
        device: Such as "cpu" or "cuda:1".

    Returns:
        The bridge.

    Raises:
        InputError: There is no checkpoint at `path`.
    """
    from repo_interp.models.bridge import bridge

    checkpoint = identify(path)
    model = fresh_model(checkpoint.config, checkpoint.layout, checkpoint.options, seed)
    return bridge(model.to(torch.device(device)).eval(), load_tokenizer(checkpoint))  # pyright: ignore[reportArgumentType]


def fresh_twin(decoder: Decoder, seed: int = 0) -> PreTrainedModel:
    """Build a model like another one, with freshly drawn weights, in float32, on its device.

    The state of torch's random numbers stays.

    Args:
        decoder: Decoder of the model.
        seed: Seed of the weights.

    Returns:
        The twin, in evaluation mode.
    """
    config = decoder.owner.config
    twin = fresh_model(stock_config(config), decoder.schemes, own_layout_of(config)[1], seed)
    return twin.to(decoder.device).eval()  # pyright: ignore[reportArgumentType]


def fresh_model(
    config: PretrainedConfig, schemes: Sequence[str], options: Mapping[str, Any], seed: int
) -> PreTrainedModel:
    """Build a repositioned model with freshly drawn weights, in float32.

    The state of torch's random numbers stays.

    Args:
        config: Configuration of the stock decoder.
        schemes: Scheme of every layer.
        options: Choices within schemes.
        seed: Seed of the weights.

    Returns:
        The model.
    """
    # Adding a control must not change the random numbers of the caller's experiment.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return with_layout(model, ",".join(schemes), **options)
