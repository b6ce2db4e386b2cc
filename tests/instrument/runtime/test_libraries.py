"""A library that is too old or too new is one line where it is needed."""

from __future__ import annotations

import os
import subprocess
import sys

from places import ROOT

from repo_interp.runtime.libraries import require


def test_what_is_installed_here_is_of_the_ranges():
    require("torch", "transformers", "transformer-lens", "xarray")


def test_another_version_is_one_line_where_it_is_needed(tmp_path):
    name, number = "transformer_lens", "9.0.0"
    other = tmp_path / f"{name}-{number}.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "repo_interp", "verify", "niah/repo"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    library = name.replace("_", "-")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(
        f"repo-interp verify: {library} {number} is installed, and repo_interp works with "
    )
    assert f"pip install '{library}" in done.stderr
