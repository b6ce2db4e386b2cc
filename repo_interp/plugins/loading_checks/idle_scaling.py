"""Warn of a scaling of frequencies that some layers, or all, do not turn by."""

from __future__ import annotations

from repo_interp.errors import warn
from repo_interp.models.decoder import Decoder
from repo_interp.models.rescaling import IdleScaling, scaling_remark


def warn_of_idle_scaling(decoder: Decoder) -> None:
    """Warn, with an `IdleScaling`, where the scaling that was asked for changes nothing.

    Args:
        decoder: Decoder of a model that was loaded.
    """
    if decoder.origin is not None and (idle := scaling_remark(decoder, decoder.origin.scaling)):
        warn(idle, IdleScaling)
