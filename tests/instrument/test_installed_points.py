"""What packages declare is read once, and anew when a package is installed."""

from __future__ import annotations

import sys

from repo_interp import installed_points as module
from repo_interp.installed_points import installed_points


def declare(folder, name: str) -> None:
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[repo_interp.tried]\n{name} = {name}:thing\n")


def test_a_package_counts_from_when_it_is_installed_and_nothing_is_read_twice(
    tmp_path, monkeypatch
):
    read = []

    def counted(group):
        read.append(group)
        return module_points(group=group)

    module_points = module.entry_points
    monkeypatch.setattr(module, "entry_points", counted)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    names = [[point.name for point in installed_points("repo_interp.tried")] for _ in range(3)]
    assert names == [[]] * 3 and len(read) == 1
    declare(tmp_path, "first")
    assert [point.name for point in installed_points("repo_interp.tried")] == ["first"]
    declare(tmp_path, "second")
    assert sorted(point.name for point in installed_points("repo_interp.tried")) == [
        "first",
        "second",
    ]
    assert len(read) == 3
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path)])
    assert installed_points("repo_interp.tried") == ()
