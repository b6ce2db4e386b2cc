"""Answers read under changed positions, batch by batch: log-probability, logit difference and score
of every prompt.

    log-probability     mean over a prompt's targets of log p(target | tokens before)
    logit difference    the target's logit less that of the strongest other candidate, mean over targets
    score               the task's, of the likeliest tokens

Candidates are the tokens of the prompt's span `distractor` that stand neither in its `needle` nor
among the targets - the values of other needles -, where it has such, else all other tokens.
Readings of a batch are finished points of a `Store`. What enters each layer is kept for the batch
at hand, so that a change in layer l costs the layers from l on. Knows nothing about which heads are
changed, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache, partial
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.experiments.attribution import attributed
from repo_interp.experiments.experiment import TOKENS
from repo_interp.experiments.position_changes import Strength, edit_prompts
from repo_interp.experiments.responses import (
    MOST_LOGITS,
    Question,
    logits_at,
    padded,
    parts,
    target_logits,
    tiled,
    to_question,
)
from repo_interp.interventions.replacing import replaced
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import batch_limits
from repo_interp.models.resuming import Recording, recorded, resumed
from repo_interp.side_by_side import WORTHWHILE, batches
from repo_interp.store import Progress, Store
from repo_interp.tasks import Prompt, Response
from repo_interp.tasks.task import Scoring

READINGS = ("log_probability", "logit_difference", "score")
"""What is taken of every prompt."""
Heads = list[tuple[int, int]]


class Measurement:
    """Readings of prompts under changes, batch by batch; of the batch at hand what enters each
    layer is kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        strength: Strength,
        batch_size: int,
        store: Store,
        points: int,
        progress: Progress | None = None,
    ) -> None:
        """`points`: how many every batch will have, of which `progress` is told."""
        self.model, self.scoring, self.prompts, self.strength, self.store = (
            model,
            scoring,
            prompts,
            strength,
            store,
        )
        lengths = [len(prompt.tokens) for prompt in prompts]
        self.batches = batches(
            sorted(range(len(prompts)), key=lengths.__getitem__),
            lengths,
            batch_limits(model, batch_size),
        )
        self._done, self._total, self._progress = 0, points * len(self.batches), progress

    def screen(
        self, kinds: Sequence[str]
    ) -> tuple[
        Float[np.ndarray, "reading prompt"],
        dict[str, Float[np.ndarray, "screening layer head prompt"]],
    ]:
        """Readings of the undisturbed prompts, and the estimates of every kind."""
        points = {
            f"screening-{number}": partial(self._screen, number, kinds)
            for number in range(len(self.batches))
        }
        found = list(self._computed(points).values())
        clean = self._joined([point["clean"] for point in found])
        return clean, {kind: self._joined([point[kind] for point in found]) for kind in kinds}

    def read(
        self, jobs: Mapping[tuple[str, str], list[Heads]]
    ) -> dict[tuple[str, str], Float[np.ndarray, "set reading prompt"]]:
        """Readings under each of the jobs: (kind, name) and the sets of heads that are changed
        together.
        """
        batch_of = lru_cache(1)(self._batch)  # its undisturbed pass serves all the jobs of a batch
        points = {
            f"{kind}-{name}-{number}": partial(self._read, batch_of, number, kind, sets)
            for number in range(len(self.batches))
            for (kind, name), sets in jobs.items()
        }
        found = self._computed(points)
        return {
            (kind, name): self._joined(
                [
                    found[f"{kind}-{name}-{number}"]["readings"]
                    for number in range(len(self.batches))
                ]
            )
            for kind, name in jobs
        }

    def _computed(
        self, points: Mapping[str, Callable[[], dict[str, Any]]]
    ) -> dict[str, dict[str, Any]]:
        before, progress, total = self._done, self._progress, self._total
        self._done += len(points)
        return self.store.get_or_compute(
            points, None if progress is None else lambda done, _: progress(before + done, total)
        )

    def _joined(self, values: Sequence[Any]) -> np.ndarray:
        """Batches along their last axis, the prompts, in the order of the prompts."""
        joined = np.concatenate([np.array(each, dtype=np.float64) for each in values], axis=-1)
        return joined[..., np.argsort([number for numbers in self.batches for number in numbers])]

    def _batch(self, number: int) -> Batch:
        return Batch(
            self.model, self.scoring, [self.prompts[each] for each in self.batches[number]]
        )

    def _screen(self, number: int, kinds: Sequence[str]) -> dict[str, Any]:
        batch, numbers = self._batch(number), self.batches[number]
        changes = {
            kind: edit_prompts(self.model, kind, self.prompts, numbers, self.strength)
            for kind in kinds
        }

        def objective() -> Tensor:
            return batch.logit_difference(target_logits(self.model, batch.question))

        estimates = attributed(self.model, objective, changes)
        with torch.no_grad():
            clean = batch.readings(target_logits(self.model, batch.question))
        return {"clean": clean.tolist()} | {
            kind: estimate.tolist() for kind, estimate in estimates.items()
        }

    @torch.no_grad()
    def _read(
        self, batch_of: Callable[[int], Batch], number: int, kind: str, sets: Sequence[Heads]
    ) -> dict[str, Any]:
        batch, numbers = batch_of(number), self.batches[number]
        edit_of = lru_cache(2)(
            lambda copies: edit_prompts(
                self.model, kind, self.prompts, numbers * copies, self.strength
            )
        )

        def changed(of_rows: list[Heads]) -> AbstractContextManager:
            return replaced(self.model, edit_of(len(of_rows) // len(numbers)), sets=of_rows)

        return {"readings": [readings.tolist() for readings in batch.under_edits(sets, changed)]}


class Batch:
    """Prompts side by side: what is asked of them, and how an answer is read."""

    def __init__(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt]) -> None:
        self.model, self.scoring, self.prompts = model, scoring, prompts
        self.question: Question = to_question(padded(prompts, scoring), as_decoder(model).device)
        self.others = torch.zeros(
            len(prompts),
            model.config.vocab_size,
            dtype=torch.bool,
            device=self.question.tokens.device,
        )
        for row, prompt in enumerate(prompts):
            candidates = _candidates(prompt, scoring.targets(prompt))
            self.others[row, slice(None) if candidates is None else sorted(candidates)] = True

    def _together(self, edits: int) -> int:
        """How many of so many edits are worth one pass, of passes of about equal size."""
        worthwhile = WORTHWHILE.get(self.question.tokens.device.type, TOKENS)
        passes = round(edits * self.question.tokens.numel() / worthwhile)
        return max(
            1, min(ceil(edits / max(1, passes)), 2 * worthwhile // self.question.tokens.numel())
        )

    @cached_property
    def recording(self) -> Recording:
        """The undisturbed pass."""
        return recorded(self.model, self.question.tokens)

    @torch.no_grad()
    def under_edits(
        self, sets: Sequence[Heads], edited: Callable[[list[Heads]], AbstractContextManager]
    ) -> list[Float[np.ndarray, "reading prompt"]]:
        """Readings under an edit of each of `sets`, none where a set is empty; many are rows of one
        pass.

        `edited` is given the heads of each row, and returns the context in which they are edited.
        """
        # recorded before anything is edited
        recording, read = self.recording, dict[int, np.ndarray]()
        most_logits = max(1, MOST_LOGITS // int(self.model.config.vocab_size))
        firsts = [min((layer for layer, _ in heads), default=-1) for heads in sets]
        for first in sorted(set(firsts)):
            places = [place for place, layer in enumerate(firsts) if layer == first]
            size = self._together(len(places))
            for some in (places[begin : begin + size] for begin in range(0, len(places), size)):
                if first < 0:
                    hidden = recording.last_hidden.repeat(len(some), 1, 1)
                else:
                    with edited([sets[place] for place in some for _ in self.prompts]):
                        hidden = resumed(self.model, recording, first, len(some))
                question = tiled(self.question, len(some))
                told = [
                    self._of_targets(logits_at(self.model, hidden, part), part)
                    for part in parts(question, most_logits)
                ]
                read |= zip(
                    some,
                    map(self._readings, torch.cat(told, dim=-1).chunk(len(some), dim=-1)),
                    strict=True,
                )
        return [read[place] for place in range(len(sets))]

    def logit_difference(self, logits: Float[Tensor, "target token_id"]) -> Float[Tensor, "prompt"]:
        """The answer's logit less that of the strongest other candidate, mean over the targets of
        each prompt.
        """
        return self._mean(self._differences(logits, self.question))

    def readings(
        self, logits: Float[Tensor, "target token_id"]
    ) -> Float[np.ndarray, "reading prompt"]:
        """The log-probability of the answer, its logit difference, and the task's score."""
        return self._readings(self._of_targets(logits, self.question))

    def _differences(
        self, logits: Float[Tensor, "target token_id"], question: Question
    ) -> Float[Tensor, "target"]:
        answer, others = question.targets[:, None], self.others[question.rows % len(self.prompts)]
        rivals = logits.masked_fill(~others, -torch.inf).scatter(-1, answer, -torch.inf).amax(-1)
        return logits.gather(-1, answer)[:, 0] - rivals

    def _of_targets(
        self, logits: Float[Tensor, "target token_id"], question: Question
    ) -> Float[Tensor, "3 target"]:
        """The log-probability of each target of `question`, its logit difference, and the likeliest
        token in its place.
        """
        log_probabilities = logits.double().log_softmax(-1)
        reference = log_probabilities.gather(-1, question.targets[:, None])[:, 0]
        return torch.stack(
            [reference, self._differences(logits, question), log_probabilities.argmax(-1)]
        )

    def _readings(
        self, of_targets: Float[Tensor, "3 target"]
    ) -> Float[np.ndarray, "reading prompt"]:
        reference, differences, likeliest = of_targets
        own, said, rows = (
            reference.tolist(),
            [int(token) for token in likeliest.tolist()],
            self.question.rows.tolist(),
        )
        responses = []
        for row in range(len(self.prompts)):
            places = [place for place, its_row in enumerate(rows) if its_row == row]
            responses.append(
                Response(
                    tuple(said[place] for place in places), tuple(own[place] for place in places)
                )
            )
        score = np.asarray(self.scoring.score(responses, self.prompts), dtype=np.float64)
        return np.stack(
            [self._mean(reference).cpu().numpy(), self._mean(differences).cpu().numpy(), score]
        )

    def _mean(self, values: Float[Tensor, "target"]) -> Float[Tensor, "prompt"]:
        total = torch.zeros(len(self.prompts), dtype=values.dtype, device=values.device).index_add(
            0, self.question.rows, values
        )
        return total / self.question.rows.bincount(minlength=len(self.prompts))


def _candidates(prompt: Prompt, targets: Sequence[int]) -> set[int] | None:
    """Tokens that stand in the distractors and neither in the needle nor among the targets; None
    where there are none: all.
    """
    distractor, needle = (
        {prompt.tokens[place] for place in prompt.spans.get(name, ())}
        for name in ("distractor", "needle")
    )
    return (distractor - needle - {prompt.tokens[place] for place in targets}) or None
