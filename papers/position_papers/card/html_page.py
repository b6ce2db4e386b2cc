"""The HTML page of a card: a single offline file in the style of our other pages.

    facts                  the scheme, its source, versions tried, findings of `verify_scheme`
    a section per task     scores and losses, comparison with rivals, numbers of heads
    provenance             command and versions of each training

The page has no scripts; figures are embedded images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from matplotlib.figure import Figure

import position_papers.card.texts as texts
from position_papers.card.content import Card, TaskCard
from position_papers.card.figures import compares, differences, scores_and_losses
from repo_interp.plots.marks import Table
from repo_interp.plots.pages.frame import Picture, packaged, picture, template
from repo_interp.plots.style import rendered


def html_of(made: Card) -> str:
    """Make the page.

    Args:
        made: The card.

    Returns:
        The HTML text.
    """
    facts = [
        ("source", made.digest[:12] or "packaged"),
        ("versions tried here", texts.versions(made)),
        ("verify_scheme", _plain(texts.verified(made.findings, made.reference))),
    ]
    page = template().page_of(
        title=f"{made.layout}: a card",
        facts=facts,
        findings=[],
        warnings=[],
        sides=[],
        sections=list(_sections(made)),
        runs=None,
        owners=list(_owners(made)),
        style=packaged("page.css"),
        script="",
    )
    return str(page)


def _sections(made: Card) -> Iterator[dict[str, Any]]:
    if compares(made):
        drawn = _picture(differences(made), texts.LEGEND)
        yield _section("differences", f"On {texts.UNLIKE}", "", [drawn], [])
    for each in made.tasks:
        yield _of_task(made, each)
    words = Table("reading", "", ("word", "meaning"), tuple(texts.reading(made)))
    yield _section("reading", "How to read it", "", [], [words])
    yield _section("caveats", "What this cannot say", "", [], [], (*texts.CAVEATS, *made.notes))


def _of_task(made: Card, each: TaskCard) -> dict[str, Any]:
    task, remarks = each.column.task, texts.remarks(each)
    if each.own is None:
        return _section(task, task, texts.missing(each), [], [], remarks)
    caption = (
        "Left: mean score over seeds. Right: training losses of each seed; records from before "
        "losses were kept have none."
    )
    drawn = _picture(scores_and_losses(made, each), caption)
    return _section(
        *(
            task,
            task,
            f"{texts.about(each.own)} {texts.missing(each)}",
            [drawn],
            texts.tables(made, each),
            remarks,
        )
    )


def _section(
    name: str,
    title: str,
    lead: str,
    pictures: list[Picture],
    tables: list[Table],
    lines: Iterable[str] = (),
) -> dict[str, Any]:
    """Make a section for the template of pages, without scripts."""
    content = {
        "group": name,
        "title": title,
        "lead": lead,
        "notes": [_plain(line) for line in lines],
        "pictures": pictures,
        "tables": tables,
        "informative": True,
        **dict.fromkeys(("interactive", "maps", "charts", "data")),
    }
    view = {"group": name, "title": title}
    return {"view": view, "content": content, "explores": False, "follows": False}


def _plain(line: str) -> str:
    """Remove Markdown marks from a line."""
    return line.replace("`", "")


def _picture(figure: Figure, caption: str) -> Picture:
    return picture(figure, caption, rendered(figure, ("png", "svg")))


def _owners(made: Card) -> Iterator[tuple[str, dict[str, str]]]:
    yield "card", {"scheme": made.layout, "SHA-256 of the source": made.digest or "packaged"}
    for each in made.tasks:
        for run in each.own.runs if each.own is not None else ():
            made_with = {"finished": run.date, **run.made_with}
            yield f"{each.column.task}, seed {run.recorded.seed}", made_with
