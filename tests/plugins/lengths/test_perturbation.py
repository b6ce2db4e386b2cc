"""Perturbing order and positions: exact where nothing moves, equal to doing it by hand, gone
afterwards.
"""

from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from families import TOKENS, model_for, repositioned, tiny
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.experiments.responses import forced_responses
from repo_interp.interventions import exchanged_keys, moved_keys
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.lengths import perturbation
from repo_interp.plugins.lengths.disturbance import (
    KINDS,
    Disturbance,
    disturbed,
    offset,
    transposed,
)
from repo_interp.plugins.lengths.perturbation import Perturbation
from repo_interp.tasks import make_task

TASK = make_task("reversal", longest=6)


@torch.no_grad()
def logits_under(model, context):
    with context:
        return model(TOKENS).logits


@pytest.mark.parametrize("scheme", ["rope", "repo head", "repo_alibi", "alibi", "learned"])
def test_keys_that_stay_change_nothing_and_moved_ones_the_logits_from_there_on(scheme):
    model, layers = repositioned(scheme), range(3)
    plain, moves = logits_under(model, torch.no_grad()), torch.zeros_like(TOKENS)
    shifts = {layer: lambda positions: moves[:, None].to(positions) for layer in layers}
    same = torch.arange(20).expand(2, -1)
    assert_close(logits_under(model, moved_keys(model, shifts)), plain)
    assert_close(logits_under(model, exchanged_keys(model, dict.fromkeys(layers, same))), plain)
    moves[:, 4:9] = 3
    changed = logits_under(model, moved_keys(model, {0: shifts[0]}))
    assert_close(changed[:, :4], plain[:, :4])
    assert not torch.allclose(changed[:, 9:], plain[:, 9:], atol=1e-4)


def test_a_moved_key_is_the_key_rotated_at_its_new_position():
    model, seen = ri.reposition(tiny("llama"), "repo"), []
    attention = as_decoder(model).layers[0]
    moves = torch.arange(20).expand(2, -1) % 5
    shift = {0: lambda positions: moves[:, None].to(positions)}
    for context in (torch.no_grad(), moved_keys(model, shift)):
        with (
            context,
            attention.sites.rotated_keys.register_forward_hook(
                lambda module, given, keys: seen.append(keys.detach())
            ),
        ):
            model(TOKENS)
    keys = torch.complex(*seen[0].chunk(2, -1)) * torch.polar(
        torch.ones(1), moves[:, None, :, None] * attention.frequencies
    )
    assert_close(seen[1], torch.cat([keys.real, keys.imag], -1), atol=1e-5, rtol=1e-5)


def test_exchanged_keys_are_those_of_the_named_tokens_and_values_stay():
    model = ri.reposition(tiny("qwen3"), "rope")
    attention, keys, values = as_decoder(model).layers[0], [], []
    order = torch.arange(20).flip(0).expand(2, -1)
    attention.observers.append(lambda layer, queries, seen, *rest: keys.append(seen))
    attention.sites.values.register_forward_hook(lambda module, given, out: values.append(out))
    logits_under(model, torch.no_grad())
    logits_under(model, exchanged_keys(model, {0: order}))
    assert_close(keys[1], keys[0].flip(2))
    assert_close(values[0], values[1])


@pytest.mark.parametrize(("gamma", "l_max"), [(0.0, 3), (0.1, 1), (1.0, 200)])
def test_transposed_pairs_are_few_enough_and_near_enough(gamma, l_max):
    order, still = (
        transposed(np.random.default_rng(3), np.arange(1, 101), 103, gamma, l_max),
        np.arange(103),
    )
    assert_array_equal(order[order], still)  # pairs
    moved = np.flatnonzero(order != still)
    assert set(moved) <= set(range(1, 101)) and len(moved) == 2 * round(gamma * 100 / 2)
    assert np.abs(order - still).max() <= l_max


@pytest.mark.parametrize("draw", [transposed, offset])
def test_a_smaller_share_moves_some_of_what_a_larger_one_moves(draw):
    few, many, none = (
        draw(np.random.default_rng(5), np.arange(1, 200), 200, gamma, 7) for gamma in (0.1, 0.4, 0)
    )
    chosen = few != none
    assert 0 < chosen.sum() < (many != none).sum()
    assert_array_equal(few[chosen], many[chosen])


def test_offsets_are_never_zero_and_stay_within_reach():
    moves = offset(np.random.default_rng(0), np.arange(1, 400), 400, 1.0, 4)
    assert moves[0] == 0
    assert set(np.abs(moves[1:])) == {1, 2, 3, 4}


@pytest.fixture(scope="module")
def model():
    return model_for(TASK)


def test_no_perturbation_is_the_plain_model_and_the_same_seed_the_same_numbers(model):
    prompts = TASK.prompts(5, seed=1)
    group, again = (
        Perturbation(KINDS, (0.3,), (2, 4)).measured(
            as_decoder(model), TASK, prompts, batch_size=size
        )
        for size in (2, 5)
    )
    assert group["log_perplexity"].dims == ("kind", "gamma", "l_max")
    assert_allclose(again["log_perplexity"], group["log_perplexity"], rtol=1e-5)
    plain = forced_responses(model, TASK, prompts)
    still, moved = group.sel(gamma=0.0), group.sel(gamma=0.3)
    surprise = -np.mean(np.concatenate([answer.log_probabilities for answer in plain]))
    for name, expected in {
        "log_perplexity": surprise,
        "task_score": TASK.score(plain, prompts).mean(),
        "log_perplexity_rise": 0,
        "moved_share": 0,
    }.items():
        assert_allclose(still[name], expected, rtol=1e-6, atol=1e-6)
    assert (abs(moved["log_perplexity"] - surprise) > 1e-5).all()


def test_kept_outputs_save_passes_and_change_no_number(model, monkeypatch):
    decoder, prompts, passes = as_decoder(model), TASK.prompts(4, seed=1), []
    handle = decoder.stack.register_forward_hook(lambda *given: passes.append(1))
    asked = Perturbation(("position_offset",), (0.3, 0.5), (2, 4))
    measured = partial(asked.measured, decoder, TASK, prompts, batch_size=2)
    kept, few = measured(), len(passes)
    outputs = 4 * decoder.weight.element_size() * decoder.config.hidden_size * len(decoder.layers)
    # room for one batch of two
    some = 2 * max(len(prompt.tokens) for prompt in prompts) * outputs // 4
    monkeypatch.setattr(perturbation, "KEPT", some)
    half = measured()
    monkeypatch.setattr(perturbation, "KEPT", 0)
    none, counts = measured(), len(passes)
    handle.remove()
    # two batches: undisturbed ones and four points, with undisturbed outputs once or at every point
    assert few == 2 + 4 * 2 + 2
    assert counts == few + (2 + 4 * 2 + 1 + 4) + (2 + 4 * 2 + 4 * 2)
    xr.testing.assert_identical(half, kept)
    xr.testing.assert_identical(none, kept)


def test_answers_and_the_first_token_stay_where_they_are(model):
    prompts = TASK.prompts(4, seed=2)
    for kind in KINDS:
        changed, _, moved = disturbed(
            as_decoder(model), prompts, range(4), Disturbance(kind, 1.0, 3, (0, 1, 2))
        )
        for prompt, other, moves in zip(prompts, changed, moved, strict=True):
            assert not moves[:, [0, *prompt.generated]].any()
            assert moves.any()
            assert sorted(other.tokens) == sorted(prompt.tokens)
            assert (other.tokens != prompt.tokens) == (kind == "text_order")


def test_chosen_layers_alone_are_disturbed(model):
    prompts = TASK.prompts(3, seed=3)
    some, every = (
        Perturbation(("position_offset",), (1.0,), (3,), layers).measured(
            as_decoder(model), TASK, prompts
        )
        for layers in ((1,), ())
    )
    assert some.attrs["layers"] == [1]
    assert abs(some["log_perplexity"] - every["log_perplexity"]).sel(gamma=1.0).item() > 1e-6


def test_placing_features_elsewhere_means_nothing_without_positions():
    nope = model_for(TASK, "nope")
    group = Perturbation(("feature_placement", "position_offset"), (1.0,), (4,)).measured(
        as_decoder(nope), TASK, TASK.prompts(3)
    )
    assert_allclose(group["log_perplexity_rise"], 0, atol=1e-6)


@pytest.mark.parametrize(("layout", "layers"), [("learned", (1, 2)), ("r2n1", (2,))])
def test_layers_without_positions_to_move_are_refused_by_number(layout, layers):
    """Found: nothing moved, while half of the tokens were said to have."""
    asked = partial(Perturbation, ("position_offset",), (1.0,), (4,))
    model, prompts = model_for(TASK, layout), TASK.prompts(3)
    with refused("position_offset moves the positions of keys, and there are none in layer"):
        asked(layers).measured(as_decoder(model), TASK, prompts)
    rise = asked((0, *layers)).measured(as_decoder(model), TASK, prompts)["log_perplexity_rise"]
    assert (rise.sel(gamma=1.0) != 0).all()


def test_offsets_in_the_unit_of_the_range_are_those_in_positions_for_an_index():
    rope = model_for(TASK, "rope")
    one, other = (
        Perturbation(("position_offset",), (0.5,), (4,), offset_unit=unit).measured(
            as_decoder(rope), TASK, TASK.prompts(3)
        )
        for unit in ("positions", "range")
    )
    assert_allclose(one["log_perplexity"], other["log_perplexity"], rtol=1e-5)


@pytest.mark.parametrize("kind", ["text_order", "position_offset"])
def test_changes_of_outputs_are_those_of_passes_one_by_one(model, kind):
    """Against what reaches the output projections, prompt by prompt and without padding."""
    prompts, squares = TASK.prompts(4, seed=6), 0
    group = Perturbation((kind,), (0.5,), (3,)).measured(
        as_decoder(model), TASK, prompts, batch_size=3
    )
    for number, prompt in enumerate(prompts):
        point = Disturbance(kind, 0.5, 3, (0, 1, 2))
        (changed,), context, moved = disturbed(as_decoder(model), [prompt], [number], point)
        before = _into_output_projections(model, prompt.tokens)
        with context:
            after = _into_output_projections(model, changed.tokens)
        still = ~torch.from_numpy(moved[0, 0]) if kind == "text_order" else slice(None)
        squares += torch.stack([after - before, before])[:, still].square().sum((1, 4))
    expected = (squares[0] / squares[1]).sqrt()
    found = group["output_change"].sel(kind=kind, l_max=3)
    assert found.dims == ("gamma", "layer", "head") and (found.sel(gamma=0.0) == 0).all()
    assert_allclose(found.sel(gamma=0.5), expected, rtol=1e-3, atol=1e-6)
    assert (expected[1:] > 1e-3).all()


@torch.no_grad()
def _into_output_projections(model, tokens):
    """Inputs of the output projections, [token, layer, head, d_head]."""
    seen = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            keep = lambda module, given: seen.append(given[0][0])  # noqa: E731
            hooks.enter_context(layer.self_attn.o_proj.register_forward_pre_hook(keep))
        model(torch.tensor([tokens]))
    return torch.stack(seen, dim=1).unflatten(-1, (4, -1))
