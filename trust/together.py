"""Several processes on one command: 1, 2 and 4 leave the same bytes; where one is killed, what goes on leaves them too.

    equal        analyze, score, figures, zoo train: every file but those with clock times
    kills        SIGKILL of one of two processes at random moments of an analysis with measures and an experiment; the other ends on its
                 own, and two processes, or one, go on from what both have kept

Moments are drawn by a seed, even over the CPU time of an undisturbed process.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trust.forked import Done, files, preload, team
from trust.kills import half_written
from trust.outcome import Outcome, Row
from trust.subjects import hidden, subjects

SIZES = (2, 4)
CLOCKED = (".jsonl", ".toml", ".pt")
"""Endings of files that hold clock times or the command."""
KEPT_EVERY = 0.0
"""Seconds between writes in what is killed: it takes seconds itself."""


def run(given: Namespace) -> Outcome:
    """Compare and kill."""
    preload()
    rows, details = [], []
    with tempfile.TemporaryDirectory() as scratch:
        tried: dict[str, Callable[[Path], tuple[Row, list[str]]]] = {
            subject.name: lambda place, words=subject.words: equal(words[0], lambda: _command(words), place)
            for subject in subjects(Path(scratch))
            if subject.name != "train"
        }
        tried["zoo train"] = lambda place: equal("zoo train", _zoo, place)
        tried["kills"] = lambda place: kills(given.kills, place)
        for name, attempt in tried.items():
            if given.only and name not in given.only:
                continue
            place = Path(scratch) / name
            place.mkdir()
            row, said = attempt(place)
            rows.append(row)
            details.extend(said)
    return Outcome(tuple(rows), tuple(details))


def equal(name: str, work: Callable[[], int], scratch: Path) -> tuple[Row, list[str]]:
    """Whether the files of several processes are those of one."""
    expected: dict[str, str] = {}
    wrong, cpu = [], []
    for count in (1, *SIZES):
        place = scratch / str(count)
        place.mkdir()
        done = team(count, work, place)
        cpu.append(max(each.cpu for each in done))
        found = files(place / "out", lambda path: hidden(path) or path.suffix in CLOCKED)
        if any(each.code for each in done) or not found:
            wrong.append(f"{name}, {count} processes: {' / '.join(each.errors for each in done if each.errors)[-300:]}")
        elif count == 1:
            expected = found
        elif found != expected:
            other = sorted(path for path in {*found, *expected} if found.get(path) != expected.get(path))
            wrong.append(f"{name}, {count} processes: other bytes than one: {', '.join(other[:5])}")
        shutil.rmtree(place)
    times = ", ".join(f"{seconds:.1f}" for seconds in cpu)
    note = f"{', '.join(map(str, SIZES))} processes against 1, {len(expected)} files; CPU s of the busiest: {times}"
    return Row(name, len(SIZES), len(SIZES) - len(wrong), note), wrong


def kills(times: int, scratch: Path) -> tuple[Row, list[str]]:
    """What one of two processes that is killed leaves, gone on with by two and by one in turn."""
    calm = scratch / "calm"
    calm.mkdir()
    (alone,) = team(1, _measured, calm)
    expected = files(calm, hidden)
    if alone.code or not expected:
        return Row("kills", 1, 0, "fails undisturbed"), [f"kills: {alone.errors[-300:]}"]
    generator = np.random.default_rng(0)
    both = scratch / "both"
    both.mkdir()
    lengths = [each.cpu for each in team(2, _measured, both)]
    wrong, kept = [], []
    for number in range(times):
        place, victim = scratch / str(number), int(generator.integers(2))
        place.mkdir()
        moment = float(generator.uniform(0, lengths[victim]))
        cut = team(2, _measured, place, kill=(victim, moment))
        kept.append(len([path for path in place.rglob("*") if path.suffix in (".nc", ".json")]))
        found = half_written(place) + _gone_on(place, expected, cut, 2 if number % 2 == 0 else 1)
        wrong += [f"kills, process {victim} after {moment:.2f} s: {complaint}" for complaint in found[:1]]
        shutil.rmtree(place)
    parts = 2 * PROMPTS  # batches, and points of the experiment
    note = f"one of 2 processes killed with {min(kept)} to {max(kept)} of {parts} parts kept; {alone.cpu:.1f} CPU s undisturbed"
    return Row("kills", times, times - len(wrong), note), wrong


def _gone_on(place: Path, expected: dict[str, str], cut: list[Done], count: int) -> list[str]:
    """Complaints about what is there after the same was asked again of `count` processes."""
    if not any(each.code == -9 for each in cut) and any(each.code for each in cut):
        return [f"undisturbed it ends with {[each.code for each in cut]}: {cut[0].errors[-300:]}"]
    again = team(count, _measured, place)
    if any(each.code for each in again):
        return [f"given again it ends with {[each.code for each in again]}: {again[0].errors[-300:]}"]
    found = files(place, hidden)
    return (
        [] if found == expected else [f"other bytes than undisturbed: {sorted(set(found.items()) ^ set(expected.items()))[0][0]}"]
    )


PROMPTS, STEPS = 8, 1


def _measured() -> int:
    """Analyse here, every finished part kept at once."""
    import repo_interp as ri
    from repo_interp import processes
    from repo_interp.analysis.score import task_of
    from repo_interp.experiments.saliency import Saliency

    with processes.together():
        bridge = ri.zoo("niah/repo")
        prompts = task_of(bridge).prompts(PROMPTS, seed=1, test_set="96")
        measures = ["positions", "patterns", "attention_mass"]
        run = ri.analyze(bridge, prompts, measures, store="store", store_every=KEPT_EVERY, experiments=[Saliency(steps=STEPS)])
        if processes.is_first():
            ri.write_run(run, "run.nc")
    return 0


def _command(words: tuple[str, ...]) -> int:
    from repo_interp.cli import main

    return main(list(words))


def _zoo() -> int:
    """A plan of four small runs, two of which go on from the others."""
    from position_papers.training.plan import Planned, planned_runs
    from position_papers.training.shipping import make
    from repo_interp import processes

    tiny = {"width": 16, "heads": 2, "layers": 1, "steps": 20, "batch": 4, "warm_up": 1, "score_prompts": 4, "score_every": 0}
    small = {"task_options": {"longest": 4, "longest_test": 5, "words": 8, "first_longest": 3}}
    plan = (
        Planned("reversal/pretrained", "rope", (0, 1), fields=tiny | small, weights=()),
        Planned("reversal/repo", "repo", (0, 1), "reversal/pretrained", tiny | small),
    )
    with processes.together():
        return 0 if make(planned_runs(plan, Path("out")), 1, lambda: None) else 1
