"""Make families that compute attention themselves (BLOOM, Falcon, GPT-J, MPT) use the interface.

    stock projections -> rotation by the given tables -> cache
    -> ALL_ATTENTION_FUNCTIONS -> stock output projection

`use_interface` changes the class of their attention modules to a subclass. Its forward pass
computes the same with the parts of the module, so code for other families works, and weights keep
their names. GPT-J keeps its sines in every module; its decoder gets a rotary module that passes
them on as tables. BLOOM and MPT add a slope per head times the distance (ALiBi) to their logits;
their layers have our scheme `alibi` with the slopes of the family. If no scheme is attached, the
stock bias goes into the mask.
"""
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOptionalIterable=false, reportOptionalOperand=false
# pyright: reportOperatorIssue=false
# Stock signatures, whose annotations are narrower than the arguments of decoders.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as turned_halves
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as turned_neighbours
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from repo_interp.checkpoint_files.architectures import require_family
from repo_interp.models.attention import scheme_of
from repo_interp.models.masks import visible
from repo_interp.models.rotation import TABLES


class InterfaceAttention:
    """Base of the subclasses: attends by transformers' interface."""

    calls_interface = True

    def attend(
        self: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        dropout: float,
        cache: Any,
        bias: Tensor | None = None,
    ) -> Any:
        """Call the configured attention function.

        Args:
            queries: [batch, head, token, d_head].
            keys: [batch, kv_head, token, d_head].
            values: [batch, kv_head, token, d_head].
            mask: Boolean or additive; None: causal.
            dropout: Rate of dropout in training.
            cache: Cache with the keys and values of earlier tokens; None: no cache.
            bias: Bias of the stock decoder [batch or 1, head, 1, key]; it may have more keys, at
                the front.

        Returns:
            Outputs with heads side by side [batch, token, width], and the pattern or None.
        """
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        # A scheme adds its bias itself.
        if bias is not None and scheme_of(self) is None:
            count = keys.shape[2]
            seen = visible(queries.shape[2], count, mask, queries.device)
            bias = bias[..., -count:].to(queries.dtype)
            # The lowest number rather than -inf, which gives NaN in a row of padding.
            mask = torch.where(seen, bias, torch.finfo(queries.dtype).min)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        rate = dropout if self.training else 0.0
        scaling = getattr(self, "softmax_scale", self.head_dim**-0.5)
        attended, weights = function(
            self, queries, keys, values, mask, dropout=rate, scaling=scaling
        )
        return attended.flatten(2), weights


class SlopedAttention(InterfaceAttention):
    """Base of the subclasses that add a slope per head times the distance."""

    native_scheme = "alibi"
    num_key_value_groups = 1


class InterfaceBloom(SlopedAttention, BloomAttention):
    """BLOOM's attention through the interface."""

    @property
    def slopes(self) -> list[float]:
        """Slopes of the heads; not ALiBi's series if their number is not a power of two."""
        # The bias of token 1 is the slope itself: transformers has no function for slopes alone.
        return build_alibi_tensor(torch.ones(1, 2), self.num_heads, torch.float32)[:, 0, 1].tolist()

    def forward(
        self,
        hidden_states,
        residual,
        alibi,
        attention_mask,
        layer_past=None,
        **kwargs,
    ) -> Any:
        """As the stock class."""
        queries, keys, values = self._reshape(self.query_key_value(hidden_states))
        # The decoder makes it [batch * head, 1, key].
        bias = None if alibi is None else alibi.view(len(queries), self.num_heads, 1, -1)
        rate = self.attention_dropout.p
        attended, weights = self.attend(
            queries, keys, values, attention_mask, rate, layer_past, bias
        )
        output = nn.functional.dropout(self.dense(attended), self.hidden_dropout, self.training)
        return output if residual is None else residual + output, weights


class InterfaceFalcon(InterfaceAttention, FalconAttention):
    """Falcon's attention, with rotation, through the interface."""

    @property
    def num_key_value_groups(self) -> int:
        """Number of heads that share a key; the newer architecture repeats its keys."""
        return 1 if self.new_decoder_architecture else self.num_heads // self.num_kv_heads

    def forward(
        self,
        hidden_states,
        alibi,
        attention_mask,
        layer_past=None,
        position_embeddings=None,
        **kwargs,
    ) -> Any:
        """As the stock class."""
        queries, keys, values = (
            part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states))
        )
        queries, keys = turned_halves(queries, keys, *position_embeddings)
        rate = self.attention_dropout.p
        attended, weights = self.attend(queries, keys, values, attention_mask, rate, layer_past)
        return self.dense(attended), weights


class InterfaceGPTJ(InterfaceAttention, GPTJAttention):
    """GPT-J's attention through the interface, rotated by tables from the rotary module."""

    num_key_value_groups = 1

    def forward(
        self,
        hidden_states,
        layer_past=None,
        attention_mask=None,
        position_embeddings=None,
        cache=None,
        **kwargs,
    ) -> Any:
        """As the stock class."""
        projected = (part(hidden_states) for part in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (
            part.unflatten(-1, (self.num_attention_heads, self.head_dim)) for part in projected
        )
        cosines, sines = (table.to(keys.dtype) for table in position_embeddings)
        # GPT-J turns the first rotary_dim entries of a head only.
        turning = 2 * cosines.shape[-1]
        queries, keys = (
            torch.cat(
                [turned_neighbours(part[..., :turning], sines, cosines), part[..., turning:]], -1
            )
            for part in (queries, keys)
        )
        queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
        # transformers renamed `layer_past` in 5.24
        cache = layer_past if cache is None else cache
        attended, weights = self.attend(
            queries, keys, values, attention_mask, self.config.attn_pdrop, cache
        )
        return self.resid_dropout(self.out_proj(attended)), weights


class InterfaceMpt(SlopedAttention, MptAttention):
    """MPT's attention through the interface; `attention_mask` is True where a key is seen."""

    @property
    def slopes(self) -> list[float]:
        """Slopes of the heads."""
        # In a bias for two tokens, key 0 has distance 1, so its entry is minus the slope.
        return (-build_mpt_alibi_tensor(self.n_heads, 2)[:, 0, 0]).tolist()

    def forward(
        self,
        hidden_states,
        position_bias,
        past_key_values=None,
        attention_mask=None,
        **kwargs,
    ) -> Any:
        """As the stock class."""
        projected = self.Wqkv(hidden_states)
        if self.clip_qkv:
            projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        queries, keys, values = (
            part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)
            for part in projected.chunk(3, dim=-1)
        )
        # The decoder's bias is for its longest prompt and ends at the current token.
        bias = None if position_bias is None else position_bias[None]
        rate = self.attn_dropout_p
        attended, weights = self.attend(
            queries, keys, values, attention_mask, rate, past_key_values, bias
        )
        return self.out_proj(attended), weights


class GPTJRotary(nn.Module):
    """The sines of GPT-J as tables [batch, token, pair], for all its layers."""

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        """Make tables for a GPT-J with this configuration."""
        super().__init__()
        width = config.rotary_dim or config.hidden_size
        exponents = torch.arange(0, width, 2, dtype=torch.int64) / width
        self.register_buffer("inv_freq", 1.0 / 10000**exponents, persistent=False)

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        return angles.cos(), angles.sin()


INTERFACE_CLASSES: dict[type, type] = {
    BloomAttention: InterfaceBloom,
    FalconAttention: InterfaceFalcon,
    GPTJAttention: InterfaceGPTJ,
    MptAttention: InterfaceMpt,
}
"""Our subclasses, by stock class."""
_ROTARY = "rotary_of_repo_interp"


def use_interface(decoder: Any) -> None:
    """Let attention modules that compute attention themselves call the attention interface.

    Args:
        decoder: Model of Hugging Face without its unembedding.

    Raises:
        InputError: A Falcon adds to its logits (ALiBi).
    """
    if decoder.config.model_type == "falcon":
        require_family(decoder.config)
    modules = [module for module in decoder.modules() if type(module) in INTERFACE_CLASSES]
    for module in modules:
        # The class changes, not the module, so the user's weights, hooks, adapters and names stay.
        module.__class__ = INTERFACE_CLASSES[type(module)]
        module.config = decoder.config
        if isinstance(module, InterfaceMpt):
            module.register_forward_pre_hook(_seen_mask, with_kwargs=True)
    if modules and isinstance(modules[0], InterfaceGPTJ):
        rotary = GPTJRotary(decoder.config).to(next(decoder.buffers()).device)
        decoder.add_module(_ROTARY, rotary)

        def hand_on(
            module: nn.Module, arguments: tuple, keywords: dict[str, Any]
        ) -> tuple[tuple, dict[str, Any]]:
            # transformers from 5.24 on gives tables too, sines first
            return arguments, keywords | {
                TABLES: rotary(
                    arguments[0] if arguments else keywords["hidden_states"],
                    keywords["position_ids"],
                )
            }

        for module in modules:
            module.register_forward_pre_hook(hand_on, with_kwargs=True)


def _seen_mask(
    module: nn.Module, arguments: tuple, keywords: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Invert the mask of MPT's decoder, which is True for hidden keys; other code marks seen keys."""
    mask = keywords.get("attention_mask")
    return arguments, keywords | ({} if mask is None else {"attention_mask": ~mask})
