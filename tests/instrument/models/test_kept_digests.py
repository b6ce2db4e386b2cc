"""Digests of large checkpoints are kept, and taken again when a file was written to."""

import hashlib
import os

import pytest

from repo_interp.checkpoint_files import checkpoint_digest as digests
from repo_interp.checkpoint_files.checkpoint_digest import checkpoint_digest
from repo_interp.storage.files import cache_directory


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A checkpoint that is just large enough in a new cache; its clock counts as settled at once."""
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED", 0)
    monkeypatch.setattr(digests, "KEPT", 1 << 16)
    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(bytes(digests.KEPT))
    return place


def expected(directory):
    files = (directory / "config.json", directory / "model.safetensors")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kept():
    return sorted((cache_directory() / "digests").glob("*"))


def test_a_digest_is_kept_and_read_and_no_damage_of_it_is_believed(directory):
    assert checkpoint_digest(directory) == expected(directory)
    (file,) = kept()
    file.write_text("a" * 64)  # only what is kept can give this
    assert checkpoint_digest(directory) == "a" * 64
    for damaged in (b"", b"\xff", b"g" * 64):
        file.write_bytes(damaged)
        assert checkpoint_digest(directory) == expected(directory)


def test_a_written_file_is_hashed_again_though_its_size_and_time_stay(directory):
    checkpoint_digest(directory)
    weights = directory / "model.safetensors"
    stated = weights.stat()
    with weights.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"1")
    os.utime(weights, ns=(stated.st_atime_ns, stated.st_mtime_ns))
    assert checkpoint_digest(directory) == expected(directory)
    assert len(kept()) == 2


def test_another_configuration_has_another_digest(directory):
    before = checkpoint_digest(directory)
    (directory / "config.json").write_text("[]")
    assert checkpoint_digest(directory) == expected(directory) != before


def test_nothing_is_kept_of_small_files_and_of_those_just_written(directory, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED", 10**15)
    assert checkpoint_digest(directory) == expected(directory)
    monkeypatch.setattr(digests, "SETTLED", 0)
    (directory / "model.safetensors").write_bytes(bytes(digests.KEPT - 1))
    assert checkpoint_digest(directory) == expected(directory)
    assert not kept()
