"""Make one paper's figures in its directory: measure what is not kept yet, draw, write, and say how each model differs in scale.

Knows nothing about any paper, nor about terminals.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from repo_interp.papers.catalogue import base
from repo_interp.papers.kit import scale
from repo_interp.papers.kit.cache import Cache, sources_digest
from repo_interp.papers.kit.claims import Verdict
from repo_interp.papers.kit.durations import Duration, Durations
from repo_interp.papers.kit.figure_directory import stands, write_figures
from repo_interp.papers.kit.given import Given, file_digest
from repo_interp.run import versions


@dataclass(frozen=True)
class Making:
    """One paper, with everything that decides its figures."""

    name: str
    module: ModuleType
    given: Given
    options: Any
    command: str
    """What makes just this paper's figures again."""
    directory: Path

    @property
    def provenance(self) -> dict[str, str]:
        """All that decides the bytes."""
        digests = {f"checkpoint {name}": f"sha256 {digest}" for name, digest in self.given.digests.items()}
        files = {f"data {name}": f"sha256 {file_digest(file)}" for name, file in getattr(self.options, "data", ())}
        made_by = {"options": str(self.options), **versions(), "sources": f"sha256 {sources_digest()}"}
        return {"command": self.command, **digests, **files, **made_by}

    @property
    def stands(self) -> bool:
        """Whether just these figures are there."""
        return stands(self.directory, self.provenance)

    def before(self, durations: Durations) -> Duration | None:
        """How long it took before, on the same checkpoints with the same options."""
        return durations.get(self._what)

    def elsewhere(self, durations: Durations) -> Duration | None:
        """How long this paper took at most on other checkpoints or with other options."""
        return durations.others(f"{self.name} ")

    def seconds(self) -> float | None:
        """How long it will take at least when nothing is kept, from a timed part; None for a paper that cannot say."""
        estimate = getattr(self.module, "seconds", None)
        return None if estimate is None else estimate(self.given.paths, self.options)

    def make(self, directory: Path, progress: Callable[[str], None], durations: Durations) -> tuple[list[Verdict], list[Path]]:
        """Measure, draw, write; what is measured is kept in `directory`. Returns the verdicts and the files."""
        cache, start, finished = Cache(directory), time.monotonic(), False
        try:
            results = self.module.figures(self.given.paths, self.options, progress, cache)
            missing = self.module.unmeasured(results)
            verdicts = [*(verdict for result in results for verdict in result.verdicts), *missing]
            scales = {
                (one.claim.id, one.checkpoint): scale_beside(one.claim.id, one.checkpoint, self.given.paths) for one in verdicts
            }
            files = write_figures(self.directory, self.module.TITLE, results, missing, self.command, self.provenance, scales)
            finished = True
        finally:
            taken = time.monotonic() - start
            durations.put(self._what, Duration(max(taken, cache.seconds), finished))
        return verdicts, files

    @property
    def _what(self) -> str:
        digests = ",".join(f"{name}={digest[:12]}" for name, digest in sorted(self.given.digests.items()))
        return f"{self.name} {self.options} {digests}"


def scale_beside(claim: str, checkpoint: str, paths: Mapping[str, str]) -> str:
    """How the model or models that a verdict calls `checkpoint` differ in scale from the one that the paper's claim is about.

    `checkpoint` is one of the names, several in one text, or what several begin with ("niah" of niah/repo and niah/rope).
    """
    words = re.split(r"[\s,;]+", checkpoint)
    names = [name for name in paths if name == checkpoint]
    names = names or [name for name in paths if name in words]
    names = names or [name for name in paths if name.split("/")[0] in words]
    lines: dict[str, list[str]] = {}
    for name in names:
        lines.setdefault(scale.difference(scale.scale_of(paths[name]), scale.PAPERS[base(claim)]), []).append(name)
    if len(lines) == 1:
        return next(iter(lines))
    return " / ".join(f"{', '.join(named)}: {line}" for line, named in lines.items())
