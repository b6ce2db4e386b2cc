"""The directory of our checkpoints: next to the package in a checkout, inside the package if it was
installed from a wheel.

    DIRECTORY/TASK/NAME              weights of seed 0 and config.json          NAME/seed-N        the same of another seed
    DIRECTORY/TASK/tokenizer.json    of all checkpoints of the task             TASK/runs.jsonl    a record per training run
    DIRECTORY/registry.csv           name, size, SHA-256 and a description of all weights

The package repo_interp contains niah/repo and reversal/repo; their records, and the weights of
their other seeds, are in this directory.
"""

from __future__ import annotations

from pathlib import Path

from repo_interp.checkpoint_files import shipped

REGISTRY = "registry.csv"
_PACKAGE = Path(__file__).parent
_PLACES = (_PACKAGE.parent / "zoo", _PACKAGE / "zoo")
DIRECTORY = next((place for place in _PLACES if (place / REGISTRY).is_file()), _PLACES[0])


def recorded_at(directory: Path) -> Path:
    """Return the directory with the records and the other seeds of the checkpoint in `directory`:
    the same directory, unless the checkpoint is part of the package repo_interp.
    """
    within = directory.is_relative_to(shipped.DIRECTORY)
    return DIRECTORY / directory.relative_to(shipped.DIRECTORY) if within else directory
