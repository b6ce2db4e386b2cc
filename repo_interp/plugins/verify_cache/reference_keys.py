"""Unrotated keys of a model for given tokens, from one pass without a cache.

k[layer]     [kv_head, token, pair], complex: the pair's entries as real and imaginary part
theta        radians per position, by pair
z            positions of the pass: the token index, or learned ones

cached key at position p = s exp(i theta p) k     s: the attention factor (YaRN)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from repo_interp.inputs import AttentionInputs
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.cached import read_positions_beside
from repo_interp.models.capture import capture
from repo_interp.models.decoder import Decoder

_BLOCK = 64
"""Tokens per row of a pass over the vocabulary."""
_PIECES = 64
"""Most passes over single pieces."""


@dataclass(frozen=True)
class ReferenceKeys:
    """Unrotated keys of one layer, and how the layer rotates them."""

    attention: RepositionedAttention
    plain: Float[Tensor, "kv_head token d_head"]
    """Keys in half-split order, float64."""
    frequencies: Float[Tensor, "pair"] | None
    """Frequencies, float64; None if the layer does not rotate, or not by one number per pair."""
    scaling: Float[Tensor, "*pair"]
    """Factor of rotation on the length of keys."""
    positions: Float[Tensor, "row token"] | None
    """Positions, float64; None if the layer has none, or one per pair."""
    window: int | None

    def split(self, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the entries of a repositioned model's cache into keys and positions.

        Args:
            keys: Cached entries [kv_head, slot, entry].

        Returns:
            Keys with the width of a head, and positions [row, slot]; None without positions.
        """
        width = self.attention.d_head
        if keys.shape[-1] <= width or self.positions is None:
            return keys[..., :width], None
        weights = (self.attention.assigner or nn.Module()).parameters()
        dtype = next((weight.dtype for weight in weights), torch.float32)
        beside = read_positions_beside(keys[None, ..., width:], dtype, len(self.positions))
        return keys[..., :width], beside[0].double()

    def orders(self) -> tuple[Int[Tensor, "d_head"], Int[Tensor, "d_head"]]:
        """Return the places of half-split entries in a key, for both orders.

        Returns:
            Places in the model's keys, and in keys of the other order: adjacent pairs if the model
            pairs halves, and halves if it pairs neighbors.
        """
        width = self.attention.d_head
        order = self.attention.order
        stock = torch.arange(width) if order is None else order
        turning, half = self.attention.rotation.turning, width // 2
        first, second = stock[:turning], stock[half : half + turning]
        entries = torch.cat([first, second]).sort().values
        other = entries.view(-1, 2).T if self.pairs_halves else entries.view(2, -1)
        rest = stock[turning:half], stock[half + turning :]
        return stock, torch.cat([other[0], rest[0], other[1], rest[1]])

    @property
    def pairs_halves(self) -> bool:
        """Whether the entries of a pair are half a head apart, rather than neighbors."""
        order, half = self.attention.order, self.attention.d_head // 2
        return order is None or int(order[half] - order[0]) != 1


def pairs(half_split: Float[Tensor, "*batch d_head"]) -> Complex[Tensor, "*batch pair"]:
    """Join both halves of vectors to complex numbers.

    Args:
        half_split: [..., d_head].

    Returns:
        [..., d_head / 2].
    """
    return torch.complex(*half_split.double().chunk(2, -1))


def reference_keys(
    decoder: Decoder,
    tokens: Int[Tensor, "token"],
    position_ids: Int[Tensor, "axis token"] | None = None,
) -> dict[int, ReferenceKeys]:
    """Run tokens through a model and return the keys of its layers before rotation.

    Args:
        decoder: Decoder of a model that can be observed.
        tokens: Token ids of one prompt.
        position_ids: Positions in time, height and width of a prompt with an image; None: the
            token index.

    Returns:
        Keys by number of layer.
    """
    found = {}

    def receive(inputs: AttentionInputs) -> None:
        attention = decoder.by_layer[inputs.layer]
        frequencies, positions = inputs.frequencies, inputs.positions
        rotates = frequencies is not None and frequencies.ndim == 1 and bool(frequencies.any())
        by_token = positions is not None and positions.ndim == 3
        found[inputs.layer] = ReferenceKeys(
            attention,
            inputs.keys[0].double().cpu(),
            frequencies.double().cpu() if rotates and frequencies is not None else None,
            torch.as_tensor(inputs.attention_scaling).double().cpu(),
            positions[0].double().cpu() if by_token and positions is not None else None,
            inputs.window,
        )

    by_axis = None if position_ids is None else position_ids[:, None]
    _observe(decoder, tokens[None], receive, position_ids=by_axis)
    return found


def reference_keys_apart(
    decoder: Decoder,
    tokens: Int[Tensor, "token"],
    whole: Mapping[int, ReferenceKeys],
    pieces: Sequence[tuple[int, int]],
) -> dict[int, ReferenceKeys]:
    """Return keys from passes over single pieces; all other tokens keep the keys of the whole pass.

    Args:
        decoder: Decoder of a model that can be observed.
        tokens: Token ids of one prompt.
        whole: Keys of a pass over all tokens.
        pieces: First and last token of each piece.

    Returns:
        Keys by number of layer.
    """
    plain = {layer: one.plain.clone() for layer, one in whole.items()}
    for first, last in pieces[:_PIECES]:
        for layer, one in reference_keys(decoder, tokens[first : last + 1]).items():
            plain[layer][:, first : last + 1] = one.plain
    return {layer: replace(one, plain=plain[layer]) for layer, one in whole.items()}


def keys_of_vocabulary(decoder: Decoder, layer: int) -> Float[Tensor, "kv_head id d_head"]:
    """Return the unrotated keys of a first layer for every token of the vocabulary.

    Args:
        decoder: Decoder of a model that can be observed.
        layer: Number of its first layer with attention.

    Returns:
        Keys by token id, float64.
    """
    found: list[Tensor] = []
    ids = torch.arange(decoder.vocabulary_size)
    padded = nn.functional.pad(ids, (0, -len(ids) % _BLOCK)).view(-1, _BLOCK)
    for rows in padded.split(_BLOCK):
        _observe(decoder, rows, lambda inputs: found.append(inputs.keys.double().cpu()), (layer,))
    return torch.cat(found).transpose(0, 1).flatten(1, 2)[:, : len(ids)]


def _observe(
    decoder: Decoder,
    tokens: Int[Tensor, "prompt token"],
    receive: Callable[[AttentionInputs], None],
    layers: tuple[int, ...] | None = None,
    position_ids: Int[Tensor, "axis prompt token"] | None = None,
) -> None:
    tokens = tokens.to(decoder.device)
    places = None if position_ids is None else position_ids.to(decoder.device)
    prompts = torch.arange(len(tokens))
    capture(
        decoder, tokens, torch.ones_like(tokens, dtype=torch.bool), prompts, receive, layers, places
    )
