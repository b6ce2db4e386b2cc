"""Files of others: HDF5 that leads elsewhere, goes in a circle or unpacks without end is refused in
one line, before any value of it is read; what netCDF needs is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.stored_statistics import BATCHES
from repo_interp.run import read_netcdf, write_netcdf
from repo_interp.storage.files import sealed
from repo_interp.storage.plain_hdf5 import ReadOnly
from repo_interp.storage.store import Damaged, Store

WORD = b"quetzalcoatlus"
Change = Callable[[h5py.File], object]


@pytest.fixture
def file(tmp_path) -> Path:
    """A run file beside a file of its reader."""
    (tmp_path / "diary.txt").write_bytes(WORD * 8)
    described = {"long_name": "of each token", "units": "1"}
    texts = np.array(["a", "b", "c"], object)
    group = xr.Dataset(
        {"text": ("token", texts, described), "size": ("token", np.ones(3), described)}
    )
    run = xr.DataTree.from_dict({"/": xr.Dataset(), "/group": group})
    ri.write_run(run, tmp_path / "run.nc")
    return tmp_path / "run.nc"


def change(file: Path, how: Change) -> None:
    """Change the HDF5 in `file`, and seal it again as its author would."""
    with h5py.File(file, "r+") as stored:
        how(stored)
    file.write_bytes(sealed(file.read_bytes()))


def test_an_object_of_a_file_that_is_read_is_opened_once(file):
    with ReadOnly(file.read_bytes()) as stored:
        size = stored["/group/size"]
        assert stored["/group/size"] is size and stored[size.ref] == size
        assert size.shape == (3,) and {*stored["/group"]} == {"text", "size", "token"}
        with pytest.raises(ValueError, match="no write intent"):
            stored.create_group("other")


def axis(array: h5py.Dataset) -> h5py.Dataset:
    """Make an array an axis, so that nothing else is wrong with it."""
    array.make_scale("own")
    return array


def array(stored: h5py.File, *shape: int, dtype="i1", **options) -> h5py.Dataset:
    return axis(stored.create_dataset("group/own", shape=shape, dtype=dtype, **options))


def filled(stored: h5py.File, content: bytes, size: int) -> None:
    """A packed array of one chunk of `size` bytes that is `content`."""
    own = array(stored, size, chunks=(size,), compression="gzip")
    own.id.write_direct_chunk((0,), content)


def virtual(stored: h5py.File, source: str) -> None:
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(source, "group/size", shape=(3,))
    axis(stored.create_virtual_dataset("group/own", layout))


def low_level(stored: h5py.File, size: int, *filters: tuple) -> None:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((size,))
    for one in filters:
        plan.set_filter(*one)
    space = h5py.h5s.create_simple((size,))
    h5py.h5d.create(stored["group"].id, b"own", h5py.h5t.STD_I8LE, space, plan)


def shared_text(stored: h5py.File) -> None:
    """Texts that are all one text of the file: 16 bytes each there, 100 kB in memory."""
    own = array(stored, 100_000, dtype=h5py.string_dtype(), chunks=(100_000,))
    own[0] = "x" * 100_000
    stored.flush()
    address = own.id.read_direct_chunk((0,))[1][:16]
    own.id.write_direct_chunk((0,), address * 100_000)


ELSEWHERE = "from other files"
REFUSED: dict[str, tuple[Change, str]] = {
    "external storage": (
        lambda to: array(to, 31, external=[(str(Path(to.filename).parent / "diary.txt"), 0, 31)]),
        ELSEWHERE,
    ),
    "virtual": (lambda to: virtual(to, str(Path(to.filename).parent / "other.nc")), ELSEWHERE),
    "virtual, of itself": (lambda to: virtual(to, "."), ELSEWHERE),
    "external link": (
        lambda to: to.__setitem__("group/own", h5py.ExternalLink("/of/reader.nc", "/group")),
        "/group/own is a link",
    ),
    "soft link": (lambda to: to.__setitem__("own", h5py.SoftLink("/group")), "/own is a link"),
    "circle": (lambda to: to.__setitem__("group/own", to["/"]), "in a circle"),
    "circle of one": (lambda to: to.__setitem__("group/own", to["group"]), "in a circle"),
    "second name": (lambda to: to.__setitem__("own", to["group/size"]), "wanted one name each"),
    "deep": (lambda to: to.create_group("/".join("a" * 400)), "more than 16 deep"),
    "many groups": (lambda to: [to.create_group(str(n)) for n in range(1001)], "than 1,000 groups"),
    "filter of a plug-in": (
        lambda to: low_level(to, 4, (40_000, h5py.h5z.FLAG_OPTIONAL, (1,))),
        "other means than zlib",
    ),
    "lzf": (lambda to: array(to, 4, chunks=(4,), compression="lzf"), "other means than zlib"),
    "zlib of zlib": (
        lambda to: low_level(to, 4, *2 * [(h5py.h5z.FILTER_DEFLATE, 0, (9,))]),
        "other means than zlib",
    ),
    "absent numbers": (lambda to: array(to, 1 << 40, chunks=(1 << 20,)), "more numbers than"),
    "chunk beyond its array": (
        lambda to: array(to, 1, maxshape=(None,), chunks=(1 << 30,)),
        "more numbers than",
    ),
    "chunk that unpacks to more": (
        lambda to: filled(to, zlib.compress(bytes(1 << 24)), 1 << 16),
        "does not unpack to its size",
    ),
    "chunk that is not packed": (lambda to: filled(to, b"x" * 99, 1 << 16), "not a run file"),
    "one text many times": (shared_text, "more texts than"),
    "text in absent cells": (
        lambda to: array(
            to, 1 << 20, dtype=h5py.string_dtype(), chunks=(1 << 10,), fillvalue="x" * 99_999
        ),
        "more texts than",
    ),
    "reference": (lambda to: array(to, 3, dtype=h5py.ref_dtype), "neither numbers nor texts"),
    "compound": (lambda to: array(to, 3, dtype=[("a", "i4")]), "neither numbers nor texts"),
    "lists": (lambda to: array(to, 3, dtype=h5py.vlen_dtype("i4")), "neither numbers nor texts"),
    "type": (lambda to: to.__setitem__("own", np.dtype("f8")), "neither a group nor an array"),
    "reference as attribute": (
        lambda to: to["group"].attrs.__setitem__("own", to["group/size"].ref),
        "the attribute own of /group holds neither",
    ),
    "no axes": (lambda to: to.create_dataset("own", data=np.ones(3)), "/own names no axes"),
    "no shape": (lambda to: to.create_dataset("own", data=h5py.Empty("f8")), "/own has no shape"),
    "time of no calendar": (
        lambda to: array(to, 3).attrs.__setitem__("units", "days since yesterday"),
        "unable to decode time units",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_holds_more_than_numbers_and_texts_is_refused(name, file):
    how, why = REFUSED[name]
    change(file, how)
    with refused(f"run.nc is not a run file: .*{why}" if why != "not a run file" else why):
        ri.read_run(file)


READ: dict[str, Change] = {
    "packed with a checksum": lambda to: axis(
        to.create_dataset(
            "group/own",
            data=np.arange(5000) % 7,
            chunks=(700,),
            compression="gzip",
            shuffle=True,
            fletcher32=True,
        )
    ),
    "texts in chunks": lambda to: array(to, 700, dtype=h5py.string_dtype(), chunks=(100,)),
    "empty text": lambda to: to["group"].attrs.__setitem__("own", h5py.Empty("S1")),
    "number without axes": lambda to: to.create_dataset("group/own", data=2.0),
}


@pytest.mark.parametrize("name", READ)
def test_what_other_writers_of_netcdf_do_is_read(name, file):
    change(file, READ[name])
    group = ri.read_run(file)["group"]
    assert group["text"].values.tolist() == ["a", "b", "c"]
    if name == "packed with a checksum":
        assert group["own"].values.tolist() == (np.arange(5000) % 7).tolist()


def test_more_than_half_of_the_memory_is_not_unpacked(file, monkeypatch):
    array_of_zeros = zlib.compress(bytes(1 << 20), 9)
    change(file, lambda to: filled(to, array_of_zeros, 1 << 20))
    assert ri.read_run(file)["group/own"].size == 1 << 20
    monkeypatch.setattr("repo_interp.storage.plain_hdf5.machine_memory", lambda: 8.0 * (1 << 20))
    with refused("half of this machine's memory"):
        ri.read_run(file)


def test_kept_statistics_that_are_something_else_are_measured_again(file, tmp_path):
    """A file of another kind, and one that reads a file of the reader's."""
    for number, how in enumerate((lambda to: None, REFUSED["external storage"][0])):
        change(file, how)
        file.rename(tmp_path / f"{number}.nc")
        with pytest.warns(Damaged):
            found = Store(tmp_path).get_or_compute({str(number): dict}, form=BATCHES)
        assert found == {str(number): {}}
        write_netcdf(xr.Dataset(), file)


def test_a_variable_of_its_groups_name_is_in_memory_too(tmp_path):
    """`DataTree.load` forgot it, so that a run whose file was gone could not be drawn."""
    file = tmp_path / "run.nc"
    group = xr.Dataset({"saliency": ("token", np.arange(3.0)), "sign": ("token", np.ones(3))})
    write_netcdf(xr.DataTree.from_dict({"saliency": group}), file)
    read = read_netcdf(file)
    file.unlink()
    assert read["saliency"].to_dataset().identical(group)
