"""Paths between heads: queries, keys, values and positions of a receiver without one sender."""

import pytest
import torch
from families import TOKENS, repositioned, tiny
from hooks import hooks_of
from refusals import refused
from scipy import stats
from test_ablation import gpt2
from torch.testing import assert_close

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.models.decoder import as_decoder
from repo_interp.models.observing import observing

MODELS = {
    "llama": lambda: ri.reposition(tiny("llama"), "rope"),
    "repo": lambda: repositioned("repo"),
    "gemma2": lambda: ri.reposition(tiny("gemma2"), "rope"),
    "olmo2": lambda: ri.reposition(tiny("olmo2"), "rope"),
    "gpt2": gpt2,
}
SITES = ("queries", "keys", "values")


@pytest.fixture(params=MODELS, scope="module")
def bridge(request):
    torch.manual_seed(0)
    return ri.bridge(MODELS[request.param]())


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return ri.bridge(MODELS["llama"]())


@torch.no_grad()
def seen(bridge, layer=2, tokens=TOKENS):
    """Tensors of a layer as measures see them, [prompt, token, head, d_head]."""
    found = {}

    def receive(inputs):
        found.update({site: getattr(inputs, site).transpose(1, 2) for site in SITES})

    valid = torch.ones_like(tokens, dtype=torch.bool)
    with observing(as_decoder(bridge), valid, torch.arange(len(tokens)), receive, [layer]):
        bridge(tokens)
    return found


@torch.no_grad()
def by_hand(bridge, heads, outputs=None):
    """The layer 2 computed of the residual stream without what `heads` of layer 0 wrote there."""
    stack, (first, *_) = as_decoder(bridge).blocks, as_decoder(bridge).layers
    wrote, entered = {}, []
    with stack[2].register_forward_pre_hook(
        lambda block, given, more: entered.append(given[0] if given else more["hidden_states"]),
        with_kwargs=True,
    ):
        bridge(TOKENS)
    _, cache = bridge.run_with_cache(TOKENS)
    z = cache["blocks.0.attn.hook_z"].reshape(*TOKENS.shape, 4, -1)
    for name in ("whole", "without"):
        given = z.clone()
        if name == "without":
            given[:, :, heads] = 0 if outputs is None else outputs[:, :, heads]
        wrote[name] = first.output_projection(given.flatten(2))
    norm = getattr(stack[0], "post_attention_layernorm", None)
    if norm is not None and as_decoder(bridge).owner.config.model_type in ("gemma2", "olmo2"):
        wrote = {name: norm(part) for name, part in wrote.items()}
    changed = entered[0] - (wrote["whole"] - wrote["without"])
    with stack[2].register_forward_pre_hook(
        lambda block, given, more: (
            ((changed, *given[1:]), more) if given else (given, more | {"hidden_states": changed})
        ),
        with_kwargs=True,
    ):
        return seen(bridge)


@pytest.mark.parametrize("into", SITES)
def test_a_receiver_reads_the_residual_stream_without_the_sender(bridge, into):
    before, changed = seen(bridge), by_hand(bridge, [1, 2])
    plain, hooks = bridge(TOKENS), hooks_of(bridge)  # TransformerLens keeps some of its own
    earlier = seen(bridge, 1)
    shared = 4 // before["keys"].shape[2] if into != "queries" else 1
    receivers = [*range(2, 2 + shared)]
    with iv.ablate_paths(bridge, [(0, 1), (0, 2)], [(2, head) for head in receivers], into):
        found, rest = seen(bridge), seen(bridge, 1)
        assert not torch.equal(bridge(TOKENS), plain)
    rows = {head // shared for head in receivers}
    for site in SITES:
        for row in range(before[site].shape[2]):
            expected = changed if site == into and row in rows else before
            assert_close(found[site][:, :, row], expected[site][:, :, row], atol=1e-5, rtol=1e-4)
        assert torch.equal(rest[site], earlier[site])
    read = (part[into][:, :, min(rows)] for part in (before, changed))
    assert not torch.allclose(*read, atol=1e-3)
    assert torch.equal(bridge(TOKENS), plain) and hooks_of(bridge) == hooks


def test_a_path_is_patched_from_another_prompt_and_from_means(llama):
    with torch.no_grad():
        z = llama.run_with_cache(TOKENS.flip(1))[1]["blocks.0.attn.hook_z"]
    means = ri.head_means(llama, TOKENS.tolist())
    of_z = z.reshape(*TOKENS.shape, 4, -1)
    for outputs, written in (({0: z}, of_z), (means, means[0].expand_as(of_z))):
        expected = by_hand(llama, [1], written)["queries"][:, :, 3]
        with iv.ablate_paths(llama, (0, 1), (2, 3), "queries", outputs):
            assert_close(seen(llama)["queries"][:, :, 3], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_learned_positions_are_read_of_the_same_stream_and_a_cache_gets_keys_once():
    torch.manual_seed(0)
    model = repositioned("repo")
    bridge, heads = ri.bridge(model), [(2, head) for head in range(4)]
    every = [(0, head) for head in range(4)]
    plain, rest = iv.positions_of(bridge, TOKENS)[2], seen(bridge)
    with iv.ablate_paths(bridge, every, heads, "positions"):
        changed, after = iv.positions_of(bridge, TOKENS)[2], seen(bridge)
    assert not torch.allclose(changed, plain, atol=1e-3)
    assert all(torch.equal(after[site], rest[site]) for site in SITES)
    with iv.ablate_paths(bridge, every, heads, (*SITES, "positions")):
        whole = model(TOKENS).logits
        first = model(TOKENS[:, :15], use_cache=True)
        second = model(TOKENS[:, 15:], past_key_values=first.past_key_values).logits
    assert_close(second, whole[:, 15:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(whole, model(TOKENS).logits, atol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (((2, 0), (2, 1)), "a path leads from a layer to a later one; got one from layer 2 to"),
        (((0, 0), (2, 1), "pattern"), "paths lead into some of queries, keys, values, positions"),
        (((0, 0), (2, 1), "keys"), "share their keys, values or positions, 2 each"),
        (((0, 0), (2, 1), "positions"), r"layer 2 \(rope\) learns no positions"),
        (((0, 9), (2, 1)), "head 9 was asked for"),
        (((0, 0), (2, 1), "queries", {}), "outputs lack layer 0"),
        (((0, 1), (2, 1), "queries", {0: torch.zeros(4, 3)}), r"of layer 0 are \[4, 3\]; wanted"),
    ],
)
def test_what_is_no_path_is_one_line(llama, arguments, line):
    with refused(line), iv.ablate_paths(llama, *arguments):
        llama(TOKENS)


PATHS = {
    "none": [],
    "one": [((0, 1), (2, 0), "queries")],
    "another": [((1, 3), (2, 0), "queries")],
    "both": [((0, 1), (2, 0), "queries"), ((1, 3), (2, 0), "queries")],
    "apart": [((0, 1), (2, 0), "queries"), ((1, 3), (2, 2), "queries")],
    "chain": [((0, 2), (1, 0), "queries"), ((1, 0), (2, 3), "queries")],
    "keys": [((0, sender), (2, head), "keys") for sender in (0, 2) for head in (2, 3)],
}


@torch.no_grad()
def test_paths_of_a_set_are_removed_together_each_from_its_own_receiver(llama):
    before = seen(llama)
    for heads, paths in (([1], "one"), ([0, 2], "keys")):
        senders, site = [(0, head) for head in heads], PATHS[paths][0][2]
        receivers = sorted({path[1] for path in PATHS[paths]})
        with iv.ablate_paths(llama, senders, receivers, site):
            expected = seen(llama)
        with iv.ablate_paths(llama, sets=[PATHS[paths]]):
            found = seen(llama)
        for name in SITES:
            assert torch.equal(found[name], expected[name])
    with iv.ablate_paths(llama, (1, 3), (2, 2), "queries"):
        other = seen(llama)["queries"][:, :, 2]
    with iv.ablate_paths(llama, (0, 1), (2, 0), "queries"):
        first = seen(llama)["queries"][:, :, 0]
    with iv.ablate_paths(llama, sets=[PATHS["apart"]]):
        found = seen(llama)["queries"]
    assert torch.equal(found[:, :, 0], first) and torch.equal(found[:, :, 2], other)
    assert torch.equal(found[:, :, 1], before["queries"][:, :, 1])
    with iv.ablate_paths(llama, sets=[PATHS["both"]]):
        found = seen(llama)["queries"][:, :, 0]
    # One second run without both senders
    with iv.ablate_paths(llama, [(0, 1), (1, 3)], (2, 0), "queries"):
        assert torch.equal(found, seen(llama)["queries"][:, :, 0])
    assert not torch.allclose(found, first, atol=1e-3)


def _with(bridge, edit):
    with edit:
        return bridge(TOKENS)


@torch.no_grad()
def test_sets_of_prompts_side_by_side_are_those_one_by_one(llama):
    whole, hooks = TOKENS[:1].expand(len(PATHS), -1), hooks_of(llama)
    with iv.ablate_paths(llama, sets=[*PATHS.values()]):
        found = llama(whole)
    for row, (name, paths) in enumerate(PATHS.items()):
        expected = (
            _with(llama, iv.ablate_paths(llama, sets=[paths]))[0] if paths else llama(TOKENS)[0]
        )
        assert_close(found[row], expected, atol=1e-5, rtol=1e-4)
        assert name == "none" or (expected - llama(TOKENS)[0]).abs().max() > 1e-4
    assert hooks_of(llama) == hooks


@pytest.mark.parametrize("means", [False, True])
def test_effects_of_sets_are_differences_of_logits_pass_by_pass(means):
    torch.manual_seed(0)
    model = repositioned("repo")
    prompts, right, wrong = [TOKENS[0].tolist(), TOKENS[1, :13].tolist(), [5, 9, 7]], [7, 8, 9], 20
    sets = PATHS | {"positions": [((0, 1), (2, head), "positions") for head in range(4)]}
    outputs = ri.head_means(model, prompts) if means else None
    found = ri.path_effects(
        model, prompts, sets, right, wrong, means=outputs, batch_size=2, progress=lambda *done: None
    )
    with torch.no_grad():
        for number, tokens in enumerate(prompts):

            def difference(tokens=tokens, number=number):
                logits = model(torch.tensor([tokens])).logits[0, -1]
                return float(logits[right[number]] - logits[wrong])

            plain = difference()
            assert abs(float(found["logit_difference"][number]) - plain) < 1e-4
            for name, paths in sets.items():
                with iv.ablate_paths(model, outputs=outputs, sets=[paths]):
                    expected = difference() - plain
                change = float(found["change_by_prompt"].sel(set=name, prompt=number))
                assert change == pytest.approx(expected, abs=1e-4), name
    rows = found["change_by_prompt"].sel(set="both").values
    low, high = stats.t.interval(0.95, 2, rows.mean(), stats.sem(rows))
    here = found.sel(set="both")
    assert [float(here["change_low"]), float(here["change_high"])] == pytest.approx([low, high])


def test_what_is_no_set_of_paths_is_one_line(llama):
    for line, sets in (
        ("a path is a sender and a receiver", [[5]]),
        ("heads are .layer, head. pairs", [[(0, 1)]]),
        ("paths lead into some of", [[((0, 1), (2, 0), "pattern")]]),
        ("from layer 2 to layer 1", [[((2, 1), (1, 0))]]),
        ("head 9 was asked for", [[((0, 9), (1, 0), "queries")]]),
        ("share their keys", [[((0, 1), (2, 0), "keys"), ((0, 2), (2, 1), "keys")]]),
        ("paths of 3 prompts were named, but 2 prompts came", [PATHS["one"]] * 3),
    ):
        with refused(line), iv.ablate_paths(llama, sets=sets):
            llama(TOKENS)
    with refused("give either"), iv.ablate_paths(llama, (0, 1), (2, 0), sets=[[]]):
        llama(TOKENS)
    for line, sets in (("at least one", {}), ("lists by name", [PATHS["one"]])):
        with refused(line):
            ri.path_effects(llama, TOKENS, sets, 3, 4)
