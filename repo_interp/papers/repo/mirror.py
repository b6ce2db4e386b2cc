"""The mirror effect in text reversal (RePo app. C, fig. 6): R2 and R3, from the positions of texts as long as the longest trained on.

Positions are measured on the trained checkpoint and on twins with random weights, the control. A layer's numbers are means over its
heads. Layer 0 is measured and shown, but no finding: its position depends on the word alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.analysis.analyze import analyze
from repo_interp.measures.labels import described
from repo_interp.models.load import load, load_fresh
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.subjects import Options, Subject, finite
from repo_interp.papers.repo import rules
from repo_interp.papers.repo.claims import R2, R3
from repo_interp.papers.repo.mirror_figure import mirror_figure
from repo_interp.tasks.reversal import Reversal

_TOGETHER: Any = {"join": "exact", "coords": "minimal", "compat": "override"}


def mirror_effect(one: Subject, options: Options, cache: Cache) -> Result:
    """R2 and R3, fig. 6: positions of one text by layer, and how copies lie to the words that they copy."""
    task = _task(one)
    found = one.measured(
        cache,
        "mirror",
        options,
        lambda: _measure(one, task, options),
        prompts=options.prompts,
        controls=options.controls,
        example=options.example_words,
    )
    return Result(
        f"mirror_{one.stem}",
        f"{one.name}: positions of a text of {options.example_words} words by layer (above; RePo fig. 6; blue words, pink copies), and of "
        f"every copy against its source (below) on {options.prompts} texts of {task.longest} words, with means of |dz|.",
        found,
        mirror_figure(found, one.name),
        (_mirrors(one, found), _near_constant(one, found)),
    )


def _mirrors(one: Subject, found: xr.Dataset) -> Verdict:
    means = found["mirror"].mean("prompt")

    def layers(weights: str) -> list[int]:
        chosen = means.sel(weights=weights)
        return [
            int(layer)
            for layer in found["layer"].values
            if layer > 0 and rules.is_mirror(*(float(chosen.sel(layer=layer, kind=kind)) for kind in rules.Mirror._fields))
        ]

    later = means.sel(weights="trained", layer=[layer for layer in found["layer"].values if layer > 0])
    ratios = later.sel(kind="copies") / later.sel(kind="random")
    best = int(ratios["layer"].values[int(np.nanargmin(ratios.values))])
    best_of = found["mirror"].sel(weights="trained", layer=best)
    by_prompt = (best_of.sel(kind="copies") / best_of.sel(kind="random")).values
    random = [
        float((means.sel(weights=name, kind="copies") / means.sel(weights=name, kind="random")).sel(layer=best))
        for name in found["weights"].values[1:]
    ]
    at = {kind: float(later.sel(layer=best, kind=kind)) for kind in rules.Mirror._fields}
    mirrored = layers("trained")
    return Verdict(
        R2,
        one.name,
        judged(bool(mirrored)),
        f"|dz| of copies over |dz| to other words, in layer {best}",
        float(ratios.sel(layer=best)),
        float(np.std(finite(by_prompt), ddof=1)),
        "texts",
        found.sizes["prompt"],
        "random weights: " + ", ".join(f"{value:.3g}" for value in random),
        f"layers that mirror: {', '.join(map(str, mirrored)) or 'none'} of 0 to {len(one.schemes) - 1} (random weights: "
        f"{sum(len(layers(str(name))) for name in found['weights'].values[1:])}); layer {best}: copies {at['copies']:.2f}, other words "
        f"{at['random']:.2f}, the same word elsewhere {at['elsewhere']:.2f} positions, correlation {at['correlation']:.2f}; "
        "one training seed",
    )


def _near_constant(one: Subject, found: xr.Dataset) -> Verdict:
    later = [layer for layer in found["layer"].values if layer > 0]
    ratios = found["flatness"].sel(layer=later)
    median = ratios.mean("prompt").median("layer")
    trained = ratios.sel(weights="trained")
    spans = found["instruction_range"].sel(weights="trained", layer=later).mean("prompt").values
    of_words = found["words_range"].sel(weights="trained", layer=later).mean("prompt").values
    return Verdict(
        R3,
        one.name,
        judged(bool(float(median.sel(weights="trained")) <= rules.FLAT)),
        "range of the instruction's positions over that of as many consecutive words, median over layers other than 0",
        float(median.sel(weights="trained")),
        float(trained.median("layer").std("prompt", ddof=1)),
        "texts",
        found.sizes["prompt"],
        "random weights: " + ", ".join(f"{float(median.sel(weights=name)):.3g}" for name in found["weights"].values[1:]),
        "; ".join(
            f"layer {layer}: {ratio:.2f} (instruction {inside:.2f}, all words {outside:.1f} positions)"
            for layer, ratio, inside, outside in zip(later, trained.mean("prompt").values, spans, of_words, strict=True)
        ),
    )


def _measure(one: Subject, task: Reversal, options: Options) -> xr.Dataset:
    """`mirror [weights, layer, prompt, kind]`, `flatness`, `instruction_range`, `words_range [weights, layer, prompt]`, and from the
    trained weights `example [layer, token]` with `example_part` and `example_text`, and `pair [layer, point, end]` for the scatter.
    """
    bridges = {"trained": load(one.path, options.device)} | {
        f"random {seed}": load_fresh(one.path, seed, options.device) for seed in range(options.controls)
    }
    prompts = one.prompts(task.longest, options.prompts, options.seed)
    lots = []
    for bridge in bridges.values():
        run = analyze(bridge, prompts, ("positions",), one.learned, batch_size=options.batch_size)
        lots.append(_of_positions(run["positions"].to_dataset()["position"], prompts))
    found = xr.concat([lot.drop_vars("pair") for lot in lots], dim=xr.IndexVariable("weights", list(bridges)), **_TOGETHER)
    (example,) = one.prompts(options.example_words, 1, options.seed)
    shown = analyze(bridges["trained"], [example], ("positions",), one.learned)["positions"].to_dataset()["position"]
    parts = ["words" if place in example.spans["words"] else "other" for place in range(len(example.tokens))]
    parts = ["copies" if place in example.generated else part for place, part in enumerate(parts)]
    return found.assign(
        pair=lots[0]["pair"],
        example=described(
            shown.isel(prompt=0, drop=True).mean("head").transpose("layer", "token"), "position, mean over heads", "positions"
        ),
        example_part=described(xr.DataArray(parts, dims="token"), "part of the text", "1"),
        example_text=described(xr.DataArray(list(example.token_text or ()), dims="token"), "word", "1"),
    )


def _of_positions(position: xr.DataArray, prompts: Sequence[Any]) -> xr.Dataset:
    """The statistics of every text, by layer, from `position [prompt, layer, head, token]`."""
    values = position.transpose("layer", "prompt", "head", "token").values.astype(float)
    layers, count, heads, _ = values.shape
    mirrors = np.full((layers, count, heads, len(rules.Mirror._fields)), np.nan)
    flat, inside, outside = (np.full((layers, count, heads), np.nan) for _ in range(3))
    ends = []
    for number, prompt in enumerate(prompts):
        words, source, copies = prompt.spans["words"], prompt.attributes["source"], prompt.generated
        ends.append(values[:, number].mean(axis=1)[:, [list(copies), list(source)]].transpose(0, 2, 1))
        for layer, head in np.ndindex(layers, heads):
            z = values[layer, number, head]
            mirrors[layer, number, head] = rules.mirror(z, prompt.tokens, source, copies)
            flat[layer, number, head] = rules.flatness(z, prompt.spans["instruction"], words)
            inside[layer, number, head] = np.ptp(z[list(prompt.spans["instruction"])])
            outside[layer, number, head] = np.ptp(z[list(words)])
    coords = {"layer": position["layer"].values}
    axes = ("layer", "prompt")
    return xr.Dataset(
        {
            "mirror": described(
                xr.DataArray(mirrors.mean(axis=2), coords | {"kind": list(rules.Mirror._fields)}, (*axes, "kind")),
                "mean |dz| of copies to their source, to other words, to the same word elsewhere; correlation of copy and source",
                "positions",
            ),
            "flatness": described(
                xr.DataArray(flat.mean(axis=2), coords, axes), "range of the instruction over that of as many words", "1"
            ),
            "instruction_range": described(
                xr.DataArray(inside.mean(axis=2), coords, axes), "range over the instruction", "positions"
            ),
            "words_range": described(xr.DataArray(outside.mean(axis=2), coords, axes), "range over the words", "positions"),
            "pair": described(
                xr.DataArray(np.concatenate(ends, axis=1), coords | {"end": ["copy", "source"]}, ("layer", "point", "end")),
                "positions of a copy and of its source, mean over heads",
                "positions",
            ),
        }
    )


def _task(one: Subject) -> Reversal:
    assert isinstance(one.task, Reversal)
    return one.task
