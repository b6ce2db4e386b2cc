"""The audit of a cache: sound caches of every kind have no finding, and mistakes are named."""

import json

import numpy as np
import pytest
import torch
from refusals import refused
from transformers import DynamicCache, StaticCache, cache_utils

import repo_interp as ri
from benchmarks.caches import FAMILIES, MISTAKES, TOKENS, caches_of
from benchmarks.tiny_models import small_model
from repo_interp.cli import main
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import observable
from repo_interp.plugins.verify_cache.reference_keys import keys_of_vocabulary, reference_keys


def cache_of(model, tokens=TOKENS, cache=None, **arguments):
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(tokens[None], past_key_values=cache, use_cache=True, **arguments)
    return cache


def legacy(cache):
    return tuple((layer.keys, layer.values) for layer in cache.layers)


def audited(model, cache, tokens=TOKENS):
    return ri.verify_cache(model, tokens, cache)


def verdict(model, cache, tokens=TOKENS):
    return audited(model, cache, tokens).attrs["verdict"]


@pytest.fixture(scope="module")
def llama():
    return small_model("llama")


@pytest.fixture(scope="module")
def made():
    return caches_of("llama")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(made, name):
    wanted, make = MISTAKES[name]
    given = tuple((keys[None], None) for keys in make(made).values())
    assert verdict(made.model, given) == wanted


SLICE = [
    (family, name)
    for number, family in enumerate(FAMILIES[1:])
    for name in list(MISTAKES)[2 * number :: 29]
]


@pytest.mark.parametrize(("family", "name"), SLICE)
def test_a_slice_of_the_catalogue_of_families(family, name):
    """`python -m benchmarks.caches` tries all mistakes in all families."""
    caches = caches_of(family)
    wanted, make = MISTAKES[name]
    given = tuple((keys[None], None) for keys in make(caches).values())
    assert verdict(caches.model, given) == wanted


@pytest.mark.parametrize("family", FAMILIES[::3])
def test_a_sound_cache_in_bfloat16_has_no_finding(family):
    caches = caches_of(family, torch.bfloat16)
    found = audited(caches.model, tuple((keys[None], None) for keys in caches.keys.values()))
    assert (found.attrs["findings"], found.attrs["dtype"]) == ("", "bfloat16")
    assert found.attrs["verdict"] == "contiguous"


def test_positions_agree_with_those_that_the_pass_was_given(llama):
    """The reference: keys of a pass with position ids stand where those say, in all heads."""
    at = torch.arange(40) * 3 % 41
    found = audited(llama, cache_of(llama, position_ids=at[None]))
    first = found["position"].sel(layer=0).values
    assert np.array_equal(first, np.broadcast_to(at.numpy(), first.shape))
    assert float(found["agreement"].sel(layer=0).min()) > 1 - 1e-6
    assert found["token"].dims == ("layer", "slot")


def test_unrotated_keys_of_the_first_layer_depend_on_the_token_alone(llama):
    decoder = as_decoder(observable(llama))
    by_id = keys_of_vocabulary(decoder, 0)[:, TOKENS]
    assert torch.allclose(by_id, reference_keys(decoder, TOKENS)[0].plain, atol=1e-6)


class _FourBits(cache_utils.QuantizedLayer):
    def _quantize(self, tensor, axis):
        low, high = tensor.amin(2, keepdim=True), tensor.amax(2, keepdim=True)
        step = (high - low) / 15
        return ((tensor - low) / step).round(), low, step

    def _dequantize(self, quantized):
        return quantized[0] * quantized[2] + quantized[1]


def test_caches_of_transformers(llama):
    static = StaticCache(config=llama.config, max_cache_len=64)
    assert verdict(llama, cache_of(llama, cache=static)) == "contiguous"
    four = cache_utils.Cache(layers=[_FourBits(residual_length=16) for _ in range(4)])
    cache_of(llama, TOKENS[:30], four)
    for token in TOKENS[30:]:
        cache_of(llama, token[None], four)
    found = audited(llama, four)
    assert found.attrs["verdict"] == "contiguous" and found.sizes["slot"] == 40
    # Keys of deeper layers were made of rounded ones, and some tell nothing.
    assert "too far from those of a dense pass" in found.attrs["cannot_tell"]
    offloaded = cache_of(llama)
    for layer in offloaded.layers:
        layer.keys = layer.keys.to("cpu", copy=True)
    assert verdict(llama, offloaded) == "contiguous"
    assert verdict(llama, legacy(offloaded)) == "contiguous"


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_layers_of_a_window_need_the_tokens_of_their_window(family):
    model = small_model(family)
    cache = cache_of(model)
    assert cache.layers[0].keys.shape[2] < 40
    found = audited(model, cache)
    assert found.attrs["findings"] == ""
    held = found["token"].sel(layer=0).values
    assert list(held[held >= 0]) == list(range(33, 40))
    static = cache_of(model, cache=StaticCache(config=model.config, max_cache_len=64))
    assert verdict(model, static) == "contiguous"


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_keys_that_do_not_rotate_tell_nothing(family):
    model = small_model(family)
    found = audited(model, cache_of(model, TOKENS[:30]), TOKENS[:30])
    assert found.attrs["verdict"] == "not told" and not found.attrs["findings"]
    assert "does not rotate" in found.attrs["cannot_tell"]


@pytest.mark.parametrize("name", ["reversal/repo", "language/repo", "language/rope"])
def test_learned_positions_are_those_of_a_dense_pass(name):
    model = ri.open_model(name)
    tokens = TOKENS % model.config.vocab_size
    cache = legacy(cache_of(model, tokens, DynamicCache()))
    assert verdict(model, cache, tokens) == "contiguous"
    for layer in as_decoder(model).learned_layers[-1:]:
        cache[layer][0][..., 5:9, -1] += 1.0  # the position beside a key
        found = audited(model, cache, tokens)
        assert found.attrs["verdict"] == "other positions"
        assert found.attrs["findings"].endswith(f"for tokens 5-8 (layer {layer})")


def test_a_wrapped_model_and_a_path(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    cache = legacy(cache_of(llama))
    assert verdict(tmp_path, cache) == "contiguous"
    assert verdict(torch.compile(llama, backend="eager"), cache) == "contiguous"


def test_text_that_is_longer_than_the_cache_has_no_finding(llama):
    """Generated text: its last token is not cached."""
    cache = cache_of(llama, TOKENS[:-1])
    assert verdict(llama, cache) == "contiguous"


def test_refusals(llama):
    cache = legacy(cache_of(llama))
    with refused("cache of other tokens"):
        audited(llama, cache, (TOKENS + 7) % 100 + 3)
    torch.manual_seed(3)
    with refused("cache of other model"):
        audited(type(llama)(llama.config), cache)
    with refused("layers with attention are 0-3: it is the cache of another model"):
        audited(llama, cache * 2)
    with refused("NaN"):
        audited(llama, [(keys * torch.nan, values) for keys, values in cache])
    with refused("holds 2 prompts"):
        audited(llama, [(keys.expand(2, -1, -1, -1), values) for keys, values in cache])
    with refused("and the model's 2 of 16"):
        audited(llama, [(keys[..., :4], values) for keys, values in cache])
    for tokens, line in (("text", "wanted the token ids"), (TOKENS + 900, "wanted 0 to 119")):
        with refused(line):
            audited(llama, cache, tokens)
    for given, line in ((5, "was wanted"), ([], "no key"), ([5], "layer 0 of the cache is 5")):
        with refused(line):
            audited(llama, given)


class _Runs:
    def __reduce__(self):
        return (print, ("it ran",))


def test_the_command_and_its_files(llama, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama.save_pretrained("m")
    (tmp_path / "t.json").write_text(json.dumps(TOKENS.tolist()))
    (tmp_path / "words").write_text("no numbers")
    whole = [layer.keys[0] for layer in cache_of(llama).layers]
    two = [cache_of(llama, part) for part in TOKENS.split(20)]
    joined = [torch.cat([part.layers[row].keys[0] for part in two], 1) for row in range(4)]
    for name, keys in {"whole": whole, "joined": joined}.items():
        np.savez(f"{name}.npz", **{f"keys_{row}": part.numpy() for row, part in enumerate(keys)})
    (tmp_path / "half.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:2000])
    np.savez("object.npz", keys_0=np.array([_Runs()], dtype=object))
    np.savez("other.npz", cos=np.ones((2, 3)))
    command = ["verify", "m", "--tokens", "t.json", "--cache"]
    assert main([*command, "whole.npz"]) == 0
    assert main([*command, "joined.npz", "--out", "audit"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "fragments: tokens 20-39 at positions 0 to 19, 20 too early (all layers)" in said
    assert "joined.npz 40 slots in 4 layers; fragments" in said
    assert (tmp_path / "audit" / "cache.nc").is_file()
    for name, line in {
        "half.npz": "half.npz cannot be read",
        "object.npz": "object.npz cannot be read",
        "other.npz": "holds cos; wanted keys_0",
        "absent.npz": "there is no file absent.npz",
        "t.json": "does not end in .npz",
    }.items():
        assert main([*command, name]) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()
        assert line in said
    for more, line in (
        (["m", "m", "--tokens", "t.json", "--cache", "whole.npz"], "leave out m"),
        (["m", "--cache", "whole.npz"], "belong together"),
        (["m", "--tokens", "words", "--cache", "whole.npz"], "wanted token ids"),
    ):
        assert main(["verify", *more]) == 2
        assert line in capsys.readouterr().err
    assert "it ran" not in capsys.readouterr().out
