"""Where attention goes in a needle in a haystack (RePo sec. 5.1, table 4): R4, read in both ways.

    mass per token x 100 of needle, query and rest, mean over layers and heads, by prompt; every checkpoint is asked the same prompts

The rows of the generated tokens themselves are the paper's words; the rows that produced them are where an answer is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.analysis.analyze import analyze
from repo_interp.measures.attention_mass import ROWS, AttentionMass
from repo_interp.measures.labels import described
from repo_interp.models.load import load
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import Claim, Verdict, judged
from repo_interp.papers.kit.lead import Lead, paired_lead
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.subjects import Options, Subject
from repo_interp.papers.repo.claims import R4, R4_PRODUCING
from repo_interp.papers.repo.tables_figure import mass_table

SPANS = ("needle", "query", "rest", "distractor")
"""Those of table 4, and the needles that are not asked for, where there are some."""
_CLAIMS: Mapping[str, Claim] = {"generated": R4, "producing": R4_PRODUCING}


def attention_table(found: Sequence[Subject], options: Options, cache: Cache) -> Result:
    """R4: mass per token of all checkpoints of one haystack, on prompts of their training length."""
    mass = xr.concat(
        [
            one.measured(cache, "mass", options, lambda one=one: _measure(one, options), prompts=options.prompts)["mass"]
            for one in found
        ],
        dim=xr.IndexVariable("checkpoint", [one.name for one in found]),
        join="exact",
        coords="minimal",
        compat="override",
    ).assign_coords(layout=("checkpoint", [one.layout for one in found]))
    data = mass.to_dataset(name="mass_per_token")
    rope = next((one.name for one in found if one.layout == "rope"), None)
    nope = next((one.name for one in found if one.layout == "nope"), None)
    verdicts = (
        [_verdict(mass, one.name, rope, nope, rows) for one in found if one.learned for rows in ROWS] if rope and nope else []
    )
    return Result(
        f"attention_mass_{found[0].kind}_{found[0].training_length}",
        f"Attention mass per token on parts of the context (RePo table 4), mean over {options.prompts} prompts of "
        f"{found[0].training_length} tokens, all layers and heads; bar: two standard errors over prompts. Left: rows of the generated "
        "tokens, as the paper puts it; right: rows that produced them.",
        data,
        mass_table(data),
        tuple(verdicts),
    )


def _measure(one: Subject, options: Options) -> xr.Dataset:
    """`mass [rows, prompt, span]` in 0.01."""
    prompts = one.prompts(one.training_length, options.prompts, options.seed)
    measures: list[Any] = [AttentionMass(rows=rows, name=rows) for rows in ROWS]
    run = analyze(load(one.path, options.device), prompts, measures, batch_size=options.batch_size)
    parts = [100 * run[rows].to_dataset()["mass_per_token"].mean(("layer", "head")) for rows in ROWS]
    kept = [part.reindex(span=[name for name in SPANS if name in part["span"].values]) for part in parts]
    mass: xr.DataArray = xr.concat(
        kept, dim=xr.IndexVariable("rows", list(ROWS)), join="exact", coords="minimal", compat="override"
    )
    return described(mass, "attention mass per token", "0.01").to_dataset(name="mass")


def _verdict(mass: xr.DataArray, name: str, rope: str, nope: str, rows: str) -> Verdict:
    def of(checkpoint: str, span: str) -> np.ndarray:
        return mass.sel(checkpoint=checkpoint, rows=rows, span=span).values

    leads: dict[str, Lead] = {
        "needle above RoPE": paired_lead(of(name, "needle"), of(rope, "needle")),
        "needle, RoPE above NoPE": paired_lead(of(rope, "needle"), of(nope, "needle")),
        "query below RoPE": paired_lead(of(rope, "query"), of(name, "query")),
        "query below NoPE": paired_lead(of(nope, "query"), of(name, "query")),
    }
    others = {"RoPE": rope, "NoPE": nope}
    own = of(name, "needle")
    return Verdict(
        _CLAIMS[rows],
        name,
        judged(all(one.holds for one in leads.values())),
        "needle mass per token, 0.01",
        float(own.mean()),
        float(own.std(ddof=1)),
        "prompts",
        len(own),
        ", ".join(f"{scheme} {of(other, 'needle').mean():.3f}" for scheme, other in others.items()),
        f"query {of(name, 'query').mean():.3f} ("
        + ", ".join(f"{scheme} {of(other, 'query').mean():.3f}" for scheme, other in others.items())
        + "); "
        + "; ".join(
            f"{what}: {'yes' if one.holds else 'no'} ({one.margin:+.3f}, standard error {one.standard_error:.2g})"
            for what, one in leads.items()
        ),
    )
