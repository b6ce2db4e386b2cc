"""The parts of all pages: a jinja2 template, scripts, JSON inside them, and pictures.

A page is one self-contained file, offline, with a content security policy that forbids any request.
The template `page/page.html.jinja` escapes every text. A figure is an image, so that
the ids of several SVGs cannot clash; a figure is a PNG if its SVG has more than `MOST_SVG` bytes
(thousands of points). This module knows nothing about runs or the content of a page.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from repo_interp.plots.marks import counted
from repo_interp.plots.view import Interactive

MOST_SVG = 300_000
"""Bytes of an SVG above which a page embeds a PNG instead."""
PAGE_PIXELS = 132
"""Pixels of the page per inch of a figure."""
LONG_DATA = 100_000
"""Characters of a section's JSON above which the page holds it compressed."""
MODULES = (
    "dom.js",
    "charts.js",
    "map.js",
    "looking.js",
    "table.js",
    "tour.js",
    "stored.js",
    "head_charts.js",
    "explorer.js",
    "link.js",
    "page.js",
)
"""The modules of a page; a module comes after the modules that it imports."""
LONG_TABLE = 24
"""Rows above which a reader may fold a table away."""
FIRST_FINDINGS = 3
"""Findings that a reader need not unfold: with more the map of heads leaves the first screen."""


@dataclass(frozen=True)
class Picture:
    """A figure as an image of the page: its width in pixels, data address and caption."""

    width: int
    source: str
    caption: str


def picture(figure: Figure, caption: str, contents: Mapping[str, bytes]) -> Picture:
    """Make a picture of the page from a figure.

    Args:
        figure: Figure that was drawn.
        caption: Text below the picture.
        contents: PNG and SVG of the figure, by format.

    Returns:
        The picture.
    """
    # A large SVG slows the page down, so that its PNG is embedded instead.
    kind, content = (
        ("svg+xml", contents["svg"])
        if len(contents["svg"]) <= MOST_SVG
        else ("png", contents["png"])
    )
    width = round(figure.get_figwidth() * PAGE_PIXELS)
    return Picture(width, f"data:image/{kind};base64,{b64encode(content).decode()}", caption)


@cache
def template() -> Any:
    """Load the macros of `page/page.html.jinja`, which return escaped HTML.

    They are `page_of`, `section_of`, `side_of` and `table_of`.

    Returns:
        Module of the template.
    """
    # StrictUndefined: a misspelt name in the template raises, where jinja would print nothing.
    environment = Environment(
        autoescape=True, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {
        "json_script": json_script,
        "packed": packed,
        "inline": _inline,
        "zip": zip,
        "counted": counted,
    }
    environment.globals |= {
        "long_table": LONG_TABLE,
        "long_data": LONG_DATA,
        "first_findings": FIRST_FINDINGS,
    }
    return environment.from_string(packaged("page.html.jinja")).module


def page_script(interactives: Sequence[Interactive], charts: bool) -> str:
    """Join the scripts of a page into one module.

    Files of `page/` come after the files that they import. Then come the scripts of interactive
    parts, which may use all exports of these files. The script of the page is last.

    Args:
        interactives: Interactive parts of the page.
        charts: Whether the page has charts, which need plotly.

    Returns:
        JavaScript.
    """
    # Both sides of a comparison have the same scripts, which the page needs once.
    parts = dict.fromkeys(
        part for interactive in interactives for part in (*interactive.parts, interactive.script)
    )
    # Braces give every script a separate scope: scripts of two views may declare the same const.
    blocks = ["{\n" + part.read_text(encoding="utf-8") + "\n}" for part in parts]
    # page.js runs at once, so scripts that register in `reportSections` must precede it.
    scripts = [*map(packaged, MODULES[:-1]), *blocks, packaged(MODULES[-1])]
    plotly = [f'window.packedPlotly = "{_plotly()}";'] if charts else []
    return "\n".join([*plotly, "window.reportSections = {};", *map(_unlinked, scripts)])


def _unlinked(module: str) -> str:
    """`module` without imports and exports, for a page in which all modules are one."""
    return re.sub(r"^(import .*\n|export (?=const|function|class))", "", module, flags=re.MULTILINE)


@cache
def _plotly() -> str:
    """plotly.js, which page.js runs, in a third of its size."""
    # Imported here, since only pages with charts need the package.
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs())


def packed(text: str) -> str:
    """Compress a text; page.js decompresses it.

    Args:
        text: Text to compress.

    Returns:
        Base64.
    """
    # zlib's format is the one that browsers call "deflate" in DecompressionStream.
    return b64encode(zlib.compress(text.encode())).decode()


def json_script(data: Any) -> str:
    """Write JSON that is safe inside a script element for any text.

    Args:
        data: Data to write.

    Returns:
        JSON.

    Raises:
        ValueError: A number is NaN.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # "<" could end the script element; U+2028 and U+2029 end a line in older JavaScript.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A token may hold half of a surrogate pair, which cannot be encoded as UTF-8.
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def packaged(name: str) -> str:
    """Read a file of `page/`.

    Args:
        name: Name of the file.

    Returns:
        Its text.
    """
    return (files("repo_interp.plots.pages") / "page" / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """`script` without the text that would end its script element."""
    # HTML is parsed before JavaScript: it would see both even inside a string or a comment.
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
