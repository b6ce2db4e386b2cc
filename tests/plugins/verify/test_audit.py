"""The rotation audit: faults seeded into stock models are found and named; healthy models of many
families have no finding.
"""

import pytest
import torch
from families import HEAD, TINY
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, SmolLM3Config
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.llama import modeling_llama

import repo_interp as ri
from benchmarks.families import scaled_configuration
from benchmarks.tiny_models import small_model
from repo_interp.cli import main
from repo_interp.plugins.verify.layer_rotation import tested_distances as distances_of

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "attention_factor": 1.0,
    "original_max_position_embeddings": 32,
}


def llama(**changed):
    return AutoModelForCausalLM.from_config(
        LlamaConfig(**{**TINY, "hidden_size": 64, **changed})
    ).eval()


def findings(*models, **options):
    return ri.verify(*models, **options).attrs["findings"].splitlines()


def test_distances_are_powers_of_two_and_their_neighbours():
    assert distances_of(10) == [1, 2, 3, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "family", ["gpt_neox", "glm4", "cohere2", "gemma3_text", "gpt_oss", "qwen3_next"]
)
def test_a_healthy_family_has_no_finding(family):
    model = small_model(family)
    for dtype in ("float32", "bfloat16"):
        audited = ri.verify(model, model, dtype=dtype, longest=64)
        assert audited.attrs["findings"] == ""
        assert float(audited["largest_error"].max()) < 1e-2


@pytest.mark.parametrize(
    ("family", "scaling"), [("granite_swa", "linear"), ("gemma4_text", "yarn"), ("lfm3", "llama3")]
)
def test_a_healthy_scaled_family_has_no_finding(family, scaling):
    """Bases by layer; columns of frequency 0; a norm that undoes YaRN's factor."""
    assert not findings(small_model(family, scaled_configuration(family, scaling)), longest=64)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_precision_of_the_process_changes_nothing(default):
    """Found: refused, as if the attention of the model did not run on its own."""
    model, wanted = llama(), ri.verify(llama())
    torch.set_default_dtype(default)
    try:
        found = ri.verify(model)
        assert torch.get_default_dtype() == default
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.attrs["findings"] == "" and found.equals(wanted)


def test_a_model_that_does_not_rotate_has_no_finding(tmp_path, capsys):
    """Found: a traceback, for the largest of no angles."""
    small_model("gpt2").save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "audit")]) == 0
    assert "0 of them rotate" in capsys.readouterr().out


def test_a_share_of_a_head_that_the_class_ignores_is_found():
    (line,) = findings(llama(rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}))
    assert line.startswith(
        "layers 0-2: expected 4 pairs that turn (partial rotation), measured 8, from distance 1 on"
    )


def test_interleaved_pairs_in_the_place_of_halves_are_found(monkeypatch):
    model = llama()
    model.model.rotary_emb = CohereRotaryEmbedding(model.config)

    class Interleaved(modeling_llama.LlamaAttention):
        def forward(self, *arguments, **keywords):
            with monkeypatch.context() as patched:
                patched.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
                return super().forward(*arguments, **keywords)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Interleaved
    (line,) = findings(model)
    assert line.startswith(
        "layers 0-2: expected entries (0, 8), (1, 9), ... as pairs, measured (0, 1), (2, 3), ..."
    )


def test_another_base_in_one_layer_is_found():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = AutoModelForCausalLM.from_config(
        Gemma3TextConfig(**TINY, **HEAD, sliding_window=8, layer_types=kinds)
    )
    assert findings(model) == []
    model.model.rotary_emb.full_attention_inv_freq = 500.0 ** (-torch.arange(4) / 4)
    (line,) = findings(model)
    assert line.startswith(
        "layer 1, pairs 1-3: expected theta 0.0316228 (pair 1), measured 0.21147"
    )
    assert line.endswith("rad off, from distance 1 on")


def test_yarn_that_is_not_applied_and_its_factor_are_found():
    model = llama(rope_parameters=YARN)
    assert findings(model) == []
    model.model.rotary_emb.attention_scaling = 1.0
    assert findings(model) == [
        "layers 0-2: expected queries lengthened by 1.139 (attention factor), measured 1, "
        "from distance 1 on"
    ]
    model = llama(rope_parameters=YARN)
    model.model.rotary_emb.inv_freq = llama().model.rotary_emb.inv_freq
    (line,) = findings(model)
    assert line.startswith("layers 0-2, pairs 1-7: expected theta")


def test_frequencies_rounded_to_bfloat16_are_found():
    model = llama().to(torch.bfloat16)
    (line,) = findings(model)
    assert line.startswith(
        "layers 0-2, pairs 1-4: expected theta 0.316228 (pair 1), measured 0.31640"
    )


def test_a_layer_that_rotates_against_its_configuration_is_found():
    config = SmolLM3Config(**TINY)
    config.no_rope_layers = [1, 0, 1]
    model = AutoModelForCausalLM.from_config(config)
    assert findings(model) == []
    model.model.layers[1].self_attn.use_rope = 1
    assert any(
        line.startswith("layer 1: expected no rotation, as the configuration says, measured 4")
        for line in findings(model)
    )


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize("rope", [DYNAMIC, LONG])
def test_frequencies_that_depend_on_the_length_are_judged_at_the_longest_distance(rope):
    """Found: sound models were accused, one that ignores its dynamic scaling was acquitted, and its
    later passes were others.
    """
    model = llama(rope_parameters=rope, max_position_embeddings=64)
    tokens = torch.arange(80)[None] % 60
    before = model(tokens).logits
    for longest in (16, 31, 32, 63, 64, None):
        assert findings(model, longest=longest) == []
    assert torch.equal(model(tokens).logits, before)
    plain = llama(max_position_embeddings=64)
    plain.config.rope_parameters = dict(rope)
    assert findings(plain, longest=16) == []
    (line,) = findings(plain, longest=500)
    assert line.startswith("layers 0-2, pairs ") and "expected theta" in line


def reordered(weight):
    entries = torch.arange(16).view(2, 8).T.flatten()
    weight.copy_(weight.view(-1, 16, weight.shape[-1])[:, entries].flatten(0, 1))


KEYS = {
    "the keys of the first model, measured interleaved pairs instead of halves": reordered,
    "the queries of the first model, measured interleaved pairs instead of halves": reordered,
    "the keys of the first model, measured a correlation of 0.00 with them": torch.zero_,
    "the products of queries and keys of the first model, measured 100% of them "
    "off": lambda weight: weight.mul_(2),
}


@pytest.mark.parametrize("said", KEYS)
def test_a_second_model_whose_keys_are_others_is_found(said):
    """Found: queries alone were compared."""
    model, other = llama(), llama()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        part = "q_proj" if "the queries of" in said else "k_proj"
        KEYS[said](getattr(other.model.layers[1].self_attn, part).weight)
    (line,) = findings(model, other)
    assert line.startswith(f"layer 1: expected {said}")


def test_the_command_compares_two_checkpoints_and_says_what_it_does_not_compare(tmp_path, capsys):
    for name in "ab":
        llama().save_pretrained(tmp_path / name)
    one, other = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["verify", one, other, "--longest", "8"]) == 1
    assert main(["verify", one, one, "--longest", "8"]) == 0
    assert "not compared: values, what attention writes, feed-forward" in capsys.readouterr().out


def test_layers_of_ours_that_rotate_otherwise_are_named(capsys):
    """Found: of a checkpoint without positions it said that all its layers rotate, and nothing
    else.
    """
    assert main(["verify", "reversal/nope", "--longest", "8"]) == 0
    assert (
        "reversal/nope are nope; only the rotation of the underlying llama is audited"
        in capsys.readouterr().err
    )
    assert main(["verify", "reversal/repo", "--longest", "8"]) == 0 and not capsys.readouterr().err


def test_the_command_returns_1_for_a_finding_and_writes_the_figure(tmp_path, capsys):
    llama(rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}).save_pretrained(tmp_path / "m")
    assert main(["verify", str(tmp_path / "m"), "--out", str(tmp_path / "audit")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "expected 4 pairs that turn (partial rotation), measured 8" in said
    assert {path.name for path in (tmp_path / "audit").iterdir()} == {"rotation.nc", "rotation.png"}
