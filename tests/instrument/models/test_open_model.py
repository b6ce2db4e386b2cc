"""A model opened without TransformerLens: the numbers of its bridge; weights that are the file,
mapped; checksums that tell every edit.
"""

import pytest
import torch
import xarray as xr
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.checkpoint_files.stored import StoredWeight
from repo_interp.checkpoint_files.weights import read_weights
from repo_interp.models.changes import changes
from repo_interp.models.decoder import as_decoder
from repo_interp.models.remembered import fingerprints, remember_weights
from repo_interp.models.wrapped import model_of


def test_an_opened_model_gives_the_numbers_of_its_bridge():
    bridge, model = ri.load("niah/repo"), ri.open_model("niah/repo")
    assert as_decoder(model).tokenizer.get_vocab() == as_decoder(bridge).tokenizer.get_vocab()
    assert as_decoder(model).prepended == as_decoder(model_of(bridge)).prepended
    prompts = ri.tasks.make_task("niah").prompts(1)
    ours, theirs = (
        ri.analyze(each, prompts, ("positions", "predictions"), experiments=())
        for each in (model, bridge)
    )
    xr.testing.assert_identical(ours, theirs)
    text = as_decoder(model).tokenizer.decode(prompts[0].tokens[1:9])
    assert ri.prompt(text, model).tokens == ri.prompt(text, bridge).tokens
    model.model.layers[0].register_forward_hook(lambda *given: None)
    assert "hooks at layers.0" in changes(as_decoder(model))


def test_weights_are_the_file_and_what_is_written_to_them_is_not(tmp_path):
    ri.save(ri.open_model("reversal/rope"), tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    content, model = file.read_bytes(), ri.load_model(tmp_path / "a")
    edited = {name: parameter + 1 for name, parameter in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert file.read_bytes() == content
    ri.save(model, tmp_path / "a")  # over the files that it is mapped to
    assert_close(dict(ri.load_model(tmp_path / "a").state_dict()), edited, rtol=0, atol=0)


def stored(file, values, offset=8, shape=None):
    """The values behind eight bytes of a file, as a weight of `shape`."""
    file.write_bytes(bytes(8) + torch.tensor(values).numpy().tobytes())
    return {"w": StoredWeight("w", file, offset, shape or (len(values),), "F32")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # mapped, and read
def test_a_file_that_was_cut_off_and_weights_that_are_not_finite_are_refused(tmp_path, dtype):
    for values, refusal in (
        ([1.0, 2.0], "ends within w"),
        ([1.0, float("nan"), 2.0], "w holds values that are not finite"),
    ):
        with refused(refusal):
            read_weights(stored(tmp_path / "a", values, shape=(3,)), dtype)


@pytest.mark.parametrize(
    ("offset", "shape", "expected"),
    [(8, (2,), [3.0, 4.0]), (12, (1,), [4.0]), (8, (0,), [])],
)
def test_a_weight_is_read_at_its_place(tmp_path, offset, shape, expected):
    weights = stored(tmp_path / "a", [3.0, 4.0], offset, shape)
    assert read_weights(weights, torch.float32)["w"].tolist() == expected


EDITS = (
    *(lambda t, place=place: t.view(-1)[place].neg_() for place in range(4)),
    lambda t: t.copy_(t.flip(0)),
    lambda t: t.copy_(t.flip(-1)),
    lambda t: t[:2].copy_(t[:2].flip(0)),
    lambda t: t[..., :2].copy_(t[..., :2].flip(-1)),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_edit_of_a_weight_is_told(dtype):
    model = ri.open_model("reversal/rope", dtype=dtype)
    model.model.norm.weight.data[:2] = torch.tensor([1.0, 2.0])
    remember_weights(as_decoder(model))
    assert changes(as_decoder(model)) == ""
    for name in ("layers.1.mlp.up_proj.weight", "norm.weight"):
        tensor = model.model.get_parameter(name).data
        before = tensor.clone()
        for edit in EDITS:
            edit(tensor)
            assert changes(as_decoder(model)) == f"other weights in {name}"
            tensor.copy_(before)
    assert changes(as_decoder(model)) == ""


@pytest.mark.parametrize("numbers", [0, 1, 7, 4096, 16_287, 16_288, 40_001])
def test_a_checksum_is_that_of_the_tensor_alone(numbers):
    """Others of its shape, which are summed with it, and how it is stored make no difference."""
    drawn = torch.randn(3, numbers, 2, generator=torch.Generator().manual_seed(0))
    apart = drawn.transpose(0, 2).contiguous().transpose(0, 2)
    given = {f"{place}": tensor for place, tensor in enumerate((*drawn, *apart))}
    together = fingerprints(given | {"number": torch.tensor(2.0)})
    assert together == {
        name: fingerprints({name: tensor.clone()})[name]
        for name, tensor in (given | {"number": torch.tensor(2.0)}).items()
    }
    assert len({*together.values()}) == (4 if numbers else 2)
    odd = torch.cat([drawn[0].flatten()[:1], drawn.flatten()])[1:].view(drawn.shape)
    assert list(fingerprints(dict(enumerate(odd)))) == [0, 1, 2]
