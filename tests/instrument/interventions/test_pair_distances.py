"""Distances of pairs against a rotation by hand in plain transformers; cached, padded, generated."""

from copy import deepcopy

import pytest
import torch
from families import TOKENS, repositioned, tiny
from refusals import refused
from torch.testing import assert_close
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.interventions import pair_distances
from repo_interp.models.decoder import as_decoder

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
INDEX = torch.arange(20)
GIVEN = (INDEX[:, None] - INDEX).float()


def self_extend(distance, pair, near=6, group=3):
    """Jin et al. 2024: floor(i / G) - floor(j / G) + w - floor(w / G) beyond w tokens."""
    far = pair.query // group - pair.key // group + near - near // group
    return torch.where(distance < near, distance, far.to(distance))


METHODS = {
    "ReRoPE": lambda distance, pair: distance.clamp(max=6),
    "leaky ReRoPE": lambda distance, pair: torch.where(
        distance < 6, distance, 6 + (distance - 6) / 4
    ),
    "Self-Extend": self_extend,
    "interpolation": lambda distance, pair: distance / 2.5,
    "logarithm": lambda distance, pair: distance.clamp(min=1).log2(),
    "by head": lambda distance, pair: distance * torch.arange(4)[:, None, None] / 2,
    "contents": lambda distance, pair: torch.where(
        pair.queries[:, :, :, :1] > 0, distance, 0 * distance
    ),
}


@torch.no_grad()
def logits(model, *edits, tokens=TOKENS, **given):
    if not edits:
        return model(tokens, **given).logits
    with edits[0]:
        return logits(model, *edits[1:], tokens=tokens, **given)


class Pair:
    """What a function is given by hand."""

    query, key = INDEX[:, None], INDEX


@torch.no_grad()
def by_hand(stock, change, monkeypatch, chosen=None, pairs=None):
    """Logits of a stock model in which every pair of tokens is rotated by its distance."""
    frequencies = stock.model.rotary_emb.inv_freq
    for module in (modeling_llama, modeling_gemma2):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *rest, **given: (q, k))

    def attend(module, queries, keys, values, mask, scaling, softcap=None, **rest):
        Pair.queries = queries
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        new = change(GIVEN, Pair).expand(*queries.shape[:2], 20, 20)
        turned = torch.zeros_like(new)
        for pair, frequency in enumerate(frequencies):
            q, k = (
                torch.complex(x[..., pair], x[..., pair + len(frequencies)])
                for x in (queries, keys)
            )
            heads = torch.tensor([head in (chosen or range(4)) for head in range(4)])
            acts = heads[:, None, None] & torch.tensor(pairs is None or pair in pairs)
            distance = torch.where(acts, new, GIVEN)
            turned += (
                q[..., None] * k.conj()[..., None, :] * torch.exp(1j * frequency * distance)
            ).real
        turned = turned * scaling
        turned = turned if softcap is None else torch.tanh(turned / softcap) * softcap
        assert mask is None  # of an unknown implementation transformers makes none
        seen = (GIVEN >= 0) & ((rest.get("sliding_window") or 20) > GIVEN)
        weights = torch.softmax(turned.masked_fill(~seen, -1e30), -1)
        return (weights @ values).transpose(1, 2), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "by hand", attend)
    for layer in stock.model.layers:
        layer.self_attn.config._attn_implementation_internal = "by hand"
    return stock(TOKENS).logits


@pytest.mark.parametrize("rows", [256, 3])
@pytest.mark.parametrize("method", METHODS)
def test_distances_are_those_of_a_rotation_by_hand(method, rows, monkeypatch):
    torch.manual_seed(0)
    stock, change = tiny("llama"), METHODS[method]
    model = ri.reposition(deepcopy(stock), "rope")
    monkeypatch.setattr(pair_distances, "ROWS", rows)
    monkeypatch.setattr(pair_distances, "_NUMBERS", 1000)
    found = logits(model, iv.distances(model, change))
    expected = by_hand(stock, change, monkeypatch)
    assert_close(found, expected, **CLOSE)
    assert not torch.allclose(found, logits(model), atol=1e-2)


def test_heads_rotary_pairs_and_soft_caps_are_those_by_hand(monkeypatch):
    torch.manual_seed(0)
    change = METHODS["Self-Extend"]
    for family, chosen, pairs in (("llama", [0, 3], None), ("gemma2", None, [0, 2])):
        stock = tiny(family)
        model = ri.reposition(deepcopy(stock), "rope")
        heads = chosen and [(layer, head) for layer in range(3) for head in chosen]
        found = logits(model, iv.distances(model, change, heads, pairs=pairs))
        assert_close(found, by_hand(stock, change, monkeypatch, chosen, pairs), **CLOSE)
        monkeypatch.undo()


def test_contexts_compose_and_pairs_of_several_are_kept_apart():
    torch.manual_seed(0)
    model = repositioned("rope")
    half, cap = METHODS["interpolation"], METHODS["ReRoPE"]
    both = iv.distances(model, half) + iv.distances(model, cap)
    composed = iv.distances(model, lambda d, pair: cap(half(d, pair), pair))
    assert_close(logits(model, both), logits(model, composed), **CLOSE)
    apart = iv.distances(model, half, pairs=[0, 1]) + iv.distances(model, half, pairs=[2, 3])
    assert_close(logits(model, apart), logits(model, iv.distances(model, half)), **CLOSE)
    over = iv.distances(model, half, pairs=[0, 3]) + iv.distances(model, half, pairs=[3])
    twice = iv.distances(model, half, pairs=[0]) + iv.distances(
        model, lambda d, pair: half(half(d, pair), pair), pairs=[3]
    )
    assert_close(logits(model, over), logits(model, twice), **CLOSE)


@pytest.mark.parametrize("scheme", ["rope", "repo", "repo head", "repo layer", "alibi", "hope"])
def test_half_the_distance_is_interpolation_and_the_distance_itself_nothing(scheme):
    torch.manual_seed(0)
    model = repositioned(scheme)
    halved = iv.distances(model, lambda distance, pair: distance / 2)
    assert_close(logits(model, halved), logits(model, iv.interpolated(model, 2.0)), **CLOSE)
    same = iv.distances(model, lambda distance, pair: distance)
    assert_close(logits(model, same), logits(model), atol=1e-5, rtol=1e-5)
    if scheme == "rope":
        rescaled = iv.rescaled(model, heads=[(1, 2)], linear=3.0)
        by_distance = iv.distances(model, lambda d, pair: d / 3, heads=[(1, 2)])
        assert_close(logits(model, by_distance), logits(model, rescaled), **CLOSE)
        # and with frequencies that differ by head, distances of others change as before
        both = logits(model, rescaled, iv.distances(model, METHODS["ReRoPE"], heads=[(0, 0)]))
        one = logits(model, iv.distances(model, METHODS["ReRoPE"], heads=[(0, 0)]), by_distance)
        assert_close(both, one, **CLOSE)


def test_yarn_scales_pairs_whose_distance_changes_as_all_others():
    model = repositioned("rope")
    for edit in (iv.interpolated(model, 2.0), iv.yarn(model, 2.0, 8)):
        for change in (METHODS["ReRoPE"], METHODS["logarithm"], METHODS["leaky ReRoPE"]):
            moved = lambda d, pair, change=change: change(d, pair) + 1e-4  # noqa: E731
            near = iv.distances(model, lambda d, pair: d + 1e-4)  # all pairs go the other way
            assert_close(logits(model, edit, near), logits(model, edit), atol=5e-3, rtol=5e-3)
            assert_close(
                logits(model, edit, iv.distances(model, moved)),
                logits(model, edit, iv.distances(model, change)),
                atol=5e-3,
                rtol=5e-3,
            )


def test_fire_is_given_the_new_distance_and_keeps_its_normaliser():
    torch.manual_seed(0)
    model = repositioned("fire")
    attention = as_decoder(model).layers[0]
    fire, scores = attention.position_logits, {}
    fire.first_threshold = 4.0

    def keep(name):
        return attention.sites.scores.register_forward_hook(
            lambda module, given, out: scores.update({name: out})
        )

    for name, edits in (("own", []), ("new", [iv.distances(model, METHODS["ReRoPE"])])):
        handle = keep(name)
        logits(model, *edits)
        handle.remove()
    bias = lambda distance: fire.bias(  # noqa: E731
        INDEX.float()[:, None, None], (INDEX[:, None] - distance)[:, None]
    )[:, :, 0].transpose(0, 1)
    expected = bias(GIVEN.clamp(max=6)) - bias(GIVEN)
    seen = GIVEN >= 0
    assert_close((scores["new"] - scores["own"])[:, :, seen][0], expected[:, seen], **CLOSE)
    assert expected[:, seen].abs().max() > 1e-2


ASKED = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("scheme", ["rope", "repo head", "alibi", "fire"])
def test_generation_with_a_cache_is_generation_without(scheme):
    torch.manual_seed(0)
    model = repositioned(scheme)
    valid = torch.ones_like(TOKENS)
    given = {**ASKED, "attention_mask": valid}
    # Streaming: sinks and a window, at the distances that a cache of those keys would have
    edit = iv.hidden_keys(model, lambda pair: (pair.distance >= 9) & (pair.key >= 2))
    edit = edit + iv.distances(model, self_extend, heads=[(0, 1), (1, 1), (2, 3)])
    with edit:
        cached = model.generate(TOKENS, **given)
        assert torch.equal(cached, model.generate(TOKENS, use_cache=False, **given))
        with torch.no_grad():
            whole = model(cached, use_cache=False).logits
            steps = model(cached[:, :20], use_cache=True)
            after = model(cached[:, 20:], past_key_values=steps.past_key_values).logits
        assert_close(after, whole[:, 20:], atol=1e-4, rtol=1e-4)
        static = model.generate(TOKENS[:1], cache_implementation="static", **ASKED)
        assert torch.equal(static, cached[:1])
        valid[1, :7] = 0  # padding on the left
        padded = model.generate(TOKENS, **given)
        alone = model.generate(TOKENS[1:, 7:], **ASKED | {"attention_mask": valid[1:, 7:]})
        assert torch.equal(padded[1, 20:], alone[0, 13:])


def test_a_distance_that_cannot_change_is_refused():
    model, change = repositioned("rope"), METHODS["ReRoPE"]
    for scheme, line in (
        ("cope", "layer 0 .cope. counts positions by context"),
        ("nope", "no layer of this model rotates or adds logits by distance"),
        ("learned", "no layer of this model rotates"),
        ("selective_rope", "every rotary pair its own position"),
    ):
        other = repositioned(scheme)
        with refused(line), iv.distances(other, change):
            pass
    for line, edit in (
        ("head 9 was asked for", iv.distances(model, change, (0, 9))),
        ("a function of distances", iv.distances(model, 2.0)),
        ("rotary pairs of layer 0 .* are 0 to 3; got .4.", iv.distances(model, change, pairs=[4])),
        ("rotary pairs .* got ..", iv.distances(model, change, pairs=[])),
        ("distances of layer 0 are NaN", iv.distances(model, lambda d, pair: d / 0)),
        ("distances of layer 0 are no numbers", iv.distances(model, lambda d, pair: "far")),
        (
            r"distances of layer 0 are \[3, 20, 20\]; wanted an array that broadcasts to \[2, 4, 20, 20\]",
            iv.distances(model, lambda d, pair: d[0].expand(3, 20, 20)),
        ),
    ):
        with refused(line):
            logits(model, edit)
    with torch.no_grad():
        cache = model(TOKENS, use_cache=True).past_key_values
    with refused("the cache holds rotated keys of layer 0"):
        logits(model, iv.distances(model, change), past_key_values=cache)
    alibi = repositioned("alibi")
    with refused("rotary pairs of layer 0 .alibi. are none"):
        logits(alibi, iv.distances(alibi, change, pairs=[0]))
