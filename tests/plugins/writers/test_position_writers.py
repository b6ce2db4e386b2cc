"""Writers of positions: complete, equal to slow hooks, and at their means in every family."""

import numpy as np
import pytest
import torch
from families import TINY, TOKENS, repositioned, tiny
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import repo_interp as ri
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.writers.stream import EMBEDDING, MLP, Means, Stream, at_mean

PROMPTS = [TOKENS[0].tolist(), TOKENS[1, :13].tolist()]
DEEP = {"layer": 2, "row": 1, "draws": 1}


def model_of(family):
    torch.manual_seed(0)
    if family == "gpt_neox":  # attention and MLP side by side, biases, layer norms
        sizes = {name: size for name, size in TINY.items() if "key_value" not in name}
        config = GPTNeoXConfig(**sizes, use_parallel_residual=True, initializer_range=0.2)
        model = ri.reposition(AutoModelForCausalLM.from_config(config).eval(), "repo")
    else:
        model = ri.reposition(tiny(family), "repo")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name or "assigner" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


FAMILIES = ("llama", "olmo2", "gemma2", "gpt_neox")
"""Norm before attention; after it; both; side by side."""


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_add_up_to_the_position_less_that_of_the_mean(family):
    model = model_of(family)
    before = hooks_of(model)
    found = ri.position_writers(model, PROMPTS, **DEEP)
    assert hooks_of(model) == before
    less = found["position"] - found["position_of_mean"]
    whole = found["contribution"].sum("component", skipna=False)
    spread = float(found["position"].std())
    assert_allclose(whole, less, atol=1e-3 * spread)
    assert float(found["remainder"]) < 1e-3 * spread
    assert found["contribution"].isnull().sum() == found.sizes["component"] * 7  # padding
    for share in ("clock_share", "word_share"):
        # what the sum leaves is as small beside what a trend is of
        assert float(found[share].sum()) == pytest.approx(1, abs=0.05)
        assert float(abs(found[share]).max()) > 0.05
    captured = {}
    attention = as_decoder(model).by_layer[2]
    undo = attention.sites.call("positions", lambda z: captured.update(z=z.detach()))
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0]]))
    undo()
    assert_allclose(found["position"][0], captured["z"][0, 1], rtol=1e-4, atol=1e-5)


def plain_parts(model, tokens):
    """What enters layer 2 of a Llama, by part, with nothing but hooks on linear maps."""
    layers, parts, hooks = model.model.layers, {}, []

    def keep(name):
        return lambda module, given, out: parts.__setitem__(name, (given[0][0], out))

    hooks.append(model.model.embed_tokens.register_forward_hook(keep("embedding")))
    for place, layer in enumerate(layers[:2]):
        hooks.append(layer.self_attn.o_proj.register_forward_hook(keep((place, "o"))))
        hooks.append(layer.mlp.register_forward_hook(keep((place, "mlp"))))
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    found = {"embedding": parts["embedding"][1][0]}
    for place, layer in enumerate(layers[:2]):
        weight = layer.self_attn.o_proj.weight.detach()
        for head in range(4):
            columns = slice(8 * head, 8 * head + 8)
            outputs = parts[place, "o"][0].detach()[:, columns]
            found[f"L{place} H{head}"] = outputs @ weight[:, columns].T
        found[f"L{place} MLP"] = parts[place, "mlp"][1][0].detach()
    return found


def test_every_contribution_is_that_of_a_slow_integral_over_plain_hooks():
    model = model_of("llama")
    parts = plain_parts(model, TOKENS[:1])
    whole, layer = sum(parts.values()), model.model.layers[2]
    mean, steps = whole.mean(0), 4000
    assigner = as_decoder(model).by_layer[2].assigner
    with torch.enable_grad():
        # The midpoint rule, token by token side by side
        shares = (torch.arange(steps) + 0.5) / steps
        gradient = torch.zeros_like(whole)
        for share in shares.split(100):
            points = mean + share[:, None, None] * (whole - mean)
            points = points.detach().requires_grad_()
            z = assigner.assign(layer.input_layernorm(points))[..., 1].sum()
            gradient += torch.autograd.grad(z, points)[0].sum(0) / steps
    found = ri.position_writers(model, TOKENS[:1], **DEEP)
    assert [str(name) for name in found["component"].values] == list(parts)
    for name, part in parts.items():
        expected = ((part - part.mean(0)) * gradient).sum(-1)
        got = found["contribution"].sel(component=name)[0]
        assert_allclose(got, expected, atol=2e-3 * float(found["position"].std()))
    z, index = found["position"].values[0], np.arange(20) - 9.5
    for name in parts:
        c = found["contribution"].sel(component=name).values[0]
        assert_allclose(found["clock_share"].sel(component=name), c @ index / (z @ index))
    # Given the word: only words that occur twice differ from their mean
    words, rest = TOKENS[0].numpy(), []
    for values in (found["contribution"].values[:, 0], z[None]):
        values = values - values.mean(-1, keepdims=True)
        rest.append(np.stack([v - [v[words == word].mean() for word in words] for v in values]))
    expected = rest[0] @ rest[1][0] / (rest[1][0] @ rest[1][0])
    assert_allclose(found["word_share"], expected, rtol=1e-6, atol=1e-9)


@torch.no_grad()
def parts_of(stream, means):
    """c - mean of every component in a pass of the model, and what entered its layers."""
    entered, wrote, parts = {}, {}, {}
    with stream.observed(entered.__setitem__, wrote.__setitem__):
        stream.decoder.stack(TOKENS[:1])
    if not means.entered:
        for sums, kept in ((means.entered, entered), (means.wrote, wrote)):
            sums |= {layer: value.mean((0, 1)) for layer, value in kept.items()}
    for layer in range(2):
        outputs = wrote[layer] - means.wrote[layer]
        alone = outputs[0, :, None] * torch.eye(4).repeat_interleave(outputs.shape[-1] // 4, 1)
        heads = alone @ stream.matrix(layer, outputs.shape[-1])
        parts |= {(layer, head): heads[:, head] for head in range(4)}
        here, after = (entered[one][0] - means.entered[one] for one in (layer, layer + 1))
        parts[layer, MLP] = after - here - heads.sum(1)
    return parts, {layer: value[0] for layer, value in entered.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "chosen", [[(0, 2)], [(1, 0), (0, 1)], [(0, MLP), (0, 3)], [(1, MLP), (0, MLP)]]
)
def test_f_phi_alone_reads_the_stream_less_what_components_write_beyond_their_means(family, chosen):
    model = model_of(family)
    stream, means = Stream(as_decoder(model), 2), Means()
    plain, before = parts_of(stream, means)
    removed = sum(plain[one] for one in chosen)
    found = {}
    with at_mean(stream, means, chosen, everywhere=False):
        undo = stream.reader.sites.call("positions", lambda z: found.__setitem__("z", z))
        _, after = parts_of(stream, means)
        undo()
    assert_allclose(after[2], before[2], atol=1e-5)  # nobody else reads another stream
    norm = getattr(stream.blocks[2], "input_layernorm", lambda x: x)
    with torch.no_grad():
        expected = stream.reader.assigner(norm(before[2] - removed)[None], torch.arange(20)[None])
        unchanged = stream.reader.assigner(norm(before[2])[None], torch.arange(20)[None])
    assert_allclose(found["z"], expected, rtol=1e-3, atol=1e-3 * float(expected.std()))
    assert (expected - unchanged).abs().max() > 0.1 * expected.std()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [(0, MLP), (1, MLP), (0, 2), (1, 0)])
def test_for_all_readers_the_stream_lacks_what_a_component_writes_beyond_its_mean(family, chosen):
    model = model_of(family)
    stream, means = Stream(as_decoder(model), 2), Means()
    plain, before = parts_of(stream, means)
    layer, head = chosen
    attention, outputs = as_decoder(model).by_layer[layer], []
    last = stream.added[layer][0] or attention.output_projection
    with at_mean(stream, means, [chosen], everywhere=True):
        undo = last.register_forward_hook(lambda module, given, out: outputs.append(out[0]))
        _, after = parts_of(stream, means)
        undo.remove()
    assert_allclose(after[layer], before[layer], atol=1e-5)
    if head == MLP or family == "gpt_neox":  # nothing else of the layer reads it
        expected = before[layer + 1] - plain[chosen]
        assert_allclose(after[layer + 1], expected, atol=1e-4)
    if head != MLP:
        undo = last.register_forward_hook(lambda module, given, out: outputs.append(out[0]))
        parts_of(stream, means)
        undo.remove()
        assert_allclose(outputs[0], outputs[1] - plain[chosen], atol=1e-4)
    assert (after[2] - before[2]).abs().max() > 1e-3


@torch.no_grad()
def test_heads_at_their_means_for_all_are_an_ablation_with_means_and_losses_are_transformers():
    model = model_of("llama")
    stream, means = Stream(as_decoder(model), 2), Means()
    parts_of(stream, means)
    found = ri.position_writers(model, TOKENS[:1], **DEEP, together=2)

    def loss():
        return float(cross_entropy(model(TOKENS[:1]).logits[0, :-1], TOKENS[0, 1:]))

    heads = [(0, 2), (1, 0)]
    with ri.ablate(model, heads, means=ri.head_means(model, TOKENS[:1])):
        ablated = loss()
    with at_mean(stream, means, heads, everywhere=True):
        assert loss() == pytest.approx(ablated, rel=1e-5)
    assert abs(ablated - loss()) > 1e-3
    assert f"{found['removed'].values[1]} write " in found.attrs["finding"]
    assert "at their means for f_phi alone" in found.attrs["finding"]
    for place, sets in enumerate(found["removed"].values[1:], 1):
        parts = [str(name).split() for name in str(sets).split(" + ")]
        chosen = [
            (int(layer[1:]), MLP if head == "MLP" else int(head[1:])) for layer, head in parts
        ]
        assert len({*chosen}) == 2
        for reader in ("f_phi", "all"):
            one = found.sel(reader=reader).isel(removed=place)
            with at_mean(stream, means, chosen, reader == "all"):
                assert float(one["loss"]) == pytest.approx(loss(), rel=1e-5)
            # A single block of a single text has no interval
            assert float(one["change"]) == pytest.approx(float(one["loss"]) - loss(), abs=1e-5)
            assert np.isnan(one["change_low"])


def test_the_clock_of_a_real_model_has_a_writer_and_equal_calls_are_equal():
    model = ri.open_model("reversal/repo")
    prompts = ri.tasks.make_task("reversal").prompts(3)
    one, two = (ri.position_writers(model, prompts, 2, 0) for _ in range(2))
    assert one.identical(two)
    assert one["removed"].values[1] == "L1 H1" and "L1 H1 writes" in one.attrs["finding"]
    assert float(one["clock_share"].sel(component="L1 H1")) > 0.5
    trend = abs(one["trend"].sel(reader="f_phi")).values
    # the trend goes with its writer, and stays with others
    assert trend[1] < 0.5 * trend[0] and (trend[2:] > 0.5 * trend[0]).all()
    assert_allclose(one["loss"][:, 0], ri.loss(model, prompts).mean(), rtol=1e-5)


def test_the_figure_shows_the_shares():
    prompts = ri.tasks.make_task("reversal").prompts(3)
    found = ri.position_writers(ri.open_model("reversal/repo"), prompts, 2, 0)
    drawn = ri.plots.position_writers(found)
    left, middle, right, *_ = drawn.axes
    share = found["clock_share"].sel(component="L1 H1")
    assert_allclose(left.images[0].get_array()[1, 1], share)
    share = found["word_share"].sel(component="L0 MLP")
    assert_allclose(middle.images[0].get_array()[0, -1], share)
    # 46 tokens are too few for a resolution
    assert [text.get_text() for text in right.texts] == ["no distance tells the order"]
    assert "L1 H1 at the mean" in drawn.get_suptitle()
    told = found.assign(resolution=found["resolution"].fillna(8.0))
    told["resolution"][:, 1] = 20.0
    right = ri.plots.position_writers(told).axes[2]
    dots = {line.get_gid(): list(line.get_ydata()) for line in right.lines}
    assert dots["writer 0"] == dots["writer 1"] == [20]
    assert dots["controls 1"] == [8] * 4 and dots["as it is"] == [8, 8]
    with refused("writers of positions are what ri.position_writers returns"):
        ri.plots.position_writers(found[["position"]])


@pytest.mark.parametrize(
    ("scheme", "given", "line"),
    [
        ("rope", {"layer": 2, "row": 0}, "layer 2 .rope. learns no positions"),
        ("repo_attention", {"layer": 2, "row": 0}, "computes a position from several tokens"),
        ("repo_index", {"layer": 2, "row": 0}, "reads the token index and the hidden state"),
        ("repo", {"layer": 0, "row": 0}, "layer 0 reads the embedding alone"),
        ("repo", {"layer": 2, "row": 9}, "row 9 of positions was asked for"),
        ("repo", {"layer": 7, "row": 0}, "layer 7 was asked for"),
        ("repo", {"layer": 2, "row": 0, "together": 9}, "layer 2 has 10 before it"),
    ],
)
def test_what_has_no_writers_is_refused_in_one_line(scheme, given, line):
    torch.manual_seed(0)
    with refused(line):
        ri.position_writers(repositioned(scheme), PROMPTS, **given)
    assert EMBEDDING == (-1, MLP)
