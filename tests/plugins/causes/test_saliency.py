"""Saliency against finite differences and a shift of all positions, integrated gradients against
completeness and a slow integral.
"""

from functools import partial

import numpy as np
import pytest
import torch
from drawn import artist, starting
from families import tiny
from numpy.testing import assert_allclose
from refusals import refused
from torch.nn.functional import rms_norm

import repo_interp as ri
from repo_interp.experiments import Saliency
from repo_interp.experiments.experiment_catalogue import planned
from repo_interp.experiments.prompt_sets import Answers
from repo_interp.models.decoder import as_decoder
from repo_interp.models.wrapped import model_of
from repo_interp.plugins.causes import saliency_view as view
from repo_interp.tasks import Prompt, make_task

TASK = make_task("reversal", longest=6, longest_test=12)
TEXT = Answers()
COMPLETE = 1e-6
"""Nats that 64 steps miss at most, in float64, where positions turn pairs by a few radians."""


def exact(layout="rope,repo,nope"):
    """A bridge in float64, with a text's worth of tokens: two key-value heads of two heads each."""
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), layout).double()
    for module in model.modules():
        # its own rounds to float32, more than a small step does
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_root_mean_square, module)
    return ri.bridge(model)


def _root_mean_square(norm, states):
    return rms_norm(states, states.shape[-1:], norm.weight, norm.variance_epsilon)


def asked(length=9):
    tokens = np.random.default_rng(length).integers(3, 60, length).tolist()
    texts = tuple(f" w{token}" for token in tokens)
    return Prompt(tokens, generated=tuple(range(length - 3, length)), token_text=texts)


@torch.no_grad()
def log_probability(bridge, prompt):
    """Of the generated tokens, their mean, in float64 throughout."""
    log_p = model_of(bridge)(torch.tensor([prompt.tokens])).logits[0].log_softmax(-1)
    return np.mean([log_p[place - 1, prompt.tokens[place]].item() for place in prompt.generated])


def slope(bridge, prompt, layer, head, token, step):
    """Of the log-probability by one position, from both sides."""
    ends = []
    for side in (step, -step):
        move = side * torch.eye(len(prompt.tokens), dtype=torch.float64)[token]
        with ri.set_positions(bridge, layer, head, lambda own, move=move: own.double() + move):
            ends.append(log_probability(bridge, prompt))
    return (ends[0] - ends[1]) / (2 * step)


def measured(bridge, prompts, **options):
    run = ri.analyze(bridge, prompts, (), experiments=(Saliency(**options),))
    return run["saliency"].to_dataset()


@pytest.fixture(scope="module")
def bridge():
    return exact()


@pytest.fixture(scope="module")
def group(bridge):
    return measured(bridge, [asked(), asked(12)])


@pytest.mark.parametrize(("layer", "head"), [(0, 3), (1, 1)])
def test_saliency_is_the_slope_of_the_log_probability_by_one_position_of_one_head(
    bridge, group, layer, head
):
    # a step that a token index, in float32, takes exactly
    slopes = [slope(bridge, asked(), layer, head, token, step=2.0**-10) for token in range(9)]
    found = group["saliency"].sel(prompt=0, layer=layer, head=head).values[:9]
    assert np.abs(slopes).max() > 1e-4
    # logits are float32 in a response
    assert_allclose(found, slopes, rtol=2e-4, atol=2e-6)


def test_a_shift_of_all_of_a_heads_positions_changes_nothing(group):
    sums = group["saliency"].sel(layer=[0, 1]).sum("token")
    reach = 1e-5 * float(group["saliency_size"].max()) * group.sizes["token"]
    assert_allclose(sums, 0, atol=reach)


def test_what_is_not_there_is_nan(group):
    assert group["saliency"].sel(layer=2).isnull().all(), "a layer without positions"
    there = group["saliency"].sel(layer=[0, 1]).notnull().all(("layer", "head"))
    np.testing.assert_array_equal(there, group["token_id"] >= 0)
    first = group.sel(prompt=0)
    assert group["token_count"].values.tolist() == [9, 12]
    assert first["answer"].values.tolist()[-4:] == [1, -1, -1, -1]
    assert group["scheme"].values.tolist() == ["rope", "repo", "nope"]
    assert_allclose(first["log_probability"], log_probability(exact(), asked()), rtol=1e-6)


@pytest.mark.parametrize("baseline", ["constant", "index"])
def test_integrated_gradients_sum_to_what_all_positions_add(bridge, baseline):
    group, rough = (
        measured(bridge, [asked(), asked(12)], baseline=baseline, steps=steps) for steps in (64, 2)
    )
    added = group["log_probability"] - group["baseline_log_probability"]
    assert (np.abs(added) > 1e-3).all()
    total = group["integrated_gradients"].sum(("layer", "head", "token"))
    assert_allclose(total - added, group["completeness_error"], atol=1e-6)
    missed = np.abs(group["completeness_error"])
    assert float(missed.max()) < COMPLETE * 100, "logits are float32"
    assert (np.abs(rough["completeness_error"]) > 10 * missed).all()


def test_the_constant_baseline_tells_no_token_apart_and_the_index_leaves_rope_alone(bridge):
    prompt = asked()
    group = measured(bridge, [prompt])
    with ri.set_positions(bridge, 0, None, 0.0), ri.set_positions(bridge, 1, None, 7.0):
        nowhere = log_probability(bridge, prompt)
    assert_allclose(group["baseline_log_probability"], [nowhere], rtol=1e-5)
    by_index = measured(bridge, [prompt], baseline="index")
    assert not by_index["integrated_gradients"].sel(layer=0).any()
    assert by_index["integrated_size"].sel(layer=1).all()


def test_integrated_gradients_are_the_integral_along_the_straight_path(bridge):
    """A slow reference: the midpoint rule over gradients that hooks of TransformerLens take, one
    step after the other.
    """
    prompt, steps = asked(), 60
    tokens = torch.tensor([prompt.tokens])
    names = [f"blocks.{layer}.attn.hook_positions" for layer in (0, 1)]
    _, cache = bridge.run_with_cache(tokens, names_filter=names)
    ends = {name: z.double().repeat_interleave(4 // z.shape[1], 1) for name, z in cache.items()}
    total = dict.fromkeys(names, 0.0)
    for step in range(steps):
        at = {
            name: end.mean(-1, keepdim=True).lerp(end, (step + 0.5) / steps).requires_grad_()
            for name, end in ends.items()
        }
        hooks = [(name, lambda value, hook, at=at: at[hook.name]) for name in names]
        log_p = bridge.run_with_hooks(tokens, fwd_hooks=hooks)[0].log_softmax(-1)
        f = sum(log_p[place - 1, prompt.tokens[place]] for place in prompt.generated) / 3
        for name, gradient in zip(names, torch.autograd.grad(f, [*at.values()]), strict=True):
            total[name] = total[name] + gradient / steps
    found = measured(bridge, [prompt])["integrated_gradients"].sel(prompt=0)
    for layer, name in enumerate(names):
        slow = (total[name] * (ends[name] - ends[name].mean(-1, keepdim=True)))[0].detach()
        assert float(slow.abs().max()) > 1e-3
        # the midpoint rule in so few steps
        assert_allclose(found.sel(layer=layer), slow, atol=2e-4)


def test_heads_that_share_one_row_of_positions_are_told_apart_and_sum_to_its_slope():
    bridge, prompt = exact("continuous"), asked()
    group = measured(bridge, [prompt], steps=0)
    own = group["saliency"].sel(prompt=0, layer=1)
    assert not np.allclose(own.sel(head=0), own.sel(head=3))
    of_row = slope(bridge, prompt, 1, None, 4, step=1e-4)
    assert_allclose(own.sum("head")[4], of_row, rtol=1e-4)
    assert group["integrated_gradients"].isnull().all()
    assert group["completeness_error"].isnull().all()


def test_text_is_judged_by_every_token_and_the_passes_are_known(bridge):
    text = Prompt(asked().tokens)
    assert measured(bridge, [text], steps=0)["answer"].values.tolist() == [[0] + [1] * 8]
    (plan,) = planned(as_decoder(bridge), [asked(), asked(12)], (Saliency(steps=4),))
    assert sum(plan.passes) == 3 * 5 * (9 + 12)


@pytest.mark.parametrize(
    ("layout", "prompt", "line"),
    [
        ("cope", asked(), r"no layer of this model assigns any \(cope\)"),
        ("rope", Prompt((3, 4, 5)), "saliency judges what is predicted, but prompt 0 has nothing"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_run(layout, prompt, line):
    with refused(line):
        planned(as_decoder(ri.reposition(tiny("llama"), layout)), [prompt], ("saliency",), TASK)


# what is drawn
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(bridge):
    return ri.analyze(bridge, [asked(), asked(12)], (), experiments=(Saliency(steps=4),))


def test_every_token_has_its_field_in_the_colour_of_its_value(run):
    figure = view.saliency_text(run, 1, 2, prompt=1)
    values = run["saliency"]["saliency"].sel(prompt=1, layer=1, head=2).values
    fields = [artist(figure, f"token {token}").get_facecolor() for token in range(12)]
    colours = view.mpl.colormaps[view.COLOURS](0.5 + 0.5 * values / np.abs(values).max())
    assert_allclose(fields, colours, atol=0.01)
    answers = {one.get_gid() for one in starting(figure, "answer ")}
    assert answers == {"answer 9", "answer 10", "answer 11"}
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert texts == {view.token_label(text) for text in asked(12).token_text}


def test_of_a_long_prompt_the_surroundings_of_large_values_are_shown_and_the_others_counted():
    values = np.full(2000, 0.001)
    values[[500, 1500]] = 5.0, -4.0
    shown = view.shown_tokens(values, np.array([1998, 1999]))
    assert len(shown) <= view.MOST_TOKENS and {492, 508, 1492, 1508, 1998, 1999} <= {*shown}
    lines = view.text_lines(view.PromptTokens(0, 2000, (" w",) * 2000, "text", {}), shown)
    pieces = [piece for line in lines for piece in line]
    assert [token for token, _ in pieces if token is not None] == [*shown]
    skipped = [int(label.split()[1].replace(",", "")) for token, label in pieces if token is None]
    assert sum(skipped) == 2000 - len(shown)
    broken = view.text_lines(view.PromptTokens(0, 3, ("a", ".\n", "b"), "text", {}), np.arange(3))
    assert [[token for token, _ in line] for line in broken] == [[0, 1], [2]]


def test_heads_and_tables_say_what_was_measured(run, bridge):
    group = run["saliency"].to_dataset()
    sizes = group["integrated_size"].mean("prompt").sel(layer=[0, 1])
    layer, head = view.heads_by_saliency(run)[0]
    assert sizes.sel(layer=layer, head=head) == sizes.max()
    heads, prompts = view.VIEW.tables(run)
    assert len(heads.rows) == 8 and heads.rows[0][:2] == (head, layer)
    assert "4 heads with less, or without" in heads.note
    added = group["log_probability"] - group["baseline_log_probability"]
    assert_allclose([row[3] for row in prompts.rows], added, rtol=1e-6)
    assert "With 4 steps they miss" in view.VIEW.lead(run)
    without_path = ri.analyze(bridge, [asked()], (), experiments=(Saliency(steps=0),))
    assert len(view.VIEW.tables(without_path)) == 1 and "steps" not in view.VIEW.lead(without_path)
    assert all(name.startswith("saliency_") for name, _ in view.VIEW.figures(without_path))


def test_a_text_that_cannot_be_drawn_is_refused(run):
    with refused("are saliency, integrated"):
        view.saliency_text(run, 1, 0, value="weight")
    with refused("layer 2 has no saliency"):
        view.saliency_text(run, 2, 0)


def test_the_answer_of_the_mirror_hangs_on_layer_2():
    """reversal/repo with all positions equal loses its answer; nearly all of it is owed to one
    layer, of four that learn positions.
    """
    task = make_task("reversal")
    group = Saliency().measured(as_decoder(ri.zoo("reversal/repo")), task, task.prompts(1))
    group = group.squeeze("prompt")
    added = float(group["log_probability"] - group["baseline_log_probability"])
    assert added > 5 and abs(float(group["completeness_error"])) < 0.01 * added
    assert float(group["integrated_gradients"].sel(layer=2).sum()) > 0.9 * added


def test_prompts_that_share_a_pass_have_the_derivatives_of_single_ones():
    bridge, passes = exact(), []
    decoder = as_decoder(bridge)
    prompts = [asked(9), asked(12), Prompt(asked(9).tokens[::-1], generated=(5, 8)), asked(12)]
    decoder.stack.register_forward_hook(lambda *given: passes.append(1))

    def measured(tokens_at_once):
        group = Saliency(steps=0).measured(decoder, TEXT, prompts, tokens_at_once)
        return group, len(passes)

    (together, two), (alone, six) = measured(100), measured(1)
    assert (two, six) == (2, 2 + 4)
    for name in ("saliency", "saliency_size", "log_probability"):
        assert_allclose(together[name], alone[name], rtol=1e-6, atol=1e-12)
