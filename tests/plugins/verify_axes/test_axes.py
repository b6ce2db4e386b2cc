"""Axes of mRoPE: mistakes made in tables and caches of real families are named by axis."""

import copy
import json

import numpy as np
import pytest
import torch
from larger import small_larger
from refusals import refused
from transformers import DynamicCache

import repo_interp as ri
from benchmarks.tiny_models import small_configuration, small_model
from repo_interp.cli import main
from repo_interp.plugins.verify.axis_tables import image_positions
from repo_interp.plugins.verify_axes.axes import axis_faults, positions_by_axis, turns_by_axis

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "cohere_compass_text")
SECTIONS = [4, 2, 2]
POSITIONS = image_positions()
IMAGE = slice(4, 39)
TOKENS = torch.randint(3, 100, (43,), generator=torch.Generator().manual_seed(1))
TOKENS[IMAGE] = 110  # placeholders, which are equal


def changed(axis, by, some=slice(None)):
    positions = POSITIONS.clone()
    positions[axis, some] += by
    return positions


MISTAKES = {
    "contiguous": POSITIONS,
    "sections of height and width swapped": POSITIONS[[0, 2, 1]],
    "sections of time, height and width exchanged": POSITIONS[[1, 2, 0]],
    "text-only positions": torch.arange(43).expand(3, -1),
    "time for all axes": POSITIONS[[0, 0, 0]],
    "time shifted by +2": changed(0, 2),
    "height shifted by +1": changed(1, 1),
    "width off": changed(2, 1, IMAGE),
    "shifted by +5": POSITIONS + 5,
    "turned twice": 2 * POSITIONS,
    "not turned": 0 * POSITIONS,
}


def sized(family, sections=SECTIONS):
    """A tiny model whose pairs turn by all axes."""
    config = small_configuration(family)
    wanted = {"mrope_section": sections, "partial_rotary_factor": 1.0}
    rope = config.rope_parameters
    by_kind = "full_attention" in rope
    rope = {name: one | wanted for name, one in rope.items()} if by_kind else rope | wanted
    config.rope_parameters = rope
    return small_model(family, config)


@pytest.fixture(scope="module")
def models():
    return {family: sized(family) for family in FAMILIES}


def cache_of(model, positions):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(TOKENS[None], position_ids=positions[:, None], past_key_values=cache)
    return cache


def prompt_of(model):
    return ri.prompt(TOKENS.tolist(), model, position_ids=POSITIONS.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_mistakes_of_axes_are_named_in_caches_of_all_families(models, family, dtype):
    # Of a copy: frequencies that were rounded stay so
    model = copy.deepcopy(models[family]).to(dtype)
    for wanted, positions in MISTAKES.items():
        found = ri.verify_cache(model, prompt_of(model), cache_of(model, positions))
        assert found.attrs["verdict"] == wanted
        assert bool(found.attrs["findings"]) == (wanted != "contiguous")


def test_positions_by_axis_are_those_that_the_pass_was_given(models):
    """The reference: position ids that were drawn, and agree with nothing."""
    model = models["cohere_compass_text"]
    drawn = torch.randint(0, 30, (3, 43), generator=torch.Generator().manual_seed(2))
    found = ri.verify_cache(model, prompt_of(model), cache_of(model, drawn))
    first = found["position"].sel(layer=0)
    assert first.dims == ("head", "slot", "axis")
    assert list(first["axis"].values) == ["time", "height", "width"]
    assert np.array_equal(first, np.broadcast_to(drawn.T, first.shape))
    assert np.array_equal(found["wanted"].sel(layer=0, head=0), POSITIONS.T)
    assert np.array_equal(found["token"].sel(layer=0), range(43))


def test_one_head_and_one_axis_are_named(models):
    model = models["cohere_compass_text"]
    shifted, sound = (cache_of(model, at).layers for at in (changed(1, 1), POSITIONS))
    mixed = []
    for wrong, right in zip(shifted, sound, strict=True):
        keys = right.keys.clone()
        keys[:, 1] = wrong.keys[:, 1]
        mixed.append((keys, None))
    found = ri.verify_cache(model, prompt_of(model), mixed)
    assert found.attrs["findings"].splitlines()[0].startswith("height shifted by +1: height pos")
    assert "head 1" in found.attrs["findings"]
    wanted = "time: contiguous; height: height shifted by +1; width: contiguous"
    assert found.attrs["verdict_by_axis"] == wanted


def test_tokens_that_are_gone_or_strange_are_named_beside_axes(models):
    model = models["cohere_compass_text"]
    keys = [layer.keys for layer in cache_of(model, POSITIONS).layers]
    evicted = [(torch.cat([one[:, :, :1], one[:, :, 2:]], 2), None) for one in keys]
    assert ri.verify_cache(model, prompt_of(model), evicted).attrs["verdict"] == "evicted"
    strange = [(one.clone(), None) for one in keys]
    strange[0][0][:, :, 2] = torch.randn(keys[0].shape[1], keys[0].shape[-1])
    assert "wrong token" in ri.verify_cache(model, prompt_of(model), strange).attrs["verdict"]


def test_the_cache_of_a_whole_model_that_saw_an_image_is_sound(tmp_path):
    whole = small_larger("qwen3_5")
    whole.model.language_model.rotary_emb.mrope_section = SECTIONS
    embedded = whole.get_input_embeddings()(TOKENS[None]).detach()
    embedded[:, IMAGE] = torch.randn(1, 35, embedded.shape[-1])
    given = {"inputs_embeds": embedded, "position_ids": POSITIONS[:, None]}
    with torch.no_grad():
        cache = whole(**given, use_cache=True).past_key_values
    whole.save_pretrained(tmp_path)
    with pytest.warns(ri.errors.Note, match="only its text part is opened"):
        model = ri.open_model(tmp_path)
    model.get_input_embeddings().register_forward_hook(lambda *_: embedded)
    found = ri.verify_cache(model, prompt_of(model), cache)
    assert (found.attrs["verdict"], found.attrs["findings"]) == ("contiguous", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_family_has_no_finding_and_other_sections_are_found(family):
    model = sized(family)
    for dtype in ("float32", "bfloat16"):
        assert ri.verify(model, dtype=dtype, longest=64).attrs["findings"] == ""
    for module in model.modules():
        if isinstance(sections := getattr(module, "mrope_section", None), dict):
            module.mrope_section = {kind: [3, 3, 2] for kind in sections}
        elif sections is not None:
            module.mrope_section = [3, 3, 2]
    for dtype in ("float32", "bfloat16"):
        (line,) = ri.verify(model, dtype=dtype, longest=64).attrs["findings"].splitlines()
        assert line.endswith(": other sections: pair 7 turns by height, not time")


def written(path, positions, stated=POSITIONS, dtype=np.float32):
    """Tables of a runtime that turns pairs of "qwen4_exp_text" by `positions`."""
    frequencies = 1e4 ** -(torch.arange(8).double() / 8)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
    angles = (frequencies[:, None] * positions[axes]).T
    tables = {"cos": angles.cos(), "sin": angles.sin()}
    np.savez(
        path, positions=stated, **{name: one.numpy().astype(dtype) for name, one in tables.items()}
    )
    return path


@pytest.mark.parametrize("wanted", MISTAKES)
def test_mistakes_of_axes_are_named_in_tables_of_a_runtime(models, tmp_path, wanted):
    audited = ri.verify(models["qwen4_exp_text"], written(tmp_path / "t.npz", MISTAKES[wanted]))
    lines = audited.attrs["findings"].splitlines()
    assert [line.split(": ")[1] for line in lines] == ([] if wanted == "contiguous" else [wanted])
    assert (float(audited["largest_error"].max()) < 1e-3) == (wanted == "contiguous")


def test_a_coarse_table_says_which_axis_it_does_not_tell(models, tmp_path):
    path = written(tmp_path / "t.npz", POSITIONS, dtype=np.float16)
    audited = ri.verify(models["qwen4_exp_text"], path)
    assert audited.attrs["findings"] == ""
    with refused("the file has 4 pairs that turn; the model has 8"):
        sines = np.random.default_rng(0).random((43, 4))
        np.savez(path, positions=POSITIONS, cos=np.sqrt(1 - sines**2), sin=sines)
        ri.verify(models["qwen4_exp_text"], path)


def named(positions, dtype, wanted=POSITIONS):
    """Faults in tables of a Qwen2-VL: sections one after another, 64 pairs, base 10^6."""
    frequencies = 1e6 ** -(torch.arange(64).double() / 64)
    axes = torch.tensor([0] * 16 + [1] * 24 + [2] * 24)
    angles = (frequencies * positions[axes].T).float()
    table = torch.complex(*(part.to(dtype).double() for part in (angles.cos(), angles.sin())))[None]
    plain = torch.ones_like(table)
    turns = turns_by_axis(table, plain, frequencies, axes, wanted, torch.arange(43), dtype)
    at, lost = positions_by_axis(turns)
    return [fault.kind for fault in axis_faults(turns, at, lost)], at


def test_chunked_sections_are_told_apart_as_far_as_the_precision_goes():
    for wanted, positions in MISTAKES.items():
        assert named(positions, torch.float32)[0] == [wanted] * (wanted != "contiguous")
    found, at = named(changed(2, 1), torch.bfloat16)
    # A width that turns by at most 1.8e-4 rad per token is lost in bfloat16, and none is claimed.
    assert (
        found == [] and bool(at[2].isnan().all()) and torch.equal(at[0, 0], POSITIONS[0].double())
    )


def test_the_command_reads_a_prompt_with_positions_by_axis(models, tmp_path, capsys):
    model = models["cohere_compass_text"]
    model.save_pretrained(tmp_path / "model")
    keys = {
        f"keys_{n}": one.keys[0].numpy()
        for n, one in enumerate(cache_of(model, POSITIONS[[0, 2, 1]]).layers)
    }
    np.savez(tmp_path / "keys.npz", **keys)
    line = {"tokens": TOKENS.tolist(), "position_ids": POSITIONS.T.tolist()}
    (tmp_path / "prompt.jsonl").write_text(json.dumps(line) + "\n")
    given = ["--cache", str(tmp_path / "keys.npz"), "--tokens", str(tmp_path / "prompt.jsonl")]
    assert main(["verify", str(tmp_path / "model"), *given]) == 1
    assert "sections of height and width swapped: pairs 2, 5 turn by" in capsys.readouterr().out
    (tmp_path / "prompt.jsonl").write_text(2 * (json.dumps(line) + "\n"))
    assert main(["verify", str(tmp_path / "model"), *given]) == 2


def test_what_has_no_axes_is_refused_by_name(models, tmp_path):
    llama = small_model("llama")
    with refused("LlamaModel takes one position id per token, and a prompt has three axes"):
        ri.verify_cache(llama, prompt_of(llama), [(torch.ones(1, 2, 43, 16), None)])
    with refused("pairs of this llama turn by one position per token"):
        ri.verify(llama, written(tmp_path / "t.npz", POSITIONS))
    with refused("the prompt has position ids of its own, one per token"):
        shifted = ri.prompt([3, 4, 5], llama, position_ids=[2, 3, 4])
        ri.verify_cache(llama, shifted, [(torch.ones(1, 2, 3, 16), None)])
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"):
        with refused(f"model_type '{family}' is no causal language model of transformers"):
            ri.verify(small_larger(family))
