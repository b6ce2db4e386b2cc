"""What the zoo consists of: every checkpoint that comes with the package, how it is trained, and with which seeds.

    runs/zoo/TASK/NAME             seed 0          runs/zoo/TASK/NAME/seed-N       the others
    repo_interp/zoo/TASK/NAME      seed 0, as it ships; the others in seed-N; weights of the seeds in `weights`, records of all

Schemes of one task differ in nothing but the scheme: recipes and budgets are the task's. Where the papers continue a RoPE model (NIAH,
language modelling), every scheme continues the same one, RoPE itself included. Knows nothing about how training is carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from position_papers.training.configuration import TABLES, TrainingConfiguration, replaced
from position_papers.training.recipes import recipe
from repo_interp.errors import InputError

REVERSAL_SEEDS = (0, 1, 2, 3, 4, 5, 6, 7)
RUNS = Path("runs") / "zoo"
"""Where training runs of the zoo stand, from where the command is given."""


@dataclass(frozen=True)
class Planned:
    """One checkpoint of the zoo."""

    name: str
    """TASK/NAME, where NAME begins with the scheme's."""
    scheme: str
    seeds: tuple[int, ...] = (0,)
    continue_from: str = ""
    """Another planned one, of the same seed."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the task's recipe."""
    weights: tuple[int, ...] = (0,)
    """Seeds whose weights the package ships; scores and logs of all seeds ship."""

    @property
    def task(self) -> str:
        """The task it is trained on."""
        return self.name.split("/")[0]


@dataclass(frozen=True)
class PlannedRun:
    """One training run: a planned checkpoint with one seed."""

    planned: Planned
    seed: int
    directory: Path
    configuration: TrainingConfiguration

    @property
    def shipped(self) -> Path:
        """Its directory, below the zoo's."""
        return Path(self.planned.name) if self.seed == 0 else Path(self.planned.name) / f"seed-{self.seed}"


def planned_runs(plan: Iterable[Planned], runs: Path = RUNS) -> list[PlannedRun]:
    """Every run of a plan, those that others continue first. Raises InputError for a plan that refers to nothing."""
    plan = list(plan)
    names = {planned.name for planned in plan}
    for planned in plan:
        if planned.continue_from and planned.continue_from not in names:
            raise InputError(f"{planned.name} continues {planned.continue_from}, which the plan lacks")
    ordered = sorted(plan, key=lambda planned: bool(planned.continue_from))
    return [
        PlannedRun(planned, seed, _directory(runs, planned.name, seed), _configuration(planned, seed, runs))
        for planned in ordered
        for seed in planned.seeds
    ]


def chosen(plan: Iterable[Planned], names: Iterable[str]) -> tuple[Planned, ...]:
    """The part of a plan whose names begin with one of `names` (TASK or TASK/NAME), with what it continues; all for no names.

    Raises InputError for a name that nothing begins with.
    """
    plan, wanted = tuple(plan), tuple(names)
    for name in wanted:
        if not any(_matches(planned.name, name) for planned in plan):
            tasks = ", ".join(dict.fromkeys(planned.task for planned in plan))
            raise InputError(
                f"the zoo has no {name!r}; give a task, one of {tasks}, or a TASK/NAME that `repo-interp zoo plan` lists"
            )
    matching = [planned for planned in plan if not wanted or any(_matches(planned.name, name) for name in wanted)]
    needed = {planned.continue_from for planned in matching} | {planned.name for planned in matching}
    return tuple(planned for planned in plan if planned.name in needed)


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(wanted.rstrip("/") + "/")


def _directory(runs: Path, name: str, seed: int) -> Path:
    return runs / name if seed == 0 else runs / name / f"seed-{seed}"


def _configuration(planned: Planned, seed: int, runs: Path) -> TrainingConfiguration:
    defaults = recipe(planned.task, continued=bool(planned.continue_from))
    fields = {**defaults, **planned.fields, "scheme": planned.scheme, "seed": seed}
    for table in TABLES:
        fields[table] = {**defaults.get(table, {}), **planned.fields.get(table, {})}
    if planned.continue_from:
        fields["continue_from"] = _directory(runs, planned.continue_from, seed).as_posix()
    return replaced(TrainingConfiguration(task=planned.task), fields)


def _plan() -> Iterator[Planned]:
    two, three = (0, 1), (0, 1, 2)
    # RePo ends in two kinds of models, so that three seeds say little; the weights of all ship, for what is asked over seeds.
    yield Planned("reversal/repo", "repo", REVERSAL_SEEDS, weights=REVERSAL_SEEDS)
    for scheme in ("rope", "nope"):
        yield Planned(f"reversal/{scheme}", scheme, three)

    # Half-way, so that the schemes have something to learn; the curriculum still grows when it stops.
    yield Planned("niah/pretrained", "rope", three, fields={"steps": 500, "curriculum": 1.0}, weights=())
    for scheme in ("repo", "rope", "nope", "r2n1", "n2r1"):
        yield Planned(f"niah/{scheme}", scheme, three, "niah/pretrained")
    for name, layout in (("repo_from_1", "repo@1"), ("repo_from_2", "repo@2"), ("repo_from_3", "repo@3")):
        yield Planned(f"niah/{name}", layout, three, "niah/pretrained")

    # Needles that need positions; RePo from L/3 on, as in the paper, and from other layers. Of the seeds 0 to 3, 2 is left out: after 5,000
    # steps its RoPE model went by the last word of a key still, and has nothing for a scheme to take over.
    learned = (0, 1, 3)
    yield Planned("niah_keys/pretrained", "rope", learned, weights=())
    for name, layout in (("rope", "rope"), ("nope", "nope"), ("repo", "repo@1/3")):
        yield Planned(f"niah_keys/{name}", layout, learned, "niah_keys/pretrained", weights=learned)
    for name, layout in (("repo_from_0", "repo"), ("repo_from_2", "repo@2"), ("repo_from_3", "repo@3")):
        yield Planned(f"niah_keys/{name}", layout, learned, "niah_keys/pretrained")

    for name, layout in _CONTEXTUAL:
        yield Planned(f"flip_flop/{name}", layout, three, fields=_contextual(name))
    # Twice as long, for a verdict on C1 that is blind.
    for name, layout in _CONTEXTUAL:
        longer = {"task_options": {"length": 256, "longest_test": 1024}, "batch": 16, "steps": 1600}
        seeds, weights = ((0,) if name == "repo" else three), ((0,) if name == "cope" else ())
        yield Planned(f"flip_flop/{name}_256", layout, seeds, fields={**_contextual(name), **longer}, weights=weights)
    for name, layout in _CONTEXTUAL:
        seeds = three if name in ("cope", "rope") else (0,)  # those that C2 is about
        yield Planned(f"selective_copy/{name}", layout, seeds, fields=_contextual(name), weights=())
    for suffix, variables in (("", 1), ("_3", 3), ("_5", 5)):
        several = {"task_options": {"variables": variables}} if suffix else {}
        for name, layout in _CONTEXTUAL:
            fields = {**_contextual(name), **several}
            yield Planned(
                f"counting/{name}{suffix}", layout, fields=fields, weights=(0,) if (name, variables) == ("cope", 1) else ()
            )

    # Four times as many operations, for a verdict on C3 over seeds.
    for suffix, variables in (("", 1), ("_3", 3), ("_5", 5)):
        for name, layout in _CONTEXTUAL:
            if name != "repo":
                yield _longer_counting(name, layout, suffix, variables)

    # Four sequences, four of them asked for: a place in the context is a hint; and with any number of them, a distance is. Their weights do
    # not ship any more.
    for scheme in (*_COPYING, *_ABLATIONS):
        yield Planned(f"copying/{scheme}", scheme, two, weights=())
    for scheme in (*_COPYING, *_ABLATIONS):
        yield Planned(f"copying/{scheme}_varied", scheme, fields=_VARIED, weights=())
    for scheme in _COPYING:
        # RoPE and HoPE are extended beyond the training length too, which needs weights.
        weights = three if scheme in ("rope", "hope") else (0,)
        yield Planned(f"copying/{scheme}_scattered", scheme, three, fields=_SCATTERED, weights=weights)
    for scheme in _ABLATIONS[:3]:
        yield Planned(f"copying/{scheme}_scattered", scheme, three, fields=_SCATTERED, weights=())

    yield Planned("language/rope", "rope", three, fields={"checkpoint_every": 100}, weights=three)
    # C4 compares CoPE, RoPE and learned positions, whose seeds are scored on the same windows: that takes their weights.
    for scheme in ("learned", "alibi", "kerple", "fire", "hope", "cope"):
        seeds = three if scheme in ("learned", "cope") else (0,)
        yield Planned(f"language/{scheme}", scheme, seeds, fields=_contextual(scheme), weights=seeds)
    yield Planned("language/cope_16", "cope", three, fields={"scheme_options": {"p_max": 16}}, weights=three)
    # The gates of the paper's figures, and its own rival: all gates open is relative position.
    for name, gates, seeds in (("cope_sep_keys", "separate_keys", two), ("cope_open", "open", three)):
        yield Planned(f"language/{name}", "cope", seeds, fields={"scheme_options": {"p_max": 64, "gates": gates}}, weights=seeds)
    for name, layout, weights in (("rope_continued", "rope", (0,)), ("repo", "repo@1/3", three), ("nope", "nope", ())):
        yield Planned(f"language/{name}", layout, three, "language/rope", weights=weights)
    for scheme in ("r2n1", "n2r1"):
        yield Planned(f"language/{scheme}", scheme, continue_from="language/rope", weights=())

    # A larger language model on longer windows: do learned positions take part there? Its weights, 29 MB each, are too large to ship.
    yield Planned("language/rope_512", "rope", three, fields={**_LARGER, "steps": 1000}, weights=())
    for name, layout in (("rope_continued_512", "rope"), ("repo_512", "repo@1/3"), ("nope_512", "nope")):
        yield Planned(f"language/{name}", layout, three, "language/rope_512", fields=_LARGER_CONTINUED, weights=())


_VARIED: Mapping[str, Any] = {
    "task_options": {"sequences": 6, "first_sequences": 6, "fewest": 1, "questions": 6, "separator": 1, "test_from": 2},
    "steps": 5000,
}
"""Of copying, where neither the number of sequences nor that of questions is always the same. Every distance is a multiple of 13 tokens
here, and that is what rotary models learn: of questions in 2 to 10 sequences RoPE's finds .83 to .95 of those whose answer stands four
sequences back, and none of most others."""

_SCATTERED: Mapping[str, Any] = {
    "task_options": {**_VARIED["task_options"], "first_sequences": 1, "filler": 4, "test_to": 24},
    "steps": 5000,
    "curriculum": 0.42,
    "initial_deviation": 0.113,
}
"""Of copying, where no distance is more frequent than others, and contexts grow from one sequence. Chosen by losses: RoPE's comes to its
end under it (after 3,000 steps .06; without growing contexts 3.4, with weights of deviation 0.02 2.5). 3,000 steps were too few for HoPE
(.19; of 10 sequences it finds .49), and that was seen when they became 5,000."""

_COPYING = ("rope", "alibi", "kerple", "fire", "hope")
_ABLATIONS = ("hope_ab1", "hope_ab2", "hope_ab3", "rope_high")
"""Of HoPE; the last is in no claim."""

_LARGER: Mapping[str, Any] = {
    "task_options": {"length": 512},
    "layers": 8,
    "width": 256,
    "heads": 8,
    "batch": 8,
    "learning_rate": 1e-3,
    "precision": "bfloat16",
    "score_every": 250,
}
# 0.0566 = 0.02 sqrt(2048 / 256): the paper's, at this width.
_LARGER_CONTINUED: Mapping[str, Any] = {
    "task_options": {"length": 512},
    "steps": 600,
    "batch": 8,
    "learning_rate": 5e-4,
    "scheme_deviation": 0.0566,
    "precision": "bfloat16",
    "score_every": 200,
}

# RePo with RoPE in the first layer: in all layers, flip-flop was not learned in a pilot of this budget.
_CONTEXTUAL = (("learned", "learned"), ("rope", "rope"), ("cope", "cope"), ("repo", "repo@1/3"))
"""Name and layout of the schemes that CoPE's tasks compare, and RePo."""


def _longer_counting(name: str, layout: str, suffix: str = "", variables: int = 1) -> Planned:
    """Counting with 256 operations; RePo, which the claim is not about, with one seed. Compiled, a step of CoPE's takes half the time."""
    fields = {
        **_contextual(name),
        "task_options": {"variables": variables, "operations": 256},
        "batch": 16,
        "score_every": 0,
        "score_prompts": 2000,
        **({"execution": "compiled"} if name == "cope" else {}),
    }
    seeds, weights = ((0,) if name == "repo" else (0, 1, 2)), ((0,) if (name, variables) == ("cope", 1) else ())
    return Planned(f"counting/{name}{suffix}_256", layout, seeds, fields=fields, weights=weights)


def _slower_counting(name: str, layout: str) -> Planned:
    """Counting of 3 variables where the number of operations grows slowly. Chosen by losses: at 40 operations RoPE's and CoPE's are .4 to
    .5 here, 1.0 with half the sequences per step and half the steps, and 1.4 to 1.5 with weights of deviation 0.02, where nothing was
    learned.
    """
    planned = _longer_counting(name, layout, "_3", 3)
    fields = {**planned.fields, "batch": 32, "steps": 6000, "curriculum": 0.9, "initial_deviation": 0.113}
    return replace(planned, name=f"counting/{name}_3_slow", fields=fields)


def _contextual(scheme: str) -> Mapping[str, Any]:
    return {"scheme_options": {"p_max": 64}} if scheme == "cope" else {}


PLAN: tuple[Planned, ...] = tuple(_plan())
"""Every checkpoint of the zoo."""


def _ahead() -> Iterator[Planned]:
    for name, layout in _CONTEXTUAL[:3]:
        yield _slower_counting(name, layout)
    for suffix, variables in (("", 1), ("_3", 3), ("_5", 5)):
        yield _longer_counting("repo", dict(_CONTEXTUAL)["repo"], suffix, variables)


AHEAD: tuple[Planned, ...] = tuple(_ahead())
"""Checkpoints that are planned and not trained yet, in the order of what they decide. `repo-interp zoo train NAME` trains them; with their
records in the zoo they move to `PLAN`."""
