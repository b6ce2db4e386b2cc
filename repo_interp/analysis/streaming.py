"""Any number of prompts through a model in constant memory: each batch is observed, added to what is known, and forgotten.

    total <- merge(total, observe(batch))          prompts are drawn from an iterator as they are needed

For measures whose statistics are sums (`Components(prompts="mean")`): those of single prompts would pile up. Knows nothing about
how prompts are made or what is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import xarray as xr
from torch import nn

from repo_interp.analysis.analyze import observe_batch
from repo_interp.analysis.batches import make_batches
from repo_interp.errors import InputError
from repo_interp.measures.catalogue import for_training_length
from repo_interp.measures.statistics import Measure, Statistics, merge
from repo_interp.models.provenance import length_trained
from repo_interp.models.reposition import layout
from repo_interp.run import with_schemes
from repo_interp.tasks.prompt import Prompt


def stream(
    bridge: nn.Module, prompts: Iterable[Prompt], measures: Sequence[Measure], batch_size: int = 8
) -> dict[str, xr.Dataset]:
    """What each of `measures` concludes over `prompts`, by its name: groups as `analyze` has them in a run.

    Raises InputError where there is no prompt, and for a measure that keeps something of every single one.
    """
    schemes = layout(bridge)
    chosen = [for_training_length(measure, length_trained(bridge)) for measure in measures]
    device = next(bridge.parameters()).device
    known = {measure.name: Statistics() for measure in chosen}
    source, begun = iter(prompts), 0
    while some := list(itertools.islice(source, batch_size)):
        (batch,) = make_batches(some, batch_size, device)
        batch = replace(batch, numbers=tuple(begun + number for number in batch.numbers))
        for name, found in observe_batch(bridge, batch, chosen, range(len(schemes))).items():
            if found.per_prompt.data_vars:
                raise InputError(
                    f"{name} keeps {', '.join(map(str, found.per_prompt.data_vars))} of every prompt: use analyze, or sums"
                )
            known[name] = merge([known[name], found])
        begun += len(some)
    if not begun:
        raise InputError("there are no prompts to measure")
    return {
        measure.name: with_schemes(measure.conclude(known[measure.name]), schemes).assign_attrs(dict(measure.parameters))
        for measure in chosen
    }
