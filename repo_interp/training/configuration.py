"""Everything that decides the bytes of a trained checkpoint, as one flat record that is written beside it as training.toml.

The same record, on the same machine with the same versions, gives the same model.safetensors. Knows nothing about how it is carried out.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from repo_interp.errors import InputError
from repo_interp.values import checked

DEVICES = ("cpu", "cuda")
TABLES = ("task_options", "scheme_options")
"""The fields that are tables: options of the task and of the scheme."""


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class TrainingConfiguration:
    """What one training run is made with. Shares are of its steps. What a field means stands in its metadata, under "help"."""

    task: str
    task_size: str = _option("small", "size of the task, by the name the task gives it")
    task_options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """Options of the task, in its own names; those that are left out are as its size has them."""

    scheme: str = _option("repo", "position scheme or layout, such as rope, nope, repo, repo@1/3, r2n1")
    scheme_options: Mapping[str, int | str] = field(default_factory=dict)
    """Choices within schemes, as `reposition` takes them: assignment (kv_head, head, layer), gates, p_max, ..."""
    continue_from: str = _option("", "a checkpoint to reposition and go on from; it keeps its size and weights")
    index_share_until: float = _option(
        0.0, "share of the steps over which learned positions go over from the token index to themselves"
    )

    layers: int = _option(4, "layers of a fresh model")
    width: int = _option(64, "width of a fresh model's residual stream")
    heads: int = _option(4, "heads of a fresh model")
    kv_heads: int = _option(0, "key-value heads of a fresh model; 0: one per head")
    feed_forward: int = _option(0, "width of its feed-forward layers; 0: 8/3 of the width, up to a multiple of 16")
    initial_deviation: float = _option(0.02, "standard deviation of a fresh model's random weights")
    scheme_deviation: float = _option(0.02, "the same for what the position schemes learn")

    steps: int = _option(1000, "changes of the weights")
    batch: int = _option(32, "sequences of one forward pass")
    accumulation: int = _option(1, "forward passes of one step")
    learning_rate: float = _option(2e-3, "largest learning rate, after the warm-up")
    final_share: float = _option(0.0, "learning rate at the end, as a share of the largest")
    warm_up: int = _option(100, "steps over which the learning rate rises")
    beta_1: float = _option(0.9, "AdamW's first decay")
    beta_2: float = _option(0.98, "AdamW's second decay")
    weight_decay: float = _option(0.01, "AdamW's weight decay, on matrices")
    clip: float = _option(1.0, "largest norm of the gradient")
    curriculum: float = _option(0.0, "share of the steps over which the task grows to its full difficulty")

    seed: int = _option(0, "seed of weights and data")
    device: str = _option("cpu", "cpu or cuda")
    threads: int = _option(1, "CPU threads; another number adds in another order, so it may change the last bits")

    checkpoint_every: int = _option(0, "keep a checkpoint in steps/ every so many steps; 0: none but the last")
    log_every: int = _option(25, "steps between two records of the log")
    score_every: int = _option(250, "steps between two scores; 0: only at the end")
    score_prompts: int = _option(200, "prompts a score is the mean over")

    def __post_init__(self) -> None:
        """Raise InputError for what could not be carried out."""
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
    known = get_type_hints(TrainingConfiguration)
    for name in changes:
        if name not in known:
            raise InputError(f"a training configuration has no {name!r}; it has {', '.join(known)}")
    return dataclasses.replace(configuration, **{name: checked(value, known[name], name) for name, value in changes.items()})


def read_toml(file: Path) -> dict[str, Any]:
    """The fields that `file` gives, unchecked; its table `made_with` is left out. Raises InputError when it is no TOML file."""
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
        fields.pop("made_with", None)
        return fields
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {file}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file} is no TOML file: {error}") from None


def to_toml(configuration: TrainingConfiguration, made_with: Mapping[str, str] | None = None) -> str:
    """The whole configuration as TOML; `read_toml` and `replaced` read it back. `made_with`: a table of what else is known of the run."""
    fields = dataclasses.asdict(configuration)
    tables = {name: fields.pop(name) for name in TABLES} | {"made_with": made_with or {}}
    lines = [f"{name} = {_toml_value(value)}" for name, value in fields.items()]
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: int | float | str | bool) -> str:
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value, ensure_ascii=False)
