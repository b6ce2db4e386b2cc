"""What is chosen by name - measures, experiments, views, schemes, tasks, commands - as entry points, ours and those of other packages.

    [project.entry-points."repo_interp.measures"]     name = "package.module:object"

Ours stand in `OWN` in the very form in which another package writes its own, and are found by the same code. `names` reads names alone;
`find` imports the one object that was asked for, so a package that nobody asks for costs nothing and breaks nothing. A name of ours always
means ours. Knows nothing about what the objects are.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

from repo_interp.errors import InputError
from repo_interp.installed_points import installed_points

MEASURES, EXPERIMENTS, VIEWS = "repo_interp.measures", "repo_interp.experiments", "repo_interp.plots"
SCHEMES, TASKS = "repo_interp.schemes", "repo_interp.tasks"
COMMANDS, CHECKPOINTS = "repo_interp.commands", "repo_interp.checkpoints"

OWN: Mapping[str, Mapping[str, str]] = {
    MEASURES: {
        "positions": "repo_interp.measures.positions:Positions",
        "patterns": "repo_interp.measures.patterns:Patterns",
        "attention_mass": "repo_interp.measures.attention_mass:AttentionMass",
        "attention_rows": "repo_interp.measures.attention_rows:AttentionRows",
        "predictions": "repo_interp.measures.predictions:NextTokens",
        "components": "repo_interp.measures.components:Components",
        "three_axis": "repo_interp.measures.three_axis:ThreeAxis",
        "fake_distance": "repo_interp.measures.fake_distance:FakeDistance",
        "rotation": "repo_interp.measures.rotation:Rotation",
        "maps": "repo_interp.measures.maps:Maps",
        "gates": "repo_interp.measures.gates:Gates",
        "segments": "repo_interp.measures.segments:Segments",
        "position_sources": "repo_interp.measures.position_sources:PositionSources",
    },
    EXPERIMENTS: {
        "perturbation": "repo_interp.experiments.perturbation:Perturbation",
        "extrapolation": "repo_interp.experiments.extrapolation:Extrapolation",
        "effects": "repo_interp.experiments.effects:Effects",
        "saliency": "repo_interp.experiments.saliency:Saliency",
        "atlas": "repo_interp.experiments.atlas:Atlas",
    },
    VIEWS: {
        "positions": "repo_interp.plots.views.positions:VIEW",
        "attention_rows": "repo_interp.plots.views.attention_rows:VIEW",
        "predictions": "repo_interp.plots.views.predictions:VIEW",
        "attention_mass": "repo_interp.plots.views.attention_mass:VIEW",
        "patterns": "repo_interp.plots.views.patterns:VIEW",
        "components": "repo_interp.plots.views.components:VIEW",
        "three_axis": "repo_interp.plots.views.three_axis:VIEW",
        "fake_distance": "repo_interp.plots.views.fake_distance:VIEW",
        "rotation": "repo_interp.plots.views.rotation:VIEW",
        "maps": "repo_interp.plots.views.three_axis:MAPS",
        "effects": "repo_interp.plots.views.effects:VIEW",
        "perturbation": "repo_interp.plots.views.perturbation:VIEW",
        "extrapolation": "repo_interp.plots.views.extrapolation:VIEW",
        "output_traces": "repo_interp.plots.views.extrapolation:OUTPUT_TRACES",
        "gates": "repo_interp.plots.views.gates:VIEW",
        "segments": "repo_interp.plots.views.segments:VIEW",
        "position_sources": "repo_interp.plots.views.position_sources:VIEW",
        "saliency": "repo_interp.plots.views.saliency:VIEW",
        "atlas": "repo_interp.plots.views.atlas:VIEW",
        "scores": "repo_interp.plots.views.task_scores:VIEW",
    },
    SCHEMES: {},
    TASKS: {
        "reversal": "repo_interp.tasks.reversal:SIZES",
        "niah": "repo_interp.tasks.niah_small:SIZES",
        "copying": "repo_interp.tasks.copying:SIZES",
        "random_tokens": "repo_interp.tasks.random_tokens:SIZES",
    },
    COMMANDS: {name: f"repo_interp.cli.{name}" for name in ("analyze", "inspect", "fetch", "score", "compare", "bench")},
}
"""By group, names and objects of ours; views stand in the order of the page."""


def names(group: str) -> tuple[str, ...]:
    """Every name of `group`: ours in order, then those of other packages, sorted. Imports nothing."""
    own = OWN.get(group, {})
    return (*own, *sorted({point.name for point in installed_points(group)} - set(own)))


def find(group: str, name: str) -> Any:
    """The object that is known as `name` in `group`; None where there is none.

    Raises InputError, in one line, when it cannot be imported, or when two packages give the same name.
    """
    if name in OWN.get(group, {}):
        return EntryPoint(name, OWN[group][name], group).load()
    points = [point for point in installed_points(group) if point.name == name]
    if not points:
        return None
    what = f"the {group.rpartition('.')[2].removesuffix('s')} {name!r}"
    if len(points) > 1:
        packages = " and ".join(sorted(package_of(point) for point in points))
        raise InputError(f"{what} is given by {packages}; uninstall one of them")
    try:
        return points[0].load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"{what} of the package {package_of(points[0])} ({points[0].value}) cannot be imported: {reason}; mend or uninstall it"
        ) from None


def package_of(point: EntryPoint) -> str:
    """The name of the package that gives an entry point."""
    return "unknown" if point.dist is None else point.dist.name
