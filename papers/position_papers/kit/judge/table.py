"""Evidence as a table, and verdicts from it: `evidence.csv.gz` beside the figures holds every unit
that a test or an interval is taken over.

    row, claim, checkpoint, seed     one verdict has one row number, and a part of the table for every training seed
    part measured, over, control, note, why, scale     text
    part number, spread, n, seeds                      the number that is shown
    part value, null                 a quantity of the claim's rule; unit: one of several values, a control with random weights or a shuffle
    part own, rival                  the scores that a difference is taken between, by unit "seed 3" or "prompt 12"; `against` names the rival
    part margin, error, degrees      a difference of which no more is known

Of a row that was measured before its units were kept, the outcome and its reasons stand in their
place: part outcome, reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from position_papers.kit.judge.claims import (
    Claim,
    Estimate,
    Evidence,
    Interval,
    Outcome,
    Verdict,
    corrected_together,
    decide,
    reasons_of,
)
from position_papers.kit.judge.differences import Difference, Sample, between
from position_papers.kit.judge.rules import Observed
from repo_interp.errors import InputError

if TYPE_CHECKING:
    from position_papers.kit.experiment import Paper

EVIDENCE = "evidence.csv.gz"
COLUMNS = ("row", "claim", "checkpoint", "seed", "quantity", "against", "part", "unit")
Line = dict[str, Any]


def evidence_table(evidence: Iterable[Evidence], scales: Iterable[str]) -> pd.DataFrame:
    """Return evidence as a table; a verdict over several training seeds is one row of them.

    Args:
        evidence: In the order of the verdicts.
        scales: How the models of each differ in size from the paper's.

    Returns:
        One line per unit, with the columns of the module and `value`, `text`.
    """
    lines: list[Line] = []
    row, last = -1, None
    for own, scale in zip(evidence, scales, strict=True):
        is_next_seed = (
            last is not None
            and last.claim is own.claim
            and None not in (last.seed, own.seed)
            and own.seed > last.seed
        )
        row, last = row + (not is_next_seed), own
        key = {"row": row, "claim": own.claim.label, "checkpoint": own.checkpoint}
        seed = "" if own.seed is None else str(own.seed)
        lines += [{**key, "seed": seed, **line} for line in _lines(own, scale)]
    return pd.DataFrame(lines, columns=[*COLUMNS, "value", "text"]).fillna(
        dict.fromkeys((*COLUMNS[3:], "text"), "")
    )


def _lines(own: Evidence, scale: str) -> Iterator[Line]:
    estimate, interval = own.estimate, own.interval
    texts = [("measured", estimate.measured), ("control", estimate.control), ("scale", scale)]
    texts += [("note", note) for note in own.notes] + [("why", why) for why in own.why]
    texts += [("over", "" if interval is None else interval.over)]
    yield from ({"part": part, "text": text} for part, text in texts if text or part == "why")
    numbers = {
        "number": estimate.value,
        "spread": None if interval is None else interval.spread,
        "n": estimate.n,
        "seeds": estimate.seeds,
    }
    yield from ({"part": part, "value": of} for part, of in numbers.items() if of is not None)
    if not own.why:
        for quantity, value in estimate.values.items():
            yield from ({"quantity": quantity, **line} for line in _quantity(value))


def _quantity(value: Any) -> Iterator[Line]:
    match value:
        case Difference():
            yield from _difference(value, "")
        case Observed():
            yield {"part": "value", "value": float(value.value)}
            for unit, of in enumerate(value.null):
                yield {"part": "null", "unit": unit, "value": float(of)}
            if not len(value.null):
                yield {"part": "null"}
        case Mapping():
            yield from (line for rival, of in value.items() for line in _difference(of, str(rival)))
            if not value:
                yield {"part": "rivals"}
        case [Mapping(), *_]:
            for unit, by_name in enumerate(value):
                for name, of in by_name.items():
                    yield {"part": "value", "against": name, "unit": unit, "value": float(of)}
        case tuple():
            for unit, of in enumerate(value):
                yield {"part": "value", "unit": unit, "value": float(of)}
        case None:
            return
        case _:
            yield {"part": "value", "value": float(value)}


def _difference(value: Difference, rival: str) -> Iterator[Line]:
    if value.samples is None:
        yield {"against": rival, "part": "margin", "value": value.margin, "text": value.over}
        yield {"against": rival, "part": "error", "value": value.standard_error}
        yield {"against": rival, "part": "degrees", "value": value.degrees}
        return
    for part, sample in zip(("own", "rival"), value.samples, strict=True):
        line = {"against": rival, "part": part, "text": sample.texts}
        seeds = sample.numbers or range(len(sample.seeds))
        kind = "seed" if sample.numbers else "run"
        for unit, of in zip(seeds, sample.seeds, strict=True):
            yield {**line, "unit": f"{kind} {unit}", "value": float(of)}
        for unit, of in enumerate(sample.prompts):
            yield {**line, "unit": f"prompt {unit}", "value": float(of)}
        yield {**line, "unit": "share" if sample.share else "count", "value": sample.recorded}


# ---- back ----------------------------------------------------------------------------------------


def judge(claim: Claim, table: pd.DataFrame) -> Verdict:
    """Return the verdict of a claim's rule on its part of a table of evidence.

    Args:
        claim: The claim, with its rule.
        table: The lines of one row number: of one checkpoint, by training seed where several
            were measured.

    Returns:
        The verdict, before Holm's correction over other rows of the claim. Where the table lacks
        a quantity of the rule and has the outcome that was found when it was measured, that one.

    Raises:
        KeyError: The table has neither the quantities of the rule nor an outcome.
    """
    by_seed = [_evidence(claim, part) for _, part in table.groupby("seed", sort=False)]
    stored = _by_part(table, "text")
    if "outcome" not in stored:
        return decide(by_seed)
    (own,), (outcome,), (reasons,) = by_seed, stored["outcome"], stored["reasons"]
    return Verdict(
        claim,
        own.checkpoint,
        Outcome(outcome),
        own.estimate,
        own.interval,
        reasons_of(reasons),
    )


def verdicts(paper: Paper, table: pd.DataFrame) -> tuple[list[Verdict], list[str]]:
    """Return every verdict on a paper's claims, and how the models of each differ in scale.

    Rows that decide on one claim are corrected together.

    Args:
        paper: The paper.
        table: All evidence of it.

    Returns:
        The verdicts in the order of the table, and as many texts.

    Raises:
        InputError: The table speaks of a claim that the paper does not have.
    """
    claims = {claim.label: claim for claim in paper.claims}
    found: list[Verdict] = []
    scales: list[str] = []
    for _, part in table.groupby("row", sort=False):
        label = part["claim"].iloc[0]
        if label not in claims:
            raise InputError(
                f"{EVIDENCE} speaks of {label}, which is no claim of {paper.name}; measure "
                "again with --overwrite"
            )
        found.append(judge(claims[label], part))
        scales.append(next(iter(_by_part(part, "text").get("scale", ())), ""))
    for experiment in paper.experiments:
        places = [i for i, each in enumerate(found) if each.claim in experiment.claims]
        own = corrected_together([found[place] for place in places], experiment.needs.zoo)
        for place, each in zip(places, own, strict=True):
            found[place] = each
    return found, scales


def _evidence(claim: Claim, table: pd.DataFrame) -> Evidence:
    texts, numbers = _by_part(table, "text"), _by_part(table, "value")

    def text(part: str) -> str:
        return next(iter(texts.get(part, ())), "")

    def number(part: str) -> float | None:
        return next(iter(numbers.get(part, ())), None)

    values = {
        str(quantity): _value(part)
        for quantity, part in table[table["quantity"] != ""].groupby("quantity", sort=False)
    }
    shown = table[table["quantity"] == ""]["part"]
    estimate = Estimate(
        number("number") if "number" in shown.values else None,
        text("measured"),
        int(number("n") or 0),
        int(number("seeds") or 0),
        text("control"),
        values,
    )
    spread, seed = number("spread"), table["seed"].iloc[0]
    return Evidence(
        claim,
        table["checkpoint"].iloc[0],
        estimate,
        None if spread is None else Interval(spread, text("over")),
        tuple(texts.get("note", ())),
        tuple(texts.get("why", ())),
        int(seed) if seed else None,
    )


def _by_part(table: pd.DataFrame, column: str) -> dict[str, list[Any]]:
    own = table[table["quantity"] == ""]
    return {str(part): of[column].tolist() for part, of in own.groupby("part", sort=False)}


def _value(table: pd.DataFrame) -> Any:
    """One quantity of a rule."""
    parts, values = table["part"], table["value"]
    if "rivals" in parts.values:
        return {}
    if not parts.isin(["value", "null"]).any():
        rivals = {
            str(name): _read_difference(of) for name, of in table.groupby("against", sort=False)
        }
        return rivals.get("", rivals)
    if "null" in parts.values:
        null = values[(parts == "null") & (table["unit"] != "")].to_numpy()
        return Observed(values[parts == "value"].item(), null)
    if (table["against"] != "").any():
        return [
            dict(zip(of["against"], of["value"], strict=True))
            for _, of in table.groupby("unit", sort=False)
        ]
    return values.item() if len(table) == 1 else tuple(values)


def _read_difference(table: pd.DataFrame) -> Difference:
    parts = table.set_index("part")
    if "margin" in parts.index:
        margin, error, degrees = parts.loc[["margin", "error", "degrees"], "value"]
        return Difference(margin, error, parts.loc["margin", "text"], degrees)
    return between(*(_sample(table[table["part"] == part]) for part in ("own", "rival")))


def _sample(table: pd.DataFrame) -> Sample:
    by_kind: dict[str, list[tuple[str, float]]] = {}
    for unit, value in zip(table["unit"], table["value"], strict=True):
        kind, _, number = unit.partition(" ")
        by_kind.setdefault(kind, []).append((number, value))
    seeds, runs = by_kind.get("seed", []), by_kind.get("run", [])
    share = "share" in by_kind
    return Sample(
        np.array([value for _, value in seeds or runs]),
        np.array([value for _, value in by_kind.get("prompt", [])]),
        int(by_kind["share" if share else "count"][0][1]),
        share,
        tuple(int(number) for number, _ in seeds),
        table["text"].iloc[0],
    )


def read_evidence(file: Path) -> pd.DataFrame:
    """Return the table of evidence in a file."""
    text = dict.fromkeys((*COLUMNS[1:], "text"), str)
    table = pd.read_csv(file, dtype=text, keep_default_na=False, na_values={"value": [""]},
                        float_precision="round_trip")  # fmt: skip
    return table


def write_evidence(table: pd.DataFrame, file: Path) -> None:
    """Write a table of evidence; the same table gives the same bytes."""
    table.to_csv(file, index=False, lineterminator="\n", compression={"method": "gzip", "mtime": 0})
