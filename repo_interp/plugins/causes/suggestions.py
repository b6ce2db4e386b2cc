"""Edits of the explorer that the answer depends on most, by the experiment `effects`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from repo_interp.experiments.position_changes import default_kinds
from repo_interp.explorer.session import Head, Session
from repo_interp.explorer.session_edits import Edit
from repo_interp.models.lasting import at_rest
from repo_interp.plugins.causes.effects import Effects

MOST = 5
"""Edits that are suggested."""


def needed(session: Session, progress: Callable[[int, int], None]) -> list[tuple[Edit, float]]:
    """Find edits of one head or layer that lower the log-probability of the answer most.

    Positions become the token index where they are learned, else one constant.

    Args:
        session: Model, prompt and answer.
        progress: Function of the points that are done and of all.

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
