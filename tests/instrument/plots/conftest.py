"""The runs that most tests draw; nobody changes them."""

from __future__ import annotations

import pytest
import xarray as xr
from run_fixture import small_run

import repo_interp as ri
from repo_interp.experiments import Atlas, Effects, Perturbation, Saliency
from repo_interp.measures.measure_catalogue import measure_names
from repo_interp.plugins.fake_distance.fake_distance import FakeDistance
from repo_interp.plugins.three_axis.three_axis import ThreeAxis


@pytest.fixture(scope="session")
def small() -> xr.DataTree:
    """The run of three prompts."""
    return small_run()


@pytest.fixture(scope="session")
def measured() -> xr.DataTree:
    """All measures but gates and segments, and experiments, on a small model of learned positions."""
    experiments = (
        *(Effects(draws=2), Saliency(steps=4), Atlas(twins=1, sequences=2)),
        *(Perturbation(gammas=(0.2,), l_maxes=(1, 5)), "kinds"),
    )
    asked = {"three_axis": ThreeAxis(axes="first_prompt")}
    asked["fake_distance"] = FakeDistance(axes="first_prompt")
    names = set(measure_names()) - {"gates", "segments"}
    measures = [asked.get(name, name) for name in sorted(names)]
    prompts = ri.tasks.make_task("reversal").prompts(2)
    return ri.analyze(ri.zoo("reversal/repo"), prompts, measures, experiments=experiments)
