"""How stock attention modules turn queries and keys, measured: pairs, columns and frequencies of
families that differ.
"""

import copy
from dataclasses import replace

import pytest
import torch
from families import TINY, tiny
from refusals import refused
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GPTNeoXConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
)

import repo_interp as ri
from repo_interp.errors import Note
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.experiments.responses import forced_responses
from repo_interp.measures.components import Components
from repo_interp.models.capture import decode
from repo_interp.models.decoder import as_decoder
from repo_interp.models.generation import continue_greedily, pad_left
from repo_interp.models.reposition import with_layout
from repo_interp.models.rotation_probe import Prober
from repo_interp.plugins.causes.effects import Effects
from repo_interp.plugins.lengths.perturbation import Perturbation
from repo_interp.tasks.prompt import Prompt

TOKENS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def rope(kind="default", **more):
    return {"rope_type": kind, "rope_theta": 1e4, **more}


def measured(config):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = as_decoder(model).blocks[0]
    attention = next(
        module
        for module in layer.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "config")
    )
    return Prober(model.base_model).measured(attention)


def test_a_head_that_turns_whole_in_halves_is_left_in_its_order():
    rotation = measured(LlamaConfig(**TINY))
    assert rotation.order is None and rotation.rotates and rotation.window is None
    assert_close(rotation.frequencies, 10_000.0 ** (-torch.arange(4) / 4))
    assert (rotation.heads, rotation.kv_heads, rotation.scaling) == (4, 2, 8**-0.5)


def test_entries_that_do_not_turn_are_pairs_of_frequency_zero():
    rotation = measured(GPTNeoXConfig(**TINY, rope_parameters=rope(partial_rotary_factor=0.25)))
    assert rotation.frequencies.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert rotation.order is not None
    assert rotation.order[[0, 4]].tolist() == [0, 1]  # of two entries that turn, one pair
    assert sorted(rotation.order.tolist()) == list(range(8))


def test_interleaved_pairs_are_put_into_halves():
    turned = rope(partial_rotary_factor=1.0)
    rotation = measured(Glm4Config(**TINY, head_dim=8, rope_parameters=turned))
    assert rotation.order is not None
    assert rotation.order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert_close(rotation.frequencies, 10_000.0 ** (-torch.arange(4) / 4))


def test_a_norm_with_gains_after_the_rotation_is_refused():
    model = AutoModelForCausalLM.from_config(HunYuanDenseV1Config(**TINY, head_dim=8))
    with refused(
        "HunYuanDenseV1Attention does something after rotating queries that is no rotation"
    ):
        with_layout(model, None)


SCALED = {
    "dynamic": {"factor": 4.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 7.0, 10.0], "factor": 4.0},
}


def scaled(kind, dtype=torch.float32):
    """A stock decoder whose frequencies are others beyond 16 tokens."""
    torch.manual_seed(0)
    sizes = {
        **TINY,
        "max_position_embeddings": 16,
        "initializer_range": 0.3,
        "rope_parameters": rope(kind, original_max_position_embeddings=16, **SCALED[kind]),
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(params=SCALED)
def stock(request):
    return scaled(request.param)


def drawn(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(3, 60, (length,), generator=generator).tolist()) for length in lengths
    ]


def test_frequencies_that_depend_on_the_length_are_those_of_the_pass(stock):
    """Found: after a pass of 40 tokens, dynamic frequencies of one of 20 were those of 40."""
    model = ri.reposition(copy.deepcopy(stock), "rope")
    with torch.no_grad():
        for tokens in drawn(12, 40, 20, 16, 12, 17):
            given = torch.tensor([tokens])
            expected = copy.deepcopy(stock)(given, use_cache=False).logits
            assert_close(model(given, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [("dynamic", torch.float32, {}), ("longrope", torch.bfloat16, {"num_beams": 3})],
)
def test_a_cache_that_outgrows_the_limit_gives_the_tokens_of_the_stock_model(kind, dtype, options):
    """Found: cached keys were turned by the frequencies of the present pass."""
    stock, tokens = scaled(kind, dtype), torch.tensor([drawn(12)[0]])
    model = ri.reposition(copy.deepcopy(stock), "rope")
    expected = stock.generate(tokens, max_new_tokens=20, **options)
    assert torch.equal(model.generate(tokens, max_new_tokens=20, **options), expected)
    with ri.interventions.rescaled(model, 1, 2, linear=1.0):  # frequencies by head, the same ones
        assert torch.equal(model.generate(tokens, max_new_tokens=20, **options), expected)


def test_a_prompts_numbers_do_not_depend_on_those_beside_it(stock):
    """Found: a short prompt beside a longer one had the frequencies of the longer one, and
    `frequency` was their mean.
    """
    prompts = [
        Prompt(tokens=tokens, generated=(len(tokens) - 1,)) for tokens in drawn(10, 40, 12, 40, 30)
    ]
    model = ri.reposition(copy.deepcopy(stock), "rope")
    run = ri.analyze(model, prompts, ("predictions", "components"), batch_size=4)
    row = stock(torch.tensor([prompts[0].tokens])).logits[0, :-1].softmax(-1)
    expected = row[range(9), prompts[0].tokens[1:]]
    found = torch.from_numpy(run["predictions"]["probability_of_next"].values[:9]).float()
    assert_close(found, expected.detach(), rtol=1e-4, atol=1e-6)
    components = run["components"].to_dataset()
    for number, prompt in enumerate(prompts):
        alone = ri.analyze(model, [prompt], ("components",))["components"]
        own = components.sel(prompt=number)
        assert "prompt_frequency" not in alone
        assert_close(own["prompt_frequency"].values, alone["frequency"].values.astype("float32"))
        assert_close(own["vaf"].values, alone["vaf"].values[0], equal_nan=True)
    assert bool(components["frequency"].isnull().all())
    assert "frequencies depend on the length of a pass" in run.attrs["notes"]
    assert "changed" not in run.attrs
    mean = ri.analyze(model, prompts, (Components(prompts="mean"),))["components"]
    assert bool(mean["frequency"].isnull().all())
    assert "notes" not in ri.analyze(model, [prompts[0], prompts[2]], ("components",)).attrs


def test_responses_do_not_depend_on_the_prompts_beside_them(stock):
    model = ri.reposition(stock, "rope")
    prompts = [Prompt(tokens=tokens, generated=(len(tokens) - 1,)) for tokens in drawn(10, 40, 12)]
    forced = forced_responses(model, scoring_of(prompts), prompts, 5)
    for prompt, together in zip(prompts, forced, strict=True):
        (alone,) = forced_responses(model, scoring_of(prompts), [prompt], 1)
        assert together.log_probabilities == pytest.approx(alone.log_probabilities)
    tokens, counts = drawn(10, 14, 15), [8, 4, 3]
    alone = [
        continue_greedily(as_decoder(model), [prompt], [count])[0]
        for prompt, count in zip(tokens, counts, strict=True)
    ]
    assert continue_greedily(as_decoder(model), tokens, counts) == alone


def test_experiments_take_prompts_of_one_length_together(stock):
    prompts = [Prompt(tokens=tokens, generated=(len(tokens) - 1,)) for tokens in drawn(12, 40, 18)]
    asked = [
        Perturbation(kinds=("position_offset",), gammas=(0.5,), l_maxes=(4,)),
        Effects(kinds=("linearised",)),
    ]
    one, other = (
        ri.analyze(stock, some, (), experiments=asked, batch_size=8)
        for some in (prompts, prompts[::-1])
    )
    assert bool(one["perturbation"]["log_perplexity"].notnull().any())
    effects = [run["effects"]["effect"].values for run in (one, other)]
    assert_close(*effects, atol=1e-5, rtol=0, equal_nan=True)


def test_prompts_of_different_lengths_in_one_pass_are_refused(stock):
    tokens, valid = pad_left(drawn(10, 12), "cpu")
    with refused("give prompts of equal length to one pass"):
        decode(as_decoder(ri.reposition(stock, "rope")), tokens, valid)


def test_a_scheme_that_leaves_out_frequencies_keeps_them_out_at_every_length(stock):
    """Found: HoPE became RoPE in the first pass; and interventions kept the frequencies of the pass
    before them.
    """
    (short,), (long,) = ([torch.tensor([tokens])] for tokens in drawn(10, 40))
    model = ri.reposition(stock, "hope")
    layer = as_decoder(model).layers[0]
    kept = layer.frequencies != 0
    assert 0 < int(kept.sum()) < 4
    with torch.no_grad():
        expected = model(long).logits
        assert torch.equal(layer.frequencies != 0, kept)
        model(short)
        with ri.interventions.scaled(model, 1.0):
            assert torch.equal(model(long).logits, expected)
        model(short)
        with ri.interventions.rescaled(model, 0, linear=1.0):
            assert torch.equal(model(long).logits, expected)


def late(model):
    model.config.rope_parameters = rope("linear", factor=4.0)


def lost(model):
    model.model.rotary_emb.inv_freq = 1e4 ** (-torch.arange(4) / 4)


def unlengthened(model):
    model.model.rotary_emb.attention_scaling = 1.0


def undynamic(model):
    model.config.rope_parameters = rope("dynamic", factor=4.0)


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize(
    ("stated", "spoil"),
    [(rope(), late), (LLAMA3, lost), (YARN, unlengthened), (rope(), undynamic)],
)
def test_a_model_is_measured_as_it_runs(stated, spoil):
    """Found: it was measured, and repositioned, as its configuration says."""
    sizes = {**TINY, "max_position_embeddings": 64, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, rope_parameters=stated))
    spoil(model.eval())
    (tokens,) = drawn(80)
    given = torch.tensor([tokens])
    with torch.no_grad():
        expected = model(given).logits
    line = "layers 0, 1, 2 of this llama rotate differently from its configuration"
    with pytest.warns(Note, match=line):
        run = ri.analyze(model, [Prompt(tokens=tokens)], ("predictions",))
    assert run.attrs["changed"].endswith("in layer 0, layer 1, layer 2")
    assert run.attrs["changed"] in run.attrs["notes"]
    known = expected[0].softmax(-1)[range(79), tokens[1:]]
    found = torch.from_numpy(run["predictions"]["probability_of_next"].values[:79]).float()
    assert_close(found, known, rtol=1e-4, atol=1e-6)
    with pytest.warns(Note), torch.no_grad():
        assert_close(ri.reposition(model, "rope")(given).logits, expected, rtol=1e-4, atol=1e-5)


def test_rounded_buffers_are_no_difference(stock):
    exact, rounded = (
        Prober(each.model).measured(each.model.layers[0].self_attn)
        for each in (stock, copy.deepcopy(stock).bfloat16())
    )
    assert not rounded.differs and torch.equal(rounded.frequencies, exact.frequencies)


def test_what_the_tables_turn_has_the_attention_factor_whatever_its_frequency_and_nothing_else():
    yarn = rope("yarn", factor=4.0, attention_factor=1.5, partial_rotary_factor=0.5)
    rotation = measured(GPTNeoXConfig(**TINY, rope_parameters=yarn))
    for each in (rotation, replace(rotation, frequencies=0 * rotation.frequencies)):
        assert_close(each.attention_scaling, torch.tensor([1.5, 1.5, 1.0, 1.0]))
    whole = replace(rotation, frequencies=rotation.frequencies[:2])
    assert whole.attention_scaling == 1.5


def test_another_base_is_that_of_a_stock_model():
    model = ri.reposition(tiny("llama"), "rope")
    config = LlamaConfig(**TINY, rope_parameters=rope() | {"rope_theta": 500.0})
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain = model(TOKENS).logits
        with ri.interventions.rescaled(model, [0, 1, 2], theta=500.0):
            assert_close(model(TOKENS).logits, other(TOKENS).logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(model(TOKENS).logits, plain)


def test_measures_refuse_a_layer_whose_heads_rotate_differently():
    model = ri.reposition(tiny("llama"), "rope")
    with (
        ri.interventions.rescaled(model, 1, 2, linear=2.0),
        refused("single heads of layer 1 are rescaled"),
    ):
        ri.analyze(model, [tuple(TOKENS[0].tolist())], measures=("components",))


def test_an_attention_that_ignores_its_scheme_is_an_error():
    model = ri.reposition(tiny("llama"), "repo")
    attention = as_decoder(model).layers[0]
    attention.module.config = attention.config  # the stock function attends again
    with refused(r"layer 0 attended without the attention function of its scheme 'repo'"):
        model(TOKENS)
