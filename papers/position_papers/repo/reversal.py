"""Text reversal by length (RePo app. C, fig. 7): R1, from the exact match of all checkpoints
trained on it, and of their seeds.

Checkpoints without weights take part with their recorded scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from position_papers.kit import (
    Above,
    AtLeast,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Scored,
    Subject,
    between,
    evidence,
    in_words,
    note,
    numbers_of,
    of_tasks,
    score_by_length,
    score_subject,
    score_table,
    trained_alike,
)
from position_papers.repo.checkpoints import GPT2
from position_papers.repo.options import Options
from position_papers.training.trained import configured_task
from repo_interp.plots.marks.drawing import counted
from repo_interp.plots.style import scheme_name
from repo_interp.tasks.reversal import Reversal

EXACT_MATCH = "mean exact match over these lengths"
EVERY_SEED = f"{EXACT_MATCH}, and over seeds,"
RIVALS = ("RoPE", "NoPE")
SCHEMES = ("reversal/repo", "reversal/rope", "reversal/nope")
"""The checkpoints of the zoo for this claim."""
R1 = Claim(
    "R1",
    "text reversal, longer texts than trained on (21-30 words): RePo above RoPE and NoPE",
    "RePo app. C, fig. 7",
    "figure",
    Above(EXACT_MATCH, RIVALS),
    shows_control=True,
)
R1_TRAINED = Claim(
    "R1",
    "text reversal, lengths trained on (to 20 words): all schemes near perfect",
    R1.source,
    "figure",
    AtLeast(EVERY_SEED, 0.95),
    part="trained lengths",
    about={name: (name,) for name in SCHEMES},  # the claim is about all schemes
)


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Scored]:
    """Measure the exact match of every checkpoint at every length of its task."""
    return [score_subject(subject, options.of_scores, cache) for subject in subjects]


def tabulate(scored: Sequence[Scored]) -> Iterator[Evidence]:
    """Judge every checkpoint at the trained lengths, and compare RePo with RoPE and NoPE at longer
    lengths.
    """
    trained, longer = _lengths(scored)
    if trained:
        yield from (_near_perfect(checkpoint, trained) for checkpoint in scored)
    rivals = [checkpoint for checkpoint in scored if checkpoint.layout in ("rope", "nope")]
    if rivals and longer:
        yield from (
            _above(each, rivals, longer) for each in scored if each.layout.startswith("repo")
        )


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Draw figure 7."""
    sets, longest = [name for names in _lengths(scored) for name in names], _task(scored).longest
    table = score_table(scored, sets)
    data = table.assign_coords(test_set=[int(name) for name in sets]).assign_attrs(
        axis="words", training_length=longest
    )
    yield Drawing(
        "reversal_by_length",
        partial(score_by_length, data),
        "Text reversal: exact match by number of words (RePo fig. 7), "
        f"{scored[0].sample(sets[:1]).count} texts per length. Line: mean "
        f"over seeds; small dots: each seed. Dotted: longest text trained on ({longest} words).",
        data,
    )


def _task(scored: Sequence[Scored]) -> Reversal:
    task = configured_task(scored[0].configuration)
    assert isinstance(task, Reversal)
    return task


def _lengths(scored: Sequence[Scored]) -> tuple[list[str], list[str]]:
    """The trained numbers of words, and the longer ones, at which every checkpoint has scores, in
    ascending order, as names of test sets.
    """
    task = _task(scored)
    lengths = range(task.shortest, task.longest_test + 1)
    sets = [
        str(length)
        for length in lengths
        if all(str(length) in checkpoint.test_sets for checkpoint in scored)
    ]
    return [name for name in sets if int(name) <= task.longest], [
        name for name in sets if int(name) > task.longest
    ]


def _near_perfect(checkpoint: Scored, trained: Sequence[str]) -> Evidence:
    sample = checkpoint.sample(trained)
    return evidence(
        R1_TRAINED,
        checkpoint.name,
        f"mean exact match at {trained[0]} to {trained[-1]} words",
        {EVERY_SEED: sample.mean},
        **numbers_of(sample),
        note=f"lowest of {len(sample.seeds)} seeds {sample.seeds.min():.3f}",
    )


def _above(checkpoint: Scored, rivals: Sequence[Scored], longer: Sequence[str]) -> Evidence:
    own = checkpoint.sample(longer)
    samples = {rival.name: rival.sample(longer) for rival in rivals}
    differences = {name: between(own, sample) for name, sample in samples.items()}
    # the first checkpoint of each scheme represents it
    layouts = {scheme_name(rival.layout): rival.name for rival in reversed(rivals)}
    others = {
        name: difference for name, difference in differences.items() if name not in layouts.values()
    }
    return evidence(
        R1,
        checkpoint.name,
        f"mean exact match at {longer[0]} to {longer[-1]} words",
        {EXACT_MATCH: {scheme: differences[name] for scheme, name in layouts.items()} | others},
        **numbers_of(own),
        control=", ".join(
            f"{name} {sample.mean:.3f} ({counted(len(sample.seeds), 'seed')})"
            for name, sample in samples.items()
        ),
        note=note(
            [checkpoint, *rivals],
            in_words(differences, "above", ""),
            "" if set(RIVALS) <= set(layouts) else "RoPE or NoPE is missing",
        ),
    )


REVERSAL = Experiment(
    "text reversal by length",
    (R1, R1_TRAINED),
    Needs(
        trained_alike(of_tasks("reversal")),
        "checkpoints of text reversal with RePo, RoPE and NoPE were not given",
        SCHEMES,
        otherwise_of={R1_TRAINED.label: "no checkpoint trained on text reversal was given"},
    ),
    measure,
    tabulate,
    draw,
    GPT2,
)
