"""How a stock attention module rotates queries and keys, measured on a copy with random weights.

    x_e  <-  cos(a_c) x_e -+ sin(a_c) x_p    e, p: the two entries of a pair; c: the column of the
                                             table that turns them

A module is run twice on a few tokens: with tables of angle 0, then with another angle a_c in every
column. Least squares over tokens and heads give, for every entry that moved, its partner p, the
sign and the angle, hence the column. So no family needs a declaration: half-split and interleaved
pairs, partial rotation and latent attention are detected. A module is refused if its result is no
such rotation (a norm with gains after the rotation).

    order[r], order[r + d_head/2]    the entries of pair r: a permutation to half-split pairs;
                                     entries that do not turn form pairs too, of frequency 0
    theta_r                          the frequency of column c of pair r (`rotation.Source`)

Random weights make the copy independent of the model's precision, device and training, also on
"meta". This module knows no scheme.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from repo_interp.errors import InputError, one_line
from repo_interp.models.attention_modules import forward_functions
from repo_interp.models.identity_tables import first_table, identity_tables
from repo_interp.models.rotation import (
    SHARED,
    TABLES,
    Rotation,
    Source,
    recomputes,
    rotaries,
    source_of,
)

_RECORD = "repo_interp_record"
_TOKENS = 5
_AXES = 3
"""Axes of mRoPE's positions: time, height and width."""


class Prober:
    """Prober of the layers of one decoder; it probes every kind of attention module once."""

    def __init__(self, decoder: nn.Module) -> None:
        self.rotaries = list(rotaries(decoder))  # to find them is a walk through all modules
        self.known: dict[Any, Rotation] = {}

    def measured(self, stock: Any) -> Rotation:
        """Measure how an attention module rotates.

        Args:
            stock: Attention module of the decoder.

        Returns:
            Its rotation.

        Raises:
            InputError: The module does not rotate pairs, or cannot run separately.
        """
        config = stock.config
        source = source_of(self.rotaries, stock, config)
        plain = {
            name: value
            for name, value in vars(stock).items()
            if isinstance(value, int | float | str | bool | None)
        }
        plain.pop("layer_idx", None)
        shapes = tuple(
            (name, tuple(parameter.shape)) for name, parameter in stock.named_parameters()
        )
        key = (
            type(stock),
            tuple(sorted(plain.items(), key=repr)),
            shapes,
            source and (source.prefix, source.rotary),
        )
        # Layers of the same kind rotate alike, and a measurement runs the module several times.
        if key not in self.known:
            self.known[key] = _measure(stock, source)
        return self.known[key]


def _measure(stock: Any, source: Source | None) -> Rotation:
    name = type(stock).__name__
    copied = replica(stock)
    if getattr(stock, "is_causal", True) is False:
        raise InputError(f"{name} attends to later tokens too (an encoder); decoders are supported")
    hidden = _hidden_states(stock)
    tables, scaling, settled = None, 1.0, None
    frequencies = unscaled = torch.empty(0)
    axes: Tensor | None = None
    entries: list[tuple[int, int, int]] = []
    if source is not None:
        with torch.no_grad():
            given = source.tables(hidden, torch.arange(_TOKENS)[None])
        if not isinstance(given, Tensor | tuple | list):
            raise InputError(f"{name} is given tables by layer type, which is not supported")
        settled = source.without_rounding()
        frequencies, scaling = (
            settled.at(1),
            length_factor(copied, settled, settled.attention_scaling),
        )
        unscaled = _unscaled(settled, len(frequencies))
        # One angle per frequency, so that both entries of a pair turn by the same, and norms
        # stay as under rotation.
        by_column = _column_order(source, frequencies, first_table(given).shape[-1])
        tables, entries = _probe(copied, given, by_column)
        axes = _axes(source, by_column)
    queries, keys, call = run_replica(copied, hidden, tables)
    # With positions moved by 3 and equal tables, nothing may change.
    later, _, _ = run_replica(copied, hidden, tables, start=3)
    if not torch.allclose(later, queries, rtol=1e-4, atol=1e-5):
        raise InputError(
            f"{name} rotates by tables of its own, not by those that its decoder gives it; "
            "not supported"
        )
    d_head = queries.shape[-1]
    firsts, seconds = [e for e, _, _ in entries], [p for _, p, _ in entries]
    rest = [e for e in range(d_head) if e not in {*firsts, *seconds}]
    # A loader that drops the factor would silently rotate whole heads.
    share = source.parameters.get("partial_rotary_factor") or 1.0 if source is not None else 1.0
    if entries and not rest and share < 1.0 and bool((frequencies > 0).all()):
        raise InputError(
            f"the configuration says that {share} of each head is rotated "
            f"(partial_rotary_factor), and {name} rotates whole heads; "
            "leave it out"
        )
    if entries and len(rest) % 2:
        raise InputError(
            f"{name} rotates {d_head - len(rest)} of {d_head} entries of a head, which "
            "leaves an odd number; not supported"
        )
    # Still entries form pairs too, so that all code sees half-split heads.
    half = len(rest) // 2
    order = torch.tensor([*firsts, *rest[:half], *seconds, *rest[half:]])
    still = torch.zeros(half)
    chosen = torch.tensor([number for _, _, number in entries], dtype=torch.long)
    factor = call.get("scaling")
    return Rotation(
        frequencies=torch.cat([frequencies[chosen], still]),
        turning=len(entries),
        table_scaling=scaling,
        unscaled=torch.cat([unscaled[chosen], still]),
        order=None if torch.equal(order, torch.arange(d_head)) else order,
        rotates=bool(entries),
        heads=queries.shape[1],
        kv_heads=keys.shape[1],
        # From the call: a configuration may name a window that its family ignores.
        scaling=d_head**-0.5 if factor is None else float(factor),
        window=call.get("sliding_window"),
        softcap=call.get("softcap"),
        source=None if settled is None else replace(settled, pairs=chosen),
        axes=None if axes is None else torch.cat([axes[chosen], torch.zeros(half).long()]),
        slopes=getattr(stock, "slopes", None),
    )


def replica(stock: nn.Module, weights: bool = False) -> Any:
    """Copy a module in float32 to the processor, with random weights and without hooks.

    Args:
        stock: Attention module.
        weights: Whether the copy keeps the weights.

    Returns:
        The copy, in evaluation mode; it keeps the arguments of its attention function in `seen`.
    """
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    for parameter in () if weights else stock.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        values = values * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0 + 0.3 * values
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    copied: Any = copy.deepcopy(stock, memo)
    for module in copied.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    copied.config = copy.copy(copied.config)
    copied.config._attn_implementation_internal = _RECORD
    return copied.float().cpu().eval()


def run_replica(
    replica: Any, hidden: Tensor, tables: Any, start: int = 0
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Run a replica up to its attention function.

    Args:
        replica: Replica of an attention module.
        hidden: Hidden states [1, token, width].
        tables: Tables of the rotation.
        start: Index of the first token.

    Returns:
        Queries and keys [1, head, token, d_head], and further arguments of the attention function.

    Raises:
        InputError: The module does not run separately, or does not attend exactly once.
    """
    name, wanted = type(replica).__name__, dict[str, inspect.Parameter]()
    for forward in forward_functions(type(replica)):
        wanted |= dict(list(inspect.signature(forward).parameters.items())[1:])
    tokens = hidden.shape[1]
    known: dict[str, Any] = {
        "hidden_states": hidden,
        TABLES: tables,
        "position_ids": torch.arange(start, start + tokens)[None],
        "attention_mask": torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril(),
        # of an earlier layer's sparse attention
        "prev_topk_indices": torch.arange(tokens).expand(1, tokens, tokens),
    }
    required = [
        key
        for key, p in wanted.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    keywords = {key: known.get(key) for key in wanted if key in known or key in required}
    keywords |= {SHARED: _AnyKeys(replica, tokens)} if SHARED in wanted else {}
    try:
        with torch.no_grad():
            try:
                replica.seen = {}
                replica(**keywords)
            except Exception:  # for example masks by kind of layer; sparse attention needs one
                replica.seen = {}
                replica(**keywords | {"attention_mask": None})
    except Exception as error:
        raise InputError(
            f"{name} does not run separately ({one_line(error)}), so its rotation cannot be measured"
        ) from None
    seen = replica.seen
    if "queries" not in seen:
        raise InputError(
            f"{name} does not call the attention interface of transformers, so its attention "
            "cannot be observed"
        )
    if seen.pop("calls") > 1:
        raise InputError(
            f"{name} attends more than once in a pass (such as differential attention); not supported"
        )
    return seen.pop("queries"), seen.pop("keys"), seen


class _AnyKeys(dict):
    """Keys and values for a layer that shares them with an earlier layer."""

    def __init__(self, replica: Any, tokens: int) -> None:
        super().__init__()
        heads = replica.config.num_attention_heads // getattr(replica, "num_key_value_groups", 1)
        self.given = torch.zeros(1, heads, tokens, replica.head_dim)

    def __missing__(self, kind: object) -> tuple[Tensor, Tensor]:
        return self.given, self.given


def _record(
    module: Any,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Any = None,
    *more: Any,
    **keywords: Any,
) -> tuple:
    """Attention function of a replica: keeps its arguments, and returns the right shape."""
    calls = module.seen.get("calls", 0) + 1
    module.seen = {**keywords, "queries": queries, "keys": keys, "calls": calls}
    return values.repeat_interleave(queries.shape[1] // values.shape[1], 1).transpose(
        1, 2
    ).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_RECORD, _record)


def _tables(given: Any, angles: Float[Tensor, "column"]) -> Any:
    """Tables like `given`, with the same angles at every token."""
    if isinstance(given, Tensor):
        return torch.polar(torch.ones_like(angles), angles).to(given.dtype).expand_as(given)
    return tuple(
        table.to(torch.float32).expand_as(given[0]) for table in (angles.cos(), angles.sin())
    )


def length_factor(copied: Any, source: Source, factor: float) -> float:
    """Return the factor by which rotation lengthens queries and keys.

    Args:
        copied: Replica of the attention module.
        source: Source of its tables.
        factor: Attention factor that the rotary module states.

    Returns:
        `factor`; 1 if a norm after the rotation removes it.

    Raises:
        InputError: The norm is of heads that rotate only in part, or there are two factors.
    """
    if recomputes(source.rotary) and source.rotary.rope_type != "default":
        factor, long = (float(source.parameters[name]) for name in ("short_mscale", "long_mscale"))
        if factor != long:
            raise InputError(
                f"{type(source.rotary).__name__} scales short passes by short_mscale "
                f"{factor} and long ones by long_mscale {long}; only "
                "one value for both is supported"
            )
    if factor == 1.0:
        return factor
    hidden = _hidden_states(copied)
    with torch.no_grad():
        plain = identity_tables(source.tables(hidden, torch.arange(_TOKENS)[None]))
    # Longer tables of angle 0: only a norm behind them can undo the length.
    longer = plain * factor if isinstance(plain, Tensor) else (plain[0] * factor, plain[1])
    before, after = (
        run_replica(copied, hidden, by)[0][0].flatten(0, 1).norm(dim=0) for by in (plain, longer)
    )
    kept, undone = ((after / before - ratio).abs() < 1e-3 for ratio in (factor, 1.0))
    if not bool((kept | undone).all()):
        raise InputError(
            f"{type(copied).__name__} has a norm after the rotation of a part of each head, "
            f"which an attention factor of {factor:.4g} "
            "changes; not supported"
        )
    return factor if bool(kept.any()) else 1.0


def find_pairs(copied: Any, given: Any) -> list[tuple[int, int]]:
    """Find the pairs of entries that a replica turns.

    Args:
        copied: Replica of an attention module.
        given: Tables of the wanted form.

    Returns:
        First and second entry of every pair, in the order of first entries.
    """
    one, *more = (
        table[:, :1].expand(-1, _TOKENS, -1)
        for table in ([given] if isinstance(given, Tensor) else given)
    )
    one = (one, *more) if more else one
    return [
        (first, second)
        for first, second, _ in _probe(copied, one, torch.arange(first_table(given).shape[-1]))[1]
    ]


def _probe(
    copied: Any, given: Any, by_column: Int[Tensor, "column"]
) -> tuple[Any, list[tuple[int, int, int]]]:
    """Tables with one angle per number in `by_column`, and the pairs that they turn."""
    angles = torch.linspace(0.2, 1.3, int(by_column.max()) + 1, dtype=torch.float64)
    turned = _tables(given, angles[by_column])
    plain, queries = (
        run_replica(copied, _hidden_states(copied), by)[0][0].double()
        for by in (identity_tables(turned), turned)
    )
    return turned, _pairs(plain, queries, angles, type(copied).__name__)


def _hidden_states(stock: Any) -> Float[Tensor, "1 token width"]:
    return torch.randn(
        1, _TOKENS, stock.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )


def _pairs(
    plain: Float[Tensor, "head token d_head"],
    turned: Float[Tensor, "head token d_head"],
    angles: Tensor,
    name: str,
) -> list[tuple[int, int, int]]:
    """First and second entry, and number of the angle, of every pair, by first entry."""
    x, y = plain.flatten(0, 1).T, turned.flatten(0, 1).T  # [entry, sample]
    moved = ((y - x).abs().amax(1) > 1e-5 * x.abs().amax()).nonzero().flatten().tolist()
    gram, mixed = x @ x.T, y @ x.T
    found = []
    for entry in moved:
        # For every partner p: the least squares fit y_e = alpha x_e + beta x_p.
        determinant = (gram[entry, entry] * gram.diagonal() - gram[entry] ** 2).clamp_min(1e-12)
        alpha = (mixed[entry, entry] * gram.diagonal() - mixed[entry] * gram[entry]) / determinant
        beta = (mixed[entry] * gram[entry, entry] - mixed[entry, entry] * gram[entry]) / determinant
        residual = (y[entry] - alpha[:, None] * x[entry] - beta[:, None] * x).square().sum(1)
        residual[entry] = torch.inf
        partner = int(residual.argmin())
        angle = torch.atan2(beta[partner].abs(), alpha[partner])
        number = int((angles - angle).abs().argmin())
        if (
            residual[partner] > 1e-6 * y[entry].square().sum()
            or abs(float(angles[number] - angle)) > 1e-3
        ):
            raise InputError(
                f"{name} does something after rotating queries that is no rotation (a norm "
                "with gains, say), so positions cannot be "
                "exchanged there; qwen3, whose norm comes first, is supported"
            )
        if beta[partner] < 0:
            found.append((entry, partner, number))
    if 2 * len(found) != len(moved):
        raise InputError(f"{name} turns entries of a head that form no pairs; not supported")
    return found


def _column_order(source: Source, frequencies: Tensor, columns: int) -> Tensor:
    """Number of the frequency of every column; a table has one column per frequency, or two."""
    count = len(frequencies)
    first = torch.zeros(1, 2, 1)
    with torch.no_grad():
        given = source.tables(first, torch.tensor([[0, 1]]))
    angle = (
        (
            given.angle()
            if isinstance(given, Tensor)
            else torch.atan2(given[1].float(), given[0].float())
        )[0, 1]
        .double()
        .cpu()
    )
    # Columns repeat frequencies block by block, or one by one.
    orders = [torch.arange(columns) % count, torch.arange(columns) * count // columns]
    live = source.at(2)
    wrong = [
        float((torch.atan2(live[o].sin(), live[o].cos()).double() - angle).abs().max())
        for o in orders
    ]
    best = 0 if wrong[0] <= wrong[1] else 1
    if not wrong[best] < 1e-2:
        raise InputError(
            f"{type(source.rotary).__name__} makes tables that its frequencies do not "
            "explain; not supported"
        )
    return orders[best]


def _axes(source: Source, by_column: Tensor) -> Int[Tensor, "pair"] | None:
    """Axis of positions that turns every frequency; None if tokens have one position."""
    if not hasattr(source.rotary, "mrope_section"):
        return None
    axes = torch.zeros(int(by_column.max()) + 1, dtype=torch.long)
    for axis in range(_AXES):
        index = torch.zeros(_AXES, 1, 1, dtype=torch.long)
        index[axis] = 1
        with torch.no_grad():
            _, sines = source.tables(torch.zeros(1, 1, 1), index)
        axes[by_column[sines.reshape(-1).cpu() != 0]] = axis
    return axes


def _unscaled(source: Source, count: int) -> Tensor:
    """theta_r = rope_theta^(-2 r / d): the frequencies of training."""
    theta = source.parameters.get("rope_theta") or getattr(source.config, "rope_theta", None)
    if theta is None:
        return source.at(1)
    return 1.0 / theta ** (torch.arange(count, dtype=torch.float32) / count)
