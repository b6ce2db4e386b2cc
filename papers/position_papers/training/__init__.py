"""Training of small models by the recipes of the zoo.

    position_papers.training.train("mine", "reversal", "runs/mine", seed=1)

No large library is imported before the first use of `train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from position_papers.training.single import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    """Import `train` at its first use."""
    if name == "train":
        from position_papers.training.single import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
