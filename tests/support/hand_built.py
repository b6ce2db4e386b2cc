"""A decoder whose heads are built by hand, so that what each of them does is known: layers RoPE,
NoPE and RePo of four heads.

    layer 0 (rope)   H0 attends to the previous token, and writes which token that is        H1 - H3 nothing: equal weights
    layer 1 (nope)   H0 induction, and writes the token that it finds; H1 duplicate token; H2 sink             H3 nothing
    layer 2 (repo)   every head attends to its own token and earlier copies; f_phi gives 0 everywhere

Hidden states: dimension 0 is 1, dimension 1 marks <bos>, then a code of the token, then - from
layer 1 on - the code of the one before, then - from layer 2 on - that of the token to be said,
which is all that the unembedding reads.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import repo_interp as ri
from repo_interp.models.attention import scheme_of

HEADS, CODE = 4, 32
TOKEN, BEFORE, SAID = (slice(2 + part * CODE, 2 + (part + 1) * CODE) for part in range(3))
BOS = 1
SHARP = 6.0


def hand_built(vocabulary: int, length: int) -> nn.Module:
    """The bridge of the decoder, for tokens 0 .. vocabulary - 1 and prompts of `length` tokens."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HEADS * CODE,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=BOS,
    )
    generator = torch.Generator().manual_seed(0)
    model = ri.reposition(
        AutoModelForCausalLM.from_config(config).eval(), "rope,nope,repo", assignment="head"
    )
    codes = torch.nn.functional.normalize(
        torch.randn(vocabulary, CODE, generator=generator), dim=-1
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        embedding = model.model.embed_tokens.weight
        embedding[:, 0], embedding[BOS, 1], embedding[:, TOKEN] = 1.0, 1.0, codes
        model.lm_head.weight[:, SAID] = codes
        attention = [layer.self_attn for layer in model.model.layers]
        _previous_token(attention[0])
        copies = SHARP * torch.eye(CODE)
        # induction: the token's code meets that of the token before a key
        _of_head(attention[1].q_proj, 0, TOKEN, copies)
        _of_head(attention[1].k_proj, 0, BEFORE, copies)
        _of_head(attention[1].v_proj, 0, TOKEN, torch.eye(CODE))
        attention[1].o_proj.weight[SAID, :CODE] = torch.eye(CODE)
        _of_head(attention[1].q_proj, 1, TOKEN, copies)
        _of_head(attention[1].k_proj, 1, TOKEN, copies)
        _of_head(attention[1].q_proj, 2, slice(0, 1), SHARP * torch.ones(CODE, 1))
        _of_head(attention[1].k_proj, 2, slice(1, 2), SHARP * torch.ones(CODE, 1))
        for head in range(HEADS):
            _of_head(attention[2].q_proj, head, TOKEN, copies / 2)
            _of_head(attention[2].k_proj, head, TOKEN, copies / 2)
    return ri.bridge(model)


def _previous_token(attention: nn.Module) -> None:
    """Queries and keys that are the same for all tokens, the query turned back by one position: the
    logit is largest at distance 1.
    """
    angles = scheme_of(attention).frequencies
    flat = torch.cat([torch.ones(CODE // 2), torch.zeros(CODE // 2)])
    back = torch.cat([torch.cos(angles), -torch.sin(angles)])
    _of_head(attention.q_proj, 0, slice(0, 1), SHARP * back[:, None])
    _of_head(attention.k_proj, 0, slice(0, 1), SHARP * flat[:, None])
    _of_head(attention.v_proj, 0, TOKEN, torch.eye(CODE))
    attention.o_proj.weight[BEFORE, :CODE] = torch.eye(CODE)


def _of_head(projection: nn.Module, head: int, read: slice, weights: torch.Tensor) -> None:
    projection.weight[head * CODE : (head + 1) * CODE, read] = weights
