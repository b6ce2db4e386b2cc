"""Interventions of passes that are recomputed for a gradient (gradient checkpointing).

    node        of the graph that is being differentiated: it was made in the pass, and is numbered
    history     of a layer: the interventions that were active from each number on

A layer that runs inside backward() thus knows the interventions that were active in the original
pass, and refuses to run under others: the gradient would belong to another model. If the recomputed
function enters an intervention, it enters it again. This module knows nothing about kinds of
interventions.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _autograd

from repo_interp.errors import InputError

_KEPT = 1_000
"""Most changes of a layer in its history; graphs do not live longer."""


def backward_pass() -> int | None:
    """Return which call of backward() computes gradients in this thread at the moment.

    Returns:
        Its number; None outside of backward().
    """
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def _within_checkpoint() -> bool:
    # Non-reentrant checkpoints set hooks on saved tensors
    return _autograd._top_saved_tensors_default_hooks(True) is not None


@dataclass(frozen=True, eq=False)
class Lasting:
    """An intervention under way in a model."""

    thread: int = field(default_factory=threading.get_ident)
    backward: int | None = field(default_factory=backward_pass)
    """The call of backward() in which it was entered."""
    checkpointed: bool = field(default_factory=_within_checkpoint)
    """Whether it was entered by a function that may be computed again."""


def note_interventions(attention: Any) -> None:
    """Remember which interventions last in a layer from now on.

    Args:
        attention: The `RepositionedAttention`.
    """
    since, lasting, history = _autograd._get_sequence_nr(), _lasting(attention), attention.history
    # no node was made since the last change
    if history and history[-1][0] == since:
        history.pop()
    if lasting != (history[-1][1] if history else ()):
        history.append((since, lasting))
    del history[:-_KEPT]


def require_same_interventions(attention: Any) -> None:
    """Refuse a pass for a gradient under other interventions than those of its first computation.

    Args:
        attention: The `RepositionedAttention` that begins a pass.

    Raises:
        InputError: Others lasted.
    """
    backward = backward_pass()
    if not attention.history or backward is None:
        return
    node: Any = torch._C._current_autograd_node()
    number, lasting = node._sequence_nr(), _lasting(attention)
    lasted = next((them for since, them in reversed(attention.history) if since <= number), ())
    outer = tuple(each for each in lasting if each.backward != backward)
    # Interventions that the function entered again; the node may be from inside or outside of them.
    inner = lasted[len(lasted) - (len(lasting) - len(outer)) :]
    if lasted != outer and not (
        inner and lasted == outer + inner and all(each.checkpointed for each in inner)
    ):
        raise InputError(
            f"backward() computes layer {attention.layer_idx} again (gradient checkpointing), and "
            "not under the interventions of the forward pass; call backward() inside of the same "
            "`with`, or model.gradient_checkpointing_disable() before"
        )


def _lasting(attention: Any) -> tuple[Lasting, ...]:
    return tuple(each for each in attention.interventions if isinstance(each, Lasting))
