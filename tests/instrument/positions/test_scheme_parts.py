"""Parts of schemes beside assigner and logits: a part that changes nothing changes no number of any
measure, and one that acts is the slow formula.
"""

from __future__ import annotations

import pytest
import torch
import xarray as xr
from families import TOKENS
from own_schemes import model_of, register_all
from refusals import refused
from torch import nn
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.measures.measure_catalogue import measure_names
from repo_interp.models.attention import SchemeParts
from repo_interp.models.decoder import as_decoder
from repo_interp.models.layer_probe import logits_by_content
from repo_interp.plugins.verify.audit import audit
from repo_interp.positions.assigners import LearnedPositions, TokenIndex
from repo_interp.positions.rotary import expand_heads, rotate
from repo_interp.tasks.prompt import Prompt

MEASURES = sorted({*measure_names()} - {"gates"})
"""Gates are CoPE's alone."""
SPANS = {"needle": (3, 4), "query": (30, 31)}
PROMPTS = [
    Prompt(tuple(row), SPANS, generated=(36, 37))
    for row in torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
]
quiet = pytest.mark.filterwarnings("ignore::repo_interp.analysis.notes.SilentMeasure")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register_all(monkeypatch)


class Matrices(nn.Module):
    """A matrix for every query head and every key-value head (HARoPE), the identity at first."""

    def __init__(self, rotation, d_head):
        super().__init__()
        self.of_queries, self.of_keys = (
            nn.Parameter(torch.eye(d_head).repeat(rows, 1, 1))
            for rows in (rotation.heads, rotation.kv_heads)
        )

    def forward(self, queries, keys, positions):
        return queries @ self.of_queries, keys @ self.of_keys


class Planes(nn.Module):
    """exp(z L) of a plane for every key-value head (GRAPE), L = a b' - b a', a and b orthonormal."""

    def __init__(self, rotation, d_head):
        super().__init__()
        self.rate = nn.Parameter(0.3 + torch.rand(rotation.kv_heads))
        plane = torch.linalg.qr(torch.randn(rotation.kv_heads, d_head, 2))[0]
        self.register_buffer("plane", plane)

    def turned(self, vectors, positions):
        heads = vectors.shape[1]
        plane = self.plane.repeat_interleave(heads // len(self.plane), 0).to(vectors)
        rate = self.rate.repeat_interleave(heads // len(self.rate)).to(vectors)[:, None]
        in_plane = vectors @ plane
        moved = rotate(in_plane, expand_heads(positions, heads) * rate, torch.ones(1))
        return vectors + (moved - in_plane) @ plane.mT

    def forward(self, queries, keys, positions):
        return self.turned(queries, positions), self.turned(keys, positions)


def scheme(make, assign=lambda b, r: TokenIndex(), rotates=True, learned=False):
    def build(builder, rotation, d_head):
        frequencies = rotation.frequencies if rotates else None
        part = make(rotation, d_head)
        return SchemeParts(
            "", assign(builder, rotation), frequencies, learned=learned, transform=part
        )

    return build


def of_repo(builder, rotation):
    return LearnedPositions(builder.config.hidden_size, rotation.kv_heads)


SCHEMES = {
    "matrices": scheme(Matrices),
    "matrices_repo": scheme(Matrices, of_repo, learned=True),
    "planes": scheme(Planes, rotates=False),
    "planes_repo": scheme(Planes, of_repo, learned=True),
}


def transformed(name, family="llama"):
    ri.register_scheme(name, SCHEMES[name])
    return model_of(name, family=family)


def identity(name, family="llama"):
    """A model whose transform changes nothing."""
    model = transformed(name, family)
    for layer in as_decoder(model).layers:
        for matrix in layer.transform.parameters():
            matrix.data.copy_(torch.eye(matrix.shape[-1]).expand_as(matrix))
    return model


def groups(run):
    """Arrays of a run by group, without what names schemes and weights."""
    return {
        node.path: node.to_dataset().drop_vars("scheme", errors="ignore")
        for node in run.subtree
        if node.path != "/"
    }


@quiet
@pytest.mark.parametrize(("own", "ours"), [("matrices", "rope"), ("matrices_repo", "repo")])
def test_an_identity_transform_has_the_numbers_of_none_in_every_measure(own, ours):
    model, plain = identity(own), model_of(ours)
    if ours == "repo":  # the same weights of f_phi
        named = dict(model.named_parameters())
        plain.load_state_dict({name: named[name] for name in plain.state_dict()})
    runs = [ri.analyze(each, PROMPTS, MEASURES, experiments=()) for each in (model, plain)]
    found, expected = map(groups, runs)
    assert found.keys() == expected.keys() and len(found) >= 12
    for name, group in found.items():
        for each in (group, expected[name]):
            each.attrs.pop("left_out", None)
        xr.testing.assert_equal(group, expected[name])


@torch.no_grad()
def test_an_identity_transform_generates_audits_and_rescales_like_none():
    """The cache holds what the stock model's does: transformed keys, rotated."""
    model, plain = identity("matrices"), model_of("rope")
    given = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    caches = []
    for each in (model, plain):
        out = each.generate(TOKENS, return_dict_in_generate=True, output_scores=True, **given)
        caches.append(out.past_key_values)
        last = out
    assert torch.equal(out.sequences, model.generate(TOKENS, **given))
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert last is out
    step = model(TOKENS[:, -1:], past_key_values=plain(TOKENS[:, :-1]).past_key_values)
    assert torch.equal(
        step.logits,
        plain(TOKENS[:, -1:], past_key_values=plain(TOKENS[:, :-1]).past_key_values).logits,
    )
    for change in ({"linear": 2.0}, {"yarn": 4.0}, {"head": 1, "layer": 0, "linear": 2.0}):
        with ri.interventions.rescaled(model, **change), ri.interventions.rescaled(plain, **change):
            assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    xr.testing.assert_identical(audit(model), audit(plain))


def test_schemes_with_a_transform_are_verified():
    transformed("matrices")
    verified = [ri.verify_scheme(name) for name in ("matrices", "rope")]
    assert [each.attrs["findings"] for each in verified] == ["", ""]


@pytest.mark.parametrize("family", ["llama", "llama_mha", "qwen3", "gemma2", "olmo2"])
@torch.no_grad()
def test_a_matrix_for_every_head_is_the_slow_formula(family):
    """W = s R(i) A_h q_i . R(j) A_g k_j, from the queries and keys of the stock model."""
    model = transformed("matrices", family)
    for layer in as_decoder(model).layers:
        for matrix in layer.transform.parameters():
            matrix.copy_(torch.eye(8) + 0.3 * torch.randn(matrix.shape))
    seen, found = {}, []
    layer = as_decoder(model).layers[0]
    layer.transform.register_forward_hook(
        lambda m, given, made: seen.update(q=given[0], k=given[1])
    )
    layer.observers.append(lambda a, q, k, z, more: found.append((q, k)))
    scores = {}
    layer.sites.scores.register_forward_hook(lambda m, given, made: scores.update(now=made))
    model(TOKENS)
    q, k = seen["q"].double(), expand_heads(seen["k"].double(), 4)
    a, b = layer.transform.of_queries.double(), layer.transform.of_keys.double()
    b = b.repeat_interleave(4 // len(b), 0)
    z = torch.arange(20.0, dtype=torch.float64)
    theta = layer.frequencies.double()
    expected = rotate(q @ a, z, theta) @ rotate(k @ b, z, theta).mT * layer.scaling
    expected = expected if family != "gemma2" else 50 * (expected / 50).tanh()
    seen_pairs = scores["now"] > -1e30
    assert_close(scores["now"][seen_pairs].double(), expected[seen_pairs], atol=1e-4, rtol=1e-5)
    # hooks and measures are given the new vectors
    assert_close(found[0][0].double(), q @ a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SCHEMES)
def test_transforms_are_trained_saved_cached_and_bridged(name, tmp_path):
    model = transformed(name)
    count = sum(weight.numel() for weight in as_decoder(model).layers[0].transform.parameters())
    assert ri.added_parameters(model) >= 3 * count
    assert "model.layers.0.self_attn.transform." in "".join(model.state_dict())
    before = model(TOKENS).logits.detach()
    model(TOKENS, labels=TOKENS).loss.backward()
    weights = list(as_decoder(model).layers[0].transform.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    assert all(weight.grad is not None and weight.grad.any() for weight in weights)
    optimizer.step()
    with torch.no_grad():
        after = model(TOKENS).logits
        assert not torch.allclose(before, after)
        ri.save(model, tmp_path / "saved")
        assert torch.equal(ri.open_model(tmp_path / "saved")(TOKENS).logits, after)
        step, steps = None, []
        for token in TOKENS.split((7, *(1,) * 13), 1):
            cache = None if step is None else step.past_key_values
            step = model(token, past_key_values=cache, use_cache=True)
            steps.append(step.logits)
        assert_close(torch.cat(steps, 1), after, atol=2e-4, rtol=1e-4)
        wrapped = ri.bridge(model)
        logits, cache = wrapped.run_with_cache(TOKENS)
        assert_close(logits, after, atol=1e-4, rtol=1e-4)
        layer, seen = as_decoder(wrapped).layers[0], []
        layer.observers.append(lambda a, q, k, z, more: seen.extend((q, k, z)))
        wrapped(TOKENS)
        for vectors, hook in zip(seen, ("hook_rot_q", "hook_rot_k"), strict=False):
            if layer.frequencies is not None:
                z = expand_heads(seen[2], vectors.shape[1])
                vectors = rotate(vectors, z, layer.frequencies)
            found = cache[f"blocks.0.attn.{hook}"].transpose(1, 2)
            assert_close(found, vectors, atol=1e-6, rtol=1e-6)
    assert ri.verify_scheme(name).attrs["findings"] == ""


@torch.no_grad()
def test_a_plane_of_positions_is_the_matrix_exponential():
    model = transformed("planes")
    layer, seen, scores = as_decoder(model).layers[0], {}, {}
    layer.transform.register_forward_hook(
        lambda m, given, made: seen.update(q=given[0], k=given[1])
    )
    layer.sites.scores.register_forward_hook(lambda m, given, made: scores.update(now=made))
    model(TOKENS)
    q, k = seen["q"].double(), expand_heads(seen["k"].double(), 4)
    part = layer.transform
    a, b = part.plane.double().unbind(-1)
    turn = part.rate[:, None, None] * (b[:, :, None] * a[:, None] - a[:, :, None] * b[:, None])
    turn = turn.repeat_interleave(2, 0)
    for i in range(0, 20, 3):
        for j in range(i + 1):
            moved = (torch.linalg.matrix_exp((j - i) * turn) @ k[:, :, j, :, None])[..., 0]
            expected = (q[:, :, i] * moved).sum(-1) * layer.scaling
            assert_close(scores["now"][:, :, i, j].double(), expected, atol=1e-4, rtol=1e-4)


@quiet
def test_a_transform_that_reads_positions_has_no_distance_alone():
    for name, reads in (("matrices", False), ("planes", True), ("planes_repo", True)):
        model = transformed(name)
        assert logits_by_content(as_decoder(model).layers[0]) == reads
        run = ri.analyze(model, PROMPTS, ("fake_distance",), experiments=())
        assert bool(run["fake_distance/r"].isnull().all()) == reads
    with refused("transforms by contents and positions"):
        ri.interventions.distances(model, lambda distance, pairs: distance).__enter__()


def test_transforms_that_do_not_fit_are_refused():
    for make, line in (
        (lambda r, d: nn.Identity(), None),
        (lambda r, d: 3.0, "has float as transform; wanted an nn.Module"),
    ):
        SCHEMES["odd"] = scheme(make)
        if line:
            with refused(line):
                transformed("odd")
    model = transformed("matrices")
    wrong = as_decoder(model).layers[1].transform
    wrong.register_forward_hook(lambda m, given, made: (made[0], expand_heads(made[1], 4)))
    with refused(r"transform of layer 1 \(matrices\) gave \[\[2, 4, 20, 8\], \[2, 4, 20, 8\]\]; "):
        model(TOKENS)


def test_keys_that_are_made_of_latents_have_no_transform_with_a_cache():
    from benchmarks.tiny_models import small_model

    ri.register_scheme("matrices", SCHEMES["matrices"])
    model = ri.reposition(small_model("deepseek_v3"), "matrices")
    with torch.no_grad():
        model(TOKENS, use_cache=False)
        first = model(TOKENS[:, :7], use_cache=True)
        with refused("does not reach; pass use_cache=False"):
            model(TOKENS[:, 7:], past_key_values=first.past_key_values, use_cache=True)
