"""Parts of logit differences: complete in every family, and those of plain transformers by hooks."""

import numpy as np
import pytest
import torch
from families import tiny
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused
from scipy import stats
from test_direct_path import FAMILIES
from transformers import AutoModelForCausalLM

import repo_interp as ri
from benchmarks.tiny_models import small_configuration, small_model
from repo_interp.models.reposition import with_layout

PROMPTS = [list(range(3, 15)), [7, 5, 4, 9, 30], [11, 12, 13, 8, 7, 6, 5, 9, 21]]
FOR, AGAINST = [7, 20, 9], 33
QUIET = {"progress": lambda *done: None}


def drawn(family):
    """A model of a family with gains and biases at random."""
    torch.manual_seed(0)
    config = small_configuration(family)
    for name, value in FAMILIES.get(family, ("", "", {}))[2].items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or "bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logit_differences(model):
    logits = [model(torch.tensor([tokens])).logits[0, -1] for tokens in PROMPTS]
    return [float(row[one] - row[AGAINST]) for row, one in zip(logits, FOR, strict=True)]


def summed(found):
    parts = found["heads"].sum(("layer", "head")) + found["mlps"].sum("layer")
    return parts + found["embedding"] + found["biases"]


@pytest.mark.parametrize("family", [*FAMILIES, "olmo2", "phi", "gemma3_text"])
def test_parts_add_up_to_the_logit_difference(family):
    model = drawn(family)
    # Large enough for its soft cap, where it has one
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30 if family == "gemma2" else 1)
    expected = logit_differences(model)
    ours = with_layout(model, None)
    before = hooks_of(ours)
    found = ri.direct_logits(ours, PROMPTS, FOR, AGAINST, batch_size=3, **QUIET)
    assert hooks_of(ours) == before
    assert_allclose(found["logit_difference"], expected, rtol=2e-4, atol=2e-5)
    size = float(abs(found["heads"]).max() + abs(found["mlps"]).max())
    whole = summed(found) + found["remainder"]
    assert_allclose(whole, found["logit_difference"], atol=1e-6)
    remainder = float(abs(found["remainder"]).max())
    assert remainder > 0.05 if family == "gemma2" else remainder < 2e-5 * max(1.0, size)
    for number, tokens in enumerate(PROMPTS):
        alone = ri.direct_logits(ours, [tokens], FOR[number], AGAINST, **QUIET).isel(prompt=0)
        for name in ("heads", "mlps", "biases"):
            assert_allclose(found[name][number], alone[name], rtol=1e-3, atol=1e-4 * max(1.0, size))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_parts_are_those_of_stock_modules_read_by_the_unembedding(family):
    """Outputs of modules times the last norm, frozen, times the difference of unembeddings."""
    model = drawn(family)
    body = model.model if family == "llama" else model.transformer
    blocks = body.layers if family == "llama" else body.h
    last = body.norm if family == "llama" else body.ln_f
    kept, tokens = {}, torch.tensor([PROMPTS[0]])

    def keep(name, at=0):
        return lambda module, given, out: kept.update({name: (given[0], out)[at][0, -1]})

    handles = [last.register_forward_hook(keep("stream"))]
    handles.append(blocks[0].register_forward_hook(keep("embedding")))
    for layer, block in enumerate(blocks):
        projection = block.self_attn.o_proj if family == "llama" else block.attn.c_proj
        handles.append(projection.register_forward_hook(keep(("z", layer))))
        handles.append(block.mlp.register_forward_hook(keep(("mlp", layer), 1)))
    model(tokens)
    for handle in handles:
        handle.remove()
    centred = (lambda x: x - x.mean()) if family == "gpt2" else (lambda x: x)
    epsilon = last.eps if family == "gpt2" else last.variance_epsilon
    scale = torch.rsqrt(centred(kept["stream"]).square().mean() + epsilon)
    unembedding = model.get_output_embeddings().weight
    reads = unembedding[FOR[0]] - unembedding[AGAINST]

    def part(vector):
        return float((centred(vector) * scale * last.weight) @ reads)

    found = ri.direct_logits(with_layout(model, None), [PROMPTS[0]], FOR[0], AGAINST, **QUIET)
    found = found.isel(prompt=0)
    assert_allclose(found["embedding"], part(kept["embedding"]), rtol=1e-4, atol=1e-6)
    biases = 0.0 if family == "llama" else float(last.bias @ reads)
    heads = found.sizes["head"]
    for layer, block in enumerate(blocks):
        assert_allclose(found["mlps"][layer], part(kept["mlp", layer]), rtol=1e-3, atol=1e-6)
        weight = block.self_attn.o_proj.weight.T if family == "llama" else block.attn.c_proj.weight
        for head, (z, out) in enumerate(
            zip(kept["z", layer].chunk(heads), weight.chunk(heads), strict=True)
        ):
            assert_allclose(found["heads"][layer, head], part(z @ out), rtol=1e-3, atol=1e-6)
        biases += 0.0 if family == "llama" else part(block.attn.c_proj.bias)
    assert_allclose(found["biases"], biases, rtol=1e-4, atol=1e-6)


def test_means_have_the_intervals_of_scipy_and_answers_may_be_texts():
    model = ri.open_model("language/rope")
    texts = ["the man and the", "it was a very", "in the first"]
    words = [" other", " good", " part"]
    ids = [model.tokenizer.encode(word, add_special_tokens=False) for word in words]
    single = [word for word, tokens in zip(words, ids, strict=True) if len(tokens) == 1]
    assert single
    found = ri.direct_logits(model, texts, single[0], 3, **QUIET)
    by_number = ri.direct_logits(
        model, texts, torch.tensor([ids[words.index(single[0])][0]] * 3), 3, **QUIET
    )
    assert found.equals(by_number)
    values = found["heads"].sel(layer=2, head=1).values
    low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
    here = found.sel(layer=2, head=1)
    assert_allclose([here["heads_low"], here["heads_high"]], [low, high], rtol=1e-6)
    assert "mean over 3 prompts; the largest parts of single heads are L" in found.attrs["finding"]


def test_a_generated_answer_is_read_where_it_begins():
    model = ri.open_model("reversal/repo")
    (prompt,) = ri.tasks.make_task("reversal").prompts(1, seed=1)
    first = prompt.generated[0]
    found = ri.direct_logits(model, prompt, prompt.tokens[first], 0, **QUIET)
    cut = ri.direct_logits(model, [prompt.tokens[:first]], prompt.tokens[first], 0, **QUIET)
    assert_allclose(found["heads"], cut["heads"], rtol=1e-3, atol=1e-4)
    assert found["heads_low"].isnull().all()


def test_what_is_no_answer_is_refused():
    model = ri.reposition(tiny("llama"), "rope")
    named = ri.open_model("language/rope")
    several = with_layout(small_model("falcon_h1"), None)
    for line, asked, answers in (
        ("for_ has 2 answers, and there are 3 prompts", model, ([1, 2], 5)),
        ("are the same token in prompt 1", model, ([1, 5, 2], 5)),
        (
            "against is 64; wanted is a text of one token, or its number from 0 to 63",
            model,
            (1, 64),
        ),
        ("for_ is True", model, (True, 5)),
        ("the model has no tokenizer", model, (" Mary", 5)),
        ("tokens of this model; wanted is one", named, (" antidisestablishment", 5)),
        ("adds no outputs of heads to one residual stream", several, (1, 5)),
    ):
        with refused(line):
            ri.direct_logits(asked, PROMPTS, *answers, **QUIET)


def test_the_figure_shows_heads_mlps_and_the_largest():
    model = ri.reposition(tiny("llama"), "rope")
    found = ri.direct_logits(model, PROMPTS, FOR, AGAINST, **QUIET)
    left, right, *_ = ri.plots.direct_logits(found).axes
    (image,) = left.images
    assert_allclose(image.get_array()[:, :-1], found["heads_mean"])
    assert_allclose(image.get_array()[:, -1], found["mlps_mean"])
    (line,) = [each for each in right.lines if each.get_gid() == "largest"]
    sizes = np.abs(line.get_xdata())
    assert (np.diff(sizes) <= 0).all() and sizes[0] == abs(
        found[["heads_mean", "mlps_mean"]]
    ).max().to_array().max()
    with refused("parts of logits are what ri.direct_logits returns"):
        ri.plots.direct_logits(found[["heads"]])
