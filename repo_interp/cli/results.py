"""The option --out of analyze and score: refuse, resume, draw, and print paths.

asked  the options of a command that affect its numbers, as JSON, an attribute of its run:
       `--resume` only continues a run with equal options
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from repo_interp.cli.checkpoint import find_checkpoint
from repo_interp.errors import InputError, Taken, shown_as
from repo_interp.runtime import processes

if TYPE_CHECKING:
    import xarray as xr

    from repo_interp.analysis.publication import Published, Results
    from repo_interp.runtime.console import Console
    from repo_interp.runtime.progress import Step


KEEP_EVERY = 30.0
"""Seconds between writes of finished batches to disk, from which an interrupted or killed command
can continue.
"""
ASKED = "asked"
"""Attribute of a run: the options of the command that made it."""
# Arguments outside of this list count as deciding, so a new option is safe by default.
_UNDECIDING = (
    "command",
    "checkpoint",
    "out",
    "resume",
    "overwrite",
    "device",
    "device_map",
    "max_memory",
    "batch_size",
    "formats",
    "tables",
    "all_findings",
    "threads",
)
"""Arguments that decide no number, or that are compared otherwise: a checkpoint by its files."""
# Arguments have other names in the program than on the command line.
_SPELT = {"parameters": "set", "task_options": "set"}
_REMEDY = "give --resume with the command that it was begun with, another --out, or --overwrite"


class Command:
    """The directory of results of a command, and its question."""

    def __init__(
        self, arguments: argparse.Namespace, checkpoint: str, makes: Literal["analysis", "scores"]
    ) -> None:
        """That of `arguments`.

        Raises InputError for `--resume` without `--out`, or with `--overwrite`.
        """
        if arguments.resume and arguments.overwrite:
            raise InputError("--resume continues and --overwrite starts again; give one of them")
        if arguments.resume and arguments.out is None:
            raise InputError("--resume needs a directory; give --out DIR")
        self.checkpoint, self.makes, self.formats = checkpoint, makes, arguments.formats
        self.out, self.resume, self.overwrite = arguments.out, arguments.resume, arguments.overwrite
        # JSON with sorted keys: equal questions are equal texts.
        decisive = {
            name: _without_paths(value)
            for name, value in vars(arguments).items()
            if name not in _UNDECIDING
        }
        self.asked = json.dumps(decisive, sort_keys=True)
        """Every option that decides a number, as JSON, files by their content: the same question
        from another folder is the same.
        """

    @property
    def replaces(self) -> bool:
        """Whether existing results in --out may be replaced."""
        # Resuming replaces results by the same ones.
        return self.resume or self.overwrite

    def require_claimable(self) -> None:
        """Refuse an --out that cannot be written, before anything is loaded.

        Raises:
            InputError: It holds other things, another process writes there, or the disk refuses.
        """
        from repo_interp.analysis.publication import require_claimable

        require_claimable(self.out, self.replaces)

    def resume_finished(self, console: Console) -> int | None:
        """Finish the results in --out, where `--resume` finds all measured.

        Figures that are missing are drawn.

        Args:
            console: Console to print to.

        Returns:
            The exit code; None if there is more to measure, or no `--resume`.

        Raises:
            InputError: The results are the answer to another question.
        """
        if not self.resume:
            return None
        from repo_interp.analysis.publication import claim_results, stage
        from repo_interp.plots.pages.report import write_report
        from repo_interp.run import read_run
        from repo_interp.runtime.console import on_one_line

        out = Path(str(self.out))
        # Determined once, since the first process may finish before the others check
        reached = processes.from_first(lambda: stage(out))
        # Unfinished work continues in the usual way.
        if reached in ("nothing", "begun"):
            return None
        # The rest, drawing and printing, is for one process.
        if not processes.is_first():
            return 0
        run = read_run(out)
        self._require_same(run)
        if reached == "finished":
            console.print(f"{on_one_line(out)} is finished: {_summary(run)}")
            return 0
        # The other processes have returned, so nothing may wait for them.
        with processes.alone(), claim_results(out, out.name, overwrite=True) as results:
            published = results.draw(run, partial(write_report, formats=self.formats))
        return print_results(console, results, published)

    def _require_same(self, run: xr.DataTree) -> None:
        """Raise InputError if --out holds a run of another command, checkpoint or options."""
        from repo_interp.checkpoint_files.checkpoint_digest import checkpoint_digest
        from repo_interp.models.checkpoints import identify

        held = "scores" if "scores" in run.children else "analysis"
        if held != self.makes:
            kind = "an analysis" if held == "analysis" else held
            raise InputError(
                f"{self.out} holds {kind}, which --resume of this command cannot continue; "
                "give another --out"
            )
        # By content: the checkpoint's path may differ, and its
        # weights may have changed at one path.
        if run.attrs.get("checkpoint_digest") != checkpoint_digest(
            identify(find_checkpoint(self.checkpoint)).directory
        ):
            raise InputError(
                f"{self.out} holds results of another checkpoint "
                f"({run.attrs.get('checkpoint')}); give another --out, or --overwrite"
            )
        if ASKED not in run.attrs:
            raise InputError(
                f"{self.out} holds a run without its request "
                f"({_summary(run)}); give another --out, or --overwrite"
            )
        before, now = json.loads(run.attrs[ASKED]), json.loads(self.asked)
        # Only options that this version has; an older run may lack a newer one.
        name = next((name for name in now if now[name] != before.get(name)), None)
        if name is not None:
            raise InputError(
                f"{self.out} holds the answer to another question: "
                f"--{_SPELT.get(name) or name.replace('_', '-')} was "
                f"{_in_words(before.get(name))}, now {_in_words(now[name])}; {_REMEDY}"
            )

    @contextmanager
    def same_question(self, console: Console) -> Iterator[None]:
        """In the context, refuse stored work on another question, or discard it by --overwrite.

        Args:
            console: Console to print to.

        Yields:
            Nothing.

        Raises:
            Taken: There is such work and no `--overwrite`; the work is kept.
        """
        from repo_interp.storage.store import OtherQuestion

        def show(kept: str) -> None:
            console.print(
                f"{kept}: thrown away, all is measured from the beginning", style="yellow"
            )

        # Without --overwrite another question is an error, which ends
        # the command instead of deleting work.
        with shown_as(OtherQuestion, show, "always" if self.overwrite else "error"):
            try:
                yield
            except OtherQuestion as kept:
                # Taken, because `claim_results` deletes finished batches after most other errors.
                raise Taken(f"{kept}; {_REMEDY}") from None


def _summary(run: xr.DataTree) -> str:
    """Return the contents of a finished run in words."""
    if "scores" in run.children:
        scores = run["scores"].to_dataset()
        sets = ", ".join(map(str, scores["test_set"].values))
        return (
            f"scores of {scores.sizes['prompt']} prompts of {sets}, scaling "
            f"{run.attrs.get('scaling', 'none')}"
        )
    return f"{run.attrs['prompts']} prompts, {', '.join(run.children)}"


def _without_paths(value: Any) -> Any:
    """Replace paths of files in a value by their SHA-256, in hexadecimal."""
    if isinstance(value, list | tuple):
        return [_without_paths(part) for part in value]
    # The option does not show whether a value is a path: the name of an existing file counts as
    # one.
    try:
        return (
            hashlib.sha256(Path(value).read_bytes()).hexdigest()
            if isinstance(value, str) and Path(value).is_file()
            else value
        )
    # A text with a NUL or of great length is no path, and asking raises.
    except (OSError, ValueError):
        return value


def _in_words(value: Any) -> str:
    """Return the value of an option as typed; a file is named by the start of its digest."""
    if value is None or value == []:
        return "not given"
    if isinstance(value, list):
        return ",".join(
            "=".join(map(str, part)) if isinstance(part, list) else str(part) for part in value
        )
    # 64 characters are a SHA-256, written by `_without_paths`.
    return (
        f"another file or folder ({value[:12]}...)"
        if isinstance(value, str) and len(value) == 64
        else str(value)
    )


def draw_results(
    results: Results, run: xr.DataTree, step: Step, formats: Sequence[str] | None
) -> Published:
    """Draw the page and figures of a run that is written already, and stays.

    Args:
        results: Directory of results.
        run: The run.
        step: Function that reports the current step.
        formats: Formats of figures, as `write_report` takes them.

    Returns:
        The files that were written, and failures.

    Raises:
        KeyboardInterrupt: The drawing was interrupted; the message names the run file.
    """
    from repo_interp.plots.pages.report import write_report

    step("drawing")
    try:
        return results.draw(
            run,
            partial(write_report, formats=formats, drawn=lambda figure: step(f"drawing {figure}")),
        )
    except KeyboardInterrupt:
        # Numbers are written before, so an interruption only loses figures.
        raise KeyboardInterrupt(f"while drawing; the numbers are in {results.data_file}") from None


def print_results(console: Console, results: Results, published: Published) -> int:
    """Print the paths of the page, the numbers and the figures, and one line per failure.

    Args:
        console: Console to print to.
        results: Directory of results.
        published: Files that were written, and failures.

    Returns:
        The exit code: 1 after a failure, else 0.
    """
    from repo_interp.runtime.console import bold, on_one_line

    if results.page in published.files:
        console.print(bold(results.page, "  the page to look at"))
    figures = f"{published.figures} figure{'' if published.figures == 1 else 's'}"
    if not published.figures:
        figures += " (the page draws all of this run; --formats png writes them)"
    console.print(f"{on_one_line(results.data_file)}  the numbers")
    console.print(f"{on_one_line(results.figures)}  {figures}")
    if published.tables:
        console.print(
            f"{', '.join(on_one_line(file) for file in published.tables)}  the heads as a table"
        )
    for line in (*published.notes, *(f"not drawn: {failure}" for failure in published.failures)):
        console.print(line, style="yellow")
    # Failures of figures leave the numbers, hence 1 and not 2.
    return 1 if published.failures else 0
