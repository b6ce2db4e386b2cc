"""Facts of a decoder from its configuration: whether it opens, which layers rotate, its lengths.

Nothing here is needed to open a family: how a layer rotates is measured on its module
(`rotation_probe`), and a family that follows the interfaces of transformers opens without a line of
code. The tables below name families that measurement would refuse, so that they are refused before
weights are read, and facts that configurations leave to classes. Reads no weights, builds no model
and loads no torch: a `config` is a configuration of transformers or any object with the same
attributes.
"""

from __future__ import annotations

import difflib
from typing import Any

from repo_interp.checkpoint_files.transformers_source import decoders, rope_types
from repo_interp.errors import InputError
from repo_interp.positions.layouts import NO_ATTENTION
from repo_interp.storage.records import abbreviate

# transformers lists these as causal models, since a setting (is_decoder) makes decoders of them.
_ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
    "xlm",
    "xlnet",
    "reformer",
)
# transformers lists them for the decoder half, which runs alone but was trained with an encoder.
_ENCODER_DECODERS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "mvp",
    "pegasus",
    "plbart",
    "prophetnet",
    "trocr",
    "whisper",
    "musicgen",
    "musicgen_melody",
    "git",
)
_ONE_MODULE_FOR_MANY_LAYERS = ("hrm_text", "zamba", "zamba2")
_DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")
_OWN_TABLES = ("moshi", "recurrent_gemma")
_NORM_AFTER = ("hunyuan_v1_dense", "hunyuan_v1_moe")
_WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
_OWN_ATTENTION = (
    "codegen",
    "cpmant",
    "ctrl",
    "gpt_neo",
    "gpt_neox_japanese",
    "openai-gpt",
    "xglm",
)
REASONS = {
    **dict.fromkeys(_ENCODERS, "is an encoder, which sees later tokens too; wanted a decoder"),
    **dict.fromkeys(_ENCODER_DECODERS, "attends to an encoder too; wanted a decoder alone"),
    **dict.fromkeys(
        _DRAFTS, "drafts tokens for another model, whose keys it reads; gemma4_text is supported"
    ),
    **dict.fromkeys(
        _OWN_TABLES,
        "makes its tables inside its attention, where they cannot be exchanged; gemma2 is "
        "supported",
    ),
    **dict.fromkeys(
        _NORM_AFTER,
        "has a norm with gains after the rotation, so positions cannot be exchanged; qwen3 "
        "is supported",
    ),
    "deepseek_v4": "attends to keys that stand for several tokens, which have no position of "
    "their own; deepseek_v32 is supported",
    "inkling2_text": "makes keys, values and queries of different states; inkling_text is "
    "supported",
    **dict.fromkeys(
        ("aya_vision", "cohere2_vision"),
        "scales its logits otherwise than its text part does alone",
    ),
    **dict.fromkeys(
        ("blip-2", "instructblip", "instructblipvideo"),
        "reads an image with every text, so its text part never runs alone",
    ),
    "emu3": "has a text part that transformers makes no causal language model of by itself; "
    "llama is supported",
    "mllama": "has layers of text that attend to images; llama4 is supported",
    "paligemma": "attends to later tokens of a prompt too; gemma3 is supported",
    "blt": "reads bytes in patches, by an encoder and a decoder of its own; wanted a decoder "
    "of tokens, such as llama",
    "diffllama": "subtracts two patterns of attention, so one pattern does not explain its "
    "output; llama is supported",
    **dict.fromkeys(
        _ONE_MODULE_FOR_MANY_LAYERS,
        "runs one attention module several times in a pass, so its layers cannot be kept "
        "apart; bamba is supported",
    ),
    **dict.fromkeys(
        _WITHOUT_ATTENTION, "has no attention, so its tokens have no positions to see or to change"
    ),
    **dict.fromkeys(
        _OWN_ATTENTION,
        "computes attention itself instead of calling the attention interface of "
        "transformers, so it cannot be observed; gpt_neox, gptj "
        "and bloom are supported",
    ),
}
"""Why families that transformers lists as decoders are refused, by `model_type`."""

# Some families count a feed-forward block as a layer (Nemotron-H), so these are listed too.
_WITHOUT_ATTENTION_TYPES = ("linear_attention", "conv", "moe", "mamba", "recurrent", "mlp")
"""Types of layers, as configurations name them, that have no attention."""
_NAMED_LAYERS = ("layer_types", "layers_block_type")
_HONOURS_NO_ROPE_LAYERS = ("smollm3", "llama4_text")
"""Families whose modules read `no_rope_layers` (1: rotates); others, such as Llama, ignore the key.
"""
_FULL_LAYERS_DO_NOT_ROTATE = (
    *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"),
)
"""Families whose layers with full attention have no rotation; sliding ones have."""
_WINDOWLESS_ROTATE = ("exaone4", "exaone_moe", "kolibri1")
"""Those of these families that rotate in all layers if they have no window."""
_TYPE_ROTATES = ("granitemoehybrid",)
"""Families that rotate only if their `position_embedding_type` is "rope"."""
_DO_NOT_ROTATE = ("inkling_text", "jamba", "kimi_linear", "nemotron_h")
"""Families without positions: their other layers, or a relative bias, order tokens."""
_SLOPES = ("bloom", "mpt")
"""Families that add a slope per head times the distance to their logits."""
_MPT = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "qk_ln": False,
    "prefix_lm": False,
}
"""Options of MPT's attention, with the values that transformers uses for any config.json."""
_LEARNED_AT_INPUT = ("biogpt", "gpt-sw3", "gpt2", "gpt_bigcode", "opt")
"""Families that add a learned vector per position to the token embeddings."""
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)


def class_name(family: str) -> str:
    """Return the class of a decoder, as transformers and TransformerLens call it.

    Args:
        family: The `model_type`.

    Returns:
        Name of the class, such as LlamaForCausalLM.
    """
    return decoders()[family]


def refusal(family: Any) -> str | None:
    """Explain why decoders of a family cannot be opened.

    Args:
        family: The `model_type` that config.json states; may be anything.

    Returns:
        The reason; None if nothing is known against the family.
    """
    # The value may be any JSON: a list would fail in the lookup below.
    if not isinstance(family, str):
        return f"model_type is {abbreviate(family)}; wanted the name of a decoder, such as llama or qwen3"
    if family not in decoders():
        near = difflib.get_close_matches(family, decoders(), 3, 0.5)
        meant = (
            f"; nearest by name: {', '.join(near)}"
            if near
            else "; wanted a decoder, such as llama or qwen3"
        )
        return f"model_type {str(family)[:80]!r} is no causal language model of transformers{meant}"
    return (
        f"model_type {family!r} cannot be opened: it {REASONS[family]}"
        if family in REASONS
        else None
    )


def require_family(config: Any) -> None:
    """Refuse a configuration whose decoder cannot be opened.

    Args:
        config: Configuration of transformers, or any object with the same attributes.

    Raises:
        InputError: The family, a part of it or its rotation is not supported.
    """
    reason = refusal(config.model_type)
    if reason is not None:
        raise InputError(reason)
    part = getattr(config, "text_config", None)
    if part is not None:
        # A part may be of a family that is refused itself; then it is no advice.
        text = part.model_type
        opens = text in decoders() and refusal(text) is None
        nearest = (
            f"ri.load opens its text part, type {text!r}"
            if opens
            else "wanted a decoder of text alone, such as llama"
        )
        raise InputError(
            f"model_type {config.model_type!r} cannot be opened: its decoder is one part of "
            f"a larger model; {nearest}"
        )
    if config.model_type == "falcon" and config.alibi:
        raise InputError(
            "a Falcon with ALiBi scales its added logits, which is not supported; a Falcon that "
            "rotates is"
        )
    if config.model_type == "mpt":
        # A dict in JSON that was read lightly, an object in transformers' class
        stated = config.attn_config
        stated = stated if isinstance(stated, dict) else vars(stated)
        for name, computed in _MPT.items():
            # A key that is absent means the value that transformers computes with anyway.
            if stated.get(name, computed) != computed:
                raise InputError(
                    f"this MPT has {name} = {abbreviate(stated[name])} in attn_config, and "
                    f"transformers computes every MPT with {computed}, so its logits would be "
                    "wrong; wanted an MPT with that value"
                )
    # Gemma 4's images alone
    if getattr(config, "use_bidirectional_attention", False) not in (False, None, "vision"):
        raise InputError(
            f"this {config.model_type} decoder attends to later tokens "
            "(use_bidirectional_attention); wanted a causal one"
        )
    # A kind that transformers lacks would fail at the model's first layer, as a KeyError.
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind not in (known := sorted(("default", *rope_types()))):
            raise InputError(f"there is no rope_type {kind!r}; wanted one of {', '.join(known)}")


def native_layout(config: Any) -> tuple[str, ...]:
    """Return the schemes of the stock decoder, as far as its configuration states them.

    A loaded model has the layout that was measured on its modules.

    Args:
        config: Configuration of a decoder.

    Returns:
        Scheme by layer: `rope`, `nope`, `learned`, `alibi`, or `-` without attention.
    """
    family, layers = config.model_type, config.num_hidden_layers
    # Families name the kinds of layers under two keys; without either all layers are alike.
    kinds = (
        next((kinds for name in _NAMED_LAYERS if (kinds := getattr(config, name, None))), None)
        or ["attention"] * layers
    )
    rotates = [family not in (*_DO_NOT_ROTATE, *_LEARNED_AT_INPUT, *_SLOPES)] * layers
    if family in _HONOURS_NO_ROPE_LAYERS and getattr(config, "no_rope_layers", None):
        # The key is 1 for a layer that rotates, despite its name.
        rotates = [bool(turns) for turns in config.no_rope_layers]
    windowless = family in _WINDOWLESS_ROTATE and config.sliding_window is None
    if family in _FULL_LAYERS_DO_NOT_ROTATE and not windowless:
        rotates = [kind != "full_attention" for kind in kinds]
    if family in _TYPE_ROTATES and config.position_embedding_type != "rope":
        rotates = [False] * layers
    parameters = getattr(config, "rope_parameters", None) or {}
    rotates = [
        # null instead of parameters: layers of this type do not rotate.
        turns and parameters.get(kind, {}) is not None
        for turns, kind in zip(rotates, kinds, strict=True)
    ]
    if thetas := getattr(config, "layer_rope_theta", None):  # Granite
        rotates = [turns and theta != 0 for turns, theta in zip(rotates, thetas, strict=True)]
    if (attending := getattr(config, "attn_layer_indices", None)) is not None:  # Bamba
        kinds = ["attention" if layer in attending else "mamba" for layer in range(layers)]
    attends = [kind not in _WITHOUT_ATTENTION_TYPES for kind in kinds]
    # The scheme of layers that attend without rotation
    still = "learned" if family in _LEARNED_AT_INPUT else "alibi" if family in _SLOPES else "nope"
    return tuple(
        ("rope" if turns else still) if sees else NO_ATTENTION
        for turns, sees in zip(rotates, attends, strict=True)
    )


def key_value_heads(config: Any) -> int:
    """Return how many heads of keys and values a layer has.

    Args:
        config: Configuration of a decoder.

    Returns:
        Their number; that of all heads in families without grouped heads.
    """
    # Falcon's newer architecture ignores the switch.
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1
    stated = (getattr(config, name, None) for name in ("num_key_value_heads", "num_kv_heads"))
    return next(filter(None, stated), config.num_attention_heads)


def training_length(config: Any) -> int:
    """Return the longest prompts of training, before any scaling of frequencies.

    Args:
        config: Configuration of a decoder.

    Returns:
        Length in tokens.

    Raises:
        InputError: The configuration does not state it.
    """
    # Before scaling: max_position_embeddings of a scaled model is its length afterwards.
    lengths = [p.get("original_max_position_embeddings") for p in _rope_parameters(config)]
    known = [length for length in lengths if length]
    known = known or [
        length for name in LENGTHS if isinstance(length := getattr(config, name, None), int)
    ]
    if not known:
        raise InputError(
            f"the {config.model_type} configuration does not say how long its training "
            f"prompts were ({LENGTHS[0]})"
        )
    # Types of layers may state different lengths, and no prompt should exceed any of them.
    return int(min(known))


def _rope_parameters(config: Any) -> list[dict]:
    parameters = getattr(config, "rope_parameters", None) or {}
    # Parameters by type of layer where there are such, else one set for all layers
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_layer_type or [parameters]


def tied_parameters(model: Any) -> tuple[str, ...]:
    """Name the embedding and unembedding that the configuration ties.

    Args:
        model: A decoder.

    Returns:
        Both names; empty if they are not tied.
    """
    tied = model._tied_weights_keys if getattr(model.config, "tie_word_embeddings", False) else None
    return next(((embedding, unembedding) for unembedding, embedding in (tied or {}).items()), ())
