"""Suggested edits for the explorer: the edits with the largest `effects` on the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from repo_interp.experiments.position_changes import default_kinds
from repo_interp.explorer.session import Head, Session
from repo_interp.explorer.session_edits import Edit
from repo_interp.models.lasting import at_rest
from repo_interp.plugins.causes.effects import Effects

MOST = 5
"""Most suggested edits."""


def needed(session: Session, progress: Callable[[int, int], None]) -> list[tuple[Edit, float]]:
    """Find the edits of one head or layer that lower the log-probability of the answer most.

    An edit replaces learned positions by the token index, and other positions by a constant.

    Args:
        session: Model, prompt and answer.
        progress: Called with the number of finished points and of all points.

    Returns:
        Up to `MOST` edits with their effects in nats.

    Raises:
        InputError: No layer assigns positions.
    """
    kind: Any = default_kinds(session.decoder)[0]
    with at_rest(session.decoder):
        # One draw: suggestions are ranked, not tested against controls
        effects = Effects((kind,), draws=1).measured(
            session.decoder, session.scoring, [session.prompt], progress=progress
        )
    group = effects.isel(kind=0)
    layers: list[int] = group["layer"].values.tolist()
    heads: list[Head] = [
        (layer, head) for layer in layers for head in group["head"].values.tolist()
    ]
    changes = [Edit(kind=kind, layer=layer) for layer in layers] + [
        Edit(kind=kind, heads=(head,)) for head in heads
    ]
    lost = [
        *group["layer_effect"].values.tolist(),
        *group["effect"].transpose("layer", "head").values.ravel().tolist(),
    ]
    # NaN where no head was measured
    found = [(edit, change) for edit, change in zip(changes, lost, strict=True) if change < 0]
    return sorted(found, key=lambda pair: pair[1])[:MOST]
