"""Work side by side, without importing torch in every process."""

from __future__ import annotations

import multiprocessing

import pytest


@pytest.fixture
def forking(request, monkeypatch):
    """Processes are forked from this one; those that a user's command starts are fresh, as in
    tests/papers/test_training.py.
    """
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: fork)
    request.node.add_marker(pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"))
