"""Checkpoints of families that nothing was written for: inspected, analyzed, given learned
positions, saved and loaded again.
"""

import re
import shutil

import pytest
import torch
from refusals import refused

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.cli import main
from repo_interp.models.checkpoints import load_model

TOKENS = torch.randint(3, 120, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """By family, a directory that transformers saved, and the logits of the stock model."""
    made = {}

    def of(family):
        if family not in made:
            model, directory = small_model(family), tmp_path_factory.mktemp(family)
            model.save_pretrained(directory)
            with torch.no_grad():
                made[family] = directory, model(TOKENS, use_cache=False).logits
        return made[family]

    return of


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_learned_positions_are_saved_and_loaded_in_any_family(family, stored, tmp_path):
    model = ri.reposition(load_model(stored(family)[0]), "repo", assignment="head")
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
    assert (expected - stored(family)[1]).abs().max() > 1e-3
    ri.save(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert ri.layout(again) == ri.layout(model)
    with torch.no_grad():
        assert torch.equal(again(TOKENS, use_cache=False).logits, expected)


def test_a_converted_checkpoint_that_lacks_a_weight_is_refused(stored, tmp_path):
    from safetensors.torch import load_file, save_file

    directory, _ = stored("mixtral")
    weights = load_file(directory / "model.safetensors")
    weights.pop("model.layers.1.input_layernorm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with refused(
        r"do not fit a mixtral: 1 missing \(first: model.layers.1.input_layernorm.weight\)"
    ):
        ri.load(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_an_adapter_beside_whole_weights_is_refused_and_never_added(
    family, stored, tmp_path, capsys
):
    """Found: transformers added it to a mixtral, and logits were those of no stored weights."""
    directory = shutil.copytree(stored(family)[0], tmp_path / "checkpoint")
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    said = "an adapter of peft (adapter_config.json) is next to the weights"
    with refused(re.escape(said)):
        ri.load_model(directory)
    assert main(["inspect", str(directory)]) == 2 and said in capsys.readouterr().err
