"""Fill empty cells of the table of encodings: train, and record each cell when it is finished.

After an interruption at any moment, the next call continues; first it writes missing records of
finished trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from position_papers.card.encodings import Cell, record, trainings
from position_papers.card.trials import Training
from position_papers.training.configuration import to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.loop import train_side_by_side
from position_papers.training.trained import made_with, require_begun
from position_papers.zoo_directory import DIRECTORY
from repo_interp.cli.scheme_files import read_scheme_files

COMMAND = "python docs/encodings.py --fill"


def fill(
    empty: Sequence[Cell],
    out: Path,
    jobs: int = 1,
    device: str = "cpu",
    zoo: Path = DIRECTORY,
    on_record: Callable[[Cell], object] = lambda cell: None,
    scheme_files: Sequence[str] = (),
    on_step: Callable[[str, int, int], object] = lambda cell, step, steps: None,
) -> bool:
    """Train empty cells in their order.

    Args:
        empty: The cells.
        out: Directory of the runs.
        jobs: Number of trainings at a time.
        device: Device of the trainings.
        zoo: Directory of the records.
        on_record: Called with a cell when its record is written.
        scheme_files: Every FILE.py:FUNCTION of an encoding, which each process runs.
        on_step: Called now and then with the first cell that is not finished, in words, its
            finished steps and all of its steps.

    Returns:
        True if all cells were filled; False after an interruption.

    Raises:
        InputError: A cell cannot be trained.
        Taken: A directory has another run.
    """
    read_scheme_files(scheme_files)
    # Starts must be finished before the runs that continue them begin.
    for _, group in groupby(empty, key=lambda cell: bool(cell.column.start)):
        planned = [(cell, trainings(cell, out, device)) for cell in group]
        waiting_for_record = list(planned)

        def keep(left: list[tuple[Cell, list[Training]]] = waiting_for_record) -> None:
            for cell, (*_, training) in list(left):
                if training.is_finished:
                    require_begun(training.directory, training.configuration)
                    record(cell, training, zoo)
                    left[:] = [each for each in left if each[0] is not cell]
                    on_record(cell)
            for cell, (*_, training) in left[:1]:
                log = TrainingFolder(training.directory).records()
                done = log[-1]["step"] if log else 0
                name = f"{cell.encoding} on {cell.column.task}, seed {cell.seed}"
                on_step(name, done, training.configuration.steps)

        keep()
        for wave in (0, -1):  # the same training twice without a start
            waiting = {
                each[wave].directory: each[wave]
                for _, each in planned
                if not each[wave].is_finished
            }
            for training in waiting.values():
                _begin(training)
            runs = [(each.configuration, directory) for directory, each in waiting.items()]
            ended = not runs or train_side_by_side(runs, jobs, keep, scheme_files=scheme_files)
            keep()
            if not ended:
                return False
    return True


def _begin(training: Training) -> None:
    folder, configuration = TrainingFolder(training.directory), training.configuration
    if folder.is_begun:
        require_begun(training.directory, configuration)
        return
    folder.require_free()
    with folder.claimed():
        folder.begin(to_toml(configuration, made_with(configuration, COMMAND)))
