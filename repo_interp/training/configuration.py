"""Everything that decides the bytes of a trained checkpoint, as one flat record that is written beside it as training.toml.

The same record, on the same machine with the same versions, gives the same model.safetensors. Knows nothing about how it is carried out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TrainingConfiguration:
    """One training run. Shares are of its steps, lengths in tokens unless the task says otherwise."""

    task: str
    task_options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """What the task is made with, in the task's own names; its defaults where nothing is said."""

    scheme: str = "repo"
    """A layout: see `positions.layouts`."""
    assignment: str = "kv_head"
    """What has a row of learned positions of its own: "kv_head", "head" or "layer"."""
    continue_from: str = ""
    """A checkpoint to reposition and go on from, with its own size and tokenizer; empty: start from random weights."""
    index_share_until: float = 0.0
    """Share of the steps over which learned positions go over from the token index (p = 1 -> 0); 0: none."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 0
    """Key-value heads; 0: as many as heads."""
    feed_forward: int = 0
    """Width of the feed-forward layers; 0: 8/3 of the width, rounded up to a multiple of 16."""
    initial_deviation: float = 0.02
    """Standard deviation of the random weights of the decoder."""
    scheme_deviation: float = 0.02
    """The same for what the position schemes learn (the paper's)."""

    steps: int = 1000
    batch: int = 32
    """Prompts of one forward pass."""
    accumulation: int = 1
    """Forward passes a step."""
    learning_rate: float = 2e-3
    final_share: float = 0.0
    """Learning rate at the end as a share of `learning_rate`."""
    warm_up: int = 100
    beta_1: float = 0.9
    beta_2: float = 0.98
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    curriculum: float = 0.0
    """Share of the steps over which the task grows to its full difficulty; 0: full from the start."""

    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    """CPU threads: sums are made in another order with another number of them."""

    checkpoint_every: int = 0
    """Keep a checkpoint every so many steps in steps/; 0: none but the last."""
    log_every: int = 25
    score_every: int = 250
    """Score the model every so many steps; 0: at the end only."""
    score_prompts: int = 64

    def __post_init__(self) -> None:
        """Refuse, by one line, what could not be carried out."""
        for name in ("layers", "width", "heads", "steps", "batch", "accumulation", "log_every", "score_prompts", "threads"):
            self._require(name, getattr(self, name) >= 1, "wanted at least 1")
        for name in ("kv_heads", "feed_forward", "warm_up", "checkpoint_every", "score_every", "seed", "weight_decay"):
            self._require(name, getattr(self, name) >= 0, "wanted 0 or more")
        for name in ("learning_rate", "clip", "initial_deviation", "scheme_deviation"):
            self._require(name, getattr(self, name) > 0, "wanted more than 0")
        for name in ("index_share_until", "curriculum", "final_share"):
            self._require(name, 0 <= getattr(self, name) <= 1, "wanted a share between 0 and 1")
        for name in ("beta_1", "beta_2"):
            self._require(name, 0 <= getattr(self, name) < 1, "wanted at least 0 and below 1")
        self._require("device", self.device in DEVICES, f"wanted one of {', '.join(DEVICES)}")
        self._require("width", self.width % self.heads == 0, f"wanted a multiple of the {self.heads} heads")
        self._require("width", self.width // self.heads % 2 == 0, f"wanted heads of even width, not {self.width // self.heads}")
        self._require("kv_heads", self.heads % (self.kv_heads or self.heads) == 0, f"wanted a divisor of the {self.heads} heads")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise InputError(f"{name} is {getattr(self, name)!r}; {wanted}")


def replaced(configuration: TrainingConfiguration, changes: Mapping[str, Any]) -> TrainingConfiguration:
    """`configuration` with some fields exchanged. Raises InputError for unknown fields and values of another type."""
    known = typing.get_type_hints(TrainingConfiguration)
    checked: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            raise InputError(f"a training configuration has no {name!r}; it has {', '.join(known)}")
        checked[name] = _of_type(name, value, known[name])
    return dataclasses.replace(configuration, **checked)


def read_toml(file: Path) -> dict[str, Any]:
    """The fields that `file` gives, unchecked. Raises InputError when it is no TOML file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {file}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file} is no TOML file: {error}") from None


def to_toml(configuration: TrainingConfiguration) -> str:
    """The whole configuration as TOML; `read_toml` and `replaced` read it back."""
    fields = dataclasses.asdict(configuration)
    options = fields.pop("task_options")
    lines = [f"{name} = {_toml_value(value)}" for name, value in fields.items()]
    lines += ["", "[task_options]", *(f"{name} = {_toml_value(value)}" for name, value in options.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: int | float | str | bool) -> str:
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value)


def _of_type(name: str, value: Any, wanted: Any) -> Any:
    if typing.get_origin(wanted) is not None:
        if not isinstance(value, Mapping) or not all(isinstance(v, (int, float, str, bool)) for v in value.values()):
            raise InputError(f"{name} is {value!r}; wanted a table of numbers and words")
        return dict(value)
    assert isinstance(wanted, type | types.UnionType)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted or (wanted is float and not math.isfinite(value)):
        raise InputError(f"{name} is {value!r}; wanted {'a finite number' if wanted is float else f'one {wanted.__name__}'}")
    return value
