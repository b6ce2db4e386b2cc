"""Carry out the zoo's plan: train what is not finished, put what ships where the package looks for it, and write the zoo's page.

    wave 1: runs from random weights        wave 2: those that go on from one of wave 1
    page:   mean over seeds of the final loss, and of the score on a test set; +- standard deviation over seeds where there are several

Interrupted at any moment, training goes on where it stopped. Nothing in the page is typed by hand but what a task is. Knows nothing about
terminals.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from position_papers.training.configuration import TABLES, to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.plan import Planned, PlannedRun, planned_runs
from position_papers.training.processes import train_side_by_side
from position_papers.training.recipes import recipe
from position_papers.training.trained import made_with
from repo_interp.files import replaced
from repo_interp.processes import from_first
from repo_interp.tasks import make_task

RECORDS = ("training.toml", "log.jsonl", "scores.json")
"""What ships of every run."""
CHECKPOINT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""What ships where weights do."""
EXTRAS = ("steps.nc",)
"""What ships where it was measured: statistics over the saved steps, which are too large themselves."""


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Those that are not trained to their end. Raises InputError where another thing stands in a run's place."""
    waiting = [run for run in runs if not TrainingFolder(run.directory).is_finished]
    for run in waiting:
        folder = TrainingFolder(run.directory)
        if not folder.is_begun and not any(run.directory.glob("seed-*")):
            folder.require_free()
    return waiting


def make(runs: Sequence[PlannedRun], jobs: int, watch: Callable[[], None]) -> bool:
    """Train every unfinished one of `runs`, `jobs` at a time; `watch` is called twice per second. Returns whether all came to their end."""

    def begun(wave: bool) -> list[PlannedRun]:
        """The runs of a wave that wait, the longest first, each with its folder."""
        waiting = [run for run in unfinished(runs) if bool(run.configuration.continue_from) is wave]
        for run in waiting:
            folder = TrainingFolder(run.directory)
            with folder.claimed():
                if not folder.is_begun:
                    folder.begin(to_toml(run.configuration, made_with(run.configuration, command(run))))
        return sorted(waiting, key=_work, reverse=True)

    for wave in (False, True):
        waiting = from_first(lambda wave=wave: begun(wave))
        if waiting and not train_side_by_side([(run.configuration, run.directory) for run in waiting], jobs, watch):
            return False
    return True


def _work(run: PlannedRun) -> float:
    """What a run costs, roughly: sequences times the square of the width."""
    configuration = run.configuration
    return configuration.steps * configuration.batch * configuration.accumulation * configuration.width**2


def install(run: PlannedRun, zoo: Path) -> Path:
    """Put what ships of a finished run into the directory `zoo`, whole or not at all. Returns where it stands."""
    target = zoo / run.shipped
    names = RECORDS + (CHECKPOINT if run.seed in run.planned.weights else ()) + (EXTRAS if run.seed == 0 else ())
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced(target) as fresh:
        fresh.mkdir()
        for name in names:
            if (run.directory / name).is_file():
                shutil.copyfile(run.directory / name, fresh / name)
        for seed in target.glob("seed-*"):
            shutil.copytree(seed, fresh / seed.name)
    return target


def command(run: PlannedRun) -> str:
    """The command that trains one run of the plan alone."""
    configuration = run.configuration
    known = recipe(configuration.task, continued=bool(configuration.continue_from))
    words = ["repo-interp", "train", configuration.task, "--scheme", configuration.scheme]
    if configuration.continue_from:
        words += ["--continue-from", configuration.continue_from]
    for name, value in sorted(run.planned.fields.items()):
        if name in TABLES:
            flag = "--set" if name == "task_options" else "--scheme-set"
            differing = {key: option for key, option in value.items() if known.get(name, {}).get(key) != option}
            words += [word for key, option in differing.items() for word in (flag, f"{key}={option}")]
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if run.seed:
        words += ["--seed", str(run.seed)]
    return " ".join([*words, "--out", run.directory.as_posix()])


_HEAD = """# The checkpoints that come with the package

`ri.zoo("niah/repo")` loads one, `repo-interp zoo` lists them, `make zoo` trains all of them again and writes this page. Each directory
has the weights, the tokenizer, `training.toml` (everything that decides the bytes, with command and versions), `log.jsonl` and
`scores.json`; `seed-N` in it the records of other seeds, and their weights where the page says so: `ri.load("reversal/repo/seed-1")`.
Those marked "records" ship without weights. The same commands on the same machine give the same bytes. Loss: of the last steps of
training, nats per target. Loss and scores: mean over seeds, ± their standard deviation. A seed decides the weights that training
begins with, the order of its data, and the prompts that are scored: ± is of all three together, and not the error of a comparison of
two checkpoints, which have the same prompts where they have the same seed. Of `language` prompts are windows of held-out text, some
harder than others, so that much of its ± is of the windows. Commands are those of seed 0; `repo-interp zoo train TASK/NAME` trains every
seed of one, and what it goes on from.
"""

_AHEAD = """In the order of what they decide. `repo-interp zoo train TASK/NAME` trains every seed of one, and what it goes on from; those of
seed 0 alone by these commands.
"""

_TASKS = {
    "reversal": "Text reversal (RePo, app. C): exact match by number of words; trained on 2 to 20. "
    "f_phi is shared by a layer's heads, as in the paper.",
    "niah": "Needle in a haystack, small: exact match by tokens of context; trained at 256. "
    "A RoPE model is trained half-way, then goes on with each scheme on the same data and budget, as in the RePo paper. "
    "`repo_from_N`: RoPE below layer N, RePo from it on.",
    "niah_keys": "Needle in a haystack that needs positions: share of the values found by tokens of context; a RoPE model is trained at 64 "
    "tokens, then goes on with each scheme at 128. `repo`: from L/3 on, as in the RePo paper; `repo_from_N`: from layer N on. "
    "Seeds 0, 1 and 3: of seed 2 the RoPE model went by the last word of a key still after 5,000 steps, and has nothing to take "
    "over, so it is left out.",
    "flip_flop": "Flip-flop (CoPE, table 2): accuracy of reads; trained on 128 tokens, 80 % of them ignored "
    "(sparse: 98 %, dense: 10 %, long: 512 tokens). `_256`: trained on 256 tokens, long: 1,024.",
    "selective_copy": "Selective copy (CoPE, table 2): exact match with as many blanks as in training, half and twice as many.",
    "counting": "Counting (CoPE, tables 3 and 4): exact match with contexts as in training, longer and shorter ones; "
    "`_3` and `_5`: trained and tested with three and five variables instead of one. `_256`: up to 256 operations instead of 64, and test "
    "sets in which all values are as frequent (balanced).",
    "copying": "In-context copying (HoPE, table 1): exact match by number of sequences in the context; trained on 4, four of them asked "
    "for behind each other, so that the training prompts are as long as one with 7. `_varied`: trained on 1 to 6 sequences, any number "
    "of them asked for, with a separator before each: every distance is a multiple of 13 tokens, and rotary models learn the most "
    "frequent ones, not to compare tokens (RoPE copies from four sequences back and hardly from elsewhere; a test set asks for the "
    "middle one, which is one distance). `_scattered`: as many more separators before sequences at random as leave no distance more "
    "frequent than others, contexts that grow from one sequence, and weights drawn with deviation 0.113: chosen by RoPE's and HoPE's "
    "losses, and for 5,000 steps once scores of HoPE's after 3,000 had been seen. "
    "Ablations (table 3): `hope_ab1` makes only the activated components independent of position, `hope_ab2` only the low ones; "
    "`hope_ab3` puts high ones in the place of both, `rope_high` nothing.",
    "language": "Language modelling on the Python standard library: log perplexity by tokens, nats, lower is better; trained at 256. "
    "`rope_continued`, `repo` (after 1/3), `nope`, `r2n1` and `n2r1` go on from `rope` on the same data and budget, as in the RePo paper; "
    "`cope` has p_max = 64, `cope_16` 16; `cope_sep_keys` makes gates from keys of their own, `cope_open` leaves all gates open, which is "
    "relative position. `_512`: 8 layers of width 256 on windows of 512 tokens.",
}
"""What a task is, and what its numbers are."""


def zoo_page(plan: Iterable[Planned], ahead: Sequence[Planned], zoo: Path) -> str:
    """The page, in Markdown, of what a plan has in the directory `zoo`, and of what is `ahead`: planned and not trained yet."""
    plan = list(plan)
    parts = [_HEAD]
    for task in dict.fromkeys(planned.task for planned in plan):
        of_task = [planned for planned in plan if planned.task == task]
        parts += [
            f"## {task}\n",
            _words(task) + "\n",
            _table(of_task, zoo) + "\n",
            "```\n" + _commands(of_task, of_task) + "\n```\n",
        ]
    if ahead:
        parts += ["## Planned, not trained yet\n", _AHEAD, f"```\n{_commands([*plan, *ahead], ahead)}\n```\n"]
    return "\n".join(parts)


def _words(task: str) -> str:
    """What the page says of a task: the text above, else the first line of the task's own docstring."""
    return _TASKS.get(task) or (type(make_task(task)).__doc__ or "").strip().partition("\n")[0]


def _table(plan: Sequence[Planned], zoo: Path) -> str:
    scores = {planned.name: _scores(planned, zoo) for planned in plan}
    names = dict.fromkeys(name for of_seeds in scores.values() for means in of_seeds for name in means)
    sets = _thinned(sorted(names, key=lambda name: int(name) if name.isdigit() else 0))
    lines = [f"| name | seeds | loss | {' | '.join(sets)} |", "|" + "---|" * (3 + len(sets))]
    for planned in plan:
        name = planned.name if planned.weights else f"{planned.name} (records)"
        cells = [_cell([means.get(test_set) for means in scores[planned.name]]) for test_set in sets]
        loss = _cell([TrainingFolder(zoo / run.shipped).records()[-1]["loss"] for run in _runs(planned)])
        lines.append(f"| {name} | {len(scores[planned.name])} | {loss} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _scores(planned: Planned, zoo: Path) -> list[dict[str, float | None]]:
    return [json.loads((zoo / run.shipped / "scores.json").read_text(encoding="utf-8"))["test_sets"] for run in _runs(planned)]


def _runs(planned: Planned) -> list[PlannedRun]:
    """The runs of every seed of one checkpoint, wherever they began."""
    return planned_runs([replace(planned, continue_from="")])


def _thinned(sets: list[str]) -> list[str]:
    """All test sets where they are few; of many lengths, those where something changes: the last of training's and all beyond."""
    return sets if len(sets) <= 8 else [sets[0], *sets[-11:]]


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{np.mean(known):.3f}"
    return mean if len(known) == 1 else f"{mean} ± {np.std(known, ddof=1):.3f}"


def _commands(plan: Sequence[Planned], shown: Sequence[Planned]) -> str:
    """One of each seed 0 of those that are `shown`, a part of the plan; other seeds have --seed N and stand in seed-N."""
    first = {run.planned.name: run for run in planned_runs(plan) if run.seed == 0}
    return "\n".join(command(first[planned.name]) for planned in shown)
