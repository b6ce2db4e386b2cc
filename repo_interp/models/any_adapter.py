"""A TransformerLens adapter for decoders that TransformerLens has none for: the embedding, the residual stream, attention, the unembedding.

    embed, blocks.{i}.hook_in / hook_out, blocks.{i}.attn, unembed

Names of parts are read off the model. Norms and feed-forward parts stay inside their blocks, without hook points of their own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES, ArchitectureAdapterFactory
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import BlockBridge, EmbeddingBridge, UnembeddingBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from repo_interp.models.attention import attached
from repo_interp.models.reposition import blocks


class AnyAttention(GeneralizedComponent):
    """An attention module as it is; its hook points are those that `bridge` puts at the hook sites."""


class AnyBlock(BlockBridge):
    """A layer, whose residual stream is seen before and after it."""

    hook_aliases: ClassVar = {"hook_resid_pre": "hook_in", "hook_resid_post": "hook_out", "hook_attn_out": "attn.hook_out"}


def architecture_of(model: Any) -> str:
    """The name of TransformerLens' adapter for `model`; where it has none, that of one made for this model."""
    name = type(model).__name__
    return name if name in SUPPORTED_ARCHITECTURES else adapter_for(model)


def adapter_for(model: Any) -> str:
    """The name of an adapter made for `model`."""
    made = f"{type(model).__name__} (repo_interp)"
    parts = {id(module): path for path, module in model.named_modules()}
    stack = blocks(model)
    attention = next(path for path, module in stack.named_modules() if attached(module) is not None).partition(".")[2]

    class Adapter(ArchitectureAdapter):
        """Parts of the model by name."""

        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            self.component_mapping = {
                "embed": EmbeddingBridge(name=parts[id(model.get_input_embeddings())]),
                "blocks": AnyBlock(
                    name=parts[id(stack)], submodules={"attn": AnyAttention(name=attention, config=cfg, optional=True)}
                ),
                "unembed": UnembeddingBridge(name=parts[id(model.get_output_embeddings())], config=cfg),
            }

    ArchitectureAdapterFactory.register_adapter(made, Adapter)
    return made


def has_hook(component: nn.Module, name: str) -> bool:
    """Whether a component of a bridge has a hook point or an alias called `name`."""
    return name in getattr(component, "hook_aliases", {}) or name in dict(component.named_children())
