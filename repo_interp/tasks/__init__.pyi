"""The names of the tasks, for type checkers, and for the lazy imports of `__init__.py`."""

import collections.abc
import typing

from .copying import copying_prompts as copying_prompts
from .few_shot_text import few_shot_prompts as few_shot_prompts
from .few_shot_text import following as following
from .harness import harness_prompts as harness_prompts
from .niah import niah as niah
from .niah import niah_score as niah_score
from .niah import niah_scores as niah_scores
from .prompt import Prompt as Prompt
from .prompt import digest as digest
from .prompt.jsonl import read_prompts as read_prompts
from .prompt.jsonl import write_prompts as write_prompts
from .prompt.text import prompt_from_text as prompt_from_text
from .random_tokens import random_token_prompts as random_token_prompts
from .reversal import reversal_prompts as reversal_prompts
from .task import Batch as Batch
from .task import Response as Response
from .task import Task as Task

def task_names() -> tuple[str, ...]: ...
def recorded_task(
    source: str,
    name: str,
    size: str,
    options: collections.abc.Mapping[str, typing.Any],
    given: collections.abc.Mapping[str, typing.Any],
) -> Task: ...
def make_task(name: str, size: str = "small", **options: typing.Any) -> Task: ...
