"""Key-value caches of transformers: with each of them, logits are those without."""

import pytest
import torch
from families import VARIANTS, repositioned, tiny
from refusals import refused
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

import repo_interp as ri
from repo_interp import interventions as iv

TOKENS = torch.randint(3, 64, (2, 18), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[0] * 3 + [1] * 15, [0] + [1] * 17])
INDEX = (MASK.cumsum(1) - 1).clamp_min(0)
CHUNKS = (11, 3, 1, 2, 1)
"""Tokens of the passes: a prompt in two chunks, then one token, or several as a draft has them."""
NEAR = {"atol": 1e-4, "rtol": 1e-4}
FOREIGN = ("forgetting", "path", "pope", "selective_rope")
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=40),
    "static, full at the end": lambda model: StaticCache(config=model.config, max_cache_len=18),
}


def cached(model, cache, mask=None, tokens=TOKENS):
    """Logits of passes that share a cache."""
    found, begin = [], 0
    for count in CHUNKS:
        end = begin + count
        padding = {} if mask is None else {"attention_mask": mask[:, :end]}
        padding |= {} if mask is None else {"position_ids": INDEX[:, begin:end]}
        given = model(tokens[:, begin:end], past_key_values=cache, use_cache=True, **padding)
        found, begin = [*found, given.logits], end
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind != "dynamic"])
@pytest.mark.parametrize("variant", [*VARIANTS, *FOREIGN])
@torch.no_grad()
def test_logits_with_a_static_cache_are_those_without(variant, kind):
    """Found: without a mask the last slot of the cache counted as the last token's."""
    model = repositioned(variant)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        expected = model(TOKENS, use_cache=False).logits
        assert_close(cached(model, CACHES[kind](model)), expected, **NEAR)
        padded = {"attention_mask": MASK, "position_ids": INDEX}
        expected = model(TOKENS, use_cache=False, **padded).logits
        found = cached(model, CACHES[kind](model), MASK)
        assert_close(found[MASK.bool()], expected[MASK.bool()], **NEAR)


@pytest.mark.parametrize("family", ["olmo3", "mistral", "gemma2"])
@pytest.mark.parametrize("layout", ["rope", "repo_alibi", "cope_relative", "repo_convolution"])
@torch.no_grad()
def test_a_static_cache_of_layers_with_a_window(layout, family):
    model = repositioned(layout, family)
    for kind in CACHES.values():
        assert_close(cached(model, kind(model)), model(TOKENS, use_cache=False).logits, **NEAR)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("layout", ["rope", "nope", "alibi", "cope", "repo head"])
@torch.no_grad()
def test_hard_attention_with_a_cache(layout, kind):
    model = repositioned(layout)
    with iv.hard_attention(model):
        assert_close(
            cached(model, CACHES[kind](model)), model(TOKENS, use_cache=False).logits, **NEAR
        )


@pytest.mark.parametrize("layout", ["rope", "repo_fire", "cope", "repo_attention"])
@torch.no_grad()
def test_a_static_cache_in_half_precision(layout):
    model = repositioned(layout).to(torch.bfloat16)
    whole = model(TOKENS, use_cache=False).logits.float()
    found = cached(model, CACHES["static"](model)).float()
    assert (found - whole).abs().max() < 0.03 * whole.abs().max()


@pytest.mark.parametrize("layout", ["alibi", "cope", "repo", "rope"])
@torch.no_grad()
def test_generated_text_is_the_same_with_every_cache(layout):
    model = repositioned(layout)
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": MASK}
    expected = model.generate(TOKENS, use_cache=False, **greedy)
    for options in (
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
        {"num_beams": 1, "prefill_chunk_size": 5},
    ):
        rows = [0] if "prompt_lookup_num_tokens" in options else [0, 1]
        asked = greedy | {"attention_mask": MASK[rows]} | options
        assert torch.equal(model.generate(TOKENS[rows], **asked), expected[rows]), options


def test_masks_that_are_no_tensors_are_refused():
    """As flex_attention has them; found: an AttributeError."""
    model = ri.reposition(tiny("llama"), "rope")
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 18, 18, device="cpu")
    with refused(r"mask that is no tensor \(BlockMask\).*choose model.set_attn_implementation"):
        model(TOKENS, attention_mask=blocks)
