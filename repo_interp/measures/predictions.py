"""Next-token predictions after tokens of the first prompt, and how well all prompts are predicted.

The likeliest next tokens, and the probability of the token that does follow.

    p(v | x_0 ... x_i) = softmax_v logits_i
            of row i the `candidates` largest, their tokens v, and p(x_{i+1})
    log p of the answer = mean of log p(x_{i+1} | x_0 ... x_i) over its tokens x_{i+1}
    loss                = mean of -log p over all tokens, of a prompt without an answer

The first token of a packed document follows from nothing before it: it counts in neither mean. Rows
of the first prompt are those of `attention_rows`: all tokens where these are no more than `rows`,
else those of its spans first. From the hidden states of the forward pass that everything else is
measured in, some rows at a time. This module knows no tokenizer: texts of tokens are added by who
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.inputs import Predictions as NextTokenLogits
from repo_interp.measures.attention_rows import rows_of_interest
from repo_interp.measures.fitting import AnyPrompt, Layers, PromptLabels
from repo_interp.measures.kernels.seen_pairs import on_host
from repo_interp.measures.labels import Arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.runtime.memory import memory_for

_ROWS = 32
"""Rows whose logits exist at a time, at least: enough that reading the unembedding does not cost
more than multiplying by it.
"""
_TEXTS = {
    "probability": "largest probabilities of the next token, after a token of the first prompt",
    "next_token": "token id that the probability is of",
    "probability_of_next": "probability of the token that does follow; NaN after the last",
    "rank_of_next": (
        "tokens that are likelier than the one that does follow; -1 after the last [tokens]"
    ),
    "answer_log_probability": "log-probability of the answer, mean over its tokens [nat]",
    "answer_is_likeliest": "1 where every token of the answer is the likeliest one",
    "loss": "mean of -log p of a text without an answer [nat]",
}
_SCORES = ("answer_log_probability", "answer_is_likeliest", "loss")
"""Variables of every prompt."""


@dataclass(frozen=True)
class Predictions(Measure, needs=Needs(tensors=(), predictions=True, documents=True)):
    """The measure `predictions`."""

    rows: Annotated[int, Interval(ge=1, le=65_536)] = 512
    """Most tokens after which predictions are kept."""
    candidates: Annotated[int, Interval(ge=1, le=4096)] = 8
    """Likeliest next tokens after a token."""
    name: str = "predictions"
    describes: ClassVar[str] = "likeliest next tokens"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether all layers are measured."""
        return layers.complete

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return nothing: single layers do not matter."""
        return Statistics()

    def observe_predictions(self, predictions: NextTokenLogits, spans: Spans) -> Statistics:
        """Return how well every prompt is predicted, and predictions after tokens of the first one.

        Scores have the axis [prompt]; predictions [token, rank], or [token] of the next token.
        """
        first, of_first, scores = predictions.row_of_first_prompt, Arrays(), []
        # Which rows are asked for is found on the processor: nothing of a prompt waits for a device
        documents = predictions.documents
        numbers = None if documents is None else documents.cpu().numpy()
        for row, valid in enumerate(on_host(predictions.valid)):
            asked = np.zeros(0, int)
            if "generated" in spans:  # a token is predicted after the one before it
                asked = np.flatnonzero((on_host(spans["generated"])[row] & valid)[1:])
            is_text = not len(asked)
            if is_text:
                asked = np.flatnonzero(valid)
            kept = rows_of_interest(valid, spans, row, self.rows) if row == first else asked[:0]
            # Sorted and once each: the unembedding is the cost, and both purposes share its rows
            rows = np.union1d(kept, asked)
            is_kept = np.isin(rows, kept)
            last = int(np.flatnonzero(valid)[-1])
            largest, likeliest, actual, place = self._read(predictions, row, rows, is_kept, last)
            if row == first:
                of_first = _of_first_prompt(
                    rows[is_kept], largest, likeliest, actual[is_kept], place[is_kept]
                )
            counted = np.isin(rows, asked)
            if numbers is not None:
                number = numbers[row]
                counted &= number[rows] == number[np.minimum(rows + 1, len(number) - 1)]
            known = counted & (place >= 0)  # -1 after the last token
            mean = actual[known].mean() if known.any() else float("nan")
            right = float((place[known] == 0).all()) if known.any() else float("nan")
            scores.append((np.nan, np.nan, -mean) if is_text else (mean, right, np.nan))
        values = dict(zip(_SCORES, np.array(scores).T, strict=True))
        labels = {"prompt": predictions.prompts.cpu().numpy()}
        return Statistics(
            Arrays({name: (("prompt",), array) for name, array in values.items()}, labels),
            first_prompt=of_first,
        )

    def _read(
        self,
        predictions: NextTokenLogits,
        row: int,
        rows: Int[np.ndarray, " row"],
        kept: Bool[np.ndarray, " row"],
        last: int,
    ) -> list[np.ndarray]:
        """Top probabilities and tokens of kept rows, log-probability and rank of following tokens.

        The token `last` of the prompt has no successor.
        """
        tokens = predictions.tokens[row]
        index = torch.from_numpy(rows).to(tokens.device)
        following = tokens[(index + 1).clamp_max_(last)].masked_fill(index >= last, -1)
        count = min(self.candidates, predictions.vocabulary)
        at_once = max(_ROWS, memory_for(tokens.device, 0) // (32 * predictions.vocabulary))
        # Made once: results of parts would stand between their logits, and what those leave free
        # could not be joined
        shown, wide = int(kept.sum()), {"dtype": torch.float64, "device": tokens.device}
        found = [
            torch.empty(*shape, **wide)
            for shape in ((shown, count), (shown, count), (len(rows),), (len(rows),))
        ]
        begin = 0
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            of_part = torch.from_numpy(np.flatnonzero(kept[some])).to(tokens.device)
            end = begin + len(of_part)
            values = _of_rows(predictions.logits(row, index[some]), following[some], of_part, count)
            for whole, part, place in zip(
                found, values, (slice(begin, end), slice(begin, end), some, some), strict=True
            ):
                whole[place] = part  # float64 holds these whole numbers exactly
            begin = end
        together = torch.cat([part.flatten() for part in found]).cpu().numpy()
        ends = np.cumsum([part.numel() for part in found])[:-1]
        return [
            part.reshape(tuple(made.shape))
            for part, made in zip(np.split(together, ends), found, strict=True)
        ]

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `predictions` of a run."""
        scores = statistics.per_prompt.data_vars.items()
        known = {name: array for name, array in scores if array.notnull().any()}
        return described_group(statistics.first_prompt.assign(known), _TEXTS)

    def add_tokens(self, group: xr.Dataset, tokens: PromptLabels) -> xr.Dataset:
        """Return the group with the texts of the likeliest next tokens."""
        return tokens.of_next(group)


def _of_first_prompt(
    rows: np.ndarray,
    probability: np.ndarray,
    token: np.ndarray,
    actual: np.ndarray,
    place: np.ndarray,
) -> Arrays:
    """Return predictions after the kept rows."""
    both, one = ("token", "rank"), ("token",)
    values = {
        "probability": (both, probability.astype(np.float32)),
        "next_token": (both, token.astype(np.int32)),
        "probability_of_next": (one, np.exp(actual).astype(np.float32)),
        "rank_of_next": (one, place.astype(np.int32)),
    }
    return Arrays(values, {"token": rows, "rank": np.arange(probability.shape[1])})


def _of_rows(
    logits: Float[Tensor, "row token_id"],
    following: Int[Tensor, "row"],
    kept: Int[Tensor, "some"],
    count: int,
) -> tuple[Tensor, ...]:
    """Top probabilities and tokens of the rows `kept`, and log-probability and rank of all."""
    # Widened first: a float32 sum over the vocabulary would leave its rounding in all log p
    logarithms = torch.log_softmax(logits.double(), dim=-1)
    largest, tokens = logarithms[kept].topk(count, dim=-1)
    known = following >= 0
    # -1 is no index; those rows are masked below
    actual = logarithms.gather(-1, following.clamp_min(0)[:, None])
    place = (logarithms > actual).sum(-1).masked_fill(~known, -1)
    return largest.exp(), tokens, actual[:, 0].masked_fill(~known, float("nan")), place
