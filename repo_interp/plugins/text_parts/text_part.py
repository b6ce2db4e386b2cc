"""The text part of a larger model, such as one that sees images, as a decoder.

transformers loads the larger model. Its decoder and unembedding modules become a causal language
model of the text part's family. Both models must give equal logits on a few tokens, which shows
that the larger model computes nothing else around its text part.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from repo_interp.checkpoint_files.stated import Checkpoint
from repo_interp.checkpoint_files.weights import loaded_by_transformers
from repo_interp.errors import InputError, as_input_errors
from repo_interp.models.checkpoints import (
    Loader,
    LoadOptions,
    device_named,
    dtype_named,
    generation_settings,
    ready_model,
)
from repo_interp.models.configuration import scaled_configuration
from repo_interp.models.reposition import with_layout

_TOKENS = 12
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 0.05
"""Largest difference of logits, relative to the largest logit, of the same modules in two runs."""


def load_text_part(
    checkpoint: Checkpoint, device: str, dtype: str, options: LoadOptions
) -> PreTrainedModel:
    """Load the text part of a larger model, with the checkpoint's positions.

    Args:
        checkpoint: A checkpoint with `larger`.
        device: See `load_model`, as all that follows.
        dtype: Precision of the weights.
        options: Further options.

    Returns:
        The model in evaluation mode.

    Raises:
        InputError: The weights do not fit, or an argument is invalid.
    """
    place, generation = device_named(device), generation_settings(checkpoint.directory)
    config, scaling = checkpoint.config, options.get("rope_scaling")
    if scaling is not None:
        config = scaled_configuration(config, scaling)
    several = options.get("device_map")
    placement = {
        "device_map": place if several is None else several,
        "max_memory": options.get("most_memory"),
    }
    text = text_model(checkpoint, config, dtype_named(dtype), **placement)
    return ready_model(with_layout(text, None), generation)


def require_larger_headers(checkpoint: Checkpoint, config: PretrainedConfig) -> None:
    """Refuse a larger model if weights in its headers do not fit; reads no values.

    Args:
        checkpoint: A checkpoint with `larger`.
        config: Configuration of the text part.

    Raises:
        InputError: Names or shapes differ.
    """
    larger, meta = larger_config(checkpoint, config), torch.device("meta")
    loaded_by_transformers(checkpoint.directory, larger, torch.float32, device_map=meta)


def larger_config(checkpoint: Checkpoint, config: PretrainedConfig) -> PretrainedConfig:
    """Make the configuration of a larger model.

    Args:
        checkpoint: A checkpoint with `larger`.
        config: The configuration of the text part.

    Returns:
        The configuration, with the rotation of `config`.

    Raises:
        InputError: The keys describe no larger model.
    """
    raw: dict[str, Any] = dict(checkpoint.larger or {})
    family = raw.pop("model_type")
    with as_input_errors(f"{checkpoint.directory}/config.json describes no {family}"):
        larger = AutoConfig.for_model(
            family, **PretrainedConfig._decode_special_floats(copy.deepcopy(raw))
        )
        # The caller may have scaled the rotation, which then applies to both models.
        larger.get_text_config().rope_parameters = getattr(config, "rope_parameters", None)
    return larger


def text_model(
    checkpoint: Checkpoint, config: PretrainedConfig, dtype: torch.dtype, **placement: Any
) -> PreTrainedModel:
    """Load the text part of a larger model.

    Args:
        checkpoint: A checkpoint with `larger`.
        config: The configuration of the text part.
        dtype: The precision of its weights.
        **placement: `device_map` and `max_memory`.

    Returns:
        A causal language model of the text part's family, without other parts.

    Raises:
        InputError: The weights do not fit, or logits of the part differ from the larger model's on
            text.
    """
    larger, source = larger_config(checkpoint, config), f"{checkpoint.directory}/config.json"
    whole: Any = loaded_by_transformers(checkpoint.directory, larger, dtype, **placement).eval()
    # Represents an image
    beside = {
        value
        for name, value in (checkpoint.larger or {}).items()
        if name.endswith(("token_id", "token_index"))
    }
    # The placeholder of an image would make the larger model look for one.
    words = [number for number in range(min(config.vocab_size, 1000)) if number not in beside]
    tokens = torch.tensor([words[:: -(-len(words) // _TOKENS)]], device=whole.device)
    with torch.no_grad(), as_input_errors(f"{source}: the larger model does not run on text alone"):
        wanted = whole(input_ids=tokens).logits
        text = _extract(whole)
        error = float((text(input_ids=tokens).logits - wanted).abs().max() / wanted.abs().max())
    # Written with `not`, so that NaN is refused too.
    if not error <= (_TOLERANCE if dtype.itemsize >= 4 else _TOLERANCE_HALF):
        raise InputError(
            f"{source}: the text part of this {larger.model_type} alone, a {config.model_type}, gives "
            "other logits than the larger model "
            f"(by {error:.2g} of the largest), so it cannot be opened"
        )
    return text


def _extract(whole: Any) -> PreTrainedModel:
    """Decoder and unembedding of a larger model as a causal model; ValueError if unfit."""
    decoder = whole.get_decoder()
    # Created without weights: the loaded decoder replaces them.
    with init_empty_weights(include_buffers=False):
        text: Any = AutoModelForCausalLM.from_config(decoder.config)
    if type(decoder) is type(text):  # Llama 4
        text = decoder
    else:
        place = next(
            (name for name, child in text.named_children() if type(child) is type(decoder)), None
        )
        if place is None:
            raise ValueError(
                f"its text part is a {type(decoder).__name__}, which is no part of a "
                f"{type(text).__name__}"
            )
        setattr(text, place, decoder)
        text.set_output_embeddings(whole.get_output_embeddings())
        text.config = decoder.config
    # Compares tensors, since the configurations of part and whole may disagree.
    text.config.tie_word_embeddings = (
        text.get_output_embeddings().weight is text.get_input_embeddings().weight
    )
    text.generation_config = whole.generation_config
    if hasattr(whole, "hf_device_map"):
        text.hf_device_map = whole.hf_device_map
    return text.eval()


LOADER = Loader(load_text_part, require_larger_headers)
