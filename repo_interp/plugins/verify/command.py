"""`repo-interp verify A [B]`: compare a model's rotation with its configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from repo_interp.cli.arguments import reader_of
from repo_interp.errors import InputError

SUMMARY = (
    "Audit the rotation of a checkpoint: the angle of every pair at every distance, "
    "compared with its configuration or a second checkpoint."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `repo-interp verify`.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "checkpoint",
        metavar="A",
        help="a directory, a hub id, a GGUF file, or the name of a zoo checkpoint",
    )
    parser.add_argument(
        "other",
        metavar="B",
        nargs="?",
        help="the same model in another form, whose rotation, queries and keys are compared; or a "
        ".npz or .safetensors file with cos and sin [token, column], or q and q_rotated "
        "[head, token, entry], as another runtime computes them",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="precision of the tables (default: float32); with it the model also reads one text at "
        "several offsets, where rotation should change nothing",
    )
    parser.add_argument(
        "--cache",
        metavar="FILE",
        help="a .npz with keys_L [kv_head, slot, entry] of every layer L of a key-value cache: find "
        "the position of every key",
    )
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help="the token ids that the cache was made of, a JSON list; or a .jsonl of one prompt, whose "
        "position_ids may be [time, height, width] of every token",
    )
    parser.add_argument(
        "--longest",
        type=reader_of(Annotated[int, Interval(ge=1, le=1 << 24)]),
        metavar="N",
        help="the last distance in tokens (default: twice the training length)",
    )
    parser.add_argument("--out", metavar="DIR", help="write rotation.png and rotation.nc there")


def run(arguments: argparse.Namespace) -> int:
    """Compare the rotation of a model with its configuration, and print findings.

    Args:
        arguments: Parsed options.

    Returns:
        1 if there is a finding, else 0.

    Raises:
        InputError: A name, a path or a file is refused.
    """
    from repo_interp.cli.checkpoint import find_checkpoint, find_readable
    from repo_interp.runtime.console import Console, bold
    from repo_interp.storage.files import require_directory, require_writable

    # Checked before minutes of measuring; the directory is not created yet.
    if arguments.out is not None:
        require_directory(Path(arguments.out))
        require_writable(Path(arguments.out))
    if (arguments.cache is None) != (arguments.tokens is None):
        raise InputError("--cache and --tokens belong together; give both, or neither")
    if arguments.cache is not None:
        return _verify_cache(arguments)
    console = Console()
    named = [arguments.checkpoint, *([arguments.other] if arguments.other else [])]
    for name in named:
        if Path(name).suffix in (".npz", ".safetensors") and not Path(name).is_file():
            raise InputError(f"there is no file {name}; wanted tables, or a checkpoint's directory")
        # The reader of tables or GGUF files gives a better message for an existing file.
        if not Path(name).is_file():
            find_readable(name)
    # Printed before the import of torch, which takes seconds.
    console.print(f"auditing {' and '.join(named)} on cpu")
    from repo_interp.plugins.verify.audit import verify

    tree = verify(
        *(find_checkpoint(name) for name in named), dtype=arguments.dtype, longest=arguments.longest
    )
    audited = tree.to_dataset()
    findings = audited.attrs["findings"].splitlines()
    for finding in findings:
        console.print(finding, style="yellow", soft_wrap=True)
    # Pairs that do not rotate have frequency 0.
    turning = int((audited["frequency"] > 0).any("component").sum())
    console.print(
        bold(
            arguments.checkpoint,
            f"  {audited.sizes['layer']} layers with attention, {turning} of them rotate; "
            "distances 1 to "
            f"{audited.attrs['longest']:,} in {audited.attrs['dtype']} on {audited.attrs['device']}; "
            + (
                f"largest error {float(audited['largest_error'].max()):.2g} rad; "
                if turning
                else "so no angle was compared; "
            )
            + f"{len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}",
        )
    )
    if "offsets" in tree.children:
        ran = tree.children["offsets"].to_dataset()
        console.print(_offsets(ran, audited.attrs["dtype"]), soft_wrap=True)
    console.print(f"not compared: {audited.attrs['not_compared']}", soft_wrap=True)
    if arguments.out is not None:
        from repo_interp.plots.style import save_figure
        from repo_interp.plugins.verify.figure import rotation_errors
        from repo_interp.run import write_netcdf

        directory = Path(arguments.out)
        directory.mkdir(parents=True, exist_ok=True)
        write_netcdf(tree, directory / "rotation.nc")
        for path in save_figure(rotation_errors(audited), directory / "rotation"):
            console.print(bold(path))
    # The command did not fail, but scripts need the exit code to notice a finding.
    return 1 if findings else 0


def _offsets(ran: Any, dtype: str) -> str:
    """Describe the change of the loss of a text over offsets."""
    if "left_out" in ran.attrs:
        return f"no text was read at offsets: {ran.attrs['left_out']}"
    losses = ", ".join(
        f"{loss:.5f} at {offset:,}"
        for offset, loss in zip(ran["offset"].values, ran["loss"].values, strict=True)
    )
    return (
        f"{ran.attrs['tokens']} tokens at offsets in {dtype}: loss {losses}; largest change of a "
        f"logit {float(ran['largest_change'].max()):.2g}"
    )


def _verify_cache(arguments: argparse.Namespace) -> int:
    """Print the positions of the keys of a cache."""
    from repo_interp.cli.checkpoint import find_checkpoint, find_readable
    from repo_interp.runtime.console import Console, bold

    if arguments.other is not None:
        raise InputError(f"--cache is compared with one checkpoint; leave out {arguments.other}")
    for file in (arguments.cache, arguments.tokens):
        if not Path(file).is_file():
            raise InputError(f"there is no file {file}; wanted the keys of a cache and its tokens")
    find_readable(arguments.checkpoint)
    console = Console()
    console.print(f"auditing {arguments.cache} with {arguments.checkpoint} on cpu")
    from repo_interp.models.load import open_model
    from repo_interp.plugins.verify_cache.cache_audit import verify_cache
    from repo_interp.plugins.verify_cache.cached_keys import read_prompt

    tokens = read_prompt(Path(arguments.tokens))
    model = open_model(find_checkpoint(arguments.checkpoint), dtype=arguments.dtype or "float32")
    audited = verify_cache(model, tokens, arguments.cache)
    findings = audited.attrs["findings"].splitlines()
    for finding in findings:
        console.print(finding, style="yellow", soft_wrap=True)
    for line in audited.attrs["cannot_tell"].splitlines():
        console.print(f"cannot tell, {line}", soft_wrap=True)
    console.print(
        bold(
            arguments.cache,
            f"  {audited.sizes['slot']} slots in {audited.sizes['layer']} layers; "
            f"{audited.attrs['verdict']}",
        ),
        soft_wrap=True,
    )
    console.print(f"not compared: {audited.attrs['not_compared']}")
    if arguments.out is not None:
        from repo_interp.run import write_netcdf

        Path(arguments.out).mkdir(parents=True, exist_ok=True)
        write_netcdf(audited, Path(arguments.out) / "cache.nc")
        console.print(bold(Path(arguments.out) / "cache.nc"))
    return 1 if findings else 0
