"""The instrument without the laboratory: an environment with every installed package but
position-papers.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import site
import sys
import sysconfig
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

from forked import forked
from places import PACKAGE

LABORATORY = "position_papers"
COMMAND = "analyze reversal/repo --length 4 --count 2 --layers 2 --measures patterns --out out"


def installed_without_it(folder: Path) -> Path:
    """`folder` with links to all that is installed, and not the laboratory."""
    for entry in Path(
        next(place for place in site.getsitepackages() if Path(place, "torch").is_dir())
    ).iterdir():
        if "position" not in entry.name and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    (folder / "repo_interp").unlink(missing_ok=True)
    (folder / "repo_interp").symlink_to(PACKAGE)
    return folder


def alone(place: Path, modules: list[str]) -> int:
    """In a process of its own: import all `modules` from `place` and the standard library alone,
    and run commands.
    """
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("repo_interp", LABORATORY)
    ]:
        del sys.modules[name]
    # without those of editable installations
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
    standard = Path(sysconfig.get_path("stdlib"))
    sys.path[:] = [str(place), str(standard), str(standard / "lib-dynload")]
    importlib.invalidate_caches()
    main = importlib.import_module("repo_interp.cli").main
    for command in ("figures", "train", "zoo"):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert main([command]) == 2
        assert (
            said.getvalue().count("\n") == 1
            and "position-papers; install it: pip install ./papers" in said.getvalue()
        )
    for name in modules:
        assert Path(str(importlib.import_module(name).__file__)).is_relative_to(place)
    # figures take longest, and need no module that is not loaded yet
    for name in ("pages.report", "view_catalogue"):
        importlib.import_module(f"repo_interp.plots.{name}").figures_of = (
            lambda run, failures=None: iter(())
        )
    assert LABORATORY not in sys.modules
    return main(COMMAND.split())


def test_every_module_and_command_works_without_the_laboratory_whose_commands_name_it(tmp_path):
    names = sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
    )
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    place = tmp_path / "site"
    place.mkdir()
    done = forked(lambda: alone(installed_without_it(place), modules), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "run.nc").is_file()
