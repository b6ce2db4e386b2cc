"""Data sets that cannot come with the package, answered by checkpoints that know text: a table by checkpoint and data set.

    HybridQA       RePo table 2                      LongBench    RePo table 3, HoPE table 5
    MMLU-Pro       RePo table 5, HoPE table 4        GLUE         HoPE table 2             Qasper    Position Generalization table 1

A user names a file a data set; a row without one says so. Checkpoints trained on a task of ours with words of its own are left out.
Beyond the training length L the rotation is extended by `extension` with the factor length / L, for all questions, as in RePo's table 3.
Rules stand in `data_set_claims`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.experiments.extrapolation import allowed_methods, extended
from repo_interp.experiments.generated_scores import question_scores
from repo_interp.experiments.perturbation import transposed
from repo_interp.models.checkpoints import load_model
from repo_interp.papers.data_sets.claims import CLAIMS, COMPARISONS, FLOOR, P6_QASPER, Comparison, needed
from repo_interp.papers.data_sets.table_figure import data_set_table
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import UNMEASURED, Claim, Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.score_rules import Sample, above
from repo_interp.papers.kit.subjects import Subject, subjects
from repo_interp.papers.position_generalization.rules import MARGINAL, TEXT
from repo_interp.tasks import Prompt, digest
from repo_interp.tasks.data_sets import NAMES, data_set_prompts, require_name

__all__ = ["CLAIMS", "Options", "table_rows"]

PLAIN, REORDERED = "plain", "reordered"
NO_TEXT = "no checkpoint that knows text was given"


@dataclass(frozen=True)
class Options:
    """How much is asked."""

    questions: int = 100
    """Of every part of a data set; all, where it has fewer."""
    length: int = 0
    """Tokens of a prompt with its answer; 0: the training length of each checkpoint."""
    extension: str = "yarn"
    """How the rotation is extended where `length` is longer: yarn, interpolation, plain."""
    batch_size: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.questions < 2:
            raise InputError(f"questions is {self.questions}; wanted at least 2, for an error")
        if self.length and self.length < 8:
            raise InputError(f"length is {self.length}; wanted at least 8 tokens, or 0 for the training length")
        if self.extension not in ("yarn", "interpolation", PLAIN):
            raise InputError(f"extension is {self.extension!r}; wanted yarn, interpolation or plain")


def table_rows(
    checkpoints: Mapping[str, str | os.PathLike[str]],
    data: Mapping[str, str | os.PathLike[str]],
    options: Options,
    progress: Callable[[str], None],
    cache: Cache,
) -> list[Result]:
    """The table of scores by checkpoint and data set, and a verdict on each claim of `CLAIMS`. `data`: the user's files by data set.

    A data set without a file has a row and verdicts that say what to give. Raises InputError for an unknown data set, a file that is
    not in its format, and a checkpoint that cannot be read or has no tokenizer.
    """
    for name in data:
        require_name(name)
    asked = [one for one in subjects(checkpoints) if _knows_text(one)]
    found: dict[tuple[str, str], xr.Dataset] = {}
    for name in NAMES:
        for one in asked if name in data else ():
            progress(f"{name}: {one.name}")
            found[one.name, name] = _scores(one, name, Path(data[name]), options, cache)
    table = _table(asked, found, [name for name in NAMES if name not in data])
    verdicts = [verdict for one in COMPARISONS for verdict in _compared(one, asked, found, data)]
    verdicts += _perturbed(asked, found, data)
    length = "each checkpoint's training length" if not options.length else f"{options.length} tokens"
    return [
        Result(
            "data_sets",
            "Data sets that cannot come with the package (RePo table 2, 3, 5; HoPE table 2, 4, 5; Position Generalization table 1): mean "
            f"score, generated greedily, of up to {options.questions} questions of each part (n), prompts and answers within {length}, "
            "the middle of longer ones cut out; bar: 2 standard errors over questions.",
            table,
            data_set_table(table),
            tuple(verdicts),
        )
    ]


def _knows_text(one: Subject) -> bool:
    """Whether a checkpoint was trained on no task of ours, or on text."""
    return one.kind in ("text", "language")


def _scores(one: Subject, name: str, path: Path, options: Options, cache: Cache) -> xr.Dataset:
    length = options.length or one.training_length
    prompts = data_set_prompts(name, path, one.tokenizer, length, options.questions, options.seed)
    depends = {
        "checkpoint": one.digest,
        "data_set": name,
        "prompts": _digest(prompts),
        "length": length,
        "extension": options.extension,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "device": options.device,
    }
    return cache.dataset("data_set", depends, lambda: _measured(one, name, prompts, length, options))


def _measured(one: Subject, name: str, prompts: Sequence[Prompt], length: int, options: Options) -> xr.Dataset:
    model = load_model(one.path, options.device)
    method = options.extension if length > one.training_length and options.extension in allowed_methods(model) else PLAIN
    orders: dict[str, Sequence[Prompt]] = {PLAIN: prompts}
    if name == "qasper":
        orders[REORDERED] = [_reordered(prompt, options.seed, number) for number, prompt in enumerate(prompts)]
    parts = [
        question_scores(model, one.tokenizer, asked, options.batch_size, extended(model, method, length, one.training_length))
        for asked in orders.values()
    ]
    return xr.concat(parts, dim=xr.IndexVariable("order", list(orders))).assign_attrs(method=method)


def _reordered(prompt: Prompt, seed: int, number: int) -> Prompt:
    """`prompt` with a share of its tokens, but for the first, exchanged in pairs within a distance; spans stay where they are."""
    generator = np.random.default_rng([seed, number])
    order = transposed(generator, np.arange(1, len(prompt.tokens)), len(prompt.tokens), *TEXT)
    tokens = tuple(prompt.tokens[place] for place in order)
    return replace(prompt, tokens=tokens, token_text=None, text=None, characters=None)


def _table(asked: Sequence[Subject], found: Mapping[tuple[str, str], xr.Dataset], absent: Sequence[str]) -> xr.Dataset:
    """`score`, `standard_error` [row, checkpoint]; `questions`, `cut` [row]; what is needed where there is no data."""
    rows: dict[str, tuple[int, float, str]] = {}
    for name in NAMES:
        if name in absent:
            rows[name] = (0, np.nan, needed(name))
        for (_, data_set), scores in found.items():
            if data_set == name:
                plain = scores.sel(order=PLAIN)
                known = zip(plain["test_set"].values.astype(str), plain["questions"].values, plain["cut"].values, strict=True)
                for row, count, cut in known:
                    before = rows.get(row, (0, 0.0, ""))
                    rows[row] = (max(before[0], int(count)), max(before[1], float(cut)), "")
    values = np.full((2, len(rows), len(asked)), np.nan)
    for (checkpoint, _), scores in found.items():
        column = [one.name for one in asked].index(checkpoint)
        for place, row in enumerate(rows):
            if row in scores["test_set"].values:
                here = scores.sel({"order": PLAIN, "test_set": row})
                values[:, place, column] = float(here["mean_score"]), float(here["standard_error"])
    axes = ("row", "checkpoint")
    return xr.Dataset(
        {
            "score": (axes, values[0], {"long_name": "mean score", "units": "1"}),
            "standard_error": (axes, values[1], {"long_name": "standard error over questions", "units": "1"}),
            "questions": ("row", [count for count, _, _ in rows.values()], {"long_name": "questions", "units": "1"}),
            "cut": (
                "row",
                [cut for _, cut, _ in rows.values()],
                {"long_name": "largest share of prompts that lost their middle", "units": "1"},
            ),
        },
        {
            "row": list(rows),
            "needs": ("row", [needs for _, _, needs in rows.values()]),
            "checkpoint": [one.name for one in asked],
            "layout": ("checkpoint", [one.layout for one in asked]),
        },
    )


def _compared(
    one: Comparison, asked: Sequence[Subject], found: Mapping[tuple[str, str], xr.Dataset], data: Mapping[str, object]
) -> list[Verdict]:
    if one.data_set not in data:
        return [_without(one.claim, needed(one.data_set))]
    rivals = [subject for subject in asked if subject.layout == "rope"]
    ours = [subject for subject in asked if set(subject.schemes) & set(one.schemes)]
    if not ours or not rivals:
        return [_without(one.claim, f"no checkpoints of {one.schemes[0]} and rope that know text were given")]
    verdicts = []
    for subject in ours:
        rival = next((known for known in rivals if known.training_length == subject.training_length), None)
        if rival is None:
            verdicts.append(_without(one.claim, "no checkpoint of rope with the same training length was given", subject.name))
            continue
        mine, theirs = (_sample(found[known.name, one.data_set], one.metrics) for known in (subject, rival))
        if mine.count < 2:
            verdicts.append(_without(one.claim, "there is one question alone, so nothing to take an error over", subject.name))
            continue
        if max(mine.mean, theirs.mean) < FLOOR:
            note = f"nobody answers: {mine.mean:.3f}, {rival.name} {theirs.mean:.3f}"
            verdicts.append(_without(one.claim, note, subject.name))
            continue
        lead = above(mine, theirs) if one.equal == "above" else above(theirs, mine)
        margin = lead.margin if one.equal == "above" else -lead.margin
        verdicts.append(
            Verdict(
                one.claim,
                subject.name,
                judged(lead.holds == (one.equal == "above")),
                f"{one.metrics[0] if len(one.metrics) == 1 else 'mean score'} on {one.data_set}, %",
                100 * mine.mean,
                None if mine.spread is None else 100 * mine.spread,
                mine.over,
                mine.count,
                f"{rival.name} {100 * theirs.mean:.3g} %",
                f"above by {100 * margin:+.3g} points (standard error {100 * lead.standard_error:.2g} over {lead.over})",
            )
        )
    return verdicts


def _perturbed(
    asked: Sequence[Subject], found: Mapping[tuple[str, str], xr.Dataset], data: Mapping[str, object]
) -> list[Verdict]:
    if "qasper" not in data:
        return [_without(P6_QASPER, needed("qasper"))]
    verdicts = []
    for subject in asked:
        scores = found[subject.name, "qasper"]
        plain, reordered = (_sample(scores, ("F1",), order) for order in (PLAIN, REORDERED))
        if plain.mean < FLOOR:
            verdicts.append(_without(P6_QASPER, f"it does not answer: F1 {plain.mean:.3f}", subject.name))
            continue
        fall = above(plain, reordered)
        verdicts.append(
            Verdict(
                P6_QASPER,
                subject.name,
                judged(fall.margin <= MARGINAL * plain.mean),
                "F1 with tokens reordered, %",
                100 * reordered.mean,
                None if reordered.spread is None else 100 * reordered.spread,
                reordered.over,
                reordered.count,
                f"in order {100 * plain.mean:.3g} %",
                f"falls by {100 * fall.margin:.3g} points (standard error {100 * fall.standard_error:.2g} over {fall.over})",
            )
        )
    return verdicts or [_without(P6_QASPER, NO_TEXT)]


def _sample(scores: xr.Dataset, metrics: Sequence[str], order: str = PLAIN) -> Sample:
    """All questions of the parts that have one of `metrics`, in their order."""
    chosen = scores["score"].sel(order=order).values[np.isin(scores["metric"].values.astype(str), list(metrics))]
    questions = chosen[np.isfinite(chosen)]
    return Sample(np.array([questions.mean()]), questions, len(questions), True)


def _without(claim: Claim, why: str, checkpoint: str = "none") -> Verdict:
    return Verdict(claim, checkpoint, UNMEASURED, "", note=why)


def _digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of what is asked, of the answers, and of how they are scored."""
    known = [digest(prompts), *([prompt.answers, dict(prompt.attributes)] for prompt in prompts)]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
