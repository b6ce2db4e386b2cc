"""The commands: parse, call, print. Nothing below prints.

A command is a module with `SUMMARY`, `add_arguments(parser)` and `run(arguments) -> exit code`; it
imports heavy modules inside `run`, so that `repo-interp --help` is fast. Bad input gives one line
and exit code 2, an interruption 130. Exit code 1 means that numbers are written, but a figure, the
page or the printed text failed. A Note is one more line, and refuses nothing.

Launched as several processes (`accelerate launch -m repo_interp ...`), a command with `SHARED` is
run by all of them, other commands only by the first. One process prints, and one reports why the
command ends.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import Timer
from typing import Any, NoReturn

from repo_interp import __version__
from repo_interp.entry_points import COMMANDS, OWN, called, find, names
from repo_interp.errors import InputError, Note, one_line, shown_as
from repo_interp.runtime import processes
from repo_interp.runtime.failures import failure_of, is_out_of_memory
from repo_interp.runtime.interruptible import abandoned

SILENCE = 1.0
"""Seconds after which a silent command reports that it imports libraries."""
LABORATORY = ("card", "figures", "train", "train-steps", "zoo")
"""Commands of the distribution position-papers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words of the command line; None: the arguments of this process.

    Returns:
        The exit code.
    """
    given = _merge_words(list(sys.argv[1:] if arguments is None else arguments))
    # Libraries write to these without asking, and a None would raise in the middle of a run.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore  # of a terminal in another encoding than UTF-8
    try:
        _require_no_nul(given)
        options, strays = _parser(given).parse_known_args(given)
        if strays:
            said = f"unrecognized arguments: {' '.join(strays)}"
            meant = getattr(_module(options.command), "CALL", None)
            said += f"; a call is {meant}" if meant else ""
            raise _WrongUsage(f"repo-interp {options.command}", said)
    except _WrongUsage as error:
        return _report(error.command, str(error), 2)
    except KeyboardInterrupt:  # while the modules of the commands are imported
        return _report("repo-interp", "interrupted", 130)
    # Libraries must neither use the network nor print over our progress bars; a hub id is still
    # looked up on the hub.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Otherwise torch prints a stack when another process has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # numpy reads it on import. Its threads wait for each other by spinning, which on a busy machine
    # costs as much as the rest of a command, and sums of several threads differ in the last bits.
    if hasattr(options, "threads") and "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(options.threads or 1))
    # At exit Python looks for reference cycles among all objects, which takes a second.
    atexit.register(gc.freeze)
    command = f"repo-interp {options.command}"
    # A command that is not shared writes separate files, so the other processes do nothing.
    try:
        if not getattr(_module(options.command), "SHARED", False):
            return _run(options) if processes.is_first() else 0
        with processes.together(given, lambda line: _write(f"{command} {line}")):
            return _run(options)
    except InputError as error:
        # Before the work began: no process knows whether another one exists to print it.
        _write(f"{command}: {error}")
        return 2
    except KeyboardInterrupt as interruption:  # while it waits for the others
        _write(f"{command}: {_interrupted(interruption)}")
        return 130


def _run(options: argparse.Namespace) -> int:
    command = f"repo-interp {options.command}"
    try:
        with (
            # Cached, so that a note that a library repeats is one line
            shown_as(Note, cache(partial(_report, command, code=0))),
            _lossy_output() as output,
            # The timer reads whether anything was written, so the
            # output is exchanged before it starts.
            _announced(command, output),
        ):
            code = _module(options.command).run(options)
            output.flush()
        if output.failure is not None:
            line = f"standard output cannot be written ({output.failure})"
            return _report(
                command,
                f"{line}; the results are there" if hasattr(options, "out") else line,
                1 if hasattr(options, "out") else 2,
            )
        return code
    # Errors that a user can fix become lines; a bug keeps its traceback, see below.
    except InputError as error:
        return _report(command, str(error), 2)
    except KeyboardInterrupt as interruption:
        code = _report(command, _interrupted(interruption), 130)
        if abandoned():
            _end(code)
        return code
    except SystemExit as end:  # ours return a code
        line = (
            failure_of(end)
            or f"code of another package called sys.exit({end.code!r}); nothing was finished"
        )
        return _report(command, line, 1)
    # The reader of a pipe has gone (head, less): a shell reports SIGPIPE as 141.
    except BrokenPipeError:
        _close(sys.stdout)
        return 141
    except OSError as error:
        file = "the output" if error.filename is None else one_line(error.filename)
        return _report(command, f"{file} cannot be read or written ({error.strerror or error})", 2)
    except Exception as error:
        line = (
            "not enough memory; give shorter prompts, fewer of them at a time "
            "(--batch-size), or a smaller model"
        )
        # torch raises a RuntimeError too if memory runs out, so the message decides.
        if not is_out_of_memory(error) and (line := failure_of(error)) is None:
            # A bug: show the traceback.
            raise
        return _report(command, line, 2)


@contextmanager
def _announced(command: str, output: _Output) -> Iterator[None]:
    """Write a line if a command is silent for `SILENCE` seconds while it imports torch."""

    def announce() -> None:
        if not output.written:
            _report(command, "importing torch and the libraries around it", 0)

    # A daemon, so that a command that ends first does not wait for it
    waiting = Timer(SILENCE, announce)
    waiting.daemon = True
    if "torch" not in sys.modules:
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


class _Output:
    """Standard output that a command can lose: after the first failed write, text is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.failure = stream, None
        self.written = False
        """Whether anything was written."""

    def write(self, text: str) -> int:
        self.written = True
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        # The reader has closed the pipe: the command ends. A full disk only loses the text.
        except BrokenPipeError:
            raise
        except OSError as error:
            self.failure = error.strerror or str(error)
            _close(self._stream)  # also for Python, which flushes it at the end

    # rich reads the encoding of a stream, whether it is a terminal, and more.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _lossy_output() -> Iterator[_Output]:
    """In the context a full disk below standard output costs the printed text and nothing else."""
    # Exchanged for the whole command: libraries print as well.
    stream, sys.stdout = sys.stdout, _Output(sys.stdout)
    try:
        yield sys.stdout
    finally:
        sys.stdout = stream


def _require_no_nul(given: Sequence[str]) -> None:
    # Python refuses NUL in a path by a ValueError, far from the argument that has it.
    for word in given:
        if "\0" in word:
            raise _WrongUsage(
                "repo-interp",
                f"the argument {one_line(word, 80)} has a NUL character, which no path and "
                "no name can have",
            )


class _WrongUsage(InputError):
    def __init__(self, command: str, message: str) -> None:
        super().__init__(f"{message} (see {command} --help)")
        self.command = command


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        raise _WrongUsage(self.prog, message)


def _end(code: int) -> NoReturn:
    """End the process without taking Python down below a call that still runs in another thread."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _interrupted(interruption: KeyboardInterrupt) -> str:
    return f"interrupted: {interruption}" if str(interruption) else "interrupted"


def _report(command: str, line: str, code: int) -> int:
    """Write one line to standard error from one process only; return `code`."""
    if processes.speaks():
        _write(f"{command}: {line}")
    return code


def _write(line: str) -> None:
    # Standard error may be closed or full; then the line is lost.
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")


def _close(stream: Any) -> None:
    """Redirect a stream to the null device if its reader is gone or its disk is full."""
    with suppress(OSError, ValueError):
        # Python flushes the stream at exit; the replaced file makes this succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _merge_words(given: list[str]) -> list[str]:
    """Join the words of a command of two words; `steps` alone is the former `train steps`."""
    # argparse takes a command as one word.
    if given[:2] == ["train", "steps"]:
        return ["train steps", *given[2:]]
    return ["train steps", *given[1:]] if given[:1] == ["steps"] else given


# Commands are modules, and entry points have names with hyphens.
def _module(command: str) -> Any:
    return find(COMMANDS, command.replace(" ", "-"))


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="repo-interp",
        description="A microscope for token positions in attention: RePo, RoPE, NoPE and "
        "their relatives.",
    )
    parser.add_argument("--version", action="version", version=f"repo-interp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # The requested command may raise; another command that fails must not stop it.
    installed, wanted = names(COMMANDS), given[0].replace(" ", "-") if given else ""
    for name in installed:
        try:
            module = _module(name)
            # Tried on a separate parser, since argparse cannot undo half of a command.
            if name not in OWN[COMMANDS]:
                module.add_arguments(_Parser())  # one that fails half way must leave nothing
            # argparse formats help with %, and would fail at "95 %".
            summary = module.SUMMARY.replace("%", "%%")
        except (Exception, SystemExit) as error:
            if name in OWN[COMMANDS]:
                # If one of our commands fails, that is a bug.
                raise
            reason = (
                f"{called(COMMANDS, name)} fails: "
                f"{one_line(f'{type(error).__name__}: {error}')}; fix or uninstall it"
            )
            reason = str(error) if isinstance(error, InputError) else reason
            if name == wanted:
                raise _WrongUsage("repo-interp", reason) from None
            _report("repo-interp", reason, 0)
            continue
        module.add_arguments(
            commands.add_parser(name.replace("-", " "), help=summary, description=module.SUMMARY)
        )
    if wanted in LABORATORY and wanted not in installed:
        raise _WrongUsage(
            "repo-interp",
            f"{given[0]} comes with the package position-papers; install it: pip install "
            "./papers in a checkout",
        )
    return parser
