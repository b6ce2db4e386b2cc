"""Plots stand on labelled arrays alone: no torch, no neighbour, no global figure."""

import subprocess
import sys

FORBIDDEN = ("torch", "transformers", "transformer_lens", "matplotlib.pyplot", "repo_interp.measures", "repo_interp.tasks")
FORBIDDEN += ("repo_interp.models", "repo_interp.positions", "position_papers.training", "repo_interp.analysis.analyze")
SCRIPT = """
import importlib, pkgutil, sys
import repo_interp.plots
for module in pkgutil.iter_modules(repo_interp.plots.__path__, "repo_interp.plots."):
    importlib.import_module(module.name)
print(" ".join(sys.modules))
"""


def test_plots_load_no_torch_and_no_neighbour():
    loaded = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout.split()
    assert "repo_interp.plots.pages.report" in loaded
    assert [name for name in loaded if name in FORBIDDEN or name.startswith(tuple(f"{name}." for name in FORBIDDEN))] == []
