"""Few-shot following on GLUE (HoPE sec. 4.1, table 2): its own tsv files, with five examples and meaningless sentences between.

The prompts are those of `few_shot_text`, which reads SST-2, QNLI and RTE. Following: the output begins with a label of the examples; label
accuracy: with the right one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from repo_interp.errors import InputError
from repo_interp.tasks.few_shot_text import few_shot_prompts
from repo_interp.tasks.prompt import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METRICS = ("following", "label accuracy")
NEW_TOKENS = 8


def prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int, answer: str = "none"
) -> list[Prompt]:
    """`count` prompts of at most `length` tokens with their labels. Raises InputError for anything that is no table of GLUE's."""
    if Path(path).is_dir():
        raise InputError(f"{path}: wanted one of GLUE's tables, got a folder; name a file such as SST-2/dev.tsv")
    made = few_shot_prompts(tokenizer, path, length - NEW_TOKENS, count, seed=seed)
    return [_scored(prompt if answer == "reference" else _asked(prompt)) for prompt in made]


def _scored(prompt: Prompt) -> Prompt:
    new = {"subset": "glue", "metrics": list(METRICS), "new_tokens": NEW_TOKENS, "stops": [], "dropped_tokens": 0}
    return dataclasses.replace(prompt, attributes={**prompt.attributes, **new})


def _asked(prompt: Prompt) -> Prompt:
    """`prompt` without its answer, which stands at its end."""
    end = prompt.generated[0]
    return dataclasses.replace(
        prompt,
        tokens=prompt.tokens[:end],
        generated=(),
        token_text=None if prompt.token_text is None else prompt.token_text[:end],
        text=None,
        characters=None,
    )
