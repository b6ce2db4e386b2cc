"""Hooks of mkdocs.yml for the build of the site.

formulas      become MathML, so that a page needs no script and no network
search        ranks guides before the reference, results and logs, which repeat their words, and finds a section by other forms of its words
blank lines   are put where Python-Markdown wants one and GitHub does not: before a heading, a list or a table that follows a line
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
BEGINS = {
    "heading": re.compile(r"#+ "),
    "list": re.compile(r"(-|\d+\.) "),
    "table": re.compile(r"\|"),
    "inside": re.compile(r"\s"),
}
FENCE = "```"
SEARCH_WEIGHTS = {
    "README.md": 1.5,
    "docs/python.md": 1.5,
    "repo_interp/plugins/": 0.5,
    "docs/api/": 0.3,
    "docs/bench.md": 0.3,
    "docs/tour.md": 0.3,
    "docs/trust.md": 0.3,
    "papers/": 0.3,
    "AGENTS.md": 0.3,
    "CONTRIBUTING.md": 0.3,
    "docs/families.md": 0.1,
    "figures/": 0.1,
    "CHANGELOG.md": 0.1,
}
"""Factor of a page's scores in the search, by the start of its path; 1 elsewhere."""
TWO_COLUMNS = "docs/from_"
"""Start of the paths of pages that show two programs side by side, over the whole width."""
WORD_FORMS = tuple(
    frozenset(forms.split())
    for forms in (
        "freeze freezes freezing frozen",
        "linearize linearizes linearized linearise linearises linearised",
        "ablate ablates ablated ablation",
        "look looks looking",
        "remove removes removed removing",
        "color colors colour colours",
    )
)
"""Words that are found by each other. The search compares beginnings of words, so that "sink" finds
"sinks", and "frozen" does not find "freeze"; its stemmer takes the beginnings away and does not
know irregular verbs.
"""


def on_page_markdown(text: str, page: Any, **more: Any) -> str:
    """A page as Python-Markdown reads it, with its weight in the search and its width."""
    path = page.file.src_uri
    weight = next((w for start, w in SEARCH_WEIGHTS.items() if path.startswith(start)), 1.0)
    page.meta.setdefault("search", {}).setdefault("boost", weight)
    if path.startswith(TWO_COLUMNS):
        page.meta["hide"] = ["navigation", "toc"]
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


@event_priority(-100)  # after the search plug-in, which writes the index
def on_post_build(config: Any, **more: Any) -> None:
    """Add to every section of the index the other forms of its words."""
    file = Path(config["site_dir"]) / "search" / "search_index.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    for section in index["docs"]:
        words = set(re.findall("[a-z]+", f"{section['title']} {section['text']}".lower()))
        others = sorted(word for forms in WORD_FORMS if forms & words for word in forms - words)
        section["text"] += f"<p>Also: {', '.join(others)}</p>" if others else ""
    file.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
