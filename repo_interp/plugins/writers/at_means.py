"""Positions, and the loss, with components set to their means.

    resolution   least distance at which positions of the row show the order (`kernels.order`)
    trend        sum_i (z_i - mean z) (i - mean i) / sum_i (i - mean i)^2, within prompts
    change       loss with components at their means - loss of the model, paired

The components with the largest shares are compared with the same number of random others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from repo_interp.analysis.batches import PaddedBatch
from repo_interp.intervals import half_interval
from repo_interp.measures.kernels.order import OrderSums, told_by
from repo_interp.measures.kernels.rounding import equal_within
from repo_interp.models.lasting import called_at
from repo_interp.plugins.edits.token_losses import losses_of_batch
from repo_interp.plugins.writers.stream import (
    EMBEDDING,
    MLP,
    Component,
    Means,
    Stream,
    at_mean,
)
from repo_interp.tasks import Prompt

BLOCK = 32
"""Tokens of a block of a single text, as in `try_edits`."""
READERS = ("f_phi", "all")


def choose_components(
    components: Sequence[Component],
    shares: Float[np.ndarray, " component"],
    together: int,
    draws: int,
    seed: int,
) -> tuple[list[Component], list[list[Component]]]:
    """Choose the components with the largest shares, and draw sets of the same number of others.

    Args:
        components: All components.
        shares: Share of each component.
        together: Number of components to choose.
        draws: Number of sets of others; they have the same kinds if there are enough.
        seed: Seed of the draws.

    Returns:
        The chosen components, and the drawn sets.
    """
    order = [components[place] for place in np.argsort(-shares, kind="stable")]
    writers = [one for one in order if one != EMBEDDING][:together]
    kinds = {one[1] == MLP for one in writers}
    others = [one for one in components if one != EMBEDDING and one not in writers]
    alike = [one for one in others if (one[1] == MLP) in kinds]
    # If all components of a kind are chosen, others must be of another kind.
    others = alike if len(alike) >= together else others
    random = np.random.default_rng(seed)
    picked = [random.choice(len(others), together, replace=False) for _ in range(draws)]
    return writers, [[others[place] for place in sorted(some)] for some in picked]


def components_at_means(
    stream: Stream,
    means: Means,
    prompts: Sequence[Prompt],
    batches: Sequence[PaddedBatch],
    row: int,
    sets: Sequence[Sequence[Component]],
    advance: Callable[[], None],
) -> dict[str, Float[np.ndarray, "reader removed"]]:
    """Measure resolution, trend and loss of the model, and with sets of components at their means.

    Args:
        stream: The residual stream.
        means: Means of the stream.
        prompts: All prompts.
        batches: One batch per prompt.
        row: Row of positions.
        sets: Sets of components.
        advance: Called after every pass.

    Returns:
        By name, values [reader, removed]; the first entry of `removed` is the unchanged model.
    """
    decoder, made = stream.decoder, []

    def measured(chosen: Sequence[Component], reader: str) -> tuple[float, float, np.ndarray]:
        seen: list[np.ndarray] = []

        def keep(attention: Any, positions: Tensor) -> None:
            seen.append(positions[0, row].double().cpu().numpy())

        units = []
        for batch in batches:
            with ExitStack() as edit:
                if chosen:
                    edit.enter_context(at_mean(stream, means, chosen, reader == "all"))
                edit.enter_context(called_at(decoder, "positions", keep, [stream.layer]))
                (losses,) = losses_of_batch(decoder, prompts, batch)
            units.append(losses.loss[1:])
            advance()
        if len(units) == 1:
            units = [units[0][start : start + BLOCK] for start in range(0, len(units[0]), BLOCK)]
        return *_order(seen), np.array([np.nanmean(unit) for unit in units])

    plain = measured((), "all")
    for reader in READERS:
        found = [plain, *(measured(chosen, reader) for chosen in sets)]
        changes = np.stack([losses - plain[2] for *_, losses in found])
        mean, half = changes.mean(-1), half_interval(changes)
        made.append(
            {
                "resolution": [resolution for resolution, *_ in found],
                "trend": [trend for _, trend, _ in found],
                "loss": [losses.mean() for *_, losses in found],
                "change": mean,
                "change_low": mean - half,
                "change_high": mean + half,
            }
        )
    return {name: np.array([one[name] for one in made], dtype=float) for name in made[0]}


def _order(positions: Sequence[Float[np.ndarray, " token"]]) -> tuple[float, float]:
    """Resolution in tokens, as in the measure `position_sources`, and slope per token."""
    sums, rise, spread = 0, 0.0, 0.0
    for z in positions:
        values = torch.from_numpy(z)[None]
        present = torch.ones((1, 1, len(z)), dtype=torch.bool)
        tokens, equal = np.array([len(z)]), equal_within(values)
        sums = sums + told_by(values[None], present, tokens, equal)[1].numpy()
        index = np.arange(len(z)) - (len(z) - 1) / 2
        rise, spread = rise + float(z @ index), spread + float(index @ index)
    return float(OrderSums(*sums).resolution[0]), rise / spread  # pyright: ignore[reportGeneralTypeIssues]


def component_name(component: Component) -> str:
    """Return the name of a component: `L5 H3`, `L5 MLP` or `embedding`.

    Args:
        component: Layer and head.

    Returns:
        The name.
    """
    layer, head = component
    if component == EMBEDDING:
        return "embedding"
    return f"L{layer} MLP" if head == MLP else f"L{layer} H{head}"
