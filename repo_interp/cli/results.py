"""Where the results are, and what could not be drawn: the last lines of analyze, score and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repo_interp.analysis.publication import Published, Results
    from repo_interp.cli.console import Console


def print_results(console: Console, results: Results, published: Published) -> int:
    """Print the paths of the page, the numbers and the figures, and one line per failure; return the exit code, 1 after a failure."""
    from repo_interp.cli.console import plain

    if results.page in published.files:
        console.print(f"[bold]{plain(results.page)}[/bold]  the page to look at", highlight=False)
    drawn = f"{published.figures} figure{'' if published.figures == 1 else 's'} in {published.formats} formats"
    console.print(
        f"{plain(results.data_file)}  the numbers; {plain(results.figures)}  {drawn}",
        highlight=False,
    )
    if published.tables:
        console.print(f"{', '.join(plain(file) for file in published.tables)}  the atlas of heads as a table", highlight=False)
    for note in published.notes:
        console.print(note, style="yellow", highlight=False, markup=False)
    for failure in published.failures:
        console.print(f"not drawn: {failure}", style="yellow", highlight=False, markup=False)
    return 1 if published.failures else 0
