"""Prompts of `repo-interp analyze`: given by the user, or made by a task.

    --prompts FILE, --text TEXT                     read
    --task, --variant, --length, --count, --seed    made

Options that exclude each other are refused before torch is loaded.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repo_interp.cli.arguments import count, field_values, seed, tokens, without_owner
from repo_interp.errors import InputError

if TYPE_CHECKING:
    from repo_interp.runtime.progress import Step

_MADE_BY = ("task", "variant", "length", "count", "seed")
"""Options of prompts that are made."""

# Written here again, since importing the task would make --help slow.
_VARIANTS = (
    "single_1",
    "single_2",
    "single_3",
    "multikey_1",
    "multikey_2",
    "multikey_3",
    "multivalue",
    "multiquery",
)


def add_made_prompts(parser: argparse.ArgumentParser) -> None:
    """Declare the options of prompts that are made.

    Args:
        parser: Parser of the command.
    """
    generated = parser.add_argument_group("prompts that are made, when no --prompts are given")
    generated.add_argument(
        "--task",
        metavar="NAME",
        help="ruler (needle in a haystack), or a synthetic task (default: the task "
        "that the checkpoint was trained on by "
        "repo-interp train, else ruler)",
    )
    generated.add_argument("--variant", choices=_VARIANTS, help="of ruler (default: multikey_1)")
    generated.add_argument(
        "--length",
        type=tokens,
        metavar="N",
        help="tokens of a ruler prompt (default: the training length, at most 4096), or the "
        "test set of a synthetic task",
    )
    generated.add_argument(
        "--count", type=count, metavar="N", help="how many prompts (default: 20)"
    )
    generated.add_argument("--seed", type=seed, help="seed of the prompts (default: 0)")


def require_none_made(arguments: argparse.Namespace) -> None:
    """Refuse options of made prompts together with given prompts, and text together with a file.

    Args:
        arguments: Parsed options.

    Raises:
        InputError: Two options exclude each other.
    """
    if arguments.prompts is not None and arguments.text is not None:
        raise InputError(
            "--text gives a prompt, and --prompts a file of them; leave one of the two out"
        )
    given = "--text gives one" if arguments.prompts is None else "--prompts gives a file of them"
    # Their default is None, so that 0 counts as given
    for option in _MADE_BY:
        if getattr(arguments, option) is not None:
            raise InputError(
                f"--{option} is of prompts that are made, and {given}; leave one of the two out"
            )


def given_prompts(arguments: argparse.Namespace, bridge: Any) -> tuple[list[Any], None, str]:
    """Read the prompts of --text or --prompts.

    A plain text that is longer than the training length is cut, with a note.

    Args:
        arguments: Parsed options.
        bridge: Model with its tokenizer.

    Returns:
        Prompts, no task, and their origin in words.
    """
    from repo_interp.errors import warn
    from repo_interp.models.decoder import as_decoder
    from repo_interp.tasks.prompt.jsonl import read_prompts
    from repo_interp.tasks.prompt.text import prompt_from_text
    from repo_interp.tasks.short_text import truncate

    if arguments.text is not None:
        source, prompts = "--text", [prompt_from_text(arguments.text, {}, bridge.tokenizer)]
    else:
        source = f"the file {Path(arguments.prompts).name}"
        prompts = read_prompts(
            arguments.prompts, tokenizer=bridge.tokenizer, vocab_size=bridge.config.vocab_size
        )
    # The first position decides: a number, or a tuple with a number per axis of an image.
    if any(isinstance((prompt.position_ids or (0,))[0], tuple) for prompt in prompts):
        warn(
            "prompts have positions by axis, and a file contains only tokens: placeholders of an image "
            "enter with their vectors of the table (docs/python.md puts in the image's features)"
        )
    # A prompt with spans is not cut: its marks could fall off.
    longest = as_decoder(bridge).training_length
    if (
        len(prompts) == 1
        and not (prompts[0].spans or prompts[0].generated)
        and len(prompts[0].tokens) > longest
    ):
        warn(
            f"the text has {len(prompts[0].tokens):,} tokens; its first {longest:,}, the "
            "training length, are analyzed"
        )
        prompts = [truncate(prompts[0], longest)]
    return prompts, None, source


def make_prompts(
    arguments: argparse.Namespace, bridge: Any, step: Step
) -> tuple[list[Any], Any, str]:
    """Make prompts of the task that is asked for, or of the checkpoint's.

    Args:
        arguments: Parsed options.
        bridge: Model with its tokenizer.
        step: Called with the progress.

    Returns:
        Prompts, their task, and their origin in words. The task is None for ruler: its prompts are
        scored by their generated tokens.

    Raises:
        InputError: The task cannot make them for this checkpoint, or they exceed the memory.
    """
    from repo_interp import tasks
    from repo_interp.analysis.defaults import COUNT, default_prompts, origin_of
    from repo_interp.analysis.memory_needed import (
        require_memory_for_pass,
        require_memory_for_prompts,
    )
    from repo_interp.analysis.trained_task import task_of, trained_name
    from repo_interp.models.decoder import as_decoder
    from repo_interp.models.pass_limits import batch_limit

    decoder = as_decoder(bridge)
    origin = decoder.origin
    assert origin is not None  # a command has loaded it
    name = arguments.task or trained_name(origin.directory) or "ruler"
    # ruler is not a `Task`: its options have separate arguments.
    options = {} if name == "ruler" else _task_options(arguments, name)
    # Without options for prompts, the default of `ri.analyze` applies.
    if all(getattr(arguments, option) is None for option in _MADE_BY):
        prompts, task = default_prompts(decoder, **options)
        return prompts, task, origin_of(task)
    count = COUNT if arguments.count is None else arguments.count
    seed = 0 if arguments.seed is None else arguments.seed
    if name == "ruler":
        length = arguments.length or min(4096, origin.training_length)
        if bridge.tokenizer is None:
            raise InputError(
                "this checkpoint has no tokenizer, so no prompts can be made for it; give "
                "--prompts with token ids"
            )
        # Making needles tokenizes long texts, which may already exceed the memory.
        require_memory_for_prompts(count, length)
        require_memory_for_pass(
            decoder,
            length,
            min(count, batch_limit(decoder, arguments.batch_size).of_length(length)),
        )
        variant = arguments.variant or "multikey_1"
        return (
            tasks.niah(
                bridge.tokenizer,
                variant,
                length,
                count,
                seed,
                progress=partial(step, "making prompts"),
            ),
            None,
            f"the task ruler, {variant}",
        )
    if arguments.variant is not None:
        raise InputError(
            f"--variant is of the task ruler, and this checkpoint is asked {name}; give "
            "--task ruler with it"
        )
    task = task_of(origin.directory, name, **options)
    # Token ids beyond the embedding would fail in the first pass.
    if bridge.config.vocab_size < task.vocabulary_size:
        raise InputError(
            f"the task {name} has {task.vocabulary_size} tokens, the checkpoint "
            f"{bridge.config.vocab_size}; "
            "wanted a checkpoint trained on it, or --prompts"
        )
    require_memory_for_prompts(count, arguments.length or task.training_length)
    test_set = None if arguments.length is None else str(arguments.length)
    return task.prompts(count, seed=seed, test_set=test_set), task, task.origin


def _task_options(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the options of a task: settings with the name of the task, and its texts."""
    from repo_interp.tasks import make_task

    task = make_task(name)
    of_task = [
        (key, text)
        for key, text in arguments.parameters
        # Options that are texts, such as corpus, are the task's even without its name.
        if key.startswith(f"{name}.") or isinstance(task.options().get(key), str)
    ]
    # Taken out of the list, or the measures would refuse them as unknown.
    arguments.parameters = [pair for pair in arguments.parameters if pair not in of_task]
    return field_values(without_owner(of_task, name), task, f"task {name}")
