"""Evidence as a table, and verdicts from it: `evidence.csv.gz`, next to the figures, has every unit
behind a test or an interval.

    row, claim, checkpoint, seed     a row number per verdict, whose lines go by training seed
    part: measured, over, control, note, why, scale     texts
    part: number, spread, n, seeds   the shown number
    part: value, null                a quantity of the rule; unit: which of several values, or of
                                     the controls with random weights, the shuffles
    part: own, rival                 scores of both sides of a difference, by unit "seed 3" or
                                     "prompt 12"; `against` names the rival
    part: margin, error, degrees     a difference without its scores
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from position_papers.kit.judge.claims import (
    Claim,
    Estimate,
    Evidence,
    Interval,
    Verdict,
    corrected_together,
    decide,
)
from position_papers.kit.judge.differences import Difference, Sample, between
from position_papers.kit.judge.rules import Observed

if TYPE_CHECKING:
    from position_papers.kit.experiment import Paper

EVIDENCE = "evidence.csv.gz"
COLUMNS = ("row", "claim", "checkpoint", "seed", "quantity", "against", "part", "unit")
EMPTY = dict.fromkeys((*COLUMNS, "text"), "")
"""An empty line."""
Line = dict[str, Any]


def evidence_table(evidence: Iterable[Evidence], scales: Iterable[str]) -> pd.DataFrame:
    """Return evidence as a table; a verdict over several training seeds is one row of them.

    Args:
        evidence: Evidence in the order of the verdicts.
        scales: For each, the difference of our models in size from the paper's.

    Returns:
        One line per unit, with the columns of the module and `value`, `text`.
    """
    lines: list[Line] = []
    row, last = -1, None
    for own, scale in zip(evidence, scales, strict=True):
        is_next_seed = (
            last is not None
            and last.claim is own.claim
            and own.seed is not None
            and last.seed is not None
            and own.seed > last.seed
        )
        row, last = row + (not is_next_seed), own
        key = {"row": row, "claim": own.claim.label, "checkpoint": own.checkpoint}
        key |= {} if own.seed is None else {"seed": own.seed}
        lines += [{**EMPTY, **key, **line} for line in _lines(own, scale)]
    return pd.DataFrame(lines, columns=[*EMPTY, "value"])


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
        table: The lines of one row number: one checkpoint, by training seed if there are several.

    Returns:
        The verdict, before Holm's correction over other rows of the claim.

    Raises:
        KeyError: The table lacks a quantity of the rule.
    """
    by_seed = _by(table.to_dict("records"), "seed").values()
    return decide([_evidence(claim, own) for own in by_seed])


def verdicts(paper: Paper, table: pd.DataFrame) -> tuple[list[Verdict], list[str]]:
    """Return every verdict on a paper's claims, and for each the difference of our models in scale.

    Rows that decide one claim are corrected together; measurements for claims that the paper no
    longer has are left out.

    Args:
        paper: The paper.
        table: All evidence on the paper.

    Returns:
        The verdicts in the order of the table, and one text per verdict.
    """
    claims = {claim.label: claim for claim in paper.claims}
    found: list[Verdict] = []
    scales: list[str] = []
    for _, part in table.groupby("row", sort=False):
        if (label := part["claim"].iloc[0]) not in claims:
            continue
        found.append(judge(claims[label], part))
        scales.append(next(iter(part["text"][part["part"] == "scale"]), ""))
    for experiment in paper.experiments:
        places = [i for i, each in enumerate(found) if each.claim in experiment.claims]
        own = corrected_together([found[place] for place in places], experiment.needs.zoo)
        for place, each in zip(places, own, strict=True):
            found[place] = each
    return found, scales


def _evidence(claim: Claim, lines: Sequence[Line]) -> Evidence:
    quantities = _by(lines, "quantity")
    shown = _by(quantities.pop("", ()), "part")
    texts = {part: tuple(line["text"] for line in own) for part, own in shown.items()}
    numbers = {part: own[0]["value"] for part, own in shown.items()}
    text = {part: of[0] for part, of in texts.items()}
    estimate = Estimate(
        numbers.get("number"),
        text.get("measured", ""),
        int(numbers.get("n", 0)),
        int(numbers.get("seeds", 0)),
        text.get("control", ""),
        {quantity: _value(own) for quantity, own in quantities.items()},
    )
    spread, seed = numbers.get("spread"), lines[0]["seed"]
    return Evidence(
        claim,
        lines[0]["checkpoint"],
        estimate,
        None if spread is None else Interval(spread, text.get("over", "")),
        texts.get("note", ()),
        texts.get("why", ()),
        int(seed) if seed else None,
    )


def _by(lines: Iterable[Line], column: str) -> dict[str, list[Line]]:
    """Group lines by their value in a column, in the order of first occurrence."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line[column], []).append(line)
    return found


def _value(lines: Sequence[Line]) -> Any:
    """Return one quantity of a rule."""
    parts = _by(lines, "part")
    values = [line["value"] for line in parts.get("value", ())]
    if "rivals" in parts:
        return {}
    if "null" in parts:
        return Observed(values[0], [line["value"] for line in parts["null"] if line["unit"]])
    if not values:
        rivals = {name: _read_difference(own) for name, own in _by(lines, "against").items()}
        return rivals.get("", rivals)
    if lines[0]["against"]:
        units = _by(lines, "unit").values()
        return [{line["against"]: line["value"] for line in own} for own in units]
    return values[0] if len(values) == 1 else tuple(values)


def _read_difference(lines: Sequence[Line]) -> Difference:
    parts = _by(lines, "part")
    if "margin" in parts:
        margin, error, degrees = (parts[part][0] for part in ("margin", "error", "degrees"))
        return Difference(margin["value"], error["value"], margin["text"], degrees["value"])
    return between(_sample(parts["own"]), _sample(parts["rival"]))


def _sample(lines: Sequence[Line]) -> Sample:
    units: dict[str, dict[str, float]] = {}
    for line in lines:
        kind, _, number = line["unit"].partition(" ")
        units.setdefault(kind, {})[number] = line["value"]
    seeds, share = units.get("seed", {}), "share" in units
    return Sample(
        np.array([*(seeds or units.get("run", {})).values()]),
        np.array([*units.get("prompt", {}).values()]),
        int(units["share" if share else "count"][""]),
        share,
        tuple(map(int, seeds)),
        lines[0]["text"],
    )


def read_evidence(file: Path) -> pd.DataFrame:
    """Return the table of evidence in a file.

    Args:
        file: File of `write_evidence`.

    Returns:
        The table, every value to the last digit.
    """
    table = pd.read_csv(file, dtype=str, keep_default_na=False)
    # Numbers are parsed by Python, since pandas' parser is not exact to the last digit.
    return table.assign(value=[float(text or "nan") for text in table["value"]])


def write_evidence(table: pd.DataFrame, file: Path) -> None:
    """Write a table of evidence; the same table gives the same bytes.

    Args:
        table: Result of `evidence_table`.
        file: File to write, as compressed CSV.
    """
    table.to_csv(file, index=False, lineterminator="\n", compression={"method": "gzip", "mtime": 0})
