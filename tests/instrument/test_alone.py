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


PROGRAM = """
import contextlib, io, sys
from importlib import import_module
from repo_interp.cli import main
for command in ("figures", "train", "zoo"):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main([command]) == 2
    assert said.getvalue().count("\\n") == 1 and "position-papers; install it: pip install ./papers" in said.getvalue()
for name in sys.argv[1:]:
    import_module(name)
assert "position_papers" not in sys.modules
sys.exit(main("analyze reversal/repo --length 4 --count 2 --layers 2 --measures patterns --out out".split()))
"""


def test_every_module_and_command_works_without_the_laboratory_whose_commands_name_it(alone, tmp_path):
    """In a process without `site`, so that only PYTHONPATH counts."""
    names = sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    words = [sys.executable, "-S", "-c", PROGRAM, *modules]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=alone)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "run.nc").is_file()
