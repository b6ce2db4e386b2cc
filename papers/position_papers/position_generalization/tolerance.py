"""Tolerance of models to disturbed order and positions (Position Generalization sec. 4.1, fig. 5,
table 1): P6.

    rise = perplexity disturbed - undisturbed, per cent of the latter
    fall = accuracy undisturbed - disturbed, per cent of the former      accuracy: share of targets that are the model's likeliest token

The disturbances are: 5 % of tokens, or of keys in every layer, change places within 5 tokens; 10 %
of positions are off by up to 10; and, as the paper states for perplexity, 1 % of tokens change
places within 1,000 and 1 % of positions are off by up to 10. "Marginal" is read as two per cent;
the paper's numbers are .4 % of accuracy and .6 % of perplexity.

The paper's accuracy is over answers (Qasper), which no move touches. Our accuracy is therefore over
the targets that no move touched, and perplexity is reported for these as well. Over all targets of
the disturbed text, a moved token is hard to predict however the model uses positions. A model with
learned positions is compared with its RoPE twin over the targets that no move touched, in nats per
target, with the same moved tokens in both: the mean over draws, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import xarray as xr

from position_papers.kit import (
    NORMAL_95,
    Above,
    AtMost,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Subject,
    evidence,
    groups_of,
    mean_of,
    paired_difference,
    unmeasured,
    why_not,
)
from position_papers.position_generalization.disturbed import OF_TEXT, POINTS, TEXT, measure
from position_papers.position_generalization.measured import (
    MODEL,
    SOURCE,
    TEXT_MODELS,
    Measured,
    is_language_model,
)
from repo_interp.plugins.lengths.perturbation_view import perturbation_grid
from repo_interp.positions.layouts import LEARNED

FALL = "the fall of accuracy at targets that no move touched"
RISE = "the rise of perplexity"
RISE_IN_PLACE = "the rise of perplexity of targets that no move touched"
RISE_OF_UNTOUCHED = (
    f"with {100 * TEXT[0]:.0f} % of tokens reordered within {TEXT[1]}, the "
    "rise of log perplexity of targets that no move touched"
)
ROPE_TWIN = "a RoPE model of the same task"
_ROUNDING = 6
"""Numbers in per cent and nats are rounded to this number of decimals; smaller changes count as 0.
"""


MARGINAL = 2.0
"""Largest marginal effect, in per cent."""


def _marginal(statement: str, place: str, number: str, part: str, quantity: str = RISE) -> Claim:
    """A claim that some disturbance has a marginal effect on perplexity."""
    return Claim(
        "P6", statement, f"{SOURCE} {place}", number, AtMost(quantity, MARGINAL, " %"), part
    )


P6 = Claim(
    "P6",
    "5 % of tokens reordered within 5: marginal effect",
    f"{SOURCE} fig. 5a, table 1",
    "accuracy 42.53 -> 42.34 %",
    AtMost(FALL, MARGINAL, " % of it"),
    apart=("untouched",),
)
P6_TEXT = {
    "text_order": replace(
        _marginal("the same over all targets, moved ones among them", "fig. 5a", "", "all targets"),
        paper_number="none",
    ),
    "feature_order": _marginal(
        "5 % of keys exchanged within 5 in every layer: marginal effect",
        "fig. 5b, table 1",
        "42.53 -> 41.98 (accuracy)",
        "features",
    ),
    "position_offset": _marginal(
        "10 % of positions off by up to 10 in every layer: marginal effect",
        "fig. 5c, table 1",
        "42.53 -> 42.44 (accuracy)",
        "positions",
    ),
}
P6_TABLE = _marginal(
    "5 % of positions off by up to 5 in every layer: marginal effect",
    "table 1",
    "42.53 -> 42.42 (accuracy)",
    "positions, as in table 1",
)
P6_FEW_TOKENS = _marginal(
    "1 % of tokens reordered within 1,000: marginal effect on perplexity",
    "sec. 4.1, fig. 5a",
    "3.688 -> 3.71 (perplexity)",
    "1 % within 1,000",
)
P6_FEW_POSITIONS = _marginal(
    "1 % of positions off by up to 10 in every layer: marginal effect on perplexity",
    "sec. 4.1, fig. 5c",
    "3.688 -> 3.70 (perplexity)",
    "positions, 1 %",
)
P6_UNTOUCHED = _marginal(
    "5 % of tokens reordered within 5: the text that stays in place is predicted as well",
    "fig. 5a",
    "figure",
    "untouched",
    RISE_IN_PLACE,
)
P6_LEARNED = Claim(
    "P6",
    "a model with learned positions is more tolerant of reordered text than its RoPE twin",
    "ours",
    "none",
    Above(RISE_OF_UNTOUCHED, (ROPE_TWIN,), relation="below"),
    "learned",
)


# ---- tabulating and drawing -------------------------------------------------------------------------


def tabulate(measured: Sequence[Measured]) -> Iterator[Evidence]:
    """The evidence on P6 for one checkpoint, and on P6 (learned) if it has learned positions and a
    RoPE twin.
    """
    yield from _text(measured[0])
    if len(measured) > 1:
        yield _beside_twin(*measured)


def _text(measured: Measured) -> Iterator[Evidence]:
    """P6 from the fall of accuracy, and from the rise of perplexity at every judged point."""
    judged = measured.group("judged")
    yield _accuracy(measured.name, judged.sel(kind="text_order"))
    rows = [
        (P6_TEXT[kind], judged.sel(kind=kind), RISE, _strongest(measured, kind))
        for kind in _kinds(measured)
    ]
    rows += [(P6_UNTOUCHED, judged.sel(kind="text_order"), RISE_IN_PLACE, "")]
    points = {"few_tokens": P6_FEW_TOKENS}
    if "position_offset" in _kinds(measured):
        points |= {"table": P6_TABLE, "few_positions": P6_FEW_POSITIONS}
    for group, claim in points.items():
        if group in measured.run:
            rows += [(claim, measured.group(group).isel(kind=0), RISE, "")]
        else:
            farthest = OF_TEXT[group][1][1]
            short = (
                f"its sequences have {measured.tokens}; more than {farthest:,} are "
                f"needed to move tokens by {farthest:,}"
            )
            yield unmeasured(claim, measured.name, short)
    for claim, of_kind, quantity, control in rows:
        untouched, plain = of_kind["log_perplexity_rise"].values, float(of_kind["plain"])
        in_nats = untouched if claim is P6_UNTOUCHED else of_kind["log_perplexity"].values - plain
        rises = 100 * np.expm1(in_nats)
        yield evidence(
            claim,
            measured.name,
            f"{quantity.removeprefix('the ')}, per cent",
            {quantity: np.round(rises.mean(), _ROUNDING)},
            **mean_of(rises, "draws", int(judged.attrs["prompts"])),
            control=control,
            note=f"log perplexity {plain:.3f}, which rises by "
            f"{100 * in_nats.mean() / plain:.2g} %; the perplexity of targets that no move "
            f"touched rises by {100 * float(np.expm1(untouched).mean()):.2g} %",
        )


def _accuracy(name: str, judged: xr.Dataset) -> Evidence:
    """P6 for one checkpoint, from `accuracy` and `accuracy_before` [draw]."""
    before, after = (judged[part].values for part in ("accuracy_before", "accuracy"))
    measured = f"{FALL.removeprefix('the ')}, per cent"
    if not before.all():
        return unmeasured(P6, name, "it predicts no target that no move touched", measured)
    falls = 100 * (1 - after / before)
    return evidence(
        P6,
        name,
        measured,
        {FALL: np.round(falls.mean(), _ROUNDING)},
        **mean_of(falls, "draws", int(judged.attrs["prompts"])),
        note=f"accuracy {100 * before.mean():.4g} -> {100 * after.mean():.4g} %",
    )


def _beside_twin(own: Measured, twin: Measured) -> Evidence:
    """P6 (learned): whether the loss of targets that no move touched rises less than in the RoPE
    twin.
    """
    rises = [
        each.group("judged")["rise"].sel(kind="text_order").mean("draw").dropna("prompt").values
        for each in (own, twin)
    ]
    if not np.round(rises, _ROUNDING).any():
        same = (
            "nothing to compare: where no move touched them, neither its predictions "
            f"nor those of {twin.name} change"
        )
        return unmeasured(P6_LEARNED, own.name, same)
    less = paired_difference(rises[1], rises[0])  # the same tokens are moved in both
    plain = [float(each.group("judged")["plain"]) for each in (own, twin)]
    return evidence(
        P6_LEARNED,
        own.name,
        "rise of untouched targets' log perplexity, nats",
        {RISE_OF_UNTOUCHED: {ROPE_TWIN: less}},
        rises[0].mean(),
        np.ptp(less.limits(NORMAL_95)) / 2,
        f"{less.over}, half of the difference's 95 % interval",
        len(rises[0]),
        f"{twin.name} {rises[1].mean():.3g}",
        f"log perplexity undisturbed {plain[0]:.3f} against {plain[1]:.3f}",
    )


def draw(measured: Sequence[Measured]) -> Iterator[Drawing]:
    """Draw log perplexity over shares and distances for every kind of disturbance (fig. 5)."""
    own = measured[0]
    grid = own.group("perturbation")
    caption = (
        f"{own.name}: log perplexity with a share of tokens, keys or positions moved by up "
        f"to l_max (fig. 5), on {grid.attrs['prompts']} "
        f"sequences of {own.tokens} of held-out text. Text is judged as it then stands."
    )
    points = {kind: own.group("judged").sel(kind=kind, drop=True) for kind in POINTS}
    points |= {
        group: own.group(group).isel(kind=0, drop=True) for group in OF_TEXT if group in own.run
    }
    judged = xr.concat(
        points.values(), xr.IndexVariable("disturbance", list(points)), combine_attrs="drop"
    )
    data = grid.assign({f"judged_{name}": values for name, values in judged.items()})
    chart = partial(perturbation_grid, groups_of(own.run, perturbation=grid))
    yield Drawing(f"perturbation_{own.name}", chart, caption, data)


def _kinds(measured: Measured) -> list[str]:
    """The kinds of disturbance that can affect the attention of a layer. Offsets are included only
    if a layer's attention depends on positions that can be moved.
    """
    distances = any(
        scheme not in ("nope", "cope", "cope_alibi", "cope_mlp")
        for scheme in measured.subject.schemes
    )
    return [kind for kind in POINTS if kind != "position_offset" or distances]


def _strongest(measured: Measured, kind: str) -> str:
    """Format the rise at the strongest disturbance of the grid, which shows that the measurement
    can find an effect.
    """
    grid = measured.group("perturbation")
    gamma, l_max = float(grid["gamma"].max()), int(grid["l_max"].max())
    cells = grid["log_perplexity"].sel(kind=kind, l_max=l_max)
    rise = 100 * float(np.expm1(cells.sel(gamma=gamma) - cells.sel(gamma=0.0)))
    return f"{100 * gamma:g} % within {l_max}: {rise:.3g} %"


# ---- which checkpoints ---------------------------------------------------------------------------


def with_rope_twins(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Groups of one language model each; a model with learned positions is grouped with its RoPE
    twin, if there is one.
    """
    models = [subject for subject in subjects if is_language_model(subject)]
    groups = [[subject] for subject in models]
    for group in groups:
        twin = rope_twin(group[0], models) if set(group[0].schemes) & {*LEARNED} else None
        group += [twin] if twin is not None else []
    return groups


def rope_twin(subject: Subject, subjects: Sequence[Subject]) -> Subject | None:
    """The RoPE model that can read the same prompts; None if there is none. If possible both were
    trained from the start, or both were continued.
    """
    twins = [
        other
        for other in subjects
        if set(other.schemes) == {"rope"} and _asked(other) == _asked(subject)
    ]
    return min(
        twins, key=lambda twin: _is_continued(twin) is not _is_continued(subject), default=None
    )


def _asked(subject: Subject) -> tuple[object, int]:
    """The tokenizer and the training length, which determine the prompts."""
    return subject.tokenizer_digest, subject.training_length


def _is_continued(subject: Subject) -> bool:
    return subject.configuration is not None and bool(subject.configuration.continue_from)


TOLERANCE = Experiment(
    "tolerance",
    (P6, *P6_TEXT.values(), P6_TABLE, P6_FEW_TOKENS, P6_FEW_POSITIONS, P6_UNTOUCHED, P6_LEARNED),
    Needs(
        with_rope_twins,
        "needs a language model, such as language/rope",
        TEXT_MODELS,
        otherwise_of={
            P6_LEARNED.label: (
                "needs a model with learned positions and one with RoPE of the same task, "
                "such as language/repo and language/rope"
            ),
        },
        why_not=why_not,
    ),
    measure,
    tabulate,
    draw,
    MODEL,
)
