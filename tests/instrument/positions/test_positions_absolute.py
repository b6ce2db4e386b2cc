"""Learned absolute positions: a table added to the embeddings, and its end."""

import pytest
import torch

from repo_interp.positions.embedding import AbsoluteEmbedding


def test_adds_the_vector_of_each_tokens_index_and_nothing_to_padding():
    absolute = AbsoluteEmbedding(5, 3)
    embeddings = torch.randn(2, 4, 3)
    index = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 4]])
    added = absolute.weight[index.clamp(min=0)]
    added = torch.where(index[..., None] < 0, 0, added)
    assert torch.equal(absolute(embeddings, index), embeddings + added)
    assert absolute(embeddings[:, :0], index[:, :0]).shape == (2, 0, 3)


def test_a_prompt_beyond_the_table_is_an_error_that_names_both():
    absolute = AbsoluteEmbedding(4, 3)
    with pytest.raises(ValueError, match="reaches position 4, but the learned table has 4, 0 to 3"):
        absolute(torch.zeros(1, 5, 3), torch.arange(5)[None])
    absolute(torch.zeros(1, 1, 3), torch.tensor([[3]]))


def test_starts_small_trains_and_keeps_the_dtype_of_the_embeddings():
    absolute = AbsoluteEmbedding(200, 50)
    assert 0.019 < absolute.weight.std() < 0.021
    found = absolute(torch.randn(1, 3, 50, dtype=torch.bfloat16), torch.tensor([[0, 5, -1]]))
    assert found.dtype == torch.bfloat16
    found.square().sum().backward()
    assert absolute.weight.grad.any(-1).nonzero().flatten().tolist() == [0, 5]
