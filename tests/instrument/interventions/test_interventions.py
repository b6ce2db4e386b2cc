"""Interventions on positions: each in closed form, gone afterwards to the last bit, nested, refused
by name, and while generating.
"""

import math
import re
from copy import deepcopy
from functools import partial
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
import xarray as xr
from families import repositioned, tiny
from hooks import hooks_of
from refusals import refused
from task_tokenizers import tokenizer
from torch.testing import assert_close
from transformers import MistralConfig, MistralForCausalLM

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.errors import Note
from repo_interp.experiments.generated_scores import generated_texts
from repo_interp.interventions import patching
from repo_interp.models.decoder import as_decoder
from repo_interp.models.generation import continue_greedily
from repo_interp.tasks import Prompt

generator = torch.Generator().manual_seed(1)
TOKENS, OTHERS = (torch.randint(3, 64, (2, 20), generator=generator) for _ in range(2))
HOOK = "blocks.0.attn.hook_positions"
ORDER = torch.randperm(12, generator=generator)
SPAN = range(5, 9)
NEAR = {"atol": 1e-5, "rtol": 1e-4}
CASES = {
    "linearised": iv.linearised,
    "frozen": iv.frozen,
    "frozen at a value": partial(iv.frozen, value=3.0),
    "permuted": partial(iv.permuted, order=ORDER),
    "permuted by a seed": lambda model, **where: iv.permuted(
        model, **where | {"tokens": range(12)}
    ),
    "swapped tokens": lambda model, **where: iv.swapped_tokens(
        model, 3, 11, **{k: v for k, v in where.items() if k != "tokens"}
    ),
    "swapped heads": lambda model, **where: iv.swapped_heads(model, (1, 0), (1, 3)),
    "scaled": partial(iv.scaled, factor=3.0),
    "rounded": partial(iv.rounded, step=3.0),
    "clipped": partial(iv.clipped, low=-0.1, high=0.1),
    "shifted": lambda model, **where: iv.shifted(model, 4.5, **where | {"tokens": SPAN}),
    "copied": partial(iv.copied, source=6),
    "transplanted": lambda model, **where: iv.transplanted(
        model, iv.positions_of(model, OTHERS[:, ::2]), **where
    ),
    "transplanted from a head": lambda model, **where: iv.transplanted(
        model, iv.positions_of(model, OTHERS[:1, ::2]), from_head=(0, 1), **where
    ),
    "segmented": partial(iv.segmented, starts=[4, 9], step=0.5, jump=3.0),
    "ranked": lambda model, **where: iv.ranked(model, **where | {"tokens": range(12)}),
    "straightened": lambda model, **where: iv.straightened(model, **where | {"tokens": range(12)}),
    "set": lambda model, **where: iv.set_positions(
        model, 1, 2, lambda positions: positions * 2 + 1
    ),
    "replaced": partial(iv.replaced, change=lambda positions, here: positions**2),
}
FORWARD = {
    "linearised": iv.linearised,
    "exchanged keys": lambda model: iv.exchanged_keys(
        model, {1: torch.arange(19, -1, -1).expand(2, -1)}
    ),
    "moved keys": lambda model: iv.moved_keys(model, {0: lambda z: -0.5 * z, 1: lambda z: 0.3 * z}),
    "interpolated": lambda model: iv.interpolated(model, 2.0),
    "yarn": lambda model: iv.yarn(model, 4.0, 8),
    "lm_infinite": lambda model: iv.lm_infinite(model, 6, 2),
    "infllm": lambda model: iv.infllm(model, 6),
    "hidden keys": lambda model: iv.hidden_keys(model, lambda pair: pair.distance > 4, layers=1),
    "distances": lambda model: iv.distances(model, lambda distance, pair: distance / 3, (2, 1)),
    "patching": lambda bridge: patching._named_shortly(as_decoder(bridge)),
}
SCHEMES = ("rope", "repo", "repo head", "repo layer")


@pytest.fixture(scope="module", params=SCHEMES)
def model(request):
    torch.manual_seed(0)
    return repositioned(request.param)


@pytest.fixture(scope="module")
def repo():
    torch.manual_seed(0)
    return repositioned("repo")


@torch.no_grad()
def logits(model, *contexts, tokens=TOKENS):
    if not contexts:
        return model(tokens).logits
    with contexts[0]:
        return logits(model, *contexts[1:], tokens=tokens)


def assert_same(model, context, *others, atol=0.0, rtol=0.0):
    """The logits inside a context are those inside the others; without others, the model's own."""
    assert_close(logits(model, context), logits(model, *others), atol=atol, rtol=rtol)


def twin(model, layout):
    """`model` with other positions and the same weights."""
    return ri.reposition(deepcopy(model), layout).eval()


@pytest.mark.parametrize("context", (CASES | FORWARD).values(), ids=CASES | FORWARD)
def test_an_error_inside_leaves_nothing_behind(context, bridged):
    before, plain = hooks_of(bridged), logits_of(bridged)
    fail = ("blocks.2.attn.hook_positions", lambda positions, hook: 1 / 0)
    with pytest.raises(ZeroDivisionError), context(bridged):
        bridged.run_with_hooks(TOKENS, fwd_hooks=[fail])
    bridged.reset_hooks()
    assert hooks_of(bridged) == before and torch.equal(logits_of(bridged), plain)


@torch.no_grad()
def logits_of(bridge):
    return bridge(TOKENS)


def test_linearised_is_plain_rope_and_frozen_is_nope(model):
    assert_close(
        logits(model, iv.linearised(model)), logits(twin(model, "rope")), atol=2e-6, rtol=0
    )
    nope = logits(twin(model, "nope"))
    for value in (None, 0.0, 40.0):
        assert_close(logits(model, iv.frozen(model, value=value)), nope, atol=2e-5, rtol=1e-4)


def test_shifting_all_tokens_changes_nothing_and_a_span_what_it_says(model):
    assert_same(model, iv.shifted(model, 7.5, [(0, 1), (1, 0)]), atol=5e-5, rtol=1e-4)
    by_hand = iv.set_positions(
        model, 1, None, lambda z: torch.cat([z[..., :5], z[..., 5:9] + 7.5, z[..., 9:]], -1)
    )
    assert_same(model, iv.shifted(model, 7.5, layer=1, tokens=SPAN), by_hand)


def test_permuting_is_reading_positions_in_that_order(model):
    order = torch.cat([ORDER, torch.arange(12, 20)])
    for head, heads in ((1, (1, 1)), (None, [(1, head) for head in range(4)])):
        for given in (ORDER, ORDER.repeat(2, 1)):
            by_hand = iv.set_positions(model, 1, head, lambda z: z[..., order])
            assert_same(model, iv.permuted(model, heads, order=given), by_hand)
    own, *drawn = (
        positions_under(model, *(iv.permuted(model, tokens=range(12), seed=n) for n in seeds))
        for seeds in ((), (0,), (0,), (1,))
    )
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0][..., :12].sort(-1).values, own[..., :12].sort(-1).values)
    assert torch.equal(drawn[0][..., 12:], own[..., 12:])


def positions_under(model, *contexts, layer=0):
    if not contexts:
        return iv.positions_of(model, TOKENS)[layer]
    with contexts[0]:
        return positions_under(model, *contexts[1:], layer=layer)


def test_swapping_twice_changes_nothing_and_once_is_an_order(model):
    for one, other in ((3, 11), (range(2, 5), [9, 8, 7])):
        order = torch.arange(12)
        order[[*np.r_[one, other]]] = torch.tensor([*np.r_[other, one]])
        once, twice, again = (iv.swapped_tokens(model, one, other, [(1, 2)]) for _ in range(3))
        assert_same(model, once, iv.permuted(model, [(1, 2)], order=order))
        left = positions_under(model, twice, again, layer=1)
        assert torch.equal(left[:, -1], positions_under(model, layer=1)[:, -1])


def test_swapped_heads_have_each_others_positions():
    # In "repo" heads 0, 1 and heads 2, 3 share a key-value head
    for scheme, one, other, rows in (
        ("repo head", 0, 3, [3, 1, 2, 0]),
        ("repo", 1, 2, [0, 1, 0, 1]),
        ("repo layer", 0, 3, [0, 0, 0, 0]),
    ):
        model = repositioned(scheme)
        own = positions_under(model, layer=1)[:, rows]
        swapped = iv.swapped_heads(model, (1, one), (1, other))
        assert torch.equal(positions_under(model, swapped, layer=1), own)


def test_transplanting_its_own_positions_changes_nothing_to_the_last_bit(model):
    own = iv.positions_of(model, TOKENS)
    assert_same(model, iv.transplanted(model, own))
    bridge = ri.bridge(deepcopy(model))
    with torch.no_grad():
        plain, cache = bridge.run_with_cache(TOKENS)
        with iv.transplanted(bridge, cache, layer=[0, 1]):
            assert torch.equal(bridge.run_with_cache(TOKENS)[0], plain)
    assert_same(model, iv.transplanted(model, own, [(1, 2)]), **NEAR)


def test_transplanted_positions_are_those_of_the_other_prompt_or_checkpoint(model):
    other = repositioned("repo head")
    for source in (model, other):
        theirs = iv.positions_of(source, OTHERS)
        for from_head, layer, head in ((None, 1, 2), ((0, 1), 0, 1)):
            rows = theirs[layer].repeat_interleave(4 // theirs[layer].shape[1], 1)
            by_hand = iv.set_positions(model, 1, 2, rows[:, head])
            given = iv.transplanted(model, theirs, [(1, 2)], from_head=from_head)
            assert_same(model, given, by_hand, atol=1e-6)
    one, both = (
        {layer: positions[some] for layer, positions in theirs.items()} for some in ([0], [0, 0])
    )
    assert_same(model, iv.transplanted(model, one), iv.transplanted(model, both))


def test_scaling_rounding_and_clipping_at_their_ends(model):
    for nothing in (
        iv.scaled(model, 1.0),
        iv.clipped(model, -1e9, 1e9),
        iv.replaced(model, lambda z, here: z),
    ):
        assert_same(model, nothing)
    for all_zero in (
        iv.scaled(model, 0.0),
        iv.rounded(model, step=1e9),
        iv.clipped(model, 0.0, 0.0),
    ):
        assert_same(model, all_zero, iv.frozen(model, value=0.0))
    rope = twin(model, "rope")
    assert_same(rope, iv.rounded(rope))


def test_contexts_compose_from_the_outside_in(repo):
    found = positions_under(repo, iv.linearised(repo), iv.shifted(repo, 4.0, tokens=SPAN))
    values = torch.arange(20.0)
    values[5:9] += 4
    assert torch.equal(found, values.expand_as(found))
    assert_same(repo, iv.linearised(repo), iv.scaled(repo, 9.0), iv.linearised(repo))


@pytest.fixture(scope="module")
def bridged(repo):
    """A bridge whose own hooks are there: it attaches some in its first pass."""
    bridge = ri.bridge(deepcopy(repo))
    logits_of(bridge)
    return bridge


def aliases_of(bridge):
    return [dict(block.hook_aliases) for block in bridge.blocks]


@pytest.fixture(scope="module")
def alone(bridged):
    """The logits inside a context by itself, and without any."""
    found = {"": logits_of(bridged)}
    for name, context in FORWARD.items():
        with context(bridged):
            found[name] = logits_of(bridged)
    return found


@pytest.mark.parametrize(("first", "second"), list(combinations_with_replacement(FORWARD, 2)))
def test_every_two_contexts_end_in_any_order_and_leave_the_model_as_it_was(
    first, second, bridged, alone
):
    """Found: of `yarn` and `interpolated` the one that was left last put back the other's
    rotation.
    """
    hooks, aliases = hooks_of(bridged), aliases_of(bridged)
    for last in (0, 1):
        both = [FORWARD[first](bridged), FORWARD[second](bridged)]
        for context in both:
            context.__enter__()
        both.pop(1 - last).__exit__(None, None, None)
        assert torch.equal(logits_of(bridged), alone[(first, second)[last]])
        both[0].__exit__(None, None, None)
        assert torch.equal(logits_of(bridged), alone[""])
        assert hooks_of(bridged) == hooks and aliases_of(bridged) == aliases


@pytest.mark.parametrize("name", ["linearised", "exchanged keys", "yarn", "lm_infinite"])
def test_a_model_is_not_copied_inside_a_context(name, bridged):
    """Found: the copy kept the hooks for good."""
    with FORWARD[name](bridged), refused("copied while an intervention lasts"):
        deepcopy(bridged)
    assert torch.equal(logits_of(deepcopy(bridged)), logits_of(bridged))


@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_keys_that_are_moved_to_nan_are_refused_whatever_the_scheme(scheme):
    model = repositioned(scheme)
    moved = iv.moved_keys(model, dict.fromkeys(range(3), lambda positions: positions * math.nan))
    with refused("the shifts of keys are NaN or infinite"):
        logits(model, moved)


@pytest.mark.parametrize(
    ("scheme", "of_all", "of_a_group"),
    [("rope", 1, 2), ("repo", 2, 2), ("repo head", 4, 4), ("repo layer", 1, 2)],
)
def test_rows_are_as_few_as_the_choice_of_heads_allows(scheme, of_all, of_a_group):
    model = repositioned(scheme)
    own = positions_under(model, layer=1)
    for heads, rows in ((range(4), of_all), ((2, 3), of_a_group), ((3,), 4)):
        changed = iv.frozen(model, [(1, head) for head in heads], value=3.0)
        found = positions_under(model, changed, layer=1)
        assert found.shape[1] == rows
        for head in range(4):  # and the other heads have those that they had
            expected = own[:, head * own.shape[1] // 4] if head not in heads else 3.0
            assert (found[:, head * rows // 4] == expected).all()


ASKED = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "attention_mask": torch.ones_like(TOKENS),
}


@pytest.mark.parametrize("case", [case for case in CASES if case != "replaced"])
def test_generation_with_cache_is_generation_without(case, repo):
    texts = []
    for use_cache in (True, False):
        with CASES[case](repo, heads=[(0, 1), (1, 2), (2, 0)]):
            texts.append(
                repo.generate(TOKENS, use_cache=use_cache, **ASKED | {"max_new_tokens": 3})
            )
    assert torch.equal(*texts)


@pytest.mark.parametrize("case", CASES)
def test_padding_on_the_left_changes_nothing(case, repo):
    """Tokens are counted as attention counts them, and the mask says what is padding."""
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), TOKENS], dim=1)
    mask = (torch.arange(25) >= 5).long().expand(2, -1)
    index = (mask.cumsum(1) - 1).clamp_min(0)
    heads = [(0, 1), (2, 3)]
    with CASES[case](repo, heads=heads), torch.no_grad():
        shifted = repo(padded, attention_mask=mask, position_ids=index).logits[:, 5:]
    assert_close(shifted, logits(repo, CASES[case](repo, heads=heads)), atol=1e-4, rtol=1e-4)


def test_copied_positions_are_those_of_the_token(repo):
    before = iv.positions_of(repo, TOKENS)
    with iv.copied(repo, 6, layer=1, tokens=SPAN):
        after = iv.positions_of(repo, TOKENS)
    assert torch.equal(after[1][..., SPAN], before[1][..., [6] * len(SPAN)])
    assert torch.equal(after[1][..., 9:], before[1][..., 9:]) and torch.equal(after[0], before[0])
    with iv.copied(repo, 20), refused("token 20 gives its position"):
        logits(repo)


def test_segments_step_between_and_rise_within(model):
    """Closed form: a sum of steps; constant, linear and NoPE are three settings of two numbers."""
    rise = torch.full((20,), 0.5)
    rise[0], rise[4], rise[9] = 0.0, 3.0, 3.0
    for starts in ([0, 9, 4], [[4, 9], [4, 9]]):
        found = positions_under(model, iv.segmented(model, starts, step=0.5, jump=3.0))
        assert torch.equal(found, rise.cumsum(0).expand_as(found))
    by_prompt = positions_under(model, iv.segmented(model, [[4], [9, 30]], layer=1), layer=1)
    index = torch.arange(20)
    assert torch.equal(by_prompt[:, 0], torch.stack([index >= 4, index >= 9]).float())
    assert_same(model, iv.segmented(model, [4, 9], step=1), iv.linearised(model))
    assert_same(model, iv.segmented(model, [0], jump=7), iv.frozen(model), **NEAR)
    of_one = positions_under(model, iv.segmented(model, [0], step=2))
    assert torch.equal(of_one[0, 0], 2.0 * index)


def test_ranks_are_counted(model):
    z = positions_under(model)
    after = positions_under(model, iv.ranked(model))
    below = (z[..., None, :] < z[..., None]).sum(-1) + 0.0
    ties = (z[..., None, :] == z[..., None]).sum(-1)
    assert torch.equal(after, (below + (ties - 1) / 2).expand_as(after))
    equal, some = iv.frozen(model, value=4.0), iv.ranked(model, tokens=range(5, 10))
    tied = positions_under(model, equal, some)
    assert (tied[..., 5:10] == 2).all() and (tied[..., 10:] == 4).all()
    both = [iv.permuted(model, order=ORDER), iv.ranked(model)]
    either = [iv.ranked(model), iv.permuted(model, order=ORDER)]
    assert torch.equal(positions_under(model, *both), positions_under(model, *either))


@pytest.mark.parametrize("edit", [iv.frozen, partial(iv.shifted, by=3.0, tokens=[8, 9])])
def test_an_edit_holds_while_generating_beyond_a_window(edit):
    """Found: errors of torch, since the mask of such a layer has the keys of its window alone."""
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model, ids = ri.reposition(MistralForCausalLM(config).eval(), "rope"), torch.arange(3, 13)[None]
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with edit(model):
        cached, whole = (model.generate(ids, use_cache=cache, **greedy) for cache in (True, False))
    assert torch.equal(cached, whole) and not torch.equal(whole, model.generate(ids, **greedy))


def test_lines_are_those_of_least_squares(model):
    before = positions_under(model)
    after = positions_under(model, iv.straightened(model, layer=0, tokens=range(3, 12)))
    index = np.arange(3, 12)
    for row, line in zip(before.flatten(0, 1), after.flatten(0, 1), strict=True):
        slope, start = np.polyfit(index, row[3:12].double(), 1)
        assert_close(line[3:12].double(), torch.tensor(start + slope * index), atol=1e-5, rtol=1e-5)
        assert torch.equal(line[12:], row[12:])
    assert_close(positions_under(model, iv.straightened(model, tokens=[5])), before)


@torch.no_grad()
def test_new_tokens_are_on_the_line_of_the_prompt(repo):
    """A line is its own fit, also where it is continued."""

    def new_token():
        cache = repo(TOKENS, use_cache=True).past_key_values
        return repo(TOKENS[:, :1], past_key_values=cache).logits

    with iv.linearised(repo), iv.scaled(repo, 0.5):
        expected = new_token()
        with iv.straightened(repo):
            assert_close(new_token(), expected, atol=1e-5, rtol=1e-5)
    with iv.straightened(repo, layer=0), refused("none are straightened"):
        cache = repo(TOKENS, use_cache=True).past_key_values
        with iv.straightened(repo, layer=0):
            repo(TOKENS[:, :1], past_key_values=cache)


def test_new_tokens_are_ranked_among_those_of_the_prompt(repo):
    with iv.scaled(repo, 0.0), iv.shifted(repo, 1.0, tokens=range(10, 20)), iv.ranked(repo):
        cache = repo(TOKENS, use_cache=True).past_key_values
        seen = []
        attention = as_decoder(repo).layers[0]
        handle = attention.sites.positions.register_forward_hook(lambda m, a, out: seen.append(out))
        repo(TOKENS[:, :1], past_key_values=cache)
        handle.remove()
    assert (seen[0] == 4.5).all()  # at 0, as the first ten tokens of the prompt
    with iv.ranked(repo), refused("in the cache are not known"):
        repo(TOKENS[:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "first"), [("ranked", 0), ("permuted", 0), ("permuted", 3), ("frozen", 3)]
)
def test_what_is_drawn_or_averaged_does_not_depend_on_who_stands_beside_whom(name, first, repo):
    """Found: prompts that stood beside longer ones were given positions of their padding, and means
    took it in.
    """
    texts = [TOKENS[0].tolist(), TOKENS[1, :11].tolist(), TOKENS[1, :7].tolist()]
    tokens, valid = ri.tokens(texts, repo)

    def changed(length):
        return getattr(iv, name)(repo, tokens=range(first, length) if first else None)

    with changed(20):
        alone, together = (
            ri.analyze(repo, texts, ("positions",), batch_size=size)["positions"].to_dataset()
            for size in (1, 3)
        )
        masked = repo(tokens, attention_mask=valid.long()).logits
    xr.testing.assert_allclose(alone, together, atol=1e-4)
    for row, text in zip(masked, texts, strict=True):
        own = logits(repo, changed(len(text)), tokens=torch.tensor([text]))[0]
        assert_close(row[: len(text)], own, atol=1e-4, rtol=1e-4)


def test_tokens_beyond_every_prompt_are_refused_where_prompts_are_measured(repo):
    """Found: nothing changed, and nothing was said."""
    texts = [list(range(3, 13)), list(range(3, 23))]
    with iv.shifted(repo, 100.0, layer=1, tokens=[19]):  # the longer prompt has it
        run = ri.analyze(repo, texts, ("positions",))
    assert (run["positions"]["position"].sel(layer=1, prompt=1, token=19) > 50).all()
    line = "token 20, and no prompt has more than 20 tokens, so that nothing would change there"
    for batch_size in (1, 2):
        with iv.shifted(repo, 100.0, tokens=[3, 20]), refused(line):
            ri.analyze(repo, texts, ("positions",), batch_size=batch_size)


@pytest.mark.parametrize("answers", ["forced", "generated"])
def test_tokens_beyond_every_answer_are_refused_where_answers_are_scored(answers):
    trained = ri.load("reversal/repo")
    asked = {"test_sets": ["5"], "count": 2, "answers": answers}
    longest = int(ri.score(trained, **asked)["scores"]["tokens"].max())
    # of the answer: it comes later where it is generated
    with iv.shifted(trained, 1.0, tokens=[longest - 2]):
        ri.score(trained, **asked)
    with iv.shifted(trained, 1.0, tokens=[longest]), refused(f"token {longest}, and no prompt"):
        ri.score(trained, **asked)


def test_tokens_that_no_pass_came_to_are_named_at_the_end(repo):
    line = "token 20 were to be changed, and no prompt had more than 20 tokens"
    with pytest.warns(Note, match=line) as warned:
        logits(repo, iv.shifted(repo, 5.0, tokens=[3, 20, 25]))
    assert len(warned) == 1 and warned[0].filename == __file__
    with iv.shifted(repo, 5.0, tokens=[24]):
        # the tokens come later
        repo.generate(TOKENS, **ASKED)
    with iv.shifted(repo, 5.0, tokens=[24]):
        pass  # no prompt came at all

    def pass_and_fail():
        logits(repo)
        raise KeyError("of the user")

    with pytest.raises(KeyError), iv.shifted(repo, 5.0, tokens=[24]):
        pass_and_fail()  # which is all that is said


PROMPT_BY_PROMPT = {
    "tokens": lambda model: iv.shifted(model, 100.0, tokens=[[2], [7]]),
    "orders": lambda model: iv.permuted(model, order=[[1, 0], [0, 1]]),
    "values": lambda model: iv.set_positions(model, 1, None, torch.zeros(2, 20)),
}


@pytest.mark.parametrize("what", PROMPT_BY_PROMPT)
def test_what_is_of_prompts_one_by_one_is_refused_where_they_pass_in_another_order(what, repo):
    """Found: of prompts of several lengths the longest pass first, so that each got what another
    one was to get.
    """
    texts = [list(range(3, 13)), list(range(3, 23))]
    with PROMPT_BY_PROMPT[what](repo), refused("separate values for each of 2 prompts"):
        ri.analyze(repo, texts, ("positions",), batch_size=2)
    with PROMPT_BY_PROMPT[what](repo):
        run = ri.analyze(repo, TOKENS, ("positions",), batch_size=2)
        # Found: in batches of as many the later prompts got what the first ones were to get
        with refused("for each of 2 prompts, and 4 are measured"):
            ri.analyze(repo, torch.cat([TOKENS, OTHERS]), ("positions",), batch_size=2)
    if what == "tokens":
        shifted = run["positions"]["position"].sel(layer=1, head=0) > 50
        assert np.argwhere(shifted.values).tolist() == [[0, 2], [1, 7]]


def test_answers_of_several_lengths_pass_in_another_order_than_prompts_of_one_length_with_them(
    repo,
):
    """Found: prompts and answers of one length together are sorted by the prompt's, and each got
    what another one was to get.
    """
    model = deepcopy(repo)
    prompts = [
        Prompt(tuple(range(3, 3 + length)), attributes={"new_tokens": 20 - length})
        for length in (12, 8)
    ]
    with (
        iv.set_positions(model, 1, None, torch.zeros(2, 20)),
        refused("separate values for each of 2 prompts"),
    ):
        generated_texts(as_decoder(model), tokenizer("byte_level_bpe"), prompts)


def test_in_half_precision_the_index_is_not_rounded():
    model = repositioned("repo").to(torch.bfloat16)
    with iv.linearised(model, layer=0):
        positions = iv.positions_of(model, torch.randint(3, 64, (1, 300)))
    assert (
        torch.equal(positions[0][0, 0], torch.arange(300.0))
        and positions[1].dtype == torch.bfloat16
    )


NAN = math.nan
REFUSED = [
    ("layer 1 (nope) assigns no positions", "linearised", [(1, 0)]),
    ("not both; leave one out", "scaled", 2.0, [(0, 1)], {"layer": 0}),
    ("no head was named", "linearised", []),
    ("heads are (layer, head) pairs", "linearised", [0, 1, 2]),
    ("got 'L1 H0'", "linearised", "L1 H0"),
    ("tokens are indices from 0,", "shifted", 1.0, {"layer": 0, "tokens": [-1]}),
    ("no prompt has more than", "frozen", {"tokens": [1 << 62]}),
    ("tokens of 3 prompts were named, but 2 prompts came", "frozen", {"tokens": [[2], [3], [4]]}),
    ("an order names each of the first tokens once", "permuted", {"order": [0, 2]}),
    ("an order of 30 tokens came to a prompt of 20", "permuted", {"order": list(range(30))}),
    ("orders of 3 prompts came to 2", "permuted", {"order": [[1, 0], [0, 1], [0, 1]]}),
    ("seed 3 draws an order, and one was given", "permuted", {"order": [1, 0], "seed": 3}),
    ("two tokens, or two spans", "swapped_tokens", 3, 3),
    ("cannot be swapped while the earlier layer runs", "swapped_heads", (0, 1), (2, 1)),
    ("two different heads were wanted", "swapped_heads", (0, 1), (0, 1)),
    ("wanted a number from", "rounded", {"step": 1e-300}),
    ("between a lower and an upper end, not 1 and 0", "clipped", 1, 0),
    ("frozen at is nan; wanted a number from", "frozen", {"value": NAN}),
    ("positions of layer 2 were not recorded", "transplanted", {0: torch.zeros(1, 1, 20)}),
    ("positions of 21 tokens came to prompts of 20", "transplanted", {0: torch.zeros(1, 1, 21)}),
    ("positions of 3 prompts came to 2", "transplanted", {0: torch.zeros(3, 1, 20)}),
    ("are [1, 3, 20]; wanted [prompt, row, token]", "transplanted", {0: torch.zeros(1, 3, 20)}),
    ("of layer 0 are NaN or infinite", "transplanted", {0: torch.zeros(2, 1, 20) * NAN}),
    ("wanted positions that broadcast to [2, 20]", "replaced", lambda z, here: z[..., 1:]),
    ("are NaN or infinite", "replaced", lambda z, here: z / 0, {"tokens": [3]}),
    ("are complex", "replaced", lambda z, here: z * 1j),
    ("a change is a function of positions and their context; got None", "replaced", None),
    ("to set in layer 0 are true and false", "set_positions", 0, 0, torch.ones(2, 20) > 0),
    ("orders are tokens", "exchanged_keys", {0: TOKENS - 18}),
    ("shifts are functions of positions, by layer", "moved_keys", {0: 3.0}),
    ("are [3]; wanted an array that broadcasts to", "moved_keys", {0: lambda z: torch.zeros(3)}),
    ("a head is a whole number from 0; got True", "rescaled", 2, True, {"yarn": 2}),
]
"""What is said, the function, and what it is given beside the model: positional, then by name."""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: " ".join(row[1::-1]))
def test_what_cannot_be_is_refused_in_one_line_and_leaves_nothing(row, some_of_each):
    message, name, *given = row
    named = isinstance(given[-1], dict) and all(isinstance(key, str) for key in given[-1])
    where = given.pop() if named else {}
    if name == "transplanted" and "recorded" not in message:
        where = {"layer": 0} | where
    before = hooks_of(some_of_each)
    with refused(re.escape(message)):
        logits(some_of_each, getattr(iv, name)(some_of_each, *given, **where))
    assert hooks_of(some_of_each) == before


BY_HEADS = ("linearised", "frozen", "scaled", "rounded", "ranked", "straightened", "replaced")
HEADS_THAT_ARE_NONE = {
    "head -1 was asked for; the model's are 0 to 3": (0, -1),
    "head 4 was asked for; the model's are 0 to 3": [(0, 1), (0, 4)],
    "layer -1 was asked for; the model's are 0 to 2": np.array([[-1, 0]]),
    "layer 3 was asked for; the model's are 0 to 2": torch.tensor([[3, 0]]),
    "a head is a whole number from 0; got 1.0": [(0, 1.0)],
}


@pytest.mark.parametrize("message", HEADS_THAT_ARE_NONE)
def test_heads_that_the_model_lacks_are_refused_by_every_intervention(message, repo):
    heads, where = HEADS_THAT_ARE_NONE[message], [(1, 0)]
    ((layer, head),) = iv.replacing.head_pairs(heads)[-1:] if "1.0" not in message else [(0, 1.0)]
    before = hooks_of(repo)
    for change in (
        *(partial(make, repo, heads=heads) for name, make in CASES.items() if name in BY_HEADS),
        partial(iv.swapped_heads, repo, (layer, head), (layer, 1)),
        partial(iv.transplanted, repo, iv.positions_of(repo, OTHERS), from_head=(layer, head)),
        partial(iv.rescaled, repo, heads=heads, linear=2.0),
        partial(iv.rescaled, repo, layer, head, linear=2.0),
        partial(iv.ablate, repo, heads),
        partial(iv.ablate, repo, heads, pairs=[0]),
        partial(iv.ablate, repo, sets=[[(1, 0)], heads]),
        partial(iv.ablate_paths, repo, heads, where),
        partial(iv.ablate_paths, repo, [(0, 0)], heads),
    ):
        with refused(re.escape(message)), change():
            raise AssertionError(f"{change} takes {heads}")
    assert hooks_of(repo) == before


@pytest.fixture(scope="module")
def some_of_each():
    return ri.reposition(tiny("llama"), "rope,nope,repo")


def test_what_is_no_model_and_no_tokens_is_refused(repo):
    with refused("a model or a bridge was wanted, as ri.load returns it; got None"):
        iv.frozen(None).__enter__()
    meta = OTHERS.to("meta")  # found: NaN
    for wrong in ("text", [], [1, 2], [[1, 2], [3]], [[10**9]], [[0.5]], meta, OTHERS.to_sparse()):
        with refused(r"tokens are a table \[prompt, token\] of numbers from 0 to 63"):
            iv.positions_of(repo, wrong)


@pytest.mark.parametrize("scheme", ["nope", "cope"])
def test_a_model_that_assigns_no_positions_is_refused_by_name(scheme):
    model = repositioned(scheme)
    assert iv.heads_with_positions(model) == []
    with (
        refused(rf"no layer of this model \({scheme}\) assigns"),
        iv.linearised(model),
    ):
        pass


def test_what_a_cache_cannot_give_is_refused(repo):
    with iv.permuted(repo, order=list(reversed(range(20)))):
        repo.generate(TOKENS, **ASKED)  # new tokens stand after the order
    output = repo(TOKENS, use_cache=True)
    with refused("enter the context before the prompt"), iv.frozen(repo):
        repo(TOKENS[:, :1], past_key_values=output.past_key_values)
    with refused("cannot change places with new ones"), iv.swapped_tokens(repo, 2, 22):
        repo(TOKENS[:, :1], past_key_values=output.past_key_values)


@pytest.fixture(scope="module")
def patched():
    """A bridge with a NoPE layer, a clean cache, and a metric."""
    torch.manual_seed(0)
    bridge = ri.bridge(ri.reposition(tiny("llama"), "repo,nope,repo"))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    return bridge, cache, lambda result: result[:, -1, 5].mean()


def test_patching_positions_is_transplanting_them_head_by_head(patched):
    bridge, cache, metric = patched
    before = aliases_of(bridge)
    with torch.no_grad():
        result = iv.get_act_patch_positions_all_pos(bridge, OTHERS, cache, metric)
        expected = torch.zeros(3, 4)
        expected[1] = metric(bridge(OTHERS))
        for layer, head in iv.heads_with_positions(bridge):
            with iv.transplanted(bridge, cache, [(layer, head)]):
                expected[layer, head] = metric(bridge(OTHERS))
    assert_close(result, expected, **NEAR)
    assert result.std() > 1e-4 and aliases_of(bridge) == before


def test_patching_token_by_token_has_transformer_lens_order_and_options(patched):
    bridge, cache, _ = patched
    short = OTHERS[:, :6]
    few = {name: value[..., :6] for name, value in cache.items() if name.endswith("hook_positions")}
    with torch.no_grad():
        result = iv.get_act_patch_positions_by_pos(
            bridge, short, few, lambda out: out[:, -1, 5], reduce="none", baseline=True
        )
        with iv.transplanted(bridge, few, [(2, 3)], tokens=[4]):
            assert_close(result.values[2, 4, 3], bridge(short)[:, -1, 5], **NEAR)
    assert result.axis_names == ["layer", "pos", "head"] and result.values.shape == (3, 6, 4, 2)
    assert_close(result.baseline, result.values[1, 0, 0], atol=1e-6, rtol=0)


def test_what_cannot_be_patched_is_refused(patched):
    bridge, cache, metric = patched
    for given, tokens, kept, line in (
        (bridge, OTHERS[:, :6], cache, "the clean prompt has 20 tokens"),
        (bridge, OTHERS, {HOOK: cache[HOOK]}, "the clean cache has no positions of layer 2"),
        (bridge.original_model, OTHERS, cache, "needs a bridge of repo_interp"),
        (bridge, OTHERS[:1], {HOOK: torch.zeros(2, 1, 20)}, r"\[2, 1, 20\].*of 1 or 1 prompts"),
    ):
        with refused(line):
            iv.get_act_patch_positions_all_pos(given, tokens, kept, metric)


def test_a_clean_cache_without_prompts_is_refused(patched):
    """Found: with as many tokens as heads, rows were taken for prompts and tokens for rows."""
    bridge, _, metric = patched
    _, cache = bridge.run_with_cache(TOKENS[:1, :4], remove_batch_dim=True)
    with refused(r"run_with_cache\(tokens\), which keeps the batch dimension"):
        iv.get_act_patch_positions_all_pos(bridge, OTHERS[:1, :4], cache, metric)


def test_metrics_without_a_number_are_refused(patched):
    bridge, cache, _ = patched
    for wrong in (lambda logits: None, lambda logits: logits[0, -1, :2]):
        with refused("the metric of patching gives"):
            iv.get_act_patch_positions_all_pos(bridge, OTHERS, cache, wrong)


@pytest.mark.parametrize("scheme", ["cope_rope", "cope_rope separate keys"])
def test_what_is_cached_beside_keys_follows_heads_that_rotate_their_own_copy(scheme):
    """Two key-value heads for four heads: an intervention on one head repeats keys, and what CoPE
    counts them by with them.
    """
    model, tokens = repositioned(scheme), TOKENS
    with iv.frozen(model, [(1, 0)]), torch.no_grad():
        cached = continue_greedily(as_decoder(model), TOKENS.tolist(), [5, 5], 2)
        for _ in range(5):
            new = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, new], dim=1)
    assert [list(row) for row in cached] == tokens[:, 20:].tolist()


def test_layers_and_heads_are_whole_numbers_numpys_too(repo):
    """Found: (2.7, 0.9) was layer 2, head 0; a numpy layer 0 was no layer, and another one a
    traceback.
    """
    for wrong in ({"heads": [(1.7, 0)]}, {"layer": [False]}):
        with refused("is a whole number from 0; got"), iv.frozen(repo, **wrong):
            pass
    for layer in (np.int64(0), torch.tensor(1), np.arange(2)):
        with iv.frozen(repo, layer=layer):
            pass


@torch.no_grad()
@pytest.mark.parametrize("variant", ["repo", "rope"])
def test_each_prompt_of_a_batch_has_its_own_heads_changed(variant):
    model = repositioned(variant)
    sets = [[(0, 1)], [(1, head) for head in range(4)], [], [(0, 2), (2, 3)]]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    changed = partial(
        iv.replaced, model, lambda positions, here: 3 * positions[..., order], tokens=range(4, 17)
    )
    with changed(sets=sets):
        together = model(TOKENS[:1].expand(4, -1)).logits
        with refused("heads of 4 prompts were named, but 2 prompts came"):
            model(TOKENS)
    assert_close(together[2:3], model(TOKENS[:1]).logits, **NEAR)
    for row in (0, 1, 3):
        alone = logits(model, changed(heads=sets[row]), tokens=TOKENS[:1])
        assert_close(together[row : row + 1], alone, **NEAR)
        assert (alone - together[2:3]).abs().max() > 1e-3


def test_the_former_name_of_the_context_warns():
    with pytest.warns(DeprecationWarning, match="PassContext"):
        assert ri.interventions.Here is ri.interventions.PassContext
    with pytest.raises(AttributeError, match="no attribute 'There'"):
        ri.interventions.There  # noqa: B018
