"""Text reversal by length (RePo app. C, fig. 7): R1, from the exact match of all checkpoints trained on it, and of their seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.checkpoint_scores import Scored, ScoreOptions, of_tasks, score_checkpoint, score_table
from repo_interp.papers.kit.claims import Verdict, judged
from repo_interp.papers.kit.recorded_scores import unequal_budgets
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.score_rules import above
from repo_interp.papers.kit.subjects import Options
from repo_interp.papers.repo import rules
from repo_interp.papers.repo.claims import R1, R1_TRAINED
from repo_interp.plots.marks.scores import score_by_length
from repo_interp.tasks.reversal import Reversal
from repo_interp.training.trained import configured_task


def by_length(checkpoints: Mapping[str, str | os.PathLike[str]], options: Options, cache: Cache) -> list[Result]:
    """R1, fig. 7: exact match by length; checkpoints without weights by their recorded scores. Empty where none reverses texts."""
    asked = ScoreOptions(options.score_prompts, batch_size=options.batch_size, seed=options.seed, device=options.device)
    found = [score_checkpoint(name, path, asked, cache) for name, path in of_tasks(checkpoints, ["reversal"]).items()]
    return [] if not found else [_drawn(found, options)]


def _drawn(found: Sequence[Scored], options: Options) -> Result:
    task = configured_task(found[0].configuration)
    assert isinstance(task, Reversal)
    sets = [
        str(length)
        for length in range(task.shortest, task.longest_test + 1)
        if all(str(length) in one.test_sets for one in found)
    ]
    trained = [name for name in sets if int(name) <= task.longest]
    longer = [name for name in sets if int(name) > task.longest]
    table = score_table(found, sets)
    data = table.assign_coords(test_set=[int(name) for name in sets]).assign_attrs(axis="words", training_length=task.longest)
    verdicts = [_near_perfect(one, trained) for one in found if trained]
    others = {one.name: one for one in found if one.layout in ("rope", "nope")}
    verdicts += [_above(one, others, longer) for one in found if one.layout.startswith("repo") and others and longer]
    return Result(
        "reversal_by_length",
        f"Text reversal: exact match by number of words (RePo fig. 7), {options.score_prompts} texts a length. Line: mean over seeds; "
        f"band: from the smallest to the largest seed. Dotted: longest text trained on ({task.longest} words).",
        data,
        score_by_length(data),
        tuple(verdicts),
    )


def _near_perfect(one: Scored, trained: Sequence[str]) -> Verdict:
    sample = one.sample(trained)
    return Verdict(
        R1_TRAINED,
        one.name,
        judged(sample.mean >= rules.NEAR_PERFECT),
        f"mean exact match at {trained[0]} to {trained[-1]} words",
        sample.mean,
        sample.spread,
        sample.over,
        sample.count,
        note=f"lowest of {len(sample.seeds)} seeds {sample.seeds.min():.3f}",
    )


def _above(one: Scored, others: Mapping[str, Scored], longer: Sequence[str]) -> Verdict:
    mine = one.sample(longer)
    samples = {name: other.sample(longer) for name, other in others.items()}
    leads = {name: above(mine, sample) for name, sample in samples.items()}
    complete = {other.layout for other in others.values()} == {"rope", "nope"}
    said = [
        f"above {name} by {lead.margin:+.3f} (standard error {lead.standard_error:.2g} over {lead.over})"
        for name, lead in leads.items()
    ]
    said += [] if complete else ["RoPE or NoPE is missing"]
    budgets = unequal_budgets({one.name: one.configuration} | {name: other.configuration for name, other in others.items()})
    return Verdict(
        R1,
        one.name,
        judged(complete and all(lead.holds for lead in leads.values())),
        f"mean exact match at {longer[0]} to {longer[-1]} words",
        mine.mean,
        mine.spread,
        mine.over,
        mine.count,
        ", ".join(f"{name} {sample.mean:.3f} ({_seeds(len(sample.seeds))})" for name, sample in samples.items()),
        "; ".join([*said, *([budgets] if budgets else [])]),
    )


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"
