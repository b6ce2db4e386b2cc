"""Findings on heads and distance: `stability`, `symbols`, `octaves`, and `activations` of sinks.

    finding of `symbols`      score > .8 and above its null, if logits vary by 1 nat over keys with
                              a tenth of the attention, mean over prompts
    finding of `stability`    stability more than .2 below the stability with random phases
    finding of `octaves`      a token except the first that receives a tenth of a layer's attention,
                              and four times even attention
    finding of `activations`  a massive entry of the first prompt

Figures and tables follow from the axes of the groups. This module knows nothing about how they were
measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    Chart,
    Finding,
    Heads,
    Lines,
    counted,
    group,
    heads_named,
    heads_where,
    layers_named,
    over_prompts,
    percent,
    strongest_head,
    with_run_axis,
)
from repo_interp.plots.marks.reading import described_prompts, prompt_tokens
from repo_interp.plots.view import View

HIGH_SCORE = 0.8
"""Least correlation for a head that follows only positions, or only contents."""
VARYING = 1.0
"""Least standard deviation of logits for a meaningful correlation, in nats. Logits of random
weights correlate too, but are nearly equal.
"""
READ = 0.1
"""Least attention to the keys of a head that follows positions or contents."""
LESS_STABLE = 0.2
"""Least difference between the stability with random phases and the head's stability."""
SINK_MASS = 0.1
"""Least attention to a sink."""
SINK_RATIO = 4.0
"""Least attention to a sink, relative to even attention."""
FEW_QUERIES = 1 / 16
"""Least number of queries of a drawn mean, as a share of the largest number of queries."""


def _of_symbols(run: xr.DataTree) -> Iterator[Finding]:
    """Find heads whose logits follow only positions, and count heads that follow only contents."""
    dataset = group(run, "symbols")
    null = over_prompts(dataset["null_score"])
    reads = (over_prompts(dataset["logit_spread"]) >= VARYING) & (
        over_prompts(dataset["attention_share"]) >= READ
    )
    for name, follows in (
        ("position_score", "hardly change when earlier keys change places"),
        ("symbol_score", "move with the keys when these change places"),
    ):
        score = over_prompts(dataset[name])
        found = (score > HIGH_SCORE) & (score > null) & reads
        if heads := heads_where(found):
            *best, size = strongest_head(score.where(found))
            yield Finding(
                f"In {len(heads)} of {int(score.notnull().sum())} heads the logits {follows}: "
                f"{heads_named(heads, per_layer=dataset.sizes['head'])} (up to r = {size:.2f})",
                f"a correlation above {HIGH_SCORE:g}, of logits that vary by at least {VARYING:g} nat "
                f"over keys that get at least {percent(READ)} of the attention; 95 % of unrelated "
                f"permutations stay below {float(null.max()):.2f}",
                0.5,
                "symbols",
                *best,
                variable=name,
            )


def _of_stability(run: xr.DataTree) -> Iterator[Finding]:
    """Find heads whose preferences change with distance more than with random phases."""
    dataset = group(run, "stability")
    stable = over_prompts(dataset["semantic_stability"])
    random = over_prompts(dataset["random_stability"])
    found = random - stable > LESS_STABLE
    if heads := heads_where(found):
        *worst, _ = strongest_head((random - stable).where(found))
        # Stability is the share of distances that keep the preference.
        share = 1 - float(stable.sel(layer=worst[0], head=worst[1]))
        yield Finding(
            f"In {len(heads)} of {int(stable.notnull().sum())} heads the preferred one of two keys changes "
            f"with distance: in L{worst[0]} H{worst[1]} at {percent(share)} of the distances",
            "the share of distances at which the preferred key stays the same is below that with "
            f"random phases by {LESS_STABLE:g} or more",
            0.4,
            "stability",
            *worst,
            variable="semantic_stability",
        )


def _of_octaves(run: xr.DataTree) -> Iterator[Finding]:
    """Find tokens of the first prompt, except the first, with much of a layer's attention."""
    # Sink tokens are token indices, which cannot be averaged over prompts.
    dataset = group(run, "octaves").isel(prompt=0)
    mass, even = dataset["sink_mass"].mean("head"), dataset["sink_uniform"]
    is_sink = ((mass > SINK_MASS) & (mass > SINK_RATIO * even)).values
    if not is_sink.any():
        return
    tokens = dataset["sink_token"].values.astype(int)
    prompts = described_prompts(run)
    number = int(dataset["prompt"])
    texts = None if prompts is None else prompt_tokens(prompts, number).texts
    layers = dataset["layer"].values
    # A token may be the sink of several layers; it is listed once, with its text.
    named = {
        token: f"token {token}" + ("" if texts is None else f" ({texts[token]!r})")
        for token in dict.fromkeys(tokens[is_sink].tolist())
    }
    where = [
        f"{text} in {layers_named(layers[is_sink & (tokens == token)].tolist())}"
        for token, text in named.items()
    ]
    # In other layers, a token that is not a sink by `SINK_RATIO` may receive more attention.
    largest = int(np.where(is_sink, mass.values, 0).argmax())
    token, layer = int(tokens[largest]), int(layers[largest])
    share = percent(float(mass.values[largest]))
    kinds = (
        "is a second sink"
        if len(named) == 1
        else f"and {counted(len(named) - 1, 'other')} are sinks"
    )
    which = "it" if len(named) == 1 else f"token {token}"
    sentence = (
        f"T{named[token][1:]} {kinds}, beside the first token: {which} draws {share} of later tokens' "
        f"attention in L{layer}"
    )
    yield Finding(
        sentence,
        f"prompt {number}, mean over heads: {', '.join(where)}; even attention would give "
        f"{percent(float(even.values[largest]))} in L{layer}; "
        f"a sink gets more than {percent(SINK_MASS)} of a layer's attention and more than "
        f"{SINK_RATIO:g} times even attention; first tokens of documents are left out",
        0.55,
        "octaves",
        layer,
        prompt=number,
        token=token,
        variable="sink_mass",
    )


def _charts_of_octaves(run: xr.DataTree) -> Iterator[Chart]:
    """Chart attention by distance minus even attention, maps of heads, and attention to tokens."""
    dataset = group(run, "octaves")
    # Higher octaves have more tokens, so even attention rises with the octave. The difference shows
    # where heads attend; two separate lines would overlap for heads without a preference.
    beyond = over_prompts(dataset["mass"] - dataset["uniform"]).rename("attention")
    named = {"long_name": "attention by distance, less even attention", "level": 0.0}
    lines = with_run_axis(run, beyond.assign_attrs(named))
    yield Lines(
        *lines,
        *("octave", None, "layer"),
        name="attention_by_octave",
        caption="Share of attention at distances from 1, 2, 4, ... tokens on, less the share that even "
        "attention would give them; 0: as even attention, above: more. Without the first token.",
    )
    for name in ("first_token", "own_token", "sink_mass"):
        values = dataset[name]
        mean = over_prompts(values).transpose("layer", "head").assign_attrs(values.attrs)
        yield Heads(mean, prompts=values, name=f"octaves_{name}")
    if "received" in dataset and bool(dataset["received"].notnull().any()):
        received = received_from_many(dataset).rename("attention")
        yield Lines(
            *with_run_axis(run, received),
            *("token", None, "layer"),
            name="attention_received",
            caption="Attention that each token of the first prompt receives, mean over the later tokens "
            "that see it, and over heads. Tokens that fewer than a sixteenth as many see as the "
            "first one are left out: the last ones see each other alone.",
        )


def received_from_many(dataset: xr.Dataset) -> xr.DataArray:
    """Mask the tokens whose received attention is a mean over few queries.

    Args:
        dataset: Group `octaves` of a run.

    Returns:
        `received` [layer, token], NaN for tokens that fewer queries see than `FEW_QUERIES` times
        the largest number of queries that see a token of the layer.
    """
    received = dataset["received"]
    if "received_queries" not in dataset:  # missing in older runs
        return received
    queries = dataset["received_queries"]
    return received.where(queries >= FEW_QUERIES * queries.max("token"))


def _of_activations(run: xr.DataTree) -> Iterator[Finding]:
    """Report the largest massive entry of the first prompt, and whether the sink has it."""
    dataset = group(run, "activations").isel(prompt=0)
    layers = dataset["layer"].values[dataset["massive"].values > 0]
    if len(layers):
        # idxmax returns the layer's label, not its place.
        layer = int(dataset["largest"].sel(layer=layers).idxmax())
        # Plain numbers, for the format codes below.
        one = {name: values.item() for name, values in dataset.sel(layer=layer)[_OF_LAYER].items()}
        prompt, token = int(dataset["prompt"]), one["largest_token"]
        is_sink = one["sink_token"] == token
        sink = "also" if is_sink else f"not (token {one['sink_token']} is)"
        yield Finding(
            f"Massive activations enter {len(layers)} of {dataset.sizes['layer']} layers: entry "
            f"{one['largest_dimension']} of token {token} is {one['largest']:.0f} in L{layer}, the median "
            f"{one['median']:.2g}",
            f"prompt {prompt}, L{layers[0]} to L{layers[-1]}; that token is {sink} the one with most "
            "attention; massive is above 100 and above 1000 times the median",
            0.5,
            "activations",
            layer,
            prompt=prompt,
            token=token,
            variable="largest",
        )


_OF_LAYER = ["largest", "median", "largest_token", "largest_dimension", "sink_token"]


def _charts_of_activations(run: xr.DataTree) -> Iterator[Chart]:
    """Chart the largest and the median entry, and the sink's largest entry, by layer."""
    dataset, names = group(run, "activations"), ["largest", "sink_largest", "median"]
    values = xr.concat([dataset[name] for name in names], "entry")
    values = values.assign_coords(entry=["largest", "largest of the sink", "median"])
    values = values.assign_attrs(
        long_name="size of an entry of the residual stream", units="1", scale="logarithmic"
    )
    yield Lines(
        *with_run_axis(run, over_prompts(values).rename("size")),
        *("layer", "entry"),
        name="massive_activations",
        caption="Size of the entries of the residual stream that enter each layer: the largest of all "
        "tokens, the largest of the token with most attention, and the median.",
    )


STABILITY = View(
    "stability",
    "Preferences and distance",
    "How often a query's preference between two keys survives another distance, and how much a "
    "logit changes per position (Wu et al. 2026), beside random phases.",
    findings=_of_stability,
    compared=("semantic_stability", "positional_sensitivity", "high_share"),
)
SYMBOLS = View(
    "symbols",
    "Positions or symbols",
    "Whether a head's logits stay with the places of keys, or move with their contents, when keys "
    "change places (after Urrutia et al. 2025). 1: exactly so.",
    findings=_of_symbols,
    compared=("position_score", "symbol_score"),
)
OCTAVES = View(
    "octaves",
    "How far back heads look",
    "Attention by distance in octaves (1, 2 to 3, 4 to 7, ... tokens back), beside even attention, "
    "and how much of it each token receives from later ones.",
    _charts_of_octaves,
    findings=_of_octaves,
    compared=("mass", "first_token", "sink_mass"),
    not_averaged=("sink_token", "sink_uniform", "mass", "uniform", "received"),
)
ACTIVATIONS = View(
    "activations",
    "Massive activations",
    "Entries of the hidden states far beyond all others (Sun et al. 2024), and whether the token "
    "with most attention has them.",
    _charts_of_activations,
    findings=_of_activations,
    compared=("largest", "massive", "sink_largest"),
    not_averaged=("largest_token", "largest_dimension", "sink_token"),
)
