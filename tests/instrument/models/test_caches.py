"""Key-value caches of transformers: with each of them, logits are those without, and they hold what
the stock model's hold where no scheme needs more.
"""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from families import VARIANTS, repositioned, tiny
from refusals import refused
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close
from transformers import DynamicCache, QuantizedCache, StaticCache

import repo_interp as ri
from benchmarks.families import small_model
from repo_interp import interventions as iv
from repo_interp.models.checkpoints import load_model
from repo_interp.models.reposition import with_layout

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


def cached(model, cache, mask=None, then=None):
    """Logits of passes that share a cache; `then`: the model of the passes after the first."""
    found, begin = [], 0
    for count in CHUNKS:
        end = begin + count
        padding = {} if mask is None else {"attention_mask": mask[:, :end]}
        padding |= {} if mask is None else {"position_ids": INDEX[:, begin:end]}
        run = model if then is None or not begin else then
        given = run(TOKENS[:, begin:end], past_key_values=cache, use_cache=True, **padding)
        found, begin = [*found, given.logits], end
    return torch.cat(found, 1)


def widths(cache):
    return [layer.keys.shape[-1] for layer in cache.layers]


@pytest.mark.parametrize("variant", [*VARIANTS, *FOREIGN])
@torch.no_grad()
def test_logits_with_a_static_cache_are_those_without(variant):
    """Found: without a mask the last slot of the cache counted as the last token's."""
    model, padded = repositioned(variant), {"attention_mask": MASK, "position_ids": INDEX}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        expected = model(TOKENS, use_cache=False).logits
        of_padded = model(TOKENS, use_cache=False, **padded).logits[MASK.bool()]
        for kind in (kind for kind in CACHES if kind != "dynamic"):
            assert_close(cached(model, CACHES[kind](model)), expected, **NEAR)
            found = cached(model, CACHES[kind](model), MASK)
            assert_close(found[MASK.bool()], of_padded, **NEAR)


@pytest.mark.parametrize("family", ["olmo3", "mistral", "gemma2"])
@pytest.mark.parametrize("layout", ["rope", "repo_alibi", "cope_relative", "repo_convolution"])
@torch.no_grad()
def test_a_static_cache_of_layers_with_a_window(layout, family):
    model = repositioned(layout, family)
    expected = model(TOKENS, use_cache=False).logits
    for kind in CACHES.values():
        assert_close(cached(model, kind(model)), expected, **NEAR)


@pytest.mark.parametrize("layout", ["rope", "nope", "alibi", "cope", "repo head"])
@torch.no_grad()
def test_hard_attention_with_a_cache(layout):
    model = repositioned(layout)
    with iv.hard_attention(model):
        expected = model(TOKENS, use_cache=False).logits
        for kind in CACHES.values():
            assert_close(cached(model, kind(model)), expected, **NEAR)


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


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "cohere2", "gptj", "qwen3_next"])
@torch.no_grad()
def test_a_cache_of_rope_is_the_stock_models(family):
    """Half-split, partial and interleaved pairs, windows, layers without attention."""
    stock = tiny(family) if family in ("llama", "gemma3") else small_model(family)
    ours = with_layout(copy.deepcopy(stock), None)
    for kind, mask in product(CACHES.values(), (None, MASK)):
        seen = torch.ones_like(MASK).bool() if mask is None else mask.bool()
        caches = [kind(stock) for _ in range(4)]
        expected = cached(stock, caches[0], mask)
        for first, second, cache in zip(
            (ours, stock, ours), (ours, ours, stock), caches[1:], strict=True
        ):
            found = cached(first, cache, mask, second)
            assert_close(found[seen], expected[seen], **NEAR)
            for held, wanted in zip(cache.layers, caches[0].layers, strict=True):
                if isinstance(getattr(wanted, "keys", None), torch.Tensor):
                    assert_close(held.keys, wanted.keys, **NEAR)


@torch.no_grad()
def test_layers_keep_more_of_a_key_where_their_scheme_needs_it(tmp_path):
    model = ri.reposition(tiny("llama"), "rope,hope,nope")
    model(TOKENS, past_key_values=(cache := CACHES["dynamic"](model)))
    assert widths(cache) == [8, 8, 8]
    model = ri.reposition(model, "rope,repo,alibi")
    ri.save(model, tmp_path / "model")
    load_model(tmp_path / "model")(TOKENS, past_key_values=(cache := CACHES["dynamic"](model)))
    assert widths(cache) == [8, 9, 9]
    with iv.ablate(model, (0, 0)):  # its kind does not matter
        model(TOKENS, past_key_values=(cache := CACHES["dynamic"](model)))
    assert widths(cache) == [9, 9, 9]


EDITS = {
    "scaled": partial(iv.scaled, factor=0.5),
    "linearised": iv.linearised,
    "one head": partial(iv.scaled, factor=0.5, heads=[(1, 0)]),
    "a group": partial(iv.scaled, factor=0.5, heads=[(1, 0), (1, 1)]),
    "moved": partial(iv.moved_keys, shifts={0: lambda z: z / 2, 2: lambda z: 3.0 + 0 * z}),
    "rescaled": partial(iv.rescaled, theta=500.0),
    "one head rescaled": partial(iv.rescaled, layer=1, head=2, linear=3.0),
    "ablated": partial(iv.ablate, heads=[(0, 1), (1, 2)]),
    "pairs": partial(iv.ablate, heads=(1, 2), pairs=[0, 1]),
    "paths": partial(iv.ablate_paths, senders=(0, 1), receivers=[(2, 0), (2, 1)], into=("keys",)),
}
MORE = ("moved", "rescaled", "one head rescaled")
"""Those that need more of a cached key than its rotation."""


NOT_OFFERED = {
    "repo_alibi": ("rescaled", "one head rescaled", "pairs"),  # no rotation
    "learned": tuple(name for name in EDITS if name not in ("moved", "ablated", "paths")),
}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (layout, name)
        for layout in ("rope", "hope", "repo", "repo_alibi", "learned")
        for name in EDITS
        if name not in NOT_OFFERED.get(layout, ())
    ],
)
@torch.no_grad()
def test_interventions_hold_with_every_cache(name, layout):
    """Found: keys in the cache were moved by the shift of the new token."""
    model = repositioned(layout)
    with EDITS[name](model):
        expected = model(TOKENS, use_cache=False).logits
        for kind in CACHES.values():
            assert_close(cached(model, kind(model)), expected, **NEAR)
    if name != "linearised" or layout not in ("rope", "hope"):
        assert (model(TOKENS, use_cache=False).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", [name for name in EDITS if name != "one head"])
@torch.no_grad()
def test_an_intervention_that_is_entered_later_changes_new_tokens_or_is_refused(name):
    model, found = repositioned("rope"), []
    for begun in (iv.shifted(model, 0.0), nullcontext()):
        cache = CACHES["dynamic"](model)
        with begun:  # in the first, positions are kept beside keys
            model(TOKENS[:, :12], past_key_values=cache)
        if found and name in MORE:
            with refused("rotated keys of layer . without positions"), EDITS[name](model):
                model(TOKENS[:, 12:], past_key_values=cache)
            return
        with EDITS[name](model):
            found.append(model(TOKENS[:, 12:], past_key_values=cache).logits)
    assert_close(*found, **NEAR)


@torch.no_grad()
def test_a_cache_goes_on_as_it_began():
    model = ri.reposition(tiny("llama"), "rope")
    cache, expected = CACHES["static"](model), model(TOKENS, use_cache=False).logits
    with iv.shifted(model, 0.0):
        model(TOKENS[:, :12], past_key_values=cache)
    found = model(TOKENS[:, 12:], past_key_values=cache).logits
    assert_close(found, expected[:, 12:], **NEAR)
    cache.reset()
    assert_close(cached(model, cache), expected, **NEAR)


@torch.no_grad()
def test_what_a_cache_cannot_hold_is_refused_in_one_line():
    stock = tiny("llama")
    ours = {name: ri.reposition(copy.deepcopy(stock), name) for name in ("rope", "repo", "alibi")}
    for name, reason in (("repo", "which 'repo' needs here"), ("alibi", "numbers in layer 0")):
        stock(TOKENS, past_key_values=(cache := CACHES["dynamic"](stock)))
        with refused(f"{reason}.*begin a new cache"):
            ours[name](TOKENS[:, :1], past_key_values=cache)
    with iv.scaled(ours["rope"], 0.5, heads=[(1, 0)]):
        ours["rope"](TOKENS, past_key_values=(cache := CACHES["dynamic"](stock)))
    with refused(
        "the DynamicCache holds keys of 10 numbers in layer 1, and those of this pass have 9"
    ):
        ours["rope"](TOKENS[:, :1], past_key_values=cache)
    with refused("rotated keys of layer 1"), iv.scaled(ours["rope"], 0.5, heads=[(1, 0)]):
        stock(TOKENS, past_key_values=(cache := CACHES["dynamic"](stock)))
        ours["rope"](TOKENS[:, :1], past_key_values=cache)
    handed_on = with_layout(copy.deepcopy(small_model("gemma3n_text")), None)
    small_model("gemma3n_text")(TOKENS, past_key_values=(cache := DynamicCache()))
    with refused("rotated keys of layer 0"):
        handed_on(TOKENS[:, :1], past_key_values=cache)
    with iv.scaled(handed_on, 0.5), refused("reads keys of another layer.*use_cache=False"):
        handed_on(TOKENS, past_key_values=(cache := DynamicCache()))
        handed_on(TOKENS[:, :1], past_key_values=cache)
    cache = DynamicCache()
    memory = repositioned("repo_attention")
    memory(TOKENS, past_key_values=cache)
    cache.offloading = True  # its constructor wants an accelerator
    with refused("before an offloaded cache has fetched it"):
        memory(TOKENS[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_quantized_cache_rounds_no_position():
    """fp8 keeps 448 steps: positions beside keys would be lost."""
    stock = tiny("llama")
    model = ri.reposition(copy.deepcopy(stock), "rope")
    found, expected = (cached(each, QuantizedCache("fp8", model.config)) for each in (model, stock))
    assert_close(found, expected, **NEAR)
    for changed in (ri.reposition(copy.deepcopy(stock), "alibi"), repositioned("repo")):
        with refused("a quantized cache would round the positions"):
            cached(changed, QuantizedCache("fp8", changed.config))
    with iv.scaled(model, 0.5), refused("a quantized cache would round the positions"):
        cached(model, QuantizedCache("fp8", model.config))
