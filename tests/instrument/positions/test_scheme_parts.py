"""Parts of schemes beside assigner and logits: a part that changes nothing changes no number of any
measure, and one that acts is the slow formula.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import xarray as xr
from families import TOKENS, tiny
from own_schemes import model_of, register_all
from refusals import refused
from torch import nn
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.measures.kernels.heads import reduced
from repo_interp.measures.kernels.rotary_components import ComponentSums, variance_shares
from repo_interp.measures.kernels.seen_pairs import pair_counts
from repo_interp.measures.measure_catalogue import measure_names
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.models.layer_probe import logits_by_content
from repo_interp.models.rescaling import IdleScaling
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.plugins.verify.audit import audit
from repo_interp.positions.assigners import RememberingAssigner, TokenIndex
from repo_interp.positions.learned_assigners import LearnedPositions
from repo_interp.positions.logits import PositionLogits, exact
from repo_interp.positions.rotary import expand_heads, rotate
from repo_interp.runtime.memory import working_memory
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


def by_head(rows, learned=True, spread=0.0):
    """Frequencies of every head, or key-value head (AdaRoPE), RoPE's but for a factor of each."""

    def build(builder, rotation, d_head):
        count = getattr(rotation, rows)
        factors = 1 + spread * torch.arange(count)[:, None]
        own = factors * rotation.frequencies
        own = nn.Parameter(own) if learned else own
        return SchemeParts("", TokenIndex(), own)

    return build


BY_HEAD = {
    "ada": by_head("heads"),
    "ada_kv": by_head("kv_heads"),
    "tables": by_head("heads", False),
    "ada_apart": by_head("heads", spread=0.3),
    "ada_kv_apart": by_head("kv_heads", spread=0.3),
    "tables_apart": by_head("heads", False, 0.3),
}


def frequented(name, family="llama"):
    for each, build in BY_HEAD.items():
        ri.register_scheme(each, build)
    return model_of(name, family=family)


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


@cache
def measured_rope():
    """Every measure of RoPE, for all that compare with it and change nothing."""
    return groups(ri.analyze(model_of("rope"), PROMPTS, MEASURES, experiments=()))


@quiet
@pytest.mark.parametrize("name", ["ada", "ada_kv", "tables"])
def test_equal_frequencies_of_heads_say_what_rope_says_in_every_measure(name):
    model, plain = frequented(name), model_of("rope")
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    found, expected = groups(ri.analyze(model, PROMPTS, MEASURES, experiments=())), measured_rope()
    own = found["/components"]["head_frequency"]
    of_rope = expected["/components"]["frequency"].drop_vars("scheme", errors="ignore")
    assert (own == of_rope).all() and own.dims == ("layer", "head", "component")
    for group, variables in expected.items():
        for variable, values in variables.items():
            if values.dtype.kind in "fi":
                xr.testing.assert_allclose(found[group][variable], values, rtol=1e-5, atol=1e-5)
    for change in ({"linear": 2.0}, {"yarn": 4.0}, {"theta": 5e5}, {"factors": [1, 1, 0, 0]}):
        with ri.interventions.rescaled(model, **change), ri.interventions.rescaled(plain, **change):
            assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    with (
        ri.interventions.rescaled(model, 0, 1, linear=2.0),
        ri.interventions.rescaled(plain, 0, 1, linear=2.0),
    ):
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert ri.verify_scheme(name).attrs["findings"] == ""
    xr.testing.assert_identical(audit(model), audit(plain))


@pytest.mark.parametrize("name", ["ada_apart", "ada_kv_apart", "tables_apart"])
@quiet
def test_measures_use_the_frequencies_of_each_head(name):
    """All heads at once, each by itself, and by the definition."""
    model = frequented(name)
    names = ("components", "rotation", "stability", "fake_distance", "three_axis", "maps")
    runs = [
        groups(ri.analyze(model, PROMPTS[:1], names, heads=heads, experiments=()))
        for heads in (None, *([head] for head in range(4)))
    ]
    for group, variables in runs[0].items():
        for variable, values in variables.items():
            if "head" in values.dims and variable != "head_frequency":
                alone = [run[group][variable] for run in runs[1:]]
                alone = xr.concat(alone, "head")
                xr.testing.assert_allclose(values, alone, rtol=1e-4, atol=1e-4)
    found = runs[0]["/components"]
    assert found["frequency"].isnull().any() and found["head_frequency"].notnull().all()
    # VAF of every component, from all pairs
    seen = []
    layer = as_decoder(model).layers[0]
    layer.observers.append(lambda a, q, k, z, more: seen.extend((q.double(), k.double())))
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0].tokens]))
    theta = torch.tensor(found["head_frequency"].sel(layer=0).values)
    z = torch.arange(40.0, dtype=torch.float64)
    q, k = seen[0], expand_heads(seen[1], 4)
    angle = z[:, None] * theta[:, None]  # [head, token, component]
    q, k = (
        torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle) for x in (q, k)
    )
    pairs = torch.einsum("bhic,bhjc->hijc", q, k.conj()).real
    i, j = torch.tril_indices(40, 40)
    parts = pairs[:, i, j]
    whole = parts.sum(-1, keepdim=True)
    vaf = 100 * (1 - (whole - parts).var(1) / whole.var(1))
    assert_close(torch.tensor(found["vaf"].values[0, 0]).double(), vaf, rtol=1e-3, atol=1e-2)
    length = float(found["band_length"].sel(layer=0))
    low = torch.stack([parts[h][:, theta[h] <= torch.pi / length].sum(-1) for h in range(4)])
    of_low = 100 * (1 - (whole[..., 0] - low).var(1) / whole[..., 0].var(1))
    vaf_low = torch.tensor(found["vaf_band"].sel(layer=0, band="low").values[0]).double()
    assert_close(vaf_low, of_low, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["ada_apart", "ada_kv_apart"])
def test_frequencies_of_heads_are_trained_saved_listed_and_cached(name, tmp_path):
    model = frequented(name).double()
    listed = "model.layers.0.self_attn.rotation_parameters.frequencies"
    weight = dict(model.named_parameters())[listed]
    assert ri.added_parameters(model) == 3 * weight.numel() and weight.ndim == 2

    def output():
        return model(TOKENS).logits.log_softmax(-1)[..., 3].sum()

    output().backward()
    gradient = weight.grad.clone()
    for row, component in ((0, 0), (1, 2)):
        with torch.no_grad():
            weight[row, component] += 1e-4
            above = output()
            weight[row, component] -= 2e-4
            slope = (above - output()) / 2e-4
            weight[row, component] += 1e-4
        assert_close(gradient[row, component], slope, rtol=1e-2, atol=1e-5)
    model = model.float()
    with torch.no_grad():
        expected = model(TOKENS).logits
        ri.save(model, tmp_path / "saved")
        again = ri.open_model(tmp_path / "saved")
        assert torch.equal(again(TOKENS).logits, expected)
        step, steps, widths = None, [], []
        for token in TOKENS.split((7, *(1,) * 13), 1):
            cache = None if step is None else step.past_key_values
            step = model(token, past_key_values=cache, use_cache=True)
            steps.append(step.logits)
            widths.append(step.past_key_values.layers[0].keys.shape[-1])
        assert_close(torch.cat(steps, 1), expected, atol=2e-4, rtol=1e-4)
        # heads that share a key turn it by their own: it is kept unrotated, its position beside it
        assert set(widths) == {8 if name == "ada_kv_apart" else 9}
        assert_close(ri.bridge(model)(TOKENS), expected, atol=1e-4, rtol=1e-4)
    options = {"rope_type": "linear", "factor": 2.0}
    with pytest.warns(IdleScaling, match="changes nothing: no layer of the layout ada"):
        scaled = ri.open_model(tmp_path / "saved", rope_scaling=options)
    assert torch.equal(scaled(TOKENS).logits, expected)


@quiet
def test_layers_with_frequencies_of_heads_stand_beside_others():
    frequented("ada_apart")
    mixed, rope = (
        ri.analyze(model_of(layout), PROMPTS, ("components",), experiments=())
        for layout in ("rope,ada_apart,nope", "rope")
    )
    own, of_rope = (run["components"]["frequency"].sel(layer=0) for run in (mixed, rope))
    xr.testing.assert_equal(own.drop_vars("scheme"), of_rope.drop_vars("scheme"))
    turns = [run["components"]["turn_mean"].sel(layer=0) for run in (mixed, rope)]
    xr.testing.assert_equal(*(each.drop_vars("scheme") for each in turns))
    assert mixed["components/turn_mean"].sel(layer=1).notnull().all()
    assert ri.findings(mixed) is not None


def test_tables_of_heads_that_fit_no_layer_are_refused():
    for shape in ((3, 4), (4, 3), (1, 4), (4, 1, 4)):
        table = torch.ones(shape)
        ri.register_scheme("odd", lambda b, r, d, table=table: SchemeParts("", TokenIndex(), table))
        with refused(r"wanted 4, one for every rotary pair of a head, or \[4, 4\] by head"):
            model_of("odd")


class Phases(RememberingAssigner):
    """Positions that tokens decide, a row for every query head and other rows for keys, which may
    have those of the token before.
    """

    def __init__(self, width, rows, key_rows, shift):
        super().__init__()
        self.rows, self.key_rows, self.shift = rows, key_rows, shift
        self.features = rows + key_rows
        self.angle = nn.Linear(width, self.features, bias=False)

    def remember(self, hidden_states, past):
        return 4 * exact(self.angle(hidden_states))

    def recall(self, memory, seen):
        queries, keys = memory.mT.split([self.rows, self.key_rows], 1)
        number = torch.arange(memory.shape[1])[-seen.shape[2] :]
        before = (number - self.shift).clamp_min(0)
        shown = seen[:, 0].gather(-1, before[:, None].expand(len(seen), -1, 1))[..., 0]
        before = torch.where(shown, before, number)[:, None].expand(len(keys), keys.shape[1], -1)
        return queries[..., number], keys.gather(-1, before)


class Late(nn.Module):
    """The index, and as a key that of the token before."""

    def forward(self, hidden_states, index):
        places = index.expand(len(hidden_states), -1)[:, None].float()
        return places, (places - 1).clamp_min(0)


def apart(make):
    def build(builder, rotation, d_head):
        assigner = make(builder.config.hidden_size, rotation)
        return SchemeParts("", assigner, rotation.frequencies)

    return build


APART = {
    "late": apart(lambda width, r: Late()),
    "phases": apart(lambda width, r: Phases(width, r.heads, r.kv_heads, 0)),
    "phases_late": apart(lambda width, r: Phases(width, r.heads, r.heads, 1)),
    "phases_shared": apart(lambda width, r: Phases(width, 1, r.kv_heads, 1)),
}


def keys_elsewhere(name, family="llama"):
    ri.register_scheme(name, APART[name])
    return model_of(name, family=family)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("family", ["llama", "llama_mha", "gemma2"])
@torch.no_grad()
def test_queries_and_keys_have_positions_of_their_own(name, family):
    """W = s R(z_i) q_i . R(z'_j) k_j, by the layer and by what measures are given."""
    model, inputs = keys_elsewhere(name, family), []
    layer, scores = as_decoder(model).layers[1], {}
    layer.sites.scores.register_forward_hook(lambda m, given, made: scores.update(now=made))
    valid = torch.ones_like(TOKENS, dtype=torch.bool)
    capture(as_decoder(model), TOKENS, valid, torch.arange(2), inputs.append)
    model(TOKENS)
    given = inputs[1]
    q, k = given.queries.double(), expand_heads(given.keys, 4).double()
    if name == "late":
        z, of_keys = torch.arange(20.0).double(), (torch.arange(20.0).double() - 1).clamp_min(0)
    else:
        z, of_keys = (
            expand_heads(each, 4).double() for each in (given.positions, given.key_positions)
        )
        assert not torch.allclose(z, of_keys)
    theta = layer.frequencies.double()
    expected = rotate(q, z, theta) @ rotate(k, of_keys, theta).mT * layer.scaling
    expected = expected if family != "gemma2" else 50 * (expected / 50).tanh()
    seen = scores["now"] > -1e30
    assert_close(scores["now"][seen].double(), expected[seen], atol=1e-4, rtol=1e-4)
    rows = torch.arange(20)
    assert_close(given.logits(rows)[seen], scores["now"][seen], atol=1e-4, rtol=1e-4)
    if given.is_bilinear:
        turned = given.rotated_queries @ expand_heads(given.rotated_keys, 4).mT
        assert_close((turned * given.logit_scale)[seen], scores["now"][seen], atol=1e-4, rtol=1e-4)
        (sums,) = reduced(given, [ComponentSums(64)])
        whole = (expected / layer.scaling).masked_fill(~seen, 0)
        by_distance = torch.stack([whole.diagonal(-d, 2, 3).sum((0, 2)) for d in range(20)], -1)
        assert_close(sums.logits, by_distance, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("name", APART)
@quiet
def test_positions_of_keys_are_verified_cached_and_measured(name):
    model = keys_elsewhere(name)
    assert ri.verify_scheme(name).attrs["findings"] == ""
    names = (
        "components",
        "three_axis",
        "attention_mass",
        "positions",
        "symbols",
        "maps",
        "octaves",
    )
    run = ri.analyze(model, PROMPTS, names, experiments=())
    assert run["components/frequency"].notnull().all()
    assert run["components/turn_mean"].isnull().all() and run["components/vaf"].notnull().all()
    assert "which give queries and keys positions of their own" in run.attrs["notes"]
    with refused("the query and key of a token have different positions in layer 0"):
        ri.analyze(model, PROMPTS, ("rotation",), experiments=())
    line = "query and the key of a token have positions of their own in layer 0"
    with ri.interventions.scaled(model, 2.0), refused(line):
        model(TOKENS)
    assert ri.findings(run) is not None


@torch.no_grad()
def test_a_shift_of_all_keys_by_one_is_a_turn_of_keys():
    """Of positions that count on, R(-theta) k_j: the same model with a transform, and the index."""
    model = keys_elsewhere("late")
    theta = as_decoder(model).layers[0].frequencies

    class Back(nn.Module):
        def forward(self, queries, keys, positions):
            back = -(positions > 0).to(positions.dtype)
            return queries, rotate(keys, back, theta)

    SCHEMES["back"] = scheme(lambda r, d: Back())
    assert_close(model(TOKENS).logits, transformed("back")(TOKENS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["late", "phases_late", "phases_shared"])
@torch.no_grad()
def test_a_cache_keeps_positions_of_keys_beside_padding_and_beams(name):
    model = keys_elsewhere(name)
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(TOKENS)
    expected = model.generate(TOKENS, attention_mask=mask, use_cache=False, **given)
    assert torch.equal(model.generate(TOKENS, attention_mask=mask, **given), expected)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), TOKENS], 1)
    mask = (torch.arange(23) >= 3).long().expand(2, -1)
    found = model.generate(padded, attention_mask=mask, **given)
    assert torch.equal(found[:, 3:], expected)


def test_positions_of_keys_that_fit_no_layer_are_refused():
    model = keys_elsewhere("late")
    late = as_decoder(model).layers[1].assigner
    late.register_forward_hook(lambda m, given, made: (made[0], made[1][..., :5]))
    with refused(r"the assigner of layer 1 \(late\) gave positions \[2, 1, 5\]"):
        model(TOKENS)


class Breaks(PositionLogits):
    """Of stick-breaking, log sigma(s_ij) + sum_{j < t <= i} log(1 - sigma(s_it)), less s_ij."""

    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        s = scale * exact(queries) @ expand_heads(exact(keys), queries.shape[1]).mT
        left = nn.functional.logsigmoid(-s) * visible
        after = left.flip(-1).cumsum(-1).flip(-1) - left
        return (nn.functional.logsigmoid(s) + after - s) * visible


class Left(nn.Module):
    """Its remainder, the sum of all log(1 - sigma(s_it))."""

    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        s = scale * exact(queries) @ expand_heads(exact(keys), queries.shape[1]).mT
        return (nn.functional.logsigmoid(-s) * visible).sum(-1)


class Null(nn.Module):
    """A learned logit of every head that moves no value (null attention, gpt-oss)."""

    def __init__(self, heads):
        super().__init__()
        self.logit = nn.Parameter(torch.randn(heads))

    def forward(self, queries, *given):
        return self.logit[None, :, None]


LEFT = {
    "stick": lambda b, r, d: SchemeParts(
        "", None, None, position_logits=Breaks(), remainder=Left()
    ),
    "null": lambda b, r, d: SchemeParts(
        "", TokenIndex(), r.frequencies, r.attention_scaling, remainder=Null(r.heads)
    ),
}


def with_remainder(name, family="llama"):
    ri.register_scheme(name, LEFT[name])
    return model_of(name, family=family)


def observed(model):
    """Outputs of attention, and inputs of measures, of the first layer."""
    outputs, inputs = [], []
    layer = as_decoder(model).layers[0]
    remove = layer.sites.call("attended", lambda made: outputs.append(made))
    valid = torch.ones_like(TOKENS, dtype=torch.bool)
    capture(as_decoder(model), TOKENS, valid, torch.arange(2), inputs.append)
    remove()
    return outputs[0].double(), inputs[0]


@pytest.mark.parametrize("family", ["llama", "llama_mha", "qwen3"])
@torch.no_grad()
def test_stick_breaking_is_its_slow_formula(family):
    """A_ij = sigma(s_ij) prod_{j < t <= i} (1 - sigma(s_it)): no softmax (2410.17980)."""
    outputs, given = observed(with_remainder("stick", family))
    s = given.queries.double() @ expand_heads(given.keys, 4).double().mT * given.logit_scale
    weights = torch.zeros_like(s)
    for i in range(20):
        stick = torch.ones_like(s[..., 0, 0])
        for j in range(i, -1, -1):
            weights[..., i, j] = stick * s[..., i, j].sigmoid()
            stick = stick * (1 - s[..., i, j].sigmoid())
    expected = (weights @ expand_heads(given.values, 4).double()).transpose(1, 2)
    assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    assert_close(given.pattern(torch.arange(20)).double(), weights, atol=1e-6, rtol=1e-5)
    assert (weights.sum(-1) < 0.999).any()


@torch.no_grad()
def test_a_remainder_is_a_column_of_the_softmax_beside_the_sinks_of_a_family():
    from benchmarks.tiny_models import small_model

    model = with_remainder("null")
    outputs, given = observed(model)
    rest = as_decoder(model).layers[0].remainder.logit
    logits = given.logits(torch.arange(20)).double()
    column = rest[None, :, None, None].expand(2, 4, 20, 1)
    weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    expected = (weights @ expand_heads(given.values, 4).double()).transpose(1, 2)
    assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    # gpt-oss has sinks of its own: both take their shares
    model = ri.reposition(small_model("gpt_oss"), "null")
    outputs, given = observed(model)
    layer = as_decoder(model).layers[0]
    both = torch.stack([layer.remainder.logit, layer.module.sinks.float()], -1)
    logits = given.logits(torch.arange(20)).double()
    columns = both[None, :, None].expand(*logits.shape[:3], 2)
    weights = torch.cat([logits, columns], -1).softmax(-1)[..., :-2]
    expected = (weights @ expand_heads(given.values, logits.shape[1]).double()).transpose(1, 2)
    assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    assert_close(given.pattern(torch.arange(20)).double(), weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", LEFT)
@quiet
def test_masses_and_the_remainder_are_one_in_every_measure(name, tmp_path):
    model = with_remainder(name)
    assert ri.verify_scheme(name).attrs["findings"] == ""
    names = ("attention_mass", "attention_rows", "octaves", "activations", "value_norms")
    names += ("three_axis", "components", "predictions")
    run = ri.analyze(model, PROMPTS, names, experiments=())
    mass = run["attention_mass"]
    total = mass["mass"].sel(span=["needle", "query", "rest", "generated"]).sum("span")
    assert (abs(total + mass["sink_mass"] - 1) < 1e-5).all()
    assert (mass["sink_mass"] > 0.01).any() == (name == "null")  # of 36 breaks little is left
    # the same rows, from the pattern of the pass
    outputs = model(torch.tensor([PROMPTS[0].tokens]), output_attentions=True).attentions
    rows = [35, 36]
    left = 1 - torch.stack(outputs)[:, 0][:, :, rows].sum(-1).mean(-1)
    assert_close(torch.tensor(mass["sink_mass"].values[0]), left.double(), atol=1e-5, rtol=1e-4)
    assert ri.findings(run) is not None
    with torch.no_grad():
        expected = model(TOKENS).logits
        ri.save(model, tmp_path / "saved")
        assert torch.equal(ri.open_model(tmp_path / "saved")(TOKENS).logits, expected)
        assert_close(ri.bridge(model)(TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_a_remainder_that_fits_no_layer_is_refused():
    model = with_remainder("null")
    layer = as_decoder(model).layers[1]
    layer.remainder.register_forward_hook(lambda m, given, made: made[0])
    with refused(r"remainder of layer 1 \(null\) returns \[4, 1\]; wanted \[batch, head, row\]"):
        model(TOKENS)
    with refused("leaves a share of its rows to no key"):
        ri.interventions.distances(model, lambda distance, pairs: distance, layers=0).__enter__()


@pytest.mark.parametrize("name", ["ada_apart", "ada_kv_apart", "late", "phases_late", "repo_alibi"])
def test_heads_that_stand_rotated_whole_are_those_of_blocks(name):
    """Found: on an accelerator, heads with biases of positions of their own had other heads' keys."""
    if name == "repo_alibi":
        model = ri.reposition(tiny("llama"), name, assignment="head")
    else:
        model = keys_elsewhere(name) if name in APART else frequented(name)
    inputs = []
    valid = torch.ones_like(TOKENS, dtype=torch.bool)
    capture(as_decoder(model), TOKENS, valid, torch.arange(2), inputs.append)
    found = []
    for whole, memory in ((True, working_memory(2**31)), (False, nullcontext())):
        given = dataclasses.replace(inputs[0], position_logits=None)
        with memory:
            assert given.keeps_rotated == whole
            found.append(reduced(given, [ComponentSums(64)])[0])
    assert_close(found[0].logits, found[1].logits, atol=1e-4, rtol=1e-4)
    shares = [
        variance_shares(sums.moments[None], pair_counts(valid, given.window), sums.bands)
        for sums in found
    ]
    assert_close(*shares, atol=1e-2, rtol=1e-2, equal_nan=True)
