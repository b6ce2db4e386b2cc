"""A checkpoint, ready to be looked into: `load` is identify, load strictly, bridge, and remember where it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from repo_interp.models.bridge import bridge
from repo_interp.models.checkpoints import identify, load_model, load_tokenizer
from repo_interp.models.provenance import mark, origin


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
