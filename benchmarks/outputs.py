"""`python -m benchmarks.outputs store|compare DIRECTORY`: compare the outputs of commands before
and after a change.

    store     run the commands below and store their outputs in DIRECTORY
    compare   run them again, and list every value, picture and row that differs

The comparison covers numbers (run.nc, compare.nc, every variable and attribute), figures pixel by
pixel (PNG), tables (CSV), and the tables of pages as text. It excludes values that may differ
between two runs of the same code: digests of our sources, and measured times.
"""

from __future__ import annotations

import argparse
import gzip
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from PIL import Image

_ALL = "positions,patterns,attention_mass,components,three_axis,fake_distance,rotation,maps,segments,position_sources"
COMMANDS = {
    "niah_repo": f"analyze niah/repo --count 4 --measures {_ALL} "
    "--experiments perturbation,extrapolation,saliency --set extrapolation.sequences=8 "
    "--set perturbation.gammas=0.1 --set perturbation.l_maxes=2,4",
    "niah_rope": f"analyze niah/rope --count 4 --measures {_ALL}",
    "counting_cope": f"analyze counting/cope --count 4 --measures {_ALL},gates",
    "llama": "analyze {model}/tiny_llama --prompts {model}/prompts.jsonl --batch-size 2 "
    f"--measures {_ALL}",
    "score_niah": "score niah/repo --count 12",
    "score_reversal": "score reversal/repo --count 12",
    "reversal_repo": f"analyze reversal/repo --count 4 --measures {_ALL} --experiments effects,atlas",
    "language_rope": "analyze language/rope --count 4 --measures "
    + _ALL.replace("attention_mass,", ""),
    "smollm2": "analyze smollm2-135m --count 2 --length 512 --measures attention_rows,"
    "predictions,components,three_axis,fake_distance,rotation",
    "compare_niah": "compare {work}/niah_repo {work}/niah_rope",
    "compare_scores": "compare {work}/score_niah {work}/score_reversal",
    "figures": "figures all --fast",
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
    parser.add_argument(
        "--only", nargs="*", choices=COMMANDS, default=list(COMMANDS), help="some of the commands"
    )
    given = parser.parse_args()
    work = given.directory / ("stored" if given.what == "store" else "again")
    _run(work, given.only)
    if given.what == "store":
        return 0
    differences = [
        line
        for name in given.only
        for line in differing(given.directory / "stored" / name, work / name)
    ]
    sys.stdout.write(
        "\n".join([*differences, f"{len(differences)} differences in {', '.join(given.only)}"])
        + "\n"
    )
    return 1 if differences else 0


def differing(before: Path, after: Path) -> Iterator[str]:
    """One line per difference between two directories of results."""
    names = {
        path.relative_to(root)
        for root in (before, after)
        for path in root.rglob("*")
        if path.is_file()
    }
    for name in sorted(names):
        if ".cache" in name.parts or _TIMED.search(name.stem) or name.suffix not in CONTENTS:
            continue
        if not (before / name).is_file() or not (after / name).is_file():
            yield f"{after / name}: {'new' if (after / name).is_file() else 'missing'}"
            continue
        old, new = (CONTENTS[name.suffix](root / name) for root in (before, after))
        for item in dict.fromkeys([*old, *new]):
            if item not in old or item not in new:
                yield f"{after / name}: {item[:300]}: {'new' if item in new else 'missing'}"
            elif not _same(old[item], new[item]):
                yield f"{after / name}: {item} was {_short(old[item])}, is {_short(new[item])}"


def _run(work: Path, names: list[str]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    model = work.parent / "model"
    if not model.exists():
        _tiny_llama(model)
    for name in names:
        words = [word.format(work=work, model=model) for word in COMMANDS[name].split()]
        shutil.rmtree(work / name, ignore_errors=True)
        sys.stdout.write(f"repo-interp {' '.join(words)}\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "repo_interp", *words, "--out", str(work / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)


def _tiny_llama(directory: Path) -> None:
    """A stock Llama with grouped keys, random weights and no tokenizer, and prompts in tokens."""
    import repo_interp as ri
    from benchmarks.shapes import prompt_of
    from benchmarks.tiny_models import small_model

    model = small_model("llama")
    model.save_pretrained(directory / "tiny_llama")
    ri.write_prompts(
        [prompt_of(tokens, model.config.vocab_size) for tokens in (96, 112, 128)],
        directory / "prompts.jsonl",
    )


def _netcdf(file: Path) -> dict[str, Any]:
    """Every variable, with its axes, and every attribute."""
    items: dict[str, Any] = {}
    with xr.open_datatree(file, engine="h5netcdf") as tree:
        for node in tree.subtree:
            owners = {node.path: node.attrs}
            for name, array in node.to_dataset(inherit=False).variables.items():
                place = f"{node.path}/{name}"
                owners[place] = array.attrs
                items |= {place: array.values, f"axes of {place}": array.dims}
            items |= {
                f"{owner}: {name}": str(value)
                for owner, attributes in owners.items()
                for name, value in attributes.items()
                if name not in _NOT_COMPARED
            }
    return items


def page_rows(html: str) -> list[str]:
    """The rows of all tables of a page, as text, except the provenance."""
    html = re.sub(r'<table class="provenance".*?</table>', "", html, flags=re.DOTALL)
    rows = re.findall(r"<tr\b.*?</tr>", html, re.DOTALL)
    return [
        " | ".join(" ".join(text.split()) for text in re.split(r"<[^>]*>", row) if text.strip())
        for row in rows
    ]


def _pixels(file: Path) -> dict[str, Any]:
    """The colors of a picture; files with another compression or a palette may be equal."""
    with Image.open(file) as picture:
        return {"pixels": np.asarray(picture.convert("RGBA"))}


def _lines(text: str) -> dict[str, Any]:
    return dict.fromkeys(line for line in text.splitlines() if not _TIMED.search(line))


def _same(old: Any, new: Any) -> bool:
    if not isinstance(old, np.ndarray) or not isinstance(new, np.ndarray):
        return type(old) is type(new) and old == new
    return (
        old.dtype == new.dtype
        and old.shape == new.shape
        and np.array_equal(old, new, equal_nan=old.dtype.kind in "fc")
    )


def _short(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)[:80]


CONTENTS: dict[str, Any] = {
    ".nc": _netcdf,
    ".png": _pixels,
    ".csv": lambda file: _lines(file.read_text("utf-8")),
    ".gz": lambda file: _lines(gzip.decompress(file.read_bytes()).decode("utf-8")),
    ".html": lambda file: dict.fromkeys(page_rows(file.read_text("utf-8"))),
}
"""By ending, the compared items of a file, by name."""

if __name__ == "__main__":
    sys.exit(main())
