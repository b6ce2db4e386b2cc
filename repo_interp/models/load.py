"""Open a checkpoint as a model or as a TransformerBridge, with its tokenizer and origin.

TransformerLens is imported only when a bridge is made: `analyze` and the commands do not need it,
and importing it takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.checkpoint_digest import checkpoint_digest
from repo_interp.checkpoint_files.shipped import training_record, zoo_path
from repo_interp.checkpoint_files.stated import Checkpoint, tokens_of
from repo_interp.entry_points import CHECKS, find, names
from repo_interp.models.checkpoints import LoadOptions, load_model, load_tokenizer
from repo_interp.models.configuration import identify
from repo_interp.models.decoder import Decoder, Origin, as_decoder
from repo_interp.models.remembered import remember_computation, remember_weights
from repo_interp.models.tokenizing import set_tokenizer
from repo_interp.runtime.collection import collection_paused

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TRAINED = "training.toml"
"""The file that `repo-interp train` writes into the directory of the weights."""


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
        device: Such as "cpu" or "cuda:1"; "auto": cuda if there is one.
        dtype: Precision of the weights, or "auto"; see `load_model`.
        **options: `rope_scaling`, `device_map`, `most_memory`, `positions_dtype`; see `load_model`.

    Returns:
        The model in evaluation mode, with its tokenizer as `model.tokenizer`.

    Raises:
        InputError: The checkpoint would not run exactly as it was trained, or an argument is
            invalid.
    """
    model, tokenizer, source, _ = _open(path, device, dtype, options)
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

    Positions are analyzed in float32, because bfloat16 rounds a position near 100 to steps of 0.5.
    For a model in bfloat16, `positions_dtype` "float32" keeps learned positions unrounded.

    Args:
        path: Directory, name of the zoo, or hub id.
        device: Such as "cpu" or "cuda:1"; "auto": cuda if there is one.
        dtype: Precision of the weights, or "auto"; see `load_model`.
        **options: `rope_scaling`, `device_map`, `most_memory`, `positions_dtype`; see `load_model`.

    Returns:
        The bridge, with tokenizer and origin.

    Raises:
        InputError: The checkpoint would not run exactly as it was trained, or an argument is
            invalid.
    """
    from repo_interp.models.bridge import Trial, wrap

    model, tokenizer, source, passes = _open(path, device, dtype, options)
    # A pass of the checks also gives the logits that the bridge is compared with.
    trial = Trial(*passes[-1]) if passes else None
    wrapped = wrap(model, tokenizer, trial)
    remember_origin(as_decoder(wrapped), source)
    wrapped.cfg.model_name = source.name
    return wrapped


def _open(
    path: str | os.PathLike[str], device: str, dtype: str, options: LoadOptions
) -> tuple[
    PreTrainedModel, PreTrainedTokenizerBase | None, Origin, list[tuple[Tensor, Tensor | None]]
]:
    """Model of a checkpoint, its tokenizer and origin; tokens and logits of the checks' passes."""
    checkpoint = identify(path)
    # Before the weights, which can then use the memory that reading it took.
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, device, dtype, **options)
    source = origin(checkpoint, path, options.get("rope_scaling"))
    decoder, passes = as_decoder(model), []
    decoder.origin = source

    def remember_pass(module: Any, given: Any, named: Mapping[str, Any], output: Any) -> None:
        passes.append((named["input_ids"], output.logits))

    with ExitStack() as undo:
        undo.callback(model.register_forward_hook(remember_pass, with_kwargs=True).remove)
        for name in names(CHECKS):
            find(CHECKS, name)(decoder)
    return model, tokenizer, source, passes


def origin(
    checkpoint: Checkpoint,
    asked_for: str | os.PathLike[str],
    rope_scaling: Mapping[str, Any] | None = None,
) -> Origin:
    """Return the origin of a model that is loaded from a checkpoint.

    Args:
        checkpoint: The checkpoint.
        asked_for: Path or name that the user gave.
        rope_scaling: Scaling that replaces the configured one; None: none.

    Returns:
        Name, digest, training length, directory, scaling and remarks.
    """
    directory = Path(asked_for).resolve()
    if not directory.exists():
        name = os.fspath(asked_for)
    # A seed such as "seed-0" is no name.
    elif (directory / TRAINED).is_file() or training_record(directory):
        name = f"{directory.parent.name}/{directory.name}"
    else:
        name = directory.name
    scaled = rope_scaling or {}
    shown = ("rope_type", "type", "factor", "rope_theta")
    scaling = " ".join(str(scaled[key]) for key in shown if key in scaled)
    digest, trained = checkpoint_digest(checkpoint.directory), training_length(checkpoint.config)
    return Origin(
        name,
        digest,
        trained,
        checkpoint.directory,
        scaling,
        checkpoint.remarks,
        tokens_of(checkpoint.directory) / "tokenizer.json",
    )


def remember_origin(decoder: Decoder, source: Origin) -> None:
    """Store the origin of a model, and checksums of its weights as the checkpoint's.

    Args:
        decoder: Decoder of the model.
        source: The origin.
    """
    decoder.origin = source
    remember_weights(decoder)


def zoo(name: str, device: str = "cpu", dtype: str = "float32") -> TransformerBridge:
    """Open a checkpoint that ships as a TransformerBridge.

    Args:
        name: Such as "niah/repo".
        device: Such as "cpu" or "cuda:1"; "auto": cuda if there is one.
        dtype: Precision of the weights.

    Returns:
        The bridge.

    Raises:
        InputError: There is no such checkpoint; the message lists all of them.
    """
    return load(zoo_path(name), device, dtype)
