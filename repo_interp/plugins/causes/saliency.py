"""Gradients of the log-probability of an answer by positions, at a point and along a path.

    f           = mean of log p(token_t | tokens before t) over the targets t of a prompt, in nats per
                  token, as in `effects`
    saliency    = d f / d z_{l,h,i}            one pass forward and back for all tokens and heads
    integrated  = (z - z') int_0^1 (dF / dz)(z' + a (z - z')) da
                                               (Sundararajan, Taly and Yan 2017, eq. 1)
    completeness: sum over l, h, i of integrated = F(z) - F(z')
                                               its error is kept; it falls with the number of steps

z_{l,h,i}: position of token i in head h of layer l, as query and as key. Layers that rotate have
positions, both learned ones and the token index; others (NoPE, ALiBi, CoPE, ...) have NaN. Heads of
a layer or of a key-value head may share positions. They get separate rows, so a derivative is for
moving one head only, keys included, as `interventions.set_positions` does.

`saliency` and `integrated` hold different things constant. `saliency` is the effect of a small
intervention at one place: f_phi of later layers reads the changed hidden states and responds. In
`F` all positions of all layers are inputs that move together along one straight path, and no
position responds to another. The baseline z' is `constant`, the mean of a head's positions over the
prompt, which does not distinguish tokens, or `index`. A common shift of a head's positions changes
nothing, so a head's saliencies sum to 0 over tokens.

Captum's `IntegratedGradients` (Gauss-Legendre) computes the integral: it takes the positions, one
tensor per layer, as the inputs of `F`. Captum's `LayerIntegratedGradients` does not fit, since its
baseline is a layer's values at another *prompt*, not given values. If z - z' turns pairs by many
radians, the integrand oscillates and a path needs thousands of steps; look at the completeness
error first.

This module knows nothing about how prompts are chosen or drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.experiments.attribution import frozen_weights
from repo_interp.experiments.experiment import (
    PATH_TOKENS,
    Experiment,
    Plan,
    Progress,
    require_targets,
)
from repo_interp.experiments.grid import Grid, stack_padded
from repo_interp.experiments.responses import target_logits, to_question
from repo_interp.measures.labels import described_group
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.side_by_side import SideBySide, batches
from repo_interp.positions.logits import exact
from repo_interp.positions.rotary import expand_heads
from repo_interp.run import with_schemes
from repo_interp.storage.store import NOT_KEPT, Store
from repo_interp.tasks import Batch, Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import CountOrNone

BACKWARD = 3
"""Cost of a forward and backward pass, in forward passes."""
Baseline = Literal["constant", "index"]

_BY_TOKEN = {
    "saliency": (
        "derivative of the answer's log-probability, mean over its tokens, by the position of "
        "each token [nat/token/position]"
    ),
    "integrated_gradients": (
        "what the position of each token adds to the answer's log-probability, mean over its "
        "tokens, from the baseline on [nat/token]"
    ),
}
_TOKENS = {
    "token_id": "token, -1 for padding",
    "token_count": "tokens of each prompt [tokens]",
    "answer": "1 where the log-probability of a token is counted, -1 for padding",
    "token_text": "text of each token",
}
_BY_HEAD = {
    "saliency_size": "mean size of a head's saliencies over tokens [nat/token/position]",
    "integrated_size": "sum of the sizes of a head's integrated gradients over tokens [nat/token]",
}
_BY_PROMPT = {
    "log_probability": "log-probability of the answer, mean over its tokens [nat/token]",
    "baseline_log_probability": (
        "log-probability of the answer, mean over its tokens, with every position at its "
        "baseline [nat/token]"
    ),
    "completeness_error": (
        "sum of integrated gradients minus the difference of both log-probabilities [nat/token]"
    ),
}


@dataclass(frozen=True)
class Gradients:
    """Derivatives of the log-probability of a prompt's answer by all positions."""

    positions: list[Float[Tensor, "1 head token"]]
    """Positions of every layer that assigns positions, one row per head."""
    gradients: list[Float[Tensor, "1 head token"]]
    """d f / d z at `positions`."""
    log_probability: float
    """f, in nats per token of the answer."""


def position_gradients(
    decoder: Decoder, scoring: Scoring, prompts: Sequence[Prompt]
) -> list[Gradients]:
    """Differentiate the log-probability of answers by all positions, in one pass.

    Args:
        decoder: Decoder of the model.
        scoring: Names the targets of a prompt.
        prompts: Prompts of one length.

    Returns:
        Derivatives of every prompt.
    """
    layers = list(decoder.positioned.values())
    heads = decoder.heads
    positions: list[Tensor] = []
    moves: list[Tensor] = []

    def move(place: int, assigned: Tensor) -> Tensor:
        """Expand `assigned` to one row per prompt and head, and add the zeros of `moves`."""
        # In half precision steps of 0.5 would be lost
        rows = exact(expand_heads(assigned, heads)).expand(len(prompts), -1, -1)
        positions.append(rows.detach())
        # The derivative by the added 0 is the derivative by the position, learned or not.
        moves.append(torch.zeros_like(rows, requires_grad=True))
        return rows + moves[-1]

    # Callers may be inside no_grad, as other measurements are.
    with torch.enable_grad(), _positions_changed(layers, move):
        log_probabilities = _log_probabilities(decoder, scoring, prompts)
        # Prompts do not interact, so the gradient of the sum has the gradient of every prompt.
        gradients = torch.autograd.grad(log_probabilities.sum(), moves)
    return [
        Gradients(
            [of_layer[row, None] for of_layer in positions],
            [of_layer[row, None] for of_layer in gradients],
            log_probability,
        )
        for row, log_probability in enumerate(log_probabilities.detach().tolist())
    ]


def integrated_gradients(
    decoder: Decoder,
    scoring: Scoring,
    prompt: Prompt,
    positions: Sequence[Float[Tensor, "1 head token"]],
    baseline: str,
    steps: int,
    copies: int,
) -> tuple[list[Float[Tensor, "1 head token"]], float, float]:
    """Integrate gradients along the straight path from a baseline to the positions.

    Args:
        decoder: Decoder of the model.
        scoring: Names the targets of a prompt.
        prompt: Prompt.
        positions: Positions of the layers that assign positions.
        baseline: "constant" or "index".
        steps: Points of the path.
        copies: Points that are run side by side.

    Returns:
        Integrated gradients by `positions`, and F in nats per token at the baseline and at `positions`.
    """
    # Imported here: it takes most of a second, and only a path needs it
    from captum.attr import IntegratedGradients

    layers = list(decoder.positioned.values())

    # One input tensor of positions per layer, since Captum attributes to inputs.
    def probability(*given: Float[Tensor, "point head token"]) -> Float[Tensor, "point"]:
        with _positions_changed(layers, lambda place, assigned: given[place]):
            return _log_probabilities(decoder, scoring, [prompt] * len(given[0]))

    inputs = tuple(of_layer.contiguous() for of_layer in positions)
    index = torch.arange(len(prompt.tokens), device=inputs[0].device)
    origin = tuple(
        # [1, head, token]; the mean represents no position: a constant distinguishes no tokens.
        (index.to(z.dtype) if baseline == "index" else z.mean(-1, keepdim=True))
        .expand_as(z)
        .contiguous()
        for z in inputs
    )
    # Both ends, against which the sum of the integral is checked
    with torch.no_grad():
        start, end = float(probability(*origin)), float(probability(*inputs))
    integral = IntegratedGradients(probability)
    return (
        # `internal_batch_size` only bounds memory: points of the path do not interact.
        list(integral.attribute(inputs, origin, n_steps=steps, internal_batch_size=copies)),
        start,
        end,
    )


def _log_probabilities(
    decoder: Decoder, scoring: Scoring, prompts: Sequence[Prompt]
) -> Float[Tensor, "prompt"]:
    """Compute the log-probability of targets in one pass, in nats per target.

    The prompts have one length. The points of a path are copies of a prompt that differ only in
    their positions.
    """
    tokens = np.array([prompt.tokens for prompt in prompts])
    targets = np.zeros(tokens.shape, dtype=bool)
    for row, prompt in zip(targets, prompts, strict=True):
        row[list(scoring.targets(prompt))] = True
    question = to_question(Batch(tokens, targets), decoder.device)
    by_target = (
        target_logits(decoder, question).log_softmax(-1).gather(-1, question.targets[:, None])[:, 0]
    )
    # A mean over targets by prompt
    counts = torch.from_numpy(targets.sum(1)).to(by_target.device)
    return by_target.new_zeros(len(prompts)).index_add(0, question.rows, by_target) / counts


@contextmanager
def _positions_changed(
    layers: Sequence[RepositionedAttention], change: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """Replace the positions of the n-th of `layers` by change(n, positions) inside the context."""

    def hook(place: int) -> Callable[..., Tensor]:
        return lambda module, arguments, assigned: change(place, assigned)

    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            # At the output of the assigner, before rotation: later code
            # cannot tell it from the model's own.
            hooks.callback(layer.sites.positions.register_forward_hook(hook(place)).remove)
        yield


def _token_values(prompts: Sequence[Prompt], scoring: Scoring) -> dict[str, Any]:
    """Tokens, their texts if every prompt has them, and a mask of the answer."""
    rows = [prompt.tokens for prompt in prompts]
    answers = [
        np.isin(np.arange(len(prompt.tokens)), scoring.targets(prompt)) for prompt in prompts
    ]
    axes = ("prompt", "token")
    values: dict[str, Any] = {
        "token_id": (axes, stack_padded(rows, -1, np.int64)),
        "token_count": ("prompt", [len(row) for row in rows]),
        "answer": (axes, stack_padded(answers, -1, np.int8)),
    }
    # One array holds the texts, so all prompts must have them.
    if all(prompt.token_text is not None for prompt in prompts):
        texts = [np.array(prompt.token_text, dtype=object) for prompt in prompts]
        values["token_text"] = (axes, stack_padded(texts, "", object))
    return values


@dataclass(frozen=True)
class Saliency(Experiment):
    """The experiment `saliency` (ours; integrated gradients: Sundararajan, Taly and Yan 2017)."""

    baseline: Baseline = "constant"
    """Start of the path of integrated gradients: `constant`, the mean of a head's positions over
    the prompt, or `index`.
    """
    steps: CountOrNone = 64
    """Points of the path; 0: derivatives at the model's own positions alone."""
    name: ClassVar[str] = "saliency"
    describes: ClassVar[str] = "of positions, on these prompts"

    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """Plan a forward and a backward pass per prompt and step.

        Raises InputError if no layer assigns positions, or nothing is predicted.
        """
        decoder = as_decoder(model)
        _ = decoder.heads  # refuses layers with different numbers of heads
        if not decoder.positioned:
            schemes = ", ".join(dict.fromkeys(decoder.schemes))
            raise InputError(
                "saliency is a derivative by positions, and no layer of this model assigns "
                f"any ({schemes}); leave it out"
            )
        require_targets(self.name, scoring, prompts)
        lengths = tuple(len(prompt.tokens) for prompt in prompts)
        return Plan(
            self,
            lengths * (BACKWARD * (1 + self.steps)),
            lambda batch_size, store, progress: {
                self.name: self.measured(
                    decoder,
                    scoring,
                    prompts,
                    # As many points as fit into a pass that keeps activations
                    max(PATH_TOKENS, batch_size * max(lengths)),
                    progress,
                    store,
                )
            },
        )

    def measured(
        self,
        decoder: Decoder,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        tokens_at_once: int = PATH_TOKENS,
        progress: Progress | None = None,
        store: Store = NOT_KEPT,
    ) -> xr.Dataset:
        """Differentiate by positions, and integrate along paths.

        Costs a forward and a backward pass per prompt and step.

        Args:
            decoder: Decoder of the model.
            scoring: Names the targets of a prompt.
            prompts: Prompts.
            tokens_at_once: Tokens of the points of a path that are run side by side.
            progress: Called with finished prompts and all prompts.
            store: Keeps finished prompts.

        Returns:
            The group `saliency` of a run: `saliency` and `integrated_gradients` [prompt, layer,
            head, token], in nats per token of the answer (and position); `saliency_size` and `integrated_size`
            [prompt, layer, head] (mean, and sum, of their sizes over tokens); `log_probability`,
            `baseline_log_probability` and `completeness_error` [prompt], nats per token, NaN without
            `steps`; and the tokens of the prompts.
        """
        axes = ("layer", "head", "token")
        lengths = [len(prompt.tokens) for prompt in prompts]
        order = sorted(range(len(prompts)), key=lengths.__getitem__)
        limits = replace(batch_limit(decoder, SideBySide(tokens=tokens_at_once)), padding=0)
        beside = {
            number: numbers for numbers in batches(order, lengths, limits) for number in numbers
        }
        # Gradients of prompts that shared a pass, until their points are computed
        waiting = dict[int, Gradients]()

        def point(number: int) -> dict[str, Any]:
            if number not in waiting:
                some = beside[number]
                found = position_gradients(decoder, scoring, [prompts[other] for other in some])
                waiting.update(zip(some, found, strict=True))
            gradients = waiting.pop(number)
            return self._of_prompt(decoder, scoring, prompts[number], gradients, tokens_at_once)

        grid = Grid({"prompt": range(len(prompts))}, point, dict.fromkeys(_BY_TOKEN, axes))
        with frozen_weights(decoder):
            values = grid.compute(store, progress)
        layers = list(decoder.by_layer)
        places = [layers.index(layer) for layer in decoder.positioned]
        by_prompt = {name: ("prompt", values[name].values) for name in _BY_PROMPT}
        by_token = {}
        for name in _BY_TOKEN:
            found = values[name].values
            # All layers, NaN for layers without positions. There is a value per token and head, so
            # float32 halves the file.
            whole = np.full((len(found), len(layers), *found.shape[2:]), np.nan, np.float32)
            whole[:, places] = found
            by_token[name] = (("prompt", *axes), whole)
        sizes = [np.abs(whole) for _, whole in by_token.values()]
        # A head without values has no size; a sum would be 0
        known = [np.isfinite(size).sum(-1) for size in sizes]
        sums = [
            np.where(count > 0, np.nansum(size, -1), np.float32(np.nan))
            for size, count in zip(sizes, known, strict=True)
        ]
        of_head = ("prompt", *axes[:2])
        by_head = {
            "saliency_size": (of_head, sums[0] / np.maximum(known[0], 1).astype(np.float32)),
            "integrated_size": (of_head, sums[1]),
        }
        group = described_group(
            by_token | by_prompt | by_head | _token_values(prompts, scoring),
            _BY_TOKEN | _BY_PROMPT | _BY_HEAD | _TOKENS,
            {
                "prompt": np.arange(len(prompts)),
                "layer": layers,
                "head": np.arange(sizes[0].shape[2]),
                "token": np.arange(sizes[0].shape[3]),
            },
        )
        group = with_schemes(group, decoder.schemes, decoder.learned_schemes)
        return group.assign_attrs(task=scoring.name, baseline=self.baseline, steps=self.steps)

    def _of_prompt(
        self,
        decoder: Decoder,
        scoring: Scoring,
        prompt: Prompt,
        found: Gradients,
        tokens_at_once: int,
    ) -> dict[str, Any]:
        """Values of one prompt: `_BY_TOKEN` by layer with positions, `_BY_PROMPT` numbers."""
        start = end = float("nan")
        attributions = [torch.full_like(of_layer, torch.nan) for of_layer in found.positions]
        if self.steps:
            copies = max(1, tokens_at_once // len(prompt.tokens))
            attributions, start, end = integrated_gradients(
                decoder, scoring, prompt, found.positions, self.baseline, self.steps, copies
            )
        # Float64: the completeness error is a small difference of large sums.
        total = sum(float(of_layer.double().sum()) for of_layer in attributions)
        return {
            "saliency": torch.cat(found.gradients).float().tolist(),
            "integrated_gradients": torch.cat(attributions).float().tolist(),
            "log_probability": found.log_probability,
            "baseline_log_probability": start,
            "completeness_error": total - (end - start),
        }
