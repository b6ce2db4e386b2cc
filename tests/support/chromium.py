"""A headless Chromium, driven over a pipe by its DevTools protocol: JSON messages that end in a
zero byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Under which a Chromium may be installed."""
PATIENCE = 600.0
"""Seconds that a page may take to answer."""


def executable() -> str | None:
    """The path of an installed Chromium; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a headless Chromium; `errors` holds what it wrote to its console as an error, and
    exceptions that nobody caught.
    """

    def __init__(self, directory: Path, path: str) -> None:
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, to_us)]
        os.close(to_browser)
        os.close(to_us)

        def as_chromium_wants() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        flags = (
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        )
        flags += (
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        )
        self._process = subprocess.Popen(
            [path, *flags, f"--user-data-dir={directory}", "about:blank"],
            preexec_fn=as_chromium_wants,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._write, self._read, self._buffer, self._number = from_us, from_browser, b"", 0
        self.errors: list[str] = []
        self._session: str | None = None
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol.

        Raises RuntimeError where the browser refuses it.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, address: str) -> None:
        """Show `address`; return when it is loaded."""
        self.errors.clear()
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of `script`. Raises RuntimeError for an exception in it."""
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Return when `condition` is true. Raises TimeoutError after `PATIENCE` seconds."""
        until = time.monotonic() + PATIENCE
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Make the window so many pixels large, on light or dark paper."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """Press and release `key`, such as "ArrowRight" or "Enter", where the focus is."""
        codes = {
            "Enter": 13,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Escape": 27,
            "Home": 36,
            "End": 35,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        self.send(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=key,
            code=key,
            windowsVirtualKeyCode=codes[key],
            **text,
        )
        self.send(
            "Input.dispatchKeyEvent",
            type="keyUp",
            key=key,
            code=key,
            windowsVirtualKeyCode=codes[key],
        )

    def drag(self, *points: tuple[float, float]) -> None:
        """Press the mouse at the first of `points`, move it over the others and release it at the
        last.
        """
        for place, (x, y) in enumerate(points):
            pressed = {"button": "left", "buttons": 1, "x": x, "y": y}
            self.send(
                "Input.dispatchMouseEvent",
                type="mouseMoved",
                **(pressed if place else {"x": x, "y": y}),
            )
            if not place:
                self.send("Input.dispatchMouseEvent", type="mousePressed", clickCount=1, **pressed)
        x, y = points[-1]
        self.send(
            "Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, x=x, y=y
        )

    def picture(self, path: Path, whole: bool = False) -> Path:
        """Write what is seen, or the whole page, to `path` as PNG."""
        shown = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(b64decode(shown["data"]))
        return path

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], PATIENCE)[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(
                str(details.get("exception", {}).get("description", details["text"]))
            )
        if (
            message.get("method") == "Runtime.consoleAPICalled"
            and message["params"]["type"] == "error"
        ):
            self.errors.append(str(message["params"]["args"]))
        if (
            message.get("method") == "Log.entryAdded"
            and message["params"]["entry"]["level"] == "error"
        ):
            self.errors.append(message["params"]["entry"]["text"])
        return message
