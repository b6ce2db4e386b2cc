"""RePo (Li et al. 2026): figures 1 to 8 and tables 1, 4 and 6, made again on any checkpoints: claims R1 to R9.

    text reversal          R1 by length, R2 and R3 from positions             repo_reversal, repo_mirror
    needle in a haystack   R4 attention mass, R5 ranges, R6 chunks, R9 scores  repo_attention, repo_ranges, repo_haystack
    language               R5, R6, and R8 segments                             repo_ranges, repo_segments
    fresh models           R7 cost                                             repo_efficiency

A checkpoint is asked what its task has an answer to; one of no task of ours, such as the authors', is given RULER's needle in a haystack
and few-shot prompts. Checkpoints are compared within a task and training length. The rules stand in `repo_rules`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import UNMEASURED, Verdict
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.subjects import Options, Subject, subjects
from repo_interp.papers.repo.attention import attention_table
from repo_interp.papers.repo.claims import CLAIMS, R1, R1_TRAINED, R2, R3, R7, R7_TIME, R8, R8_CODE, R9_START
from repo_interp.papers.repo.efficiency import efficiency
from repo_interp.papers.repo.haystack import haystack
from repo_interp.papers.repo.mirror import mirror_effect
from repo_interp.papers.repo.ranges import chunks, ranges
from repo_interp.papers.repo.reversal import by_length
from repo_interp.papers.repo.segments import segments

__all__ = ["CLAIMS", "FAST", "TITLE", "ZOO", "Options", "figures", "unmeasured"]

TITLE = "RePo's experiments and analyses, made again"
FAST: Mapping[str, Any] = MappingProxyType(
    {"prompts": 16, "score_prompts": 24, "controls": 1, "efficiency_layers": 4, "efficiency_width": 256, "efficiency_rounds": 7}
)
ZOO = (
    "reversal/repo",
    "reversal/rope",
    "reversal/nope",
    "niah/repo",
    "niah/rope",
    "niah/nope",
    "niah/r2n1",
    "niah/n2r1",
    "niah/repo_from_1",
    "niah/repo_from_2",
    "niah/repo_from_3",
    "language/repo",
    "language/rope",
)
_WITHOUT = {
    **{claim.id: "no checkpoint trained on text reversal was given" for claim in (R1_TRAINED,)},
    R1.id: "checkpoints of text reversal with RePo, RoPE and NoPE were not given",
    **{claim.id: "no checkpoint with learned positions trained on text reversal was given" for claim in (R2, R3)},
    **{claim.id: "needs no checkpoint; was not measured" for claim in (R7, R7_TIME)},
    R8.id: "no checkpoint with learned positions that knows text was given, or its training length is too short for five examples",
    R8_CODE.id: "no language model with learned positions and a corpus was given",
    R9_START.id: "checkpoints with RePo from several layers on were not given",
}
_HAYSTACK = "no checkpoints of one needle in a haystack with learned positions, RoPE and NoPE were given"


def figures(
    checkpoints: Mapping[str, str | os.PathLike[str]],
    options: Options,
    progress: Callable[[str], None],
    cache: Cache,
) -> list[Result]:
    """Every figure that the checkpoints (name -> path) allow. `progress` is told what is being done.

    Raises InputError for a checkpoint that cannot be read.
    """
    found = subjects(checkpoints)
    progress("text reversal by length")
    results = by_length(checkpoints, options, cache)
    for one in found:
        if one.learned and one.kind == "reversal":
            progress(f"mirror effect in {one.name}")
            results.append(mirror_effect(one, options, cache))
    for group in haystacks(found):
        progress(f"attention in {', '.join(one.name for one in group)}")
        results.append(attention_table(group, options, cache))
        progress(f"needles found by {', '.join(one.name for one in group)}")
        results += haystack(group, options, cache)
    for one in found:
        if one.learned and one.kind in ("niah", "language", "text"):
            progress(f"positions in {one.name}")
            spread = ranges(one, options, cache)
            results += [] if spread is None else [spread]
            results += chunks(one, options, cache)
            results += segments(one, options, cache)
    progress("cost of RoPE and RePo")
    return [*results, efficiency(options, cache)]


def haystacks(found: Sequence[Subject]) -> list[list[Subject]]:
    """Checkpoints that can be asked the same prompts of a needle in a haystack: one list a task, tokenizer and training length."""
    groups: dict[Any, list[Subject]] = {}
    for one in found:
        if one.kind in ("niah", "text"):
            key = one.task if one.task is not None else one.tokenizer_digest
            groups.setdefault((key, one.training_length), []).append(one)
    return list(groups.values())


def unmeasured(results: Sequence[Result]) -> list[Verdict]:
    """A verdict "not measurable here" for each claim that nothing was found about."""
    known = {verdict.claim.id for result in results for verdict in result.verdicts}
    return [
        Verdict(claim, "none", UNMEASURED, "", note=_WITHOUT.get(claim.id, _HAYSTACK))
        for claim in CLAIMS
        if claim.id not in known
    ]
