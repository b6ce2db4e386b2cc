"""Draw the pictures of docs/pictures: `python docs/pictures.py`, or `--check` to compare them.

Each picture is a figure of a command that users can run. `{texts}` is a file with the texts of
notebook 11; its picture needs `repo-interp fetch smollm2-135m`, and is left out otherwise.
`--check` draws all again and names the pictures that differ from the stored ones; CI runs it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from learned_positions import cells
from PIL import Image
from recipes import printed

from repo_interp import read_run
from repo_interp.cli import main as command
from repo_interp.errors import InputError
from repo_interp.plots.style import rendered
from repo_interp.plots.view_catalogue import figures_of

PICTURES = Path(__file__).parent / "pictures"
COMMANDS = {
    "reversal": "reversal/repo --count 20 --experiments effects,atlas,saliency "
    "--measures positions,patterns,attention_mass,position_sources",
    "needles": "niah/repo --count 20 --experiments none --measures patterns,attention_mass",
    "logits": "language/rope --count 8 --length 256 --experiments none --save-maps 2:1 "
    "--measures components,rotation,three_axis,fake_distance",
    "lengths": "language/rope --count 8 --length 256 --experiments perturbation,extrapolation "
    "--measures predictions --set extrapolation.sequences=8",
    "text": "language/repo --count 8 --length 512 --experiments none --measures positions,segments",
    "gates": "language/cope --count 8 --length 256 --experiments none --measures gates",
    "texts": "smollm2-135m/repo --prompts {texts} --experiments none "
    "--measures positions,patterns,position_sources",
}
"""Arguments of `repo-interp analyze`, by the name of the run."""
FIGURES = {
    "atlas": ("reversal", "atlas_overview"),
    "attention_mass_by_span": ("needles", "attention_mass_by_span"),
    "component_vaf": ("logits", "component_vaf"),
    "components_by_distance": ("logits", "components_by_distance"),
    "effects": ("reversal", "effects_by_head"),
    "effects_of_sets": ("reversal", "effects_of_sets"),
    "extrapolation": ("lengths", "extrapolation_log_perplexity"),
    "fake_distance_fit": ("logits", "fake_distance_layer2_head1"),
    "gates": ("gates", "gate_scores"),
    "pattern_shares": ("needles", "pattern_shares"),
    "perturbation": ("lengths", "perturbation_log_perplexity"),
    "position_ranges": ("text", "position_ranges"),
    "positions": ("reversal", "positions_layer2_head2"),
    "rotating_pairs": ("logits", "rotating_pairs_layer3_head0"),
    "rows_of_positions": ("texts", "rows_of_positions"),
    "saliency": ("reversal", "integrated_gradients_layer2_head0"),
    "segments": ("text", "segment_scores_paragraphs"),
    "three_axis_fit": ("logits", "three_axis_layer2_head1"),
}
"""Run and figure by picture."""
RESOLUTION = 160
"""Dots per inch."""
LEVELS, SHARE = 32, 2e-4
"""Pixels that differ by more levels than this (of 255) may be at most this share: processors round
differently, which moves the edge of a line.
"""


def draw(into: Path) -> list[Path]:
    """Run the commands and draw their figures.

    Args:
        into: Directory of the pictures.

    Returns:
        Paths of the pictures.
    """
    paths: list[Path] = []
    with tempfile.TemporaryDirectory() as place:
        for run, arguments in COMMANDS.items():
            out = Path(place, run)
            if "{texts}" in arguments:
                file = Path(place, "texts.jsonl")
                if reason := write_texts(file):
                    sys.stderr.write(f"pictures of {arguments.split()[0]} are left out: {reason}\n")
                    continue
                arguments = arguments.format(texts=file)
            if command(["analyze", *arguments.split(), "--out", str(out)]):
                raise SystemExit(f"repo-interp analyze {arguments} failed")
            drawings = {one.name: one for one in figures_of(read_run(out / "run.nc"))}
            for picture, (of, figure) in FIGURES.items():
                if of == run:
                    paths.append(into / f"{picture}.png")
                    content = rendered(drawings[figure].figure, ("png",), dpi=RESOLUTION)
                    paths[-1].write_bytes(content["png"])
    return paths


def write_texts(file: Path) -> str:
    """Write the texts of notebook 11 as prompts, or name the data to fetch first."""
    names: dict[str, Any] = {}
    try:
        printed(cells()[0][0], "code cell 1", names)
    except InputError as error:
        if "repo-interp fetch" not in str(error):
            raise
        return str(error)
    file.write_text("".join(json.dumps({"text": text.text}) + "\n" for text in names["texts"]))
    return ""


def differs(old: Path, new: Path) -> str:
    """Compare two pictures by their pixels.

    Args:
        old: Stored picture.
        new: Picture drawn again.

    Returns:
        A description of the difference; "" if there is none.
    """
    if not old.exists():
        return "is not there"
    before, after = (np.asarray(Image.open(file).convert("RGB"), int) for file in (old, new))
    if before.shape != after.shape:
        return f"has {before.shape[1]} x {before.shape[0]} pixels, not {after.shape[1]} x " + str(
            after.shape[0]
        )
    share = float((np.abs(before - after).max(-1) > LEVELS).mean())
    return f"differs in {share:.2%} of its pixels" if share > SHARE else ""


def main() -> int:
    """Draw the pictures, or compare them; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as place:
        drawn = draw(Path(place))
        if not check:
            for path in drawn:
                shutil.copy(path, PICTURES / path.name)
            return 0
        faults = {path.name: differs(PICTURES / path.name, path) for path in drawn}
    for name, fault in faults.items():
        if fault:
            sys.stderr.write(f"docs/pictures/{name} {fault}; run `python docs/pictures.py`\n")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
