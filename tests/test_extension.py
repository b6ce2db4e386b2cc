"""A package outside ours adds a measure with a figure, a scheme and a task: the files of docs/extend.md, as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import repo_interp as ri
from repo_interp.measures.catalogue import measure_named, measure_names
from repo_interp.plots.catalogue import view_of
from repo_interp.positions.layouts import format_layout, parse_layout, scheme_names
from repo_interp.tasks import make_task, task_names

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
FILE = re.compile(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TINY = "--layers 2 --width 16 --heads 2 --steps 4 --batch 4 --warm-up 2 --log-every 2 --score-prompts 4 --set longest=4"


def install(folder: Path, files: dict[str, str]) -> None:
    """Lay a package into `folder` as an installer does: its files, and the metadata with the entry points of its pyproject.toml."""
    project = tomllib.loads(files["pyproject.toml"])["project"]
    for name, text in files.items():
        if name.endswith(".py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def worked(tmp_path_factory) -> Path:
    """The folder in which a fresh interpreter, with the package of the page on its path, has run the commands of the page - made small."""
    folder = tmp_path_factory.mktemp("extension")
    files = dict(FILE.findall(PAGE.read_text(encoding="utf-8")))
    assert set(files) == {"pyproject.toml", *(f"position_extras/{part}.py" for part in ("measure", "scheme", "task"))}
    install(folder / "site", files)
    commands = [
        f"train sorting --scheme t5 {TINY} --out trained",
        "score trained --count 3 --test-sets 3,4 --answers generated --out scored",
        "analyze trained --measures positions,attention_mass,backwards --count 3 --out analysed",
        "analyze reversal/repo --measures positions,backwards --length 8 --count 2 --set backwards.margin=0.5 --out mirror",
        "inspect trained",
    ]
    program = "import sys; from repo_interp.cli import main; sys.exit(max(main(command.split()) for command in sys.argv[1:]))"
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "160", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:position_extras", "-c", program, *commands],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


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
    assert [weights[f"model.layers.{layer}.self_attn.table"].shape for layer in range(2)] == [(2, 32), (2, 32)]


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
    assert {"numbers", "mark", "generated"} <= set(trained["attention_mass"]["span"].values.tolist())


@pytest.mark.parametrize("run", ["mirror", "analysed"])
def test_the_measure_is_drawn_as_files_and_in_the_page(worked, run):
    figures = worked / run / "figures"
    assert all((figures / f"backwards_by_head.{kind}").stat().st_size > 1000 for kind in ("png", "svg", "pdf"))
    assert "share of steps that run backwards" in (figures / "backwards_by_head.svg").read_text()
    page = (worked / run / "report.html").read_text(encoding="utf-8")
    section = page.partition('<section id="backwards"')[2].partition("</section>")[0]
    assert 'alt="backwards by head" src="data:image/svg+xml;base64,' in section
    assert 'href="#backwards"' in page and "without a section here" not in page


def test_without_the_package_its_names_are_refused_by_name(worked):
    with pytest.raises(ri.InputError, match=r"no measure 'backwards'; there are positions"):
        measure_named("backwards")
    with pytest.raises(ri.InputError, match="wanted a task, one of reversal"):
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
[project.entry-points."repo_interp.plots"]
absent = "broken_extras.nowhere:figures"
[project.entry-points."repo_interp.schemes"]
absent_scheme = "broken_extras:absent"
wrong_scheme = "broken_extras:number"
[project.entry-points."repo_interp.tasks"]
absent_task = "broken_extras:absent"
wrong_task = "broken_extras:NUMBERS"
""",
    "broken_extras.py": "class Nameless:\n    pass\n\n\ndef number(builder, rotation, d_head):\n    return 3\n\n\nNUMBERS = {'small': 3}\n",
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
        (lambda: measure_named("absent"), r"the measure 'absent' of the package broken-extras \(broken_extras:Absent\) cannot be imported"),
        (lambda: measure_named("nameless"), "the measure 'nameless' is .*; wanted an object of that name with required_spans"),
        (lambda: view_of("absent"), "the plot 'absent' of the package broken-extras .* ModuleNotFoundError"),
        (lambda: ri.reposition(tiny(), "absent_scheme"), "the scheme 'absent_scheme' of the package broken-extras"),
        (lambda: ri.reposition(tiny(), "wrong_scheme@1"), "the scheme 'wrong_scheme' of another package gave int; wanted SchemeParts"),
        (lambda: make_task("absent_task"), "the task 'absent_task' of the package broken-extras"),
        (lambda: make_task("wrong_task"), "the task 'wrong_task' of another package: wanted a mapping"),
    ],
)  # fmt: skip
def test_a_broken_package_is_one_line_that_names_it(broken, ask, message):
    with pytest.raises(ri.InputError, match=message) as refusal:
        ask()
    assert "\n" not in str(refusal.value)


def test_two_packages_with_one_name_are_refused(broken):
    other = {"pyproject.toml": BROKEN["pyproject.toml"].replace("broken-extras", "other-extras")}
    install(broken, other)
    with pytest.raises(ri.InputError, match="the task 'absent_task' is given by broken-extras and other-extras; uninstall one"):
        make_task("absent_task")


def test_ours_cannot_be_replaced_and_names_are_known_without_import(broken):
    assert type(measure_named("positions")).__module__ == "repo_interp.measures.positions"
    assert measure_names().count("positions") == 1 and "nameless" in measure_names()
    assert {"absent_task", "wrong_task"} < set(task_names())
    assert {"absent_scheme", "wrong_scheme"} < set(scheme_names())
    assert "broken_extras" not in sys.modules
    for text in ("absent_scheme", "absent_scheme@1"):
        assert format_layout(parse_layout(text, 3)) == text
