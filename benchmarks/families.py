"""`python -m benchmarks.families [FAMILY ...]`: which causal-LM families of the installed transformers open, and what works on them.

Each family is built with tiny random weights in a process of its own, and tried:

    logits        the stock model's, within 1e-5 of the largest
    attention     each layer's output made again from its captured queries, keys, positions and sinks
    generation    the same tokens as the stock model: greedy, sampled with one seed, a batch with padding on the left
    intervention  shifted positions change the logits; afterwards they are bit-identical to those before
    bridge        a TransformerBridge with the same logits

Without names, all are tried and docs/families.md is written.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SMALL = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
"""The sizes of every family, under the names that its configuration has. Windows are shorter than the prompts."""
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
}
"""The sizes of latent attention: a head is 16 entries that do not turn and 8 that do."""
EXCEPTIONS: dict[str, dict[str, Any]] = {}
"""What else a family needs to be small."""
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "attention_layers")
SECONDS = 60
COLUMNS = ("logits", "attention", "generation", "intervention", "bridge")


def small_configuration(family: str) -> Any:
    """A configuration of `family` with small sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    default = kind()
    small = {name: value for name, value in SMALL.items() if _settable(kind, default, name)}
    if hasattr(default, "qk_rope_head_dim"):
        small |= {name: value for name, value in LATENT.items() if _settable(kind, default, name)}
    for name in LISTS:
        named = getattr(default, name, None)
        if isinstance(named, list | tuple) and _settable(kind, default, name):
            small[name] = _varied(list(named))
    return kind(**small | EXCEPTIONS.get(family, {}))


def _settable(kind: type, default: Any, name: str) -> bool:
    """Whether a configuration has `name`, and not as a property computed of other names."""
    computed = getattr(kind, name, None)
    return hasattr(default, name) and not (isinstance(computed, property) and computed.fset is None)


def _varied(named: list[Any]) -> list[Any]:
    """Four entries in which every kind of `named` occurs."""
    kinds = list(dict.fromkeys(named))
    return [*kinds, *named[: 4 - len(kinds)]][:4] if len(kinds) < 4 else kinds[:4]


def small_model(family: str) -> Any:
    """A tiny random model of `family`, in which positions matter."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = small_configuration(family)
    config.initializer_range = 0.15
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tried(family: str) -> dict[str, str]:
    """What works on `family`, by column: "yes", a number, or the reason why not."""
    import copy

    import torch

    import repo_interp as ri
    from repo_interp.models.outputs import parity_errors
    from repo_interp.models.reposition import attentions, with_layout

    stock = small_model(family)
    tokens = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = stock(tokens, use_cache=False).logits
    model = copy.deepcopy(stock)
    with_layout(model, None)
    layers = list(attentions(model))
    row = {"layers": f"{len(layers)}/{model.config.num_hidden_layers}", "schemes": " ".join(dict.fromkeys(each.scheme for each in layers))}

    def attempt(column: str, does: Any) -> None:
        try:
            row[column] = does()
        except Exception as error:
            row[column] = f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"

    def logits() -> str:
        with torch.no_grad():
            error = float((model(tokens, use_cache=False).logits - expected).abs().max() / expected.abs().max())
        return "yes" if error <= 1e-5 else f"{error:.1e}"

    def attention() -> str:
        error = max(parity_errors(model, tokens[:1]))
        return "yes" if error <= 1e-4 else f"{error:.1e}"

    def generation() -> str:
        mask = torch.ones_like(tokens)
        mask[0, :3] = 0
        wrong = []
        for name, options in {"greedy": {}, "sampled": {"do_sample": True}, "padded": {"attention_mask": mask}}.items():
            given = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "do_sample": False} | options
            outputs = []
            for each in (stock, model):
                torch.manual_seed(3)
                outputs.append(each.generate(tokens, **given))
            if not torch.equal(*outputs):
                wrong.append(name)
        return "yes" if not wrong else "differs: " + ", ".join(wrong)

    def intervention() -> str:
        if not any(each.frequencies is not None and each.assigner is not None for each in layers):
            return "nothing rotates"
        with torch.no_grad():
            before = model(tokens, use_cache=False).logits
            with ri.interventions.shifted(model, 3.0, tokens=range(2, 6)):
                inside = model(tokens, use_cache=False).logits
            after = model(tokens, use_cache=False).logits
        changed = float((inside - before).abs().max())
        return "yes" if changed > 1e-4 and torch.equal(before, after) else f"changed by {changed:.1e}"

    def bridged() -> str:
        wrapped = ri.bridge(copy.deepcopy(model))
        with torch.no_grad():
            error = float((wrapped(tokens) - expected).abs().max() / expected.abs().max())
        return "yes" if error <= 1e-5 else f"{error:.1e}"

    for column, does in zip(COLUMNS, (logits, attention, generation, intervention, bridged), strict=True):
        attempt(column, does)
    return row


def _child(family: str, pipe: Any) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    try:
        pipe.send(tried(family))
    except Exception as error:
        pipe.send({"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def in_a_process(family: str) -> dict[str, str]:
    """`tried` in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(family, there))
    process.start()
    there.close()
    try:
        row = here.recv() if here.poll(SECONDS) else {"refused": f"no end after {SECONDS} s"}
    except EOFError:
        row = {"refused": "the process died"}
    process.kill()
    process.join()
    return row


def main() -> int:
    """Try the named families, or all; print a line of each."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import repo_interp.models.load  # noqa: F401 - imported once, before processes are made

    torch.set_num_threads(1)
    rows = {}
    for family in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows[family] = in_a_process(family)
        sys.stdout.write(json.dumps({"family": family} | rows[family]) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
