"""Cache of the scores of twins: models with random weights, drawn once per configuration.

    CACHE/twins/SHA-256(configuration, layout, seed, libraries, our code, tokens, scores).json

holds the largest score by rule, with a checksum, for later analyses.

The key contains neither the weights nor the name of a model: checkpoints of one configuration
share their twins. If a file is damaged or cannot be written, the twin is drawn again. This module
knows nothing about the scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from repo_interp.errors import InputError, warn
from repo_interp.models.decoder import Decoder
from repo_interp.models.repositioned_config import own_layout_of, stock_config
from repo_interp.storage.files import cache_directory
from repo_interp.storage.store import POINTS, Damaged

_PACKAGES = ("positions", "models", "measures", "experiments")
"""Packages with code that affects a twin or its scores."""
_IDLE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Fields that do not affect a twin. `dtype` is one: twins are float32."""


def kept_scores(
    decoder: Decoder,
    seed: int,
    asked: Mapping[str, Any],
    names: Collection[str],
    compute: Callable[[], dict[str, float]],
) -> dict[str, float]:
    """Compute the scores of a twin, or read them from the cache.

    The scores in a damaged file are computed again, with a warning.

    Args:
        decoder: Decoder of the model.
        seed: Seed of the weights.
        asked: All other inputs that affect the numbers, such as the tokens.
        names: Names of the numbers.
        compute: Function that is called if the file is missing or damaged.

    Returns:
        Numbers by name.
    """
    if not names:
        return {}
    config = decoder.owner.config
    # The key has every input that affects the twin or its scores, so no weights and no name.
    question = {
        "config": {
            name: value
            for name, value in stock_config(config).to_dict().items()
            if name not in _IDLE
        },
        "layout": decoder.schemes,
        "options": own_layout_of(config)[1],
        "seed": seed,
        # Another version may draw other weights from the same seed, or compute other scores.
        "with": (torch.__version__, transformers.__version__, _code_digest()),
        **asked,
    }
    # sort_keys, so that equal keys have equal text; str for values such as dtypes
    digest = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()
    try:
        file = cache_directory() / "twins" / f"{digest}.json"
    except InputError:  # There is no home directory
        return compute()
    if file.is_file():
        try:
            point = POINTS.read(file)
            # A file of another version may hold other names
            if point.keys() != set(names) or not all(
                isinstance(number, float) for number in point.values()
            ):
                raise ValueError("other names")
            return point
        # json raises RecursionError for text that is nested too deep: also damage.
        except (OSError, ValueError, RecursionError):
            warn(
                f"{file} is damaged: the scores of a model with random weights are measured again",
                Damaged,
            )
    point = compute()
    with suppress(OSError):  # The disk is full or read-only
        file.parent.mkdir(parents=True, exist_ok=True)
        POINTS.write(point, file)
    return point


# Once per process: reading and hashing the sources takes time.
@cache
def _code_digest() -> str:
    """SHA-256 of the code of `_PACKAGES`; a version number does not change with every line."""
    root, running = Path(__file__).parents[1], hashlib.sha256()
    # Sorted, since the order of rglob depends on the file system.
    for file in sorted(file for package in _PACKAGES for file in (root / package).rglob("*.py")):
        running.update(file.read_bytes())
    return running.hexdigest()
