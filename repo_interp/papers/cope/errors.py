"""Errors on flip-flop, selective copy and counting, in and out of distribution (CoPE sec. 5.1 to 5.3, tables 2 to 4): C1, C2, C3.

    error = 100 (1 - score) per cent; score: share of reads that are right (flip-flop), exact match (the others)

"Relative" of the paper is a learned vector a distance; RoPE stands for it here. Thresholds are in `cope_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from repo_interp.papers.cope import rules
from repo_interp.papers.cope.claims import C1, C2, C3, C3_CONTEXTS
from repo_interp.papers.cope.errors_figure import error_bars
from repo_interp.papers.kit.checkpoint_scores import Scored, first_of, score_table
from repo_interp.papers.kit.claims import Claim, Verdict, judged
from repo_interp.papers.kit.lead import Lead
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.score_rules import Sample, above, all_hold
from repo_interp.papers.kit.score_words import common, missing, no_verdict, noted, said
from repo_interp.tasks.counting import Counting
from repo_interp.tasks.flip_flop import FlipFlop
from repo_interp.tasks.selective_copy import SelectiveCopy
from repo_interp.training.trained import configured_task

COPE, RIVALS = "cope", ("rope", "learned")
WITHIN, SPARSE, DENSE = "in_distribution", "sparse", "dense"
LONGER, SHORTER = "longer", "shorter"
TASKS = ("flip_flop", "selective_copy", "counting")


def error_table(scored: Sequence[Scored]) -> xr.Dataset:
    """Errors [checkpoint, test_set, seed] in per cent, as `plots.cope_errors` draws them."""
    table = score_table(scored)
    said_of = {"long_name": f"error (1 - {scored[0].metric})", "units": "%"}
    return table.assign(
        score=(100 * (1 - table["score"])).assign_attrs(said_of),
        standard_error=(100 * table["standard_error"]).assign_attrs(long_name="standard error over prompts", units="%"),
    )


def flip_flop(scored: Sequence[Scored]) -> Result:
    """C1: errors of flip-flop checkpoints."""
    task = configured_task(scored[0].configuration)
    assert isinstance(task, FlipFlop)
    table = error_table(scored)
    verdicts: tuple[Verdict, ...] = ()
    if first_of(scored, COPE) is not None:
        verdicts = (_lower(C1, scored, (SPARSE,), f"error of reads on {SPARSE} test sequences, %"),)
    return Result(
        "flip_flop",
        f"Flip-flop: error of reads by test set (CoPE table 2, left). {100 * task.ignore:g} % of instructions are ignored in training, "
        f"{100 * task.sparse:g} % in sparse and {100 * task.dense:g} % in dense test sets; sequences have {task.length} tokens, in long "
        f"test sets {task.longest_test}. {_bars(scored)}",
        table,
        error_bars({"Flip-flop": table}),
        verdicts,
    )


def selective_copy(scored: Sequence[Scored]) -> Result:
    """C2: errors of selective-copy checkpoints."""
    task = configured_task(scored[0].configuration)
    assert isinstance(task, SelectiveCopy)
    table = error_table(scored)
    cope, rope = first_of(scored, COPE), first_of(scored, "rope")
    return Result(
        "selective_copy",
        f"Selective copy: share of sequences that are not copied exactly (CoPE table 2, right). {task.copied} of {task.symbols} symbols "
        f"are copied, with as many blanks as in training ({task.blanks}), half as many (dense) and twice as many (sparse). {_bars(scored)}",
        table,
        error_bars({"Selective copy": table}),
        () if cope is None else (_solved(cope, rope),),
    )


def counting(scored: Sequence[Scored]) -> Result:
    """C3: errors of counting checkpoints, by the number of variables that they were trained with."""
    task = configured_task(scored[0].configuration)
    assert isinstance(task, Counting)
    groups: dict[int, list[Scored]] = {}
    for one in scored:
        groups.setdefault(variables(one), []).append(one)
    panels = {_variables(count): error_table(groups[count]) for count in sorted(groups)}
    verdicts = []
    for count in sorted(groups):
        if first_of(groups[count], COPE) is not None:
            said_of = f"error with {_variables(count)}, %"
            verdicts.append(_lower(C3, groups[count], (WITHIN,), said_of))
            verdicts += [_lower(C3_CONTEXTS, groups[count], (name,), f"{said_of}, {name} contexts") for name in (LONGER, SHORTER)]
    return Result(
        "counting",
        f"Counting: share of sequences whose value is wrong (CoPE table 3, 4), with the weight of pass of training ({task.pass_weight:g}), "
        f"longer contexts ({task.longer_pass_weight:g}) and shorter ones ({task.shorter_pass_weight:g}). {_bars(scored)}",
        xr.concat(list(panels.values()), dim="checkpoint", join="outer", coords="minimal", compat="override").assign_coords(
            variables=("checkpoint", [count for count in sorted(groups) for _ in groups[count]])
        ),
        error_bars(panels),
        tuple(verdicts),
    )


def variables(one: Scored) -> int:
    """Variables that a counting checkpoint was trained with."""
    return int(one.configuration.task_options.get("variables", 1))


def errors_of(one: Scored, test_sets: Sequence[str]) -> Sample:
    """Errors as shares, in the form that is compared."""
    right = one.sample(test_sets)
    return Sample(1 - right.seeds, 1 - right.prompts, right.recorded, right.share)


def _lower(claim: Claim, scored: Sequence[Scored], test_sets: tuple[str, ...], measured: str) -> Verdict:
    """Whether the error of CoPE is lower than that of RoPE and of absolute positions, each that is there."""
    cope = first_of(scored, COPE)
    assert cope is not None
    rivals = {
        name: one for name in RIVALS if (one := first_of(scored, name)) is not None and set(test_sets) <= set(one.test_sets)
    }
    absent = missing([name for name in RIVALS if name not in rivals], cope.configuration.task)
    if not rivals:
        return no_verdict(claim, cope.name, absent)
    samples = {name: errors_of(one, test_sets) for name, one in {COPE: cope, **rivals}.items()}
    errors = {name: 100 * sample.mean for name, sample in samples.items()}
    shown = ", ".join(f"{name} {error:.3g} %" for name, error in errors.items())
    if not rules.apart(np.array(list(errors.values()))):
        return no_verdict(
            claim,
            cope.name,
            f"{measured}: {shown}; all at most {rules.APART:g} %, so the task is too easy here to tell them apart",
        )
    leads: dict[str, Lead] = {name: above(samples[name], samples[COPE]) for name in rivals}
    within = errors_of(cope, (WITHIN,)) if test_sets != (WITHIN,) else None
    return Verdict(
        claim,
        cope.name,
        judged(all_hold(leads.values())),
        measured,
        errors[COPE],
        **common(samples[COPE], 100),
        control=", ".join(f"{name} {errors[name]:.3g} %" for name in rivals),
        note=noted(
            [cope, *rivals.values()],
            said(leads, "below", " points", 100),
            "" if within is None else f"in distribution {100 * within.mean:.3g} %",
            absent,
        ),
    )


def _solved(cope: Scored, rope: Scored | None) -> Verdict:
    sets, outside = (WITHIN, DENSE, SPARSE), (DENSE, SPARSE)
    if rope is None:
        return no_verdict(C2, cope.name, missing(["rope"], "selective_copy"))
    errors = {
        one: np.array([100 * errors_of(scored, (name,)).mean for name in sets]) for one, scored in ((COPE, cope), ("rope", rope))
    }
    worst = errors_of(cope, (sets[int(errors[COPE].argmax())],))
    return Verdict(
        C2,
        cope.name,
        judged(rules.solved_where_other_fails(errors[COPE], errors["rope"][1:])),
        "largest error of the three test sets, %",
        100 * worst.mean,
        **common(worst, 100),
        control="rope " + ", ".join(f"{error:.3g} %" for error in errors["rope"]),
        note=noted(
            [cope, rope],
            f"in distribution, {' and '.join(outside)}: CoPE {', '.join(f'{error:.3g}' for error in errors[COPE])} %, "
            f"RoPE {', '.join(f'{error:.3g}' for error in errors['rope'])} %",
        ),
    )


def _bars(scored: Sequence[Scored]) -> str:
    """What bars are means over."""
    samples = {one.name: one.sample(one.test_sets[:1]) for one in scored}
    seeds = {name: len(sample.seeds) for name, sample in samples.items()}
    same = len(set(seeds.values())) == 1
    over = str(next(iter(seeds.values()))) if same else ", ".join(f"{name} {count}" for name, count in seeds.items())
    prompts = sorted({sample.count for sample in samples.values()})
    return (
        f"Bars: means over training seeds ({over}); dots: seeds; whiskers of a single seed: standard error over prompts; "
        f"{' to '.join(str(count) for count in dict.fromkeys((prompts[0], prompts[-1])))} prompts each."
    )


def _variables(count: int) -> str:
    return f"{count} variable" if count == 1 else f"{count} variables"
