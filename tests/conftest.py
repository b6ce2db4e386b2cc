"""Shared fixtures: the authors' tiny checkpoints with what their code computed, and tiny random
decoders of every family.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests fork processes, which wait for ever for threads of OpenMP that their parent has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from places import OFFICIAL

from repo_interp.storage.files import cache_directory

# A shell's background job ignores Ctrl-C, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The user's fetched models and texts, and nothing that an earlier analysis left there: scores of
# twins are drawn, and kept here.
_CACHE = tempfile.TemporaryDirectory()
for _name in ("models", "texts", "gguf"):
    if (_there := cache_directory() / _name).is_dir():
        (Path(_CACHE.name) / _name).symlink_to(_there)
os.environ["REPO_INTERP_CACHE"] = _CACHE.name

# A twentieth of the suite went into looking through modules of torch for what is not used.
gc.set_threshold(100_000, 50, 50)

# No test is timed.
_ALIKE = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("suite", max_examples=25, derandomize=True, database=None, **_ALIKE)
settings.register_profile("fuzz", max_examples=int(os.environ.get("FUZZ_EXAMPLES", 5000)), **_ALIKE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(scope="session")
def official() -> Path:
    return OFFICIAL


@pytest.fixture(scope="session")
def expected():
    """Arrays of an official checkpoint: expected("repo_mha")["logits"]."""

    def arrays(name: str, variant: str = "expected"):
        return np.load(OFFICIAL / name / f"{variant}.npz")

    return arrays


@pytest.fixture
def no_pictures():
    """Figures are drawn and not rendered, which costs most of a page: their files and pictures are
    empty.
    """
    from drawn import without_pictures

    with without_pictures():
        yield


@pytest.fixture
def no_figures():
    """No figures are drawn for pages: of tests that look at neither figures nor pages."""
    from drawn import without_figures

    with without_figures():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    # `torch.manual_seed` notes the stack for every kind of device: 5 s in all
    torch.default_generator.manual_seed(0)


def pytest_collection_finish():
    """What is imported and collected by now stays to the end; looking through it again and again
    takes time.
    """
    gc.collect()
    gc.freeze()
