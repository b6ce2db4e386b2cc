"""`repo-interp train` and `score`: what they leave, what they refuse, and how an interrupted run
goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from trained_tiny import LINE as TINY

from position_papers.commands import train as train_command
from position_papers.commands import zoo as zoo_command
from position_papers.training.configuration import read_toml
from position_papers.training.folder import TrainingFolder
from repo_interp.cli import score_command as score_command
from repo_interp.errors import InputError
from repo_interp.experiments.test_set_scores import task_scores
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.run import read_run
from repo_interp.tasks import make_task


def command(module, line: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(line.split()))


def train(line: str) -> int:
    return command(train_command, line)


def train_tiny(line: str) -> int:
    return train(f"{TINY} {line}")


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_what_it_trains_and_leaves_a_checkpoint_with_all_that_made_it(somewhere, capsys):
    assert train_tiny("--steps 6 --checkpoint-every 3") == 0
    place = somewhere / "runs" / "reversal-repo" / "seed-0"
    checkpoint = {"config.json", "generation_config.json", "model.safetensors"}
    checkpoint |= {"tokenizer.json", "tokenizer_config.json"}
    kept = {"log.jsonl", "scores.json", "steps", "training.toml"}
    assert {file.name for file in place.iterdir()} == checkpoint | kept
    assert {step.name for step in (place / "steps").iterdir()} == {"000003", "000006"}
    said = " ".join(capsys.readouterr().out.split())
    assert "6 steps of 4 sequences, seed 0, on cpu" in said


def test_its_record_trains_the_same_bytes_again(somewhere):
    train_tiny("--steps 6 --out first --scheme-set assignment=layer --seed 3")
    train("--config first/training.toml --out second")
    train("--config first/training.toml --out third --seed 4")
    assert weights("first") == weights("second") != weights("third")
    assert 'assignment = "layer"' in Path("second/training.toml").read_text()


def test_a_finished_run_is_neither_destroyed_nor_repeated(somewhere, capsys):
    train_tiny("--steps 4 --out run")
    before = weights("run")
    with pytest.raises(InputError, match="--overwrite"):
        train_tiny("--steps 5 --out run")
    assert train("--resume --out run") == 0
    assert "run is finished" in capsys.readouterr().out
    assert weights("run") == before
    assert train_tiny("--steps 5 --out run --overwrite") == 0
    assert weights("run") != before


def test_an_interrupt_leaves_a_state_and_says_how_to_go_on(somewhere):
    train_tiny("--steps 100 --out undisturbed")
    folder = TrainingFolder(somewhere / "run")

    def interrupt() -> None:
        while not folder.log.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match=r"--resume --out run$"):
        train_tiny("--steps 100 --out run")
    thread.join()
    assert not folder.is_finished
    with pytest.raises(InputError, match="--resume"):
        train_tiny("--steps 100 --out run")
    with pytest.raises(InputError, match="another steps"):
        train_tiny("--steps 90 --out run --resume")
    assert train("--resume --out run") == 0
    assert weights("run") == weights("undisturbed")


def test_scores_by_length_in_a_run_file_forced_and_generated_alike(somewhere):
    train_tiny("--steps 40 --learning-rate 0.02 --out run")
    assert command(score_command, "run --count 30 --out forced") == 0
    assert command(score_command, "run --count 30 --out generated --answers generated") == 0
    forced, generated = (read_run(name)["scores"] for name in ("forced", "generated"))
    assert forced.mean_score.dims == ("test_set",)
    assert forced.test_set.values.tolist() == ["2", "3", "4", "5"]
    assert (forced.score.values == generated.score.values).all()
    assert float(forced.mean_score.max()) > 0
    assert (forced.score_map.sel(length=[2, 3, 4, 5]).values == forced.mean_score.values).all()
    assert "log_perplexity" in forced and "log_perplexity" not in generated
    for line, refused in (
        ("--out forced", "--overwrite"),
        ("niah", "tokens, the checkpoint"),
        ("--scaling magic:2", "yarn:FACTOR"),
    ):
        with pytest.raises(InputError, match=refused):
            command(score_command, f"run {line}")
    assert command(score_command, "run --count 3 --test-sets 2 --scaling yarn:2 --out scaled") == 0


def test_what_is_continued_is_not_removed_to_make_room(somewhere):
    train_tiny("--steps 4 --checkpoint-every 2 --out run")
    before = weights("run")
    for continued in ("run", "run/steps/000002", "./run/../run"):
        on = f"reversal --scheme rope --continue-from {continued} --steps 2"
        with pytest.raises(InputError, match="--overwrite would remove it with run"):
            train(f"{on} --out run --overwrite")
    assert weights("run") == before


def test_prompts_beyond_a_learned_table_are_left_out_and_said(somewhere):
    """Found when a language model with learned absolute positions had trained for a quarter of an
    hour and could not be scored.
    """
    size = {"length": 64, "first_length": 64, "longest_test": 128}
    task = " ".join(f"--set {name}={value}" for name, value in size.items())
    sizes = "--layers 1 --width 16 --heads 2 --steps 2 --batch 2 --score-prompts 4"
    assert train(f"niah --scheme learned {sizes} {task} --out learned") == 0
    means = json.loads(Path("learned/scores.json").read_text())["test_sets"]
    assert {name: value is None for name, value in means.items()} == {"64": False, "128": True}
    result = task_scores(as_decoder(load_model("learned")), make_task("niah", **size), count=4)
    assert result["test_set"].values.tolist() == ["64"] and result.attrs["left_out"] == ["128"]


def test_a_run_goes_on_on_another_device(somewhere):
    train_tiny("--steps 6 --out other")
    stated = Path("other/training.toml").read_text()
    text = stated.replace('device = "cpu"', 'device = "cuda"')
    TrainingFolder(somewhere / "run").begin(text)
    assert train("--resume --out run --device cpu") == 0
    assert weights("other") == weights("run")
    TrainingFolder(somewhere / "again").begin(text)
    with pytest.raises(InputError, match="was begun with another steps"):
        train("--resume --out again --device cpu --steps 7")


def test_the_record_names_the_device_that_auto_found_and_whether_sums_have_one_order(somewhere):
    for out, asked, order in (("a", "", None), ("b", "--no-deterministic", False)):
        assert train_tiny(f"--steps 2 --score-every 0 --device auto {asked} --out {out}") == 0
        stated = read_toml(Path(out) / "training.toml")
        assert stated["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
        assert stated["deterministic"] is ((stated["device"] == "cpu") if order is None else order)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize(
    ("module", "line"), [(train_command, TINY), (zoo_command, "train reversal")]
)
def test_a_device_that_is_not_here_is_refused_before_anything_is_written(somewhere, module, line):
    with pytest.raises(InputError, match=r"^device 'cuda' is not available here \(.*\); use cpu$"):
        command(module, f"{line} --device cuda")
    assert list(somewhere.iterdir()) == []
