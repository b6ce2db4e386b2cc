"""The explorer in a notebook: the modules of the page in an anywidget; no port is opened.

    page -> kernel    {"number": n, "message": {"ask": ...}}     a message of `messages`; of "continue" and "suggest" the first event
                      {"number": n, "message": {"more": stream}} the next event of a stream
    kernel -> page    {"number": n, "answer": {...}}             the answer, or one of
                      {"refused": line}  {"stream": s, "event": {...}}  {"done": true}

The page requests each event of a stream, so it stops a stream by sending no more requests, and the
kernel is free between two events. Each widget has separate passes, and no hook stays on the bridge
between two messages: several widgets on one bridge do not affect each other.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from repo_interp.errors import InputError
from repo_interp.explorer.explored import Explored
from repo_interp.explorer.messages import message
from repo_interp.plots.pages.frame import packaged, packed

try:
    import anywidget
except ImportError:
    raise InputError(
        "anywidget is not installed, and ri.explore needs it; pip install 'repo-interp[widget]'"
    ) from None

MODULES = (
    "dom.js",
    "charts.js",
    "map.js",
    "looking.js",
    "table.js",
    "tour.js",
    "explorer.js",
    "link.js",
    "sides.js",
    "sources.js",
)
"""In the order of their imports."""
# A page never reports that it stops: with more streams, the oldest one ends
MOST_STREAMS = 4


def _text(name: str) -> str:
    # Some modules are shared with the page of results and belong to `plots`
    file = files("repo_interp.explorer") / "page" / name
    return file.read_text(encoding="utf-8") if file.is_file() else packaged(name)


_LOADER = """
const texts = TEXTS;
let loaded;

// The modules import each other by name, and a notebook serves no names: each becomes an object of its own, whose address the others get.
function modules() {
  const places = {};
  for (const [name, text] of texts) {
    let named = text;
    for (const [other, place] of Object.entries(places)) named = named.replaceAll('"./' + other + '"', JSON.stringify(place));
    places[name] = URL.createObjectURL(new Blob([named], { type: "text/javascript" }));
  }
  return Promise.all(["dom.js", "sources.js", "sides.js"].map((name) => import(places[name]))).then((all) => Object.assign({}, ...all));
}

async function plotly(source) {
  if (window.Plotly) return;
  const { inflated } = await loaded, text = await inflated((await source.ask({ ask: "plotly" })).packed);
  const alone = ["(function () { var define, module, exports;", text, "\\n}).call(window)"]; // no loader of a notebook takes it
  const src = URL.createObjectURL(new Blob(alone, { type: "text/javascript" }));
  await new Promise((onload, onerror) => {
    document.head.append(Object.assign(document.createElement("script"), { src, onload, onerror }));
  });
}

export default {
  async render({ model, el }) {
    const { sides, KernelSource } = await (loaded ||= modules());
    const sources = [new KernelSource(model)], root = el.appendChild(document.createElement("div"));
    root.className = "explorer";
    await plotly(sources[0]);
    sides(root, (number) => sources[sources.push(new KernelSource(model, number)) - 1], false);
    return () => sources.forEach((source) => source.close());
  },
};
"""


class ExplorerWidget(anywidget.AnyWidget):
    """The explorer as a cell's output; `ri.explore` makes it."""

    # anywidget takes one module, so all others travel inside it as text
    _esm = _LOADER.replace("TEXTS", json.dumps([[name, _text(name)] for name in MODULES]))
    _css = _text("explorer.css")

    def __init__(self, explored: Explored) -> None:
        super().__init__()
        self._explored = explored
        self._numbers = itertools.count(1)
        self._streams: OrderedDict[int, Iterator[dict[str, Any]]] = OrderedDict()
        self.on_msg(self._receive)

    def __repr__(self) -> str:
        return f"<the explorer of {self._explored.title}>"

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        given = content if isinstance(content, dict) else {}
        try:
            answer = self.answer(given.get("message"))
        except InputError as error:
            answer = {"refused": str(error)}
        # The number identifies the message that this answers
        self.send({"number": given.get("number"), "answer": answer})

    def answer(self, given: Any) -> dict[str, Any]:
        """The answer to a message. Raises InputError for one that does not fit."""
        if given == {"ask": "plotly", "model": 0}:
            # Sent separately, packed, and only on request: it has megabytes
            from plotly.offline import get_plotlyjs

            return {"packed": packed(get_plotlyjs())}
        if isinstance(given, dict) and set(given) == {"more"}:
            return self._next(given["more"])
        asked = message(given)
        if asked.ask not in ("continue", "suggest"):
            return self._explored.answer(asked)
        stream = next(self._numbers)
        self._streams[stream] = self._explored.events(asked)
        while len(self._streams) > MOST_STREAMS:
            self._streams.popitem(last=False)
        return self._next(stream)

    def _next(self, stream: Any) -> dict[str, Any]:
        """Return the next event of a stream; done at its end, or where newer ones replaced it."""
        known = isinstance(stream, int) and stream in self._streams
        event = next(self._streams[stream], None) if known else None
        if event is None and known:
            del self._streams[stream]
        return {"done": True} if event is None else {"stream": stream, "event": event}
