"""`repo-interp inspect CHECKPOINT`: what a checkpoint is, layer by layer."""

from __future__ import annotations

import argparse
from itertools import groupby

from repo_interp.cli.checkpoint import find

SUMMARY = "Describe a checkpoint: layers, position schemes, heads, widths of f_phi, parameters, training length."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory, a hub id, or the name of a zoo checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, from config.json and the headers of the weights: what does not fit the layout is refused here too."""
    from rich.table import Table

    from repo_interp.cli.console import Console, bold, plain
    from repo_interp.cli.tables import span_of
    from repo_interp.models.architectures import training_length
    from repo_interp.models.checkpoints import inspected
    from repo_interp.models.reposition import added_parameters, attentions
    from repo_interp.positions.layouts import format_layout, meaning

    checkpoint, model = inspected(find(arguments.checkpoint))
    model.tie_weights()  # so that an embedding that is the unembedding too counts once
    config, console = checkpoint.config, Console()
    total, added = sum(parameter.numel() for parameter in model.parameters()), added_parameters(model)
    console.print(
        bold(arguments.checkpoint, f"  {checkpoint.format} format, {config.model_type}"),
        highlight=False,
    )
    console.print(
        f"layout {format_layout(checkpoint.layout)}; {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {config.num_key_value_heads} key-value heads; vocabulary {config.vocab_size}; "
        f"trained on up to {training_length(config)} tokens",
        highlight=False,
    )
    console.print(
        f"{total:,} parameters, {added:,} of them for positions (+{100 * added / (total - added):.2f} %)",
        highlight=False,
    )
    if checkpoint.base is not None:
        console.print(f"an adapter on top of {plain(checkpoint.base.name)}, whose weights stay as they are", highlight=False)
    table = Table(box=None, padding=(0, 3, 0, 0), show_edge=False)
    for column in ("layers", "scheme", "positions", "f_phi width", "parameters", "window"):
        table.add_column(column, no_wrap=True)
    described = [(attention.layer_idx, _cells(attention, config)) for attention in attentions(model)]
    for cells, layers in groupby(described, key=lambda layer: layer[1]):
        table.add_row(span_of([number for number, _ in layers]), *cells)
    console.print(table)
    console.print("parameters: for positions, in each layer", highlight=False)
    for scheme in dict.fromkeys(checkpoint.layout):
        console.print(f"{scheme}: {meaning(scheme)}", highlight=False)
    return 0


def _cells(attention, config) -> tuple[str, ...]:
    from repo_interp.positions.assigners import LearnedPositions

    parts = [part for part in (attention.assigner, attention.position_logits) if part is not None]
    return (
        attention.scheme,
        _rows(attention, config),
        str(attention.assigner.representation) if isinstance(attention.assigner, LearnedPositions) else "-",
        f"{sum(parameter.numel() for part in parts for parameter in part.parameters()):,}",
        str(attention.sliding_window or "-"),
    )


def _rows(attention, config) -> str:
    if attention.assigner is None:
        return "counted by gates" if attention.position_logits is not None else "none"
    last = getattr(attention.assigner, "final_map", None) or getattr(attention.assigner, "dynamic_map", None)
    if last is None or last.out_features == 1:
        return "one for all heads"
    return "one per head" if last.out_features == config.num_attention_heads else "one per key-value head"
