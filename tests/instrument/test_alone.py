"""The instrument without the laboratory: an environment with every installed package but position-papers."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from places import PACKAGE


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    """The environment of a process whose import path has links to all that is installed, and not the laboratory."""
    folder = tmp_path_factory.mktemp("site")
    for entry in Path(next(place for place in site.getsitepackages() if Path(place, "torch").is_dir())).iterdir():
        if "position" not in entry.name and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    (folder / "repo_interp").unlink(missing_ok=True)
    (folder / "repo_interp").symlink_to(PACKAGE)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(environment: dict[str, str], *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A process without `site`, so that only PYTHONPATH counts."""
    return subprocess.run([sys.executable, "-S", *words], capture_output=True, text=True, cwd=cwd, env=environment)


def test_every_module_is_imported_without_the_laboratory(alone, tmp_path):
    names = sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    program = "".join(f"import {name}\n" for name in modules) + "import sys\nassert 'position_papers' not in sys.modules\n"
    (tmp_path / "program.py").write_text(program)
    done = run(alone, "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["figures", "train", "zoo"])
def test_a_command_of_the_laboratory_names_the_package_to_install(command, alone, tmp_path):
    done = run(alone, "-m", "repo_interp", command, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "position-papers; install it: pip install ./papers" in done.stderr


def test_an_analysis_needs_the_instrument_alone(alone, tmp_path):
    words = ("analyze", "reversal/repo", "--length", "4", "--count", "2", "--measures", "positions", "--out", "out")
    done = run(alone, "-m", "repo_interp", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "run.nc").is_file()
