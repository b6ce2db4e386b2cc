"""Entry points: measures, experiments, views, schemes, tasks, commands and readers of checkpoint files by name.

    [project.entry-points."repo_interp.measures"]     name = "package.module:object"

`OWN` lists our entry points in the same form as other packages declare theirs, and the same code
finds both. `names` reads only names; `find` imports only the requested object, so unused packages
cost nothing and break nothing. Our names take precedence. This module knows nothing about the
objects.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError, nearest, one_line, quoted
from repo_interp.installed_points import RegisteredPoint, installed_points

MEASURES, EXPERIMENTS, VIEWS = (
    "repo_interp.measures",
    "repo_interp.experiments",
    "repo_interp.plots",
)
SCHEMES, TASKS = "repo_interp.schemes", "repo_interp.tasks"
COMMANDS, CHECKPOINTS = "repo_interp.commands", "repo_interp.checkpoints"
SUGGESTIONS = "repo_interp.suggestions"
READERS, LOADERS = "repo_interp.readers", "repo_interp.loaders"
SOURCES = "repo_interp.sources"
ATTENTIONS, PLACEMENTS = "repo_interp.attentions", "repo_interp.placements"
CHECKS = "repo_interp.checks"

OWN: Mapping[str, Mapping[str, str]] = {
    MEASURES: {
        "positions": "repo_interp.measures.positions:Positions",
        "patterns": "repo_interp.measures.patterns:Patterns",
        "position_sources": "repo_interp.plugins.sources.position_sources:PositionSources",
        "gates": "repo_interp.plugins.cope.gates:Gates",
        "components": "repo_interp.measures.components:Components",
        "three_axis": "repo_interp.plugins.three_axis.three_axis:ThreeAxis",
        "fake_distance": "repo_interp.plugins.fake_distance.fake_distance:FakeDistance",
        "rotation": "repo_interp.plugins.rotation.rotation:Rotation",
        "attention_mass": "repo_interp.measures.attention_mass:AttentionMass",
        "attention_rows": "repo_interp.measures.attention_rows:AttentionRows",
        "octaves": "repo_interp.plugins.distance.octaves:Octaves",
        "predictions": "repo_interp.measures.predictions:Predictions",
        "segments": "repo_interp.plugins.segments.segments:Segments",
        "activations": "repo_interp.plugins.distance.activations:Activations",
        "stability": "repo_interp.plugins.distance.stability:Stability",
        "symbols": "repo_interp.plugins.distance.symbols:Symbols",
        "maps": "repo_interp.plugins.fake_distance.maps:Maps",
        "value_norms": "repo_interp.plugins.moved_values.value_norms:ValueNorms",
        "position_probe": "repo_interp.plugins.probe.probe_measure:PositionProbe",
    },
    EXPERIMENTS: {
        "perturbation": "repo_interp.plugins.lengths.perturbation:Perturbation",
        "extrapolation": "repo_interp.plugins.lengths.extrapolation:Extrapolation",
        "kinds": "repo_interp.plugins.kinds.kinds:Kinds",
        "effects": "repo_interp.plugins.causes.effects:Effects",
        "saliency": "repo_interp.plugins.causes.saliency:Saliency",
        "atlas": "repo_interp.plugins.heads.atlas:Atlas",
    },
    VIEWS: {
        "positions": "repo_interp.plots.views.positions:VIEW",
        "attention_rows": "repo_interp.plots.views.attention_rows:VIEW",
        "predictions": "repo_interp.plots.views.predictions:VIEW",
        "attention_mass": "repo_interp.plots.views.attention_mass:VIEW",
        "patterns": "repo_interp.plots.views.patterns:VIEW",
        "components": "repo_interp.plots.views.components:VIEW",
        "three_axis": "repo_interp.plugins.three_axis.view:VIEW",
        "fake_distance": "repo_interp.plugins.fake_distance.view:VIEW",
        "rotation": "repo_interp.plugins.rotation.view:VIEW",
        "maps": "repo_interp.plugins.three_axis.view:MAPS",
        "effects": "repo_interp.plugins.causes.effects_view:VIEW",
        "kinds": "repo_interp.plugins.kinds.view:VIEW",
        "perturbation": "repo_interp.plugins.lengths.perturbation_view:VIEW",
        "extrapolation": "repo_interp.plugins.lengths.extrapolation_view:VIEW",
        "output_traces": "repo_interp.plugins.lengths.extrapolation_view:OUTPUT_TRACES",
        "stability": "repo_interp.plugins.distance.view:STABILITY",
        "symbols": "repo_interp.plugins.distance.view:SYMBOLS",
        "octaves": "repo_interp.plugins.distance.view:OCTAVES",
        "value_norms": "repo_interp.plugins.moved_values.view:VIEW",
        "activations": "repo_interp.plugins.distance.view:ACTIVATIONS",
        "position_probe": "repo_interp.plugins.probe.view:VIEW",
        "gates": "repo_interp.plugins.cope.view:VIEW",
        "segments": "repo_interp.plugins.segments.view:VIEW",
        "position_sources": "repo_interp.plugins.sources.view:VIEW",
        "saliency": "repo_interp.plugins.causes.saliency_view:VIEW",
        "atlas": "repo_interp.plugins.heads.view:VIEW",
        "scores": "repo_interp.plots.views.task_scores:VIEW",
    },
    SCHEMES: {
        name: f"repo_interp.plugins.schemes.{module}:{name}"
        for module, schemes in {
            "rotating": "rope nope learned hope hope_ab1 hope_ab2 hope_ab3 rope_high",
            "learning": "repo repo_index repo_attention repo_convolution continuous "
            "multihead_continuous",
            "biased": "alibi kerple fire repo_alibi repo_kerple repo_fire",
            "counting": "cope cope_alibi cope_mlp cope_relative cope_rope",
        }.items()
        for name in schemes.split()
    },
    TASKS: {
        "reversal": "repo_interp.tasks.reversal:SIZES",
        "niah": "repo_interp.tasks.niah_small:SIZES",
        "copying": "repo_interp.tasks.copying:SIZES",
        "random_tokens": "repo_interp.tasks.random_tokens:SIZES",
    },
    SUGGESTIONS: {
        "effects": "repo_interp.plugins.causes.suggestions:needed",
        "kinds": "repo_interp.plugins.sources.kind_suggestions:kinds",
    },
    READERS: {"gguf": "repo_interp.plugins.gguf"},
    SOURCES: {"packages": "repo_interp.plugins.packages.fetched:SOURCE"},
    # Called with a decoder whose attention modules do not call transformers' interface
    ATTENTIONS: {"own": "repo_interp.plugins.own_attention.own_attention:use_interface"},
    # Called with the decoder of a model that was loaded
    CHECKS: {
        "parity": "repo_interp.plugins.loading_checks.parity:require_parity",
        "scaling": "repo_interp.plugins.loading_checks.idle_scaling:warn_of_idle_scaling",
    },
    # By the option of `load_model` that asks for it
    PLACEMENTS: {"device_map": "repo_interp.plugins.placement.dispatch"},
    # By the field of a `Checkpoint` that such checkpoints have
    LOADERS: {
        "base": "repo_interp.plugins.adapters.adapters:LOADER",
        "larger": "repo_interp.plugins.text_parts.text_part:LOADER",
    },
    COMMANDS: {
        **{
            name: f"repo_interp.cli.{name}_command"
            for name in ("analyze", "explore", "inspect", "verify", "fetch", "score", "compare")
        },
        "verify": "repo_interp.plugins.verify.command",
        "fetch": "repo_interp.plugins.packages.fetch_command",
    },
}
"""Our names and objects by group; views are in the order of the page."""
_STATED = r'^    {}: ClassVar\[str\] = (".*"|\((?:\n        ".*")+\n    \))$'


def names(group: str) -> tuple[str, ...]:
    """List the names of a group; imports nothing.

    Args:
        group: Group of entry points, such as `MEASURES`.

    Returns:
        Our names in order, then sorted names from other packages.
    """
    ours = OWN.get(group, {})
    # Ours first, in the order of the page; names of other packages cannot replace ours.
    return (*ours, *sorted({point.name for point in installed_points(group)} - set(ours)))


@cache
def attribute_texts(group: str, word: str) -> Mapping[str, str]:
    """Read the texts that our objects in a group assign to an attribute; imports nothing.

    Args:
        group: Group of entry points.
        word: Name of the attribute, such as "describes".

    Returns:
        Texts by name, for objects with one.
    """
    found, pattern = {}, re.compile(_STATED.format(word), re.MULTILINE)
    for name, place in OWN[group].items():
        # From the source, since importing a measure imports torch, too slow for `--help`
        module = Path(__file__).parents[1].joinpath(*place.partition(":")[0].split("."))
        text = module.with_suffix(".py").read_text(encoding="utf-8")
        if (said := pattern.search(text)) is not None:
            found[name] = literal_eval(said[1])
    return found


def find(group: str, name: str) -> Any:
    """Import the object of a name.

    Args:
        group: Group of entry points.
        name: Name in the group.

    Returns:
        The object; None if there is none.

    Raises:
        InputError: It cannot be imported, or two packages give the name.
    """
    if name in OWN.get(group, {}):
        # Through the same class as others, so that both are loaded in one way
        return EntryPoint(name, OWN[group][name], group).load()
    points = [point for point in installed_points(group) if point.name == name]
    if not points:
        return None
    if len(points) > 1:
        packages = " and ".join(sorted(package_of(point) for point in points))
        raise InputError(
            f"the {kind_of(group)} {name!r} is given by {packages}; uninstall one of them"
        )
    try:
        return points[0].load()
    # sys.exit at the import of another package must not end the command.
    except (Exception, SystemExit) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise InputError(
            f"{called(group, name)} ({points[0].value}) cannot be imported: {reason}; fix "
            "or uninstall it"
        ) from None


def require_names(group: str, given: Iterable[str], *more: str) -> None:
    """Refuse unknown names; imports nothing.

    Args:
        group: Group of entry points.
        given: Names that a user gave.
        *more: Further known names.

    Raises:
        InputError: A name is unknown.
    """
    ours = (*more, *OWN.get(group, {}))
    for name in given:
        # Declarations of other packages are read last: that takes as long as a short prompt's pass.
        if isinstance(name, str) and name in ours:
            continue
        known = (*more, *names(group))
        if not isinstance(name, str) or name not in known:
            raise InputError(
                f"there is no {kind_of(group)} {quoted(name)}; "
                f"{nearest(str(name), known)}there are "
                f"{', '.join(known)}"
            )


def require_once(group: str, given: Sequence[str]) -> None:
    """Refuse a name that comes twice.

    Args:
        group: Group of entry points.
        given: Names that a user gave.

    Raises:
        InputError: A name comes twice.
    """
    twice = [name for place, name in enumerate(given) if name in given[:place]]
    if twice:
        raise InputError(f"the {kind_of(group)} {twice[0]!r} was asked for twice; name it once")


def named(group: str, name: str, is_one: Callable[[Any], bool], wanted: str) -> Any:
    """Make the object of a name by calling its entry point.

    Args:
        group: Group of entry points.
        name: Name in the group, which the object must have as `name`.
        is_one: Whether an object is of the wanted kind.
        wanted: The wanted kind in words.

    Returns:
        The object.

    Raises:
        InputError: There is none, it cannot be imported, or it is of another kind.
    """
    require_names(group, [name])
    factory = find(group, name)
    # Checked before the call: an object instead of a factory is the usual mistake.
    if not callable(factory):
        raise InputError(
            f"{called(group, name)} is of type {type(factory).__name__}; wanted a callable without "
            "arguments that gives it"
        )
    made = factory()
    declared = getattr(made, "name", None)
    if isinstance(declared, str) and declared != name:
        raise InputError(
            f"{called(group, name)} gives an object with the name {declared!r}; the entry point and "
            "the field name must be equal"
        )
    # A class, or a factory of something else
    if declared != name or not is_one(made):
        raise InputError(f"{called(group, name)} is of type {type(made).__name__}; wanted {wanted}")
    return made


def called(group: str, name: str) -> str:
    """Describe an entry point for messages.

    Args:
        group: Group of entry points.
        name: Name in the group.

    Returns:
        Kind, name, and the package if it is another one.
    """
    return f"the {kind_of(group)} {name!r}{given_by(group, name)}"


def given_by(group: str, name: str) -> str:
    """Describe the package of a name for messages.

    Args:
        group: Group of entry points.
        name: Name in the group.

    Returns:
        " of the package P" where another package gives it, else nothing.
    """
    if name in OWN.get(group, {}):
        return ""
    others = [point for point in installed_points(group) if point.name == name]
    if not others or isinstance(others[0], RegisteredPoint):
        return ""
    return f" of the package {package_of(others[0])}"


def kind_of(group: str) -> str:
    """Return the kind of the objects in a group, for messages.

    Args:
        group: Group of entry points, such as "repo_interp.measures".

    Returns:
        The kind in words, such as "measure".
    """
    return group.rpartition(".")[2].removesuffix("s")


def package_of(point: EntryPoint | RegisteredPoint) -> str:
    """Return the package of an entry point.

    Args:
        point: An entry point.

    Returns:
        Name of the distribution; the module for a registered object, or if no package is known.
    """
    return point.module if point.dist is None else point.dist.name
