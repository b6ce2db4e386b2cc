"""What breaks when the positions of text reversal are taken away (ours, to RePo app.

C): causal rows of R2 and R3.

    linearised    z_i = i, as RoPE has it          frozen    z_i = the head's mean, as NoPE          permuted    z_i of another token
    fall          score as it is minus score while the positions are changed, teacher-forced; over prompts with its standard error

in one learned layer at a time, in all of them, and on the tokens of the instruction alone, in all
of them. What is described of positions (a mirror, flat instructions) matters to what the model does
as far as the score falls. An index is also out of the model's distribution: notes have what the
other changes do.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import xarray as xr

from position_papers.kit import (
    NORMAL_95,
    All,
    AtLeast,
    Cache,
    Claim,
    Difference,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Significant,
    Subject,
    each,
    evidence,
    over_seeds,
    paired_difference,
    score_by_length,
    share_difference,
    why_not,
)
from position_papers.repo.checkpoints import GPT2, can_mirror, reversal_of, reversals
from position_papers.repo.mirror import R2, R3, strengths
from position_papers.repo.mirror import measure as measure_mirror
from position_papers.repo.options import Options
from repo_interp.experiments.responses import forced_responses
from repo_interp.interventions import frozen, linearised, permuted
from repo_interp.measures.labels import with_attrs
from repo_interp.models.checkpoints import load_model
from repo_interp.plots.marks.drawing import counted

KINDS = {"linearised": linearised, "frozen": frozen, "permuted": permuted}
EVERYWHERE, INSTRUCTION = "all learned layers", "the instruction"
OF_MIRROR = "the fall when the layer with the strongest mirror is linearised"
OF_INSTRUCTION = "the fall when the instruction's positions are linearised in all learned layers"
AS_IT_IS = "as it is"
DRAWN_AS = {AS_IT_IS: "repo", "linearised": "rope", "frozen": "nope", "permuted": "repo"}
"""The scheme that assigns such positions, for its colour."""
LETTERS = 12
"""In a line of the name of a place."""
NEEDED = 0.05
"""Least fall, in the score's own unit, that counts."""


def _needed(quantity: str, least: float = NEEDED) -> All:
    """The rule that a quantity is large enough to matter, and not by chance."""
    return All(AtLeast(quantity, least), Significant(f"{quantity}, over prompts,"))


MIRROR_NEEDED = Claim(
    "R2",
    "the model needs the mirror: its layer's positions are used",
    R2.source,
    "none",
    _needed(OF_MIRROR, 0.5),
    "needed",
)
INSTRUCTION_NEEDED = Claim(
    "R3",
    "the model needs the instruction's near-constant positions",
    R3.source,
    "none",
    _needed(OF_INSTRUCTION),
    "needed",
)
# ---- measured ------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """`score [kind, where, prompt]`, `plain [prompt]` and `mirror [layer]`, its strength, of one
    checkpoint.
    """
    (subject,) = subjects
    data = subject.measured(cache, _scores, options, prompts=options.prompts)
    data = data.assign(mirror=strengths(measure_mirror([subject], options, cache)))
    return data.assign_attrs(checkpoint=subject.name, stem=subject.stem)


def _scores(subject: Subject, options: Options) -> xr.Dataset:
    """`score [kind, where, prompt]`, `plain [prompt]` in one dataset: every change of positions at
    every place.
    """
    assert subject.task is not None
    task, model = subject.task, load_model(subject.path, options.device)
    prompts = reversals(subject, reversal_of(subject).longest, options.prompts, options.seed)
    learned = list(subject.learned)
    places: dict[str, dict] = {
        **{f"layer {layer}": {"layer": layer} for layer in learned},
        EVERYWHERE: {"layer": learned},
    }
    instruction = prompts[0].spans["instruction"]
    if all(prompt.spans["instruction"] == instruction for prompt in prompts):
        places[INSTRUCTION] = {"layer": learned, "tokens": list(instruction)}

    def score() -> np.ndarray:
        return np.asarray(
            task.score(forced_responses(model, task, prompts, options.batch_size), prompts)
        )

    plain, changed = score(), []
    for change in KINDS.values():
        for where in places.values():
            with change(model, **where):
                changed.append(score())
    shape = (len(KINDS), len(places), len(prompts))
    coords = {"kind": list(KINDS), "where": list(places)}
    array = xr.DataArray(np.array(changed).reshape(shape), coords, ("kind", "where", "prompt"))
    return xr.Dataset(
        {
            "score": with_attrs(array, task.metric, task.units),
            "plain": with_attrs(
                xr.DataArray(plain, dims="prompt"),
                f"{task.metric}, positions as they are",
                task.units,
            ),
        },
        attrs={"metric": task.metric},
    )


# ---- tabulated --------------------------------------------------------------------------------------


def tabulate(data: xr.Dataset) -> Iterator[Evidence]:
    """The mirror and the instruction of text reversal."""
    layer = f"layer {int(data['mirror']['layer'].values[int(data['mirror'].values.argmax())])}"
    yield _evidence(data, MIRROR_NEEDED, OF_MIRROR, layer)
    if INSTRUCTION in data["where"].values:
        yield _evidence(data, INSTRUCTION_NEEDED, OF_INSTRUCTION, INSTRUCTION)


def _evidence(data: xr.Dataset, claim: Claim, quantity: str, where: str) -> Evidence:
    """How far the score falls with every kind of change at the place `where`, as evidence on
    `claim`.
    """
    falls = {str(kind): fall(data, str(kind), where) for kind in data["kind"].values}
    linear = falls["linearised"]
    others = [
        f"{place} {_told(fall(data, 'linearised', place))}"
        for place in map(str, data["where"].values)
        if place != where
    ]
    return evidence(
        claim,
        data.attrs["checkpoint"],
        f"fall of {data.attrs['metric']} with linearised positions",
        {quantity: linear.margin, f"{quantity}, over prompts,": linear},
        linear.margin,
        np.ptp(linear.limits(NORMAL_95)) / 2,
        "prompts, half of the 95 % interval",
        data.sizes["prompt"],
        f"score as it is {float(data['plain'].mean()):.3g}",
        f"{where}; "
        + ", ".join(f"{kind} {_told(falls[kind])}" for kind in falls if kind != "linearised")
        + " (95 %)"
        + f"; linearised elsewhere: {', '.join(others)}"
        + (
            ""
            if linear.margin >= NEEDED
            else "; what the claim describes is not needed for the score"
        ),
    )


def fall(data: xr.Dataset, kind: str, where: str) -> Difference:
    """How far the score falls.

    Prompts that are right or wrong are compared as shares: their difference has an error where all
    or none are right too.
    """
    changed, plain = data["score"].sel(kind=kind, where=where).values, data["plain"].values
    if np.isin([plain, changed], (0, 1)).all():
        return share_difference(plain.mean(), changed.mean(), (len(plain), len(changed)))
    return paired_difference(plain, changed)


def _told(difference: Difference) -> str:
    low, high = difference.limits(NORMAL_95)
    return f"{difference.margin:.3g} ({low:.2g} to {high:.2g})"


# ---- drawn ---------------------------------------------------------------------------------------


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """The score for every change and place, beside the score as it is."""
    plain = data["plain"].expand_dims(kind=[AS_IT_IS], where=data["where"].values)
    score = xr.concat([plain, data["score"]], dim="kind").assign_attrs(
        data["score"].attrs | {"long_name": data.attrs["metric"]}
    )
    errors = [
        [
            0.0 if kind == AS_IT_IS else fall(data, str(kind), str(where)).standard_error
            for where in score["where"].values
        ]
        for kind in score["kind"].values
    ]
    by_kind = (
        score.mean("prompt", keep_attrs=True)
        .expand_dims("seed")
        .rename(kind="checkpoint", where="test_set")
    )
    drawn = by_kind.to_dataset(name="score").assign(
        standard_error=(("checkpoint", "test_set"), np.array(errors))
    )
    names = by_kind["checkpoint"].values
    places = [textwrap.fill(str(place), LETTERS) for place in by_kind["test_set"].values]
    layouts = ("checkpoint", [DRAWN_AS[str(name)] for name in names])
    yield Drawing(
        f"causes_{data.attrs['stem']}",
        partial(
            score_by_length,
            drawn.assign_coords(layout=layouts, label=("checkpoint", names), test_set=places),
            data.attrs["checkpoint"],
        ),
        f"{data.attrs['checkpoint']}: {data.attrs['metric']} while learned positions are "
        "linearised (the token index), frozen (a head's mean) or permuted, in one layer or all. "
        f"Means of {counted(data.sizes['prompt'], 'prompt')}; bars: the standard error, over "
        "these, of the difference from the score as it is.",
        data,
    )


CAUSES = over_seeds(
    Experiment(
        "causes",
        (MIRROR_NEEDED, INSTRUCTION_NEEDED),
        Needs(
            each(can_mirror),
            "no checkpoint trained on text reversal with learned positions in a layer other "
            "than 0 was given",
            ("reversal/repo",),
            why_not=why_not,
        ),
        measure,
        tabulate,
        draw,
        GPT2,
    ),
    lambda data: data[["score", "plain"]],
)
