"""A repositioned model as a TransformerLens `TransformerBridge`.

    blocks.{i}.attn.hook_positions    [batch, P, token], P in {1, key-value heads, heads};
                                      editable, also on RoPE layers
    blocks.{i}.attn.hook_q, hook_k, hook_v, hook_z, hook_rot_q, hook_rot_k, hook_attn_scores,
    hook_pattern, ...                 hook points of TransformerLens

TransformerLens re-implements attention, and a stock adapter would silently rotate by the token
index. Here its hook points are the hook sites of `RepositionedAttention` instead, on the stock
module, so bridge and Hugging Face model run the same code; scores and patterns are materialised
only in layers where a hook reads them, elsewhere the fused kernel runs.

Decoders get an adapter here if TransformerLens has none, or one that does not support their
configuration or computes other logits: embed, blocks.{i}.hook_in / hook_out, blocks.{i}.attn,
unembed. Names of parts are read off the model; norms and feed-forward parts stay inside their
blocks, without hook points.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformer_lens import ActivationCache
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from repo_interp.errors import InputError, one_line, warn
from repo_interp.models.attention import scheme_of
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import at_rest, require_weights
from repo_interp.models.layer_pass import HookSites
from repo_interp.models.remembered import remember_computation
from repo_interp.models.saving import save
from repo_interp.models.tokenizing import set_tokenizer, special_tokens_around
from repo_interp.models.wrapped import unwrapped

logger = logging.getLogger(__name__)

_TOKENS = 12
_TOLERANCE, _TOLERANCE_HALF = 1e-5, 0.05
"""Largest difference of logits over the largest logit: some adapters compute norms themselves."""


class RepositionedBridge(TransformerBridge):
    """A TransformerBridge that turns text into the tokens that `analyze` measures."""

    def to_tokens(
        self,
        input: str | list[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool | None = None,
    ) -> Tensor:
        """Tokenize text as `analyze` does.

        Args:
            input: One text or several.
            prepend_bos: Whether to prepend BOS to a text; None: as the tokenizer does.
            padding_side: "left" or "right"; None: the tokenizer's.
            move_to_device: Whether tokens are moved to the device of the model.
            truncate: True cuts at the training length; None warns there and cuts nothing.

        Returns:
            Token ids [text, token].

        Raises:
            InputError: The model has no tokenizer, or a text begins with the BOS that the tokenizer
                puts.
        """
        if self.tokenizer is None:
            raise InputError(
                "this checkpoint has no tokenizer; give tokens instead of text, such as "
                "ri.tokens(prompts, bridge)[0]"
            )
        tokens = super().to_tokens(input, prepend_bos, padding_side, move_to_device, bool(truncate))
        bos = self.tokenizer.bos_token_id
        if (
            prepend_bos is None
            and self.cfg.tokenizer_prepends_bos
            and bool(((tokens[:, :-1] == bos) & (tokens[:, 1:] == bos)).any())
        ):
            raise InputError(
                f"the text begins with {self.tokenizer.bos_token!r}, which the tokenizer "
                "puts before every text: leave it out, "
                "or give the tokens, ri.tokens(prompts, bridge)[0]"
            )
        if truncate is None and tokens.shape[1] > self.cfg.n_ctx:
            warn(
                f"a text has {tokens.shape[1]} tokens, and the model was trained on up to "
                f"{self.cfg.n_ctx}; it was not cut"
            )
        return tokens

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Run with a cache that also knows positions, as cache["positions", layer]."""
        output, cache = super().run_with_cache(*args, **kwargs)
        if isinstance(cache, ActivationCache):
            cache = PositionCache(cache.cache_dict, cache.model, cache.has_batch_dim)
        return output, cache

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the checkpoint as `ri.save` does.

        The model's own method would find every weight twice: in the bridge and inside it.
        """
        save(self, save_directory)


class PositionCache(ActivationCache):
    """An ActivationCache in which ("positions", layer) is blocks.LAYER.attn.hook_positions."""

    def __getitem__(self, key: Any) -> Tensor:
        """Raises InputError for positions of a layer that are not in the cache."""
        if not isinstance(key, tuple) or key[0] != "positions":
            return super().__getitem__(key)
        name = f"blocks.{key[1]}.attn.hook_positions" if len(key) > 1 else "positions"
        if name not in self.cache_dict:
            held = [
                part.split(".")[1] for part in self.cache_dict if part.endswith("hook_positions")
            ]
            raise InputError(
                f"the cache has no {name}; it holds positions of layers {', '.join(held) or 'none'}"
            )
        return self.cache_dict[name]


class _TokensFirst(nn.Module):
    """A hook point [batch, token, head, d_head] at a tensor [batch, head, token, d_head]."""

    def __init__(self, point: nn.Module, flat: bool) -> None:
        """`flat`: the heads share one axis, as in a norm over all heads."""
        super().__init__()
        self.point, self.flat = point, flat

    def forward(self, tensor: Tensor) -> Tensor:
        """The tensor after the hooks."""
        tensor = tensor.transpose(1, 2)
        hooked = (
            self.point(tensor.flatten(2)).unflatten(2, tensor.shape[2:])
            if self.flat
            else self.point(tensor)
        )
        return hooked.transpose(1, 2)


class RepositionedAttentionBridge:
    """Mixin for an adapter's attention: hook points are the hook sites of the stock module."""

    rope_optional = True

    def set_original_component(self: Any, component: nn.Module) -> None:
        """Use the hook points as the hook sites of a module; one without a scheme has none.

        Args:
            component: Stock attention module, or linear attention of a hybrid.
        """
        super().set_original_component(component)  # pyright: ignore[reportAttributeAccessIssue]
        attention = scheme_of(component)
        if attention is None:
            return
        for name in _POINTS:
            if not has_hook(self, name):
                point = HookPoint()
                point.pos_dim = 2
                setattr(self, name, point)
        self.hook_cos.pos_dim = self.hook_sin.pos_dim = 2  # [batch, P, token, d_head/2]
        attention.sites = HookSites(
            positions=self.hook_positions,
            cosines=self.hook_cos,
            sines=self.hook_sin,
            rotated_queries=self.hook_rot_q,
            rotated_keys=self.hook_rot_k,
            position_logits=self.hook_position_logits,
            scores=self.hook_attn_scores,
            pattern=self.hook_pattern,
        )
        normed = getattr(component, "q_norm", None) is not None
        if normed and hasattr(self, "hook_q_normed"):
            spans_heads = self._qk_norm_phase == "pre_reshape"
            norms = (self.hook_q_normed, self.hook_k_normed)
            sites = [_TokensFirst(point, flat=True) if spans_heads else point for point in norms]
            attention.sites.queries, attention.sites.keys = sites
        if "o" not in self.submodules:
            self.hook_z = HookPoint()
            attention.sites.attended = self.hook_z
        if "q" not in self.submodules or any(
            getattr(component, name, None) is None for name in ("q_proj", "k_proj", "v_proj")
        ):
            # Projections are fused, or unknown to the adapter: the hooks on single ones fire where
            # the parts arrive.
            points: list[Any] = [
                getattr(getattr(self, name, None), "hook_out", None) for name in ("q", "k", "v")
            ]
            if None in points:
                aliases = getattr(self, "hook_aliases", {})
                self.hook_aliases = {
                    alias: at
                    for alias, at in aliases.items()
                    if alias not in ("hook_q", "hook_k", "hook_v")
                }
                self.hook_q, self.hook_k, self.hook_v = points = [
                    HookPoint(),
                    HookPoint(),
                    HookPoint(),
                ]
            # A point of the adapter that splits heads itself is given them side by side.
            sites = [
                _TokensFirst(point, flat=point.hook_conversion is not None) for point in points
            ]
            attention.sites.queries, attention.sites.keys, attention.sites.values = sites

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the stock module between hook_in and hook_out; inner hooks fire at its hook sites."""
        for switch in ("use_attn_result", "use_split_qkv_input", "use_attn_in"):
            if getattr(self.config, switch, False):
                raise InputError(
                    f"{switch} is not offered by repositioned attention; read hook_z, "
                    "hook_q, hook_k, hook_v instead"
                )
        hidden_states = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        result = self.original_component(self.hook_in(hidden_states), *args[1:], **kwargs)
        return (
            self.hook_out(result)
            if isinstance(result, Tensor)
            else (self.hook_out(result[0]), *result[1:])
        )


def bridge(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> TransformerBridge:
    """Wrap a repositioned model; this changes it in place, so train and save it first.

    Args:
        model: Repositioned model of Hugging Face.
        tokenizer: Tokenizer of the model; None: the bridge takes only tokens.

    Returns:
        The bridge. It tokenizes text in the same way as `analyze`.

    Raises:
        InputError: The model was not repositioned.
    """
    return wrap(model, tokenizer)


class Trial(NamedTuple):
    """Results of a model before it is wrapped; its bridge must compute the same."""

    tokens: Tensor
    """[1, token]."""
    logits: Tensor | None
    """[1, token, token id]; None with weights on "meta"."""


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trial: Trial | None = None,
) -> TransformerBridge:
    """Wrap a model as `bridge` does, with logits that are known already.

    Args:
        model: Repositioned model of Hugging Face.
        tokenizer: Tokenizer of the model; None: the bridge takes only tokens.
        trial: Logits of the model; None: they are computed.

    Returns:
        The bridge.

    Raises:
        InputError: The model was not repositioned.
    """
    model = unwrapped(model)
    opened = as_decoder(model)
    _ = opened.layers  # refuses a model that was never repositioned
    implementation = model.config._attn_implementation
    wrapped = _build(opened, trial)
    # TransformerLens builds this class, and takes no other
    wrapped.__class__ = RepositionedBridge
    _put_output_projections(wrapped)
    wrapped.cfg.default_prepend_bos = False  # as long as no tokenizer puts one
    if tokenizer is not None:
        # TransformerLens would load the tokenizer again to prepend BOS, and add tokens beyond the
        # vocabulary, so prompts would differ from the model's.
        wrapped.tokenizer = tokenizer
        wrapped.cfg.tokenizer_prepends_bos, wrapped.cfg.tokenizer_appends_eos = (
            special_tokens_around(tokenizer)
        )
        # the tokens that `analyze` measures, none added
        wrapped.cfg.default_prepend_bos = wrapped.cfg.tokenizer_prepends_bos
        set_tokenizer(opened, tokenizer)
    # Some adapters force eager attention for the whole model.
    model.set_attn_implementation("sdpa" if implementation is None else implementation)
    found = as_decoder(wrapped)
    found.origin = opened.origin
    remember_computation(found)
    return wrapped


def _build(decoder: Decoder, trial: Trial | None) -> Any:
    """A bridge by TransformerLens' adapter if it computes the model's logits, else by ours."""
    model = decoder.owner

    def adapted(architecture: str) -> Any:
        with _cheap_building():
            return build_bridge_from_module(
                model,
                architecture,
                hf_config=model.config,
                model_name=model.config.name_or_path or model.config.model_type,
                post_adapter_hook=_exchange_attention,
            )

    name = type(model).__name__
    if name in SUPPORTED_ARCHITECTURES:
        put_back, (tokens, expected) = _kept(model), trial or _tried(decoder)
        # An adapter for other options of the family may fail with any error.
        try:
            wrapped = adapted(name)
            if _equal(_logits(decoder, wrapped, tokens), expected):
                return wrapped
            reason = "computes other logits"
        except Exception as error:
            reason = f"fails ({one_line(error)})"
        put_back()
        logger.info("the adapter of TransformerLens for %s %s; ours is used", name, reason)
    return adapted(adapter_for(model))


def _tried(decoder: Decoder) -> Trial:
    count = min(_TOKENS, decoder.longest_prompt or _TOKENS)
    # A stride by a prime spreads the tokens over the vocabulary.
    tokens = torch.arange(count, device=decoder.device)[None] * 7919 % decoder.vocabulary_size
    return Trial(tokens, _logits(decoder, decoder.owner, tokens))


def _logits(decoder: Decoder, model: Any, tokens: Tensor) -> Tensor | None:
    """Logits of `model` (of `decoder`, or a bridge around it); None with weights on "meta"."""
    try:
        require_weights(decoder)
    except InputError:
        return None
    with torch.no_grad(), at_rest(decoder):
        output = model(tokens, use_cache=False)
    return output if isinstance(output, Tensor) else output.logits


def _equal(given: Tensor | None, expected: Tensor | None) -> bool:
    """Whether logits, or NaN, are equal up to rounding; True without logits (weights on "meta")."""
    if given is None or expected is None:
        return True
    share = _TOLERANCE if torch.finfo(expected.dtype).bits >= 32 else _TOLERANCE_HALF
    largest = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(given, expected, rtol=0.0, atol=share * largest, equal_nan=True)


def _kept(model: nn.Module) -> Callable[[], None]:
    """A function that puts back all modules of a model, and their attributes, as they are now."""
    kept = [
        (module, name, value, dict(value) if isinstance(value, dict) else None)
        for module in model.modules()
        for name, value in vars(module).items()
    ]

    def put_back() -> None:
        for module in {id(module): module for module, *_ in kept}.values():
            vars(module).clear()
        for module, name, value, content in kept:
            vars(module)[name] = value
            # The same dicts: handles of hooks refer to them.
            if content is not None:
                value.clear()
                value.update(content)

    return put_back


@contextmanager
def _cheap_building() -> Iterator[None]:
    """Inside the context, modules are listed without methods, and copied without empty parts.

    TransformerLens looks for hook points among all attributes of all modules, twice, and copies a
    template for every layer: half of the time in which a bridge is built.
    """

    def listed(self: nn.Module) -> list[str]:
        own = {**self.__dict__, **self._modules}
        hooks = [name for name, value in own.items() if isinstance(value, HookPoint)]
        return sorted({*_listed_of(type(self)), *hooks})

    exchanged = (
        (nn.Module, "__dir__", listed),
        (HookPoint, "__deepcopy__", _copied),
        (GeneralizedComponent, "__deepcopy__", _copied),
    )
    before = [(kind, name, vars(kind).get(name)) for kind, name, _ in exchanged]
    for kind, name, method in exchanged:
        setattr(kind, name, method)
    try:
        yield
    finally:
        for kind, name, method in before:
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A faster `copy.deepcopy`: most attributes of a hook point are empty dicts and lists."""
    new = memo[id(module)] = module.__class__.__new__(module.__class__)
    for name, value in vars(module).items():
        if id(value) not in memo and type(value) in _CONTAINERS and not value:
            memo[id(value)] = type(value)()
        vars(new)[name] = copy.deepcopy(value, memo)
    return new


_CONTAINERS = (dict, list, set, OrderedDict)


@cache
def _listed_of(kind: type) -> set[str]:
    """Attributes of a class that are no functions."""
    known = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    functions = FunctionType | staticmethod | classmethod
    listed = {name for name, value in known.items() if not isinstance(value, functions)}
    # Two of a bridge that collect all of its hook points
    return listed - {"hook_dict", "mod_dict"}


def _put_output_projections(wrapped: Any) -> None:
    """Use the adapter's output projection in modules with another one (GPT-2), so hook_z fires."""
    holders = {getattr(part, "original_component", None): part for part in wrapped.modules()}
    for attention in as_decoder(wrapped).layers:
        output = getattr(holders.get(attention.module), "o", None)
        for name, child in list(attention.module.named_children()):
            if output is not None and child is output.original_component:
                setattr(attention.module, name, output)


def _exchange_attention(adapter: Any) -> None:
    # ln1 would be folded into q, k, v but not into the maps of f_phi
    adapter.supports_fold_ln = False
    stock = adapter.component_mapping["blocks"].submodules["attn"]
    kind = type(stock)
    # The adapter has built its part with the arguments of its family. The class of a part
    # determines the component that a bridge builds from it.
    stock.__class__ = type(
        f"Repositioned{kind.__name__}",
        (RepositionedAttentionBridge, kind),
        {"__module__": __name__},
    )
    for learned in ("gate_map", "content_map", "final_map", "dynamic_map"):
        stock.submodules[learned] = LinearBridge(name=f"assigner.{learned}", optional=True)


_POINTS = (
    *("hook_positions", "hook_position_logits", "hook_cos", "hook_sin", "hook_rot_q", "hook_rot_k"),
    *("hook_attn_scores", "hook_pattern"),
)
"""Hook points of every attention module, from its adapter or from us."""


class AnyAttention(GeneralizedComponent):
    """An attention module as it is, with the hook points that `bridge` puts at its hook sites."""


class AnyBlock(BlockBridge):
    """A layer with hook points on the residual stream before and after it."""

    hook_aliases: ClassVar = {
        "hook_resid_pre": "hook_in",
        "hook_resid_post": "hook_out",
        "hook_attn_out": "attn.hook_out",
    }


def adapter_for(model: Any) -> str:
    """Make and register an adapter for a model.

    Args:
        model: Repositioned model of Hugging Face.

    Returns:
        The name of the adapter.
    """
    made = f"{type(model).__name__} (repo_interp)"
    parts = {module: path for path, module in model.named_modules()}
    stack = as_decoder(model).blocks
    attention = next(
        path for path, module in stack.named_modules() if scheme_of(module) is not None
    ).partition(".")[2]

    class Adapter(ArchitectureAdapter):
        """Parts of the model by name."""

        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            self.component_mapping = {
                "embed": EmbeddingBridge(name=parts[model.get_input_embeddings()]),
                "blocks": AnyBlock(
                    name=parts[stack],
                    submodules={"attn": AnyAttention(name=attention, config=cfg, optional=True)},
                ),
                "unembed": UnembeddingBridge(name=parts[model.get_output_embeddings()], config=cfg),
            }

    ArchitectureAdapterFactory.register_adapter(made, Adapter)
    return made


def has_hook(component: nn.Module, name: str) -> bool:
    """Return whether a component of a bridge has a hook point or alias of this name.

    Args:
        component: Part of a bridge.
        name: Such as "hook_q".

    Returns:
        True where `component` has one.
    """
    return name in getattr(component, "hook_aliases", {}) or name in dict(
        component.named_children()
    )
