"""What made a training run, beside its configuration: the command, versions, and what it went on from."""

from __future__ import annotations

import platform
from importlib.metadata import version

from repo_interp.models.checkpoints import identify
from repo_interp.models.provenance import checkpoint_digest
from repo_interp.training.configuration import TrainingConfiguration


def made_with(configuration: TrainingConfiguration, command: str) -> dict[str, str]:
    """The table `made_with` of training.toml."""
    known = {"command": command, "python": platform.python_version()}
    known |= {name: version(name) for name in ("torch", "transformers", "numpy")}
    if configuration.continue_from:
        known["continued_from"] = checkpoint_digest(identify(configuration.continue_from).directory)
    return known
