"""Batches that keep their documents apart, and batches that do not."""

import pytest
import torch
from families import repositioned, tiny
from refusals import refused

import repo_interp as ri

LENGTHS = (7, 9, 6)


def packed(starts_at_zero=True, rows=2):
    tokens = torch.randint(3, 60, (rows, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    index = torch.arange(sum(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS]) if starts_at_zero else index
    return {"input_ids": tokens, "position_ids": positions.expand(rows, -1)}


def block_mask():
    of = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return ((of[:, None] == of) & torch.ones(len(of), len(of)).tril().bool())[None, None]


@pytest.mark.parametrize("variant", ["llama", "repo", "alibi"])
def test_documents_that_a_mask_keeps_apart(variant):
    model = tiny("llama") if variant == "llama" else repositioned(variant)
    batch = packed() | {"attention_mask": block_mask().expand(2, -1, -1, -1)}
    checked = ri.verify_batch(model, batch)
    assert checked.attrs["findings"] == ""
    assert checked["row"].values.tolist() == [0] * 3 + [1] * 3
    assert checked["start"].values.tolist() == [0, 7, 16] * 2
    assert checked["length"].values.tolist() == list(LENGTHS) * 2
    assert float(checked["leak"].max()) == 0.0
    assert float(checked["difference"].max()) < 1e-4


def test_positions_alone_are_not_enough_where_a_padding_mask_comes_with_them():
    """Transformers finds packed documents by position_ids only where no mask is given."""
    batch = packed() | {"attention_mask": torch.ones(2, sum(LENGTHS), dtype=torch.long)}
    checked = ri.verify_batch(tiny("llama"), batch)
    leaks = checked["leak"].values.reshape(2, 3)
    assert (leaks[:, 1:] > 0.01).all() and (leaks[:, 0] == 0).all()
    lines = checked.attrs["findings"].splitlines()
    assert len(lines) == 4 and all("the document sees others" in line for line in lines)
    assert "row 0, tokens 7 to 15" in lines[0]
    assert ri.verify_batch(tiny("llama"), packed()).attrs["findings"] == ""


def test_positions_that_do_not_start_at_zero():
    """A later start changes nothing where positions enter by differences, and is said."""
    batch = packed() | {"attention_mask": block_mask().expand(2, -1, -1, -1)}
    batch["position_ids"] = batch["position_ids"] + torch.tensor([[0], [5]])
    checked = ri.verify_batch(tiny("llama"), batch)
    assert checked["first_position"].values.tolist() == [0, 0, 0, 5, 5, 5]
    assert checked.attrs["findings"].splitlines() == [
        f"row 1, tokens {start} to {end}: the document starts at position 5; wanted 0"
        for start, end in ((0, 6), (7, 15), (16, 21))
    ]
    absolute = ri.verify_batch(repositioned("learned"), batch).attrs["findings"]
    assert "look at its positions" in absolute


def test_documents_that_only_arguments_of_kernels_tell_apart():
    """A kernel that does not read them lets documents see each other, and positions count on."""
    tokens = packed(rows=2)["input_ids"]
    ends = torch.tensor([0, 7, 7, 22, 31, 44], dtype=torch.int32)  # rows one after the other
    numbers = torch.zeros_like(tokens).index_fill(1, torch.arange(16, 22), 4)
    arguments = ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}, {"seq_idx": numbers})
    for given, starts in zip(arguments, ([0, 7, 0, 9], [0, 16, 0, 16]), strict=True):
        checked = ri.verify_batch(tiny("llama"), {"input_ids": tokens} | given)
        assert checked["start"].values.tolist() == starts
        assert checked.attrs["documents_from"] == ", ".join(given)
        assert (checked["leak"].values[[1, 3]] > 0.01).all()
        assert f"starts at position {starts[1]}; wanted 0" in checked.attrs["findings"]
    alone = ri.verify_batch(tiny("llama"), {"input_ids": tokens})
    assert alone.attrs["documents_from"] == "none" and alone.sizes["document"] == 2


def test_a_leak_between_documents_of_one_token_is_seen():
    """Any other token tells, also where the batch holds a single one."""
    batch = packed() | {"attention_mask": torch.ones(2, sum(LENGTHS), dtype=torch.long)}
    for token in (0, 63):
        given = batch | {"input_ids": torch.full((2, sum(LENGTHS)), token)}
        assert "the document sees others" in ri.verify_batch(tiny("llama"), given).attrs["findings"]


def test_a_jump_and_padding():
    tokens = packed()["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    checked = ri.verify_batch(
        tiny("llama"), {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    )
    assert checked.attrs["findings"] == "" and checked["start"].values.tolist() == [4, 0]
    positions[1, 9:] += 3
    findings = ri.verify_batch(
        tiny("llama"), {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    ).attrs["findings"]
    assert "position 12 of token 9 follows position 8; wanted 9" in findings
    # positions that count padding
    checked = ri.verify_batch(
        tiny("llama"),
        {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": torch.arange(22).expand(2, -1),
        },
    )
    assert "row 0, tokens 4 to 21: the document starts at position 4; wanted 0" in str(
        checked.attrs["findings"]
    )


def test_the_model_stays_as_it_is():
    model = tiny("llama").train()
    before = torch.get_rng_state()
    ri.verify_batch(model, packed(rows=1))
    assert model.training and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({}, "input_ids"),
        ({"input_ids": torch.ones(5, dtype=torch.long)}, "input_ids"),
        ({"input_ids": torch.ones(1, 5)}, "input_ids"),
        (
            {
                "input_ids": torch.ones(1, 5, dtype=torch.long),
                "position_ids": torch.arange(4)[None],
            },
            "position_ids",
        ),
        (
            {
                "input_ids": torch.ones(1, 5, dtype=torch.long),
                "attention_mask": torch.zeros(1, 5, dtype=torch.long),
            },
            "attention_mask",
        ),
        (torch.ones(1, 5, dtype=torch.long), "arguments by name"),
        *(
            ({"input_ids": torch.ones(1, 5, dtype=torch.long), name: value}, name)
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
    with refused("model"):
        ri.verify_batch("smollm2", batch)  # pyright: ignore[reportArgumentType]
