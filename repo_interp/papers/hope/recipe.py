"""HoPE's analysis of RoPE (Chen et al. 2025, sec. 3, fig. 2, 3, 6, 7, 8), made again on any checkpoints: claims H1 to H5; and H6, H7.

The recipe takes measured checkpoints and returns figures with data and verdicts: `hope_measurements` says what is measured, `hope_figures`
draws H1 to H5, `hope_rules` judges them, `hope_scores` has scores and ablations (H6, H7). Schemes that a claim is about and that no
checkpoint has are "not measurable here".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repo_interp.papers.hope.claims import H1, H2, H3, H4, H4_UPPER, H5, U_SHAPED
from repo_interp.papers.hope.figures import beyond, components, logits_by_distance, over_training, vaf
from repo_interp.papers.hope.lots import Sampling, bands
from repo_interp.papers.hope.measurements import measure_checkpoint
from repo_interp.papers.hope.measurements import seconds as timed_seconds
from repo_interp.papers.hope.more import norms, pair, turns
from repo_interp.papers.hope.score_claims import CLAIMS as SCORE_CLAIMS
from repo_interp.papers.hope.scores import SCORE_ZOO, ScoreOptions, score_figures, unmeasured_scores
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import UNMEASURED, Verdict
from repo_interp.papers.kit.result import Result
from repo_interp.positions.layouts import LEARNED
from repo_interp.training.trained import trained_configuration

TITLE = "HoPE: which parts of RoPE matter, made again"


@dataclass(frozen=True)
class Options(Sampling, ScoreOptions):
    """What a caller may choose."""

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        ScoreOptions.__post_init__(self)


FAST: Mapping[str, Any] = {
    "sequences": 16,
    "controls": 1,
    "step_sequences": 8,
    "count": 50,
    "language_count": 12,
}
ZOO = tuple(dict.fromkeys((*(f"language/{scheme}" for scheme in ("rope", *U_SHAPED, "hope", "repo")), *SCORE_ZOO)))
CLAIMS = (H1, H2, H3, H4, H4_UPPER, H5, *SCORE_CLAIMS)
_NEEDS = {"H3": "no steps of training were kept; train with --checkpoint-every, then repo-interp steps RUN"}


def figures(
    checkpoints: Mapping[str, str | os.PathLike[str]], options: Options, progress: Callable[[str], None], cache: Cache
) -> list[Result]:
    """Every figure that the checkpoints (name -> path) allow. `progress` is told what is being done.

    Raises InputError for a checkpoint that cannot be read.
    """
    measured = [measure_checkpoint(name, path, options, progress, cache) for name, path in analysed(checkpoints).items()]
    progress("drawing")
    results = [logits_by_distance(measured)] if measured else []
    for one in measured:
        if set(one.layout) == {"rope"}:
            results.append(components(one))
            if bands(one.within)["activated"].any():
                results += [found for found in (vaf(one), over_training(one), beyond(one)) if found is not None]
            results += [norms(one, cache), pair(one, cache)]
    results += [turns(one) for one in measured if set(one.layout) & set(LEARNED)]
    return results + score_figures(checkpoints, options, progress, cache)


def seconds(checkpoints: Mapping[str, str | os.PathLike[str]], options: Options) -> float | None:
    """How long the analysis will take, from a timed part of it; scores come to that. None where nothing is analysed."""
    paths = analysed(checkpoints)
    return timed_seconds(next(iter(paths.values())), options, len(paths)) if paths else None


def analysed(checkpoints: Mapping[str, str | os.PathLike[str]]) -> dict[str, str | os.PathLike[str]]:
    """Those whose attention is looked at: all with weights but those trained to copy, which are there for their scores."""

    def is_analysed(path: str | os.PathLike[str]) -> bool:
        trained = trained_configuration(path)
        has_weights = not Path(path).is_dir() or (Path(path) / "config.json").is_file()
        return has_weights and (trained is None or trained.task != "copying")

    return {name: path for name, path in checkpoints.items() if is_analysed(path)}


def unmeasured(results: Sequence[Result]) -> list[Verdict]:
    """A verdict "not measurable here" for each claim, and scheme of H1, that nothing was found about."""
    found = {(verdict.claim.id, verdict.checkpoint) for result in results for verdict in result.verdicts}
    known = {claim for claim, _ in found}
    missing = [
        Verdict(claim, "rope", UNMEASURED, "", note=_NEEDS.get(claim.id, "no checkpoint with RoPE in every layer was given"))
        for claim in (H2, H3, H4, H4_UPPER, H5)
        if claim.id not in known
    ]
    present = {str(scheme) for result in results if result.name == "logit_by_distance" for scheme in result.data["scheme"].values}
    absent = [scheme for scheme in U_SHAPED if scheme not in present]
    without = [Verdict(H1, scheme, UNMEASURED, "", note=f"no checkpoint of scheme {scheme} was given") for scheme in absent]
    return [*without, *missing, *unmeasured_scores(results)]
