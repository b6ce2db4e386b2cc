"""The corpus of what is installed: what of a package is taken, how repeats are left out and counted, and windows that grow."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path

import numpy as np
import pytest

from position_papers.tasks.installed import (
    PAGES,
    _joined,
    _modules,
    _number,
    _of_modules,
    _of_package,
    _without_repeats,
    repeated,
)
from repo_interp.errors import InputError
from repo_interp.tasks import make_task

SENTENCE = "This is a whole sentence of prose that says what the module does and for whom it was once written."


def paragraphs(count: int, start: int = 0) -> str:
    return "\n\n".join(f"{SENTENCE} Its number is {chr(97 + number)}." for number in range(start, start + count))


@pytest.fixture
def package(tmp_path) -> PathDistribution:
    """A package as pip leaves it: modules, a text, a licence, a README in its metadata."""
    files = {f"made/module_{number}.py": f'"""{paragraphs(6, number)}"""\n\nvalue = {number}\n' * 2 for number in range(8)}
    files |= {"made/notes.md": "Notes.\n\n" + paragraphs(5), "made/LICENSE.txt": "All rights of the licence. " * 40}
    files |= {"made/short.md": "too short", "made/tests/test_made.py": '"""A test."""\n' + "assert True\n" * 60}
    files["made-1.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: made\nVersion: 1.0\n\n# Made\n\n" + paragraphs(7)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    record = "".join(f"{name},,\n" for name in (*files, "made-1.0.dist-info/RECORD"))
    (tmp_path / "made-1.0.dist-info" / "RECORD").write_text(record)
    return PathDistribution(tmp_path / "made-1.0.dist-info")


def test_a_module_is_code_or_prose_and_never_both(package, tmp_path):
    texts = list(_of_package(package))
    assert texts[0].strip().startswith("# Made") and texts[1].startswith("Notes.")
    assert not any("All rights" in text or "assert True" in text or "too short" in text for text in texts)
    modules = [Path(tmp_path / "made" / f"module_{number}.py") for number in range(8)]
    code = {file.read_text() for file in modules if _number(file, tmp_path) % 2 == 0}
    assert 0 < len(code) < 8
    assert {text for text in texts[2:] if "value =" in text} == code
    assert len(texts) == 2 + 8 and texts == list(_of_package(package))


def test_prose_alone_and_code_alone_are_the_two_parts_of_both(package, tmp_path):
    everything = 1 << 62
    both, code, prose = (
        list(_of_modules(_modules(package), tmp_path, *most)) for most in ((everything,) * 2, (everything, 0), (0, everything))
    )
    assert all("value =" in text for text in code) and not any("value =" in text for text in prose)
    assert sorted(both) == sorted([*code, *prose])


def test_pages_are_long_enough_and_lose_nothing():
    texts = [str(number) * (PAGES // 3) for number in range(6)]
    pages = list(_joined(texts))
    assert [len(page) >= PAGES for page in pages] == [True, False]
    assert "\n\n".join(pages) == "\n\n".join(texts)


def test_repeats_are_left_out_and_counted():
    first, second = paragraphs(8), paragraphs(8, 4)
    kept = list(_without_repeats([first, second]))
    assert kept == [first, paragraphs(4, 8)]
    line = "a line of thirty characters ..."
    assert repeated([line, line]) == 0.5
    assert repeated([line, "short", "short"]) == 0.0
    assert repeated(kept) == 0.0 < repeated([first, second])


def test_windows_grow_and_hold_as_many_tokens(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"chapter {number}: " + "the rain in spain stays mainly in the plain. " * 20)
    task = make_task("language", corpus=str(tmp_path), tokens=280, length=16, grown_length=64, longest_test=32)
    shapes = [task.batch(np.random.default_rng(0), 8, progress).tokens.shape for progress in (0.0, 0.49, 0.5, 0.99, 1.0)]
    assert shapes == [(8, 16), (8, 16), (4, 32), (4, 32), (2, 64)]
    assert task.training_length == 64 and task.sources() == {}
    assert task.batch(np.random.default_rng(0), 1).tokens.shape == (1, 64)
    for length in (24, 48, 8):
        with pytest.raises(InputError, match="times a power of two"):
            make_task("language", corpus=str(tmp_path), length=16, grown_length=length)
