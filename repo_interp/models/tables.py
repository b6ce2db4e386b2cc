"""Learned absolute positions: a decoder's table of vectors, one per token index, and changes of
that index.

    h_i <- h_i + e[change(i)]

The table is ours (`reposition`, the scheme "learned") or the stock decoder's own (GPT-2's wpe,
OPT's embed_positions). Sinusoids count as none: they are computed, not learned. Knows nothing about
attention.
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
    """The module that looks up a vector per token index in a stock decoder; None where it has
    none.
    """
    tokens, config = decoder.get_input_embeddings(), decoder.config
    length = getattr(config, "max_position_embeddings", None)
    for module in decoder.modules():
        if isinstance(module, nn.Embedding) and module.weight is not tokens.weight:
            shape = (module.num_embeddings - getattr(module, "offset", 0), module.embedding_dim)
            if shape == (length, config.hidden_size):
                return module
    return None


def table_of(decoder: Any) -> Any:
    """A decoder's table of learned positions, ours or its own; None where it has none."""
    own = getattr(decoder, TABLE, None)
    return stock_table(decoder) if own is None else own


def positions_in(table: Any) -> int:
    """How many positions a table has."""
    return table.weight.shape[0] - getattr(table, "offset", 0)


def change_index(table: Any, change: Callable[[Int[Tensor, "any token"]], Tensor]) -> Any:
    """Look up `change(index)` in place of each token's index, below 0 for padding; the handle takes
    that back.

    Changed indices are rounded, and kept within the table.
    """
    names = list(inspect.signature(table.forward).parameters)
    name = next(each for each in ("index", "position_ids", "input") if each in names)

    def hook(
        module: nn.Module, arguments: tuple, keywords: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        given = dict(zip(names, arguments, strict=False)) | keywords
        index = given[name]
        changed = change(index).round().to(index.dtype).clamp(0, positions_in(table) - 1)
        return (), given | {name: changed.where(index >= 0, index)}

    return table.register_forward_pre_hook(hook, with_kwargs=True)
