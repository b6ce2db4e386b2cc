"""Weights that ship of what a task's runs go on from, so that they are not trained again.

A start is a checkpoint of the zoo, TASK/NAME or TASK/NAME/seed-N; it is taken where registry.csv lists
it, and its file has the SHA-256 that stands there.
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
        seed: Seed that it was trained with.

    Returns:
        The name by which checkpoints of the zoo open; "" where its weights do not ship.

    Raises:
        InputError: They are other weights than the registry lists.
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
