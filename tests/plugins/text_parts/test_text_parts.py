"""The text part of a model that sees images or hears sound is opened, with the logits of the whole
on text, and is named as that.
"""

import re
import shutil

import pytest
import torch
from larger import FAMILIES, small_larger
from refusals import refused
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.checkpoint_files.inspected import inspect_checkpoint
from repo_interp.checkpoint_files.stated import light_config
from repo_interp.cli import main
from repo_interp.errors import Note
from repo_interp.models.checkpoints import require_fitting_headers
from repo_interp.models.configuration import make_config

TOKENS = torch.arange(3, 27)[None]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*only its text part is opened:repo_interp.errors.Note"
)


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_has_the_logits_of_the_whole(family, tmp_path):
    whole = small_larger(family)
    whole.save_pretrained(tmp_path)
    wanted = logits(whole)
    opened = ri.load_model(tmp_path)
    assert float((logits(opened) - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert opened.config.model_type == whole.config.get_text_config().model_type
    stated, layout = inspect_checkpoint(str(tmp_path), make_config), ri.layout(opened)
    require_fitting_headers(stated.checkpoint)
    assert stated.checkpoint.layout == layout
    parameters = sum(parameter.numel() for parameter in opened.parameters())
    assert abs(stated.parameters - parameters) <= 20  # scalars, which are buffers of some
    if "rope" in layout:  # the opened part takes other positions
        with ri.set_positions(opened, layer=layout.index("rope"), head=None, values=0.0):
            assert not torch.allclose(logits(opened), wanted)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gemma")
    whole = small_larger("gemma3")
    whole.save_pretrained(directory)
    return directory, logits(whole)


def test_the_text_part_is_named_by_inspect_by_a_note_and_in_the_run(gemma, capsys):
    directory, _ = gemma
    said = "config.json describes a gemma3; only its text part is opened, a gemma3_text"
    with pytest.warns(Note, match=said):
        model = ri.open_model(directory)
    run = ri.analyze(model, [tuple(range(3, 27))], measures=("predictions",))
    assert run.attrs["notes"].startswith(said)
    assert main(["inspect", str(directory)]) == 0
    out = capsys.readouterr()
    assert "gemma3_text, the text part of a gemma3" in " ".join(out.out.split()) and said in out.err
    assert main(["verify", str(directory), "--longest", "8"]) == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda weight: {}, r"1 missing \(first: {name}\)"),
        (
            lambda weight: {"{name}": weight[:-1].clone()},
            r"{name} has shape \[63\], a gemma3 wants \[64\]",
        ),
    ],
)
def test_inspect_holds_headers_to_the_larger_model(gemma, damage, said, tmp_path, capsys):
    directory, _ = gemma
    stored = load_file(directory / "model.safetensors")
    shutil.copy(directory / "config.json", tmp_path)
    name = "model.language_model.norm.weight"
    (key,) = (key for key in stored if key.endswith((name, "language_model.model.norm.weight")))
    changed = {each.format(name=key): value for each, value in damage(stored.pop(key)).items()}
    save_file(stored | changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused(said.format(name=name)):
        ri.load_model(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert re.search(said.format(name=name), capsys.readouterr().err.splitlines()[-1])


def test_a_text_part_is_saved_as_a_decoder_alone(gemma, tmp_path):
    directory, wanted = gemma
    model = ri.load_model(directory)
    ri.save(model, tmp_path / "stock")
    stock = ri.load_model(tmp_path / "stock")
    assert stock.config.model_type == "gemma3_text"
    assert_close(logits(stock), wanted)


def test_a_text_part_is_spread_over_devices_and_scaled(tmp_path):
    whole = small_larger("llava")
    whole.save_pretrained(tmp_path)
    spread = ri.load_model(tmp_path, device_map="auto", most_memory={"cpu": "300KiB"})
    assert any(parameter.is_meta for parameter in spread.parameters())
    assert_close(logits(spread), logits(whole))
    scaling = {"rope_type": "linear", "factor": 2.0}
    scaled = small_larger("llava")
    scaled.config.text_config.rope_parameters |= scaling
    scaled.model.language_model.rotary_emb.__init__(scaled.config.text_config)
    assert_close(logits(ri.load_model(tmp_path, rope_scaling=scaling)), logits(scaled))


def test_a_part_that_computes_otherwise_is_refused(tmp_path):
    granite = small_larger("granite_speech").config.text_config.to_dict()
    small_larger("llava", text_config=granite | {"logits_scaling": 3.0}).save_pretrained(tmp_path)
    with refused("alone, a granite, gives other logits than the larger model"):
        ri.load_model(tmp_path)


def test_a_larger_model_in_memory_is_refused_by_name():
    with refused("part of a larger model"):
        ri.analyze(small_larger("gemma3"), [[3, 4, 5]])


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "llama", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        {"model_type": "olmo2", "rope_theta": 1e6, "num_key_value_heads": None},
    ],
)
def test_older_configurations_are_read_as_transformers_reads_them(raw):
    ours, theirs = light_config(dict(raw), "config.json"), make_config(dict(raw), "config.json")
    names = ("rope_parameters", "num_key_value_heads", "num_hidden_layers", "vocab_size")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
