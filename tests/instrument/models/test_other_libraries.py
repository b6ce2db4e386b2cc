"""No class of another library runs a checkpoint or adapter of ours with positions that are not its
own: each of them raises.

They are tried in one process that never imports repo_interp. What is written in its place as a
stock checkpoint, they do load.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

import repo_interp as ri
from repo_interp.checkpoint_files.checkpoint_digest import checkpoint_digest
from repo_interp.checkpoint_files.position_layout import COUNTED
from repo_interp.checkpoint_files.shipped import shipped_directories, zoo_path
from repo_interp.models.checkpoints import load_model
from repo_interp.models.configuration import identify
from repo_interp.plugins.adapters.adapter_training import attach, save_adapter
from repo_interp.plugins.adapters.adapters import base_reference

PROGRAM = """
import json, sys, warnings
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Olmo2ForCausalLM
warnings.simplefilter("ignore")
asked = json.load(sys.stdin)
base = LlamaForCausalLM.from_pretrained(asked["base"])
whole = {each.__name__: each.from_pretrained for each in (AutoModelForCausalLM, LlamaForCausalLM, Olmo2ForCausalLM)}
adapters = whole | {
    "AutoPeftModelForCausalLM": AutoPeftModelForCausalLM.from_pretrained,
    "PeftModel": lambda path: PeftModel.from_pretrained(base, path),
    "load_adapter": lambda path: LlamaForCausalLM.from_pretrained(asked["base"]).load_adapter(path),
}
loaded = []
for loaders, paths in ((whole, asked["whole"]), (adapters, asked["adapters"])):
    for path in paths:
        for name, load in loaders.items():
            try:
                load(path)
            except Exception:
                continue
            loaded.append([name, path])
assert "repo_interp" not in sys.modules
print(json.dumps(loaded))
"""
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def loaded_by_others(base, whole, adapters):
    """Which loader, of which path, gives a model."""
    asked = {"base": str(base), "whole": [*map(str, whole)], "adapters": [*map(str, adapters)]}
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        input=json.dumps(asked),
        env=here | {"TRANSFORMERS_VERBOSITY": "error"},
        cwd=base,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints by their family and layout, written by `ri.save` or ("theirs") by Hugging Face;
    adapters on llama/rope.
    """
    directory, paths = tmp_path_factory.mktemp("made"), {}
    tokens = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    for family, build, configuration, layouts in (
        ("llama", LlamaForCausalLM, LlamaConfig, ("rope", "repo", "nope")),
        ("olmo2", Olmo2ForCausalLM, Olmo2Config, ("repo",)),
    ):
        for layout in layouts:
            model = ri.reposition(build(configuration(**SIZES, **tokens)), layout)
            name = f"{family}/{layout}"
            paths |= {name: directory / name, f"{name}/theirs": directory / "theirs" / name}
            ri.save(model, paths[name])
            model.save_pretrained(paths[f"{name}/theirs"])
    base = paths["llama/rope"]
    for layout in ("rope", "repo", "nope"):
        model = ri.reposition(load_model(base), layout)
        attach(model, rank=2)
        paths[f"adapter/{layout}"] = directory / "adapters" / layout
        reference = base_reference(identify(base), str(base))
        save_adapter(model, paths[f"adapter/{layout}"], reference)
    return paths


def test_no_other_library_loads_positions_that_it_does_not_have(made):
    stock = [made["llama/rope"], made["llama/rope/theirs"]]
    whole, adapters = [*stock, zoo_path("niah/repo")], [zoo_path("smollm2-135m/repo")]
    for name, path in made.items():
        if name.startswith("adapter"):
            adapters.append(path)
        elif "rope" not in name:
            whole.append(path)
    loaded = loaded_by_others(stock[0], whole, adapters)
    assert {path for _, path in loaded} == {*map(str, stock), str(made["adapter/rope"])}
    assert ["PeftModel", str(made["adapter/rope"])] in loaded  # plain RoPE, which peft has


def test_what_was_written_before_loads_and_has_the_same_digest(made):
    """The number of layers was a number once; runs, trainings and figures name checkpoints by
    digests from then.
    """
    path = made["llama/repo"]
    logits, digest = load_model(path)(torch.arange(8)[None]).logits, checkpoint_digest(path)
    file = path / "config.json"
    written = file.read_text()
    file.write_text(written.replace(json.dumps(COUNTED), "2"))
    assert file.read_text() != written
    assert torch.equal(load_model(path)(torch.arange(8)[None]).logits, logits)
    assert checkpoint_digest(path) == digest
    file.write_text(written)


def test_every_shipped_checkpoint_is_written_so(made):
    files = [file for directory in shipped_directories() for file in directory.rglob("config.json")]
    stated = [json.loads(file.read_text()) for file in files]
    assert len(files) >= 60
    for file, raw in zip(files, stated, strict=True):
        own = raw["model_type"] == "repo_interp"
        assert (raw["num_hidden_layers"] == COUNTED) is own
        lora = file.with_name("adapter_config.json")
        assert not lora.is_file() or (json.loads(lora.read_text())["peft_type"] != "LORA") is own
