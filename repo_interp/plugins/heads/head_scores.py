"""The scores of every head of one model: on random tokens that are repeated once, and on prompts.

    random tokens   <first token> r r            previous, duplicate, induction, sink; where in the
                                                 context attention goes
    prompts         as they are                  the same; distances attended; departure from equal
                                                 weights; share of content; patterns and range of
                                                 positions, heads that share them, whether copies
                                                 have the positions of their sources
    answers         the rows that produce them   mass on the source, retrieval, contribution

The source of an answer is the span `needle`; where a prompt lacks one, the token that its attribute
`source` names for each generated one. Retrieval (Wu et al. 2024), top-k copy, averaged over
prompts:

    R_h = share of the generated t that stand in the source for which the model says t, and one of
    h's k strongest keys is that t in it

Wu et al. divide by the tokens of the whole needle, all of which their answers repeat. The model
says t where t is its most likely token after the reference before it, which is greedy generation up
to the first wrong token. `plugins.paths.direct_path` defines the contribution; a layer without a direct
path has none (NaN).

Rows of attention are computed in parts of at most `CELLS` weights, and of a long prompt `rows` of
them, the middles of equal parts; no map of a head is kept. Knows nothing about names and thresholds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, weights_of
from repo_interp.measures.kernels.mirror import mirror, mirror_score
from repo_interp.measures.kernels.samples import middles
from repo_interp.measures.patterns import PATTERNS, chunk_patterns
from repo_interp.measures.positions import position_range
from repo_interp.models.capture import decode, next_token_logits, observing
from repo_interp.models.decoder import Decoder
from repo_interp.plugins.heads.head_patterns import (
    ContentSums,
    departure_sums,
    detection_rows,
    detection_sums,
    distance_sums,
    place_sums,
    position_distance_sums,
)
from repo_interp.plugins.paths.direct_path import DirectPath, direct_path
from repo_interp.positions.rotary import expand_heads
from repo_interp.tasks.prompt import Prompt

# 16 MB in float32, so that a long prompt needs no map of its heads
CELLS = 2**22
"""Attention weights that exist at a time, of one batch and layer."""
ON_PROMPTS = "_on_prompts"
"""Ends the names of scores on prompts that are measured on random tokens too."""

_DETECTED = {
    "previous_token": "previous token: attention to it",
    "duplicate_token": "duplicate token: attention to earlier copies, where there are some",
    "induction": "induction: attention to tokens after earlier copies, where there are some",
    "sink": "sink: attention to the first token",
}
SCORES = {
    **{name: f"{text}, on random tokens" for name, text in _DETECTED.items()},
    "place_u": (
        "positional U: attention to both ends of random tokens above that to the middle; 1: "
        "equal weights"
    ),
    "source_mass": (
        "source: attention to the answer's source, from the rows that produce the answer"
    ),
    "retrieval": (
        "retrieval: share of the answer said while the strongest key is that token in the source"
    ),
    "contribution": (
        "contribution: what the head moves from the source adds to the answer's "
        "logit, directly [nat]"
    ),
    "mirror": (
        "mirror: how much nearer a copy's position is to its source's than to other places'; "
        "1: the same"
    ),
    "distance": "mean attended distance [tokens]",
    "position_distance": "mean attended distance in positions [positions]",
    "departure": (
        "departure: attention's distance from equal weights, ln(keys seen) - entropy [nat]"
    ),
    "content": "content: share of the variance of a row's logits that distance does not explain",
    "constant": "share of chunks of prompts whose positions are constant",
    "mono": "share of chunks of prompts whose positions are mono",
    "hybrid": "share of chunks of prompts whose positions are hybrid",
    "position_range": "largest minus smallest position of a prompt [positions]",
    "heads_per_map": "heads that read the positions of one f_phi; 1: each has its own",
    **{f"{name}{ON_PROMPTS}": f"{text}, on prompts" for name, text in _DETECTED.items()},
}
"""Long name of every score, with its units."""
ON_RANDOM = frozenset({*_DETECTED, "place_u"})
"""Scores on random tokens; all others are on prompts."""
OF_ANSWERS = frozenset({"source_mass", "retrieval", "contribution"})
"""Scores of the rows that produce an answer: these rows alone are computed for them."""
_DETECTED_ON_PROMPTS = frozenset(f"{name}{ON_PROMPTS}" for name in _DETECTED)
_OF_ROWS = _DETECTED_ON_PROMPTS | {"distance", "position_distance", "departure", "content"}
"""Scores of all rows of a prompt."""
_OF_POSITIONS = SCORES.keys() - ON_RANDOM - OF_ANSWERS - _OF_ROWS


@dataclass(frozen=True)
class Answers:
    """The generated tokens of a prompt, and the tokens that each is taken from."""

    rows: Int[Tensor, "answer"]
    """The rows that produce them: one earlier."""
    tokens: Int[Tensor, "answer"]
    source: Float[Tensor, "answer key"]
    """1 where a token of the prompt belongs to the source."""
    same: Float[Tensor, "answer key"]
    """1 where, besides, it is the answer's token itself."""


def repeated_tokens(
    sequences: int, half: int, vocabulary: int, special: Sequence[int], first: int | None, seed: int
) -> Int[np.ndarray, "sequence token"]:
    """Draw random tokens and repeat them once.

    Args:
        sequences: Number of sequences.
        half: Random tokens before the repetition.
        vocabulary: Number of token ids.
        special: Token ids that are not drawn.
        first: Token before them; None: none.
        seed: Seed of the draws.

    Returns:
        Token ids, all different within a half where the vocabulary has enough.
    """
    # Special tokens draw attention whatever the context, as sinks do.
    alphabet = np.setdiff1d(np.arange(vocabulary), [*special, *([] if first is None else [first])])
    generator = np.random.default_rng(seed)
    drawn = np.stack(
        # A small vocabulary has fewer tokens than a half, so some then come twice.
        [generator.choice(alphabet, half, replace=half > len(alphabet)) for _ in range(sequences)]
    )
    # Without a first token the column has no width, and its value is never used.
    before = np.full((sequences, 0 if first is None else 1), first or 0)
    return np.concatenate([before, drawn, drawn], axis=1)


def answers_of(prompt: Prompt, device: torch.device | str = "cpu") -> Answers | None:
    """Read the generated tokens of a prompt and their sources.

    Args:
        prompt: Prompt, with a span `needle` or the attribute `source`.
        device: Device of the tensors.

    Returns:
        The answers; None where the prompt marks no generated token or no source of them.
    """
    tokens, generated = (
        torch.tensor(prompt.tokens, device=device),
        # No row before token 0 produces it.
        [place for place in prompt.generated if place > 0],
    )
    if not generated:
        return None
    source = torch.zeros(len(generated), len(prompt.tokens), device=device)
    named = prompt.sources
    # A needle is the source of all answers alike; `sources` name one place for each of them.
    if prompt.spans.get("needle"):
        source[:, list(prompt.spans["needle"])] = 1.0
    elif named is not None and len(named) == len(generated):
        source[torch.arange(len(generated)), list(named)] = 1.0
    else:
        return None
    # Row i produces token i + 1.
    rows = torch.tensor(generated, device=device) - 1
    # [answer, key]: keys of the source whose token is the one that is produced
    same = source * (tokens[rows + 1][:, None] == tokens)
    return Answers(rows, tokens[rows + 1], source, same)


@torch.no_grad()
def random_scores(
    decoder: Decoder, sequences: Int[np.ndarray, "sequence token"], asked: Collection[str] = SCORES
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """Compute scores on repeated random tokens by one pass.

    Args:
        decoder: Decoder of the model.
        sequences: Repeated random tokens (`repeated_tokens`).
        asked: Names of scores; those of `ON_RANDOM` are computed.

    Returns:
        Scores by name; empty, without a pass, where none is asked for.
    """
    if not ON_RANDOM & set(asked):
        return {}
    # Some scores come from one pass whatever is asked; `_known` drops the others.
    return _known(
        _on_random(decoder, torch.from_numpy(sequences).to(decoder.device), decoder.shape), asked
    )


@torch.no_grad()
def prompt_scores(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    rows: int = 512,
    top: int = 1,
    asked: Collection[str] = SCORES,
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """Compute scores on prompts by one pass per prompt that has something for them.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts.
        rows: Rows of attention of a prompt, at most.
        top: Strongest keys of a row that count for retrieval.
        asked: Names of scores; those of `ON_RANDOM` are left out.

    Returns:
        Scores by name, means over prompts.
    """
    wanted = set(asked) - ON_RANDOM
    shape, device = decoder.shape, decoder.device
    # Scores of answers alone: prompts without any would be passed for nothing.
    if wanted <= OF_ANSWERS:
        prompts = [prompt for prompt in prompts if answers_of(prompt) is not None]
    if not wanted or not prompts:
        return {}
    of_prompts: dict[str, list[np.ndarray]] = {}
    # Shares of variance need the logits of all prompts by distance, so sums run across prompts.
    content = [
        ContentSums.empty(shape[1], max(len(prompt.tokens) for prompt in prompts), device)
        for _ in range(shape[0])
    ]
    # Values of all layers are kept for the contribution alone.
    with direct_path(decoder) if "contribution" in wanted else nullcontext() as path:
        for number, prompt in enumerate(prompts):
            for name, values in _on_prompt(
                decoder, path, number, prompt, content, shape, rows, top, wanted
            ).items():
                of_prompts.setdefault(name, []).append(values)
    scores = {name: _mean(values) for name, values in of_prompts.items()}
    scores["content"] = torch.stack([sums.share() for sums in content]).cpu().numpy()
    return _known(scores, wanted)


def _known(scores: Mapping[str, np.ndarray], asked: Collection[str]) -> dict[str, np.ndarray]:
    return {
        name: scores[name]
        for name in SCORES
        # A score that is NaN for every head is left out, so that a group holds no empty variables.
        if name in asked and name in scores and np.isfinite(scores[name]).any()
    }


def _on_random(
    decoder: Decoder, tokens: Int[Tensor, "sequence token"], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    scores = {name: np.full(shape, np.nan) for name in ON_RANDOM}
    count = tokens.shape[1]

    def receive(inputs: AttentionInputs) -> None:
        sums: dict[str, Tensor] = {}
        # First, middle and last part of the keys; in float64, as it is summed over many rows.
        places, enough = (
            torch.zeros(*inputs.queries.shape[:2], 3, dtype=torch.float64, device=tokens.device),
            0,
        )
        for part in _parts(torch.arange(count, device=tokens.device), inputs):
            weights = inputs.pattern(part)
            _add(sums, detection_sums(weights, part, tokens))
            in_first = part < (count + 1) // 2  # rows that have seen nothing twice
            of_places, counted = place_sums(weights[:, :, in_first], part[in_first])
            places, enough = places + of_places, enough + counted
        # Rows in which the pattern has a pair at all; the others cannot follow it and do not count.
        occurring = detection_rows(torch.arange(count, device=tokens.device), tokens)
        for name, total in sums.items():
            scores[name][inputs.layer] = (total / occurring[name][:, None]).mean(0).cpu().numpy()
        if enough:
            first, middle, last = (places / enough).mean(0).unbind(-1)
            # The lower of both ends, so that a head that looks at one end alone is no U.
            scores["place_u"][inputs.layer] = (torch.minimum(first, last) - middle).cpu().numpy()

    _pass(decoder, tokens, receive)
    return scores


def _on_prompt(
    decoder: Decoder,
    path: DirectPath | None,
    number: int,
    prompt: Prompt,
    content: list[ContentSums],
    shape: tuple[int, int],
    most: int,
    top: int,
    asked: Collection[str],
) -> dict[str, np.ndarray]:
    """The scores [layer, head] of one prompt but `content`, to which its rows are added."""
    device = decoder.device
    tokens, answers = torch.tensor([prompt.tokens], device=device), answers_of(prompt, device)
    # NaN where a layer has no such score: without attention, positions or a direct path.
    scores = {
        name: np.full(shape, np.nan)
        for name in SCORES
        if name not in ON_RANDOM and name != "content"
    }
    moved: dict[int, Tensor] = {}
    on_token: dict[int, Tensor] = {}

    def receive(inputs: AttentionInputs) -> None:
        if not _OF_ROWS.isdisjoint(asked):
            for name, values in _of_rows(
                inputs, tokens, content[inputs.layer], most, asked
            ).items():
                scores[name][inputs.layer] = values[0].cpu().numpy()
        if not _OF_POSITIONS.isdisjoint(asked):
            for name, values in _of_positions(inputs, prompt).items():
                scores[name][inputs.layer] = values
        # Popped, so that values of one layer exist at a time; key-
        # value heads are repeated to heads.
        values = (
            None if path is None else expand_heads(path.values.pop(inputs.layer), inputs.heads)[0]
        )
        if answers is not None and not OF_ANSWERS.isdisjoint(asked):
            weights = inputs.pattern(answers.rows)[0]  # [head, answer, key]
            on_source = weights * answers.source
            scores["source_mass"][inputs.layer] = on_source.sum(-1).mean(-1).cpu().numpy()
            strongest = weights.topk(min(top, weights.shape[-1]), dim=-1).indices
            # 1 where any of the k strongest keys is the answer's token
            # in the source: [head, answer]
            on_token[inputs.layer] = answers.same.expand_as(weights).gather(-1, strongest).amax(-1)
            if values is not None:
                # The part of the head's output that comes from the source: [answer, head, d_value].
                moved[inputs.layer] = (on_source.to(values.dtype) @ values).transpose(0, 1)

    hidden = _pass(decoder, tokens, receive, number)
    # Whether the model says the token is known only when all layers have run.
    if answers is not None and on_token:
        _finish(decoder, path, hidden, answers, moved, on_token, scores)
    return scores


def _finish(
    decoder: Decoder,
    path: DirectPath | None,
    hidden: Float[Tensor, "1 token width"],
    answers: Answers,
    moved: Mapping[int, Tensor],
    on_token: Mapping[int, Tensor],
    scores: Mapping[str, np.ndarray],
) -> None:
    """Retrieval and contribution, which need the end of the pass."""
    copied = answers.same.any(-1)
    if copied.any():
        said = next_token_logits(decoder, hidden[0, answers.rows]).argmax(-1) == answers.tokens
        for layer, found in on_token.items():
            # Only tokens that stand in the source can be retrieved, so the others are no failures.
            scores["retrieval"][layer] = ((found * said).sum(-1) / copied.sum()).cpu().numpy()
    for layer, values in moved.items():
        if path is not None and layer in path.layers:
            scores["contribution"][layer] = (
                path.contributions(layer, values, answers.rows, answers.tokens)
                .mean(0)
                .cpu()
                .numpy()
            )


def _of_rows(
    inputs: AttentionInputs,
    tokens: Int[Tensor, "1 token"],
    content: ContentSums,
    most: int,
    asked: Collection[str],
) -> dict[str, Float[Tensor, "1 head"]]:
    """Means over the rows of one prompt, of those `asked`; its logits are added to `content`."""
    # All, or middles of equal parts: the first rows see few keys and are no sample.
    rows = torch.tensor(middles(tokens.shape[1], most), device=tokens.device)
    # Learned positions have distances of their own; others are the index, so tokens apart.
    learned = inputs.head_positions if inputs.learned else None
    sums: dict[str, Tensor] = {}
    for part in _parts(rows, inputs):
        logits = inputs.logits(part)
        weights = weights_of(logits, inputs.sinks)
        if not _DETECTED_ON_PROMPTS.isdisjoint(asked):
            detected = detection_sums(weights, part, tokens)
            _add(sums, {f"{name}{ON_PROMPTS}": values for name, values in detected.items()})
        if not {"distance", "position_distance"}.isdisjoint(asked):
            _add(sums, {"distance": distance_sums(weights, part)})
        if "departure" in asked:
            # A sink takes a share of the row, which would count as
            # departure; equal weights are over keys.
            of_keys = weights if inputs.sinks is None else logits.softmax(-1)
            _add(sums, {"departure": departure_sums(of_keys, logits)})
        if "position_distance" in asked and learned is not None:
            # Indexed positions need no pass: see the end.
            _add(sums, {"position_distance": position_distance_sums(weights, part, learned)})
        if "content" in asked:
            content.add(logits, part)
    if "distance" in sums and inputs.positions is not None and not inputs.learned:
        sums["position_distance"] = sums["distance"]  # the position is the index
    occurring = detection_rows(rows, tokens)  # none in a text without copies: NaN
    return {
        # Detectors divide by the rows that have a pair, the other scores by all rows.
        name: total / occurring.get(name.removesuffix(ON_PROMPTS), len(rows))
        for name, total in sums.items()
    }


def _of_positions(inputs: AttentionInputs, prompt: Prompt) -> dict[str, np.ndarray]:
    """Patterns and range of positions; of learned ones also who shares them, and the mirror."""
    positions = inputs.head_positions
    # Positions by rotary pair are no single number, of which a chunk could be constant.
    if positions is None or inputs.differ_by_pair:
        return {}
    labels = chunk_patterns(positions, inputs.valid[:, None])[0]
    found = (labels >= 0).sum(-1).double()
    # NaN where a prompt has no chunk
    shares = [((labels == code).sum(-1) / found).cpu().numpy() for code in range(len(PATTERNS))]
    scores = dict[str, np.ndarray](zip(PATTERNS, shares, strict=True))
    scores["position_range"] = (
        position_range(positions.double(), inputs.valid[:, None])[0].cpu().numpy()
    )
    if not inputs.learned:
        return scores
    assert inputs.positions is not None
    # Heads that share a row of positions: all of them, or those of a key-value head
    scores["heads_per_map"] = np.full(inputs.heads, inputs.heads / inputs.positions.shape[1])
    if prompt.sources is not None:
        by_head = positions[0].double().cpu().numpy()
        scores["mirror"] = np.array(
            [
                mirror_score(mirror(z, prompt.tokens, prompt.sources, prompt.generated))
                for z in by_head
            ]
        )
    return scores


def _pass(decoder: Decoder, tokens: Int[Tensor, "prompt token"], receive, first: int = 0) -> Tensor:
    """A forward pass that hands every layer to `receive`; its last hidden states.

    `first`: the number of the first prompt.
    """
    valid = torch.ones_like(tokens, dtype=torch.bool)
    with observing(decoder, valid, torch.arange(first, first + len(tokens)), receive):
        return decode(decoder, tokens, valid)


def _parts(rows: Int[Tensor, "row"], inputs: AttentionInputs) -> tuple[Tensor, ...]:
    prompts, heads, count, _ = inputs.queries.shape
    # At least one row, however long the prompt
    return rows.split(max(1, CELLS // (prompts * heads * count)))


def _add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, values in more.items():
        sums[name] = sums[name] + values if name in sums else values


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over prompts, NaN left out; NaN where all are."""
    return np.ma.masked_invalid(np.stack(values)).mean(0).filled(np.nan)
