"""What experiments find, in plain torch over models of transformers: the shortest scripts that give
the same numbers, for `benchmarks.peers`.

They know one family (Llama), one length of prompts and answers at one place; each is a function of
a model and its prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scipy.stats import sem
from scipy.stats import t as student
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

SEQUENCES = 8
"""Sequences of random tokens, repeated once."""
FEWEST = 10
"""Keys, without the first, that a row needs before its fifths are told apart."""


def _maps(model: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    """Attention [layer, prompt, head, row, key], and what else a pass returns."""
    model.set_attn_implementation("eager")
    out = model(tokens, output_attentions=True)
    return torch.stack(out.attentions), out


def _detected(weights: Tensor, tokens: Tensor) -> list[Tensor]:
    """Induction, previous token, duplicate token and sink, by head."""
    same = (tokens[:, :, None] == tokens[:, None]).float().tril(-1)
    before = torch.ones_like(same).tril(-1).triu(-1)
    after = torch.nn.functional.pad(same, (1, -1))
    found = [
        (weights * pairs[:, None]).sum((-1, -2)) / (pairs.sum(-1) > 0).sum(-1)[:, None]
        for pairs in (after, before, same)
    ]
    return [one.mean(1) for one in (*found, weights[..., 0].mean(-1))]


def _place_u(weights: Tensor) -> Tensor:
    """Attention to the ends of random tokens above that to the middle; `weights` of all rows."""
    count = weights.shape[-1]
    rows, keys = torch.arange(FEWEST, (count + 1) // 2)[:, None], torch.arange(count)
    width = rows // 5
    first, last = (keys >= 1) & (keys <= width), (keys > rows - width) & (keys <= rows)
    middle = (keys >= 1) & (keys <= rows) & ~first & ~last
    of_rows = weights[..., FEWEST : (count + 1) // 2, :]
    begin, between, end = (
        ((of_rows * part).sum(-1) * rows[:, 0] / part.sum(-1)).mean(-1).mean(1)
        for part in (first, middle, last)
    )
    return torch.minimum(begin, end) - between


def _content(weights: Tensor) -> Tensor:
    """Share of the variance of a row's logits that distance does not explain."""
    count = weights.shape[-1]
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    seen[:, 0] = seen[:2] = False
    # Logits but for a number by row, which their mean takes away
    logits = weights.double().log().masked_fill(~seen, 0)
    logits = (logits - logits.sum(-1, keepdim=True) / seen.sum(-1)[:, None].clamp_min(1)) * seen
    by_distance = torch.stack([logits.diagonal(-far, -2, -1).sum((1, -1)) for far in range(count)])
    pairs = logits.shape[1] * torch.stack([seen.diagonal(-far).sum() for far in range(count)])
    explained = (by_distance.square() / pairs.clamp_min(1)[:, None, None]).sum(0)
    return 1 - explained / logits.square().sum((1, -1, -2))


def _contribution(model: Any, on_source: Tensor, kept: dict[Any, Tensor], told: Tensor) -> Tensor:
    """What heads move from the source to the logits of the answers, `told`, by the direct path."""
    norm, unembedding = model.model.norm, model.lm_head.weight
    rows = kept["rows"]
    factor = kept["last"][:, rows].pow(2).mean(-1, keepdim=True).add(norm.variance_epsilon).rsqrt()
    directions = (unembedding[told] - unembedding.mean(0)) * norm.weight * factor
    found = []
    for layer, block in enumerate(model.model.layers):
        values = kept[layer].unflatten(-1, (on_source.shape[2], -1)).transpose(1, 2)
        moved = (on_source[layer] @ values).transpose(1, 2)
        back = (directions @ block.self_attn.o_proj.weight).unflatten(-1, moved.shape[-2:])
        found.append((moved * back).sum(-1).mean((0, 1)))
    return torch.stack(found)


@torch.inference_mode()
def head_scores(
    model: Any, prompts: Tensor, source: list[int], answer: list[int], first: int
) -> np.ndarray:
    """Compute what the atlas finds of every head of a Llama.

    Args:
        model: Model of transformers.
        prompts: Token ids [prompt, token].
        source: Tokens that the answer copies.
        answer: Tokens that are generated.
        first: Token before the random ones.

    Returns:
        Scores [layer, head, score]: induction, previous token, duplicate token and sink on random
        tokens; U; the four on prompts; source mass; retrieval; contribution; distance; departure;
        content.
    """
    config, length = model.config, prompts.shape[1]
    half = min(128, (config.max_position_embeddings - 1) // 2)
    alphabet = np.setdiff1d(np.arange(config.vocab_size), [first, config.pad_token_id])
    generator = np.random.default_rng(0)
    drawn = np.stack([generator.choice(alphabet, half, replace=False) for _ in range(SEQUENCES)])
    random = torch.from_numpy(np.hstack([np.full((SEQUENCES, 1), first), drawn, drawn]))
    weights, _ = _maps(model, random)
    scores = [*_detected(weights, random), _place_u(weights)]
    kept: dict[Any, Tensor] = {"rows": torch.tensor(answer) - 1}
    hooks = [
        block.self_attn.v_proj.register_forward_hook(
            lambda module, given, gave, layer=layer: kept.update({layer: gave})
        )
        for layer, block in enumerate(model.model.layers)
    ]
    hooks.append(
        model.model.norm.register_forward_pre_hook(lambda module, given: kept.update(last=given[0]))
    )
    weights, out = _maps(model, prompts)
    for hook in hooks:
        hook.remove()
    scores += _detected(weights, prompts)
    of_answers, told = weights[..., kept["rows"], :], prompts[:, answer]
    on_source = torch.zeros_like(of_answers)
    on_source[..., source] = of_answers[..., source]
    scores.append(on_source.sum(-1).mean((1, -1)))
    strongest = of_answers.argmax(-1)
    in_source = torch.isin(strongest, torch.tensor(source))
    copied = in_source & (
        prompts[torch.arange(len(prompts))[:, None, None], strongest] == told[:, None]
    )
    said = out.logits[:, kept["rows"]].argmax(-1) == told
    # every answer stands in the source
    scores.append((copied & said[:, None]).float().mean((1, -1)))
    scores.append(_contribution(model, on_source, kept, told))
    index = torch.arange(length)
    scores.append((weights * (index[:, None] - index)).sum(-1).mean((1, -1)))
    entropy = -(weights * weights.log().nan_to_num(neginf=0)).sum(-1)
    scores.append(((index + 1).log() - entropy).mean((1, -1)))
    scores.append(_content(weights))
    return torch.stack([score.double() for score in scores], -1).numpy()


# Other positions
# --------------------------------------------------------------------------------------------------


@contextmanager
def _turning(turn: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let `turn` rotate queries and keys in place of transformers."""
    stock, llama.apply_rotary_pos_emb = llama.apply_rotary_pos_emb, turn
    try:
        yield
    finally:
        llama.apply_rotary_pos_emb = stock


def _turned(features: Tensor, places: Tensor, frequencies: Tensor, scale: float = 1.0) -> Tensor:
    angles = (places[..., None] * frequencies).repeat(*[1] * places.ndim, 2)
    return (features * angles.cos() + llama.rotate_half(features) * angles.sin()) * scale


def _log_likelihoods(model: Any, prompts: Tensor, answer: list[int]) -> Tensor:
    """Of the tokens of the answer [prompt, answer]."""
    logits = model(prompts, use_cache=False).logits[:, [place - 1 for place in answer]]
    return logits.log_softmax(-1).gather(-1, prompts[:, answer, None])[..., 0]


def position_derivatives(model: Any, prompts: Tensor, answer: list[int]) -> np.ndarray:
    """Differentiate the log-probability of the answer by all positions of a Llama.

    Args:
        model: Model of transformers.
        prompts: Token ids [prompt, token].
        answer: Tokens that are generated.

    Returns:
        Derivatives [layer, prompt, head, token].
    """
    model.requires_grad_(False)
    places: list[Tensor] = []

    def turn(queries: Tensor, keys: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(queries.shape[2], dtype=torch.float32)
        places.append(index.expand(queries.shape[:3]).clone().requires_grad_())
        frequencies = model.model.rotary_emb.inv_freq
        return _turned(queries, places[-1], frequencies), _turned(keys, places[-1], frequencies)

    with _turning(turn):
        answered = _log_likelihoods(model, prompts, answer).mean(-1).sum()
    return torch.stack(torch.autograd.grad(answered, places)).numpy()


@contextmanager
def _outputs(model: Any) -> Iterator[list[Tensor]]:
    """What heads give to the output projection, layer by layer [prompt, token, head, d_head]."""
    found: list[Tensor] = []
    width = model.model.layers[0].self_attn.head_dim
    hooks = [
        block.self_attn.o_proj.register_forward_pre_hook(
            lambda module, given: found.append(given[0].unflatten(-1, (-1, width)))
        )
        for block in model.model.layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def tolerance(
    model: Any,
    prompts: Tensor,
    answer: list[int],
    points: Sequence[tuple[str, float, int]],
    draw: Mapping[str, Callable[..., np.ndarray]],
) -> np.ndarray:
    """Disturb the positions of a Llama, as `perturbation` does.

    Args:
        model: Model of transformers.
        prompts: Token ids [prompt, token].
        answer: Tokens that are generated.
        points: Kind, share and reach.
        draw: By kind, which tokens move: the draws are part of what is measured.

    Returns:
        Log perplexity, its rise, and the change of every head's outputs [point, number].
    """
    count, layers = prompts.shape[1], len(model.model.layers)
    movable = np.setdiff1d(np.arange(count), [0, *answer])
    index, frequencies = torch.arange(count), model.model.rotary_emb.inv_freq
    with _outputs(model) as found:
        before = _log_likelihoods(model, prompts, answer).double()
    plain, rows = torch.stack(found).double(), []
    for kind, gamma, reach in points:
        numbers = [0] if kind == "text_order" else range(layers)
        drawn = np.array(
            [
                [
                    draw[kind](
                        np.random.default_rng([0, zlib.crc32(kind.encode()), row, layer, reach]),
                        *(movable, count, gamma, reach),
                    )
                    for row in range(len(prompts))
                ]
                for layer in numbers
            ]
        )
        moves, asked, compared = torch.from_numpy(drawn), prompts, torch.ones(prompts.shape)
        counted = torch.ones(before.shape, dtype=torch.bool)
        if kind == "text_order":
            asked, compared = prompts.gather(1, moves[0]), (moves[0] == index).float()
            counted = (compared[:, answer] * compared[:, [t - 1 for t in answer]]).bool()
        here = iter(moves)

        def turn(queries: Tensor, keys: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
            places = index[None, None]
            if kind == "feature_order":  # noqa: B023 - called within this round
                keys = keys.gather(2, next(here)[:, None, :, None].expand_as(keys))  # noqa: B023
            if kind == "position_offset":  # noqa: B023
                places = places + next(here)[:, None]  # noqa: B023
            stay = index[None, None]
            return _turned(queries, stay, frequencies), _turned(keys, places, frequencies)

        with _outputs(model) as found, _turning(turn):
            after = _log_likelihoods(model, asked, answer).double()
        squares = [
            (some.square().sum(-1) * compared[..., None]).sum((1, 2))
            for some in (torch.stack(found).double() - plain, plain)
        ]
        rows.append(
            [
                -after.mean(),
                (before - after)[counted].mean(),
                *(squares[0] / squares[1]).sqrt().flatten(),
            ]
        )
    return np.array(rows)


# Learned positions
# --------------------------------------------------------------------------------------------------


def _frozen(positions: Tensor) -> Tensor:
    return positions.mean(-1, keepdim=True).expand_as(positions)


def _index(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[-1], dtype=positions.dtype).expand_as(positions)


def _line(positions: Tensor) -> Tensor:
    index = _index(positions).double() - (positions.shape[-1] - 1) / 2
    slope = (index * positions).sum(-1, keepdim=True) / index.square().sum(-1, keepdim=True)
    return (positions.mean(-1, keepdim=True) + slope * index).to(positions.dtype)


def _permuted(positions: Tensor) -> Tensor:
    """By the number of the prompt."""
    orders = [
        np.random.default_rng([0, row]).permutation(positions.shape[-1])
        for row in range(len(positions))
    ]
    return positions.gather(-1, torch.from_numpy(np.array(orders))[:, None].expand_as(positions))


CASES = {"all heads": _frozen, "all heads, straight lines": _line, "all heads, token index": _index}


@torch.inference_mode()
def use_of_kinds(
    model: Any, prompts: Tensor, sets: Mapping[str, Sequence[Sequence[int]]]
) -> np.ndarray:
    """Change the positions of kinds of layers, whose heads share one position, and predict again.

    Args:
        model: Model of transformers with the modules of RePo in it.
        prompts: Token ids [prompt, token].
        sets: By kind, its layers and those of its controls.

    Returns:
        Changes of -log p by kind: of the kind, of controls and the difference; mean and ends of the
        95 % interval over prompts [kind, of, bound]; NaN where there is none.
    """

    def losses() -> Tensor:
        logits = model(prompts, use_cache=False).logits[:, :-1].flatten(0, 1)
        lost = torch.nn.functional.cross_entropy(logits, prompts[:, 1:].flatten(), reduction="none")
        return lost.reshape(len(prompts), -1).double()

    def changed(layers: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
        hooks = [
            model.model.layers[layer].self_attn.assigner.register_forward_hook(
                lambda module, given, gave: change(gave)
            )
            for layer in layers
        ]
        lost = losses()
        for hook in hooks:
            hook.remove()
        return lost - clean

    clean, found = losses(), []
    for kind, (own, *others) in sets.items():
        of_kind = changed(own, CASES.get(kind, _frozen))
        controls = torch.full_like(clean, torch.nan)
        if others:
            controls = torch.stack([changed(other, _frozen) for other in others]).mean(0)
        for change in (of_kind, controls, of_kind - controls):
            by_prompt = change.mean(-1).numpy()
            reach = student.ppf(0.975, len(prompts) - 1) * sem(by_prompt)
            found.append(by_prompt.mean() + np.array([0, -reach, reach]))
    return np.array(found).reshape(len(sets), 3, 3)


@torch.inference_mode()
def effects(
    model: Any, prompts: Tensor, answer: list[int], choose: Callable[..., list[list[Any]]]
) -> np.ndarray:
    """Change the positions of heads, layers and sets of heads of a Llama, and read the answer.

    Args:
        model: Model of transformers with the modules of RePo in it.
        prompts: Token ids [prompt, token].
        answer: Tokens that are generated.
        choose: Takes the effects of heads, all heads, and how many are needed most; returns these
            and as many others: the draws are part of what is measured.

    Returns:
        Mean change of the log-probability of the answer, of every head, layer, needed set and its
        controls [kind, number].
    """
    count, heads = len(prompts), model.config.num_attention_heads
    blocks = model.model.layers
    every = [(layer, head) for layer in range(len(blocks)) for head in range(heads)]

    def answered(sets: Sequence[Any], change: Callable[[Tensor], Tensor]) -> np.ndarray:
        """With every set changed, side by side [set]."""

        def hook(layer: int) -> Callable[..., Tensor]:
            def edit(module: Any, given: Any, gave: Tensor) -> Tensor:
                rows = gave.unflatten(0, (len(sets), count)).expand(-1, -1, heads, -1).clone()
                for row, some in zip(rows, sets, strict=True):
                    of_layer = [head for at, head in some if at == layer]
                    row[:, of_layer] = change(row)[:, of_layer]
                return rows.flatten(0, 1)

            return edit

        hooks = [
            block.self_attn.assigner.register_forward_hook(hook(layer))
            for layer, block in enumerate(blocks)
        ]
        told = _log_likelihoods(model, prompts.repeat(len(sets), 1), answer).double().mean(-1)
        for one in hooks:
            one.remove()
        return told.reshape(len(sets), count).numpy()

    clean, found = answered([[]], _frozen)[0], []
    for change in (_index, _frozen, _permuted):
        single, whole = np.empty(0), []
        for layer in range(len(blocks)):
            own = [head for head in every if head[0] == layer]
            *alone, together = (answered([*([head] for head in own), own], change) - clean).mean(1)
            single, whole = np.append(single, alone), [*whole, together]
        sets = choose(single.reshape(-1, heads), every, heads)
        found.append([*single, *whole, *(answered(sets, change) - clean).mean(1)])
    return np.array(found)


# Longer prompts
# --------------------------------------------------------------------------------------------------

GLOBAL, FOLDS, SHRINKAGE = 10, 8, 1e-4
"""Of the experiment: tokens that LM-Infinite always shows, groups of prompts, share of the variance."""


def _lm_infinite(length: int, frequencies: Tensor, plain: list[tuple[Tensor, Tensor]]) -> Any:
    """Attention with LM-Infinite's mask and capped distance, over `plain`: before rotation."""

    def attend(
        module: Any, queries: Tensor, keys: Tensor, values: Tensor, *given: Any, **named: Any
    ) -> tuple[Tensor, None]:
        raw, of_keys = plain.pop()
        index = torch.arange(queries.shape[2])
        far, first = index[:, None] - index, index < GLOBAL
        capped = _turned(raw, torch.full_like(index, length)[None, None], frequencies) @ of_keys.mT
        scores = torch.where((far > length) & first, capped, queries @ keys.mT) * module.scaling
        seen = (far >= 0) & ((far < length) | first)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ values).transpose(1, 2), None

    return attend


def _divergence(of: list[Tensor], to: list[Tensor]) -> Tensor:
    """KL of the Gaussians of sums over 1, x and x x^T; mean over heads."""
    means, covariances = [], []
    for count, total, square in (of, to):
        means.append(total / count)
        second = square / count[..., None]
        covariances.append(second - means[-1][..., None] * means[-1][..., None, :])
    level = SHRINKAGE * covariances[1].diagonal(0, -2, -1).mean(-1)[..., None, None]
    gaussians = [
        MultivariateNormal(mean, covariance + level * torch.eye(mean.shape[-1]).double())
        for mean, covariance in zip(means, covariances, strict=True)
    ]
    return kl_divergence(*gaussians).mean(-1)


def _left_out(sums: Tensor) -> Tensor:
    """Sums of all folds, then without each; folds are axis 1."""
    whole = sums.sum(1, keepdim=True)
    return torch.cat([whole, whole - sums], 1)


@torch.inference_mode()
def divergences(
    model: Any, prompts: Mapping[int, Tensor], answers: Mapping[int, list[int]], judged: int
) -> np.ndarray:
    """Extend a Llama to longer prompts by several methods, as `extrapolation` does.

    Args:
        model: Model of transformers.
        prompts: Token ids [prompt, token] by length; the shortest is the training length.
        answers: Tokens that are generated, by length.
        judged: Last tokens whose outputs are compared.

    Returns:
        Divergence from the training length above noise by layer, the ends of the interval of its
        mean over layers, and the log perplexity [method, length, number].
    """
    rotary, stated = model.model.rotary_emb, model.config.to_dict()
    stock, training = rotary.inv_freq, min(prompts)

    def sums(method: str, length: int, rows: Tensor) -> tuple[list[Tensor], float]:
        factor, plain = length / training, list[tuple[Tensor, Tensor]]()
        rotary.inv_freq, rotary.attention_scaling = stock, 1.0
        if method == "interpolation":
            rotary.inv_freq = stock / factor
        if method == "yarn" and factor > 1:
            yarn = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": training,
            }
            config = LlamaConfig(**(stated | {"rope_parameters": stated["rope_parameters"] | yarn}))
            rotary.inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        turn: Any = llama.apply_rotary_pos_emb

        def kept(queries: Tensor, keys: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
            plain.append((queries, keys))
            return turn(queries, keys, *tables)

        capped = method == "lm_infinite"
        ALL_ATTENTION_FUNCTIONS["capped"] = _lm_infinite(training, stock, plain)
        model.set_attn_implementation("capped" if capped else "sdpa")
        with _outputs(model) as found, _turning(kept if capped else turn):
            answered = _log_likelihoods(model, rows, answers[length])
        last = torch.stack(found)[:, :, -judged:].double().transpose(2, 3)
        folds = torch.arange(len(rows)) % FOLDS
        total, square = (
            torch.zeros(len(last), FOLDS, *one.shape[2:]).double().index_add(1, folds, one)
            for one in (last.sum(3), last.mT @ last)
        )
        count = folds.bincount()[None, :, None, None].double() * last.shape[3]
        told = [place >= length - judged for place in answers[length]]
        perplexity = -float(answered.double()[:, told].mean())
        return [_left_out(one) for one in (count, total, square)], perplexity

    normal, _ = sums("plain", training, prompts[training][::2])
    found, noise = list[list[float]](), np.zeros(0)
    for method in ("plain", "lm_infinite", "interpolation", "yarn"):
        for length, rows in prompts.items():
            judged_sums, perplexity = sums(method, length, rows[1::2])
            divergence = _divergence(judged_sums, normal).numpy()
            noise = divergence if not found else noise  # the first: plain, at the training length
            above, *_ = (divergence - noise).T
            spread = sem((divergence - noise)[:, 1:].mean(0))
            width = student.ppf(0.975, FOLDS - 1) * (FOLDS - 1) * spread
            found.append([*above, above.mean() - width, above.mean() + width, perplexity])
    rotary.inv_freq, rotary.attention_scaling = stock, 1.0
    model.set_attn_implementation("sdpa")
    return np.array(found)
