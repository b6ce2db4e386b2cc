"""Counts of hooks, to see that nothing stays attached."""

from __future__ import annotations

from repo_interp.models.decoder import as_decoder


def hooks_of(model):
    """Every hook that is attached anywhere in `model`, its attention layers' observers and its hook
    sites.
    """
    modules = [*model.modules()]
    for attention in as_decoder(model).layers:
        modules += vars(attention.sites).values()
    counted = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    return sum(counted) + sum(len(attention.observers) for attention in as_decoder(model).layers)
