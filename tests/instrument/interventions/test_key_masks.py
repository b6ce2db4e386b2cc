"""Hidden keys against plain transformers with additive masks; cached, padded, generated, measured."""

from copy import deepcopy

import pytest
import torch
from families import TOKENS, VARIANTS, repositioned, tiny
from refusals import refused
from torch.testing import assert_close
from transformers import StaticCache

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.interventions import key_masks
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.loading_checks.parity import parity_errors

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
INDEX = torch.arange(20)
CAUSAL = INDEX[:, None] >= INDEX
DRAWN = torch.rand(3, 4, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.4
"""By layer and head."""
DRAWN[..., INDEX, INDEX] = False


def streaming(pair):
    """StreamingLLM: a window of 5 and two sinks."""
    return (pair.distance >= 5) & (pair.key >= 2)


@torch.no_grad()
def logits(model, *edits, **given):
    if not edits:
        return model(TOKENS, **given).logits
    with edits[0]:
        return logits(model, *edits[1:], **given)


@torch.no_grad()
def plain(stock, hidden):
    """Logits of a stock model whose layers are given additive masks, with some keys hidden."""
    undo = []
    for layer, one in zip(stock.model.layers, hidden, strict=True):

        def mask(module, given, keywords, one=one):
            own = keywords["attention_mask"]
            seen = CAUSAL if own is None else own if own.dtype == torch.bool else own == 0
            return given, keywords | {
                "attention_mask": torch.zeros(()).where(seen & ~one, torch.finfo(torch.float32).min)
            }

        undo.append(layer.self_attn.register_forward_pre_hook(mask, with_kwargs=True))
    found = stock(TOKENS).logits
    for handle in undo:
        handle.remove()
    return found


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "qwen3"])
def test_hidden_keys_are_those_of_an_additive_mask_given_to_transformers(family, implementation):
    torch.manual_seed(0)
    stock = tiny(family)
    model = ri.reposition(deepcopy(stock), "rope")
    if family != "gemma2":  # has no other than eager
        model.set_attn_implementation(implementation)
    stock.set_attn_implementation("eager")  # takes a mask with a row for every head
    by_layer = [iv.hidden_keys(model, DRAWN[one], layers=one) for one in range(3)]
    assert_close(logits(model, *by_layer), plain(stock, DRAWN), **CLOSE)
    some = torch.zeros_like(DRAWN)
    some[1, 2] = DRAWN[1, 2]
    one = iv.hidden_keys(model, DRAWN[1, 2], heads=(1, 2))
    assert_close(logits(model, one), plain(stock, some), **CLOSE)
    assert not torch.allclose(plain(stock, some), logits(model), atol=1e-3)
    function = iv.hidden_keys(model, streaming)
    far = (INDEX[:, None] - INDEX >= 5) & (INDEX >= 2)
    assert_close(logits(model, function), plain(stock, [far] * 3), **CLOSE)
    assert torch.equal(logits(model), logits(deepcopy(model)))


@pytest.mark.parametrize("scheme", [one for one in VARIANTS if one != "learned"])
def test_every_scheme_computes_as_with_a_mask_of_pairs(scheme):
    """Gates of CoPE and memories of an f_phi too: a 4-D mask is given to the model as transformers
    takes it, but positions are assigned as without.
    """
    torch.manual_seed(0)
    model = repositioned(scheme)
    far = CAUSAL & ~((INDEX[:, None] - INDEX >= 5) & (INDEX >= 2))
    expected = logits(model, attention_mask=far[None, None].expand(2, -1, -1, -1))
    found = logits(model, iv.hidden_keys(model, streaming))
    if scheme != "repo_attention":  # whose f_phi sees what the mask of the model shows
        assert_close(found, expected, **CLOSE)
    by_head = torch.zeros(4, 20, 20, dtype=torch.bool)
    by_head[1] = ~far
    one = logits(model, iv.hidden_keys(model, by_head, layers=[0, 2]))
    assert one.isfinite().all() and not torch.allclose(one, logits(model), atol=1e-4)
    both = iv.hidden_keys(model, ~far & (INDEX % 2 == 0)) + iv.hidden_keys(
        model, ~far & (INDEX % 2 == 1)
    )
    assert_close(logits(model, both), found, **CLOSE)


ASKED = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
GENERATED = ("rope", "repo head", "alibi", "cope separate keys", "fire", "nope")


@pytest.mark.parametrize("scheme", GENERATED)
def test_generation_with_a_cache_is_generation_without(scheme):
    torch.manual_seed(0)
    model = repositioned(scheme)
    valid = torch.ones_like(TOKENS)
    with iv.hidden_keys(model, streaming, heads=[(0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 3)]):
        given = {**ASKED, "attention_mask": valid}
        cached = model.generate(TOKENS, **given)
        assert torch.equal(cached, model.generate(TOKENS, use_cache=False, **given))
        with torch.no_grad():
            whole = model(cached, use_cache=False).logits
            steps = model(cached[:, :20], use_cache=True)
            after = model(cached[:, 20:], past_key_values=steps.past_key_values).logits
        assert_close(after, whole[:, 20:], atol=1e-4, rtol=1e-4)
        valid[1, :7] = 0  # padding on the left
        padded = model.generate(TOKENS, **given)
        alone = model.generate(TOKENS[1:, 7:], **ASKED | {"attention_mask": valid[1:, 7:]})
        assert torch.equal(padded[1, 20:], alone[0, 13:])
        static = model.generate(TOKENS[:1], cache_implementation="static", **ASKED)
        assert torch.equal(static, cached[:1])


def test_a_static_cache_with_empty_slots_hides_the_same_keys():
    model = repositioned("rope")
    with iv.hidden_keys(model, streaming), torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=32)
        first = model(TOKENS[:, :15], past_key_values=cache).logits
        rest = model(TOKENS[:, 15:], past_key_values=cache, position_ids=INDEX[None, 15:]).logits
        assert_close(torch.cat([first, rest], 1), model(TOKENS).logits, **CLOSE)


def test_a_function_sees_contents_and_is_given_blocks_of_queries(monkeypatch):
    """Keys of large norm are evicted: as by a mask that is made of the layer's keys."""
    torch.manual_seed(0)
    model, seen = repositioned("rope"), []

    def evict(pair):
        seen.append(pair.queries.shape[2])
        norms = pair.keys.norm(dim=-1).repeat_interleave(2, 1)[:, :, None]
        return (norms > norms.median(-1, keepdim=True).values) & (pair.distance > 0)

    found = logits(model, iv.hidden_keys(model, evict, layers=1))
    assert seen == [20]
    norms, seen[:] = [], []
    keep = (
        as_decoder(model)
        .layers[1]
        .sites.keys.register_forward_hook(
            lambda module, given, keys: norms.append(keys.norm(dim=-1).repeat_interleave(2, 1))
        )
    )
    logits(model)
    keep.remove()
    middle = norms[0].median(-1, keepdim=True).values
    mask = (norms[0] > middle)[:, :, None] & (INDEX[:, None] > INDEX)
    assert_close(logits(model, iv.hidden_keys(model, mask, layers=1)), found, **CLOSE)
    monkeypatch.setattr(key_masks, "PAIRS", 60)
    assert torch.equal(logits(model, iv.hidden_keys(model, evict, layers=1)), found)
    assert seen == [3] * 6 + [2]


@pytest.mark.parametrize("scheme", ["rope", "repo head", "cope", "alibi"])
def test_measures_see_keys_that_are_hidden_from_all_heads_and_refuse_others(scheme):
    torch.manual_seed(0)
    bridge = ri.bridge(repositioned(scheme))
    decoder = as_decoder(bridge)
    with iv.hidden_keys(bridge, streaming):
        assert max(parity_errors(decoder, TOKENS[:1])) < 1e-5
        run = ri.analyze(bridge, TOKENS, ("attention_rows",))
        assert "keys hidden in layer 0" in run.attrs["changed"]
    assert "changed" not in ri.analyze(bridge, TOKENS, ("attention_rows",)).attrs
    with (
        iv.hidden_keys(bridge, streaming, heads=(1, 0)),
        refused("hidden from single heads of layer 1"),
    ):
        ri.analyze(bridge, TOKENS, ("attention_rows",))


def test_hard_attention_reads_the_largest_logit_that_is_seen():
    torch.manual_seed(0)
    model = repositioned("rope")
    patterns = []
    for attention in as_decoder(model).layers[:1]:
        attention.sites.attended.register_forward_hook(
            lambda module, given, out: patterns.append(out)
        )
    with iv.hidden_keys(model, INDEX[None].expand(20, -1) != INDEX[:, None]) + iv.hard_attention(
        model
    ):
        logits(model)
    values = as_decoder(model).layers[0]
    logits(model, iv.hidden_keys(model, CAUSAL & (INDEX[:, None] != INDEX)))
    assert_close(patterns[0], patterns[1])  # every token reads itself alone
    assert values.heads == patterns[0].shape[2]


def test_what_cannot_be_hidden_is_refused():
    model = repositioned("rope")
    nothing = torch.zeros(20, 20, dtype=torch.bool)
    for line, ask in (
        ("layer 9 was asked for", lambda: iv.hidden_keys(model, nothing, layers=9)),
        ("head 9 was asked for", lambda: iv.hidden_keys(model, nothing, heads=(0, 9))),
        ("true and false", lambda: iv.hidden_keys(model, nothing.float())),
        ("true and false", lambda: iv.hidden_keys(model, [True])),
        ("no array", lambda: iv.hidden_keys(model, "all")),
        ("hidden keys of 19 queries came to 20", lambda: iv.hidden_keys(model, nothing[1:])),
        (
            "hidden keys of 3 prompts came to 2",
            lambda: iv.hidden_keys(model, nothing.expand(3, 1, 20, 20)),
        ),
        (
            "returns true and false .* got torch.int64",
            lambda: iv.hidden_keys(model, lambda pair: pair.distance),
        ),
        ("got float", lambda: iv.hidden_keys(model, lambda pair: 0.5)),
        (
            r"are \[3, 20, 20\]; wanted an array that broadcasts to \[2, 4, 20, 20\]",
            lambda: iv.hidden_keys(model, lambda pair: nothing.expand(3, 20, 20)),
        ),
        (
            "every key is hidden from token 0 of prompt 0 in layer 0",
            lambda: iv.hidden_keys(model, lambda pair: pair.distance >= 0),
        ),
        (
            "every key is hidden from token 4 of prompt 0 in layer 2 in head 3",
            lambda: iv.hidden_keys(model, (INDEX[:, None] == 4) & CAUSAL, heads=(2, 3)),
        ),
    ):
        with refused(line):
            logits(model, ask())
    with refused("hidden keys of 20 queries came to 21"), iv.hidden_keys(model, nothing):
        model.generate(TOKENS, max_new_tokens=2, attention_mask=torch.ones_like(TOKENS))
    for attention in as_decoder(model).layers:
        attention.config._attn_implementation_internal = "flash_attention_2"
    with refused("flash_attention_2 takes no mask of single keys"):
        logits(model, iv.hidden_keys(model, streaming))
