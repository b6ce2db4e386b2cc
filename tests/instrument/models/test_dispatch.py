"""Models whose weights lie in memory and on the disk: what they say and what is measured of them is
what it is when they are whole.
"""

import pytest
import torch
import xarray as xr
from refusals import refused
from transformers import AutoModelForCausalLM

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.models.dispatch import is_dispatched


def room_for(model, share):
    """Memory for a part of the weights; the rest goes to the disk."""
    return {
        "cpu": int(
            share
            * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        )
    }


@pytest.mark.parametrize(
    "name", ["niah/repo", "language/cope", "copying/fire_scattered", "language/learned"]
)
def test_logits_of_an_offloaded_model_are_those_of_the_whole(name):
    whole = ri.load_model(name)
    offloaded = ri.load_model(name, device_map="auto", most_memory=room_for(whole, 0.5))
    placed = set(offloaded.hf_device_map.values())
    assert placed == {"cpu", "disk"} and is_dispatched(offloaded) and not is_dispatched(whole)
    on_disk = [
        parameter.numel() for parameter in offloaded.parameters() if parameter.device.type == "meta"
    ]
    assert sum(on_disk) > 0.2 * sum(parameter.numel() for parameter in whole.parameters())
    tokens = torch.randint(3, 20, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(offloaded(tokens).logits, whole(tokens).logits)
        assert torch.equal(offloaded(tokens).logits, whole(tokens).logits), (
            "weights come again in the next pass"
        )


def test_an_offloaded_bridge_is_measured_like_the_whole(tmp_path):
    whole = ri.load("niah/repo")
    bridge = ri.load("niah/repo", device_map="auto", most_memory=room_for(whole, 0.5))
    rows = torch.randint(3, 20, (3, 30), generator=torch.Generator().manual_seed(0)).tolist()
    measures = ["positions", "components", "three_axis", "attention_rows", "predictions"]
    found, expected = (ri.analyze(each, rows, measures) for each in (bridge, whole))
    assert set(found.children) == set(measures)
    for name in measures:
        xr.testing.assert_identical(found[name].to_dataset(), expected[name].to_dataset())
    _, cache = bridge.run_with_cache(
        torch.tensor(rows[:1]), names_filter="blocks.2.attn.hook_positions"
    )
    _, expected = whole.run_with_cache(
        torch.tensor(rows[:1]), names_filter="blocks.2.attn.hook_positions"
    )
    assert torch.equal(
        cache["blocks.2.attn.hook_positions"], expected["blocks.2.attn.hook_positions"]
    )
    with refused("offloaded; load it without a device map"):
        ri.save(bridge, tmp_path / "saved")


def test_a_map_may_be_given_and_must_be_whole():
    parts = [
        "model.embed_tokens",
        "model.norm",
        "lm_head",
        *(f"model.layers.{layer}" for layer in range(4)),
    ]
    model = ri.load_model(
        "niah/rope", device_map={part: "disk" if part.endswith("2") else "cpu" for part in parts}
    )
    offloaded = {name for name, weight in model.named_parameters() if weight.device.type == "meta"}
    assert offloaded and all(name.startswith("model.layers.2.") for name in offloaded)
    with refused(r"no place for model\.norm\.weight"):
        ri.load_model(
            "niah/rope",
            device_map=dict.fromkeys([part for part in parts if part != "model.norm"], "cpu"),
        )
    with refused("device map 'spread' is unknown"):
        ri.load_model("niah/rope", device_map="spread")
    with refused("no device 77 here"):
        ri.load_model("niah/rope", device_map="auto", most_memory={77: "1GiB"})
    with refused("wanted a size such as"):
        ri.load_model("niah/rope", device_map="auto", most_memory={"cpu": "much"})


def test_damaged_weights_on_the_disk_are_refused_when_loading(tmp_path):
    from safetensors.torch import load_file, save_file

    ri.save(ri.load_model("reversal/rope"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused(f"{name} holds values that are not finite"):
        ri.load_model(tmp_path, device_map={"": "disk"})


def test_hugging_face_loads_it_with_a_device_map(tmp_path):
    whole = ri.load_model("niah/repo")
    ri.save(whole, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory=room_for(whole, 0.5)
    )
    assert is_dispatched(model)


def test_the_command_line_scores_an_offloaded_model(tmp_path, capsys):
    words = (
        "score",
        "reversal/repo",
        "--test-sets",
        "3",
        "--count",
        "6",
        "--answers",
        "generated",
        "--out",
    )
    assert (
        main([*words, str(tmp_path / "parts"), "--device-map", "auto", "--max-memory", "cpu=150KB"])
        == 0
    )
    parts, whole = (
        ri.read_run(tmp_path / "parts"),
        ri.score(ri.zoo("reversal/repo"), None, ["3"], 6, answers="generated"),
    )
    xr.testing.assert_identical(parts["scores"]["score"], whole["scores"]["score"])
