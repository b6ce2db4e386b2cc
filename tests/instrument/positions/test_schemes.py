"""Every scheme in a whole decoder: cached, padded, grouped, bridged, saved, trained - and, for
some, equal to another one.
"""

import dataclasses
import functools

import pytest
import torch
from families import TOKENS, VARIANTS, repositioned, tiny
from places import tree
from refusals import refused
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.models.capture import capture
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder

ROWS = {"rope": 1, "continuous": 1, "repo": None, "repo_alibi": None}
"""Rows of positions by scheme; None: as many as key-value heads."""
VALID = torch.ones_like(TOKENS, dtype=torch.bool)
GREEDY = {
    "max_new_tokens": 4,
    "do_sample": False,
    "attention_mask": torch.ones_like(TOKENS),
    "eos_token_id": None,
}
ALIKE = (
    *("multihead_continuous", "kerple", "repo_kerple", "repo_fire", "cope_alibi", "cope_mlp"),
    *("hope_ab1", "hope_ab2", "hope_ab3", "repo layer", "repo@1"),
    *("cope one map", "cope p_max", "cope_rope separate keys"),
)
"""Variants that are another one with other frequencies, maps or layers."""
DISTINCT = [variant for variant in VARIANTS if variant not in ALIKE]
PAIRS = [
    *((variant, "llama") for variant in DISTINCT),
    *(("repo", family) for family in ("olmo3", "qwen3", "gemma2", "gemma3", "smollm3")),
    ("r2n1", "gemma3"),
]
"""One family with every scheme, learned positions in families that differ: schemes and families
know nothing of each other.
"""
everywhere = pytest.mark.parametrize(("variant", "family"), PAIRS)


@everywhere
@torch.no_grad()
def test_generation_with_cache_is_generation_without_and_left_padding_changes_nothing(
    variant, family
):
    model = repositioned(variant, family)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), TOKENS], dim=1)
    mask = (torch.arange(25) >= 5).long().expand(2, -1)
    index = (mask.cumsum(1) - 1).clamp_min(0)
    cached = model.generate(TOKENS, **GREEDY)
    assert cached.shape[1] == 24
    assert torch.equal(model.generate(TOKENS, use_cache=False, **GREEDY), cached)
    beside_padding = model.generate(padded, **GREEDY | {"attention_mask": mask})
    assert torch.equal(beside_padding[:, 25:], cached[:, 20:])
    shifted = model(padded, attention_mask=mask, position_ids=index).logits[:, 5:]
    assert_close(shifted, model(TOKENS).logits, atol=1e-4, rtol=1e-4)


@everywhere
@torch.no_grad()
def test_fused_and_open_attention_the_bridge_with_both_and_what_is_captured_agree(variant, family):
    model = repositioned(variant, family)
    fused = model(TOKENS).logits
    model.set_attn_implementation("eager")
    assert_close(model(TOKENS).logits, fused, atol=1e-5, rtol=1e-5)
    if family != "gemma2":  # offers no other than eager
        model.set_attn_implementation("sdpa")
    wrapped = ri.bridge(model)
    assert_close(wrapped(TOKENS), fused, atol=1e-6, rtol=0)
    logits, cache = wrapped.run_with_cache(TOKENS)
    assert_close(logits, fused, atol=1e-5, rtol=1e-5)
    rows, inputs = torch.tensor([0, 7, 19]), []
    capture(as_decoder(wrapped), TOKENS, VALID, torch.arange(2), inputs.append)
    for one, attention in zip(inputs, as_decoder(wrapped).layers, strict=True):
        site = f"blocks.{one.layer}.attn.hook_"
        assert (f"{site}position_logits" in cache) == (attention.position_logits is not None)
        assert (f"{site}positions" in cache) == (one.positions is not None)
        if one.scheme in ROWS and " " not in variant:
            count = ROWS[one.scheme] or one.kv_heads
            assert cache[f"{site}positions"].shape == (2, count, 20)
        logits, scores = one.logits(rows), cache[f"{site}attn_scores"][:, :, rows]
        seen = torch.isfinite(logits)
        # float32, by the processor's products
        assert_close(logits[seen], scores[seen], atol=1e-4, rtol=1e-5)
        assert (scores[~seen] < -1e30).all()
        pattern = cache[f"{site}pattern"][:, :, rows]
        assert_close(logits.softmax(-1), pattern, atol=1e-6, rtol=1e-5)
        if one.position_logits is not None:
            without = dataclasses.replace(one, position_logits=None).logits(rows)
            added = cache[f"{site}position_logits"].expand(2, 4, -1, -1)[:, :, rows]
            assert_close((logits - without)[seen], added[seen], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "variant", [*DISTINCT, "hope_ab1", "cope_mlp", "cope one map", "cope p_max"]
)
def test_saving_and_loading_gives_the_same_bits(variant, tmp_path):
    """In other families: tests/instrument/models/test_checkpoints.py."""
    model = repositioned(variant)
    ri.save(model, tmp_path / "one")
    again = load_model(tmp_path / "one")
    assert ri.layout(again) == ri.layout(model)
    assert ri.added_parameters(again) == ri.added_parameters(model)
    assert_close(dict(again.state_dict()), dict(model.state_dict()), atol=0, rtol=0)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    ri.save(again, tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


@pytest.mark.parametrize("variant", DISTINCT)
def test_gradients_reach_everything_a_scheme_learns(variant):
    model = repositioned(variant).train()
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for module in as_decoder(model).scheme_modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize("variant", DISTINCT)
@torch.no_grad()
def test_bfloat16_stays_near_float32(variant):
    model = repositioned(variant)
    exact = model(TOKENS).logits
    rounded = model.to(torch.bfloat16)(TOKENS).logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().mean() < 0.15 * exact.abs().mean()
    kept = {
        one.frequencies.dtype for one in as_decoder(model).layers if one.frequencies is not None
    }
    assert kept <= {torch.float32}


@pytest.mark.parametrize("rows", ["head", None])
@torch.no_grad()
def test_a_bias_is_of_the_positions_of_the_pass_whatever_assigns_or_changes_them(rows):
    """Found: positions that a scheme assigned, and a hook set, changed nothing that was added to
    the logits.
    """
    if rows:
        model = ri.reposition(tiny("llama"), "repo_alibi", assignment=rows)
    else:
        model = ri.reposition(tiny("llama"), "alibi")
    layer, seen = as_decoder(model).layers[1], {}
    if not rows:
        # a row for every head, behind and before others
        layer.sites.positions.register_forward_hook(lambda m, a, z: z * torch.randn(4, 1))
    for name in ("positions", "position_logits"):
        site = getattr(layer.sites, name)
        site.register_forward_hook(lambda m, a, out, name=name: seen.update({name: out}))
    model(TOKENS)
    positions = seen["positions"]
    assert positions.shape == (2, 4, 20) and (positions.diff(dim=-1) < 0).any()
    expected = layer.position_logits.bias(positions, positions).tril()
    assert_close(seen["position_logits"].expand(2, -1, -1, -1), expected, atol=0, rtol=0)


@torch.no_grad()
def test_learned_positions_at_the_index_are_alibi():
    model, plain = repositioned("repo_alibi"), repositioned("alibi")
    plain.load_state_dict(
        {name: value for name, value in model.state_dict().items() if ".assigner." not in name}
    )
    expected = plain(TOKENS).logits
    assert (model(TOKENS).logits - expected).abs().max() > 1e-3
    with iv.linearised(model):
        assert_close(model(TOKENS).logits, expected)


def test_prompts_with_equal_positions_have_gradients_of_their_own():
    """One bias serves all prompts where their positions are equal, but not where these are
    differentiated.
    """
    model, moves = repositioned("alibi"), torch.zeros(2, 1, 20, requires_grad=True)
    as_decoder(model).layers[0].sites.positions.register_forward_hook(lambda m, a, z: z + moves)
    (gradient,) = torch.autograd.grad(
        model(TOKENS[:1].expand(2, -1)).logits[0].square().sum(), moves
    )
    assert gradient[0].abs().max() > 1e-3 and not gradient[1].any()


@functools.cache
@torch.no_grad()
def logits_of(variant):
    torch.manual_seed(0)
    return repositioned(variant)(TOKENS).logits


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("nope", "rope")])
def test_the_scheme_matters(variant):
    for other in ("rope", "nope"):
        assert (logits_of(variant) - logits_of(other)).abs().max() > 1e-3, other


def test_one_map_for_all_layers_is_one_module():
    shared, own = repositioned("cope one map"), repositioned("cope")
    assert ri.added_parameters(own) == 3 * ri.added_parameters(shared)
    assert len({id(a.position_logits.position_map) for a in as_decoder(shared).layers}) == 1


def test_hope_chooses_by_the_frequencies_of_training_then_scales():
    config = tiny("llama").config
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    config.rope_parameters["original_max_position_embeddings"] = 128
    model = AutoModelForCausalLM.from_config(config)
    rope, hope, third = (
        as_decoder(ri.reposition(model, scheme)).layers[0].frequencies
        for scheme in ("rope", "hope", "hope_ab3")
    )
    high = 1e4 ** -(torch.arange(4) / 4) >= 2 * torch.pi / 128
    assert 0 < high.sum() < len(high) and (rope != 1e4 ** -(torch.arange(4) / 4)).any()
    assert torch.equal(hope, rope.where(high, 0.0))
    assert torch.equal(third[high], rope[high])


def test_dropped_components_are_zero_in_queries():
    model, seen = ri.reposition(tiny("llama"), "rope_high"), []
    attention = as_decoder(model).layers[0]
    attention.sites.rotated_queries.register_forward_hook(lambda m, a, out: seen.append(out))
    model(TOKENS)
    kept = attention.components
    assert 0 < kept.sum() < len(kept)
    assert torch.equal(seen[0].flatten(0, -2).any(0), kept.repeat(2))


def test_a_prompt_beyond_a_learned_table_is_refused():
    model = ri.reposition(tiny("llama"), "learned", training_length=16)
    with refused(r"reaches position 19, but the learned table has 16"):
        model(TOKENS)


def test_taking_learned_positions_away_again_leaves_nothing():
    model = tiny("llama")
    with torch.no_grad():
        before = model(TOKENS).logits
        ri.reposition(ri.reposition(model, "learned"), "rope")
        assert torch.equal(model(TOKENS).logits, before)


@pytest.mark.parametrize("wrong", [lambda z: z.mT, lambda z: z[:, 0], lambda z: z[:, [0] * 3]])
def test_positions_of_another_shape_are_refused_with_both_shapes(wrong):
    model = repositioned("repo")
    (assigner, *_) = as_decoder(model).scheme_modules
    assigner.register_forward_hook(lambda module, arguments, positions: wrong(positions))
    with refused(r"assigner of layer 0 \(repo\) gave positions \[.*; wanted \[batch, row, token\]"):
        model(TOKENS)


@pytest.mark.parametrize(
    "wrong", [lambda z: z[..., :5], lambda z: z[:, 0], lambda z: z[:, :0], lambda z: 0.0]
)
def test_a_hook_that_gives_other_positions_is_refused_by_its_layer(wrong):
    """Found: errors of torch, or that keys of another layer were read."""
    model = repositioned("repo")
    as_decoder(model).layers[1].sites.call("positions", wrong)
    with refused(r"a hook on the positions of layer 1 \(repo\)"):
        model(TOKENS)


@pytest.mark.filterwarnings("ignore:Casting complex values")  # in transformers, before us
@pytest.mark.parametrize("variant", ["rope", "repo", "alibi", "repo_attention"])
def test_complex_positions_are_refused_wherever_they_come_in(variant):
    """Found: their imaginary part was lost."""
    model = repositioned(variant)
    for act, line in (
        (
            lambda: as_decoder(model).layers[1].sites.call("positions", lambda z: z + 0j),
            "a hook on",
        ),
        (
            lambda: (
                as_decoder(model)
                .layers[1]
                .assigner.register_forward_hook(
                    lambda _, given, z: (z[0] + 0j, z[1]) if isinstance(z, tuple) else z + 0j
                )
                .remove
            ),
            "the assigner of",
        ),
    ):
        remove = act()
        with refused(rf"{line}.* layer 1 \({variant}\) gave complex positions"):
            model(TOKENS)
        remove()
    with refused("position ids are complex"):
        model(
            inputs_embeds=model.get_input_embeddings()(TOKENS),
            position_ids=torch.arange(20)[None] * 1j,
        )
    model(TOKENS)


def test_complex_logits_of_a_scheme_are_refused():
    model = repositioned("alibi")
    as_decoder(model).layers[1].position_logits.register_forward_hook(
        lambda _, given, added: added + 0j
    )
    with refused(r"position_logits of layer 1 \(alibi\) returns complex numbers"):
        model(TOKENS)
