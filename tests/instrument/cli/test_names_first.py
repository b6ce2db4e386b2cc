"""A wrong name costs neither a model's load nor the import of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tiny_models import small_model
from repo_interp.cli import main
from repo_interp.models import load as loading

WITHOUT_TORCH = """
import contextlib, io, sys

class Heavy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} was imported")

from repo_interp.cli import main

for command in sys.stdin.buffer.read().decode().splitlines():
    code = main(command.split())
    print(code, *sys.modules.keys() & {"torch", "transformers", "lm_eval"}, flush=True)
sys.meta_path.insert(0, Heavy())
with contextlib.suppress(ImportError):
    main(["verify", "niah/rope"])
"""
NAMES = {
    "analyze nowhere": "there is no checkpoint directory nowhere",
    "analyze owner/name/more": "there is no checkpoint directory owner/name/more",
    "analyze --prompts nonsense.jsonl": "nonsense.jsonl: wanted a prompts file",
    "analyze --layers 0,4": "layer 4 was asked for; the model's are 0 to 3",
    "analyze --heads 9": "head 9 was asked for; the model's are 0 to 3",
    "analyze --set nonsense.x=1": "there is no measure 'nonsense'",
    "analyze --device nonsense": "device 'nonsense' is not available here (no such kind of device)",
    "analyze --text x --length 9": "--length is of prompts that are made",
    "analyze --max-memory 0=1GiB": "--max-memory is for a model that is spread over devices",
    "analyze --resume": "--resume needs a directory",
    "analyze --out /dev/null": "/dev/null is a file; wanted a directory",
    "analyze --task few_shot": "there is no task 'few_shot'; there are ruler, reversal, niah,",
    "analyze --measures nonsense": "there is no measure 'nonsense'",
    "analyze --experiments nonsense": "there is no experiment 'nonsense'",
    "analyze niah/nonsense": "no checkpoint 'niah/nonsense' is installed",
    "compare nowhere": "there is no run at nowhere",
    "compare nowhere --out /dev/null": "/dev/null is a file; wanted a directory",
    "explore nowhere": "there is no checkpoint directory nowhere",
    "explore nowhere.nc": "there is no run at nowhere.nc",
    "explore --against nowhere": "there is no checkpoint directory nowhere",
    "explore --prompts nonsense.jsonl": "nonsense.jsonl: wanted a prompts file",
    "explore --checkpoint niah/rope": "--checkpoint is of a run",
    "explore --port ٣٣٣٣": "wanted a port from 1 to 65535, not '٣٣٣٣'",
    "explore --against niah/nonsense": "no checkpoint 'niah/nonsense' is installed",
    "fetch nonsense": "there is no packaged model 'nonsense'",
    "figures nonsense": "there are no figures of 'nonsense'",
    "figures hope --checkpoint a=niah/nonsense": "no checkpoint 'niah/nonsense' is installed",
    "figures hope --formats nonsense": "wanted some of png,svg,pdf,nc",
    "inspect nowhere": "there is no checkpoint directory nowhere",
    "score nowhere": "there is no checkpoint directory nowhere",
    "score niah/repo --test-sets nonsense": "wanted a test set named by the number of tokens",
    "score niah/repo --task-size nonsense": "wanted a size, one of small, paper",
    "score niah/repo --set nonsense=1": "task niah has no option 'nonsense'",
    "score niah/repo --out /dev/null": "/dev/null is a file; wanted a directory",
    "score niah/repo lm-eval:nonsense": "lm-eval has no task 'nonsense'",
    "score niah/repo few_shot --set rows=nowhere.tsv": "there is no file nowhere.tsv",
    "score niah/repo few_shot --set shots=x": "few_shot.shots=x: wanted whole numbers",
    "score niah/repo ruler --set essay=nowhere.txt": "nowhere.txt: wanted a text file",
    "score niah/repo ruler --set depth=200": "wanted a depth of 0 to 100 percent",
    "score niah/repo ruler --test-sets ٣": "lengths in tokens, such as 4096; got",
    "score niah/repo nonsense": "there is no task 'nonsense'; there are ruler, few_shot, lm-eval:NAME,",
    "score niah/repo --scaling nonsense:2": "scaling 'nonsense:2' is unknown",
    "score niah/repo ruler --set variant=nonsense": "wanted one of single_1,",
    "score niah/repo ruler --set nonsense=1": "ruler has no option 'nonsense'",
    "train nonsense": "there is no task 'nonsense'",
    "train reversal --task-size nonsense": "wanted a size, one of small, paper",
    "train reversal --scheme nonsense": "unknown position scheme 'nonsense'",
    "train reversal --continue-from niah/nonsense": "no checkpoint 'niah/nonsense' is installed",
    "train reversal --continue-from nowhere": "there is no checkpoint directory nowhere",
    "train reversal --out /proc/nowhere": "/proc/nowhere cannot be written",
    "train reversal --out /dev/null": "/dev/null is a file; wanted a directory",
    "train reversal --device nonsense": "device 'nonsense' is not available here",
    "train reversal --layers 0": "layers is 0; wanted a whole number from 1 to 1,000",
    "train reversal --scheme repo@9": "layout 'repo@9' starts at layer 9",
    "train reversal --set nonsense=1": "task reversal has no option 'nonsense'",
    "train reversal --scheme-set nonsense=1": "the scheme has no option 'nonsense'",
    "train reversal --overwrite --batch 0": "batch is 0; wanted a whole number",
    "train --config nowhere.toml": "there is no configuration file nowhere.toml",
    "train --resume --out nowhere": "no task was named; give one of reversal,",
    "train": "no task was named; give one of reversal,",
    "verify nowhere": "there is no checkpoint directory nowhere",
    "verify niah/repo nowhere": "there is no checkpoint directory nowhere",
    "verify niah/repo nowhere.npz": "there is no file nowhere.npz",
    "verify niah/repo --out /dev/null": "/dev/null is a file; wanted a directory",
    "verify niah/repo --cache nowhere.npz --tokens nowhere.json": "there is no file nowhere.npz",
    "verify niah/repo --longest 0": "wanted a whole number from 1 to 16,777,216",
    "verify niah/repo --dtype nonsense": "invalid choice: 'nonsense'",
    "zoo list nonsense": "no checkpoint nonsense is installed",
    "zoo plan nonsense": "the zoo has no 'nonsense'",
    "zoo train nonsense": "the zoo has no 'nonsense'",
    "zoo train reversal --device nonsense": "device 'nonsense' is not available here",
    "zoo train reversal --into /dev/null": "/dev/null is a file; wanted a directory",
    "zoo train reversal --into /proc/nowhere": "/proc/nowhere cannot be written",
}


def test_wrong_names_are_refused_before_torch_is_imported(tmp_path):
    """Found: refused after 12 to 20 seconds."""
    given = "\n".join(NAMES)
    program, pipes = [sys.executable, "-c", WITHOUT_TORCH], {"capture_output": True, "text": True}
    done = subprocess.run(program, input=given, cwd=tmp_path, **pipes)
    *codes, verified = done.stdout.splitlines()
    assert codes == ["2"] * len(NAMES), done.stderr
    assert verified == "auditing niah/rope on cpu", (
        "verify says what it does before it imports torch"
    )
    # on a slow machine
    said = [line for line in done.stderr.splitlines() if "importing torch" not in line]
    for line, (command, refusal) in zip(said, NAMES.items(), strict=False):
        assert line.startswith(f"repo-interp {command.split()[0]}: ") and refusal in line


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("analyze niah/repo --set nonsense.x=1", "there is no measure 'nonsense'"),
        (
            "analyze niah/repo --set effects.kinds=nonsense",
            "effects.kinds=nonsense: wanted some of linearised,",
        ),
        ("analyze niah/repo --layers 0,4", "layer 4 was asked for; the model's are 0 to 3"),
        ("analyze niah/repo --prompts nonsense.jsonl", "nonsense.jsonl: wanted a prompts file"),
        (
            "score niah/repo --test-sets nonsense",
            "wanted a test set named by the number of tokens, got 'nonsense'",
        ),
        ("score niah/repo --set nonsense=1", "task niah has no option 'nonsense'"),
    ],
)
def test_names_inside_a_measure_or_a_task_are_refused_before_a_model_is_loaded(
    command, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(loading, "load_model")
    assert main(command.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("no_pictures")
def test_a_configuration_with_other_heads_in_every_layer_is_analyzed(tmp_path, monkeypatch):
    """Its number of heads is no single one, and reading it raises an error of transformers."""
    monkeypatch.chdir(tmp_path)
    small_model("dots3_note_text").save_pretrained("model")
    Path("prompts.jsonl").write_text('{"tokens": [3, 4, 5, 6]}\n')
    asked = (
        "analyze model --prompts prompts.jsonl --measures octaves --heads 1 --layers 3 --out out"
    )
    assert main(asked.split()) == 0
