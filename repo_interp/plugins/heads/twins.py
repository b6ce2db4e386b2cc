"""Scores of the twins of a model, controls with random weights, drawn once per configuration.

    CACHE/twins/SHA-256(configuration, layout, seed, libraries, our code, tokens, scores).json

holds the largest score by rule, with a seal, for every later analysis.

Neither a model's weights nor its name are in the key: a twin of one checkpoint is a twin of every
one of its configuration. A file that is damaged, or that cannot be written, costs the time of
drawing again. Knows nothing about the scores.
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
from repo_interp.models.configuration import own_layout_of, stock_config
from repo_interp.models.decoder import Decoder
from repo_interp.storage.files import cache_directory
from repo_interp.storage.store import POINTS, Damaged

_PACKAGES = ("positions", "models", "measures", "experiments")
"""Packages whose code decides a twin and its scores."""
_IDLE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Fields in which configurations of one model may differ; a twin has float32."""


def kept_scores(
    decoder: Decoder,
    seed: int,
    asked: Mapping[str, Any],
    names: Collection[str],
    compute: Callable[[], dict[str, float]],
) -> dict[str, float]:
    """Compute the scores of a twin, or read them from the cache.

    A damaged file is computed again, with a warning.

    Args:
        decoder: Decoder of the model.
        seed: Seed of the weights.
        asked: All else that decides the numbers, such as the tokens.
        names: Names of the numbers.
        compute: Called where the cache has no such file, or a damaged one.

    Returns:
        Numbers by name.
    """
    if not names:
        return {}
    config = decoder.owner.config
    # Everything that decides the twin or its scores is part of the key; weights and name are not.
    question = {
        "config": {
            name: value
            for name, value in stock_config(config).to_dict().items()
            if name not in _IDLE
        },
        "layout": decoder.schemes,
        "options": own_layout_of(config)[1],
        "seed": seed,
        # Another version may draw other weights from one seed, or compute other scores.
        "with": (torch.__version__, transformers.__version__, _code_digest()),
        **asked,
    }
    # sort_keys, so that equal questions have equal text; str for values such as dtypes
    digest = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()
    try:
        file = cache_directory() / "twins" / f"{digest}.json"
    except InputError:  # no home
        return compute()
    if file.is_file():
        try:
            point = POINTS.read(file)
            # a file of another version may hold other names
            if point.keys() != set(names) or not all(
                isinstance(number, float) for number in point.values()
            ):
                raise ValueError("other names")
            return point
        # RecursionError comes from JSON that is nested too deep: also damage.
        except (OSError, ValueError, RecursionError):
            warn(
                f"{file} is damaged: the scores of a model with random weights are measured again",
                Damaged,
            )
    point = compute()
    with suppress(OSError):  # a full disk, or one that is read alone
        file.parent.mkdir(parents=True, exist_ok=True)
        POINTS.write(point, file)
    return point


# Once per process: reading and hashing the sources takes time.
@cache
def _code_digest() -> str:
    """SHA-256 of the code that decides twins and scores; a version does not change by line."""
    root, running = Path(__file__).parents[1], hashlib.sha256()
    # Sorted, since a folder lists its files in any order.
    for file in sorted(file for package in _PACKAGES for file in (root / package).rglob("*.py")):
        running.update(file.read_bytes())
    return running.hexdigest()
