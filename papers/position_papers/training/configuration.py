"""Everything that determines the bytes of a trained checkpoint, as one flat record, which is stored
with it as training.toml.

The same record gives the same model.safetensors on the same machine with the same versions. This
module knows nothing about the training itself.
"""

# ruff: noqa: RUF009 - `_option` is dataclasses.field
from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Interval

from repo_interp.errors import InputError
from repo_interp.storage.files import regular
from repo_interp.values import (
    Count,
    CountOrNone,
    Positive,
    PositiveOrZero,
    Seed,
    Share,
    check_fields,
    checked,
)

Layers = Annotated[int, Interval(ge=1, le=1000)]
Width = Annotated[int, Interval(ge=1, le=65_536)]
WidthOrNone = Annotated[int, Interval(ge=0, le=262_144)]
Decay = Annotated[float, Interval(ge=0, lt=1)]
TABLES = ("task_options", "scheme_options")
"""Fields that are tables: options of the task and of the scheme."""
SIZES = ("layers", "width", "heads", "kv_heads", "feed_forward", "initial_deviation")
"""Fields of fresh models only."""


def _option(default: Any, meaning: str, alone: Any = None) -> Any:
    """Make a field; `alone` is the value of its option without an argument."""
    return field(default=default, metadata={"help": meaning, "alone": alone})


@dataclass(frozen=True)
class TrainingConfiguration:
    """Configuration of one training run.

    Shares are shares of its steps. The metadata of a field have an explanation under "help".
    """

    task: str
    task_size: str = _option("small", "size of the task, by the name the task gives it")
    task_options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """Options of the task by the task's names; missing options have the defaults of its size."""

    scheme: str = _option(
        "repo",
        "position scheme or layout, such as rope, nope, repo, repo@1/3, r2n1; "
        "FILE.py:FUNCTION instead of a name is a function of a Python file, which is run",
    )
    scheme_options: Mapping[str, int | float | str] = field(default_factory=dict)
    """Options of schemes, as for `reposition`: assignment (kv_head, head, layer), gates, p_max, ...
    """
    continue_from: str = _option(
        "", "a checkpoint to reposition and continue; it keeps its size and weights"
    )
    index_share_until: Share = _option(
        0.0,
        "share of the steps during which positions move from the token index to the learned ones",
    )

    adapter: CountOrNone = _option(
        0,
        "rank of an adapter, which trains the schemes' parameters and LoRA on attention and "
        "does not change the checkpoint",
        alone=16,
    )
    adapter_from: Annotated[int, Interval(ge=0, le=999)] = _option(
        0,
        "first layer whose attention an adapter changes; lower layers do not change and "
        "need no backward pass",
    )

    layers: Layers = _option(4, "layers of a fresh model")
    width: Width = _option(64, "width of a fresh model's residual stream")
    heads: Width = _option(4, "heads of a fresh model")
    kv_heads: WidthOrNone = _option(0, "key-value heads of a fresh model; 0: one per head")
    feed_forward: WidthOrNone = _option(
        0, "width of its feed-forward layers; 0: 8/3 of the width, up to a multiple of 16"
    )
    initial_deviation: Positive = _option(
        0.02, "standard deviation of a fresh model's random weights"
    )
    scheme_deviation: Positive = _option(
        0.02, "standard deviation of the position schemes' random parameters"
    )

    steps: Annotated[int, Interval(ge=1, le=1_000_000_000)] = _option(1000, "optimizer steps")
    batch: Count = _option(32, "sequences of one forward pass")
    accumulation: Count = _option(1, "forward passes of one step")
    learning_rate: Positive = _option(2e-3, "largest learning rate, after the warm-up")
    final_share: Share = _option(0.0, "learning rate at the end, as a share of the largest")
    warm_up: Annotated[int, Interval(ge=0, le=1_000_000_000)] = _option(
        100, "steps over which the learning rate rises"
    )
    beta_1: Decay = _option(0.9, "AdamW's first decay")
    beta_2: Decay = _option(0.98, "AdamW's second decay")
    weight_decay: PositiveOrZero = _option(0.01, "AdamW's weight decay, on matrices")
    clip: Positive = _option(1.0, "largest norm of the gradient")
    curriculum: Share = _option(
        0.0, "share of the steps over which the task grows to its full difficulty"
    )

    seed: Seed = _option(0, "seed of weights and data")
    precision: Literal["float32", "bfloat16"] = _option(
        "float32",
        "precision of matrix products in training; weights, positions, losses and scores "
        "stay float32",
    )
    execution: Literal["eager", "compiled"] = _option(
        "eager", "compiled: torch.compile compiles the decoder, which may change the last bits"
    )
    device: Literal["cpu", "cuda"] = _option("cpu", "cpu, cuda, or auto: cuda if available")
    deterministic: bool | None = _option(
        None,
        "compute sums in the same order every time, which some schemes cannot do on an "
        "accelerator (default: only on a processor)",
    )
    threads: Annotated[int, Interval(ge=1, le=1024)] = _option(
        1, "CPU threads; another number may change the last bits, because sums run in another order"
    )

    checkpoint_every: CountOrNone = _option(
        0, "steps between two checkpoints in steps/; 0: only the last"
    )
    log_every: Count = _option(25, "steps between two records of the log")
    score_every: CountOrNone = _option(250, "steps between two scores; 0: only at the end")
    score_prompts: Count = _option(200, "prompts of each score")

    def __post_init__(self) -> None:
        """Raise InputError for a configuration that cannot be trained."""
        check_fields(self)
        heads = self.heads
        wanted = (
            ("width", self.width % heads == 0, f"a multiple of the {heads} heads"),
            (
                "width",
                self.width // heads % 2 == 0,
                f"heads of even width, not {self.width // heads}",
            ),
            ("kv_heads", heads % (self.kv_heads or heads) == 0, f"a divisor of the {heads} heads"),
            (
                "scheme_deviation",
                "scheme_deviation" not in self.scheme_options,
                "once: not among the scheme's options too (give --scheme-deviation)",
            ),
            (
                "adapter",
                not self.adapter or self.continue_from,
                "with continue_from, a checkpoint to stand on",
            ),
            (
                "execution",
                self.execution == "eager" or self.index_share_until == 0,
                "eager with index_share_until: the decoder is then another one at every step",
            ),
        )
        for name, holds, words in wanted:
            if not holds:
                raise InputError(f"{name} is {getattr(self, name)!r}; wanted {words}")

    @property
    def key_value_heads(self) -> int:
        """Key-value heads of a fresh model."""
        return self.kv_heads or self.heads

    @property
    def feed_forward_width(self) -> int:
        """Width of the feed-forward layers of a fresh model."""
        return self.feed_forward or -(-8 * self.width // (3 * 16)) * 16

    @property
    def is_deterministic(self) -> bool:
        """Whether to use deterministic algorithms; by default only on a processor."""
        return self.device == "cpu" if self.deterministic is None else self.deterministic


def replaced(
    configuration: TrainingConfiguration, changes: Mapping[str, Any]
) -> TrainingConfiguration:
    """Return `configuration` with some fields replaced.

    Raises InputError for unknown fields and values of another type.
    """
    known = get_type_hints(TrainingConfiguration, include_extras=True)
    for name in changes:
        if name not in known:
            raise InputError(f"a training configuration has no {name!r}; it has {', '.join(known)}")
    return dataclasses.replace(
        configuration,
        **{name: checked(value, known[name], name) for name, value in changes.items()},
    )


def joined(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Join two sets of fields; `over` takes precedence, and tables of options are joined by option."""
    tables = {
        name: {**under.get(name, {}), **over.get(name, {})}
        for name in TABLES
        if name in under or name in over
    }
    return {**under, **over, **tables}


def read_toml(file: Path) -> dict[str, Any]:
    """Read the fields in `file`, unchecked, without its table `made_with`.

    Raises InputError if it is not a TOML file.
    """
    try:
        fields = tomllib.loads(regular(file).read_text(encoding="utf-8"))
        fields.pop("made_with", None)
        for name in TABLES:
            if not isinstance(fields.get(name, {}), dict):
                raise InputError(f"{file}: {name} is {fields[name]!r}; wanted a table of options")
        return fields
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {file}") from None
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is no TOML file: {error}") from None


def to_toml(
    configuration: TrainingConfiguration, made_with: Mapping[str, str] | None = None
) -> str:
    """Return the whole configuration as TOML, for `read_toml` and `replaced`.

    `made_with` is a table with further facts about the run.

    If the run continues a checkpoint, the fields of fresh models are left out.
    """
    fields = dataclasses.asdict(configuration)
    fields["deterministic"] = configuration.is_deterministic
    if configuration.continue_from:
        fields = {name: value for name, value in fields.items() if name not in SIZES}
    tables = {name: fields.pop(name) for name in TABLES} | {"made_with": made_with or {}}
    lines = [f"{name} = {_toml_value(value)}" for name, value in fields.items()]
    for name, table in tables.items():
        if table:
            lines += [
                "",
                f"[{name}]",
                *(f"{key} = {_toml_value(value)}" for key, value in table.items()),
            ]
    return "\n".join(lines) + "\n"


def _toml_value(value: int | float | str | bool) -> str:
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value, ensure_ascii=False)
