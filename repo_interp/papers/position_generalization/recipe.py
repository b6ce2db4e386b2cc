"""Computation Mechanism Behind LLM Position Generalization (Han and Ji 2025), made again on checkpoints of ours: claims P1 to P7.

Each recipe takes a measured checkpoint and returns a figure with its data and verdicts. The rules stand in `position_rules`; what is
measured in `position_measurements`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import UNMEASURED, Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.position_generalization import rules
from repo_interp.papers.position_generalization.measurements import Measured, Options, measure_checkpoint
from repo_interp.papers.position_generalization.rules import P6_TASK, P6_TASK_FEATURE, P6_TASK_OFFSET
from repo_interp.papers.position_generalization.tolerance import tolerance
from repo_interp.plots.views.extrapolation import extrapolation_by_length
from repo_interp.plots.views.extrapolation import output_traces as traces_in_plane
from repo_interp.plots.views.fake_distance import fake_distance_fit
from repo_interp.plots.views.rotation import rotating_heads, rotation_grid
from repo_interp.plots.views.three_axis import example_heads, fit_correlations, three_axis_fit

TITLE = "Position Generalization, made again"
CLAIMS = rules.CLAIMS
FAST: Mapping[str, Any] = {
    "sequences": 6,
    "prompts": 50,
    "controls": 1,
    "gammas": (0.05, 0.1, 0.5),
    "l_maxes": (5, 100),
    "longer": 32,
    "reach": 2,
}
ZOO = ("language/rope", "language/rope_continued", "language/repo", "language/learned", "niah/rope", "niah/repo")


def figures(
    checkpoints: Mapping[str, str | os.PathLike[str]], options: Options, progress: Callable[[str], None], cache: Cache
) -> list[Result]:
    """Every figure that the checkpoints (name -> path) allow; those of which only scores are there are passed over.

    `progress` is told what is being done. Raises InputError for a checkpoint that cannot be read or judged on text.
    """
    measured = [
        measure_checkpoint(name, path, options, progress, cache)
        for name, path in checkpoints.items()
        if not Path(path).is_dir() or (Path(path) / "config.json").is_file()
    ]
    progress("drawing")
    results = []
    for one in measured:
        if "three_axis" in one.run.children:
            results += [fits(one), three_axes(one), fake_distance(one)]
            if rotating_heads(one.run["rotation"].to_dataset()):
                results.append(rotation(one))
        results.append(tolerance(one, measured))
        if "extrapolation" in one.run.children:
            results.append(longer(one))
        if "output_traces" in one.run.children:
            results.append(traces(one))
    return results


def unmeasured(results: Sequence[Result]) -> list[Verdict]:
    """A verdict "not measurable here" for each claim that nothing was found about."""
    found = {verdict.claim.id for result in results for verdict in result.verdicts}
    needs = {claim.id: "needs a language model, such as language/rope" for claim in rules.CLAIMS}
    needs |= {
        claim.id: "needs a model of a scored task, such as niah/rope" for claim in (P6_TASK, P6_TASK_FEATURE, P6_TASK_OFFSET)
    }
    needs[rules.P6_LEARNED.id] = (
        "needs a model with learned positions and one with RoPE of the same task, as language/repo and language/rope"
    )
    needs |= {claim.id: "needs a language model that rotates, such as language/rope" for claim in (rules.P2, rules.P4, rules.P5)}
    needs[rules.P7.id] = "needs a language model whose distances can be capped, such as language/rope"
    return [Verdict(claim, "none", UNMEASURED, "", note=needs[claim.id]) for claim in rules.CLAIMS if claim.id not in found]


def fits(one: Measured) -> Result:
    """P1, P2, P3: r of both fits over layers and heads."""
    three, fake = (one.run[name].to_dataset() for name in ("three_axis", "fake_distance"))
    by_prompt = three["r"].mean(("layer", "head")).values
    r = float(by_prompt.mean())
    random = np.array([_mean(control["three_axis"].to_dataset()["r"]) for control in one.controls])
    verdicts = [
        Verdict(
            rules.P1,
            one.name,
            judged(r >= rules.MAJORITY),
            "mean r of the three-axis fit",
            r,
            float(by_prompt.std(ddof=1)),
            "sequences",
            len(by_prompt),
            f"random weights {random.mean():.3g}; distances shuffled {_mean(three['r_shuffled']):.3g}",
            f"R² on held-out rows {_mean(three['r2_held_out']):.3g}; heads {float(three['r'].min()):.3g} to {float(three['r'].max()):.3g}",
        ),
        Verdict(
            rules.P3,
            one.name,
            judged(random.mean() <= min(rules.CHANCE, r / 2)),
            "mean r of the three-axis fit with random weights",
            float(random.mean()),
            float(random.std(ddof=1)) if len(random) > 1 else None,
            "draws of weights",
            len(by_prompt),
            f"trained {r:.3g}",
            f"by chance about {np.sqrt(6 / one.training_length):.2g} at {one.training_length} tokens",
        ),
    ]
    rotating = _rotating_layers(one)
    if rotating:
        layers = fake["r"].mean(("prompt", "head")).sel(layer=rotating).values
        prompts = fake["r"].sel(layer=rotating).mean(("layer", "head")).values
        control = np.mean([_mean(twin["fake_distance"].to_dataset()["r"].sel(layer=rotating)) for twin in one.controls])
        verdicts.append(
            Verdict(
                rules.P2,
                one.name,
                judged(bool((layers >= rules.LAW).all())),
                "mean r of the fake-distance fit",
                float(layers.mean()),
                float(prompts.std(ddof=1)),
                "sequences",
                len(prompts),
                f"random weights {control:.3g}",
                f"layers {layers.min():.3g} to {layers.max():.3g}",
            )
        )
    kept = {f"three_axis_{name}": three[name] for name in ("r", "r_position", "r_shuffled", "r2_held_out")}
    return Result(
        f"fits_{one.name}",
        f"{one.name}: correlation of the logits and the three-axis fit (sec. 3.1), and of fake-distance logits and their two axes "
        f"(sec. 3.2), by layer and head, mean over {len(by_prompt)} sequences of {one.training_length} tokens of held-out text.",
        xr.Dataset({**kept, "fake_distance_r": fake["r"]}),
        fit_correlations(one.run),
        tuple(verdicts),
    )


def three_axes(one: Measured) -> Result:
    """Fig. 2, of the head with the median r."""
    layer, head = example_heads(one.run["three_axis"].to_dataset())[:2][-1]
    maps, axes = one.run["maps"].to_dataset(), one.run["three_axis"].to_dataset()
    chosen = maps[["logit_map", "block_size"]].assign({name: axes[name] for name in _AXES})
    return Result(
        f"three_axis_{one.name}",
        f"{one.name}, the head with the median r: its logits, distance, query and key axis, and their sum (fig. 2). Axes have a meaning "
        "up to a level and a common slope.",
        chosen.sel(layer=layer, head=head),
        three_axis_fit(one.run, layer, head),
    )


def fake_distance(one: Measured) -> Result:
    """Fig. 3, of the head with the median r."""
    dataset = one.run["fake_distance"].to_dataset()
    layer, head = (example_heads(dataset.sel(layer=_rotating_layers(one) or dataset["layer"].values))[:2] or [(0, 0)])[-1]
    maps = one.run["maps"].to_dataset()[["fake_map", "block_size"]]
    chosen = maps.assign({name: dataset[name] for name in ("position_axis", "semantic_axis")})
    return Result(
        f"fake_distance_{one.name}",
        f"{one.name}, the head with the median r: logits that the last query would give every key at every distance, with their two "
        "axes, and the sum of these (fig. 3).",
        chosen.sel(layer=layer, head=head),
        fake_distance_fit(one.run, layer, head),
    )


def rotation(one: Measured) -> Result:
    """P4, P5, fig. 4 and 9."""
    dataset = one.run["rotation"].to_dataset()
    share, few = _slow_heads(dataset, _rotating_layers(one))
    control = float(np.mean([_slow_heads(twin["rotation"].to_dataset(), _rotating_layers(one))[0] for twin in one.controls]))
    closed = dataset["closed_form_r"]
    by_prompt = closed.mean(("layer", "head")).values
    sequences = closed.sizes["prompt"]
    verdicts = [
        Verdict(
            rules.P4,
            one.name,
            judged(share >= rules.HEADS and few <= rules.FEW and share > control),
            "share of heads with slow dominating components",
            share,
            n=sequences,
            control=f"random weights {control:.2g}",
            note=f"{100 * few:.2g} % of the components of a head that has some",
        )
    ]
    if np.isfinite(by_prompt).any():
        verdicts.append(
            Verdict(
                rules.P5,
                one.name,
                judged(_mean(closed) >= rules.CLOSED),
                "mean r of logits and f + g",
                _mean(closed),
                float(np.nanstd(by_prompt, ddof=1)) if np.isfinite(by_prompt).sum() > 1 else None,
                "sequences",
                sequences,
                note=f"heads {float(closed.min()):.3g} to {float(closed.max()):.3g}; "
                f"{100 * float(np.isfinite(closed).mean()):.0f} % of heads and sequences have such components",
            )
        )
    return Result(
        f"rotation_{one.name}",
        f"{one.name}: mean pairs of queries and keys in the plane (fig. 4, 9). Coloured: slow dominating. Circle: deviation of the key; "
        "arc: rotation over the largest distance.",
        dataset,
        rotation_grid(one.run),
        tuple(verdicts),
    )


def longer(one: Measured) -> Result:
    """P7, table 2."""
    group = one.run["extrapolation"].to_dataset()
    first, last = group["length"].values[[0, -1]]
    verdicts = ()
    if "lm_infinite" in group["method"].values:
        verdicts = (_in_distribution(one, group, int(first), int(last)),)
    return Result(
        f"extrapolation_{one.name}",
        f"{one.name}: divergence of attention outputs from those at the training length, and log perplexity, of the last "
        f"{group.attrs['judged']} tokens (table 2).",
        group,
        extrapolation_by_length(one.run),
        verdicts,
    )


def traces(one: Measured) -> Result:
    """Fig. 6."""
    group = one.run["output_traces"].to_dataset()
    outside = 100 * float(group["trace_outside"].mean())
    return Result(
        f"output_traces_{one.name}",
        f"{one.name}: attention outputs at the training length (dots), and of a few queries over sliding windows of keys and values "
        f"(lines; the first window is a dot), in the plane of their two largest variances (fig. 6). {outside:.2g} % of the lines' points "
        "are further from the mean than 99 % of the dots, by Mahalanobis' distance.",
        group,
        traces_in_plane(one.run),
    )


_AXES = ("distance_axis", "query_axis", "key_axis")


def _in_distribution(one: Measured, group: xr.Dataset, first: int, last: int) -> Verdict:
    of_layers = group["kl"].sel(length=last) - group["kl"].sel(length=first)
    plain, capped = (of_layers.sel({"method": method}).values for method in ("plain", "lm_infinite"))
    floor = float(group["kl"].sel({"method": "plain", "length": first}).mean())
    nats, nats_capped = (
        float(group["log_perplexity"].sel({"method": name, "length": last})) for name in ("plain", "lm_infinite")
    )
    stays = plain.mean() > 0 and capped.mean() <= rules.KEPT * plain.mean()
    return Verdict(
        rules.P7,
        one.name,
        judged(bool(stays and nats_capped < nats)),
        f"KL with LM-Infinite at {last} tokens above that at {first}, nats a head",
        float(capped.mean()),
        float(capped.std(ddof=1)),
        "layers",
        group.attrs["prompts"],
        f"plain {plain.mean():.3g}; at {first} tokens, where only the noise of the fit is left, {floor:.3g}",
        f"log perplexity {nats_capped:.3f} against {nats:.3f}",
    )


def _slow_heads(dataset: xr.Dataset, layers: Sequence[int]) -> tuple[float, float]:
    """Share of heads with slow dominating components, and of the components of a head that has some (0 where none has)."""
    slow = (dataset["slow_dominating"].sel(layer=list(layers)) == 1).mean("component").values
    return float((slow > 0).mean()), float(slow[slow > 0].mean()) if (slow > 0).any() else 0.0


def _rotating_layers(one: Measured) -> list[int]:
    dataset = one.run["rotation"].to_dataset()
    return sorted({layer for layer, _ in rotating_heads(dataset)})


def _mean(values: xr.DataArray) -> float:
    return float(np.nanmean(values.values))
