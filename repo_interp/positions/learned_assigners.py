"""Assigners that learn positions from the hidden states.

    learned    z_i = (silu(h_i Wg) * (h_i Wc)) Wz         (RePo eq. 4-6, app. A)
    indexed    z_i = f_phi([h_i, i])                      (RePo, footnote 2)
    linear     z_i = h_i W                                (the released `continuous` modes)
    attention  z_i = (r_i + sum_{j <= i} a_ij V r_j) Wz,
               a_ij = softmax_j(Q r_i . K r_j / sqrt(d_p)) (RePo sec. 3.2: full access to r_<i)
    convolved  z_i = (sum_{o < 4} c_o * r_{i - o}) Wz      (RePo sec. 3.2: limited access)

r_i = silu(h_i Wg) * (h_i Wc), the position representation. The last two start as RePo's, except for
the small V: c_0 starts at 1 and the other c at 0. A token sees those that attention shows it:
no padding, no other documents, and none outside its window.

h_i is the input of the attention layer; Wg, Wc: d_model -> d_model // 8 (`gate_map`,
`content_map`), Wz: d_model // 8 -> P (`final_map`); no biases.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.positions.assigners import MixedAssigner, RememberingAssigner


def represent(maps: Any, hidden_states: Tensor) -> Tensor:
    """Compute the position representation r = silu(h Wg) * (h Wc) (RePo eq. 4).

    Args:
        maps: Module with `gate_map` and `content_map`.
        hidden_states: [batch, token, d_model].

    Returns:
        Representations [batch, token, d_p].
    """
    return nn.functional.silu(maps.gate_map(hidden_states)) * maps.content_map(hidden_states)


class LearnedPositions(MixedAssigner):
    """RePo's f_phi: a gated representation of the position, then one linear map per row."""

    def __init__(self, d_model: int, rows: int, representation: int | None = None) -> None:
        """Make the maps; `rows` is P.

        `representation` is d_p, the width of the representation; None: d_model // 8, as in the
        paper.
        """
        super().__init__()
        self.representation = d_model // 8 if representation is None else representation
        self.gate_map = nn.Linear(d_model, self.representation, bias=False)
        self.content_map = nn.Linear(d_model, self.representation, bias=False)
        # No bias: a shift of all positions would change no rotated logit
        self.final_map = nn.Linear(self.representation, rows, bias=False)

    def assign(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch token any"]:
        """Positions of every token, one column per row of positions."""
        return self.final_map(represent(self, hidden_states))


class IndexedPositions(LearnedPositions):
    """RePo's f_phi with the token index as an additional input; training may rely on it alone."""

    def __init__(self, d_model: int, rows: int) -> None:
        """Make the maps; `rows` is P, and the width of the representation stays d_model // 8."""
        super().__init__(d_model + 1, rows, d_model // 8)

    def forward(
        self, hidden_states: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch any token"]:
        """Positions of every token."""
        # bfloat16 would round the index
        hidden_states = hidden_states.to(self.gate_map.weight.dtype)
        indices = index.expand(hidden_states.shape[0], -1)[..., None].to(hidden_states.dtype)
        return super().forward(torch.cat([hidden_states, indices], dim=-1), index)


class LinearPositions(MixedAssigner):
    """A linear map of the hidden state to one row (`continuous`) or several (multihead)."""

    def __init__(self, d_model: int, rows: int) -> None:
        """Make the map; `rows` is P: 1, or the number of key-value heads."""
        super().__init__()
        self.dynamic_map = nn.Linear(d_model, rows, bias=False)

    def assign(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch token any"]:
        """Positions of every token, one column per row of positions."""
        return self.dynamic_map(hidden_states)


class RecalledPositions(RememberingAssigner):
    """Base of RePo's f_phi with access to the representations of earlier tokens."""

    def __init__(self, d_model: int, rows: int) -> None:
        """`rows` is P."""
        super().__init__()
        self.features = d_model // 8
        self.gate_map = nn.Linear(d_model, self.features, bias=False)
        self.content_map = nn.Linear(d_model, self.features, bias=False)
        self.final_map = nn.Linear(self.features, rows, bias=False)

    def remember(self, hidden_states: Tensor, past: Tensor | None) -> Tensor:
        """Position representation r of the new tokens."""
        return represent(self, hidden_states)

    @abstractmethod
    def gather(self, memory: Tensor, seen: Tensor) -> Float[Tensor, "batch token feature"]:
        """Combine the representations that the last tokens see."""

    def recall(self, memory: Tensor, seen: Tensor) -> Tensor:
        """Positions of the last tokens."""
        # The memory is float32; the maps may be half precision
        memory = memory.to(self.final_map.weight.dtype)
        return self.final_map(self.gather(memory, seen)).transpose(1, 2)


class AttendedPositions(RecalledPositions):
    """One head of attention over the representations, beside the token's."""

    def __init__(self, d_model: int, rows: int) -> None:
        """`rows` is P."""
        super().__init__(d_model, rows)
        self.query_map, self.key_map, self.value_map = (
            nn.Linear(self.features, self.features, bias=False) for _ in range(3)
        )

    def gather(self, memory: Tensor, seen: Tensor) -> Tensor:
        """r_i + sum_j a_ij V r_j."""
        # The new tokens are last, after the cached ones.
        last = memory[:, -seen.shape[2] :]
        attended = nn.functional.scaled_dot_product_attention(
            self.query_map(last)[:, None],
            self.key_map(memory)[:, None],
            self.value_map(memory)[:, None],
            seen,
        )
        return last + attended[:, 0]


class ConvolvedPositions(RecalledPositions):
    """A causal convolution over the representations, channel by channel."""

    def __init__(self, d_model: int, rows: int, taps: int = 4) -> None:
        """Make the maps; `rows` is P, and `taps` is the number of tokens in the convolution."""
        super().__init__(d_model, rows)
        self.taps = nn.Parameter(torch.zeros(taps, self.features))
        # Starts as RePo's f_phi. Written through `detach`, which shares memory, since a leaf that
        # requires gradients cannot be written to.
        nn.init.ones_(self.taps[0].detach())

    def gather(self, memory: Tensor, seen: Tensor) -> Tensor:
        """Return sum_o c_o * r_{i - o} over the offsets o for which token i sees token i - o."""
        keys, rows = memory.shape[1], seen.shape[2]
        # Indices of the new tokens among all keys
        token = torch.arange(keys - rows, keys, device=memory.device)
        gathered = torch.zeros_like(memory[:, -rows:])
        # A short prompt has fewer tokens than taps
        for back, tap in enumerate(self.taps[:keys]):
            # Clamped for gathering; `token >= back` below hides tokens before the first.
            place = (token - back).clamp(min=0)
            shown = seen[:, 0].gather(-1, place[:, None].expand(len(seen), -1, 1))
            gathered = gathered + tap * memory[:, place] * (shown & (token >= back)[:, None])
        return gathered
