"""Writers of the residual stream that a layer reads: embedding, earlier heads, earlier MLPs.

    x_L    = x_0 + sum_{l < L} (sum_h c_lh + m_l)      x_l: the residual stream that enters layer l
    c_lh,i = r_l n_li o_lh,i W_O^h (G_l)               o: the head's output, behind a gate
    m_l    = x_(l+1) - x_l - sum_h c_lh                the MLP, and biases

r_l is the factor of attention's output when it is added. n_li and G_l are factor and gain of its
norm, in families that norm this output (OLMo-2, Gemma 2 and 3); the norm is of the sum of all
heads. Layers that compute attention and MLP in parallel need no special case, since m_l is a
difference. This module does not know which components matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.attention import CACHES, RepositionedAttention, require_one_position
from repo_interp.models.decoder import Decoder
from repo_interp.models.lasting import called_at, intervention
from repo_interp.plugins.paths.direct_path import Norm, added_outputs, inner, norm_hook
from repo_interp.positions.assigners import RememberingAssigner
from repo_interp.positions.logits import exact

MLP = -1
"""Index of the MLP, instead of a head."""
EMBEDDING = (-1, MLP)
Component = tuple[int, int]
"""Layer and head, or MLP."""
Assign = Callable[[Tensor], Tensor]
"""Positions [prompt, row, token] of a residual stream [prompt, token, width]."""


class _Assigned(Exception):
    """Ends a layer once it has assigned its positions, which are the argument."""


@dataclass
class Means:
    """Means over tokens of the inputs of layers, and of the outputs of their heads before W_O."""

    entered: dict[int, Float[Tensor, " width"]] = field(default_factory=dict)
    wrote: dict[int, Float[Tensor, " inner"]] = field(default_factory=dict)


class Stream:
    """The residual stream up to a layer."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        """Find the writers; costs one short pass.

        Raises:
            InputError: There is no such layer, or an earlier layer does not add the outputs of its
                heads to one residual stream.
        """
        (self.reader,) = decoder.attentions([layer])
        self.decoder, self.layer, self.added = decoder, layer, added_outputs(decoder)
        self.blocks = list(decoder.blocks)[: layer + 1]
        earlier = [one for one in decoder.layers if one.layer_idx <= layer]
        self.attentions = {one.layer_idx: one for one in earlier[:-1]}
        for one in earlier:
            number = one.layer_idx
            inside = number < len(self.blocks) and one.module in [*self.blocks[number].modules()]
            if not inside or (number < layer and number not in self.added):
                raise InputError(
                    f"layer {number} of this {decoder.config.model_type} adds no outputs of heads "
                    "to one residual stream, so the outputs of single heads are unknown"
                )
        self.norms: dict[int, Norm] = {}

    @property
    def components(self) -> list[Component]:
        """The embedding, then heads and MLP of every earlier layer (the MLP alone without heads)."""
        found: list[Component] = [EMBEDDING]
        for layer in range(self.layer):
            heads = self.attentions[layer].heads if layer in self.attentions else 0
            found += [(layer, head) for head in (*range(heads), MLP)]
        return found

    def require_positions(self) -> None:
        """Refuse a layer unless it learns positions from each token's hidden state alone.

        Raises:
            InputError: The layer does not, or is the first layer.
        """
        reader, layer = self.reader, self.layer
        if not reader.learned:
            raise InputError(
                f"layer {layer} ({reader.scheme}) learns no positions; those of this model "
                f"that do are {', '.join(map(str, self.decoder.learned_layers)) or 'none'}"
            )
        if isinstance(reader.assigner, RememberingAssigner):
            raise InputError(
                f"layer {layer} ({reader.scheme}) computes a position from several tokens; "
                "writers are known only if it depends on the hidden state of its token alone"
            )
        if layer == 0:
            raise InputError("layer 0 reads the embedding alone; name a later layer")

    def matrix(self, layer: int, width: int) -> Float[Tensor, "inner width"]:
        """Return the map from the outputs of a layer's heads, times n, to the residual stream.

        Args:
            layer: An earlier layer that has run.
            width: Width of the outputs of all heads.

        Returns:
            Matrix in float32, or float64.
        """
        projection = inner(self.attentions[layer].output_projection)
        weight = next(projection.parameters())
        # By the projection's forward pass, however its weights are stored or quantized; the bias
        # is subtracted.
        identity = torch.eye(width, dtype=weight.dtype, device=self.decoder.device)
        with torch.no_grad():
            written = exact(projection.forward(identity) - projection.forward(0 * identity[:1]))
        norm, factor = self.norms.get(layer), self.added[layer][1]
        if norm is not None:
            written = written - written.mean(-1, keepdim=True) if norm.centred else written
            written = written * norm.gain
        return factor * written

    @contextmanager
    def observed(
        self,
        entered: Callable[[int, Tensor], Tensor | None],
        wrote: Callable[[int, Tensor], Tensor | None],
        reached: Callable[[Tensor, Assign], Tensor | None] | None = None,
    ) -> Iterator[None]:
        """Observe, or change, the residual stream of every pass inside a `with` block.

        Args:
            entered: Called with a layer and the residual stream that enters it
                [prompt, token, width]; its result, if not None, replaces the stream.
            wrote: Called with an earlier layer and the outputs of its heads, times n,
                [prompt, token, inner]; its result, if not None, is subtracted from the stream.
            reached: Called at the layer that learns positions, with the residual stream and the map
                from stream to positions; its result, if not None, replaces the positions.

        Yields:
            None.

        Raises:
            AssertionError: The layer ended without positions; this never happens.
        """
        running, put, shape = False, None, torch.Size()

        def enter(layer: int, block: nn.Module, arguments: tuple, keywords: dict) -> Any:
            nonlocal running, put, shape
            if running:
                return None
            hidden = arguments[0] if arguments else keywords["hidden_states"]
            shape, changed = hidden.shape[:2], entered(layer, hidden)
            hidden = hidden if changed is None else changed.to(hidden)

            def given(stream: Tensor) -> tuple[tuple, dict]:
                if arguments:
                    return (stream, *arguments[1:]), keywords
                return (), keywords | {"hidden_states": stream}

            def assign(stream: Tensor) -> Tensor:
                nonlocal running
                some, further = given(stream.to(hidden.dtype))
                running = True
                try:
                    # Without a cache, which would get the keys twice.
                    block(*some, **further | {name: None for name in CACHES if name in further})
                except _Assigned as found:
                    return found.args[0]
                finally:
                    running = False
                raise AssertionError("a layer that learns positions assigns them")

            if layer == self.layer and reached is not None:
                put = reached(hidden, assign)
            return given(hidden)

        def at_positions(attention: RepositionedAttention, positions: Tensor) -> Tensor | None:
            require_one_position(attention, positions)
            if running:
                raise _Assigned(positions)
            return put

        def at_projection(layer: int, module: nn.Module, arguments: tuple, out: Tensor) -> Any:
            outputs[layer] = arguments[0].reshape(*shape, -1)
            return None if self.added[layer][0] is not None else less(layer, 1.0, out)

        def at_norm(layer: int, module: nn.Module, arguments: tuple, out: Tensor) -> Any:
            norm_hook(partial(self.norms.__setitem__, layer))(module, arguments, out)
            return less(layer, self.norms[layer].factor[..., None], out)

        def less(layer: int, factor: Tensor | float, out: Tensor) -> Tensor | None:
            change = wrote(layer, factor * exact(outputs.pop(layer)))
            if change is None:
                return None
            return out - (change / self.added[layer][1]).to(out).reshape(out.shape)

        outputs: dict[int, Tensor] = {}
        with intervention(self.decoder) as undo:
            for layer, block in enumerate(self.blocks):
                hook: Any = partial(enter, layer)
                undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for layer, attention in self.attentions.items():
                projection, norm = attention.output_projection, self.added[layer][0]
                assert projection is not None  # `added_outputs` has seen it
                hook = partial(at_projection, layer)
                undo.callback(projection.register_forward_hook(hook).remove)
                if norm is not None:
                    hook = partial(at_norm, layer)
                    undo.callback(norm.register_forward_hook(hook).remove)
            if reached is not None:
                undo.enter_context(called_at(self.decoder, "positions", at_positions, [self.layer]))
            yield


@contextmanager
def at_mean(
    stream: Stream, means: Means, chosen: Sequence[Component], everywhere: bool
) -> Iterator[None]:
    """Set components to their means, for f_phi of the layer alone or for all readers.

    Args:
        stream: The residual stream.
        means: Means of the stream.
        chosen: Heads and MLPs.
        everywhere: True: for all readers; False: for f_phi alone, by subtracting the deviations
            from the means.

    Yields:
        None.
    """
    apart: dict[int, Tensor] = {}
    removed: list[Tensor] = []
    heads = attended_by(chosen)

    def entered(layer: int, hidden: Tensor) -> Tensor | None:
        deviation = hidden.float() - means.entered[layer].to(hidden.device)
        if layer == 0:
            removed.clear()
            apart.clear()
        elif (layer - 1, MLP) in chosen:
            # `apart` has the input of the previous layer plus the output of its heads.
            written = deviation - apart[layer - 1]
            if everywhere:
                hidden, deviation = hidden - written.to(hidden), deviation - written
            else:
                removed.append(written)
        apart[layer] = deviation
        return hidden

    def wrote(layer: int, outputs: Tensor) -> Tensor | None:
        if layer not in heads and (layer, MLP) not in chosen:
            return None
        deviation = outputs - means.wrote[layer].to(outputs.device)
        matrix = stream.matrix(layer, outputs.shape[-1])
        count = stream.attentions[layer].heads
        some = torch.zeros(count, device=outputs.device)
        some[heads.get(layer, [])] = 1
        part = (deviation * some.repeat_interleave(outputs.shape[-1] // count)) @ matrix
        apart[layer] = apart[layer] + deviation @ matrix
        if everywhere:
            apart[layer] = apart[layer] - part
            return part
        removed.append(part)
        return None

    def reached(hidden: Tensor, assign: Assign) -> Tensor | None:
        return None if everywhere else assign(hidden.float() - sum(removed))

    with stream.observed(entered, wrote, reached):
        yield


def attended_by(chosen: Sequence[Component]) -> Mapping[int, list[int]]:
    """Return the heads among components, by layer.

    Args:
        chosen: Heads and MLPs.

    Returns:
        Indices of heads.
    """
    found: dict[int, list[int]] = {}
    for layer, head in chosen:
        if head != MLP:
            found.setdefault(layer, []).append(head)
    return found
