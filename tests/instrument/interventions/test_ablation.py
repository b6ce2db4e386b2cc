"""Heads that write nothing, or their mean: in closed form, gone afterwards to the last bit, beside
random heads, refused by name.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from families import TOKENS, repositioned, tiny
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config

import repo_interp as ri
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks import Prompt

PROMPTS = [Prompt(tokens=tuple(row), generated=(17, 18, 19)) for row in TOKENS.tolist()]
LAYER = [(1, head) for head in range(4)]


def gpt2():
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.transformer.h[1].attn.c_proj.bias)
    return ri.reposition(model, "learned")


MODELS = {
    "llama": lambda: ri.reposition(tiny("llama"), "rope"),
    "repo": lambda: repositioned("repo"),
    "gemma2": lambda: ri.reposition(tiny("gemma2"), "repo@1"),
    "gpt2": gpt2,
}


@pytest.fixture(params=MODELS, scope="module")
def bridge(request):
    torch.manual_seed(0)
    return ri.bridge(MODELS[request.param]())


@torch.no_grad()
def seen(bridge, name, *, tokens=TOKENS):
    return bridge.run_with_cache(tokens)[1][name]


@torch.no_grad()
def test_a_layer_without_its_heads_writes_its_bias_alone_and_nothing_remains_afterwards(bridge):
    before, plain, hooks = seen(bridge, "blocks.1.attn.hook_out"), bridge(TOKENS), hooks_of(bridge)
    projection = bridge.blocks[1].attn.o.original_component
    bias = getattr(projection, "bias", None)
    with ri.ablate(bridge, LAYER):
        written = seen(bridge, "blocks.1.attn.hook_out")
        assert not bool(seen(bridge, "blocks.1.attn.hook_z").any())
        assert not torch.equal(bridge(TOKENS), plain)
    expected = torch.zeros_like(written) if bias is None else bias.expand_as(written)
    assert torch.equal(written, expected)
    assert torch.equal(bridge(TOKENS), plain) and hooks_of(bridge) == hooks
    assert torch.equal(seen(bridge, "blocks.1.attn.hook_out"), before)


@torch.no_grad()
def test_one_head_is_its_own_hook_and_the_other_heads_keep_theirs(bridge):
    def without(z, hook):
        z.view(*z.shape[:2], 4, -1)[:, :, 2] = 0
        return z

    by_hand = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", without)])
    assert torch.equal(ablated(bridge, (1, 2)), by_hand)
    with ri.ablate(bridge, [(0, 1)]):
        nested = ablated(bridge, [(1, 2)])
    assert torch.equal(ablated(bridge, [(1, 2), (0, 1), (1, 2)]), nested)


@torch.no_grad()
def test_means_are_those_of_all_tokens_and_stand_in_for_the_heads(bridge):
    prompts = [row[: 20 - 5 * place] for place, row in enumerate(TOKENS.tolist())]
    means, name = ri.head_means(bridge, prompts), "blocks.1.attn.hook_z"
    outputs = [seen(bridge, name, tokens=torch.tensor([prompt]))[0] for prompt in prompts]
    wanted = torch.cat(outputs).mean(0).reshape(4, -1)
    assert_close(means[1], wanted, atol=1e-6, rtol=1e-5)
    with ri.ablate(bridge, [(1, 3)], means):
        shown = seen(bridge, name).reshape(2, 20, 4, -1)[:, :, 3]
    assert torch.equal(shown, means[1][3].expand_as(shown))


def test_effects_are_changes_of_the_answers_log_probability_beside_random_heads_of_the_same_layers(
    bridge,
):
    heads = [(0, 0), (1, 2)]
    table, again = (
        ri.ablation_effects(bridge, heads, PROMPTS, controls=3, seed=1).set_index("ablation")
        for _ in range(2)
    )
    assert again.equals(table)

    @torch.no_grad()
    def answers():
        found = bridge(TOKENS).double().log_softmax(-1)[:, 16:19].gather(-1, TOKENS[:, 17:, None])
        return found.mean((1, 2)).numpy()

    def change(pairs):
        with ri.ablate(bridge, pairs):
            return answers() - plain

    plain = answers()
    found = table.loc["ablated", ["effect", "standard_error"]].astype(float)
    changed = change(heads)
    wanted = [changed.mean(), abs(changed[1] - changed[0]) / 2]
    assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)
    assert_allclose(table.loc["whole model", "log_probability"], plain.mean(), rtol=1e-5)
    assert table.index.tolist() == ["whole model", "ablated", "control 0", "control 1", "control 2"]
    controls = []
    for written in table["heads"].iloc[2:]:
        pairs = [tuple(int(part[1:]) for part in each.split()) for each in written.split(", ")]
        assert [layer for layer, _ in pairs] == [0, 1] and not {*pairs} & {*heads}
        controls.append(change(pairs))
    paired = changed - np.mean(controls, 0)  # two prompts: one degree of freedom
    reach = 12.706204736174698 * abs(paired[1] - paired[0]) / 2
    found = table.loc["ablated", ["less_controls", "less_controls_low", "less_controls_high"]]
    mean = paired.mean()
    assert_allclose(found.astype(float), [mean, mean - reach, mean + reach], rtol=1e-3, atol=1e-5)
    assert table["less_controls"].notna().sum() == 1


def test_controls_are_different_sets_and_all_of_them_where_there_are_too_few(repo):
    drawn = ri.ablation_effects(repo, [(0, 0), (1, 2)], PROMPTS, controls=8)["heads"][2:]
    assert drawn.nunique() == len(drawn) == 8, "of 9"
    with pytest.warns(
        ri.errors.Note, match="3 controls were asked for, but there are 1 different sets"
    ):
        table = ri.ablation_effects(repo, LAYER[:2], PROMPTS, controls=3)
    assert table["heads"][2:].tolist() == ["L1 H2, L1 H3"]


@pytest.fixture(scope="module")
def repo():
    torch.manual_seed(0)
    return repositioned("repo")


@torch.no_grad()
def ablated(bridge, heads, means=None):
    with ri.ablate(bridge, heads, means):
        return bridge(TOKENS)


@pytest.mark.parametrize(
    ("function", "given", "line"),
    [
        (
            ri.ablation_effects,
            (LAYER[:3], PROMPTS),
            "ablates 3 other heads of layer 1, which has 1",
        ),
        (ri.ablation_effects, ([(9, 0)], PROMPTS), "layer 9 was asked for"),
        (ablated, ([(9, 0)],), "layer 9 was asked for"),
        (ablated, ((0, 1), {0: torch.zeros(3, 8)}), "lack finite ones of the 4 heads of layer 0"),
        (ablated, ((0, 1), {0: torch.zeros(4, 1)}), "have 1 numbers per head, which writes 8"),
        (ablated, ((0, 1), "zero"), "lack finite ones of the 4 heads of layer 0"),
        (ri.head_means, ([],), "there are no prompts"),
    ],
)
def test_what_cannot_be_ablated_is_one_line(repo, function, given, line):
    with refused(line):
        function(repo, *given)


@torch.no_grad()
def test_each_prompt_of_a_batch_loses_its_own_heads(bridge):
    sets, one = [[(0, 1)], [], [(1, 0), (2, 3)]], TOKENS[:1]
    for given in (None, ri.head_means(bridge, PROMPTS)):
        with ri.ablate(bridge, means=given, sets=sets):
            together = bridge(one.expand(3, -1))
        for row, heads in zip(together, sets, strict=True):
            with ri.ablate(bridge, heads, given) if heads else nullcontext():
                assert_close(row, bridge(one)[0], atol=1e-5, rtol=1e-4)


def test_all_sets_of_a_prompt_are_rows_of_one_pass(repo):
    """Two passes a prompt: one undisturbed, whose residuals are kept, and one for all sets that
    begin in a layer.
    """
    passes = []
    with as_decoder(repo).stack.register_forward_hook(lambda *_: passes.append(1)):
        ri.ablation_effects(repo, [(1, 0)], PROMPTS, controls=2)
    assert len(passes) == 2 * len(PROMPTS)
