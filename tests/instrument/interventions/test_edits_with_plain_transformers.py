"""Every edit of positions, keys and logits on a RePo model, against Llama of transformers whose layers
attend by whole matrices and f_phi by three (docs/recipe_references/plain_repo.py)."""

from __future__ import annotations

import sys

import pytest
import torch
from places import DOCS
from scipy.stats import rankdata
from torch.testing import assert_close

import repo_interp as ri
from repo_interp import interventions as iv

sys.path.append(str(DOCS / "recipe_references"))
from plain_repo import open_repo, positioned
from plain_transformers import attending, causal, rotate

NAME = "language/repo"
LENGTH = 24
INDEX = torch.arange(LENGTH).float()
TOKENS = torch.randint(3, 2000, (2, LENGTH), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(3, 2000, (2, LENGTH), generator=torch.Generator().manual_seed(1))
ORDER = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(2))
HEADS = [(1, 0), (2, 0), (2, 1)]
"""Of the learned layers 1, 2, 3 with two heads each."""


@pytest.fixture(scope="module")
def model():
    return ri.open_model(NAME)


@pytest.fixture(scope="module")
def plain():
    stock, _, maps = open_repo(NAME)
    return stock, maps


@pytest.fixture(scope="module")
def foreign(plain):
    """Positions of another prompt."""
    stock, maps = plain
    with torch.no_grad(), positioned(stock, maps) as found:
        stock(OTHER)
    return dict(found)


def line(positions):
    """The straight line of every row, by least squares."""
    design = torch.stack([torch.ones(LENGTH), INDEX], 1).double()
    rows = positions.double()
    return (design @ torch.linalg.lstsq(design, rows.flatten(0, 1).T).solution).T.view_as(rows)


def swapped(positions):
    changed = positions.clone()
    changed[..., 4], changed[..., 9] = positions[..., 9], positions[..., 4]
    return changed


def shifted(positions):
    changed = positions.clone()
    changed[..., 5:9] += 3.5
    return changed


POSITIONS = {
    "linearised": (lambda m: iv.linearised(m, HEADS), lambda z: INDEX.expand_as(z)),
    "straightened": (lambda m: iv.straightened(m, HEADS), line),
    "frozen": (lambda m: iv.frozen(m, HEADS, value=2.5), lambda z: torch.full_like(z, 2.5)),
    "frozen at the mean": (
        lambda m: iv.frozen(m, HEADS),
        lambda z: z.mean(-1, keepdim=True).expand_as(z),
    ),
    "copied": (lambda m: iv.copied(m, 6, HEADS), lambda z: z[..., 6:7].expand_as(z)),
    "permuted": (lambda m: iv.permuted(m, HEADS, order=ORDER), lambda z: z[..., ORDER]),
    "swapped tokens": (lambda m: iv.swapped_tokens(m, 4, 9, HEADS), swapped),
    "scaled": (lambda m: iv.scaled(m, -1.5, HEADS), lambda z: -1.5 * z),
    "rounded": (lambda m: iv.rounded(m, 0.5, HEADS), lambda z: 0.5 * (z / 0.5).round()),
    "clipped": (lambda m: iv.clipped(m, -0.1, 0.1, HEADS), lambda z: z.clamp(-0.1, 0.1)),
    "shifted": (lambda m: iv.shifted(m, 3.5, HEADS, tokens=range(5, 9)), shifted),
    "ranked": (
        lambda m: iv.ranked(m, HEADS),
        lambda z: torch.from_numpy(rankdata(z.numpy(), axis=-1) - 1),
    ),
    "segmented": (
        lambda m: iv.segmented(m, [7, 15], HEADS, step=0.25, jump=2.0),
        lambda z: (0.25 * INDEX + 1.75 * ((INDEX >= 7).float() + (INDEX >= 15))).expand_as(z),
    ),
}


def edited_in_heads(change):
    """Positions [prompt, head, token] that change in the chosen heads of a layer."""

    def edit(layer, positions):
        edited = positions.clone()
        for head in (head for chosen, head in HEADS if chosen == layer):
            edited[:, head] = change(positions)[:, head].to(positions)
        return edited

    return edit


def compare(model, edit, plain, context):
    """Logits of our model under an edit, and of the plain one in a context; the edit does something."""
    with torch.no_grad():
        before = model(TOKENS).logits
        with edit:
            ours = model(TOKENS).logits
        with context:
            theirs = plain[0](TOKENS).logits
    assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    assert float((ours - before).abs().max()) > 2e-3


@pytest.mark.parametrize("name", POSITIONS)
def test_positions(name, model, plain):
    edit, change = POSITIONS[name]
    compare(model, edit(model), plain, positioned(*plain, edited_in_heads(change)))


def test_positions_of_another_prompt(model, plain, foreign):
    edit = iv.transplanted(model, iv.positions_of(model, OTHER), HEADS)

    def change(layer, positions):
        return edited_in_heads(lambda z: foreign[layer])(layer, positions)

    compare(model, edit, plain, positioned(*plain, change))


def logits_of(plain, change):
    """The plain model with logits that `change` makes of queries, keys, positions and frequencies."""
    stock, maps = plain
    frequencies = stock.model.rotary_emb.inv_freq

    def logits(layer, states, queries, keys):
        if layer in maps:
            gate, content, final = maps[layer]
            hidden = torch.nn.functional.silu(states @ gate.mT) * (states @ content.mT)
            positions = (hidden @ final.mT).transpose(1, 2)
        else:
            positions = INDEX[None, None].expand(len(states), queries.shape[1], -1)
        return change(queries, keys, positions, frequencies)

    return attending(stock, logits)


def turned(vectors, positions, frequencies):
    return rotate(vectors, positions[..., None] * frequencies)


def plainly(queries, keys, positions, frequencies):
    return turned(queries, positions, frequencies) @ turned(keys, positions, frequencies).mT


def at_distances(function):
    """Logits pair by pair: the query turned by a function of z_i - z_j."""

    def logits(queries, keys, positions, frequencies):
        distances = function(positions[..., :, None] - positions[..., None, :])
        return (turned(queries[..., None, :], distances, frequencies) * keys[..., None, :, :]).sum(
            -1
        )

    return logits


def hidden_far(queries, keys, positions, frequencies):
    """LM-Infinite: the last 6 keys and the first 2, at up to 6 positions."""
    apart = INDEX[:, None] - INDEX
    logits = at_distances(lambda d: d.clamp(-6, 6))(queries, keys, positions, frequencies)
    return logits.masked_fill((apart >= 6) & (INDEX >= 2), -torch.inf)


def hardest(*given):
    logits = plainly(*given).masked_fill(causal(LENGTH), -torch.inf)
    most = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1)
    return torch.where(most == 1, 0.0, -torch.inf)


LOGITS = {
    "LM-Infinite": (lambda m: iv.lm_infinite(m, 6, 2), hidden_far),
    "InfLLM": (lambda m: iv.infllm(m, 6), at_distances(lambda d: d.clamp(-6, 6))),
    "interpolated": (
        lambda m: iv.interpolated(m, 3.0),
        lambda q, k, z, theta: plainly(q, k, z, theta / 3),
    ),
    "NTK": (
        lambda m: iv.rescaled(m, ntk=4.0),
        lambda q, k, z, theta: plainly(q, k, z, theta * 4 ** -torch.linspace(0, 1, len(theta))),
    ),
    "distances": (
        lambda m: iv.distances(m, lambda distance, pair: distance.abs().sqrt()),
        at_distances(lambda d: d.abs().sqrt()),
    ),
    "hard attention": (iv.hard_attention, hardest),
    "moved keys": (
        lambda m: iv.moved_keys(m, dict.fromkeys(range(4), lambda z: 0.5 * z)),
        lambda q, k, z, theta: turned(q, z, theta) @ turned(k, 1.5 * z, theta).mT,
    ),
    "exchanged keys": (
        lambda m: iv.exchanged_keys(m, dict.fromkeys(range(4), ORDER.expand(2, -1))),
        lambda q, k, z, theta: plainly(q, k[:, :, ORDER], z, theta),
    ),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits(name, model, plain):
    edit, change = LOGITS[name]
    compare(model, edit(model), plain, logits_of(plain, change))


def test_values(model, plain):
    """Values of two tokens, times a factor, by a hook on the projection."""

    def scale(module, arguments, output):
        output = output.clone()
        output[:, [0, 7]] *= -0.5
        return output

    stock, maps = plain
    handles = [layer.self_attn.v_proj.register_forward_hook(scale) for layer in stock.model.layers]
    try:
        compare(model, iv.scaled_values(model, -0.5, tokens=[0, 7]), plain, positioned(stock, maps))
    finally:
        for handle in handles:
            handle.remove()
