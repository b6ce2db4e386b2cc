"""`repo-interp explore [CHECKPOINT | RUN]`: change positions in a page of the browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repo_interp.cli.arguments import add_device, load_kwargs
from repo_interp.cli.checkpoint import DEFAULT, find_checkpoint, find_readable
from repo_interp.cli.scheme_files import add_scheme_files, read_scheme_files
from repo_interp.errors import InputError

if TYPE_CHECKING:
    import xarray as xr

    from repo_interp.models.decoder import Decoder

SUMMARY = (
    "Explore a checkpoint in the browser: change positions, frequencies and outputs of heads, and "
    "see attention, the answer and the continuation follow."
)
PORT = 8947
"""Default port of the page; another one is chosen if this one is taken."""
PROMPTS = 8
"""Prompts of the task that a checkpoint was trained on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `repo-interp explore`.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "what",
        metavar="CHECKPOINT | RUN",
        nargs="?",
        default=DEFAULT,
        help="a directory, a hub id, a GGUF file, or the name of a zoo checkpoint; or a "
        "run.nc or its directory, whose prompts and table of heads "
        f"are shown (default: {DEFAULT})",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="CHECKPOINT",
        help="directory of the checkpoint of a RUN, if its name does not lead there",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts.jsonl, or plain text (default: prompts of the task it was trained on)",
    )
    parser.add_argument(
        "--against",
        metavar="CHECKPOINT",
        help="another checkpoint, to compare with over the same texts",
    )
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help=f"port on this machine (default: {PORT}, or a free one)",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address and open no browser"
    )
    add_device(parser)
    add_scheme_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load, print the address, and answer until interrupted.

    Args:
        arguments: Parsed options.

    Returns:
        0.

    Raises:
        InputError: starlette or uvicorn is not installed, or the checkpoint or the run does not
            load.
    """
    from importlib.util import find_spec

    # find_spec imports nothing: importing both takes time.
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise InputError(
            f"{missing[0]} is not installed, and explore needs it; pip install "
            "'repo-interp[explore]'"
        )
    arguments.scheme = read_scheme_files(arguments.scheme)
    # Before the imports below, which take seconds
    given = _given(arguments)
    import threading
    import webbrowser

    from repo_interp.explorer.server import HOST, kept_token, listening, server
    from repo_interp.runtime.console import Console, bold

    # The port is taken before the model is loaded, so that a port in use is refused at once.
    place = _listen(listening, arguments.port)
    with place:
        (explored, source), token, console = _explored(arguments, given), kept_token(), Console()
        # The token keeps other users and pages of this machine from the explorer.
        address = f"http://{HOST}:{place.getsockname()[1]}/{token}/"
        device = explored.decoder.device
        console.print(
            bold(address, f"  the explorer, for this machine alone, on {device}; Ctrl-C ends it"),
            soft_wrap=True,
        )
        console.print(f"prompts from {source}")
        if not arguments.no_browser:
            # In a thread: some browsers hold the call until they are closed.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        server(explored, token, place).run(sockets=[place])
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"wanted a port from 1 to 65535, not {text[:80]!r}")
    return int(text)


def _listen(listening: Any, port: int | None) -> Any:
    if port is not None:
        return listening(port)
    try:
        return listening(PORT)
    except InputError:
        return listening(None)


class _Given(NamedTuple):
    """The explored model: path of the checkpoint, its name, and a run."""

    path: str
    name: str
    measured: xr.DataTree | None


def _given(arguments: argparse.Namespace) -> _Given:
    """Find the checkpoint and the run without torch.

    Raises InputError if one of them, the second checkpoint or the prompts cannot be read.
    """
    from repo_interp.checkpoint_files.directories import known_directory
    from repo_interp.checkpoint_files.shipped import means_zoo, zoo_path
    from repo_interp.run import read_run
    from repo_interp.tasks.prompt.jsonl import require_readable

    load_kwargs(arguments)
    if arguments.against is not None:
        find_readable(arguments.against)
    if arguments.prompts is not None:
        require_readable(arguments.prompts)
    given = Path(arguments.what)
    # A run's file or its directory; any other directory is a checkpoint.
    is_run = given.suffix == ".nc" or (given / "run.nc").is_file()
    measured = read_run(given) if is_run else None
    if measured is None and arguments.checkpoint is not None:
        raise InputError(
            f"--checkpoint is of a run, and {arguments.what} is a checkpoint; leave it out"
        )
    named = arguments.checkpoint or (
        arguments.what if measured is None else str(measured.attrs.get("checkpoint", ""))
    )
    # A run may be from another machine, so it may name a checkpoint of the package, but no folder.
    if measured is None or arguments.checkpoint is not None:
        path = find_readable(named)
    elif (path := str(zoo_path(named) if means_zoo(named) else known_directory(named) or "")) == "":
        raise InputError(
            f"the run was measured on {named or 'a model made in memory'}, and a run does "
            "not choose which folder is read; "
            "name it with --checkpoint"
        )
    return _Given(path, named, measured)


def _explored(arguments: argparse.Namespace, given: _Given) -> tuple[Any, str]:
    """Return the explored model, and the origin of its prompts.

    Raises InputError if the checkpoint or the prompts cannot be read, or do not belong to the
    run.
    """
    from repo_interp.cli.threads import use_threads
    from repo_interp.explorer.explored import Explored
    from repo_interp.explorer.explored_run import prompts_in
    from repo_interp.explorer.same_texts import over_the_same_texts
    from repo_interp.models.decoder import as_decoder
    from repo_interp.models.load import open_model
    from repo_interp.tasks.prompt.jsonl import read_prompts

    path, named, measured = given
    bridge = open_model(path, **load_kwargs(arguments))
    use_threads(bridge, arguments.threads)
    decoder = as_decoder(bridge)
    origin = decoder.origin
    if (
        measured is not None
        and origin is not None
        # By digest: a checkpoint of the same name may have been trained on.
        and measured.attrs.get("checkpoint_digest") not in (None, origin.digest)
    ):
        raise InputError(
            f"{named} has other weights than the checkpoint that the run was measured on; "
            "name that one with --checkpoint"
        )
    if arguments.prompts is not None:
        prompts = read_prompts(
            arguments.prompts, tokenizer=decoder.tokenizer, vocab_size=bridge.config.vocab_size
        )
        source = f"the file {Path(arguments.prompts).name}"
    else:
        # A run keeps its prompts, over which its numbers can be compared with the page.
        prompts, source = (
            _default_prompts(decoder, path)
            if measured is None
            else (prompts_in(measured), "the run")
        )
    explored = Explored(bridge, prompts, named, measured)
    if arguments.against is None:
        return explored, source
    return over_the_same_texts(
        explored,
        open_model(find_checkpoint(arguments.against), **load_kwargs(arguments)),
        arguments.against,
    ), source


def _default_prompts(decoder: Decoder, path: str) -> tuple[list[Any], str]:
    """Return prompts of the checkpoint's task, else one text of the library, and their origin."""
    from repo_interp.analysis.defaults import default_prompts, origin_of
    from repo_interp.analysis.trained_task import trained_name
    from repo_interp.tasks import Prompt
    from repo_interp.tasks.short_text import TOKENS

    # Without a tokenizer or a task no text can be made, but token ids still show positions.
    if decoder.tokenizer is None and trained_name(path) is None:
        return [
            Prompt(tuple(range(min(TOKENS, decoder.training_length))))
        ], "the first tokens of the vocabulary"
    prompts, task = default_prompts(decoder, PROMPTS)
    return prompts, origin_of(task)
