"""Somebody else's files choose no file and no folder of their reader: one test for each kind of
file that is read.

`watched` is a folder of the reader. Every value of a checkpoint, a run or a log that could be a
path leads there, and what Python opens there is seen by an audit hook; what other libraries open
themselves would be seen in the results.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import h5netcdf
import numpy as np
import pytest
import torch
import xarray as xr
from refusals import refused
from task_tokenizers import tokenizer
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
)

import repo_interp as ri
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import _parser, main
from repo_interp.cli.explore_command import _explored, _given
from repo_interp.models.checkpoints import identify, load_model
from repo_interp.plugins.adapters.adapter_training import attach, save_adapter
from repo_interp.plugins.adapters.adapters import base_reference
from repo_interp.storage.files import sealed

WORD = "quetzalcoatlus"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
OPENED: list[str] = []
sys.addaudithook(
    lambda event, given: (
        OPENED.append(str(given[0])) if event in ("open", "os.scandir", "os.listdir") else None
    )
)


@pytest.fixture
def watched(tmp_path):
    """A folder of the reader: texts, a vocabulary, a tokenizer and a checkpoint."""
    folder = tmp_path / "private"
    shutil.copytree(zoo_path("reversal/rope"), folder)
    tokenizer("metaspace_bpe").save_pretrained(folder)
    (folder / "diary.txt").write_text(f"The {WORD} of my diary says so. " * 800)
    (folder / "vocab.txt").write_text(f"{WORD}\n[UNK]\n")
    OPENED.clear()
    return folder


def explored(*words):
    arguments = _parser(["explore"]).parse_args(["explore", *words])
    return _explored(arguments, _given(arguments))


def opened_in(folder):
    return {Path(path).name for path in OPENED if Path(path).is_relative_to(folder)}


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny decoder of text in its own tokens."""
    words, directory = tokenizer("metaspace_bpe"), tmp_path / "downloaded"
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=64, **SIZES)
    LlamaForCausalLM(config).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def changed(file, **keys):
    stated = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(stated | keys))


def recorded(directory, **options):
    """Writes training.toml, as if the checkpoint was trained on `language` with `options`."""
    lines = ['task = "language"', "[task_options]"]
    for name, value in {"length": 16, "longest_test": 32, **options}.items():
        lines.append(f"{name} = {json.dumps(value)}")
    (directory / "training.toml").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("command", "option"), [("analyze", "corpus"), ("score", "tokenizer_file")]
)
def test_a_record_of_training_names_no_path(command, option, checkpoint, watched, tmp_path, capsys):
    place = watched if option == "corpus" else watched / "tokenizer.json"
    recorded(checkpoint, **{option: str(place)})
    if option == "tokenizer_file":
        for file in checkpoint.glob("tokenizer*"):  # else its own is taken
            file.unlink()
    assert main([command, str(checkpoint), "--count", "1", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert f"give --set {option}={option.upper()}" in said.err and said.out == ""
    assert "Traceback" not in said.err
    assert not opened_in(watched) and not (tmp_path / "out").exists()


def test_every_other_way_to_a_recorded_task_refuses_a_path_too(checkpoint, watched):
    recorded(checkpoint, corpus=str(watched))
    bridge = ri.load(checkpoint)
    for made in (
        lambda: ri.analyze(bridge, measures=["attention_mass"]),
        lambda: ri.score(bridge, count=1),
        lambda: trained_task(checkpoint),
        lambda: explored(str(checkpoint)),
    ):
        with refused("no file from outside chooses what is read here"):
            made()
    assert not opened_in(watched)


@pytest.mark.usefixtures("no_figures")
def test_the_user_gives_the_path_and_the_run_says_where_prompts_came_from(
    checkpoint, watched, tmp_path, capsys
):
    recorded(checkpoint, corpus="/somewhere/else", tokenizer_file="/somewhere/else.json")
    file = tmp_path / "prompts.txt"
    file.write_text("the cat sees a tree")
    task, rows = (
        f"--set corpus={watched / 'diary.txt'} --count 1",
        "analyze --measures attention_rows",
    )
    for number, (words, source) in enumerate(
        (
            (f"{rows} --length 16 {task}", "the task language on diary.txt"),
            (f"score --test-sets 16 {task}", "the task language on diary.txt"),
            (f"{rows} --text the-cat", "--text"),
            (f"{rows} --prompts {file}", "the file prompts.txt"),
        )
    ):
        command, *options = words.split()
        out = str(tmp_path / str(number))
        assert main([command, str(checkpoint), *options, "--out", out]) == 0
        assert f"from {source}" in " ".join(capsys.readouterr().out.split())
        assert ri.read_run(out).attrs["prompts_from"] == source


def test_a_corpus_with_a_name_may_be_recorded(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))
    recorded(checkpoint, corpus="pinned-prose")
    task = trained_task(checkpoint)
    assert task is not None and task.options()["corpus"] == "pinned-prose"
    assert task.origin == "the task language on pinned-prose"
    assert task.options()["tokenizer_file"] == str(checkpoint / "tokenizer.json")


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("tokenizer_config.json", "vocab_file"),
        ("special_tokens_map.json", "vocab"),
        ("tokenizer_config.json", "sp_model_kwargs"),
    ],
)
def test_a_tokenizer_names_no_file_elsewhere(file, key, checkpoint, watched, capsys):
    """Found: a vocabulary of another folder is read so, and its lines become the texts of
    tokens.
    """
    place = str(watched / "vocab.txt")
    changed(checkpoint / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    named = {"model_file": place} if key == "sp_model_kwargs" else place
    changed(checkpoint / file, **{key: named})
    (checkpoint / "tokenizer.json").unlink()
    assert main(["inspect", str(checkpoint)]) == 2
    assert f"{file} names a file of this machine" in capsys.readouterr().err
    with refused("names a file of this machine"):
        ri.load(checkpoint)


def test_an_author_s_own_paths_that_nothing_reads_are_passed_over(checkpoint, watched):
    names = {"special_tokens_map_file": str(watched / "vocab.txt"), "name_or_path": str(watched)}
    changed(checkpoint / "tokenizer_config.json", **names, vocab_file="/of/the/author/vocab.txt")
    changed(checkpoint / "config.json", _name_or_path=str(watched), name_or_path=str(watched))
    assert WORD not in ri.load(checkpoint).tokenizer.get_vocab() and not opened_in(watched)


def test_an_adapter_of_peft_beside_weights_leads_to_no_base(checkpoint, watched):
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    changed(checkpoint / "adapter_config.json", base_model_name_or_path=str(watched), **adapter)
    shutil.copy(checkpoint / "adapter_config.json", experts(checkpoint.parent / "experts"))
    for directory in (checkpoint, checkpoint.parent / "experts"):
        with suppress(ri.InputError):  # or the adapter is refused
            ri.load(directory)
        assert not opened_in(watched)


def experts(directory):
    """A checkpoint whose weights transformers reads."""
    experts = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    config = Qwen3MoeConfig(vocab_size=64, head_dim=16, **experts, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("named", ["whole path", "short name"])
def test_an_adapter_opens_a_folder_of_its_reader_only_for_the_weights_that_it_states(
    named, watched, tmp_path, monkeypatch, capsys
):
    base = shutil.copytree(zoo_path("reversal/repo"), tmp_path / "base")
    model = ri.reposition(load_model(base), "repo")
    attach(model, rank=2)
    save_adapter(model, tmp_path / "adapter", base_reference(identify(base), str(base)))
    assert main(["inspect", str(tmp_path / "adapter")]) == 0
    stated = json.loads((tmp_path / "adapter" / "config.json").read_text())["adapter"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    shutil.move(watched, tmp_path / "models" / "private")
    name = str(tmp_path / "models" / "private") if named == "whole path" else "models/private"
    changed(tmp_path / "adapter" / "config.json", adapter=stated | {"name": name})
    OPENED.clear(), capsys.readouterr()
    for command in ("inspect", "analyze"):
        assert main([command, str(tmp_path / "adapter")]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert ("those of" if named == "whole path" else "is a folder or a file here") in said
    weights = {"private", "model.safetensors", "config.json", "tokenizer_config.json"}
    assert opened_in(tmp_path / "models") <= weights


def test_a_run_names_no_folder(watched, tmp_path, monkeypatch):
    run = ri.analyze(ri.load("reversal/rope"), [[3, 4, 5]], ["attention_rows"])
    monkeypatch.chdir(watched.parent)
    del run.attrs["checkpoint_digest"]
    for name in (str(watched), watched.name, f"niah/../{watched.name}"):
        run.attrs["checkpoint"] = name
        ri.write_run(run, tmp_path / "run.nc")
        with refused(r"a run does not choose which folder is read|is installed"):
            explored(str(tmp_path / "run.nc"))
    assert not opened_in(watched)


def test_a_run_of_scores_names_no_corpus(watched):
    bridge = ri.load("niah/repo")
    scores = ri.score(bridge, test_sets=[64], count=1)
    scores["scores"].attrs |= {"task": "language", "task_corpus": str(watched)}
    with refused("the run sets corpus of the task language"):
        ri.explain_cell(scores, 50, 64, bridge)
    assert not opened_in(watched)


def test_a_run_of_more_numbers_than_a_file_holds_is_refused(tmp_path):
    xr.Dataset({"a": ("x", np.zeros(2))}).to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    with h5netcdf.File(tmp_path / "run.nc", "a") as file:
        file.dimensions["y"] = 1 << 40
        file.create_variable("many", ("y",), "f8", chunks=(1 << 20,))
    (tmp_path / "run.nc").write_bytes(sealed((tmp_path / "run.nc").read_bytes()))
    with refused("it states more numbers than such a file can hold"):
        ri.read_run(tmp_path / "run.nc")


@pytest.mark.parametrize("key", ["n_layer", "n_positions"])
def test_sizes_are_bounded_by_whatever_name_a_family_has_for_them(key, tmp_path, capsys):
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    config.save_pretrained(tmp_path)
    changed(tmp_path / "config.json", **{key: 10**12})
    assert main(["inspect", str(tmp_path)]) == 2
    assert "wanted less than or equal to" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the log holds messages")
def test_prompts_and_logs_name_no_file(checkpoint, watched, tmp_path):
    place = str(watched / "diary.txt")
    sample = {"doc_id": 0, "doc": {"file": place}, "resps": [[place]], "target": place}
    logged = {"id": 1, "input": place, "attachments": {"a": place}}
    files = {
        "samples.jsonl": sample | {"arguments": [[place, {"until": []}]]},
        "log.json": {"eval": {"model": place}, "samples": [logged]},
        "own.jsonl": {"text": place, "attributes": {"file": place}},
    }
    bridge = ri.load(checkpoint)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
        (prompt,) = ri.read_prompts(tmp_path / name, tokenizer=bridge.tokenizer)
        assert len(prompt.tokens) > 1
    assert not opened_in(watched)


def test_an_index_names_no_file_elsewhere(checkpoint, watched):
    shutil.move(checkpoint / "model.safetensors", watched / "model.safetensors")
    named = {"model.embed_tokens.weight": str(watched / "model.safetensors")}
    changed(checkpoint / "model.safetensors.index.json", weight_map=named)
    OPENED.clear()
    with refused("is not a safetensors file next to it"):
        ri.load(checkpoint)
    assert not opened_in(watched)
