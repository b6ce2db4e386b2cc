"""Gradient checkpointing computes a pass again in backward(): under the interventions of that pass,
or not at all.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from families import repositioned
from refusals import refused
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from repo_interp import interventions as iv

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing")  # renamed in 5.23
TOKENS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
INTERVENTIONS = {
    "ablate": partial(iv.ablate, heads=[(0, 1), (1, 2)]),
    "ablate_paths": partial(iv.ablate_paths, senders=(0, 1), receivers=[(1, 0), (2, 1)], into="queries"),
    "clipped": partial(iv.clipped, low=0.0, high=3.0),
    "copied": partial(iv.copied, source=2),
    "distances": partial(iv.distances, function=lambda distance, pair: distance.clamp(max=3)),
    "exchanged_keys": partial(iv.exchanged_keys, orders={1: torch.arange(11, -1, -1).expand(2, -1)}),
    "frozen": iv.frozen,
    "hard_attention": iv.hard_attention,
    "hidden_keys": partial(iv.hidden_keys, hidden=lambda pair: pair.distance > 3, heads=(1, 2)),
    "infllm": partial(iv.infllm, length=2),
    "interpolated": partial(iv.interpolated, factor=2.0),
    "linearised": iv.linearised,
    "lm_infinite": partial(iv.lm_infinite, length=6, global_tokens=2),
    "moved_keys": partial(iv.moved_keys, shifts={1: lambda z: 0.3 * z}),
    "permuted": iv.permuted,
    "ranked": iv.ranked,
    "replaced": partial(iv.replaced, change=lambda positions, here: positions**2),
    "rescaled": partial(iv.rescaled, layer=1, head=2, linear=3.0),
    "rounded": iv.rounded,
    "scaled": partial(iv.scaled, factor=0.5),
    "scaled_values": partial(iv.scaled_values, factor=0.5, tokens=[0, 3]),
    "segmented": partial(iv.segmented, starts=[4, 9]),
    "set_positions": partial(iv.set_positions, layer=1, head=2, values=lambda z: 2 * z + 1),
    "shifted": partial(iv.shifted, by=9.0, tokens=[3, 4]),
    "straightened": iv.straightened,
    "swapped_heads": partial(iv.swapped_heads, one=(1, 0), other=(1, 3)),
    "swapped_tokens": partial(iv.swapped_tokens, one=3, other=5),
    "transplanted": lambda model: iv.transplanted(model, iv.positions_of(model, TOKENS.flip(0))),
    "yarn": partial(iv.yarn, factor=4.0, training_length=8),
}  # fmt: skip
NO_CONTEXTS = {
    "Change",
    "ModelEdit",
    "PassContext",
    "Shift",
    "TokenPairs",
    "heads_with_positions",
    "positions_of",
} | {*("query_key_means", "get_act_patch_positions_all_pos", "get_act_patch_positions_by_pos")}
CROSSING = ("ablate_paths",)
"""Refused where a block is computed alone: their paths cross layers."""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return repositioned("repo").train()


def checkpointing(model, reentrant):
    """Let transformers compute blocks again, or not (None)."""
    if reentrant is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def loss(model):
    embedded = model.get_input_embeddings()(TOKENS)
    return model(inputs_embeds=embedded, use_cache=False, labels=TOKENS).loss


def gradient(model, value):
    model.zero_grad()
    value.backward()
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def test_every_intervention_is_here():
    assert {*INTERVENTIONS} == {*iv.__all__} - NO_CONTEXTS


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_a_gradient_is_that_of_the_pass(name, model):
    """Found: backward() after the `with` gave the gradient of the model without the intervention."""
    edit = INTERVENTIONS[name]
    checkpointing(model, None)
    with edit(model):
        expected, value = gradient(model, loss(model)), loss(model)
    assert_close(gradient(model, value), expected, atol=0, rtol=0)
    for reentrant in (True, False):
        checkpointing(model, reentrant)
        with edit(model):
            if name in CROSSING:
                with refused("computes layer 2 again without the layers before it"):
                    loss(model).backward()
            else:
                assert_close(gradient(model, loss(model)), expected, atol=1e-6, rtol=1e-5)
            value = loss(model)
        with refused("computes layer 2 again.*inside of the same `with`"):
            value.backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layout", ["rope", "learned", "alibi"])
def test_what_is_entered_before_backward_is_no_part_of_the_pass(layout, reentrant):
    model = repositioned(layout).train()
    checkpointing(model, reentrant)
    expected = gradient(model, loss(model))
    with iv.ablate(model, (1, 1)):
        value = loss(model)
        with refused("not under the interventions"), iv.hard_attention(model):
            value.backward()
    value = loss(model)
    with iv.ablate(model, (1, 1)):
        iv.query_key_means(model, TOKENS)  # passes without a graph
    assert_close(gradient(model, value), expected, atol=0, rtol=0)
    value = loss(model)
    with iv.hard_attention(model), refused("not under the interventions"):
        value.backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["scaled", "ablate_paths", "hard_attention"])
def test_a_whole_model_that_a_user_computes_again(name, reentrant, model):
    edit, embedded = INTERVENTIONS[name], model.get_input_embeddings()(TOKENS)
    checkpointing(model, None)

    def run(inputs):
        return model(inputs_embeds=inputs, use_cache=False, labels=TOKENS).loss

    with edit(model):
        expected = gradient(model, loss(model))
        found = gradient(model, checkpoint(run, embedded, use_reentrant=reentrant))
        assert_close(found, expected, atol=1e-6, rtol=1e-5)
        value = checkpoint(run, model.get_input_embeddings()(TOKENS), use_reentrant=reentrant)
    with refused("computes layer 0 again"):
        value.backward()


def test_passes_of_several_interventions_in_one_backward(model):
    """Every pass is asked for what lasted in it."""
    checkpointing(model, False)
    with iv.frozen(model):
        frozen = loss(model)
    value = loss(model)
    assert gradient(model, value)
    with refused("again"):
        (loss(model) + frozen).backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [False, True])
def test_an_intervention_that_the_computed_function_enters(inside, reentrant, model):
    """It is entered again with the function, also inside of another one."""
    checkpointing(model, None)

    def run(embedded):
        with iv.scaled(model, 0.5):
            return model(inputs_embeds=embedded, use_cache=False, labels=TOKENS).loss

    def run_again():
        return checkpoint(run, model.get_input_embeddings()(TOKENS), use_reentrant=reentrant)

    with iv.hard_attention(model) if inside else nullcontext():
        expected = gradient(model, run(model.get_input_embeddings()(TOKENS)))
        assert_close(gradient(model, run_again()), expected, atol=1e-6, rtol=1e-5)
        value = run_again()
    if inside:
        with refused("computes layer 0 again"):
            value.backward()
    else:
        assert_close(gradient(model, value), expected, atol=1e-6, rtol=1e-5)
