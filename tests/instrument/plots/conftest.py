"""The small run that most tests draw."""

from __future__ import annotations

import pytest
import xarray as xr
from run_fixture import small_run


@pytest.fixture(scope="session")
def small() -> xr.DataTree:
    """The run of three prompts; nobody changes it."""
    return small_run()
