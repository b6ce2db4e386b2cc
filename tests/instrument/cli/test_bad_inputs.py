"""Every bad input of the catalogue is refused: exit code 2, the whole line as it stands there,
nothing else said, nothing left behind.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
from bad_inputs import TINY, cases, said
from forked import forked

from repo_interp.cli import main
from repo_interp.errors import Note
from repo_interp.explorer.server import kept_token
from repo_interp.models import load as loading
from repo_interp.storage.files import cache_directory


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """A checkpoint that ships is loaded once for all cases that name it: a refusal leaves a model
    as it was.
    """
    load = loading.load
    keep = functools.cache(load)

    def once(path, **options):
        # not one of the case's own folder
        return (keep if Path(path).is_absolute() else load)(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", once)
        yield


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_bad_input_is_refused_in_its_line(case, tmp_path):
    assert said(case, tmp_path) == case.line


def test_a_terminal_that_is_full_or_gone_is_no_traceback():
    with open("/dev/full", "w") as full:
        done = forked(lambda: main(["zoo", "list", "niah"]), stdout=full)
    line = "repo-interp zoo: standard output cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_command_whose_streams_are_closed_is_no_traceback():
    def closed(command):
        sys.stdin = sys.stdout = sys.stderr = None
        return main(command)

    assert forked(lambda: closed(["analyze", "reversal/nope", "--prompts", "-"])).returncode == 2
    assert forked(lambda: closed(["inspect", "reversal/nope"])).returncode == 0


def test_a_user_without_a_home_is_told_to_name_a_directory(monkeypatch):
    def homeless():
        for name in ("HOME", "REPO_INTERP_CACHE", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        os.setuid(54321)  # a number without a name
        assert len(kept_token()) == 43
        cache_directory()

    if os.getuid() != 0:
        pytest.skip("only root may become somebody else")
    assert forked(homeless).stderr.endswith(
        "InputError: there is no home directory to keep files in; name a directory with "
        "REPO_INTERP_CACHE\n"
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: os.chown(file, 54321, 54321), "belongs to another user"),
        (lambda file: file.chmod(0o644), "can be read by other users"),
        (lambda file: file.rename(file.with_name("b")).chmod(0o600) or file.symlink_to("b"), "is a link"),
    ],
)  # fmt: skip
def test_a_token_that_others_may_know_is_refused_by_name(spoil, said, tmp_path, monkeypatch):
    """Found: that of another user, who gave it mode 600, was the address."""
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))
    kept = kept_token()
    assert kept_token() == kept
    if said.startswith("belongs") and os.getuid() != 0:
        pytest.skip("only root may give a file to somebody else")
    spoil(tmp_path / "explore-token")
    with pytest.warns(Note, match=f"explore-token {said}.* has a fresh token; remove the file"):
        assert kept_token() != kept


def test_a_terminal_in_ascii_shows_other_characters_by_their_numbers(tmp_path, monkeypatch):
    """Found: UnicodeEncodeError under PYTHONIOENCODING=ascii."""
    shutil.copytree(TINY, tmp_path / "\u00e9\u4e2d")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "\u00e9\u4e2d"]) == 0
    shown.flush()
    assert b"\\xe9\\u4e2d" in shown.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
