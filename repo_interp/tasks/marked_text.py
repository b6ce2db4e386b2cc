"""A text that is written piece by piece, each piece belonging to named spans. Knows nothing about tokens."""

from __future__ import annotations

from repo_interp.tasks.spans import Intervals


class MarkedText:
    """A text and the character ranges of its spans, grown at the end."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._spans: dict[str, list[tuple[int, int]]] = {}

    def add(self, piece: str, *spans: str) -> None:
        """Write `piece` at the end; it belongs to every one of `spans`, and so do the names they are parts
        of.
        """
        start, self._length = self._length, self._length + len(piece)
        self._pieces.append(piece)
        if not piece:
            return
        whole = {span.rsplit(".", depth)[0]: None for span in spans for depth in range(span.count("."), -1, -1)}
        for span in whole:
            ranges = self._spans.setdefault(span, [])
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], self._length)
            else:
                ranges.append((start, self._length))

    @property
    def text(self) -> str:
        """Everything written so far."""
        return "".join(self._pieces)

    @property
    def characters(self) -> dict[str, Intervals]:
        """Half-open character ranges by span."""
        return {name: tuple(ranges) for name, ranges in self._spans.items()}
