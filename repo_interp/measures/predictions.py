"""Next-token predictions after tokens of the first prompt.

The likeliest next tokens, and the probability of the token that does follow.

    p(v | x_0 ... x_i) = softmax_v logits_i
            of row i the `candidates` largest, their tokens v, and p(x_{i+1})

Rows are those of `attention_rows`: all tokens of the prompt where these are no more than `rows`,
else those of its spans first. From the hidden states of the forward pass that everything else is
measured in, in parts of `_ROWS` rows. Knows no tokenizer: texts of tokens are added by who does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval

from repo_interp.inputs import AttentionInputs, Predictions, Spans
from repo_interp.measures.attention_rows import rows_of_interest
from repo_interp.measures.labels import Arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics

_ROWS = 32
"""Rows whose logits exist at a time: enough that reading the unembedding does not cost more than
multiplying by it.
"""
_TEXTS = {
    "probability": (
        "largest probabilities of the next token, after a token of the first prompt",
        "1",
    ),
    "next_token": ("token id that the probability is of", "1"),
    "probability_of_next": ("probability of the token that does follow; NaN after the last", "1"),
    "rank_of_next": (
        "tokens that are likelier than the one that does follow; -1 after the last",
        "tokens",
    ),
}


@dataclass(frozen=True)
class NextTokens(Measure, needs=Needs(tensors=(), predictions=True, documents=True)):
    """The measure `predictions`."""

    rows: Annotated[int, Interval(ge=1, le=65_536)] = 512
    """Most tokens after which predictions are kept."""
    candidates: Annotated[int, Interval(ge=1, le=4096)] = 8
    """Likeliest next tokens after a token."""
    name: str = "predictions"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return nothing: single layers do not matter."""
        return Statistics()

    def observe_predictions(self, predictions: Predictions, spans: Spans) -> Statistics:
        """Return tokens and probabilities [token, rank], and those of the following token [token].

        Of the first prompt; nothing where it is in another batch.
        """
        first = predictions.row_of_first_prompt
        if first is None:
            return Statistics()
        tokens, valid = predictions.tokens[first], predictions.valid[first]
        rows = rows_of_interest(valid, spans, first, self.rows)
        # The last token of the prompt has no successor.
        following = torch.where(
            rows + 1 < int(valid.nonzero()[-1]) + 1,
            tokens[(rows + 1).clamp_max(len(tokens) - 1)],
            -1,
        )
        count = min(self.candidates, predictions.vocabulary)
        parts = [
            _of_rows(predictions.logits(first, some), after, count)
            for some, after in zip(rows.split(_ROWS), following.split(_ROWS), strict=True)
        ]
        probability, token, actual, place = (
            torch.cat(part).cpu() for part in zip(*parts, strict=True)
        )
        both, one = ("token", "rank"), ("token",)
        values = {
            "probability": (both, probability.float().numpy()),
            "next_token": (both, token.int().numpy()),
            "probability_of_next": (one, actual.float().numpy()),
            "rank_of_next": (one, place.int().numpy()),
        }
        return Statistics(
            first_prompt=Arrays(values, {"token": rows.cpu().numpy(), "rank": np.arange(count)})
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `predictions` of a run."""
        return described_group(statistics.first_prompt, _TEXTS)


def _of_rows(logits: torch.Tensor, following: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return top probabilities and tokens, and probability and rank of the following tokens."""
    logarithms = torch.log_softmax(logits.double(), dim=-1)
    largest, tokens = logarithms.topk(count, dim=-1)
    known = following >= 0
    actual = logarithms.gather(-1, following.clamp_min(0)[:, None])
    place = (logarithms > actual).sum(-1).masked_fill(~known, -1)
    return largest.exp(), tokens, actual[:, 0].exp().masked_fill(~known, float("nan")), place
