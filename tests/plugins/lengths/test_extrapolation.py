"""Longer prompts: each method exact where nothing is longer, equal to the obvious reference, gone
afterwards.
"""

import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import OFFICIAL
from drawn import texts
from families import TOKENS, model_for, repositioned, tiny
from numpy.testing import assert_allclose
from refusals import refused
from scipy.stats import t as student
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.errors import Note
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.experiments.responses import forced_responses
from repo_interp.interventions import infllm, interpolated, lm_infinite, pair_distances, yarn
from repo_interp.interventions.extension import METHODS, extended
from repo_interp.models.checkpoints import identify, load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.models.outputs import attention_outputs, layer_tensors, outputs_over_windows
from repo_interp.plots.view_catalogue import figures_of, tables
from repo_interp.plugins.lengths.extrapolation import Extrapolation, output_traces
from repo_interp.plugins.lengths.extrapolation_view import extrapolation_table
from repo_interp.plugins.lengths.extrapolation_view import output_traces as drawn_traces
from repo_interp.plugins.lengths.gaussians import (
    fold_sums,
    gaussian_divergence,
    leave_one_out,
    principal_plane,
    vector_sums,
)
from repo_interp.plugins.lengths.prompt_lengths import cut, prompts_by_length
from repo_interp.run import make_run
from repo_interp.storage.store import NOT_KEPT
from repo_interp.tasks import Prompt, make_task

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@torch.no_grad()
def logits_under(model, context):
    with context:
        return model(TOKENS).logits


def spread(scheme, family="llama"):
    """A model whose learned positions spread beyond a cap, in one layer: the next would enlarge
    what rounding leaves.
    """
    model = repositioned(scheme, family)
    if scheme.startswith("repo"):
        as_decoder(model).layers[0].assigner.final_map.weight.data.mul_(1000)
    return model


def capped(model, length, first):
    """LM-Infinite with `first` global tokens; None: InfLLM."""
    return infllm(model, length) if first is None else lm_infinite(model, length, first)


@pytest.mark.parametrize("scheme", ["nope", "repo head", "repo_alibi", "hope", "fire", "learned"])
def test_a_cap_at_the_length_of_the_prompt_changes_nothing(scheme):
    model = repositioned(scheme)
    plain = logits_under(model, torch.no_grad())
    # Learned positions may spread further than the index: a far larger cap leaves them alone too.
    length = 10_000 if scheme.startswith("repo") else 20
    for first in (10, None):
        assert_close(logits_under(model, capped(model, length, first)), plain, **CLOSE)


@torch.no_grad()
def seen_under(model, length, first, layer):
    """Queries, keys a head, positions a head and scores of a layer in a pass under `capped`."""
    attention, seen = as_decoder(model).layers[layer], {}
    attention.observers.append(
        lambda layer, *rest: seen.update(zip(("queries", "keys", "positions"), rest, strict=False))
    )
    keep_scores = lambda module, given, out: seen.update(scores=out)  # noqa: E731
    with capped(model, length, first), attention.sites.scores.register_forward_hook(keep_scores):
        model(TOKENS)
    groups = attention.heads // seen["keys"].shape[1]
    return attention, seen["queries"], seen["keys"].repeat_interleave(groups, 1), seen


INDEX = torch.arange(20)
SLOPES = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(4)])


@pytest.mark.parametrize(
    ("scheme", "family", "first"),
    [
        ("rope", "gemma2", 3),
        ("rope", "llama", None),
        ("alibi", "llama_mha", 2),
        ("alibi", "llama", None),
        ("repo head", "llama", 20),
        ("repo_alibi", "llama_mha", 20),
    ],
)
def test_scores_are_those_of_the_capped_difference_of_positions(scheme, family, first):
    """Put into the rotation and into ALiBi by hand; `first` 20: all keys are global."""
    layer = 1 if family == "gemma2" else 0  # without a window, but with a soft cap
    attention, queries, keys, seen = seen_under(spread(scheme, family), 7, first, layer)
    learned = scheme.startswith("repo")
    positions = seen["positions"] if learned else INDEX.float()
    distance = positions[..., :, None] - positions[..., None, :]
    assert (distance.abs() > 7).any() and (distance.abs() < 7).any()
    distance = distance.clamp(-7, 7)
    if "alibi" in scheme:
        expected = queries @ keys.mT * attention.scaling - SLOPES[:, None, None] * distance.abs()
    else:
        queries, keys = (torch.complex(*each.chunk(2, -1)) for each in (queries, keys))
        turned = torch.exp(1j * distance[..., None] * attention.frequencies)
        products = queries[:, :, :, None] * keys.conj()[:, :, None] * turned
        expected = products.real.sum(-1) * attention.scaling
    if cap := attention.attn_logit_softcapping:
        expected = torch.tanh(expected / cap) * cap
    apart = INDEX[:, None] - INDEX
    visible = (apart >= 0) & ((apart < 7) | ((first or 20) > INDEX))
    found, close = seen["scores"], {"atol": 1e-3, "rtol": 1e-3} if learned else CLOSE
    assert_close(found[..., visible], expected[..., visible], **close)
    assert (found[..., ~visible] < -1e30).all()


@pytest.mark.parametrize("scheme", ["rope", "repo", "repo_alibi", "fire"])
@pytest.mark.parametrize("first", [0, 9, None])
def test_blocks_of_rows_are_the_whole_map_and_lm_infinite_makes_no_far_score(
    scheme, first, monkeypatch
):
    model, shapes = spread(scheme), []
    monkeypatch.setattr(pair_distances, "ROWS", 3)
    with capped(model, 6, first), torch.no_grad():
        for attention in as_decoder(model).layers:
            attention.weigh = lambda scores, *rest, weigh=attention.weigh: (
                shapes.append(scores.shape[-2:]) or weigh(scores, *rest)
            )
        blocks = model(TOKENS).logits
        assert {rows for rows, _ in shapes} == {3, 2}
        assert first is None or max(keys for _, keys in shapes) <= 6 + first + 3
        shapes.clear()
        for attention in as_decoder(model).layers:
            attention.sites.pattern.register_forward_hook(lambda *given: None)
        whole = model(TOKENS).logits
        assert {*shapes} == {(20, 20)}
    assert_close(blocks, whole, **CLOSE)


def test_lm_infinite_sees_the_mask_of_padded_prompts(monkeypatch):
    model, mask = repositioned("rope"), torch.ones_like(TOKENS)
    mask[1, 13:] = 0
    monkeypatch.setattr(pair_distances, "ROWS", 4)
    with lm_infinite(model, 5, 2), torch.no_grad():
        both = model(TOKENS, attention_mask=mask).logits
        assert_close(both[1:, :13], model(TOKENS[1:, :13]).logits, **CLOSE)
        left, index = mask.flip(1), (mask.flip(1).cumsum(1) - 1).clamp_min(0)
        tokens = torch.cat([TOKENS[1:, 13:], TOKENS[1:, :13]], 1).expand(2, -1)
        padded = model(tokens, attention_mask=left, position_ids=index).logits
        assert_close(padded[1:, 7:], both[1:, :13], **CLOSE)


@pytest.mark.parametrize("scheme", ["repo", "repo_alibi", "fire"])
def test_interpolation_by_one_changes_nothing_and_by_two_halves_every_distance(scheme):
    model = repositioned(scheme)
    plain = logits_under(model, torch.no_grad())
    assert_close(logits_under(model, interpolated(model, 1.0)), plain)
    by_two = logits_under(model, interpolated(model, 2.0))
    assert not torch.allclose(by_two, plain, atol=1e-5)
    if scheme != "fire":
        for attention in as_decoder(model).layers:  # positions z / 2 by hand
            attention.sites.positions.register_forward_hook(lambda m, a, out: out / 2)
        assert_close(logits_under(model, torch.no_grad()), by_two, **CLOSE)


def test_yarn_is_what_loading_with_yarn_gives():
    """The released checkpoint with YaRN in its configuration, against the unscaled one in the
    context.
    """
    found = identify(OFFICIAL / "repo_mha")
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    model, scaled = load_model(found), load_model(found, rope_scaling=scaling)
    found = logits_under(model, yarn(model, 2.0, 64))
    assert_close(found, logits_under(scaled, torch.no_grad()), atol=1e-4, rtol=1e-4)


def test_what_a_method_cannot_do_is_refused():
    cope, nope, alibi = (ri.reposition(tiny("llama"), one) for one in ("cope", "nope", "alibi"))
    for line, ask in (
        ("by context", lambda: lm_infinite(cope, 8)),
        ("leave the method out", lambda: interpolated(nope, 2.0)),
        ("leave the method out", lambda: yarn(alibi, 2.0, 8)),
        ("the window of InfLLM is 0", lambda: infllm(nope, 0)),
        ("methods of extrapolation", lambda: extended(nope, "ntk", 8, 8)),
    ):
        with refused(line), ask():
            pass


def test_divergence_is_the_closed_form_and_adds_up_over_batches():
    one, other = torch.randn(60, 5).double(), torch.randn(60, 5).double() * 2 + 1
    sums = vector_sums(one[:20]) + vector_sums(one[20:])
    fitted = [MultivariateNormal(part.mean(0), part.T.cov(correction=0)) for part in (one, other)]
    expected = torch.stack([kl_divergence(*fitted), torch.tensor(0.0).double()])
    of_parts = gaussian_divergence(sums, vector_sums(other), shrinkage=0.0)
    assert_close(of_parts, expected[0], rtol=1e-9, atol=0)
    both = vector_sums(torch.stack([one, other])), vector_sums(torch.stack([other, other]))
    assert_close(gaussian_divergence(*both, 0.0), expected, atol=1e-9, rtol=1e-9)
    flat = vector_sums(torch.cat([one, one], -1))  # half of its dimensions say nothing new
    assert gaussian_divergence(flat, flat).item() == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="at least 2"):
        gaussian_divergence(vector_sums(one[:1]), sums)
    folds = fold_sums(torch.stack([one, other, other * 3]), [1, 0, 1], 2)
    left_out, to = leave_one_out(folds, 2), vector_sums(one[30:])
    singles = [
        vector_sums(torch.cat(some))
        for some in ((other, one, other * 3), (one, other * 3), (other,))
    ]
    expected = [gaussian_divergence(of, to) for of in singles]
    several = fold_sums(one[None, 30:], [0], 1)[[0, 0, 0]]
    assert_close(gaussian_divergence(left_out, several), torch.stack(expected), rtol=1e-9, atol=0)
    plane, shares = principal_plane(vector_sums(one * torch.tensor([1.0, 9.0, 1.0, 4.0, 1.0])))
    assert plane.abs().argmax(0)[:2].tolist() == [1, 3]
    assert shares[0] > shares[1] > 0


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A corpus of numbered sentences: enough text for a language task, and quickly read."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(
        "\n".join(
            f"sentence {number} says that {number * 7 % 101} comes next." for number in range(4000)
        )
    )
    return make_task("language", corpus=str(path), tokens=300, length=16, longest_test=64)


def measured(task, layout, prompts, **asked):
    """What a random decoder with the task's tokens makes of prompts longer than 16; the decoder."""
    model = model_for(task, layout)
    with warnings.catch_warnings(action="ignore", category=Note):
        return Extrapolation(**asked).measured(as_decoder(model), task, prompts, 16), model


def rows_of(group):
    return extrapolation_table(xr.DataTree.from_dict({"/extrapolation": group}))


def test_extrapolation_measures_every_method_layer_and_length(task):
    prompts = cut(task.describe, task.prompts(12, seed=0, test_set="64"), (16, 32))
    group, model = measured(task, "repo@2", prompts, methods=METHODS, global_tokens=2)
    assert group["kl"].dims == ("method", "length", "layer")
    assert group["kl"].shape == (5, 2, 3) and (group["kl"] > 0).all()
    assert group["scheme"].values.tolist() == ["rope", "rope", "repo"]
    # At the training length all methods are the plain model (learned positions of this model stay
    # within the cap).
    for name in ("kl", "log_perplexity", "task_score"):
        at_training = group[name].sel(length=16)
        of_plain = at_training.sel({"method": "plain"}).broadcast_like(at_training)
        assert_allclose(at_training, of_plain, rtol=1e-4)
    odd = prompts[32][1::2]
    for method, context in (
        ("plain", torch.no_grad()),
        ("lm_infinite", lm_infinite(model, 16, 2)),
        ("interpolation", interpolated(model, 2.0)),
        ("yarn", yarn(model, 2.0, 16)),
        ("infllm", infllm(model, 16)),
    ):
        with context:
            answers = forced_responses(model, task, odd)
        found, last = (
            group.sel({"method": method, "length": 32}),
            [one.log_probabilities[-4:] for one in answers],
        )
        assert_allclose(found["log_perplexity"], -np.mean(last), rtol=1e-5)
        assert_allclose(found["task_score"], task.score(answers, odd).mean())
    # found: all 12 were said to be
    assert "6 prompts of language per length, beside 6 others of the" in rows_of(group).note
    with refused("at least 4 prompts of the training length"):
        measured(task, "rope", {32: prompts[32]})
    with refused("a prompt has 64"):
        cut(task.describe, task.prompts(2, test_set="64"), (128,))


def test_divergence_above_noise_has_the_interval_of_leaving_out_each_pair_of_prompts(task):
    prompts = cut(task.describe, task.prompts(6, seed=0, test_set="64"), (16, 64))

    def of(kept):
        some = {length: [rows[number] for number in kept] for length, rows in prompts.items()}
        return measured(task, "rope", some, methods=("interpolation",))[0]

    group = of(range(6))
    # without the plain model there is no noise to compare with
    assert group["method"].values.tolist() == ["plain", "interpolation"]
    at_training, longer = (group.sel(length=length) for length in (16, 64))
    assert not at_training["kl_above_noise"].any(), "methods change nothing there"
    assert_allclose(longer["kl_above_noise"], longer["kl"] - at_training["kl"])
    others = [of([number for number in range(6) if number // 2 != pair]) for pair in range(3)]
    without = np.array([one["kl_above_noise"].sel(length=64).mean("layer") for one in others])
    width = student.ppf(0.975, 2) * np.sqrt(2 / 3 * np.square(without - without.mean(0)).sum(0))
    above = longer["kl_above_noise"].mean("layer")
    for end, sign in (("low", -1), ("high", 1)):
        assert_allclose(longer[f"kl_above_noise_{end}"], above + sign * width, rtol=1e-6)
    table = rows_of(group)
    assert table.columns[3:6] == ("KL above noise", "from", "to")
    assert len(table.rows[0]) == len(table.columns)


def test_only_different_texts_are_compared():
    texts = [Prompt(tuple(range(3, 3 + 24))), Prompt(tuple(range(4, 4 + 24)))] * 3
    with refused("at least 4 different prompts longer than the training length, 16 tokens"):
        prompts_by_length(scoring_of(texts), texts, 16, (), 32, 0)


def test_outputs_are_traced_over_the_layers_own_window():
    model = ri.reposition(tiny("gemma3"), "rope")  # windows of 8 tokens in the first two layers
    texts = [Prompt(tuple(torch.randint(3, 64, (length,)).tolist())) for length in (16, 16, 40)]
    traces = output_traces(as_decoder(model), texts[:2], texts[2], 16, 1, queries=2, step=4)
    assert traces.attrs["window"] == 8 and traces["step"].values.tolist() == list(range(0, 33, 4))
    outputs = {}
    keep = attention_outputs(as_decoder(model), outputs.__setitem__, [1])
    with keep, layer_tensors(as_decoder(model), 1) as tensors:
        # A cache holds keys that are already rotated.
        model(torch.tensor([texts[2].tokens]), use_cache=False)
    (found,) = outputs_over_windows(as_decoder(model), 1, tensors, 39, [32], 8)
    assert_close(found, outputs[1][0, 39], atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:most of extrapolation.kl is noise")
def test_several_layers_are_traced_as_each_alone_and_have_a_figure_each():
    model = ri.reposition(tiny("gemma2"), "rope")  # layer 1 has no window
    rows = torch.randint(3, 64, (8, 40), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Prompt(tuple(row)) for row in rows]

    def traced(*layers):
        asked = Extrapolation(("lm_infinite",), (40,), 4, traced_layers=layers)
        plan = asked.plan(model, scoring_of(prompts), prompts, 16)
        return plan.run(2, NOT_KEPT, None)["output_traces"]

    both = traced(2, 1)
    assert both["window"].values.tolist() == [16, 8] and both["layer"].values.tolist() == [1, 2]
    for layer in (1, 2):
        alone = traced(layer)
        steps = both.sel(layer=layer, step=alone["step"])
        assert alone.attrs["layer"] == layer and alone["pca_trace"].notnull().all()
        assert_allclose(steps["pca_trace"], alone["pca_trace"], rtol=1e-5)
        assert_allclose(steps["trace_outside"], alone["trace_outside"])
    run = make_run({"output_traces": both}, {})
    figures = {one.name: " ".join(texts(one.figure)) for one in figures_of(run)}
    assert "Layer 1, windows of 16 keys" in figures.pop("output_traces_layer_1")
    assert "Layer 2, windows of 8 keys" in figures.pop("output_traces_layer_2") and not figures
    with refused("layer 0 was not traced; these were: 1, 2"):
        drawn_traces(run, layer=0)
    assert {row[0] for row in tables(run)[0].rows} == {1, 2}
