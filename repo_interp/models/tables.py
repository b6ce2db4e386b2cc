"""Learned absolute positions: a decoder's table of vectors, one per token index, and its changes.

    h_i <- h_i + e[change(i)]

The table is ours (`reposition`, the scheme "learned") or the stock decoder's (GPT-2's wpe, OPT's
embed_positions). Sinusoids count as none: they are computed, not learned. This module knows nothing
about attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

TABLE = "position_table"
"""Name of the table that `reposition` gives to a decoder."""


def stock_table(decoder: Any) -> nn.Embedding | None:
    """Find the table of learned positions of a stock decoder.

    Args:
        decoder: Model of Hugging Face without its unembedding.

    Returns:
        The module that looks up a vector per token index; None without one.
    """
    config = decoder.config.get_text_config()
    try:
        tokens = decoder.get_input_embeddings()
    except NotImplementedError:  # a decoder of BART's kind
        return None
    length = getattr(config, "max_position_embeddings", None)
    for module in decoder.modules():
        # By shape, as names differ by family; a vocabulary as large as the context must not match.
        if isinstance(module, nn.Embedding) and module.weight is not tokens.weight:
            # OPT keeps two more vectors than positions, its offset.
            shape = (module.num_embeddings - getattr(module, "offset", 0), module.embedding_dim)
            if shape == (length, config.hidden_size):
                return module
    return None


def position_table(decoder: Any) -> Any:
    """Find a decoder's table of learned positions, ours or the stock one.

    Args:
        decoder: Model of Hugging Face without its unembedding.

    Returns:
        The table; None without one.
    """
    table = getattr(decoder, TABLE, None)
    return stock_table(decoder) if table is None else table


def positions_in(table: Any) -> int:
    """Count the positions of a table.

    Args:
        table: Table of learned positions.

    Returns:
        Number of positions.
    """
    return table.weight.shape[0] - getattr(table, "offset", 0)


def change_index(table: Any, change: Callable[[Int[Tensor, "any token"]], Tensor]) -> Any:
    """Look up vectors by changed token indices, rounded and kept within the table.

    Args:
        table: Table of learned positions.
        change: Maps indices [any, token], below 0 for padding, to new ones.

    Returns:
        A handle; its `remove` ends the change.
    """
    names = list(inspect.signature(table.forward).parameters)
    # Ours calls it index, OPT position_ids, and nn.Embedding (GPT-2) input.
    name = next(taken for taken in ("index", "position_ids", "input") if taken in names)

    def hook(
        module: nn.Module, arguments: tuple, keywords: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        given = dict(zip(names, arguments, strict=False)) | keywords
        index = given[name]
        # Changed positions may be any numbers; the table holds whole ones up to its end.
        changed = change(index).round().to(index.dtype).clamp(0, positions_in(table) - 1)
        # Negative indices mark padding, which the table handles itself.
        return (), given | {name: changed.where(index >= 0, index)}

    return table.register_forward_pre_hook(hook, with_kwargs=True)
