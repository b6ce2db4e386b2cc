"""The needles of a haystack that a checkpoint finds, plainly and with YaRN (RePo app.

B.2), and whether finding them takes positions.

    plain     as it was trained              YaRN     from n tokens beyond the training length L on, with the factor n / L

Lengths are L, 2 L and 4 L; of an adapter those beyond L that its base was not trained on either. A
checkpoint of our task finds needles of that task, teacher-forced; one that reads text finds
RULER's, generated. YaRN changes nothing where no layer rotates. All checkpoints of one training
length answer the same prompts, so that differences are taken prompt by prompt - or over seeds where
both have several.

Needles that NoPE finds as well say nothing about positions: where NoPE finds 0.9 of them at L there
is no verdict, nor where a task of ours comes without NoPE. Judged are scores (`haystack`) and
attention (`attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from position_papers.kit import (
    PLAIN,
    Cache,
    Custom,
    Sample,
    Scored,
    Subject,
    score_subject,
    with_methods,
)
from position_papers.repo.checkpoints import longest_trained, needles, omits_positions, reads_text
from position_papers.repo.options import Options
from repo_interp.experiments.generated_scores import found_needles
from repo_interp.measures.labels import with_attrs
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder

YARN = "yarn"
METHODS = {PLAIN: "without scaling", YARN: "YaRN beyond L"}
MULTIPLES = (1, 2, 4)
"""Lengths, in training lengths."""
ROTATING = ("rope", "repo", "continuous", "multihead_continuous", "hope", "cope_rope")
"""Schemes whose layers YaRN reaches."""
CEILING = 0.99
"""Score from which checkpoints cannot be told apart.

For lengths beyond training and for start layers this was added when YaRN had brought every
checkpoint of the zoo to 1.
"""
WITHOUT_POSITIONS = 0.9
"""Share of needles from which on NoPE is said to find them, so that the task does not need
positions.
"""
NOPE = "the share that NoPE finds"
NEEDS_POSITIONS = Custom(
    lambda values: not values[NOPE] >= WITHOUT_POSITIONS,
    f"NoPE, where it was given, finds less than {WITHOUT_POSITIONS:g} of them at the "
    "training length",
)


@dataclass(frozen=True)
class Searched:
    """One checkpoint with the needles that it found."""

    subject: Subject
    scores: xr.Dataset
    """`score [method, length, prompt]`; method "plain", and "yarn" where a layer rotates."""
    recorded: Scored | None
    """Scores of the same checkpoint and of its other seeds, where the task is one of ours."""
    is_unused: bool = False
    """Whether it is not shown to use the positions that it learns."""

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.subject.name

    @property
    def lengths(self) -> list[int]:
        """In tokens, ascending."""
        return [int(length) for length in self.scores["length"].values]

    def sample(self, lengths: Sequence[int], method: str) -> Sample:
        """Scores as means over `lengths`, with those of the other seeds.

        YaRN is plain where no layer rotates.
        """
        known = method if method in self.scores["method"].values else PLAIN
        if self.recorded is not None:
            return self.recorded.sample([str(length) for length in lengths], known)
        prompts = (
            self.scores["score"]
            .sel({"method": known, "length": list(lengths)})
            .mean("length")
            .values
        )
        return Sample(np.array([prompts.mean()]), prompts, len(prompts) * len(lengths), True)


def search(subject: Subject, options: Options, cache: Cache) -> Searched:
    """The needles that one checkpoint found. Raises InputError where it cannot be asked."""
    longest = longest_trained(subject)
    multiples = [subject.training_length * multiple for multiple in MULTIPLES]
    lengths = [
        length for length in multiples if length == subject.training_length or length > longest
    ]
    rotates = bool(set(subject.schemes) & set(ROTATING))
    if reads_text(subject):
        scores = subject.measured(
            cache, _ruler, options, lengths, rotates, prompts=options.score_prompts
        )
        return Searched(subject, scores, None)
    scored = score_subject(subject, options.of_scores, cache, lambda _: (YARN,) if rotates else ())
    assert scored.live is not None, subject.path
    known = [length for length in lengths if str(length) in scored.test_sets]
    score = (
        scored.live["score"]
        .sel(test_set=[str(length) for length in known])
        .rename(test_set="length")
    )
    return Searched(subject, score.assign_coords(length=known).to_dataset(name="score"), scored)


def _ruler(subject: Subject, options: Options, lengths: Sequence[int], rotates: bool) -> xr.Dataset:
    """Scores on RULER's needles, generated: plainly, and with YaRN where a layer rotates."""
    model = load_model(subject.path, options.device)
    count = options.score_prompts
    prompts = {
        length: needles(subject, length, count, options.seed, answer="none") for length in lengths
    }

    def found(place: int) -> np.ndarray:
        return found_needles(
            as_decoder(model), subject.tokenizer, prompts[lengths[place]], options.batch_size
        )

    methods = [YARN] if rotates else []
    plain = np.stack([found(place) for place in range(len(lengths))])
    values = with_methods(model, methods, plain, lengths, subject.training_length, found)
    coords = {"method": [PLAIN, *methods], "length": list(lengths), "prompt": np.arange(count)}
    score = xr.DataArray(values, coords, tuple(coords))
    return with_attrs(score, "share of the needles found", "1").to_dataset(name="score")


def found_without_positions(searched: Sequence[Searched]) -> tuple[float, str]:
    """The share of needles that the first of `searched` with NoPE finds at the training length, NaN
    where there is none; and why needles say nothing about positions: NoPE finds them too, or a task
    of ours comes without it; empty where they do.
    """
    nope = next((each for each in searched if omits_positions(each.subject.layout)), None)
    if nope is None:
        ours = any(each.recorded is not None for each in searched)
        return np.nan, "no NoPE was given to show that the task needs positions" if ours else ""
    share = nope.sample([nope.subject.training_length], PLAIN).mean
    solved = f"{nope.name} finds {share:.3f} without positions, so the task needs none"
    return share, "" if NEEDS_POSITIONS.holds({NOPE: share}) else solved
