"""The house stands: arrows point down only, nothing below the commands prints, importing is light,
help is there without torch.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from places import OFFICIAL, PACKAGE
from places import ROOT as repository

from repo_interp.entry_points import EXPERIMENTS, MEASURES, OWN, READERS, VIEWS
from repo_interp.moved_modules import MOVED

ROOT = PACKAGE
LABORATORY = repository / "papers" / "position_papers"
NEIGHBOURS = ("measures", "tasks", "plots", "models")
ABOVE = ("cli", "explorer", "comparison", "analysis", "experiments", "interventions")
"""From the top down: a floor may load those after it, and none before it.

The neighbours stand below them all, side by side.
"""
PAPERS = tuple(path.parent.name for path in sorted(LABORATORY.glob("*/paper.py")))
FORBIDDEN = {
    "positions": (
        *NEIGHBOURS,
        *ABOVE,
        "checkpoint_files",
        "storage",
        "run",
        "inputs",
        "errors",
    ),
    "runtime": (*NEIGHBOURS, *ABOVE, "checkpoint_files", "storage", "inputs", "run"),
    "storage": (*NEIGHBOURS, *ABOVE, "checkpoint_files", "inputs", "run"),
    "checkpoint_files": (*NEIGHBOURS, *ABOVE, "inputs", "run"),
    **{
        floor: tuple(other for other in NEIGHBOURS if other != floor) + ABOVE
        for floor in NEIGHBOURS
    },
    **{floor: ABOVE[:place] for place, floor in enumerate(ABOVE)},
    "gguf": (*NEIGHBOURS, *ABOVE, "inputs", "run"),
    "interventions": (*ABOVE[:-1], *(floor for floor in NEIGHBOURS if floor != "models")),
    "comparison": tuple({*ABOVE, *NEIGHBOURS} - {"comparison", "plots"}),
}
ROOMS = {
    "measures.kernels": ("measures",),
    "plots.marks": ("plots.views", "plots.pages"),
    "plots.views": ("plots.pages",),
}
"""By room of a floor, what its own floor has that it must not import; "measures": the measures
themselves, not their kernels.
"""
LIBRARIES = {
    "plots": ("torch", "transformers", "transformer_lens", "matplotlib.pyplot"),
    "positions": ("transformers", "transformer_lens"),
    "measures": ("transformers", "transformer_lens", "matplotlib", "plotly"),
    "tasks": ("torch", "transformer_lens", "matplotlib", "plotly"),
}


OF_PROTOCOLS = {"observe", "conclude", "forward", "statistics", "plan", "of_prompts", "of_next"}
"""Methods that their protocol documents."""
NEEDS_NO_SECTIONS = {"property", "cached_property", "override", "overload"}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file; the first is the module."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports() -> dict[str, set[str]]:
    """Every module of ours with the modules of ours that it imports, wherever in the file; the
    facades that load lazily are left out.
    """
    paths = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts): path
        for root in (ROOT, LABORATORY)
        for path in root.rglob("*.py")
    }
    known = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        if name in ("repo_interp", "repo_interp.plots"):
            continue
        found: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
            elif isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
        graph[name] = (found & set(known)) - {name}
    return graph


def within(name: str, room: str) -> bool:
    """Whether a module stands in a room; the room "measures" of the measures themselves is without
    its kernels.
    """
    inside = name == f"repo_interp.{room}" or name.startswith(f"repo_interp.{room}.")
    return inside and not (
        room == "measures"
        and (within(name, "measures.kernels") or name.endswith((".measures", ".labels")))
    )


def test_the_instrument_never_imports_the_laboratory():
    wrong = {
        name
        for name, others in imports().items()
        if name.startswith("repo_interp") and any("position_papers" in other for other in others)
    }
    assert not wrong


@pytest.mark.parametrize("paper", PAPERS)
def test_the_kit_knows_no_paper_and_papers_do_not_know_each_other(paper):
    others = [f"position_papers.{other}" for other in ("kit", *PAPERS) if other != paper]
    wrong = {
        name
        for name, needs in imports().items()
        if name.startswith(tuple(others))
        and any(f"position_papers.{paper}." in need for need in needs)
    }
    assert not wrong


@pytest.mark.parametrize("room", [*FORBIDDEN, *ROOMS])
def test_arrows_point_down(room):
    wrong = {
        f"{name} imports {other}"
        for name, others in imports().items()
        if within(name, room)
        for other in others
        for bad in FORBIDDEN.get(room, ROOMS.get(room, ()))
        if within(other, bad)
    }
    assert not wrong


def test_a_reader_of_checkpoint_files_is_found_by_its_ending():
    assert OWN[READERS] == {"gguf": "repo_interp.plugins.gguf"}


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Functions of a module and methods of its classes; those of subclasses are documented by the
    base.
    """
    for node in body:
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(mark).split("(")[0].split(".")[-1] for mark in node.decorator_list}
            if not (
                node.name.startswith("_") or node.name in OF_PROTOCOLS or marks & NEEDS_NO_SECTIONS
            ):
                yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = {ast.unparse(base).split("[")[0] for base in node.bases}
            if bases <= {"Protocol", "NamedTuple", "ABC", "Generic"}:
                yield from public_functions(node.body)
        elif isinstance(node, ast.If | ast.With):
            yield from public_functions(node.body)


def raises(node: ast.AST) -> bool:
    """Whether a node raises an error that no handler of its own takes."""
    if isinstance(node, ast.Try) and node.handlers:
        parts: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
    else:
        parts = list(ast.iter_child_nodes(node))
    return (isinstance(node, ast.Raise) and node.exc is not None) or any(map(raises, parts))


def lacking_sections(node: ast.FunctionDef) -> list[str]:
    """The sections of a Google docstring that a function lacks."""
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    returns = ast.unparse(node.returns) if node.returns else "None"
    wanted = {
        "Args:": any(one.arg not in ("self", "cls") for one in given),
        "Returns:|Yields:": returns not in ("None", "NoReturn", "Never"),
        "Raises:": raises(node),
    }
    text = ast.get_docstring(node) or ""
    return [name for name, needed in wanted.items() if needed and not re.search(name, text)]


def test_public_functions_name_their_arguments_results_and_errors():
    paths = list(ROOT.rglob("*.py"))
    lacks = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lacking
        for path in paths
        for node in public_functions(ast.parse(path.read_text()).body)
        if (lacking := lacking_sections(node))
    }
    assert paths and not lacks


def test_a_function_without_sections_lacks_them():
    code = """
def f(a) -> int:
    'Add.'
    try:
        raise ValueError
    except ValueError:
        raise InputError from None
"""
    (function,) = public_functions(ast.parse(code).body)
    assert lacking_sections(function) == ["Args:", "Returns:|Yields:", "Raises:"]
    function.body[1].handlers[0].body = [ast.Pass()]
    assert lacking_sections(function) == ["Args:", "Returns:|Yields:"]


def test_imports_make_no_circle():
    assert tuple(TopologicalSorter(imports()).static_order())


FLOORS = """
import json, sys
from importlib import import_module
for floor, modules, bad in json.loads(sys.argv[1]):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("repo_interp", *bad)]:
        del sys.modules[name]
    for name in modules:
        import_module(name)
    wrong = sorted(name for name in sys.modules for one in bad if name == one or name.startswith(f"{one}."))
    assert not wrong, f"{floor} loads {wrong}"
"""


def test_a_floor_loads_nothing_above_or_beside_it():
    """One interpreter forgets what must not be loaded before each floor; torch, which is loaded
    once, only after those that must not.
    """
    floors = []
    for floor, libraries in sorted(LIBRARIES.items(), key=lambda item: "torch" not in item[1]):
        files = [path for path in ROOT.joinpath(floor).rglob("*.py") if path.name != "__init__.py"]
        modules = sorted(
            ".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in files
        )
        assert modules
        bad = [*(f"repo_interp.{other}" for other in FORBIDDEN[floor]), *libraries]
        floors.append([floor, [f"repo_interp.{floor}", *modules], bad])
    done = subprocess.run(
        [sys.executable, "-c", FLOORS, json.dumps(floors)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_transformer_lens_is_imported_where_a_bridge_is_made_and_nowhere_else():
    """At the top of a module, outside of `if TYPE_CHECKING`: `analyze`, experiments and commands
    need none, and it takes seconds.
    """
    bridge = "repo_interp.models.bridge"
    wrong = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(one.name for one in node.names)]
        if name.partition(".")[0] == "transformer_lens" or name == bridge
    }
    assert wrong == {"models/bridge.py"}


NO_MODEL = ("torch", "transformers", "transformer_lens", "matplotlib", "plotly", "xarray", "scipy")
HELP = """
import contextlib, io, json, sys
import repo_interp
from repo_interp.cli import main
for words in json.loads(sys.argv.pop(1)):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        main(words)
    assert said.getvalue()
wrong = sorted(set(sys.argv[1:]) & set(sys.modules))
assert not wrong, wrong
"""


@pytest.mark.parametrize(
    ("asked", "heavy"),
    [
        (
            ["--help", "analyze --help", "inspect --help", "train --help", "--version"],
            (*NO_MODEL, "numpy", "rich"),
        ),
        (["inspect niah/repo", f"inspect {OFFICIAL / 'repo_mha'}"], NO_MODEL),
    ],
    ids=["help", "inspect"],
)
def test_importing_the_package_asking_for_help_and_inspecting_are_light(asked, heavy):
    words = json.dumps([command.split() for command in asked])
    command = [sys.executable, "-c", HELP, words, *heavy]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


MEASURE = """
import sys
import tokenize
import repo_interp as ri
ri.analyze(ri.open_model("reversal/repo"), [[3, 4, 5, 6]], ["positions"], progress=print)
few = ("", ".experiment_catalogue", ".experiment", ".prompt_sets")
allowed = {f"repo_interp.experiments{name}" for name in few}
ours = {name for name in sys.modules if name.startswith("repo_interp.experiments")}
wrong = sorted(ours - allowed | set(sys.argv[1:]) & set(sys.modules))
assert not wrong, wrong
"""


def test_a_measure_that_is_named_imports_no_experiment_and_no_statistics():
    """Found: all experiments and scipy.stats, half a second of a first call."""
    heavy = ["scipy.stats", "matplotlib", "plotly", "transformer_lens", "h5py"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *heavy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_source_of_transformers_is_read_as_its_modules_run():
    from transformers.activations import ACT2FN
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from repo_interp.checkpoint_files import transformers_source as source

    assert source.decoders() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(source.activations()) == set(ACT2FN)
    assert source.layer_types() == tuple(ALLOWED_LAYER_TYPES)
    assert set(source.rope_types()) == set(ROPE_INIT_FUNCTIONS)
    for family in ("llama", "gemma3_text", "gpt2", "mixtral", "gpt-sw3"):
        config, stated = CONFIG_MAPPING[family](), source.class_defaults(family)
        for name in ("hidden_size", "num_attention_heads"):
            own = stated.get("attribute_map", {}).get(name, name)
            assert stated[own] == getattr(config, name)


def test_every_public_name_can_be_had_and_is_listed():
    import repo_interp as ri

    for name in ri.__all__:
        assert getattr(ri, name) is not None
    assert dir(ri) == sorted(ri.__all__)
    with pytest.raises(AttributeError, match="No repo_interp attribute nothing"):
        ri.nothing  # noqa: B018


ENGINE = ("analysis.analyze", "analysis.job", "analysis.defaults", "measures.statistics")
"""What asks measures and experiments, and knows none of them."""


def test_the_engine_imports_no_measure_and_no_experiment():
    graph, seen, waiting = imports(), set(), [f"repo_interp.{name}" for name in ENGINE]
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += graph.get(name, ())  # the facade imports lazily
    plugins = {
        place.partition(":")[0]
        for group in (MEASURES, EXPERIMENTS)
        for place in OWN[group].values()
    }
    assert len(plugins) > 20 and not plugins & seen


def test_modules_of_before_are_found_by_their_old_names_and_exist():
    for old, new in MOVED.items():
        assert not (ROOT / f"{old.replace('.', '/')}.py").exists(), old
        assert (ROOT / f"{new.replace('.', '/')}.py").is_file(), new
    with pytest.warns(DeprecationWarning, match=r"three_axis is now repo_interp.plugins"):
        old = import_module("repo_interp.measures.three_axis")
    assert old is import_module("repo_interp.plugins.three_axis.three_axis")


PLUGINS = tuple(sorted(path.parent.name for path in ROOT.glob("plugins/*/__init__.py")))
CORE = (repository / "tests" / "support" / "core_interface.txt").read_text().split()
"""Modules of the core whose public names plug-ins may import."""


def plugin_imports() -> dict[str, set[tuple[str, str]]]:
    """By plug-in, module and name of all that it imports of ours."""
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in PLUGINS}
    for name in PLUGINS:
        for path in ROOT.glob(f"plugins/{name}/*.py"):
            for node in nodes(path):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "repo_interp"
                ):
                    found[name] |= {(str(node.module), one.name) for one in node.names}
    return found


def test_the_core_imports_no_plugin():
    wrong = {
        f"{name} imports {other}"
        for name, others in imports().items()
        if name.startswith("repo_interp.") and not name.startswith("repo_interp.plugins")
        for other in others
        if other.startswith("repo_interp.plugins.")
    }
    # Facades, which find their names when they are asked for
    assert {
        one for one in wrong if not one.startswith("repo_interp.interventions imports")
    } == set()


HOMONYMS = {
    ("analysis/ablation_effects.py", "log_probability"): "a reading of answers",
    ("checkpoint_files/options.py", "gates"): "the setting of CoPE",
    ("experiments/readings.py", "log_probability"): "a reading of answers",
    ("explorer/session.py", "log_probability"): "a reading of answers",
    ("explorer/token_row.py", "log_probability"): "a reading of answers",
    ("interventions/edits.py", "segments"): "segments of a prompt, and their form",
    ("measures/attention_mass.py", "sink_mass"): "the key for the sink of its statistics",
    ("measures/segment_measure.py", "kinds"): "the kinds of segments",
    ("plots/marks/drawing.py", "rotation"): "the angle of a text",
    ("plots/pages/linked.py", "maps"): "maps of heads",
    ("run.py", "block_size"): "the unit of axes of blocks, of any measure",
    ("plots/pages/report.py", "maps"): "maps of heads",
    ("plots/views/attention_mass.py", "attention_share"): "a table",
}
"""Texts of the core that are spelled as the name of a plug-in's measure and mean another thing."""
FACADES = {f"{name}__init__.py" for name in ("", "plots/", "interventions/")}
"""They load the public names of plug-ins lazily."""


def names_of_plugins() -> set[str]:
    """Names of plug-ins' measures, experiments and views, and of the variables that only these have."""
    ours = {**OWN[MEASURES], **OWN[EXPERIMENTS], **OWN[VIEWS]}
    names = {name for name, place in ours.items() if place.startswith("repo_interp.plugins.")}
    variables: dict[str, set[str]] = {}
    text = (repository / "docs" / "measures.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        found = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        variables[section.split()[0].strip("`")] = {name for name in found if "_" in name}
    of_core = {one for group, found in variables.items() if group not in names for one in found}
    return names | {one for name in names for one in variables.get(name, ())} - of_core


def test_the_core_names_no_plugin():
    """It asks entry points, measures, experiments and views: no text of its code, or of the scripts
    of its pages, is the name of a measure, experiment, view or variable of one of our plug-ins.
    """
    names, texts = names_of_plugins(), set[tuple[str, str]]()
    for path in ROOT.rglob("*"):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith("plugins/") or place in {
            "entry_points.py",
            "moved_modules.py",
            *FACADES,
        }:
            continue
        if path.suffix == ".py":
            found = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
            texts |= {(place, value) for value in found if isinstance(value, str)}
        elif path.suffix == ".js":
            code = path.read_text(encoding="utf-8")
            texts |= {(place, text) for text in re.findall(r"[\"'](\w+)[\"']", code)}
    assert len(names) > 100 and len(texts) > 3000
    assert {one for one in texts if one[1] in names} == set(HOMONYMS)


ASKING = ("analysis", "cli", "explorer", "plots/pages")
"""Rooms that ask any measure what they need, and know none, also none of the core."""
SPELLED_ALIKE = {
    ("analysis/batches.py", "positions"): "a unit",
    ("cli/inspect_command.py", "positions"): "a column of the table of layers",
    ("explorer/head_scores.py", "positions"): "a unit",
    ("explorer/token_row.py", "positions"): "a unit",
    ("plots/pages/page/charts.js", "positions"): "a chart",
    ("plots/pages/page/explorer.js", "positions"): "a chart",
}
"""Texts of those rooms that are spelled as the name of a measure of the core and mean another thing."""


def test_rooms_that_ask_name_no_measure_of_the_core():
    """Neither as a text, nor in a sentence or a comment, nor by an import."""
    measures = {
        name: place.partition(":")[0]
        for name, place in OWN[MEASURES].items()
        if not place.startswith("repo_interp.plugins.")
    }
    assert len(measures) == 6
    any_name = "|".join(measures)
    # Names of several words mean nothing else, wherever they stand
    compound = "|".join(name for name in measures if "_" in name)
    sentence = re.compile(rf"\b(?:{compound})\b|\bmeasures? [`'\"]?(?:{any_name})\b")
    texts, told, seen = set[tuple[str, str]](), set[tuple[str, str]](), 0
    for path in (path for room in ASKING for path in ROOT.joinpath(room).rglob("*.*")):
        if path.suffix not in (".py", ".js"):
            continue
        place, code = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        told |= {(place, found) for found in sentence.findall(code)}
        if path.suffix == ".py":
            found = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
            texts |= {(place, value) for value in found if value in measures}
        else:
            texts |= {(place, one) for one in re.findall(rf"[\"'`]({any_name})[\"'`]", code)}
        seen += 1
    assert seen > 50 and not told
    assert texts == set(SPELLED_ALIKE)
    rooms = [f"repo_interp.{room.replace('/', '.')}" for room in ASKING]
    graph = imports()
    assert not {
        f"{name} imports {other}"
        for name in graph
        if name.startswith(tuple(rooms))
        for other in graph[name] & {*measures.values()}
    }


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_imports_public_names_of_the_core_and_others_that_its_readme_names(name):
    readme = (ROOT / "plugins" / name / "README.md").read_text(encoding="utf-8")
    (others,) = re.findall(r"Imports: ([^.]*)\.", readme)
    for module, imported in plugin_imports()[name]:
        assert not imported.startswith("_"), f"{module}.{imported}"
        _, plugins, rest = module.partition("repo_interp.plugins.")
        if plugins:
            other = rest.partition(".")[0]
            assert other == name or re.search(rf"\b{other}\b", others), f"{other}: {others}"
        else:
            assert module.removeprefix("repo_interp.") in CORE, module


def test_every_plugin_has_a_readme_of_a_screen_and_tests():
    assert len(PLUGINS) >= 15
    for name in PLUGINS:
        lines = (ROOT / "plugins" / name / "README.md").read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# ") and 12 <= len(lines) <= 36, name


DOORS = {
    "analysis/analyze.py": (103, 100_300),
    "models/load.py": (58, 54_700),
    "measures/patterns.py": (23, 26_200),
    "plots/views/patterns.py": (33, 34_000),
    "plots/pages/report.py": (42, 42_900),
    "explorer/session.py": (99, 103_500),
}
"""By door, most files and code tokens that it needs by imports, wherever in a file these stand."""
LARGEST = 12_650
"""Code tokens of a plug-in, at most."""
NO_CODE = {
    tokenize.COMMENT,
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


@functools.cache
def code_tokens(path: Path) -> int:
    """Names, operators, numbers and strings of a file, without docstrings and comments."""
    bodies = (getattr(node, "body", None) for node in nodes(path))
    told = {
        line
        for body in bodies
        for each in (body if isinstance(body, list) else ())
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        if isinstance(each.value.value, str)
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }
    with path.open() as file:
        return sum(
            token.type not in NO_CODE and token.start[0] not in told
            for token in tokenize.generate_tokens(file.readline)
        )


@pytest.mark.parametrize("door", DOORS)
def test_a_door_needs_few_files(door):
    graph, seen = imports(), set()
    waiting = [f"repo_interp.{door.removesuffix('.py').replace('/', '.')}"]
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += graph.get(name, ())
    paths = [ROOT.parent / f"{name.replace('.', '/')}.py" for name in seen]
    files = [path if path.exists() else path.with_suffix("") / "__init__.py" for path in paths]
    assert len(files) <= DOORS[door][0] and sum(map(code_tokens, files)) <= DOORS[door][1]


def test_a_plugin_is_small():
    sizes = {name: sum(map(code_tokens, ROOT.glob(f"plugins/{name}/*.py"))) for name in PLUGINS}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}


def test_a_name_of_the_core_means_one_thing():
    """Of files, and of public types and functions of files; commands have two functions each."""
    places: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if "plugins" in path.parts or path.name.startswith("__"):
            continue
        defined = [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]
        for name in (path.name, *(name for name in defined if not name.startswith("_"))):
            places.setdefault(name, set()).add(str(path))
    assert len([name for name, there in places.items() if len(there) > 1]) <= 10
