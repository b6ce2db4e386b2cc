"""A package outside ours adds a measure and an experiment with figures, a scheme and a task: the
files of docs/extend.md as they are.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from drawn import without_pictures
from families import tiny
from packages import install
from places import DOCS
from refusals import refused
from safetensors.numpy import load_file

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.entry_points import OWN, TASKS
from repo_interp.experiments.experiment_catalogue import experiment_named
from repo_interp.measures.measure_catalogue import measure_named, measure_names
from repo_interp.plots.view_catalogue import view_of
from repo_interp.positions import layouts
from repo_interp.positions.layouts import format_layout, parse_layout, scheme_names
from repo_interp.tasks import make_task, task_names

PAGE = DOCS / "extend.md"
FILE = re.compile(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TINY = (
    "--layers 2 --width 16 --heads 2 --steps 4 --batch 4 --warm-up 2 --log-every 2 "
    "--score-prompts 4 --set longest=4"
)


@pytest.fixture(scope="module")
def worked(tmp_path_factory) -> Path:
    """The folder in which the commands of the page have run - made small - with its package on the
    import path.
    """
    folder = tmp_path_factory.mktemp("extension")
    files = dict(FILE.findall(PAGE.read_text(encoding="utf-8")))
    assert set(files) == {
        "pyproject.toml",
        *(f"position_extras/{part}.py" for part in ("measure", "experiment", "scheme", "task")),
    }
    install(folder / "site", files)
    commands = [
        f"train sorting --scheme t5 {TINY} --out trained",
        "score trained --count 3 --test-sets 3,4 --answers generated --out scored",
        "analyze trained --measures positions,attention_mass,backwards --count 3 --out analyzed",
        "analyze reversal/repo --measures positions,backwards --length 8 --count 2 --set "
        "backwards.margin=0.5 --out mirror",
        "analyze reversal/repo --experiments stretch --length 8 --count 2 --set "
        "stretch.factors=0.5,1,2 --out stretched",
        "inspect trained",
    ]
    with pytest.MonkeyPatch.context() as changed, contextlib.redirect_stdout(io.StringIO()) as said:
        changed.syspath_prepend(folder / "site")
        changed.chdir(folder)
        changed.setenv("COLUMNS", "160")
        with without_pictures():
            assert [main(command.split()) for command in commands] == [0] * len(commands)
    for name in [name for name in sys.modules if name.partition(".")[0] == "position_extras"]:
        del sys.modules[name]
    (folder / "said").write_text(said.getvalue())
    return folder


def test_the_experiment_is_in_the_run_file_and_on_the_page(worked):
    measured = ri.read_run(worked / "stretched")["stretch/log_probability"]
    assert measured["factor"].values.tolist() == [0.5, 1.0, 2.0]
    # trained on its own positions
    assert measured.argmax("factor") == 1 and measured[1] > -0.1
    assert (worked / "stretched" / "figures" / "stretch_by_factor.png").is_file()
    page = (worked / "stretched" / "report.html").read_text(encoding="utf-8")
    assert '<section id="stretch"' in page


def test_the_scheme_and_the_task_train_and_are_scored(worked):
    weights = load_file(worked / "trained" / "model.safetensors")
    tables = [weights[f"model.layers.{layer}.self_attn.table"].shape for layer in range(2)]
    assert tables == [(2, 32)] * 2
    scored = ri.read_run(worked / "scored")
    scores = scored["scores"]
    assert scores.attrs["task"] == "sorting" and scored.attrs["layout"] == "t5,t5"
    assert scores["test_set"].values.tolist() == ["3", "4"]
    assert np.isfinite(scores["mean_score"]).all()
    said = (worked / "said").read_text()
    assert "how many of them are for positions is not known" in said


def test_the_measure_is_in_the_run_file(worked):
    run = ri.read_run(worked / "mirror")
    group, position = run["backwards"], run["positions"]["position"]
    assert group.attrs["margin"] == 0.5 and group["scheme"].equals(run["positions"]["scheme"])
    expected = (np.diff(position.values, axis=-1) < -0.5).mean(-1)
    np.testing.assert_allclose(group["share"].transpose(*position.dims[:3]), expected)
    assert expected.max() > 0.1
    trained = ri.read_run(worked / "analyzed")
    assert trained["backwards"]["scheme"].values.tolist() == ["t5", "t5"]
    assert (trained["backwards"]["share"] == 0).all()
    assert {"numbers", "mark", "generated"} <= {*trained["attention_mass"]["span"].values.tolist()}


@pytest.mark.parametrize("run", ["mirror", "analyzed"])
def test_the_measure_is_drawn_as_files_and_in_the_page(worked, run):
    figures = worked / run / "figures"
    assert (figures / "backwards_by_head.png").is_file()
    page = (worked / run / "report.html").read_text(encoding="utf-8")
    section = page.partition('<section id="backwards"')[2].partition("</section>")[0]
    assert re.search('alt="[^"]+" src="data:image/svg[+]xml;base64,', section)
    assert 'href="#backwards"' in page and "without a section here" not in page


@pytest.mark.parametrize(
    ("function", "line"),
    [(measure_named, "no measure 'sorting'"), (make_task, "no task 'sorting'")],
)
def test_without_the_package_its_names_are_refused_by_name(worked, function, line):
    with refused(line):
        function("sorting")
    with refused("t5"):
        ri.load_model(worked / "trained")


BROKEN = {
    "pyproject.toml": """
[project]
name = "broken-extras"
version = "1.0"
[project.entry-points."repo_interp.measures"]
absent = "broken_extras:Absent"
nameless = "broken_extras:Nameless"
positions = "broken_extras:Absent"
[project.entry-points."repo_interp.experiments"]
wrong_experiment = "broken_extras:Nameless"
[project.entry-points."repo_interp.plots"]
absent = "broken_extras.nowhere:figures"
[project.entry-points."repo_interp.schemes"]
absent_scheme = "broken_extras:absent"
wrong_scheme = "broken_extras:number"
[project.entry-points."repo_interp.tasks"]
absent_task = "broken_extras:absent"
wrong_task = "broken_extras:NUMBERS"
""",
    "broken_extras.py": "class Nameless:\n    pass\n\n\ndef number(builder, rotation, "
    "d_head):\n    return 3\n\n\nNUMBERS = {'small': 3}\n",
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    install(tmp_path, BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("broken_extras", None)


OF_BROKEN = {
    "the measure 'absent' of the package broken-extras": lambda: measure_named("absent"),
    "the measure 'nameless' of the package broken-extras": lambda: measure_named("nameless"),
    "wanted a repo_interp.experiments.Experiment": lambda: experiment_named("wrong_experiment"),
    "the plot 'absent' of the package broken-extras": lambda: view_of("absent"),
    "the package broken-extras gave int": lambda: ri.reposition(tiny("llama"), "wrong_scheme@1"),
    "the task 'absent_task' of the package broken-extras": lambda: make_task("absent_task"),
    "the package broken-extras: wanted a mapping": lambda: make_task("wrong_task"),
}
"""By what is said of it, a use of a part that cannot be used."""


@pytest.mark.parametrize("line", OF_BROKEN)
def test_a_broken_package_is_one_line_that_names_it(broken, line):
    with refused(line):
        OF_BROKEN[line]()


COMMAND = {
    "absent": "",
    "syntax": "def (",
    "exits": "import sys; sys.exit(3)",
    "no parts": "SUMMARY = 3",
    "fails half way": """SUMMARY = '100 %'
def add_arguments(parser):
    parser.add_argument('--x')
    1 / 0
""",
}


@pytest.mark.parametrize("code", COMMAND)
def test_a_broken_command_stops_no_other(code, tmp_path, monkeypatch, capsys):
    """Found: a traceback of every command, of --help too."""
    module = "broken_command.nowhere" if code == "absent" else "broken_command"
    project = (
        '[project]\nname = "broken-extras"\nversion = "1.0"\n'
        f'[project.entry-points."repo_interp.commands"]\nbroken = "{module}"\n'
        '[project.entry-points."repo_interp.checkpoints"]\nlost = "broken_command:lost"\n'
    )
    install(tmp_path, {"pyproject.toml": project, "broken_command.py": COMMAND[code]})
    monkeypatch.syspath_prepend(tmp_path)
    line = "repo-interp: the command 'broken' of the package broken-extras"
    with pytest.raises(SystemExit) as end:
        main(["fetch", "--help"])
    said = capsys.readouterr()
    assert end.value.code == 0 and said.out.startswith("usage:") and "broken" not in said.out
    assert said.err.startswith(line) and said.err.count("\n") == 1
    assert main(["inspect", "reversal/nope"]) == 0
    named, lost = capsys.readouterr().err.splitlines()
    assert named.startswith(line) and "checkpoints are left out: the checkpoint 'lost'" in lost
    assert main(["broken"]) == 2
    assert capsys.readouterr().err.startswith(line)
    sys.modules.pop("broken_command", None)


FAILING = """
from dataclasses import dataclass
import sys
import numpy as np
import xarray as xr
from repo_interp.experiments import Experiment, Plan
from repo_interp.measures.labels import with_attrs, of_layer
from repo_interp.measures.statistics import Measure, Statistics
from repo_interp.plots.style import paper_figure, style


def fail(*given, **more):
    raise KeyError("of the plug-in")


def observe(self, inputs, spans):
    squares = inputs.queries.double().pow(2).sum((-1, -2))
    return Statistics(per_prompt=xr.Dataset({"square": of_layer(inputs, ("prompt", "layer", "head"), squares)}))


def conclude(self, statistics):
    return xr.Dataset({"square": with_attrs(statistics.per_prompt["square"], "square", "1")})


def measure(name, base=object, **parts):
    return type(name, (base,), {"name": name, "required_spans": (), "parameters": {}, "observe": observe, "conclude": conclude, **parts})


def experiment(name, plan):
    return dataclass(frozen=True)(type(name, (Experiment,), {"name": name, "plan": plan}))


def one(values, **attributes):
    return xr.Dataset({"square": ("x", np.array(values), attributes)})


UNITS = {"units": "1", "long_name": "squares"}
m_number = 3
m_init = measure("m_init", __init__=fail)
m_observe = measure("m_observe", observe=fail)
m_exit = measure("m_exit", observe=lambda self, inputs, spans: sys.exit(3))
m_conclude = measure("m_conclude", conclude=fail)
m_named = measure("another")
m_needs = measure("m_needs", Measure, needs=property(fail))
m_no_needs = measure("m_no_needs", Measure, needs=None)
m_none = measure("m_none", observe=lambda self, inputs, spans: None)
m_axes = measure("m_axes", observe=lambda self, inputs, spans: Statistics(per_prompt=one([1.0])))
m_group = measure("m_group", conclude=lambda self, statistics: 3)
m_units = measure("m_units", conclude=lambda self, statistics: one([1.0]))
m_objects = measure("m_objects", conclude=lambda self, statistics: one([object()], **UNITS))
m_layers = measure("m_layers", conclude=lambda self, statistics: one([1.0], **UNITS).rename(x="layer"))
m_spans = measure("m_spans", required_spans=7)
m_writes = measure("m_writes", observe=lambda self, inputs, spans: inputs.queries.mul_(0))
m_scheme = measure("m_scheme", conclude=lambda self, statistics: conclude(self, statistics).rename(square="scheme"))
m_parameters = measure("m_parameters", parameters=3)
m_parameter = measure("m_parameter", parameters={"a": object()})
m_figure, m_raise, m_leave = (measure(name) for name in ("m_figure", "m_raise", "m_leave"))
e_init = fail
e_plan = experiment("e_plan", fail)
e_no_plan = experiment("e_no_plan", lambda self, *given: 3)
e_passes = experiment("e_passes", lambda self, *given: Plan(self, 3, fail))
e_run = experiment("e_run", lambda self, *given: Plan(self, (4,), fail))
e_groups = experiment("e_groups", lambda self, *given: Plan(self, (4,), lambda *how: 3))
squares = one([1.0], **UNITS)
e_scheme = experiment("e_scheme", lambda self, *given: Plan(self, (4,), lambda *how: {"e_scheme": squares.rename(square="scheme")}))
e_taken = experiment("e_taken", lambda self, *given: Plan(self, (4,), lambda *how: {"e_taken": squares, "layout": squares}))
e_group = experiment("e_group", lambda self, *given: Plan(self, (4,), lambda *how: {"e_group": 3}))


def m_figure_view(run):
    yield 3


def m_raise_view(run):
    with style():
        yield "m_raise_first", paper_figure(2, 2)
    raise RuntimeError("the second figure\\ncannot be drawn")


def m_leave_view(run):
    yield from sys.exit(0)
"""
DRAWS = {
    "m_figure": "wanted pairs of a name and a figure",
    "m_raise": "RuntimeError: the second figure cannot be drawn",
    "m_leave": "SystemExit: 0",
}
"""Measures that are right, with figures that are not, and what is said of them."""
RAISED = "code of the package broken-extras failed (failing_extras.py, line "
OF_FAILING = {
    "m_number": "is of type int; wanted a callable without arguments",
    "m_init": RAISED,
    "m_observe": RAISED,
    "m_conclude": "m_conclude stopped: it cannot conclude (KeyError: 'of the plug-in')",
    "m_named": "gives an object with the name 'another'",
    "m_needs": RAISED,
    "m_no_needs": "needs a NoneType; wanted a record Needs",
    "m_none": "observes NoneType; wanted Statistics",
    "m_axes": "observes 'square' in per_prompt with the axes x; wanted 'prompt' among",
    "m_group": "gives int; wanted an xarray.Dataset",
    "m_units": "gives 'square' without long_name or units",
    "m_objects": "gives 'square' of Python objects",
    "m_layers": "gives the axis 'layer' without the numbers of the layers",
    "m_writes": "changes queries in place",
    "m_scheme": "has the name 'scheme', which a run keeps",
    "e_scheme": "has the name 'scheme', which a run keeps",
    "e_taken": "has the name 'layout', which a run keeps",
    "m_spans": "has a int as required_spans; wanted names",
    "m_parameters": "has a int as parameters; wanted values by name",
    "m_parameter": "has a object as parameter a; wanted numbers or words",
    "e_init": RAISED,
    "e_plan": RAISED,
    "e_no_plan": "plans a int; wanted a repo_interp.experiments.Plan",
    "e_passes": "plans a Plan; wanted a repo_interp.experiments.Plan",
    "e_run": RAISED,
    "e_groups": "gives int; wanted groups of a run by name",
    "e_group": "gives int; wanted an xarray.Dataset",
}
"""What the command says of every part of a package that fails, after its own name."""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    points = {"measures": "", "experiments": "", "plots": ""}
    for name in (*OF_FAILING, *DRAWS, "m_exit"):
        group = "experiments" if name.startswith("e_") else "measures"
        points[group] += f'{name} = "failing_extras:{name}"\n'
    for name in DRAWS:
        points["plots"] += f'{name} = "failing_extras:{name}_view"\n'
    project = '[project]\nname = "broken-extras"\nversion = "1.0"\n'
    for group, named in points.items():
        project += f'[project.entry-points."repo_interp.{group}"]\n{named}'
    install(tmp_path, {"pyproject.toml": project, "failing_extras.py": FAILING})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield ["analyze", "reversal/repo", "--length", "4", "--count", "2", "--out", "out"]
    sys.modules.pop("failing_extras", None)


@pytest.mark.parametrize("name", [*OF_FAILING, "m_exit"])
def test_a_package_whose_code_fails_is_one_line_that_names_it(name, failing, capsys):
    """Found: a traceback each; one that ends the process is named too."""
    asked = ["positions", "--experiments", name] if name.startswith("e_") else [name]
    assert main([*failing, "--measures", *asked]) == (1 if name == "m_exit" else 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("repo-interp analyze: ") and OF_FAILING.get(name, RAISED) in line
    error = "SystemExit: 3" if name == "m_exit" else "KeyError: 'of the plug-in'"
    assert name in line or error in line


@pytest.mark.usefixtures("no_pictures")
def test_figures_of_a_package_that_fail_cost_themselves_alone(failing, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    assert main([*failing, "--measures", f"positions,{','.join(DRAWS)}"]) == 1
    said = re.findall("^not drawn: .*$", capsys.readouterr().out, re.MULTILINE)
    for line, (name, error) in zip(sorted(said), sorted(DRAWS.items()), strict=True):
        assert f"'{name}' of the package broken-extras" in line and error in line
    assert set(ri.read_run("out").children) == {"positions", *DRAWS}
    figures = {path.name for path in Path("out/figures").iterdir()}
    assert {"position_ranges.png", "m_raise_first.png"} <= figures
    assert {path.name for path in Path("out").iterdir()} == {"figures", "report.html", "run.nc"}


def test_two_packages_with_one_name_are_refused(broken):
    other = {"pyproject.toml": BROKEN["pyproject.toml"].replace("broken-extras", "other-extras")}
    install(broken, other)
    with refused("the task 'absent_task' is given by broken-extras and other-extras"):
        make_task("absent_task")


def test_ours_cannot_be_replaced_and_names_are_known_without_import(broken):
    assert type(measure_named("positions")).__module__ == "repo_interp.measures.positions"
    assert measure_names().count("positions") == 1 and "nameless" in measure_names()
    assert {"absent_task", "wrong_task"} < set(task_names())
    assert {"absent_scheme", "wrong_scheme"} < set(scheme_names())
    assert "broken_extras" not in sys.modules
    for text in ("absent_scheme", "absent_scheme@1"):
        assert format_layout(parse_layout(text, 3)) == text


def enumerations(names: set[str]) -> set[str]:
    """Files of the package with a literal that names at least half of `names`: the places to edit
    where one is added.
    """
    return {place for place, written in literals() if 2 * len(written & names) >= len(names)}


@cache
def literals() -> list[tuple[str, set[str]]]:
    """The texts in every tuple, list, set and dictionary of the package, and the file."""
    package = Path(ri.__file__).parent
    return [
        (
            str(path.relative_to(package)),
            {part.value for part in parts if isinstance(part, ast.Constant)},
        )
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
        for parts in [node.keys if isinstance(node, ast.Dict) else node.elts]
    ]


def test_nothing_else_lists_the_tasks():
    for name, place in OWN[TASKS].items():
        assert place.startswith("repo_interp.tasks.") and set(
            make_task(name, "paper").options()
        ) == set(make_task(name).options())
    assert enumerations(set(OWN[TASKS])) == {"entry_points.py"}


def test_nothing_else_lists_the_schemes():
    # and names in legends, of those that have one; others are grey and go by their own name
    colours = {"plots/style.py"}
    assert enumerations(set(layouts.SCHEMES)) == {"positions/layouts.py"} | colours
