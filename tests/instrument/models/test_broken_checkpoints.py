"""Every broken checkpoint is refused: exit code 2, one line that names the fault, nothing left
behind.
"""

import json
import shutil

import pytest
import torch
from families import tiny
from safetensors.torch import load_file, save_file

import repo_interp as ri
from repo_interp.cli import main


@pytest.fixture
def checkpoint(official, tmp_path):
    """A copy of the authors' tiny RePo checkpoint, to be broken."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(official / "repo_mha" / name, directory / name)
    return directory


def config(**changes):
    """Sets keys of config.json; `pe_config__mode` is one in `pe_config`."""

    def damage(directory):
        file = directory / "config.json"
        raw = json.loads(file.read_text())
        for path, value in changes.items():
            *above, key = path.split("__")
            target = raw
            for part in above:
                target = target[part]
            target[key] = value
        file.write_text(json.dumps(raw))

    return damage


def released(key, value):
    """Sets a key of `pe_config` in both of its spellings."""
    return config(
        **{f"pe_config__{spelling}_pe_{key}": value for spelling in ("dynamic", "dynmaic")}
    )


def weight(name, change):
    """Sets the weight `name` to what `change` makes of it (None: of no weight); None leaves it
    out.
    """

    def damage(directory):
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors[name] = change(tensors.get(name))
        kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})

    return damage


def pickled(directory):
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def truncated(directory):
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])


LAYER = "model.layers.{}.self_attn.{}.weight"
FINITE = None
"""In the place of what `inspect` says of values, which it does not read."""
BROKEN = [
    (
        config(pe_config__dynamic_pe_startlayer=2),
        "'dynamic_pe_startlayer', which the released format does not have",
    ),
    (released("start_layer", 1), "3 missing (first: model.layers.1.self_attn."),
    (config(pe_config__dynamic_pe_mode="nope"), "12 unexpected (first: model.layers.2.self_attn."),
    (
        config(num_attention_heads=8, num_key_value_heads=8),
        "final_map.weight has shape [4, 8], the layout repo@2 wants [8, 8]",
    ),
    (pickled, "weights are read from safetensors only"),
    (truncated, "cannot be read as safetensors"),
    (
        weight(LAYER.format(3, "q_proj"), lambda old: old.fill_(float("nan"))),
        f"{LAYER.format(3, 'q_proj')} holds values that are not finite",
        FINITE,
    ),
    (
        weight(LAYER.format(2, "assigner.final_map"), lambda old: torch.zeros(4, 8)),
        "1 unexpected (first: model.layers.2.self_attn.",
    ),
    (
        weight("model.norm.weight", lambda old: old.to(torch.int32)),
        "model.norm.weight is stored as I32; wanted floating point",
    ),
    (
        weight("model.norm.weight", lambda old: old.to(torch.float8_e4m3fn)),
        "model.norm.weight is stored as F8_E4M3; wanted floating point",
    ),
]
"""What is broken, what is said, and what `inspect` says otherwise; what no tensor is needed for is
in the catalogue of bad inputs (support/bad_inputs).
"""


@pytest.mark.parametrize("command", ["inspect", "analyze"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken[1][:60])
def test_broken_checkpoints_are_refused_in_one_line(
    broken, command, checkpoint, tmp_path, monkeypatch, capsys
):
    damage, *lines = broken
    damage(checkpoint)
    said = lines[-1 if command == "inspect" else 0]
    if said is FINITE:
        assert main(["inspect", str(checkpoint)]) == 0
        return
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main([command, str(checkpoint)]) == 2
    captured = capsys.readouterr()
    # Beside how far it has come, where the machine is slow
    (line,) = (each for each in captured.err.splitlines() if not each.endswith(" so far"))
    assert captured.out == "" and line.startswith(f"repo-interp {command}: ") and said in line
    assert sorted(tmp_path.rglob("*")) == before


def test_the_unbroken_checkpoint_is_inspected(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "released format, olmo2",
        "layout repo@2",
        "4 heads",
        "trained on up to 256 tokens",
        "one per head",
        "2-5",
        "repo: ",
    ):
        assert part in shown


def test_how_other_programs_want_their_outputs_changes_nothing(checkpoint):
    """Found: a traceback in the first pass."""
    config(return_dict=False, torchscript=True)(checkpoint)
    assert "positions" in ri.analyze(ri.load(checkpoint), [[1, 5, 9]], ("positions",)).children


@pytest.mark.parametrize(
    ("layout", "shown"), [("cope", "counted by gates"), ("kerple", "one for all heads")]
)
def test_every_kind_of_scheme_is_inspected(layout, shown, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model = ri.reposition(tiny("llama"), layout)
    ri.save(model, tmp_path / "made")
    assert main(["inspect", str(tmp_path / "made")]) == 0
    output = capsys.readouterr().out
    assert shown in output and f"{ri.added_parameters(model):,} of them for positions" in output
