"""`python -m benchmarks.outputs store|compare DIRECTORY`: whether the commands give what they gave before a change.

    store     run the commands below and keep in DIRECTORY what they leave
    compare   run them again beside it, and name every value, picture and row that differs

Compared are the numbers (run.nc, compare.nc, every variable and attribute), figures pixel for pixel (PNG), tables (CSV), and the tables of
pages as text. Left out is what may differ between two runs of one and the same code: digests of our sources, and measured times.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

_ALL = "positions,patterns,attention_mass,components,three_axis,fake_distance,rotation,maps,segments,position_sources"
COMMANDS: dict[str, tuple[str, ...]] = {
    "niah_repo": (
        *("analyze", "niah/repo", "--count", "4", "--measures", _ALL, "--experiments", "perturbation,extrapolation,saliency"),
        *("--set", "extrapolation.sequences=8", "--set", "perturbation.gammas=0.1", "--set", "perturbation.l_maxes=2,4"),
    ),
    "niah_rope": ("analyze", "niah/rope", "--count", "4", "--measures", _ALL),
    "counting_cope": ("analyze", "counting/cope", "--count", "4", "--measures", f"{_ALL},gates"),
    "llama": ("analyze", "{model}/tiny_llama", "--prompts", "{model}/prompts.jsonl", "--measures", _ALL, "--batch-size", "2"),
    "score_niah": ("score", "niah/repo", "--count", "12"),
    "score_reversal": ("score", "reversal/repo", "--count", "12"),
    "compare_niah": ("compare", "{work}/niah_repo", "{work}/niah_rope"),
    "compare_scores": ("compare", "{work}/score_niah", "{work}/score_reversal"),
    "figures": ("figures", "all", "--fast"),
}
_TIMED = re.compile(r"efficiency|R7 \(time\)")
"""Figures and rows of tables that hold measured times."""
_NOT_COMPARED = ("sources", "command")
"""Attributes that name the code or where the command stood."""


def main() -> int:
    """Store, or compare and return 1 where something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("store", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS), help="some of the commands")
    given = parser.parse_args()
    work = given.directory / ("stored" if given.what == "store" else "again")
    _run(work, given.only)
    if given.what == "store":
        return 0
    differences = [line for name in given.only for line in differing(given.directory / "stored" / name, work / name)]
    sys.stdout.write("\n".join([*differences, f"{len(differences)} differences in {', '.join(given.only)}"]) + "\n")
    return 1 if differences else 0


def differing(before: Path, after: Path) -> Iterator[str]:
    """A line for everything that differs between two directories of results."""
    names = {path.relative_to(root) for root in (before, after) for path in root.rglob("*") if path.is_file()}
    for name in sorted(names):
        if ".cache" in name.parts or _TIMED.search(name.stem) or name.suffix not in _COMPARED:
            continue
        if not (before / name).is_file() or not (after / name).is_file():
            yield f"{after / name}: {'new' if (after / name).is_file() else 'missing'}"
            continue
        yield from (f"{after / name}: {line}" for line in _COMPARED[name.suffix](before / name, after / name))


def _run(work: Path, names: list[str]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    model = work.parent / "model"
    if not model.exists():
        _tiny_llama(model)
    for name in names:
        words = [word.format(work=work, model=model) for word in COMMANDS[name]]
        shutil.rmtree(work / name, ignore_errors=True)
        sys.stdout.write(f"repo-interp {' '.join(words)}\n")
        sys.stdout.flush()
        done = subprocess.run(
            [sys.executable, "-m", "repo_interp", *words, "--out", str(work / name)], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr)


def _tiny_llama(directory: Path) -> None:
    """A stock Llama with grouped keys, random weights and no tokenizer, and prompts in tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(**sizes, vocab_size=97, max_position_embeddings=128, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(directory / "tiny_llama")
    generator = np.random.default_rng(0)
    prompts = [
        {
            "tokens": generator.integers(0, 97, 96 + 16 * number).tolist(),
            "spans": {"needle": [20, 30], "query": [80, 88]},
            "generated": list(range(90, 94)),
        }
        for number in range(3)
    ]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n", encoding="utf-8")


def _netcdf(before: Path, after: Path) -> Iterator[str]:
    with xr.open_datatree(before, engine="h5netcdf") as one, xr.open_datatree(after, engine="h5netcdf") as other:
        for path in sorted({node.path for node in (*one.subtree, *other.subtree)}):
            if path not in {node.path for node in one.subtree} or path not in {node.path for node in other.subtree}:
                yield f"group {path} is in one of them alone"
                continue
            old, new = one[path].to_dataset(), other[path].to_dataset()
            yield from _attributes(path, old.attrs, new.attrs)
            for name in sorted({*old.variables, *new.variables}, key=str):
                if name not in old.variables or name not in new.variables:
                    yield f"{path}/{name} is in one of them alone"
                elif old[name].dims != new[name].dims or not _same(old[name].values, new[name].values):
                    yield f"{path}/{name} differs"
                else:
                    yield from _attributes(f"{path}/{name}", old[name].attrs, new[name].attrs)


def _attributes(owner: str, old: dict, new: dict) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if name not in _NOT_COMPARED and str(old.get(name)) != str(new.get(name)):
            yield f"{owner}: attribute {name} was {str(old.get(name))[:80]!r}, is {str(new.get(name))[:80]!r}"


def _same(old: np.ndarray, new: np.ndarray) -> bool:
    return old.dtype == new.dtype and old.shape == new.shape and bool(np.array_equal(old, new, equal_nan=old.dtype.kind in "fc"))


def _bytes(before: Path, after: Path) -> Iterator[str]:
    if before.read_bytes() != after.read_bytes():
        yield "other bytes"


def _csv(before: Path, after: Path) -> Iterator[str]:
    old, new = (
        [tuple(row.items()) for row in csv.DictReader(file.open(encoding="utf-8", newline="")) if not _TIMED.search(str(row))]
        for file in (before, after)
    )
    yield from _changed_lines([str(row) for row in old], [str(row) for row in new])


def _page(before: Path, after: Path) -> Iterator[str]:
    yield from _changed_lines(page_tables(before.read_text(encoding="utf-8")), page_tables(after.read_text(encoding="utf-8")))


def _changed_lines(old: list[str], new: list[str]) -> Iterator[str]:
    yield from (f"was: {line[:300]}" for line in old if line not in new)
    yield from (f"is:  {line[:300]}" for line in new if line not in old)


def page_tables(html: str) -> list[str]:
    """The rows of all tables of a page, as text; those of its provenance are left out."""
    reader = _Rows()
    reader.feed(html)
    return reader.rows


class _Rows(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []
        self._cells: list[str] | None = None
        self._provenance = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._provenance = dict(attrs).get("class") == "provenance"
        if tag == "tr" and not self._provenance:
            self._cells = []

    def handle_data(self, data: str) -> None:
        if self._cells is not None and data.strip():
            self._cells.append(" ".join(data.split()))

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr" and self._cells is not None:
            self.rows.append(" | ".join(self._cells))
            self._cells = None


_COMPARED = {".nc": _netcdf, ".png": _bytes, ".csv": _csv, ".html": _page}

if __name__ == "__main__":
    sys.exit(main())
