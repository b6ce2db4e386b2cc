"""What mkdocs.yml hooks into the build of the site.

formulas      become MathML, so that a page needs no script and no network
blank lines   are put where Python-Markdown wants one and GitHub does not: before a heading, a list or a table that follows a line
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
BEGINS = {
    "heading": re.compile(r"#+ "),
    "list": re.compile(r"(-|\d+\.) "),
    "table": re.compile(r"\|"),
    "inside": re.compile(r"\s"),
}
FENCE = "```"


def on_page_markdown(text: str, **more: Any) -> str:
    """A page as Python-Markdown reads it."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        kind, before = _kind(line), _kind(lines[-1]) if lines else ""
        if (
            kind in ("heading", "list", "table")
            and before not in ("", kind, "inside")
            and not fenced
        ):
            lines.append("")
        fenced ^= line.startswith(FENCE)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _kind(line: str) -> str:
    return (
        next((name for name, begin in BEGINS.items() if begin.match(line)), "text") if line else ""
    )


def on_page_content(text: str, **more: Any) -> str:
    """A page with its formulas in MathML."""
    text = INLINE.sub(lambda found: convert(html.unescape(found[1])), text)
    return DISPLAYED.sub(lambda found: convert(html.unescape(found[1]), display="block"), text)
