"""A cache that drops keys generates as one that keeps all, and as stock Llama with an additive mask."""

from contextlib import ExitStack

import pytest
import torch
from families import repositioned
from refusals import refused
from transformers import AutoModelForCausalLM, DynamicCache

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.checkpoint_files.shipped import zoo_path

WINDOW, SINKS = 8, 3
TOKENS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(2))


def lost(pair):
    return (pair.distance >= WINDOW) & (pair.key >= SINKS)


@pytest.fixture(params=["rope", "repo", "alibi", "cope"])
def model(request):
    torch.manual_seed(0)
    return repositioned(request.param)


def test_kept_keys_are_the_first_and_the_last(model):
    cache = ri.StreamingCache(WINDOW, SINKS)
    with torch.no_grad(), iv.hidden_keys(model, lost):
        model(TOKENS, past_key_values=cache)
    # the next query, token 20, sees itself and those less than 8 before it
    assert cache.layers[0].kept.tolist() == [0, 1, 2, *range(13, 20)]
    assert cache.layers[0].keys.shape[2] == WINDOW - 1 + SINKS
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("pieces", [(1,) * 20, (7, 7, 6), (20,)])
def test_passes_with_it_are_those_of_the_whole_text(model, implementation, pieces):
    model.set_attn_implementation(implementation)
    with torch.no_grad(), iv.hidden_keys(model, lost):
        whole = model(TOKENS).logits
        cache = ri.StreamingCache(WINDOW, SINKS)
        parts = [model(part, past_key_values=cache).logits for part in TOKENS.split(pieces, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


def test_text_is_generated_as_with_a_cache_of_all_keys(model):
    options = {"max_new_tokens": 30, "do_sample": False}
    with iv.hidden_keys(model, lost):
        expected = model.generate(TOKENS, **options, past_key_values=DynamicCache())
        cache = ri.StreamingCache(WINDOW, SINKS)
        assert torch.equal(model.generate(TOKENS, **options, past_key_values=cache), expected)
        assert all(layer.keys.shape[2] == WINDOW - 1 + SINKS for layer in cache.layers)
        cache.reset()
        assert torch.equal(model.generate(TOKENS, **options, past_key_values=cache), expected)


def test_beyond_the_training_length_distances_are_capped():
    """Token by token, with a bounded cache, as one pass of stock Llama by its authors' formula."""
    model, length = ri.open_model("language/rope"), 300
    tokens = torch.randint(3, 2000, (1, length), generator=torch.Generator().manual_seed(0))
    edits = [
        iv.hidden_keys(model, lambda pair: (pair.distance >= 16) & (pair.key >= 4)),
        iv.distances(model, lambda distance, pair: distance.clamp(max=16)),
    ]
    cache = ri.StreamingCache(16, 4)
    with torch.no_grad(), ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit)
        steps = [model(part, past_key_values=cache).logits for part in tokens.split(5, 1)]
    assert cache.layers[0].keys.shape[2] == 19
    stock = AutoModelForCausalLM.from_pretrained(zoo_path("language/rope")).eval()
    with torch.no_grad(), slow_attention(stock, 16, 4):
        expected = stock(tokens).logits
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-4, rtol=1e-4)


def slow_attention(stock, window, sinks):
    """Stock Llama whose layers attend by whole matrices: far keys at one distance, few of them."""
    frequencies, width = stock.model.rotary_emb.inv_freq, stock.config.head_dim

    def rotated(vectors, positions):
        first, second = vectors.chunk(2, -1)
        cos, sin = (
            (positions[:, None] * frequencies).cos(),
            (positions[:, None] * frequencies).sin(),
        )
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    def forward(module, hidden_states):
        queries, keys, values = (
            project(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        index = torch.arange(hidden_states.shape[1])
        apart = index[:, None] - index
        near = rotated(queries, index) @ rotated(keys, index).mT
        far = rotated(queries, torch.full_like(index, window)) @ keys.mT
        hidden = (apart < 0) | ((apart >= window) & (index >= sinks))
        scores = torch.where(apart < window, near, far).masked_fill(hidden, -torch.inf)
        weights = (scores / width**0.5).softmax(-1)
        return module.o_proj((weights @ values).transpose(1, 2).flatten(2)), weights

    stack = ExitStack()
    for block in stock.model.layers:
        module = block.self_attn
        module.forward = lambda hidden_states, module=module, **_: forward(module, hidden_states)
        stack.callback(module.__dict__.pop, "forward")
    return stack


def test_what_it_cannot_do_is_refused():
    torch.manual_seed(0)
    model = repositioned("rope")
    for sizes, words in (((0, 4), "the window"), ((8, -1), "the sinks"), ((2.5, 4), "the window")):
        with refused(words):
            ri.StreamingCache(*sizes)
    options = {"max_new_tokens": 3, "pad_token_id": 0}
    padded = torch.ones_like(TOKENS)
    padded[0, :3] = 0
    cache = ri.StreamingCache(WINDOW, SINKS)
    with refused("give prompts of one length"):
        model.generate(TOKENS, attention_mask=padded, past_key_values=cache, **options)
    remembering = repositioned("repo_attention")
    with refused("the scheme of this layer remembers all"):
        remembering.generate(TOKENS, past_key_values=ri.StreamingCache(WINDOW, SINKS), **options)
