"""Passes that are computed again for a gradient (gradient checkpointing), by which interventions.

    node        of the graph that is differentiated now; it was made in the pass, and has a number
    history     of a layer: from which number on which interventions lasted

So a layer that runs inside backward() knows what lasted in the pass whose gradient is computed, and
refuses to run under anything else: its gradient would be another model's. Knows nothing about kinds
of interventions.
"""

from __future__ import annotations

from typing import Any

import torch

from repo_interp.errors import InputError

_KEPT = 10_000
"""Changes of a layer that are remembered; graphs do not live that long."""


def note_interventions(attention: Any) -> None:
    """Remember which interventions last in a layer from now on.

    Args:
        attention: The `RepositionedAttention`.
    """
    since, lasting, history = _next_number(), _lasting(attention), attention.history
    # no node was made since the last change
    if history and history[-1][0] == since:
        history.pop()
    if lasting != (history[-1][1] if history else ()):
        history.append((since, lasting))
    del history[:-_KEPT]


def require_same_interventions(attention: Any) -> None:
    """Refuse a pass for a gradient under other interventions than those of its first computation.

    Args:
        attention: The `RepositionedAttention` whose pass begins.

    Raises:
        InputError: Others lasted.
    """
    if not attention.history or backward_pass() is None:
        return
    node: Any = torch._C._current_autograd_node()
    number = node._sequence_nr()
    lasted = next((them for since, them in reversed(attention.history) if since <= number), ())
    if lasted != _lasting(attention):
        raise InputError(
            f"backward() computes layer {attention.layer_idx} again (gradient checkpointing), and "
            "not under the interventions of the forward pass; call backward() inside of the same "
            "`with`, or model.gradient_checkpointing_disable() before"
        )


def backward_pass() -> int | None:
    """Return which call of backward() computes gradients in this thread at the moment.

    Returns:
        Its number; None outside of backward().
    """
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def _lasting(attention: Any) -> tuple[int, ...]:
    return tuple(
        lasting.number for lasting in attention.interventions if hasattr(lasting, "number")
    )


def _next_number() -> int:
    """Number of the next node that autograd makes in this thread."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
