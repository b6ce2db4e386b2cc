"""Frequencies and factors of rotation that a scheme learns are parameters of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from families import TOKENS
from own_schemes import model_of, parts, register_all
from refusals import refused
from torch import nn
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.models.decoder import as_decoder
from repo_interp.positions.assigners import TokenIndex

LEARNED = {"learned_frequencies": "frequencies", "learned_scaling": "attention_scaling"}
either = pytest.mark.parametrize("scheme", LEARNED)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register_all(monkeypatch)


def numbers(model):
    return [weight for name, weight in model.named_parameters() if "rotation_parameters" in name]


@torch.no_grad()
def logits(model, tokens=TOKENS, **more):
    return model(tokens, **more).logits


def trained(model, steps=2):
    """Train the numbers of the rotation alone."""
    optimizer = torch.optim.SGD(numbers(model), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    return model


@either
def test_they_are_trained_and_every_pass_turns_by_them(scheme):
    """Found: accepted, never trained, never saved."""
    model = model_of(scheme)
    name = f"model.layers.0.self_attn.rotation_parameters.{LEARNED[scheme]}"
    assert name in model.state_dict() and ri.added_parameters(model) == 3 * 4
    before = logits(model)
    assert torch.equal(before, logits(model_of("rope")))
    after = logits(trained(model))
    assert not torch.allclose(before, after)
    # tokens one by one turn by the numbers of now, those in the cache too
    step = model(TOKENS[:, :12], use_cache=True)
    steps = [step.logits]
    for token in TOKENS[:, 12:, None].unbind(1):
        step = model(token, past_key_values=step.past_key_values, use_cache=True)
        steps.append(step.logits)
    assert_close(torch.cat(steps, 1), after, atol=2e-4, rtol=0)


@either
def test_the_gradient_is_that_of_the_outputs(scheme):
    model = model_of(scheme).double()
    (first, *_) = numbers(model)

    def output():
        return model(TOKENS).logits.log_softmax(-1)[..., 3].sum()

    output().backward()
    assert first.grad is not None
    with torch.no_grad():
        first[1] += 1e-3
        above = output()
        first[1] -= 2e-3
        slope = (above - output()) / 2e-3
    assert_close(first.grad[1], slope, rtol=1e-2, atol=1e-5)


@either
def test_they_are_saved_loaded_copied_and_exact_in_half_precision(scheme, tmp_path):
    model = trained(model_of(scheme))
    after = logits(model)
    ri.save(model, tmp_path / "saved")
    assert torch.equal(logits(ri.open_model(tmp_path / "saved")), after)
    half = ri.open_model(tmp_path / "saved", dtype="bfloat16")
    assert_close(numbers(half), numbers(model), atol=0, rtol=0)
    other, twin = model_of(scheme, 1), copy.deepcopy(model)
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(logits(other), after)
    numbers(twin)[0].data *= 2
    assert not torch.allclose(logits(twin), after) and torch.equal(logits(model), after)
    assert not numbers(ri.reposition(model, "rope"))


def test_one_parameter_of_all_layers_is_shared_and_saved_once(tmp_path):
    of_builder = {}
    ri.register_scheme(
        "shared",
        lambda builder, rotation, d_head: parts(
            TokenIndex(),
            of_builder.setdefault(id(builder), nn.Parameter(rotation.frequencies.clone())),
        ),
    )
    model = trained(model_of("shared"))
    assert len(numbers(model)) == 1
    ri.save(model, tmp_path / "saved")
    assert torch.equal(logits(ri.open_model(tmp_path / "saved")), logits(model))


@either
def test_the_audit_of_schemes_sees_them(scheme, monkeypatch):
    assert ri.verify_scheme(scheme).attrs["findings"] == ""
    ri.register_scheme(
        "idle", lambda b, r, d: parts(TokenIndex(), None, nn.Parameter(torch.ones(d // 2)))
    )
    found = ri.verify_scheme("idle").attrs["findings"]
    assert "does not reach" in found and "rotation_parameters.attention_scaling" in found


def test_measures_and_interventions_read_the_numbers_of_now():
    model = trained(model_of("learned_frequencies"))
    numbers(model)[0].data[2] *= -1  # training may turn a pair backwards
    prompts = TOKENS.tolist()
    names = ("components", "three_axis", "fake_distance", "rotation", "stability")
    run = ri.analyze(model, prompts, names)
    with torch.no_grad():
        numbers(model)[0][2] *= -1
    backwards, forwards = run["components"], ri.analyze(model, prompts, names)["components"]
    for name in ("activated", "low_frequency", "turn_mean", "still_share"):
        assert_close(backwards[name].values, forwards[name].values, equal_nan=True)
    for change in (
        {"linear": 2.0},
        {"yarn": 2.0},
        {"ntk": 2.0},
        {"head": 1, "layer": 0, "linear": 2.0},
    ):
        before = logits(model)
        with ri.interventions.rescaled(model, **change):
            inside = logits(model)
        assert not torch.allclose(inside, before) and torch.equal(logits(model), before)


def test_frequencies_other_than_the_decoders_keep_at_every_length(monkeypatch):
    """Found: all of them became the first one where the decoder's follow the length of a pass."""
    ri.register_scheme("halved", lambda b, r, d: parts(TokenIndex(), r.frequencies / 2))
    for layout, ends in (("halved", False), ("learned_frequencies", False), ("turned", True)):
        model = model_of("rope")
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        config.max_position_embeddings = 8
        dynamic = ri.reposition(type(model)(config).eval(), layout)
        layer = as_decoder(dynamic).layers[0]
        before = layer.frequencies.clone()
        logits(dynamic)
        assert layer.follows_length == ends
        assert torch.equal(layer.frequencies, before) != ends


@pytest.mark.parametrize(
    ("line", "frequencies", "scaling"),
    [
        (
            "frequencies that follow from a parameter",
            lambda r: nn.Parameter(r.frequencies).exp(),
            1.0,
        ),
        ("complex frequencies", lambda r: 1j * r.frequencies, 1.0),
        (r"frequencies \[3\]; wanted 4, one for", lambda r: torch.ones(3), 1.0),
        ("list as frequencies", lambda r: [1.0, 0.5, 0.2, 0.1], 1.0),
        (
            r"attention_scaling \[3\]; wanted one number, or 4",
            lambda r: r.frequencies,
            torch.ones(3),
        ),
        ("complex attention_scaling", lambda r: r.frequencies, torch.ones(4) * 1j),
        ("str as attention_scaling", lambda r: r.frequencies, "2"),
    ],
)
def test_numbers_that_no_layer_could_turn_by_are_refused(line, frequencies, scaling):
    ri.register_scheme("mine", lambda b, r, d: parts(TokenIndex(), frequencies(r), scaling))
    with refused(line):
        model_of("mine")
