"""Where attention goes in a needle in a haystack (RePo sec. 5.1, table 4): R4, read in both ways.

    mass per token x 100 of needle, query and rest, mean over layers and heads, by prompt; every checkpoint gets the same prompts

The rows of the generated tokens themselves are the paper's words; the rows that produced them are where an answer is looked up. Where NoPE
finds the needles too, nothing is said: see `needles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, Claim, Verdict, verdict
from position_papers.kit.differences import paired_difference
from position_papers.kit.experiment import Drawing, Experiment, Needs, asked_the_same
from position_papers.kit.learned_positions import why_not
from position_papers.kit.rules import Above, All, Where
from position_papers.kit.scores import PLAIN
from position_papers.kit.subjects import Subject
from position_papers.repo.checkpoints import HAYSTACKS, NO_HAYSTACK, OLMO, finds_needles, needles, needles_of, omits_positions
from position_papers.repo.needles import NEEDS_POSITIONS, NOPE, found_without_positions, search
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.measures.attention_mass import ROWS, AttentionMass
from repo_interp.measures.labels import described
from repo_interp.models.load import load
from repo_interp.plots.marks.scores import layout_name, method_panels

SPANS = ("needle", "query", "rest", "distractor")
"""Those of table 4, and the needles that are not asked for, where there are some."""
NEEDLE, ROPE_NEEDLE, QUERY = "needle mass per token", "RoPE's needle mass per token", "query mass per token"
R4 = Claim(
    "R4",
    "attention mass per token from the generated tokens' own rows: needle RePo > RoPE > NoPE, query RePo lowest",
    "RePo table 4",
    "needle 2.013 / 1.754 / 1.572, query 1.046 / 1.123 / 1.135 x 0.01",
    Where(
        NEEDS_POSITIONS,
        All(Above(NEEDLE, ("RoPE",)), Above(ROPE_NEEDLE, ("NoPE",)), Above(QUERY, ("RoPE", "NoPE"), relation="below")),
    ),
    also=(EVERY_SEED,),  # it compares schemes, and its own errors are over the prompts of one model of each
)
R4_PRODUCING = Claim(
    "R4",
    "the same from the rows that produced the generated tokens, one earlier",
    R4.source,
    R4.paper_number,
    R4.rule,
    part="producing rows",
    also=("producing rows, every seed",),
)
CLAIMS: Mapping[str, Claim] = {"generated": R4, "producing": R4_PRODUCING}
"""By the rows that attention is read from."""
LEAST_FOUND = 0.5
"""Share of the needles that a checkpoint finds itself, below which its attention says nothing about finding them."""


# ---- measured -------------------------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """`mass_per_token [checkpoint, rows, prompt, span]` in 0.01, on prompts of the training length; `layout`, `learned_layers`."""
    mass = xr.concat(
        [subject.measured(cache, _mass, options, prompts=options.prompts)["mass"] for subject in subjects],
        dim=xr.IndexVariable("checkpoint", [subject.name for subject in subjects]),
        join="exact",
        coords="minimal",
        compat="override",
    ).assign_coords(
        layout=("checkpoint", [subject.layout for subject in subjects]),
        learned_layers=("checkpoint", [len(subject.learned) for subject in subjects]),
    )
    nope = [search(subject, options, cache) for subject in subjects if omits_positions(subject.layout)][:1]
    without = found_without_positions(nope)
    return mass.to_dataset(name="mass_per_token").assign_attrs(
        task=needles_of(subjects[0]),
        training_length=subjects[0].training_length,
        found_by_nope=without.share,
        why_not=without.why_not
        or next((_lost(each.name, each, options, cache) for each in subjects if each.layout == "rope"), ""),
    )


def _mass(subject: Subject, options: Options) -> xr.Dataset:
    """`mass [rows, prompt, span]` in 0.01."""
    prompts = needles(subject, subject.training_length, options.prompts, options.seed)
    measures: list[Any] = [AttentionMass(rows=rows, name=rows) for rows in ROWS]
    run = analyze(load(subject.path, options.device), prompts, measures, batch_size=options.batch_size)
    by_rows = [100 * run[rows].to_dataset()["mass_per_token"].mean(("layer", "head")) for rows in ROWS]
    parts = [part.reindex(span=[name for name in SPANS if name in part["span"].values]) for part in by_rows]
    mass: xr.DataArray = xr.concat(
        parts, dim=xr.IndexVariable("rows", list(ROWS)), join="exact", coords="minimal", compat="override"
    )
    return described(mass, "attention mass per token", "0.01").to_dataset(name="mass")


def _why_not(subject: Subject, options: Options, cache: Cache) -> str:
    """Why the attention of `subject` says nothing on learned positions: it does not use them, or does not find the needles."""
    if not subject.learned:
        return ""
    return _lost("it", subject, options, cache) or why_not(subject, options, cache)


def _lost(called: str, subject: Subject, options: Options, cache: Cache) -> str:
    """Why the attention of `subject` says nothing on needles: it does not find them; "" where it does."""
    found = search(subject, options, cache).sample([subject.training_length], PLAIN).prompts.mean()
    few = f"{called} finds {found:.3f} of the needles at its training length (wanted at least {LEAST_FOUND:g})"
    return few if found < LEAST_FOUND else ""


# ---- judged ---------------------------------------------------------------------------------------------------------


def judge(data: xr.Dataset) -> Iterator[Verdict]:
    """Every checkpoint with learned positions beside those of RoPE and NoPE, in both readings."""
    mass = data["mass_per_token"]
    layouts = dict(zip(mass["checkpoint"].values.tolist(), mass["layout"].values.tolist(), strict=True))
    rope = next((name for name, layout in layouts.items() if layout == "rope"), None)
    nope = next((name for name, layout in layouts.items() if omits_positions(layout)), None)
    if rope is not None and nope is not None:
        rivals = {"RoPE": rope, "NoPE": nope}
        for checkpoint in mass["checkpoint"].values[mass["learned_layers"].values > 0].tolist():
            for rows, claim in CLAIMS.items():
                yield _beside(mass.sel(rows=rows), checkpoint, rivals, claim, data.attrs)


def _beside(
    mass: xr.DataArray, checkpoint: str, rivals: Mapping[str, str], claim: Claim, attributes: Mapping[str, Any]
) -> Verdict:
    def of(name: str, span: str) -> np.ndarray:
        return mass.sel(checkpoint=rivals.get(name, name), span=span).values

    values = {
        NEEDLE: {"RoPE": paired_difference(of(checkpoint, "needle"), of("RoPE", "needle"))},
        ROPE_NEEDLE: {"NoPE": paired_difference(of("RoPE", "needle"), of("NoPE", "needle"))},
        QUERY: {name: paired_difference(of(name, "query"), of(checkpoint, "query")) for name in rivals},
    }
    named = {
        "needle above RoPE": values[NEEDLE]["RoPE"],
        "needle, RoPE above NoPE": values[ROPE_NEEDLE]["NoPE"],
        "query below RoPE": values[QUERY]["RoPE"],
        "query below NoPE": values[QUERY]["NoPE"],
    }
    own = of(checkpoint, "needle")
    layouts = {name: layout_name(str(mass.sel(checkpoint=rival)["layout"].item())) for name, rival in rivals.items()}
    query = ", ".join(f"{layout} {of(name, 'query').mean():.3f}" for name, layout in layouts.items())
    return verdict(
        claim,
        checkpoint,
        "needle mass per token, 0.01",
        {**values, NOPE: attributes["found_by_nope"]},
        float(own.mean()),
        float(own.std(ddof=1)),
        "prompts",
        len(own),
        ", ".join(f"{layout} {of(name, 'needle').mean():.3f}" for name, layout in layouts.items()),
        f"query {of(checkpoint, 'query').mean():.3f} ({query}); "
        + "; ".join(
            f"{what}: {'yes' if difference.exceeds() else 'no'} ({difference.margin:+.3f}, standard error {difference.standard_error:.2g})"
            for what, difference in named.items()
        ),
        attributes["why_not"],
    )


# ---- drawn ----------------------------------------------------------------------------------------------------------

_TITLES = {"producing": "Producing rows", "generated": "Own rows"}
UNIT = 100.0
"""Table 4's unit is 10^-2."""


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Table 4."""
    length = data.attrs["training_length"]
    mass, titles = data["mass_per_token"], {rows: title for rows, title in _TITLES.items() if rows in data["rows"].values}
    by_rows = mass.sel(rows=list(titles)).rename(rows="method", span="test_set").assign_coords(method=list(titles.values()))
    error = by_rows.std("prompt", ddof=1) / np.sqrt(by_rows.sizes["prompt"])
    drawn = described(by_rows.mean("prompt"), "attention mass per token", "0.01").expand_dims("seed", -1).to_dataset(name="score")
    yield Drawing(
        f"attention_mass_{data.attrs['task']}_{length}",
        method_panels(drawn.assign(standard_error=error)),
        f"Attention mass per token on parts of the context (RePo table 4), mean over {data.sizes['prompt']} prompts of {length} tokens, "
        "all layers and heads; bar: standard error over prompts. Left: the rows that produced the generated tokens, one earlier; "
        f"right: rows of the generated tokens themselves, as the paper puts it. Even attention over {length} tokens: "
        f"{UNIT / length:.3g}.",
        data,
    )


ATTENTION = Experiment(
    "attention mass",
    (R4, R4_PRODUCING),
    Needs(asked_the_same(finds_needles), NO_HAYSTACK, HAYSTACKS, why_not=_why_not),
    measure,
    judge,
    draw,
    OLMO,
)
