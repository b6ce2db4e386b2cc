"""All heads screened by one backward pass, which estimates the effect of changed positions.

    positions    sum_i  dF / dz_i . (z'_i - z_i)    attribution patching (Nanda 2023): gradient
                                                    times change of the positions
    output       sum_i  dF / do_i . (o'_i - o_i)    the same behind the softmax (Kramar et al. 2024,
                                                    AtP*), o_i the output of a head

F is the objective, one number per prompt; primes denote the head with changed positions, with
unchanged inputs. Both estimates are the first term of a series. The first one approximates rotation
and softmax as linear, although a rotation may turn many times while a position moves by a few, and
a saturated softmax has no gradient. The second one computes the head again (attention of every
layer once more per kind, no MLP and no backward pass), and approximates only the layers after the
head as linear. It includes later layers that read the changed hidden states, and f_phi. Heads that
share positions get copies of them, so that every head has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.interventions.position_edit import PositionEdit
from repo_interp.interventions.replacing import replaced
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.positions.logits import exact
from repo_interp.positions.rotary import expand_heads

SCREENINGS = ("positions", "output")


def attributed(
    decoder: Decoder,
    objective: Callable[[], Float[Tensor, "prompt"]],
    changes: Mapping[str, PositionEdit],
) -> dict[str, Float[Tensor, "screening layer head prompt"]]:
    """Estimate by one backward pass how much each change of positions raises an objective.

    Args:
        decoder: Decoder of the model.
        objective: Runs the model once, on prompts padded on the right; returns a number per prompt.
        changes: Changes of positions by name.

    Returns:
        For every change the estimated rise [screening, layer, head, prompt], float64; NaN for
        layers without positions.
    """
    # Layers without positions have nothing to change, and stay NaN below.
    watched = {layer: _Watched(attention) for layer, attention in decoder.positioned.items()}
    with torch.enable_grad(), frozen_weights(decoder), ExitStack() as hooks:
        for watch in watched.values():
            watch.attach(hooks)
        # Prompts do not see one another, so the gradient of the sum
        # holds the gradient of every prompt.
        total = objective().sum()
        wanted = [
            tensor for watch in watched.values() for tensor in (watch.positions, watch.output)
        ]
        gradients = iter(torch.autograd.grad(total, wanted))
    # grad returns gradients in the order of `wanted`: positions and output of a layer, then the
    # next layer.
    by_layer = {layer: (next(gradients), next(gradients)) for layer in watched}
    estimates = {}
    for name, edit in changes.items():
        # Positions are [prompt, head, token]; the slice gives heads, then prompts.
        heads, prompts = next(iter(watched.values())).positions.shape[1::-1]
        estimate = torch.full(
            (len(SCREENINGS), decoder.layer_count, heads, prompts), torch.nan, dtype=torch.float64
        )
        # The replay applies the change, but every layer gets its input from the clean pass.
        with torch.no_grad(), replaced(decoder.module, edit):
            for layer, watch in watched.items():
                estimate[:, layer] = watch.first_order(*by_layer[layer]).cpu()
        estimates[name] = estimate
    return estimates


@dataclass
class _Watched:
    """One layer in the differentiated pass: arguments of its attention, positions and outputs."""

    attention: RepositionedAttention
    called: tuple[tuple, dict[str, Any]] = ((), {})
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    """[prompt, head, token]: one copy per head."""
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    """[prompt, token, head, d_value], before the output projection."""

    def attach(self, hooks: ExitStack) -> None:
        """Record arguments, positions and outputs in the next pass."""
        # Before all other hooks: the replay runs them again, so it needs the original arguments.
        hooks.callback(
            self.attention.module.register_forward_pre_hook(
                self._call, with_kwargs=True, prepend=True
            ).remove
        )
        hooks.callback(self.attention.sites.positions.register_forward_hook(self._copy).remove)
        hooks.callback(self.attention.sites.attended.register_forward_hook(self._output).remove)

    def first_order(
        self, by_position: Tensor, by_output: Tensor
    ) -> Float[Tensor, "screening head prompt"]:
        """Return gradients times changes, under the active change."""
        # The replay overwrites both with changed values; the clean ones are restored below.
        before = self.positions, self.output
        arguments, keywords = self.called
        with ExitStack() as hooks:
            self.attach(hooks)
            self.attention.module(*arguments, **keywords)
        (positions, output), (self.positions, self.output) = (self.positions, self.output), before
        moved = (by_position.double() * (positions - self.positions)).sum(-1)
        # Over tokens and d_value: [prompt, head]
        changed = (by_output.double() * (output - self.output)).sum((1, 3))
        return torch.stack([moved.T, changed.T])

    def _call(self, module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        self.called = arguments, keywords

    def _copy(self, module: nn.Module, arguments: tuple, positions: Tensor) -> Tensor:
        # In float32 or wider, since half precision would round the steps of learned positions.
        positions = expand_heads(exact(positions), self.attention.heads)
        if torch.is_grad_enabled() and not positions.requires_grad:  # the token index
            positions = positions.detach().requires_grad_()
        self.positions = positions
        return positions

    def _output(self, module: nn.Module, arguments: tuple, attended: Tensor) -> None:
        self.output = attended


@contextmanager
def frozen_weights(decoder: Decoder) -> Iterator[None]:
    """Take no gradient of weights inside a `with` block.

    A forward pass then keeps no activations for them, and a backward pass takes half as long.

    Args:
        decoder: Decoder of the model.

    Yields:
        None.
    """
    # Only trainable parameters, so that parameters frozen by the caller stay frozen afterwards.
    owner: Any = decoder.owner
    trained = {
        name
        for name, parameter in owner.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    for parameter in owner.parameters():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        # By name, since every pass makes new parameters for offloaded weights
        for name, parameter in owner.named_parameters(remove_duplicate=False):
            if name in trained:
                with torch.inference_mode(parameter.is_inference()):
                    parameter.requires_grad_(True)
