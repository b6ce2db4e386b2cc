"""Needles found by a checkpoint, by length and depth, plainly and with YaRN: what R9 is judged on.

    plain     as it was trained              YaRN     from n tokens beyond the training length L on, with the factor n / L (app. B.2)

Lengths are L, 2 L and 4 L. A checkpoint of our task finds needles of that task, teacher-forced; any other one RULER's, generated. YaRN
changes nothing where no layer rotates. Knows nothing about claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from repo_interp.experiments.extrapolation import extended
from repo_interp.experiments.generated_scores import found_needles
from repo_interp.experiments.task_scores import score_map
from repo_interp.measures.labels import described
from repo_interp.models.checkpoints import load_model
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.checkpoint_scores import PLAIN, Scored, ScoreOptions, score_checkpoint
from repo_interp.papers.kit.score_rules import Sample
from repo_interp.papers.kit.subjects import VARIANT, Options, Subject
from repo_interp.tasks import Prompt, niah

YARN = "yarn"
MULTIPLES = (1, 2, 4)
"""Lengths, in training lengths."""
ROTATING = ("rope", "repo", "continuous", "multihead_continuous", "hope", "cope_rope")
"""Schemes whose layers YaRN reaches."""


@dataclass(frozen=True)
class Searched:
    """One checkpoint with the needles that it found."""

    subject: Subject
    scores: xr.Dataset
    """`score [method, length, prompt]`, `map [method, depth, length]`; method "plain", and "yarn" where a layer rotates."""
    recorded: Scored | None
    """Scores of the same checkpoint and of its other seeds, where the task is one of ours."""

    @property
    def lengths(self) -> list[int]:
        """In tokens, ascending."""
        return [int(length) for length in self.scores["length"].values]

    def sample(self, lengths: Sequence[int], method: str) -> Sample:
        """Scores as means over `lengths`; plain ones with the other seeds. YaRN is plain where no layer rotates."""
        if method == PLAIN and self.recorded is not None:
            return self.recorded.sample([str(length) for length in lengths])
        prompts = self._by_prompt(lengths, method)
        return Sample(np.array([prompts.mean()]), prompts, len(prompts) * len(lengths), True)

    def _by_prompt(self, lengths: Sequence[int], method: str) -> np.ndarray:
        known = method if method in self.scores["method"].values else PLAIN
        return self.scores["score"].sel({"method": known, "length": list(lengths)}).mean("length").values


def search(one: Subject, options: Options, cache: Cache) -> Searched:
    """Let checkpoint `one` look for needles. Raises InputError where it cannot be asked."""
    lengths = [one.training_length * multiple for multiple in MULTIPLES]
    rotates = bool(set(one.schemes) & set(ROTATING))
    if one.task is None:
        found = one.measured(
            cache, "ruler", options, lambda: _ruler(one, lengths, rotates, options), prompts=options.score_prompts
        )
        return Searched(one, found, None)
    asked = ScoreOptions(options.score_prompts, batch_size=options.batch_size, seed=options.seed, device=options.device)
    scored = score_checkpoint(one.name, one.path, asked, cache, lambda _: (YARN,) if rotates else ())
    assert scored.live is not None, one.path
    known = [length for length in lengths if str(length) in scored.test_sets]
    score = scored.live["score"].sel(test_set=[str(length) for length in known]).rename(test_set="length")
    score = score.assign_coords(length=known)
    prompts = {length: one.prompts(length, options.score_prompts, options.seed) for length in known}
    return Searched(one, _with_map(score, prompts), scored)


def _with_map(score: xr.DataArray, prompts: Mapping[int, Sequence[Prompt]]) -> xr.Dataset:
    """`score [method, length, prompt]` with its means over depth and length; without them where prompts have no one depth."""
    score = described(score.transpose("method", "length", "prompt"), "share of the needles found", "1")
    asked = [prompt for length in score["length"].values for prompt in prompts[int(length)]]
    if any(prompt.attributes.get("depth") is None for prompt in asked):
        return score.to_dataset(name="score")
    maps = [
        score_map(asked, score.sel({"method": method}).values.ravel(), ("depth", "length")) for method in score["method"].values
    ]
    of_methods = xr.concat(
        [one for one in maps if one is not None],
        dim=xr.IndexVariable("method", score["method"].values),
        join="outer",
        coords="minimal",
        compat="override",
    )
    return score.to_dataset(name="score").assign(map=described(of_methods, "share of the needles found", "1"))


def _ruler(one: Subject, lengths: Sequence[int], rotates: bool, options: Options) -> xr.Dataset:
    model = load_model(one.path, options.device)
    prompts = {
        length: niah(one.tokenizer, VARIANT, length, options.score_prompts, options.seed, answer="none") for length in lengths
    }
    methods = [PLAIN, *([YARN] if rotates else [])]
    values = np.empty((len(methods), len(lengths), options.score_prompts))
    for row, method in enumerate(methods):
        for column, length in enumerate(lengths):
            if row and length <= one.training_length:
                values[row, column] = values[0, column]
                continue
            with extended(model, method, length, one.training_length):
                values[row, column] = found_needles(model, one.tokenizer, prompts[length], options.batch_size)
    coords = {"method": methods, "length": list(lengths), "prompt": np.arange(options.score_prompts)}
    return _with_map(xr.DataArray(values, coords, ("method", "length", "prompt")), prompts)
