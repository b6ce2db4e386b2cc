"""Biases that depend only on positions: ALiBi, KERPLE, FIRE.

For head h and distance D = |z_i - z_j|:

    ALiBi         B = -m_h D,  m_h = 2^(-8 h / H),  h = 1 .. H    (Press et al. 2022, sec. 3)
    KERPLE log    B = -a_h log(1 + b_h D),  a, b > 0              (Chi et al. 2022, as in HoPE)
    FIRE          B = f_h(psi(D) / psi(max(L, z_i))),
                  psi(x) = log(1 + c x)                           (Li et al. 2024, listing)

z is the token's index, or any real-valued position, such as RePo's learned positions. Distances are
symmetric, like KERPLE's kernel: a learned position of a key may be beyond or before that of its
query. ALiBi and KERPLE depend only on differences of positions. FIRE's normalizer grows with the
query's position above L, so its positions must be counted from 0.

KERPLE's constraints hold by construction: a = exp(.), b = exp(.) of unconstrained parameters. (The
authors' code instead clamps a and b to at least 0.01 before every use. Starting values are drawn as
in their code.)

These logits do not depend on the contents of tokens, so this module needs no queries and keys.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from repo_interp.positions.logits import PositionLogits, exact, full_precision
from repo_interp.positions.piecewise import relu_network
from repo_interp.positions.rotary import expand_heads


def geometric_slopes(
    heads: int,
    first: float | None = None,
    ratio: float | None = None,
    device: torch.device | None = None,
) -> Float[Tensor, "head"]:
    """Return slopes first, first * ratio, first * ratio^2, ..., one per head.

    The rule in the paper's text applies to any number of heads; the paper's code differs from it if
    the number is not a power of two.

    Args:
        heads: Number of heads.
        first: The first slope, in logits per position; None: 2^(-8 / heads).
        ratio: Ratio of successive slopes; None: 2^(-8 / heads).
        device: Device of the slopes.

    Returns:
        Slopes [head], float32: 1/2 .. 1/256 for 8 heads by default.

    Raises:
        ValueError: `heads` is below 1.
    """
    if heads < 1:
        raise ValueError(f"slopes for at least one head were wanted; got {heads} heads")
    first = math.exp2(-8.0 / heads) if first is None else first
    ratio = math.exp2(-8.0 / heads) if ratio is None else ratio
    return first * ratio ** torch.arange(heads, dtype=torch.float32, device=device)


class PositionBias(PositionLogits):
    """Base of biases that depend only on positions."""

    reads_content: ClassVar = False

    def __init__(self, heads: int) -> None:
        """Keep the number of query heads of the layer."""
        super().__init__()
        self.heads = heads

    @abstractmethod
    def bias(
        self,
        query_positions: Float[Tensor, "batch any row"],
        key_positions: Float[Tensor, "batch any key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Return the bias of every pair, finite also for pairs that are not visible."""

    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        keys: Float[Tensor, "batch kv_head key d_head"],
        query_index: Num[Tensor, "batch row"],
        key_index: Num[Tensor, "batch key"],
        visible: Bool[Tensor, "batch 1 row key"],
        logit_scale: float,
        values: Float[Tensor, "batch kv_head key d_head"] | None = None,
        gate_keys: Float[Tensor, "batch kv_head key d_head"] | None = None,
    ) -> Float[Tensor, "batch head row key"]:
        """Return position logits of some rows and all keys, 0 where not visible."""
        with full_precision(query_index):
            bias = self.bias(
                self._rows_of_positions(query_index), self._rows_of_positions(key_index)
            )
        return bias.masked_fill(~visible, 0.0)

    def _rows_of_positions(self, index: Num[Tensor, "..."]) -> Float[Tensor, "batch any token"]:
        """Positions in float32 with an axis of heads: one row for all heads, or one per head."""
        positions = exact(index if index.ndim == 3 else index[:, None])
        if (
            # Learned positions differ by prompt; comparing them would wait for the device.
            len(positions) > 1
            and not positions.requires_grad
            and torch.equal(positions, positions[:1].expand_as(positions))
        ):
            positions = positions[:1]  # the index: one bias for all prompts
        return positions if positions.shape[1] == 1 else expand_heads(positions, self.heads)


class ALiBi(PositionBias):
    """-m_h D with fixed slopes; nothing to learn."""

    def __init__(
        self,
        heads: int,
        first: float | None = None,
        ratio: float | None = None,
        slopes: Sequence[float] | None = None,
    ) -> None:
        """Set slopes, by default a geometric series, see `geometric_slopes`.

        Args:
            heads: Query heads of the layer.
            first: The first slope; None: the paper's.
            ratio: Ratio of successive slopes; None: the paper's.
            slopes: Slope of every head, instead of a series.
        """
        super().__init__(heads)
        self.first, self.ratio, self.slopes = first, ratio, slopes

    def bias(
        self,
        query_positions: Float[Tensor, "batch any row"],
        key_positions: Float[Tensor, "batch any key"],
    ) -> Float[Tensor, "batch head row key"]:
        """The bias of every pair."""
        # Computed in every call, since `.to(bfloat16)` would round a buffer.
        device = query_positions.device
        slopes = (
            geometric_slopes(self.heads, self.first, self.ratio, device)
            if self.slopes is None
            else torch.tensor(self.slopes, dtype=torch.float32, device=device)
        )
        return -slopes[:, None, None] * distances(query_positions, key_positions)


class KerpleLog(PositionBias):
    """-a_h log(1 + b_h D); a starts uniform in (0, 2), b in (0, 1)."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.log_scale = nn.Parameter(_uniform(heads, 2.0).log())
        self.log_rate = nn.Parameter(_uniform(heads, 1.0).log())

    def bias(
        self,
        query_positions: Float[Tensor, "batch any row"],
        key_positions: Float[Tensor, "batch any key"],
    ) -> Float[Tensor, "batch head row key"]:
        """The bias of every pair."""
        # Converted to float32 before exp, which would amplify the rounding of half precision.
        scale, rate = exact(self.log_scale).exp(), exact(self.log_rate).exp()
        reached = torch.log1p(rate[:, None, None] * distances(query_positions, key_positions))
        return -scale[:, None, None] * reached


class FIRE(PositionBias):
    """f_h(psi(D) / psi(max(L, z_i))) with a ReLU network f, learned c and L."""

    def __init__(
        self,
        heads: int,
        width: int = 32,
        curvature: float = 0.1,
        threshold: float = 512.0,
        margin: float = 1e-6,
    ) -> None:
        """Set the starting values, by default those of the paper's listing.

        Args:
            heads: Query heads of the layer.
            width: Hidden units of f.
            curvature: c at the start.
            threshold: L at the start, in positions; training learns a factor of it.
            margin: Constant that is added to the normalizer.
        """
        super().__init__(heads)
        self.hidden = nn.Linear(1, width)
        self.output = nn.Linear(width, heads)
        self.curvature = nn.Parameter(torch.tensor(curvature))
        # As in the listing: a factor near 1 learns at a similar rate as other parameters.
        self.threshold_factor = nn.Parameter(torch.tensor(1.0))
        self.first_threshold, self.margin = threshold, margin

    def bias(
        self,
        query_positions: Float[Tensor, "batch any row"],
        key_positions: Float[Tensor, "batch any key"],
    ) -> Float[Tensor, "batch head row key"]:
        """The bias of every pair."""
        # Signs may flip in training, but log1p needs arguments above -1.
        curvature = exact(self.curvature).abs()
        threshold = (exact(self.threshold_factor) * self.first_threshold).abs()
        reach = torch.log1p(
            curvature * torch.maximum(query_positions, threshold.to(query_positions.dtype))
        )
        progress = torch.log1p(curvature * distances(query_positions, key_positions))
        # The margin avoids a division by 0 for the first token.
        progress = progress / (reach + self.margin)[..., None]
        hidden_weight, hidden_bias, output_weight = (
            parameter.to(progress.dtype)
            for parameter in (
                self.hidden.weight[:, 0],
                self.hidden.bias,
                self.output.weight[:, None],
            )
        )
        # A network of one input is evaluated by segments, which needs no axis of units.
        learned = relu_network(progress, hidden_weight, hidden_bias, output_weight)
        return learned + self.output.bias.to(progress.dtype)[:, None, None]


def distances(
    query_positions: Float[Tensor, "batch any row"], key_positions: Float[Tensor, "batch any key"]
) -> Float[Tensor, "batch any row key"]:
    """Return |z_i - z_j| of every pair, in positions.

    Args:
        query_positions: [batch, any, row].
        key_positions: [batch, any, key].

    Returns:
        Distances [batch, any, row, key].
    """
    return (query_positions[..., :, None] - key_positions[..., None, :]).abs()


def _uniform(heads: int, upper: float) -> Float[Tensor, "head"]:
    """Draw starting values from (0, upper), at least 0.01, to which KERPLE's code clamps."""
    return (torch.rand(heads) * upper).clamp(min=1e-2)
