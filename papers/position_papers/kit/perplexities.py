"""Perplexities of language models side by side, at the training length and beyond: what CoPE's and HoPE's claims about them share.

    perplexity = exp of the mean of -log p over the tokens of held-out windows; compared as log perplexity, window by window

Windows of text differ far more than models do: only perplexities of the same windows can stand side by side.

    what seeds change    d^2 = mean over checkpoints with several seeds of their variance over these;  error^2 = s^2 + 2 d^2

A difference of two models of one seed each has an error s over windows alone. What another training seed would have made of both is known
from the checkpoints beside them that have several, on the same windows; it has as many degrees of freedom as these have seeds to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr

from position_papers.kit.claims import SEEN, UNMEASURABLE, Claim, Verdict, unmeasured
from position_papers.kit.differences import Difference, paired_difference
from position_papers.kit.samples import between
from position_papers.kit.scores import PLAIN, Scored, in_layers, score_table
from repo_interp.measures.labels import described


def on_the_same_windows(scored: Sequence[Scored]) -> list[Scored]:
    """Those of `scored` whose perplexities can stand side by side: those with weights, where any have them.

    What a run without weights has recorded is a mean over other windows than those that are measured now.
    """
    return [each for each in scored if each.live is not None] or list(scored)


def perplexity_table(scored: Sequence[Scored], method: str = PLAIN) -> xr.Dataset:
    """Perplexity [checkpoint, test_set, seed] by length in tokens, ascending, as `plots.marks.perplexity` draws it."""
    table = score_table(scored, method=method).assign_coords(layout=("checkpoint", [in_layers(each) for each in scored]))
    values = xr.apply_ufunc(np.exp, table["score"])
    table = table.assign(
        score=values.assign_attrs(long_name="perplexity", units="1"),
        standard_error=(values.mean("seed") * table["standard_error"]).assign_attrs(
            long_name="standard error of the perplexity over windows", units="1"
        ),
    )
    return table.assign_coords(test_set=table["test_set"].astype(int)).sortby("test_set")


def differences(rows: Sequence[tuple[Scored, str]], reference: Scored, name: str, table: xr.Dataset) -> dict[str, xr.DataArray]:
    """Log perplexity of each checkpoint and method of `rows` above that of `reference`, called `name`, by checkpoint and test set of
    `table`, with its standard error as `samples.between` takes it, as `plots.marks.perplexity` draws them; NaN where one has no scores.
    Another method of `reference` itself is compared with it seed by seed: they are the same models.
    """
    values = np.full((2, len(rows), table.sizes["test_set"]), np.nan)
    for row, (each, method) in enumerate(rows):
        for place, test_set in enumerate(table["test_set"].values.astype(str)):
            if test_set in each.test_sets and test_set in reference.test_sets:
                mine, theirs = each.sample((test_set,), method), reference.sample((test_set,))
                same_models = each is reference and len(mine.seeds) == len(theirs.seeds) > 1
                own = paired_difference(mine.seeds, theirs.seeds) if same_models else between(mine, theirs)
                values[:, row, place] = own.margin, own.standard_error if np.isfinite(own.standard_error) else np.nan
    axes = {axis: table[axis].values for axis in ("checkpoint", "test_set")}
    margin, error = (xr.DataArray(each, axes, tuple(axes)) for each in values)
    above = described(margin, f"log perplexity above that of {name}", "nat per token").assign_attrs({"from": name})
    return {
        "difference": above,
        "difference_error": described(error, "standard error of the difference over seeds or windows", "nat per token"),
    }


def differences_caption(name: str) -> str:
    """What a caption says of the differences from the checkpoint called `name`."""
    return (
        f"Below: log perplexity above that of {name}, with two standard errors - over training seeds where one of the two has several, "
        "else over the windows that both have."
    )


def continued_caption(scored: Sequence[Scored]) -> str:
    """What a caption says of checkpoints that went on from a trained one; "" where none did."""
    names = [each.name for each in scored if each.configuration.continue_from]
    return f" More training than the others, on from a trained RoPE model: {', '.join(names)}." if names else ""


def errors_caption(table: xr.Dataset) -> str:
    """What a caption says of the training seeds and windows behind a table of perplexities."""
    errors = (table["standard_error"] / table["score"].mean("seed")).values
    known = errors[np.isfinite(errors)]
    windows = (
        f" Standard error over windows: up to {100 * known.max():.2g} %; all have the same, and are compared on each."
        if known.size
        else ""
    )
    count = table.sizes["seed"]
    seeds = "One training seed." if count == 1 else f"Mean over up to {count} training seeds; small dots: each."
    return seeds + windows


def shortest_and_longest(scored: Scored) -> tuple[str, str]:
    """The training length, and the longest length that there are scores of, as names of test sets."""
    lengths = sorted(int(name) for name in scored.test_sets)
    return str(min(lengths, key=lambda length: abs(length - scored.training_length))), str(lengths[-1])


# ---- beside what another training seed would change ------------------------------------------------------------------

BEYOND_SEEDS = "beyond training seeds"
"""The part of a claim that says so."""


@dataclass(frozen=True)
class SeedSpread:
    """How much a number differs between training seeds of one checkpoint."""

    deviation: float
    degrees: int
    of: str
    """The checkpoints that have several seeds."""


def seed_spread(scored: Sequence[Scored], seeds_of: Callable[[Scored], np.ndarray]) -> SeedSpread | None:
    """The standard deviation over seeds of `seeds_of` a checkpoint, pooled over those that have several; None where none has."""
    several = {each.name: values for each in scored if len(values := seeds_of(each)) > 1}
    if not several:
        return None
    degrees = sum(len(values) - 1 for values in several.values())
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several.values())
    return SeedSpread(float(np.sqrt(squares / degrees)), degrees, ", ".join(several))


def beyond_seeds(claim: Claim) -> Claim:
    """The same claim, a question of ours to it: by more than training seeds differ."""
    statement = f"{claim.statement}, by more than training seeds differ"
    part = ", ".join(filter(None, (claim.part, BEYOND_SEEDS)))
    return replace(claim, statement=statement, paper_number="none", part=part, written=SEEN, also=())


def judged_beyond_seeds(judged: Verdict, claim: Claim, spread: SeedSpread | None) -> Verdict:
    """The verdict on `claim`, made by `beyond_seeds`, from that on the claim itself: its differences, with the error that seeds add."""
    if judged.outcome == UNMEASURABLE:
        return replace(judged, claim=claim)
    if spread is None:
        return unmeasured(
            claim, judged.checkpoint, "no checkpoint has several training seeds that were scored on the same windows"
        )

    def widened(difference: Difference) -> Difference:
        if difference.of_seeds:  # seeds are among its errors
            return difference
        error = float(np.hypot(difference.standard_error, np.sqrt(2) * spread.deviation))
        return Difference(difference.margin, error, f"{difference.over} and seeds", spread.degrees)

    compared = {quantity: known for quantity, known in judged.estimate.values.items() if isinstance(known, Mapping)}
    values = {quantity: {rival: widened(each) for rival, each in known.items()} for quantity, known in compared.items()}
    margins = [each for known in values.values() for each in known.values()]
    told = ", ".join(f"{each.margin:.3g} (standard error {each.standard_error:.2g})" for each in margins)
    deviation = f"deviation over seeds {spread.deviation:.2g}, as of {spread.of} ({spread.degrees} degrees of freedom)"
    return judged.on(claim, values, f"nats: {told}", deviation)
