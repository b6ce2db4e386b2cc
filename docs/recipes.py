"""Run the recipes of recipes.md and write their outputs into the page: `python docs/recipes.py [NUMBER ...]`.

Every recipe is a self-contained block of Python, followed by a block of text with its output. Its
reference is a file of recipe_references/ that computes the same lines, or some of them, with
transformers alone; a second block has the reference's output. Every line of a reference must be a
line of the recipe, with the same words and whole numbers, and other numbers within one unit of the
last digit. The test suite runs both on small models that come with the package (`SMALL`).
`--check` compares the outputs with the page, and names the recipes that differ; CI runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError

PAGE = Path(__file__).resolve().parent / "recipes.md"
REFERENCES = PAGE.parent / "recipe_references"
sys.path.append(str(REFERENCES))  # references import a shared module
RECIPE = re.compile(
    r"^## (?P<title>.+?)\n.*?^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```$"
    r"(?:\n\nThe same with transformers alone[^\n]*:\n\n```text\n(?P<reference>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
SMALL = {
    '"smollm2-135m/repo"': '"language/repo"',
    '"smollm2-135m"': '"language/rope"',
    '"gemma3-270m"': '"language/rope"',
}
"""Names of models in the recipes, and the small models that replace them in tests."""


def recipes() -> dict[str, str]:
    """Return the code of every recipe by its title."""
    return {
        found["title"]: found["code"] for found in RECIPE.finditer(PAGE.read_text(encoding="utf-8"))
    }


def reference_file(title: str) -> Path:
    """Return the file of a recipe's reference, whether it exists or not."""
    return REFERENCES / f"{re.sub(r'[^a-z0-9]+', '_', title.lower()).strip('_')}.py"


def printed(code: str, name: str, names: dict[str, Any] | None = None) -> str:
    """Run a recipe, and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, name, "exec"), {} if names is None else names)
    return output.getvalue()


def agree(stored: str, found: str, slack: Callable[[str], Decimal] | None = None) -> bool:
    """Return whether two outputs have the same words, and numbers equal up to rounding.

    Args:
        stored: Output on the page.
        found: New output.
        slack: Largest difference of a number, as a function of its printed text; None: two units of
            the last digit plus 1 %, and 0 for a whole number.

    Returns:
        False if words differ, or numbers differ by more.
    """
    if NUMBER.sub("#", stored).split() != NUMBER.sub("#", found).split():
        return False
    pairs = zip(NUMBER.findall(stored), NUMBER.findall(found), strict=True)
    return all(abs(Decimal(a) - Decimal(b)) <= (slack or _slack)(a) for a, b in pairs)


def lines_that_differ(output: str, reference: str) -> list[str]:
    """Return the lines of a reference that its recipe does not print.

    Args:
        output: Output of the recipe.
        reference: Output of its reference: some of these lines, in the same order.

    Returns:
        The lines; empty if all agree.
    """
    left, differ = iter(output.splitlines()), []
    for line in reference.splitlines():
        words = NUMBER.sub("#", line).split()
        ours = next((one for one in left if NUMBER.sub("#", one).split() == words), "")
        if not agree(ours, line, _last_digit):
            differ.append(line)
    return differ


def _slack(number: str) -> Decimal:
    unit = _last_digit(number)
    return 2 * unit + abs(Decimal(number)) / 100 if unit else unit


def _last_digit(number: str) -> Decimal:
    """The unit of the last digit; 0 for a whole number: a head, a layer or a count."""
    exponent = Decimal(number).as_tuple().exponent
    assert isinstance(exponent, int)
    return Decimal(10) ** exponent if exponent else Decimal(0)


def main() -> int:
    """Write the outputs of some recipes or all, or compare them."""
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
        title, file = found["title"], reference_file(found["title"])
        begun = time.process_time()
        try:
            output, between = printed(found["code"], title), time.process_time()
            code = file.read_text(encoding="utf-8") if file.is_file() else ""
            reference = printed(code, str(file))
        except InputError as error:
            if not arguments.check or "repo-interp fetch" not in str(error):
                raise
            sys.stderr.write(f"{number}. {title}\n   not compared: {error}\n")
            return found[0]
        seconds = between - begun, time.process_time() - between
        sys.stderr.write(
            "{}. {}: {:.0f} CPU s, its reference {:.0f}\n".format(number, title, *seconds)
        )
        for line in lines_that_differ(output, reference):
            differ.append(f"{number}. {title}: transformers alone print\n{line}\nand we do not\n")
        for ours, stored in ((output, found["output"]), (reference, found["reference"] or "")):
            if arguments.check and not agree(stored, ours):
                differ.append(f"{number}. {title} prints\n{ours}and the page has\n{stored}")
        head = text[found.start() : found.start("output")]
        link = f"[{file.name}]({REFERENCES.name}/{file.name})"
        beside = f"\n\nThe same with transformers alone, {link}:\n\n```text\n{reference}```"
        return f"{head}{output}```{beside if reference else ''}"

    # Recipes write into their working directory.
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        written = RECIPE.sub(write, text)
    if not arguments.check:
        PAGE.write_text(written, encoding="utf-8")
    sys.stdout.write("\n".join(differ))
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
