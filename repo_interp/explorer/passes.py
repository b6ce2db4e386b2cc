"""Forward passes of one prompt under lists of edits.

Layers before the first edited one are taken from the pass without edits.

    of(edits)               inputs of each layer, last hidden states, positions and scores of every
                            head, from the measures that offer them (`Measure.offers`)
    inputs(edits, layer)    the inputs of one layer's attention (`AttentionInputs`), at the cost of
                            its projections
    rows(edits, tokens)     mean attention from some tokens in every head, at the cost of one pass

An edit in layer l of L costs the L - l layers after it (`models.resuming`). The last `MOST` passes
are kept, and forgotten in the order of their use. Hooks are gone when a call returns, also by an
error. This module knows nothing about pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.analysis.ablation_effects import head_means
from repo_interp.analysis.batches import make_batches
from repo_interp.errors import NotFinite
from repo_interp.explorer.session_edits import MEANS, Edit
from repo_interp.inputs import AttentionInputs
from repo_interp.interventions.ablation import HeadMeans, PairMeans, query_key_means
from repo_interp.measures.border import as_measure, observe
from repo_interp.measures.kernels.samples import middles
from repo_interp.measures.measure_catalogue import measure_named, measures_offering
from repo_interp.measures.statistics import HeadScore, Measure, Needs, Statistics, merge
from repo_interp.models.decoder import as_decoder
from repo_interp.models.observing import observing, require_finite
from repo_interp.models.resuming import Recording, record_pass, resume_pass
from repo_interp.tasks import Prompt

MOST = 6
"""Most passes that are kept, and most layers with kept inputs."""
ROWS = 32
"""Rows of attention that the map of heads reads."""
BUDGET = 1 << 30
"""Most bytes of stored hidden states, not counting the pass without edits and one pass with edits.
"""
RESULTS = 64
"""Results stored with a pass: rows of viewed tokens, and maps of the heads."""
Kept = TypeVar("Kept")
Edits = tuple[Edit, ...]


class _Seen(Exception):
    """Ends a pass that has shown enough."""


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    recording: Recording
    observed: dict[int, dict[str, Statistics]]
    """By layer and measure."""
    measures: Sequence[Measure]
    looks: dict[int, Float[Tensor, "where head"]]
    """By layer, mean attention to token 0 and to the previous token."""
    _results: OrderedDict[Any, Any] = field(default_factory=OrderedDict)

    def result(self, key: Any, compute: Callable[[], Kept]) -> Kept:
        """Return a result of this pass; the last `RESULTS` are kept for the next question.

        Args:
            key: Everything the result depends on, except the pass.
            compute: Function that computes the result.

        Returns:
            The result; it is shared, so callers change copies.
        """
        return _kept(self._results, key, compute, RESULTS)

    @cached_property
    def positions(self) -> xr.DataArray:
        """Positions [layer, head, token], of the first measure that offers them."""
        measure = next(one for one in self.measures if "head_positions" in one.offers.split())
        position = self._groups[measure.name]["position"].isel(prompt=0, drop=True)
        return position.reset_coords(drop=True).transpose("layer", "head", "token")

    @cached_property
    def scores(self) -> dict[str, HeadScore]:
        """Scores of heads by name."""
        return {
            name: score
            for measure in self.measures
            for name, score in measure.head_scores(self._groups[measure.name]).items()
        }

    @cached_property
    def _groups(self) -> dict[str, xr.Dataset]:
        """The groups that `ri.analyze` gives for the measures."""
        parts = {
            measure.name: [layer[measure.name] for layer in self.observed.values()]
            for measure in self.measures
        }
        return {
            measure.name: measure.conclude(merge(parts[measure.name])) for measure in self.measures
        }


class Passes:
    """The passes of one prompt through one bridge."""

    def __init__(self, bridge: nn.Module, prompt: Prompt) -> None:
        self.decoder = as_decoder(bridge)
        self.model, self.prompt = self.decoder.owner, prompt
        (self.batch,) = make_batches([prompt], 1, self.decoder.device)
        offering = measures_offering("head_positions", "head_scores")
        offered = [as_measure(measure_named(name)) for name in offering]
        self.measures = [measure for measure in offered if _takes(measure.needs, prompt)]
        width = self.model.get_input_embeddings().weight.shape[1]
        # Hidden states that enter all blocks and leave the last one, 4 bytes a number
        size = 4 * len(prompt.tokens) * width * (1 + len(self.decoder.blocks))
        # At least 2: every pass with edits starts from the pass without edits.
        self._most = min(MOST, 2 + BUDGET // size)
        # Edits that were entered once, and need no check again
        self._fitting: set[Edit] = set()
        self._kept: OrderedDict[Any, Pass] = OrderedDict()
        self._inputs: OrderedDict[Any, AttentionInputs] = OrderedDict()
        self._rows: OrderedDict[Any, dict[int, Tensor]] = OrderedDict()

    @cached_property
    @torch.no_grad()
    def means(self) -> HeadMeans:
        """Mean outputs of heads over the prompt, without edits."""
        return head_means(self.decoder.owner, [self.prompt])

    @cached_property
    def pair_means(self) -> PairMeans:
        """Means of queries and keys over the prompt, without edits."""
        return query_key_means(self.decoder.owner, [self.prompt.tokens])

    def contexts(self, edits: Edits) -> list[Callable[[], AbstractContextManager[None]]]:
        """Prepare edits for this prompt.

        Args:
            edits: Edits of any layers, heads and tokens.

        Returns:
            One function per edit. It returns a context that applies the edit, at every call.

        Raises:
            InputError: The model or the prompt has no such layer, head, span or token.
        """
        spans, count = self.prompt.all_spans(), len(self.prompt.tokens)
        contexts = []
        for edit in edits:
            name = MEANS.get(edit.kind)
            means = None if name is None else getattr(self, name[0])
            contexts.append(edit.context(self.model, edit.tokens_in(spans, count), means))
            if edit not in self._fitting:
                with contexts[-1]():  # refuses layers and heads that the model lacks
                    self._fitting.add(edit)
        return contexts

    def of(self, edits: Edits, check: Callable[[], None]) -> Pass:
        """Run the model under edits, or take the pass from the kept ones.

        Args:
            edits: Edits that are on.
            check: Function that is called before each layer; its exception ends the pass.

        Returns:
            The pass.
        """
        return _kept(self._kept, edits, lambda: self._passed(edits, check), self._most)

    def inputs(self, edits: Edits, layer: int, check: Callable[[], None]) -> AttentionInputs:
        """Observe one layer under edits.

        Args:
            edits: Edits that are on.
            layer: Number of the layer.
            check: Function that is called before each layer; its exception ends the pass.

        Returns:
            Inputs of the layer's attention.
        """
        return _kept(self._inputs, (edits, layer), lambda: self._looked(edits, layer, check), MOST)

    def rows(
        self, edits: Edits, tokens: tuple[int, ...], check: Callable[[], None]
    ) -> dict[int, Float[Tensor, "head key"]]:
        """Average the attention from some tokens, in every head under edits.

        Args:
            edits: Edits that are on.
            tokens: Query tokens, at least one.
            check: Function that is called before each layer; its exception ends the pass.

        Returns:
            By layer, means of the rows of the tokens, float64; 0 for keys that no row sees.
        """
        return _kept(
            self._rows, (edits, tokens), lambda: self._averaged(edits, tokens, check), MOST
        )

    @torch.no_grad()
    def _averaged(
        self, edits: Edits, tokens: tuple[int, ...], check: Callable[[], None]
    ) -> dict[int, Tensor]:
        recording, means = self.of(edits, check).recording, {}

        def receive(inputs: AttentionInputs) -> None:
            check()
            # A few rows at a time: all rows of a long answer would not fit into memory
            rows = torch.tensor(tokens, device=inputs.queries.device).split(ROWS)
            parts = [inputs.pattern(part)[0].double().sum(-2) for part in rows]
            means[inputs.layer] = (torch.stack(parts).sum(0) / len(tokens)).cpu()

        with ExitStack() as stack:
            for context in self.contexts(edits):
                stack.enter_context(context())
            stack.enter_context(self._observing(receive))
            resume_pass(self.decoder, recording, 0)
        return means

    @torch.no_grad()
    def _passed(self, edits: Edits, check: Callable[[], None]) -> Pass:
        # Its hidden states are where the edited pass begins
        clean = self.of((), check) if edits else None
        first = self._block(min(edit.first_layer for edit in edits)) if edits else 0
        entered: dict[int, Tensor] = {}
        observed: dict[int, dict[str, Statistics]] = {}
        looks: dict[int, Tensor] = {}

        def enter(
            number: int, layer: nn.Module, arguments: tuple, keywords: dict[str, Any]
        ) -> None:
            check()
            # Blocks before the first edited one only hand their input on
            if number >= first:
                entered[number] = arguments[0] if arguments else keywords["hidden_states"]

        def receive(inputs: AttentionInputs) -> None:
            require_finite(inputs)
            observed[inputs.layer] = {
                measure.name: observe(measure, inputs, self.batch.marks(measure))
                for measure in self.measures
            }
            # Reduced at once: attention of all layers would not fit into memory
            looks[inputs.layer] = looked(inputs)

        with ExitStack() as stack:
            for context in self.contexts(edits):
                stack.enter_context(context())
            stack.enter_context(self._observing(receive))
            for number, layer in enumerate(self.decoder.blocks):
                stack.callback(
                    layer.register_forward_pre_hook(partial(enter, number), with_kwargs=True).remove
                )
            if clean is None:
                recording = record_pass(self.decoder, self.batch.tokens)
            else:
                hidden = resume_pass(self.decoder, clean.recording, first)
                before, later = (
                    # The input of the first edited block is still unchanged
                    clean.recording.residuals[: first + 1],
                    range(first + 1, len(self.decoder.blocks)),
                )
                recording = Recording(
                    self.batch.tokens, (*before, *(entered[number] for number in later)), hidden
                )
        if not bool(recording.last_hidden.isfinite().all()):
            raise NotFinite(
                "the model's outputs under these edits are NaN or infinite; make the edit smaller"
            )
        earlier = (
            {}
            if clean is None
            # Layers before the edit, in front of the others: `observed` is in the order of layers
            else {layer: seen for layer, seen in clean.observed.items() if layer not in observed}
        )
        return Pass(
            recording,
            earlier | observed,
            self.measures,
            ({} if clean is None else clean.looks) | looks,
        )

    @torch.no_grad()
    def _looked(self, edits: Edits, layer: int, check: Callable[[], None]) -> AttentionInputs:
        recording, found = self.of(edits, check).recording, []

        def receive(inputs: AttentionInputs) -> None:
            found.append(replace(inputs, tokens=self.batch.tokens))
            raise _Seen

        with ExitStack() as stack:
            for context in self.contexts(edits):
                stack.enter_context(context())
            stack.enter_context(self._observing(receive, [layer]))
            try:
                # Ends in the hook by `_Seen`, right after the projections of this layer
                resume_pass(self.decoder, recording, self._block(layer))
            except _Seen:
                return found[0]
        raise AssertionError(f"the pass did not reach layer {layer}")

    def _observing(
        self, receive: Callable[[AttentionInputs], None], layers: Sequence[int] | None = None
    ) -> Any:
        return observing(self.decoder, self.batch.valid, torch.arange(1), receive, layers)

    def _block(self, layer: int) -> int:
        """The first block to run for a layer; block 0 if blocks have several layers."""
        return layer if self.decoder.layer_count == len(self.decoder.blocks) else 0


def _takes(needs: Needs, prompt: Prompt) -> bool:
    """Whether a measure with these needs takes the prompt and any layer as they are."""
    return (
        {*needs.spans} <= {*prompt.all_spans()}
        and needs.tokens <= len(prompt.tokens)
        and not (needs.segments or needs.schemes)
        and needs.heads is None
        and needs.by_pair
        and needs.documents
    )


def looked(inputs: AttentionInputs) -> Float[Tensor, "where head"]:
    """Average the attention to token 0 and to the previous token.

    Args:
        inputs: Inputs of attention of one prompt.

    Returns:
        Means over up to `ROWS` rows, the middles of equal parts.
    """
    # From 1: token 0 sees only itself and has no previous token
    rows = 1 + torch.tensor(
        middles(inputs.valid.shape[1] - 1, ROWS), dtype=torch.long, device=inputs.queries.device
    )
    weights = inputs.pattern(rows)[0]
    previous = weights.gather(-1, (rows - 1)[None, :, None].expand(len(weights), -1, 1))[..., 0]
    return torch.stack([weights[..., 0].mean(-1), previous.mean(-1)]).cpu()


def _kept(kept: OrderedDict[Any, Kept], key: Any, compute: Callable[[], Kept], most: int) -> Kept:
    """Get or compute the value of `key`; drop the least recently used value beyond `most`."""
    value = kept.pop(key) if key in kept else compute()
    kept[key] = value
    while len(kept) > most:
        # The pass without edits stays, since all others begin from it
        first = next(other for other in kept if other not in ((), key))
        del kept[first]
    return value
