"""The explorer's own server in a thread, for pages and requests to it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from repo_interp.explorer.explored import Explored
from repo_interp.explorer.server import listening, server

TOKEN = "t" * 43


class Served:
    """A server in a thread, which can be ended and started again at the same place."""

    def __init__(self, explored: Explored, port: int | None = None) -> None:
        self.explored, self.place = explored, listening(port)
        self.port = self.place.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/{TOKEN}/"
        self._server = server(explored, TOKEN, self.place)
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self.place]))
        self._thread.start()

    def end(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)
        self.place.close()

    def get(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, headers or {})
        with connection.getresponse() as response:
            answer = response.status, response.read()
        connection.close()
        return answer

    def ask(self, **message: Any) -> Any:
        return json.loads(self.get(f"/{TOKEN}/ask", message)[1])


@contextmanager
def serving(explored: Explored, port: int | None = None) -> Iterator[Served]:
    """An explorer that is served while the context lasts."""
    served = Served(explored, port)
    try:
        yield served
    finally:
        served.end()
