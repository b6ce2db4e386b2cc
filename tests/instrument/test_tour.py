"""The reading path of docs/tour.md: its files exist, and it stays short enough to be read in an
evening.
"""

from __future__ import annotations

import re

from places import DOCS


def test_the_reading_path_exists_and_stays_short():
    text = (DOCS / "tour.md").read_text(encoding="utf-8")
    linked = dict.fromkeys(
        (DOCS / path).resolve() for path in re.findall(r"\]\((\.\./repo_interp/[^)]+\.py)\)", text)
    )
    assert len(linked) >= 12
    missing = [path for path in linked if not path.is_file()]
    assert not missing, "a file of the reading path was renamed: follow it in docs/tour.md"
    lines = [line for path in linked for line in path.read_text(encoding="utf-8").splitlines()]
    # comments shorten the reading
    assert sum(not line.lstrip().startswith("#") for line in lines) <= 6950
