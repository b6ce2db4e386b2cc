"""`AttentionInputs`, the record of a layer that capture passes to measures, and `Predictions`.

The logit of query i and key j of a head is

    W_ij = logit_scale * rotate(q_i, z_i) . rotate(k_j, z_j) + bias_ij
           for j <= i, j in the window, both valid

with q, k after any QK-norm and before rotation, in half-split order, z the positions. A sink is a
further column of the softmax. Rotated queries and keys are derived here, not stored twice. This
module knows nothing about models, prompts or measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.positions.layouts import SCHEMES
from repo_interp.positions.logits import cap_logits
from repo_interp.positions.rotary import by_pair, expand_heads, pair_tables, turn
from repo_interp.positions.sinks import weights_of
from repo_interp.runtime.memory import CORE, SHARED, memory_for

Spans = Mapping[str, Bool[Tensor, "prompt token"]]
"""Named sets of tokens: a mask over the tokens of the batch's prompts by name."""

TENSORS = ("positions", "key_positions", "queries", "keys", "gate_features")
"""Tensors of a layer that must be finite, in the order in which they are checked."""
_BY_PROMPT = (*TENSORS, "valid", "prompts", "tokens", "documents", "hidden")
"""Tensors with prompts as their first axis."""
_ROWS = 8
"""Rows in which position logits of other packages' schemes are checked."""
_LARGEST = 1e18
"""Largest logit: its square is a finite float32."""

PositionLogits = Callable[[Int[Tensor, "row"]], Float[Tensor, "prompt head row key"]]
"""Position logits that a scheme adds, only for given query rows and never the whole map.
"""


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for a batch of prompts, computed for given rows."""

    tokens: Int[Tensor, "prompt token"]
    valid: Bool[Tensor, "prompt token"]
    prompts: Int[Tensor, "prompt"]
    """Numbers of the prompts of the batch within the whole analysis."""
    vocabulary: int
    logits: Callable[[int, Int[Tensor, "row"]], Float[Tensor, "row token_id"]]
    """Function of a prompt's place in the batch and tokens `row` that returns next-token logits,
    float32.
    """
    documents: Int[Tensor, "prompt token"] | None = None
    """Number of the document that a token is of; None: every prompt is one."""

    @property
    def row_of_first_prompt(self) -> int | None:
        """Row of the analysis' prompt number 0 in this batch; None if another batch has it."""
        return _row_of_first(self.prompts)


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one attention layer for a batch of prompts.

    Token order is causal order; padding may be on either side.
    """

    layer: int
    scheme: str
    queries: Float[Tensor, "prompt head token d_head"]
    keys: Float[Tensor, "prompt kv_head token d_head"]
    positions: Float[Tensor, "prompt any token *component"] | None
    """One row per head, per key-value head, or one for all; None if the scheme has no positions
    (NoPE). With a fourth axis, every rotary pair has its position (`differ_by_pair`).
    """
    frequencies: Float[Tensor, "*any component"] | None
    """theta_r of the rotation, None if nothing is rotated (NoPE, additive schemes).

    [head, 1, component] if heads have their own.
    """
    attention_scaling: float | Float[Tensor, "*any component"]
    """Factor of queries and keys by rotation (YaRN's): a number, one per pair, or one per head and
    pair.
    """
    logit_scale: float
    valid: Bool[Tensor, "prompt token"]
    prompts: Int[Tensor, "prompt"]
    """Numbers of the prompts within the whole analysis: labels of the axis `prompt`."""
    learned: bool = False
    """Whether the layer learns its positions."""
    window: int | None = None
    """Query i sees keys i - window + 1 .. i; None sees all earlier keys."""
    softcap: float | None = None
    """Argument of `cap_logits`, for the logits before position logits are added; None: no cap."""
    position_logits: PositionLogits | None = None
    gate_features: Float[Tensor, "prompt kv_head token d_head"] | None = None
    """x_j of CoPE, which with a query determines the tokens that it counts; None: it counts none."""
    tokens: Int[Tensor, "prompt token"] | None = None
    """Token ids; None if the pass was not one of tokens."""
    sinks: Float[Tensor, "head"] | None = None
    """One logit per head that takes a part of the softmax and moves no value (gpt-oss); None:
    there is none.
    """
    documents: Int[Tensor, "prompt token"] | None = None
    """Number of the document of every token; a query sees keys of its document. None: one."""
    hidden: Bool[Tensor, "prompt row key"] | None = None
    """Further keys that a query does not see (chunks, sparse attention); None: there are none."""
    largest_position: float = math.inf
    """Contextual positions are clipped to this one (CoPE's p_max - 1)."""
    read_values: Callable[[], Float[Tensor, "prompt kv_head token d_value"]] | None = None
    """Function that returns `values`; copying and conversion wait until a measure reads them."""
    read_residual: Callable[[], Float[Tensor, "prompt token d_model"]] | None = None
    """Function that returns `residual`, as `read_values`."""
    by_axis: bool = False
    """Whether positions by pair come from an image: steps of the index along the pair's axis."""
    reads_content: Callable[[], bool] | None = None
    """Returns whether logits depend on contents and positions by more than rotation; None: no."""
    key_positions: Float[Tensor, "prompt any token *component"] | None = None
    """Positions as keys, in rows like `positions`, those as queries; None: a token has one."""
    remainder: Callable[[Int[Tensor, "row"]], Float[Tensor, "prompt head row"]] | None = None
    """Function that returns, for each row, the logit that takes a part of the softmax and moves no
    value (stick-breaking), including `sinks`; None: only the sinks do.
    """
    rotation_of_pass: Callable[[AttentionInputs], Any] | None = None
    """Returns the `PassRotation` of the layer if it rotates these queries and keys, else None."""

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.queries.shape[1]

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.keys.shape[1]

    @property
    def differ_by_pair(self) -> bool:
        """Whether the rotary pairs of a token have different positions (Selective RoPE, mRoPE)."""
        return self.positions is not None and self.positions.ndim == 4

    @property
    def one_position(self) -> bool:
        """Whether a token has at most one position: no other as a key, or by rotary pair."""
        return not self.differ_by_pair and self.key_positions is None

    @property
    def has_frequencies(self) -> bool:
        """Whether theta_r is a rate of position: the layer rotates, and all pairs count alike.

        If an assigner gives every pair its own position, each pair has its own unit.
        """
        rotates = self.frequencies is not None and self.positions is not None
        return rotates and (self.by_axis or not self.differ_by_pair)

    @cached_property
    def logits_by_content(self) -> bool:
        """Whether logits depend on contents and positions other than through the rotation."""
        probed = self.reads_content is not None and self.reads_content()
        return self.gate_features is not None or probed

    @property
    def row_of_first_prompt(self) -> int | None:
        """Row of the analysis' prompt number 0 in this batch; None if another batch has it."""
        return _row_of_first(self.prompts)

    @property
    def is_bilinear(self) -> bool:
        """Whether logits are a dot product of a query's and a key's features and nothing else."""
        return self.softcap is None and self.position_logits is None

    @cached_property
    def pair_scaling(self) -> Float[Tensor, "component"]:
        """Factor of products of rotary pairs, float64: attention_scaling^2; 1 without rotation."""
        pairs, device = self.queries.shape[-1] // 2, self.queries.device
        if self.frequencies is None or self.positions is None:
            return _of_pairs(1.0, pairs, device)
        # Queries and keys are both scaled, so their product has the square.
        scaling = self.attention_scaling
        if isinstance(scaling, Tensor):
            ones = _of_pairs(1.0, pairs, device)
            return ones * scaling.to(ones) ** 2
        return _of_pairs(float(scaling) ** 2, pairs, device)

    @property
    def head_positions(self) -> Float[Tensor, "prompt head token *component"] | None:
        """Positions with one row per query head."""
        return None if self.positions is None else expand_heads(self.positions, self.heads)

    @cached_property
    def rotated_queries(self) -> Float[Tensor, "prompt head token d_head"]:
        """Queries as they enter the dot product."""
        return self._rotated[0]

    @cached_property
    def rotated_keys(self) -> Float[Tensor, "prompt head token d_head"]:
        """Keys as they enter the dot product, one row per key or per row of positions."""
        return self._rotated[1]

    @property
    def keeps_rotated(self) -> bool:
        """Whether rotated queries and keys fit into memory as a whole, shared by all measures."""
        return 2 * self.queries.nbytes <= memory_for(self.queries.device, 0)

    @property
    def _of_pass(self) -> Any:
        """The pass's `PassRotation` of these queries and keys; None if it is another one."""
        known = None if self.rotation_of_pass is None else self.rotation_of_pass(self)
        # Only if both rotate the heads of a key in the same way
        return known if known is None or known.keys.shape[1] == self._keys_alike else None

    @property
    def _keys_alike(self) -> int:
        """Rows of keys after rotation: as many as keys, positions or frequencies have."""
        # Frequencies with three axes are [head, 1, component]: they differ by head.
        by_head = self.frequencies is not None and self.frequencies.ndim == 3
        rows = 1 if self.positions is None else self.positions.shape[1]
        return self.heads if by_head else max(self.kv_heads, rows)

    @cached_property
    def values(self) -> Float[Tensor, "prompt kv_head token d_value"]:
        """Values v_j, which attention moves: a head writes sum_j w_ij v_j before its projection."""
        return _read(self.read_values, "values")

    @cached_property
    def residual(self) -> Float[Tensor, "prompt token d_model"]:
        """Hidden states that enter the layer, before its first norm."""
        return _read(self.read_residual, "residual")

    @cached_property
    def results(self) -> dict[Any, Any]:
        """Cache of results that were derived from these inputs."""
        return {}

    @cached_property
    def faults(self) -> dict[str, str]:
        """Place of the first NaN, infinite or too large number by tensor of `TENSORS`.

        Empty if there is none; padding does not count. |q| |k| bounds the logits: beyond
        `_LARGEST`, results become NaN or infinite. The check costs one norm per tensor, which is
        finite if every number is.
        """
        given = {name: tensor for name in TENSORS if (tensor := getattr(self, name)) is not None}
        norms = {
            # One norm per tensor detects any number that is not finite, in one pass and without
            # waiting for the device.
            name: torch.linalg.vector_norm(tensor, dtype=_wide(tensor))
            for name, tensor in given.items()
        }
        # |q| |k| |scale| bounds every logit, by Cauchy and Schwarz.
        largest = norms["queries"] * norms["keys"] * abs(self.logit_scale)
        # Times 0, a norm that is finite adds nothing, and another one makes this no number.
        others = [norm for name, norm in norms.items() if name not in ("queries", "keys")]
        # The only question to the device: NaN fails every comparison, so one answer covers all.
        if bool(sum((0 * norm for norm in others), largest) < _LARGEST):
            return {} if self.scheme in SCHEMES else self._scheme_faults()
        # Rare, so that every tensor may be looked through
        found = {
            # Padding may hold anything; its numbers are left out in `_first_fault`.
            name: self._first_fault(tensor)
            for name, tensor in given.items()
            if not bool(torch.isfinite(norms[name]))
        }
        faults = {
            name: f"{name} of layer {self.layer}{place} are NaN or infinite"
            for name, place in found.items()
            if place is not None
        }
        # All are finite, but a product may overflow.
        if not found and not bool(largest < _LARGEST):
            too_large = (
                f"queries and keys of layer {self.layer} are too large for logits to be numbers"
            )
            faults = {"queries": too_large, "keys": too_large}
        return faults

    def _scheme_faults(self) -> dict[str, str]:
        """Faults of frequencies and position logits, in some rows, of another package's scheme."""
        where = f"of layer {self.layer} ({self.scheme}) are NaN or infinite"
        if self.frequencies is not None and not bool(self.frequencies.isfinite().all()):
            return dict.fromkeys(("queries", "keys"), f"frequencies {where}")
        if self.position_logits is not None:
            count = self.valid.shape[1]
            rows = torch.linspace(0, count - 1, min(count, _ROWS), device=self.valid.device).long()
            logits = self.logits(rows)
            # -inf marks keys that are not seen; rows of padding may hold any number.
            wrong = (logits.isnan() | (logits == torch.inf)).any(1).any(-1)
            if bool((wrong & self.valid[:, rows]).any()):
                return dict.fromkeys(("queries", "keys"), f"position logits {where}")
        return {}

    def _first_fault(self, tensor: Tensor) -> str | None:
        """Head and prompt of the first number that is not finite and no padding."""
        wrong = ~torch.isfinite(tensor)
        # [prompt, head, token]
        # d_head is looked through first: a tensor of positions may lack that axis.
        wrong = (wrong.any(-1) if wrong.dim() == 4 else wrong) & self.valid[:, None]
        if not bool(wrong.any()):
            return None
        row, head, _ = wrong.nonzero()[0].tolist()
        of_head = (
            f", head {head}"
            if wrong.shape[1] == self.heads
            else f", key-value head {head}"
            if wrong.shape[1] > 1
            else ""
        )
        return f"{of_head} in prompt {int(self.prompts[row])}"

    def _logits_of_keys(self, rows: Tensor, some: slice, shared: int) -> Tensor:
        """Scaled products of the query heads that share `some` of the `shared` keys."""
        # [prompt, head, row, d] -> [prompt, key, head of that key, row, d]
        queries = self.queries[:, :, rows].unflatten(1, (shared, -1))[:, some]
        # Axis 2 is that of the heads that share a key, which broadcasts.
        keys, positions = expand_heads(self.keys, shared)[:, some, None], self.positions
        if positions is not None and self.frequencies is not None:
            # One row of positions for all is not repeated by key: its tables broadcast too.
            z = positions if positions.shape[1] == 1 else expand_heads(positions, shared)[:, some]
            # [prompt, key, 1, token, component]
            tables = [table[:, :, None] for table in self._tables(z, keys.dtype, some)]
            # Keys use the tables of all tokens, queries the tables of their rows.
            queries = turn(queries, *(table[..., rows, :] for table in tables))
            if self.key_positions is not None:
                z = self.key_positions
                z = z if z.shape[1] == 1 else expand_heads(z, shared)[:, some]
                tables = [table[:, :, None] for table in self._tables(z, keys.dtype, some)]
            keys = turn(keys, *tables)
        # [prompt, head, row, key]; heads are in order, since heads of a key are adjacent
        return (queries @ keys.mT * self.logit_scale).flatten(1, 2)

    @cached_property
    def _rotated(self) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys, by tables that are made once for both."""
        if (known := self._of_pass) is not None:
            return known.turned_queries, known.turned_keys
        # Heads share keys as long as neither positions nor frequencies differ by head.
        alone, positions = self._keys_alike > self.kv_heads, self.positions
        queries, keys = self.queries, expand_heads(self.keys, self.heads) if alone else self.keys
        if positions is None or self.frequencies is None:
            return queries, keys
        by_head = self.frequencies.ndim == 3
        tables, key_tables = (
            self._tables(expand_heads(z, self.heads) if by_head else z, queries.dtype)
            if z is not None
            else None
            for z in (positions, self.key_positions)
        )

        def turned(features: Tensor, tables: Any) -> Tensor:
            # One row of positions for all is not repeated: its tables broadcast
            rows = features.shape[1]
            of_rows = (
                table if table.shape[1] == 1 else expand_heads(table, rows) for table in tables
            )
            return turn(features, *of_rows)

        return turned(queries, tables), turned(keys, key_tables or tables)

    def _tables(
        self, positions: Tensor, dtype: torch.dtype, heads: slice | None = None
    ) -> tuple[Tensor, Tensor]:
        frequencies, scaling = (
            _of_heads(factors, heads or slice(None))
            # If heads were rescaled separately, only the factors of `heads`
            for factors in (self.frequencies, self.attention_scaling)
        )
        return pair_tables(by_pair(positions), frequencies, scaling, dtype)

    def compared_length(self, training_length: int) -> int:
        """Return how far apart tokens were that the layer compared in training.

        Args:
            training_length: Longest prompts of training, in tokens.

        Returns:
            min(window, training length), in tokens.
        """
        return training_length if self.window is None else min(self.window, training_length)

    def visible(self, rows: Int[Tensor, "row"]) -> Bool[Tensor, "prompt row key"]:
        """Return the keys that queries may attend to.

        Causal, in the window and the query's document, not `hidden`, both tokens valid.

        Args:
            rows: Indices of the queries.

        Returns:
            Mask [prompt, row, key].
        """
        keys = torch.arange(self.valid.shape[1], device=rows.device)
        seen = rows[:, None] >= keys
        if self.window is not None:
            seen &= rows[:, None] - keys < self.window
        if self.documents is not None:
            # A sequence may be several documents, packed for training.
            seen = seen & (self.documents[:, rows, None] == self.documents[:, None, :])
        if self.hidden is not None:
            seen = seen & ~self.hidden[:, rows]
        # Both valid: a row of padding sees no key at all.
        return seen & self.valid[:, None, :] & self.valid[:, rows, None]

    def logits(self, rows: Int[Tensor, "row"]) -> Float[Tensor, "prompt head row key"]:
        """Compute the logits of queries before the softmax.

        Costs rows x tokens. Includes logit_scale, the soft cap and the position logits.

        Args:
            rows: Indices of the queries.

        Returns:
            Logits [prompt, head, row, key]; -inf where the key is not visible.
        """
        shared = self._keys_alike
        if self.keeps_rotated:
            queries = self.rotated_queries[:, :, rows].unflatten(1, (shared, -1))
            products = (queries @ self.rotated_keys[:, :, None].mT).flatten(1, 2)
            return self._finished(products * self.logit_scale, rows)
        if self.keys.nbytes <= memory_for(rows.device, SHARED) and (known := self._of_pass):
            queries = known.turned_queries[:, :, rows].unflatten(1, (shared, -1))
            products = (queries @ known.turned_keys[:, :, None].mT).flatten(1, 2)
            return self._finished(products * self.logit_scale, rows)
        # On a processor, rotate as many keys at a time as fit into a cache.
        key_bytes = 8 * self.keys[:, 0].numel()
        at_once = max(1, memory_for(rows.device, CORE) // key_bytes)
        blocks = [
            self._logits_of_keys(rows, slice(start, start + at_once), shared)
            for start in range(0, shared, at_once)
        ]
        return self._finished(torch.cat(blocks, dim=1), rows)

    def _finished(self, products: Tensor, rows: Tensor) -> Tensor:
        """Logits of scaled products, which are changed."""
        logits = cap_logits(products, self.softcap)
        if self.position_logits is not None:
            logits = logits + self.position_logits(rows)
        # In place, since the logits were made here
        return logits.masked_fill_(~self.visible(rows)[:, None], float("-inf"))

    def pattern(self, rows: Int[Tensor, "row"]) -> Float[Tensor, "prompt head row key"]:
        """Compute the attention of queries.

        Args:
            rows: Indices of the queries.

        Returns:
            Weights [prompt, head, row, key] of the keys: the softmax includes the sink.
        """
        return weights_of(self.logits(rows), self.sinks_of(rows))

    def sinks_of(
        self, rows: Int[Tensor, "row"]
    ) -> Float[Tensor, "head"] | Float[Tensor, "prompt head row"] | None:
        """Return the logits that take a part of the softmax of rows and move no value.

        Args:
            rows: Indices of the queries.

        Returns:
            Logits by head, or by prompt, head and row; None: there are none.
        """
        return self.sinks if self.remainder is None else self.remainder(rows)


@lru_cache(maxsize=8)
def _of_pairs(factor: float, pairs: int, device: torch.device) -> Float[Tensor, "component"]:
    """The same for all pairs, and for all layers: float64, since sums over all logits have it."""
    return torch.full((pairs,), factor, dtype=torch.float64, device=device)


def _read(read: Callable[[], Tensor] | None, name: str) -> Tensor:
    if read is None:
        raise InputError(
            f"these attention inputs lack {name}; set AttentionInputs.read_{name} to a "
            "function that returns them"
        )
    return read()


def _of_heads(factors: Any, heads: Any) -> Any:
    """Frequencies or factors of some heads; for a single head [component], as for a whole layer."""
    if not isinstance(factors, Tensor) or factors.ndim < 2:
        return factors
    some = factors[heads]
    # A single head has the shape [component] of a layer, which kernels expect.
    return some[0, 0] if len(some) == 1 else some


def _wide(tensor: Tensor) -> torch.dtype | None:
    """The precision in which numbers are summed: whole numbers are no numbers to torch's norms."""
    return None if tensor.is_floating_point() else torch.float64


def select_prompts(inputs: AttentionInputs, chosen: slice) -> AttentionInputs:
    """Restrict a layer to some prompts.

    Args:
        inputs: Inputs of the layer.
        chosen: Rows of the batch.

    Returns:
        Inputs of these prompts.
    """
    some = {
        name: tensor[chosen] for name in _BY_PROMPT if (tensor := getattr(inputs, name)) is not None
    }

    def choose(tensor: Tensor) -> Tensor:
        return tensor[chosen]

    return replace(
        inputs,
        **some,
        position_logits=_followed_by(choose, inputs.position_logits),
        remainder=_followed_by(choose, inputs.remainder),
        read_values=_followed_by(choose, inputs.read_values),
        read_residual=_followed_by(choose, inputs.read_residual),
    )


def _followed_by(
    choose: Callable[[Tensor], Tensor], read: Callable[..., Tensor] | None
) -> Callable[..., Tensor] | None:
    """Make a reader that chooses from the result of `read`; None if there is no reader."""
    return None if read is None else lambda *rows: choose(read(*rows))


def _row_of_first(prompts: Int[Tensor, "prompt"]) -> int | None:
    numbers = prompts.tolist()
    return numbers.index(0) if 0 in numbers else None


def select_heads(inputs: AttentionInputs, heads: Sequence[int]) -> AttentionInputs:
    """Restrict a layer to some heads; these no longer share keys.

    Args:
        inputs: Inputs of the layer.
        heads: Query heads; an unknown one is an IndexError of torch.

    Returns:
        Inputs of these heads.
    """
    chosen = torch.as_tensor(heads, device=inputs.queries.device)

    def choose(tensor: Tensor) -> Tensor:
        return expand_heads(tensor, inputs.heads)[:, chosen]

    # Chosen heads need not share keys evenly any more, so every head gets its keys.
    some = {
        name: choose(tensor) for name in TENSORS if (tensor := getattr(inputs, name)) is not None
    }
    return replace(
        inputs,
        **some,
        # An index on the processor works for tensors on any device; the reverse fails.
        frequencies=_of_heads(inputs.frequencies, chosen.cpu()),
        attention_scaling=_of_heads(inputs.attention_scaling, chosen.cpu()),
        position_logits=_followed_by(choose, inputs.position_logits),
        remainder=_followed_by(choose, inputs.remainder),
        sinks=None if inputs.sinks is None else inputs.sinks[chosen],
        read_values=_followed_by(choose, inputs.read_values),
    )
