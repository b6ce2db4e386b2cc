"""Tables and sentences of a card, for its Markdown page and its HTML page.

This module knows no model, no figure and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from position_papers.card.columns import LEARNED
from position_papers.card.content import Card, TaskCard
from position_papers.card.intervals import BETTER, NOT_LEARNED, UNDECIDED, WORSE
from position_papers.card.records import Compared, Row
from repo_interp.plots.marks import Table, cells

ORDER = (WORSE, UNDECIDED, BETTER)
CAVEATS = (
    "Small models: what ranks here need not rank at scale.",
    "The recipes were piloted with RoPE and RePo. A scheme that has not learned by one may learn by "
    "another, with another learning rate for one; it is never called worse here.",
    "An interval is that of one difference: of twenty at 95 %, one leaves out the truth.",
    "One seed beside several: their spread s is taken for it too, so that a difference is decided "
    "where it is above 4.97 s beside three seeds, 2.51 s beside eight, and above what prompts "
    "explain. Where their seeds hardly spread that may be too little: better or worse by one seed "
    "is a hint. One seed beside one is never decided.",
)
"""Limits of all cards."""
LEGEND = (
    "Dot: difference; line: 95 % interval, none where both have one seed; blue: better, orange: "
    "worse, grey: undecided, or one of both has not learned."
)
UNLIKE = "test sets unlike training"
"""Test sets for comparing schemes: longer, shorter and different ones."""
_HEADS = {
    "range": "largest minus smallest position of a prompt, mean over prompts "
    "(docs/measures.md#positions)",
    "resolution": "tokens between two from which on the positions of 90 % of pairs tell which is "
    "the later one (docs/measures.md#patterns)",
    "order": "largest order that positions keep from some distance on: 1 the later token always "
    "has the higher position, -1 always the lower (docs/measures.md#patterns)",
    "needle": "share of attention that goes from answers to the span that holds them "
    "(docs/measures.md#attention_mass)",
    "band": "rotary pairs, by frequency, that account for most of the variance of logits: low, "
    "activated (half a turn to a turn over the training length) or high "
    "(docs/measures.md#components)",
    "axes": "correlation of logits with a sum of a term of the distance, one of the query and one "
    "of the key (docs/measures.md#three_axis)",
    "disentangled": "the same for one query at every distance: a position axis plus a semantic "
    "one (docs/measures.md#fake_distance)",
    "semantic share": "share of the semantic axis in the variance of both "
    "(docs/measures.md#fake_distance)",
}
"""Meaning of the columns of heads, and the pages that explain them."""
_OF_INDEX = ("range", "resolution", "order")


def ordered(compared: Iterable[Compared]) -> list[Compared]:
    """Sort rivals by verdict, then by name, so that the order shows no undecided differences."""
    places = {verdict: place for place, verdict in enumerate(ORDER)}
    return sorted(compared, key=lambda one: (places.get(one.verdict, len(ORDER)), one.row.name))


def versions(made: Card) -> str:
    """State the number of versions of the scheme, and of versions whose scores were shown."""
    if made.tried < 2:
        return f"{made.tried}"
    warning = ". Who sees several scores and shows one has chosen it by these test sets"
    return (
        f"{made.tried}; this is number {made.number}; scores were seen of {made.scored}"
        f"{warning if made.scored > 1 else ''}"
    )


def verified(findings: Sequence[str], reference: Mapping[str, str]) -> str:
    """State the findings of `verify_scheme`, and whether there was a reference."""
    digest = reference.get("sha256", "")
    source = f" of a source with SHA-256 {digest[:12]}..." if digest else ""
    held = (
        f"held against the reference `{reference['function']}`{source}"
        if reference
        else "not held against a reference, so that a wrong sign or constant is not found"
    )
    return f"{'; '.join(findings) or 'no findings'}; {held}"


def reading(made: Card) -> Iterator[tuple[str, str]]:
    """Yield the terms and columns of a card, each with its meaning."""
    name = made.layout
    yield (
        "like training",
        "test sets as long as training and made as it is; learned: every seed scores at least "
        f"{100 * LEARNED:.0f} % there",
    )
    yield (
        "unlike training",
        "longer, shorter or made otherwise; each task names them; card.csv calls the mean beyond",
    )
    yield "a ± b", "mean and standard deviation over seeds"
    yield "training loss", "of the last steps, mean over seeds [nat]; decides nothing"
    yield (
        f"{name} minus it",
        "difference of means, with limits of 95 %; over: what the limits are taken over, of "
        f"{name} and of the rival: seeds (1 and 3 seeds), prompts (600 and 600 prompts), or both "
        "where each gives one of the limits; the wider limit counts",
    )
    yield (
        "verdict",
        f"{BETTER} or {WORSE} where the interval leaves out 0, else {UNDECIDED}; rows in this "
        f"order: those that {name} is {WORSE} than, {UNDECIDED}, {BETTER}, by name in each",
    )
    shown = {str(name) for each in made.tasks if each.heads is not None for name in each.heads}
    for column, meaning in _HEADS.items():
        if column in shown:
            same = (
                "; the same for every head, trained or not, where positions are the token index"
                if column in _OF_INDEX
                else ""
            )
            yield f"heads: {column}", f"{meaning}{same}"


def about(own: Row) -> str:
    """Describe the training of a row and its scores."""
    one, column = own.runs[0].recorded, own.column
    sequences = one.configuration.batch * one.configuration.accumulation
    return (
        f"{one.configuration.steps:,} steps of {sequences} sequences; {one.metric}, {one.prompts} "
        f"prompts for each test set{'' if own.higher else '; lower is better'}. Like training: "
        f"{', '.join(column.inside)}; unlike training: the mean of {', '.join(column.beyond)}."
        f"{_others(own)}"
    )


def _others(own: Row) -> str:
    """List the test sets that are not in a mean."""
    column = own.column
    left = [
        name for name in own.runs[0].recorded.means if name not in (*column.inside, *column.beyond)
    ]
    if not left:
        return ""
    named = ", ".join(left) if len(left) < 4 else f"the other {len(left)}"
    return (
        f" The figure and the table of scores have {named} too; the mean leaves them out, as it has "
        "since the first card: with them every cell and every difference would be another one."
    )


def remarks(each: TaskCard) -> Iterator[str]:
    """Yield remarks on missing results of a task."""
    if each.own is None:
        names = ", ".join(row.name for row in each.rivals)
        begun = "Not finished yet." if each.unfinished else "Not trained yet."
        yield f"{begun}{f' Records of equal budget: {names}.' if names else ''}"
    elif not each.rivals:
        yield "No record has this budget, so nothing is compared."
    if each.unfinished:
        yield f"When this was written: {'; '.join(each.unfinished)}."
    for line in each.heads_left_out:
        yield f"Not measured of the heads: {line}."
    unpaired = [one.row.name for one in ordered(each.compared) if one.unpaired]
    if unpaired:
        yield (
            "Seeds are not paired, because the records are of another device or of other versions: "
            f"{', '.join(unpaired)}."
        )


def missing(each: TaskCard) -> str:
    """List the encodings without a record for a task; "" if there are none."""
    return f"No record of this budget: {', '.join(each.missing)}." if each.missing else ""


def tables(made: Card, each: TaskCard) -> list[Table]:
    """Make the tables of a task: the scheme and its rivals, scores by test set, and heads.

    Args:
        made: The card.
        each: A task of the card.

    Returns:
        The tables; empty for a task without training.
    """
    if each.own is None:
        return []
    own, name = each.own, made.layout
    columns = ("encoding", "seeds", "like training", "unlike training")
    rows = [(*_row(own), "", "")] + [
        (*_row(one.row), _interval(one), one.verdict) for one in ordered(each.compared)
    ]
    columns = (*columns, f"{name} minus it, unlike training [95 %]", f"verdict on {name}")
    found = [Table(f"{own.column.task}_rivals", f"{name} and the records", columns, tuple(rows))]
    beside = [own, *(one.row for one in ordered(each.compared))]
    scores = [row.by_test_set() for row in beside]
    lines = tuple(
        (test_set, *cells(score.get(test_set, np.nan) for score in scores))
        for test_set in own.runs[0].recorded.means
    )
    columns = ("test set", *(row.name for row in beside))
    found.append(
        Table(f"{own.column.task}_scores", "Scores by test set, mean over seeds", columns, lines)
    )
    if each.heads is not None:
        numbers = each.heads.astype(object).where(each.heads.notna(), None)
        rows = tuple(numbers.itertuples(index=False, name=None))
        seed = own.runs[0].recorded.seed
        title = f"Heads after training, seed {seed}, on prompts like training"
        found.append(
            Table(f"{own.column.task}_heads", title, tuple(map(str, numbers.columns)), rows)
        )
    return found


def _row(row: Row) -> tuple[str, int, str, str]:
    return row.name, len(row.runs), _learned(row), _mean(row.scores(row.column.beyond))


def _mean(values: np.ndarray) -> str:
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if not len(known):
        return "–"
    return f"{known.mean():.3f}" + (f" ± {known.std(ddof=1):.3f}" if len(known) > 1 else "")


def _learned(row: Row) -> str:
    loss = f"training loss {float(np.mean(row.losses)):.2g}"
    if row.column.learned is None:
        return loss
    done, count = sum(row.learned), len(row.runs)
    if done == count:
        return f"learned, {loss}"
    return f"{NOT_LEARNED}{f' ({done} of {count} seeds did)' if done else ''}, {loss}"


def _interval(one: Compared) -> str:
    if one.margin is None:
        return ""
    found = one.margin
    limits = f" [{found.low:+.3f}, {found.high:+.3f}]" if np.isfinite(found.low) else ""
    return f"{found.difference:+.3f}{limits}, over {found.over}".replace(
        "over one seed each", "one seed each"
    )
