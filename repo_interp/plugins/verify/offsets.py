"""Test whether a model in a given precision computes the same at every offset.

    R(z_i + c) q . R(z_j + c) k = R(z_i) q . R(z_j) k        for every offset c

In exact arithmetic rotation depends on distances alone. Tables and turned vectors are rounded, so
the loss and logits of a text change with its offset: little in a correct model, and much if
positions or frequencies are rounded before they are multiplied.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import xarray as xr
from torch import Tensor
from torch.nn import functional as F

from repo_interp.errors import InputError
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import at_rest
from repo_interp.models.tables import position_table
from repo_interp.tasks.prompt.text import encode

OFFSETS = (0, 16, 1000, 30_000)
TEXT = (
    "A decoder turns queries and keys by the positions of their tokens, and multiplies them. What "
    "is left of two positions is the distance between them, so a text may stand anywhere. Numbers "
    "of half precision hold eight bits, and a position of thirty thousand needs fifteen."
)
"""The text to read at every offset, if the model has a tokenizer."""
_TOKENS = 64
"""Number of random tokens, if the model has no tokenizer or lacks the words."""
_TOLERANCE, _STEPS = 1e-3, 4
"""Relative change of the loss that is a finding, or this many steps of the precision."""


def at_offsets(model: Any, dtype: torch.dtype) -> xr.Dataset:
    """Run one text at several offsets.

    Args:
        model: Model of Hugging Face, also wrapped.
        dtype: Precision of the weights in the pass.

    Returns:
        `loss [offset]` in nats, and `largest_change [offset]` of a logit. The attribute `tokens` is
        the number of tokens; `findings` is empty if the loss changes by no more than rounding. For
        a model that takes no offset, a dataset without axes, with the attribute `left_out`.
    """
    decoder = as_decoder(model)
    if reason := _left_out(decoder):
        return xr.Dataset(attrs={"left_out": reason, "findings": ""})
    owner = decoder.owner
    if any(weight.dtype != dtype for weight in owner.parameters()):
        owner = copy.deepcopy(owner)
        for weight in owner.parameters():  # buffers keep their dtype, as in from_pretrained
            weight.data = weight.data.to(dtype)
    tokens = _tokens(decoder)
    index = torch.arange(tokens.shape[1], device=decoder.device)[None]
    with torch.no_grad(), at_rest(as_decoder(owner)):
        logits = [
            owner(input_ids=tokens, position_ids=index + offset, use_cache=False).logits[0].float()
            for offset in OFFSETS
        ]
    losses = [float(F.cross_entropy(found[:-1], tokens[0, 1:])) for found in logits]
    changes = [float((found - logits[0]).abs().max()) for found in logits]
    allowed = max(_TOLERANCE, _STEPS * torch.finfo(dtype).eps) * abs(losses[0])
    findings = [
        f"the loss of one text is {loss:.4g} nats at offset {offset:,} and {losses[0]:.4g} at 0; "
        "rotation sees distances alone, so look at the precision of positions and frequencies"
        for offset, loss in zip(OFFSETS, losses, strict=True)
        if not abs(loss - losses[0]) <= allowed
    ]
    return xr.Dataset(
        {
            "loss": ("offset", losses, {"long_name": "loss of one text", "units": "nat"}),
            "largest_change": (
                "offset",
                changes,
                {"long_name": "largest change of a logit from offset 0", "units": "1"},
            ),
        },
        {"offset": list(OFFSETS)},
        {"tokens": tokens.shape[1], "findings": "\n".join(findings[:1])},
    )


def _left_out(decoder: Decoder) -> str:
    if any(weight.is_meta for weight in decoder.owner.parameters()):
        return "its weights hold no numbers"
    if "position_ids" not in inspect.signature(decoder.owner.forward).parameters:
        return "it takes no position ids"
    if position_table(decoder.stack) is not None:
        return "its positions are vectors of a table"
    if decoder.length_matters:
        return "its frequencies depend on the last position"
    return ""


def _tokens(decoder: Decoder) -> Tensor:
    try:
        ids = torch.tensor([encode(TEXT, decoder.tokenizer).tokens])
    except InputError:  # no tokenizer, or one of a few words
        most = int(decoder.owner.get_input_embeddings().weight.shape[0])
        ids = torch.randint(most, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    return ids.to(decoder.device)
