"""Where the checkpoints of the laboratory are."""

from __future__ import annotations

from repo_interp import shipped

DIRECTORY = shipped.DIRECTORY
ADAPTERS = shipped.DIRECTORY.with_name("adapters")
