"""The explorer over HTTP, only for this machine: a page, its modules, and answers to messages.

    GET  /TOKEN/            the page                GET /TOKEN/page/NAME     one of its modules, by a name of a fixed list
    POST /TOKEN/ask         an answer as JSON; or, for "continue" and "suggest", server-sent events

Bound to 127.0.0.1. The address holds a secret token, Host must name this machine and Origin, where
there is one, this server: another page in the same browser can neither read nor ask. No name that a
page sends is a path. There is one model, so messages wait for each other; a newer view of a tab
ends its older one between two layers, and an interruption ends all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from repo_interp.errors import InputError, one_line, warn
from repo_interp.explorer.explored import Explored
from repo_interp.explorer.messages import Asked, message
from repo_interp.storage.files import cache_directory
from repo_interp.storage.records import parse_json

HOST = "127.0.0.1"
MOST_BYTES = 8 << 20
"""Most bytes of a message."""
_STREAMED = ("continue", "suggest")
_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_HEADERS = {
    # Tokens of a prompt may hold HTML, and nothing of it may run or send anything away;
    # plotly.js sets styles and draws pictures as data:, which needs the exceptions
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Explorer</title><link rel="icon" href="data:,"><link rel="stylesheet" href="page/explorer.css">
<script src="page/plotly.js"></script><script type="module" src="page/sources.js"></script></head>
<body data-explorer="http"><main id="explorer" class="explorer"><noscript>The explorer needs JavaScript.</noscript></main></body></html>
"""


class Superseded(Exception):
    """A newer message of the same page has come, or the server ends."""


@cache
def assets() -> Mapping[str, bytes]:
    """Read the files of the page, and plotly.js from the plotly package.

    Returns:
        Contents by name.
    """
    from plotly.offline import get_plotlyjs

    # All names that can be served: a path that a browser sends is only looked up among them
    folders = (
        files("repo_interp.explorer") / "page",
        files("repo_interp.plots.pages") / "page",
    )
    parts = (
        part
        for folder in folders
        for part in folder.iterdir()
        if part.name.endswith((".js", ".css"))
    )
    return {part.name: part.read_bytes() for part in parts} | {"plotly.js": get_plotlyjs().encode()}


class AnswerQueue:
    """One answer at a time, and only to the newest message of each page and kind."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._latest: dict[tuple[str, str], threading.Event] = {}
        self._over = False

    def end(self) -> None:
        """End the work of all pages, between two layers."""
        # A plain value: a handler of signals may interrupt whoever holds the lock of an event
        self._over = True

    def begin(self, asked: Asked) -> Callable[[], None]:
        """End the older work of the same page and kind.

        Args:
            asked: The newest message.

        Returns:
            Function to call before each layer.

        Raises:
            Superseded: In that function, once a newer message has come or all are ended.
        """
        # An event of threads: `check` is called from the thread in which the model runs
        ended, key = threading.Event(), (asked.tab, asked.ask)
        older = self._latest.pop(key, None)
        # Others are short, or a file that the reader wants in any case
        if older is not None and asked.ask in ("view", *_STREAMED):
            older.set()
        self._latest[key] = ended
        # Closed pages send no message.
        while len(self._latest) > 256:
            del self._latest[next(iter(self._latest))]

        def check() -> None:
            if self._over or ended.is_set():
                raise Superseded

        return check

    async def take(self, work: Callable[[], Any], check: Callable[[], None]) -> Any:
        """Run work in its turn.

        Args:
            work: Function without arguments.
            check: Function that raises if the work is not needed any more.

        Returns:
            The result of `work`.
        """
        async with self._lock:
            # Once more in its turn: a newer message may have come while this one waited
            check()
            return await run_in_threadpool(work)


def application(
    explored: Explored, token: str, port: int, turns: AnswerQueue | None = None
) -> Starlette:
    """Make the application that answers below the path /TOKEN/.

    Args:
        explored: Model and prompts.
        token: Secret part of the address.
        port: Port of the server, which the headers of a request must name.
        turns: Turns of the messages; None: new ones.

    Returns:
        The application.
    """
    names = {f"{name}:{port}" for name in (HOST, "localhost")}
    origins, turns = {f"http://{name}" for name in names}, turns or AnswerQueue()

    def refusal(request: Request) -> Response | None:
        # Against DNS rebinding: a foreign name that points to 127.0.0.1 is not answered
        if request.headers.get("host") not in names:
            return _said(f"this server answers to {HOST}:{port} alone", 421)
        # Browsers send no Origin with a plain visit, which is allowed
        if request.headers.get("origin", next(iter(origins))) not in origins:
            return _said(
                "another page asks; open the address that repo-interp explore printed", 403
            )
        # In constant time, so that the token cannot be guessed letter by letter; as bytes, since
        # compare_digest takes no text beyond ASCII
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return _said(
                "the address lacks the token; open the one that repo-interp explore printed", 403
            )
        return None

    async def page(request: Request) -> Response:
        return refusal(request) or Response(
            _PAGE, headers=_HEADERS, media_type="text/html; charset=utf-8"
        )

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if (refused := refusal(request)) is not None:
            return refused
        if name not in assets():
            return _said("there is no such file", 404)
        return Response(
            assets()[name], headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]]
        )

    async def ask(request: Request) -> Response:
        if (refused := refusal(request)) is not None:
            return refused
        try:
            asked = message(parse_json((await _body(request)).decode(), "the request"))
            check = turns.begin(asked)
            if asked.ask in _STREAMED:
                return StreamingResponse(
                    events(asked, check), headers=_HEADERS, media_type="text/event-stream"
                )
            answer = await turns.take(lambda: explored.answer(asked, check), check)
            return JSONResponse(answer, headers=_HEADERS)
        except (Superseded, ClientDisconnect):  # nobody reads the answer
            return JSONResponse({"superseded": True}, headers=_HEADERS)
        except (InputError, UnicodeDecodeError) as error:
            # an answer, too: a browser counts other states as errors of the page
            return _said(one_line(error), 200)

    async def events(asked: Asked, check: Callable[[], None]) -> AsyncIterator[str]:
        source = explored.events(asked, check)
        with suppress(Superseded):
            while True:
                try:
                    # The lock is free between two events: a long stream holds up no view
                    event = await turns.take(lambda: next(source, None), check)
                except InputError as error:
                    event = {"refused": str(error)}
                    yield f"data: {json.dumps(event)}\n\n"
                    return
                yield f"data: {json.dumps(event if event is not None else {'done': True})}\n\n"
                if event is None:
                    return

    paths = [("", page, "GET"), ("page/{name}", asset, "GET"), ("ask", ask, "POST")]
    return Starlette(
        routes=[Route(f"/{{token}}/{path}", call, methods=[method]) for path, call, method in paths]
    )


async def _body(request: Request) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        # While it arrives: a header may understate the length
        if len(content) > MOST_BYTES:
            raise InputError(
                f"the request has more than {MOST_BYTES >> 20} MB; give a shorter text"
            )
    return bytes(content)


def _said(line: str, status: int) -> Response:
    return JSONResponse({"refused": line}, status, headers=_HEADERS)


def listening(port: int | None) -> socket.socket:
    """Listen on this machine.

    Args:
        port: Port; None: any that is free.

    Returns:
        The socket.

    Raises:
        InputError: Another program has the port.
    """
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A server that is started again gets its port, though old connections are still being closed
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((HOST, port or 0))
    except OSError as error:
        place.close()
        raise InputError(
            f"port {port} cannot be used ({error.strerror}); give another with --port"
        ) from None
    place.listen()
    return place


class _Server(uvicorn.Server):
    """A server that an interruption ends without a word about the answers that it cuts off."""

    def __init__(self, config: uvicorn.Config, turns: AnswerQueue) -> None:
        super().__init__(config)
        self._turns = turns

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._turns.end()
        # A layer may take longer than the patience below; uvicorn then cancels the answer and logs
        # the traceback. The next uvicorn.Config sets the level again.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        super().handle_exit(sig, frame)


def server(explored: Explored, token: str, place: socket.socket) -> uvicorn.Server:
    """Make the server; its `run(sockets=[place])` answers until the process is interrupted.

    Args:
        explored: Model and prompts.
        token: Secret part of the address.
        place: Result of `listening`.

    Returns:
        The server.
    """
    turns = AnswerQueue()
    app = application(explored, token, place.getsockname()[1], turns)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        # Streams of open pages would keep an interrupted server alive
        timeout_graceful_shutdown=1,
    )
    return _Server(settings, turns)


def kept_token() -> str:
    """Read the token of this user, so that a page finds a server that was started again.

    Warns if a stored token gives no protection, because others know it or may change it.

    Returns:
        The kept token, or a fresh one.
    """
    fresh = secrets.token_urlsafe(32)
    with suppress(OSError, ValueError):
        file = cache_directory() / "explore-token"
        file.parent.mkdir(parents=True, exist_ok=True)
        # "x" makes the file or fails, so two servers that start at once read the same token
        with suppress(FileExistsError), open(file, "x", opener=_private) as made:
            made.write(fresh)
        if (fault := _fault(file)) is not None:
            warn(f"{file} {fault}, so this address has a fresh token; remove the file")
        elif len(kept := file.read_text("ascii")) == len(fresh):
            return kept
    return fresh


def _fault(file: Path) -> str | None:
    """The reason why a stored token is not a secret of this user; None if it is one."""
    if file.is_symlink():
        return "is a link, which may lead anywhere"
    state = file.stat()
    # Windows has no such numbers, and keeps the files of a user apart by their folder
    if hasattr(os, "getuid") and state.st_uid != os.getuid():
        return "belongs to another user, who knows the token in it"
    return "can be read by other users" if state.st_mode & 0o077 else None


def _private(path: str, flags: int) -> int:
    # The mode at creation: a chmod afterwards would leave the token readable for a moment
    return os.open(path, flags, 0o600)
