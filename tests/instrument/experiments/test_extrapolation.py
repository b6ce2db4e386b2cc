"""Longer prompts: each method exact where nothing is longer, equal to the obvious reference, gone
afterwards.
"""

import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import texts
from families import TOKENS, repositioned, tiny
from numpy.testing import assert_allclose
from refusals import refused
from scipy.stats import t as student
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.errors import Note
from repo_interp.experiments.extrapolation import Extrapolation, output_traces
from repo_interp.experiments.gaussians import (
    gaussian_divergence,
    principal_plane,
    vector_sums,
)
from repo_interp.experiments.prompt_sets import cut, prompts_by_length, scoring_of
from repo_interp.experiments.responses import forced_responses
from repo_interp.interventions import extension, infllm, interpolated, lm_infinite, yarn
from repo_interp.interventions.extension import extended
from repo_interp.models.decoder import as_decoder
from repo_interp.models.outputs import attention_outputs, layer_tensors, outputs_over_windows
from repo_interp.plots.catalogue import figures_of, tables
from repo_interp.plots.views.extrapolation import extrapolation_table
from repo_interp.plots.views.extrapolation import output_traces as drawn_traces
from repo_interp.run import make_run
from repo_interp.store import NOT_KEPT
from repo_interp.tasks import Prompt, make_task

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
RELATIVE = ["rope", "nope", "repo", "repo head", "repo_alibi", "hope", "alibi", "kerple", "fire"]


@torch.no_grad()
def logits_under(model, context):
    with context:
        return model(TOKENS).logits


def spread(scheme):
    """A model whose learned positions spread beyond a cap, in one layer: the next would enlarge
    what rounding leaves.
    """
    model = repositioned(scheme)
    if scheme.startswith("repo"):
        as_decoder(model).layers[0].assigner.final_map.weight.data.mul_(1000)
    return model


@pytest.mark.parametrize("scheme", [*RELATIVE, "learned"])
def test_a_cap_at_the_length_of_the_prompt_changes_nothing(scheme):
    model = repositioned(scheme)
    plain = logits_under(model, torch.no_grad())
    # Learned positions may spread further than the index: a far larger cap leaves them alone too.
    length = 10_000 if scheme.startswith("repo") else 20
    for context in (lm_infinite(model, length), infllm(model, length)):
        assert_close(logits_under(model, context), plain, **CLOSE)


@torch.no_grad()
def seen_under(model, length, first, layer=0):
    """Queries, keys a head, positions a head and scores of a layer in a pass under LM-Infinite, or
    under InfLLM where no token is `first`.
    """
    attention = as_decoder(model).layers[layer]
    heads, seen = attention.heads, {}
    attention.observers.append(
        lambda layer, *rest: seen.update(zip(("queries", "keys", "positions"), rest, strict=False))
    )
    with (
        infllm(model, length) if first is None else lm_infinite(model, length, first),
        attention.sites.scores.register_forward_hook(lambda m, a, out: seen.update(scores=out)),
    ):
        model(TOKENS)
    for name in ("keys", "positions"):
        if seen.get(name) is not None:
            seen[name] = seen[name].repeat_interleave(heads // seen[name].shape[1], 1)
    return attention, seen


CAUSAL = torch.ones(20, 20, dtype=torch.bool).tril()
SLOPES = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(4)])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_lm_infinite_is_two_passes_with_masks(family):
    """Scores as in the authors' implementation: near pairs as ever; far global keys from the query
    at L and the key at 0.
    """
    model = ri.reposition(tiny(family), "rope")
    model.set_attn_implementation("eager")
    length, first = 6, 3
    attention, seen = seen_under(model, length, first, layer=1)
    queries, keys = seen["queries"], seen["keys"]
    index = torch.arange(20)
    positions = index[None, None].float()
    near = (
        torch.einsum("bhid,bhjd->bhij", *attention.rotate(queries, keys, positions))
        * attention.scaling
    )
    far_queries, _ = attention.rotate(queries, keys, torch.full_like(positions, length))
    far = torch.einsum("bhid,bhjd->bhij", far_queries, keys) * attention.scaling
    if attention.attn_logit_softcapping:
        near, far = (
            torch.tanh(part / attention.attn_logit_softcapping) * attention.attn_logit_softcapping
            for part in (near, far)
        )
    distance = index[:, None] - index
    expected = torch.where(distance <= length, near, far)
    visible = (distance >= 0) & ((distance < length) | (index < first))
    if attention.sliding_window is not None:
        visible &= distance < attention.sliding_window
    assert_close(
        seen["scores"].masked_fill(~visible, 0),
        expected.masked_fill(~visible, 0),
        atol=1e-4,
        rtol=1e-4,
    )
    assert (seen["scores"][..., ~visible] < -1e30).all()


@pytest.mark.parametrize("first", [2, None])
def test_alibi_is_given_the_capped_distance(first):
    attention, seen = seen_under(ri.reposition(tiny("llama_mha"), "alibi"), 5, first)
    content = seen["queries"] @ seen["keys"].mT * attention.scaling
    index = torch.arange(20)
    distance = index[:, None] - index
    expected = content - SLOPES[:, None, None] * distance.clamp(max=5)
    visible = CAUSAL if first is None else CAUSAL & ((distance < 5) | (index < first))
    assert_close(seen["scores"][..., visible], expected[..., visible], **CLOSE)


@pytest.mark.parametrize("scheme", ["rope", "repo", "repo_alibi", "fire"])
def test_infllm_in_blocks_of_rows_is_the_same(scheme, monkeypatch):
    model = spread(scheme)
    whole = logits_under(model, infllm(model, 6))
    assert not torch.allclose(whole, logits_under(model, torch.no_grad()), atol=1e-4)
    monkeypatch.setattr(extension, "ROWS", 3)
    assert_close(logits_under(model, infllm(model, 6)), whole, **CLOSE)


def test_infllm_sees_all_keys_at_the_mapped_distances():
    """The paper's list of distances, L, ..., L, L - 1, ..., 1, 0, put into RoPE by hand."""
    attention, seen = seen_under(repositioned("rope"), 5, None)
    queries, keys = (torch.complex(*seen[name].chunk(2, -1)) for name in ("queries", "keys"))
    for query in (0, 4, 5, 6, 19):
        mapped = torch.tensor([5] * max(0, query - 5) + [*range(min(query, 5), -1, -1)])
        assert len(mapped) == query + 1
        turned = torch.exp(1j * mapped[:, None] * attention.frequencies)
        products = queries[:, :, query, None] * keys[:, :, : query + 1].conj() * turned
        logits = products.real.sum(-1) * attention.scaling
        found = seen["scores"][:, :, query]
        assert_close(found[..., : query + 1], logits, **CLOSE)
        assert (found[..., query + 1 :] < -1e30).all()


@pytest.mark.parametrize("scheme", ["repo", "repo_alibi"])
def test_learned_positions_are_capped_by_their_difference(scheme):
    # all keys global: no mask, but every pair capped
    attention, seen = seen_under(spread(scheme), 7, 20)
    distance = seen["positions"][..., :, None] - seen["positions"][..., None, :]
    assert (distance.abs() > 7).any() and (distance.abs() < 7).any()
    capped = distance.clamp(-7, 7)
    if scheme == "repo":
        queries, keys = (torch.complex(*seen[name].chunk(2, -1)) for name in ("queries", "keys"))
        angles = capped[..., None] * attention.frequencies
        turned = torch.polar(torch.ones_like(angles), angles)
        content = (queries[:, :, :, None] * keys.conj()[:, :, None] * turned).real.sum(-1)
        bias = 0
    else:
        content, bias = seen["queries"] @ seen["keys"].mT, SLOPES[:, None, None] * capped.abs()
    expected = content * attention.scaling - bias
    assert_close(seen["scores"][..., CAUSAL], expected[..., CAUSAL], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scheme", RELATIVE)
@pytest.mark.parametrize("first", [0, 9])
def test_lm_infinite_in_blocks_of_rows_is_the_whole_map_and_makes_no_far_score(
    scheme, first, monkeypatch
):
    model, shapes = spread(scheme), []
    monkeypatch.setattr(extension, "ROWS", 3)
    with lm_infinite(model, 6, first):
        for attention in as_decoder(model).layers:
            attention.weigh = lambda scores, *rest, weigh=attention.weigh: (
                shapes.append(scores.shape) or weigh(scores, *rest)
            )
        blocks = model(TOKENS).logits
        assert {shape[-2] for shape in shapes} == {3, 2}
        assert max(shape[-1] for shape in shapes) <= 6 + first + 3
        shapes.clear()
        for attention in as_decoder(model).layers:
            attention.sites.pattern.register_forward_hook(lambda *given: None)
        whole = model(TOKENS).logits
        assert {shape[-2:] for shape in shapes} == {(20, 20)}
    assert_close(blocks, whole, **CLOSE)


@pytest.mark.parametrize("count", [13, 20])
def test_lm_infinite_sees_the_mask_of_padded_prompts(count, monkeypatch):
    model, mask = repositioned("rope"), torch.ones_like(TOKENS)
    mask[1, count:] = 0
    left = (torch.arange(20) >= 3).long().expand(2, -1)
    monkeypatch.setattr(extension, "ROWS", 4)
    with lm_infinite(model, 5, 2), torch.no_grad():
        both = model(TOKENS, attention_mask=mask).logits
        assert_close(both[1:, :count], model(TOKENS[1:, :count]).logits, **CLOSE)
        with refused("pad prompts on the right"):
            model(TOKENS, attention_mask=left)


@pytest.mark.parametrize("scheme", ["rope", "repo", "repo_alibi", "alibi", "fire"])
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


def test_yarn_is_what_loading_with_yarn_gives(official):
    """The released checkpoint with YaRN in its configuration, against the unscaled one in the
    context.
    """
    from repo_interp.models.checkpoints import identify, load_model

    found = identify(official / "repo_mha")
    scaled = load_model(
        found,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    )
    model = load_model(found)
    with yarn(model, 2.0, 64), torch.no_grad():
        assert_close(model(TOKENS).logits, scaled(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_what_a_method_cannot_do_is_refused():
    cope, nope = ri.reposition(tiny("llama"), "cope"), ri.reposition(tiny("llama"), "nope")
    with refused("by context"), lm_infinite(cope, 8):
        pass
    for context in (
        interpolated(nope, 2.0),
        yarn(nope, 2.0, 8),
        yarn(ri.reposition(tiny("llama"), "alibi"), 2.0, 8),
    ):
        with refused("leave the method out"), context:
            pass
    with refused("LM-Infinite is 0"), lm_infinite(nope, 0):
        pass
    with refused("the window of InfLLM is 0"), infllm(nope, 0):
        pass
    with refused("methods of extrapolation"):
        extended(nope, "ntk", 8, 8)


def test_divergence_is_the_closed_form_and_adds_up_over_batches():
    generator = torch.Generator().manual_seed(0)
    one, other = (
        torch.randn(60, 5, generator=generator, dtype=torch.float64) * scale + shift
        for scale, shift in ((1, 0), (2, 1))
    )
    sums = vector_sums(one[:20]) + vector_sums(one[20:])
    fitted = [MultivariateNormal(part.mean(0), part.T.cov(correction=0)) for part in (one, other)]
    expected = kl_divergence(*fitted).item()
    assert gaussian_divergence(sums, vector_sums(other), shrinkage=0.0).item() == pytest.approx(
        expected, rel=1e-9
    )
    assert gaussian_divergence(sums, sums).item() == pytest.approx(0, abs=1e-9)
    both = gaussian_divergence(
        vector_sums(torch.stack([one, other])), vector_sums(torch.stack([other, other])), 0.0
    )
    assert_close(both, torch.tensor([expected, 0.0], dtype=torch.float64), atol=1e-9, rtol=1e-9)
    flat = vector_sums(torch.cat([one, one], -1))  # half of its dimensions say nothing new
    assert torch.isfinite(gaussian_divergence(flat, flat))
    with pytest.raises(ValueError, match="at least 2"):
        gaussian_divergence(vector_sums(one[:1]), sums)
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


def model_of(task, layout):
    stock = tiny("llama")
    stock.resize_token_embeddings(task.vocabulary_size, mean_resizing=False)
    return ri.reposition(stock, layout)


def test_extrapolation_measures_every_method_layer_and_length(task):
    model = model_of(task, "repo@2")
    prompts = cut(task.describe, task.prompts(12, seed=0, test_set="64"), (16, 32))
    with pytest.warns(Note, match="most of extrapolation.kl is noise"):
        group = Extrapolation(global_tokens=2).measured(model, task, prompts, 16)
    assert group["kl"].dims == ("method", "length", "layer")
    assert group["kl"].shape == (4, 2, 3)
    assert group["scheme"].values.tolist() == ["rope", "rope", "repo"]
    assert (group["kl"] > 0).all()
    # At the training length all methods are the plain model (learned positions of this model stay
    # within the cap).
    plain = group.sel({"method": "plain"})
    for name in ("kl", "log_perplexity", "task_score"):
        at_training = group[name].sel(length=16)
        of_plain = plain[name].sel(length=16).broadcast_like(at_training)
        assert_allclose(at_training, of_plain, rtol=1e-4)
    odd = prompts[32][1::2]
    answers = forced_responses(model, task, odd)
    last = -np.mean([answer.log_probabilities[-4:] for answer in answers])
    assert_allclose(plain["log_perplexity"].sel(length=32), last, rtol=1e-5)
    assert_allclose(plain["task_score"].sel(length=32), task.score(answers, odd).mean())
    note = extrapolation_table(xr.DataTree.from_dict({"/extrapolation": group})).note
    assert (
        f"{len(odd)} prompts of language per length, beside 6 others of the training length" in note
    )  # found: all 12 were said to be
    with refused("at least 4 prompts of the training length"):
        Extrapolation().measured(model, task, {32: prompts[32]}, 16)
    with refused("a prompt has 64"):
        cut(task.describe, task.prompts(2, test_set="64"), (128,))


def test_divergence_above_noise_has_the_interval_of_leaving_out_each_pair_of_prompts(task):
    model = model_of(task, "rope")
    prompts = cut(task.describe, task.prompts(6, seed=0, test_set="64"), (16, 64))

    def measured(kept):
        chosen = {length: [some[number] for number in kept] for length, some in prompts.items()}
        with warnings.catch_warnings(action="ignore", category=Note):
            return Extrapolation(("interpolation",)).measured(model, task, chosen, 16)

    group = measured(range(6))
    # without the plain model there is no noise to compare with
    assert group["method"].values.tolist() == ["plain", "interpolation"]
    at_training, longer = (group.sel(length=length) for length in (16, 64))
    assert not at_training["kl_above_noise"].any(), "methods change nothing there"
    assert_allclose(longer["kl_above_noise"], longer["kl"] - at_training["kl"])
    others = [measured([number for number in range(6) if number // 2 != pair]) for pair in range(3)]
    without = np.array([each["kl_above_noise"].sel(length=64).mean("layer") for each in others])
    width = student.ppf(0.975, 2) * np.sqrt(2 / 3 * np.square(without - without.mean(0)).sum(0))
    above = longer["kl_above_noise"].mean("layer")
    for end, expected in (("low", above - width), ("high", above + width)):
        assert_allclose(longer[f"kl_above_noise_{end}"], expected, rtol=1e-6)
    table = extrapolation_table(xr.DataTree.from_dict({"/extrapolation": group}))
    assert table.columns[3:6] == ("KL above noise", "from", "to")
    assert len(table.rows[0]) == len(table.columns)


def test_only_different_texts_are_compared():
    texts = [Prompt(tuple(range(3, 3 + 24))), Prompt(tuple(range(4, 4 + 24)))] * 3
    with refused("at least 4 different prompts longer than the training length, 16 tokens"):
        prompts_by_length(scoring_of(texts), texts, 16, (), 32, 0)


def test_outputs_are_traced_over_the_layers_own_window():
    model = ri.reposition(tiny("gemma3"), "rope")  # windows of 8 tokens in the first two layers
    texts = [Prompt(tuple(torch.randint(3, 64, (length,)).tolist())) for length in (16, 16, 40)]
    traces = output_traces(model, texts[:2], texts[2], 16, 1, queries=2, step=4)
    assert traces.attrs["window"] == 8 and traces["step"].values.tolist() == list(range(0, 33, 4))
    outputs = []
    with (
        attention_outputs(model, lambda _, some: outputs.append(some[0]), [1]),
        layer_tensors(model, 1) as tensors,
    ):
        model(torch.tensor([texts[2].tokens]))
    (found,) = outputs_over_windows(model, 1, tensors, 39, [32], 8)
    assert_close(found, outputs[0][39], atol=1e-5, rtol=1e-4)


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
    figures = {one.name: one.figure for one in figures_of(run)}
    assert list(figures) == ["output_traces_layer_1", "output_traces_layer_2"]
    for name, window in zip(figures, (16, 8), strict=True):
        assert f"Layer {name[-1]}, windows of {window} keys" in " ".join(texts(figures[name]))
    assert drawn_traces(run, layer=2) is not None
    with refused("layer 0 was not traced; these were: 1, 2"):
        drawn_traces(run, layer=0)
    assert {row[0] for row in tables(run)[0].rows} == {1, 2}


@pytest.mark.filterwarnings("ignore:most of extrapolation.kl is noise")
def test_infllm_is_measured_where_it_is_named(task):
    torch.manual_seed(0)
    stock = tiny("llama")
    stock.resize_token_embeddings(task.vocabulary_size, mean_resizing=False)
    model = ri.reposition(stock, "rope")
    prompts = cut(task.describe, task.prompts(4, seed=0, test_set="64"), (16, 32))
    group = Extrapolation(("infllm",)).measured(model, task, prompts, 16)
    assert group["method"].values.tolist() == ["plain", "infllm"]
    with infllm(model, 16):
        answers = forced_responses(model, task, prompts[32][1::2])
    last = -np.mean([answer.log_probabilities[-4:] for answer in answers])
    found = group["log_perplexity"].sel({"method": "infllm", "length": 32})
    assert found.item() == pytest.approx(last, rel=1e-5)
