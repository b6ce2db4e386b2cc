"""`repo-interp inspect CHECKPOINT`: what a checkpoint is, layer by layer."""

from __future__ import annotations

import argparse

SUMMARY = "Show what a checkpoint is: layers, position schemes, heads, widths of f_phi, parameters, training length."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory, a hub id, or the name of a zoo checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Print the table. The weights are loaded, so that a checkpoint that does not fit its layout is refused here too."""
    from rich.console import Console
    from rich.table import Table

    from repo_interp.cli.checkpoint import find
    from repo_interp.models.checkpoints import identify, load_model
    from repo_interp.models.families import training_length
    from repo_interp.models.reposition import added_parameters, attentions
    from repo_interp.positions.assigners import LearnedPositions
    from repo_interp.positions.layouts import format_layout, meaning

    checkpoint = identify(find(arguments.checkpoint))
    model = load_model(checkpoint)
    config, console = checkpoint.config, Console()
    total, added = sum(parameter.numel() for parameter in model.parameters()), added_parameters(model)
    console.print(
        f"[bold]{arguments.checkpoint}[/bold]  {checkpoint.format} format, {config.model_type}",
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
    table = Table("layer", "scheme", "positions", "width of f_phi", "parameters for positions", "window", "what it is")
    for attention in attentions(model):
        parts = [part for part in (attention.assigner, attention.position_logits) if part is not None]
        own = [parameter for part in parts for parameter in part.parameters()]
        table.add_row(
            str(attention.layer_idx),
            attention.scheme,
            _rows(attention, config),
            str(attention.assigner.representation) if isinstance(attention.assigner, LearnedPositions) else "-",
            f"{sum(parameter.numel() for parameter in own):,}",
            str(attention.sliding_window or "-"),
            meaning(attention.scheme),
        )
    console.print(table)
    return 0


def _rows(attention, config) -> str:
    if attention.assigner is None:
        return "counted by gates" if attention.position_logits is not None else "none"
    last = getattr(attention.assigner, "final_map", None) or getattr(attention.assigner, "dynamic_map", None)
    if last is None or last.out_features == 1:
        return "one for all heads"
    return "one a head" if last.out_features == config.num_attention_heads else "one a key-value head"
