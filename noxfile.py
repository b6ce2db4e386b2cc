"""Oldest and newest libraries: `nox`, or `python -m trust versions`, which writes what comes of it into the table.

A session per pair of transformers and transformer-lens runs the tests on the authors' checkpoints, and those against Hugging Face's own
logits. `oldest` pins the lower ends of the ranges in pyproject.toml, `newest` takes what pip's resolver takes within them, `older` looks
below: what works there could widen the ranges. PyTorch comes as a build for processors alone (a local version such as 2.13.0+cpu), the
oldest and newest of those that the index has; where it has none, the version of constraints.txt.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nox

TESTS = tuple(
    f"tests/instrument/{name}.py"
    for name in ("models/test_official", "analysis/test_run_goldens", "measures/test_components_official", "models/test_parity")
)
LOOKED_AT = ("transformers", "transformer-lens")
BELOW = {"transformers": "5.8.1", "transformer-lens": "3.9.0"}
"""The versions before those of the ranges, with what a range of them would have to resolve to."""

nox.options.reuse_existing_virtualenvs = True


def lower_ends() -> dict[str, str]:
    """The lower end of every range of pyproject.toml by package."""
    stated = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(stated), re.MULTILINE))


def builds_for_processors(session: nox.Session) -> list[str]:
    """Versions of torch that the index has without CUDA, the oldest first; from the lower end of the range on."""
    listed = session.run("python", "-m", "pip", "index", "versions", "torch", silent=True, log=False)
    _, _, versions = str(listed).partition("Available versions:")
    found = re.findall(r"(\d[\d.]*)\+cpu", versions)
    order = sorted({tuple(map(int, one.split("."))) for one in found})
    least = tuple(map(int, lower_ends()["torch"].split(".")))
    return [".".join(map(str, one)) + "+cpu" for one in order if one >= least]


@nox.session
@nox.parametrize("end", ["oldest", "newest", "older-lens", "older-transformers"])
def versions(session: nox.Session, end: str) -> None:
    """The tests of `TESTS` with one end of the ranges."""
    builds = builds_for_processors(session)
    torch = f"torch=={builds[0 if end == 'oldest' else -1]}" if builds else "torch"
    lower = lower_ends()
    pins = [f"{name}=={lower[name]}" for name in LOOKED_AT] if end == "oldest" else []
    constraint = [] if builds else ["--constraint", "constraints.txt"]
    session.install(*constraint, torch)
    session.install("--upgrade", ".", "pytest", torch, *pins)
    if end == "older-lens":
        session.install("--no-deps", f"transformer-lens=={BELOW['transformer-lens']}")
    if end == "older-transformers":
        session.install(f"transformers=={BELOW['transformers']}")
    found = session.run("python", "-m", "pip", "freeze", silent=True, log=False)
    for name in ("torch", *LOOKED_AT):
        session.log(next(line for line in str(found).splitlines() if line.lower().startswith(f"{name}==")))
    session.env.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": ""})
    session.run("python", "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "--import-mode=append", *TESTS)
