"""Prompts with position ids - offsets, packed documents - against plain transformers with the same
ids; what knows the token index alone is refused.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from numpy.testing import assert_allclose
from refusals import refused
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    set_seed,
)

import repo_interp as ri
from repo_interp.errors import Note
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks.prompt import Prompt, digest
from repo_interp.tasks.prompt.jsonl import read_prompts, write_prompts

PACKED = (*range(8), *range(10), *range(3))
OFFSET = tuple(range(5, 26))
TOKENS = tuple((7 * number) % 61 + 3 for number in range(21))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
}


def decoder(config=CONFIGS["llama"], layout=None, attention="sdpa"):
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    return model if layout is None else ri.reposition(model, layout)


@torch.no_grad()
def plain(model, ids=None, **options):
    """Without a cache, with which transformers would not keep documents apart."""
    options |= {"use_cache": False}
    given = None if ids is None else torch.tensor([ids])
    return model(torch.tensor([TOKENS]), position_ids=given, **options)


@pytest.mark.parametrize("ids", [PACKED, OFFSET], ids=["packed", "offset"])
@pytest.mark.parametrize("family", CONFIGS)
def test_predictions_are_those_of_plain_transformers_with_the_same_ids(family, ids):
    model = decoder(CONFIGS[family])
    expected = plain(model, ids).logits[0].softmax(-1)
    short = Prompt(TOKENS[:9])  # padded in the same batch, by the index
    run = ri.analyze(
        model, [Prompt(TOKENS, position_ids=ids), short], ["predictions", "positions"], batch_size=2
    )
    of_next = run["predictions/probability_of_next"].values[:-1]
    assert_allclose(of_next, expected[range(20), TOKENS[1:]], rtol=1e-4)
    assert run["positions/position_id"].values[:, :9].tolist() == [list(ids[:9]), [*range(9)]]
    if family != "gpt2":
        measured = run["positions/position"].isel(layer=0, head=0)
        assert measured[0].values.tolist() == list(ids)
        assert measured[1].values[:9].tolist() == [*range(9)]


def test_frequencies_of_the_largest_position_are_asked_for_one_by_one():
    """Batches are chosen by default; two prompts in one pass would be refused."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = decoder(LlamaConfig(**SIZES, rope_parameters=rope))
    prompts = [Prompt(TOKENS, position_ids=[*range(start, start + 21)]) for start in (0, 30)]
    by_default, alone = (
        ri.analyze(model, prompts, ["predictions"], **size)["predictions"].to_dataset()
        for size in ({}, {"batch_size": 1})
    )
    assert by_default.identical(alone)


@pytest.mark.parametrize("ids", [PACKED, OFFSET], ids=["packed", "offset"])
@pytest.mark.parametrize(
    "layout", [None, "hope", "alibi", "kerple", "fire", "nope", "cope", "repo", "learned"]
)
def test_captured_attention_is_that_of_the_pass(layout, ids):
    """In every scheme the pattern that measures see is the one that the model computed."""
    model = decoder(layout=layout, attention="eager")
    expected = plain(model, ids, output_attentions=True).attentions
    observed = model if layout else ri.reposition(decoder(attention="eager"), "rope")
    seen = []
    valid = torch.ones(1, len(TOKENS), dtype=torch.bool)
    capture(
        *(as_decoder(observed), torch.tensor([TOKENS]), valid, torch.arange(1)),
        lambda inputs: seen.append(inputs.pattern(torch.arange(len(TOKENS)))),
        position_ids=torch.tensor([ids]),
    )
    for one, other in zip(seen, expected, strict=True):
        assert_allclose(one, other, atol=1e-5)


def test_documents_are_attended_to_alone():
    """The last one begins at 18: no generated token sees the others, nor the first token."""
    model = decoder(attention="eager")
    prompt = ri.prompt(TOKENS, model, generated=-2, position_ids=torch.tensor(PACKED))
    run = ri.analyze(model, prompt, ["attention_rows", "attention_mass"])
    mass = run["attention_mass"].to_dataset().sel(span="generated").isel(prompt=0)
    assert_allclose(mass["chance"], (1 / 2 + 0) / 2, rtol=1e-6)
    assert (run["attention_rows/key"].sel(query=[18, 19, 20]).values % 99 >= 18).all()


def test_the_file_and_the_digest_hold_them(tmp_path):
    prompts = [Prompt(TOKENS, position_ids=PACKED), Prompt(TOKENS, position_ids=range(21))]
    write_prompts(prompts, tmp_path / "prompts.jsonl")
    assert read_prompts(tmp_path / "prompts.jsonl") == prompts
    assert prompts[1] == Prompt(TOKENS) and prompts[1].position_ids is None
    assert digest(prompts[:1]) != digest(prompts[1:]) == digest([Prompt(TOKENS)])
    assert prompts[0].has_documents and not Prompt(TOKENS, position_ids=OFFSET).has_documents


def test_defaults_leave_out_what_takes_all_tokens_for_one_text():
    with (
        pytest.warns(Note, match="left out, since they take all tokens.*components, three_axis"),
        pytest.warns(Note, match="without experiments"),
    ):
        run = ri.analyze(decoder(), Prompt(TOKENS, position_ids=PACKED))
    assert {"attention_rows", "octaves", "predictions"} == set(run.children)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        shifted = ri.analyze(decoder(), Prompt(TOKENS, position_ids=OFFSET))
    still = ri.analyze(decoder(), Prompt(TOKENS), experiments=())
    assert "components" in shifted.children
    wanted = still["components/logit_by_distance"]
    assert_allclose(shifted["components/logit_by_distance"], wanted, rtol=1e-4, atol=1e-6)


BLOOM = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, max_position_embeddings=32)


def test_what_would_ignore_them_is_refused():
    for ids, line in (
        ((0,), "one position id per token, got 1 for 2"),
        ((0, -1), "wanted whole numbers from 0"),
        ((0, 0.5), "wanted whole numbers from 0"),
    ):
        with refused(line):
            Prompt((1, 2), position_ids=ids)
    with refused("has position ids"):
        ri.tokens([Prompt(TOKENS, position_ids=OFFSET)], decoder())


@pytest.mark.parametrize(
    ("config", "ids", "measure", "line"),
    [
        (CONFIGS["llama"], PACKED, "three_axis", "three_axis takes all tokens for one"),
        (CONFIGS["llama"], OFFSET, "atlas", "which only the measures of analyze take"),
        (CONFIGS["gpt2"], (32, *range(20)), "predictions", "of the model has positions 0 to 31"),
        (BLOOM, OFFSET, "attention_rows", "BloomModel takes no position ids"),
    ],
)
def test_what_would_measure_without_them_is_refused(config, ids, measure, line):
    prompt = Prompt(TOKENS, position_ids=ids)
    asked = {"experiments": ["atlas"]} if measure == "atlas" else {"measures": [measure]}
    with refused(line):
        ri.analyze(decoder(config, attention="eager"), prompt, **asked)
