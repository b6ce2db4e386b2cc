"""The same decoder and layout with freshly drawn weights: the control for claims about training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from repo_interp.models.checkpoints import load_tokenizer
from repo_interp.models.configuration import identify
from repo_interp.models.decoder import Decoder
from repo_interp.models.reposition import with_layout
from repo_interp.models.repositioned_config import own_layout_of, stock_config

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


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
