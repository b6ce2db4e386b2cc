"""Where things are in the checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "repo_interp"
DOCS = ROOT / "docs"
SUPPORT = Path(__file__).parent
OFFICIAL = ROOT / "tests" / "official"
"""Checkpoints in the released format, with outputs of the original code (see official/README.md for
how they were made).
"""


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, by its path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
