"""Scoring of prompts (`Scoring`), and tasks that also make prompts and training batches (`Task`).

    loss       mean over targets t of  -log p(tokens[t] | tokens[:t])      targets = Batch.targets
    response   for every target t of a prompt: argmax p(. | tokens[:t]) and
               log p(tokens[t] | tokens[:t]), teacher-forced
    score      one number per prompt from its response (`metric`); its mean over prompts is the
               score of the task

All targets of a teacher-forced response are right if and only if greedy generation gives the
reference, so exact match needs no generation. Tokens are padded on the right, so a causal model
never sees padding, and padding is never a target.

A task is a frozen dataclass. Its fields (numbers, words and booleans) are the options from which
`make_task` rebuilds it. This module knows nothing about models, losses or optimizers.
"""

from __future__ import annotations

import dataclasses
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float, Int

from repo_interp.errors import InputError, quoted
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.vocabulary import Vocabulary
from repo_interp.values import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


MOST = 65_536
Number = Annotated[int, Interval(ge=1, le=MOST)]
"""Number of tokens, or of parts, of a sequence."""
Words = Annotated[int, Interval(ge=1, le=1_000_000)]
"""Number of words of a vocabulary."""


class Batch(NamedTuple):
    """Sequences for one training step, padded on the right with <pad> (0)."""

    tokens: Int[np.ndarray, "sequence token"]
    """int64 token ids."""
    targets: Bool[np.ndarray, "sequence token"]
    """True for tokens to predict from all earlier tokens.

    Never at token 0, never at padding.
    """


@dataclass(frozen=True)
class Response:
    """Teacher-forced predictions at the targets of one prompt, in the order of its targets."""

    tokens: tuple[int, ...]
    """The most likely token at every target."""
    log_probabilities: tuple[float, ...] = ()
    """Natural logarithm of the probability of the token at every target.

    Only tasks scored in nats need it.
    """


@dataclass(frozen=True)
class Scoring:
    """Targets of a prompt and the score of predictions; here exact match of generated tokens."""

    name: ClassVar[str]
    metric: ClassVar[str] = "exact match"
    """Name of the number that `score` returns."""
    units: ClassVar[str] = "1"
    """Units of the score: "1" (shares, counts) or "nat"."""
    higher_is_better: ClassVar[bool] = True
    does: ClassVar[str] = ""
    """Description of a model that does the task, to follow "The model": "says {length} words
    backwards", with attributes of a prompt in braces; empty: no description.
    """

    def purpose(self, prompts: Sequence[Prompt]) -> str:
        """Describe a model that does the task on these prompts.

        Args:
            prompts: Prompts.

        Returns:
            `does`, filled in by the longest prompt.
        """
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        try:
            return self.does.format(**longest.attributes)
        except KeyError:  # prompts that others made
            return ""

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes of a group of scores."""
        return {
            "task": self.name,
            "metric": self.metric,
            "higher_is_better": str(self.higher_is_better),
        }

    def targets(self, prompt: Prompt) -> tuple[int, ...]:
        """List the tokens to predict.

        Args:
            prompt: Prompt.

        Returns:
            Indices, ascending.
        """
        return tuple(sorted(prompt.generated))

    def score(
        self, responses: Sequence[Response], prompts: Sequence[Prompt]
    ) -> Float[np.ndarray, " prompt"]:
        """Score responses; by default 1 if every target is right, else 0.

        Args:
            responses: One response per prompt.
            prompts: Prompts.

        Returns:
            One number per prompt, in `units`.
        """
        return np.array([float(right.all()) for right in self.right(responses, prompts)])

    def right(
        self, responses: Sequence[Response], prompts: Sequence[Prompt]
    ) -> list[Bool[np.ndarray, " target"]]:
        """Compare predictions with the tokens of prompts.

        Args:
            responses: One response per prompt.
            prompts: Prompts.

        Returns:
            For every prompt, whether each target was predicted.

        Raises:
            ValueError: Responses do not fit the prompts.
        """
        if len(responses) != len(prompts):
            raise ValueError(
                f"wanted one response per prompt, got {len(responses)} for {len(prompts)} prompts"
            )
        right = []
        for response, prompt in zip(responses, prompts, strict=True):
            targets = self.targets(prompt)
            if len(response.tokens) != len(targets):
                raise ValueError(
                    f"wanted {len(targets)} tokens in a response, got {len(response.tokens)}"
                )
            right.append(np.array(response.tokens) == np.array(prompt.tokens)[list(targets)])
        return right


@dataclass(frozen=True)
class PlainText(Scoring):
    """Text without an answer: all tokens but the first are targets.

    The score is the log perplexity in nats per token.
    """

    metric: ClassVar[str] = "log perplexity"
    units: ClassVar[str] = "nat"
    higher_is_better: ClassVar[bool] = False

    def targets(self, prompt: Prompt) -> tuple[int, ...]:
        """All tokens but the first."""
        return tuple(range(1, len(prompt.tokens)))

    def score(
        self, responses: Sequence[Response], prompts: Sequence[Prompt]
    ) -> Float[np.ndarray, " prompt"]:
        """Return the log perplexity of every prompt, in nats per token."""
        return log_perplexity(self, responses, prompts)


@dataclass(frozen=True)
class Task(Scoring, ABC):
    """A task. Subclasses make batches, and read a sequence back as a prompt with spans."""

    axes: ClassVar[tuple[str, ...]] = ("test_set",)
    """Attributes of prompts to tabulate scores by, such as ("length",) or ("depth", "length")."""
    test_sets_count: ClassVar[str] = "tokens"
    """Unit of test sets with numbers as names."""
    named_texts: ClassVar[Mapping[str, Collection[str]]] = {}
    """By text option, the values that are not files; the record of a checkpoint may only set these.
    """

    def __post_init__(self) -> None:
        """Raises InputError for an option with a wrong type or out of range."""
        check_fields(self, f"task {self.name}")

    @property
    def origin(self) -> str:
        """The origin of the prompts as a phrase."""
        return f"the task {self.name}"

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def training_length(self) -> int:
        """Tokens of the longest training sequence, the context length of a trained model."""

    @property
    @abstractmethod
    def test_sets(self) -> tuple[str, ...]:
        """Names for `prompts`; sets within the training distribution come first."""

    @property
    def default_test_set(self) -> str:
        """Default test set of `prompts`: like training at full difficulty."""
        return self.test_sets[0]

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer to save with a checkpoint."""

    @abstractmethod
    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Make `size` training sequences at `progress` of a curriculum, from 0 to 1."""

    @abstractmethod
    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Make `size` sequences of one test set. Raises InputError for an unknown name."""

    @abstractmethod
    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Read a sequence, without padding, as a prompt with spans, answers and attributes."""

    def prompts(self, count: int, seed: int = 0, test_set: str | None = None) -> list[Prompt]:
        """Make `count` prompts of a test set. Prompt i depends only on the seed, the set and i."""
        require_drawable(count, seed)
        chosen = self.default_test_set if test_set is None else str(test_set)
        # A number for numpy's seed; hash() of a text differs between processes.
        tag = zlib.crc32(f"{self.name}/{chosen}".encode())
        prompts = []
        for index in range(count):
            # One at a time, so that prompt i does not depend on `count`.
            tokens = self.sample(np.random.default_rng([seed, index, tag]), 1, chosen).tokens[0]
            prompt = self.describe(tokens.tolist())
            # Last, so that a task may set both itself.
            attributes = {"task": self.name, "test_set": chosen, **prompt.attributes}
            prompts.append(dataclasses.replace(prompt, attributes=attributes))
        return prompts

    def options(self) -> dict[str, Any]:
        """The fields that rebuild this task: `make_task(task.name, **task.options())`."""
        return dataclasses.asdict(self)

    def sources(self) -> dict[str, str]:
        """Versions of the task's data for the record of a training run; empty by default."""
        return {}

    def _require_test_set(self, name: str) -> None:
        if name not in self.test_sets:
            raise InputError(
                f"task {self.name}: wanted a test set, one of {', '.join(self.test_sets)}; "
                f"got {name!r}"
            )

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InputError(f"task {self.name}: {message}")

    def _require_ascending(self, *bounds: int | str) -> None:
        """Raise InputError if `bounds`, numbers and names of options, descend."""
        values = [getattr(self, bound) if isinstance(bound, str) else bound for bound in bounds]
        # The message shows values of options only, since it contains fixed bounds already.
        options = [
            str(value)
            for bound, value in zip(bounds, values, strict=True)
            if isinstance(bound, str)
        ]
        self._require(
            values == sorted(values),
            f"wanted {' <= '.join(map(str, bounds))}, got {', '.join(options)}",
        )


@dataclass(frozen=True)
class WordTask(Task):
    """A task with a vocabulary of words."""

    @abstractmethod
    def task_words(self) -> tuple[str, ...]:
        """The words, without <pad> and <bos>."""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The words and their ids."""
        return Vocabulary(self.task_words())

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A word-level tokenizer: one token per word."""
        return self.vocabulary.tokenizer()


def require_drawable(count: Any, seed: Any) -> None:
    """Check a number of prompts and a seed.

    Args:
        count: Number of prompts.
        seed: Seed to draw them with.

    Raises:
        InputError: `count` is not a whole number from 1, or `seed` not one from 0.
    """
    # Whole numbers of numpy are allowed; booleans, which are numbers in Python, are not.
    counts, seeds = (
        hasattr(number, "__index__") and not isinstance(number, bool) for number in (count, seed)
    )
    if not counts or count < 1:
        raise InputError(f"wanted at least one prompt, got {quoted(count)}; ask for 1 or more")
    if not seeds or seed < 0:
        raise InputError(f"wanted a seed of 0 or more, got {quoted(seed)}")


def log_perplexity(
    scoring: Scoring, responses: Sequence[Response], prompts: Sequence[Prompt]
) -> Float[np.ndarray, " prompt"]:
    """Average -log p over the targets of every prompt.

    Args:
        scoring: Names the targets of a prompt.
        responses: Responses with log-probabilities.
        prompts: Prompts.

    Returns:
        Log perplexity in nats.

    Raises:
        ValueError: A response lacks log-probabilities.
    """
    # Called only for its checks of the numbers of responses and targets.
    scoring.right(responses, prompts)
    for response in responses:
        if len(response.log_probabilities) != len(response.tokens):
            raise ValueError(f"the metric {scoring.metric!r} needs one log-probability per target")
    return np.array([-np.mean(response.log_probabilities) for response in responses])


def grown(first: int, last: int, progress: float) -> int:
    """Interpolate the current size of a curriculum.

    Args:
        first: Size at the beginning.
        last: Size at the end.
        progress: From 0 to 1.

    Returns:
        The size, rounded.
    """
    return first + round(progress * (last - first))


def doublings(length: int, longest: int) -> tuple[str, ...]:
    """List a length and its doublings.

    Args:
        length: Shortest length.
        longest: Bound of the lengths.

    Returns:
        length, 2 x length, 4 x length, ... up to `longest`, as names of test sets.
    """
    # bit_length is floor(log2) + 1: the number of doublings that fit, including the length itself
    return tuple(str(length << power) for power in range((longest // length).bit_length()))


def whole_number(name: str, wanted: str, most: int = MOST) -> int:
    """Read the number that names a test set.

    Args:
        name: Name of the test set.
        wanted: Meaning of the number, for messages.
        most: Largest number.

    Returns:
        The number.

    Raises:
        InputError: `name` is not a number from 1 to `most`.
    """
    # isdigit is true for superscripts too, which int refuses.
    if not (name.isascii() and name.isdigit() and int(name) > 0):
        raise InputError(
            f"wanted a test set named by {wanted}, got {quoted(name)}; give a number like 64"
        )
    if int(name) > most:
        raise InputError(f"wanted a test set named by {wanted}, {most:,} at most, got {name}")
    return int(name)
