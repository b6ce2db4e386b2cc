"""Schemes as other packages write them, for the tests; `registered` gives them names in layouts."""

from __future__ import annotations

import torch
from families import tiny
from torch import nn

import repo_interp as ri
from repo_interp import installed_points
from repo_interp.models.decoder import as_decoder
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.biases import ALiBi
from repo_interp.positions.logits import PositionLogits, exact
from repo_interp.positions.rotary import expand_heads, rotate


class OfPairs(nn.Module):
    """Positions by rotary pair: the index times learned frequencies (AdaRoPE), one row or several."""

    def __init__(self, frequencies, rows):
        super().__init__()
        self.log = nn.Parameter(frequencies.log().repeat(rows, 1))

    def forward(self, hidden_states, index):
        return exact(index)[:, None, :, None] * self.log.exp()[:, None]


class Distance(PositionLogits):
    """-distance / 8, of no base that this package knows."""

    def forward(
        self, queries, keys, query_index, key_index, visible, scale, values=None, gate_keys=None
    ):
        rows, columns = (exact(z if z.ndim == 3 else z[:, None]) for z in (query_index, key_index))
        return -(rows[..., None] - columns[..., None, :]).abs() / 8 * visible


class Turned(PositionLogits):
    """What rotation by the index adds to a logit, as a term: of queries, keys and distance."""

    def __init__(self, frequencies):
        super().__init__()
        self.register_buffer("frequencies", frequencies.clone(), persistent=False)

    def forward(
        self, queries, keys, query_index, key_index, visible, scale, values=None, gate_keys=None
    ):
        q, k = exact(queries), expand_heads(exact(keys), queries.shape[1])
        rows, columns = (exact(z if z.ndim == 3 else z[:, None]) for z in (query_index, key_index))
        turned = rotate(q, rows, self.frequencies) @ rotate(k, columns, self.frequencies).mT
        return scale * (turned - q @ k.mT) * visible


def parts(assigner=None, frequencies=None, scaling=1.0, logits=None):
    return SchemeParts("", assigner, frequencies, scaling, position_logits=logits)


def ones(width):
    return torch.ones(width // 2)


OWN = {
    "turned": lambda b, r, d: parts(TokenIndex(), r.frequencies),
    "sloped": lambda b, r, d: parts(TokenIndex(), logits=ALiBi(r.heads)),
    "far": lambda b, r, d: parts(TokenIndex(), logits=Distance()),
    "far_turned": lambda b, r, d: parts(TokenIndex(), r.frequencies, logits=Distance()),
    "as_term": lambda b, r, d: parts(logits=Turned(r.frequencies)),
    "term_and_turned": lambda b, r, d: parts(
        TokenIndex(), r.frequencies, logits=Turned(r.frequencies)
    ),
    "by_pair": lambda b, r, d: parts(OfPairs(r.frequencies, 1), ones(d)),
    "by_head_and_pair": lambda b, r, d: parts(OfPairs(r.frequencies, r.heads), ones(d)),
    "learned_frequencies": lambda b, r, d: parts(TokenIndex(), nn.Parameter(r.frequencies.clone())),
    "learned_scaling": lambda b, r, d: parts(TokenIndex(), r.frequencies, nn.Parameter(ones(d))),
    "still": lambda b, r, d: parts(TokenIndex(), r.frequencies * 0),
}
"""turned, sloped: RoPE and ALiBi by other names. by_pair and by_head_and_pair compute as RoPE."""


def register_all(monkeypatch) -> None:
    """Register the schemes until the test ends."""
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    for name, build in OWN.items():
        ri.register_scheme(name, build)


def model_of(layout: str, seed: int = 0, family: str = "llama"):
    """A tiny model with a layout, and weights that make its logits differ."""
    torch.manual_seed(seed)
    model = tiny(family)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    model = ri.reposition(model, layout).eval()
    with torch.no_grad():
        for module in as_decoder(model).scheme_modules:
            for weight in module.parameters():
                if not weight.any():
                    weight.normal_(std=0.5)
    return model
