"""Read rotation from a file that another runtime, such as vLLM, llama.cpp or ONNX, wrote.

    cos, sin                   tables [token, column]: a column per pair, or one per entry of a head
    q, q_rotated (k, ...)      vectors [token, d_head] or [head, token, d_head] before and after
    positions                  [token], by default 0, 1, 2, ...; or [axis, token]: time, height,
                               width (mRoPE)

    angle of a pair = atan2(sin, cos), or the angle from the plain to the turned pair
    length          = |(cos, sin)|, or the length of the turned pair over that of the plain pair

A table with a column per entry repeats the column of a pair half a head away (half-split) or in the
next column (interleaved). For vectors, the order of pairs is the one in which rotation keeps their
lengths best.

Files are .safetensors or .npz; reading runs no code from them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from repo_interp.errors import InputError, as_input_errors
from repo_interp.storage.files import regular

SUFFIXES = (".npz", ".safetensors")
"""Suffixes of files of tables."""
_VECTORS = (("q", "q_rotated"), ("k", "k_rotated"))
# float32 holds whole numbers exactly up to here.
_LONGEST = 1 << 24
_MOST_BYTES = 1 << 30
"""Largest unpacked size of the arrays of a file."""


def read_tables(path: Path) -> tuple[Tensor, Tensor, Tensor, torch.dtype, bool | None]:
    """Read rotation from a file of tables or vectors.

    Args:
        path: File that ends in one of `SUFFIXES`.

    Returns:
        Angles and lengths [pair, token], float64; positions [token], or
        [axis, token]; the precision of the file; and whether pairs are neighbors in a head, None if
        that is unknown.

    Raises:
        InputError: The file cannot be read, or holds neither tables nor vectors.
    """
    given = read_arrays(path)
    # Tables come first: they need no guess about the order of pairs.
    found = next((pair for pair in (("cos", "sin"), *_VECTORS) if {*pair} <= {*given}), None)
    if found is None:
        raise InputError(
            f"{path} holds {', '.join(given) or 'nothing'}; wanted cos and sin, or q and "
            "q_rotated, or k and k_rotated"
        )
    first, second = (given[name] for name in found)
    ranks = (2,) if found[0] == "cos" else (2, 3)
    if first.shape != second.shape or first.ndim not in ranks or not first.numel():
        raise InputError(
            f"{found[0]} of {path} is {list(first.shape)} and {found[1]} {list(second.shape)}; "
            f"wanted two arrays [{'head, ' if 3 in ranks else ''}token, entry] of one shape"
        )
    if complexes := [name for name in (*found, "positions") if given.get(name, first).is_complex()]:
        raise InputError(f"{complexes[0]} of {path} is complex; wanted real numbers")
    for name in found:
        kind = given[name].dtype
        if not kind.is_floating_point or kind.itemsize < 2:
            kind = str(kind).removeprefix("torch.")
            raise InputError(f"{name} of {path} is {kind}; wanted float16, bfloat16 or wider")
    # Compared in float64, so that the only rounding is that of the coarser array in the file.
    dtype = max(first.dtype, second.dtype, key=lambda kind: torch.finfo(kind).eps)
    first, second = first.double(), second.double()
    if not bool(torch.isfinite(first + second).all()):
        raise InputError(f"{found[0]} or {found[1]} of {path} is NaN or infinite at places")
    tokens = first.shape[-2]
    stated = given.get("positions", torch.arange(tokens))
    positions = stated.long()
    if (
        positions.shape not in ((tokens,), (3, tokens))
        or not torch.equal(positions.double(), stated.double())
        or not 0 <= int(positions.min()) <= int(positions.max()) < _LONGEST
    ):
        raise InputError(
            f"positions of {path} are {list(positions.shape)}; wanted {tokens} whole numbers "
            f"from 0 to {_LONGEST - 1}, or [time, height, width] of them"
        )
    if found[0] == "cos":
        cosines, sines = one_per_pair(first), one_per_pair(second)
        # The length is 1, or YaRN's factor, which runtimes multiply into their tables.
        return torch.atan2(sines, cosines), torch.hypot(cosines, sines), positions, dtype, None
    if first.shape[-1] % 2:
        raise InputError(f"{found[0]} of {path} has {first.shape[-1]} entries; wanted pairs")
    halves, neighbors = (_turned(_pairs(first, order), _pairs(second, order)) for order in (0, 1))
    # rotation multiplies the lengths of pairs by one factor
    spread = [float(lengths.std()) for _, lengths in (halves, neighbors)]
    adjacent = spread[1] < spread[0]
    is_clear = min(spread) + torch.finfo(dtype).eps < 0.1 * max(spread)
    found = neighbors if adjacent else halves
    return *found, positions, dtype, adjacent if is_clear else None


def read_arrays(path: Path) -> Mapping[str, Tensor]:
    """Read the arrays of a file, without running code from it.

    Args:
        path: File that ends in one of `SUFFIXES`.

    Returns:
        Arrays by name.

    Raises:
        InputError: The file cannot be read, or unpacks to more than a GiB.
    """
    # For a broken archive, zipfile, zlib and numpy raise various errors.
    with as_input_errors(f"{path} cannot be read", 120):
        if path.suffix == ".safetensors":
            return load_file(regular(path))
        with zipfile.ZipFile(regular(path)) as archive:
            # Before anything is unpacked: a small archive may hold terabytes
            if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
                raise ValueError(f"it unpacks to more than {_MOST_BYTES >> 30} GiB")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.as_tensor(arrays[name]) for name in arrays.files}


def one_per_pair(table: Tensor) -> Tensor:
    """Drop the columns of a table that repeat a pair.

    Args:
        table: [token, column].

    Returns:
        [pair, token].
    """
    columns = table.shape[-1]
    # Half-split as Llama has it, interleaved as GPT-J has it.
    if columns % 2 == 0 and torch.equal(table[:, : columns // 2], table[:, columns // 2 :]):
        table = table[:, : columns // 2]
    elif columns % 2 == 0 and torch.equal(table[:, 0::2], table[:, 1::2]):
        table = table[:, 0::2]
    return table.T


def _pairs(vectors: Tensor, order: int) -> Tensor:
    """Vectors [..., token, d_head] as complex pairs, half-split (0) or interleaved (1)."""
    half = vectors.shape[-1] // 2
    # [..., token, pair, 2] or [..., token, 2, pair]: the axis of length 2 is real and imaginary
    # part.
    split = vectors.unflatten(-1, (half, 2) if order else (2, half))
    return torch.complex(*split.unbind(-1 if order else -2))


def _turned(plain: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Angles and lengths [pair, token], averaged over heads with weights of their pairs' lengths."""
    products = turned * plain.conj()
    sizes = plain.abs().square()
    if plain.ndim == 3:
        products, sizes = products.sum(0), sizes.sum(0)
    # Least squares for the complex factor that turns all heads; pairs of zeros get angle 0.
    ratio = products / sizes.clamp_min(1e-30)
    return ratio.angle().T, ratio.abs().T
