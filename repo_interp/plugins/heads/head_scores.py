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

    R_h = hits / n     n     generated tokens t that occur in the source
                       hits  tokens among them that the model predicts while one of the k strongest
                             keys of head h is an occurrence of t in the source

Wu et al. divide by the number of tokens of the whole needle, because their answers repeat all of
it. The model predicts t where t is its most likely token after the reference tokens before t; this
equals greedy generation up to the first wrong token. `plugins.paths.direct_path` defines the
contribution, which is NaN in a layer without a direct path.

Prompts of one length with answers in the same rows share a pass, and the scores of a pass are
fetched from the device in one copy. Rows of attention are computed in parts of at most `CELLS`
weights. A long prompt is sampled at `rows` rows, the middles of equal parts. No map of a head is
kept. This module knows nothing about names and thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.experiments.responses import MOST_LOGITS
from repo_interp.inputs import AttentionInputs, select_prompts
from repo_interp.measures.kernels.mirror import MEANING, mirror_scores
from repo_interp.measures.kernels.samples import middles
from repo_interp.measures.patterns import PATTERNS, chunk_patterns
from repo_interp.measures.positions import position_range
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.models.observing import observing
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.side_by_side import batches
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
from repo_interp.positions.sinks import weights_of
from repo_interp.tasks.prompt import Prompt

# 16 MB in float32, so that a long prompt needs no map of its heads
CELLS = 2**22
"""Most attention weights of a batch and layer that exist at a time."""
MOST_ANSWERS = 512
"""Most answers of a pass: head outputs at the answers are kept for all layers until it ends."""
ON_PROMPTS = "_on_prompts"
"""Suffix of scores on prompts that are also measured on random tokens."""

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
    "mirror": f"mirror: {MEANING}",
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
"""Scores on random tokens. All other scores are on prompts."""
OF_ANSWERS = frozenset({"source_mass", "retrieval", "contribution"})
"""Scores of the rows that produce an answer. They need no other rows."""
_DETECTED_ON_PROMPTS = frozenset(f"{name}{ON_PROMPTS}" for name in _DETECTED)
_OF_ROWS = _DETECTED_ON_PROMPTS | {"distance", "position_distance", "departure", "content"}
"""Scores of all rows of a prompt."""
_OF_POSITIONS = SCORES.keys() - ON_RANDOM - OF_ANSWERS - _OF_ROWS


@dataclass(frozen=True)
class AnswerRows:
    """The generated tokens of prompts and their source tokens."""

    rows: Int[Tensor, "answer"]
    """The rows that produce the answers: one before each answer's place."""
    tokens: Int[Tensor, "prompt answer"]
    source: Float[Tensor, "prompt answer key"]
    """1 where a token of the prompt belongs to the source, else 0."""
    same: Float[Tensor, "prompt answer key"]
    """1 where a token of the source equals the answer's token, else 0."""
    copied: Float[Tensor, "prompt"]
    """Number of answers with their token in the source; NaN for zero."""


def repeated_tokens(
    sequences: int, half: int, vocabulary: int, special: Sequence[int], first: int | None, seed: int
) -> Int[np.ndarray, "sequence token"]:
    """Draw random tokens and repeat them once.

    Args:
        sequences: Number of sequences.
        half: Random tokens before the repetition.
        vocabulary: Number of token ids.
        special: Token ids that are never drawn.
        first: Token before the random tokens; None for no such token.
        seed: Seed of the draws.

    Returns:
        Token ids. Within a half they are all different if the vocabulary is large enough.
    """
    # Special tokens draw attention whatever the context, as sinks do.
    alphabet = np.setdiff1d(np.arange(vocabulary), [*special, *([] if first is None else [first])])
    generator = np.random.default_rng(seed)
    drawn = np.stack(
        # A vocabulary smaller than a half makes repeats necessary.
        [generator.choice(alphabet, half, replace=half > len(alphabet)) for _ in range(sequences)]
    )
    # Without a first token the column has width 0, and its value is never used.
    before = np.full((sequences, 0 if first is None else 1), first or 0)
    return np.concatenate([before, drawn, drawn], axis=1)


def answers_of(prompt: Prompt) -> AnswerRows | None:
    """Read the generated tokens of a prompt and their sources.

    Args:
        prompt: Prompt, with a span `needle` or the attribute `source`.

    Returns:
        The answers of one prompt; None if it marks no generated token or no source.
    """
    # No row produces token 0.
    generated = [place for place in prompt.generated if place > 0]
    if not generated:
        return None
    source = torch.zeros(len(generated), len(prompt.tokens))
    named = prompt.sources
    # A needle is the source of every answer; `sources` has one place per answer.
    if prompt.spans.get("needle"):
        source[:, list(prompt.spans["needle"])] = 1.0
    elif named is not None and len(named) == len(generated):
        source[torch.arange(len(generated)), list(named)] = 1.0
    else:
        return None
    tokens = torch.tensor(prompt.tokens)
    answer = tokens[generated]
    # [answer, key]: keys of the source with the token that is produced
    same = source * (answer[:, None] == tokens)
    copied = same.any(-1).sum()
    return AnswerRows(
        # Row i produces token i + 1.
        torch.tensor(generated) - 1,
        answer[None],
        source[None],
        same[None],
        torch.where(copied > 0, copied.float(), torch.nan)[None],
    )


@torch.no_grad()
def random_scores(
    decoder: Decoder, sequences: Int[np.ndarray, "sequence token"], asked: Collection[str] = SCORES
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """Compute scores on repeated random tokens by one pass.

    Args:
        decoder: Decoder of the model.
        sequences: Repeated random tokens (`repeated_tokens`).
        asked: Names of scores; only names in `ON_RANDOM` are computed.

    Returns:
        Scores by name; empty, without a pass, if `asked` has no name of `ON_RANDOM`.
    """
    if not ON_RANDOM & set(asked):
        return {}
    # One pass computes all scores; `_known` drops the ones not asked for.
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
    """Compute scores on prompts; prompts of one length share a pass.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts.
        rows: Most rows of attention of a prompt.
        top: Number of strongest keys of a row that count for retrieval.
        asked: Names of scores; names in `ON_RANDOM` are ignored.

    Returns:
        Scores by name, means over prompts.
    """
    wanted = set(asked) - ON_RANDOM
    shape, device = decoder.shape, decoder.device
    answers = [answers_of(prompt) for prompt in prompts]
    # Where only scores of answers are asked for, prompts without answers need no pass.
    passed = [
        number for number, of in enumerate(answers) if of is not None or not wanted <= OF_ANSWERS
    ]
    if not wanted or not passed:
        return {}
    by_prompt: dict[str, np.ndarray] = {}
    # The share of variance needs the logits of all prompts, so these sums run across prompts.
    longest = max(len(prompts[number].tokens) for number in passed)
    content = [ContentSums.empty(shape[1], longest, device) for _ in range(shape[0])]
    # Only the contribution needs the values of all layers.
    with direct_path(decoder) if "contribution" in wanted else nullcontext() as path:
        for numbers in _alike(decoder, prompts, answers, passed):
            found = _on_prompts(
                decoder,
                path,
                numbers,
                [prompts[number] for number in numbers],
                _stacked([answers[number] for number in numbers], device),
                content,
                rows,
                top,
                wanted,
            )
            for (name, layer), values in found.items():
                if name not in by_prompt:
                    by_prompt[name] = np.full((len(prompts), *shape), np.nan)
                by_prompt[name][numbers, layer] = values
    scores = {name: _mean(values[passed]) for name, values in by_prompt.items()}
    scores["content"] = torch.stack([sums.share() for sums in content]).cpu().numpy()
    return _known(scores, wanted)


def _alike(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    answers: Sequence[AnswerRows | None],
    passed: Sequence[int],
) -> Iterator[list[int]]:
    """Numbers of prompts that share a pass: of one length, with answers in the same rows."""
    lengths, limits = [len(prompt.tokens) for prompt in prompts], batch_limit(decoder, "auto")
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number in passed:
        of_prompt = answers[number]
        rows = () if of_prompt is None else tuple(of_prompt.rows.tolist())
        groups.setdefault((lengths[number], rows), []).append(number)
    for (_, rows), numbers in groups.items():
        most = min(limits.prompts, max(1, MOST_ANSWERS // max(1, len(rows))))
        yield from batches(numbers, lengths, replace(limits, prompts=most))


def _stacked(answers: Sequence[AnswerRows | None], device: torch.device) -> AnswerRows | None:
    """Concatenate the answers of prompts with answers in the same rows; None without answers."""
    known = [of_prompt for of_prompt in answers if of_prompt is not None]
    if not known:
        return None
    parts = zip(*((of.tokens, of.source, of.same, of.copied) for of in known), strict=True)
    return AnswerRows(known[0].rows.to(device), *(torch.cat(part).to(device) for part in parts))


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
    found: dict[tuple[str, int], Tensor] = {}
    every = torch.arange(tokens.shape[1], device=tokens.device)
    # Only rows in which the pattern has a pair count: no head can follow it in other rows.
    occurring = detection_rows(every, tokens)

    def receive(inputs: AttentionInputs) -> None:
        sums: dict[str, Tensor] = {}
        # Mass on the first, middle and last part of the keys; float64, since it sums many rows.
        places, enough = (
            torch.zeros(*inputs.queries.shape[:2], 3, dtype=torch.float64, device=tokens.device),
            0,
        )
        for part in _parts(every, inputs):
            weights = inputs.pattern(part)
            _add(sums, detection_sums(weights, part, tokens))
            in_first = part < (len(every) + 1) // 2  # rows before any repetition
            of_places, counted = place_sums(weights[:, :, in_first], part[in_first])
            places, enough = places + of_places, enough + counted
        for name, total in sums.items():
            found[name, inputs.layer] = (total / occurring[name][:, None]).mean(0)
        if enough:
            first, middle, last = (places / enough).mean(0).unbind(-1)
            # The lower of both ends, so that a head that attends to only one end is not a U.
            found["place_u", inputs.layer] = torch.minimum(first, last) - middle

    # The pass ends inside the last layer: no score needs that layer's output.
    _pass(decoder, tokens, receive, torch.arange(len(tokens)), decoder.layers[-1].layer_idx)
    for (name, layer), values in _fetched(found, decoder.device).items():
        scores[name][layer] = values
    return scores


def _on_prompts(
    decoder: Decoder,
    path: DirectPath | None,
    numbers: Sequence[int],
    prompts: Sequence[Prompt],
    answers: AnswerRows | None,
    content: list[ContentSums],
    most: int,
    top: int,
    asked: Collection[str],
) -> dict[tuple[str, int], Float[np.ndarray, "prompt head"]]:
    """Compute scores of prompts of one length, by name and layer; a layer may lack scores.

    Adds the rows of the prompts to `content`, which is a score over all prompts.
    """
    tokens = torch.tensor([prompt.tokens for prompt in prompts], device=decoder.device)
    found: dict[tuple[str, int], Tensor] = {}
    mirrored: dict[tuple[str, int], Tensor] = {}
    moved: dict[int, Tensor] = {}
    on_token: dict[int, Tensor] = {}
    sourced = any(prompt.sources is not None for prompt in prompts)

    def receive(inputs: AttentionInputs) -> None:
        layer = inputs.layer
        if not _OF_ROWS.isdisjoint(asked):
            of_rows = _of_rows(inputs, tokens, content[layer], most, asked)
            found.update({(name, layer): values for name, values in of_rows.items()})
        if not _OF_POSITIONS.isdisjoint(asked):
            of_positions = _of_positions(inputs)
            found.update({(name, layer): values for name, values in of_positions.items()})
            if sourced and inputs.learned and "heads_per_map" in of_positions:
                assert inputs.head_positions is not None
                mirrored["mirror", layer] = inputs.head_positions
        # Popped, so that only one layer's values are in memory. Key-value heads are repeated to
        # heads.
        values = None if path is None else expand_heads(path.values.pop(layer), inputs.heads)
        if answers is not None and not OF_ANSWERS.isdisjoint(asked):
            weights = inputs.pattern(answers.rows)  # [prompt, head, answer, key]
            on_source = weights * answers.source[:, None]
            found["source_mass", layer] = on_source.sum(-1).mean(-1)
            strongest = weights.topk(min(top, weights.shape[-1]), dim=-1).indices
            # 1 where any of the k strongest keys is the answer's token in the source: [prompt,
            # head, answer]
            same = answers.same[:, None].expand_as(weights)
            on_token[layer] = same.gather(-1, strongest).amax(-1)
            if values is not None:
                # The source's part of the head's output: [prompt, answer, head, d_value]
                moved[layer] = (on_source.to(values.dtype) @ values).transpose(1, 2)

    hidden = _pass(decoder, tokens, receive, torch.tensor(numbers))
    # The model's prediction is known only after all layers have run.
    if answers is not None and on_token:
        found |= _finish(decoder, path, hidden, answers, moved, on_token)
    scores = _fetched(found | mirrored, decoder.device)
    for key in mirrored:
        scores[key] = _mirrors(prompts, scores[key])
    return scores


def _fetched(
    found: Mapping[tuple[str, int], Tensor], device: torch.device
) -> dict[tuple[str, int], np.ndarray]:
    """Copy tensors of all layers to float64 arrays, with one wait for an accelerator."""
    if not found:
        return {}
    numbers = torch.cat([values.to(device, torch.float64).flatten() for values in found.values()])
    parts = numbers.cpu().split([values.numel() for values in found.values()])
    return {
        key: part.reshape(values.shape).numpy()
        for (key, values), part in zip(found.items(), parts, strict=True)
    }


def _mirrors(
    prompts: Sequence[Prompt], positions: Float[np.ndarray, "prompt head token"]
) -> Float[np.ndarray, "prompt head"]:
    """Mirror scores; NaN for prompts that name no sources."""
    return np.stack(
        [
            np.full(len(z), np.nan)
            if prompt.sources is None
            else mirror_scores(z, prompt.tokens, prompt.sources, prompt.generated)
            for prompt, z in zip(prompts, positions, strict=True)
        ]
    )


def _finish(
    decoder: Decoder,
    path: DirectPath | None,
    hidden: Float[Tensor, "prompt token width"],
    answers: AnswerRows,
    moved: Mapping[int, Tensor],
    on_token: Mapping[int, Tensor],
) -> dict[tuple[str, int], Float[Tensor, "prompt head"]]:
    """Compute retrieval and contribution by layer from the last hidden states."""
    # In parts, since the vocabulary is large
    states = hidden[:, answers.rows].flatten(0, 1)
    likeliest = [
        next_token_logits(decoder, part).argmax(-1)
        for part in states.split(max(1, MOST_LOGITS // decoder.vocabulary_size))
    ]
    is_right = torch.cat(likeliest).reshape(answers.tokens.shape) == answers.tokens
    found = {
        # A token that is not in the source cannot be retrieved, so it is not counted as a failure.
        ("retrieval", layer): (right * is_right[:, None]).sum(-1) / answers.copied[:, None]
        for layer, right in on_token.items()
    }
    # Rows of all prompts, one prompt after the other
    count, each = answers.tokens.shape
    prompts = torch.arange(count, device=hidden.device).repeat_interleave(each)
    rows, tokens = answers.rows.repeat(count), answers.tokens.flatten()
    for layer, values in moved.items():
        if path is not None and layer in path.layers:
            added = path.contributions(layer, values.flatten(0, 1), rows, tokens, prompts)
            found["contribution", layer] = added.unflatten(0, (count, each)).mean(1)
    return found


def _of_rows(
    inputs: AttentionInputs,
    tokens: Int[Tensor, "prompt token"],
    content: ContentSums,
    most: int,
    asked: Collection[str],
) -> dict[str, Float[Tensor, "prompt head"]]:
    """Compute means over rows of the scores in `asked`, and add the logits to `content`."""
    # All rows, or the middles of equal parts. The first rows see few keys, a biased sample.
    rows = torch.tensor(middles(tokens.shape[1], most))
    # As many prompts as fit into `CELLS` weights; a single larger one is split by rows
    at_once = max(1, CELLS // (inputs.heads * len(rows) * tokens.shape[1]))
    found: dict[str, list[Tensor]] = {}
    for start in range(0, len(tokens), at_once):
        some = slice(start, start + at_once)
        part = inputs if at_once >= len(tokens) else select_prompts(inputs, some)
        for name, values in _of_rows_at_once(part, tokens[some], rows, content, asked).items():
            found.setdefault(name, []).append(values)
    return {name: torch.cat(values) for name, values in found.items()}


def _of_rows_at_once(
    inputs: AttentionInputs,
    tokens: Int[Tensor, "prompt token"],
    rows: Int[Tensor, "row"],
    content: ContentSums,
    asked: Collection[str],
) -> dict[str, Float[Tensor, "prompt head"]]:
    # Learned positions have distances of their own; others are the index, so tokens apart.
    learned = inputs.head_positions if inputs.learned and inputs.one_position else None
    sums: dict[str, Tensor] = {}
    for on_processor in _parts(rows, inputs):
        part = on_processor.to(tokens.device)
        logits = inputs.logits(part)
        sinks = inputs.sinks_of(part)
        weights = weights_of(logits, sinks)
        if not _DETECTED_ON_PROMPTS.isdisjoint(asked):
            detected = detection_sums(weights, part, tokens)
            _add(sums, {f"{name}{ON_PROMPTS}": values for name, values in detected.items()})
        if not {"distance", "position_distance"}.isdisjoint(asked):
            _add(sums, {"distance": distance_sums(weights, part)})
        if "departure" in asked:
            # A sink takes a share of the row, which would count as departure; equal weights are
            # over keys.
            of_keys = weights if sinks is None else logits.softmax(-1)
            _add(sums, {"departure": departure_sums(of_keys, logits)})
        if "position_distance" in asked and learned is not None:
            # Without learned positions it equals the distance in tokens; see below.
            _add(sums, {"position_distance": position_distance_sums(weights, part, learned)})
        if "content" in asked:
            content.add(logits, on_processor)
    indexed = inputs.positions is not None and inputs.one_position and not inputs.learned
    if "distance" in sums and indexed:
        sums["position_distance"] = sums["distance"]  # the position is the index
    occurring = detection_rows(rows.to(tokens.device), tokens)  # none in a text without copies: NaN
    every = torch.full((len(tokens),), len(rows), device=tokens.device)
    return {
        # Detectors divide by the rows that have a pair, the other scores by all rows.
        name: total / occurring.get(name.removesuffix(ON_PROMPTS), every)[:, None]
        for name, total in sums.items()
    }


def _of_positions(inputs: AttentionInputs) -> dict[str, Float[Tensor, "prompt head"]]:
    """Compute patterns and range of positions; for learned ones also the heads per map."""
    positions = inputs.head_positions
    # With positions by rotary pair there is no single number that could be constant in a chunk.
    if positions is None or not inputs.one_position:
        return {}
    labels = chunk_patterns(positions, inputs.valid[:, None])
    # NaN where a prompt has no chunk
    found = (labels >= 0).sum(-1).double()
    scores = {name: (labels == code).sum(-1) / found for code, name in enumerate(PATTERNS)} | {
        "position_range": position_range(positions.double(), inputs.valid[:, None])
    }
    if inputs.learned:
        assert inputs.positions is not None
        # Heads that share a row of positions: all heads, or the heads of a key-value head
        shared = inputs.heads / inputs.positions.shape[1]
        scores["heads_per_map"] = torch.full_like(scores["position_range"], shared)
    return scores


def _pass(
    decoder: Decoder,
    tokens: Int[Tensor, "prompt token"],
    receive: Callable[[AttentionInputs], None],
    numbers: Int[Tensor, "prompt"],
    last_layer: int | None = None,
) -> Float[Tensor, "prompt token width"]:
    """Run a forward pass, call `receive` for every layer, and return the last hidden states.

    `numbers` are the numbers of the prompts. The pass ends inside `last_layer`; None runs it all.
    """
    valid = torch.ones_like(tokens, dtype=torch.bool)
    with observing(decoder, valid, numbers, receive):
        return decode(decoder, tokens, valid, last_layer)


def _parts(rows: Int[Tensor, "row"], inputs: AttentionInputs) -> tuple[Tensor, ...]:
    prompts, heads, count, _ = inputs.queries.shape
    # At least one row, however long the prompt
    return rows.split(max(1, CELLS // (prompts * heads * count)))


def _add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, values in more.items():
        sums[name] = sums[name] + values if name in sums else values


def _mean(values: Float[np.ndarray, "prompt layer head"]) -> Float[np.ndarray, "layer head"]:
    """Mean over prompts without NaN; NaN if all values are NaN."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0.0).sum(0) / known.sum(0)
