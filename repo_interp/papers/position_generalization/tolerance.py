"""P6 of Position Generalization, fig. 5, table 1: how little disturbed order and positions matter, and to whom less.

The rules stand in `position_rules`; what is measured in `position_measurements`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repo_interp.papers.kit.claims import UNMEASURED, Claim, Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.position_generalization import rules
from repo_interp.papers.position_generalization.measurements import Measured
from repo_interp.plots.views.perturbation import perturbation_grid
from repo_interp.positions.layouts import LEARNED

_TEXT = {"text_order": rules.P6_TEXT, "feature_order": rules.P6_FEATURE, "position_offset": rules.P6_OFFSET}
_TASK = {"text_order": rules.P6_TASK, "feature_order": rules.P6_TASK_FEATURE, "position_offset": rules.P6_TASK_OFFSET}
_LEARNS = (*LEARNED, "learned")
_ROUNDING = 1e-6
"""Per cent, and nats: below it nothing changed."""


def tolerance(one: Measured, all_measured: Sequence[Measured]) -> Result:
    """P6, fig. 5; against a RoPE twin of the same task where positions are learned and one was given."""
    grid = one.run["perturbation"].to_dataset()
    by_text = one.judged.attrs["metric"] == "log perplexity"
    moves = [kind for kind in _TEXT if kind != "position_offset" or _has_distances(one)]
    verdicts = [_marginal(one, _TEXT[kind], kind) if by_text else _score(one, _TASK[kind], kind) for kind in moves]
    twin = rope_twin(one, all_measured)
    if set(one.layout) & set(_LEARNS) and twin is not None:
        verdicts.append(_more_tolerant(one, twin))
    what = "log perplexity" if by_text else str(one.judged.attrs["metric"])
    drawn = f"{grid.attrs['prompts']} sequences of held-out text" if by_text else f"{grid.attrs['prompts']} prompts of {one.task}"
    return Result(
        f"perturbation_{one.name}",
        f"{one.name}: {what} with a share of tokens, keys or positions moved by up to l_max (fig. 5), on {drawn}. "
        "Text is judged as it then stands.",
        grid,
        perturbation_grid(one.run, "log_perplexity" if by_text else "task_score"),
        tuple(verdicts),
    )


def rope_twin(one: Measured, all_measured: Sequence[Measured]) -> Measured | None:
    """The RoPE model of the same task to compare with: of equal budget where there is one, so what was continued is set against what was
    continued; None where no RoPE model was measured.
    """
    twins = [other for other in all_measured if set(other.layout) == {"rope"} and other.task == one.task]
    return min(twins, key=lambda twin: twin.continued is not one.continued, default=None)


def _marginal(one: Measured, claim: Claim, kind: str) -> Verdict:
    plain = float(one.judged["plain"])
    values = 100 * (one.judged["log_perplexity"].sel(kind=kind).values - plain) / plain
    untouched = float(one.judged["log_perplexity_rise"].sel(kind=kind).mean())
    return Verdict(
        claim,
        one.name,
        judged(values.mean() <= 100 * rules.MARGINAL + _ROUNDING),
        "rise of log perplexity, per cent",
        float(values.mean()),
        float(values.std(ddof=1)),
        "draws",
        int(one.judged.attrs["prompts"]),
        _strongest(one, kind, "log_perplexity", -1.0),
        note=f"log perplexity {plain:.3f}; targets that no move touched rise by {100 * untouched / plain:.2g} %",
    )


def _score(one: Measured, claim: Claim, kind: str) -> Verdict:
    plain, better = float(one.judged["plain_score"]), _better(one)
    scores = one.judged["task_score"].sel(kind=kind).values
    falls = 100 * better * (plain - scores) / abs(plain) if plain else np.zeros_like(scores)
    metric, count = str(one.judged.attrs["metric"]), int(one.judged.attrs["prompts"])
    return Verdict(
        claim,
        one.name,
        judged(bool(plain) and falls.mean() <= 100 * rules.MARGINAL + _ROUNDING),
        f"fall of {metric}, per cent of itself",
        float(falls.mean()),
        float(falls.std(ddof=1)),
        "draws",
        count,
        _strongest(one, kind, "task_score", better),
        note=f"{metric} {plain:.3f}, then {scores.mean():.3f}; one of {count} prompts is {100 / count:.2g} %",
    )


def _strongest(one: Measured, kind: str, name: str, better: float) -> str:
    """The same at the strongest disturbance of the grid: that the measurement can find an effect at all."""
    grid = one.run["perturbation"].to_dataset()
    gamma, l_max = float(grid["gamma"].max()), int(grid["l_max"].max())
    cells = grid[name].sel(kind=kind, l_max=l_max)
    plain = float(cells.sel(gamma=0.0))
    worse = better * (plain - float(cells.sel(gamma=gamma)))
    return f"{100 * gamma:g} % within {l_max}: {100 * worse / abs(plain):.3g} %" if plain else ""


def _more_tolerant(one: Measured, twin: Measured) -> Verdict:
    rises = [other.judged["log_perplexity_rise"].sel(kind="text_order").values for other in (one, twin)]
    if max(np.abs(rise).max() for rise in rises) < _ROUNDING:
        note = f"nothing to compare: where no move touched them, neither its predictions nor those of {twin.name} change"
        return Verdict(rules.P6_LEARNED, one.name, UNMEASURED, "", note=note)
    # The same tokens move in both, draw by draw.
    less = rises[1] - rises[0]
    error = float(less.std(ddof=1) / np.sqrt(len(less)))
    plain = [float(other.judged["plain"]) for other in (one, twin)]
    return Verdict(
        rules.P6_LEARNED,
        one.name,
        judged(less.mean() > rules.SIGNIFICANT * error),
        "rise of untouched targets' log perplexity, nats",
        float(rises[0].mean()),
        error,
        "draws (standard error of the difference)",
        int(one.judged.attrs["prompts"]),
        f"{twin.name} {rises[1].mean():.3g}",
        f"log perplexity undisturbed {plain[0]:.3f} against {plain[1]:.3f}",
    )


def _better(one: Measured) -> float:
    return 1.0 if one.run["perturbation"].attrs["higher_is_better"] == "True" else -1.0


def _has_distances(one: Measured) -> bool:
    """Whether some layer's attention depends on positions that can be moved."""
    return any(scheme not in ("nope", "cope", "cope_alibi", "cope_mlp") for scheme in one.layout)
