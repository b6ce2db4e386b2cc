"""The rotation of queries and keys in a layer, and the rotary module with its frequencies.

    theta_r     the frequency of pair r, from the model's rotary module, in float32: from its
                configuration if both agree up to rounding, else from the module

`rotation_probe` measures which entries make a pair. This module knows no scheme.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

TABLES = "position_embeddings"
"""The argument by which a decoder passes its tables to an attention module: cosines and sines, or
complex numbers.
"""
SHARED = "shared_kv_states"
"""The argument by which layers pass their keys and values to later layers."""
OF_TABLES = ("frequencies", "turning", "table_scaling", "unscaled", "order", "source", "axes")
"""Fields of a `Rotation` that a layer without rotation takes from one that rotates."""
_LONG = 1 << 24
"""Tokens of a pass that is certainly long, for frequencies that depend on the length."""
_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary embeddings with frequencies that depend on the length of a pass."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer by the token index, and the shapes of its attention."""

    frequencies: Float[Tensor, "component"]
    """float32, radians per token; 0 for pairs that do not turn."""
    turning: int
    """Number of pairs that the tables rotate, at any frequency; they come first."""
    table_scaling: float
    """Factor of the tables' cosines and sines (YaRN, longrope)."""
    unscaled: Float[Tensor, "component"]
    """The frequencies before position interpolation, YaRN or the like."""
    order: Int[Tensor, "d_head"] | None
    """Entries of a head in half-split order; None if they are in it."""
    rotates: bool
    """Whether the stock module rotates; if not, the frequencies are from the model's other layers.
    """
    heads: int
    kv_heads: int
    scaling: float
    """Factor of the dot products of queries and keys."""
    window: int | None
    softcap: float | None
    source: Source | None
    """Source of the frequencies; None if the model has no rotary module."""
    axes: Int[Tensor, "component"] | None = None
    """Axis of the token's positions by which each pair turns, if positions have several (mRoPE)."""
    slopes: list[float] | None = None
    """m_h of the heads of a family that adds them times the distance (BLOOM, MPT)."""

    @property
    def attention_scaling(self) -> float | Float[Tensor, "component"]:
        """Factor by which rotation lengthens queries and keys: `by_pair` of the tables' factor."""
        return self.by_pair(self.table_scaling)

    def by_pair(self, factor: float) -> float | Float[Tensor, "component"]:
        """Spread a factor over pairs.

        Args:
            factor: Factor of the pairs that the tables turn.

        Returns:
            Factors by pair, 1 for pairs that do not turn; one number if all are equal.
        """
        pairs = len(self.frequencies)
        if factor == 1.0 or self.turning == pairs:
            return factor
        turning = torch.arange(pairs) < self.turning
        return torch.where(turning, torch.tensor(factor, dtype=torch.float32), 1.0)

    @property
    def differs(self) -> bool:
        """Whether the rotation of the module differs from its configuration."""
        return self.rotates and self.source is not None and self.source.differs


@dataclass(frozen=True)
class Source:
    """A rotary module of a decoder, and the frequencies in it that a layer uses."""

    rotary: nn.Module
    prefix: str
    """Prefix of the buffers: the type of the layer, if there are frequencies by type."""
    config: Any
    pairs: Int[Tensor, "pair"] | None = None
    """Numbers of the frequencies that pairs of the layer turn by; None: all, in order."""
    differs: bool = False
    """Whether frequencies or attention scaling of the module differ from its configuration.
    """

    @property
    def changes(self) -> bool:
        """Whether the frequencies depend on the length of the pass."""
        return depends_on_length(self.rotary)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of these frequencies in the configuration."""
        stated = getattr(self.config, "rope_parameters", None) or {}
        return stated.get(self.prefix.removesuffix("_"), stated) if self.prefix else stated

    def tables(self, like: Tensor, index: Tensor) -> Any:
        """Make the tables of a layer, independent of earlier passes.

        Args:
            like: Tensor of the wanted device and dtype.
            index: Token indices [1, token].

        Returns:
            The output of the rotary module: cosines and sines, or complex numbers.
        """
        return self._run(like, index)[1]

    @property
    def attention_scaling(self) -> float:
        """Factor of cosines and sines (YaRN's)."""
        return float(getattr(self.rotary, f"{self.prefix}attention_scaling", 1.0))

    def at(self, length: int) -> Float[Tensor, "pair"]:
        """Return the frequencies of a pass.

        Args:
            length: Tokens up to the last one of the pass.

        Returns:
            Radians per token [pair], float32, on the processor.
        """
        length = length if self.changes else 0
        if length not in self._known:
            with torch.inference_mode(False), torch.no_grad():  # kept for passes with gradients too
                module = (
                    self._run(
                        torch.zeros(1, 1, 1, dtype=torch.float32), torch.tensor([[length - 1]])
                    )[0]
                    if length
                    else self.rotary
                )
                found = getattr(module, f"{self.prefix}inv_freq").detach().float().cpu()
                self._known[length] = (found if self.pairs is None else found[self.pairs]).clone()
        return self._known[length]

    def without_rounding(self) -> Source:
        """Return this source with frequencies made again, since `.to(bfloat16)` rounds buffers.

        Returns:
            The source without rounding; marked `differs` if the configuration gives other
            frequencies.
        """
        try:
            fresh = replace(self, rotary=type(self.rotary)(self.config))
            same = abs(self.attention_scaling - fresh.attention_scaling) < 1e-6
            same = same and all(
                _is_rounded(self.at(length), fresh.at(length)) for length in (1, _LONG)
            )
        except Exception:  # a constructor with other arguments: its buffers are all there is
            return self
        return fresh if same else replace(self, differs=True)

    @cached_property
    def _known(self) -> dict[int, Tensor]:
        """Frequencies by length of the pass."""
        return {}

    def _run(self, like: Tensor, index: Tensor) -> tuple[Any, Any]:
        """Rotary module after a pass, and its tables; a copy where passes change it."""
        module = self.rotary
        if self.changes:
            module = copy.deepcopy(module)
            forget_length(module)
        keywords = {"layer_type": self.prefix.removesuffix("_")} if self.prefix else {}
        return module, module(like, index, **keywords)


def of_chosen(
    chosen: Float[Tensor, "component"],
    known: Float[Tensor, "component"],
    values: Float[Tensor, "component"],
) -> Float[Tensor, "component"]:
    """Take the values of components that were chosen by their frequencies.

    Args:
        chosen: Chosen frequencies, some of `known`; 0 for components that are left out.
        known: Frequencies of all components.
        values: Values of all components, such as scaled frequencies.

    Returns:
        Values of the chosen components; 0 for the others.
    """
    source = (chosen[:, None] == known).to(torch.int8).argmax(1)
    # argmax returns 0 without a match; these components are set to 0.
    return values[source].where(chosen != 0, 0.0)


def depends_on_length(rotary: nn.Module) -> bool:
    """Return whether frequencies depend on the length of the pass, in some type of layers.

    Args:
        rotary: Rotary module of a decoder.

    Returns:
        True if they do (dynamic NTK, longrope).
    """
    kinds = getattr(rotary, "rope_type", None)
    changing = any(
        kind in _CHANGING for kind in (kinds.values() if isinstance(kinds, Mapping) else [kinds])
    )
    return changing and not recomputes(rotary)


def forget_length(rotary: Any, *arguments: Any) -> None:
    """Reset the frequencies to short passes: a pre-hook of a rotary module (dynamic NTK).

    So frequencies follow the length of a pass, not that of the longest one before it.

    Args:
        rotary: The rotary module.
        *arguments: Ignored.
    """
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        if getattr(rotary, name) > rotary.original_max_seq_len:
            prefix = name.removesuffix("max_seq_len_cached")
            setattr(rotary, name, rotary.original_max_seq_len)
            setattr(rotary, f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq"))


def _is_rounded(live: Tensor, exact: Tensor) -> bool:
    """Whether `live` frequencies equal `exact` ones, as they are or in half precision."""
    rounded = [exact.to(dtype).float() for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    return live.shape == exact.shape and any(
        torch.allclose(live, values, rtol=1e-5, atol=0) for values in rounded
    )


def rotaries(decoder: nn.Module) -> Iterator[Any]:
    """Find the modules that make a decoder's tables.

    Args:
        decoder: Model of Hugging Face.

    Returns:
        The modules, in the order of the model.
    """
    # `dir` of every module would take longer than measuring the rotation.
    parts: Iterator[Any] = decoder.modules()
    return (
        part
        for part in parts
        if any(name.endswith("inv_freq") for name in (*part._buffers, *vars(part)))
    )


def source_of(several: Sequence[Any], stock: Any, config: Any) -> Source | None:
    """Find the rotary module that makes the tables of an attention module.

    Args:
        several: `rotaries` of its decoder.
        stock: The attention module.
        config: Its configuration.

    Returns:
        The source; None if no tables are made for the layer.
    """
    # by layer (Granite); 0: the layer does not rotate
    thetas = getattr(config, "layer_rope_theta", None)
    if thetas:
        # Granite's base has a module twice, and the first one is not used.
        theta = thetas[stock.layer_idx]
        several = [
            part for part in reversed(several) if part.config.rope_parameters["rope_theta"] == theta
        ]
    if not several:
        return None
    rotary = several[0]
    config = rotary.config if thetas else config
    kinds = getattr(config, "layer_types", None)
    kind = getattr(stock, "layer_type", None) or (kinds[stock.layer_idx] if kinds else None)
    prefix = f"{kind}_" if kind is not None and hasattr(rotary, f"{kind}_inv_freq") else ""
    # a type of layer without tables
    return Source(rotary, prefix, config) if hasattr(rotary, f"{prefix}inv_freq") else None


def recomputes(rotary: nn.Module) -> bool:
    """Return whether a pass always has the frequencies of a short one, and a factor by length.

    Args:
        rotary: Rotary module of a decoder.

    Returns:
        True if it does (PhiMoE).
    """
    return "long_mscale" in inspect.unwrap(type(rotary).forward).__code__.co_consts
