"""Draws figures/first/explorer_*.png, the first pictures of the README: the explorer as it opens
and after a click.

python docs/explorer_pictures.py        needs Chromium and the extra [explore]
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from chromium import Browser, executable  # noqa: E402

WIDTH, HEIGHT = 1180, 1400
TOLD = "document.querySelectorAll('.continued .{}').length >= {}"


def sections(browser: Browser) -> bytes:
    """The sections that the story is told by, as a PNG: from the map of heads to the edits, from
    the prompt to the continuation.
    """
    names = ("Heads", "Edits", "Prompt", "Continuation")
    places = [
        f"document.querySelector('section[aria-label={name}]').getBoundingClientRect()"
        for name in names
    ]
    top, bottom = (
        browser.run(f"Math.{end}(...[{', '.join(places)}].map((one) => one.{side}))")
        for end, side in (("min", "top"), ("max", "bottom"))
    )
    clip = {"x": 0, "y": top - 8, "width": WIDTH, "height": bottom - top + 16, "scale": 1}
    return base64.b64decode(browser.send("Page.captureScreenshot", format="png", clip=clip)["data"])


def main() -> None:
    """Start the explorer, take the two pictures and write them."""
    command = [sys.executable, "-m", "repo_interp", "explore", "reversal/repo", "--no-browser"]
    browser = Browser(Path(tempfile.mkdtemp()), executable() or "chromium")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        address = next(
            word for line in served.stdout for word in line.split() if word.startswith("http")
        )
        browser.size(WIDTH, HEIGHT)
        browser.open(address)
        shots = {}
        for name, act, told in (
            (
                "1_opens",
                "",
                TOLD.format("right", 20) + " && document.querySelectorAll('.suggested').length > 0",
            ),
            (
                "2_edited",
                "document.querySelector('.suggested').click()",
                TOLD.format("wrong", 8)
                + " && document.querySelectorAll('.continued span').length === 40",
            ),
        ):
            browser.run(act)
            browser.wait(told)
            shots[name] = sections(browser)
        browser.close()
        served.terminate()
    for name, content in shots.items():
        # A palette would give the color bar of the map false colors
        picture = Image.open(BytesIO(content)).convert("RGB")
        picture.save(ROOT / "figures" / "first" / f"explorer_{name}.png", optimize=True)


if __name__ == "__main__":
    main()
