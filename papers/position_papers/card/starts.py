"""Weights in the package from which runs of a task continue, so that they need no training.

A start is a checkpoint of the zoo, TASK/NAME or TASK/NAME/seed-N. It is used if registry.csv lists
it and its file has the listed SHA-256.
"""

from __future__ import annotations

from position_papers.training.trained import registered
from position_papers.zoo_directory import DIRECTORY, REGISTRY
from repo_interp.checkpoint_files.stored import stored_digest
from repo_interp.errors import InputError


def shipped_start(name: str, seed: int) -> str:
    """Look for the weights of a start.

    Args:
        name: TASK/NAME of the zoo.
        seed: Seed of its training.

    Returns:
        The name that opens the checkpoint; "" if its weights are not in the package.

    Raises:
        InputError: The weights differ from those in the registry.
    """
    wanted = registered(DIRECTORY / name, seed)
    if not wanted:
        return ""
    place = f"{name}/seed-{seed}" if seed else name
    if stored_digest(DIRECTORY / place) != wanted:
        raise InputError(
            f"{DIRECTORY / place} has other weights than {REGISTRY} lists, so nothing can go on "
            "from them; install position-papers again"
        )
    return place
