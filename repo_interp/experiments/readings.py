"""Answers under changed positions: log-probability, logit difference and score of every prompt.

    log-probability     mean over the targets of log p(target | tokens before)
    logit difference    logit of the target - logit of the strongest other candidate, mean over
                        targets
    score               score of the task for the likeliest tokens

Candidates are the tokens in the prompt's span `distractor` that are neither in its `needle` nor
among the targets (the values of other needles); without such tokens, all other tokens.
Readings of a batch are points of a `Grid`. The inputs of all layers are kept for the current batch,
so that a change in layer l only runs the layers from l on. This module knows nothing about the
choice of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from repo_interp.experiments.attribution import attributed
from repo_interp.experiments.experiment import TOKENS
from repo_interp.experiments.position_changes import EditedPrompts, Strength
from repo_interp.experiments.responses import (
    MOST_LOGITS,
    Question,
    logits_at,
    pad_prompts,
    parts,
    target_logits,
    tiled,
    to_question,
    to_responses,
)
from repo_interp.interventions.replacing import replaced
from repo_interp.models.decoder import Decoder
from repo_interp.models.resuming import Recording, record_pass, resume_pass
from repo_interp.models.side_by_side import WORTHWHILE
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Scoring

READINGS = ("log_probability", "logit_difference", "score")
"""Names of the readings of every prompt."""
Heads = list[tuple[int, int]]


@dataclass(frozen=True)
class Measurement:
    """Points of a grid over batches of prompts: readings under changes of positions.

    Attributes:
        decoder: Decoder of the model.
        scoring: Names the targets of a prompt and scores the answers.
        prompts: All prompts; a batch is a tuple of their numbers.
        strength: Strengths of the changes.
    """

    decoder: Decoder
    scoring: Scoring
    prompts: Sequence[Prompt]
    strength: Strength

    # Cached on the instance, which a frozen dataclass allows: the property writes to __dict__.
    @cached_property
    def _batch(self) -> Callable[[tuple[int, ...]], AnswerBatch]:
        """The last batch is kept: its undisturbed pass serves all points of the batch."""
        return lru_cache(1)(
            lambda numbers: AnswerBatch(
                self.decoder, self.scoring, [self.prompts[number] for number in numbers]
            )
        )

    def screen(self, numbers: tuple[int, ...], kinds: Sequence[str]) -> dict[str, Any]:
        """Read a batch undisturbed, and estimate the effects of all kinds by one backward pass.

        Args:
            numbers: The prompts of the batch.
            kinds: Changes of positions.

        Returns:
            `clean` [reading, prompt], and `screened` [kind, screening, layer, head, prompt].
        """
        batch = self._batch(numbers)
        some = EditedPrompts(self.decoder, self.prompts, numbers, self.strength)
        changes = {kind: some.edit(kind) for kind in kinds}

        def objective() -> Tensor:
            return batch.logit_difference(target_logits(self.decoder, batch.question))

        estimates = attributed(self.decoder, objective, changes)
        with torch.no_grad():
            clean = batch.readings(target_logits(self.decoder, batch.question))
        return {"clean": clean.tolist(), "screened": [estimates[kind].tolist() for kind in kinds]}

    @torch.no_grad()
    def read(self, numbers: tuple[int, ...], kind: str, sets: Sequence[Heads]) -> list[Any]:
        """Read a batch under a change of each of `sets`.

        Args:
            numbers: The prompts of the batch.
            kind: Change of positions.
            sets: Sets of heads to change together.

        Returns:
            Readings [set, reading, prompt] as nested lists.
        """
        # All passes of a call have one size, except a smaller last one, so two edits suffice.
        edit_of = lru_cache(2)(
            lambda copies: EditedPrompts(
                self.decoder, self.prompts, [*numbers] * copies, self.strength
            ).edit(kind)
        )

        def changed(of_rows: list[Heads]) -> AbstractContextManager:
            # An edit has one row per prompt, so it is made for the number of copies in the pass.
            return replaced(
                self.decoder.module, edit_of(len(of_rows) // len(numbers)), sets=of_rows
            )

        edited = self._batch(numbers).under_edits(sets, changed)
        return [readings.tolist() for readings in edited]


class AnswerBatch:
    """A batch of prompts: their targets, and the readings of their answers."""

    def __init__(self, decoder: Decoder, scoring: Scoring, prompts: Sequence[Prompt]) -> None:
        self.decoder, self.scoring, self.prompts = decoder, scoring, prompts
        self.question: Question = to_question(pad_prompts(prompts, scoring), decoder.device)
        # [prompt, token_id]: candidates to compare the answer's logit with.
        self.others = torch.zeros(
            len(prompts),
            decoder.vocabulary_size,
            dtype=torch.bool,
            device=self.question.tokens.device,
        )
        for row, prompt in enumerate(prompts):
            candidates = _candidates(prompt, scoring.targets(prompt))
            self.others[row, slice(None) if candidates is None else sorted(candidates)] = True

    def _together(self, edits: int) -> int:
        """Number of edits per pass, so that passes are large enough and of about equal size."""
        worthwhile = WORTHWHILE.get(self.question.tokens.device.type, TOKENS)
        # Rounded, so that passes are about equal rather than full ones and a small rest
        passes = round(edits * self.question.tokens.numel() / worthwhile)
        return max(
            1, min(ceil(edits / max(1, passes)), 2 * worthwhile // self.question.tokens.numel())
        )

    @cached_property
    def recording(self) -> Recording:
        """The undisturbed pass."""
        return record_pass(self.decoder, self.question.tokens)

    @torch.no_grad()
    def under_edits(
        self, sets: Sequence[Heads], edited: Callable[[list[Heads]], AbstractContextManager]
    ) -> list[Float[np.ndarray, "reading prompt"]]:
        """Read the prompts under an edit of every set of heads, many sets in one pass.

        Args:
            sets: Sets of heads to edit together; an empty set is read without an edit.
            edited: Function from the heads of every row to the context that edits them.

        Returns:
            Readings of every set.
        """
        # The pass is recorded before any edit.
        recording, read = self.recording, dict[int, np.ndarray]()
        most_logits = max(1, MOST_LOGITS // self.decoder.vocabulary_size)
        # -1 where a set is empty, so nothing is changed
        firsts = [min((layer for layer, _ in heads), default=-1) for heads in sets]
        # One group per first layer, since a pass resumes at one layer for all its copies
        for first in sorted(set(firsts)):
            places = [place for place, layer in enumerate(firsts) if layer == first]
            size = self._together(len(places))
            for some in (places[begin : begin + size] for begin in range(0, len(places), size)):
                if first < 0:
                    # Nothing changes, so the last hidden states come from the undisturbed pass.
                    hidden = recording.last_hidden.repeat(len(some), 1, 1)
                else:
                    # Copy by copy, as `resume_pass` repeats the prompts: all prompts
                    # with the first set, then again.
                    with edited([sets[place] for place in some for _ in self.prompts]):
                        hidden = resume_pass(self.decoder, recording, first, len(some))
                question = tiled(self.question, len(some))
                # In parts: logits of all targets of all copies would not fit into memory.
                target_readings = [
                    self._of_targets(logits_at(self.decoder, hidden, part), part)
                    for part in parts(question, most_logits)
                ]
                read |= zip(
                    some,
                    # [3, target] splits along targets into the copies, which have equally many.
                    map(
                        self._readings, torch.cat(target_readings, dim=-1).chunk(len(some), dim=-1)
                    ),
                    strict=True,
                )
        return [read[place] for place in range(len(sets))]

    def logit_difference(self, logits: Float[Tensor, "target token_id"]) -> Float[Tensor, "prompt"]:
        """Subtract the logit of the strongest other candidate from the logit of the answer.

        Args:
            logits: Logits at the targets of the prompts.

        Returns:
            The mean over the targets of every prompt.
        """
        return self._mean(self._differences(logits, self.question))

    def readings(
        self, logits: Float[Tensor, "target token_id"]
    ) -> Float[np.ndarray, "reading prompt"]:
        """Read log-probability, logit difference and score.

        Args:
            logits: Logits at the targets of the prompts.

        Returns:
            `READINGS` of every prompt.
        """
        return self._readings(self._of_targets(logits, self.question))

    def _differences(
        self, logits: Float[Tensor, "target token_id"], question: Question
    ) -> Float[Tensor, "target"]:
        # Rows are numbered through all copies; candidates depend only on the prompt.
        answer, others = question.targets[:, None], self.others[question.rows % len(self.prompts)]
        # The answer may be among the candidates, but must not be compared with itself.
        rivals = logits.masked_fill(~others, -torch.inf).scatter(-1, answer, -torch.inf).amax(-1)
        return logits.gather(-1, answer)[:, 0] - rivals

    def _of_targets(
        self, logits: Float[Tensor, "target token_id"], question: Question
    ) -> Float[Tensor, "3 target"]:
        """Log-probability, logit difference and likeliest token at every target of `question`."""
        # Float64: effects are small differences of log-probabilities near 0.
        log_probabilities = logits.double().log_softmax(-1)
        reference = log_probabilities.gather(-1, question.targets[:, None])[:, 0]
        # A token id is exact in float64, so that one tensor holds all three.
        return torch.stack(
            [reference, self._differences(logits, question), log_probabilities.argmax(-1)]
        )

    def _readings(
        self, of_targets: Float[Tensor, "3 target"]
    ) -> Float[np.ndarray, "reading prompt"]:
        reference, differences, likeliest = of_targets
        responses = to_responses(self.question, likeliest.long().tolist(), reference.tolist())
        score = np.asarray(self.scoring.score(responses, self.prompts), dtype=np.float64)
        return np.stack(
            [self._mean(reference).cpu().numpy(), self._mean(differences).cpu().numpy(), score]
        )

    def _mean(self, values: Float[Tensor, "target"]) -> Float[Tensor, "prompt"]:
        total = torch.zeros(len(self.prompts), dtype=values.dtype, device=values.device).index_add(
            0, self.question.rows, values
        )
        # Divided by the targets of the prompt: index_add sums.
        return total / self.question.rows.bincount(minlength=len(self.prompts))


def _candidates(prompt: Prompt, targets: Sequence[int]) -> set[int] | None:
    """Tokens of distractors outside needle and targets; None if there are none (all tokens)."""
    distractor, needle = (
        {prompt.tokens[place] for place in prompt.spans.get(name, ())}
        for name in ("distractor", "needle")
    )
    # A model that confuses needles would predict the values of other needles.
    return (distractor - needle - {prompt.tokens[place] for place in targets}) or None
