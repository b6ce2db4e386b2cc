"""The nine schemes of docs/nine_schemes.py, each against its paper's formula, slowly, in float64."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys

import pytest
import torch
from families import TOKENS
from own_schemes import model_of, register_all
from places import DOCS
from torch.nn.functional import softplus
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.models.decoder import as_decoder
from repo_interp.positions.rotary import expand_heads

specification = importlib.util.spec_from_file_location("nine_schemes", DOCS / "nine_schemes.py")
assert specification is not None and specification.loader is not None
nine = importlib.util.module_from_spec(specification)
sys.modules["nine_schemes"] = nine  # where inspect looks for a class
specification.loader.exec_module(nine)


def softmax(logits):
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def by_pairs(of_pair):
    """Weights from a function of (query, key, i, j), one pair of tokens at a time."""

    def weights(q, k, h, layer):
        logits = torch.zeros(*q.shape[:3], q.shape[2], dtype=q.dtype)
        for i in range(q.shape[2]):
            for j in range(i + 1):
                logits[..., i, j] = of_pair(q[:, :, i], k[:, :, j], i, j, layer)
        return softmax(logits)

    return weights


def turned(x, angle):
    """Pairs (r, r + d/2) as complex numbers, times exp(i angle)."""
    return torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)


def of_adarope(q, k, i, j, layer):
    theta = layer.frequencies.double()[:, 0]
    scale = getattr(layer.transform, "scale", torch.ones(1, 1, 1)).double()[..., 0, 0]
    return (
        scale
        * (turned(q, i * theta) * turned(k, j * theta).conj()).real.sum(-1)
        / q.shape[-1] ** 0.5
    )


def of_carope(q, k, h, layer):
    base = 1 / (1 + softplus(h @ layer.assigner.map.weight.double().mT))
    pairs = q.shape[-1] // 2
    phases = torch.stack([(base**r).cumsum(1) for r in range(1, pairs + 1)], -1).transpose(1, 2)
    q, k = turned(q, phases), turned(k, phases)
    return softmax((q @ k.conj().mT).real / math.sqrt(2 * pairs))


def of_tapa(q, k, i, j, layer):
    half = q.shape[-1] // 2
    amplitude = (q[..., :half] * k[..., :half]).sum(-1) / half**0.5
    phase = (q[..., half:] * k[..., half:]).sum(-1) / half**0.5
    return amplitude * torch.cos(2 * torch.pi * abs(i - j) ** 0.5 * phase)


def of_grape(q, k, i, j, layer):
    a, b = (part.double() for part in (layer.transform.a, layer.transform.b))
    turn = torch.linalg.matrix_exp((j - i) * (a.mT @ b - b.mT @ a))
    turn = turn.repeat_interleave(q.shape[1] // len(turn), 0)
    return torch.einsum("bhd,hde,bhe->bh", q, turn, k) / q.shape[-1] ** 0.5


def of_harope(q, k, i, j, layer):
    matrix = layer.transform.matrix.double()
    matrix = matrix.repeat_interleave(q.shape[1] // len(matrix), 0)
    q, k = (torch.einsum("bhd,hde->bhe", x, matrix) for x in (q, k))
    theta = layer.frequencies.double()
    return (turned(q, i * theta) * turned(k, j * theta).conj()).real.sum(-1) / q.shape[-1] ** 0.5


def of_wavelet(q, k, i, j, layer):
    psi = []
    for number in range(q.shape[-1]):
        t = (i - j - number // 8) / 2.0 ** (number % 8)
        psi.append(2 / (3**0.5 * math.pi**0.25) * (1 - t * t) * math.exp(-t * t / 2))
    return (q * (k + torch.tensor(psi).double())).sum(-1) / q.shape[-1] ** 0.5


def of_stick(q, k, h, layer):
    s = (q @ k.mT / q.shape[-1] ** 0.5).sigmoid()
    weights = torch.zeros_like(s)
    for i in range(s.shape[2]):
        for j in range(i + 1):
            weights[..., i, j] = s[..., i, j] * (1 - s[..., i, j + 1 : i + 1]).prod(-1)
    return weights


def of_prope(q, k, i, j, layer):
    theta = 1e4 ** -(torch.arange(q.shape[-1] // 2).double() / (q.shape[-1] // 2))
    theta[int(0.75 * len(theta)) :] = 0
    return (turned(q, i * theta) * turned(k, j * theta).conj()).real.sum(-1) / q.shape[-1] ** 0.5


NINE = {
    "adarope": (by_pairs(of_adarope), ["adarope"]),
    "adarope_scaled": (by_pairs(of_adarope), ["Scales", "adarope_scaled"]),
    "carope": (of_carope, ["Powers", "carope"]),
    "tapa": (by_pairs(of_tapa), ["Amplitudes", "tapa"]),
    "grape": (by_pairs(of_grape), ["Planes", "grape"]),
    "harope": (by_pairs(of_harope), ["Matrices", "harope"]),
    "wavelet": (by_pairs(of_wavelet), ["Wavelets", "wavelet"]),
    "stick": (of_stick, ["breaks", "Breaks", "Left", "stick"]),
    "prope": (by_pairs(of_prope), ["prope"]),
}
"""By scheme, its weights slowly, and what was written."""


def lines(name):
    """Lines of a scheme that are not empty."""
    written = (inspect.getsource(getattr(nine, part)) for part in NINE[name][1])
    return sum(bool(line.strip()) for part in written for line in part.splitlines())


def drawn(name, family):
    """A model of the scheme whose learned numbers are no longer those of its start, in float64."""
    ri.register_scheme(name, getattr(nine, name))
    model = model_of(name, family=family).double()
    torch.manual_seed(3)
    for weight in as_decoder(model).scheme_parameters:
        weight.data += 0.1 * torch.randn_like(weight)
    return model


@torch.no_grad()
def difference(name, family):
    """Largest difference of outputs of attention to the slow formula, over all layers."""
    model, largest = drawn(name, family), 0.0
    for layer in as_decoder(model).layers:
        module, kept = layer.module, {}
        handles = [
            module.register_forward_pre_hook(
                lambda m, given, keywords, kept=kept: kept.update(h=keywords["hidden_states"]),
                with_kwargs=True,
                prepend=True,
            ).remove,
            layer.sites.call("attended", lambda made, kept=kept: kept.update(out=made)),
        ]
        model(TOKENS)
        for remove in handles:
            remove()
        h, out = kept["h"].double(), kept["out"].double()
        q, k, v = (
            expand_heads(
                (h @ part.weight.mT).unflatten(-1, (-1, layer.d_head)).transpose(1, 2), layer.heads
            )
            for part in (module.q_proj, module.k_proj, module.v_proj)
        )
        expected = (NINE[name][0](q, k, h, layer) @ v).transpose(1, 2)
        largest = max(largest, float((out - expected).abs().max()))
    return largest


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register_all(monkeypatch)


@pytest.mark.parametrize("family", ["llama", "llama_mha"])
@pytest.mark.parametrize("name", NINE)
def test_nine_schemes_are_their_slow_formulas(name, family):
    # Frequencies are kept in float32, and stick-breaking's weights pass through a softmax in it.
    assert difference(name, family) < 1e-5
    assert lines(name) <= 20


@pytest.mark.parametrize("name", NINE)
def test_nine_schemes_are_verified(name):
    ri.register_scheme(name, getattr(nine, name))
    slow = NINE[name][0]

    def reference(q, k, positions, layer):
        return slow(q, k, None, layer)

    # CARoPE's formula is one of hidden states, which a reference is not given.
    given = None if name == "carope" else reference
    assert ri.verify_scheme(name, reference=given).attrs["findings"] == ""


def test_schemes_at_their_start_turn_as_rope():
    for name in ("adarope", "adarope_scaled", "harope"):
        ri.register_scheme(name, getattr(nine, name))
        model, plain = model_of(name), model_of("rope")
        if name == "harope":
            for layer in as_decoder(model).layers:
                layer.transform.matrix.data.copy_(torch.eye(8).expand(2, 8, 8))
        assert_close(model(TOKENS).logits, plain(TOKENS).logits, atol=0, rtol=0)
