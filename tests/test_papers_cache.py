"""What is kept of measurements: the same comes back, something else - other code among it - is measured anew, and nothing half-written
is left.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from repo_interp.experiments.resumable_grid import ResumableGrid
from repo_interp.papers.catalogue import PAPERS
from repo_interp.papers.kit import closure
from repo_interp.papers.kit.build import Duration, Durations
from repo_interp.papers.kit.cache import Cache

ROOT = Path(closure.__file__).parents[2]
DEPENDS = {"checkpoint": "abc", "seed": 0}


def measured(times: list[str]) -> xr.Dataset:
    """A measurement that says when it is made."""
    times.append("measured")
    return xr.Dataset(
        {"x": ("step", np.array([0.1, np.nan, 3]), {"units": "1"}), "yes": ("step", np.array([True, False, True]))},
        coords={"step": [1, 2, 3], "scheme": ("step", ["rope", "repo", "rope"])},
        attrs={"kept": "this"},
    )


def groups(times: list[str]) -> xr.DataTree:
    """Several groups at once, with axes of different lengths."""
    shorter = measured(times).isel(step=slice(2))
    return xr.DataTree.from_dict({"whole": measured(times), "shorter": shorter})


def another(times: list[str]) -> xr.Dataset:
    """Another one that gives the same."""
    return measured(times)


def interrupted() -> xr.Dataset:
    """A measurement that the user stops."""
    raise KeyboardInterrupt


def unwritable() -> xr.Dataset:
    """What no file can hold."""
    return xr.Dataset(attrs={"odd": object()})


def test_groups_are_kept_together_and_come_back_as_they_were(tmp_path):
    times: list[str] = []
    first, again = (Cache(tmp_path).tree(groups, DEPENDS, times) for _ in range(2))
    assert len(times) == 2 and len(list(tmp_path.glob("*.nc"))) == 1
    xr.testing.assert_identical(first, again)
    xr.testing.assert_identical(again["whole"].to_dataset(), measured([]))
    assert again["shorter"].sizes["step"] == 2 and not again.attrs


def by_points(grid: ResumableGrid, stop_at: int) -> xr.Dataset:
    """A measurement of four points that is stopped at one of them."""

    def point(number: int) -> dict[str, float]:
        MADE.append(number)
        if number == stop_at:
            raise KeyboardInterrupt
        return {"value": number / 3}

    points = {str(number): partial(point, number) for number in range(4)}
    return xr.Dataset({"x": ("point", [found["value"] for found in grid.get_or_compute(points).values()])})


MADE: list[int] = []


def test_an_interrupted_measurement_goes_on_from_its_finished_points(tmp_path):
    cache = Cache(tmp_path)
    for stop_at in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            cache.dataset(by_points, DEPENDS, cache.points(by_points, DEPENDS), stop_at)
    whole = cache.dataset(by_points, DEPENDS, cache.points(by_points, DEPENDS), -1)
    assert MADE == [0, 1, 2, 2, 3, 3]
    np.testing.assert_array_equal(whole["x"], np.arange(4) / 3)
    assert [file.suffix for file in tmp_path.iterdir() if file.name != ".gitignore"] == [".nc"]
    assert Cache().points(by_points, DEPENDS).get_or_compute({"a": lambda: {"value": 1.0}}) == {"a": {"value": 1.0}}


def test_the_same_is_measured_once_and_comes_back_as_it_was(tmp_path):
    times: list[str] = []
    first = Cache(tmp_path).dataset(measured, DEPENDS, times)
    again = Cache(tmp_path).dataset(measured, dict(reversed(DEPENDS.items())), times)
    assert len(times) == 1
    xr.testing.assert_identical(first, again)
    xr.testing.assert_identical(first, measured([]))
    assert first["yes"].dtype == bool


@pytest.mark.parametrize("other", [{"seed": 1}, {"checkpoint": "abd"}, {"more": None}])
def test_something_else_is_measured_anew(tmp_path, other):
    times: list[str] = []
    Cache(tmp_path).dataset(measured, DEPENDS, times)
    Cache(tmp_path).dataset(measured, DEPENDS | other, times)
    Cache(tmp_path).dataset(another, DEPENDS, times)
    assert len(times) == 3


def test_an_interrupted_measurement_leaves_nothing_and_the_others_stay(tmp_path):
    cache = Cache(tmp_path)
    cache.dataset(measured, DEPENDS, [])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        cache.dataset(interrupted, {"seed": 5})
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        Cache(tmp_path).dataset(unwritable, {})
    assert [file.name for file in tmp_path.iterdir()] == [".gitignore"]


def test_without_a_directory_nothing_is_kept():
    times: list[str] = []
    cache = Cache()
    cache.dataset(measured, DEPENDS, times)
    cache.dataset(measured, DEPENDS, times)
    assert len(times) == 2


def test_a_cache_knows_what_its_measurements_took_then(tmp_path):
    first, second = Cache(tmp_path), Cache(tmp_path)
    first.dataset(measured, DEPENDS, [])
    second.dataset(measured, DEPENDS, [])
    assert first.seconds == second.seconds > 0


def test_durations_are_remembered_and_a_finished_one_goes_first(tmp_path):
    durations = Durations(tmp_path / "kept")
    assert durations.get("hope") is None
    durations.put("hope", Duration(5, False))
    assert Durations(tmp_path / "kept").get("hope") == Duration(5, False)
    durations.put("hope", Duration(9, True))
    durations.put("hope", Duration(2, False))
    assert durations.get("hope") == durations.longest("ho") == Duration(9, True)
    (tmp_path / "kept" / "durations.json").write_text("{")
    assert durations.get("hope") is durations.longest("ho") is None


# ---- what a measurement computes with -------------------------------------------------------------------------------

FILES = {
    "papers/mine/experiment.py": '''
"""Says what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repo_interp.measures.mass import Mass, total
from repo_interp.measures.unused import nothing
from repo_interp.plots.marks import line

if TYPE_CHECKING:
    from repo_interp.papers.mine.options import Options

FIRST, (SECOND, THIRD) = 3, (4, 5)
SCALE: float = 2.0
SCALE += 1
THRESHOLD = 0.5
RULES = {"r": nothing(THRESHOLD)}


def doubled(function):
    return lambda *given: 2 * function(*given)


class Twin:
    """A twin."""

    seeds = 7

    def run(self):
        """Run."""
        return self.seeds * THIRD


@doubled
def measure(mass: Mass, options: Options):
    """Measures."""
    from repo_interp.models.load import load

    return load(total(mass)) * SECOND * SCALE * Twin().run() * _helper(options)


def _helper(options):
    return np.sum(options)


def judge(data):
    return data > THRESHOLD


def draw(data):
    return line(data, "A caption.")
''',
    "papers/mine/options.py": "class Options:\n    count = 100\n",
    "measures/mass.py": 'from repo_interp.measures.kernels import sums\n\n\nclass Mass:\n    """Mass."""\n    rows = 1\n\n\n'
    "def total(mass):\n    return sums(mass)\n",
    "measures/kernels.py": 'def sums(values):\n    """Sums."""\n    return sum(values)\n',
    "measures/unused.py": "def nothing(value):\n    return value\n",
    "measures/found.py": "class Found:\n    epsilon = 0.2\n",
    "models/load.py": "from repo_interp.entries import find\nfrom repo_interp.tasks import make\n\n\n"
    "def load(path):\n    return find(path), make(path)\n",
    "entries.py": 'OWN = {"found": "repo_interp.measures.found:Found", "view": "repo_interp.plots.marks:line"}\n',
    "tasks/__init__.py": 'from importlib import import_module\n\n\ndef make(name):\n    return import_module(f"{__name__}.{name}")\n',
    "tasks/reversal.py": "LENGTH = 20\n",
    "plots/marks.py": 'def line(data, caption):\n    return data, caption, "blue"\n',
}


@pytest.fixture
def package(tmp_path) -> Path:
    """A package of a few files with our closure in it."""
    root = tmp_path / "repo_interp"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.lstrip("\n"))
    (root / "papers" / "kit").mkdir()
    shutil.copy(Path(closure.__file__), root / "papers" / "kit")
    return root


def digest(package: Path) -> str:
    """What `measure` of the package computes with, as a fresh interpreter sees it."""
    spec = importlib.util.spec_from_file_location("closure_of_package", package / "papers" / "kit" / "closure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names: dict[str, Any] = {}
    exec(compile("def measure(): ...", str(package / "papers" / "mine" / "experiment.py"), "exec"), names)
    return module.closure_digest(names["measure"])


EXPERIMENT = "papers/mine/experiment.py"


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        pytest.param(EXPERIMENT, "SECOND, THIRD) = 3, (4, 5)", "SECOND, THIRD) = 3, (4, 6)", id="a constant of several"),
        pytest.param(EXPERIMENT, "SCALE: float = 2.0", "SCALE: float = 2.5", id="a constant"),
        pytest.param(EXPERIMENT, "SCALE += 1", "SCALE += 2", id="a constant that is changed later"),
        pytest.param(EXPERIMENT, "seeds = 7", "seeds = 8", id="an attribute of a class"),
        pytest.param(EXPERIMENT, "lambda *given: 2", "lambda *given: 3", id="a decorator"),
        pytest.param(EXPERIMENT, "np.sum(options)", "np.max(options)", id="a helper in the same file"),
        pytest.param("measures/mass.py", "sums(mass)", "2 * sums(mass)", id="an imported function"),
        pytest.param("measures/mass.py", "rows = 1", "rows = 2", id="the class of an argument"),
        pytest.param("measures/kernels.py", "return sum(values)", "return max(values)", id="a kernel through another file"),
        pytest.param("models/load.py", "find(path), make(path)", "make(path)", id="an import inside the function"),
        pytest.param("measures/found.py", "0.2", "0.3", id="an object that a string names"),
        pytest.param("tasks/reversal.py", "20", "30", id="a module that is imported by name"),
    ],
)
def test_other_code_that_computes_is_measured_anew(package, file, before, after):
    first = digest(package)
    text = (package / file).read_text()
    assert before in text
    (package / file).write_text(text.replace(before, after))
    assert digest(package) != first


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        pytest.param(EXPERIMENT, "A caption.", "Another caption.", id="a caption"),
        pytest.param(EXPERIMENT, "Measures.", "Measures it.", id="a docstring"),
        pytest.param(EXPERIMENT, '"""A twin."""', '"""Twin."""', id="the docstring of a class"),
        pytest.param(
            EXPERIMENT, "    return np.sum(options)", "    # why\n\n    return np.sum(options)", id="a comment and a blank line"
        ),
        pytest.param(EXPERIMENT, "return line(data", "return 2, line(data", id="a drawing"),
        pytest.param(EXPERIMENT, "THRESHOLD = 0.5", "THRESHOLD = 0.6", id="a threshold"),
        pytest.param(EXPERIMENT, "data > THRESHOLD", "data >= THRESHOLD", id="how it is judged"),
        pytest.param("papers/mine/options.py", "100", "200", id="options, which every measurement names itself"),
        pytest.param("measures/unused.py", "return value", "return -value", id="what only the rules use"),
        pytest.param("measures/kernels.py", "Sums.", "The sum.", id="a docstring of a kernel"),
        pytest.param("plots/marks.py", "blue", "red", id="a drawing in another file"),
    ],
)
def test_words_rules_and_drawings_measure_nothing_again(package, file, before, after):
    first = digest(package)
    text = (package / file).read_text()
    assert before in text
    (package / file).write_text(text.replace(before, after))
    assert digest(package) == first


def test_all_code_decides_where_a_figure_comes_from(package):
    def sources() -> str:
        spec = importlib.util.spec_from_file_location("closure_of_package", package / "papers" / "kit" / "closure.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.sources_digest()

    first = sources()
    (package / "plots" / "marks.py").write_text("# another drawing\n")
    assert sources() != first


def kept_functions() -> dict[str, Any]:
    """Every function whose result a paper keeps: the second argument of `subject.measured`, the first of `cache.dataset`."""
    functions = {}
    for file in sorted((ROOT / "papers").glob("*/*.py")):
        module = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("measured", "dataset"):
                place = 1 if node.func.attr == "measured" else 0
                argument = node.args[place] if len(node.args) > place else None
                function = getattr(import_module(module), argument.id, None) if isinstance(argument, ast.Name) else None
                if function is not None:
                    functions[f"{module}.{function.__name__}"] = function
    return functions


def test_no_measurement_of_a_paper_computes_with_drawings_commands_or_other_papers():
    functions = kept_functions()
    assert {name.split(".")[2] for name in functions} >= {paper.replace("-", "_") for paper in PAPERS}
    for name, function in functions.items():
        reached = {path.relative_to(ROOT).parts for path in closure.imported_files(function)}
        assert not {parts[0] for parts in reached} & {"plots", "cli", "comparison"}, name
        assert {parts[1] for parts in reached if parts[0] == "papers"} <= {"kit", name.split(".")[2]}, name


def test_no_measurement_of_a_paper_computes_with_rules():
    """Found: a rule was part of what HoPE's replicates are kept by, so that another one measured all of them again."""
    for name, function in kept_functions().items():
        reached = {path.relative_to(ROOT).parts for path in closure.imported_files(function)}
        assert not {("papers", "kit", file) for file in ("rules.py", "claims.py", "experiment.py")} & reached, name
