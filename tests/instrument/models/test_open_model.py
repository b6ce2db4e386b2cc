"""A model opened without TransformerLens: the numbers of its bridge; weights that are the file,
mapped; checksums that tell every edit.
"""

import pytest
import torch
import xarray as xr
from refusals import refused

import repo_interp as ri
from repo_interp.checkpoint_files.stored import StoredWeight
from repo_interp.checkpoint_files.weights import read_weights
from repo_interp.experiments import Atlas
from repo_interp.models.changes import changes, remember_weights
from repo_interp.models.decoder import as_decoder
from repo_interp.models.wrapped import model_of


def test_an_opened_model_gives_the_numbers_of_its_bridge():
    bridge, model = ri.load("niah/repo"), ri.open_model("niah/repo")
    assert as_decoder(model).tokenizer.get_vocab() == as_decoder(bridge).tokenizer.get_vocab()
    assert as_decoder(model).prepended == as_decoder(model_of(bridge)).prepended
    asked = {
        "measures": ("positions", "attention_mass", "predictions"),
        "experiments": [Atlas(sequences=1, twins=0)],
    }
    prompts = ri.tasks.make_task("niah").prompts(2)
    ours, theirs = (ri.analyze(each, prompts, **asked) for each in (model, bridge))
    xr.testing.assert_identical(ours, theirs)
    text = as_decoder(model).tokenizer.decode(prompts[0].tokens[1:9])
    assert ri.prompt(text, model).tokens == ri.prompt(text, bridge).tokens
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    handle = model.model.layers[0].register_forward_hook(lambda *given: None)
    assert "other weights in" in changes(model) and "hooks at layers.0" in changes(model)
    handle.remove()


def test_weights_are_the_file_and_what_is_written_to_them_is_not(tmp_path):
    ri.save(ri.open_model("reversal/rope"), tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    content, model = file.read_bytes(), ri.load_model(tmp_path / "a")
    stored = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert file.read_bytes() == content
    ri.save(model, tmp_path / "a")  # over the files that it is mapped to
    again = dict(ri.load_model(tmp_path / "a").named_parameters())
    assert all(torch.equal(again[name], stored[name] + 1) for name in stored)
    half = dict(ri.load_model(tmp_path / "a", dtype="bfloat16").named_parameters())
    assert all(torch.equal(half[name], again[name].bfloat16()) for name in stored), (
        "read, not mapped"
    )


def test_a_file_that_was_cut_off_and_weights_that_are_not_finite_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    for values, refusal in (
        ([1.0, 2.0], "ends within w"),
        ([1.0, float("nan"), 2.0], "w holds values that are not finite"),
    ):
        file.write_bytes(b"head" * 2 + torch.tensor(values).numpy().tobytes())
        for dtype in (torch.float32, torch.float64):  # mapped, and read
            with refused(refusal):
                read_weights({"w": StoredWeight("w", file, 8, (3,), "F32")}, dtype)
    file.write_bytes(b"head" * 2 + torch.tensor([3.0, 4.0]).numpy().tobytes())
    for offset, shape, expected in ((8, (2,), [3.0, 4.0]), (12, (1,), [4.0]), (8, (0,), [])):
        read = read_weights({"w": StoredWeight("w", file, offset, shape, "F32")}, torch.float32)[
            "w"
        ]
        assert read.tolist() == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_edit_of_a_weight_is_told(dtype):
    model = ri.open_model("reversal/rope", dtype=dtype)
    weights = dict(model.named_parameters())
    matrix, vector = (
        weights["model.layers.1.mlp.up_proj.weight"].data,
        weights["model.norm.weight"].data,
    )
    vector[:2] = torch.tensor([1.0, 2.0])
    remember_weights(model)
    assert changes(model) == ""
    for tensor, name in ((matrix, "layers.1.mlp.up_proj.weight"), (vector, "norm.weight")):
        before = tensor.clone()
        edits = [
            *(lambda t, place=place: t.view(-1)[place].neg_() for place in range(4)),
            lambda t: t.copy_(t.flip(0)),
            lambda t: t.copy_(t.flip(-1)),
        ]
        edits += [
            lambda t: t[:2].copy_(t[:2].flip(0)),
            lambda t: t[..., :2].copy_(t[..., :2].flip(-1)),
        ]
        for edit in edits:
            edit(tensor)
            assert changes(model) == f"other weights in {name}"
            tensor.copy_(before)
    assert changes(model) == ""
