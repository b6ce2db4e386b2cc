"""The small run that most tests draw, and pages without pictures: rendering costs most of a page, and two tests check it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import xarray as xr
from drawn import without_pictures
from run_fixture import small_run


@pytest.fixture(scope="session")
def small() -> xr.DataTree:
    """The run of three prompts; nobody changes it."""
    return small_run()


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """Figures are drawn and not rendered: their files and pictures are empty."""
    with without_pictures():
        yield
