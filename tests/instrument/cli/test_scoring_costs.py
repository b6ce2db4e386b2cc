"""`score` says its cost, keeps every finished prompt, and makes one forward pass per batch."""

import os
import subprocess
import sys

import pytest
from forked import forked
from refusals import refused
from torch.nn.modules.module import register_module_forward_hook

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.experiments.perturbation import Perturbation
from repo_interp.values import field_value


def test_no_command_on_a_toy_imports_transformer_lens(tmp_path):
    commands = [
        "analyze niah/repo --count 1 --measures patterns --experiments none --out a",
        "score reversal/repo --test-sets 3 --count 1 --out s",
        "verify niah/rope --longest 8",
    ]
    script = (
        "import sys\nfrom repo_interp.cli import main\n"
        f"codes = [main(words.split()) for words in {commands!r}]\n"
        "print(codes, 'transformer_lens' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.endswith("[0, 0, 0] False\n"), done.stderr


WORDS = ["score", "reversal/repo", "--test-sets", "3,4", "--count", "3", "--batch-size", "1"]


def counted(work):
    """Result of `work`, and how many passes the whole decoder made meanwhile."""
    passes = []

    def watch(module, *_):
        if hasattr(module, "embed_tokens"):
            passes.append(1)

    with register_module_forward_hook(watch):
        return work(), len(passes)


@pytest.mark.usefixtures("no_figures")
def test_a_killed_score_goes_on_with_the_prompts_that_are_missing(tmp_path, capsys):
    words = [*WORDS, "--out", str(tmp_path / "out")]

    def killed():
        passes = []

        def watch(module, *_):
            if hasattr(module, "embed_tokens"):
                passes.append(1)
                if len(passes) == 5:
                    os._exit(9)

        with register_module_forward_hook(watch):
            return main(words)

    assert forked(killed).returncode == 9
    kept = len(list(tmp_path.rglob("[01]-*.json")))
    assert 0 < kept < 6
    code, resumed = counted(lambda: main([*words, "--resume"]))
    capsys.readouterr()
    code_whole, whole = counted(lambda: main([*WORDS, "--out", str(tmp_path / "whole")]))
    assert (code, code_whole) == (0, 0) and whole - resumed == kept
    first, second = (ri.read_run(tmp_path / name)["scores"] for name in ("out", "whole"))
    assert first["score"].identical(second["score"])
    line = " ".join(capsys.readouterr().out.split())
    assert "6 prompts of up to 14 tokens" in line and "and 6 forward passes in all, on cpu" in line


def test_a_forced_score_is_one_pass_per_batch(tmp_path):
    model = ri.open_model("reversal/repo")
    told, costs = [], []

    def asked(**more):
        return ri.score(
            model, None, ["3", "20"], 4, progress=lambda *done: told.append(done),
            announce=costs.append, **more,
        )  # fmt: skip

    _, passes = counted(lambda: asked(batch_size=1))
    assert passes == costs[0].passes == 8 and costs[0].prompts == 8
    assert told == [(done, 8) for done in range(1, 9)]
    _, passes = counted(lambda: asked(batch_size=4))
    assert passes == costs[1].passes == 2 and told[8:] == [(4, 8), (8, 8)]
    _, passes = counted(lambda: asked(batch_size=4, answers="generated"))
    assert passes == costs[2].passes > 2 and costs[2].tokens == costs[0].tokens
    # with a store, one more of the first prompt says which model the answers are of
    _, passes = counted(lambda: asked(batch_size=1, store=tmp_path / "store"))
    assert passes == 9


def test_without_a_terminal_progress_names_the_layer_of_the_pass():
    from repo_interp.cli.score import _Shown
    from repo_interp.console import Console

    said = []
    model = ri.open_model("reversal/repo")
    shown = _Shown(Console(quiet=True), "x", model, lambda *step: said.append(step))
    with register_module_forward_hook(shown.layer):
        ri.score(
            model, None, ["3"], 2, batch_size=1, progress=shown.progress, announce=shown.announce
        )
    layers = [("scoring prompts", 0, 2, f"layer {layer} of 4") for layer in range(1, 5)]
    assert said[:6] == [("scoring prompts", 0, 2), *layers, ("scoring prompts", 1, 2)]


def test_layers_are_ranges_and_lists_in_settings_too():
    def read(text):
        return field_value(Perturbation(), "layers", text, "perturbation")

    assert read("3-7") == (3, 4, 5, 6, 7) and read("1,4") == (1, 4) and read("0-1, 9") == (0, 1, 9)
    with refused("wanted whole numbers"):
        read("7-3")
