"""Tolerance of a model to perturbed order and positions of tokens.

Position Generalization, sec. 4.1, fig. 5 and table 1. `disturbance` has the kinds of moves.

The paper leaves open how to count. Log perplexity is of the reordered text, so it includes that
the text itself is less likely. `log_perplexity_rise` excludes this: it is the difference to the
undisturbed prompt over the targets that no move touched (for text: neither the target nor the token
before it moved). `output_change` is the relative change of a head's attention outputs (before Wo),

    sqrt(sum_i |o'_i - o_i|^2 / sum_i |o_i|^2)    over the tokens i of all prompts; for text, over
                                                  the tokens that did not move

including the effect of changes in earlier layers. With feature_order, taken literally from the
paper, a row may see the key of a later token, which reveals a little about it through the attention
weights; feature_placement reveals nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import MinLen
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.errors import InputError, renumber_prompts
from repo_interp.experiments.experiment import (
    Experiment,
    Plan,
    Progress,
    require_targets,
    score_texts,
    side_by_side,
    standard_error,
)
from repo_interp.experiments.grid import Grid
from repo_interp.experiments.responses import batches_by_length, forced_responses
from repo_interp.interventions.keys import has_keys_to_move
from repo_interp.measures.labels import described_group
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.outputs import attention_outputs
from repo_interp.models.side_by_side import restore_order
from repo_interp.plugins.lengths.disturbance import KINDS, Disturbance, Kind, OffsetUnit, disturbed
from repo_interp.run import with_schemes
from repo_interp.storage.store import NOT_KEPT, Store
from repo_interp.tasks import Prompt, Response
from repo_interp.tasks.task import Scoring
from repo_interp.values import CountOrNone, Seed, Share, Tokens

PAPER_KINDS: tuple[Kind, ...] = KINDS[:3]
GAMMAS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.5)
"""The shares of table 1, and 0."""
L_MAX = (1, 5, 10, 100)
KEPT = 2**27
"""Most bytes of undisturbed attention outputs that are kept; others need another pass."""


_TEXTS = {
    "log_perplexity": "mean of -log p over all targets [nat]",
    "task_score": "{metric}, mean over prompts [{units}]",
    "task_score_error": "standard error of {metric} over prompts [{units}]",
    "log_perplexity_rise": (
        "rise of -log p against no perturbation, over the targets that no move touched [nat]"
    ),
    "output_change": "relative change of attention outputs, by head",
    "moved_share": "share of all tokens that were moved, mean over layers and prompts",
}


@dataclass
class KeptOutputs:
    """Undisturbed attention outputs of batches, as far as they fit; all points use them."""

    left: int
    """Bytes that are still free."""
    found: dict[tuple[int, ...], Mapping[int, Tensor]] = field(default_factory=dict)

    def of(
        self, numbers: tuple[int, ...], compute: Callable[[], Mapping[int, Tensor]]
    ) -> Mapping[int, Tensor]:
        """Return the outputs of a batch.

        Args:
            numbers: Prompts of the batch.
            compute: Called if the outputs are not kept.

        Returns:
            Outputs by layer.
        """
        if numbers in self.found:
            return self.found[numbers]
        outputs = compute()
        size = sum(of_layer.nbytes for of_layer in outputs.values())
        if size <= self.left:
            self.left -= size
            self.found[numbers] = outputs
        return outputs


@dataclass(frozen=True)
class DisturbedAnswers:
    """Answers of a model to disturbed prompts; every list by prompt."""

    asked: Sequence[Prompt]
    """The perturbed prompts."""
    answered: Sequence[Response]
    rises: Sequence[np.ndarray]
    """The rise of -log p of every target that no move touched, nats."""
    shares: Sequence[float]
    """Share of the tokens that were moved."""
    untouched: Sequence[np.ndarray]
    """Whether no move touched a target."""

    def summary(self, scoring: Scoring) -> dict[str, float]:
        """Compute the numbers of one point.

        Args:
            scoring: Scores the answers.

        Returns:
            Values by the names of the group's variables.
        """
        scores = np.asarray(scoring.score(self.answered, self.asked), dtype=np.float64)
        rise = np.concatenate(self.rises)
        return {
            "log_perplexity": -float(
                np.mean(np.concatenate([answer.log_probabilities for answer in self.answered]))
            ),
            "task_score": float(scores.mean()),
            "task_score_error": standard_error(scores),
            # If half of the tokens move, all targets may be touched.
            "log_perplexity_rise": float(rise.mean()) if len(rise) else float("nan"),
            "moved_share": float(np.mean(self.shares)),
        }


def answers_at(
    decoder: Decoder,
    scoring: Scoring,
    prompts: Sequence[Prompt],
    plain: Sequence[Response],
    point: Disturbance,
    batch_size: int,
    receive_outputs: Callable[[np.ndarray], object] | None = None,
    kept: KeptOutputs | None = None,
) -> DisturbedAnswers:
    """Run perturbed prompts, with prompts of similar length side by side.

    Args:
        decoder: Decoder of the model.
        scoring: Names the targets of a prompt.
        prompts: Undisturbed prompts.
        plain: Responses to `prompts`.
        point: Kind, share and reach of the moves.
        batch_size: Prompts side by side.
        receive_outputs: Called per batch with the sums over tokens of |o' - o|^2 and |o|^2 of
            attention outputs [2, layer, head]; costs another undisturbed pass if `kept` has none.
        kept: Undisturbed outputs of earlier calls; None: no outputs are kept.

    Returns:
        Answers in the order of the prompts.
    """
    kept = KeptOutputs(0) if kept is None else kept
    cut, found = batches_by_length(decoder, prompts, batch_size), []
    for numbers in cut:
        found.append([])
        some, context, moved = disturbed(
            decoder, [prompts[number] for number in numbers], numbers, point
        )
        plain_outputs: Mapping[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        observed = nullcontext()
        if receive_outputs is not None:
            same = [prompts[number] for number in numbers]
            # Before any hook of the perturbation
            plain_outputs = kept.of(tuple(numbers), partial(_outputs, decoder, scoring, same))
            observed = attention_outputs(decoder, outputs.__setitem__)
        with context, renumber_prompts(numbers), observed:
            answers = forced_responses(decoder.module, scoring, some, len(some))
        if receive_outputs is not None:
            compared = np.arange(moved.shape[-1]) < np.array(
                [[len(prompt.tokens)] for prompt in some]
            )
            # The output at a moved token is another token's, so only unmoved tokens are compared.
            if point.kind == "text_order":
                compared &= ~moved[:, 0]
            receive_outputs(_squares(decoder, plain_outputs, outputs, compared))
        for number, prompt, answer, moves in zip(numbers, some, answers, moved, strict=True):
            targets = np.array(scoring.targets(prompt))
            # Moves of keys leave all tokens in place; only text changes tokens.
            touched = moves[0] if point.kind == "text_order" else np.zeros_like(moves[0])
            # The row before a target predicts it, so neither may have moved.
            untouched = ~touched[targets] & ~touched[targets - 1]
            before, after = plain[number].log_probabilities, answer.log_probabilities
            rise = (np.array(before) - np.array(after))[untouched]
            share = float(moves[:, : len(prompt.tokens)].mean())
            found[-1].append((prompt, answer, rise, share, untouched))
    return DisturbedAnswers(*zip(*restore_order(cut, found), strict=True))


def _fit(decoder: Decoder, lengths: Sequence[int]) -> bool:
    """Whether the attention outputs of all prompts fit into `KEPT`."""
    widths = (attention.heads * attention.d_head for attention in decoder.layers)
    return sum(widths) * decoder.dtype.itemsize * sum(lengths) <= KEPT


def _outputs(
    decoder: Decoder, scoring: Scoring, prompts: Sequence[Prompt]
) -> dict[int, Float[Tensor, "prompt token width"]]:
    """Attention outputs of one pass, by layer."""
    found: dict[int, Tensor] = {}
    with attention_outputs(decoder, found.__setitem__):
        forced_responses(decoder.module, scoring, prompts, len(prompts))
    return found


def _squares(
    decoder: Decoder, plain: Mapping[int, Tensor], changed: dict[int, Tensor], compared: np.ndarray
) -> np.ndarray:
    """Sums of |o' - o|^2 and |o|^2 [2, layer, head] over `compared` tokens [prompt, token]."""
    # By index: selecting by a mask would wait for an accelerator.
    chosen, sums = torch.from_numpy(np.flatnonzero(compared)), []
    for attention in decoder.layers:
        before, after = (
            (outputs if compared.all() else outputs[chosen.to(outputs.device)])
            .double()
            .unflatten(-1, (attention.heads, -1))
            for outputs in (
                of_layers.flatten(0, 1)
                for of_layers in (plain[attention.layer_idx], changed.pop(attention.layer_idx))
            )
        )
        # Over tokens and d_head: one sum per head.
        sums.append(torch.stack([(values**2).sum((0, 2)) for values in (after - before, before)]))
    return (
        torch.stack([of_layer.to(decoder.device) for of_layer in sums]).cpu().numpy().swapaxes(0, 1)
    )


@dataclass(frozen=True)
class Perturbation(Experiment):
    """The experiment `perturbation` (Position Generalization sec. 4.1)."""

    kinds: Annotated[tuple[Kind, ...], MinLen(1)] = PAPER_KINDS
    """Disturbances; also `feature_placement`: keys exchange their positions (ours)."""
    gammas: Annotated[tuple[Share, ...], MinLen(1)] = GAMMAS
    """Shares of tokens that are moved; none is always among them."""
    l_maxes: Annotated[tuple[Tokens, ...], MinLen(1)] = L_MAX
    """Farthest moves, in tokens."""
    layers: tuple[CountOrNone, ...] = ()
    """Layers whose features and positions are disturbed; empty: all."""
    offset_unit: OffsetUnit = "positions"
    """`positions`, or `range`: offsets scaled by the reach of a head's positions."""
    seed: Seed = 0
    """Seed of the moves."""
    name: ClassVar[str] = "perturbation"
    describes: ClassVar[str] = "of order and positions, on these prompts"

    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """Plan the grid over `prompts`.

        Raises InputError for layers that have nothing to disturb, and prompts without anything to
        predict.
        """
        decoder = as_decoder(model)
        _ = decoder.heads  # refuses layers with different numbers of heads
        self._layers(decoder)
        require_targets(self.name, scoring, prompts)
        # Share 0 is one plain pass for all kinds and reaches.
        points = len(self.kinds) * len(set(self.gammas) - {0.0}) * len(self.l_maxes)
        lengths = tuple(len(prompt.tokens) for prompt in prompts)
        size = partial(side_by_side, longest=max(lengths))
        return Plan(
            self,
            # Outputs are compared with undisturbed ones, which every point computes again if they
            # do not fit into `KEPT`.
            lengths * (1 + points + (min(points, 1) if _fit(decoder, lengths) else points)),
            lambda batch_size, store, progress: {
                self.name: self.measured(
                    decoder, scoring, prompts, size(batch_size), progress, store
                )
            },
        )

    def measured(
        self,
        decoder: Decoder,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        batch_size: int = 16,
        progress: Progress | None = None,
        store: Store = NOT_KEPT,
        undisturbed: Sequence[Response] | None = None,
    ) -> xr.Dataset:
        """Answer `prompts` teacher-forced for every kind, share and reach.

        Costs two forward passes per prompt and point (one if undisturbed outputs fit into `KEPT`),
        and one pass for gamma = 0, which is always measured.

        Args:
            decoder: Decoder of the model.
            scoring: Names the targets of a prompt and scores the answers.
            prompts: Prompts.
            batch_size: Prompts side by side.
            progress: Called with finished points and all points.
            store: Keeps finished points.
            undisturbed: Responses to the undisturbed prompts; None computes them.

        Returns:
            The group `perturbation` of a run over [kind, gamma, l_max]: `log_perplexity` (nats per
            target), `task_score` (in the units of `scoring`) with `task_score_error` over prompts,
            `log_perplexity_rise`, `moved_share`; `output_change` also over [layer, head].

        Raises:
            InputError: The layers have nothing to disturb.
        """
        layers, numbers = self._layers(decoder), list(decoder.by_layer)
        shape = (len(numbers), decoder.heads)
        # Not run if the store has every point.
        plain = cache(
            lambda: undisturbed or forced_responses(decoder.module, scoring, prompts, batch_size)
        )

        kept = KeptOutputs(KEPT)

        def point(kind: str, gamma: float, l_max: int) -> dict[str, Any]:
            squares: list[np.ndarray] = []
            if gamma == 0:  # nothing moves, and nothing is run again
                # |o' - o|^2 of 0 and |o|^2 of 1: a change of 0 without a pass.
                squares.append(np.stack([np.zeros(shape), np.ones(shape)]))
                answers = DisturbedAnswers(
                    prompts, plain(), [np.zeros(1)], [0.0], [np.ones(1, bool)]
                )
            else:
                disturbance = Disturbance(kind, gamma, l_max, layers, self.offset_unit, self.seed)
                answers = answers_at(
                    decoder,
                    scoring,
                    prompts,
                    plain(),
                    disturbance,
                    batch_size,
                    squares.append,
                    kept,
                )
            # Squares are summed over batches before the root: a ratio of totals, not a mean of
            # ratios.
            change = np.sqrt(np.divide(*np.sum(squares, axis=0)))
            return answers.summary(scoring) | {"output_change": change.tolist()}

        axes = {"kind": self.kinds, "gamma": sorted({0.0, *self.gammas}), "l_max": self.l_maxes}
        found = Grid(axes, point, {"output_change": ("layer", "head")}).compute(store, progress)
        group = described_group(
            found.assign_coords(layer=numbers, head=np.arange(shape[1])),
            score_texts(_TEXTS, scoring),
        )
        group = with_schemes(group, decoder.schemes, decoder.learned_schemes)
        group["l_max"].attrs = {"long_name": "largest distance of a move", "units": "tokens"}
        group["gamma"].attrs = {"long_name": "share of tokens moved", "units": "1"}
        return group.assign_attrs(
            scoring.attributes,
            layers=list(layers),
            offset_unit=self.offset_unit,
            seed=self.seed,
            prompts=len(prompts),
        )

    def _layers(self, decoder: Decoder) -> tuple[int, ...]:
        """Return the perturbed layers.

        Raises InputError for unknown layers, and if no key has a position to move.
        """
        layers = decoder.attentions(self.layers)
        moving = [kind for kind in self.kinds if kind in ("position_offset", "feature_placement")]
        # In layers without positions of keys the grid would show no effect.
        if moving and layers and not any(map(has_keys_to_move, layers)):
            learned = (
                " (a learned table acts in layer 0)"
                if any(attention.scheme == "learned" for attention in layers)
                else ""
            )
            named = (
                f"layer{'s' if len(layers) > 1 else ''} "
                f"{', '.join(str(attention.layer_idx) for attention in layers)}"
            )
            raise InputError(
                f"{moving[0]} moves the positions of keys, and there are none in "
                f"{named}{learned}; name other layers, or leave the kind out"
            )
        return tuple(sorted(set(self.layers) or decoder.by_layer))
