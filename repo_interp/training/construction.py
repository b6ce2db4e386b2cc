"""The model that a training run begins with: a small decoder with random weights, or a checkpoint that goes on with other positions.

A fresh decoder is a pre-norm Llama: RMSNorm, SwiGLU, no biases, untied embeddings. Its own weights depend on the seed and the sizes
alone, never on the scheme, so twins with the same seed start alike. A continued checkpoint keeps its weights; what its new schemes
learn starts afresh.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from repo_interp.errors import InputError
from repo_interp.models.checkpoints import identify, load_model, load_tokenizer
from repo_interp.models.reposition import reposition
from repo_interp.training.configuration import TrainingConfiguration


def fresh_model(configuration: TrainingConfiguration, vocabulary: int, longest: int, padding: int) -> PreTrainedModel:
    """A decoder with random weights for `vocabulary` tokens, with the layout of `configuration`, on its device.

    `longest`: tokens of the longest prompt in training, which the checkpoint names as its training length.
    """
    width = configuration.width
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=configuration.feed_forward or -(-8 * width // (3 * 16)) * 16,
        num_hidden_layers=configuration.layers,
        num_attention_heads=configuration.heads,
        num_key_value_heads=configuration.kv_heads or configuration.heads,
        max_position_embeddings=longest,
        initializer_range=configuration.initial_deviation,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=padding,
    )
    torch.manual_seed(configuration.seed)
    return _with_layout(LlamaForCausalLM(config), configuration)


def continued_model(configuration: TrainingConfiguration) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The checkpoint `continue_from` with the layout of `configuration`, on its device, and its tokenizer."""
    checkpoint = identify(configuration.continue_from)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise InputError(f"{configuration.continue_from} has no tokenizer, so the task cannot be put into its tokens")
    model = load_model(checkpoint)
    torch.manual_seed(configuration.seed)
    return _with_layout(model, configuration), tokenizer


def _with_layout(model: PreTrainedModel, configuration: TrainingConfiguration) -> PreTrainedModel:
    model.config.initializer_range = configuration.scheme_deviation
    reposition(model, configuration.scheme, **configuration.scheme_options)
    return model.to(torch.device(configuration.device))  # type: ignore[arg-type]
