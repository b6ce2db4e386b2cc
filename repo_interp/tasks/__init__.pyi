"""The names of the tasks, for type checkers, and for the lazy imports of `__init__.py`."""

from collections.abc import Mapping
from typing import Any

from repo_interp.tasks.copying import copying_prompts as copying_prompts
from repo_interp.tasks.few_shot_text import few_shot_prompts as few_shot_prompts
from repo_interp.tasks.few_shot_text import following as following
from repo_interp.tasks.niah import niah as niah
from repo_interp.tasks.niah import niah_score as niah_score
from repo_interp.tasks.niah import niah_scores as niah_scores
from repo_interp.tasks.prompt import Prompt as Prompt
from repo_interp.tasks.prompt import digest as digest
from repo_interp.tasks.prompt.jsonl import read_prompts as read_prompts
from repo_interp.tasks.prompt.jsonl import write_prompts as write_prompts
from repo_interp.tasks.prompt.text import prompt_from_text as prompt_from_text
from repo_interp.tasks.random_tokens import random_token_prompts as random_token_prompts
from repo_interp.tasks.reversal import reversal_prompts as reversal_prompts
from repo_interp.tasks.task import Batch as Batch
from repo_interp.tasks.task import Response as Response
from repo_interp.tasks.task import Task as Task

def task_names() -> tuple[str, ...]: ...
def recorded_task(
    source: str, name: str, size: str, options: Mapping[str, Any], given: Mapping[str, Any]
) -> Task: ...
def make_task(name: str, size: str = "small", **options: Any) -> Task: ...
