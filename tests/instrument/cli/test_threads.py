"""A command chooses threads by the size of its model; the user's number wins."""

import pytest
import torch
from torch import nn

from repo_interp.cli import main, threads

SMALL_MODEL, LARGE_MODEL = nn.Linear(8, 8), nn.Linear(8, 8, device="meta")


@pytest.fixture(autouse=True)
def torch_threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model", "given", "environment", "expected"),
    [
        (SMALL_MODEL, None, None, 1),
        (SMALL_MODEL, 2, None, 2),
        (SMALL_MODEL, None, "2", None),
        (SMALL_MODEL, 2, "1", 2),
        (LARGE_MODEL, None, None, None),
    ],
)
def test_a_small_model_on_a_processor_takes_one(monkeypatch, model, given, environment, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert threads.use_threads(model, given) == expected
    assert expected is None or torch.get_num_threads() == expected


def test_a_model_of_many_parameters_keeps_torchs_own_number(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "SMALL", 72)  # the weights and biases of SMALL_MODEL
    assert threads.use_threads(SMALL_MODEL, None) is None


@pytest.mark.usefixtures("no_figures")
def test_the_first_line_says_the_number(tmp_path, capsys):
    command = f"analyze reversal/rope --count 1 --measures positions --out {tmp_path / 'out'}"
    assert main([*command.split(), "--threads", "2"]) == 0
    assert "on cpu with 2 threads" in " ".join(capsys.readouterr().out.split())
