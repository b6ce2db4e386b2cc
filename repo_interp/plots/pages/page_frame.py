"""What every page of ours stands in: one self-contained file, offline, with a content security policy that forbids any request.

Knows nothing about runs and what a page shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

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


def packaged(name: str) -> str:
    """A file of `page/`."""
    return (files("repo_interp.plots") / "pages" / "page" / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script that may stand inside a script element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
