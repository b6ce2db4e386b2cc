"""Values of options that several commands share.

All functions raise argparse's error for text that they cannot read.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from repo_interp.errors import InputError
from repo_interp.installed_points import installed_points
from repo_interp.runtime.option_texts import field_value, value_of
from repo_interp.values import Count, Seed, Tokens, in_words, shortened

_FORMATS = ("png", "svg", "pdf")
"""Equal to the formats of `plots.style`, which would import matplotlib."""
# Bounds the memory that a typed range may take before anything checks it
_LARGEST = 65_535
"""Largest number in a list of numbers: of layers, of heads, of seeds."""


def number_list(text: str) -> tuple[int, ...]:
    """Parse numbers such as "0,3", "5-15" or "0-2,7".

    Args:
        text: Numbers and ranges with commas between them.

    Returns:
        The numbers once, in the order given.

    Raises:
        argparse.ArgumentTypeError: A part is no number or range, runs backwards, or is too large.
    """
    numbers: list[int] = []
    for part in text.split(","):
        # At most 18 digits, so that int() never meets a text of a million digits
        found = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", part)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"wanted numbers or ranges such as 0,3 or 5-15, not {text[:80]!r}"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise argparse.ArgumentTypeError(f"the range {part.strip()} runs backwards")
        if last > _LARGEST:
            raise argparse.ArgumentTypeError(f"wanted numbers up to {_LARGEST:,}, not {last}")
        numbers.extend(range(first, last + 1))
    # Each once, in the order given: ranges may overlap.
    return tuple(dict.fromkeys(numbers))


def name_list(text: str) -> tuple[str, ...]:
    """Parse names with commas between them.

    Args:
        text: The names.

    Returns:
        The names, in order.

    Raises:
        argparse.ArgumentTypeError: There is no name, or one is repeated.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("wanted names with commas between them")
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise argparse.ArgumentTypeError(f"{twice[0]!r} is named twice; name it once")
    return names


def name_list_or_none(text: str) -> tuple[str, ...]:
    """Parse names with commas between them, or "none".

    Args:
        text: The names.

    Returns:
        The names, in order; none for "none".

    Raises:
        argparse.ArgumentTypeError: There is no name, one is repeated, or "none" is among others.
    """
    names = name_list(text)
    if "none" in names and len(names) > 1:
        raise argparse.ArgumentTypeError("none cannot be combined with names")
    return () if names == ("none",) else names


def reader_of(kind: Any) -> Callable[[str], Any]:
    """Make the `type` of an argument.

    Args:
        kind: Type of the values, with its range.

    Returns:
        Function that reads a text.

    Raises:
        argparse.ArgumentTypeError: By that function, for a text that is no such value.
    """

    def read(text: str) -> Any:
        try:
            # The name is empty, as argparse puts the name of the option before the message.
            return value_of(text, kind, "")
        except InputError:
            raise argparse.ArgumentTypeError(
                f"wanted {in_words(kind)}, not {shortened(repr(text))}"
            ) from None

    return read


count = reader_of(Count)
"""The number of something in a text: of prompts, of sequences of a pass, of processes."""
tokens = reader_of(Tokens)
"""The number of tokens in a text."""
seed = reader_of(Seed)
"""The seed in a text."""


def batch_size(text: str) -> Any:
    """Parse the value of `--batch-size`.

    Args:
        text: A number of prompts, or "auto".

    Returns:
        The number, or "auto".
    """
    # auto is decided later, when lengths and memory are known.
    return text if text == "auto" else count(text)


SETTING = "[OWNER.]NAME=VALUE"
"""Form of every `--set`. OWNER, a measure, an experiment, a task or a paper with the option, may be
left out.
"""


def setting(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE or OWNER.NAME=VALUE.

    Args:
        text: Value of `--set`.

    Returns:
        Both sides as text; the owner of the option knows its type.

    Raises:
        argparse.ArgumentTypeError: A side is empty, or the name begins or ends with a dot.
    """
    name, equals, value = text.partition("=")
    # A name without dots at its ends: ".x" and "x." name no owner or no option.
    if not (name.strip(".") == name and name and equals and value):
        raise argparse.ArgumentTypeError(
            f"wanted {SETTING}, such as longest=20 or patterns.epsilon=0.5, not {text[:80]!r}"
        )
    return name, value


def add_settings(parser: argparse.ArgumentParser, dest: str, meaning: str) -> None:
    """Declare `--set`.

    Args:
        parser: Parser of a command.
        dest: Attribute of the parsed options.
        meaning: Settings that are allowed, for the help text.
    """
    # append with a list as default: settings add up, and none is an empty list.
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar=SETTING,
        dest=dest,
        help=f"{meaning}; may be repeated",
    )


def without_owner(texts: Iterable[tuple[str, str]], owner: str) -> list[tuple[str, str]]:
    """Remove the name of their only owner from settings.

    Args:
        texts: Names and values of `--set`.
        owner: Name of the owner.

    Returns:
        Names without an owner, and values.

    Raises:
        InputError: A setting names another owner.
    """
    settings = []
    for name, text in texts:
        # Other names are refused: a typing error must not be taken for no setting.
        named, dot, option = name.rpartition(".")
        if dot and named != owner:
            raise InputError(
                f"--set {name}={text}: there is no {named!r} here; wanted {owner}.{option} "
                f"or {option}"
            )
        settings.append((option, text))
    return settings


def field_values(
    texts: Iterable[tuple[str, str]] | None, owner: Any, called: str
) -> dict[str, Any]:
    """Parse settings as the types of the fields of a dataclass.

    Args:
        texts: Names and values of `--set`; None: none.
        owner: Dataclass with the fields.
        called: Name of the owner in messages.

    Returns:
        Values by name.
    """
    return {name: field_value(owner, name, text, called) for name, text in texts or ()}


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Declare `--overwrite` and `--resume`.

    Args:
        parser: Parser of a command.
    """
    parser.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the interrupted work in --out, or start if there is none",
    )


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Declare `--formats`.

    Args:
        parser: Parser of a command.
    """
    parser.add_argument(
        "--formats",
        type=_formats,
        metavar="A,B",
        help=f"formats of all figures: {', '.join(_FORMATS)} (default: "
        f"{_FORMATS[0]}, of figures that the page does not draw itself)",
    )


def _formats(text: str) -> tuple[str, ...]:
    formats = name_list(text)
    unknown = [name for name in formats if name not in _FORMATS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"wanted formats of {', '.join(_FORMATS)}, not {unknown[0][:80]!r}"
        )
    return formats


# A factor below 1 would shorten the context.
_TIMES = Annotated[float, Interval(ge=1, le=1024)]
"""Largest length of prompts, relative to training."""
_SCALINGS: dict[str, Any] = {
    "yarn": _TIMES,
    "linear": _TIMES,
    "ntk": _TIMES,
    "theta": Annotated[float, Interval(ge=2, le=1e15)],
}
"""Range of the number by kind of `--scaling`."""


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Declare `--scaling`.

    Args:
        parser: Parser of a command.
    """
    parser.add_argument(
        "--scaling",
        metavar="KIND:FACTOR",
        help="scale the rotation for longer prompts: yarn:2, linear:4 (position interpolation), "
        "ntk:2 (NTK-aware), from the training length; theta:500000 is another base",
    )


def scaling_of(text: str | None) -> tuple[str, float] | None:
    """Parse the value of `--scaling`.

    Args:
        text: KIND:FACTOR; None: nothing is scaled.

    Returns:
        Kind and factor.

    Raises:
        InputError: The kind is unknown, or the factor out of range.
    """
    if text is None:
        return None
    kind, colon, factor = text.partition(":")
    if kind not in _SCALINGS or not colon:
        raise InputError(
            f"scaling {text!r} is unknown; wanted yarn:FACTOR, linear:FACTOR, ntk:FACTOR or "
            "theta:BASE"
        )
    return kind, value_of(factor, _SCALINGS[kind], f"--scaling {kind}:FACTOR")


def rope_scaling(text: str | None, config: Any) -> dict[str, str | float | int] | None:
    """Return the value of `--scaling` as the table that `load` takes.

    Args:
        text: KIND:FACTOR; None: nothing is scaled.
        config: Configuration of the checkpoint.

    Returns:
        The table; None if nothing is scaled.

    Raises:
        InputError: As `scaling_of`; or ntk is requested for a checkpoint without a single base.
    """
    from repo_interp.checkpoint_files.architectures import training_length

    if (parsed := scaling_of(text)) is None:
        return None
    kind, value = parsed
    if kind == "ntk":
        # With several bases, one per type of layer, there is none here.
        stated = getattr(config, "rope_parameters", None) or {}
        base = stated.get("rope_theta")
        if base is None:
            raise InputError(
                f"--scaling {text} changes the base of the rotation, and this checkpoint states "
                "none, or several; leave it out, or use interventions.rescaled"
            )
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        # NTK-aware scaling divides the lowest frequency by s and leaves the highest.
        # Of d rotated dimensions, the base b s^(d / (d - 2)).
        width = int(width * (stated.get("partial_rotary_factor") or 1))
        kind, value = "theta", base * value ** (width / max(width - 2, 1))
    if kind == "theta":
        return {"rope_type": "default", "rope_theta": value}
    return {"rope_type": kind, "factor": value} | (
        # Only YaRN reads it: this length determines the start of its ramp between frequencies.
        {"original_max_position_embeddings": training_length(config)} if kind == "yarn" else {}
    )


def add_batch_size(parser: argparse.ArgumentParser, default: int | str) -> None:
    """Declare `--batch-size`.

    Args:
        parser: Parser of a command.
        default: Prompts per forward pass.
    """
    parser.add_argument(
        "--batch-size",
        type=batch_size,
        default=default,
        metavar="N",
        help="prompts in one forward pass; auto: as many of similar length as are worthwhile and "
        f"fit into memory (default: {default})",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare `--device`, `--dtype`, `--positions-dtype`, `--device-map` and `--max-memory`.

    Args:
        parser: Parser of a command.
    """
    parser.add_argument(
        "--device",
        default="auto",
        help="device of the model: cpu, cuda, cuda:1, mps (default: auto: cuda if available, "
        "else cpu)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float64", "bfloat16", "float16", "auto"),
        help="precision of the model; auto: bfloat16 on an accelerator if the checkpoint has it, "
        "else float32; below float32 it rounds learned positions too, unless --positions-dtype is "
        "wider (default: float32)",
    )
    parser.add_argument(
        "--positions-dtype",
        choices=("float32",),
        help="precision of learned positions and of the maps that produce them (default: "
        "that of the model)",
    )
    parser.add_argument(
        "--device-map",
        choices=("auto",),
        help="auto: spread a model that is larger than a device over all accelerators, "
        "memory and the disk; replaces --device",
    )
    parser.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help="threads of the processor (default: OMP_NUM_THREADS; without it 1 below 30 million "
        "parameters, whose operators are too short to share, else torch's default)",
    )
    parser.add_argument(
        "--max-memory",
        type=_sizes,
        metavar="0=20GiB,cpu=60GiB",
        help="with --device-map: the most memory that weights may take on each device",
    )


def _sizes(text: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(device and equals and size for device, equals, size in pairs):
        raise argparse.ArgumentTypeError(
            f"wanted sizes by device, such as 0=20GiB,cpu=60GiB, not {text[:80]!r}"
        )
    # Accelerate reads the sizes, and knows more units than are worth repeating here.
    return {device: size for device, _, size in pairs}


def require_device_kind(name: str) -> None:
    """Refuse a device of a kind that torch does not have; imports no torch.

    Args:
        name: Value of `--device`; only torch knows whether the device exists.

    Raises:
        InputError: There is no such kind.
    """
    kind = name.partition(":")[0]
    # A kind has a module in torch, or comes with another package; auto and meta have neither.
    if (
        not re.fullmatch("[a-z]+", kind)
        or kind in ("auto", "meta")
        or installed_points("torch.backends")
    ):
        return
    torch = find_spec("torch")
    folders = (torch.submodule_search_locations or ()) if torch is not None else ()
    if not any(Path(folder, kind).is_dir() for folder in folders):
        raise InputError(f"device {name!r} is not available here (no such kind of device); use cpu")


def load_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_device` as arguments of `load`.

    Args:
        arguments: Parsed options.

    Returns:
        Keyword arguments of `load` and `open_model`.

    Raises:
        InputError: `--max-memory` without `--device-map`, or a device of no kind.
    """
    require_device_kind(arguments.device)
    if arguments.max_memory is not None and arguments.device_map is None:
        raise InputError(
            "--max-memory is for a model that is spread over devices; give --device-map auto"
        )
    return {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "device_map": arguments.device_map,
        "most_memory": arguments.max_memory,
        "positions_dtype": arguments.positions_dtype,
    }
