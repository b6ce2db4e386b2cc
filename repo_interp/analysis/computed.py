"""What a model computes now: no name and no digest of files says that an intervention is under way, or that weights were edited.

    round(100 mean_i h_i / max |mean_i h_i|),   h_i the last hidden state of token i of one prompt

Coarse, so that another number of threads gives the same. What is kept of finished work belongs to a model that computes just this.
"""

from __future__ import annotations

import torch
from torch import nn

from repo_interp.models.capture import decode
from repo_interp.tasks.prompt import Prompt


def computed(bridge: nn.Module, prompt: Prompt) -> list[float]:
    """What a model makes of `prompt`, with the hooks and weights that it has now: no name says that an intervention is under way.

    The last hidden states, mean over tokens, in hundredths of the largest: coarse, so that another number of threads gives the same.
    """
    tokens = torch.tensor([prompt.tokens], device=next(bridge.parameters()).device)
    with torch.inference_mode():
        mean = decode(bridge, tokens, torch.ones_like(tokens, dtype=torch.bool)).float().mean((0, 1))
    return (100 * mean / mean.abs().max()).round().tolist()
