"""Effect of heads on the log-probability of the answer, compared with random heads.

The controls are as many other heads of the same layers. In nats:

    effect = mean over prompts of mean over targets of
             log p(target | heads ablated) - log p(target)

Targets are the generated tokens where every prompt has some, else all tokens but the first. Brings
together prompts, models and interventions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.analysis.coercion import Prompts, indexed_prompts, tokens
from repo_interp.errors import InputError, NotFinitePrediction, warn
from repo_interp.experiments.draws import distinct
from repo_interp.experiments.experiment import standard_error
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.experiments.readings import AnswerBatch
from repo_interp.intervals import half_interval
from repo_interp.interventions.ablation import HeadMeans, ablate
from repo_interp.interventions.replacing import head_pairs
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.outputs import attention_outputs
from repo_interp.tasks import Prompt
from repo_interp.values import CountOrNone, Seed, checked

if TYPE_CHECKING:
    import pandas as pd


@torch.no_grad()
def head_means(bridge: nn.Module, prompts: Prompts) -> dict[int, Float[Tensor, "head d_head"]]:
    """Return the mean output of every head over all tokens of prompts.

    For `ri.ablate(bridge, heads, means)`.

    Args:
        bridge: Bridge or Hugging Face model.
        prompts: Prompts in any form that `as_prompts` takes.

    Returns:
        By layer, means [head, d_head], float32.

    Raises:
        InputError: There are no prompts, an object is no prompt, or the model lacks a token.
    """
    decoder = as_decoder(bridge)
    sums: dict[int, Tensor] = {}
    count = 0

    def receive(layer: int, outputs: Tensor) -> None:
        # [head * d_head], over [prompt, token]; float64, since long sums of float32 lose digits
        sums[layer] = sums.get(layer, 0.0) + outputs.double().sum((0, 1))

    # One prompt a pass: padding would enter the sums, which know no mask
    for prompt in indexed_prompts(prompts, decoder.tokenizer):
        ids, valid = tokens([prompt], bridge)
        with attention_outputs(decoder, receive):
            decode(decoder, ids, valid)
        count += ids.shape[1]
    if not count:
        raise InputError("there are no prompts")
    heads = {attention.layer_idx: attention.heads for attention in decoder.layers}
    return {
        layer: (total / count).float().unflatten(0, (heads[layer], -1))
        for layer, total in sums.items()
    }


def ablation_effects(
    bridge: nn.Module,
    heads: Sequence[tuple[int, int]] | tuple[int, int],
    prompts: Prompts,
    means: HeadMeans | None = None,
    controls: int = 10,
    seed: int = 0,
) -> pd.DataFrame:
    """Ablate heads, and random controls, and return the effect on the answers of prompts.

        table = ri.ablation_effects(bridge, [(0, 0), (0, 3)], prompts)

    A control is a set of as many other heads of the same layers. All sets differ; a warning says if
    there are fewer than `controls` sets.

    Args:
        bridge: Bridge or Hugging Face model.
        heads: Pairs (layer, head), or one pair.
        prompts: Prompts in any form that `as_prompts` takes.
        means: Outputs that replace those of the heads, as for `ri.ablate`; None: zeros.
        controls: Number of random sets.
        seed: Seed of the random sets.

    Returns:
        One row for the whole model, one for `heads`, one per control: the heads, the mean
        log-probability of the targets in nats, its change (`effect`), and the standard error of the
        change over prompts. In the row of `heads`, `less_controls` is their effect less the mean
        effect of the controls, from `less_controls_low` to `less_controls_high`: the 95 % interval
        over prompts, paired; NaN without controls, and in other rows.

    Raises:
        InputError: As for `ri.ablate`, or a layer has too few other heads for a control.
    """
    decoder = as_decoder(bridge)
    import pandas as pd

    pairs, given = head_pairs(heads), indexed_prompts(prompts, decoder.tokenizer)
    tokens(given, bridge)  # refuses no prompts, and tokens that the model lacks
    sets = {"whole model": [], "ablated": pairs}
    controls, generator = (
        checked(controls, CountOrNone, "controls"),
        np.random.default_rng(checked(seed, Seed, "seed")),
    )
    # Without controls a layer may be ablated whole: only controls need heads that are left
    others = _others(decoder, pairs) if controls else {}
    # A control draws in every layer by itself, so the numbers of choices multiply
    there_are = prod(comb(len(left), count) for count, left in others.values())
    if there_are < controls:
        warn(
            f"{controls} controls were asked for, but there are {there_are} different sets "
            "of as many other heads of these layers"
        )

    def draw() -> list[tuple[int, int]]:
        chosen = {
            layer: generator.choice(left, count, replace=False)
            for layer, (count, left) in others.items()
        }
        return sorted((layer, int(head)) for layer, drawn in chosen.items() for head in drawn)

    sets |= {
        f"control {number}": drawn
        for number, drawn in enumerate(distinct(draw, there_are, controls))
    }
    # The first set is empty: the whole model, from which changes count.
    read = log_probabilities(decoder, [*sets.values()], given, means)
    # [prompt], paired: the same prompt with `heads` ablated and with controls ablated. Rows of
    # `read` are the whole model, `heads`, and then the controls
    less_controls = read[1] - read[2:].mean(0) if len(read) > 2 else np.full(1, np.nan)
    mean, reach = less_controls.mean(), half_interval(less_controls)
    rows = []
    for name, values in zip(sets, read, strict=True):
        change = values - read[0]
        error = standard_error(change)
        named = ", ".join(f"L{layer} H{head}" for layer, head in sets[name])
        rows.append(
            {
                "ablation": name,
                "heads": named,
                "log_probability": values.mean(),
                "effect": change.mean(),
                "standard_error": error,
            }
        )
    table = pd.DataFrame(rows)
    ends = {"": mean, "_low": mean - reach, "_high": mean + reach}
    for end, value in ends.items():
        table[f"less_controls{end}"] = np.where(table["ablation"] == "ablated", value, np.nan)
    return table


def log_probabilities(
    decoder: Decoder,
    sets: Sequence[list[tuple[int, int]]],
    prompts: Sequence[Prompt],
    means: HeadMeans | None = None,
) -> Float[np.ndarray, "set prompt"]:
    """Return mean log-probabilities of the targets of prompts without sets of heads.

    Args:
        decoder: Decoder of the model.
        sets: Sets of pairs (layer, head) to ablate together; a set may be empty.
        prompts: Prompts.
        means: Outputs that replace those of the heads, as for `ri.ablate`; None: zeros.

    Returns:
        Means over targets [set, prompt], in nats.

    Raises:
        InputError: As for `ri.ablate`.
        NotFinitePrediction: A log-probability is NaN or infinite.
    """
    scoring = scoring_of(prompts)
    read = np.empty((len(sets), len(prompts)))
    for number, prompt in enumerate(prompts):
        # A pass has all sets of heads side by side, so it has one prompt at a time
        batch = AnswerBatch(decoder, scoring, [prompt])
        # [set, reading, prompt]: the first reading is the log-probability
        read[:, number] = np.array(
            batch.under_edits(
                sets, lambda of_rows: ablate(decoder.module, means=means, sets=of_rows)
            )
        )[:, 0, 0]
        if not np.isfinite(read[:, number]).all():
            raise NotFinitePrediction(number)
    return read


def _others(decoder: Decoder, pairs: Sequence[tuple[int, int]]) -> dict[int, tuple[int, list[int]]]:
    """By layer of `pairs`, how many heads a control draws there, and from which."""
    counts = Counter(layer for layer, _ in pairs)
    others = {}
    for attention in decoder.attentions(sorted(counts)):
        layer, count = attention.layer_idx, counts[attention.layer_idx]
        left = [head for head in range(attention.heads) if (layer, head) not in pairs]
        if len(left) < count:
            raise InputError(
                f"a control ablates {count} other heads of layer {layer}, which has "
                f"{len(left)}; ablate fewer heads, or set controls=0"
            )
        others[layer] = (count, left)
    return others
