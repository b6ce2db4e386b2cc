"""Schemes of 2024 and 2025 as plug-ins; docs/schemes.md shows this file as the example of one.

    forgetting      logit = q_i . k_j + sum_{t = j+1 .. i} log sigmoid(w_h . x_t + b_h)
                    (Forgetting Transformer, Lin et al. 2025)
    pope            logit = sum_c softplus(q_c) softplus(k_c) cos(theta_c (z_i - z_j) - delta_c)
                    (PoPE, Gopalakrishnan et al. 2025)
    path            logit = q_i . (prod_{t = j+1 .. i} (I - beta_t w_t w_t^T)) k_j
                    (PaTH, Yang et al. 2025)
    selective_rope  position of pair r, in radians: z_ir = sum_{t <= i} w_r . x_t
                    (Selective RoPE, Movahedi et al. 2025)

The logits are scaled by the layer's `logit_scale`; `forward` returns what they have beyond that of the
dot product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.positions.assigners import RememberingAssigner
from repo_interp.positions.logits import PositionLogits, exact
from repo_interp.positions.rotary import expand_heads


class Forgetting(PositionLogits):
    """Sums of the logarithms of forget gates between key and query."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, heads)

    def gate_keys(self, hidden_states: Tensor) -> Tensor:
        return F.logsigmoid(self.gate(hidden_states))[:, None]  # [batch, 1, token, head]

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        visible: Tensor,
        logit_scale: float,
        values: Tensor | None = None,
        gate_keys: Tensor | None = None,
    ) -> Tensor:
        assert gate_keys is not None
        gates = exact(gate_keys[:, 0]).mT[:, :, None] * visible  # [batch, head, row, key]
        return (gates.flip(-1).cumsum(-1).flip(-1) - gates) * visible


class Polar(PositionLogits):
    """Sizes from the content, phases from positions and a learned offset."""

    def __init__(self, heads: int, d_head: int, base: float = 10000.0) -> None:
        super().__init__()
        self.base, self.delta = base, nn.Parameter(torch.zeros(heads, d_head))

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        visible: Tensor,
        logit_scale: float,
        values: Tensor | None = None,
        gate_keys: Tensor | None = None,
    ) -> Tensor:
        q, k = exact(queries), expand_heads(exact(keys), queries.shape[1])
        index = torch.arange(q.shape[-1], dtype=torch.float32, device=q.device)
        theta = self.base ** (-index / q.shape[-1])
        rows, columns = (
            exact(z if z.ndim == 3 else z[:, None])[..., None] * theta
            for z in (query_index, key_index)
        )
        columns = columns + self.delta[:, None].clamp(-2 * torch.pi, 0)
        q_polar, k_polar = (
            torch.cat([F.softplus(x) * angle.cos(), F.softplus(x) * angle.sin()], -1)
            for x, angle in ((q, rows), (k, columns))
        )
        return logit_scale * (q_polar @ k_polar.mT - q @ k.mT) * visible


class Householder(PositionLogits):
    """Products of Householder maps between key and query."""

    def __init__(self, d_model: int, kv_heads: int, d_head: int) -> None:
        super().__init__()
        self.direction = nn.Linear(d_model, kv_heads * d_head, bias=False)
        self.strength, self.kv_heads = nn.Linear(d_model, kv_heads), kv_heads

    def gate_keys(self, hidden_states: Tensor) -> Tensor:
        w = F.normalize(self.direction(hidden_states).unflatten(-1, (self.kv_heads, -1)), dim=-1)
        beta = 2 * torch.sigmoid(self.strength(hidden_states))[..., None]
        return (beta.sqrt() * w).transpose(1, 2)  # w: its outer product is beta w w^T

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        visible: Tensor,
        logit_scale: float,
        values: Tensor | None = None,
        gate_keys: Tensor | None = None,
    ) -> Tensor:
        assert gate_keys is not None
        q, heads = exact(queries), queries.shape[1]
        k, w = (expand_heads(exact(each), heads) for each in (keys, gate_keys))
        # the product takes sum_t c_t w_t from q, with c_t + sum_{s > t} c_s w_s . w_t = q . w_t
        removed = torch.linalg.solve_triangular(
            (w @ w.mT).tril(-1), (q @ w.mT) * visible, upper=False, left=False, unitriangular=True
        )
        return -logit_scale * (removed @ (w @ k.mT).tril(-1)) * visible


class Selective(RememberingAssigner):
    """Sums of angles that tokens decide, by pair."""

    def __init__(self, d_model: int, d_head: int) -> None:
        super().__init__()
        self.features = d_head // 2
        self.angle = nn.Linear(d_model, self.features, bias=False)

    def remember(self, hidden_states: Tensor, past: Tensor | None) -> Tensor:
        before = 0 if past is None else past[:, -1:]
        return before + exact(self.angle(hidden_states)).cumsum(1)

    def recall(self, memory: Tensor, seen: Tensor) -> Tensor:
        return memory[:, None, -seen.shape[2] :]  # [batch, 1, token, component]


def _added(name: str, logits: PositionLogits) -> SchemeParts:
    return SchemeParts(name, None, None, position_logits=logits)


def forgetting(builder: Any, rotation: Any, d_head: int) -> SchemeParts:
    """Make the parts of a layer of the Forgetting Transformer."""
    return _added("forgetting", Forgetting(builder.config.hidden_size, rotation.heads))


def pope(builder: Any, rotation: Any, d_head: int) -> SchemeParts:
    """Make the parts of a layer of PoPE."""
    return _added("pope", Polar(rotation.heads, d_head))


def path(builder: Any, rotation: Any, d_head: int) -> SchemeParts:
    """Make the parts of a layer of PaTH."""
    return _added("path", Householder(builder.config.hidden_size, rotation.kv_heads, d_head))


def selective_rope(builder: Any, rotation: Any, d_head: int) -> SchemeParts:
    """Make the parts of a layer of Selective RoPE."""
    assigner = Selective(builder.config.hidden_size, d_head)
    return SchemeParts("selective_rope", assigner, torch.ones(d_head // 2))
