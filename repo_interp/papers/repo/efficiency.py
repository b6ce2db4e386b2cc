"""What RePo costs (RePo sec. 5.4, table 6): R7.

    parameters   2 d d_p + d_p P a layer, counted on models without weights, at the paper's size and at ours
    FLOPs        6 N a token of training, N the parameters beside the input embedding; with 5e10 tokens this is table 6
    time         a token, generated with a cache after a prompt, RoPE and RePo in turns on the same machine

The timed models are fresh: time does not depend on weights. Times differ from run to run; nothing else here does.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import xarray as xr
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from repo_interp.measures.labels import described
from repo_interp.models.generation import continue_greedily
from repo_interp.models.reposition import added_parameters, reposition
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.subjects import Options
from repo_interp.papers.repo import rules
from repo_interp.papers.repo.claims import R7, R7_TIME
from repo_interp.papers.repo.tables_figure import times

LAYOUT = "repo@1/3"
"""As in the paper: RoPE below a third of the layers."""
TOKENS = 50e9
"""Tokens of table 6."""
SIZES: dict[str, dict[str, int | str]] = {
    "OLMo-2 1B": {
        "model_type": "olmo2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 100352,
    },
    "OLMo-2 7B": {
        "model_type": "olmo2",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 100352,
    },
}
"""The paper's models, from their public configurations."""


def efficiency(options: Options, cache: Cache) -> Result:
    """R7, table 6."""
    depends = {name: getattr(options, name) for name in vars(options) if name.startswith("efficiency_")}
    measured = cache.dataset(
        "repo_efficiency", {**depends, "seed": options.seed, "device": options.device}, lambda: _times(options)
    )
    sizes = [counts(_config(stated)) for stated in (*SIZES.values(), _timed_size(options))]
    coords = {"size": [*SIZES, "timed"], "scheme": ["rope", "repo"]}
    array = xr.DataArray(np.array(sizes, dtype=float), coords, ("size", "scheme"))
    data = measured.assign(
        parameters=described(array, "parameters beside the input embedding", "1"),
        flops=described(6 * array * TOKENS, "floating-point operations to train on 5e10 tokens, 6 N a token", "1"),
    )
    return Result(
        "efficiency",
        f"Time to generate a token with RoPE and RePo ({LAYOUT}) in turns (RePo table 6): {options.efficiency_layers} layers of width "
        f"{options.efficiency_width}, a prompt of {options.efficiency_context} tokens, {options.efficiency_tokens} tokens a round; "
        "bar: median. " + "; ".join(_stated(array, str(size)) for size in coords["size"]),
        data,
        times(data),
        (_parameters(array), _time(data, options)),
    )


def counts(config: PretrainedConfig) -> tuple[int, int]:
    """Parameters beside the input embedding, with RoPE and with RePo."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
        reposition(model, LAYOUT)
    added = added_parameters(model)
    whole = sum(parameter.numel() for parameter in model.parameters()) - model.get_input_embeddings().weight.numel()
    return whole - added, whole


def _parameters(array: xr.DataArray) -> Verdict:
    rope, repo = (float(array.sel(size="OLMo-2 1B", scheme=scheme)) for scheme in ("rope", "repo"))
    return Verdict(
        R7,
        "OLMo-2 1B (configuration)",
        judged(repo / rope - 1 <= rules.PARAMETERS),
        "parameters added, per cent of those beside the input embedding",
        100 * (repo / rope - 1),
        control="RoPE: 0",
        note=f"FLOPs of table 6 as 6 N T: {6 * rope * TOKENS:.3g} and {6 * repo * TOKENS:.3g} (paper 3.84e+20 and 3.87e+20); "
        + "; ".join(_stated(array, str(size)) for size in array["size"].values[1:]),
    )


def _time(data: xr.Dataset, options: Options) -> Verdict:
    ratios = data["ratio"].values
    rope, repo = (1e3 * float(data["seconds"].sel(scheme=scheme).median()) for scheme in ("rope", "repo"))
    return Verdict(
        R7_TIME,
        "fresh models",
        judged(bool(np.median(ratios) <= rules.SLOWER)),
        "median ratio of times a generated token, RePo over RoPE",
        float(np.median(ratios)),
        float(ratios.std(ddof=1)),
        "rounds",
        len(ratios),
        f"RoPE against itself {float(data['repeat_ratio'].median()):.3f}",
        f"RoPE {rope:.3g} ms, RePo {repo:.3g} ms on {options.device}, {options.efficiency_layers} layers of "
        f"width {options.efficiency_width}",
    )


def _stated(array: xr.DataArray, size: str) -> str:
    rope, repo = (float(array.sel(size=size, scheme=scheme)) for scheme in ("rope", "repo"))
    return f"{size}: {rope:,.0f} parameters, RePo adds {100 * (repo / rope - 1):.2f} %"


def _times(options: Options) -> xr.Dataset:
    """`seconds [scheme, round]` a token, their `ratio [round]`, and the `repeat_ratio [round]` of RoPE timed twice in the same round."""
    models = {scheme: _fresh(layout, options) for scheme, layout in (("rope", "rope"), ("repo", LAYOUT))}
    prompt = torch.randint(1, 1024, (options.efficiency_context,), generator=torch.Generator().manual_seed(options.seed)).tolist()
    for model in models.values():
        _seconds(model, prompt, options)
    turns = ("rope", "repo", "rope")
    rounds = np.array(
        [[_seconds(models[scheme], prompt, options) for scheme in turns] for _ in range(options.efficiency_rounds)]
    ).T
    first, learned, second = rounds
    seconds = xr.DataArray(np.stack(((first + second) / 2, learned)), {"scheme": ["rope", "repo"]}, ("scheme", "round"))
    return xr.Dataset(
        {
            "seconds": described(seconds, "time a generated token", "s"),
            "ratio": described(xr.DataArray(2 * learned / (first + second), dims="round"), "RePo over RoPE", "1"),
            "repeat_ratio": described(xr.DataArray(second / first, dims="round"), "RoPE over RoPE, later over earlier", "1"),
        }
    )


def _seconds(model: PreTrainedModel, prompt: list[int], options: Options) -> float:
    """A token: the time of all steps without that of the prompt and the first one."""
    elapsed = []
    for count in (1, 1 + options.efficiency_tokens):
        _wait(options.device)
        start = time.perf_counter()
        continue_greedily(model, [prompt], [count])
        _wait(options.device)
        elapsed.append(time.perf_counter() - start)
    return (elapsed[1] - elapsed[0]) / options.efficiency_tokens


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _fresh(layout: str, options: Options) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(_config(_timed_size(options)), dtype=torch.float32)
        reposition(model, layout)
    placed: Any = model
    return placed.to(options.device).eval()


def _timed_size(options: Options) -> dict[str, int | str]:
    width = options.efficiency_width
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": options.efficiency_layers,
        "num_attention_heads": options.efficiency_heads,
        "num_key_value_heads": options.efficiency_heads,
        "vocab_size": 2048,
    }


def _config(stated: dict[str, int | str]) -> PretrainedConfig:
    given = dict(stated)
    return AutoConfig.for_model(str(given.pop("model_type")), **given)
