"""What CoPE's gates count in a language model, and where position alone sends attention (CoPE fig. 4 and 6): C6.

Held-out windows of the training length through the checkpoint and through a twin with random weights; the measure `gates` gives,
for every head, the separators' share of the gates and the attention that stays in the query's own segment, each with its control by
chance. The head that is judged is chosen on every other window. Thresholds are in `cope_rules`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xarray as xr

from repo_interp.analysis.analyze import analyze
from repo_interp.measures.gates import KINDS, Gates
from repo_interp.measures.labels import described
from repo_interp.models.load import load, load_fresh
from repo_interp.models.provenance import length_trained
from repo_interp.papers.cope import rules
from repo_interp.papers.cope.claims import C6, C6_ATTENTION
from repo_interp.papers.cope.gates_figure import position_attention_and_gates
from repo_interp.papers.kit.claims import Claim, Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.score_words import no_verdict
from repo_interp.tasks import Prompt, Task

SHARES = ("separator_share", "separator_share_shuffled", "separator_share_chance")
MASSES = ("last_segment_mass", "last_segment_shuffled", "last_segment_chance")
_KEPT = (*SHARES, *MASSES, "separator_share_even", "last_segment_even")
_SHOWN = ("position_attention", "gate_by_token", "counted", "separator")
_TOGETHER: Any = {"join": "outer", "coords": "minimal", "compat": "override"}


@dataclass(frozen=True)
class GatedTexts:
    """How the gates of one checkpoint are measured."""

    prompts: int
    draws: int
    batch_size: int
    seed: int
    device: str


def measure_gates(path: str | os.PathLike[str], task: Task, texts: GatedTexts) -> xr.Dataset:
    """Shares and masses [weights, prompt, layer, head, kind] of the checkpoint at `path` and of a twin with random weights; of the first
    window with the trained weights `position_attention`, `gate_by_token`, `counted`, `separator`, and `text [key]`.
    """
    bridges = {"trained": load(path, texts.device), "random": load_fresh(path, texts.seed, texts.device)}
    prompts = task.prompts(texts.prompts, texts.seed, str(length_trained(bridges["trained"])))
    found = []
    for name, bridge in bridges.items():
        measure = Gates(
            kinds=KINDS, maps=int(name == "trained"), map_tokens=len(prompts[0].tokens), draws=texts.draws, seed=texts.seed
        )
        run = analyze(bridge, prompts, [measure], batch_size=texts.batch_size)  # pyright: ignore[reportArgumentType]
        found.append(run["gates"].to_dataset())
    kept = xr.concat([one[list(_KEPT)] for one in found], dim=xr.IndexVariable("weights", list(bridges)), **_TOGETHER)
    return kept.assign({name: found[0][name].isel(prompt=0, drop=True) for name in _SHOWN}).assign(text=_texts(prompts[0]))


def gates(name: str, found: xr.Dataset) -> list[Result]:
    """C6 of the checkpoint `name`: the head whose gates mark separators most, and the one whose attention stays in a segment most."""
    parts: list[tuple[str, Claim, tuple[str, ...], Callable[..., bool], str]] = [
        ("gates", C6, SHARES, rules.gated, "separators' share of the gates' sum"),
        (
            "position_attention",
            C6_ATTENTION,
            MASSES,
            rules.stays_within,
            "attention from position alone within the query's own segment",
        ),
    ]
    return [_judge(name, found, *part) for part in parts]


def _judge(
    name: str, found: xr.Dataset, stem: str, claim: Claim, variables: tuple[str, ...], holds: Callable[..., bool], measured: str
) -> Result:
    chosen = {str(weights): _stands_out(found.sel(weights=weights), variables) for weights in found["weights"].values}
    trained, random = chosen["trained"], chosen["random"]
    short = name.split("/")[-1]
    if trained is None:
        layer, head, title = 0, 0, "head 0 of layer 0"
        verdict = no_verdict(claim, name, "too few of the texts have separators or segments")
    else:
        layer, head = int(found["layer"].values[trained.place[0]]), int(found["head"].values[trained.place[1]])
        kind = str(found["kind"].values[trained.place[2]]) if len(trained.place) > 2 else "separators"
        title = f"layer {layer}, head {head}: {kind}"
        control = "random tokens" if stem == "gates" else "shuffled segments"
        verdict = Verdict(
            claim,
            name,
            judged(holds(trained, random)),
            f"{measured} ({title})",
            trained.observed,
            float(trained.by_prompt.std(ddof=1)) if len(trained.by_prompt) > 1 else None,
            "texts",
            len(trained.by_prompt),
            f"{control} {trained.control:.3g}; random weights "
            + ("none" if random is None else f"{random.observed:.3g}, {random.control:.3g}"),
            f"{trained.ratio:.2f} times {control}, which reach it in {100 * trained.chance:.3g} % of the draws; the head was chosen among "
            f"{_places(found, variables[0])} on the other half of the texts",
        )
    data = found.sel(layer=layer, head=head).drop_vars("scheme", errors="ignore")
    return Result(
        f"{stem}_{short}",
        f"{name}, {title}: attention from position alone on the first text, every row scaled to a maximum of 1 (CoPE fig. 4), and below it "
        "the mean gate of each token over the queries that see it (fig. 6). Plus signs and ticks: separators - line breaks, ends of "
        "sentences, beginnings of blocks.",
        data,
        position_attention_and_gates(data, f"{short}, {title}"),
        (verdict,),
    )


def _stands_out(found: xr.Dataset, variables: tuple[str, ...]) -> rules.Chosen | None:
    arrays = [found[variable] for variable in variables]
    axes = ("prompt", "layer", "head", *(("kind",) if "kind" in arrays[0].dims else ()))
    return rules.stands_out(*(array.transpose(*axes).values for array in arrays))


def _places(found: xr.Dataset, variable: str) -> str:
    array = found[variable]
    text = f"{array.sizes['layer'] * array.sizes['head']} heads"
    return f"{text} and {array.sizes['kind']} kinds of segments" if "kind" in array.dims else text


def _texts(prompt: Prompt) -> xr.DataArray:
    return described(xr.DataArray(list(prompt.token_text or map(str, prompt.tokens)), dims="key"), "text of a token", "1")
