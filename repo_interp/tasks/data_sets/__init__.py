"""Data sets that cannot come with the package: prompts from a user's copy, in its own published format, and its own scores.

    prompts = data_set_prompts("hybridqa", "dev.json", tokenizer, length=4096, count=100)
    scores  = data_set_scores(prompts, outputs)           outputs: the text generated after each prompt

    hybridqa    exact match, F1          longbench    one per set             qasper    F1
    glue        following (HoPE)         mmlu_pro     accuracy

Readers are one module per data set and say which file they want. What makes scores differ from the benchmark's own without being wrong -
wording of ours, examples that are missing, questions that stand twice - is said in a Note. Knows no model.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from repo_interp.errors import InputError, warn
from repo_interp.files import path_of
from repo_interp.tasks.data_sets.metrics import METRICS
from repo_interp.tasks.data_sets.question import Question, prompt_of
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import require_drawable
from repo_interp.values import Tokens, checked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NAMES", "data_set_prompts", "data_set_scores", "spoken"]

NAMES = ("hybridqa", "longbench", "qasper", "glue", "mmlu_pro")
_DEPARTURES: Mapping[str, tuple[Callable[[Prompt], bool], str]] = {
    "longbench": (
        lambda prompt: prompt.attributes["wording"] == "ours",
        "are asked in words of ours; put LongBench's dataset2prompt.json beside the data for its own",
    ),
    "mmlu_pro": (
        lambda prompt: "examples.5" not in prompt.spans,
        "are asked with fewer examples than the 5 that the benchmark shows; name a folder with test and validation, or a greater length",
    ),
}
"""By data set: which prompts are not what the benchmark asks, and what is said of them."""


def data_set_prompts(
    name: str,
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int = 4096,
    count: int = 100,
    seed: int = 0,
    answer: str = "none",
) -> list[Prompt]:
    """`count` questions of every part of the data set (all, where it has fewer; of GLUE always `count`, drawn one by one), drawn by the
    seed, each at most `length` tokens with its answer: longer ones lose their middle.

    `answer`: "none" ends with the question, "reference" appends the reference answer as generated tokens. Raises InputError, in one line
    naming row and field, where the file is not this data set's; warns with a Note of what departs from the benchmark.
    """
    require_name(name)
    path = path_of(path, f"the file of {name}")
    require_drawable(count, seed)
    length = checked(length, Tokens, "length")
    if name == "glue":
        from repo_interp.tasks.data_sets.glue import prompts

        return prompts(path, tokenizer, length, count, seed, answer)
    read: Callable[[str | Path], list[Question]] = import_module(f"{__name__}.{name}").questions
    parts: dict[str, list[Question]] = {}
    for question in read(path):
        parts.setdefault(question.subset, []).append(question)
    if not parts:
        raise InputError(f"{path}: there are no rows; name a file of {name} that has some")
    for part, known in parts.items():
        if twice := len(known) - len({hash(question.wordings[-1].text) for question in known}):
            warn(f"{path}: {twice} of {len(known)} questions of {part} stand there a second time, and count again")
    made = [
        prompt_of(question, tokenizer, length, answer)
        for part, known in parts.items()
        for question in _drawn(part, known, count, seed)
    ]
    if name in _DEPARTURES:
        departs, said = _DEPARTURES[name]
        if departing := sum(map(departs, made)):
            warn(f"{departing} of {len(made)} questions of {name} {said}")
    return made


def data_set_scores(prompts: Sequence[Prompt], outputs: Sequence[str]) -> dict[str, Float[np.ndarray, " prompt"]]:
    """Every metric of the prompts' data sets, from 0 to 1, of the text generated after each; NaN where a prompt has another metric.

    Raises InputError where numbers differ, or the prompts come from no data set.
    """
    if len(outputs) != len(prompts):
        raise InputError(f"wanted one output per prompt, got {len(outputs)} for {len(prompts)} prompts")
    if not all("metrics" in prompt.attributes for prompt in prompts):
        raise InputError("these prompts do not say how they are scored; make them with data_set_prompts")
    names = list(dict.fromkeys(name for prompt in prompts for name in prompt.attributes["metrics"]))
    scores = {name: np.full(len(prompts), np.nan) for name in names}
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for name in prompt.attributes["metrics"]:
            scores[name][place] = METRICS[name](spoken(output, prompt.attributes), prompt.answers, prompt.attributes)
    return scores


def spoken(output: str, attributes: Mapping[str, Sequence[str]]) -> str:
    """What of an output counts: up to the first of the prompt's `stops`, not counting line breaks before it."""
    stops = attributes.get("stops", ())
    if not stops:
        return output
    text = output.lstrip("\n")
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def require_name(name: str) -> None:
    """Raises InputError where `name` is no data set."""
    if name not in NAMES:
        raise InputError(f"wanted a data set, one of {', '.join(NAMES)}; got {name!r}")


def _drawn(part: str, known: Sequence[Question], count: int, seed: int) -> list[Question]:
    """`count` of them, in their order; all where there are no more."""
    if len(known) <= count:
        return list(known)
    return [known[place] for place in sorted(random.Random(f"{seed}/{part}").sample(range(len(known)), count))]
