r"""Split one attention logit by writer of the query, writer of the key, and rotary pair.

    logit(i, j) = sum_{c, c', r} contribution_cc'r + soft cap + bias                 exact
    contribution_cc'r = scale (R(z_i) q_c)_r . (R(z_j) k_c')_r
    q_c = Q_i c_i,   k_c' = K_j c'_j,   q_bias = q_i - sum_c q_c = Q_i's constant

The c_i are the outputs of the embedding, the earlier heads and the earlier MLPs, which add up to
the residual stream of token i (`stream`). Q_i maps the stream to the query of the head, K_j to its
key. They consist of linear maps and of norms before and after them (QK-norms too). The scale of
each norm is frozen at its value for the token, so all c_i are divided by the same number and their
parts add up; the effect of a writer on that number is not included. `bias` has the constants of
these maps and norms; constants of earlier layers are in their MLPs. R(z) rotates by the positions
of the pass, also learned ones (`position_writers` splits z). Pairs of frequency 0, or all pairs if
nothing is rotated, are one pair, -1.

The softmax depends only on differences of logits. With `against`, a second key j', contributions
are to logit(i, j) - logit(i, j'), which excludes everything that the query adds for all keys.
(After the paths of Elhage et al. 2021, with frozen norms as in attribution graphs.)

This module knows nothing about values, which attention moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.analysis.batches import make_batch
from repo_interp.analysis.coercion import Prompts, indexed_prompts
from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, select_heads
from repo_interp.measures.labels import described_group
from repo_interp.models.capture import decode
from repo_interp.models.decoder import as_decoder
from repo_interp.models.observing import observing
from repo_interp.plugins.one_head.one_head import explain_logit
from repo_interp.plugins.paths.direct_path import Norm, norm_hook
from repo_interp.plugins.writers.at_means import component_name
from repo_interp.plugins.writers.stream import MLP, Component, Stream
from repo_interp.positions.logits import exact
from repo_interp.tasks import Prompt

MOST = 1 << 27
"""Largest number of contributions: 1 GB."""
TOLERANCE = 1e-3
"""Largest relative error of the sum of the parts."""
BIAS: Component = (-2, MLP)
"""Label of the constants of the maps, next to the components."""
_TEXTS = {
    "contribution": "part of the logit [logits]",
    "frequency": "frequency of a pair [rad/position]",
    "logit": "logit of the query and the key, less that of `against` [logits]",
    "soft_cap": "what the soft cap changes [logits]",
    "bias": "what the scheme adds [logits]",
    "rounding": "logit less the sum of its parts [logits]",
}


@torch.no_grad()
def logit_writers(
    model: nn.Module,
    prompt: Prompts,
    layer: int,
    head: int,
    query: int,
    key: int,
    against: int | None = None,
) -> xr.Dataset:
    """Split one attention logit by writer of the query, writer of the key, and rotary pair.

        found = ri.logit_writers(model, text, layer=5, head=2, query=40, key=20)
        print(found.attrs["finding"])
        found["contribution"].sum("pair").to_series().nlargest(5)

    Args:
        model: Bridge or model, in float32 or float64.
        prompt: One prompt, in any form that `as_prompts` takes.
        layer: Index of the layer.
        head: Index of the head.
        query: Index of the query token.
        key: Index of the key token.
        against: Index of a key whose logit is subtracted; None: nothing is subtracted.

    Returns:
        `contribution [query_writer, key_writer, pair]`, in logits, and `frequency [pair]`. `logit`
        is the sum of contributions, `soft_cap`, `bias` and `rounding`. Writers have the
        coordinates `query_layer`, `query_head`, `key_layer` and `key_head` (head -1: MLP; layer -1:
        embedding, -2: constants). The attribute `finding` is a sentence.

    Raises:
        InputError: The query does not see a key, the weights are in half precision, an earlier
            layer does not add its outputs to one residual stream, or the layer computes queries and
            keys by more than linear maps and norms.
    """
    decoder = as_decoder(model)
    if decoder.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"the weights are in {str(decoder.dtype).removeprefix('torch.')}, whose rounding would "
            "hide parts; load the model in float32"
        )
    # These calls refuse pairs without a logit.
    whole = explain_logit(model, prompt, layer, head, query, key)
    parts = {name: float(whole[name]) for name in ("logit", "soft_cap", "bias")}
    other = None if against is None else explain_logit(model, prompt, layer, head, query, against)
    if other is not None:
        parts = {name: value - float(other[name]) for name, value in parts.items()}
    stream = Stream(decoder, layer)
    writers = [*stream.components, BIAS]
    if len(writers) ** 2 * whole.sizes["component"] > MOST:
        raise InputError(
            f"layer {layer} has {len(writers) - 1} writers before it, whose products would take "
            f"more than {8 * MOST >> 30} GB; name an earlier layer"
        )
    tokens = [query, key] if against is None else [query, key, against]
    inputs, written = _written(stream, indexed_prompts(prompt, decoder.tokenizer), tokens)
    inputs = select_heads(inputs, [head])
    (queries, _), (_, keys), *others = [
        _turned(stream, inputs, head, token, vectors)
        for token, vectors in zip(tokens, written, strict=True)
    ]
    for _, other_keys in others:
        keys = keys - other_keys
    products = torch.einsum("aep,bep->abp", queries, keys) * inputs.logit_scale
    frequencies = whole["frequency"].values
    turns = frequencies != 0
    values = products[..., torch.from_numpy(turns).to(products.device)].cpu().numpy()
    still = products.sum(-1).cpu().numpy() - values.sum(-1)
    if not turns.all():
        values = np.concatenate([values, still[..., None]], axis=-1)
    parts["rounding"] = parts["logit"] - values.sum() - parts["soft_cap"] - parts["bias"]
    if not abs(parts["rounding"]) <= TOLERANCE * (1 + np.abs(values).max()):
        raise _not_linear(stream)
    names = [component_name(one) if one != BIAS else "bias" for one in writers]
    pairs = [*np.flatnonzero(turns), *[-1] * (not turns.all())]
    group = {
        "contribution": (("query_writer", "key_writer", "pair"), values),
        "frequency": (("pair",), np.append(frequencies[turns], [0.0] * (not turns.all()))),
        **parts,
    }
    found = described_group(
        group, _TEXTS, {"query_writer": names, "key_writer": names, "pair": pairs}
    )
    found = found.assign_coords(
        {
            f"{side}_{name}": (f"{side}_writer", [one[place] for one in writers])
            for side in ("query", "key")
            for place, name in enumerate(("layer", "head"))
        }
    )
    found.attrs |= {name: whole.attrs[name] for name in ("layer", "head", "query", "key", "scheme")}
    found.attrs |= {name: whole.attrs[name] for name in ("query_text", "key_text")}
    if other is not None:
        found.attrs |= {"against": against, "against_text": other.attrs["key_text"]}
    found.attrs["finding"] = _finding(found)
    return found


def _written(
    stream: Stream, prompts: Sequence[Prompt], tokens: Sequence[int]
) -> tuple[AttentionInputs, list[Float[Tensor, "component width"]]]:
    """Inputs of the layer on a prompt, and the outputs of every component at the given tokens."""
    decoder, layer, (prompt,) = stream.decoder, stream.layer, prompts
    batch = make_batch([prompt], [0], len(prompt.tokens), decoder.device)
    entered: dict[int, Tensor] = {}
    parts: dict[int, Tensor] = {}
    found: list[AttentionInputs] = []

    def enter(number: int, hidden: Tensor) -> None:
        entered[number] = hidden[0, tokens]

    def wrote(number: int, outputs: Tensor) -> None:
        count = stream.attentions[number].heads
        matrix = stream.matrix(number, outputs.shape[-1]).unflatten(0, (count, -1))
        # [token, head, width]
        heads = outputs[0, tokens].unflatten(-1, (count, -1))
        parts[number] = torch.einsum("thi,hiw->thw", heads, matrix)

    with (
        stream.observed(enter, wrote),
        observing(decoder, batch.valid, torch.arange(1), found.append, [layer], batch.position_ids),
    ):
        decode(decoder, batch.tokens, batch.valid, layer, batch.position_ids, batch.attention_mask)
    if entered[0].ndim != 2:
        raise InputError(
            f"this {decoder.config.model_type} has several residual streams, so the outputs into "
            "one of them are unknown"
        )
    written = [entered[0][:, None]]
    for number in range(layer):
        heads = parts.get(number, entered[0].new_zeros(len(tokens), 0, entered[0].shape[-1]))
        rest = entered[number + 1] - entered[number] - heads.sum(1)
        written += [heads, rest[:, None]]
    return found[0], [*torch.cat(written, dim=1)]


def _turned(
    stream: Stream,
    inputs: AttentionInputs,
    head: int,
    token: int,
    vectors: Float[Tensor, "component width"],
) -> list[Float[Tensor, "writer half pair"]]:
    """Rotated parts of a token's query and key: one per component, then one for constants."""
    plain = vectors.sum(0, keepdim=True)
    with _norms(stream) as norms:
        expected = _run(stream, plain, head)
    with _norms(stream, norms):
        # A zero stream gives the constants of the maps, which are subtracted from every component.
        found = _run(stream, torch.cat([vectors, 0 * plain]), head)
    turned = []
    for name, part, whole in zip(("queries", "keys"), found, expected, strict=True):
        parts = torch.cat([part[:-1] - part[-1:], part[-1:]])
        real = getattr(inputs, name)[0, 0, token]
        for value in (whole[0, 0, 0], parts.sum(0)[0, 0]):
            if not (value - real).norm() <= TOLERANCE * real.norm():
                raise _not_linear(stream)
        z = inputs.positions
        at = replace(
            inputs,
            **{name: parts},
            positions=None
            if z is None
            else z[:, :, [token]].expand(len(parts), *z[0, :, :1].shape),
        )
        turned.append(getattr(at, f"rotated_{name}")[:, 0, 0].double().unflatten(-1, (2, -1)))
    return turned


def _run(
    stream: Stream, vectors: Float[Tensor, "row width"], head: int
) -> list[Float[Tensor, "row 1 1 d_head"]]:
    """Queries and keys of a head, for residual streams of one token."""
    decoder, found = stream.decoder, []
    tokens = torch.zeros((len(vectors), 1), dtype=torch.long, device=decoder.device)

    def enter(block: nn.Module, arguments: tuple, keywords: dict) -> Any:
        layer_input = vectors[:, None].to(arguments[0] if arguments else keywords["hidden_states"])
        if arguments:
            return (layer_input, *arguments[1:]), keywords
        return (), keywords | {"hidden_states": layer_input}

    hook: Any = enter
    with ExitStack() as undo:
        block = stream.blocks[stream.layer]
        undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        prompts = torch.arange(len(vectors))
        valid = torch.ones_like(tokens, dtype=torch.bool)
        undo.enter_context(observing(decoder, valid, prompts, found.append, [stream.layer]))
        decode(decoder, tokens, valid, stream.layer)
    of_head = select_heads(found[0], [head])
    return [of_head.queries, of_head.keys]


Frozen = dict[nn.Module, list[tuple[Tensor, Tensor, Norm]]]


@contextmanager
def _norms(stream: Stream, frozen: Frozen | None = None) -> Iterator[Frozen]:
    """Record the scale of the layer's norms for one vector, or apply a recorded scale to others."""
    noted: Frozen = {}

    def act(module: nn.Module, arguments: tuple, normed: Any) -> Tensor | None:
        norm_input = exact(arguments[0])
        if not isinstance(normed, Tensor) or norm_input.ndim < 3:
            raise _not_linear(stream)
        if frozen is None:
            norm_hook(
                lambda norm: noted.setdefault(module, []).append((norm_input, exact(normed), norm))
            )(module, arguments, normed)
            return None
        calls = frozen[module]
        # In the order of the calls, which is the same in every run.
        before, after, norm = calls[0]
        calls.append(calls.pop(0))
        change = norm_input - before
        if norm.centred:
            change = change - change.mean(-1, keepdim=True)
        return (after + norm.gain * norm.factor[..., None] * change).to(normed.dtype)

    with ExitStack() as undo:
        for module in stream.blocks[stream.layer].modules():
            if "norm" in type(module).__name__.lower():
                undo.callback(module.register_forward_hook(act).remove)
        yield noted


def _not_linear(stream: Stream) -> InputError:
    return InputError(
        f"layer {stream.layer} of this {stream.decoder.config.model_type} ({stream.reader.scheme}) "
        "makes queries and keys of its hidden state by more than norms and linear maps, so no part "
        "of a logit has one writer"
    )


def _finding(found: xr.Dataset) -> str:
    """Name the largest product of two writers, the writers of each side, and the pairs."""
    parts, attrs = found["contribution"], found.attrs
    product = parts.sum("pair")
    one, other = np.unravel_index(int(product.values.argmax()), product.shape)
    names = found["query_writer"].values
    largest = float(product[one, other])
    pairs = parts[one, other].to_series().nlargest(3)
    by_pair = ", ".join(f"{_pair(pair)} {value:+.2f}" for pair, value in pairs.items())

    def sides(side: str) -> str:
        of_side = product.sum(f"{side}_writer").to_series().nlargest(3)
        return ", ".join(f"{name} {value:+.2f}" for name, value in of_side.items())

    def token(side: str) -> str:
        return f"token {attrs[side]} {attrs[f'{side}_text']!r}"

    less = f" less that for {token('against')}" if "against" in attrs else ""
    return (
        f"L{attrs['layer']} H{attrs['head']}'s logit of {token('query')} for {token('key')}{less} is "
        f"{float(found['logit']):.2f}: most of it, {largest:+.2f}, is {names[one]} in the query with "
        f"{names[other]} in the key ({by_pair}); by writer of the query {sides('key')}; of the key "
        f"{sides('query')}"
    )


def _pair(pair: object) -> str:
    return "unrotated" if pair == -1 else f"pair {pair}"
