"""What is kept of measurements: the same comes back, something else is measured anew, and nothing half-written is left."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from repo_interp.papers.kit import cache as module
from repo_interp.papers.kit.cache import Cache, sources_digest
from repo_interp.papers.kit.durations import Duration, Durations, in_words

DEPENDS = {"checkpoint": "abc", "seed": 0}


class Counted:
    """A measurement that counts how often it was made."""

    def __init__(self):
        self.times = 0

    def __call__(self) -> xr.Dataset:
        self.times += 1
        return xr.Dataset(
            {"x": ("step", np.array([0.1, np.nan, 3]), {"units": "1"}), "yes": ("step", np.array([True, False, True]))},
            coords={"step": [1, 2, 3], "scheme": ("step", ["rope", "repo", "rope"])},
            attrs={"kept": "this"},
        )


def test_the_same_is_measured_once_and_comes_back_as_it_was(tmp_path):
    measure = Counted()
    first = Cache(tmp_path).dataset("lots", DEPENDS, measure)
    again = Cache(tmp_path).dataset("lots", dict(reversed(DEPENDS.items())), measure)
    assert measure.times == 1
    xr.testing.assert_identical(first, again)
    xr.testing.assert_identical(first, measure())
    assert first["yes"].dtype == bool


@pytest.mark.parametrize("other", [{"seed": 1}, {"checkpoint": "abd"}, {"more": None}])
def test_something_else_is_measured_anew(tmp_path, other):
    measure = Counted()
    Cache(tmp_path).dataset("lots", DEPENDS, measure)
    Cache(tmp_path).dataset("lots", DEPENDS | other, measure)
    Cache(tmp_path).dataset("few", DEPENDS, measure)
    assert measure.times == 3


def test_another_line_of_code_is_another_key_but_a_drawing_is_none(tmp_path, monkeypatch):
    package = tmp_path / "package"
    for name in ("measures/a.py", "plots/b.py", "cli/c.py"):
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("1")
    monkeypatch.setattr(module, "_PACKAGE", package)

    def digests():
        module._sources_digest.cache_clear()
        return sources_digest(("cli", "plots")), sources_digest()

    try:
        computing, everything = digests()
        (package / "plots/b.py").write_text("2")
        assert digests()[0] == computing
        assert digests()[1] != everything
        (package / "measures/a.py").write_text("2")
        assert digests()[0] != computing
    finally:
        module._sources_digest.cache_clear()


def test_an_interrupted_measurement_leaves_nothing_and_the_others_stay(tmp_path):
    def interrupted() -> xr.Dataset:
        raise KeyboardInterrupt

    measure, cache = Counted(), Cache(tmp_path)
    cache.dataset("lots", DEPENDS, measure)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        cache.dataset("lots", {"seed": 5}, interrupted)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        Cache(tmp_path).dataset("odd", {}, lambda: xr.Dataset(attrs={"odd": object()}))
    assert [file.name for file in tmp_path.iterdir()] == [".gitignore"]


def test_without_a_directory_nothing_is_kept():
    measure, cache = Counted(), Cache()
    cache.dataset("lots", DEPENDS, measure)
    cache.dataset("lots", DEPENDS, measure)
    assert measure.times == 2


def test_a_cache_knows_what_its_measurements_took_then(tmp_path):
    first, second = Cache(tmp_path), Cache(tmp_path)
    first.dataset("lots", DEPENDS, Counted())
    second.dataset("lots", DEPENDS, Counted())
    assert first.seconds == second.seconds > 0


def test_durations_are_remembered_and_a_finished_one_goes_first(tmp_path):
    durations = Durations(tmp_path / "kept")
    assert durations.get("hope") is None
    durations.put("hope", Duration(5, False))
    assert Durations(tmp_path / "kept").get("hope") == Duration(5, False)
    durations.put("hope", Duration(9, True))
    durations.put("hope", Duration(2, False))
    assert durations.get("hope") == Duration(9, True)
    (tmp_path / "kept" / "durations.json").write_text("{")
    assert durations.get("hope") is None
    assert [in_words(seconds) for seconds in (0.2, 45, 600, 9000)] == ["1 s", "45 s", "10 min", "2.5 h"]
