"""What a head writes straight into a logit: the direct path of Elhage et al. (2021), with every norm taken as the factor that it was.

    c_h(i, t) = sum_{j in S} A^h_ij v_j W_O^h . g (u_t - mean_t' u_t') s_i          S: the tokens that the head moves something from

u_t is token t's row of the unembedding, without the mean of all rows, which no softmax sees; g and s_i are the final norm's gain and its
factor at row i in the pass (RMS norms are linear but for it). Families that norm the output of attention (OLMo-2, OLMo-3, Gemma 2 and 3)
have a second gain and factor between. A soft cap on the logits is left out. Later layers that read what the head writes are no part of it.

Knows nothing about which rows, tokens and sources are of interest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.bridge import model_of
from repo_interp.models.outputs import attention_values
from repo_interp.models.reposition import attentions, blocks, decoder_of

NORMS_OUTPUT = ("olmo2", "olmo3", "gemma2", "gemma3_text")
"""Families whose `post_attention_layernorm` norms what attention gives; of the others it stands before the MLP."""
LARGE = 1e4
"""What a norm is given to read its gain off: so large that its epsilon is nothing beside it."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm in one pass: norm(x) = gain * factor * x."""

    gain: Float[Tensor, "width"]
    factor: Float[Tensor, "token"]


@dataclass
class DirectPath:
    """What the latest pass of one prompt left behind."""

    model: Any
    values: dict[int, Float[Tensor, "1 kv_head token d_head"]] = field(default_factory=dict)
    """Of each layer, until they are taken."""
    final: Norm | None = None
    after_attention: dict[int, Norm] = field(default_factory=dict)

    def contributions(
        self,
        layer: int,
        moved: Float[Tensor, "row head d_head"],
        rows: Int[Tensor, "row"],
        answers: Int[Tensor, "row"],
    ) -> Float[Tensor, "row head"]:
        """What `moved`, sums of weighted values, add to the logit of `answers[r]` at token `rows[r]`, once the pass has ended."""
        assert self.final is not None
        unembedding = inner(self.model.get_output_embeddings()).weight
        directions = (unembedding[answers] - unembedding.mean(0)).float()
        for norm in (self.final, self.after_attention.get(layer)):
            if norm is not None:
                directions = directions * norm.gain * norm.factor[rows, None]
        (attention,) = [one for one in attentions(self.model) if one.layer_idx == layer]
        written = directions @ inner(attention.output_projection).weight.float()
        return (written.unflatten(-1, (-1, attention.d_head)) * moved.float()).sum(-1)


@contextmanager
def direct_path(model: nn.Module) -> Iterator[DirectPath]:
    """While the context lasts, what the latest pass of one prompt leaves behind. `model`: repositioned, or a bridge."""
    decoder = decoder_of(model)
    if not hasattr(decoder, "norm"):
        raise InputError(
            f"a {model_of(model).config.model_type} has no final RMS norm, through which the direct path of a head could be followed; "
            "leave the atlas out"
        )
    path = DirectPath(model_of(model))

    def remember_norm(store: Callable[[Norm], None]) -> Callable:
        def hook(module: nn.Module, arguments: tuple, normed: Tensor) -> None:
            (given, *_) = arguments
            gain = inner(module).forward(torch.full_like(given[:1, :1], LARGE))[0, 0].float()  # no hook is called
            straight = given[0].float() * gain
            store(Norm(gain, (straight * normed[0].float()).sum(-1) / straight.square().sum(-1).clamp_min(1e-30)))

        return hook

    def store_final(norm: Norm) -> None:
        path.final = norm

    with ExitStack() as hooks:
        hooks.enter_context(attention_values(model, path.values.__setitem__))
        if path.model.config.model_type in NORMS_OUTPUT:
            layers: Any = blocks(model)
            for number, layer in enumerate(layers):
                after = remember_norm(lambda norm, number=number: path.after_attention.__setitem__(number, norm))
                hooks.callback(layer.post_attention_layernorm.register_forward_hook(after).remove)
        hooks.callback(decoder.norm.register_forward_hook(remember_norm(store_final)).remove)
        yield path


def inner(module: Any) -> Any:
    """The Hugging Face module inside a part of a bridge; a module itself."""
    return getattr(module, "original_component", None) or module
