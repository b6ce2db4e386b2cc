"""Pausing the collector of cyclic garbage: it goes on as before, and nothing is lost to it."""

import gc
import subprocess
import sys

from repo_interp.runtime.collection import collection_paused

GARBAGE = """
import gc, weakref
from repo_interp.runtime.collection import collection_paused

class Node:
    def __init__(self):
        self.itself = self

with collection_paused():
    gone = weakref.ref(Node())
    assert gone() is not None
assert gc.isenabled() and gc.get_freeze_count() == 0
gc.collect()
assert gone() is None
gc.freeze()
frozen = gc.get_freeze_count()
with collection_paused():
    pass
assert gc.get_freeze_count() >= frozen > 0
"""


def fail():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
        raise ValueError


def test_the_collector_rests_inside_and_runs_again_even_after_an_error():
    try:
        fail()
    except ValueError:
        assert gc.isenabled()
    else:
        raise AssertionError


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_is_collected_later_and_what_the_user_froze_stays_frozen():
    subprocess.run([sys.executable, "-c", GARBAGE], check=True)  # the suite has frozen its modules
