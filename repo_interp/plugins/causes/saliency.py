"""Gradients of the log-probability of an answer by positions, at a point and along a path.

    f           = mean of log p(token_t | tokens before t) over the targets t of a prompt, in nats per
                  token, as in `effects`
    saliency    = d f / d z_{l,h,i}            one pass forward and back for all tokens and heads
    integrated  = (z - z') int_0^1 (dF / dz)(z' + a (z - z')) da
                                               (Sundararajan, Taly and Yan 2017, eq. 1)
    completeness: sum over l, h, i of integrated = F(z) - F(z')
                                               its error is kept; it falls with the number of steps

z_{l,h,i}: position of token i in head h of layer l, as query and as key. Layers that rotate have
positions, learned ones and the token index alike; others (NoPE, ALiBi, CoPE, ...) have NaN. Heads
that share positions - those of a layer, or of a key-value head - get separate rows, so a derivative
is that of moving one head alone, keys included, as `interventions.set_positions` does.

The two hold different things constant. `saliency` is the effect of a small intervention at one
place: f_phi of later layers reads hidden states that changed, and answers. In `F` all positions of
all layers are inputs, moved together along one straight path, and none answers another. The
baseline z' is `constant`, the mean of a head's positions over the prompt (no position tells tokens
apart), or `index`. A common shift of a head's positions changes nothing, so a head's saliencies sum
to 0 over tokens.

The integral is Captum's `IntegratedGradients` (Gauss-Legendre): positions are inputs of `F`, one
tensor per layer, which is the form it takes. Its `LayerIntegratedGradients` does not fit: it takes
a layer's values at another *prompt* for the baseline, not given ones. Where z - z' turns pairs by
many radians the integrand swings and a path needs thousands of steps; look at the completeness
error first.

Knows nothing about how prompts are chosen or drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from repo_interp.experiments.grid import Grid, padded
from repo_interp.experiments.responses import target_logits, to_question
from repo_interp.measures.labels import described_group
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.positions.logits import exact
from repo_interp.positions.rotary import expand_heads
from repo_interp.run import with_schemes
from repo_interp.store import NOT_KEPT, Store
from repo_interp.tasks import Batch, Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import CountOrNone

BACKWARD = 3
"""Forward passes that a pass forward and back takes as long as."""
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


def position_gradients(
    decoder: Decoder, scoring: Scoring, prompt: Prompt
) -> tuple[list[Float[Tensor, "1 head token"]], list[Float[Tensor, "1 head token"]], float]:
    """Differentiate the log-probability of the answer by all positions, in one pass.

    Args:
        decoder: Decoder of the model.
        scoring: Names the targets of a prompt.
        prompt: Prompt.

    Returns:
        Positions of every layer that assigns some, a row for every head; d f / d z there; and f, in
        nats per token of the answer.
    """
    layers = list(decoder.positioned.values())
    heads = decoder.heads
    positions: list[Tensor] = []
    moves: list[Tensor] = []

    def move(place: int, assigned: Tensor) -> Tensor:
        """`assigned` with a row of its own for every head, plus 0, by which is differentiated."""
        # in half precision a path in steps of 0.5 would be none
        rows = exact(expand_heads(assigned, heads))
        positions.append(rows.detach())
        # A derivative at 0 by the addend is the derivative by the position, learned or not.
        moves.append(torch.zeros_like(rows, requires_grad=True))
        return rows + moves[-1]

    # Callers may be inside no_grad, as measuring is elsewhere.
    with torch.enable_grad(), _positions_changed(layers, move):
        (log_probability,) = _log_probabilities(decoder, scoring, prompt, 1)
        gradients = torch.autograd.grad(log_probability, moves)
    return positions, list(gradients), float(log_probability.detach())


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
        positions: Positions of the layers that assign some.
        baseline: "constant" or "index".
        steps: Points of the path.
        copies: Points that are run side by side.

    Returns:
        Integrated gradients by `positions`, and F in nats per token at the baseline and at `positions`.
    """
    # takes most of a second: only who asks for a path pays it
    from captum.attr import IntegratedGradients

    layers = list(decoder.positioned.values())

    # One tensor of positions per layer: Captum attributes to inputs, whatever the model reads.
    def probability(*given: Float[Tensor, "point head token"]) -> Float[Tensor, "point"]:
        with _positions_changed(layers, lambda place, assigned: given[place]):
            return _log_probabilities(decoder, scoring, prompt, len(given[0]))

    inputs = tuple(of_layer.contiguous() for of_layer in positions)
    index = torch.arange(len(prompt.tokens), device=inputs[0].device)
    origin = tuple(
        # [1, head, token]; the mean stands for no position: one constant tells no tokens apart.
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
        # `internal_batch_size` only bounds memory: points of the path do not see one another.
        list(integral.attribute(inputs, origin, n_steps=steps, internal_batch_size=copies)),
        start,
        end,
    )


def _log_probabilities(
    decoder: Decoder, scoring: Scoring, prompt: Prompt, copies: int
) -> Float[Tensor, "copy"]:
    """Log-probability of the targets of `prompt`, nats per target, of each copy in one pass."""
    targets = np.zeros((copies, len(prompt.tokens)), dtype=bool)
    targets[:, list(scoring.targets(prompt))] = True
    # Copies of the prompt differ in positions alone: one copy per point of the path.
    batch = Batch(np.tile(prompt.tokens, (copies, 1)), targets)
    question = to_question(batch, decoder.device)
    by_target = (
        target_logits(decoder, question).log_softmax(-1).gather(-1, question.targets[:, None])[:, 0]
    )
    # A mean over targets by copy; every copy has as many targets.
    return by_target.new_zeros(copies).index_add(0, question.rows, by_target) / targets[0].sum()


@contextmanager
def _positions_changed(
    layers: Sequence[RepositionedAttention], change: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """While the context lasts, the n-th of `layers` goes on with change(n, its positions)."""

    def hook(place: int) -> Callable[..., Tensor]:
        return lambda module, arguments, assigned: change(place, assigned)

    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            # At the output of the assigner, before rotation: later code
            # cannot tell it from the model's own.
            hooks.callback(layer.sites.positions.register_forward_hook(hook(place)).remove)
        yield


def _token_group(prompts: Sequence[Prompt], scoring: Scoring) -> xr.Dataset:
    """Tokens, their texts where every prompt has them, and which of them are the answer."""
    rows = [prompt.tokens for prompt in prompts]
    answers = [
        np.isin(np.arange(len(prompt.tokens)), scoring.targets(prompt)) for prompt in prompts
    ]
    axes = ("prompt", "token")
    values: dict[str, Any] = {
        "token_id": (axes, padded(rows, -1, np.int64)),
        "token_count": ("prompt", [len(row) for row in rows]),
        "answer": (axes, padded(answers, -1, np.int8)),
    }
    # Texts are shown only where all prompts have them, as one array holds them.
    if all(prompt.token_text is not None for prompt in prompts):
        texts = [np.array(prompt.token_text, dtype=object) for prompt in prompts]
        values["token_text"] = (axes, padded(texts, "", object))
    return described_group(values, _TOKENS)


@dataclass(frozen=True)
class Saliency(Experiment):
    """The experiment `saliency` (ours; integrated gradients: Sundararajan, Taly and Yan 2017)."""

    baseline: Baseline = "constant"
    """Where the path of integrated gradients begins: `constant`, the mean of a head's positions
    over the prompt, or `index`.
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
        """Every step of every prompt, forward and back.

        Raises InputError where no layer assigns positions, or nothing is predicted.
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
                    # As many points as fit into a pass that keeps its activations
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
        """Differentiate by positions, and integrate along paths, prompt by prompt.

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

        def point(number: int) -> dict[str, Any]:
            return self._of_prompt(decoder, scoring, prompts[number], tokens_at_once)

        grid = Grid({"prompt": range(len(prompts))}, point, dict.fromkeys(_BY_TOKEN, axes))
        values = grid.compute(store, progress)
        # Reindexed over all layers at the end: those without positions get NaN.
        values = values.assign_coords(
            layer=list(decoder.positioned),
            head=np.arange(values.sizes["head"]),
            token=np.arange(values.sizes["token"]),
        ).reindex(layer=list(decoder.by_layer))
        # Kept for every token and head, so float32 halves the file.
        by_token = values[[*_BY_TOKEN]].astype(np.float32)
        values = values.assign(by_token).assign(
            saliency_size=abs(by_token["saliency"]).mean("token"),
            # min_count: all NaN stays NaN, where a sum would be 0
            integrated_size=abs(by_token["integrated_gradients"]).sum("token", min_count=1),
        )
        group = described_group(values, _BY_TOKEN | _BY_PROMPT | _BY_HEAD)
        group = with_schemes(
            group.merge(_token_group(prompts, scoring)), decoder.schemes, decoder.learned_schemes
        )
        return group.assign_attrs(task=scoring.name, baseline=self.baseline, steps=self.steps)

    def _of_prompt(
        self, decoder: Decoder, scoring: Scoring, prompt: Prompt, tokens_at_once: int
    ) -> dict[str, Any]:
        """Values of one prompt: `_BY_TOKEN` by layer with positions, `_BY_PROMPT` numbers."""
        with frozen_weights(decoder):
            positions, gradients, log_probability = position_gradients(decoder, scoring, prompt)
            start = end = float("nan")
            attributions = [torch.full_like(of_layer, torch.nan) for of_layer in positions]
            if self.steps:
                copies = max(1, tokens_at_once // len(prompt.tokens))
                attributions, start, end = integrated_gradients(
                    decoder, scoring, prompt, positions, self.baseline, self.steps, copies
                )
        # Float64: the error of completeness is a small difference of this sum.
        total = sum(float(of_layer.double().sum()) for of_layer in attributions)
        return {
            "saliency": torch.cat(gradients).float().tolist(),
            "integrated_gradients": torch.cat(attributions).float().tolist(),
            "log_probability": log_probability,
            "baseline_log_probability": start,
            "completeness_error": total - (end - start),
        }
