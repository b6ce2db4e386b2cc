"""Contextual Position Encoding (Golovneva et al. 2024), its experiments made again on trained checkpoints: claims C1 to C6.

    cope_errors     flip-flop, selective copy, counting (C1 to C3)       cope_language   perplexity by length (C4, C5)
    cope_gates      gates, and attention from position alone (C6)        cope_rules      when a claim holds

Which figures a checkpoint is in, the task says that its training.toml names; others are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.papers.cope.claims import C1, C2, C3, C3_CONTEXTS, C4, C4_POSITIONS, C5, C6, C6_ATTENTION, CLAIMS
from repo_interp.papers.cope.errors import counting, flip_flop, selective_copy
from repo_interp.papers.cope.gates import GatedTexts, gates, measure_gates
from repo_interp.papers.cope.language import perplexity
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.checkpoint_scores import Scored, ScoreOptions, of_tasks, score_checkpoint, task_digest
from repo_interp.papers.kit.claims import UNMEASURED, Claim, Verdict
from repo_interp.papers.kit.result import Result
from repo_interp.training.trained import trained_task

__all__ = ["CLAIMS", "FAST", "TITLE", "ZOO", "Options", "figures", "unmeasured"]

TITLE = "Contextual Position Encoding (CoPE), made again"
_SCHEMES = ("cope", "rope", "learned")
ZOO = (
    *(f"flip_flop/{scheme}" for scheme in (*_SCHEMES, "repo")),
    *(f"selective_copy/{scheme}" for scheme in (*_SCHEMES, "repo")),
    *(f"counting/{scheme}{variables}" for variables in ("", "_3", "_5") for scheme in (*_SCHEMES, "repo")),
    *(f"language/{scheme}" for scheme in (*_SCHEMES, "cope_16", "alibi", "kerple", "fire", "hope")),
)
FAST: Mapping[str, Any] = {"count": 50, "language_count": 12, "gate_texts": 8, "draws": 20}


@dataclass(frozen=True)
class Options(ScoreOptions):
    """How much is measured."""

    gate_texts: int = 32
    """Texts whose gates are measured."""
    draws: int = 40
    """Random choices of separators, and shuffled segments, of each text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_texts < 4:
            raise InputError(f"gate_texts is {self.gate_texts}; wanted at least 4, two to choose a head on and two to judge it")


def figures(
    checkpoints: Mapping[str, str | os.PathLike[str]], options: Options, progress: Callable[[str], None], cache: Cache
) -> list[Result]:
    """Every figure that the checkpoints (name -> path) allow. `progress` is told what is being done.

    Raises InputError for a checkpoint that cannot be read.
    """
    drawers: dict[str, Callable[[Sequence[Scored]], Result]] = {
        "flip_flop": flip_flop,
        "selective_copy": selective_copy,
        "counting": counting,
        "language": perplexity,
    }
    results = []
    for task, draw in drawers.items():
        scored = []
        for name, path in of_tasks(checkpoints, [task]).items():
            progress(f"scoring {name}")
            scored.append(score_checkpoint(name, path, options, cache))
        if scored:
            results.append(draw(scored))
        for one in scored if task == "language" else ():
            if one.live is not None and "cope" in one.layout:
                progress(f"gates of {one.name}")
                results += gates(one.name, _gates(one, Path(checkpoints[one.name]), options, cache))
    return results


def unmeasured(results: Sequence[Result]) -> list[Verdict]:
    """A verdict "not measurable here" for each claim that nothing was found about."""
    found = {verdict.claim.id for result in results for verdict in result.verdicts}
    return [Verdict(claim, task, UNMEASURED, "", note=why) for claim, (task, why) in _NEEDED.items() if claim.id not in found]


def _gates(one: Scored, path: Path, options: Options, cache: Cache) -> xr.Dataset:
    task = trained_task(path)
    assert task is not None and one.digest is not None, path
    texts = GatedTexts(options.gate_texts, options.draws, options.batch_size, options.seed, options.device)
    depends = {"checkpoint": one.digest, "task": task_digest(path, one.configuration, task), **asdict(texts)}
    return cache.dataset("gates", depends, lambda: measure_gates(path, task, texts))


def _without_cope(task: str) -> tuple[str, str]:
    return task, f"no checkpoint with CoPE in every layer, trained on {task}, was given"


_NEEDED: Mapping[Claim, tuple[str, str]] = {
    C1: _without_cope("flip_flop"),
    C2: _without_cope("selective_copy"),
    C3: _without_cope("counting"),
    C3_CONTEXTS: _without_cope("counting"),
    C4: _without_cope("language"),
    C4_POSITIONS: ("language", "no two CoPE checkpoints trained on language, one with p_max = 16 and one with more, were given"),
    C5: _without_cope("language"),
    C6: ("language", "no checkpoint with CoPE and its weights, trained on language, was given"),
    C6_ATTENTION: ("language", "no checkpoint with CoPE and its weights, trained on language, was given"),
}
