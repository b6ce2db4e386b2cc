"""What every page of ours is made of: its frame, tables in plain HTML, and figures as pictures.

A page is one self-contained file, offline, with a content security policy that forbids any request. A figure stands in it as an SVG, in an
element of its own so that the ids of several cannot clash; one whose SVG has more than `MOST_SVG` bytes - thousands of points - as a PNG.
Knows nothing about runs and what a page shows.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from matplotlib.figure import Figure

from repo_interp.plots.marks.table import Table
from repo_interp.plots.view import Interactive

MOST_SVG = 300_000
"""Bytes of an SVG above which a page embeds a PNG instead."""
PAGE_PIXELS = 132
"""Pixels of the page per inch of a figure."""
_PICTURES = "style-src 'unsafe-inline'; img-src data:"
_PICTURES_AND_SCRIPTS = "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def framed(
    title: str, facts: str, navigation: Mapping[str, str], sections: Sequence[str], provenance: str, scripts: Sequence[str] = ()
) -> str:
    """A page: `title` and the titles of `navigation` (section id -> title) are plain text; the rest is trusted HTML and JavaScript.

    `scripts` run one after the other; a page without any forbids scripts altogether.
    """
    return Template(packaged("frame.html")).substitute(
        policy=_PICTURES_AND_SCRIPTS if scripts else _PICTURES,
        title=escape(title),
        style=packaged("page.css"),
        facts=facts,
        navigation="".join(f'<a href="#{escape(name)}">{escape(shown)}</a>' for name, shown in navigation.items()),
        sections="\n".join(sections),
        provenance=provenance,
        scripts="".join(f"<script>\n{_inline(script)}\n</script>\n" for script in scripts),
    )


def picture_html(figure: Figure, caption: str, contents: Mapping[str, bytes]) -> str:
    """`figure` as a picture with a caption; `contents`: its PNG and SVG."""
    kind, content = ("svg+xml", contents["svg"]) if len(contents["svg"]) <= MOST_SVG else ("png", contents["png"])
    width, text = round(figure.get_figwidth() * PAGE_PIXELS), escape(caption)
    return (
        f'<figure><img width="{width}" style="max-width: 100%; height: auto" alt="{text}" '
        f'src="data:image/{kind};base64,{b64encode(content).decode()}"><figcaption>{text}</figcaption></figure>'
    )


def table_html(table: Table) -> str:
    """A table in plain HTML, with its note below. Columns `layer` and `head` together make every row open that head in the
    explorer.
    """
    linked = "layer" in table.columns and "head" in table.columns
    rows = []
    for row, cells in zip(table.rows, table.formatted(), strict=True):
        drawn = [
            f'<td class="number">{escape(cell)}</td>' if numeric else f"<td>{escape(cell)}</td>"
            for cell, numeric in zip(cells, table.numeric, strict=True)
        ]
        if linked:
            layer, head = row[table.columns.index("layer")], row[table.columns.index("head")]
            drawn.append(
                f'<td><button type="button" class="open" data-layer="{layer}" data-head="{head}" hidden>'
                f"show L{layer} H{head}</button></td>"
            )
        rows.append(f"<tr>{''.join(drawn)}</tr>")
    header = "".join(
        f'<th scope="col"{" class=number" if numeric else ""}>{escape(column)}</th>'
        for column, numeric in zip(table.columns, table.numeric, strict=True)
    )
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption><thead><tr>{header}{"<td></td>" * linked}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="note">{escape(table.note)}</p>'
    )


def page_scripts(interactives: Sequence[Interactive], further: Sequence[str]) -> list[str]:
    """Scripts in the order in which they run: plotly, those of `interactives`, the files `further` of `page/`, and the page's own last.

    Empty where nothing is interactive.
    """
    if not interactives and not further:
        return []
    files_of = dict.fromkeys(part for interactive in interactives for part in (*interactive.parts, interactive.script))
    own = [*(part.read_text(encoding="utf-8") for part in files_of), *map(packaged, further), packaged("page.js")]
    return [*([_plotly()] if interactives or "head_charts.js" in further else []), "\n".join(own)]


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def json_script(data: Any) -> str:
    """`data` as JSON that may stand inside a script element whatever texts it holds. Raises ValueError for NaN."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def packaged(name: str) -> str:
    """A file of `page/`."""
    return (files("repo_interp.plots") / "pages" / "page" / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script that may stand inside a script element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
