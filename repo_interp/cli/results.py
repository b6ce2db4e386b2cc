"""Where the results are, and what could not be drawn: the last lines of analyze, score and compare; and how far they had come before.

asked  the options of a command that decide its numbers, as JSON, an attribute of its run: `--resume` finishes no other question
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

    from repo_interp.analysis.publication import Published, Results
    from repo_interp.cli.console import Console


KEEP_EVERY = 10.0
"""Seconds between writes of finished batches to disk, from which an interrupted or killed command goes on."""
ASKED = "asked"
"""Attribute of a run: what the command that made it was asked."""
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
)
"""Arguments that decide no number, or that are compared otherwise: a checkpoint by its files."""
_SPELT = {"parameters": "set", "task_options": "set"}


def gone_on_with(console: Console, arguments: argparse.Namespace, checkpoint: str, makes_scores: bool) -> int | None:
    """The exit code, where `--resume` finds that all is measured in `--out`, and draws what is not drawn yet; None where it is not.

    Raises InputError for a `--resume` without `--out`, or beside `--overwrite`, and where what is measured there is not what is asked.
    """
    from repo_interp import processes
    from repo_interp.analysis.publication import claimed, stage
    from repo_interp.errors import InputError
    from repo_interp.plots.pages.report import write_report
    from repo_interp.run import read_run

    if not arguments.resume:
        return None
    if arguments.overwrite:
        raise InputError("--resume goes on and --overwrite begins anew; give one of them")
    if arguments.out is None:
        raise InputError("--resume needs to know what; give --out DIR")
    out = Path(arguments.out)
    reached = processes.from_first(lambda: stage(out))
    if reached in ("nothing", "begun"):
        return None
    if not processes.is_first():
        return 0
    _require_same(out, checkpoint, arguments, makes_scores)
    if reached == "finished":
        from repo_interp.cli.console import plain

        console.print(f"{plain(out)} is finished: {_held(read_run(out))}", highlight=False)
        return 0
    with processes.alone(), claimed(out, out.name, overwrite=True) as results:
        published = results.draw(read_run(results.data_file), partial(write_report, formats=arguments.formats))
    return print_results(console, results, published)


def _held(run: xr.DataTree) -> str:
    """What a finished run was asked, in words."""
    if "scores" in run.children:
        scores = run["scores"].to_dataset()
        sets = ", ".join(map(str, scores["test_set"].values))
        return f"scores of {scores.sizes['prompt']} prompts of {sets}, scaling {run.attrs.get('scaling', 'none')}"
    return f"{run.attrs['prompts']} prompts, {', '.join(run.children)}"


def asked(arguments: argparse.Namespace) -> str:
    """What `arguments` of analyze or score ask, as JSON: every option that decides a number, files by their content.

    No path is kept: the same question from another folder is the same.
    """
    decisive = {name: value for name, value in vars(arguments).items() if name not in _UNDECIDING}
    if (data := decisive.get("data")) and Path(data).is_dir():
        files = {str(file.relative_to(data)): str(file) for file in sorted(Path(data).rglob("*")) if file.is_file()}
        decisive["data"] = hashlib.sha256(
            json.dumps([[name, _without_paths(file)] for name, file in files.items()]).encode()
        ).hexdigest()
    return json.dumps({name: _without_paths(value) for name, value in decisive.items()}, sort_keys=True)


def _without_paths(value: Any) -> Any:
    """`value`, of what names a file its SHA-256, in hexadecimal."""
    if isinstance(value, list | tuple):
        return [_without_paths(each) for each in value]
    try:
        return hashlib.sha256(Path(value).read_bytes()).hexdigest() if isinstance(value, str) and Path(value).is_file() else value
    except (OSError, ValueError):
        return value


def _require_same(out: Path, checkpoint: str, arguments: argparse.Namespace, makes_scores: bool) -> None:
    """Raise InputError where the run in `out` was made by another command, of another checkpoint, or with other options."""
    from repo_interp.cli.checkpoint import find
    from repo_interp.errors import InputError
    from repo_interp.models.checkpoints import identify
    from repo_interp.models.provenance import checkpoint_digest
    from repo_interp.run import read_run

    run = read_run(out)
    if ("scores" in run.children) is not makes_scores:
        kind = "an analysis" if makes_scores else "scores"
        raise InputError(f"{out} holds {kind}, which --resume of this command cannot go on with; give another --out")
    if run.attrs.get("checkpoint_digest") != checkpoint_digest(identify(find(checkpoint)).directory):
        raise InputError(
            f"{out} holds results of another checkpoint ({run.attrs.get('checkpoint')}); give another --out, or --overwrite"
        )
    if ASKED not in run.attrs:
        raise InputError(
            f"{out} holds a run that does not say what it was asked ({_held(run)}); give another --out, or --overwrite"
        )
    before, now = json.loads(run.attrs[ASKED]), json.loads(asked(arguments))
    differing = [name for name in now if now[name] != before.get(name)]
    if differing:
        name: str = differing[0]
        option = _SPELT.get(name) or name.replace("_", "-")
        raise InputError(
            f"{out} holds the answer to another question: --{option} was {_in_words(before.get(name))}, "
            f"now {_in_words(now[name])}; give --resume with the command that it was begun with, another --out, or --overwrite"
        )


def _in_words(value: Any) -> str:
    """The value of an option as it is typed; files and folders are told apart by the beginning of their digest."""
    if value is None or value == []:
        return "not given"
    if isinstance(value, list):
        return ",".join("=".join(map(str, each)) if isinstance(each, list) else str(each) for each in value)
    return f"another file or folder ({value[:12]}...)" if isinstance(value, str) and len(value) == 64 else str(value)


@contextmanager
def asked_as_before(console: Console, resume: bool) -> Iterator[None]:
    """While the context lasts, what is kept of another question is thrown away with a line that says so; refused, where it is to go on.

    Raises Taken, and what is kept stays then.
    """
    from repo_interp.errors import Taken
    from repo_interp.experiments.resumable_grid import OtherQuestion

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, OtherQuestion):
            said = f"{message}: thrown away, all is measured from the beginning"
            console.print(said, style="yellow", highlight=False)
        else:
            others(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("error" if resume else "always", OtherQuestion)
        others, warnings.showwarning = warnings.showwarning, show
        try:
            yield
        except OtherQuestion as kept:
            raise Taken(f"{kept}; give --resume with the command that it was begun with, another --out, or --overwrite") from None


def print_results(console: Console, results: Results, published: Published) -> int:
    """Print the paths of the page, the numbers and the figures, and one line per failure; return the exit code, 1 after a failure."""
    from repo_interp.cli.console import bold, plain

    if results.page in published.files:
        console.print(bold(results.page, "  the page to look at"), highlight=False)
    drawn = f"{published.figures} figure{'' if published.figures == 1 else 's'}"
    console.print(
        f"{plain(results.data_file)}  the numbers; {plain(results.figures)}  {drawn}",
        highlight=False,
    )
    if published.tables:
        console.print(f"{', '.join(plain(file) for file in published.tables)}  the atlas of heads as a table", highlight=False)
    for note in published.notes:
        console.print(note, style="yellow", highlight=False)
    for failure in published.failures:
        console.print(f"not drawn: {failure}", style="yellow", highlight=False)
    return 1 if published.failures else 0
