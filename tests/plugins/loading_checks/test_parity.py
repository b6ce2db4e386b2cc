"""What measures see of a layer is what the layer computes: window, scale and soft cap are those of
the module that ran.
"""

import pytest
import torch
from families import CONFIGS, TINY, tiny
from refusals import refused
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import repo_interp as ri
from benchmarks.tiny_models import small_configuration, small_model
from repo_interp.checkpoint_files.architectures import native_layout
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import with_layout
from repo_interp.plugins.loading_checks.parity import parity_errors, require_parity

TOKENS = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
SETTINGS = {
    "llama": {"sliding_window": 4},  # ignored by the family
    "olmo2": {"sliding_window": 4, "attn_logit_softcapping": 0.5},  # ignored
    "olmo3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "mistral": {"sliding_window": 4},
    "gemma": {"sliding_window": 4, "attn_logit_softcapping": 0.5},  # ignored
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 2},
    # its soft cap is ignored
    "gemma3": {"sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 2},
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def with_settings(family):
    """A stock decoder whose configuration names windows and soft caps, whether its family uses them
    or not.
    """
    raw = CONFIGS[family]().to_dict() | {"initializer_range": 0.2} | SETTINGS[family]
    if family in ("qwen2", "qwen3"):
        raw.pop("layer_types")
    if family == "smollm3":
        raw["layer_types"] = raw["layer_types"][: TINY["num_hidden_layers"]]
    model = AutoModelForCausalLM.from_config(
        type(CONFIGS[family]())(**raw), attn_implementation="eager"
    )
    return model.eval()


WINDOWS = {
    "olmo3": [4, None, 4],
    "qwen2": [None, 4, 4],
    "qwen3": [None, None, 4],
    "mistral": [4] * 3,
    "gemma2": [4, None, 4],
    "gemma3": [4] * 3,
    "smollm3": [4, None, 4],
}


@pytest.mark.parametrize("family", SETTINGS)
def test_windows_scales_and_caps_are_those_of_the_stock_module(family):
    model = with_settings(family)
    with torch.no_grad():
        stock = model(TOKENS).logits
        ri.reposition(model, ",".join(native_layout(model.config)))
        if family != "gemma2":  # offers no other than eager
            model.set_attn_implementation("sdpa")
        assert_close(model(TOKENS).logits, stock, atol=1e-5, rtol=1e-5)
    assert max(parity_errors(as_decoder(model), TOKENS)) < 1e-5
    layers = as_decoder(model).layers
    assert [layer.sliding_window for layer in layers] == WINDOWS.get(family, [None] * 3)
    caps = {layer.attn_logit_softcapping for layer in layers}
    assert caps == {0.5 if family == "gemma2" else None}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        # windows, soft cap
        *(("gemma2", layout) for layout in ("repo", "nope", "hope", "alibi", "fire", "cope")),
        *(("llama", "repo"), ("gemma3", "alibi")),
    ],
)
def test_captured_inputs_give_the_outputs_of_every_scheme(family, layout):
    assert max(parity_errors(as_decoder(ri.reposition(tiny(family), layout)), TOKENS)) < 1e-5


def test_layers_without_rotation_are_those_whose_modules_do_not_rotate(tmp_path):
    """`no_rope_layers` is SmolLM3's; in a Llama's configuration, left over, it says nothing."""
    stock = tiny("llama")
    stock.config.no_rope_layers = [0] * 3
    stock.save_pretrained(tmp_path)
    model = ri.load_model(tmp_path)
    assert ri.layout(model) == ("rope",) * 3
    with torch.no_grad():
        assert_close(model(TOKENS).logits, stock(TOKENS).logits, atol=1e-5, rtol=1e-5)
    config = CONFIGS["smollm3"]()
    config.no_rope_layers = [1, 0, 0]
    assert native_layout(config) == ("rope", "nope", "nope")


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("family", ["afmoe", "cohere2", "exaone4"])
def test_full_layers_without_sliding_ones_rotate_as_their_modules_do(family, window):
    """Found: `inspect` said "rope" of layers that do not rotate."""
    config = small_configuration(
        family, layer_types=["full_attention"] * 2, num_hidden_layers=2, sliding_window=window
    )
    model = small_model(family, config)
    assert native_layout(config) == ri.layout(with_layout(model, None))


def test_loading_refuses_a_layer_that_measures_would_see_otherwise():
    model = ri.reposition(tiny("llama"), "repo")
    require_parity(as_decoder(model))
    as_decoder(model).layers[1].sites.attended.register_forward_hook(
        lambda module, arguments, attended: 1.1 * attended
    )
    with refused(r"layer 1 \(repo\) attends differently from its captured"):
        require_parity(as_decoder(model))


def test_attention_to_later_tokens_is_refused():
    config = CONFIGS["gemma3"]()
    config.use_bidirectional_attention = True
    with refused("attends to later tokens"):
        ri.reposition(AutoModelForCausalLM.from_config(config), "repo")
