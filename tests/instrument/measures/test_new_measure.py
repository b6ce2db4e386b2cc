"""A measure of ours is one file and one line of `entry_points.OWN`: a measure with everything that one can declare, through the command."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr

import repo_interp as ri
from repo_interp import entry_points
from repo_interp.cli import main
from repo_interp.measures.catalogue import measure_named, measure_names
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.statistics import Measure, Needs, Statistics, as_measure, merge, of_training_length


@dataclass(frozen=True)
class Walk(Measure):
    """The file: the longest step of a head's positions, in training lengths, where a line begins; positions of the first prompt."""

    training_length: int | None = None
    kinds: tuple[str, ...] = ("lines",)
    name: str = "walk"

    @property
    def needs(self):
        return Needs(spans=("generated",), segments=self.kinds)

    def observe(self, inputs, spans):
        assert inputs.head_positions is not None and self.training_length
        steps = inputs.head_positions.double().diff(dim=-1).abs()
        begins = torch.stack([spans[f"segments.{kind}.starts"][:, 1:] for kind in self.kinds], 1)
        longest = (steps[:, :, None] * begins[:, None]).amax(-1) / self.training_length
        labelled = of_layer(inputs, ("prompt", "layer", "head", "kind"), longest, kind=list(self.kinds))
        row, first = inputs.row_of_first_prompt, xr.Dataset()
        if row is not None:
            first["first"] = of_layer(inputs, ("layer", "head", "token"), inputs.head_positions[row])
        return Statistics(per_prompt=xr.Dataset({"longest": labelled}), first_prompt=first)

    def conclude(self, statistics):
        longest, first = statistics.per_prompt["longest"], statistics.first_prompt["first"]
        return xr.Dataset(
            {
                "longest": described(longest, "longest step at the beginning of a segment", "training lengths"),
                "first": described(first, "position of each token of the first prompt", "positions"),
            }
        )


@pytest.fixture
def walk(monkeypatch):
    """The line."""
    monkeypatch.setitem(entry_points.OWN[entry_points.MEASURES], "walk", f"{__name__}:Walk")


def test_it_is_known_by_name_and_its_fields_are_its_parameters(walk):
    assert "walk" in measure_names()
    measure = measure_named("walk")
    assert measure.parameters == {"training_length": "not given", "kinds": ("lines",)}
    assert of_training_length(measure, 64).parameters["training_length"] == 64


@pytest.mark.usefixtures("no_figures")
def test_the_command_measures_it_like_any_other(walk, tmp_path):
    options = ["--count", "3", "--batch-size", "2", "--set", "walk.kinds=lines,sentences"]
    assert main(["analyze", "niah/rope", "--measures", "positions,walk", *options, "--out", str(tmp_path / "run")]) == 0
    run = ri.read_run(tmp_path / "run")
    walked, positions = run["walk"].to_dataset(), run["positions"]["position"]
    assert walked.attrs["kinds"] == ["lines", "sentences"] and walked.attrs["training_length"] == run.attrs["training_length"]
    assert walked["longest"].dims == ("prompt", "layer", "head", "kind") and "scheme" in walked.coords
    np.testing.assert_array_equal(walked["first"], positions.sel(prompt=0))
    assert set(np.unique(walked["longest"] * run.attrs["training_length"])) <= {0, 1}  # a step of the token index


def test_the_first_prompt_is_merged_from_the_one_batch_that_holds_it():
    empty, own = Statistics(), Statistics(first_prompt=xr.Dataset({"first": ("layer", [2.0])}, {"layer": [0]}))
    assert merge([empty, own, empty]).first_prompt["first"].values.tolist() == [2.0]
    with pytest.raises(ValueError, match="observed twice"):
        merge([own, own])


def test_an_object_with_the_parts_alone_needs_nothing_more():
    class Parts:
        name, required_spans, parameters = "parts", ["needle"], {"width": 2}

        def observe(self, inputs, spans):
            return Statistics(sums=xr.Dataset({"s": ("layer", [1.0])}, {"layer": [0]}))

        def conclude(self, statistics):
            return statistics.sums

    measure = as_measure(Parts())
    assert (measure.name, measure.needs, measure.parameters) == ("parts", Needs(spans=("needle",)), {"width": 2})
    assert of_training_length(measure, 8) is measure and as_measure(measure) is measure
    assert measure.conclude(measure.observe(None, {}))["s"].values.tolist() == [1.0]  # pyright: ignore[reportArgumentType]
