"""Write the outputs of notebook 11 into learned_positions.md: `python docs/learned_positions.py`.

A block of text after `<!-- printed: N -->` is the output of the notebook's code cell N. `--check` runs
the cells again, except those with the tag "minutes", and compares the outputs with the notebook and
with the page; CI runs it. Both modes report a number of the page's prose that no cell prints as an error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes import agree, printed

from repo_interp.errors import InputError

PAGE = Path(__file__).with_suffix(".md")
NOTEBOOK = PAGE.parents[1] / "notebooks" / "11_what_learned_positions_do.ipynb"
BLOCK = re.compile(r"(<!-- printed: (\d+) -->\n```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)
"""Parts of the page that are not prose: blocks, code, addresses and comments."""
NUMBER = re.compile(r"(?<![\w.,-])[-+]?(?:\d[\d,]*\d|\d)?(?:\.\d+)?(?![\w-])")


MINUTES = "minutes"
"""Tag of a cell that takes minutes."""


def cells() -> list[tuple[str, str, bool]]:
    """Return code and output of every code cell, and whether it takes minutes."""
    return [
        (
            "".join(cell["source"]),
            "".join(
                "".join(output["text"])
                for output in cell["outputs"]
                if output["output_type"] == "stream" and output["name"] == "stdout"
            ),
            MINUTES in cell.get("metadata", {}).get("tags", ()),
        )
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def filled(page: str, outputs: list[str]) -> str:
    """Return the page with the outputs of cells in its blocks.

    Args:
        page: Markdown of the page.
        outputs: Output of every code cell.

    Returns:
        The page.
    """
    return BLOCK.sub(lambda found: found[1] + outputs[int(found[2]) - 1] + found[4], page)


def numbers(text: str) -> Iterator[str]:
    """Yield the numbers of a text, without a plus sign, leading zeros and commas."""
    for found in NUMBER.findall(text):
        plain = found.replace(",", "").lstrip("+")
        if any(map(str.isdigit, plain)):
            yield re.sub(r"^(-?)0+(?=\d|\.)", r"\1", plain)


def unprinted(page: str, outputs: list[str]) -> list[str]:
    """Return the numbers of the page's prose that no cell prints.

    Args:
        page: Markdown of the page.
        outputs: Output of every code cell.

    Returns:
        Numbers, in the order of the page.
    """
    known = set(numbers("\n".join(outputs)))
    return [number for number in numbers(QUOTED.sub(" ", page)) if number not in known]


def faults(check: bool) -> Iterator[str]:
    """Write the page's blocks, or compare them.

    Args:
        check: Whether to run the cells again, and write nothing.

    Yields:
        A description of each difference.
    """
    page, kept = PAGE.read_text(encoding="utf-8"), cells()
    outputs = [output for _, output, _ in kept]
    if missing := unprinted(page, outputs):
        yield f"{PAGE.name} has numbers that no cell of {NOTEBOOK.name} prints: {missing}"
    if not check:
        PAGE.write_text(filled(page, outputs), encoding="utf-8")
        return
    if filled(page, outputs) != page:
        yield f"{PAGE.name} does not have what {NOTEBOOK.name} prints: python docs/{Path(__file__).name}"
    names: dict[str, Any] = {}
    for number, (code, stored, takes_minutes) in enumerate(kept, 1):
        if takes_minutes:
            continue
        output = printed(code, f"code cell {number}", names)
        if not agree(stored, output):
            yield f"code cell {number} prints\n{output}and {NOTEBOOK.name} has\n{stored}"


def main() -> int:
    """Write the page's blocks, or compare them; return 1 if something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    try:
        found = list(faults(parser.parse_args().check))
    except InputError as error:
        if "repo-interp fetch" not in str(error):
            raise
        sys.stderr.write(f"{NOTEBOOK.name} is not compared: {error}\n")
        return 0
    sys.stderr.write("".join(f"{fault}\n" for fault in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
