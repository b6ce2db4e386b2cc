"""Run the recipes of recipes.md and write what they print below them: `python docs/recipes.py [NUMBER ...]`.

Every recipe is a block of Python that stands alone; its output stands in the block of text after
it. The test suite runs the same blocks on small models that come with the package (`SMALL`).
`--check` compares what they print with what stands there, and names the recipes that differ; CI
runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError

PAGE = Path(__file__).resolve().parent / "recipes.md"
RECIPE = re.compile(
    r"(^## (.+?)\n.*?^```python\n)(.*?)(^```\n\n```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
SMALL = {
    '"smollm2-135m/repo"': '"language/repo"',
    '"smollm2-135m"': '"language/rope"',
    '"gemma3-270m"': '"language/rope"',
}
"""Names of models in the recipes, and the small ones that stand for them in tests."""


def recipes() -> dict[str, str]:
    """Return the code of every recipe by its title."""
    return {found[2]: found[3] for found in RECIPE.finditer(PAGE.read_text(encoding="utf-8"))}


def printed(code: str, name: str, names: dict[str, Any] | None = None) -> str:
    """Run a recipe, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, name, "exec"), {} if names is None else names)
    return output.getvalue()


def agree(stored: str, found: str) -> bool:
    """Return whether two outputs have the same words, and numbers that processors may give.

    Args:
        stored: Output that stands on the page.
        found: Output of now.

    Returns:
        False where words or whole numbers differ, or others by more than two units of the last
        digit and 1 %.
    """
    if NUMBER.sub("#", stored).split() != NUMBER.sub("#", found).split():
        return False
    pairs = zip(NUMBER.findall(stored), NUMBER.findall(found), strict=True)
    return all(abs(Decimal(a) - Decimal(b)) <= _slack(a) for a, b in pairs)


def _slack(number: str) -> Decimal:
    exponent = Decimal(number).as_tuple().exponent
    assert isinstance(exponent, int)
    if exponent == 0:  # a head, a layer or a count
        return Decimal(0)
    return 2 * Decimal(10) ** exponent + abs(Decimal(number)) / 100


def main() -> int:
    """Write the outputs of some recipes, or of all; or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="recipes, from 1 on (default: all)")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    text, number, differ = PAGE.read_text(encoding="utf-8"), 0, []

    def write(found: re.Match[str]) -> str:
        nonlocal number
        number += 1
        if arguments.numbers and number not in arguments.numbers:
            return found[0]
        sys.stderr.write(f"{number}. {found[2]}\n")
        try:
            output = printed(found[3], found[2])
        except InputError as error:
            if not arguments.check or "repo-interp fetch" not in str(error):
                raise
            sys.stderr.write(f"   not compared: {error}\n")
            return found[0]
        if not agree(found[5], output):
            differ.append(f"{number}. {found[2]} prints\n{output}and the page has\n{found[5]}")
        return found[1] + found[3] + found[4] + output + found[6]

    # Recipes write where they run
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        written = RECIPE.sub(write, text)
    if not arguments.check:
        PAGE.write_text(written, encoding="utf-8")
        return 0
    sys.stdout.write("\n".join(differ))
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
