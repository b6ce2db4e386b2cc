"""A command chooses threads by the size of its model; the user's number wins."""

import os
import subprocess
import sys

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


NUMPY_AND_BLAS = """
import os, sys
from repo_interp.cli import main
numpy = "numpy" in sys.modules
main(sys.argv[1:])
print(numpy, os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ("", {}, "False 1"),
        ("--threads 3", {}, "False 3"),
        ("", {"OMP_NUM_THREADS": "2"}, "False None"),
        ("", {"OPENBLAS_NUM_THREADS": "2"}, "False 2"),
    ],
)
def test_numpy_is_told_its_threads_before_it_is_imported(tmp_path, options, environment, expected):
    kept = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    command = f"analyze {tmp_path / 'missing'} {options}"
    child = subprocess.run(
        [sys.executable, "-c", NUMPY_AND_BLAS, *command.split()],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.split() == expected.split()
