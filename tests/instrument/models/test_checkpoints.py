"""Checkpoints do what Hugging Face does with them, go round through Trainer and Auto classes, and
cost what they must.
"""

import ctypes
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from families import CONFIGS, TOKENS, tiny
from forked import forked, say
from places import tree
from refusals import refused
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import repo_interp as ri
from repo_interp import installed_points
from repo_interp.checkpoint_files.shipped import shipped_names
from repo_interp.checkpoint_files.weights import loaded_by_transformers
from repo_interp.cli import main
from repo_interp.errors import Note
from repo_interp.models.configuration import identify
from repo_interp.models.decoder import as_decoder
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.positions.assigners import TokenIndex
from repo_interp.tasks.prompt import Prompt


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def hugging_face(directory):
    return logits(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())


def assert_as_hugging_face(directory):
    assert_close(logits(ri.load_model(directory)), hugging_face(directory), atol=1e-5, rtol=1e-5)


def configuration_of(directory):
    return json.loads((directory / "config.json").read_text())


def configured(directory, without=(), **changed):
    """Change keys of config.json, and leave some out."""
    stated = configuration_of(directory) | changed
    kept = {key: value for key, value in stated.items() if key not in without}
    (directory / "config.json").write_text(json.dumps(kept))


def rewritten(directory, change, **configuration):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    configured(directory, **configuration)


@pytest.fixture
def stock(tmp_path):
    """A stock checkpoint as save_pretrained writes it."""
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def another_head(tensors):
    tensors["lm_head.weight"] = torch.randn_like(tensors["lm_head.weight"])


def the_same_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def no_head(tensors):
    del tensors["lm_head.weight"]


def no_embedding(tensors):
    del tensors["model.embed_tokens.weight"]


def old_frequencies(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


@pytest.mark.parametrize("change", [another_head, the_same_head, no_head, no_embedding])
def test_tied_embeddings_are_tied_as_hugging_face_ties_them(change, stock, tmp_path, capsys):
    rewritten(stock, change, tie_word_embeddings=True)
    assert_as_hugging_face(stock)
    model = ri.load_model(stock)
    assert model.config.tie_word_embeddings is (change is not another_head)
    ri.save(model, tmp_path / "again")
    assert torch.equal(logits(ri.load_model(tmp_path / "again")), logits(model))
    capsys.readouterr()
    assert main(["inspect", str(stock)]) == 0
    # Found: two matrices were counted once, where the configuration ties them.
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert f"{counted:,} parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    "from_memory", [False, True], ids=["loaded by us", "loaded by transformers"]
)
def test_an_unembedding_of_its_own_is_saved_whatever_the_configuration_says(
    from_memory, stock, tmp_path
):
    """Found: a merged adapter's head was dropped, since config.json ties it; after loading again,
    logits were off by 31.
    """
    rewritten(stock, another_head, tie_word_embeddings=True)
    right = hugging_face(stock)
    model = ri.load_model(stock)
    if from_memory:
        stocks = AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32)
        model = ri.reposition(stocks, "rope")
        model.config.tie_word_embeddings = True
    ri.save(model, tmp_path / "again")
    assert_close(hugging_face(tmp_path / "again"), right, atol=1e-5, rtol=1e-5)
    assert_as_hugging_face(tmp_path / "again")
    assert configuration_of(tmp_path / "again")["tie_word_embeddings"] is False
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.config.tie_word_embeddings = True
    ri.save(model, tmp_path / "equal")
    assert "lm_head.weight" not in load_file(tmp_path / "equal" / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
def test_names_without_that_of_the_base_model_are_read_as_hugging_face_reads_them(tied, tmp_path):
    config = CONFIGS["qwen3"]()
    config.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    right = hugging_face(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(short, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_close(logits(ri.load_model(tmp_path)), right, atol=1e-5, rtol=1e-5)
    assert main(["inspect", str(tmp_path)]) == 0


@pytest.mark.parametrize(("prefix", "command"), [("_orig_mod.", "inspect"), ("module.", "analyze")])
def test_names_of_wrappers_are_refused_with_what_takes_them_off(prefix, command, stock, capsys):
    rewritten(
        stock,
        lambda tensors: [tensors.update({prefix + key: tensors.pop(key)}) for key in [*tensors]],
    )
    assert main([command, str(stock)]) == 2
    assert f"take {prefix} off every name" in capsys.readouterr().err


def qwen3_moe(directory, **changed):
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)
    configured(directory, **changed)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantisation_that_the_weights_no_longer_have_changes_no_precision(dtype, tmp_path):
    """Found: of experts in bfloat16, float32 was asked for and bfloat16 came."""
    qwen3_moe(tmp_path)
    right = logits(ri.load_model(tmp_path, dtype=dtype))
    configured(tmp_path, quantization_config=FP8)
    with pytest.warns(Note, match=r"names a quantisation \(fp8\), which its weights do not have"):
        model = ri.load_model(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(logits(model), right)


O_PROJ, EMBEDDING = "model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"


DAMAGES = {
    "missing": lambda tensors, name: tensors.pop(name),
    "surplus": lambda tensors, name: tensors.update({f"{name}.extra": torch.ones(1)}),
    "misshaped": lambda tensors, name: tensors.update({name: tensors[name][:-1].clone()}),
    "renamed": lambda tensors, name: tensors.update({f"{name}.extra": tensors.pop(name)}),
}


def test_a_precision_that_transformers_gives_in_place_of_the_one_asked_for_is_refused(tmp_path):
    qwen3_moe(tmp_path, quantization_config=FP8)
    with refused(r"as torch.bfloat16.*"):
        loaded_by_transformers(tmp_path, AutoConfig.from_pretrained(tmp_path), torch.float32)


def test_experts_that_are_stored_in_eight_bits_are_refused_as_other_weights_are(tmp_path):
    qwen3_moe(tmp_path, quantization_config=FP8)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    rewritten(
        tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    with pytest.warns(Note), refused(f"{name} is stored as F8_E4M3"):
        ri.load_model(tmp_path)


@pytest.mark.parametrize("zero", ["mscale", "mscale_all_dim"])
def test_a_scale_of_zero_is_none_as_hugging_face_has_it(zero, stock):
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
    configured(stock, ["rope_parameters"], rope_theta=1e4, rope_scaling=scaling | {zero: 0.0})
    assert main(["inspect", str(stock)]) == 0
    assert_as_hugging_face(stock)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", EMBEDDING), ("gemma3", O_PROJ), ("qwen3_moe", O_PROJ), ("qwen3_moe", EMBEDDING)],
)
def test_inspect_refuses_headers_that_do_not_fit(family, name, damage, tmp_path, capsys):
    """Found: exit code 0, and a smaller number of parameters."""
    qwen3_moe(tmp_path) if family == "qwen3_moe" else tiny(family).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    rewritten(tmp_path, lambda tensors: DAMAGES[damage](tensors, name))
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "repo-interp inspect: " in said.err


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("olmo2", {}, "rope_theta (10,000 is taken), max_position_embeddings (2,048 is taken)"),
        (
            "gemma3",
            {"rope_theta": 1e6, "max_position_embeddings": 64},
            "rope_theta of sliding_attention (10,000 is taken)",
        ),
    ],
)
def test_numbers_of_the_rotation_that_transformers_gives_are_named(
    family, keys, said, tmp_path, capsys
):
    tiny(family).save_pretrained(tmp_path)
    configured(tmp_path, ("rope_parameters", "rope_theta", "max_position_embeddings"))
    configured(tmp_path, **keys)
    file = tmp_path / "config.json"
    with pytest.warns(Note) as warned:
        bridge = ri.load(tmp_path)
    assert f"{file} lacks {said}" in str(warned[0].message)
    assert warned[0].filename == __file__  # the line that called, not one of ours
    kept = ri.analyze(bridge, [[1, 2, 3]], ["patterns"]).attrs["notes"]
    assert kept == str(warned[0].message).replace(str(file), "config.json")  # a run names no path
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"repo-interp inspect: {warned[0].message}\n"


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 10000},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
)
def test_nothing_is_said_where_the_numbers_stand_in_an_older_form(keys, stock):
    configured(stock, ["rope_parameters"], **keys)
    identify(stock)


def test_nothing_is_said_of_what_comes_with_the_package_or_is_saved_by_it(tmp_path):
    for place in shipped_names():
        identify(place)
    for family in ("llama", "gemma3", "smollm3"):
        ri.save(ri.reposition(tiny(family), "repo@1"), tmp_path / family)
        identify(tmp_path / family)


def test_frequencies_that_old_checkpoints_store_are_skipped_as_hugging_face_skips_them(stock):
    rewritten(stock, old_frequencies)
    assert_as_hugging_face(stock)


def test_a_stale_index_beside_whole_weights_is_not_read(stock, tmp_path):
    sharded = tmp_path / "sharded"
    tiny("llama").save_pretrained(sharded, max_shard_size="20KB")
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 1
    assert_as_hugging_face(sharded)
    for file in (*shards, sharded / "model.safetensors.index.json"):
        file.rename(stock / file.name)
    assert_as_hugging_face(stock)


@pytest.mark.parametrize(("stored", "wanted"), [("float16", "bfloat16"), ("bfloat16", "float64")])
def test_weights_are_converted_once(stored, wanted, tmp_path):
    ri.save(ri.reposition(tiny("olmo2"), "repo@1").to(getattr(torch, stored)), tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    state = ri.load_model(tmp_path, dtype=wanted).state_dict()
    found = {name.replace(".assigner.", "."): tensor for name, tensor in state.items()}
    expected = {name: tensor.to(getattr(torch, wanted)) for name, tensor in before.items()}
    assert_close(found, expected, rtol=0, atol=0)


def drawn(model, std):
    """The model with random parameters of its schemes."""
    for module in as_decoder(model).scheme_modules:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return model


@pytest.mark.parametrize("scheme", ["repo", "multihead_continuous"])
def test_learned_positions_keep_their_precision_in_a_rounded_model_where_asked(scheme, tmp_path):
    model = drawn(ri.reposition(tiny("llama"), f"{scheme},rope,{scheme}"), std=1.0)
    ri.save(model, tmp_path)
    kept = ri.load_model(tmp_path, dtype="bfloat16", positions_dtype="float32")
    run = ri.analyze(kept, [Prompt(tokens=tuple(TOKENS[0].tolist()))], ("positions",))
    assert (run.attrs["dtype"], run.attrs["positions_dtype"]) == ("bfloat16", "float32")
    assert "computed in bfloat16, learned positions in float32" in run.attrs["notes"]
    with torch.no_grad():
        embedded = kept.model.embed_tokens(TOKENS[:1])
        hidden = kept.model.layers[0].input_layernorm(embedded)
        expected = model.model.layers[0].self_attn.assigner.assign(hidden.float())[0].T
    assert hidden.dtype == torch.bfloat16
    positions = run["positions"]["position"].sel(layer=0, prompt=0).values
    found = torch.as_tensor(positions).float()
    assert_close(found[:: len(found) // len(expected)], expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, found.bfloat16().float())


class Halved(TokenIndex):
    """Half the token index; the factor is a buffer that no file has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([0.5]), persistent=False)

    def forward(self, hidden_states, index):
        return super().forward(hidden_states, index) * self.factor


def test_buffers_of_a_scheme_that_are_not_stored_are_those_of_its_constructor(
    tmp_path, monkeypatch
):
    """Loaded by transformers they would be memory that nobody wrote to."""
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    ri.register_scheme(
        "halved_index",
        lambda builder, rotation, d_head: SchemeParts(
            "halved_index", Halved(), rotation.frequencies, rotation.attention_scaling
        ),
    )
    model = ri.reposition(tiny("llama"), "halved_index@1/2")
    ri.save(model, tmp_path)
    assert torch.equal(logits(ri.load_model(tmp_path)), logits(model))


def test_values_too_large_for_the_wanted_dtype_are_refused(stock):
    rewritten(stock, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    assert ri.load_model(stock, dtype="bfloat16").dtype == torch.bfloat16
    with refused(r"model.norm.weight holds values too large for torch.float16"):
        ri.load_model(stock, dtype="float16")


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("llama", "learned", {}),
        ("llama", "repo@1", {"assignment": "head"}),
        ("gemma3", "cope", {"gates": "separate_keys", "map": "model"}),
    ],
)
def test_what_save_pretrained_writes_of_a_repositioned_model_loads(
    family, layout, options, tmp_path
):
    model = drawn(ri.reposition(tiny(family), layout, **options), std=0.3)
    model.save_pretrained(tmp_path)
    written = configuration_of(tmp_path)
    assert written["model_type"] == "repo_interp"
    assert written["base_model_type"] == model.config.model_type
    for again in (ri.load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert ri.layout(again) == ri.layout(model)
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_auto_classes_load_what_we_save(family, tmp_path):
    model = ri.reposition(tiny(family), "repo")
    ri.save(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)) and type(again) is type(model)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(ri.load_model(tmp_path / "again")), logits(model))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.position_layout["layers"] == ["repo"] * 3
    assert ri.layout(AutoModelForCausalLM.from_config(config)) == ("repo",) * 3
    half = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert half.dtype == torch.bfloat16 and half.config._attn_implementation == "eager"
    with refused("take no variant"):
        AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16")


@pytest.mark.parametrize(("layout", "family"), [("rope", "gemma2"), ("learned", "llama")])
def test_a_bridge_is_saved_and_loaded(family, layout, tmp_path):
    model = ri.reposition(tiny(family), layout)
    ri.save(model, tmp_path / "before")
    bridge = ri.bridge(model)
    ri.save(bridge, tmp_path / "bridged")
    assert tree(tmp_path / "bridged") == tree(tmp_path / "before")
    # Found: the wrapped model's method met every weight twice
    bridge.save_pretrained(tmp_path / "pretrained")
    assert tree(tmp_path / "pretrained") == tree(tmp_path / "before")
    with torch.no_grad():
        bridge.blocks[1].mlp.out.weight.mul_(2)
        ri.save(bridge, tmp_path / "edited")
        assert_close(ri.load(tmp_path / "edited")(TOKENS), bridge(TOKENS), atol=1e-5, rtol=1e-5)


def test_a_bridge_whose_weights_are_no_longer_the_models_is_not_saved(tmp_path):
    bridge = ri.bridge(ri.reposition(tiny("llama"), "repo"))
    bridge.enable_compatibility_mode(no_processing=True)
    with refused("compatibility mode"):
        ri.save(bridge, tmp_path)


def test_saving_keeps_the_tokenizer_of_a_bridge(tmp_path):
    bridge = ri.load("niah/repo")
    ri.save(bridge, tmp_path)
    again = ri.load(tmp_path)
    assert again.tokenizer.get_vocab() == bridge.tokenizer.get_vocab()
    assert bridge.cfg.model_name == "niah/repo" and again.cfg.model_name == tmp_path.name
    with refused("wanted a tokenizer of transformers to save, got 3"):
        ri.save(bridge, tmp_path / "new", tokenizer=3)
    assert not (tmp_path / "new").exists()


def test_names_of_the_zoo_are_never_looked_for_on_the_hub(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert ri.layout(ri.load_model("niah/repo"))[-1] == "repo"
    for task in {name.split("/")[0] for name in shipped_names()}:
        with refused("is installed"):
            ri.load_model(f"{task}/something-else")


def memory_of_loading(directory):
    """Say how many times its own size a model needs at most while it is loaded."""

    def status(name):
        return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

    ri.load("niah/rope")
    ctypes.CDLL(None).malloc_trim(0)  # else loading reuses what the tests before have freed
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
    before = status("VmRSS")
    bridge = ri.load(directory, dtype="bfloat16")
    say(
        (status("VmHWM") - before)
        / (sum(each.numel() * each.element_size() for each in bridge.parameters()) / 1024)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_the_memory_of_the_model(tmp_path):
    """In a narrower dtype than the file's: neither the file nor a part of it is held beside the
    model.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=8000, num_hidden_layers=4, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    model.save_pretrained(tmp_path, max_shard_size="60MB")  # about 330 MB
    del model
    assert len(list(tmp_path.glob("*.safetensors"))) == 7
    done = forked(lambda: memory_of_loading(tmp_path))
    # A second copy of the weights would be 2. Of so small a model the allocator's own pages are up
    # to a quarter, now and then.
    assert 0.9 < float(done.stdout) < 1.5, done.stderr


def test_inspecting_reads_headers_alone(tmp_path, capsys):
    """A file of 4 GB of zeros on paper: reading it would take its memory and time."""
    config, header, offset = LlamaConfig(num_hidden_layers=4), {}, 0
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    for name, weight in weights.items():
        place = [offset, offset := offset + 4 * weight.numel()]
        header[name] = {"dtype": "F32", "shape": [*weight.shape], "data_offsets": place}
    encoded = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["inspect", str(tmp_path)]) == 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert f"{offset // 4:,} parameters" in capsys.readouterr().out
    assert grown < 500_000  # kB, of 4 GB


def test_auto_takes_an_accelerator_and_its_precision_only_where_there_is_one():
    model = ri.load_model("niah/repo", device="auto", dtype="auto")
    there = torch.cuda.is_available()
    assert next(model.parameters()).device.type == ("cuda" if there else "cpu")
    assert next(model.parameters()).dtype == torch.float32
