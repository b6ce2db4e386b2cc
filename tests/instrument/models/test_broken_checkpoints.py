"""Every broken checkpoint is refused: exit code 2, one line that names the fault, nothing left behind."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from repo_interp.cli import main


@pytest.fixture
def checkpoint(official, tmp_path):
    """A copy of the authors' tiny RePo checkpoint, to be broken."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(official / "repo_mha" / name, directory / name)
    return directory


def config(directory, **changes):
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    for path, value in changes.items():
        node, *rest = path.split("__")
        target = raw
        for part in rest:
            target, node = target[node], part
        target[node] = value
    file.write_text(json.dumps(raw))


def weights(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def without_config(d):
    (d / "config.json").unlink()


def config_not_json(d):
    (d / "config.json").write_text("{'model_type': 'olmo2'}")


def config_a_list(d):
    (d / "config.json").write_text("[]")


def unknown_family(d):
    config(d, model_type="gpt5")


def attention_of_its_own(d):
    config(d, model_type="mpt", sliding_window=0)


def misspelt_key(d):
    config(d, pe_config__dynamic_pe_startlayer=2)


def unknown_mode(d):
    config(d, pe_config__dynamic_pe_mode="swigluex_singlehead")


def spellings_disagree(d):
    config(d, pe_config__dynamic_pe_start_layer=3)


def start_beyond_the_last_layer(d):
    config(d, pe_config__dynamic_pe_start_layer=7, pe_config__dynmaic_pe_start_layer=7)


def layer_ids_beyond_the_last_layer(d):
    config(d, pe_config__dynamic_pe_layer_ids="3,9", pe_config__dynmaic_pe_layer_ids="3,9")


def layer_ids_that_are_no_numbers(d):
    config(d, pe_config__dynamic_pe_layer_ids="3;4", pe_config__dynmaic_pe_layer_ids="3;4")


def layout_with_a_layer_too_many(d):
    config(d, pe_config__dynamic_pe_start_layer=1, pe_config__dynmaic_pe_start_layer=1)


def layout_with_a_layer_too_few(d):
    config(d, pe_config__dynamic_pe_start_layer=3, pe_config__dynmaic_pe_start_layer=3)


def pe_config_dropped(d):
    raw = json.loads((d / "config.json").read_text())
    del raw["pe_config"]
    (d / "config.json").write_text(json.dumps(raw))


def mode_exchanged(d):
    config(d, pe_config__dynamic_pe_mode="nope")


def wrong_head_count(d):
    config(d, num_attention_heads=8, num_key_value_heads=8)


def heads_that_do_not_divide(d):
    config(d, num_key_value_heads=3)


def unknown_rope(d):
    config(d, rope_scaling={"rope_type": "spiral", "factor": 2.0})


def without_weights(d):
    (d / "model.safetensors").unlink()


def pickled_weights_only(d):
    tensors = load_file(d / "model.safetensors")
    torch.save(tensors, d / "pytorch_model.bin")
    (d / "model.safetensors").unlink()


def truncated_weights(d):
    whole = (d / "model.safetensors").read_bytes()
    (d / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def weights_that_are_no_safetensors(d):
    (d / "model.safetensors").write_bytes(b"\x80\x04pickle")


def nan_weights(d):
    weights(d, lambda t: t["model.layers.3.self_attn.q_proj.weight"][0].fill_(float("nan")))


def infinite_weights(d):
    weights(d, lambda t: t["lm_head.weight"][5, 5].fill_(float("inf")))


def missing_weight(d):
    weights(d, lambda t: t.pop("model.layers.4.self_attn.final_map.weight"))


def unexpected_weight(d):
    weights(d, lambda t: t.update({"model.layers.0.self_attn.gate_map.weight": torch.zeros(8, 64)}))


def misshaped_weight(d):
    weights(d, lambda t: t.update({"model.layers.2.self_attn.final_map.weight": torch.zeros(2, 8)}))


def shard_index_that_names_no_file(d):
    (d / "model.safetensors").unlink()
    (d / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    )


def stored_as(dtype):
    def damage(d):
        weights(d, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(dtype)}))

    damage.__name__ = f"stored_as_{dtype}".replace("torch.", "")
    return damage


def config_with(**changes):
    def damage(d):
        config(d, **changes)

    damage.__name__ = f"config_with_{changes}"
    return damage


def index_with(weight_map):
    def damage(d):
        (d / "model.safetensors").rename(d.parent / "outside.safetensors")
        (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    damage.__name__ = f"index_with_{str(weight_map)[:40]}"
    return damage


def head_twice(d):
    weights(d, lambda t: t.update({"model.layers.2.self_attn.assigner.final_map.weight": torch.zeros(4, 8)}))


def config_of_brackets(d):
    (d / "config.json").write_text("[" * 100_000)


def config_a_directory(d):
    (d / "config.json").unlink()
    (d / "config.json").mkdir()


BROKEN = {
    without_config: "/config.json; wanted a checkpoint directory as save_pretrained writes it",
    config_not_json: "config.json: broken JSON (Expecting property name",
    config_a_list: "holds []; wanted an object",
    unknown_family: "model_type 'gpt5' is no causal language model of transformers; nearest by name: gpt",
    attention_of_its_own: "model_type 'mpt' cannot be opened: it computes attention itself",
    misspelt_key: "pe_config has 'dynamic_pe_startlayer', which the released format does not have",
    unknown_mode: "dynamic_pe_mode 'swigluex_singlehead'; known are none, nope, swigluex_multihead",
    spellings_disagree: "dynmaic_pe_start_layer 2 but dynamic_pe_start_layer 3",
    start_beyond_the_last_layer: "at layer 7; the model's layers are 0 to 5",
    layer_ids_beyond_the_last_layer: "layer 9; the model's layers are 0 to 5",
    layer_ids_that_are_no_numbers: "layer ids '3;4'; wanted layer numbers",
    layout_with_a_layer_too_many: "3 missing (first: model.layers.1.self_attn.",
    layout_with_a_layer_too_few: "do not fit the layout repo@3: 3 unexpected (first: model.layers.2.self_attn.",
    pe_config_dropped: "do not fit the layout rope: 12 unexpected",
    mode_exchanged: "12 unexpected (first: model.layers.2.self_attn.",
    wrong_head_count: "final_map.weight has shape [4, 8], the layout repo@2 wants [8, 8]",
    heads_that_do_not_divide: "4 heads cannot share 3 key-value heads",
    unknown_rope: "there is no rope_type 'spiral'",
    without_weights: "has no model.safetensors; weights are read from safetensors only",
    pickled_weights_only: "weights are read from safetensors only",
    truncated_weights: "cannot be read as safetensors",
    weights_that_are_no_safetensors: "cannot be read as safetensors",
    nan_weights: "model.layers.3.self_attn.q_proj.weight holds values that are not finite",
    infinite_weights: "lm_head.weight holds values that are not finite",
    missing_weight: "1 missing (first: model.layers.4.self_attn.final_map.weight)",
    unexpected_weight: "1 unexpected (first: model.layers.0.self_attn.gate_map.weight)",
    misshaped_weight: "final_map.weight has shape [2, 8], the layout repo@2 wants [4, 8]",
    shard_index_that_names_no_file: "has no model-00001-of-00002.safetensors",
    stored_as(torch.int32): "model.norm.weight is stored as I32; wanted floating point",
    stored_as(torch.bool): "model.norm.weight is stored as BOOL; wanted floating point",
    stored_as(torch.complex64): "model.norm.weight is stored as C64; wanted floating point",
    stored_as(torch.float8_e4m3fn): "model.norm.weight is stored as F8_E4M3; wanted floating point",
    config_with(max_position_embeddings=0): '"max_position_embeddings": wanted a number of at least 1, got 0',
    config_with(max_position_embeddings=-1): '"max_position_embeddings": wanted a number of at least 1, got -1',
    config_with(num_attention_heads=0): '"num_attention_heads": wanted a number of at least 1, got 0',
    config_with(hidden_size=-64): '"hidden_size": wanted a number of at least 1, got -64',
    config_with(vocab_size=0): '"vocab_size": wanted a number of at least 1, got 0',
    config_with(num_key_value_heads=-1): '"num_key_value_heads": wanted a number of at least 1, got -1',
    config_with(rope_theta=0, rope_parameters=None): '"rope_theta": wanted a number above 0, got 0',
    config_with(rope_theta=-5.0, rope_parameters=None): '"rope_theta": wanted a number above 0, got -5.0',
    config_with(rope_theta=float("nan"), rope_parameters=None): "config.json: NaN is no JSON",
    config_with(transformers_weights="../outside.safetensors"): "names other weights (transformers_weights)",
    config_with(model_type=["olmo2"]): "wanted the name of a decoder, such as llama or qwen3",
    index_with(
        {"lm_head.weight": "../outside.safetensors"}
    ): "'../outside.safetensors' is no safetensors file that stands beside it",
    index_with(3): '"weight_map": wanted an object, got 3',
    index_with(None): '"weight_map": wanted an object, got null',
    index_with({"lm_head.weight": None}): "wanted text, got null",
    index_with({"lm_head.weight": "w" * 5000 + ".safetensors"}): "is no safetensors file that stands beside it",
    head_twice: "1 unexpected (first: model.layers.2.self_attn.",
    config_of_brackets: "more than 64 levels deep",
    config_a_directory: "config.json cannot be read: Is a directory",
}


SEEN_BY_INSPECT = {
    nan_weights: None,
    infinite_weights: None,
    layout_with_a_layer_too_many: "layer 1 has the scheme repo, and the weights lack its gate_map",
    layout_with_a_layer_too_few: "layer 2 has the scheme rope, which has no content_map",
    pe_config_dropped: "layer 2 has the scheme rope, which has no content_map",
    mode_exchanged: "which has no content_map (model.layers.2.self_attn.content_map.weight); mend config.json",
    wrong_head_count: "has shape [4, 8]; wanted one row, or one for each of 8 heads or 8 key-value heads",
    missing_weight: "layer 4 has the scheme repo, and the weights lack its final_map",
    unexpected_weight: "layer 0 has the scheme rope, which has no gate_map",
    misshaped_weight: "has shape [2, 8]; wanted one row, or one for each of 4 heads or 4 key-value heads",
    head_twice: "stands twice in the weights, under two names; leave one out",
}
"""What `inspect`, which builds no decoder, says in other words; None for what stands in values alone."""


@pytest.mark.parametrize("command", ["inspect", "analyze"])
@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_broken_checkpoints_are_refused_in_one_line(damage, command, checkpoint, tmp_path, monkeypatch, capsys):
    damage(checkpoint)
    said = BROKEN[damage]
    if command == "inspect" and damage in SEEN_BY_INSPECT:
        if SEEN_BY_INSPECT[damage] is None:  # it reads headers alone, and builds no decoder
            assert main(["inspect", str(checkpoint)]) == 0
            return
        said = SEEN_BY_INSPECT[damage]
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main([command, str(checkpoint), *(["--out", "results"] if command == "analyze" else [])]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"repo-interp {command}: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/checkpoint", "there is no checkpoint directory no/such/checkpoint"),
        ("./nothing", "there is no checkpoint directory ./nothing"),
        ("somebody/nothing", "somebody/nothing is no directory here and could not be fetched from the hub"),
        ("niah/reppo", "no checkpoint 'niah/reppo' is installed; did you mean niah/repo?"),
        ("\0", "has a NUL character"),
        ("x" * 5000, "names no checkpoint directory"),
    ],
)
def test_checkpoints_that_are_not_there(name, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", name]) == 2
    assert message in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("layout", "shown"),
    [("cope", "counted by gates"), ("kerple", "one for all heads"), ("learned", "none"), ("repo", "one per key-value head")],
)
def test_every_kind_of_scheme_is_inspected(layout, shown, tmp_path, capsys, monkeypatch):
    from families import tiny

    import repo_interp as ri

    monkeypatch.setenv("COLUMNS", "200")
    model = ri.reposition(tiny("llama"), layout)
    ri.save(model, tmp_path / "made")
    assert main(["inspect", str(tmp_path / "made")]) == 0
    output = capsys.readouterr().out
    assert shown in output and f"{ri.added_parameters(model):,} of them for positions" in output
