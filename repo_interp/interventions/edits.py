"""The kinds of position edits: one class per kind, with parameters, words and arithmetic.

To add a kind, add a class; `position_edit` lists the functions and forms that follow from it. Edits
apply to RoPE's token index and to learned positions alike (RePo eq. 4-7).

Unless a class says otherwise, new tokens after a cached prompt keep their positions. Greedy text is
then the same with and without a cache, except for orders and ranks: without a cache these are
computed again for the longer prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from jaxtyping import Int
from torch import Tensor

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.position_edit import FormRow, PositionEdit, bounded, first_of
from repo_interp.interventions.replacing import (
    PassContext,
    finite_positions,
    heads_by_layer,
    layer_and_head,
    replaced,
    token_table,
)
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import Finite, Seed, TokensOrNone

FLOAT32 = torch.finfo(torch.float32)
HOOK = "blocks.{}.attn.hook_positions"
"""Pattern of the name of a layer's positions in a bridge's cache."""
Step = Annotated[float, Interval(ge=1e-30, le=1e9)]


class Linearised(PositionEdit):
    """Set positions to the token index, as in plain RoPE: z_i <- i."""

    words = "the token index"
    form = FormRow("the token index")
    become, does = "token index", "replacing them by the token index"

    def edited(self, z, here):
        # [prompt, 1, token] broadcasts over the rows
        return here.index[:, None]


class Straightened(PositionEdit):
    """Set positions to the straight line over the token index that fits them best: z_i <- a + b i.

    The line is fitted by least squares over the chosen tokens, separately for every prompt and row
    of positions. The result is RoPE with the head's slope. New tokens after a cached prompt are on
    the line of the prompt.
    """

    become, does = "straight lines", "replacing them by straight lines"

    def edited(self, z, here):
        line = self.of_prompt(z, here, self._line)
        return (line[..., :1] + line[..., 1:] * here.index[:, None]).to(z)

    def _line(self, z: Tensor, here: PassContext) -> Tensor:
        """Intercept and slope of every row [prompt, row, 2]."""
        mean = partial(_mean, here=here)
        # float64, since squares of indices lose digits in float32 above a few thousand tokens
        z, index = z.double(), here.index[:, None].double()
        offsets = index - mean(index)
        # A single chosen token has no spread: the slope is 0, and the line is its position.
        slope = mean(offsets * (z - mean(z))) / mean(offsets**2).clamp_min(1e-9)
        return torch.cat((mean(z) - slope * mean(index), slope), -1)


class Frozen(PositionEdit):
    """Set positions to one constant: z_i <- c.

    If all tokens are frozen, a head computes as without positions (NoPE), whatever the constant.
    New tokens after a cached prompt get the constant of the prompt.

    Args:
        value: The constant; None: the mean of every row over the chosen tokens of the prompt.
    """

    value: Finite | None = bounded(
        "the value that positions are frozen at", default=None, kw_only=True
    )
    words = "position {value:.4g} for every token"
    form = FormRow("one constant", "value", "position", "the mean")
    become, does = "all the same", "freezing them"

    def in_words(self) -> str:
        return "the mean position" if self.value is None else super().in_words()

    def edited(self, z, here):
        if self.value is None:
            return self.of_prompt(z, here, _mean)
        return torch.full_like(z, self.value)


class Copied(PositionEdit):
    """Give tokens the position of one token of their prompt: z_i <- z_source.

    Args:
        source: Index of the token to copy from.
    """

    source: TokensOrNone = bounded("source")
    words = "the position of token {source}"
    form = FormRow("the position of a token", "source", "token")

    def edited(self, z, here):
        return self.of_prompt(z, here, self._of_token)

    def _of_token(self, z: Tensor, here: PassContext) -> Tensor:
        shortest = int(here.index[:, -1].min()) + 1
        if shortest <= self.source:
            raise InputError(
                f"token {self.source} gives its position, and a prompt has {shortest} tokens; "
                "name an earlier one"
            )
        return _from_tokens(z, here.index.new_full((len(here.index), 1), self.source), here)


class Permuted(PositionEdit):
    """Give token i the position of token order[i], with one order for all heads: z_i <- z_order(i).

    Args:
        order: Permutation of the indices of the first tokens, [token] or [prompt, token]; later
            tokens keep their positions. None: a random order of the chosen tokens of every prompt.
            Padding on the right is permuted too, unless an attention mask or `tokens` exclude it;
            analyses and scores exclude it.
        seed: Seed of the random order; not allowed together with `order`.
    """

    order: Any = field(default=None, kw_only=True)
    seed: Seed = bounded("seed", default=0, kw_only=True)
    words = "shuffled, seed {seed}"
    form = FormRow("shuffled", "seed", "seed")
    become, does = "in random order", "permuting them"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order is None:
            return
        if self.seed:
            raise InputError(
                f"seed {self.seed} draws an order, and one was given; leave one of the two out"
            )
        # Zeros on the processor select the device, where the indices are checked.
        indices = finite_positions(self.order, torch.zeros(1), "the tokens of an order")
        if (
            indices.dtype not in (torch.int32, torch.int64)
            or indices.ndim not in (1, 2)
            or not indices.numel()
            or not (indices.sort(-1).values == torch.arange(indices.shape[-1])).all()
        ):
            raise InputError(
                "an order names each of the first tokens once, [token] or [prompt, token]; got "
                f"{quoted(self.order)}"
            )
        object.__setattr__(self, "order", indices)  # the class is frozen

    @property
    def prompts(self) -> int:
        return 1 if self.order is None or self.order.ndim == 1 else len(self.order)

    def edited(self, z, here):
        if self.order is not None:
            return self._reordered(z, here)
        if here.start > 0:
            return z
        # On the processor, for the same random numbers on every machine
        columns = torch.arange(z.shape[-1]).repeat(len(z), 1)
        chosen = torch.ones_like(columns).bool() if here.chosen is None else here.chosen.cpu()
        for row, tokens in zip(columns, chosen, strict=True):
            # Prompts with the same number of chosen tokens get the same order, so the draw does not
            # depend on the other prompts of a batch.
            generator = torch.Generator().manual_seed(self.seed)
            row[tokens] = row[tokens][torch.randperm(int(tokens.sum()), generator=generator)]
        return z.gather(-1, columns.to(z.device)[:, None].expand_as(z))

    def _reordered(self, z, here):
        order, index = self.order, here.index
        count = order.shape[-1]
        if order.ndim == 2 and len(order) not in (1, len(z)):
            raise InputError(
                f"orders of {len(order)} prompts came to {len(z)}; give one for all, or one per "
                "prompt"
            )
        if here.start > 0:
            if int(index.min()) < count:
                raise InputError(
                    "positions of tokens in the cache cannot change places with new ones; "
                    "generate without a cache"
                )
            return z
        shortest = int(index[:, -1].min()) + 1
        if shortest < count:
            raise InputError(
                f"an order of {count} tokens came to a prompt of {shortest}; give one that is no "
                "longer"
            )
        # Clamped only for `gather`: `where` below restores tokens beyond the order.
        source = order.to(index.device).expand(len(index), -1).gather(1, index.clamp_max(count - 1))
        return _from_tokens(z, torch.where(index < count, source, index), here)

    @classmethod
    def of_prompts(cls, prompts):
        order = prompts.index.clone()
        for number, row, length in zip(prompts.numbers, order, prompts.lengths, strict=True):
            # Seeded by the prompt's number, so that its order does not depend on its batch.
            random = np.random.default_rng([prompts.strength.seed, number])
            row[:length] = torch.from_numpy(random.permutation(length))
        return cls(order=order)


class Swapped(Permuted):
    """Exchange the positions of tokens 0 and 1, 2 and 3, and so on.

    For chosen tokens see `swapped_tokens`.
    """

    is_function = False
    form = None
    become, does = "neighbours swapped", "swapping neighbours"

    @classmethod
    def of_prompts(cls, prompts):
        # ^ 1 exchanges 2k and 2k + 1. An odd last token has no neighbour and stays.
        pairs = torch.tensor([[length // 2 * 2] for length in prompts.lengths])
        return cls(order=torch.where(prompts.index < pairs, prompts.index ^ 1, prompts.index))


class Scaled(PositionEdit):
    """Multiply positions by a factor: z_i <- factor z_i.

    Args:
        factor: Any finite number.
    """

    factor: Finite = bounded("the factor that positions are scaled by, given before the heads,")
    words = "times {factor:g}"
    form = FormRow("scaled", "factor", "factor")
    become, does = "scaled", "scaling them"

    def edited(self, z, here):
        return self.factor * z

    @classmethod
    def of_prompts(cls, prompts):
        return cls(prompts.strength.scale)


class Rounded(PositionEdit):
    """Round positions to multiples of a step: z_i <- step round(z_i / step).

    Halves are rounded to even multiples.

    Args:
        step: The step, in positions.
    """

    step: Step = bounded(
        "the step that positions are rounded to multiples of, given before the heads,", default=1.0
    )
    become, does = "rounded", "rounding them"

    def edited(self, z, here):
        return self.step * torch.round(z / self.step)

    @classmethod
    def of_prompts(cls, prompts):
        return cls(prompts.strength.step)


class Clipped(PositionEdit):
    """Clip positions between two ends: z_i <- min(max(z_i, low), high).

    Args:
        low: Lower end; -infinity: no lower end.
        high: Upper end; infinity: no upper end. `effects` clips to the middle half of a head's
            range over the prompt.
    """

    low: float
    high: float
    become, does = "clipped", "clipping them"

    def __post_init__(self) -> None:
        ends = self.low, self.high
        if (
            not all(
                # NaN fails both comparisons
                isinstance(end, int | float) and (abs(end) <= FLOAT32.max or abs(end) == math.inf)
                for end in ends
            )
            or not self.low <= self.high
            or self.low == math.inf
            or self.high == -math.inf
        ):
            shown = " and ".join(quoted(end, 40) for end in ends)
            raise InputError(
                f"positions are clipped between a lower and an upper end, not {shown}; wanted "
                f"numbers up to {FLOAT32.max:.2g}, or infinity"
            )

    def edited(self, z, here):
        return z.clamp(self.low, self.high)

    @classmethod
    def of_prompts(cls, prompts):
        return _InRange(lambda z, low, high: z.clamp((3 * low + high) / 4, (low + 3 * high) / 4))


class _InRange(PositionEdit, is_kind=False):
    """Base of edits that depend on the range of positions."""

    change: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Function of positions, and of the minimum and maximum of every row over the chosen tokens."""

    def edited(self, z, here):
        # Experiments that use these edits always choose tokens.
        assert here.chosen is not None
        others = ~here.chosen[:, None]
        low = z.masked_fill(others, torch.inf).amin(-1, keepdim=True)
        return self.change(z, low, z.masked_fill(others, -torch.inf).amax(-1, keepdim=True))


class Shifted(PositionEdit):
    """Move chosen tokens, such as those of a needle, by a number of positions: z_i <- z_i + by.

    Shifting all tokens changes nothing.

    Args:
        by: Number of positions to add.
    """

    by: Finite = bounded("the number of positions that tokens are shifted by")
    words = "shifted by {by:g}"
    form = FormRow("shifted", "by", "by (positions)")
    become, does = "span shifted", "shifting those of a span"
    needs = "span"

    def edited(self, z, here):
        return z + self.by

    @classmethod
    def of_prompts(cls, prompts):
        shares = torch.zeros_like(prompts.index, dtype=torch.float64)
        for row, number in zip(shares, prompts.numbers, strict=True):
            row[list(prompts.span(number))] = prompts.strength.shift
        return _InRange(lambda z, low, high: z + shares.to(z)[:, None] * (high - low))


class Transplanted(PositionEdit):
    """Give tokens the positions that were recorded for the same layer, head and index.

    Args:
        recorded: Result of `positions_of` for another prompt or checkpoint, or a bridge's cache. A
            single prompt serves all prompts; tokens beyond it keep their positions.
        from_head: (layer, head) whose recorded positions all chosen heads get; None: each head
            gets its recorded positions.
    """

    recorded: Any
    from_head: tuple[int, int] | None = field(default=None, kw_only=True)
    become, does = "another prompt's", "taking those of another prompt"
    needs = "partner"

    def on(self, model, *heads, **where):
        decoder = as_decoder(model)
        by_layer = _by_layer(decoder, self.recorded)
        # Counted before rows are repeated for heads: if one row was recorded for all heads,
        # `replaced` need not repeat the rows of the pass.
        rows = max((positions.shape[1] for positions in by_layer.values()), default=1)
        prompts = max((len(positions) for positions in by_layer.values()), default=1)
        counts = {number: attention.heads for number, attention in decoder.by_layer.items()}
        by_layer = {layer: expand_heads(given, counts[layer]) for layer, given in by_layer.items()}
        if self.from_head is not None:
            pair = layer_and_head(self.from_head)
            ((source, (head,)),) = heads_by_layer(decoder, [pair]).items()
            given = recorded_at(by_layer, source)[:, [head]]
            # All chosen heads get one row, so they may still share it.
            rows = 1
            by_layer = {layer: given.expand(-1, count, -1) for layer, count in counts.items()}
        edit = Transplanted(by_layer)
        return replaced(model, edit, *heads, rows=rows, prompts=prompts, **where)

    def edited(self, z, here):
        source = recorded_at(self.recorded, here.layer).to(z)[:, list(here.heads)]
        count, longest = source.shape[-1], int(here.index.max()) + 1
        if here.start == 0 and longest < count:
            raise InputError(
                f"positions of {count} tokens came to prompts of {longest}; cut them to as many"
            )
        if len(source) not in (1, len(z)):
            raise InputError(
                f"positions of {len(source)} prompts came to {len(z)}; give those of one prompt, "
                "or of all"
            )
        index = here.index[:, None].expand_as(z)
        source = source.expand(len(z), -1, -1).gather(-1, index.clamp_max(count - 1))
        return torch.where(index < count, source, z)

    @classmethod
    def of_prompts(cls, prompts):
        return cls(prompts.positions_of_partners())


class Ranked(PositionEdit):
    """Replace positions by their ranks, from 0; ties get the mean of their ranks.

    This keeps the order of learned positions, but not their spacing. The token index does not
    change. New tokens after a cached prompt are ranked among the chosen tokens of the prompt.
    """

    words = "ranks of the positions"
    form = FormRow("ranks of the positions")
    become, does = "their ranks", "replacing them by their ranks"

    def edited(self, z, here):
        in_order = self.of_prompt(z, here, self._in_order)
        # searchsorted copies other layouts and warns
        values = z.contiguous()
        ends = [torch.searchsorted(in_order, values, right=right) for right in (False, True)]
        # Equal positions have the ranks left .. right - 1; this is their mean.
        return (ends[0] + ends[1] - 1).to(z) / 2

    def _in_order(self, z: Tensor, here: PassContext) -> Tensor:
        if here.chosen is not None:
            # Tokens that are not chosen are sorted to the end, after all finite positions.
            z = z.masked_fill(~here.chosen[:, None], torch.inf)
        return z.sort(-1).values


class Segmented(PositionEdit):
    """Set positions by segments: a jump at the start of each segment, and a line within it.

    Positions begin at 0, and grow by `jump` at the first token of a segment and by `step` at other
    tokens: z_i <- step (i - s_i) + jump s_i, where s_i is the number of segments that begin among
    the tokens 1 .. i. Constant positions (NoPE) are step = jump = 0, the token index (RoPE) is
    step = jump = 1. New tokens after a cached prompt belong to its last segment.

    Args:
        starts: Index of the first token of every segment, for all prompts or one sequence per
            prompt; token 0 always begins a segment.
        step: Difference of positions between neighbors within a segment.
        jump: Difference of positions between the last token of a segment and the next token.
    """

    starts: Any
    step: Finite = bounded("the step within segments", default=0.0, kw_only=True)
    jump: Finite = bounded("the jump between segments", default=1.0, kw_only=True)
    words = "numbers of segments that begin at tokens {starts}"
    form = FormRow("segments", "starts", "later ones from tokens", "8, 16")
    become, does = "numbers of segments", "replacing them by numbers of segments"
    needs = "segments"

    def __post_init__(self) -> None:
        _ = self._table  # refuses invalid indices
        super().__post_init__()

    @cached_property
    def _table(self) -> Tensor:
        return token_table(self.starts)

    @property
    def prompts(self) -> int:
        return len(self._table)

    def in_words(self) -> str:
        return self.words.format(starts=first_of(self.starts))

    def edited(self, z, here):
        # Token 0 begins the first segment, whether it is named or not.
        # [prompt or 1, token]: number of segments that begin among tokens 1 .. i
        passed = self._table.to(here.index.device)[:, 1:].cumsum(-1)
        if not passed.shape[1]:
            return self.step * here.index[:, None].to(z)
        rows = torch.nn.functional.pad(passed, (1, 0)).expand(len(here.index), -1)
        # Tokens beyond the table, such as generated ones, belong to the last segment
        segments = rows.gather(1, here.index.clamp_max(rows.shape[1] - 1))
        within = self.step * (here.index - segments).to(z)
        return (within + self.jump * segments.to(z))[:, None]

    @classmethod
    def of_prompts(cls, prompts):
        # Step 0 within a segment and a jump of 1 between them: the number of the segment
        return cls([prompts.segments(number) for number in prompts.numbers])


def recorded_at(recorded: Mapping[int, Tensor], layer: int) -> Tensor:
    """Return the recorded positions of `layer`.

    Args:
        recorded: Positions by layer.
        layer: Number of a layer.

    Returns:
        Positions of every head [prompt, head, token].

    Raises:
        InputError: No positions of this layer were recorded.
    """
    if layer not in recorded:
        raise InputError(
            f"positions of layer {layer} were not recorded; there are those of "
            f"{', '.join(map(str, recorded)) or 'none'}"
        )
    return recorded[layer]


def _by_layer(decoder: Decoder, recorded: Any) -> dict[int, Tensor]:
    """Convert recorded positions of either form to positions by layer number."""
    if not isinstance(recorded, Mapping) and not hasattr(recorded, "cache_dict"):
        raise InputError(
            f"recorded positions are a result of positions_of, or a cache; got {quoted(recorded)}"
        )
    by_name = dict(recorded.items())
    by_layer = {}
    for layer, attention in decoder.by_layer.items():
        shapes = (1, attention.kv_heads, attention.heads)
        # `positions_of` names layers by number, a cache of TransformerLens by hook
        for name in by_name.keys() & {layer, HOOK.format(layer)}:
            positions = finite_positions(
                by_name[name],
                torch.zeros(1, device=decoder.device),
                f"recorded positions of layer {layer}",
            )
            if positions.ndim != 3 or positions.shape[1] not in shapes:
                raise InputError(
                    f"recorded positions of layer {layer} are {list(positions.shape)}; wanted "
                    f"[prompt, row, token] with {', '.join(map(str, sorted({*shapes})))} rows"
                )
            by_layer[layer] = positions
    return by_layer


def _from_tokens(z: Tensor, source: Int[Tensor, "prompt token"], here: PassContext) -> Tensor:
    """Return the positions of tokens `source` of the same prompts."""
    # `gather` needs columns of this pass, which are not token indices with padding on the left. The
    # last token is always in the last column.
    column = source + z.shape[-1] - 1 - here.index[:, -1:]
    return z.gather(-1, column[:, None].expand(-1, z.shape[1], -1))


def _mean(z: Tensor, here: PassContext) -> Tensor:
    """Mean of every row over the chosen tokens."""
    # [prompt, 1, token]
    weight = torch.ones_like(z[:, :1]) if here.chosen is None else here.chosen[:, None]
    weight = weight.to(z)
    # If a prompt lacks the chosen tokens, the mean is not used.
    return (z * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1)
