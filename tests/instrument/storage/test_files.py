"""Files and directories appear whole or not at all, and what stood there stands until then; a run
too, on a disk that is full.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from families import tiny
from forked import Forked
from places import tree
from safetensors.torch import save_file

import repo_interp as ri
from repo_interp.storage.files import remove, replace_whole, write_text


def test_a_directory_is_replaced_as_a_whole_and_stays_where_nothing_is_written(tmp_path):
    for names in ("ab", "bc", ""):
        with replace_whole(tmp_path / "made") as unfinished:
            for name in names:
                (unfinished / "deep").mkdir(parents=True, exist_ok=True)
                write_text(unfinished / "deep" / name, "größer\n")
    assert {path.name for path in (tmp_path / "made" / "deep").iterdir()} == {*"bc"}
    assert (tmp_path / "made" / "deep" / "c").read_bytes() == "größer\n".encode()
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["notes.txt", "made/notes.txt"])
def test_an_error_leaves_the_old_file_or_directory_and_nothing_else(name, error, tmp_path):
    """Of the second name the directory is replaced."""
    place, inside = tmp_path / Path(name).parts[0], Path(*Path(name).parts[1:])

    def write(text: str, failure: BaseException | None = None) -> None:
        with replace_whole(place) as unfinished:
            (unfinished / inside).parent.mkdir(exist_ok=True)
            (unfinished / inside).write_text(text)
            if failure is not None:
                raise failure

    write("old")
    with pytest.raises(type(error)):
        write("half of the n", error)
    assert (tmp_path / name).read_text() == "old"
    assert os.listdir(tmp_path) == [place.name]


@pytest.mark.parametrize(("mask", "file", "directory"), [(0o027, 0o640, 0o750)])
def test_files_have_the_permissions_that_the_umask_gives(tmp_path, mask, file, directory):
    before = os.umask(mask)
    try:
        with replace_whole(tmp_path / "model.safetensors") as unfinished:
            save_file({"weight": torch.zeros(2)}, unfinished)  # gives it to its owner alone
        write_text(tmp_path / "notes.txt", "new")
        ri.save(ri.reposition(tiny("llama"), "repo"), tmp_path / "saved")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (directory if path.is_dir() else file), path


def test_removing_follows_no_link(tmp_path):
    (tmp_path / "precious").mkdir()
    write_text(tmp_path / "precious" / "thesis.tex", "years of work")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    remove(tmp_path / "link")
    remove(tmp_path / "nothing")
    assert {*tree(tmp_path)} == {"precious/thesis.tex"} and len(os.listdir(tmp_path)) == 1


def test_every_text_is_read_back_as_it_was(tmp_path):
    texts = ["plain", "a\0b", "\0", "\\0", "back\\slash\0", "ünï", "\x1b[31m", ""]
    described = {"long_name": "text of each token", "units": "1"}
    plain = [f"\\{text}" for text in "abcdefgh"]
    group = xr.Dataset(
        {"text": ("token", np.array(texts, object), described), "plain": ("token", plain)},
        {"span": ["needle", "odd\0name"]},
    )
    run = xr.DataTree.from_dict({"/": xr.Dataset(), "/group": group})
    ri.write_run(run, tmp_path / "run.nc")
    stored = ri.read_run(tmp_path / "run.nc")
    xr.testing.assert_identical(stored["group"].to_dataset(), group)
    assert run["group/text"].values.tolist() == texts
    with xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf") as raw:
        assert raw["group/text"].values.tolist()[:2] == ["plain", r"a\0b"]
        assert "escaped" in raw["group/text"].attrs and "escaped" not in raw["group/plain"].attrs


def test_a_file_never_replaces_a_directory(tmp_path):
    (tmp_path / "kept").mkdir()
    write_text(tmp_path / "kept" / "file", "here")
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "kept", "instead")
    assert tree(tmp_path) == {"kept/file": b"here"}


def test_what_a_killed_process_left_unfinished_goes_with_the_next_one(tmp_path):
    child = Forked(lambda: 0)
    child.wait()
    mine, dead, alive = (
        tmp_path / f".value.txt.{number}.unfinished"
        for number in (os.getpid(), child.pid, os.getppid())
    )
    for left in (mine, dead, alive):
        left.write_text("half")
    write_text(tmp_path / "value.txt", "whole")
    assert {*tmp_path.iterdir()} == {tmp_path / "value.txt", alive}
