"""config.json: its format, the decoder, and the position scheme of every layer.

This module reads no weights and loads no torch.

    released        `pe_config`, written by the RePo authors (`released`)
    repo_interp     `position_layout`, written by us (`position_layout`)
    hugging face    a stock decoder

`configuration` makes configurations of transformers from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from repo_interp.checkpoint_files.architectures import (
    LENGTHS,
    REASONS,
    native_layout,
    refusal,
    require_family,
)
from repo_interp.checkpoint_files.directories import directory_of, known_directory
from repo_interp.checkpoint_files.fields import LAYER_TYPES, Base, Fields
from repo_interp.checkpoint_files.position_layout import (
    OURS,
    function_remark,
    read_layout,
    resolve_layers,
)
from repo_interp.checkpoint_files.released import released_layout, released_options
from repo_interp.checkpoint_files.shipped import means_zoo, shipped_directories, zoo_path
from repo_interp.checkpoint_files.stored import stored_digest
from repo_interp.checkpoint_files.transformers_source import class_defaults
from repo_interp.errors import InputError, as_input_errors, one_line, warn
from repo_interp.storage.records import abbreviate, read_json, validate

HUGGING_FACE = "hugging face"
_OF_OURS = ("pe_config", "position_layout", "base_model_type", "adapter")
"""Keys of config.json that are not the plain decoder's."""
_ADAPTER = "adapter_config.json"
_OF_OTHERS = ("return_dict", "torchscript", "quantization_config")
"""Keys that state how a decoder gives its outputs to other programs, or how weights were
stored that are plain numbers now.
"""
PLAIN = ("llama", "olmo2")
"""Families whose configuration is read without transformers; others compute keys in their class."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, known without reading its weights."""

    directory: Path
    format: str
    """"released", "repo_interp" or "hugging face"."""
    config: Any
    """A configuration of transformers; or, of a checkpoint that is inspected, an object with the
    attributes that are read (`light_config`).
    """
    layout: tuple[str, ...]
    """The scheme of every layer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Choices within schemes, as `reposition` takes them."""
    base: Base | None = None
    """The base of an adapter; None for a whole checkpoint."""
    remarks: str = ""
    """Remarks on config.json for the user: the larger model it describes, numbers that it leaves
    to transformers.
    """
    larger: Mapping[str, Any] | None = None
    """config.json of a larger model, such as one that sees images, whose text part is opened; None
    for a decoder alone.
    """


Configure = Callable[[dict[str, Any], str], Any]
"""A configuration of the keys of a plain decoder, whose file is named; `light_config`, or
`configuration.make_config`.
"""


def read_checkpoint(path: str | os.PathLike[str], configure: Configure, **hub: Any) -> Checkpoint:
    """Read the configuration of a checkpoint, without its weights.

    Warns, with a Note, of every one of its `remarks`.

    Args:
        path: Directory, name of a checkpoint of the zoo, or hub id. A name of the zoo is never
            looked for on the hub.
        configure: Makes a configuration of the decoder's keys: `light_config`, or
            `configuration.make_config`.
        **hub: Options of `huggingface_hub.snapshot_download`.

    Returns:
        The checkpoint.

    Raises:
        InputError: There is none, or it describes no decoder that can be opened.
    """
    directory = directory_of(path, hub)
    whole, file = stated(directory), str(directory / "config.json")
    raw = text_keys(whole, file)
    # A message about a key must name the object that holds it.
    source = file if raw is whole else f"{file}, text_config"
    # First, since keys of another family may mean something else
    plain = plain_keys(raw, source)
    base = validate(raw, Fields, source).adapter
    if base is None and (directory / _ADAPTER).is_file():
        # transformers adds it to weights that it converts, and we read the others alone.
        raise InputError(
            f"{directory}: an adapter of peft ({_ADAPTER}) is next to the weights; move it away, "
            "or save what merge_and_unload() of the PeftModel returns"
        )
    config = configure(plain, source)
    require_family(config)
    layers = config.num_hidden_layers
    options: Mapping[str, Any] = {}
    if raw.get("pe_config") is not None and raw.get("position_layout") is not None:
        raise InputError(
            f"{source}: pe_config and position_layout both say which scheme a layer has; "
            "leave one of them out"
        )
    if raw.get("pe_config") is not None:
        form, schemes = "released", released_layout(raw["pe_config"], layers)
        options = released_options(schemes, config.max_position_embeddings)
    elif "position_layout" in raw or raw.get("model_type") == OURS:
        form, (schemes, options) = OURS, read_layout(raw, layers, source)
    else:
        form, schemes = HUGGING_FACE, native_layout(config)
    remarks, larger = [], None if raw is whole else whole
    if larger is not None:
        remarks.append(
            f"describes a {larger['model_type']}; only its text part is opened, a "
            f"{config.model_type}"
        )
    # transformers fills in a default silently, and a wrong base rotates every pair wrongly.
    if defaults := _defaults(raw, config):
        taken = ", ".join(f"{name} ({number:,.15g} is taken)" for name, number in defaults.items())
        remarks.append(
            f"lacks {taken}: transformers' default for {config.model_type}; add the key if "
            "the model was trained with another"
        )
    if form == OURS and (remark := function_remark(raw)):
        remarks.append(remark)
    for remark in remarks:
        warn(f"{file} {remark}")
    # Quantized weights are refused when they are read, by their dtype;
    # the key may be all that is left.
    if isinstance(quantised := whole.get("quantization_config"), Mapping):
        warn(
            f"{source} names a quantisation ({quantised.get('quant_method')}), which its "
            "weights do not have: they are read as they are"
        )
    return Checkpoint(
        directory, form, config, schemes, options, base, "; it ".join(remarks), larger
    )


def text_keys(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the keys of the text part of a larger model, such as one that sees images.

    Args:
        raw: The content of config.json.
        source: The name of that file, for errors.

    Returns:
        `text_config` if there is one, else `raw` itself.

    Raises:
        InputError: The text part is of no family that opens.
    """
    part, family = raw.get("text_config"), raw.get("model_type")
    if not isinstance(part, dict) or family == OURS:
        return raw
    if reason := REASONS.get(str(family)) or refusal(part.get("model_type")):
        because = f"it {reason}" if family in REASONS else f"of its text part, {reason}"
        raise InputError(f"{source}: model_type {abbreviate(family)} cannot be opened: {because}")
    # Tying is stated for the whole model, although the text part has the two matrices.
    return part | {name: raw[name] for name in ("tie_word_embeddings",) if name in raw}


def tokens_of(directory: Path) -> Path:
    """Find the tokenizer of a checkpoint.

    A checkpoint that ships as TASK/NAME or TASK/NAME/seed-N without a tokenizer shares that of
    TASK.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        Directory with the tokenizer, of an adapter that of its base.

    Raises:
        InputError: The base of an adapter is missing.
    """
    file = directory / "config.json"
    # An adapter has no tokenizer: its prompts need the tokenizer of its base.
    base = validate(stated(directory), Fields, str(file)).adapter if file.is_file() else None
    if base is not None:
        return base_directory(directory, base)
    if any(directory.glob("tokenizer*")):
        return directory
    # Checkpoints of the zoo share one tokenizer in a folder above; elsewhere no parent is trusted.
    roots = {root.resolve() for root in shipped_directories()}
    shared = (above for above in directory.resolve().parents[:2] if roots & set(above.parents))
    return next((above for above in shared if (above / "tokenizer.json").is_file()), directory)


def read_base(adapter: Path, base: Base, configure: Configure) -> Checkpoint:
    """Read the base of an adapter.

    Args:
        adapter: Directory of the adapter.
        base: How the adapter names its base.
        configure: Makes a configuration of the base's keys.

    Returns:
        The base checkpoint.

    Raises:
        InputError: It is not there, or cannot be read.
    """
    directory = base_directory(adapter, base)
    with _on_top_of(adapter, base):
        return read_checkpoint(directory, configure)


def base_directory(adapter: Path, base: Base) -> Path:
    """Find the files of the base of an adapter.

    An adapter may come from somebody else. If it names a folder by its whole path, only weights are
    read from the folder until their SHA-256 matches the adapter's; a shorter name never means a
    folder.

    Args:
        adapter: Directory of the adapter.
        base: The adapter's record of its base.

    Returns:
        The directory of the base.

    Raises:
        InputError: It does not exist, or its weights have another SHA-256.
    """
    with _on_top_of(adapter, base):
        if os.path.isabs(base.name):
            place = directory_of(base.name, {})
            require_base(adapter, base, place)
            return place
        # Only names with known files: an adapter must not choose the folder to read.
        known = zoo_path(base.name) if means_zoo(base.name) else known_directory(base.name)
        # A relative path would mean another folder for every working directory.
        if known is None and os.path.exists(base.name):
            raise InputError(
                "that is a folder or a file here; name it by its whole path in the "
                "adapter's config.json"
            )
        return directory_of(known or base.name, {})


@contextmanager
def _on_top_of(adapter: Path, base: Base) -> Iterator[None]:
    """Name the adapter in an InputError about its base."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{adapter} is an adapter on top of {base.name}: {error}") from None


def require_base(adapter: Path, base: Base, directory: Path) -> None:
    """Refuse a base with other weights than an adapter was trained on.

    Args:
        adapter: Directory of the adapter.
        base: How the adapter names its base.
        directory: Directory of the base.

    Raises:
        InputError: The digests of the weights differ.
    """
    digest = stored_digest(directory)
    # The adapter's numbers are differences to exactly these weights.
    if digest != base.weights_digest:
        raise InputError(
            f"{adapter} is an adapter on top of weights with the sha256 "
            f"{base.weights_digest[:16]}...; those of {base.name} "
            f"have {digest[:16]}...; wanted the checkpoint that it was trained on"
        )


def stated(directory: Path) -> dict[str, Any]:
    """Read config.json, with the number of layers as a number.

    Args:
        directory: Directory of a checkpoint.

    Returns:
        Keys and values.

    Raises:
        InputError: There is no config.json, or it is no object.
    """
    file = directory / "config.json"
    # Checked first: the message about a missing config.json would suggest the wrong fix.
    if not file.exists() and (directory / _ADAPTER).is_file():
        raise InputError(
            f"{directory} is an adapter of peft, not a whole checkpoint; load it with peft, and "
            "save what merge_and_unload() returns"
        )
    return resolve_layers(json_object(file), str(file))


def json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        file: The file.

    Returns:
        Keys and values.

    Raises:
        InputError: The file is missing, or holds something else.
    """
    wanted = "a checkpoint directory as save_pretrained writes it"
    if not os.path.lexists(file) and (inside := sorted(file.parent.glob(f"*/{file.name}"))):
        named = one_line(", ".join(checkpoint.parent.name for checkpoint in inside), 160)
        wanted += f", such as one of those in {file.parent}: {named}"
    raw = read_json(file, wanted)
    if not isinstance(raw, dict):
        raise InputError(f"{file} holds {abbreviate(raw)}; wanted an object")
    return raw


def plain_keys(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Select the keys of the plain decoder.

    Args:
        raw: Keys of config.json.
        source: The file, for errors.

    Returns:
        Keys, except those of our formats and of other programs.

    Raises:
        InputError: The family cannot be opened, or other weights are named.
    """
    plain = {key: value for key, value in raw.items() if key not in (*_OF_OURS, *_OF_OTHERS)}
    if raw.get("model_type") == OURS:
        plain["model_type"] = raw.get("base_model_type")
    if reason := refusal(plain.get("model_type")):
        raise InputError(f"{source}: {reason}")
    if "transformers_weights" in plain:
        raise InputError(
            f"{source} names other weights (transformers_weights); wanted model.safetensors "
            "beside it"
        )
    return plain


def light_config(raw: Mapping[str, Any], source: str) -> SimpleNamespace:
    """Read the configuration of a plain decoder without importing transformers.

    Args:
        raw: Keys of a decoder of `PLAIN`, or all keys from a reader.
        source: The file, for errors.

    Returns:
        The attributes of a configuration that are read: those of `raw`, with the defaults of its
        class, and its rotation in the form of transformers.

    Raises:
        InputError: They describe no decoder.
    """
    require_keys(raw, source)
    known = class_defaults(raw["model_type"]) | dict(raw)
    # rope_scaling is the older name; transformers reads both.
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        # Older files have the base next to the scaling.
        parameters = {"rope_theta": raw.get("rope_theta", 10000.0), **parameters}
        parameters.setdefault("rope_type", parameters.pop("type", "default"))
    config = SimpleNamespace(**known | {"rope_parameters": parameters})
    # null means as many key-value heads as heads, as in transformers.
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    require_decoder(raw, config, source)
    return config


def require_keys(raw: Mapping[str, Any], source: str) -> None:
    """Check the keys of a decoder, under any of their names, by the types and ranges of `Fields`.

    Args:
        raw: Keys of config.json; its `model_type` is a decoder's.
        source: The file, for errors.

    Raises:
        InputError: A key has another type or is out of range.
    """
    # num_hidden_layers for the n_layer of GPT-2
    names = class_defaults(raw["model_type"]).get("attribute_map") or {}
    common = {name: other for other, name in names.items()}
    validate({common.get(name, name): value for name, value in raw.items()}, Fields, source)


def require_decoder(raw: Mapping[str, Any], config: Any, source: str) -> None:
    """Refuse keys that contradict one another.

    Args:
        raw: Keys of config.json.
        config: The configuration that they make.
        source: The file, for errors.

    Raises:
        InputError: No decoder has such layers, heads, rotation or tokens.
    """
    # Contradictions may also raise TypeError or KeyError deep inside; all become one line.
    with as_input_errors(f"{source} describes no decoder"):
        _require_fit(raw, config)


def _require_fit(raw: Mapping[str, Any], config: Any) -> None:
    """Raise ValueError where keys of `raw` contradict one another, or the rest of `config`."""
    family = config.model_type
    for name in ("layer_types", "no_rope_layers"):
        if raw.get(name) is not None and len(raw[name]) != config.num_hidden_layers:
            raise ValueError(
                f"{name} names {len(raw[name])} layers; the model has {config.num_hidden_layers}"
            )
    # A family without types has full attention everywhere, so it may be stated.
    kinds = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    if kinds and "layer_types" not in class_defaults(family):
        raise ValueError(
            f"layer_types has {abbreviate(kinds[0])}, and every layer of a {family} is the same; "
            "leave it out"
        )
    if "sliding_attention" in kinds and getattr(config, "use_sliding_window", True) is False:
        raise ValueError(
            "layer_types has sliding_attention, and use_sliding_window is false; change one of them"
        )
    if "sliding_attention" in kinds and config.sliding_window is None:
        raise ValueError(
            "layer_types has sliding_attention, and sliding_window, the width of such a layer, is "
            "missing; add it"
        )
    heads, width = config.num_attention_heads, config.hidden_size
    # GPT-2 and others have no grouped heads and no such key.
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} key-value heads")
    # Latent attention (DeepSeek) sizes its heads by other keys.
    latent = hasattr(config, "qk_rope_head_dim")
    if not raw.get("head_dim") and not latent and (width % heads or width // heads % 2):
        raise ValueError(f"a width of {width} does not split into {heads} heads of even width")
    for name, theta in _thetas(config).items():
        if theta is None:
            raise ValueError(f"its {name} is null; give a number, or leave the key out")
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and padding >= config.vocab_size:
        raise ValueError(f"pad_token_id {padding} is beyond the vocabulary of {config.vocab_size}")


def _thetas(config: Any) -> dict[str, float | None]:
    """The base frequency of every type of layers that the model has, by its name."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters:
        return {}
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        return {"rope_theta": parameters.get("rope_theta")}
    # Only types that the model has: parameters of others rotate nothing.
    of_kinds = {
        kind: parameters.get(kind, {})
        for kind in config.layer_types
        if kind in parameters or kind in LAYER_TYPES
    }
    return {
        f"rope_theta of {kind}": of_kind.get("rope_theta")
        for kind, of_kind in of_kinds.items()
        if of_kind is not None  # null: a type of layers that does not rotate
    }


def _defaults(raw: Mapping[str, Any], config: Any) -> dict[str, float]:
    """Numbers of rotation and length that `config` has by default, by name."""
    # All places for the base in a file: next to the parameters, among them, or by type of layer
    places = [raw, *(raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))]
    places += [
        value
        for parameters in places[1:]
        for value in parameters.values()
        if isinstance(value, Mapping)
    ]
    thetas = {keys.get(name) for keys in places for name in ("rope_theta", "rope_local_base_freq")}
    defaults = {
        name: theta
        for name, theta in _thetas(config).items()
        # A base that the file does not state is transformers' default.
        if theta is not None and theta not in thetas
    }
    if not set(LENGTHS) & raw.keys() and hasattr(config, "max_position_embeddings"):
        defaults["max_position_embeddings"] = config.max_position_embeddings
    return defaults
