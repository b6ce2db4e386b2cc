"""The numbers of a run as plain rows: for the terminal and for the report page alike.

    Table 4 of RePo (mass per token x 100 by span), shares of chunk patterns, ranges of positions by layer,
    heads ranked by needle mass, scores by test set

A `Table` is a title, columns and rows of text and numbers; who prints it decides how. Knows no terminal and no page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import xarray as xr

from repo_interp.plots.marks.arrays import nanmean, ranked
from repo_interp.plots.marks.reading import group, has_groups, learned_layers, ordered_spans, pick, schemes
from repo_interp.plots.marks.table import Cell, Table
from repo_interp.plots.style import scheme_name
from repo_interp.plots.views.mass import UNIT
from repo_interp.plots.views.task_scores import score_title


def mass_table(run: xr.DataTree) -> Table:
    """RePo table 4: a row a span - mean attention mass per token x 100, its deviation over prompts and over heads, mass in per
    cent.

    Raises InputError when the run has no attention mass.
    """
    dataset = group(run, "attention_mass")
    dataset = dataset.sel(span=ordered_spans(map(str, dataset["span"].values)))
    per_token = UNIT * dataset["mass_per_token"].transpose("span", "prompt", "layer", "head").values
    mass = UNIT * dataset["mass"].transpose("span", "prompt", "layer", "head").values
    rows = []
    for place, name in enumerate(dataset["span"].values):
        prompts, heads = nanmean(per_token[place], axis=(1, 2)), nanmean(per_token[place], axis=0)
        if not np.isfinite(prompts).any():
            continue
        held = mass[place][np.isfinite(per_token[place])]
        rows.append(
            (
                str(name),
                float(dataset["table"].values[place]),
                _deviation(prompts),
                _deviation(heads),
                float(held.mean()),
                int(np.isfinite(prompts).sum()),
            )
        )
    layers, heads = dataset.sizes["layer"], dataset.sizes["head"]
    return Table(
        "attention_mass",
        "Attention mass from generated tokens, by span",
        ("span", "mass per token (10⁻²)", "± over prompts", "± over heads", "mass (%)", "prompts"),
        tuple(rows),
        f"Mean over prompts, {layers} layers and {heads} heads each; ± is the standard deviation. "
        "A dotted name is a part of its parent.",
    )


def pattern_table(run: xr.DataTree) -> Table:
    """Shares of the chunk patterns in per cent: all layers that learn positions (RePo fig. 3), then every layer.

    Raises InputError when the run has no patterns.
    """
    patterns = group(run, "patterns")
    shares = 100 * patterns["pattern_share"].transpose("layer", "head", "pattern").values
    names = [str(name) for name in patterns["pattern"].values]
    rows: list[tuple[Cell, ...]] = [("learned layers", "", *_numbers(100 * patterns["pattern_share_all"].values))]
    for (layer, scheme), share in zip(schemes(patterns).items(), shares, strict=True):
        rows.append((f"layer {layer}", scheme_name(scheme), *_numbers(nanmean(share, axis=0))))
    parameters = [f"{key.replace('_', ' ')} {patterns.attrs[key]}" for key in ("chunk_size", "epsilon") if key in patterns.attrs]
    counted = ""
    if "chunk_pattern" in patterns:
        chunks = int((patterns["chunk_pattern"].sel(layer=learned_layers(patterns)) >= 0).sum())
        counted = f"{chunks:,} chunks in learned layers. "
    return Table(
        "patterns",
        "Patterns of positions inside chunks",
        ("layers", "scheme", *(f"{name} (%)" for name in names)),
        tuple(rows),
        f"{counted}{', '.join(parameters).capitalize()}.".replace(" .", ""),
    )


def range_table(run: xr.DataTree) -> Table:
    """Ranges of positions by layer, over heads and prompts (RePo fig. 2): smallest, median, largest, and the median as a share of
    the context.

    Raises InputError when the run has no positions.
    """
    positions = group(run, "positions")
    ranges = positions["position_range"].transpose("layer", "head", "prompt").values
    lengths = positions["token_count"].values
    rows: list[tuple[Cell, ...]] = []
    for (layer, scheme), values in zip(schemes(positions).items(), ranges, strict=True):
        shares = (100 * values / lengths)[np.isfinite(values)]
        finite = values[np.isfinite(values)]
        numbers = (finite.min(), np.median(finite), finite.max(), np.median(shares)) if finite.size else [np.nan] * 4
        rows.append((f"layer {layer}", scheme_name(scheme), *_numbers(np.array(numbers))))
    low, high = int(lengths.min()), int(lengths.max())
    said = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return Table(
        "positions",
        "Ranges of positions, max − min",
        ("layer", "scheme", "smallest", "median", "largest", "median / context (%)"),
        tuple(rows),
        f"In positions, over {ranges.shape[1]} heads a layer and {ranges.shape[2]} prompts of {said} tokens.",
    )


def head_table(run: xr.DataTree, span: str = "needle", most: int = 20) -> Table:
    """The `most` heads with the largest attention mass on `span`: layer, head, scheme, mass and its smallest and largest prompt,
    in per cent.

    Raises InputError when the run has no attention mass, or not this span.
    """
    dataset = group(run, "attention_mass")
    mass = UNIT * pick(dataset["mass"], span=span).transpose("layer", "head", "prompt").values
    means, named = nanmean(mass, axis=2), schemes(dataset)
    layers, heads = dataset["layer"].values, dataset["head"].values
    rows = [
        (
            place,
            int(layers[layer]),
            int(heads[head]),
            scheme_name(named[int(layers[layer])]),
            *_numbers(np.array([means[layer, head], np.nanmin(mass[layer, head]), np.nanmax(mass[layer, head])])),
        )
        for place, (layer, head) in enumerate(ranked(means)[:most], start=1)
    ]
    return Table(
        "heads",
        f"Heads ranked by attention mass on {span}",
        ("rank", "layer", "head", "scheme", f"mass on {span} (%)", "smallest", "largest"),
        tuple(rows),
        f"Mean, smallest and largest of {mass.shape[2]} prompts; {len(rows)} of {means.size:,} heads.",
    )


def score_table(run: xr.DataTree) -> Table:
    """A row a test set: mean score, its standard error, and perplexity, questions and tokens where they are known."""
    scores = group(run, "scores")
    metric = str(scores.attrs.get("metric", "score"))
    further = {
        "perplexity of the targets": lambda one: float(np.exp(one["log_perplexity"])) if "log_perplexity" in scores else None,
        "longest prompt (tokens)": lambda one: int(one["tokens"]) if "tokens" in scores else None,
        "questions": lambda one: int(one["questions"]) if "questions" in scores else None,
        "lost their middle (%)": lambda one: 100 * float(one["cut"]) if "cut" in scores else None,
    }
    rows: list[tuple[Cell, ...]] = []
    for name in scores["test_set"].values:
        one = scores.sel(test_set=name)
        rows.append(
            (str(name), float(one["mean_score"]), float(one["standard_error"]), *(cell(one) for cell in further.values()))
        )
    kept = [place for place in range(len(further)) if any(row[3 + place] is not None for row in rows)]
    return Table(
        "scores",
        score_title(run),
        ("test set", metric, "standard error", *(list(further)[place] for place in kept)),
        tuple((*row[:3], *(row[3 + place] for place in kept)) for row in rows),
        _asked(scores),
    )


TABLES: Mapping[str, Callable[[xr.DataTree], Table]] = {
    "attention_mass": mass_table,
    "patterns": pattern_table,
    "positions": range_table,
    "scores": score_table,
}
"""The table of each group."""


def tables(run: xr.DataTree) -> list[Table]:
    """The tables that the run's groups allow, table 4 first."""
    return [make(run) for name, make in TABLES.items() if has_groups(run, [name])]


def _numbers(values: Iterable[float]) -> tuple[Cell, ...]:
    return tuple(float(value) if np.isfinite(value) else None for value in values)


def _deviation(values: np.ndarray) -> float | None:
    """Sample standard deviation of the finite values; None for fewer than two."""
    finite = values[np.isfinite(values)]
    return float(finite.std(ddof=1)) if finite.size > 1 else None


def _asked(scores: xr.Dataset) -> str:
    """What was asked, in a sentence."""
    stated = [f"seed {scores.attrs['seed']}"] if "seed" in scores.attrs else []
    stated += [f"{scores.attrs['count']} prompts of each set"] if "questions" not in scores and "count" in scores.attrs else []
    stated += [f"answers {scores.attrs['answers']}"] if "answers" in scores.attrs else []
    left_out = [str(name) for name in np.atleast_1d(scores.attrs.get("left_out", []))]
    left = f" Longer than the model's learned table, left out: {', '.join(left_out)}." if left_out else ""
    return f"{', '.join(stated)}.{left}".lstrip(".").strip() if stated or left else ""
