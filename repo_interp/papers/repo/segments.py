"""Whether learned positions follow the structure of a prompt (RePo app. D, fig. 8): R8, on few-shot examples and on lines of code.

    variance_between, boundary_f1 of every learned head (measures.segments), each against shuffled edges of the same prompt

A checkpoint of our tasks that knows no text is left out. Few-shot prompts are sentences with labels in the checkpoint's own tokens; code is
held-out text of its corpus, where it was trained on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.measures.labels import described
from repo_interp.measures.segments import Segments
from repo_interp.models.load import load, load_fresh
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import Claim, Verdict, judged
from repo_interp.papers.kit.lead import paired_lead
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.subjects import Options, Subject
from repo_interp.papers.repo.claims import R8, R8_CODE
from repo_interp.papers.repo.segments_figure import segments_figure
from repo_interp.tasks import Prompt, few_shot_prompts

SHOTS = 5
SCORES = ("variance_between", "boundary_f1")
_CLAIMS: dict[str, Claim] = {"examples": R8, "lines": R8_CODE}
_TEXTS = {"examples": f"few-shot prompts of {SHOTS} examples", "lines": "held-out code"}


def segments(one: Subject, options: Options, cache: Cache) -> list[Result]:
    """R8, fig. 8: one result a kind of prompt that the checkpoint can be given."""
    results = []
    for kind in _CLAIMS:
        prompts = segment_prompts(one, kind, options)
        if prompts:
            results.append(_result(one, kind, prompts, options, cache))
    return results


def segment_prompts(one: Subject, kind: str, options: Options) -> list[Prompt]:
    """Prompts with segments of `kind`; empty where the checkpoint can be given none."""
    if kind == "lines":
        return one.prompts(one.training_length, options.prompts, options.seed) if one.kind == "language" else []
    if one.kind not in ("language", "text"):
        return []
    try:
        return few_shot_prompts(one.tokenizer, None, one.training_length, options.prompts, SHOTS, options.seed)
    except InputError:  # the examples are longer than what the checkpoint was trained on
        return []


def _result(one: Subject, kind: str, prompts: Sequence[Prompt], options: Options, cache: Cache) -> Result:
    data = one.measured(
        cache,
        f"segments_{kind}",
        options,
        lambda: _measure(one, kind, prompts, options),
        prompts=options.prompts,
        controls=options.controls,
    )
    trained = data.sel(weights="trained")
    means = {name: trained[name].mean(("layer", "head")).values for name in (*SCORES, *(f"{score}_shuffled" for score in SCORES))}
    # A prompt with fewer than two segments has no edges to follow.
    known = np.isfinite(np.stack(list(means.values()))).all(axis=0)
    leads = {score: paired_lead(means[score][known], means[f"{score}_shuffled"][known]) for score in SCORES}
    own = means["variance_between"][known]
    random = [
        ", ".join(f"{float(data[score].sel(weights=name).mean()):.3f}" for score in SCORES) for name in data["weights"].values[1:]
    ]
    chance = trained["variance_between_chance"].mean("prompt")
    verdict = Verdict(
        _CLAIMS[kind],
        one.name,
        judged(all(lead.holds for lead in leads.values())),
        f"share of position variance between {kind}, mean over learned heads",
        float(own.mean()),
        float(own.std(ddof=1)),
        "prompts",
        int(known.sum()),
        f"shuffled edges {means['variance_between_shuffled'][known].mean():.3f}; token index "
        f"{float(trained['variance_between_index'].mean()):.3f}; random weights (variance, F1): {'; '.join(random)}",
        f"above shuffled by {leads['variance_between'].margin:+.3f} (standard error {leads['variance_between'].standard_error:.2g}); "
        f"boundary F1 {means['boundary_f1'][known].mean():.3f}, above shuffled by {leads['boundary_f1'].margin:+.3f} (standard error "
        f"{leads['boundary_f1'].standard_error:.2g}); heads that beat 95 % of the shuffles on average: "
        f"{int((chance <= 0.05).sum())} of {chance.size}",
    )
    return Result(
        f"segments_{kind}_{one.stem}",
        f"{one.name}: positions and {kind} of {_TEXTS[kind]}, up to {one.training_length} tokens. Left: the head whose variance lies "
        f"most between {kind}, above shuffled edges (RePo fig. 8), on the first prompt; bands: {kind}. Right: every learned head, mean "
        f"over {int(known.sum())} prompts, against shuffled edges; hollow: random weights.",
        data,
        segments_figure(data, one.name, kind),
        (verdict,),
    )


def _measure(one: Subject, kind: str, prompts: Sequence[Prompt], options: Options) -> xr.Dataset:
    """Scores [weights, prompt, layer, head], the segments of the first prompt, and its positions in the trained weights."""
    bridges = {"trained": load(one.path, options.device)} | {
        f"random {seed}": load_fresh(one.path, seed, options.device) for seed in range(options.controls)
    }
    measure: Any = Segments(kinds=(kind,), seed=options.seed)
    parts = []
    for bridge in bridges.values():
        run = analyze(bridge, prompts, [measure], one.learned, batch_size=options.batch_size)
        parts.append(run["segments"].to_dataset().sel(kind=kind, drop=True).drop_vars("segment"))
    found = xr.concat(
        parts,
        dim=xr.IndexVariable("weights", list(bridges)),
        data_vars="all",
        join="exact",
        coords="minimal",
        compat="override",
    )
    first = analyze(bridges["trained"], prompts[:1], ("positions", measure), one.learned)
    positions = first["positions"].to_dataset()
    labels = first["segments"].to_dataset()["segment"].sel(kind=kind, drop=True).isel(prompt=0, drop=True)
    return found.drop_attrs(deep=False).assign(
        example=described(
            positions["position"].isel(prompt=0, drop=True), "position of each token of the first prompt", "positions"
        ),
        example_segment=described(labels, "segment of each token of the first prompt, -1 for none", "1"),
    )
