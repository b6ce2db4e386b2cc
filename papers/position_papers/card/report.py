"""Make a card: verify a scheme, train it by the recipes, and compare it with the package's records.

    verify -> cost -> train, one task and seed at a time -> heads -> card

The whole card is written before the first training and after each one. This module prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

import position_papers.card.texts as texts
from position_papers.card.columns import BUDGETS, Column, columns_of
from position_papers.card.content import Card, TaskCard, as_dataset
from position_papers.card.cost import costs
from position_papers.card.heads import head_numbers
from position_papers.card.page import write_card
from position_papers.card.records import compared, known_encodings, rivals
from position_papers.card.trials import Training, Trials
from position_papers.training.folder import TrainingFolder, saved_step
from position_papers.training.loop import Record
from position_papers.training.single import complete
from position_papers.training.trained import require_begun
from position_papers.zoo_directory import DIRECTORY
from repo_interp.checkpoint_files.options import describe_source
from repo_interp.errors import InputError
from repo_interp.plugins.verify_scheme.scheme_audit import verify_scheme
from repo_interp.positions.layouts import named_schemes, parse_layout
from repo_interp.storage.files import replace_whole, write_text
from repo_interp.values import duration

STOPPING = ("first", "causal", "repeated", "reference")
"""Checks of `verify_scheme` whose findings stop the card before training."""


@dataclass(frozen=True)
class Watch:
    """Callbacks of a card."""

    say: Callable[[str], object] = lambda line: None
    """Called with lines about findings, cost, and finished trainings."""
    step: Callable[..., object] = lambda *done: None
    """Called with the name of the work, its progress, and a text."""
    stop: Callable[[], bool] = lambda: False
    """Called after every step; True: save the state and stop."""


def card(
    layout: str,
    out: str | os.PathLike[str],
    *,
    budget: str = "quick",
    tasks: Sequence[str] = (),
    seeds: Sequence[int] = (),
    device: str = "cpu",
    columns: Sequence[Column] = (),
    reference: Callable[..., Any] | None = None,
    zoo: Path = DIRECTORY,
    command: str = "",
    watch: Watch | None = None,
) -> xr.Dataset:
    """Verify a scheme, train it by the recipes of the zoo, and compare it with the records.

    Finished trainings in `out` are not repeated, and interrupted ones continue. Trainings of
    another version of the scheme's source are separate; the card counts the versions.

    Args:
        layout: Layout, with names of schemes of packages or of `repo_interp.register_scheme`.
        out: Directory of the card, for this scheme only.
        budget: "quick" or "standard", see `columns.BUDGETS`.
        tasks: Tasks instead of those of the budget.
        seeds: Seeds instead of those of the budget.
        device: Device of the trainings.
        columns: Columns instead of tasks, with other recipes; no record of the package has their
            budget.
        reference: Slow formula of the scheme, as for `repo_interp.verify_scheme`. If the scheme
            differs from it, nothing is trained. None: no comparison with a formula.
        zoo: Directory of the records.
        command: Command in training.toml; "": a call from Python.
        watch: Callbacks; None: no output.

    Returns:
        `loss [encoding, task, seed]` and `score [encoding, task, part, seed]`, NaN if missing;
        `difference`, `low`, `high` and `verdict` [rival, task], on test sets unlike training, the
        scheme minus the rival with limits of 95 %. Attributes: findings of `verify_scheme`, the
        reference, and the number of versions.

    Raises:
        InputError: The budget, a task or the directory is refused, or the scheme is not causal.
        KeyboardInterrupt: `watch.stop` returned True; the same call continues.
    """
    if budget not in BUDGETS:
        raise InputError(f"there is no budget {budget!r:.80}; wanted one of {', '.join(BUDGETS)}")
    watch = Watch() if watch is None else watch
    chosen = tuple(columns) or columns_of(tuple(tasks) or BUDGETS[budget].tasks)
    numbers = tuple(seeds) or BUDGETS[budget].seeds
    _require_layout(layout, [column.configuration(layout, 0).layers for column in chosen])
    trials = Trials(Path(out), layout, device)
    findings, formula = _verify(layout, reference, watch)
    trials.claim()
    _say_versions(trials, watch)
    trainings = trials.trainings(chosen, numbers)
    for training in trainings:
        if training.is_finished:  # of an unfinished one, `complete` asks
            require_begun(training.directory, training.configuration)
    _say_cost(trainings, trials, watch)
    asked = {column.task: column for column in chosen}
    shown = (*chosen, *(column for column in _begun(trials) if column.task not in asked))

    def write() -> Card:
        return _write(trials, shown, findings, formula, zoo)

    made = write()
    for training in trainings:
        if not training.is_finished:
            try:
                _train(training, command or f"position_papers.card.card({layout!r})", watch)
            except KeyboardInterrupt:
                write()  # at which step it stands
                raise
            made = write()
    for column in shown:
        if _measure_heads(trials, column, watch):
            made = write()
    return as_dataset(made)


def _require_layout(layout: str, sizes: Sequence[int]) -> None:
    """Raise InputError if a layout does not fit models with these numbers of layers."""
    for layers in sizes:
        try:
            parse_layout(layout, layers)
        except ValueError as error:
            raise InputError(str(error)) from None


def _verify(
    layout: str, reference: Callable[..., Any] | None, watch: Watch
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The findings of `verify_scheme` about every scheme of the layout, and the reference."""
    found, schemes, formula = [], named_schemes(layout), {}
    if reference is not None:
        if len(schemes) > 1:
            raise InputError(
                f"a reference is the formula of one scheme; {layout!r:.80} has {len(schemes)}"
            )
        name = getattr(reference, "__name__", type(reference).__name__)
        formula = describe_source(reference) | {"function": name}
    for scheme in schemes:
        lines = verify_scheme(scheme, reference=reference).attrs["findings"].splitlines()
        stopping = [line for line in lines if line.partition(":")[0] in STOPPING]
        if stopping:
            raise InputError(f"nothing was trained: {scheme} fails verify_scheme: {stopping[0]}")
        found += [f"{scheme}: {line}" for line in lines]
    watch.say(f"verify_scheme: {texts.verified(found, formula)}")
    return tuple(found), formula


def _say_versions(trials: Trials, watch: Watch) -> None:
    """Report the trainings of other versions in the directory."""
    known = trials.versions
    for number, version in enumerate(known, 1):
        if version != trials.version.name:
            watch.say(
                f"version {number} of {len(known)} had another source ({version}); what it trained "
                f"is kept: {'; '.join(trials.stand(version))}"
            )


def _say_cost(trainings: Sequence[Training], trials: Trials, watch: Watch) -> None:
    left = [training for training in trainings if not training.is_finished]
    if not left:
        watch.say("every training is finished; nothing is trained")
        return
    watch.step("timing steps of every task")
    found = costs(trainings)
    each = ", ".join(f"{task} {duration(seconds)}" for task, seconds in found.items())
    watch.say(
        f"version {trials.versions.index(trials.version.name) + 1} of {len(trials.versions)} of "
        f"{trials.layout} in {trials.directory}: {len(left)} training{'s' * (len(left) > 1)}, "
        f"about {duration(sum(found.values()))} here, scores not counted ({each})"
    )


def _train(training: Training, command: str, watch: Watch) -> None:
    total, task = training.configuration.steps, training.column.task
    what = f"{training.configuration.scheme} on {task}, seed {training.seed}"
    if step := saved_step(TrainingFolder(training.directory).state):
        watch.say(f"goes on from step {step:,} of {total:,}: {what}")

    def show(record: Record) -> None:
        watch.step(f"training {what}", record.step, total, f"loss {record.loss:.4f}")

    done = complete(
        training.configuration,
        training.directory,
        command,
        watch.stop,
        show,
        lambda answered, prompts: watch.step(f"scoring {what}", answered, prompts),
    )
    if not done:
        raise KeyboardInterrupt(
            f"the state is saved in {training.directory}; the same command goes on"
        )
    watch.say(f"finished: {what}")


def _begun(trials: Trials) -> list[Column]:
    """Return the columns that earlier calls filled."""
    tasks = sorted({path.parts[-3] for path in trials.version.glob("*/seed-*/config.json")})
    return [column for task in tasks for column in columns_of([task])]


def _heads_file(trials: Trials, column: Column) -> Path:
    return trials.version / column.task / "heads.csv"


def _left_out(file: Path) -> Path:
    """Return the file with the measures missing in the table of heads, and the reasons."""
    return file.with_name("heads_left_out.txt")


def _measure_heads(trials: Trials, column: Column, watch: Watch) -> bool:
    """Measure the heads of the first seed of a task once; True if measured in this call."""
    row, file = trials.row(column), _heads_file(trials, column)
    if row is None or (file.exists() and _left_out(file).exists()):
        return False
    watch.step(f"measuring heads on {column.task}")
    checkpoint = file.parent / f"seed-{row.runs[0].recorded.seed}"
    table = head_numbers(checkpoint, column.inside[0], trials.device)
    write_text(_left_out(file), table.attrs["left_out"])
    for line in _left_out(file).read_text(encoding="utf-8").splitlines():
        watch.say(f"heads on {column.task}: {line}")
    with replace_whole(file) as unfinished:
        table.to_csv(unfinished, index=False, lineterminator="\n", float_format="%.6g")
    return True


def _write(
    trials: Trials,
    columns: Sequence[Column],
    findings: tuple[str, ...],
    formula: Mapping[str, str],
    zoo: Path,
) -> Card:
    versions = trials.versions
    made = Card(
        trials.layout,
        trials.digest,
        len(versions),
        findings,
        _notes(trials),
        tuple(_task(trials, column, zoo) for column in columns),
        versions.index(trials.version.name) + 1,
        trials.scored,
        formula,
    )
    write_card(made, trials.directory)
    return made


def _task(trials: Trials, column: Column, zoo: Path) -> TaskCard:
    (*_, training) = trials.trainings([column], [0])
    found = rivals(column, training.configuration, zoo)
    own, file = trials.row(column), _heads_file(trials, column)
    found.pop(trials.layout, None)  # a scheme of the package is not a rival of itself
    others = tuple(found.values())
    beside = () if own is None else tuple(compared(own, rival) for rival in others)
    missing = tuple(name for name in known_encodings() if name not in (*found, trials.layout))
    heads, lacking = pd.read_csv(file) if file.exists() else None, _left_out(file)
    left_out = lacking.read_text(encoding="utf-8").splitlines() if lacking.exists() else ()
    far = [line for line in trials.stand(trials.version.name, column.task) if "at step" in line]
    return TaskCard(column, own, others, beside, missing, heads, tuple(left_out), tuple(far))


def _notes(trials: Trials) -> tuple[str, ...]:
    notes = [
        "A scheme with random weights has to draw them with the standard deviation "
        "`builder.deviation` (.02, on niah_keys .113; docs/card.md): one that draws them by itself "
        "is trained by another recipe in that."
    ]
    if trials.device != "cpu":
        notes.append(
            f"Trained on {trials.device}: seeds are not paired with records of a processor."
        )
    return tuple(notes)
