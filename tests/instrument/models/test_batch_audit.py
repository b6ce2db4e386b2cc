"""Batches that keep their documents apart, and batches that do not."""

import pytest
import torch
from families import repositioned, tiny
from refusals import refused

import repo_interp as ri

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


ONES = torch.ones(1, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({}, "input_ids"),
        ({"input_ids": torch.ones(1, 5)}, "input_ids"),
        ({"input_ids": ONES, "position_ids": torch.arange(4)[None]}, "position_ids"),
        ({"input_ids": ONES, "attention_mask": 0 * ONES}, "attention_mask"),
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
