"""Linear probe of the token index in the residual stream.

    i^_t = b + w . x_t          x_t: the residual stream of token t that enters a layer
    R^2  = 1 - sum (i_t - i^_t)^2 / sum (i_t - mean i)^2      over tokens of held-out prompts

w is a ridge fit for each layer; `held_out_index` gives the interval, the penalty and two nulls. The
first token of a prompt is left out: it sees only itself, and often has massive activations. Equal
prompts count once. If layer 0 reads the embedding, its R squared shows how much words alone reveal
about the index, for instance in tasks with special words at the beginning and the end. Compare
other layers with it. (NoPE decoders learn positions: Haviv et al. 2022, Kazemnejad et al. 2023.)

Statistics keep vectors of at most `tokens` tokens of a prompt, the middles of equal parts. This
module does not know which components read the index.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.samples import middles, places_of
from repo_interp.measures.kernels.seen_pairs import on_host
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.plugins.probe.held_out_index import NULLS, held_out_index

_TEXTS = {
    "r_squared": "held-out R squared of the token index in the stream that enters a layer",
    "r_squared_low": "lower end of its 95 % interval over prompts",
    "r_squared_high": "upper end of its 95 % interval over prompts",
    "error": "root mean squared error of the index, held out [tokens]",
    "null_low": "R squared that 5 % of draws of a null are below",
    "null_high": "R squared that 95 % of draws of a null are below",
    "probed_prompts": "different prompts [prompts]",
    "probed_tokens": "tokens of all prompts [tokens]",
}


@dataclass(frozen=True)
class PositionProbe(Measure, needs=Needs(by_pair=True, nan=("state",))):
    """The measure `position_probe`."""

    tokens: Annotated[int, Interval(ge=2, le=65_536)] = 128
    """Most tokens of a prompt; a longer one has the middles of as many equal parts."""
    folds: Annotated[int, Interval(ge=3, le=1000)] = 5
    """Sets of prompts; every set is held out once."""
    name: str = "position_probe"
    describes: ClassVar[str] = "how well the residual stream predicts the token index"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Keep the residual stream of some tokens of each prompt.

        Raises:
            InputError: The inputs have no token ids.
        """
        if inputs.tokens is None:
            raise InputError(
                "position_probe needs the ids of tokens, which these attention inputs lack; set "
                "AttentionInputs.tokens"
            )
        stream = inputs.residual.flatten(2)
        count = min(self.tokens, max(1, stream.shape[1] - 1))
        shape = (len(stream), count, stream.shape[2])
        state = torch.full(shape, torch.nan, device=stream.device)
        index = np.full(shape[:2], -1)
        contents = []
        for row, places in enumerate(places_of(inputs.valid)):
            chosen = middles(len(places) - 1, self.tokens)
            state[row, : len(chosen)] = stream[row][[places[1 + one] for one in chosen]].float()
            index[row, : len(chosen)] = 1 + np.array(chosen, dtype=int)
            tokens = on_host(inputs.tokens)[row][places].astype(np.int64)
            # Finds equal prompts in any batch and process
            contents.append(zlib.crc32(tokens.tobytes()))
        record = {
            "state": ("prompt layer sample entry", state),
            "index": ("prompt layer sample", index),
            "content": ("prompt layer", np.array(contents)),
        }
        return Statistics(per_prompt=arrays(inputs, record, sample=np.arange(count)))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group `position_probe` of a run; NaN for fewer than three prompts."""
        measured = statistics.per_prompt
        # Equal prompts would lie in two folds and predict each other
        _, first = np.unique(measured["content"].isel(layer=0).values, return_index=True)
        index = measured["index"].isel(layer=0).transpose("prompt", "sample").values[first]
        present = index >= 0
        # Prompts of one token have no sample
        prompts = np.unique(np.nonzero(present)[0], return_inverse=True)[1]
        states = measured["state"].transpose("layer", "prompt", "sample", "entry")
        found = [
            # Layer by layer: a copy of all would take as much memory again
            held_out_index(
                of_layer.values[first][present].astype(float), prompts, index[present], self.folds
            )
            for of_layer in states
        ]
        by_layer = {name: np.stack([one[name] for one in found], -1) for name in found[0]}
        group = {name: (("null", "layer")[-v.ndim :], v) for name, v in by_layer.items()}
        group |= {
            "probed_prompts": ((), int(prompts.max(initial=-1)) + 1),
            "probed_tokens": ((), len(prompts)),
        }
        labels = {"layer": measured["layer"].values, "null": list(NULLS)}
        return described_group(group, _TEXTS, labels)
