"""Tolerance of a model to perturbed order and positions of tokens.

Position Generalization, sec. 4.1, fig. 5 and table 1:

    text_order           tokens of the prompt change places
    feature_order        keys change places in the chosen layers; values and positions stay
    position_offset      positions of keys move by up to l_max in the chosen layers
    feature_placement    keys exchange their positions; the causal mask stays (ours)

A share gamma of the tokens moves within l_max, drawn independently for every prompt and layer, the
same for all heads. The first token (<bos>) and generated tokens (the answer) never move. The moved
tokens and their distances are drawn so:

    transposed    round(gamma n / 2) disjoint pairs (j, j') with 1 <= |j - j'| <= l_max change
                  places
    offset        round(gamma n) tokens move by a whole number from -l_max .. l_max without 0

The order of drawing does not depend on gamma, so a larger share includes the tokens of a smaller
one. A token without a free partner within reach is skipped: near gamma = 1 a few tokens stay.

The paper leaves these choices open. Log perplexity is of the reordered text, so it includes that
the text itself is less likely. `log_perplexity_rise` excludes this: it is the difference to the
undisturbed prompt over the targets that no move touched (for text: neither the target nor the token
before it moved). `output_change` is the relative change of a head's attention outputs (before Wo),

    sqrt(sum_i |o'_i - o_i|^2 / sum_i |o_i|^2)    over the tokens i of all prompts; for text, over
                                                  the tokens that did not move

including the effect of changes in earlier layers. With feature_order, taken literally from the
paper, a row may see the key of a later token, which reveals a little about it through the attention
weights; feature_placement reveals nothing. With learned positions an offset in positions is not an
offset in tokens: `offset_unit="range"` multiplies it by (range of a head's positions) / (tokens of
the prompt - 1), which is 1 for the token index.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
import xarray as xr
from annotated_types import MinLen
from jaxtyping import Float, Int
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
from repo_interp.interventions import Shift, exchanged_keys, moved_keys
from repo_interp.interventions.keys import has_keys_to_move
from repo_interp.measures.labels import described_group
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.outputs import attention_outputs
from repo_interp.models.side_by_side import restore_order
from repo_interp.run import with_schemes
from repo_interp.storage.store import NOT_KEPT, Store
from repo_interp.tasks import Prompt, Response
from repo_interp.tasks.task import Scoring
from repo_interp.values import CountOrNone, Seed, Share, Tokens

Kind = Literal["text_order", "feature_order", "position_offset", "feature_placement"]
OffsetUnit = Literal["positions", "range"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PAPER_KINDS: tuple[Kind, ...] = KINDS[:3]
GAMMAS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.5)
"""The shares of table 1, and 0."""
L_MAX = (1, 5, 10, 100)
KEPT = 2**27
"""Most bytes of undisturbed attention outputs that are kept; others need another pass."""


@dataclass(frozen=True)
class Disturbance:
    """One point of the grid."""

    kind: str
    gamma: float
    l_max: int
    layers: tuple[int, ...]
    offset_unit: str = "positions"
    seed: int = 0


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


def disturbed(
    decoder: Decoder, prompts: Sequence[Prompt], numbers: Sequence[int], point: Disturbance
) -> tuple[list[Prompt], AbstractContextManager[None], np.ndarray]:
    """Perturb prompts at one point of the grid.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts side by side.
        numbers: Numbers of the prompts in the experiment. The draws depend on them, the seed, the
            kind, the layer and l_max.
        point: Kind, share and reach of the moves.

    Returns:
        The prompts to run, the context to run them in, padded on the right, and whether a token
        moves [prompt, layer, token].
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    # All layers see the same tokens, so text has one order.
    layers = (0,) if point.kind == "text_order" else point.layers
    # A copy, since a broadcast array cannot be written to.
    orders = np.broadcast_to(np.arange(longest), (len(layers), len(prompts), longest)).copy()
    offsets = np.zeros_like(orders)
    draw, into = (offset, offsets) if point.kind == "position_offset" else (transposed, orders)
    for row, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        count = len(prompt.tokens)
        # Moving <bos> would disturb the sink, and the answer is judged.
        stays = np.zeros(count, dtype=bool)
        stays[[0, *prompt.generated]] = True
        movable = np.flatnonzero(~stays)
        for place, layer in enumerate(layers):
            generator = np.random.default_rng(
                # Without gamma, so that larger shares include smaller ones; crc32, since hash()
                # differs by process.
                [point.seed, zlib.crc32(point.kind.encode()), number, layer, point.l_max]
            )
            into[place, row, :count] = draw(generator, movable, count, point.gamma, point.l_max)
    # [prompt, layer, token]
    moved = ((orders != np.arange(longest)) | (offsets != 0)).swapaxes(0, 1)
    if point.kind == "text_order":
        changed = [
            dataclasses.replace(
                prompt,
                tokens=tuple(prompt.tokens[place] for place in order[: len(prompt.tokens)]),
                # The texts are in the old order.
                token_text=None,
            )
            for prompt, order in zip(prompts, orders[0], strict=True)
        ]
        return changed, nullcontext(), moved
    device = decoder.device
    by_layer = dict(zip(layers, torch.from_numpy(into).to(device), strict=True))
    if point.kind == "feature_order":
        return list(prompts), exchanged_keys(decoder.module, by_layer), moved
    # An exchange is a shift too, since the distance differs by head.
    shift_of: Callable[[Tensor], Shift] = _exchange
    if point.kind == "position_offset":
        counts = torch.tensor([len(prompt.tokens) for prompt in prompts], device=device)
        shift_of = partial(_shift, counts=counts, unit=point.offset_unit)
    shifts = {layer: shift_of(moves) for layer, moves in by_layer.items()}
    return list(prompts), moved_keys(decoder.module, shifts), moved


def _exchange(order: Tensor) -> Shift:
    def shift(positions: Tensor) -> Tensor:
        # All prompts may share positions (the token index), but moves differ by prompt.
        positions = positions.expand(order.shape[0], -1, -1)
        return positions.gather(-1, order[:, None].expand_as(positions)) - positions

    return shift


def _shift(offsets: Tensor, counts: Tensor, unit: str) -> Shift:
    def shift(positions: Tensor) -> Tensor:
        moves = offsets[:, None].to(positions)
        if unit == "positions":
            return moves
        positions = positions.expand(offsets.shape[0], -1, -1)
        # Zeros of the padding would increase the range of a prompt.
        padding = torch.arange(offsets.shape[1], device=positions.device) >= counts[:, None, None]
        reach = positions.masked_fill(padding, -torch.inf).amax(-1) - positions.masked_fill(
            padding, torch.inf
        ).amin(-1)
        # range / (tokens - 1) is the mean step of a head: an offset of one token is one step.
        return moves * (reach / (counts[:, None] - 1).clamp(min=1))[..., None]

    return shift


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


def transposed(
    generator: np.random.Generator,
    movable: Int[np.ndarray, " token"],
    count: int,
    gamma: float,
    l_max: int,
) -> Int[np.ndarray, " token"]:
    """Draw disjoint pairs of tokens that change places.

    Args:
        generator: Source of randomness.
        movable: Tokens that may move.
        count: Tokens of the prompt.
        gamma: Share of the movable tokens that move.
        l_max: Largest distance of a move.

    Returns:
        An order of `count` tokens: token j becomes token order[j].
    """
    order = np.arange(count)
    free = np.zeros(count, dtype=bool)
    free[movable] = True
    # Drawn for all tokens, used or not, so that gamma does not change other draws.
    wanted, partners = round(gamma * len(movable) / 2), generator.random(len(movable))
    for token, chance in zip(generator.permutation(movable), partners, strict=True):
        if wanted == 0:
            break
        if not free[token]:
            continue
        free[token] = False
        first = max(0, token - l_max)
        near = first + np.flatnonzero(free[first : token + l_max + 1])
        if not len(near):
            # No free partner within reach, so the token stays free as a partner of later ones.
            free[token] = True
            continue
        # A uniform number selects one of any number of candidates.
        other = near[int(chance * len(near))]
        free[other] = False
        order[token], order[other] = other, token
        wanted -= 1
    return order


def offset(
    generator: np.random.Generator,
    movable: Int[np.ndarray, " token"],
    count: int,
    gamma: float,
    l_max: int,
) -> Int[np.ndarray, " token"]:
    """Draw offsets of tokens.

    Args:
        generator: Source of randomness.
        movable: Tokens that may move.
        count: Tokens of the prompt.
        gamma: Share of the movable tokens that move.
        l_max: Largest offset.

    Returns:
        The offset of every token, in tokens; 0 for most.
    """
    chosen = generator.permutation(movable)[: round(gamma * len(movable))]
    # For all tokens, so that a token's offset does not depend on the number of chosen tokens
    sizes = generator.integers(1, l_max + 1, len(movable))
    signs = generator.choice((-1, 1), len(movable))
    moves = np.zeros(count, dtype=np.int64)
    moves[chosen] = (sizes * signs)[: len(chosen)]
    return moves


@dataclass(frozen=True)
class Perturbation(Experiment):
    """The experiment `perturbation` (Position Generalization sec. 4.1)."""

    kinds: Annotated[tuple[Kind, ...], MinLen(1)] = PAPER_KINDS
    """What is disturbed; also `feature_placement`: keys change places with each other's positions
    (ours).
    """
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
