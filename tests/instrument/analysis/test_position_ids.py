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


# One text: an interpolated one, PoSE's gap, no positions, backwards, every position twice, shuffled
ONE_TEXT = {
    "gaps": tuple(range(0, 42, 2))[:21],
    "one gap": (*range(8), *range(12, 25)),
    "all equal": (5,) * 21,
    "all zero": (0,) * 21,
    "backwards": tuple(range(20, -1, -1)),
    "pairs": tuple(place // 2 for place in range(21)),
    "shuffled": tuple((8 * place) % 21 for place in range(21)),
    "to and fro": (*range(11), *range(9, -1, -1)),
}
DOCUMENTS = {
    "packed": (PACKED, 3),
    "one token each side": ((*range(8), 0, *range(12)), 3),
    "from 5": ((*range(5, 13), *range(5, 18)), 2),
    "cut": ((5, 6, 7, *range(9), *range(9)), 3),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", ONE_TEXT)
def test_positions_that_jump_within_a_text_are_measured_as_with_a_mask_of_ones(family, name):
    """Found: every jump began a document, without a note."""
    ids = tuple(min(place, 31) for place in ONE_TEXT[name])
    model = decoder(CONFIGS[family], attention="eager")
    ones = {"attention_mask": torch.ones(1, 21, dtype=torch.long), "output_attentions": True}
    expected = plain(model, ids, **ones)
    prompts = [Prompt(TOKENS, position_ids=ids), Prompt(TOKENS[:9], position_ids=ids[:9])]
    # With packed documents in between, which take no mask
    prompts.insert(1, Prompt(TOKENS, position_ids=PACKED))
    measures = ["predictions", "attention_rows", "components" if family != "gpt2" else "octaves"]
    run = ri.analyze(model, prompts[:1], measures)
    several = ri.analyze(model, prompts, measures[:2], batch_size=3)
    for one in (run, several):
        of_next = one["predictions/probability_of_next"].values[:-1]
        wanted = expected.logits[0].softmax(-1)[range(20), TOKENS[1:]]
        assert_allclose(of_next, wanted, rtol=1e-4)
    assert (
        "position ids of prompt 0 do not count on, and are taken for one text" in run.attrs["notes"]
    )
    rows = run["attention_rows"].isel(layer=0)
    weights = torch.zeros(4, 21, 22)
    keys = torch.from_numpy(rows["key"].values).long() % 22
    weights.scatter_(-1, keys, torch.from_numpy(rows["weight"].values).float())
    assert_allclose(weights[..., :21], expected.attentions[0][0], atol=1e-5)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_begin_where_all_jumps_lead_back(name):
    ids, count = DOCUMENTS[name]
    prompt = Prompt(TOKENS, position_ids=ids)
    assert prompt.document_count == count == 1 + len(prompt.jumps) and prompt.documents is None
    assert Prompt(TOKENS, position_ids=ids, documents=count) == prompt
    model = decoder()
    run = ri.analyze(model, prompt, ["predictions"])
    expected = plain(model, ids).logits[0].softmax(-1)[range(20), TOKENS[1:]]
    assert_allclose(run["predictions/probability_of_next"].values[:-1], expected, rtol=1e-4)
    assert "are taken for documents" in run.attrs["notes"]


def test_one_text_and_documents_can_be_said(tmp_path):
    model, ones = decoder(), {"attention_mask": torch.ones(1, 21, dtype=torch.long)}
    both = (*range(5), *range(9, 13), *range(12))  # documents, and a gap in the first
    with refused(
        "begin again, as where documents are packed, and jump elsewhere too; say documents"
    ):
        Prompt(TOKENS, position_ids=both)
    for ids, documents, options in (
        (PACKED, 1, ones),
        (both, 1, ones),
        (both, 3, {}),
        (ONE_TEXT["gaps"], 21, {}),
    ):
        prompt = ri.prompt(TOKENS, model, position_ids=ids, documents=documents)
        write_prompts([prompt], tmp_path / "prompts.jsonl")
        assert read_prompts(tmp_path / "prompts.jsonl") == [prompt]
        assert prompt.document_count == documents
        run = ri.analyze(model, prompt, ["predictions"])
        expected = plain(model, ids, **options).logits[0].softmax(-1)[range(20), TOKENS[1:]]
        assert_allclose(run["predictions/probability_of_next"].values[:-1], expected, rtol=1e-4)
    assert digest([Prompt(TOKENS, position_ids=PACKED, documents=1)]) != digest(
        [Prompt(TOKENS, position_ids=PACKED)]
    )
    for ids, documents, line in (
        (PACKED, 2, "documents are 2; with these position ids wanted is 1, or 3"),
        (OFFSET, 2, "documents are 2; with these position ids wanted is 1$"),
        (None, 2, "documents are 2"),
        (PACKED, True, "documents are True"),
        (PACKED, "one", "documents are 'one'"),
    ):
        with refused(line):
            ri.prompt(TOKENS, model, position_ids=ids, documents=documents)
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [1, 2], "documents": 0}')
    with refused("line 1.*documents"):
        read_prompts(tmp_path / "prompts.jsonl")


def test_defaults_leave_out_what_takes_all_tokens_for_one_text():
    with (
        pytest.warns(Note, match="left out, since they take all tokens.*components"),
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
