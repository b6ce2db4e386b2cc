"""A job: which measures and experiments are made of which prompts on which model.

    job = Job(bridge, prompts, measures, batch_size=8)
    job.observe(batch)      {measure: Statistics | Fault}    one forward pass
    job.conclude(totals)    {measure: Dataset | Fault}       groups of a run, from merged statistics

Everything is checked to fit together when a job is made, before anything is computed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from repo_interp.analysis.batches import PaddedBatch, make_batches, structure_for
from repo_interp.analysis.coercion import Prompts, as_prompts
from repo_interp.analysis.defaults import choose, default_prompts, origin_of, resolve_measures
from repo_interp.analysis.faults import PASS, Fault, fault_in, fault_of_pass
from repo_interp.analysis.gaps import Gaps
from repo_interp.analysis.gathered_layers import GatheredLayers
from repo_interp.analysis.layer_statistics import observe_layer
from repo_interp.entry_points import EXPERIMENTS, MEASURES, OWN, VIEWS, called
from repo_interp.errors import InputError, one_line, quoted
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.experiments.experiment_catalogue import experiments_named, planned
from repo_interp.inputs import AttentionInputs
from repo_interp.interventions.replacing import require_named_tokens
from repo_interp.measures.border import as_measure, observe_predictions, require_declared
from repo_interp.measures.kernels.seen_pairs import is_whole
from repo_interp.measures.labels import parameter_attributes
from repo_interp.measures.statistics import (
    Measure,
    Statistics,
    merge,
    of_training_length,
)
from repo_interp.models.capture import decode
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import require_weights
from repo_interp.models.next_tokens import predictions_of
from repo_interp.models.observing import observing
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.provenance import identity
from repo_interp.models.reposition import observable
from repo_interp.models.side_by_side import BatchSize
from repo_interp.run import KEPT, checked_group, require_name, versions, with_schemes
from repo_interp.runtime.failures import is_out_of_memory
from repo_interp.tasks.prompt import GENERATED, NEXT, Prompt, copies_next, main_span
from repo_interp.tasks.prompt import digest as prompts_digest
from repo_interp.tasks.task import Task


class Job:
    """Measures and experiments to make of prompts on a model."""

    def __init__(
        self,
        bridge: nn.Module,
        prompts: Prompts | None = None,
        measures: Sequence[str | Measure] | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        experiments: Sequence[str | Experiment | Plan] | None = None,
        task: Task | None = None,
        batch_size: BatchSize | Literal["auto"] = "auto",
        prompts_from: str = "the caller",
    ) -> None:
        """Check that all arguments fit together; arguments as for `analyze`.

        Args:
            bridge: Bridge, Hugging Face model or repositioned model.
            prompts: Prompts, texts or tokens; None: `default_prompts`.
            measures: Names or measures; None: `default_measures`.
            layers: Layers to measure; None: all.
            heads: Heads to measure; None: all.
            experiments: Names, experiments or plans; None: `choose` decides.
            task: Task that experiments score the prompts by; None: their generated tokens.
            batch_size: Prompts of a forward pass, limits of it, or "auto".
            prompts_from: Origin of the prompts, in words, for the attributes of the run.

        Raises:
            InputError: If prompts, layers or heads do not fit the model, the measures or the
                experiments, or if an intervention changes attention where a measure cannot see it.
        """
        # Names first, since the rest may take long
        measures = None if measures is None else resolve_measures(measures)
        experiments = None if experiments is None else experiments_named(experiments)
        decoder = self.decoder = as_decoder(observable(bridge))
        self.remark = ""
        """Which prompts are measured where none were given."""
        if prompts is None:
            self.prompts, trained = default_prompts(decoder)
            prompts_from, task = origin_of(trained), trained if task is None else task
            many = "s" if len(self.prompts) > 1 else ""
            self.remark = (
                f"no prompts were given: {len(self.prompts)} prompt{many} from {prompts_from}"
            )
        else:
            self.prompts = as_prompts(prompts, decoder.tokenizer)
        if task is not None and not isinstance(task, Task):
            raise InputError(
                f"task is {quoted(task)}; wanted a task, as ri.tasks.make_task returns it"
            )
        self.prompts_from, self.task = prompts_from, task
        chosen, experiments = choose(decoder, self.prompts, measures, layers, experiments, task)
        length, heads_of_layer = decoder.training_length, decoder.config.num_attention_heads
        # Some parameters default to the training length, which a measure does not know by itself
        self.measures = [
            of_training_length(as_measure(measure), length) for measure in resolve_measures(chosen)
        ]
        self.layers = (
            list(decoder.by_layer)
            if layers is None
            else within(layers, len(decoder.schemes), "layer")
        )
        decoder.attentions(self.layers)  # refuses a layer without attention
        self.heads = None if heads is None else within(heads, heads_of_layer, "head")
        """None: all."""
        for measure in self.measures:
            require_declared(measure)
            _require_chosen(measure, self.layers, heads_of_layer)
        self._require_seen()
        _require_prompts(self.prompts, self.measures, decoder.vocabulary_size)
        require_weights(decoder)
        self.gaps = Gaps(decoder, self.measures, self.prompts, self.layers)
        """Gaps of the measures in the layers."""
        self.gaps.require_layers()
        self.experiments = planned(decoder, self.prompts, experiments, task)
        # Prompts of experiments count too: only they may reach a named token
        require_named_tokens(
            decoder, len(self.prompts), [*(self.lengths if self.measures else ()), *self.passes]
        )
        # refuses kinds of segments that are not known
        structure_for(self.prompts[:1], self.measures, decoder.tokenizer)
        self._require_names()
        if (
            batch_size == "auto"
            and decoder.length_matters
            and any(prompt.position_ids is not None for prompt in self.prompts)
        ):
            # The largest position of a pass decides its frequencies
            batch_size = 1
        self.batch_size, self.size = batch_size, batch_limit(decoder, batch_size)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every prompt."""
        return [len(prompt.tokens) for prompt in self.prompts]

    @property
    def passes(self) -> list[int]:
        """Number of tokens of every prompt that the experiments run."""
        return [length for plan in self.experiments for length in plan.passes]

    @cached_property
    def structure(self) -> list[dict[str, tuple[int, ...]]] | None:
        """Separators and segments of every prompt, where a measure needs them."""
        return structure_for(self.prompts, self.measures, self.decoder.tokenizer)

    @cached_property
    def prompts_digest(self) -> str:
        """SHA-256 of the prompts."""
        return prompts_digest(self.prompts)

    @property
    def batches(self) -> list[PaddedBatch]:
        """The prompts in batches, the longest first; none where there is no measure."""
        prompts = self.prompts if self.measures else []
        return make_batches(prompts, self.size, self.decoder.device, self.structure)

    @property
    def provenance(self) -> dict[str, Any]:
        """Attributes of the run: the model, the prompts and the versions of libraries."""
        return {
            **identity(self.decoder),
            "prompts": len(self.prompts),
            "prompts_digest": self.prompts_digest,
            "prompts_from": self.prompts_from,
            "main_span": main_span(self.prompts) or "",
            **({"does": does} if self.task and (does := self.task.purpose(self.prompts)) else {}),
            **({"needle_is": NEXT} if copies_next(self.prompts) else {}),
            **{f"version_{name}": number for name, number in versions().items()},
        }

    @property
    def question(self) -> dict[str, Any]:
        """All inputs of the numbers except the model, for the digest of a store."""
        task, sources = self.task, {}
        if copies_next(self.prompts):
            # A digest of prompts knows no attributes
            sources = {"sources": [prompt.sources for prompt in self.prompts]}
        return {
            **sources,
            "prompts": self.prompts_digest,
            "measures": {
                measure.name: parameter_attributes(measure.parameters) for measure in self.measures
            },
            "layers": self.layers,
            "heads": self.heads,
            # Another size cuts other batches, which the kept ones do not fit
            "batch_size": str(self.size),
            "structure": self.structure,
            "experiments": {
                plan.experiment.name: dict(plan.experiment.parameters) for plan in self.experiments
            },
            "task": None if task is None else {"name": task.name, **task.options()},
        }

    @torch.no_grad()
    def observe(
        self,
        batch: PaddedBatch,
        stopped: Collection[str] = (),
        on_layer: Callable[[int], None] = lambda observed: None,
    ) -> dict[str, Statistics | Fault]:
        """Run one forward pass and reduce every layer to statistics.

        Args:
            batch: Prompts of the pass.
            stopped: Names of measures to leave out.
            on_layer: Called with the number of layers observed so far.

        Returns:
            Statistics per measure, or the fault that stopped it; faults come first, in the order
            in which they occurred. The key `PASS` holds the fault of the pass itself, where no
            measure stopped before its end.
        """
        numbers = torch.as_tensor(batch.numbers)
        reading = [m for m in self.measures if m.needs.predictions and m.name not in stopped]
        # Without predictions the pass ends in the last layer that is measured.
        last = None if reading else max(self.layers, default=None)
        # From the last layer: only the masks of a pass show whether it separates documents
        documents = deque[Tensor | None]([None], maxlen=1)
        with self.observation(batch, stopped, on_layer, documents.append) as (parts, faults):
            hidden = decode(
                self.decoder,
                batch.tokens,
                batch.valid,
                last,
                batch.position_ids,
                batch.attention_mask,
            )
        fault = fault_of_pass(hidden, batch.valid, batch.numbers)
        if fault is not None:
            # A measure that stopped names the layer where NaN began, which the pass cannot
            if not faults:
                faults[PASS] = fault
            for measure in reading:
                faults.setdefault(measure.name, fault)
        elif reading:
            # The last layer may be on another device where a model is spread over several
            predictions = predictions_of(
                self.decoder, hidden.to(batch.tokens.device), batch.tokens, batch.valid, numbers
            )
            if documents[0] is not None:
                apart = documents[0].to(batch.tokens.device)
                predictions = replace(predictions, documents=apart)
            for measure in reading:
                parts[measure.name].append(observe_predictions(measure, predictions, batch.spans))
        return results_of(parts, faults)

    @contextmanager
    def observation(
        self,
        batch: PaddedBatch,
        stopped: Collection[str] = (),
        on_layer: Callable[[int], None] = lambda observed: None,
        on_documents: Callable[[Tensor | None], None] = lambda documents: None,
    ) -> Iterator[tuple[dict[str, list[Statistics]], dict[str, Fault]]]:
        """Reduce every layer of a pass that is made inside the context to statistics.

        Args:
            batch: Prompts of the pass.
            stopped: Names of measures to leave out.
            on_layer: Called with the number of layers observed so far.
            on_documents: Called with the documents that a layer keeps apart.

        Yields:
            Statistics of layers, and faults in the order in which they occurred, by measure:
            complete when the context ends. `results_of` merges them.
        """
        measures = [measure for measure in self.measures if measure.name not in stopped]
        parts: dict[str, list[Statistics]] = {measure.name: [] for measure in measures}
        faults: dict[str, Fault] = {}
        gathered = GatheredLayers()
        unchecked: list[tuple[Measure, Statistics | Fault, bool]] = []
        observed, padded = 0, not is_whole(batch.valid)

        def check() -> None:
            for measure, result, unplaced in unchecked:
                fault = (
                    result
                    if isinstance(result, Fault)
                    else fault_in(result, measure, unplaced, padded)
                )
                if fault is not None:
                    faults.setdefault(measure.name, fault)
                elif isinstance(result, Statistics):
                    gathered.gather(measure.name, result)
            unchecked.clear()

        def receive(inputs: AttentionInputs) -> None:
            nonlocal observed
            going_on = [measure for measure in measures if measure.name not in faults]
            # Such layers have NaN in numbers about positions or pairs, which is no error
            unplaced = not inputs.has_frequencies or not inputs.one_position
            # Measures may compare token ids, which a layer does not see.
            whole = replace(inputs, tokens=batch.tokens.to(inputs.queries.device))
            for measure, result in observe_layer(whole, going_on, batch, self.heads):
                unchecked.append((measure, result, unplaced))
                # On an accelerator after the pass: statistics are copied once, and no layer waits
                # for earlier ones.
                if inputs.queries.device.type == "cpu":
                    check()
            observed += 1
            on_documents(inputs.documents)
            on_layer(observed)

        numbers, ids = torch.as_tensor(batch.numbers), batch.position_ids
        with observing(self.decoder, batch.valid, numbers, receive, self.layers, ids):
            yield parts, faults
        check()
        for name, of_layers in parts.items():
            of_layers += gathered.statistics(name)

    def conclude(self, totals: Mapping[str, Statistics | Fault]) -> dict[str, xr.Dataset | Fault]:
        """Conclude the groups of a run from merged statistics.

        Args:
            totals: Merged statistics per measure, or the fault that stopped it.

        Returns:
            Group per measure, with the measure's parameters; or the fault that stopped it, also
            one that its `conclude` raised.

        Raises:
            InputError: If a measure gives something that is no group of a run.
        """
        return {
            measure.name: total
            if isinstance(total := totals[measure.name], Fault)
            else self._group(measure, total)
            for measure in self.measures
        }

    def _group(self, measure: Measure, statistics: Statistics) -> xr.Dataset | Fault:
        try:
            # A result of the wrong form is refused; an error of `conclude` stops one measure, and
            # the statistics of the others are not lost
            group = checked_group(measure.conclude(statistics), called(MEASURES, measure.name))
        except InputError:
            raise
        except Exception as error:  # of another package, after perhaps hours of observing
            # Without memory the other measures would fail as well
            if is_out_of_memory(error):
                raise
            reason = one_line(f"{type(error).__name__}: {error}")
            return Fault(f"it cannot conclude ({reason})", concluding=True)
        gaps = "; ".join(self.gaps.of(measure.name))
        attributes = parameter_attributes(measure.parameters) | ({"left_out": gaps} if gaps else {})
        decoder = self.decoder
        return with_schemes(group, decoder.schemes, decoder.learned_schemes, attributes)

    def _require_names(self) -> None:
        """Raise InputError for results that would replace others, or be lost."""
        parts = [
            *((MEASURES, measure) for measure in self.measures),
            *((EXPERIMENTS, plan.experiment) for plan in self.experiments),
        ]
        taken = [*KEPT]
        for kind, part in parts:
            # A class derived from ours may take its name: views can draw its results
            ours = OWN[kind].get(part.name) in [
                f"{base.__module__}:{base.__qualname__}" for base in type(part).__mro__
            ]
            # A foreign group by the name of a view would be drawn as if it had the view's variables
            require_name(
                part.name, called(kind, part.name), taken if ours else [*taken, *OWN[VIEWS]]
            )
            taken.append(part.name)

    def _require_seen(self) -> None:
        """Raise InputError where an intervention changes attention that a measure cannot see."""
        changed = [layer.layer_idx for layer in self.decoder.layers if not layer.attends_unchanged]
        blind = [
            measure.name
            for measure in self.measures
            if {"queries", "keys"} & set(measure.needs.tensors) and not measure.needs.predictions
        ]
        if changed and blind:
            raise InputError(
                f"layer {changed[0]} attends otherwise while an intervention lasts "
                f"(distances), which {blind[0]} cannot see; measure outside "
                "of it, or read blocks.N.attn.hook_pattern under run_with_cache"
            )


def results_of(
    parts: Mapping[str, Sequence[Statistics]], faults: Mapping[str, Fault]
) -> dict[str, Statistics | Fault]:
    """Merge the statistics of the layers of a pass.

    Args:
        parts: Statistics of layers by measure.
        faults: Faults by measure, which replace statistics.

    Returns:
        Statistics or fault per measure, faults first.
    """
    merged = {name: merge(some) for name, some in parts.items() if name not in faults}
    # Faults first, in the order in which they occurred: the first one is reported
    return {**faults, **merged}


def _require_chosen(measure: Measure, layers: Sequence[int], heads: int) -> None:
    for layer, chosen in (measure.needs.heads or {}).items():
        if layer not in layers:
            measured = (
                ", ".join(map(str, layers))
                if len(layers) <= 8
                else f"{len(layers)} of {layers[0]} to {layers[-1]}"
            )
            raise InputError(
                f"{measure.name} was asked for in layer {layer}; the layers that are "
                f"measured: {measured}"
            )
        within(chosen, heads, f"{measure.name} in layer {layer}: head")


def within(chosen: Sequence[int] | None, count: int, name: str) -> list[int]:
    """Sort the layers or heads that were chosen.

    Args:
        chosen: Numbers; None: all.
        count: How many the model has.
        name: "layer" or "head", for messages.

    Returns:
        The numbers, each once.

    Raises:
        InputError: One is no number below `count`, or there is none.
    """
    if chosen is None:
        return list(range(count))
    try:
        chosen = list(chosen)
        # operator.index takes True for 1, so a mask would choose the numbers 0 and 1
        if any(isinstance(number, bool | np.bool_) for number in chosen):
            raise TypeError("a mask")
        chosen = [operator.index(number) for number in chosen]
    except TypeError:
        raise InputError(
            f"{name} {quoted(chosen)} was asked for; wanted a list of whole numbers from 0 to {count - 1}"
        ) from None
    for number in chosen:
        if not 0 <= number < count:
            raise InputError(f"{name} {number} was asked for; the model's are 0 to {count - 1}")
    if not chosen:
        raise InputError(f"no {name} was asked for; the model's are 0 to {count - 1}")
    return sorted(set(chosen))


def _places(prompt: Prompt, name: str) -> Sequence[int]:
    # All spans take a walk over the tokens, and most measures need this one
    return prompt.generated if name == GENERATED else prompt.all_spans().get(name, ())


def _require_prompts(
    prompts: Sequence[Prompt], measures: Sequence[Measure], vocabulary: int
) -> None:
    if not prompts:
        raise InputError("there are no prompts to analyze")
    for number, prompt in enumerate(prompts):
        if max(prompt.tokens) >= vocabulary:
            raise InputError(
                f"prompt {number} has token {max(prompt.tokens)}; the model's tokens are 0 "
                f"to {vocabulary - 1}"
            )
        for measure in measures:
            if prompt.document_count > 1 and not measure.needs.documents:
                raise InputError(
                    f"position ids of prompt {number} begin {prompt.document_count} documents, and "
                    f"{measure.name} takes all tokens for one text; leave the measure or the "
                    "position ids out, or say documents=1"
                )
            if len(prompt.tokens) < measure.needs.tokens:
                raise InputError(
                    f"prompt {number} has {len(prompt.tokens)} tokens, and {measure.name} "
                    "with these parameters needs "
                    f"{measure.needs.tokens}; give longer prompts, or other parameters"
                )
            absent = [name for name in measure.needs.spans if not _places(prompt, name)]
            if absent:
                raise InputError(
                    f"prompt {number} has no span {absent[0]!r}, which the measure "
                    f"{measure.name!r} needs; "
                    f"mark it in the prompt or leave the measure out"
                )
