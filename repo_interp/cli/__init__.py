"""The commands: parse, call, print. Nothing below prints.

A command is a module with `SUMMARY`, `add_arguments(parser)` and `run(arguments) -> exit code`; it imports what is heavy inside `run`,
so that `repo-interp --help` is fast. Bad input is one line and exit code 2, an interruption 130; 1 says that
the numbers are there, but a figure or the page is not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from repo_interp import __version__
from repo_interp.errors import InputError

COMMANDS = ("analyze", "inspect", "fetch", "train", "train steps", "score", "zoo", "figures", "compare")
"""Commands; of those with two words, the second names the module."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = _joined(list(sys.argv[1:] if arguments is None else arguments))
    parsed = _parser(given).parse_args(given)
    # Libraries must neither look for a network nor talk over our progress bars; a hub id still goes to the hub.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        return _module(parsed.command).run(parsed)
    except InputError as error:
        sys.stderr.write(f"repo-interp {parsed.command}: {error}\n")
        return 2
    except KeyboardInterrupt as interruption:
        reason = f": {interruption}" if str(interruption) else ""
        sys.stderr.write(f"repo-interp {parsed.command}: interrupted{reason}\n")
        return 130
    except SystemExit as end:  # ours return a code
        sys.stderr.write(
            f"repo-interp {parsed.command}: code of another package called sys.exit({end.code!r}); nothing was finished\n"
        )
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _joined(given: list[str]) -> list[str]:
    """`given` with a command of two words as one; `steps` alone is what `train steps` was called before."""
    if given[:2] == ["train", "steps"]:
        return ["train steps", *given[2:]]
    return ["train steps", *given[1:]] if given[:1] == ["steps"] else given


def _module(command: str) -> Any:
    return import_module(f"repo_interp.cli.{command.split()[-1]}")


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="repo-interp",
        description="A microscope for token positions in attention: RePo, RoPE, NoPE and their relatives.",
    )
    parser.add_argument("--version", action="version", version=f"repo-interp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = _module(name)
        module.add_arguments(commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY))
    return parser
