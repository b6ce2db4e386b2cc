"""A checkpoint as a TransformerBridge: identified, loaded strictly, bridged, with a record of where it came from.

`load_fresh` gives the same decoder, layout and tokenizer with freshly drawn weights: the control beside every claim about what training
did to a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from repo_interp.models.bridge import bridge
from repo_interp.models.checkpoints import identify, load_model, load_tokenizer
from repo_interp.models.provenance import mark, origin
from repo_interp.models.reposition import reposition


def load(
    path: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "float32",
    rope_scaling: Mapping[str, Any] | None = None,
) -> TransformerBridge:
    """The checkpoint at `path` - a directory or a hub id; released, ours or stock Hugging Face - as a TransformerBridge.

    Positions are analysed in float32 for good reason: in bfloat16 a position near 100 is rounded to steps of 0.5. `rope_scaling`
    exchanges how frequencies are scaled (see `load_model`). Raises InputError, naming what is wrong, for anything that would not
    run exactly as it was trained.
    """
    checkpoint = identify(path)
    wrapped = bridge(load_model(checkpoint, device, dtype, rope_scaling), load_tokenizer(checkpoint))
    mark(wrapped, origin(checkpoint, path))
    return wrapped


def load_fresh(path: str | os.PathLike[str], seed: int = 0, device: str = "cpu") -> TransformerBridge:
    """The checkpoint at `path` with freshly drawn weights instead of its own, in float32, as a bridge; `seed` decides them.

    The state of torch's random numbers is left as it was. Raises InputError where there is no checkpoint to read.
    """
    checkpoint = identify(path)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32)
        reposition(model, ",".join(checkpoint.layout), **checkpoint.options)
    return bridge(model.to(device).eval(), load_tokenizer(checkpoint))
