"""Learned absolute positions: a table added to the embeddings, and its end."""

import numpy as np
import pytest
import torch

from repo_interp.positions.embedding import AbsoluteEmbedding


def test_adds_the_vector_of_each_tokens_index():
    absolute = AbsoluteEmbedding(5, 3)
    embeddings = torch.randn(2, 4, 3)
    index = torch.tensor([[0, 1, 2, 3], [4, 0, 0, 2]])
    found = absolute(embeddings, index)
    for prompt, token in np.ndindex(2, 4):
        added = found[prompt, token] - embeddings[prompt, token]
        torch.testing.assert_close(added, absolute.weight[index[prompt, token]])
    padded = absolute(embeddings, torch.tensor([[-1, -1, 0, 1]]))
    assert torch.equal(padded[:, :2], embeddings[:, :2])
    assert absolute(embeddings[:, :0], index[:, :0]).shape == (2, 0, 3)


def test_a_prompt_beyond_the_table_is_an_error_that_names_both():
    absolute = AbsoluteEmbedding(4, 3)
    with pytest.raises(ValueError, match="reaches position 4, but the learned table has 4, 0 to 3"):
        absolute(torch.zeros(1, 5, 3), torch.arange(5)[None])
    absolute(torch.zeros(1, 1, 3), torch.tensor([[3]]))


def test_starts_small_trains_and_keeps_the_dtype_of_the_embeddings():
    torch.manual_seed(0)
    absolute = AbsoluteEmbedding(200, 50)
    assert 0.019 < absolute.weight.std() < 0.021
    absolute(torch.randn(1, 3, 50), torch.tensor([[0, 5, -1]])).square().sum().backward()
    touched = absolute.weight.grad.abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == [0, 5]
    halves = torch.randn(1, 3, 50, dtype=torch.bfloat16)
    assert absolute(halves, torch.arange(3)[None]).dtype == torch.bfloat16
