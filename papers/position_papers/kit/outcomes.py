"""What the verdicts of one claim come to, as words of the pages over all papers; rows are those of verdicts.csv. Knows no paper by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from position_papers.kit.claims import AFTER_HOLM, BY_CHANCE, FAILS, HOLDS, UNMEASURED, Claim
from position_papers.kit.experiment import Paper

NOT_YET = "not measured yet"
IN_PART, AS_WORDED = "holds in part", "holds as worded alone"
"""Some of the rows that decide hold; all of them do, but not what has to hold beside them, such as that more holds than by chance."""
HEADINGS = {
    HOLDS: "Stands",
    IN_PART: "Stands in part",
    AS_WORDED: "Holds as the paper puts it, but",
    FAILS: "Does not stand",
    UNMEASURED: "Cannot be told here",
}
_OF_SEEDS = re.compile(r"(\d+) of (\d+) seeds;")
"""What the note of a row over training seeds begins with: in how many the rule holds, of those that can be judged."""
_AGAINST, _NOTHING = (FAILS, IN_PART, AS_WORDED), (UNMEASURED, NOT_YET)
"""What a part that a claim also needs comes out as where it speaks against the claim, and where it says nothing."""
EXTENSION = "none"
"""The paper's number of a claim that no paper makes: a question of ours to one of theirs."""


def number(row: Mapping[str, str], claim: Claim, rows: Sequence[Mapping[str, str]]) -> str:
    """The number of one row of `claim` with its checkpoint. Where `rows`, of all claims, have the same over training seeds, the spread is
    theirs: one over prompts is none of the claim.
    """
    label = replace(claim, part=claim.part_of_every_seed).label
    of_seeds = [each for each in rows if (each["claim"], each["checkpoint"]) == (label, row["checkpoint"]) and each["ours"]]
    if not of_seeds:
        return f"{row['checkpoint']}: {with_spread(row)}"
    (over,) = of_seeds
    return f"{row['checkpoint']}: {row['ours']} (one seed; of {over['seeds']}: {over['ours']} ± {over['spread']})"


def with_spread(row: Mapping[str, str]) -> str:
    """The number of one row, with its spread and what that is taken over."""
    return row["ours"] + (f" ± {row['spread']} ({row['spread_over']})" if row["spread"] else "")


def together(rows: Sequence[Mapping[str, str]]) -> str:
    """What the verdicts of one claim come to."""
    if not rows:
        return NOT_YET
    judged = [row["verdict"] for row in rows if row["verdict"] != UNMEASURED]
    if not judged:
        notes = dict.fromkeys(row["note"] for row in rows if row["note"])
        return f"{UNMEASURED}: {'; '.join(notes)}" if notes else UNMEASURED
    held = judged.count(HOLDS)
    if held == len(judged):
        return f"**{HOLDS}**" + (f" ({held} of {held})" if held > 1 else "")
    return f"{HOLDS} in {held} of {len(judged)}" if held else FAILS


@dataclass(frozen=True)
class Standing:
    """What became of a claim."""

    outcome: str
    """`HOLDS`, `IN_PART`, `AS_WORDED`, `FAILS`, `UNMEASURED` or `NOT_YET`."""
    why: str = ""
    """What is lacking where it holds in part or as worded alone, or but for chance; what cannot be told beside it where it holds; why
    nothing can be told."""


def standing(rows_of: Callable[[Claim], Sequence[Mapping[str, str]]], paper: Paper, claim: Claim) -> Standing:
    """What became of `claim`, given the rows of verdicts that decide on each claim (`primary_rows`).

    It holds where all of its rows do, and those parts that it has to hold in `also`: beyond a null, in every seed, against another rival.
    """
    rows = rows_of(claim)
    judged = [row for row in rows if row["verdict"] != UNMEASURED]
    if not judged:
        return Standing(UNMEASURED, reason(rows)) if rows else Standing(NOT_YET)
    held = sum(row["verdict"] == HOLDS for row in judged)
    if not held:
        by_chance = all(row["note"].endswith(BY_CHANCE) or AFTER_HOLM in row["note"] for row in judged)
        return Standing(FAILS, BY_CHANCE if by_chance else "")
    further = {
        each: standing(rows_of, paper, each).outcome for each in paper.claims if each.id == claim.id and each.part in claim.also
    }
    lacking, untold = (
        [_beside(each, claim) for each, came in further.items() if came in these] for these in (_AGAINST, _NOTHING)
    )
    beside = f"not {', nor '.join(lacking)}" if lacking else ""
    if held < len(judged):
        return Standing(IN_PART, ", ".join(filter(None, (f"in {held} of {len(judged)}", beside))))
    if lacking:
        return Standing(AS_WORDED, beside)
    return Standing(HOLDS, f"cannot be told: {', '.join(untold)}" if untold else "")


def _beside(part: Claim, claim: Claim) -> str:
    """What `part` asks for beyond what `claim` does: "beyond random weights"."""
    own = claim.part.split(", ")
    return ", ".join(word for word in part.part.split(", ") if word not in own)


def remark_on_cause(rows_of: Callable[[Claim], Sequence[Mapping[str, str]]], paper: Paper, claim: Claim) -> str:
    """What is added to a claim that stands, where removing what it describes breaks nothing, or not in every training seed that was asked;
    "" where it does, or nobody asked.
    """
    same = [each for each in paper.claims if claim.cause and each.id == claim.id]
    causes = [each for each in same if each.part == claim.cause]
    of_seeds = [each for each in same if each.part in [cause.part_of_every_seed for cause in causes]]
    found = [_OF_SEEDS.match(row["note"]) for each in of_seeds for row in rows_of(each)]
    counts = [(int(match[1]), int(match[2])) for match in found if match]
    if counts:
        held, seeds = counts[0]
        where = f" in {seeds - held} of {seeds} seeds" if held else ""
        return f", though{where} nothing breaks without it" if held < seeds else ""
    breaks_nothing = any(standing(rows_of, paper, each).outcome == FAILS for each in causes)
    return ", though nothing breaks without it" if breaks_nothing else ""


def primary_rows(verdicts: Sequence[Mapping[str, str]], paper: Paper, claim: Claim) -> list[Mapping[str, str]]:
    """The rows on the checkpoint that `claim` is about first of all: the first of those its experiment names that could be judged, else any
    other that could; for a claim `about` several things, on the first of each. All rows where none could be judged.
    """
    rows = [row for row in verdicts if row["claim"] == claim.label]
    judged = {row["checkpoint"] for row in rows if row["verdict"] != UNMEASURED}
    named = (name for experiment in paper.experiments if claim in experiment.claims for name in experiment.needs.zoo)
    known = [
        [name for name in group if name in judged] for group in (*claim.about, (*named, *(row["checkpoint"] for row in rows)))
    ]
    things = [group[0] for group in known[:-1] if group]
    chosen = things or known[-1][:1]
    return [row for row in rows if row["checkpoint"] in chosen] or rows


_IN_SENTENCES = {
    HOLDS: ("stands", "stand"),
    IN_PART: ("stands in part", "stand in part"),
    AS_WORDED: ("holds as its paper puts it and no further", "hold as their papers put them and no further"),
    FAILS: ("does not stand", "do not stand"),
    UNMEASURED: ("cannot be told here", "cannot be told here"),
}


@dataclass(frozen=True)
class Told:
    """A claim with what became of it, in words."""

    claim: Claim
    outcome: str
    """The heading that it stands under."""
    why: str = ""
    """The reason, where nothing can be told."""
    where: str = ""
    """What follows its label: on which data alone it was asked, where not on all; that nothing needs what it describes."""


def in_one_paragraph(told: Sequence[Told]) -> str:
    """Which claims came out how, in the words of their statements, each once and without its parts, with what is lacking or why nothing
    can be told; then how many came out how with the parts counted apart. Empty where nothing is told.
    """
    themselves = [each for each in told if not each.claim.part]
    sentences = [f"The papers make {len(themselves)} claims: {_counted(themselves)}."] if themselves else []
    for outcome, heading in HEADINGS.items():
        for why, some in _by_reason(themselves, heading).items():
            sentences.append(f"{_count(some, outcome)}{f' ({why})' if why else ''}: {_in_words(some)}.")
    if len(told) > len(themselves):
        sentences.append(f"With their parts they are {len(told)}: {_counted(told)}.")
    return " ".join(sentences)


def _counted(told: Sequence[Told]) -> str:
    return ", ".join(count for count in (_count(told, outcome) for outcome in HEADINGS) if count)


def _count(told: Sequence[Told], outcome: str) -> str:
    """How many came out so: "2 stand"; empty where none did."""
    count = sum(each.outcome == HEADINGS[outcome] for each in told)
    return f"{count} {_IN_SENTENCES[outcome][count > 1]}" if count else ""


def _by_reason(told: Sequence[Told], heading: str) -> dict[str, list[Told]]:
    """Those under `heading`, by what is lacking or why nothing can be told."""
    reasons: dict[str, list[Told]] = {}
    for each in told:
        if each.outcome == heading:
            reasons.setdefault(each.why, []).append(each)
    return reasons


def _in_words(told: Sequence[Told]) -> str:
    """The statements with their labels; those of one wording once."""
    labels: dict[str, list[str]] = {}
    for each in told:
        labels.setdefault(each.claim.statement.rstrip("."), []).append(each.claim.label + each.where)
    return "; ".join(f"{statement} ({', '.join(known)})" for statement, known in labels.items())


def paragraph(paper: Paper, told: Sequence[Told], headings: Sequence[str]) -> list[str]:
    """The paper's name and a list: under each of `headings` its claims; those of one wording once, those of one reason together."""
    items = []
    for heading in headings:
        for why, some in _by_reason(told, heading).items():
            because = "" if not why else f" {why}" if heading.endswith("but") else f" ({why})"
            items.append(f"- *{heading}*{because}: {_in_words(some)}.")
    return [f"**{paper.title.partition(',')[0]}**\n\n" + "\n".join(items)] if items else []


def reason(rows: Sequence[Mapping[str, str]]) -> str:
    """Why nothing can be told: the first words of the first note of rows of verdicts."""
    why = next((row["note"] for row in rows if row["note"]), "")
    return why.partition(": ")[0].partition("; ")[0]
