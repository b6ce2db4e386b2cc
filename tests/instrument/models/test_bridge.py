"""The bridge runs the Hugging Face model's numbers; positions can be read and changed; nothing
loses them silently.
"""

import copy
import gc

import pytest
import torch
from families import TOKENS, tiny
from refusals import refused
from task_tokenizers import word_tokenizer
from torch import nn
from torch.testing import assert_close
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.sources import build_bridge_from_module

import repo_interp as ri
from repo_interp.models.decoder import as_decoder


def bridged(family="llama", layout="repo@1", **options):
    return ri.bridge(ri.reposition(tiny(family), layout, **options))


def positions_hook(layer):
    return f"blocks.{layer}.attn.hook_positions"


def test_scores_and_pattern_are_made_only_where_somebody_listens_and_edits_are_felt(monkeypatch):
    wrapped, made = bridged("mistral"), []
    for layer, attention in enumerate(as_decoder(wrapped).layers):
        monkeypatch.setattr(
            attention,
            "weigh",
            lambda *given, layer=layer, weigh=attention.weigh: made.append(layer) or weigh(*given),
        )
    scores, pattern = (f"blocks.1.attn.hook_{name}" for name in ("attn_scores", "pattern"))
    first_key_only = torch.full((20,), -1e9).index_fill(0, torch.tensor(0), 1e9)
    with torch.no_grad():
        fused = wrapped(TOKENS)
        wrapped.run_with_cache(
            TOKENS, names_filter=lambda name: name.endswith(("positions", "hook_z", "hook_q"))
        )
        assert made == []
        watched = wrapped.run_with_hooks(TOKENS, fwd_hooks=[(pattern, lambda found, hook: None)])
        assert made == [1]
        with wrapped.hooks(fwd_hooks=[(scores, lambda z, hook: z * 0 + first_key_only)]):
            _, edited = wrapped.run_with_cache(TOKENS, names_filter=pattern)
    assert_close(watched, fused, atol=1e-5, rtol=1e-5)
    assert_close(edited[pattern][..., 0], torch.ones(2, 4, 20))


def test_hook_names_and_shapes_are_transformer_lens_own():
    stock = tiny("olmo2")
    theirs = build_bridge_from_module(
        copy.deepcopy(stock), "Olmo2ForCausalLM", hf_config=stock.config
    )
    ours = ri.bridge(ri.reposition(stock, "rope"))
    with torch.no_grad():
        their_logits, their_cache = theirs.run_with_cache(TOKENS)
        our_logits, our_cache = ours.run_with_cache(TOKENS)
    assert_close(our_logits, their_logits)
    assert set(our_cache) - set(their_cache) == {positions_hook(layer) for layer in range(3)}
    assert set(their_cache) <= set(our_cache)
    tables = ("hook_cos", "hook_sin")  # half tables here
    for name in their_cache:
        if not name.endswith(tables):
            assert_close(our_cache[name], their_cache[name], msg=name)


def test_bridge_generates_what_the_model_generates():
    model = ri.reposition(tiny("qwen3"), "rope,nope,repo")
    asked = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(TOKENS[:1], eos_token_id=None, **asked)
    asked |= {"stop_at_eos": False, "verbose": False}
    wrapped = ri.bridge(model)
    for cached in (True, False):
        out = wrapped.generate(TOKENS[:1], use_past_kv_cache=cached, **asked)
        assert torch.equal(out, expected)


def test_a_copied_bridge_is_independent():
    wrapped = bridged()
    twin = copy.deepcopy(wrapped)
    twin.add_hook(positions_hook(1), lambda positions, hook: positions * 0)
    with torch.no_grad():
        assert (twin(TOKENS) - wrapped(TOKENS)).abs().max() > 1e-3
        twin.reset_hooks()
        assert torch.equal(twin(TOKENS), wrapped(TOKENS))


def test_a_stock_adapter_that_would_lose_positions_is_refused():
    model = ri.reposition(tiny("olmo2"), "repo")
    with refused(r"positions by 'repo', and other code, such as a stock TransformerLens adapter"):
        build_bridge_from_module(model, type(model).__name__, hf_config=model.config)(TOKENS)
    gc.collect()


@pytest.mark.parametrize("fault", ["raises", "computes other logits"])
def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_was_and_ours_is_taken(
    fault, monkeypatch
):
    stock = tiny("olmo2")
    with torch.no_grad():
        expected = stock(TOKENS).logits
    adapters = ArchitectureAdapterFactory._adapters
    theirs = adapters["Olmo2ForCausalLM"]

    class Faulty(theirs):
        def prepare_model(self, hf_model):
            hf_model.model.layers[0].register_forward_hook(lambda *given: 2 * given[-1])
            if fault == "raises":
                hf_model.model.layers[1] = nn.Identity()

    monkeypatch.setitem(adapters, "Olmo2ForCausalLM", Faulty)
    model = ri.reposition(stock, "rope")
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *given: seen.append(given))
    wrapped = ri.bridge(model)
    assert type(wrapped.adapter).__module__ == "repo_interp.models.bridge"
    with torch.no_grad():
        logits, cache = wrapped.run_with_cache(TOKENS)
    assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert positions_hook(1) in cache and "blocks.1.attn.hook_pattern" in cache
    passes = len(seen)
    handle.remove()  # of the very dict that held it before
    wrapped(TOKENS)
    assert len(seen) == passes > 0


def test_switches_that_repositioned_attention_does_not_offer_raise():
    wrapped = bridged()
    wrapped.cfg.use_attn_result = True
    with refused("use_attn_result is not offered"):
        wrapped(TOKENS)


def test_the_tokenizer_stays_as_it_is():
    """TransformerLens adds tokens beyond the vocabulary and loads tokenizers anew; a closed
    vocabulary knows no "a".
    """
    tokenizer = word_tokenizer(pad_token="<pad>", bos_token="<bos>")
    before = tokenizer.get_vocab()
    wrapped = ri.bridge(ri.reposition(tiny("llama"), "repo"), tokenizer)
    assert wrapped.tokenizer is tokenizer and tokenizer.get_vocab() == before
    assert wrapped.cfg.d_vocab == 64
    assert wrapped.cfg.tokenizer_prepends_bos and not wrapped.cfg.tokenizer_appends_eos
    assert wrapped.to_tokens("grass sky").tolist() == [[1, 2, 3]]
    bare = ri.bridge(ri.reposition(tiny("llama"), "repo"), word_tokenizer(pad_token="<pad>"))
    assert not bare.cfg.tokenizer_prepends_bos


def test_hook_points_are_those_that_transformer_lens_finds_among_all_attributes():
    """The bridge is built while dir() leaves out methods: another scan, with them, adds nothing."""
    built = bridged(layout="cope")
    registry = dict(built._hook_registry)
    named = {name: point.name for name, point in registry.items()}
    built._scan_existing_hooks(built, "")
    assert built._hook_registry == registry
    assert {name: point.name for name, point in registry.items()} == named
    assert "forward" in dir(built) and "parameters" in dir(built.blocks[0])
