"""Disturbed order and positions (Position Generalization sec. 4.1): what is measured of a
checkpoint, over a grid and at the judged points.

    perturbation   [kind, gamma, l_max]   over shares and distances, one draw each: what is drawn
    judged         [kind, draw]           5 % of tokens, or of keys, within 5; 10 % of positions off by up to 10: what is judged
    table          [kind, draw]           5 % of positions off by up to 5, as in table 1
    few_tokens     [kind, draw]           1 % of tokens within 1,000, of which the paper says its perplexity: on sequences of 2,048 tokens,
                                          where fewer are asked for; of models that were trained on fewer it is not measured
    few_positions  [kind, draw]           1 % of positions off by up to 10, the same

The undisturbed pass over the prompts is made once for all of them. Knows no claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from position_papers.kit import Cache, Subject
from position_papers.position_generalization.measured import (
    GRID_TOKENS,
    Measured,
    Options,
    length_of,
    of_tokens,
    prompts_of,
    task_of,
)
from repo_interp.experiments.responses import forced_responses
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.lengths.disturbance import Disturbance, Kind
from repo_interp.plugins.lengths.perturbation import PAPER_KINDS, Perturbation, answers_at
from repo_interp.tasks import Prompt, Response, digest
from repo_interp.tasks.task import Scoring

TEXT = (0.05, 5)
"""Share of tokens and distance at which text order is judged; the same for the order of features.
"""
OFFSET, OFFSET_OF_TABLE = (0.1, 10), (0.05, 5)
POINTS = {"text_order": TEXT, "feature_order": TEXT, "position_offset": OFFSET}
"""Where each kind is judged; offsets are in tokens, of learned positions in as many of their range.
"""
OF_TEXT = {
    "table": ("position_offset", OFFSET_OF_TABLE),
    "few_tokens": ("text_order", (0.01, 1000)),
    "few_positions": ("position_offset", (0.01, 10)),
}
"""Where it is judged besides, by group."""
FAR_TOKENS = 2048
"""Of a sequence whose tokens move far, where options ask for fewer."""


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Measured]:
    """Of the first of `subjects` the group `perturbation`, over shares and distances of every kind;
    of each of them, it and its RoPE twin, the group `judged`, at the judged points.

    The undisturbed pass is made once, for all of them.
    """
    prompts = [digest(prompts_of(own, options)) for own in subjects]
    plain = [
        own.measured(cache, measure_undisturbed, options, prompts=known)
        for own, known in zip(subjects, prompts, strict=True)
    ]

    def disturbed(
        place: int, function: Callable[..., xr.Dataset], kind: str, *point: float, **depends: Any
    ) -> xr.Dataset:
        depends |= {"kind": kind, "prompts": prompts[place]}
        return subjects[place].measured(
            cache, function, options, plain[place], kind, *point, **depends
        )

    def judged_at(place: int, kind: str, point: tuple[float, int]) -> xr.Dataset:
        return disturbed(place, measure_judged, kind, *point, draws=options.draws, point=str(point))

    def judged_besides(group: str) -> xr.Dataset:
        kind, point = OF_TEXT[group]
        if point[1] < length_of(subjects[0], options):
            return judged_at(0, kind, point)
        return _judged_far(subjects[0], kind, point, replace(options, length=FAR_TOKENS), cache)

    grid = {"gammas": str(options.gammas), "l_maxes": str(options.l_maxes)}
    groups = [
        {"judged": _joined([judged_at(place, *each) for each in POINTS.items()])}
        for place in range(len(subjects))
    ]
    groups[0]["perturbation"] = _joined(
        [disturbed(0, measure_kind, kind, **grid) for kind in PAPER_KINDS]
    )
    groups[0] |= {group: judged_besides(group) for group in groups_of_text(subjects[0], options)}
    runs = [xr.DataTree.from_dict(datasets) for datasets in groups]
    return [
        Measured(subject, length_of(subject, options), run)
        for subject, run in zip(subjects, runs, strict=True)
    ]


def groups_of_text(subject: Subject, options: Options) -> list[str]:
    """The groups of OF_TEXT that can be measured: no farther than the text is long."""
    length = max(length_of(subject, options), min(subject.training_length, FAR_TOKENS))
    return [group for group, (_, (_, farthest)) in OF_TEXT.items() if farthest < length]


def _judged_far(
    subject: Subject, kind: str, point: tuple[float, int], options: Options, cache: Cache
) -> xr.Dataset:
    """What `measure_judged` gives on longer sequences than those of everything else."""
    known = digest(prompts_of(subject, options))
    plain = subject.measured(cache, measure_undisturbed, options, prompts=known)
    depends = {"kind": kind, "prompts": known, "draws": options.draws, "point": str(point)}
    return subject.measured(cache, measure_judged, options, plain, kind, *point, **depends)


def measure_undisturbed(subject: Subject, options: Options) -> xr.Dataset:
    """`token`, `log_probability` [prompt, target]: the answers to the undisturbed prompts; -1 and
    NaN where a prompt has fewer targets.
    """
    model, task = load_model(subject.path, options.device), task_of(subject, options)
    answers = forced_responses(model, task, prompts_of(subject, options), options.batch_size)
    most = max(len(answer.tokens) for answer in answers)
    tokens, logs = np.full((len(answers), most), -1), np.full((len(answers), most), np.nan)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer.tokens)] = answer.tokens
        logs[row, : len(answer.tokens)] = answer.log_probabilities
    return xr.Dataset(
        {"token": (("prompt", "target"), tokens), "log_probability": (("prompt", "target"), logs)}
    )


def _answers(plain: xr.Dataset) -> list[Response]:
    """What `measure_undisturbed` kept, as it was."""
    rows = zip(plain["token"].values, plain["log_probability"].values, strict=True)
    return [
        Response(tuple(map(int, tokens[tokens >= 0])), tuple(map(float, logs[tokens >= 0])))
        for tokens, logs in rows
    ]


def measure_kind(subject: Subject, options: Options, plain: xr.Dataset, kind: Kind) -> xr.Dataset:
    """The group `perturbation` of one kind, on as many prompts as are drawn."""
    model, task = load_model(subject.path, options.device), task_of(subject, options)
    prompts = of_tokens(prompts_of(subject, options), GRID_TOKENS)
    asked = Perturbation(
        (kind,),
        tuple(options.gammas),
        tuple(options.l_maxes),
        offset_unit="range",
        seed=options.seed,
    )
    return asked.measured(
        as_decoder(model),
        task,
        prompts,
        options.batch_size,
        undisturbed=_answers(plain)[: len(prompts)],
    )


def measure_judged(
    subject: Subject, options: Options, plain: xr.Dataset, kind: str, gamma: float, l_max: int
) -> xr.Dataset:
    """`log_perplexity`, `log_perplexity_rise`, `task_score` [kind, draw] of one kind at one point,
    `accuracy` and `accuracy_before` [kind, draw], the share of the targets that no move touched which
    are likeliest, disturbed and not, and `rise` [kind, draw, prompt], nats per such target (NaN where
    a prompt has none); `plain` and `plain_score`, the first and the last undisturbed.
    """
    model = load_model(subject.path, options.device)
    task = task_of(subject, options)
    prompts = prompts_of(subject, options)
    undisturbed, layers = _answers(plain), tuple(range(len(as_decoder(model).layers)))
    points = [
        Disturbance(kind, gamma, l_max, layers, "range", options.seed + 1 + draw)
        for draw in range(options.draws)
    ]
    draws = [
        answers_at(as_decoder(model), task, prompts, undisturbed, point, options.batch_size)
        for point in points
    ]
    numbers = [draw.summary(task) for draw in draws]
    rises = [[rise.mean() if len(rise) else np.nan for rise in draw.rises] for draw in draws]
    for number, draw in zip(numbers, draws, strict=True):
        number["accuracy"] = accuracy(task, draw.asked, draw.answered, draw.untouched)
        number["accuracy_before"] = accuracy(task, prompts, undisturbed, draw.untouched)
    judged = (
        "log_perplexity",
        "log_perplexity_rise",
        "task_score",
        "accuracy",
        "accuracy_before",
    )
    return xr.Dataset(
        {name: (("kind", "draw"), [[each[name] for each in numbers]]) for name in judged}
        | {
            "rise": (("kind", "draw", "prompt"), [rises]),
            "plain": -np.mean(np.concatenate([answer.log_probabilities for answer in undisturbed])),
            "plain_score": np.mean(np.asarray(task.score(undisturbed, prompts), dtype=np.float64)),
        },
        coords={"kind": [kind]},
        attrs={"metric": task.metric, "prompts": len(prompts)},
    )


def accuracy(
    scoring: Scoring,
    prompts: Sequence[Prompt],
    answers: Sequence[Response],
    chosen: Sequence[np.ndarray],
) -> float:
    """The share of the `chosen` targets of all prompts that are likeliest; NaN of none."""
    right = [
        of_prompt[mask]
        for of_prompt, mask in zip(scoring.right(answers, prompts), chosen, strict=True)
    ]
    every = np.concatenate(right)
    return float(every.mean()) if len(every) else np.nan


def _joined(kinds: Sequence[xr.Dataset]) -> xr.Dataset:
    """Groups of one kind each as one, in the order of the paper."""
    joined = xr.concat(
        kinds, dim="kind", data_vars="minimal", join="exact", coords="minimal", compat="override"
    )
    # joining cuts names to the length of the first
    return joined.assign_coords(kind=list(PAPER_KINDS))
