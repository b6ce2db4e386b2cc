"""One logit in parts that sum to it, and one pattern, as the model itself computes them; their
figures; what is refused.
"""

import numpy as np
import pytest
import torch
from drawn import artist, starting
from families import TINY, repositioned, tiny
from numpy.testing import assert_allclose
from refusals import refused
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import repo_interp as ri
from repo_interp.measures.kernels.solvers import Axes
from repo_interp.plugins.one_head.one_head import center_axes
from repo_interp.plugins.three_axis.axis_fit import additive_pairs

PROMPT = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(1)).tolist()
TOKENS = torch.tensor([PROMPT])


def partial():
    rotation = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5}
    sizes = TINY | {"num_key_value_heads": 4, "max_position_embeddings": 256}
    config = GPTNeoXConfig(**sizes, rope_parameters=rotation, initializer_range=0.3)
    return ri.reposition(AutoModelForCausalLM.from_config(config).eval(), "rope")


@pytest.fixture(
    scope="module",
    params=["rope", "repo", "nope", "alibi", "cope", "soft cap and window", "partial"],
)
def bridge(request):
    torch.manual_seed(0)
    if request.param == "partial":
        return ri.bridge(partial())
    if request.param == "soft cap and window":
        return ri.bridge(ri.reposition(tiny("gemma2"), "rope"))
    return ri.bridge(repositioned(request.param))


@torch.no_grad()
def seen(bridge, name):
    return bridge.run_with_cache(TOKENS)[1][f"blocks.1.attn.{name}"][0]


def test_the_parts_sum_to_the_logit_that_the_model_computes(bridge):
    for query, key in ((20, 17), (9, 9), (6, 3)):
        parts = ri.explain_logit(bridge, PROMPT, 1, 2, query, key)
        logit = float(parts["logit"])
        whole = parts["pair"].sum() + parts["soft_cap"] + parts["bias"]
        assert_allclose(whole, logit, rtol=1e-5, atol=1e-5)
        assert_allclose(parts["rounding"], 0, atol=1e-5 * max(1, abs(logit)))
        assert_allclose(parts["fit"].sum(), logit, rtol=1e-5, atol=1e-8)
        for name, hook in (("logit", "hook_attn_scores"), ("attention", "hook_pattern")):
            expected = seen(bridge, hook)[2, query, key]
            assert_allclose(parts[name], expected, rtol=1e-4, atol=1e-5)


def test_a_pair_turns_by_its_angle_and_what_does_not_rotate_is_content_alone(bridge):
    parts = ri.explain_logit(bridge, PROMPT, 1, 2, 20, 17)
    still = parts["frequency"] == 0
    assert_allclose(parts["pair"][still], parts["pair_at_equal_positions"][still], atol=1e-6)
    assert bool((parts["angle"][still] == 0).all())
    if parts.attrs["scheme"] == "rope":
        assert_allclose(parts["angle"], 3 * parts["frequency"])
        queries, keys = (seen(bridge, f"hook_rot_{name}") for name in "qk")  # [token, head, d_head]
        vectors = queries[20, 2], keys[17, 2 * keys.shape[1] // 4]
        q, k = (torch.complex(*vector.double().chunk(2)) for vector in vectors)
        product = (q * k.conj()).numpy()
        at_zero = product * np.exp(-1j * parts["angle"].values)
        scale = float(parts["pair"].sum()) / product.real.sum()
        for name, expected in (("pair", product), ("pair_at_equal_positions", at_zero)):
            assert_allclose(parts[name], scale * expected.real, rtol=1e-4, atol=1e-5)


def test_a_pattern_is_the_models_and_0_where_a_key_is_not_seen(bridge):
    pattern = ri.attention_pattern(bridge, PROMPT, 1, 2)
    models = seen(bridge, "hook_pattern")[2].numpy()
    assert_allclose(pattern.values, models, atol=1e-5)
    assert_allclose(pattern.sum("key"), 1, atol=1e-5)
    upper = np.triu(np.ones((24, 24), bool), 1)
    assert (pattern.values[upper] == 0).all()
    assert (pattern["seen"].values == ~upper).all()
    assert pattern.dims == ("query", "key")
    of_layer = ri.attention_pattern(bridge, PROMPT, 1)
    assert of_layer.dims == ("head", "query", "key") and "head" not in of_layer.attrs
    assert_allclose(np.nan_to_num(of_layer.values), seen(bridge, "hook_pattern"), atol=1e-5)
    np.testing.assert_array_equal(of_layer.sel(head=2), pattern)


def test_all_heads_of_a_layer_are_those_of_transformers_with_a_panel_each():
    stock = tiny("llama")
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        expected = stock(TOKENS, output_attentions=True).attentions[2][0]
    patterns = ri.attention_pattern(ri.reposition(stock, "rope"), PROMPT, 2)
    assert_allclose(patterns, expected, atol=1e-6)
    figure = ri.plots.attention_pattern(patterns)
    drawn = [artist(ax, "pattern").get_array() for ax in figure.axes[: len(expected)]]
    np.testing.assert_array_equal(np.ma.filled(drawn, np.nan), patterns.where(patterns["seen"]))
    titles = [ax.get_title(loc="left") for ax in figure.axes[: len(expected)]]
    assert titles == [f"head {head}" for head in range(len(expected))]


@pytest.mark.parametrize("window", [None, 5])
def test_centred_axes_have_the_same_map_mean_0_and_a_key_axis_without_slope(window):
    axes, valid = Axes(*torch.randn(3, 1, 1, 12).double()), torch.ones(1, 1, 12).bool()
    level, new = center_axes(axes, additive_pairs(valid, valid, window))
    i, j = np.array(
        [pair for pair in np.ndindex(12, 12) if 0 <= np.subtract(*pair) < (window or 12)]
    ).T
    before, after = (np.stack([a[0, 0, i - j], b[0, 0, i], c[0, 0, j]]) for a, b, c in (axes, new))
    assert_allclose(after.sum(0) + float(level), before.sum(0))
    assert_allclose(after.mean(1), 0, atol=1e-12)
    assert abs(np.polyfit(j, after[2], 1)[0]) < 1e-12


def test_the_figures_show_every_part_and_every_weight():
    bridge = ri.bridge(ri.reposition(tiny("gemma2"), "alibi"))
    parts = ri.explain_logit(bridge, PROMPT, 1, 2, 20, 17)
    figure = ri.plots.logit_parts(parts)
    left, right = figure.axes
    widths = {bar.get_gid(): bar.get_width() for bar in starting(left, "part ")}
    assert widths.keys() >= {"part bias", "part soft cap", "part rounding"}
    assert np.isclose(sum(widths.values()) - widths["part logit"], widths["part logit"])
    fit = [bar.get_width() for bar in starting(right, "part ")]
    assert np.isclose(sum(fit[:-1]), fit[-1]) and fit[-1] == widths["part logit"]
    pattern = ri.attention_pattern(bridge, PROMPT, 1, 2)
    np.testing.assert_array_equal(
        artist(ri.plots.attention_pattern(pattern), "pattern").get_array().filled(np.nan),
        pattern.where(pattern["seen"]).values,
    )


def test_a_pattern_of_a_long_prompt_shows_what_a_window_hides():
    bridge = ri.bridge(ri.reposition(tiny("gemma2"), "rope"))
    prompt = torch.randint(3, 64, (1, 530), generator=torch.Generator().manual_seed(0))
    pattern = ri.attention_pattern(bridge, prompt, 0, 1)  # a window of 8
    _, cache = bridge.run_with_cache(prompt)
    models = cache["blocks.0.attn.hook_pattern"][0, 1].detach().numpy()
    assert_allclose(pattern.values, models, atol=1e-5)
    assert pattern["seen"].sum("key").values.tolist() == [*range(1, 8), *[8] * 523]
    assert ri.attention_pattern(bridge, prompt, 1, 1)["seen"].sum() == 530 * 531 / 2


def test_a_pattern_of_packed_documents_is_that_of_each():
    model = ri.reposition(tiny("llama"), "rope")
    packed = ri.prompt(PROMPT, model, position_ids=[*range(10), *range(14)])
    found = ri.attention_pattern(model, packed, 2, 3)
    for some in (slice(0, 10), slice(10, 24)):
        alone = ri.attention_pattern(model, PROMPT[some], 2, 3)
        assert_allclose(found[some, some], alone, atol=1e-6)
    assert not found["seen"][10:, :10].any() and not found[10:, :10].any()
    jumping = ri.prompt(PROMPT, model, position_ids=[*range(10), *range(30, 44)])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        ids, mask = torch.tensor([jumping.position_ids]), torch.ones(1, 24, dtype=torch.long)
        given = {"position_ids": ids, "attention_mask": mask, "output_attentions": True}
        expected = model(torch.tensor([PROMPT]), **given).attentions[2][0, 3]
    assert_allclose(ri.attention_pattern(model, jumping, 2, 3), expected, atol=1e-6)
    with refused("position ids"):
        ri.explain_logit(model, packed, 2, 3, 9, 4)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((PROMPT, 3, 0), "layer 3 was asked for"),
        ((PROMPT, 0, 0, 24, 3), "query 24 was asked for"),
        ((PROMPT, 0, 0, 3, 5), "token 3 does not see token 5"),
        ((PROMPT, 0, 0, 20, 5), "no more than 7 earlier"),
        ((PROMPT, 0, None, 3, 2), "head is None; wanted a whole number"),
        ((PROMPT, 0, 0, -1, 0), "query is -1; wanted a whole number"),
        ((PROMPT * 342, 0, 0), "has 8208 tokens, and patterns are made of up to 8192"),
        (([PROMPT, PROMPT], 0, 0), "one prompt was wanted; got 2"),
    ],
)
def test_what_cannot_be_explained_is_one_line(given, line):
    bridge = ri.bridge(ri.reposition(tiny("gemma2"), "rope"))
    with refused(line):
        (ri.attention_pattern if len(given) == 3 else ri.explain_logit)(bridge, *given)


@pytest.mark.parametrize("draw", [ri.plots.attention_pattern, ri.plots.logit_parts])
def test_what_is_no_explanation_is_not_drawn(draw):
    with refused("what ri.(attention_pattern|explain_logit) returns"):
        draw(3)
