"""Save a repositioned model as a checkpoint, whole or not at all.

Loading gives the same bits back.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from repo_interp.checkpoint_files.architectures import tied_parameters
from repo_interp.checkpoint_files.directories import is_of_checkpoint
from repo_interp.checkpoint_files.stored import file_key
from repo_interp.errors import InputError, quoted
from repo_interp.models.checkpoints import empty_model
from repo_interp.models.configuration import written_configuration
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import require_weights
from repo_interp.models.offloading import is_offloaded
from repo_interp.models.reposition import layout
from repo_interp.models.repositioned_config import own_layout_of, stock_config
from repo_interp.models.wrapped import unwrapped
from repo_interp.storage.files import (
    is_left_behind,
    path_of,
    replace_whole,
    require_directory,
    write_text,
)

_BRIDGED = "._original_component"


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a repositioned model as config.json, generation_config.json and model.safetensors.

    Loading gives the same bits back. A layout that is the stock decoder's is written as a stock
    checkpoint. An earlier checkpoint in `directory` is replaced as a whole, in one step at the end;
    other files stay.

    Args:
        model: Repositioned model or bridge.
        directory: Where to write; made if missing.
        tokenizer: Written too; None: the one of `model`, if it has one.

    Raises:
        InputError: The model was never repositioned, its weights were changed or lie elsewhere
            (compatibility mode, peft, offloading), or the directory cannot be replaced.
        OSError: The disk refuses.
    """
    if getattr(unwrapped(model), "compatibility_mode", False):
        raise InputError(
            "this bridge is in compatibility mode, which changes weights; save it before "
            "enable_compatibility_mode()"
        )
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise InputError(f"wanted a tokenizer of transformers to save, got {quoted(tokenizer)}")
    decoder = as_decoder(model)
    owner = decoder.owner
    if any(name.endswith(".base_layer") for name, _ in owner.named_modules()):
        raise InputError(
            "this model has an adapter of peft; give what merge_and_unload() of the "
            "PeftModel returns, to save it"
        )
    if is_offloaded(owner):
        raise InputError(
            "weights of this model are offloaded; load it without a device map, or take the hooks "
            "away (accelerate.hooks.remove_hook_from_submodules), to save it"
        )
    _ = decoder.layers  # refuses a model that was never repositioned
    require_weights(decoder)
    place = _replaceable_directory(directory)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(place) as unfinished:
        unfinished.mkdir()
        with replace_whole(unfinished / "model.safetensors") as weights:
            save_file(stored := _weights_to_save(owner), weights, metadata={"format": "pt"})
        configuration, tied = written_configuration(owner), set(tied_parameters(owner))
        if tied and tied <= stored.keys():  # they differ, even if the configuration ties them
            configuration["tie_word_embeddings"] = False
        write_text(
            unfinished / "config.json", json.dumps(configuration, indent=1, sort_keys=True) + "\n"
        )
        if owner.generation_config is not None:
            # Not save_pretrained, which refuses settings that published checkpoints have
            write_text(
                unfinished / "generation_config.json", owner.generation_config.to_json_string()
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        _keep_others(place, unfinished)


def _replaceable_directory(directory: str | os.PathLike[str]) -> Path:
    """Resolve links of a directory; raise InputError if it cannot be replaced by another."""
    place = path_of(directory, "a directory for the checkpoint").resolve()
    require_directory(place)
    if place.is_mount() or Path.cwd().is_relative_to(place):
        raise InputError(
            f"{place} cannot be replaced as a whole: it is the working directory or above "
            "it, or a disk is mounted there; name another "
            f"directory, such as {place / 'checkpoint'}"
        )
    return place


def _keep_others(directory: Path, unfinished: Path) -> None:
    """Link or copy files that belong to no checkpoint from `directory` into `unfinished`."""

    def of_checkpoint(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != directory:
            return []
        return [
            name
            for name in names
            if is_of_checkpoint(name) or is_left_behind(name) or (unfinished / name).exists()
        ]

    def link(source: str, target: str) -> None:
        try:
            # Hard links take no room and no time; some file systems have none.
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)

    if directory.is_dir():
        shutil.copytree(
            directory,
            unfinished,
            symlinks=True,
            ignore=of_checkpoint,
            copy_function=link,
            dirs_exist_ok=True,
        )


def _weights_to_save(decoder: PreTrainedModel) -> dict[str, Tensor]:
    """Weights by key in the file, without shared memory, under names from before bridging."""
    state = decoder.state_dict()
    # A bridge renames the modules of its model.
    if any(_BRIDGED in name for name in state):
        config = decoder.config
        names = (
            empty_model(stock_config(config), layout(decoder), own_layout_of(config)[1])
            .state_dict()
            .keys()
        )
        before = {name.replace(_BRIDGED, ""): tensor for name, tensor in state.items()}
        state = {name: before[name] for name in names}
    tied = [name for name in tied_parameters(decoder) if name in state]
    if len(tied) == 2 and torch.equal(state[tied[0]], state[tied[1]]):
        del state[tied[1]]
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        shared = tensor.untyped_storage().data_ptr() in seen  # safetensors stores no tensor twice
        seen.add(tensor.untyped_storage().data_ptr())
        tensor = tensor.detach().cpu().contiguous()
        weights[file_key(name)] = tensor.clone() if shared else tensor
    return weights
