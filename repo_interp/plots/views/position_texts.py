"""The text of a prompt, once per kind of heads, colored by the positions of the clearest head of a layer.

    clearness    of a head that counts tokens: rank correlation of positions and token index; of one that places words or segments: what
                 these explain of its positions, held out; of one that marks lines: its step at line ends, in standard deviations

Where gates count positions (CoPE) the mean gate of a token takes the place of its position. Reads the groups `position_sources`,
`patterns`, `positions` and `gates`; `position_texts.js` draws. Knows nothing about how heads got their kinds.
"""

from __future__ import annotations

import base64
from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks.arrays import heads_where, over_prompts
from repo_interp.plots.marks.drawing import counted
from repo_interp.plots.marks.finding import heads_named
from repo_interp.plots.marks.reading import described_prompts, group, prompt_tokens
from repo_interp.plots.view import Interactive, PageOptions
from repo_interp.plots.views.explorer import joint, stretches

CLEARNESS = {
    "counts tokens": ("alone", "index", "the token index explains {:.0%} of its variance, held out"),
    "places words": ("alone", "token", "the word explains {:.0%} of its variance, held out"),
    "marks lines": ("line_step", "rest", "line ends stand {:+.2g} standard deviations from other tokens"),
    "places in segments": ("alone", "segment", "the segment explains {:.0%} of its variance, held out"),
}
"""By kind: the variable and its source that say how clearly a head is of it, and the same in words."""
MOST_TOKENS = 1500
"""Tokens of a prompt that are colored."""
BUDGET = 2_000_000
"""Characters of positions in the page, beyond those of the first prompt."""


def clearest(run: xr.DataTree) -> dict[str, tuple[xr.DataArray, str]]:
    """By kind that some head has: how clearly each of its heads shows it [layer, head], NaN for other heads; and the same in words."""
    sources, found = group(run, "position_sources"), {}
    for kind, (variable, source, words) in CLEARNESS.items() if "kind" in sources else ():
        values = sources.sel(source=source)[variable]
        if kind == "counts tokens" and "patterns" in run.children and "trend" in run["patterns"]:
            values, words = over_prompts(run["patterns"]["trend"]), "rank correlation with the token index {:+.2f}"
        values = values.where(sources["kind"] == kind)
        if values.notnull().any():
            found[kind] = values, words
    return found


def colored_texts(run: xr.DataTree, options: PageOptions) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Data of the texts, and a sentence for prompts that are left out; None where no head has a kind, or nothing is kept of tokens."""
    kinds, described, values = clearest(run), described_prompts(run), _by_token(run)
    if not kinds or described is None or values is None:
        return None, ()
    total, shown, heads = int((run["position_sources"]["kind"] != "").sum()), [], []
    for kind, (clear, words) in kinds.items():
        of_kind, best = heads_where(clear.notnull()), abs(clear).max("head").dropna("layer")
        own = [(int(layer), int(abs(clear.sel(layer=layer)).idxmax("head"))) for layer in best["layer"]]
        says = [words.format(float(clear.sel(layer=layer, head=head))) for layer, head in own]
        said, where = f"{len(of_kind)} of {counted(total, 'head')}", heads_named(of_kind, 12, clear.sizes["head"])
        shown.append({"kind": kind, "said": said, "where": where, "heads": own, "says": says, "start": int(best.argmax("layer"))})
        heads.append(own)
    prompts, spent = [], 0
    asked = [prompt for prompt in described["prompt"].values.tolist() if options.prompts is None or prompt in options.prompts]
    for prompt in asked:
        tokens, of_prompt = prompt_tokens(described, prompt), values.sel(prompt=prompt)
        rows = [[_packed(of_prompt.sel(layer=layer, head=head).values[: tokens.count]) for layer, head in own] for own in heads]
        spent += sum(len(row) for own in rows for row in own)
        if prompts and spent > BUDGET:
            break
        texts = None if tokens.texts is None else tokens.texts[:MOST_TOKENS]
        prompts.append({"prompt": prompt, "count": tokens.count, "texts": texts, "joint": joint(tokens), "rows": rows})
    kept = [prompt["prompt"] for prompt in prompts]
    note = (f"Colored are {len(kept)} of {len(asked)} prompts: {stretches(kept)}.",) if len(kept) < len(asked) else ()
    unit = "the position" if "positions" in run.children else "the mean gate"
    return {"unit": unit, "kinds": shown, "prompts": prompts}, note


def _by_token(run: xr.DataTree) -> xr.DataArray | None:
    """Positions, or mean gates, of every token [prompt, layer, head, token]; None where the run keeps neither."""
    kept = [("gates", "gate_by_token", {"key": "token"}), ("positions", "position", {})]
    found = [run[name][variable].rename(axes).reset_coords(drop=True) for name, variable, axes in kept if name in run.children]
    return found[0].combine_first(found[-1]) if len(found) > 1 else next(iter(found), None)


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(values[:MOST_TOKENS].astype("<f4").tobytes()).decode("ascii")


_FILES = files("repo_interp.plots.views")
TEXTS = Interactive(_FILES / "position_texts.html", _FILES / "position_texts.js", colored_texts, leads=True)
