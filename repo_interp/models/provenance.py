"""Facts about the model in a run: names, changes since it was loaded, and identifying digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from repo_interp.checkpoint_files.architectures import tied_parameters
from repo_interp.models.changes import changes
from repo_interp.models.decoder import Decoder
from repo_interp.models.offloading import parameter_value
from repo_interp.models.remembered import fingerprints
from repo_interp.models.rescaling import acting_scaling


def identity(decoder: Decoder) -> dict[str, str | int]:
    """Return names and digests of a model, for a run; paths are left out, since checkpoints move.

    Args:
        decoder: Decoder of the model.

    Returns:
        Attributes of a run. `positions_dtype` exists if learned positions have another precision
        than the model; `functions` if a scheme is not from a package (name and SHA-256 of its
        source, JSON); `scaling` if loading scaled the rotation of a layer; `changed` if the model
        changed since then: the digest of the checkpoint then describes its origin.
    """
    checkpoint = decoder.origin
    stated: dict[str, str | int] = {
        "layout": ",".join(decoder.schemes),
        "dtype": _dtype_name(decoder.dtype),
        "positions_dtype": _dtype_name(decoder.positions_dtype),
        "training_length": decoder.training_length,
        "functions": json.dumps(_functions(decoder)),
        "scaling": acting_scaling(decoder, checkpoint.scaling) if checkpoint else "",
        "changed": changes(decoder),
        "checkpoint": checkpoint.name if checkpoint else "",
        "checkpoint_digest": checkpoint.digest if checkpoint else weights_digest(decoder),
    }
    usual = {
        "positions_dtype": stated["dtype"],
        "functions": "{}",
        "scaling": "",
        "changed": "",
    }
    return {name: value for name, value in stated.items() if usual.get(name) != value}


def _functions(decoder: Decoder) -> Mapping[str, Any]:
    """The functions that built the model's schemes, even if their names are now used again."""
    return getattr(decoder.owner.config, "position_layout", {}).get("functions", {})


def weights_digest(decoder: Decoder) -> str:
    """Return the SHA-256 over names and values of parameters, for models without a checkpoint.

    It is kept on the `Decoder` while the parameters keep their checksums.

    Args:
        decoder: Decoder of the model.

    Returns:
        Hexadecimal digits.
    """
    named = dict(decoder.module.named_parameters())
    # Hashing takes far longer than the sums that tell whether a weight was edited.
    state = fingerprints({name: weight for name, weight in named.items() if not weight.is_meta})
    if decoder.hashed is None or decoder.hashed[0] != state:
        digest = hashlib.sha256()
        # Offloading splits a tied parameter into two
        twice = tied_parameters(decoder.owner)[1:]
        for name, parameter in sorted(named.items()):
            if parameter.is_meta and name in twice:
                continue
            digest.update(name.encode())
            value = parameter_value(decoder.module, name, parameter).detach().cpu().contiguous()
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        decoder.hashed = state, digest.hexdigest()
    return decoder.hashed[1]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
