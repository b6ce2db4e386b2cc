"""The directory of one training run, valid at every moment, with the state from which an
interrupted run continues.

    training.toml     configuration and provenance                       log.jsonl     one record per line
    state.pt          state for continuing after an interruption         steps/000500/ checkpoints during training
    config.json, model.safetensors, tokenizer files, scores.json         the finished checkpoint
    unscored/         the checkpoint after its last step, until it has a score

Every file is written whole or not at all. `config.json` comes last: a directory with it is
finished. The state has weights, optimizer, step, random generators and the size of the log, which
is cut to that size before a run continues. Learning rate, difficulty and sequences of a step are
functions of its number (`step`), so only the number is stored.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from pydantic import BaseModel, Field

from repo_interp.checkpoint_files.directories import is_of_checkpoint
from repo_interp.errors import InputError, one_line
from repo_interp.storage.claims import claim
from repo_interp.storage.files import (
    is_left_behind,
    remove,
    replace_whole,
    require_directory,
    write_text,
)
from repo_interp.storage.records import validate
from repo_interp.values import PositiveOrZero

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class TrainingFolder:
    """The directory of a training run."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.configuration = self.directory / "training.toml"
        self.log = self.directory / "log.jsonl"
        self.state = self.directory / "state.pt"
        self.scores = self.directory / "scores.json"
        self.unscored = self.directory / "unscored"

    @property
    def is_begun(self) -> bool:
        """Whether a run was begun here."""
        return self.configuration.is_file()

    @property
    def is_finished(self) -> bool:
        """Whether a run ended here."""
        return self.is_begun and (self.directory / "config.json").is_file()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the directory for this process inside a `with` block.

        Raises Taken if another process has the lock.
        """
        claimed = claim(self.directory)
        try:
            yield
        finally:
            claimed.release()

    def require_free(self) -> None:
        """Raise InputError if the directory has content, or its path is a file."""
        require_directory(self.directory)
        if self.is_finished:
            raise InputError(
                f"{self.directory} has a finished training run; give another --out, or "
                "--overwrite to train it anew"
            )
        if self.is_begun:
            how = "go on with it by --resume, or give --overwrite to begin anew"
            raise InputError(f"{self.directory} has an interrupted training run; {how}")
        self._require_own()

    def clear(self) -> None:
        """Remove the files of an earlier run, training.toml last, and no other files.

        Raises InputError if no run was begun here.
        """
        if not self.is_begun:
            self._require_own()
            return
        steps = self.directory / "steps"
        own = [path for path in self.directory.iterdir() if is_of_checkpoint(path.name)]
        own += [
            path for path in steps.glob("*") if path.name.isdecimal() or is_left_behind(path.name)
        ]
        # measured on the steps
        own += [
            self.state,
            self.log,
            self.scores,
            self.unscored,
            self.directory / "steps.nc",
        ]
        for path in own:
            remove(path)
        with suppress(OSError):  # missing, or it has other content
            steps.rmdir()
        remove(self.configuration)
        with suppress(OSError):
            self.directory.rmdir()

    def begin(self, configuration: str) -> None:
        """Make the directory and write the text of training.toml."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.configuration, configuration)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record to the log."""
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Read the records that the log has so far."""
        if not self.log.exists():
            return []
        whole = self.log.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def log_size(self) -> int:
        """Flush the log to the disk, and return its size in bytes."""
        if not self.log.exists():
            return 0
        with self.log.open("rb") as stream:
            os.fsync(stream.fileno())
        return self.log.stat().st_size

    def cut_log(self, size: int) -> None:
        """Cut the log to its first `size` bytes, and remove half-made files."""
        if self.log.exists():
            if self.log.stat().st_size < size:
                raise InputError(
                    f"{self.log} is shorter than the state of this run says; begin anew with "
                    "--overwrite"
                )
            os.truncate(self.log, size)
        for unfinished in (
            *self.directory.glob(".*.unfinished"),
            *self.directory.glob("steps/.*.unfinished"),
        ):
            remove(unfinished)

    def keep(self, step: int, write: Callable[[Path], None]) -> None:
        """Store the checkpoint that `write` makes as steps/<step>."""
        checkpoint = self.directory / "steps" / f"{step:06d}"
        checkpoint.parent.mkdir(exist_ok=True)
        with replace_whole(checkpoint) as unfinished:
            write(unfinished)

    def keep_unscored(self, write: Callable[[Path], None]) -> None:
        """Store the checkpoint that `write` makes until it has a score."""
        with replace_whole(self.unscored) as unfinished:
            write(unfinished)

    @property
    def kept(self) -> str:
        """A text on the weights without a score, and how to score them; "" if there are none."""
        if not self.unscored.is_dir():
            return ""
        return (
            f"the trained weights are kept in {self.unscored}, without a score; score them by "
            f"repo-interp train --resume --out {self.directory}"
        )

    def finish(self, scores: str) -> None:
        """Move the checkpoint here, with the text of scores.json, config.json last, and remove the
        state.
        """
        write_text(self.unscored / self.scores.name, scores)
        for file in sorted(self.unscored.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(self.directory / file.name)
        self.unscored.rmdir()
        self.state.unlink(missing_ok=True)

    def _require_own(self) -> None:
        if any(
            not is_left_behind(path.name)
            for path in (self.directory.iterdir() if self.directory.is_dir() else ())
        ):
            raise InputError(
                f"{self.directory} exists and holds no training run; give another --out"
            )


class Moment(BaseModel):
    """State of a run between two steps."""

    step: Annotated[int, Ge(0)] = 0
    """Number of finished steps."""
    seconds: PositiveOrZero = 0.0
    """Time spent in all sessions."""
    log_size: Annotated[int, Ge(0)] = 0
    """Bytes of the log for the finished steps."""
    losses: list[float] = Field(default_factory=list)
    """Losses of the steps since the last record, in nats per target."""


def save_state(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, moment: Moment
) -> None:
    """Write the state, whole or not at all.

    Raises OSError if the disk is full, which torch.save alone does not.
    """
    # Imported here, since folders are inspected before large libraries are imported
    import torch

    state = {
        "model": _trained(model),
        "optimizer": optimizer.state_dict(),
        "moment": moment.model_dump(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    content = io.BytesIO()
    torch.save(state, content)
    with replace_whole(file) as unfinished:
        unfinished.write_bytes(content.getbuffer())


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `model` without frozen weights, such as the base of an adapter."""
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_state(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> Moment:
    """Read the state of a run of `steps` from `file`, and restore model, optimizer and random
    numbers; without a file, return the beginning of the run.

    Only tensors and plain values are read, so no code from the file runs. Raises InputError if the
    file is damaged, inconsistent, or belongs to another model.
    """
    import torch

    if not file.exists():
        return Moment()
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        moment = validate(state["moment"], Moment)
        if moment.step > steps:
            raise ValueError(f"it is at step {moment.step} of {steps}")
        if state["model"].keys() != _trained(model).keys():
            raise ValueError("it has other weights than the model")
        model.load_state_dict({**model.state_dict(), **state["model"]})
        chosen = _chosen(optimizer)
        optimizer.load_state_dict(state["optimizer"])
        _require_at(optimizer, moment.step)
        if _chosen(optimizer) != chosen:
            raise ValueError("its optimiser has other options")
        torch.set_rng_state(state["random"])
        if state["random_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])
        return moment
    except Exception as error:  # torch raises various errors for a changed file
        why = one_line(error, 120)
        raise InputError(
            f"{file} does not hold the state of this run ({why}); begin anew with --overwrite"
        ) from None


def saved_step(file: Path) -> int:
    """Return the number of finished steps in the state in `file`; 0 if it cannot be read."""
    import torch

    try:
        return int(torch.load(file, map_location="cpu", weights_only=True)["moment"]["step"])
    except Exception:  # `load_state` refuses a changed file with the reason
        return 0


def _chosen(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer that are constant during the run."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def _require_at(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Raise ValueError if the optimizer's state does not fit its parameters or `step`."""
    for parameter, remembered in optimizer.state.items():
        if any(value.shape not in ((), parameter.shape) for value in remembered.values()):
            raise ValueError("its optimiser belongs to other weights")
    if max((int(remembered["step"]) for remembered in optimizer.state.values()), default=0) != step:
        raise ValueError(f"its optimiser did not make {step} steps")
