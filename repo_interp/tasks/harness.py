"""Prompts and scores of lm-evaluation-harness, such as RULER's variable tracking (`ruler_vt`).

    document of a task -> prompt, reference answer -> greedy answer -> the harness' metric

Only tasks that generate text are supported. The answer ends before the first stop text of the task.
The tokenizer encodes the prompt like any text, with BOS. The span `needle` has every reference that
occurs exactly once in the prompt as a whole word. RULER's tasks make documents of a given length
(`pip install 'lm-eval[ruler]'`) of at least 1,024 tokens; below that the harness does not
terminate. The random states of Python and numpy are seeded, and restored afterwards.

This module knows nothing about models.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from repo_interp.errors import InputError, one_line
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.text import prompt_from_text
from repo_interp.tasks.task import require_drawable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORTEST = 1024
"""Shortest length of RULER's documents, in tokens."""


@dataclass(frozen=True)
class HarnessDocuments:
    """Documents of one task of the harness, as prompts, and the scoring of their answers."""

    task: Any
    prompts: tuple[Prompt, ...]
    """Prompts with the attributes `task`, `targets`, `new_tokens` and `until`."""

    @property
    def metric(self) -> str:
        """Name of the score: the first that the task states; RULER's are lengths."""
        return str(self.task.config.metric_list[0]["metric"])

    def scores(self, answers: Sequence[str]) -> Float[np.ndarray, " prompt"]:
        """Score answers, one per prompt, by the task's `process_results`.

        Args:
            answers: Generated texts.

        Returns:
            The metric of every prompt.

        Raises:
            InputError: The task gives no numeric score for a document.
        """
        found = []
        # Objects of the harness, from which filters and metrics read answers
        instances = self.task.instances
        for prompt, answer, instance in zip(self.prompts, answers, instances, strict=True):
            # Our models generate past a stop text. str.split refuses an empty separator.
            for stop in filter(None, prompt.attributes["until"]):
                answer = answer.split(stop)[0]
            instance.resps = [answer]
        self.task.apply_filters()
        for prompt, instance in zip(self.prompts, instances, strict=True):
            # One answer per document; of several filters of a task, the first counts.
            response = next(iter(instance.filtered_resps.values()))
            values = self.task.process_results(instance.doc, [response])
            length = str(prompt.attributes.get("length", ""))
            # RULER's tasks name their score by the length of the document
            value = values.get(length, values.get(self.metric))
            if not isinstance(value, int | float | np.number):
                raise InputError(
                    f"the task {self.task.config.task} has no number {self.metric!r} for a "
                    "document; score it with lm_eval.simple_evaluate"
                )
            found.append(float(value))
        return np.array(found)


def harness_documents(
    tokenizer: PreTrainedTokenizerBase,
    task: str | Any,
    length: int | None = None,
    count: int = 20,
    seed: int = 0,
) -> HarnessDocuments:
    """Convert the first documents of a task of lm-evaluation-harness to prompts.

    Args:
        tokenizer: Fast tokenizer; RULER's tasks count its tokens.
        task: Name of a task that generates text, such as "ruler_vt", or a `Task` of the harness.
        length: Tokens of RULER's documents, at least 1,024; None: the default of the task.
        count: Number of documents.
        seed: Seed of tasks that draw documents.

    Returns:
        The documents.

    Raises:
        InputError: The harness is missing, lacks the task or cannot make it, or the task does not
            generate text.
    """
    require_drawable(count, seed)
    if length is not None and length < SHORTEST:
        raise InputError(
            f"lm-eval's documents have a length of {SHORTEST} tokens or more, not {length}"
        )
    made = _named_task(tokenizer, task, length, seed) if isinstance(task, str) else task
    task = str(made.config.task)
    if made.OUTPUT_TYPE != "generate_until":
        raise InputError(
            f"the task {task} of lm-eval is scored by {made.OUTPUT_TYPE}; wanted one that "
            "generates text. lm_eval.simple_evaluate takes our models (docs/tasks.md)"
        )
    with _quiet(), _seeded(seed):
        # As a single process, since the harness would split documents between processes.
        made.build_all_requests(limit=count, rank=0, world_size=1)
    known = {} if length is None else {"length": length}
    prompts = tuple(
        _prompt(instance.args, made.doc_to_target(instance.doc), tokenizer, task, known)
        for instance in made.instances
    )
    return HarnessDocuments(made, prompts)


def harness_prompts(
    tokenizer: PreTrainedTokenizerBase,
    task: str | Any,
    length: int | None = None,
    count: int = 20,
    seed: int = 0,
) -> list[Prompt]:
    """Make prompts of a task of lm-evaluation-harness, to analyze.

    Args:
        tokenizer: Fast tokenizer.
        task: Name of a task that generates text, such as "ruler_vt", or a `Task` of the harness.
        length: Tokens of RULER's documents, at least 1,024; None: the default of the task.
        count: Number of prompts.
        seed: Seed of tasks that draw documents.

    Returns:
        Prompts without answers, with the span `needle` if references occur in the text.

    Raises:
        InputError: As for `harness_documents`.
    """
    return list(harness_documents(tokenizer, task, length, count, seed).prompts)


def require_task(name: str) -> None:
    """Refuse a name that no task of the harness has, without importing the harness.

    Args:
        name: Name of a task.

    Raises:
        InputError: The harness is missing, or has no file with such a task.
    """
    harness = find_spec("lm_eval")
    if harness is None:
        raise InputError(
            f"the task lm-eval:{name} needs lm-evaluation-harness: pip install lm-eval"
        )
    # The harness's index takes ten seconds, since it parses all files; here lines `task: NAME` are
    # read.
    task = re.compile(
        rb"^[ \t-]*[\"']?task[\"']?[ \t]*:[ \t]*[\"']?" + re.escape(name.encode()) + rb"[\"'\s#]",
        re.MULTILINE,
    )
    files = [
        file
        for folder in harness.submodule_search_locations or ()
        for file in Path(folder, "tasks").rglob("*.y*ml")
    ]
    # A harness without such files is of an unknown version, and raises an error later.
    if files and not any(task.search(file.read_bytes() + b"\n") for file in files):
        raise InputError(
            f"lm-eval has no task {name!r}; `lm_eval ls tasks` lists them, and a group is "
            "scored task by task"
        )


def _named_task(
    tokenizer: PreTrainedTokenizerBase, name: str, length: int | None, seed: int
) -> Any:
    require_task(name)
    with _quiet(), _seeded(seed), tempfile.TemporaryDirectory() as directory:
        from lm_eval.tasks import TaskManager, get_task_dict

        tokenizer.save_pretrained(directory)  # files without code, since the harness would run it
        metadata: dict[str, Any] = {"tokenizer": directory}
        if length is not None:
            metadata["max_seq_lengths"] = [length]
        manager = TaskManager(metadata=metadata)
        if name not in manager.all_subtasks:
            raise InputError(
                f"lm-eval has no task {name!r}; `lm_eval ls tasks` lists them, and a group is "
                "scored task by task"
            )
        try:
            return get_task_dict([name], manager)[name]
        except Exception as error:  # the harness may lack a data set, a connection or a module
            raise InputError(f"lm-eval cannot make the task {name}: {one_line(error)}") from error


def _prompt(
    arguments: tuple[str, Mapping[str, Any]],
    target: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    known: Mapping[str, Any],
) -> Prompt:
    text, options = arguments
    targets = [str(answer) for answer in (target if isinstance(target, list) else [target])]
    # Bounded by \w, since the target may be a part of a longer number
    places = [
        match.span()
        for answer in targets
        for match in re.finditer(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text)
        if answer.strip() and text.count(answer.strip()) == 1
    ]
    until = options.get("until") or []
    return prompt_from_text(
        text,
        {"needle": tuple(sorted(set(places)))} if places else {},
        tokenizer,
        targets,
        {
            "task": f"lm-eval:{task}",
            "new_tokens": int(options.get("max_gen_toks", 256)),
            "until": [until] if isinstance(until, str) else list(until),
            **known,
        },
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness from printing and logging; its progress bars stay."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # Tasks of the harness both print and log.
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of Python and numpy, and restore their state afterwards."""
    # Global state, so it is restored for other users
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the harness draws from it
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
