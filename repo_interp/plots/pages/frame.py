"""What every page of ours is made of: one jinja2 template, its scripts, JSON inside them, and
figures as pictures.

A page is one self-contained file, offline, with a content security policy that forbids any request.
The template `page/page.html.jinja` escapes every text. Each figure is an image of its own, so that
the ids of several SVGs cannot clash; a figure whose SVG has more than `MOST_SVG` bytes - thousands
of points - is a PNG. Knows nothing about runs and what a page shows.
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
    "table.js",
    "tour.js",
    "stored.js",
    "head_charts.js",
    "explorer.js",
    "link.js",
    "page.js",
)
"""The modules of a page, each after those that it imports."""
LONG_TABLE = 24
"""Rows above which a reader may fold a table away."""


@dataclass(frozen=True)
class Picture:
    """A figure as an image of the page: its width in pixels, its data address, and its caption."""

    width: int
    source: str
    caption: str


def picture(figure: Figure, caption: str, contents: Mapping[str, bytes]) -> Picture:
    """`figure` as a picture with a caption; `contents`: its PNG and SVG."""
    kind, content = (
        ("svg+xml", contents["svg"])
        if len(contents["svg"]) <= MOST_SVG
        else ("png", contents["png"])
    )
    width = round(figure.get_figwidth() * PAGE_PIXELS)
    return Picture(width, f"data:image/{kind};base64,{b64encode(content).decode()}", caption)


@cache
def template() -> Any:
    """The macros of `page/page.html.jinja`: `page_of`, `section_of`, `side_of`, `table_of`; each
    returns escaped HTML.
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {
        "json_script": json_script,
        "packed": packed,
        "inline": _inline,
        "zip": zip,
    }
    environment.globals |= {"long_table": LONG_TABLE, "long_data": LONG_DATA}
    return environment.from_string(packaged("page.html.jinja")).module


def page_script(interactives: Sequence[Interactive], charts: bool) -> str:
    """The scripts of a page as one module: the files of `page/`, each after those that it imports,
    and those of `interactives`, before the page's own, which is last.

    A script of an interactive part uses what the files of `page/` export.

    `charts`: whether plotly is needed.
    """
    parts = dict.fromkeys(
        part for interactive in interactives for part in (*interactive.parts, interactive.script)
    )
    own = ["{\n" + part.read_text(encoding="utf-8") + "\n}" for part in parts]
    scripts = [*map(packaged, MODULES[:-1]), *own, packaged(MODULES[-1])]
    plotly = [f'window.packedPlotly = "{_plotly()}";'] if charts else []
    return "\n".join([*plotly, "window.reportSections = {};", *map(_unlinked, scripts)])


def _unlinked(module: str) -> str:
    """`module` without imports and exports, for a page in which all modules are one."""
    return re.sub(r"^(import .*\n|export (?=const|function|class))", "", module, flags=re.MULTILINE)


@cache
def _plotly() -> str:
    """plotly.js, which page.js runs, in a third of its size."""
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs())


def packed(text: str) -> str:
    """`text`, compressed, as base64; page.js unpacks it."""
    return b64encode(zlib.compress(text.encode())).decode()


def json_script(data: Any) -> str:
    """`data` as JSON that is safe inside a script element, whatever texts it holds.

    Raises ValueError for NaN.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def packaged(name: str) -> str:
    """A file of `page/`."""
    return (files("repo_interp.plots") / "pages" / "page" / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """`script` without what would end its script element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
