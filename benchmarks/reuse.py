"""`python -m benchmarks.reuse [MODEL ...] [--out DIR]`: cost of reusing a chunk's cache on eight
texts of installed packages, and how well measures of heads predict it.

Texts are the first 256 tokens; the chunk is tokens 128 to 207, cached as if it began at 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import repo_interp as ri
from repo_interp.plots.style import save_figure
from repo_interp.tasks.prompt import Prompt

TOKENS, CHUNK = 256, (128, 208)
FILES = (
    ("scikit-learn", "sklearn/datasets/descr/twenty_newsgroups.rst"),
    ("scikit-learn", "sklearn/datasets/descr/california_housing.rst"),
    ("scikit-learn", "sklearn/datasets/descr/breast_cancer.rst"),
    ("numpy", "numpy/ma/README.rst"),
    ("mpmath", "mpmath/libmp/libmpf.py"),
    ("h11", "h11/_connection.py"),
    ("networkx", "networkx/algorithms/planarity.py"),
    ("jinja2", "jinja2/lexer.py"),
)
"""Five texts that notebook 11 reads in part, and similar ones."""
LAYERS = {"smollm2-135m": range(0, 30, 3)}
"""Every third layer of deep models."""


def texts(model: Any) -> list[Prompt]:
    """The first tokens of the files, by the model's tokenizer."""
    found = []
    for package, file in FILES:
        text = Path(str(distribution(package).locate_file(file))).read_text(encoding="utf-8")
        found.append(ri.prompt(model.tokenizer.encode(text)[:TOKENS], model))
    return found


def lines_of_costs(name: str, costs: xr.Dataset) -> Iterator[str]:
    """The cost of reuse, one line per kind."""
    yield f"{name}: loss {float(costs['mean_loss'][0]):.3f} nat per token after the chunk"
    for reuse in costs["reuse"].values[1:]:
        yield f"  {reuse:24} {ends(costs.sel(reuse=reuse), 'change', 4)}"


def lines_by_head(found: xr.Dataset) -> Iterator[str]:
    """The cost of leaving heads unrotated, and how well it is predicted."""
    change = found["change"][1:]
    dearest = change["head"].values[np.argsort(-change.values)[:5]]
    yield (
        f"  {change.size} heads not turned, one at a time: {float(change.min()):+.4f} to "
        f"{float(change.max()):+.4f}, sum {float(change.sum()):+.4f}; most in {', '.join(dearest)}"
    )
    for prediction in found["prediction"].values:
        one = found.sel(prediction=prediction)
        yield f"  rank correlation with {prediction:20} {ends(one, 'correlation', 2)}"
        for half in one["half"].values:
            told = ends(one.sel(half=half), "half_change", 4)
            yield f"    all heads of the {half} half not turned: {told}"


def ends(one: xr.Dataset, name: str, digits: int) -> str:
    """A number with its interval."""
    value, low, high = (f"{float(one[name + end]):+.{digits}f}" for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables for every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=["gemma3-270m", "smollm2-135m/repo", "smollm2-135m"]
    )
    parser.add_argument("--step", type=int, default=1, help="of the texts, every so many")
    parser.add_argument("--out", type=Path, help="write figures and numbers there")
    options = parser.parse_args(arguments)
    for name in options.models:
        model = ri.load(name)
        prompts = texts(model)[:: options.step]
        costs = ri.reuse_cost(model, prompts, CHUNK)
        sys.stdout.write("\n".join(lines_of_costs(name, costs)) + "\n")
        sys.stdout.flush()
        by_head = ri.reuse_cost_by_head(model, prompts, CHUNK, layers=LAYERS.get(name))
        sys.stdout.write("\n".join(lines_by_head(by_head)) + "\n")
        sys.stdout.flush()
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            stem = options.out / name.replace("/", "_")
            by_head.to_netcdf(stem.with_suffix(".by_head.nc"))
            costs.to_netcdf(stem.with_suffix(".costs.nc"))
            save_figure(ri.plots.reuse_by_head(by_head), stem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
