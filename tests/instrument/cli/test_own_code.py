"""No code of a checkpoint ever runs: every command and every loader refuses a checkpoint that names
some, before anything is asked.
"""

import io
import json
import shutil

import pytest
from huggingface_hub.utils import filter_repo_objects
from task_tokenizers import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

import repo_interp as ri
from repo_interp.checkpoint_files.directories import FETCHED
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import main
from repo_interp.models.checkpoints import load_model
from repo_interp.models.configuration import identify
from repo_interp.plugins.adapters.adapter_training import attach, save_adapter
from repo_interp.plugins.adapters.adapters import base_reference
from repo_interp.plugins.gguf import VERSION

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path(__file__).with_name("ran").touch()
Path({mark!r}).touch()


class Evil(PreTrainedTokenizerFast):
    pass
"""
NAMED = {
    "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", None]},
    "config.json": {
        "AutoTokenizer": ["evil.Evil", None],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    },
    "processor_config.json": {"AutoProcessor": "evil.Evil"},
}
"""Files that may name code, and the code that they name."""


@pytest.fixture
def yes(monkeypatch):
    """Whoever asks, is told to go on."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 99))


@pytest.fixture
def mark(tmp_path):
    """The file that is there once the code of a checkpoint has run."""
    return tmp_path / "the code ran"


def evil(directory, mark, named_in="tokenizer_config.json"):
    """A checkpoint in `directory` with code of its own, named in one of its files; it stands there,
    or is one of the zoo.
    """
    if not directory.is_dir():
        shutil.copytree(zoo_path("reversal/repo"), directory)
    (directory / "evil.py").write_text(CODE.format(mark=str(mark)))
    file = directory / named_in
    stated = json.loads(file.read_text()) if file.is_file() else {}
    if named_in == "tokenizer_config.json":
        stated["tokenizer_class"] = "Evil"
    file.write_text(json.dumps(stated | {"auto_map": NAMED[named_in]}))
    return directory


def refused(command, named, mark, capsys):
    assert main(command) == 2
    said = capsys.readouterr()
    assert f"{named} names code of its own (auto_map)" in said.err
    assert said.err.count("\n") == 1 and said.out == "" and not mark.exists()


def test_the_code_would_run_where_transformers_may_run_it(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    AutoTokenizer.from_pretrained(evil(tmp_path / "checkpoint", mark), trust_remote_code=True)
    assert mark.exists()


@pytest.mark.parametrize(
    ("command", "named_in"),
    [
        *(("inspect CHECKPOINT", named_in) for named_in in NAMED),
        ("analyze CHECKPOINT --prompts PROMPTS --out OUT", "tokenizer_config.json"),
        ("score CHECKPOINT reversal --count 1", "config.json"),
        ("train reversal --continue-from CHECKPOINT --out OUT", "config.json"),
        ("train reversal --continue-from CHECKPOINT --adapter 2 --out OUT", "config.json"),
        ("figures repo --no-zoo --checkpoint mine=CHECKPOINT --out OUT", "config.json"),
    ],
)
def test_every_command_refuses_a_checkpoint_with_code(
    tmp_path, mark, yes, capsys, command, named_in
):
    checkpoint = evil(tmp_path / "checkpoint", mark, named_in)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"tokens": [5, 6, 7, 8]}\n')
    for name, path in {"CHECKPOINT": checkpoint, "PROMPTS": prompts, "OUT": out}.items():
        command = command.replace(name, str(path))
    refused(command.split(), checkpoint / named_in, mark, capsys)
    assert not out.exists()


def test_an_adapter_on_a_base_with_code_is_refused(tmp_path, mark, yes, capsys):
    base = shutil.copytree(zoo_path("reversal/rope"), tmp_path / "base")
    model = ri.reposition(load_model(base), "repo")
    attach(model, rank=2)
    save_adapter(model, tmp_path / "adapter", base_reference(identify(base), str(base)))
    assert main(["inspect", str(tmp_path / "adapter")]) == 0
    capsys.readouterr()
    evil(base, mark)
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [5, 6, 7, 8]}\n')
    asked = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    adapter = tmp_path / "adapter"
    refused(["analyze", str(adapter), *asked], base / "tokenizer_config.json", mark, capsys)
    evil(adapter, mark)
    refused(["inspect", str(adapter)], adapter / "tokenizer_config.json", mark, capsys)


def test_a_gguf_file_is_read_without_the_code_beside_it(tmp_path, mark, yes, capsys, monkeypatch):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    checkpoint = evil(tmp_path / "checkpoint", mark)
    (checkpoint / "model.gguf").write_bytes(b"GGUF")
    assert main(["inspect", str(checkpoint / "model.gguf")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not mark.exists()


def test_a_fetched_model_with_code_is_refused(tmp_path, mark, yes, capsys, monkeypatch):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))
    cached = evil(tmp_path / "models" / f"smollm2-135m-{VERSION}", mark)
    refused(["fetch", "smollm2-135m"], cached / "tokenizer_config.json", mark, capsys)
    refused(["inspect", "smollm2-135m"], cached / "tokenizer_config.json", mark, capsys)


def test_a_corpus_in_the_tokens_of_a_tokenizer_with_code_is_refused(tmp_path, mark, yes, capsys):
    tokenizer("metaspace_bpe").save_pretrained(tmp_path / "tokens")
    named = evil(tmp_path / "tokens", mark) / "tokenizer_config.json"
    (tmp_path / "corpus.txt").write_text("The sky is blue. " * 1000)
    corpus = f"corpus={tmp_path / 'corpus.txt'}"
    tokens = f"tokenizer_file={tmp_path / 'tokens' / 'tokenizer.json'}"
    command = ["train", "language", "--set", corpus, "--set", tokens]
    refused([*command, "--out", str(tmp_path / "out")], named, mark, capsys)
    assert not (tmp_path / "out").exists()


def test_the_python_interface_refuses_it_too(tmp_path, mark, yes):
    checkpoint = evil(tmp_path / "checkpoint", mark)
    for load in (ri.load, ri.load_model, identify, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ri.InputError, match="no code of a checkpoint is ever run"):
            load(checkpoint)
    assert not mark.exists()


def test_the_hub_is_asked_for_nothing_that_could_run():
    wanted = (
        "config.json tokenizer.json tokenizer.model model-00001-of-00002.safetensors merges.txt"
    )
    code = "modeling.py tokenizer.py tokenizer.json.py a/b.py model.bin model.pt run.sh"
    files = f"{wanted} vocab.json {code}".split()
    asked = filter_repo_objects(files, allow_patterns=list(FETCHED))
    assert list(asked) == f"{wanted} vocab.json".split()


def test_a_plain_checkpoint_is_still_read(tmp_path):
    shutil.copytree(zoo_path("reversal/repo"), tmp_path / "plain")
    (tmp_path / "plain" / "evil.py").write_text("raise SystemExit")  # named by nothing
    assert ri.layout(ri.load(tmp_path / "plain")) == ri.layout(ri.load("reversal/repo"))
