"""NaN and infinity are named where they first stand, stop the measure that meets them alone, and
are marked in the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import xarray as xr
from families import tiny
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.memory_needed import require_memory
from repo_interp.analysis.notes import RoundedPositions, SilentMeasure, notes_on
from repo_interp.errors import NotFinite
from repo_interp.experiments.responses import forced_responses, generated_responses
from repo_interp.measures.labels import of_layer, with_attrs
from repo_interp.measures.statistics import Statistics
from repo_interp.models.decoder import as_decoder
from repo_interp.models.rescaling import IdleScaling
from repo_interp.plots.pages.report import write_report
from repo_interp.tasks.prompt import Prompt

PROMPTS = [
    Prompt(tokens=tuple(range(2, 30)), generated=(26, 27)),
    Prompt(tokens=tuple(range(5, 20)), generated=(14,)),
]


@pytest.fixture
def model():
    return ri.reposition(tiny("llama"), "rope,repo,repo")


@dataclass(frozen=True)
class Spoiled:
    """A measure of another package that gives `value` for one head of layer 1."""

    value: float
    part: str
    name: str = "spoiled"
    required_spans: tuple[str, ...] = ()
    parameters: ClassVar = {}

    def observe(self, inputs, spans):
        values = np.ones((len(inputs.prompts), inputs.heads))
        if inputs.layer == 1:
            values[0, 2] = self.value
        dims = ("prompt", "layer", "head")
        if self.part == "sums":
            dims, values = dims[1:], values.sum(0)
        return Statistics(**{self.part: xr.Dataset({"x": of_layer(inputs, dims, values)})})

    def conclude(self, statistics):
        return xr.Dataset({"x": with_attrs(getattr(statistics, self.part)["x"], "x", "1")})


def spoil(model, layer, head, token, value, prompt_length):
    """Put `value` into a query of one head, in passes of `prompt_length` tokens."""
    attention = as_decoder(model).layers[layer]

    def hook(module, given, queries):
        if queries.shape[1] == prompt_length:
            queries = queries.clone()
            queries[0, token, head * attention.d_head] = value
        return queries

    return attention.module.q_proj.register_forward_hook(hook)


def test_a_query_that_is_not_finite_stops_the_measures_that_read_queries(
    model, no_figures, tmp_path
):
    # One by one: `spoil` knows a prompt by the length of its pass
    whole = ri.analyze(model, PROMPTS, ("positions", "patterns"), batch_size=1)
    spoil(model, 2, 1, 5, float("-inf"), len(PROMPTS[1].tokens))
    measures = ("positions", "patterns", "components", "attention_mass")
    run = ri.analyze(model, PROMPTS, measures, batch_size=1)
    for name in run.children:
        xr.testing.assert_identical(run[name].to_dataset(), whole[name].to_dataset())
    assert set(run.children) == {"positions", "patterns"}
    where = "queries of layer 2, head 1 in prompt 1 are NaN or infinite"
    assert run.attrs["stopped"] == f"components: {where}\nattention_mass: {where}"
    ri.write_run(run, tmp_path / "run.nc")
    assert ri.read_run(tmp_path / "run.nc").attrs["stopped"] == run.attrs["stopped"]
    assert write_report(run, tmp_path / "report.html", tmp_path / "figures") == []
    assert f"not measured: components: {where}" in (tmp_path / "report.html").read_text()


def test_where_everything_stops_there_is_no_run_and_the_first_measure_is_named(model):
    spoil(model, 0, 3, 0, float("nan"), len(PROMPTS[0].tokens))
    line = "^components stopped, as 1 more: queries of layer 0, head 3 in prompt 0 are NaN"
    with pytest.raises(NotFinite, match=line):
        ri.analyze(model, PROMPTS, ("components", "three_axis"))


def test_heads_that_nobody_asked_for_stop_nothing(model):
    spoil(model, 2, 1, 5, float("nan"), len(PROMPTS[0].tokens))
    assert "stopped" not in ri.analyze(model, PROMPTS[:1], ("components",), heads=(0, 3)).attrs


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("value", "part"), [(float("nan"), "per_prompt"), (float("inf"), "sums")])
def test_a_measure_that_gives_such_numbers_stops_alone(model, value, part, batch_size):
    """Found: NaN of a whole prompt passed for padding where another prompt of its batch had some."""
    run = ri.analyze(model, PROMPTS, (Spoiled(value, part), "positions"), batch_size=batch_size)
    in_prompt = " in prompt 0" if part == "per_prompt" else ""
    assert set(run.children) == {"positions"}
    assert run.attrs["stopped"] == f"spoiled: x of layer 1, head 2{in_prompt} is NaN or infinite"


def test_numbers_too_large_for_logits_are_refused(model):
    attention = as_decoder(model).layers[2].module
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.data *= 1e12
    with pytest.raises(NotFinite, match="queries and keys of layer 2 are too large"):
        ri.analyze(model, PROMPTS, ("components",))


def test_a_pass_that_ends_in_such_numbers_is_noted_and_its_answers_are_refused(model):
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("inf")
    run = ri.analyze(model, PROMPTS, ("positions", "predictions"))
    assert set(run.children) == {"positions"}
    assert run.attrs["notes"] == "the pass of prompt 0 ended in NaN or infinity"
    assert run.attrs["stopped"] == f"predictions: {run.attrs['notes']}"
    scoring = ri.tasks.make_task("reversal")
    for respond in (forced_responses, generated_responses):
        with pytest.raises(NotFinite, match=r"predictions for prompt [01] are NaN or infinite"):
            respond(model, scoring, PROMPTS)


def test_a_prompt_is_called_by_its_own_number_whatever_batch_it_is_in(model):
    """Found: its place within the batch was named; the experiment puts both side by side, the
    shorter one first.
    """
    spoil(model, 2, 1, 13, float("nan"), len(PROMPTS[0].tokens))
    run = ri.analyze(model, PROMPTS, ("positions",), experiments=("perturbation",))
    assert "predictions for prompt 1 are NaN or infinite" in run.attrs["stopped"]


def test_rounded_positions_are_warned_about_and_noted(model):
    with pytest.warns(RoundedPositions, match="positions are rounded in bfloat16") as warned:
        run = ri.analyze(model.bfloat16(), PROMPTS, ("positions",))
    assert len(warned) == 1 and "(positions_dtype)" in run.attrs["notes"]
    # those of the index are not
    assert notes_on(as_decoder(ri.reposition(tiny("llama"), "rope").bfloat16())) == ()


def test_prompts_beyond_training_and_measures_that_say_nothing_are_noted(model):
    long = Prompt(tokens=tuple(range(2, 32)) * 5)
    with pytest.warns(SilentMeasure, match="gates gives nothing here") as warned:
        run = ri.analyze(model, [PROMPTS[0], PROMPTS[0], long], ("gates",))
    long, repeated, silent = run.attrs["notes"].splitlines()
    assert repeated.startswith("1 of 3 prompts repeat others")
    assert long.startswith("1 of 3 prompts are longer (up to 150 tokens) than the training length")
    assert silent == str(warned[0].message) and len(warned) == 1
    assert silent.startswith("gates gives nothing here: layers 0-2 (rope, repo) count no tokens")
    counting = ri.reposition(tiny("llama"), "cope")
    assert "notes" not in ri.analyze(counting, PROMPTS, ("gates",)).attrs


def test_a_scaling_that_changes_nothing_is_noted_in_the_scores(monkeypatch):
    scaling = {"rope_type": "linear", "factor": 2.0}
    with pytest.warns(IdleScaling, match=r"scaling \(linear 2.0\) changes nothing: no layer of"):
        nope = ri.load("reversal/nope", rope_scaling=scaling)
    still, turning = (
        ri.score(bridge, test_sets=("3",), count=1).attrs
        for bridge in (nope, ri.load("reversal/rope", rope_scaling=scaling))
    )
    assert "scaling (linear 2.0) changes nothing" in still["notes"] and "notes" not in turning
    assert "scaling" not in still and turning["scaling"] == "linear 2.0"


def test_what_no_machine_holds_is_refused_before_it_is_tried():
    with refused(r"^a run would need about 953,674,316 GiB of memory, and there are [\d,]+"):
        require_memory(1.024e18, "a run")
    require_memory(1.0, "a run")
