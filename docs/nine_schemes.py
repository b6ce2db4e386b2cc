"""Nine schemes of 2024 to 2026 in a file: `repo-interp card docs/nine_schemes.py:harope --out DIR`.

Each is its paper's formula (tests/instrument/positions/test_nine_schemes.py has it slowly); docs/schemes.md lists
their parts. docs/encodings.py trains them. Where a paper has a head for every key and the model shares
keys among heads, what is made of a key is shared with it.
"""

import math

import torch
from torch import nn
from torch.nn.functional import logsigmoid, softplus

from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.positions.assigners import RememberingAssigner, TokenIndex
from repo_interp.positions.logits import PositionLogits, exact
from repo_interp.positions.rotary import expand_heads


# AdaRoPE (ICML 2026): learned frequencies of every head, and a scale
def adarope(builder, rotation, d_head):
    own = nn.Parameter(rotation.frequencies.repeat(rotation.heads, 1))
    return SchemeParts("", TokenIndex(), own)


class Scales(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, queries, keys, positions):
        return queries * self.scale, keys


def adarope_scaled(builder, rotation, d_head):
    own = nn.Parameter(rotation.frequencies.repeat(rotation.heads, 1))
    return SchemeParts("", TokenIndex(), own, transform=Scales(rotation.heads))


# CARoPE (2507.23083): phase_r(m) = sum_{t <= m} f(x_t)^r of every query head, f = 1 / (1 + softplus)
class Powers(RememberingAssigner):
    def __init__(self, d_model, rows, pairs):
        super().__init__()
        self.rows, self.pairs, self.features = rows, pairs, rows * pairs
        self.map = nn.Linear(d_model, rows, bias=False)

    def remember(self, hidden_states, past):
        base = 1 / (1 + softplus(exact(self.map(hidden_states))))
        powers = base[..., None] ** torch.arange(1, self.pairs + 1, device=base.device)
        return (0 if past is None else past[:, -1:]) + powers.flatten(-2).cumsum(1)

    def recall(self, memory, seen):
        return memory[:, -seen.shape[2] :].unflatten(-1, (self.rows, self.pairs)).transpose(1, 2)


def carope(builder, rotation, d_head):
    assigner = Powers(builder.config.hidden_size, rotation.heads, d_head // 2)
    return SchemeParts("", assigner, torch.ones(d_head // 2))


# TAPA (2509.12635): an amplitude, and the cosine of a phase that grows with the distance
class Amplitudes(PositionLogits):
    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        q, k = exact(queries), expand_heads(exact(keys), queries.shape[1])
        amplitude, phase = (
            a @ b.mT / math.sqrt(a.shape[-1])
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        distance = (rows[:, None, :, None] - columns[:, None, None]).abs().to(q.dtype)
        turned = amplitude * torch.cos(2 * math.pi * distance.sqrt() * phase)
        return (turned - scale * q @ k.mT) * visible


def tapa(builder, rotation, d_head):
    return SchemeParts("", None, None, position_logits=Amplitudes())


# GRAPE, multiplicative (2512.07805): exp(z L), L = a b' - b a', a plane of every key
class Planes(nn.Module):
    def __init__(self, rows, d_head):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(rows, 1, d_head) / 3) for _ in range(2))

    def turned(self, x, z):
        a, b = (exact(p).repeat_interleave(x.shape[1] // len(p), 0) for p in (self.a, self.b))
        s = ((a * a).sum(-1) * (b * b).sum(-1) - (a * b).sum(-1) ** 2).sqrt()
        once = (x * b).sum(-1, True) * a - (x * a).sum(-1, True) * b  # L x
        twice = (once * b).sum(-1, True) * a - (once * a).sum(-1, True) * b
        turn, s = (z.to(s.dtype) * s)[..., None], s[..., None]
        return (x + turn.sin() / s * once + (1 - turn.cos()) / s**2 * twice).to(x.dtype)

    def forward(self, queries, keys, positions):
        return self.turned(queries, positions), self.turned(keys, positions)


def grape(builder, rotation, d_head):
    return SchemeParts("", TokenIndex(), None, transform=Planes(rotation.kv_heads, d_head))


# HARoPE (2510.10489): q and k through a learned matrix before the rotation
class Matrices(nn.Module):
    def __init__(self, rows, d_head):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(d_head).repeat(rows, 1, 1))

    def forward(self, queries, keys, positions):
        group = queries.shape[1] // len(self.matrix)
        return queries @ self.matrix.repeat_interleave(group, 0), keys @ self.matrix


def harope(builder, rotation, d_head):
    part = Matrices(rotation.kv_heads, d_head)
    return SchemeParts("", TokenIndex(), rotation.frequencies, transform=part)


# Wavelets (Oka 2025): q_i . p_{i - j}, Ricker wavelets by dimension
class Wavelets(PositionLogits):
    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        q, number = exact(queries), torch.arange(queries.shape[-1], device=queries.device)
        distance = (rows[:, :, None] - columns[:, None]).to(q.dtype)[..., None]
        t = (distance - number // 8) / 2.0 ** (number % 8)
        psi = 2 / (math.sqrt(3) * math.pi**0.25) * (1 - t * t) * torch.exp(-t * t / 2)
        return scale * torch.einsum("bhid,bijd->bhij", q, psi) * visible


def wavelet(builder, rotation, d_head):
    return SchemeParts("", None, None, position_logits=Wavelets())


# Stick-breaking (2410.17980): A_ij = sigma(s_ij) prod_{j < t <= i} (1 - sigma(s_it)), no softmax
def breaks(queries, keys, visible, scale):
    s = scale * exact(queries) @ expand_heads(exact(keys), queries.shape[1]).mT
    return s, logsigmoid(-s) * visible


class Breaks(PositionLogits):
    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        s, left = breaks(queries, keys, visible, scale)
        return (logsigmoid(s) + left.flip(-1).cumsum(-1).flip(-1) - left - s) * visible


class Left(nn.Module):
    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        return breaks(queries, keys, visible, scale)[1].sum(-1)


def stick(builder, rotation, d_head):
    return SchemeParts("", None, None, position_logits=Breaks(), remainder=Left())


# p-RoPE (Barbero 2025): the fastest pairs turn
def prope(builder, rotation, d_head):
    keep = torch.arange(d_head // 2) < int(0.75 * (d_head // 2))
    return SchemeParts("", TokenIndex(), rotation.frequencies * keep)
