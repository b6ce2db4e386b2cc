"""What is kept of measurements: the same comes back, something else - other code among it - is
measured anew, and nothing half-written is left.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import xarray as xr
from trained_tiny import left_by_training

from position_papers.kit.cache import Cache
from position_papers.kit.scores import ScoreOptions
from position_papers.kit.subjects import subject
from repo_interp.storage.store import Store

DEPENDS = {"checkpoint": "abc", "seed": 0}


def measured(times: list[str]) -> xr.Dataset:
    """A measurement that says when it is made."""
    times.append("measured")
    return xr.Dataset(
        {
            "x": ("step", np.array([0.1, np.nan, 3]), {"units": "1"}),
            "yes": ("step", np.array([True, False, True])),
        },
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


def by_points(store: Store, stop_at: int) -> xr.Dataset:
    """A measurement of four points that is stopped at one of them."""

    def point(number: int) -> dict[str, float]:
        MADE.append(number)
        if number == stop_at:
            raise KeyboardInterrupt
        return {"value": number / 3}

    points = {str(number): partial(point, number) for number in range(4)}
    return xr.Dataset(
        {"x": ("point", [found["value"] for found in store.get_or_compute(points).values()])}
    )


def of_subject(own: object, options: ScoreOptions, times: list[str]) -> xr.Dataset:
    """A measurement of a checkpoint."""
    return measured(times)


MADE: list[int] = []


def test_an_interrupted_measurement_goes_on_from_its_finished_points(tmp_path):
    cache = Cache(tmp_path)
    for stop_at in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            cache.get(by_points, DEPENDS, cache.points(by_points, DEPENDS), stop_at)
    whole = cache.get(by_points, DEPENDS, cache.points(by_points, DEPENDS), -1)
    assert MADE == [0, 1, 2, 2, 3, 3]
    np.testing.assert_array_equal(whole["x"], np.arange(4) / 3)
    assert [file.suffix for file in tmp_path.iterdir() if file.name != ".gitignore"] == [".nc"]
    assert Cache().points(by_points, DEPENDS).get_or_compute({"a": lambda: {"value": 1.0}}) == {
        "a": {"value": 1.0}
    }


def test_the_same_is_measured_once_and_comes_back_as_it_was(tmp_path):
    """Whatever a reader changed in between."""
    times: list[str] = []
    cache = Cache(tmp_path)
    first = cache.get(measured, DEPENDS, times)
    xr.testing.assert_identical(first, measured([]))
    first["x"][0], first.attrs["kept"] = 7.0, "that"
    again = cache.get(measured, dict(reversed(DEPENDS.items())), times)
    assert len(times) == 1 and again["yes"].dtype == bool
    whole, kept = (Cache(tmp_path).get(groups, DEPENDS, times) for _ in range(2))
    assert len(times) == 3 and len(list(tmp_path.glob("*.nc"))) == 2
    for one in (again, whole["whole"].to_dataset(), kept["whole"].to_dataset()):
        xr.testing.assert_identical(one, measured([]))
    assert kept["shorter"].sizes["step"] == 2 and not kept.attrs


def test_something_else_is_measured_anew(tmp_path):
    times: list[str] = []
    Cache(tmp_path).get(measured, DEPENDS, times)
    for other in ({"seed": 1}, {"checkpoint": "abd"}, {"more": None}):
        Cache(tmp_path).get(measured, DEPENDS | other, times)
    Cache(tmp_path).get(another, DEPENDS, times)
    assert len(times) == 5


@pytest.mark.parametrize(
    ("function", "error"), [(interrupted, KeyboardInterrupt), (unwritable, TypeError)]
)
def test_what_is_interrupted_or_cannot_be_written_leaves_nothing_and_the_others_stay(
    tmp_path, function, error
):
    cache = Cache(tmp_path)
    cache.get(measured, DEPENDS, [])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error):
        cache.get(function, {"seed": 5})
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_without_a_directory_nothing_is_kept():
    times: list[str] = []
    cache = Cache()
    cache.get(measured, DEPENDS, times)
    cache.get(measured, DEPENDS, times)
    assert len(times) == 2


def test_a_checkpoint_at_another_path_is_not_measured_again_but_one_with_another_tokenizer_is(
    tmp_path,
):
    times: list[str] = []
    first, second = (
        left_by_training("language/rope", tmp_path / name) for name in ("first", "second")
    )
    for place in (first, second):
        subject("rope", place).measured(Cache(tmp_path / "kept"), of_subject, ScoreOptions(), times)
    assert times == ["measured"]
    tokenizer = second / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    subject("rope", second).measured(Cache(tmp_path / "kept"), of_subject, ScoreOptions(), times)
    assert times == ["measured", "measured"]
