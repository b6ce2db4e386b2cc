"""Direct logit attribution: the part of each component in the difference of two logits.

    logit(for) - logit(against) = sum_c G . c + biases       c: embedding, heads, MLPs
    G = r N (u_for - u_against)

The last residual stream is the sum of the outputs of all components (Elhage et al. 2021). N is the
final norm with its factor frozen at its value in the pass, so the sum is exact; u are rows of the
unembedding, and r is the factor of the logits. The part of an MLP is everything that its layer adds
besides the heads, including the MLP's biases. `biases` are those of output projections, norms and
the unembedding. A soft cap of the logits is not linear: its effect, and rounding, are in
`remainder`. Wang et al. (2023) read the heads of indirect object identification this way.

Effects through later layers are not included; `ablate_paths` measures these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from repo_interp.analysis.batches import PaddedBatch
from repo_interp.analysis.coercion import Prompts
from repo_interp.errors import InputError
from repo_interp.intervals import half_interval
from repo_interp.measures.labels import described_group
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.models.observing import entering
from repo_interp.models.outputs import attention_outputs
from repo_interp.models.side_by_side import BatchSize
from repo_interp.plugins.edits.token_losses import checked_prompts, prompt_batches
from repo_interp.plugins.paths.answers import Answer, asked_tokens, compared_tokens
from repo_interp.plugins.paths.direct_path import DirectPath, direct_path
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.store import Progress

NAMED = 3
"""Components that the finding names."""
_TEXTS = {
    "heads": "what a head adds to the logit difference",
    "mlps": "what an MLP adds to the logit difference",
    "embedding": "what the embedding adds to the logit difference",
    "biases": "what biases add to the logit difference",
    "logit_difference": "logit of the answer less that of the other",
    "remainder": "logit difference less all parts: soft cap and rounding",
}
_AXES = {"heads": ("prompt", "layer", "head"), "mlps": ("prompt", "layer")}


@torch.no_grad()
def direct_logits(
    model: nn.Module,
    prompts: Prompts,
    for_: Answer,
    against: Answer,
    *,
    batch_size: BatchSize | Literal["auto"] = "auto",
    progress: Progress | None = None,
) -> xr.Dataset:
    """Split the logit difference of two answers into parts of heads, MLPs and the embedding.

        found = ri.direct_logits(model, texts, [" Mary", " Tom"], [" John", " James"])
        print(found.attrs["finding"])
        ri.plots.direct_logits(found)

    Args:
        model: Bridge or model.
        prompts: Prompts in any form that `analysis.coercion` takes; the answer is read after the last
            token, or instead of the first generated one.
        for_: Right answer: a text of one token or its number, for all prompts or for each.
        against: The answer to compare it with.
        batch_size: Number of prompts per forward pass, its limits, or "auto".
        progress: Called with prompts done and in all; None: a bar on standard error.

    Returns:
        `heads [prompt, layer, head]`, `mlps [prompt, layer]`, `embedding`, `biases`, `remainder`
        and `logit_difference [prompt]`, in logits; the last is the sum of the others. Each also has
        its mean over prompts (`heads_mean [layer, head]`) and the 95 % interval of the mean
        (`heads_low` to `heads_high`). NaN in layers without heads. The attribute `finding` is a
        sentence.

    Raises:
        InputError: An answer is not a token of the model, both are the same in a prompt, or the
            family does not add the outputs of heads to one residual stream.
    """
    decoder = as_decoder(model)
    prompt_list = checked_prompts(decoder, prompts)
    right, wrong = compared_tokens(decoder, for_, against, len(prompt_list))
    rows = torch.tensor(asked_tokens(prompt_list), device=decoder.device)
    parts: dict[int, dict[str, np.ndarray]] = {}
    with steps(Console(stderr=True)) as step, direct_path(decoder) as path:
        _require_one_stream(decoder, path)
        tell = partial(step, "taking apart") if progress is None else progress
        for batch in prompt_batches(decoder, prompt_list, batch_size):
            some = torch.tensor(batch.numbers, device=decoder.device)
            found = _taken_apart(path, batch, rows[some], right[some], wrong[some])
            for place, number in enumerate(batch.numbers):
                parts[number] = {name: value[place] for name, value in found.items()}
            tell(len(parts), len(prompt_list))
    values: dict[str, Any] = {}
    for name in _TEXTS:
        axes = _AXES.get(name, ("prompt",))
        whole = np.stack([parts[number][name] for number in range(len(prompt_list))])
        mean, half = whole.mean(0), half_interval(np.moveaxis(whole, 0, -1))
        values[name] = axes, whole
        ends = {"mean": mean, "low": mean - half, "high": mean + half}
        values |= {f"{name}_{end}": (axes[1:], value) for end, value in ends.items()}
    texts = {
        f"{name}{end}": f"{words}{text} [logits]"
        for name, words in _TEXTS.items()
        for end, text in (
            ("", ""),
            ("_mean", ", mean over prompts"),
            ("_low", ", lower end of the 95 % interval of the mean"),
            ("_high", ", upper end of the 95 % interval of the mean"),
        )
    }
    heads = parts[0]["heads"].shape[1]
    coordinates = {"layer": np.arange(decoder.layer_count), "head": np.arange(heads)}
    group = described_group(values, texts, {"prompt": np.arange(len(prompt_list)), **coordinates})
    return group.assign_attrs(prompts=len(prompt_list), finding=_finding(group))


def _require_one_stream(decoder: Decoder, path: DirectPath) -> None:
    """Refuse models whose attention outputs are not added to the stream that is unembedded."""
    blocks = list(decoder.blocks)
    for attention in decoder.layers:
        layer = attention.layer_idx
        inside = layer < len(blocks) and attention.module in [*blocks[layer].modules()]
        if not inside or layer not in path.layers:
            raise InputError(
                f"layer {layer} of this {decoder.config.model_type} adds no outputs of heads to one "
                "residual stream, so the contributions of single heads to a logit are unknown"
            )


def _taken_apart(
    path: DirectPath, batch: PaddedBatch, rows: Tensor, right: Tensor, wrong: Tensor
) -> dict[str, np.ndarray]:
    """Split the logit differences of the prompts of a batch into parts, float64."""
    decoder, moved, entered = path.decoder, dict[int, Tensor](), list[Tensor]()
    places = torch.arange(len(rows), device=rows.device), rows

    def keep(store: Callable[[Tensor], object], tensor: Tensor) -> None:
        store(tensor[places].float())

    def attended(layer: int, outputs: Tensor) -> None:
        keep(partial(moved.__setitem__, layer), outputs)

    with entering(decoder, partial(keep, entered.append)), attention_outputs(decoder, attended):
        hidden = decode(
            decoder,
            batch.tokens,
            batch.valid,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
        )
    assert path.last is not None and path.final is not None
    keep(entered.append, path.last)
    path.values.clear()
    vectors = (path.unembedding[right] - path.unembedding[wrong]).float()
    directions = path.directions(vectors, places)
    # Cumulative: the part of all components before a layer [layer, prompt]
    along = torch.stack([(stream * directions).double().sum(-1) for stream in entered])
    counts = {attention.layer_idx: attention.heads for attention in decoder.layers}
    heads = along.new_full((len(rows), len(along) - 1, max(counts.values())), torch.nan)
    rest, biases = along.diff(dim=0).mT.clone(), along.new_zeros(len(rows))
    for layer, outputs in moved.items():
        of_heads = outputs.unflatten(-1, (counts[layer], -1))
        added = path.of_heads(layer, directions, of_heads, places).double()
        bias = path.of_bias(layer, directions, places).double()
        heads[:, layer, : added.shape[1]] = added
        rest[:, layer] -= added.sum(-1) + bias
        biases += bias
    logits = next_token_logits(decoder, hidden[places]).double()
    plain = next_token_logits(decoder, torch.zeros_like(hidden[0, :1])).double().expand_as(logits)
    difference, of_unembedding = (
        (some.gather(1, right[:, None]) - some.gather(1, wrong[:, None]))[:, 0]
        for some in (logits, plain)
    )
    biases += (vectors @ path.final.constant).double() * path.logit_factor + of_unembedding
    found = {"heads": heads, "mlps": rest, "embedding": along[0], "biases": biases}
    whole = along[0] + heads.nansum((1, 2)) + rest.sum(1) + biases
    found |= {"logit_difference": difference, "remainder": difference - whole}
    return {name: value.cpu().numpy() for name, value in found.items()}


def _finding(group: xr.Dataset) -> str:
    """Name the heads that add most, and the sums of the kinds of components."""

    def told(name: str, **place: int) -> str:
        mean, low, high = (
            float(group[f"{name}_{end}"].sel(place)) for end in ("mean", "low", "high")
        )
        return f"{mean:+.2f}" + (f" [{low:+.2f}, {high:+.2f}]" if np.isfinite(low) else "")

    mean = group["heads_mean"].values
    order = np.argsort(-np.nan_to_num(np.abs(mean)), axis=None, kind="stable")[:NAMED]
    pairs = [
        (int(layer), int(head))
        for layer, head in zip(*np.unravel_index(order, mean.shape), strict=True)
    ]
    named = ", ".join(f"L{a} H{b} {told('heads', layer=a, head=b)}" for a, b in pairs)
    sums = {
        "heads": np.nansum(mean),
        "MLPs": group["mlps_mean"].sum(),
        "embedding": group["embedding_mean"],
        "biases": group["biases_mean"],
    }
    # Rounded first, so that -0.001 is not printed as "-0.00".
    together = ", ".join(
        f"{name} {round(float(value), 2) + 0.0:+.2f}" for name, value in sums.items()
    )
    return (
        f"The logit difference is {told('logit_difference')}, mean over {group.sizes['prompt']} "
        f"prompts; the largest parts of single heads are {named}; all together: {together}"
    )
