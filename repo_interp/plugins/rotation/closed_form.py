"""Approximate logits from a few rotary components: a position part plus a semantic part.

Position Generalization, theorem 2 and app. C.

    f(q_i, z_i - z_j) = sum_r Re q_ir conj(mean k_r) exp(i theta_r (z_i - z_j))
            the mean key, rotated
    g(q_i, k_j)       = sum_r Re q_ir conj(k_jr - mean k_r)
            the rest, as if nothing rotated

over the chosen components r, with un-rotated q, k as complex pairs. f is the paper's f_r; the signs
of its eq. 17 cancel the signs in the proof and are dropped. The paper's g_r is ||k - mean k|| ||q||
times the cosine of the query's angle to the mean key. This is the bound of an inequality in the
proof, and it loses the direction in which a key deviates. `semantic="signed"` is the g above, exact
at distance 0; `semantic="printed"` is the paper's g_r.

f + g is a dot product u . v of 4 features per component, so its correlation with the logits over
all seen pairs needs no map: its moments and its products with the logits come from chunks and Grams
(see causal_pairs), with v centered first. The cost is O(n d chosen) per head; the moments of the
logits come from the pass (see heads). This module knows nothing about how components are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import CausalPairs, gram_products
from repo_interp.measures.kernels.heads import ILL_CONDITIONED, HeadBlock, Reduction, over_heads
from repo_interp.measures.kernels.logit_sums import row_blocks
from repo_interp.plugins.three_axis.axis_fit import pearson
from repo_interp.positions.rotary import rotate
from repo_interp.runtime.memory import SHARED, memory_for

Semantic = Literal["signed", "printed"]


# Compared by identity: tensors have no single truth value, and no hash of their content
@dataclass(frozen=True, eq=False)
class ClosedForm(Reduction):
    """Correlate the logits with f + g over the seen pairs: [prompt, head].

    NaN if no component is chosen or nothing varies. Raises ValueError for a layer without rotation.
    """

    chosen: Bool[Tensor, "prompt head component"]
    key_mean: Float[Tensor, "2 prompt head component"]
    """Mean of the un-rotated keys of a prompt, real and imaginary part."""
    semantic: Semantic

    @cached_property
    def most(self) -> int:
        """Largest number of chosen components of a head; waits for the device once per layer."""
        return int(self.chosen.sum(-1).max())

    def start(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head"]:
        """Return NaN for all heads."""
        return torch.full(
            self.chosen.shape[:2], torch.nan, dtype=torch.float64, device=self.chosen.device
        )

    def ill_conditioned(self, inputs: AttentionInputs, block: HeadBlock) -> Tensor | None:
        """Return heads with small variance of logits, or of f + g, relative to sums of squares."""
        if not self.most:
            return None
        # Either side may cancel: the logits, or their approximation
        count, ours = block.counts.total, self._approximation(inputs, block)[0]
        return (block.pairs.magnitude > block.well_conditioned) | (
            ours.magnitude > ILL_CONDITIONED * ours.scatter(count)
        )

    def add(
        self, result: Float[Tensor, "prompt head"], inputs: AttentionInputs, block: HeadBlock
    ) -> None:
        """Write the correlations of the heads of a block, from chunks and Grams."""
        if not self.most:
            return
        (ours, of_mean), logits, counts = (
            self._approximation(inputs, block),
            block.pairs,
            block.counts,
        )
        product = torch.zeros_like(logits.square)
        # Sum of products of two bilinear maps: directly within chunks, by Grams between chunks.
        for (sign, _, left), (_, _, right) in zip(logits.parts, ours.parts, strict=True):
            within = (left.within * right.within).sum(-1).sum((-1, -2), dtype=torch.float64)
            crossed = gram_products(left.queries, right.queries, left.keys, right.keys)
            product += sign * (within + crossed.sum((-1, -2)))
        # `ours` is u . v' with v' centered; the mean m of v adds u_i . m to every pair of row i
        correlation = pearson(
            count=counts.total,
            total=logits.by_query.sum(-1),
            square=logits.square,
            fitted_total=(ours.by_query + counts.query * of_mean).sum(-1),
            fitted_square=ours.square
            + (of_mean * (2 * ours.by_query + counts.query * of_mean)).sum(-1),
            product=product + (of_mean * logits.by_query).sum(-1),
        )
        some = self.chosen[block.prompt, block.head].any(-1)
        over_heads(result, block, torch.where(some, correlation, torch.nan))

    def by_rows(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head"]:
        """Return the correlations of any logits, a few rows at a time: O(n^2 d)."""
        correlation = self.start(inputs)
        exact = torch.promote_types(inputs.queries.dtype, torch.float32)
        items = self.chosen.any(-1).flatten().nonzero()[:, 0]
        if not len(items):
            return correlation
        # 12 per chosen component and token: 2 each of q and k, 4 each of u and v
        bytes_per_item = (
            inputs.queries.shape[2] * 8 * (2 * inputs.queries.shape[3] + 12 * self.most)
        )
        for some in items.split(max(1, memory_for(items.device, SHARED) // bytes_per_item)):
            prompt, head = some // inputs.heads, some % inputs.heads
            left, right = _features(inputs, self, prompt, head, exact)
            sums = torch.zeros(6, len(some), dtype=torch.float64, device=left.device)
            for rows, logits in row_blocks(inputs):
                seen = inputs.visible(rows)[prompt]
                values = torch.where(seen, logits[prompt, head], 0).to(torch.float64)
                approximate = torch.where(seen, left[:, rows] @ right.mT, 0).to(torch.float64)
                # In the order of the parameters of `pearson`
                pairs = (
                    seen,
                    values,
                    values * values,
                    approximate,
                    approximate * approximate,
                    approximate * values,
                )
                sums += torch.stack([part.sum((1, 2)) for part in pairs])
            correlation[prompt, head] = pearson(*sums)
        return correlation

    def _approximation(
        self, inputs: AttentionInputs, block: HeadBlock
    ) -> tuple[CausalPairs, Float[Tensor, "key member query"]]:
        """Return f + g with v centered, as pairs, and the term of v's mean in every row."""
        made = block.extras.get(self)
        if made is None:
            left, right = _features(
                inputs, self, block.prompt.expand_as(block.head), block.head, block.queries.dtype
            )
            left, right = (part.masked_fill_(~block.tokens[..., None], 0) for part in (left, right))
            # v is centered first: float32 products lose digits where its mean is large.
            mean = (
                right.sum(-2, keepdim=True, dtype=torch.float64)
                / block.tokens.sum(-1)[..., None, None]
            )
            right = (right - mean.to(right)).masked_fill_(~block.tokens[..., None], 0)
            # The mean that was subtracted: rounded to the dtype of the features
            of_mean = (left.to(torch.float64) @ mean.to(right).to(torch.float64).mT)[..., 0]
            made = block.extras[self] = (
                CausalPairs(left, right, block.window, block.pairs.chunk),
                of_mean,
            )
        return made


def _features(
    inputs: AttentionInputs, asked: ClosedForm, prompt: Tensor, head: Tensor, exact: torch.dtype
) -> tuple[Float[Tensor, "*head token feature"], Float[Tensor, "*head token feature"]]:
    """Return features u_i, v_j with u_i . v_j = f + g; 0 for components that are not chosen."""
    if inputs.frequencies is None or inputs.positions is None:
        raise ValueError(
            f"layer {inputs.layer} ({inputs.scheme}) rotates nothing: it has no components"
        )
    some = asked.chosen[prompt, head]
    # The chosen components of a head come first, in their order. Heads with fewer components are
    # padded with weight 0.
    component = some.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : asked.most]
    weight = (
        some.gather(-1, component)
        .to(exact)[..., None, :]
        .repeat_interleave(2, -2)
        .flatten(-2)[..., None, :]
    )
    index = torch.cat([component, component + asked.chosen.shape[-1]], -1)
    place, group = (prompt[..., None], head[..., None]), inputs.heads // inputs.kv_heads
    # The feature axis is moved next to prompt and head, so that only chosen features are copied
    queries = inputs.queries.mT[*place, index].mT.to(exact)
    keys = inputs.keys.mT[place[0], place[1] // group, index].mT.to(exact)
    mean = torch.cat([part[prompt, head].gather(-1, component) for part in asked.key_mean], -1)[
        ..., None, :
    ].to(exact)
    deviation = keys - mean
    if asked.semantic == "printed":
        # The mean key scaled to length |k - mean|: the printed bound keeps the mean's direction
        sizes = _pair_norm(deviation) / _pair_norm(mean).clamp(min=torch.finfo(exact).tiny)
        deviation = mean * sizes
    positions = inputs.positions[prompt, head // (inputs.heads // inputs.positions.shape[1])]
    rates = inputs.frequencies.to(component.device)
    # [head, 1, component] where heads have their own
    rates = rates[component] if rates.ndim == 1 else rates[head[..., None], 0, component]
    frequencies = rates[..., None, :]
    # f: query and mean key rotated, 2 features per component; g: query and deviation as they are, 2
    # more. Both are lengthened by attention_scaling; its square stands at the query alone.
    scaling = inputs.pair_scaling.to(exact).repeat(2)[torch.cat([index, index], -1)][..., None, :]
    rotated_mean = rotate(mean.expand_as(keys), positions, frequencies)
    left = torch.cat([rotate(queries, positions, frequencies), queries], -1) * scaling
    right = torch.cat([rotated_mean * weight, deviation * weight], -1)
    return left, right


def _pair_norm(features: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Return the norm of every pair, at both of its dimensions."""
    first, second = features.chunk(2, -1)
    return torch.hypot(first, second).repeat(*[1] * (features.dim() - 1), 2)
