"""Ctrl-C while a command makes long prompts: one line, no lock, nothing that is waited for."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time

import pytest
from forked import forked

from repo_interp.cli import main
from repo_interp.runtime.interruptible import abandoned, interruptible
from repo_interp.storage.files import LOCK
from repo_interp.tasks.essay import Essay


def test_a_call_that_is_interrupted_goes_on_alone():
    free = threading.Event()

    def call():
        _thread.interrupt_main()
        free.wait()

    assert interruptible(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)
    assert not abandoned()
    with pytest.raises(KeyboardInterrupt):
        interruptible(call)
    assert abandoned()
    free.set()
    while abandoned():
        time.sleep(0.001)


def test_an_essay_that_was_interrupted_has_its_words_again():
    stops = [KeyboardInterrupt()]

    def paragraphs():
        yield "one two"
        if stops:
            raise stops.pop()
        yield "three four"

    essay = Essay(paragraphs)
    with pytest.raises(KeyboardInterrupt):
        essay.words(5)
    assert essay.words(5) == ["one", "two", "three", "four", "one"]


def test_interrupted_while_prompts_are_made(tmp_path):
    """The tokenizer is at work on the first prompt, with a million characters."""
    words = "score language/rope ruler --set variant=single_1 --test-sets 400000 --count 1 --out"
    out = tmp_path / "out"

    def interrupt():
        while not abandoned():
            time.sleep(0.001)
        assert (out / LOCK).exists()
        os.kill(os.getpid(), signal.SIGINT)

    def work():
        threading.Thread(target=interrupt, daemon=True).start()
        return main([*words.split(), str(out)])

    ended = forked(work)
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[-1] == "repo-interp score: interrupted"
    assert "Traceback" not in ended.stderr and not out.exists()
