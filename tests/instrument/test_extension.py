"""A package outside ours adds a measure and an experiment with figures, a scheme and a task: the
files of docs/extend.md as they are.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from drawn import without_pictures
from packages import install
from places import DOCS

import repo_interp as ri
from position_papers.training import plan
from position_papers.training.trained import trained_configuration
from repo_interp.cli import main
from repo_interp.entry_points import OWN, TASKS
from repo_interp.experiments.catalogue import experiment_named
from repo_interp.measures.catalogue import measure_named, measure_names
from repo_interp.models import schemes
from repo_interp.plots.catalogue import view_of
from repo_interp.positions import layouts
from repo_interp.positions.biases import KerpleLog
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
        "analyze trained --measures positions,attention_mass,backwards --count 3 --out analysed",
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
    group = ri.read_run(worked / "stretched")["stretch"]
    assert group["factor"].values.tolist() == [0.5, 1.0, 2.0]
    log_probability = dict(
        zip(group["factor"].values.tolist(), group["log_probability"].values.tolist(), strict=True)
    )
    # trained on its own positions
    assert log_probability[1.0] > max(log_probability[0.5], log_probability[2.0])
    assert log_probability[1.0] > -0.1
    assert (worked / "stretched" / "figures" / "stretch_by_factor.png").is_file()
    assert '<section id="stretch"' in (worked / "stretched" / "report.html").read_text(
        encoding="utf-8"
    )


def test_the_scheme_and_the_task_train_and_are_scored(worked):
    config = json.loads((worked / "trained" / "config.json").read_text())
    assert config["position_layout"]["layers"] == ["t5", "t5"]
    scores = ri.read_run(worked / "scored")["scores"]
    assert scores.attrs["task"] == "sorting"
    assert scores["test_set"].values.tolist() == ["3", "4"]
    assert np.isfinite(scores["mean_score"]).all()
    assert ri.read_run(worked / "scored").attrs["layout"] == "t5,t5"
    assert "a scheme of another package" in (worked / "said").read_text()


def test_what_the_scheme_learns_is_in_the_checkpoint(worked):
    from safetensors.numpy import load_file

    weights = load_file(worked / "trained" / "model.safetensors")
    assert [weights[f"model.layers.{layer}.self_attn.table"].shape for layer in range(2)] == [
        (2, 32),
        (2, 32),
    ]


def test_the_measure_is_in_the_run_file(worked):
    run = ri.read_run(worked / "mirror")
    group, position = run["backwards"], run["positions"]["position"]
    assert group.attrs["margin"] == 0.5
    assert group["share"].attrs == {"long_name": "share of steps that run backwards", "units": "1"}
    assert group["scheme"].values.tolist() == run["positions"]["scheme"].values.tolist()
    expected = (np.diff(position.values, axis=-1) < -0.5).mean(-1)
    np.testing.assert_allclose(group["share"].transpose(*position.dims[:3]), expected)
    learned = group["share"].values[:, group["scheme"].values == "repo"]
    assert learned.max() > 0.1
    trained = ri.read_run(worked / "analysed")
    assert trained["backwards"]["scheme"].values.tolist() == ["t5", "t5"]
    assert (trained["backwards"]["share"] == 0).all()
    assert {"numbers", "mark", "generated"} <= set(
        trained["attention_mass"]["span"].values.tolist()
    )


@pytest.mark.parametrize("run", ["mirror", "analysed"])
def test_the_measure_is_drawn_as_files_and_in_the_page(worked, run):
    figures = worked / run / "figures"
    assert (figures / "backwards_by_head.png").is_file()
    page = (worked / run / "report.html").read_text(encoding="utf-8")
    section = page.partition('<section id="backwards"')[2].partition("</section>")[0]
    assert 'alt="Backwards by head" src="data:image/svg+xml;base64,' in section
    assert 'href="#backwards"' in page and "without a section here" not in page


def test_without_the_package_its_names_are_refused_by_name(worked):
    with pytest.raises(ri.InputError, match="no measure 'backwards'"):
        measure_named("backwards")
    with pytest.raises(ri.InputError, match="there is no task 'sorting'"):
        make_task("sorting")
    with pytest.raises(ri.InputError, match="t5"):
        ri.load(worked / "trained")


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


def tiny():
    from families import tiny as model

    return model("llama")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: measure_named("absent"), r"the measure 'absent' of the package "
                                          r"broken-extras \(broken_extras:Absent\) cannot be "
                                          r"imported"),
        (lambda: measure_named("nameless"), "the measure 'nameless' of the package "
                                            "broken-extras is a Nameless"),
        (lambda: experiment_named("wrong_experiment"), "wanted a "
                                                       "repo_interp.experiments.Experiment "
                                                       "of that name"),
        (lambda: view_of("absent"), "the plot 'absent' of the package broken-extras .* "
                                    "ModuleNotFoundError"),
        (lambda: ri.reposition(tiny(), "absent_scheme"), "the scheme 'absent_scheme' of the "
                                                         "package broken-extras"),
        (lambda: ri.reposition(tiny(), "wrong_scheme@1"), "the scheme 'wrong_scheme' of the "
                                                          "package broken-extras gave int"),
        (lambda: make_task("absent_task"), "the task 'absent_task' of the package broken-extras"),
        (lambda: make_task("wrong_task"), "the task 'wrong_task' of the package "
                                          "broken-extras: wanted a mapping"),
    ],
)  # fmt: skip
def test_a_broken_package_is_one_line_that_names_it(broken, ask, message):
    with pytest.raises(ri.InputError, match=message) as refusal:
        ask()
    assert "\n" not in str(refusal.value)


COMMAND = {
    "absent": "",
    "syntax": "def (",
    "exits": "import sys; sys.exit(3)",
    "no parts": "SUMMARY = 3",
}
COMMAND["fails half way"] = (
    "SUMMARY = '100 %'\ndef add_arguments(parser):\n    parser.add_argument('--x')\n    1 / 0\n"
)


@pytest.mark.parametrize("code", COMMAND)
def test_a_broken_command_stops_no_other(code, tmp_path, monkeypatch, capsys):
    """Found: a traceback of every command, of --help too."""
    module = "broken_command.nowhere" if code == "absent" else "broken_command"
    project = (
        '[project]\nname = "broken-extras"\nversion = '
        '"1.0"\n[project.entry-points."repo_interp.commands"]\n'
    )
    directory = '[project.entry-points."repo_interp.checkpoints"]\nlost = "broken_command:lost"\n'
    install(
        tmp_path,
        {
            "pyproject.toml": f'{project}broken = "{module}"\n{directory}',
            "broken_command.py": COMMAND[code],
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = "repo-interp: the command 'broken' of the package broken-extras"
    for command in (["--help"], ["fetch", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(command)
        said = capsys.readouterr()
        assert end.value.code == 0 and said.out.startswith("usage:") and "broken" not in said.out
        assert (
            said.err.startswith(line)
            and said.err.endswith("; fix or uninstall it\n")
            and said.err.count("\n") == 1
        )
    assert main(["inspect", "reversal/nope"]) == 0
    named, lost = capsys.readouterr().err.splitlines()
    assert named.startswith(line) and lost.startswith(
        "repo-interp inspect: checkpoints are left out: the checkpoint 'lost' of"
    )
    assert main(["broken"]) == 2
    assert capsys.readouterr().err.startswith(line)
    sys.modules.pop("broken_command", None)


FAILING = """
from dataclasses import dataclass
import sys
import numpy as np
import xarray as xr
from repo_interp.experiments import Experiment, Plan
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.statistics import Measure, Statistics
from repo_interp.plots.style import paper_figure, style


def fail(*given, **more):
    raise KeyError("of the plug-in")


def observe(self, inputs, spans):
    squares = inputs.queries.double().pow(2).sum((-1, -2))
    return Statistics(per_prompt=xr.Dataset({"square": of_layer(inputs, ("prompt", "layer", "head"), squares)}))


def conclude(self, statistics):
    return xr.Dataset({"square": described(statistics.per_prompt["square"], "square", "1")})


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
    "m_number": "the measure 'm_number' of the package broken-extras is a int; wanted a "
    "callable without arguments",
    "m_init": RAISED,
    "m_observe": RAISED,
    "m_conclude": "m_conclude stopped: it cannot conclude (KeyError: 'of the plug-in')",
    "m_needs": RAISED,
    "m_no_needs": "the measure 'm_no_needs' of the package broken-extras needs a NoneType; "
    "wanted a record Needs",
    "m_none": "the measure 'm_none' of the package broken-extras observes NoneType; wanted "
    "Statistics",
    "m_axes": "the measure 'm_axes' of the package broken-extras observes 'square' in "
    "per_prompt with the axes x; wanted 'prompt' among",
    "m_group": "the measure 'm_group' of the package broken-extras gives int; wanted an "
    "xarray.Dataset",
    "m_units": "the measure 'm_units' of the package broken-extras gives 'square' without "
    "long_name or units; describe it",
    "m_objects": "the measure 'm_objects' of the package broken-extras gives 'square' of "
    "Python objects; wanted numbers or texts",
    "m_layers": "the measure 'm_layers' of the package broken-extras gives the axis 'layer' "
    "without the numbers of the layers",
    "m_writes": "the measure 'm_writes' of the package broken-extras changes queries in "
    "place, which the model and other measures go on",
    "m_scheme": "a variable of the measure 'm_scheme' of the package broken-extras has the "
    "name 'scheme', which a run keeps",
    "e_scheme": "a variable of the experiment 'e_scheme' of the package broken-extras has "
    "the name 'scheme', which a run keeps",
    "e_taken": "a group of the experiment 'e_taken' of the package broken-extras has the "
    "name 'layout', which a run keeps",
    "m_spans": "the measure 'm_spans' of the package broken-extras has a int as "
    "required_spans; wanted names",
    "m_parameters": "the measure 'm_parameters' of the package broken-extras has a int as "
    "parameters; wanted values by name",
    "m_parameter": "the measure 'm_parameter' of the package broken-extras has a object as "
    "parameter a; wanted numbers or words",
    "e_init": RAISED,
    "e_plan": RAISED,
    "e_no_plan": "the experiment 'e_no_plan' of the package broken-extras plans a int; "
    "wanted a repo_interp.experiments.Plan",
    "e_passes": "the experiment 'e_passes' of the package broken-extras plans a Plan; wanted "
    "a repo_interp.experiments.Plan",
    "e_run": RAISED,
    "e_groups": "the experiment 'e_groups' of the package broken-extras gives int; wanted "
    "groups of a run by name",
    "e_group": "the experiment 'e_group' of the package broken-extras gives int; wanted an "
    "xarray.Dataset",
}
"""What the command says of every part of a package that fails, after its own name."""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    points = {
        "measures": {
            name: name for name in (*OF_FAILING, *DRAWS, "m_exit") if name.startswith("m_")
        },
        "experiments": {name: name for name in OF_FAILING if name.startswith("e_")},
        "plots": {name: f"{name}_view" for name in DRAWS},
    }
    project = '[project]\nname = "broken-extras"\nversion = "1.0"\n' + "".join(
        f'[project.entry-points."repo_interp.{group}"]\n'
        + "".join(f'{name} = "failing_extras:{place}"\n' for name, place in named.items())
        for group, named in points.items()
    )
    install(tmp_path, {"pyproject.toml": project, "failing_extras.py": FAILING})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield ["analyze", "reversal/repo", "--length", "4", "--count", "2", "--out", "out"]
    sys.modules.pop("failing_extras", None)


@pytest.mark.parametrize("name", OF_FAILING)
def test_a_package_whose_code_fails_is_one_line_that_names_it(name, failing, capsys):
    """Found: a traceback each."""
    asked = (
        ["--measures", name]
        if name.startswith("m_")
        else ["--measures", "positions", "--experiments", name]
    )
    assert main([*failing, *asked]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line and " so far" not in line
    ]
    assert line.startswith(f"repo-interp analyze: {OF_FAILING[name]}")
    if OF_FAILING[name] == RAISED:
        assert line.endswith(", in fail): KeyError: 'of the plug-in'; fix or uninstall it")


def test_a_package_that_ends_the_process_is_named_too(failing, capsys):
    assert main([*failing, "--measures", "m_exit"]) == 1
    said = capsys.readouterr().err
    assert f"repo-interp analyze: {RAISED}" in said and "SystemExit: 3" in said


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", DRAWS)
def test_figures_of_a_package_that_fail_cost_themselves_alone(name, failing, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    assert main([*failing, "--measures", f"positions,{name}"]) == 1
    (said,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("not drawn: ")
    ]
    assert f"'{name}' of the package broken-extras" in said and DRAWS[name] in said
    run = ri.read_run("out")
    assert set(run.children) == {"positions", name} and (run[name]["square"] > 0).all()
    figures = {path.name for path in Path("out/figures").iterdir()}
    assert "position_ranges.png" in figures and ("m_raise_first.png" in figures) == (
        name == "m_raise"
    )
    assert "Positions, head by head" in Path("out/report.html").read_text(encoding="utf-8")
    assert {path.name for path in Path("out").iterdir()} == {"figures", "report.html", "run.nc"}


def test_two_packages_with_one_name_are_refused(broken):
    other = {"pyproject.toml": BROKEN["pyproject.toml"].replace("broken-extras", "other-extras")}
    install(broken, other)
    with pytest.raises(
        ri.InputError, match="the task 'absent_task' is given by broken-extras and other-extras"
    ):
        make_task("absent_task")


def test_ours_cannot_be_replaced_and_names_are_known_without_import(broken):
    assert type(measure_named("positions")).__module__ == "repo_interp.measures.positions"
    assert measure_names().count("positions") == 1 and "nameless" in measure_names()
    assert {"absent_task", "wrong_task"} < set(task_names())
    assert {"absent_scheme", "wrong_scheme"} < set(scheme_names())
    assert "broken_extras" not in sys.modules
    for text in ("absent_scheme", "absent_scheme@1"):
        assert format_layout(parse_layout(text, 3)) == text


SORTING = dict(FILE.findall(PAGE.read_text(encoding="utf-8")))["position_extras/task.py"]


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


def test_a_task_of_ours_is_its_file_a_line_and_a_recipe(tmp_path, monkeypatch):
    """The task of docs/extend.md as one of ours: a module, a line in `OWN`, an entry of `FRESH`; it
    is listed, trained and scored.
    """
    (tmp_path / "sorting_of_ours.py").write_text(SORTING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(OWN[TASKS], "sorting", "sorting_of_ours:SIZES")
    monkeypatch.setitem(plan.FRESH, "sorting", {"steps": 3, "batch": 2})
    assert task_names()[len(OWN[TASKS]) - 1] == "sorting"
    tiny_training = (
        "train sorting --layers 1 --width 8 --heads 2 --score-prompts 2 --set longest=3 --out run"
    )
    assert main(tiny_training.split()) == 0
    configuration = trained_configuration("run")
    assert (configuration.task, configuration.steps, configuration.batch) == ("sorting", 3, 2)
    assert main(["score", "run", "--count", "2", "--out", "scored"]) == 0
    assert ri.read_run("scored")["scores"].attrs["task"] == "sorting"
    assert ri.read_run("scored")["scores"]["test_set"].values.tolist() == ["2", "3"]


def test_nothing_else_lists_the_tasks():
    for name, place in OWN[TASKS].items():
        assert place.startswith("repo_interp.tasks.") and set(
            make_task(name, "paper").options()
        ) == set(make_task(name).options())
    assert enumerations(set(OWN[TASKS])) == {"entry_points.py"}


def test_a_scheme_of_ours_is_its_file_and_two_lines(tmp_path, monkeypatch):
    """KERPLE's kernel by another name: a line in the layout language, one where schemes are
    built.
    """
    monkeypatch.setitem(layouts.SCHEMES, "kerple_again", "KERPLE again")
    monkeypatch.setitem(
        schemes._ADDITIVE, "kerple_again", lambda rotation, length: KerpleLog(rotation.heads)
    )
    assert scheme_names()[len(layouts.SCHEMES) - 1] == "kerple_again"
    assert format_layout(parse_layout("kerple_again", 2)) == "kerple_again"
    model = ri.reposition(tiny(), "kerple_again@1")
    ri.save(model, tmp_path / "saved")
    assert ri.layout(ri.load(tmp_path / "saved"))[1:] == ("kerple_again",) * (
        len(ri.layout(model)) - 1
    )


def test_nothing_else_lists_the_schemes():
    # and names in legends, of those that have one; others are grey and go by their own name
    colours = {"plots/style.py"}
    assert enumerations(set(layouts.SCHEMES)) == {"positions/layouts.py"} | colours
