"""Batches that keep their documents apart, and batches that do not."""

import numpy as np
import pytest
import torch
from families import HEAD, TINY, repositioned, tiny
from refusals import refused
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    DynamicCache,
    GPT2Config,
    MixtralConfig,
    OPTConfig,
    Qwen3_5TextConfig,
)

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.errors import Note, NotFinite

LENGTHS = (7, 9, 6)


def packed():
    tokens = torch.randint(3, 60, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return {"input_ids": tokens, "position_ids": positions.expand(2, -1)}


def checked(batch, model=None):
    found = ri.verify_batch(model or tiny("llama"), batch)
    return found, found.attrs["findings"].splitlines()


def block_mask():
    of = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = (of[:, None] == of) & torch.ones(len(of), len(of)).tril().bool()
    return {"attention_mask": seen.expand(2, 1, -1, -1)}


@pytest.mark.parametrize("variant", ["llama", "repo", "alibi"])
def test_documents_that_a_mask_keeps_apart(variant):
    model = tiny("llama") if variant == "llama" else repositioned(variant)
    before = torch.get_rng_state()
    found, findings = checked(packed() | block_mask(), model.train())
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert findings == [] and found["row"].values.tolist() == [0] * 3 + [1] * 3
    assert found["start"].values.tolist() == [0, 7, 16] * 2
    assert found["length"].values.tolist() == list(LENGTHS) * 2
    assert float(found["leak"].max()) == 0.0
    assert float(found["difference"].max()) < 1e-4


@pytest.mark.parametrize("token", [None, 0, 63])
def test_positions_alone_are_not_enough_where_a_padding_mask_comes_with_them(token):
    """Transformers finds packed documents by position_ids only where no mask is given; a leak is
    seen also where the batch holds a single token.
    """
    batch = packed()
    if token is not None:
        batch["input_ids"].fill_(token)
    mask = torch.ones(2, sum(LENGTHS), dtype=torch.long)
    found, findings = checked(batch | {"attention_mask": mask})
    leaks = found["leak"].values.reshape(2, 3)
    assert (leaks[:, 1:] > 0.01).all() and (leaks[:, 0] == 0).all()
    assert len(findings) == 4 and all("the document sees others" in line for line in findings)
    assert "row 0, tokens 7 to 15" in findings[0]
    assert checked(batch)[1] == []


def test_positions_that_do_not_start_at_zero():
    """A later start changes nothing where positions enter by differences, and is said."""
    batch = packed() | block_mask()
    batch["position_ids"] = batch["position_ids"] + torch.tensor([[0], [5]])
    found, findings = checked(batch)
    assert found["first_position"].values.tolist() == [0, 0, 0, 5, 5, 5]
    assert findings == [
        f"row 1, tokens {start} to {end}: the document starts at position 5; wanted 0"
        for start, end in ((0, 6), (7, 15), (16, 21))
    ]
    assert "look at its positions" in checked(batch, repositioned("learned"))[1][-1]


def test_documents_that_only_arguments_of_kernels_tell_apart():
    """A kernel that does not read them lets documents see each other, and positions count on."""
    tokens = {"input_ids": packed()["input_ids"]}
    ends = torch.tensor([0, 7, 7, 22, 31, 44], dtype=torch.int32)  # rows one after the other
    numbers = torch.zeros(2, 22, dtype=torch.long).index_fill(1, torch.arange(16, 22), 4)
    arguments = ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}, {"seq_idx": numbers})
    for given, starts in zip(arguments, ([0, 7, 0, 9], [0, 16, 0, 16]), strict=True):
        found, findings = checked(tokens | given)
        assert found["start"].values.tolist() == starts
        assert found.attrs["documents_from"] == ", ".join(given)
        assert (found["leak"].values[[1, 3]] > 0.01).all()
        assert f"starts at position {starts[1]}; wanted 0" in findings[0]
    alone, _ = checked(tokens)
    assert alone.attrs["documents_from"] == "none" and alone.sizes["document"] == 2


def test_a_jump_and_padding():
    tokens = packed()["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    padded = {"input_ids": tokens, "attention_mask": mask}
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found, findings = checked(padded | {"position_ids": positions})
    assert findings == [] and found["start"].values.tolist() == [4, 0]
    positions[1, 9:] += 3
    line = checked(padded | {"position_ids": positions})[1][0]
    assert "position 12 of token 9 follows position 8; wanted 9" in line
    (line,) = checked(padded | {"position_ids": torch.arange(22)[None]})[1]  # padding is counted
    assert line == "row 0, tokens 4 to 21: the document starts at position 4; wanted 0"


def seen_by_first(model, batch):
    """Whether the call itself says that documents see the first one."""
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, : LENGTHS[0]] += 1
    with torch.no_grad():
        changes = (model(**batch).logits - model(**other).logits)[:, LENGTHS[0] :]
    return float(changes.abs().max()) > 1e-3


CACHES = {
    "by the configuration": (True, {}, False),
    "of the batch": (False, {"use_cache": True}, False),
    "not of the configuration": (False, {}, False),
    "not of the batch": (True, {"use_cache": False}, False),
    "not of a checkpointed model": (True, {}, True),
    "not of a checkpointed model that is asked for one": (True, {"use_cache": True}, True),
}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "repo", "alibi"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_is_made_where_the_call_of_training_makes_one(family, cache):
    """Found: every pass was asked without a cache, with which documents see each other."""
    model = repositioned(family) if family in ("repo", "alibi") else tiny(family)
    model.config.use_cache, given, checkpoints = CACHES[cache]
    model.train()
    if checkpoints:
        model.model.gradient_checkpointing = True
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = checkpoint
            layer.training = False  # the layers' own checkpointing warns without a gradient
    batch = packed() | given
    _, findings = checked(batch, model)
    assert bool(findings) == seen_by_first(model, batch) == (not cache.startswith("not"))
    assert all("(use_cache=False) keeps it apart" in line for line in findings)
    # A model in evaluation mode says nothing about the loop that trains it.
    assert bool(checked(batch, model.eval())[1]) == bool(given.get("use_cache"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "cope", "repo", "learned"])
def test_rounding_in_half_precision_is_no_finding_and_a_leak_is_one(family, dtype):
    """Found: each correct batch was called faulty."""
    stock = family in ("llama", "gemma3", "mistral")
    model = (tiny(family) if stock else repositioned(family)).to(dtype)
    found, findings = checked(packed(), model)
    assert findings == [] and float(found["leak"].max()) == 0
    mask = torch.ones(2, sum(LENGTHS), dtype=torch.long)
    findings = checked(packed() | {"attention_mask": mask}, model)[1]
    assert len(findings) == 4 and all("the document sees others" in line for line in findings)
    if family == "learned":
        late = packed() | {"position_ids": packed()["position_ids"] + 5}
        assert "look at its positions" in checked(late, model)[1][-1]


def test_experts_and_autocast_round_too():
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}
    experts = AutoModelForCausalLM.from_config(MixtralConfig(**TINY, **options)).eval()
    assert checked(packed(), experts.bfloat16())[1] == []
    with torch.autocast("cpu", torch.bfloat16):
        found, findings = checked(packed())
        assert findings == [] and float(found["difference"].max()) > 1e-3


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_experts_that_rounding_exchanges_are_no_finding(family):
    """Found: logits that differ by as much as they are large, beside a leak of exactly 0."""
    tokens = torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "attention_mask": (torch.arange(14) > 3).expand(2, -1)}
    found, findings = checked(batch, small_model(family).bfloat16().eval())
    assert findings == [] and float(found["difference"].max()) > 0.5


def test_documents_far_apart_in_a_row_see_each_other():
    """Document 2 sees document 0 alone, which leaves its neighbor's tokens without effect."""
    of = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = block_mask()["attention_mask"].clone() | ((of[:, None] == 2) & (of == 0))
    found, findings = checked(packed() | {"attention_mask": seen})
    assert (found["leak"].values.reshape(2, 3)[:, 2] > 0.01).all()
    assert len(findings) == 2 and all("the document sees others" in line for line in findings)


def left_padded():
    tokens = packed()["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def gpt2(**changed):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 30}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    return AutoModelForCausalLM.from_config(GPT2Config(**sizes, **ends, **changed))


def test_positions_that_a_model_counts_by_itself():
    """Found: they were summed from the mask, whose values a model does not read."""
    tokens = {"input_ids": packed()["input_ids"][:, :8]}
    numbered = tokens | {"attention_mask": torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]])}
    found, findings = checked(numbered)
    assert found.attrs["documents_from"] == "attention_mask"
    assert found["first_position"].values.tolist() == [0, 4, 0, 4]
    assert "starts at position 4; wanted 0; the model counts them so" in findings[0]
    assert "the document sees others" in findings[-1]
    # Rotation does not see the padding that a Llama counts; the vectors of a GPT-2 do.
    found, findings = checked(left_padded())
    assert findings == [] and found["first_position"].values.tolist() == [4, 0]
    found, findings = checked(left_padded(), gpt2().eval())
    assert found["first_position"].values.tolist() == [4, 0]
    assert "starts at position 4" in findings[0] and "look at its positions" in findings[1]
    sizes = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    opt = AutoModelForCausalLM.from_config(OPTConfig.from_dict(sizes)).eval()
    found, findings = checked(left_padded(), opt)
    assert findings == [] and found["first_position"].values.tolist() == [0, 0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_changes_nothing(family):
    model = gpt2() if family == "gpt2" else tiny("llama")
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            vars(module)["attention_dropout"] = 0.5
    found, findings = checked(packed() | {"use_cache": False}, model.train())
    assert model.training and findings == [] and float(found["leak"].max()) == 0


def test_arrays_lists_and_arguments_that_change_no_logit():
    batch, model = packed(), tiny("llama")
    _, found = checked(batch | {"attention_mask": torch.ones(2, 22)}, model)
    for other in (
        {name: value.numpy().astype(np.int32) for name, value in batch.items()},
        {name: value.tolist() for name, value in batch.items()},
        BatchEncoding(dict(batch)),
        batch | {"input_ids": batch["input_ids"].to(torch.uint8)},
        batch | {"return_dict": False, "logits_to_keep": 1, "labels": batch["input_ids"]},
    ):
        assert checked(other, model)[1] == []
        assert checked({**other, "attention_mask": np.ones((2, 22))}, model)[1] == found
    with pytest.warns(Note, match="'document_numbers' and may pass over it"):
        checked(batch | {"document_numbers": 1})


def test_masks_by_kind_of_layer():
    pairs = block_mask()["attention_mask"]
    by_kind = {"full_attention": pairs, "sliding_attention": pairs.triu(-7)}
    assert checked(packed() | {"attention_mask": by_kind}, tiny("gemma3"))[1] == []
    by_kind["sliding_attention"] = torch.ones_like(pairs).tril().triu(-7)
    assert len(checked(packed() | {"attention_mask": by_kind}, tiny("gemma3"))[1]) == 4
    for kinds in ({"full_attention": None}, {"other": pairs}):
        with refused("Gemma3ForCausalLM cannot run this batch, whose attention_mask is a dict"):
            checked(packed() | {"attention_mask": kinds}, tiny("gemma3"))


def test_padding_in_a_mask_of_pairs():
    """Found: every token of padding was a document, which starts nowhere near 0."""
    valid = left_padded()["attention_mask"].bool()
    pairs = torch.ones(22, 22).tril().bool() & valid[:, None, None] & valid[:, None, :, None]
    added = (torch.zeros(pairs.shape).masked_fill(~pairs, low) for low in (-torch.inf, -1e9))
    for mask in (pairs, *added):
        positions = (valid.cumsum(1) - 1).clamp_min(0)
        given = {"attention_mask": mask, "position_ids": positions}
        found, findings = checked({"input_ids": packed()["input_ids"]} | given)
        assert findings == [] and found["start"].values.tolist() == [4, 0]


def test_positions_by_axis():
    """Of an image of 2 x 2 tokens within the first of two documents."""
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    parameters |= {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
    kinds = {"layer_types": ["full_attention"] * 3, "rope_parameters": parameters}
    config = Qwen3_5TextConfig(**TINY, **HEAD, **kinds, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config).eval()
    image = torch.tensor([[2, 2, 2, 2], [2, 2, 3, 3], [2, 3, 2, 3]])
    first = torch.cat([torch.arange(2).expand(3, -1), image, torch.arange(4, 8).expand(3, -1)], 1)
    axes = torch.cat([first, torch.arange(12).expand(3, -1)], 1)[:, None]
    batch = {"input_ids": packed()["input_ids"][:1]}
    found, findings = checked(batch | {"position_ids": axes}, model)
    assert found["start"].values.tolist() == [0, 10] and "sees others" in findings[0]
    # A fourth axis, of the text, lets the decoder find documents.
    text = torch.cat([torch.arange(10), torch.arange(12)])[None, None]
    found, findings = checked(batch | {"position_ids": torch.cat([text, axes])}, model)
    assert findings == [] and float(found["leak"].max()) == 0


ONES = torch.ones(1, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({}, "input_ids"),
        ({"input_ids": torch.ones(1, 5)}, "input_ids are float32"),
        ({"input_ids": ONES[0]}, r"input_ids are int64 \[5\]"),
        ({"input_ids": ONES > 0}, "input_ids are bool"),
        ({"input_ids": ONES[:0]}, "the batch has no token"),
        ({"input_ids": [[1, 2], [1]]}, "input_ids cannot become a tensor"),
        ({"input_ids": [["a"]]}, "input_ids cannot become a tensor"),
        ({"input_ids": torch.tensor([[5, -100]])}, r"hold -100 at token 1 of row 0.* labels"),
        ({"input_ids": torch.tensor([[5, 64]])}, "hold 64 .* tokens 0 to 63"),
        ({"input_ids": ONES, "position_ids": torch.arange(4)[None]}, "position_ids"),
        ({"input_ids": ONES, "position_ids": ONES * torch.nan}, "wanted whole numbers"),
        ({"input_ids": ONES, "position_ids": ONES.expand(3, 1, 5)}, "cannot run this batch"),
        ({"input_ids": ONES, "attention_mask": 0 * ONES}, "attention_mask"),
        ({"input_ids": ONES, "attention_mask": ONES * torch.nan}, "attention_mask holds NaN"),
        ({"input_ids": ONES, "attention_mask": ONES[None]}, "attention_mask"),
        ({"input_ids": ONES, "attention_mask": {"full_attention": None}}, "is a dict"),
        ({"input_ids": ONES, "position_idz": ONES}, "did you mean position_ids"),
        ({"input_idz": ONES}, "did you mean input_ids"),
        ({"input_ids": ONES, "cu_seqlens_q": [0, 5]}, "did you mean cu_seq_lens_q"),
        ({"input_ids": ONES, 3: ONES}, "has no argument 3; wanted names"),
        ({"input_ids": ONES, "past_key_values": DynamicCache()}, "has no past_key_values"),
        ({"input_ids": ONES, "inputs_embeds": torch.ones(1, 2, 32)}, "cannot be run alone"),
        (ONES, "arguments by name"),
        *(
            ({"input_ids": ONES, name: value}, name)
            for name, values in {
                "cu_seq_lens_q": ([0, 4], [1, 5], [0, 3, 2, 5], [[0, 5]], [0.0, 5.0], [5]),
                "seq_idx": ([[0, 0, 1]], 1),
            }.items()
            for value in values
        ),
    ],
)
def test_batches_that_are_none(batch, names):
    with refused(names):
        ri.verify_batch(tiny("llama"), batch)


def test_models_that_cannot_be_asked():
    batch, model = packed(), tiny("llama")
    with refused("takes the model first, then the batch"):
        ri.verify_batch(batch, model)  # pyright: ignore[reportArgumentType]
    with refused("LlamaModel predicts no next token"):
        ri.verify_batch(tiny("llama").model, batch)
    with refused("the batch has position 33; the model has positions 0 to 29"):
        ri.verify_batch(gpt2(), batch | {"position_ids": batch["position_ids"] + 25})
    with refused("the batch has position 39; the model has positions 0 to 29"):
        ri.verify_batch(gpt2(), {"input_ids": torch.ones(1, 40, dtype=torch.long)})
    model.lm_head.weight.data[3] = torch.nan
    with refused("token 0 of row 0 are NaN or infinite", NotFinite):
        ri.verify_batch(model, batch)
