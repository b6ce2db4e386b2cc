"""Figures beside HoPE's claims: norms of rotary pairs, the components of one pair of tokens, turns
by learned positions.

    norms    of the pairs of queries and keys, by component, layer and head: which frequencies heads use
    pair     components of the logit between the last token and the one half of L before it
    turns    how far learned positions turn each component, theta_r |z_j - z_i|, over pairs of tokens

Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import xarray as xr

from position_papers.hope import replicates
from position_papers.hope.component_figures import pair_of_tokens
from position_papers.hope.replicates import Sampling, bands, has_rope_alone, is_analysed
from position_papers.hope.wording import capped_caption, named_bands
from position_papers.kit import Cache, Drawing, Experiment, Needs, Subject, each
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.rotary_components import pair_components
from repo_interp.measures.labels import of_layer, with_attrs
from repo_interp.measures.statistics import Measure
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.models.load import load
from repo_interp.plots.views.components import turns_grid
from repo_interp.plugins.rotation.rotation import Rotation
from repo_interp.plugins.rotation.view import norms_grid

NORM_SEQUENCES, LONG_NORM_SEQUENCES = 8, 2
"""Most sequences that norms are taken over, and most long ones: they hardly differ between
sequences.
"""


def components_of_pair(bridge: Any, tokens: Sequence[int], query: int, key: int) -> xr.DataArray:
    """Components [layer, head, component] of the logit between the tokens numbered `query` and
    `key`, in units of q . k.

    Raises InputError where one of them is not there, or the key comes after the query.
    """
    decoder = as_decoder(bridge)
    if not 0 <= key <= query < len(tokens):
        raise InputError(
            f"a pair needs 0 <= key <= query < {len(tokens)}, not key {key} and query {query}"
        )
    by_layer: list[xr.DataArray] = []

    def receive(inputs: AttentionInputs) -> None:
        by_layer.append(
            of_layer(inputs, ("layer", "head", "component"), pair_components(inputs, query, key)[0])
        )

    batch = torch.tensor([tokens], device=decoder.device)
    capture(decoder, batch, torch.ones_like(batch, dtype=torch.bool), torch.tensor([0]), receive)
    components = xr.concat(by_layer, dim="layer", join="exact", coords="minimal", compat="override")
    return with_attrs(components, "component of the logit of a pair", "q·k")


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> xr.DataTree:
    """What was measured "within" L; with RoPE alone also "norms" and the logit of a "pair"; with
    learned positions "turns".
    """
    (subject,) = subjects
    data = replicates.within(subject, options, cache)
    nodes = {"within": data}
    if has_rope_alone(subject):
        length, count = data.attrs["length"], _sequences_of_norms(data)
        nodes["norms"] = subject.measured(
            cache, _norms, options, length, count, length=length, sequences=count
        )
        nodes["pair"] = subject.measured(cache, _pair, options, length, length=length)
    if subject.learned:
        nodes["turns"] = data.sel(weights="trained").isel(layer=list(subject.learned))
    return xr.DataTree.from_dict(nodes)


def draw(tree: xr.DataTree) -> Iterator[Drawing]:
    """The figures that the checkpoint allows."""
    data = tree["within"].to_dataset()
    name, length, band = data.attrs["checkpoint"], data.attrs["length"], bands(data)
    if "norms" in tree:
        norms = tree["norms"].to_dataset().drop_attrs(deep=False)
        caption = (
            f"Mean norm of the rotary pairs of queries and keys of {name} by component and head, "
            f"on {_sequences_of_norms(data)} sequences of random tokens. {named_bands(band, data)}"
        )
        yield Drawing(
            f"norms_{name}", partial(norms_grid, norms), caption, norms.assign(band.data_vars)
        )
    if "pair" in tree:
        query, key = _query_and_key(length)
        of_heads = tree["pair"].to_dataset()["logit_of_head"]
        logit = with_attrs(
            of_heads.mean(("layer", "head")),
            "component of the logit of a pair, mean over heads",
            "q·k",
        )
        caption = (
            f"Components of {name}'s logit between query {query} and key {key} of one "
            "sequence of random tokens, mean over layers and "
            f"heads, and their sum from the fastest on. {named_bands(band, data)}"
        )
        chart = partial(
            pair_of_tokens, band.assign(logit=logit), f"{name}: token {query} to token {key}"
        )
        yield Drawing(
            f"pair_{name}", chart, caption, band.assign(logit=logit, logit_of_head=of_heads)
        )
    if "turns" in tree:
        turns = tree["turns"].to_dataset()
        share = turns["turn_share"].mean(("repeat", "layer", "head"))
        share = with_attrs(share, "share of pairs by the angle that they turn", "1")
        drawn = bands(turns).assign(
            turn_share=share, turn_upper=turns["turn_upper"].isel(repeat=0, drop=True)
        )
        caption = (
            f"Angles by which the learned positions of {name} turn each component, over the pairs "
            f"of {data.attrs['sequences']} sequences of {length} random tokens, mean over the "
            f"heads that learn positions.{capped_caption(data)}"
        )
        yield Drawing(
            f"turns_{name}",
            partial(
                turns_grid, turns[["turn_share"]].mean("repeat"), turns["layer"].values.tolist()
            ),
            caption,
            drawn,
        )


ROTARY_PAIRS = Experiment(
    "rotary_pairs",
    (),
    Needs(
        each(
            lambda subject: (
                is_analysed(subject) and (has_rope_alone(subject) or bool(subject.learned))
            )
        ),
        "no checkpoint with RoPE alone or learned positions was given",
        ("language/rope", "language/repo"),
    ),
    measure,
    lambda tree: (),
    draw,
)


def _norms(subject: Subject, options: Sampling, length: int, count: int) -> xr.Dataset:
    bridge = load(subject.path, options.device)
    measures: list[Measure] = [Rotation(length)]  # pyright: ignore[reportAssignmentType]
    run = analyze(
        bridge, list(replicates.random_prompts(bridge, length, count, options.seed)), measures
    )
    return run["rotation"].to_dataset()[["query_norm", "key_norm"]]


def _pair(subject: Subject, options: Sampling, length: int) -> xr.Dataset:
    bridge = load(subject.path, options.device)
    prompt = next(replicates.random_prompts(bridge, length, 1, options.seed))
    return components_of_pair(bridge, prompt.tokens, *_query_and_key(length)).to_dataset(
        name="logit_of_head"
    )


def _sequences_of_norms(data: xr.Dataset) -> int:
    few = LONG_NORM_SEQUENCES if data.attrs["length"] > replicates.LONG else NORM_SEQUENCES
    return min(few, data.attrs["sequences"])


def _query_and_key(length: int) -> tuple[int, int]:
    """The last token of a sequence, and the one half of it before."""
    return length - 1, length // 2 - 1
