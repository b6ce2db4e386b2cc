"""Scores: what the model says at targets against slow references, the map over a task's axes,
generation with a cache.
"""

import numpy as np
import pytest
import torch
from families import model_for
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from transformers import MiniMaxConfig, MiniMaxForCausalLM

from repo_interp.experiments import responses
from repo_interp.experiments.responses import forced_responses, generated_responses, prompts_of
from repo_interp.experiments.test_set_scores import score_map, task_scores
from repo_interp.models.decoder import as_decoder
from repo_interp.models.generation import continue_greedily
from repo_interp.models.reposition import reposition
from repo_interp.tasks import Prompt, make_task

TASK = make_task("reversal", words=6, longest=6, longest_test=8)


@pytest.fixture(params=["nope", "repo"])
def model(request):
    return model_for(TASK, request.param)


@pytest.fixture
def prompts():
    return [prompt for length in ("2", "5", "8") for prompt in TASK.prompts(3, test_set=length)]


@torch.no_grad()
def slow_continuation(model, tokens, count):
    for _ in range(count):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens = (*tokens, int(logits[0, -1].argmax()))
    return tokens[-count:]


def test_greedy_answers_equal_those_made_one_by_one_without_a_cache(model, prompts):
    questions = [prompt.tokens[: prompt.generated[0]] for prompt in prompts]
    made = generated_responses(model, TASK, prompts, batch_size=4)
    assert [response.tokens for response in made] == [
        slow_continuation(model, question, len(prompt.generated))
        for question, prompt in zip(questions, prompts, strict=True)
    ]
    with pytest.raises(ValueError, match="one count per prompt"):
        continue_greedily(as_decoder(model), questions, [1])


def test_a_model_with_a_cache_of_its_own_continues_as_transformers_does():
    torch.manual_seed(0)
    config = MiniMaxConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention", "linear_attention"],
        block_size=8,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.5,
    )
    model = reposition(MiniMaxForCausalLM(config), "rope").eval()
    prompts = [[1, 5, 6, 7], [1, 9]]
    stock = [
        model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)[0, -3:].tolist()
        for prompt in prompts
    ]
    assert [
        list(made) for made in continue_greedily(as_decoder(model), prompts, [3, 3], 2)
    ] == stock


@pytest.mark.parametrize("most_rows", [3, 1000])
def test_forced_responses_are_the_argmax_and_log_probability_at_every_target(
    most_rows, model, prompts, monkeypatch
):
    monkeypatch.setattr(responses, "MOST_LOGITS", most_rows * model.config.vocab_size)
    for prompt, response in zip(
        prompts, forced_responses(model, TASK, prompts, batch_size=4), strict=True
    ):
        logits = model(torch.tensor([prompt.tokens])).logits[0].detach().log_softmax(-1)
        targets = TASK.targets(prompt)
        before = [index - 1 for index in targets]
        assert response.tokens == tuple(logits[before].argmax(-1).tolist())
        wanted = logits[before, [prompt.tokens[index] for index in targets]]
        assert_allclose(response.log_probabilities, wanted, atol=1e-5)


def test_answers_in_the_midst_of_a_prompt_are_not_generated():
    niah = make_task("niah")
    with refused("in the midst"):
        generated_responses(
            model_for(TASK), niah, prompts_of(niah, niah.batch(np.random.default_rng(0), 1))
        )


def test_sequences_of_a_batch_are_read_back_without_their_padding():
    batch = TASK.batch(np.random.default_rng(0), 6)
    for row, prompt in zip(batch.tokens, prompts_of(TASK, batch), strict=True):
        assert list(prompt.tokens) == [token for token in row.tolist() if token != 0]


def test_scores_have_their_mean_error_and_perplexity(model):
    scores = task_scores(as_decoder(model), TASK, test_sets=["2", "7"], count=20)
    assert scores.score.dims == ("test_set", "prompt") and scores.score.isin([0, 1]).all()
    assert_allclose(scores.mean_score, scores.score.mean("prompt"))
    assert_allclose(scores.standard_error, scores.score.std("prompt", ddof=1) / np.sqrt(20))
    answers = forced_responses(model, TASK, TASK.prompts(20, test_set="7"))
    surprises = np.concatenate([answer.log_probabilities for answer in answers])
    assert_allclose(scores.log_perplexity.sel(test_set="7"), -surprises.mean())
    assert scores.attrs["task"] == "reversal" and scores.attrs["task_words"] == "6"
    with refused("answers 'guessed'"):
        task_scores(as_decoder(model), TASK, answers="guessed")


def test_the_map_is_the_mean_of_the_prompts_in_each_cell():
    prompts = [
        Prompt((1,), attributes={"depth": depth, "length": length})
        for depth, length in ((3.0, 64), (4.9, 64), (12.0, 64), (97.0, 128))
    ]
    mapped = score_map(prompts, np.array([1.0, 0.0, 1.0, 0.0]), ("depth", "length"))
    assert (mapped["depth"] == [0, 10, 100]).all() and (mapped["length"] == [64, 128]).all()
    assert_array_equal(mapped, [[0.5, np.nan], [1.0, np.nan], [np.nan, 0.0]])
    assert score_map(prompts, np.zeros(4), ("colour",)) is None
