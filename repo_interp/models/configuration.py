"""What config.json says: which of three formats, which decoder, which position scheme in every layer. Reads no weights.

    released        `pe_config`, written by the RePo authors (`released`)
    repo_interp     `position_layout`, model_type "repo_interp", and a text in place of the number of layers (`COUNTED`)
    hugging face    a stock decoder

A model that `reposition` changed has a configuration that is written in our format, whoever saves it (`repositioned_class`). A class of
another library would take every other key and run plain RoPE; a number of layers that is no number makes it fail.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from repo_interp.errors import InputError, one_line, warn
from repo_interp.models.architectures import LENGTHS, class_name, native_layout, refusal, require_family
from repo_interp.models.directories import directory_of
from repo_interp.models.fields import LAYER_TYPES, Base, Fields
from repo_interp.models.released import released_layout
from repo_interp.models.schemes import scheme_options
from repo_interp.positions.layouts import NO_ATTENTION, scheme_names
from repo_interp.records import modelled, read_json, shown
from repo_interp.shipped import shipped_directories

OURS = "repo_interp"
HUGGING_FACE = "hugging face"
COUNTED = "one for each scheme of position_layout; load it with repo_interp, since no other class has its positions"
"""What config.json of our format has as num_hidden_layers: no class of another library can be built with it."""
_OF_OURS = ("pe_config", "position_layout", "base_model_type", "adapter")
"""Keys of config.json that are not the plain decoder's."""


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds, known without reading its weights."""

    directory: Path
    format: str
    """"released", "repo_interp" or "hugging face"."""
    config: PretrainedConfig
    layout: tuple[str, ...]
    """The scheme of every layer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Choices within schemes, as `reposition` takes them."""
    base: Base | None = None
    """What an adapter stands on; None for a whole checkpoint."""
    lacks: str = ""
    """The numbers of `_defaults` that config.json leaves to transformers, in words; empty where it says them all."""


def identify(path: str | os.PathLike[str], **hub: Any) -> Checkpoint:
    """The checkpoint at `path`: a directory, the name of a checkpoint of the zoo, or a hub id (fetched with the options `hub`).

    Raises InputError where none can be read. A name of the zoo is never looked for on the hub. The numbers of `_defaults`, which
    config.json leaves to transformers, are told by a warning, a Note.
    """
    directory = directory_of(path, hub)
    raw = stated(directory)
    if isinstance(raw.get("model_type"), str) and raw["model_type"] != OURS and refusal(raw["model_type"]):
        _configuration(raw, directory)  # refuses the family, whose other keys may mean something else
    base = modelled(raw, Fields, str(directory / "config.json")).adapter
    config = _configuration(raw, directory)
    require_family(config)
    layers = config.num_hidden_layers
    if raw.get("pe_config") is not None:
        checkpoint = Checkpoint(directory, "released", config, released_layout(raw["pe_config"], layers), base=base)
    elif "position_layout" in raw or raw.get("model_type") == OURS:
        checkpoint = Checkpoint(directory, OURS, config, *own_layout(raw, layers, str(directory / "config.json")), base)
    else:
        checkpoint = Checkpoint(directory, "hugging face", config, native_layout(config), base=base)
    if defaults := _defaults(raw, config):
        taken = ", ".join(f"{name} ({number:,.15g} is taken)" for name, number in defaults.items())
        lacks = f"lacks {taken}: transformers' default for {config.model_type}; add the key if the model was trained with another"
        warn(f"{directory / 'config.json'} {lacks}")
        checkpoint = replace(checkpoint, lacks=lacks)
    return checkpoint


def tokens_of(directory: Path) -> Path:
    """The directory with the tokenizer of the checkpoint in `directory`: that of its base for an adapter. Raises InputError for no base.

    A checkpoint that ships as TASK/NAME or TASK/NAME/seed-N and has none of its own shares that of TASK.
    """
    file = directory / "config.json"
    base = modelled(stated(directory), Fields, str(file)).adapter if file.is_file() else None
    if base is not None:
        return identify_base(directory, base).directory
    if any(directory.glob("tokenizer*")):
        return directory
    roots = {root.resolve() for root in shipped_directories()}
    shared = (above for above in directory.resolve().parents[:2] if roots & set(above.parents))
    return next((above for above in shared if (above / "tokenizer.json").is_file()), directory)


def identify_base(adapter: Path, base: Base) -> Checkpoint:
    """The checkpoint `base` that the adapter in a directory names. Raises InputError that says so where it is not there."""
    try:
        return identify(base.name)
    except InputError as error:
        raise InputError(f"{adapter} is an adapter on top of {base.name}: {error}") from None


def stated(directory: Path) -> dict[str, Any]:
    """What config.json in `directory` says, its number of layers as a number. Raises InputError when there is none."""
    file = directory / "config.json"
    return _counted(json_object(file), str(file))


def _counted(raw: dict[str, Any], source: str) -> dict[str, Any]:
    if raw.get("num_hidden_layers") != COUNTED:
        return raw
    named = raw.get("position_layout")
    layers = named.get("layers") if isinstance(named, Mapping) else None
    if not isinstance(layers, list) or not layers:
        raise InputError(f"{source}: position_layout is {shown(named)}; wanted one known scheme for each layer")
    return raw | {"num_hidden_layers": len(layers)}


def digested(directory: Path) -> bytes:
    """config.json as digests of checkpoints have it: with the number of layers in the place of `COUNTED`, as it once was written."""
    file = directory / "config.json"
    content, marker = file.read_bytes(), json.dumps(COUNTED).encode()
    return content if marker not in content else content.replace(marker, str(stated(directory)["num_hidden_layers"]).encode())


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises InputError when there is none."""
    raw = read_json(file, "a checkpoint directory as save_pretrained writes it")
    if not isinstance(raw, dict):
        raise InputError(f"{file} holds {shown(raw)}; wanted an object")
    return raw


def scaled_configuration(config: PretrainedConfig, rope_scaling: Mapping[str, Any]) -> PretrainedConfig:
    """`config` with its rotation scaled otherwise; the base frequency (rope_theta) stays unless given."""
    if not isinstance(rope_scaling, Mapping):
        raise InputError(f"rope_scaling is {rope_scaling!r}; wanted a table such as {{'rope_type': 'yarn', 'factor': 2.0}}")
    raw = config.to_dict()
    base = raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in base.values()):
        raise InputError(f"{config.model_type} scales each kind of layer by itself; rope_scaling cannot be exchanged for it")
    parameters = {"rope_theta": base.get("rope_theta"), **rope_scaling}
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    if "rope_type" not in parameters:
        raise InputError(
            f"rope_scaling is {shown(dict(rope_scaling))}; wanted a rope_type, such as yarn or linear, beside the factor"
        )
    raw["rope_parameters"] = parameters
    scaled = configured(raw, "rope_scaling")
    require_family(scaled)
    return scaled


class RepositionedConfig(PretrainedConfig):
    """What `AutoConfig` reads config.json of our format with; it gives the configuration of the decoder inside, with its layout."""

    model_type = OURS

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of the decoder and its layout. Raises InputError where it describes none."""
        raw = _counted({key: value for key, value in config_dict.items() if not key.startswith("_")}, "config.json")
        layers, options = own_layout(raw, int(raw.get("num_hidden_layers", 0)), "config.json")
        return_unused = kwargs.pop("return_unused_kwargs", False)
        config = _configuration(raw, Path())
        config.name_or_path = kwargs.pop("name_or_path", "")
        for name in [name for name in kwargs if name in raw or name.startswith("_")]:
            value = kwargs.pop(name)
            if name in raw:
                setattr(config, name, value)
        require_family(config)
        repositioned(config, layers, options)
        return (config, kwargs) if return_unused else config


def repositioned(config: PretrainedConfig, schemes: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Make `config`, in place, the configuration of a repositioned decoder: it is written in our format from now on."""
    config.__class__ = repositioned_class(config.model_type)
    config.position_layout = {"layers": list(schemes), **options}


def written_configuration(decoder: Any) -> dict[str, Any]:
    """What config.json says of a repositioned model."""
    dtype = str(decoder.dtype).removeprefix("torch.")
    config = decoder.config.to_dict() | {"dtype": dtype, "architectures": [class_name(decoder.config.model_type)]}
    config.pop("_name_or_path", None)
    return config


def plain(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config` as the stock decoder's own, without a layout."""
    stock = copy.deepcopy(config)
    stock.__class__ = CONFIG_MAPPING[config.model_type]
    stock.__dict__.pop("position_layout", None)
    return stock


def own_layout_of(config: PretrainedConfig) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The scheme of every layer of a repositioned model's configuration, and its options."""
    return own_layout({"position_layout": config.position_layout}, config.num_hidden_layers, "the configuration")


REGISTER: list[Callable[[type[PretrainedConfig]], None]] = []
"""Called with every class that `repositioned_class` makes: `checkpoints` gives it to Auto classes."""


@cache
def repositioned_class(family: str) -> type[PretrainedConfig]:
    """The family's configuration class, but for how it is written: as ours, unless the layout is the stock decoder's own."""
    stock = CONFIG_MAPPING[family]

    def to_dict(self: PretrainedConfig) -> dict[str, Any]:
        raw = stock.to_dict(self)
        given = raw.get("position_layout") or {"layers": native_layout(self)}
        if tuple(given["layers"]) == native_layout(self):
            raw.pop("position_layout", None)
            return raw
        return raw | {"model_type": OURS, "base_model_type": family, "num_hidden_layers": COUNTED}

    name = f"Repositioned{stock.__name__}"
    made = type(name, (stock,), {"to_dict": to_dict, "__module__": __name__, "__doc__": f"{stock.__name__} with a layout."})
    for register in REGISTER:
        register(made)
    return made


def __getattr__(name: str) -> Any:
    """The class that `repositioned_class` made, by its name: configurations are unpickled with it."""
    stock = name.removeprefix("Repositioned")
    families = [family for family, kind in CONFIG_MAPPING_NAMES.items() if kind == stock and stock != name]
    if families:
        return repositioned_class(families[0])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _configuration(raw: Mapping[str, Any], directory: Path) -> PretrainedConfig:
    """The plain decoder's configuration."""
    source = directory / "config.json"
    plain = {key: value for key, value in raw.items() if key not in _OF_OURS}
    if raw.get("model_type") == OURS:
        plain["model_type"] = raw.get("base_model_type")
    reason = refusal(plain.get("model_type"))
    if reason is not None:
        raise InputError(f"{source}: {reason}")
    if "transformers_weights" in plain:
        raise InputError(f"{source} names other weights (transformers_weights); wanted model.safetensors beside it")
    return configured(plain, str(source))


def configured(raw: Mapping[str, Any], source: str) -> PretrainedConfig:
    """The Hugging Face configuration of `raw`. Raises InputError, naming `source`, where it describes no decoder."""
    modelled(raw, Fields, source)
    try:
        raw = dict(PretrainedConfig._decode_special_floats(copy.deepcopy(dict(raw))))  # transformers writes into it
        layers = raw.get("num_hidden_layers")
        for name in ("layer_types", "no_rope_layers"):
            if layers is not None and raw.get(name) is not None and len(raw[name]) != layers:
                raise ValueError(f"{name} names {len(raw[name])} layers; the model has {layers}")
        family = raw.pop("model_type")
        config = AutoConfig.for_model(family, **raw)
        kinds = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
        if kinds and not hasattr(CONFIG_MAPPING[family](), "layer_types"):
            raise ValueError(f"layer_types has {shown(kinds[0])}, and every layer of a {family} is the same; leave it out")
        if "sliding_attention" in kinds and config.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, and no sliding_window says how far such a layer sees; add it")
        modelled({name: value for name, value in config.to_dict().items() if name in Fields.model_fields}, Fields, source)
        heads, width = config.num_attention_heads, config.hidden_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} key-value heads")
        latent = hasattr(config, "qk_rope_head_dim")
        if not raw.get("head_dim") and not latent and (width % heads or width // heads % 2):
            raise ValueError(f"a width of {width} does not split into {heads} heads of even width")
        for name, theta in _thetas(config).items():
            if theta is None:
                raise ValueError(f"its {name} is null; give a number, or leave the key out")
        padding = getattr(config, "pad_token_id", None)
        if padding is not None and padding >= config.vocab_size:
            raise ValueError(f"pad_token_id {padding} is beyond the vocabulary of {config.vocab_size}")
        return config
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{source} describes no decoder: {one_line(error)}") from None


def _thetas(config: PretrainedConfig) -> dict[str, float | None]:
    """The base frequency of every type of layers that the model has, by its name."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters:
        return {}
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        return {"rope_theta": parameters.get("rope_theta")}
    kinds = [kind for kind in dict.fromkeys(config.layer_types) if kind in parameters or kind in LAYER_TYPES]
    given = {kind: parameters.get(kind, {}) for kind in kinds}  # null: a type of layers that does not rotate
    return {f"rope_theta of {kind}": each.get("rope_theta") for kind, each in given.items() if each is not None}


def _defaults(raw: Mapping[str, Any], config: PretrainedConfig) -> dict[str, float]:
    """The numbers of `config`, by name, that decide how it rotates and how long its prompts were, and that `raw` does not say."""
    said = [raw, *(raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))]
    said += [value for parameters in said[1:] for value in parameters.values() if isinstance(value, Mapping)]
    thetas = {each.get(name) for each in said for name in ("rope_theta", "rope_local_base_freq")}
    defaults = {name: theta for name, theta in _thetas(config).items() if theta is not None and theta not in thetas}
    if not set(LENGTHS) & raw.keys() and hasattr(config, "max_position_embeddings"):
        defaults["max_position_embeddings"] = config.max_position_embeddings
    return defaults


def own_layout(raw: Mapping[str, Any], layers: int, source: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The scheme of every layer and the options of `position_layout`. Raises InputError, naming `source`, for unknown ones."""
    stored = raw.get("position_layout")
    options = dict(stored) if isinstance(stored, Mapping) else {}
    schemes = options.pop("layers", None)
    if (
        not isinstance(schemes, list)
        or len(schemes) != layers
        or not all(scheme in (*scheme_names(), NO_ATTENTION) for scheme in schemes)
    ):
        raise InputError(f"{source}: position_layout is {stored!r}; wanted one known scheme for each of {layers} layers")
    try:
        scheme_options(options)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return tuple(schemes), options
