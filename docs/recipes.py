"""Run the recipes of recipes.md and write what they print below them: `python docs/recipes.py [NUMBER ...]`.

Every recipe is a block of Python that stands alone; its output stands in the block of text after
it. The test suite runs the same blocks on small models that come with the package (`SMALL`).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "recipes.md"
RECIPE = re.compile(
    r"(^## (.+?)\n.*?^```python\n)(.*?)(^```\n\n```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL
)
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


def main(numbers: list[int]) -> None:
    """Write the outputs of the recipes with these numbers, from 1 on; of all without any."""
    text, number = PAGE.read_text(encoding="utf-8"), 0

    def write(found: re.Match[str]) -> str:
        nonlocal number
        number += 1
        if numbers and number not in numbers:
            return found[0]
        sys.stderr.write(f"{number}. {found[2]}\n")
        return found[1] + found[3] + found[4] + printed(found[3], found[2]) + found[6]

    PAGE.write_text(RECIPE.sub(write, text), encoding="utf-8")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
