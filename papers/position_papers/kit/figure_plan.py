"""A plan of figures: a TOML file with a table `[[figures]]` for every call of `repo-interp
figures`.

    [[figures]]
    papers = ["hope"]                            # default: all
    checkpoints = { mine = "runs/mine" }         # NAME = CHECKPOINT
    zoo = false                                  # as --no-zoo
    experiments = ["vaf"]                        # default: all
    settings = { controls = 10, hope.length = 512 }
    fast = true
    out = "figures/mine/random-tokens"

This module does not know the meaning of the words; they are read like words of the command line.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from repo_interp.errors import InputError
from repo_interp.storage.records import read_text, validate

WANTED = "a plan in TOML, with a table [[figures]] for each call"
Value = int | float | str | list[int | float | str]


class Row(BaseModel):
    """One call of the command."""

    model_config = ConfigDict(extra="forbid", strict=True)

    out: str = Field(min_length=1)
    papers: list[str] = []
    checkpoints: dict[str, str] = {}
    zoo: bool = True
    experiments: list[str] = []
    settings: dict[str, Value | dict[str, Value]] = {}
    fast: bool = False

    def stated_settings(self) -> list[tuple[str, str]]:
        """Return pairs of NAME or PAPER.NAME and the value as text of the command line."""
        flat: dict[str, Value] = {}
        for name, value in self.settings.items():
            if isinstance(value, dict):
                flat |= {f"{name}.{option}": inner for option, inner in value.items()}
            else:
                flat[name] = value
        return [(name, _written(value)) for name, value in flat.items()]


class _Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    figures: list[Row] = Field(min_length=1)


def read_plan(file: str) -> list[Row]:
    """Read the rows of a plan.

    Args:
        file: The path of the TOML file.

    Returns:
        The rows in order.

    Raises:
        InputError: The file is missing or not TOML, has no row, or has an unknown key or a wrong
            type.
    """
    text = read_text(Path(file), WANTED)
    try:
        stated = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no TOML file: {error}; wanted {WANTED}") from None
    return validate(stated, _Plan, file).figures


def _written(value: Value) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
