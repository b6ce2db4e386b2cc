"""Measures of others: what they may be, and what they may not change or take the name of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import xarray as xr
from families import TOKENS, repositioned
from refusals import refused

import repo_interp as ri
from repo_interp.experiments import Experiment, Plan
from repo_interp.measures.border import as_measure
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.logit_sums import LogitSums, logit_sums
from repo_interp.measures.labels import of_layer, with_attrs
from repo_interp.measures.measure_catalogue import measure_named
from repo_interp.measures.statistics import Measure, Needs, Statistics, merge, of_training_length
from repo_interp.tasks import Prompt


def test_fields_are_parameters_and_the_training_length_is_filled_in():
    measure = measure_named("rotation")
    assert measure.parameters["training_length"] == "not given"
    assert of_training_length(measure, 64).parameters["training_length"] == 64
    assert of_training_length(replace(measure, training_length=8), 64).training_length == 8


def test_the_first_prompt_is_merged_from_the_one_batch_that_holds_it():
    first = xr.Dataset({"first": ("layer", [2.0])}, {"layer": [0]})
    empty, own = Statistics(), Statistics(first_prompt=first)
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
    assert measure.name == "parts" and measure.parameters == {"width": 2}
    assert measure.needs == Needs(spans=("needle",))
    assert of_training_length(measure, 8) is measure and as_measure(measure) is measure
    assert measure.conclude(measure.observe(None, {}))["s"].values.tolist() == [1.0]  # pyright: ignore[reportArgumentType]


class Foreign(Measure):
    """Another package's, which does `act` when it observes a layer, or where it asks for
    reductions.
    """

    def __init__(
        self,
        act=lambda inputs, spans: None,
        name="foreign",
        variable="square",
        ask=lambda inputs: (),
    ):
        self.act, self.name, self.variable, self.ask = act, name, variable, ask

    @property
    def parameters(self):
        return {}

    def reductions(self, inputs, spans):
        return self.ask(inputs)

    def observe(self, inputs, spans):
        self.act(inputs, spans)
        squares = inputs.queries.square().sum((-1, -2))
        labelled = of_layer(inputs, ("prompt", "layer", "head"), squares)
        return Statistics(per_prompt=xr.Dataset({"square": labelled}))

    def conclude(self, statistics):
        squares = with_attrs(statistics.per_prompt["square"], "square", "1")
        return xr.Dataset({self.variable: squares})


def in_place(name):
    return lambda inputs, spans: getattr(inputs, name).zero_()


CHANGES = {
    **{
        name: (in_place(name), name)
        for name in ("queries", "keys", "positions", "frequencies", "valid", "tokens", "prompts")
    },
    "a view": (lambda inputs, spans: inputs.queries[:, 0].add_(1), "queries"),
    "a span": (lambda inputs, spans: spans["words"].zero_(), "words"),
}
"""What a measure does in place, and the name of what it changes."""


@pytest.mark.parametrize("case", CHANGES)
def test_a_measure_that_changes_what_others_see_is_refused_and_the_model_stays_as_it_was(case):
    """Found: positions of the next layer moved by 2.3, and the run said nothing."""
    act, name = CHANGES[case]
    model = repositioned("repo")
    prompts = [Prompt(tokens=tuple(row), spans={"words": (3, 4)}) for row in TOKENS.tolist()]
    with torch.no_grad():
        before = model(TOKENS).logits
    with refused(rf"^the measure 'foreign' changes {name} in place"):
        ri.analyze(model, prompts, ["patterns", Foreign(act), "positions"])
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, before)


def test_what_torch_does_not_count_is_changed_for_that_measure_alone():
    model = repositioned("repo")

    def act(inputs, spans):
        # of the inputs, for whoever asks again
        for made in (inputs.rotated_queries, logit_sums(inputs).square):
            made.zero_()
        for seen in (inputs.queries, inputs.keys, inputs.positions, inputs.frequencies):
            seen.numpy()[...] = 0

    with torch.no_grad():
        before = model(TOKENS).logits
    alone, beside = (
        ri.analyze(model, TOKENS, [*others, "three_axis", "positions"])
        for others in ([], [Foreign(act)])
    )
    for name in ("three_axis", "positions"):
        xr.testing.assert_identical(alone[name].to_dataset(), beside[name].to_dataset())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, before)


class Greedy(LogitSums):
    """A reduction that changes the heads that all reductions are given."""

    def add(self, result, inputs, block):
        block.queries.zero_()


def test_reductions_and_inference_mode_are_no_way_around():
    for foreign, said in (
        (Foreign(ask=lambda inputs: inputs.queries.zero_()), "'foreign' changes queries in place"),
        (Foreign(ask=lambda inputs: [Greedy()]), r"Greedy'> changes heads in place"),
        (Foreign(in_place("queries")), "'foreign' changes queries in place"),
    ):
        with torch.inference_mode(), refused(said):
            ri.analyze(repositioned("rope"), TOKENS, [foreign, "three_axis"])


OF_A_GROUP = ("checkpoint", "positions", "effects", "scores")
"""Names that a variable may have, and no group."""


@pytest.mark.parametrize("name", ["", ".", "a/b", 3, "run", *OF_A_GROUP])
def test_names_that_a_run_keeps_or_cannot_hold_are_refused(name):
    """Found: results of that name vanished from the run, stood in the place of others, or no
    comparison could be made.
    """
    model = repositioned("rope")
    with refused("which a run keeps for something else or cannot hold"):
        ri.analyze(model, TOKENS, [Foreign(name=name)])
    if name not in OF_A_GROUP:
        with refused(r"a variable of the measure 'foreign' has the name .*, which a run keeps"):
            ri.analyze(model, TOKENS, [Foreign(variable=name)])


def test_an_experiment_cannot_put_a_group_in_the_place_of_a_measures():
    @dataclass(frozen=True)
    class Taking(Experiment):
        name = "taking"

        def plan(self, *given):
            described = {"long_name": "x", "units": "1"}
            group = xr.Dataset({"x": ("layer", [1.0], described)}, {"layer": [0]})
            return Plan(self, (4,), lambda *how: {"positions": group})

    with refused("a group of the experiment 'taking' has the name 'positions', which a run keeps"):
        ri.analyze(repositioned("rope"), TOKENS, ["positions"], experiments=[Taking()])
    with refused("the experiment 'taking' has the name 'taking', which a run keeps"):
        ri.analyze(repositioned("rope"), TOKENS, [Foreign(name="taking")], experiments=[Taking()])


class OfRope(Foreign, needs=Needs(schemes=("rope",))):
    """Another package's, about layers that rotate by the token index."""


def test_layers_of_other_schemes_are_skipped_and_the_run_says_so():
    """Found: `Needs.schemes` selected nothing."""
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0)).tolist()
    model = repositioned("nope,rope,rope")
    run = ri.analyze(model, tokens, [OfRope(), "octaves"], experiments=())
    assert run["foreign"]["layer"].values.tolist() == [1, 2]
    assert run["octaves"]["layer"].values.tolist() == [0, 1, 2]
    skipped = "nothing in layers 0 (nope), which are not of rope"
    assert f"foreign gives {skipped}" in run.attrs["notes"]
    assert run["foreign"].attrs["left_out"] == skipped
    everywhere = ri.analyze(model, tokens, [Foreign()], experiments=())
    xr.testing.assert_equal(
        run["foreign"]["square"], everywhere["foreign"]["square"].sel(layer=[1, 2])
    )
    with refused("are not of rope, which it is about; leave the measure out"):
        ri.analyze(model, tokens, [OfRope()], layers=[0], experiments=())


class OfLayerOne(Foreign, needs=Needs(heads={1: None}, layer=True)):
    """Another package's, about layer 1 alone, of which it says nothing where that has no rotation."""

    def gap(self, inputs):
        return None if inputs.frequencies is not None else Gap("do not rotate")


def test_layers_that_a_measure_does_not_name_count_for_nothing():
    """Found: with one named layer, and nothing to say of it, the measure was not refused."""
    with refused("foreign gives nothing here: layers 1 .nope. do not rotate; leave the measure"):
        ri.analyze(repositioned("rope,nope,rope"), TOKENS, [OfLayerOne()], experiments=())
    run = ri.analyze(repositioned("nope,rope,nope"), TOKENS, [OfLayerOne()], experiments=())
    assert "left_out" not in run["foreign"].attrs
