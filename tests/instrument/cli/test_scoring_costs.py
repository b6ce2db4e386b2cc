"""`score` says its cost, keeps every finished prompt, and makes one forward pass per batch."""

import os
import sys

import pytest
from forked import forked
from torch.nn.modules.module import register_module_forward_hook

import repo_interp as ri
from repo_interp.cli import main


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    "command",
    [
        "analyze niah/repo --count 1 --measures patterns --experiments none --out a",
        "score reversal/repo --test-sets 3 --count 1 --out s",
        "verify niah/rope --longest 8",
    ],
)
def test_no_command_on_a_toy_imports_transformer_lens(command, tmp_path, monkeypatch):
    for name in ("transformer_lens", "repo_interp.models.bridge"):
        monkeypatch.setitem(sys.modules, name, None)  # whose import is an error
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0


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

    def asked(**more):
        """How many passes are made and said, and what is told of the progress and the cost."""
        told, costs = [], []
        watched = {"progress": lambda *done: told.append(done), "announce": costs.append}
        _, passes = counted(lambda: ri.score(model, None, ["3", "20"], 4, **watched, **more))
        return (passes, costs[0].passes), told, costs[0]

    passes, told, one_by_one = asked(batch_size=1)
    assert passes == (8, 8) and told == [(done, 8) for done in range(1, 9)]
    passes, told, _ = asked(batch_size=4)
    assert passes == (2, 2) and told == [(4, 8), (8, 8)]
    (passes, said), _, generated = asked(batch_size=4, answers="generated")
    assert passes == said > 2 and generated.tokens == one_by_one.tokens
    # with a store, one more of the first prompt says which model the answers are of
    assert asked(batch_size=1, store=tmp_path / "store")[0] == (9, 8)


def test_without_a_terminal_progress_names_the_layer_of_the_pass():
    from repo_interp.cli.score_command import _Shown
    from repo_interp.runtime.console import Console

    said = []
    model = ri.open_model("reversal/repo")
    shown = _Shown(Console(quiet=True), "x", model, lambda *step: said.append(step))
    with register_module_forward_hook(shown.layer):
        ri.score(
            model, None, ["3"], 2, batch_size=1, progress=shown.progress, announce=shown.announce
        )
    layers = [("scoring prompts", 0, 2, f"layer {layer} of 4") for layer in range(1, 5)]
    assert said[:6] == [("scoring prompts", 0, 2), *layers, ("scoring prompts", 1, 2)]
