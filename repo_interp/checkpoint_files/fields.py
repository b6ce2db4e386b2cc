"""Types and ranges of the keys of config.json and generation_config.json, as pydantic models.

Other keys pass unchecked. Beyond the upper ends a model would not fit any machine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Interval, MaxLen, MinLen, MultipleOf
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from repo_interp.checkpoint_files.transformers_source import activations, layer_types
from repo_interp.values import shortened

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Precisions that weights are stored and loaded in."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of layers by the tokens that they see."""


def _activation(name: str) -> str:
    # In a validator rather than a Literal: the list is read from transformers' source when needed.
    if name not in activations():
        raise ValueError(
            f"there is no activation {name!r}; wanted one of transformers', such as silu"
        )
    return name


Activation = Annotated[str, AfterValidator(_activation)]
Size = Annotated[int, Interval(ge=1, le=1 << 24)]
Length = Annotated[int, Interval(ge=1, le=1 << 31)]
Factor = Annotated[float, Interval(gt=0, le=1e9)]
Theta = Annotated[float, Interval(gt=0, le=1e15)]
# Some configurations write -1 for a token that they do not have.
OneToken = Annotated[int, Interval(ge=-1, le=1 << 24)]


class _Stated(BaseModel):
    """Keys of a JSON object that are read; others pass unchecked."""

    # strict: the text "8" is no number, and true is no 1; both would pass into torch otherwise.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_SCALED = (*_ROPE, "factor", "original_max_position_embeddings")
_IGNORED = ("finetuned", "max_position_embeddings", "llama_4_scaling_beta")
"""Keys of YaRN's checkpoints that change nothing, or scale queries (Ministral 3)."""
ROPE_KEYS = {
    "default": _ROPE,
    "linear": _SCALED,
    "yarn": (
        *_SCALED,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        *_IGNORED,
    ),
    "llama3": (*_SCALED, "low_freq_factor", "high_freq_factor"),
    "dynamic": (*_SCALED, "attention_factor"),
    "longrope": (
        *_SCALED,
        "attention_factor",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
    ),
}
"""The keys that define the rotation of a decoder, by rope_type."""
OF_FAMILIES = ("llama_4_scaling_beta", "mrope_section", "mrope_interleaved")
"""Keys that a family reads whatever the rope_type: Ministral 3's, and the axes of images' positions.
"""


class Rope(_Stated):
    """The rotation of a decoder: `rope_parameters`, or the older `rope_scaling`.

    A key that the rope_type lacks would change nothing, so it is refused.
    """

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Length | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    mscale: Annotated[float, Interval(ge=0, le=1e9)] | None = None
    """0: not set, here and below."""
    mscale_all_dim: Annotated[float, Interval(ge=0, le=1e9)] | None = None
    truncate: bool | None = None
    partial_rotary_factor: Annotated[float, Interval(gt=0, le=1)] | None = None

    def stated_keys(self) -> dict[str, Any]:
        """Return the stated fields; `type` is the older name of `rope_type`.

        Returns:
            Values by key, without those that are null.
        """
        return self.model_dump(exclude_none=True, exclude={"type"}) | {
            "rope_type": self.rope_type or self.type or "default"
        }

    @model_validator(mode="after")
    def _known(self) -> Rope:
        if None not in (self.rope_type, self.type) and self.rope_type != self.type:
            raise ValueError(
                f"rope_type is {self.rope_type!r} and type {self.type!r}; leave one of them out"
            )
        kind = self.rope_type or self.type or "default"
        # Keys of a pydantic model and others, as both may be out of place for this rope_type
        given = (self.model_extra or {}).keys() | self.model_fields_set
        # Of a rope_type that we do not list every key is taken; `require_family` judges the type.
        known = {*ROPE_KEYS.get(kind, given), *OF_FAMILIES}
        # Keys that no rope_type has come first: they are misspelt rather than misplaced.
        unknown = sorted(given - known, key=lambda key: (key in Rope.model_fields, key))
        if unknown:
            raise ValueError(
                f"rope_type {kind!r} has no key {shortened(unknown[0])!r}; it has "
                f"{', '.join(ROPE_KEYS[kind])}"
            )
        return self


class Released(_Stated):
    """Positions in checkpoints of the RePo authors; `released_layout` finds the layers."""

    dynamic_pe_mode: str = "none"


def _several(tokens: Any) -> Any:
    """One token as a list of one."""
    return tokens if tokens is None or isinstance(tokens, list) else [tokens]


def _by_layer_type(parameters: Any) -> Any:
    """Wrap parameters of all layers as those of one type; ValueError for unknown types."""
    if not isinstance(parameters, dict):
        return parameters
    # Values that are objects are parameters by type of layer, as Gemma 3 and later have them.
    if any(isinstance(value, dict) for value in parameters.values()):
        known = (*LAYER_TYPES, *layer_types())
        unknown = [
            name
            for name, value in parameters.items()
            if isinstance(value, dict) and name not in known
        ]
        if unknown:
            raise ValueError(
                f"there are no layers of type {shortened(unknown[0])!r}; wanted "
                f"{' and '.join(LAYER_TYPES)}"
            )
        return parameters
    # One name for both forms, so that later code sees parameters by type of layer only
    return {"all layers": parameters}


class SpecialTokens(_Stated):
    """Tokens with which texts begin and end, in config.json and generation_config.json."""

    bos_token_id: OneToken | None = None
    eos_token_id: Annotated[list[OneToken] | None, BeforeValidator(_several)] = None
    pad_token_id: OneToken | None = None


class Base(_Stated):
    """The whole checkpoint that an adapter changes."""

    name: Annotated[str, MinLen(1), MaxLen(4096)]
    """Its name, as for `load`."""
    weights_digest: Annotated[str, MinLen(64), MaxLen(64)]
    """SHA-256 over its weight files, in hexadecimal."""


class Fields(SpecialTokens):
    """The keys of config.json that we read, or that decide how much memory a decoder takes."""

    vocab_size: Size = 1
    hidden_size: Size = 1
    intermediate_size: Size | list[Size] | None = 1
    num_hidden_layers: Annotated[int, Interval(ge=1, le=1000)] = 1
    num_attention_heads: Annotated[int, Interval(ge=1, le=65_536)] = 1
    num_key_value_heads: Annotated[int, Interval(ge=1, le=65_536)] | None = None
    # Even, as rotary pairs halve it
    head_dim: Annotated[int, Interval(ge=2, le=65_536), MultipleOf(2)] | None = None
    max_position_embeddings: Length = 1
    sliding_window: Length | None = None
    max_window_layers: Annotated[int, Interval(ge=0, le=1000)] | None = None
    hidden_act: Activation | None = None
    hidden_activation: Activation | None = None
    dtype: Literal[DTYPES] | None = None  # pyright: ignore[reportInvalidTypeForm]
    torch_dtype: Literal[DTYPES] | None = None  # pyright: ignore[reportInvalidTypeForm]
    attn_implementation: Literal["eager", "sdpa"] | None = None
    private_attn_implementation: Literal["eager", "sdpa"] | None = Field(
        None, alias="_attn_implementation"
    )
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    rms_norm_eps: Annotated[float, Interval(ge=0, le=1)] | None = None
    initializer_range: Annotated[float, Interval(ge=0, le=1e3)] | None = None
    query_pre_attn_scalar: Factor | None = None
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None
    rope_theta: Theta | None = None
    rope_local_base_freq: Theta | None = None
    # transformers 5 calls it rope_parameters; files from before have rope_scaling.
    rope_scaling: Rope | None = None
    rope_parameters: Annotated[dict[str, Rope | None] | None, BeforeValidator(_by_layer_type)] = (
        None
    )
    layer_types: list[str] | None = None
    no_rope_layers: list[Annotated[int, Interval(ge=0, le=1)]] | None = None
    use_sliding_window: bool | None = None
    pe_config: Released | None = None
    adapter: Base | None = None

    @model_validator(mode="after")
    def _agree(self) -> Fields:
        """Refuse two keys with different rotations: transformers would use one silently."""
        rotation = (self.rope_parameters or {}).get("all layers")
        stated = rotation.stated_keys() if rotation is not None else {}
        for name, other in (
            # `rope_theta` may be next to the parameters or among them.
            ("rope_theta", {"rope_theta": self.rope_theta}),
            ("rope_scaling", self.rope_scaling and self.rope_scaling.stated_keys()),
        ):
            for key, value in (other or {}).items():
                if value is not None and stated.get(key, value) != value:
                    raise ValueError(
                        f"{name} says {key} {value}, and rope_parameters {stated[key]}; "
                        "leave one of them out"
                    )
        return self

    # Before the fields are read, since 0 is no length of a window
    @model_validator(mode="before")
    @classmethod
    def _unused(cls, stated: Any) -> Any:
        """Read a window of 0 tokens as none where windows are off (Qwen's experts)."""
        if (
            isinstance(stated, dict)
            and stated.get("use_sliding_window") is False
            and stated.get("sliding_window") == 0
        ):
            return {name: value for name, value in stated.items() if name != "sliding_window"}
        return stated
