"""Models whose weights lie in memory and on the disk: what they say and what is measured of them is
what it is when they are whole.
"""

from copy import deepcopy

import pytest
import torch
import xarray as xr
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from families import TOKENS, tiny
from refusals import refused
from transformers import AutoModelForCausalLM

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.models.offloading import is_offloaded


def room_for(model, share):
    """Memory for a part of the weights; the rest goes to the disk."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"cpu": int(share * size)}


@pytest.mark.parametrize("name", ["language/cope", "language/learned"])
def test_logits_of_an_offloaded_model_are_those_of_the_whole(name):
    whole = ri.load_model(name)
    offloaded = ri.load_model(name, device_map="auto", most_memory=room_for(whole, 0.5))
    assert set(offloaded.hf_device_map.values()) == {"cpu", "disk"}
    assert is_offloaded(offloaded) and not is_offloaded(whole)
    tokens = torch.randint(3, 20, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(2):  # weights come again in the next pass
            assert torch.equal(offloaded(tokens).logits, whole(tokens).logits)


def test_an_offloaded_bridge_is_measured_like_the_whole(tmp_path):
    whole = ri.load("niah/repo")
    bridge = ri.load("niah/repo", device_map="auto", most_memory=room_for(whole, 0.5))
    rows = torch.randint(3, 20, (3, 30), generator=torch.Generator().manual_seed(0))
    measures = ["positions", "components", "attention_rows", "predictions"]
    found, expected = (ri.analyze(each, rows.tolist(), measures) for each in (bridge, whole))
    assert set(found.children) == set(measures)
    for name in measures:
        xr.testing.assert_identical(found[name].to_dataset(), expected[name].to_dataset())
    hook = "blocks.2.attn.hook_positions"
    (_, ours), (_, theirs) = (
        each.run_with_cache(rows[:1], names_filter=hook) for each in (bridge, whole)
    )
    assert torch.equal(ours[hook], theirs[hook])
    with refused("offloaded; load it without a device map"):
        ri.save(bridge, tmp_path / "saved")


CPU = torch.device("cpu")


def on_two_places(model, directory):
    parts = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    parts |= {f"model.layers.{layer}": ("cpu", "disk")[layer % 2] for layer in range(3)}
    return dispatch_model(model, parts, main_device="cpu", offload_dir=directory)


OFFLOADS = {
    "memory": lambda model, _: cpu_offload(model, CPU),
    "memory, buffers too": lambda model, _: cpu_offload(model, CPU, offload_buffers=True),
    "disk": lambda model, directory: disk_offload(model, directory, CPU),
    "one layer": lambda model, _: cpu_offload(model.model.layers[1], CPU),
    "dispatched": on_two_places,
}
PROMPTS = [ri.tasks.Prompt(tuple(row), generated=(18, 19)) for row in TOKENS.tolist()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", OFFLOADS)
def test_a_model_that_accelerate_offloads_is_measured_like_the_whole(kind, tied, tmp_path):
    """Found: "hold no numbers", and errors of torch."""
    whole = tiny("llama")
    if tied:
        whole.config.tie_word_embeddings = True
        whole.tie_weights()
    model = deepcopy(whole)
    OFFLOADS[kind](model, str(tmp_path))
    names = ("positions", "rotation", "predictions", "attention_rows")
    found, expected = (ri.analyze(each, PROMPTS, names) for each in (model, whole))
    assert found.attrs == expected.attrs
    for name in expected.children:
        xr.testing.assert_identical(found[name].to_dataset(), expected[name].to_dataset())
    assert ri.measure_step(model, 1, PROMPTS, measures=names[:1])["positions"].equals(
        expected["positions"]
    )
    with torch.no_grad():
        logits = []
        for each in (model, whole):
            torch.manual_seed(0)
            logits.append(ri.reposition(each, "repo,alibi,rope")(TOKENS).logits)
    assert torch.equal(*logits)
    with refused("weights of this model are offloaded"):
        ri.save(model, tmp_path / "saved")
    remove_hook_from_submodules(model)
    ri.save(model, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(ri.load_model(tmp_path / "saved")(TOKENS).logits, logits[0])


def test_experiments_on_an_offloaded_model_are_those_on_the_whole_and_leave_it_trainable():
    whole = ri.reposition(tiny("llama"), "repo")
    model = deepcopy(whole)
    cpu_offload(model, CPU)
    asked = {"measures": ("positions",), "experiments": ("perturbation", "effects", "atlas")}
    found, expected = (ri.analyze(each, PROMPTS, **asked) for each in (model, whole))
    for name in expected.children:
        xr.testing.assert_allclose(found[name].to_dataset(), expected[name].to_dataset())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_weight_that_nothing_holds_is_named():
    model = tiny("llama")
    model.model.layers[1].to("meta")
    with refused("model.layers.1.* on 'meta' and holds no numbers"):
        ri.analyze(model, PROMPTS, ("positions",))


PARTS = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}


PARTS |= {f"model.layers.{layer}": "cpu" for layer in range(4)}


def test_a_map_may_be_given():
    model = ri.load_model("niah/rope", device_map=PARTS | {"model.layers.2": "disk"})
    offloaded = {name for name, weight in model.named_parameters() if weight.device.type == "meta"}
    assert offloaded and all(name.startswith("model.layers.2.") for name in offloaded)


@pytest.mark.parametrize(
    ("said", "device_map", "most_memory"),
    [
        (
            r"no place for model\.norm\.weight",
            {key: PARTS[key] for key in PARTS if "norm" not in key},
            None,
        ),
        ("device map 'spread' is unknown", "spread", None),
        ("no device 77 here", "auto", {77: "1GiB"}),
        ("wanted a size such as", "auto", {"cpu": "much"}),
    ],
)
def test_a_map_must_be_whole_and_known(said, device_map, most_memory):
    with refused(said):
        ri.load_model("niah/rope", device_map=device_map, most_memory=most_memory)


def test_damaged_weights_on_the_disk_are_refused_when_loading(tmp_path):
    model = ri.load_model("reversal/rope")
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = float("nan")
    ri.save(model, tmp_path)
    with refused(f"{name} holds values that are not finite"):
        ri.load_model(tmp_path, device_map={"": "disk"})


def test_hugging_face_loads_it_with_a_device_map(tmp_path):
    whole = ri.load_model("niah/repo")
    ri.save(whole, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory=room_for(whole, 0.5)
    )
    assert is_offloaded(model)


def test_the_command_line_scores_an_offloaded_model(tmp_path):
    asked = "score reversal/repo --test-sets 3 --count 6 --answers generated --device-map auto"
    out = str(tmp_path / "parts")
    assert main([*asked.split(), "--max-memory", "cpu=150KB", "--out", out]) == 0
    whole = ri.score(ri.open_model("reversal/repo"), None, ["3"], 6, answers="generated")
    parts = ri.read_run(tmp_path / "parts")
    xr.testing.assert_identical(parts["scores"]["score"], whole["scores"]["score"])
