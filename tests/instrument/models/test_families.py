"""Families of transformers that differ, by one mechanism: the columns of docs/families.md, caches,
layouts and precision.
"""

import copy

import numpy as np
import pytest
import torch
from refusals import refused
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import repo_interp as ri
from benchmarks.families import (
    COLUMNS,
    GOOD,
    SCALINGS,
    page,
    scaled,
    scaled_configuration,
    tried,
)
from benchmarks.options import options, summed, tried_option
from benchmarks.tiny_models import small_configuration, small_model
from repo_interp.checkpoint_files.architectures import key_value_heads
from repo_interp.checkpoint_files.inspected import inspect_checkpoint
from repo_interp.models.attention import CACHES
from repo_interp.models.checkpoints import load_model
from repo_interp.models.configuration import make_config
from repo_interp.models.decoder import as_decoder
from repo_interp.models.generation import continue_greedily
from repo_interp.models.reposition import with_layout
from repo_interp.plugins.loading_checks.parity import parity_errors
from repo_interp.tasks import Prompt

DIFFERENT = (
    *("gpt_neox", "glm4", "cohere2", "gemma3_text", "gpt_oss", "gpt2", "qwen3_next", "lfm2"),
    *("deepseek_v32", "nanochat", "inkling_text", "bloom", "mpt", "falcon", "gptj"),
)
"""Fused and partial; interleaved pairs; layers without rotation; two frequencies; sinks; experts;
learned absolute positions; hybrids; latent attention, with a selection of keys; a norm after the
rotation; biases; attention that the family computes itself.

What they do is in docs/families.md of all families (`python -m benchmarks.families`).
"""
EXPERIMENTED = ("gpt2", "deepseek_v32")
"""Those on which experiments run too, which read heads by what the other columns test."""
CACHED = {
    "gptj": {"num_beams": 2},
    "deepseek_v3": {"num_beams": 2},
    "gpt_oss": {"cache_implementation": "static"},
    "gpt2": {"cache_implementation": "static"},
}
TOKENS = torch.randint(3, 119, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def stock():
    """The stock model of a family, built once."""
    models = {}

    def of(family):
        if family not in models:
            models[family] = small_model(family)
        return models[family]

    return of


def observed(model):
    return with_layout(copy.deepcopy(model), None)


def generated(model, **options):
    torch.manual_seed(0)
    given = {
        "attention_mask": torch.ones_like(TOKENS),
        "max_new_tokens": 10,
        "do_sample": False,
    } | options
    return model.generate(TOKENS, **given)


def sloped(family, **options):
    """A stock model with ALiBi whose number of heads is no power of two."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2}
    sizes[{"bloom": "seq_length", "mpt": "max_seq_len"}[family]] = 64
    return small_model(family, AutoConfig.for_model(family, vocab_size=120, **sizes, **options))


def test_the_cache_is_found_under_its_name_in_later_transformers(stock):
    model = observed(stock("gptj"))

    def rename(module, arguments, keywords):
        cache = next((keywords.pop(key) for key in CACHES if key in keywords), None)
        return arguments, keywords | {"cache": cache}

    for attention in as_decoder(model).layers:
        attention.module.register_forward_pre_hook(rename, prepend=True, with_kwargs=True)
    assert torch.equal(generated(model), generated(stock("gptj")))


@pytest.mark.parametrize(
    ("family", "options"),
    [("bloom", {}), ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}})],
)
def test_slopes_are_those_of_the_family(family, options):
    """BLOOM and MPT take other slopes than ALiBi's paper where heads are no power of two."""
    stock = sloped(family, **options)
    model = observed(stock)
    with torch.no_grad():
        expected = stock(TOKENS).logits
        series = with_layout(copy.deepcopy(stock), "alibi")
        for ours in (model, series):
            assert_close(ours(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)
        assert max(parity_errors(as_decoder(model), TOKENS[:1])) < 1e-5
        for layer in as_decoder(series).layers:
            layer.position_logits.slopes = None
        assert float((series(TOKENS).logits - expected).abs().max()) > 1e-3


def test_a_falcon_in_memory_that_adds_to_its_logits_is_refused():
    """Found: it was measured without what it adds, though its checkpoint was refused."""
    config = small_configuration("falcon", alibi=True)
    with refused("a Falcon with ALiBi scales its added logits"):
        ri.analyze(small_model("falcon", config), [tuple(TOKENS[0].tolist())], ("predictions",))


@pytest.mark.parametrize("family", ["cohere_compass_text", "qwen3_5_text", "qwen4_exp_text"])
@torch.no_grad()
def test_positions_of_an_image_turn_every_pair_by_its_axis(family):
    """mRoPE: six tokens of an image in a grid of 2 x 3, with the stock logits, and cached; what is
    measured of it: test_images.py.
    """
    stock = small_model(family)
    grid = torch.arange(12).expand(3, 2, 12).clone()
    grid[:, :, 9:] = torch.arange(6, 9)
    for axis, places in enumerate(([3] * 6, [3, 3, 3, 4, 4, 4], [3, 4, 5, 3, 4, 5])):
        grid[axis, :, 3:9] = torch.tensor(places)
    model, expected = observed(stock), stock(TOKENS, position_ids=grid).logits
    assert_close(model(TOKENS, position_ids=grid).logits, expected, atol=1e-4, rtol=1e-4)
    assert float((model(TOKENS).logits - expected).abs().max()) > 0.1
    assert_close(model(TOKENS).logits, stock(TOKENS).logits, atol=1e-4, rtol=1e-4)
    half = model(TOKENS[:, :9], position_ids=grid[..., :9], use_cache=True).past_key_values
    rest = model(TOKENS[:, 9:], position_ids=grid[..., 9:], past_key_values=half).logits
    assert_close(rest, expected[:, 9:], atol=1e-4, rtol=1e-4)
    text = model(TOKENS[:, :3], use_cache=True).past_key_values
    with refused("give all of them to one pass"):
        model(TOKENS[:, 3:], position_ids=grid[..., 3:], past_key_values=text)
    other = with_layout(copy.deepcopy(stock), "hope")
    with refused(r"position_ids have 3 axes, and layer \d \(hope\)"):
        other(TOKENS, position_ids=grid)


@pytest.mark.parametrize(
    ("family", "options"), [("llama4_text", {"attention_chunk_size": 5}), ("deepseek_v32", {})]
)
def test_keys_that_chunks_or_a_selection_hide_are_hidden_from_measures(family, options):
    """Found: masses counted earlier chunks of Llama 4, and fits took hidden keys for logits."""
    stock = small_model(family, small_configuration(family, **options))
    stock.set_attn_implementation("eager")
    model, patterns = observed(stock), stock(TOKENS, output_attentions=True).attentions
    prompts = [
        Prompt(tokens=tuple(tokens), spans={"needle": (1, 2)}, generated=(11,))
        for tokens in TOKENS.tolist()
    ]
    with torch.no_grad():
        run = ri.analyze(model, prompts, ("attention_mass", "three_axis", "components"))
        parts = ri.explain_logit(model, prompts[0], 0, 0, 11, int(patterns[0][0, 0, 11].argmax()))
    assert np.isnan(parts.attrs["fit_r"])
    needle = run["attention_mass"]["mass"].sel(span="needle")
    for layer, pattern in enumerate(patterns):
        mass = torch.from_numpy(needle.sel(layer=layer).values)
        assert_close(mass.float(), pattern[:, :, 10, 1:3].sum(-1), atol=1e-5, rtol=1e-4)
    for measure in ("three_axis", "components"):
        assert f"{measure}: {measure} takes queries to see all earlier keys" in run.attrs["stopped"]
        assert measure not in run.children


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v32", {}),
        ("llama4_text", {"floor_scale": 4, "attn_scale": 3.0, "no_rope_layers": [0, 1, 0, 1]}),
    ],
)
def test_a_module_that_counts_padding_has_none(family, options):
    """Found: DeepSeek's indexer breaks ties by how many keys there are, and Llama 4 scales queries
    by their row, padding included.
    """
    model = ri.reposition(small_model(family, small_configuration(family, **options)), "rope")
    drawn = np.random.default_rng(0)
    prompts = [
        Prompt(tuple(drawn.integers(3, 119, count).tolist()), {"needle": (1, 2)}, (count - 1,))
        for count in (7, 40, 23)
    ]
    together, *alone = (
        ri.analyze(model, some, "attention_mass", batch_size=3)["attention_mass"]["mass"]
        for some in (prompts, *([prompt] for prompt in prompts))
    )
    assert_close(together.values, np.concatenate(alone), atol=1e-6, rtol=0)
    tokens = [prompt.tokens for prompt in prompts]
    assert continue_greedily(as_decoder(model), tokens, [3, 3, 3]) == [
        continue_greedily(as_decoder(model), [prompt], [3])[0] for prompt in tokens
    ]


def test_layers_with_different_numbers_of_heads_are_measured_and_edited():
    """Found: the atlas ended in a traceback for Laguna, and `transplanted` took the heads of the
    first layer for those of all.
    """
    config = small_configuration("laguna", num_attention_heads_per_layer=[4, 2, 4, 8])
    model = ri.reposition(small_model("laguna", config), "repo")
    prompts = [Prompt(tuple(TOKENS[0].tolist()), {"needle": (1,)}, (11,))]
    mass = ri.analyze(model, prompts, ("attention_mass",))["attention_mass"]["mass"]
    assert mass.notnull().isel(prompt=0, span=0).sum("head").values.tolist() == [4, 2, 4, 8]
    for name in ("atlas", "effects", "kinds", "perturbation", "saliency"):
        with refused("layers of this laguna have 2 to 8 heads; measures take that"):
            ri.analyze(model, prompts, (), experiments=[name])
    does = ri.interventions
    with torch.no_grad():
        before = model(TOKENS).logits
        with does.transplanted(model, does.positions_of(model, TOKENS)):
            assert_close(model(TOKENS).logits, before, atol=1e-5, rtol=1e-5)
        with does.transplanted(model, does.positions_of(model, TOKENS), from_head=(3, 7)):
            assert float((model(TOKENS).logits - before).abs().max()) > 1e-3


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("family", DIFFERENT)
def test_a_family_is_observed_as_the_table_says(family):
    columns = [column for column in COLUMNS if column != "experiments" or family in EXPERIMENTED]
    row = tried(family, columns)
    assert {column: row[column] for column in columns if row[column] not in GOOD} == {}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
        ("phi", {"qk_layernorm": True}),
        ("gpt_neox", {"attention_bias": False}),
        ("gpt_bigcode", {"multi_query": False}),
        ("opt", {"do_layer_norm_before": False}),
        ("starcoder2", {"norm_epsilon": 1e-6}),
        ("afmoe", {"num_shared_experts": 0}),
        ("mpt", {"attn_config": {"softmax_scale": 0.5}}),
        ("granitemoehybrid", {"position_embedding_type": "nope"}),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_an_option_of_a_family_gives_the_stock_logits(family, change):
    """Found: `ri.load` ended in TransformerLens' traceback, had Starcoder2's norms with another
    epsilon, and took no model without shared experts; `inspect` said that Granite 4 rotates.
    """
    assert tried_option(family, change) == "yes"


def test_rope_in_a_layer_that_has_none_is_kept_by_a_copy(tmp_path):
    """Found: Kolibri's layout was read as RoPE everywhere, and so reposition's was not written."""
    model = ri.reposition(small_model("kolibri1"), "rope")
    ri.save(model, tmp_path)
    again = load_model(tmp_path)
    assert ri.layout(again) == ("rope",) * 4
    with torch.no_grad():
        assert_close(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 1),
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ],
)
def test_key_value_heads_of_a_falcon_are_those_of_its_modules(change, count):
    """Found: `inspect` said that a Falcon with multi-query has as many as it has heads."""
    config = small_configuration("falcon", **change)
    attention = small_model("falcon", config).transformer.h[0].self_attention
    assert key_value_heads(config) == attention.num_kv_heads == count


@pytest.mark.parametrize("family", ["inkling_text", "gemma3_text", "mistral"])
def test_windows_that_inspect_shows_are_those_of_the_layers(family, tmp_path):
    """Found: it showed none for Inkling, whose layers call it by another name."""
    small_model(family).save_pretrained(tmp_path)
    found = inspect_checkpoint(str(tmp_path), make_config)
    layers = as_decoder(load_model(tmp_path)).layers
    assert [found.window(at) for at in range(4)] == [layer.sliding_window for layer in layers]


def test_options_are_the_fields_of_a_configuration():
    found = dict(options("falcon"))
    assert found["new_decoder_architecture=True"] == {"new_decoder_architecture": True}
    assert found["num_kv_heads=2"]["new_decoder_architecture"]
    assert "attn_config.softmax_scale=0.5" in dict(options("mpt"))
    assert "rope_parameters.rope_theta=500.0" in found and "hidden_size=None" not in found
    assert tried_option("falcon", {"alibi": True}).startswith("refused: a Falcon with ALiBi")
    assert tried_option("falcon", {"activation": None}).startswith("transformers: ")
    assert summed(
        {"a": "yes", "b": "refused: c", "d": "changes nothing", "e": "transformers: f"}
    ) == ("1 of 2, 1 skipped")


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("glm4", "yarn"),
        ("deepseek_v3", "yarn"),
        ("qwen3_next", "llama3"),
        ("gpt_neox", "dynamic"),
        ("phimoe", "longrope"),
        ("nanochat", "longrope"),
        ("llama4_text", "yarn"),
        ("granite_swa", "dynamic"),
        ("gemma4_text", "yarn"),
    ],
)
def test_a_scaled_rotation_gives_the_stock_logits(family, scaling):
    """Partly rotated heads; factors by length; norms that undo a factor; rotary modules by layer;
    columns of frequency 0.
    """
    assert scaled(family, scaling) == "yes"


@pytest.mark.parametrize("family", ["glm4", "llama"])
def test_scaling_on_loading_and_by_an_intervention_is_that_of_the_stock_model(family, tmp_path):
    """As `rope_scaling` of `load_model`, and `rescaled`, in all layers: a part of each head
    turns.
    """
    config = small_configuration(family)
    config.rope_parameters["partial_rotary_factor"] = 0.25 if family != "llama" else 1.0
    small_model(family, config).save_pretrained(tmp_path)
    limit = config.max_position_embeddings
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": limit}
    config.rope_parameters |= scaling
    with torch.no_grad():
        expected = small_model(family, config)(TOKENS, use_cache=False).logits
        loaded = load_model(tmp_path, rope_scaling=scaling)
        assert_close(loaded(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
        model = load_model(tmp_path)
        with ri.interventions.rescaled(model, yarn=4.0, layer=range(config.num_hidden_layers)):
            assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("gpt_neox", layout) for layout in ("repo", "nope", "cope_rope", "alibi", "hope")),
        *(("deepseek_v3", layout) for layout in ("repo", "cope", "kerple", "rope_high")),
        *(("gpt_oss", "repo"), ("qwen3_next", "repo")),
    ],
)
def test_schemes_run_in_families_that_rotate_a_part_of_a_head_or_have_sinks(stock, family, layout):
    options = {"training_length": 400} if layout in ("hope", "rope_high") else {}
    model = ri.reposition(copy.deepcopy(stock(family)), layout, **options)
    for module in as_decoder(model).scheme_modules:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    assert torch.equal(generated(model), generated(model, use_cache=False))


def test_two_factors_by_the_length_of_a_pass_are_refused():
    config = scaled_configuration("phimoe", "longrope")
    config.rope_parameters["long_mscale"] = 1.5
    with refused(r"short passes by short_mscale 1.2 and long ones by long_mscale 1.5"):
        with_layout(small_model("phimoe", config), None)


@pytest.mark.parametrize(("family", "options"), CACHED.items(), ids=CACHED)
def test_caches_of_every_kind_keep_positions(stock, family, options):
    assert torch.equal(
        generated(observed(stock(family)), **options), generated(stock(family), **options)
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_cropped_cache_goes_on_as_if_the_rest_had_never_been(stock, family):
    model = observed(stock(family))
    with torch.no_grad():
        expected = model(TOKENS, use_cache=True).logits[:, -1]
        cache = model(TOKENS[:, :7], use_cache=True).past_key_values
        cache.crop(-1)
        logits = model(TOKENS[:, 6:], past_key_values=cache, use_cache=True).logits[:, -1]
    assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_hybrid_with_an_infinite_limit_is_saved(stock, tmp_path):
    """Found: `ri.save` wrote Infinity into config.json, which `ri.load_model` refused."""
    model = ri.reposition(copy.deepcopy(stock("bamba")), "repo")
    ri.save(model, tmp_path)
    with torch.no_grad():
        assert_close(load_model(tmp_path)(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("family", ["glm4", "deepseek_v3"])
def test_half_precision_stays_as_near_to_float32_as_the_stock_model(stock, family):
    exact = stock(family)
    half = copy.deepcopy(exact).to(torch.bfloat16)
    with torch.no_grad():
        expected, of_stock = exact(TOKENS).logits, half(TOKENS).logits.float()
        ours = observed(half)(TOKENS).logits.float()
    allowed = 2.0 * float((of_stock - expected).abs().mean())
    assert float((ours - expected).abs().mean()) <= allowed


def test_positions_at_the_input_are_exchanged_in_the_table_of_the_stock_model(stock):
    model = observed(stock("gpt2"))
    assert ri.models.reposition.layout(model) == ("learned",) * 4
    assert as_decoder(model).longest_prompt == 128
    index, by_five = torch.arange(5, 17)[None], {0: lambda positions: positions * 0.0 + 5.0}
    with torch.no_grad():
        expected = stock("gpt2")(TOKENS, position_ids=index, use_cache=False).logits
        for moved in (
            ri.interventions.shifted(model, 5.0),
            ri.interventions.moved_keys(model, by_five),
        ):
            with moved:
                assert_close(model(TOKENS, use_cache=False).logits, expected)
        with ri.interventions.shifted(model, 1e6, tokens=[3]):
            model(TOKENS, use_cache=False)  # kept within the table
    with refused("learned vectors at its input"):
        ri.reposition(copy.deepcopy(stock("gpt2")), "repo")


def test_a_refusal_names_the_reason_and_what_is_supported():
    config = small_configuration("gpt_neo")
    with refused("GPTNeoAttention does not call the attention functions"):
        with_layout(AutoModelForCausalLM.from_config(config), None)
    columns = ("layers", "positions", *COLUMNS, *SCALINGS)
    rows = {
        "llama": dict.fromkeys(columns, "yes")
        | {"yarn": "transformers: no", "options": {"bias=True": "yes"}},
        "falcon": dict.fromkeys(columns, "yes") | {"options": {"alibi=True": "refused: not alone"}},
        "bert": {"refused": "it is an encoder"},
    }
    written = page(rows, "5.23.0")
    for line in (
        "| falcon | alibi=True | refused: not alone |",
        "| llama | yarn | transformers: no |",
        "| bert | it is an encoder |",
        "Of 3 families 2 open, and 1 of",
    ):
        assert line in written
