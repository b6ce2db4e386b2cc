"""Charts of the loss with frozen positions of a kind of heads, by class of tokens.

The control is as many other heads. All heads are also put on straight lines, and at the token index.

    dot     mean change of -log p with the positions of all heads of a kind changed, and its 95 % interval      gray: other heads

Draws the group `kinds`. This module knows nothing about how positions were changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from repo_interp.plots.marks import Dots, Finding, Table, group, number, table_of
from repo_interp.plots.view import View
from repo_interp.plugins.causes.effects_view import LEAST, against_others
from repo_interp.plugins.sources.names import FINE, MIDDLE

CLEAR = 1.5
"""Least distance of a found difference from 0, in half widths of its 95 % interval (about three
standard errors)."""
EXACT = "exact match"
"""The score with a maximum of 1."""
ROUNDING = 1e-6
"""Loss in nats below which a change is rounding of float32."""
INDEX = "the token index"
CASES = {
    "all heads, straight lines": "the straight line fitted to those of each head",
    "all heads, token index": INDEX,
}
"""Phrases for the new positions of the kinds of all heads that are not frozen."""
DO = {
    "finest clocks": f"order two tokens rightly from at most {FINE} apart",
    "middle clocks": f"order two tokens rightly from at most {MIDDLE} apart",
    "slow clocks": "follow a slower clock or shape",
    "readers of words": "depend on the word or the one before",
    "readers of segments": "depend on the line, sentence or span",
    "others": "no source explains",
}
"""Phrases for the use of positions, by kind of heads."""


def _answered(kinds: xr.Dataset) -> str:
    """The most relevant class of tokens: the answer's, if there is one."""
    return "generated" if int(kinds["tokens"].sel(token_class="generated")) else "all"


def losses_by_kind(run: xr.DataTree) -> Dots:
    """Draw the change of the loss with frozen positions, a row per kind of heads.

    Gray marks show the change for as many other heads.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.
    """
    kinds = group(run, "kinds")
    losses = kinds["loss_change"].sel(token_class=_answered(kinds), of=["change", "controls"])
    low, high = (losses.sel(bound=end, drop=True) for end in ("low", "high"))
    mean = (
        losses.sel(bound="mean", drop=True)
        # Smaller losses are rounding in float32, see ROUNDING.
        .round(6)
        .assign_coords(low=low, high=high)
    )
    runs = against_others("heads of the kind")
    names = [f"{kind} ({count})" for kind, count in kinds["heads"].to_series().items()]
    named = (
        mean.rename("nats per token lost")
        .rename(of="run")
        .assign_coords(run=list(runs.names), kind=names)
    )
    named = named.assign_attrs(
        long_name="loss with positions of heads changed", units="", least=LEAST
    )
    return Dots(named, runs, "kind", name="kinds")


def kind_table(run: xr.DataTree) -> Table:
    """Tabulate the change of the loss per kind of heads.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per kind: the change of the loss, the same for other heads, their difference, and
        the difference by class of tokens.
    """
    kinds = group(run, "kinds")
    kinds = kinds.sel(token_class=kinds["tokens"] > 0)
    losses, scores = kinds["loss_change"], kinds["score_change"].sel(bound="mean")
    # For all heads there are no other heads to compare with.
    by_class = losses.sel(of="difference").fillna(losses.sel(of="change")).sel(bound="mean")
    columns = [("heads", kinds["heads"])]
    for of, title in (("change", "loss"), ("controls", "others"), ("difference", "difference")):
        for bound, name in (("mean", title), ("low", "low"), ("high", "high")):
            columns.append((name, losses.sel(token_class="all", of=of, bound=bound)))
    for name, count in kinds["tokens"].to_series().items():
        if name != "all":
            columns.append((f"{name} ({count})", by_class.sel(token_class=name)))
    columns.append(("score", scores.sel(of="change")))
    columns.append(("others' score", scores.sel(of="controls")))
    # Missing in runs of earlier versions
    loss = f" (undisturbed {number(float(kinds['loss']))})" if "loss" in kinds else ""
    note = (
        f"Change of -log p{loss}, nats per token, when positions of all heads of a kind are frozen, "
        "and of as many other heads, mean over draws. RePo's special cases: all heads frozen (as "
        "NoPE), on the straight line fitted to the positions of each, or at the token index (as "
        "RoPE); "
        f"low, high: 95 % over blocks, each a {kinds.attrs['block']}. By class of tokens "
        "(how many): the difference, of kinds without "
        f"others to compare with the change. Score: {kinds.attrs['metric']}."
    )
    return table_of("kinds", VIEW.title, columns, note)


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find kinds with a clearly larger or smaller loss when frozen than as many other heads."""
    kinds = group(run, "kinds")
    answered = _answered(kinds)
    for kind, count in kinds["heads"].to_series().items():
        if kind in CASES:
            continue
        if kind == "all heads" and (ceiling := _ceiling(run)):
            yield ceiling
            continue
        of_kind = kinds["loss_change"].sel(kind=kind)
        # (mean, low, high) of each
        change, others, difference = of_kind.sel(token_class=answered).values
        judged, rest = (
            (change, "")
            if np.isnan(difference[0])
            else (difference, f", of as many other heads {number(others[0])}{_is_more(difference)}")
        )
        # For all heads the result is reported even if there is no loss
        everything = kind == "all heads"
        if everything:
            yield _of_all(kinds, answered, count, change)
            continue
        # high - mean is the half width of the interval. The negation also skips NaN.
        if not abs(judged[0]) > CLEAR * (judged[2] - judged[0]):
            continue
        by_class = of_kind.sel(of="difference").values
        # Classes without tokens are NaN.
        most = int(np.nan_to_num(by_class[:, 0], nan=-np.inf).argmax())
        if judged[0] > 0 and by_class[most, 0] - difference[0] > CLEAR * (
            by_class[most, 2] - by_class[most, 0]
        ):
            rest += (
                f"; on {of_kind['token_class'].values[most]} {_in_words(by_class[most])} "
                "more than freezing other heads"
            )
        sentence = (
            f"Freezing the positions of the {count} heads whose positions "
            f"{DO.get(str(kind), f'are called: {kind}')}, each at its mean, changes the loss by "
            f"{_in_words(change)} per token{_of_answer(answered)}{rest}"
        )
        less = f"difference from the other heads: {_in_words(judged)}; " if rest else ""
        evidence = f"{less}intervals over blocks, each a {kinds.attrs['block']}"
        yield Finding(sentence, evidence, 0.9 if rest and judged[0] > 0 else 0.56, "kinds")


def _of_answer(answered: str) -> str:
    return " of the answer" if answered == "generated" else ""


def _of_all(kinds: xr.Dataset, answered: str, count: int, change: np.ndarray) -> Finding:
    """Report the loss with frozen positions of all heads, and with RePo's other special cases."""
    costs = kinds["loss_change"].sel(token_class=answered, of="change")
    cases = {
        words: costs.sel(kind=name).values for name, words in CASES.items() if name in kinds["kind"]
    }
    sentence = (
        f"Freezing all learned positions (of {count} heads) costs {_mean(change)} per token"
        f"{_of_answer(answered)}"
    )
    if (index := cases.get(INDEX)) is not None:
        sentence += f"; {INDEX} in their place {_mean(index)}"
    evidence = "; ".join(
        f"{case} {_in_words(cost)}" for case, cost in {"each at its mean": change, **cases}.items()
    )
    return Finding(
        sentence, f"{evidence}; intervals over blocks, each a {kinds.attrs['block']}", 0.93, "kinds"
    )


def _mean(interval: np.ndarray) -> str:
    """The mean of an interval in nats, or its farther end where it holds 0."""
    mean, low, high = map(float, interval)
    if np.abs(interval).max() < ROUNDING:
        return "nothing"
    return (
        f"less than {number(max(-low, high))} nats" if low <= 0 <= high else f"{number(mean)} nats"
    )


def _ceiling(run: xr.DataTree) -> Finding | None:
    """Report if all answers are right both with all positions frozen and with none; else None."""
    kinds, predictions = group(run, "kinds"), run.children.get("predictions")
    if predictions is None or "answer_is_likeliest" not in predictions:
        return None
    right = predictions["answer_is_likeliest"]
    changed = float(kinds["score_change"].sel(kind="all heads", of="change", bound="mean"))
    if kinds.attrs.get("metric") != EXACT or changed != 0 or not bool((right == 1).all()):
        return None
    costs = kinds["loss_change"].sel(
        kind="all heads", token_class=_answered(kinds), of="change", bound="mean"
    )
    prompts = "the prompt" if right.size == 1 else f"all {right.size} prompts"
    return Finding(
        f"The model answers {prompts} right with or without its positions, so this task cannot say "
        "what they are for",
        f"freezing the positions of all {int(kinds['heads'].sel(kind='all heads'))} heads that learn "
        f"them, each at its mean, changes no score and costs {number(float(costs))} nats per token of "
        "the answer",
        0.93,
        "kinds",
    )


def _is_more(difference: np.ndarray) -> str:
    """Say that other heads lose more, if the whole interval is below 0."""
    return ", which is more" if difference[2] < 0 else ""


def _in_words(interval: np.ndarray) -> str:
    if np.abs(interval).max() < ROUNDING:
        return f"less than {ROUNDING:g} nats"
    mean, low, high = map(number, interval)
    between = "one block, no interval" if np.isnan(interval[1]) else f"95 %: {low} to {high}"
    return f"{mean} nats ({between})"


VIEW = View(
    "kinds",
    "What each kind of heads is for",
    "Positions of all heads of a kind are frozen, each at its mean over the prompt, and "
    "every token is predicted again; for comparison "
    "those of as many other heads with learned positions, drawn at random. An interval that "
    "holds 0 does not say that a kind does nothing.",
    lambda run: (losses_by_kind(run),),
    tables=lambda run: (kind_table(run),),
    findings=_findings,
    compared=("loss_change",),
)
