"""`repo-interp inspect CHECKPOINT`: the schemes and sizes of a checkpoint, layer by layer."""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import TYPE_CHECKING

from repo_interp.cli.checkpoint import configure, find_checkpoint
from repo_interp.cli.scheme_files import add_scheme_files, read_scheme_files

if TYPE_CHECKING:
    from repo_interp.checkpoint_files.inspected import Inspection

SUMMARY = (
    "Describe a checkpoint: layers, position schemes, heads, widths of f_phi, "
    "parameters, training length."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `repo-interp inspect`.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a directory, a hub id, a GGUF file, or the name of a zoo checkpoint",
    )
    add_scheme_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table of layers, from config.json and the headers of the weights.

    The decoder is built where these do not suffice.

    Args:
        arguments: Parsed options.

    Returns:
        0.
    """
    read_scheme_files(arguments.scheme)
    from rich.table import Table

    from repo_interp.checkpoint_files.architectures import key_value_heads, training_length
    from repo_interp.checkpoint_files.inspected import inspect_checkpoint
    from repo_interp.positions.layouts import NO_ATTENTION, format_layout, meaning
    from repo_interp.runtime.console import Console, bold, on_one_line, span_of

    found = inspect_checkpoint(find_checkpoint(arguments.checkpoint), configure)
    # Only plain decoders are compared by tables; others are compared
    # with the modules of transformers.
    if not found.is_plain and found.checkpoint.directory.is_dir():
        from repo_interp.models.checkpoints import require_fitting_headers

        require_fitting_headers(found.checkpoint)
    checkpoint, config, console = found.checkpoint, found.checkpoint.config, Console()
    part = f", the text part of a {checkpoint.larger['model_type']}" if checkpoint.larger else ""
    console.print(
        bold(arguments.checkpoint, f"  {checkpoint.format} format, {config.model_type}{part}")
    )
    if found.note:
        console.print(found.note)
    console.print(
        f"layout {format_layout(checkpoint.layout)}; {config.num_hidden_layers} layers, "
        f"width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {key_value_heads(config)} key-value heads; "
        f"vocabulary {config.vocab_size}; "
        f"trained on up to {training_length(config)} tokens"
    )
    total, added = found.parameters, found.for_positions
    counts = [found.parameters_of(layer) for layer in range(len(checkpoint.layout))]
    console.print(
        f"{total:,} parameters; how many of them are for positions is not known, as a scheme is of "
        "another package or of a file"
        if None in counts
        # Relative to the model without its positions' parameters
        else f"{total:,} parameters, {added:,} of them for positions "
        f"(+{100 * added / (total - added):.2f} %)"
    )
    if checkpoint.base is not None:
        console.print(
            f"an adapter on top of {on_one_line(checkpoint.base.name)}, whose weights stay as they are"
        )
    table = Table(box=None, padding=(0, 3, 0, 0), show_edge=False)
    for column in ("layers", "scheme", "positions", "f_phi width", "parameters", "window"):
        table.add_column(column, no_wrap=True)
    # Equal neighbors share a row, so that a model of many layers stays readable.
    rows = [(layer, _cells(found, layer)) for layer in range(config.num_hidden_layers)]
    for cells, layers in groupby(rows, key=lambda layer: layer[1]):
        table.add_row(span_of([number for number, _ in layers]), *cells)
    console.print(table)
    console.print("parameters: for positions, in each layer")
    for scheme in dict.fromkeys(checkpoint.layout):
        text = (
            "a layer without attention; measures leave it out"
            if scheme == NO_ATTENTION
            else meaning(scheme)
        )
        console.print(f"{scheme}: {text}")
    return 0


def _cells(found: Inspection, layer: int) -> tuple[str, ...]:
    width, count = found.representation(layer), found.parameters_of(layer)
    return (
        found.checkpoint.layout[layer],
        found.rows(layer),
        "-" if width is None else str(width),
        # "?" is unknown, as of schemes of other packages; 0 is none.
        "?" if count is None else f"{count:,}",
        str(found.window(layer) or "-"),
    )
