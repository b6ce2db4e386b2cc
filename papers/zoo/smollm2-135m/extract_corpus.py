"""Extract the text that the adapters were trained on from Debian packages.

Download the packages of corpus.csv (`apt-get download PACKAGE=VERSION`, Debian bookworm) into a
folder, and give it and a folder for the text:

    python extract_corpus.py packages text

HTML loses its tags, manual pages are rendered by man at 100 columns, and paragraphs that stood in
an earlier file are left out. The last line that is printed has the SHA-256 of all documents, in the
order of their names, joined by a zero byte. `training.toml` states it as `corpus_sha256`.
"""

import csv
import gzip
import hashlib
import html
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_CHARACTERS = 10_000_000
"""A package gives no further document once it has given more."""
READ = re.compile(r"\.(html?|xhtml|xhp|txt|rst|md|texi|info|py|js|el|tex|[1-9][a-z]*)(\.gz)?$")
HIDDEN = re.compile(r"(?is)<(script|style|nav|header|footer)\b.*?</\1>")
BLOCK = re.compile(r"(?i)<(/?p|/?div|br|/?li|/?h\d|/?tr|/?pre|/?dt|/?dd|/?table|/?section)[^>]*>")
TAG = re.compile(r"(?s)<[^>]*>")


def text_of(file: Path) -> str:
    """Return the plain text of a file."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    try:
        text = content.decode("utf8")
    except UnicodeDecodeError:
        text = content.decode("latin1")
    name = file.name.removesuffix(".gz")
    if name.endswith((".html", ".htm", ".xhtml", ".xhp")):
        text = html.unescape(TAG.sub("", BLOCK.sub("\n", HIDDEN.sub("", text))))
    elif re.search(r"\.[1-9][a-z]*$", name):
        command = ["man", "-P", "cat", "--nh", "--nj", "-l", str(file)]
        width = {**os.environ, "MANWIDTH": "100"}
        page = subprocess.run(command, capture_output=True, text=True, env=width, check=False)
        text = re.sub(r".\x08", "", page.stdout)
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def documents(package: Path, seen: set[bytes]) -> list[str]:
    """Return the documents of a package, without paragraphs that are in `seen`; add theirs to
    it.
    """
    found: list[str] = []
    with tempfile.TemporaryDirectory(dir=".") as place:
        subprocess.run(["dpkg", "-x", str(package), place], check=True)
        # The order in which the file system lists the files decides the shuffle.
        files = [file for file in Path(place).rglob("*") if _wanted(file)]
        random.Random(0).shuffle(files)
        for file in files:
            if sum(map(len, found)) > MOST_CHARACTERS:
                break
            paragraphs = []
            for paragraph in text_of(file).split("\n\n"):
                digest = (
                    hashlib.md5(paragraph.encode()).digest()[:8] if len(paragraph) > 60 else None
                )
                if digest is None or digest not in seen:
                    paragraphs.append(paragraph)
                if digest is not None:
                    seen.add(digest)
            text = "\n\n".join(paragraphs)
            if len(text) >= 1500 and sum(map(str.isascii, text)) >= 0.97 * len(text):
                found.append(text)
    return found


def _wanted(file: Path) -> bool:
    regular = file.is_file() and not file.is_symlink() and READ.search(file.name)
    return bool(regular) and 1500 < file.stat().st_size < 3_000_000


def main(packages: Path, target: Path) -> None:
    """Write the documents of all packages into the folder `target`."""
    target.mkdir(exist_ok=True)
    seen: set[bytes] = set()
    table = Path(__file__).with_name("corpus.csv").read_text().splitlines()
    counts = {row["package"]: int(row["documents"]) for row in csv.DictReader(table)}
    for package in sorted(packages.glob("*.deb")):
        name = package.name.split("_")[0]
        kept = documents(package, seen)[: counts[name]]  # the extraction was cut in the last one
        for number, text in enumerate(kept):
            (target / f"{name}-{number:05d}.txt").write_text(text)
    texts = [file.read_text() for file in sorted(target.glob("*.txt"))]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    characters = sum(map(len, texts))
    sys.stdout.write(f"{len(texts)} documents, {characters} characters, sha256 {digest}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
