"""Needle tasks in which RoPE does not find all needles (RePo table 1): R9 at the training length,
from recorded training runs.

    niah_keys/NAME_doubled    every key has two needles; values come from four words, chosen anew in
                              every context
    niah_keys/NAME_hard       the same with longer values, from two words

If RoPE finds everything, no model can exceed it. The task was therefore made harder until RoPE,
which was trained first and alone, found 30 to 90 %, and easier if RePo then found none (plan.toml
has the steps). The weights do not ship. The scores from training are judged seed by seed, in the
same way as `haystack` judges its measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from position_papers.kit import (
    PLAIN,
    Cache,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Scored,
    Subject,
    missing,
    records_of,
    trained_alike,
    unmeasured,
)
from position_papers.repo import haystack
from position_papers.repo.checkpoints import OLMO
from position_papers.repo.haystack import R9, at_training_length
from position_papers.repo.needles import Searched, found_without_positions
from position_papers.repo.options import Options
from position_papers.training.trained import configured_task, recorded_scores
from repo_interp.positions.layouts import parse_layout

HARD = tuple(
    f"niah_keys/{name}_{task}" for task in ("doubled", "hard") for name in ("repo", "rope", "nope")
)


def is_hard(subject: Subject) -> bool:
    """Whether a checkpoint was trained on one of the harder tasks and has only records."""
    return subject.name in HARD and not subject.has_weights


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Searched]:
    """Read the scores that training recorded for every checkpoint and its seeds, without scoring
    again.
    """
    return [_searched(subject) for subject in subjects]


def _searched(subject: Subject) -> Searched:
    trained = subject.configuration
    assert trained is not None, subject.path
    task = configured_task(trained)
    recorded = tuple(recorded_scores(records_of(subject)))
    coords = {
        "method": [PLAIN],
        "length": [int(name) for name in task.test_sets],
        "prompt": np.arange(recorded[0].prompts),
    }
    # there are no records by prompt
    unknown = np.full([len(values) for values in coords.values()], np.nan)
    scores = xr.Dataset({"score": (tuple(coords), unknown)}, coords)
    schemes = tuple(parse_layout(trained.scheme, trained.layers))
    known = replace(subject, schemes=schemes, training_length=task.training_length)
    scored = Scored(
        known.name, known.layout, trained, known.training_length, task.metric, None, recorded
    )
    return Searched(known, scores, scored)


def tabulate(searched: Sequence[Searched]) -> Iterator[Evidence]:
    """R9: RePo compared with RoPE."""
    by_layout = {each.subject.layout.partition("@")[0]: each for each in searched}
    own, rope = by_layout.get("repo"), by_layout.get("rope")
    nope, why_not = found_without_positions(searched)
    if own is not None and rope is None:
        yield unmeasured(R9, own.name, missing(["RoPE"], "niah_keys"))
    elif own is not None and rope is not None:
        yield at_training_length(own, rope, nope, why_not)


def draw(searched: Sequence[Searched]) -> Iterator[Drawing]:
    """Draw the share of needles found by length, if there are both RePo and RoPE."""
    first = searched[0].subject
    if {"repo", "rope"} <= {each.subject.layout.partition("@")[0] for each in searched}:
        for drawing in haystack.draw(searched):
            yield replace(drawing, name=f"harder_needles_{first.name.rpartition('_')[2]}")


HARDER_NEEDLES = Experiment(
    "harder needles",
    (R9,),
    Needs(
        trained_alike(is_hard),
        "no records of needles that RoPE does not find all of were given",
        HARD,
        "niah_keys",
    ),
    measure,
    tabulate,
    draw,
    OLMO,
)
