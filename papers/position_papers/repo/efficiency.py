"""What RePo costs (RePo sec. 5.4, table 6): R7.

    parameters   2 d d_p + d_p P per layer, counted on models without weights, at the paper's size and at ours
    FLOPs        6 N per token of training, N the parameters beside the input embedding; with 5e10 tokens this is table 6
    time         per token, generated with a cache after a prompt, RoPE and RePo in turns on the same machine

The timed models are fresh: time does not depend on weights. Times differ from run to run; nothing
else here does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from accelerate import init_empty_weights
from torch.utils.benchmark import timer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from position_papers.kit import (
    AtMost,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Significant,
    Subject,
    evidence,
    mean_of,
    paired_difference,
    score_by_length,
    without_checkpoints,
)
from position_papers.repo.checkpoints import OLMO
from position_papers.repo.options import Options
from repo_interp.measures.labels import with_attrs
from repo_interp.models.decoder import as_decoder
from repo_interp.models.generation import continue_greedily
from repo_interp.models.reposition import added_parameters, reposition
from repo_interp.plots.style import PaperFigure

ADDED = (
    "the share of parameters beside the input embedding that RePo adds at the paper's "
    "size (OLMo-2 1B, from layer 5)"
)
LONGEST = 1.1
"""The ratio of times that still is "about as long"."""
LESS = (
    f"{LONGEST:g} less the mean ratio of times, on fresh models of equal size that "
    "generate in turns,"
)
R7 = Claim("R7", "RePo adds few parameters", "RePo sec. 5.4", "0.9 %", AtMost(ADDED, 0.01))
R7_TIME = Claim(
    "R7",
    "generating a token takes about as long with RePo as with RoPE",
    "RePo table 6",
    "0.0182 s against 0.0176 s: +3.4 %",
    Significant(LESS),
    part="time",
)
LAYOUT = "repo@1/3"
"""As in the paper: RoPE below a third of the layers."""
TOKENS = 50e9
"""Tokens of table 6."""
PAPERS = "OLMo-2 1B"
OLMO_2 = ("olmo2", 2048, 8192, 16, 16, 100352)
"""The paper's model, from its public configuration, as `configuration` takes it."""


# ---- measured ------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """What `_times` measures, with `parameters [size, scheme]`; attributes: the options of what is
    timed.
    """
    timed = {
        name.removeprefix("efficiency_"): getattr(options, name)
        for name in vars(options)
        if name.startswith("efficiency_")
    }
    timed["device"] = options.device
    measured = cache.get(_times, {**timed, "seed": options.seed}, options)
    sizes = {PAPERS: counts(configuration(*OLMO_2)), "timed": counts(_timed(options))}
    coords = {"size": list(sizes), "scheme": ["rope", "repo"]}
    array = xr.DataArray(np.array(list(sizes.values()), dtype=float), coords, ("size", "scheme"))
    return measured.assign(
        parameters=with_attrs(array, "parameters beside the input embedding", "1")
    ).assign_attrs(timed)


def counts(config: PretrainedConfig) -> tuple[int, int]:
    """Parameters beside the input embedding, with RoPE and with RePo."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
        reposition(model, LAYOUT)
    added = added_parameters(model)
    whole = (
        sum(parameter.numel() for parameter in model.parameters())
        - model.get_input_embeddings().weight.numel()
    )
    return whole - added, whole


def configuration(
    kind: str, width: int, inner: int, layers: int, heads: int, vocabulary: int
) -> PretrainedConfig:
    """The configuration of a model of a type and size."""
    return AutoConfig.for_model(
        kind,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )


def _times(options: Options) -> xr.Dataset:
    """`seconds [scheme, round]` per token, their `ratio [round]`, and the `repeat_ratio [round]` of
    RoPE timed twice in the same round.
    """
    models = {
        scheme: _fresh(layout, options) for scheme, layout in (("rope", "rope"), ("repo", LAYOUT))
    }
    prompt = torch.randint(
        1,
        1024,
        (options.efficiency_context,),
        generator=torch.Generator().manual_seed(options.seed),
    ).tolist()
    for model in models.values():
        _seconds(model, prompt, options)
    order = ("rope", "repo", "rope")
    rounds = np.array(
        [
            [_seconds(models[scheme], prompt, options) for scheme in order]
            for _ in range(options.efficiency_rounds)
        ]
    ).T
    first, learned, second = rounds
    seconds = xr.DataArray(
        np.stack(((first + second) / 2, learned)), {"scheme": ["rope", "repo"]}, ("scheme", "round")
    )
    return xr.Dataset(
        {
            "seconds": with_attrs(seconds, "time per generated token", "s"),
            "ratio": with_attrs(
                xr.DataArray(2 * learned / (first + second), dims="round"), "RePo over RoPE", "1"
            ),
            "repeat_ratio": with_attrs(
                xr.DataArray(second / first, dims="round"),
                "RoPE over RoPE, later over earlier",
                "1",
            ),
        }
    )


def _seconds(model: PreTrainedModel, prompt: list[int], options: Options) -> float:
    """Per token: the time of all steps without that of the prompt and the first token."""
    elapsed = []
    for count in (1, 1 + options.efficiency_tokens):
        start = timer()  # which waits until an accelerator is done
        continue_greedily(as_decoder(model), [prompt], [count])
        elapsed.append(timer() - start)
    return (elapsed[1] - elapsed[0]) / options.efficiency_tokens


def _fresh(layout: str, options: Options) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(_timed(options), dtype=torch.float32)
        reposition(model, layout)
    placed: Any = model
    return placed.to(options.device).eval()


def _timed(options: Options) -> PretrainedConfig:
    width = options.efficiency_width
    return configuration(
        "llama", width, 4 * width, options.efficiency_layers, options.efficiency_heads, 2048
    )


# ---- tabulated --------------------------------------------------------------------------------------


def tabulate(data: xr.Dataset) -> Iterator[Evidence]:
    """The parameters at the paper's size, and the times here."""
    parameters = data["parameters"]
    rope, repo = (float(parameters.sel(size=PAPERS, scheme=scheme)) for scheme in ("rope", "repo"))
    yield evidence(
        R7,
        "OLMo-2 1B (configuration)",
        "parameters added, per cent of those beside the input embedding",
        {ADDED: repo / rope - 1},
        100 * (repo / rope - 1),
        control="RoPE: 0",
        seeds=0,
        note=f"FLOPs of table 6 as 6 N T: {6 * rope * TOKENS:.3g} and "
        f"{6 * repo * TOKENS:.3g} (paper 3.84e+20 and 3.87e+20); " + _in_words(parameters, "timed"),
    )
    ratios = data["ratio"].values
    rope, repo = (
        1e3 * float(data["seconds"].sel(scheme=scheme).median()) for scheme in ("rope", "repo")
    )
    timed = data.attrs
    yield evidence(
        R7_TIME,
        "fresh models",
        "mean ratio of times a generated token, RePo over RoPE",
        {LESS: paired_difference(np.full(len(ratios), LONGEST), ratios)},
        **mean_of(ratios, "rounds"),
        control=f"RoPE against itself {float(data['repeat_ratio'].mean()):.3f}",
        note=f"RoPE {rope:.3g} ms, RePo {repo:.3g} ms on {timed['device']}, "
        f"{timed['layers']} layers of width {timed['width']}",
        seeds=0,
    )


def _in_words(parameters: xr.DataArray, size: str) -> str:
    rope, repo = (float(parameters.sel(size=size, scheme=scheme)) for scheme in ("rope", "repo"))
    return f"{size}: {rope:,.0f} parameters, RePo adds {100 * (repo / rope - 1):.2f} %"


# ---- drawn ---------------------------------------------------------------------------------------


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Table 6."""
    timed = data.attrs
    yield Drawing(
        "efficiency",
        partial(times_in_turns, data),
        f"Time to generate a token with RoPE and RePo ({LAYOUT}) in turns (RePo table 6): "
        f"{timed['layers']} layers of width {timed['width']}, a prompt of {timed['context']} "
        f"tokens, {data.sizes['round']} rounds of {timed['tokens']} tokens; dots: rounds, mark: "
        "mean. "
        + "; ".join(_in_words(data["parameters"], str(size)) for size in data["size"].values),
        data,
    )


def times_in_turns(data: xr.Dataset) -> PaperFigure:
    """Time per token of both schemes, round by round."""
    times = with_attrs(
        1e3 * data["seconds"].transpose("scheme", "round"), "time per token", "ms"
    ).rename(scheme="checkpoint", round="seed")
    table = times.expand_dims(test_set=["rounds in turns"]).to_dataset(name="score")
    schemes = [str(scheme) for scheme in table["checkpoint"].values]
    return score_by_length(
        table.assign_coords(layout=("checkpoint", schemes)),
        f"mean ratio {float(data['ratio'].mean()):.3f}",
    )


EFFICIENCY = Experiment(
    "cost of RoPE and RePo",
    (R7, R7_TIME),
    Needs(without_checkpoints, "needs no checkpoint; was not measured"),
    measure,
    tabulate,
    draw,
    OLMO,
)
