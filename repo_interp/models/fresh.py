"""A checkpoint's twin with freshly drawn weights: the control beside every claim about what training made of a model.

The same decoder, layout and tokenizer, with weights drawn as its configuration draws them. Knows nothing about measures.
"""

from __future__ import annotations

import os

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from repo_interp.models.bridge import bridge
from repo_interp.models.checkpoints import identify, load_tokenizer
from repo_interp.models.reposition import reposition


def load_fresh(path: str | os.PathLike[str], seed: int = 0, device: str = "cpu") -> TransformerBridge:
    """The checkpoint at `path` without what it learned, in float32, as a bridge; `seed` decides its weights.

    The state of torch's random numbers is left as it was. Raises InputError where there is no checkpoint to read.
    """
    checkpoint = identify(path)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32)
        reposition(model, ",".join(checkpoint.layout), **checkpoint.options)
    return bridge(model.to(device).eval(), load_tokenizer(checkpoint))
