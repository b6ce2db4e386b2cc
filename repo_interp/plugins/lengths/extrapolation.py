"""Prompts longer than the training length, run with several methods of extension.

Position Generalization, sec. 4.2, table 2 and fig. 6:

    KL(N_n || N_L)      N_n: Gaussian fitted to the attention outputs of a layer at the judged
                             tokens of prompts of length n
                        N_L: the same for prompts of the training length, run plainly

methods: plain, lm_infinite (window and cap L), infllm (all keys, cap L), interpolation and yarn
(both by the factor n / L, or 1).

An attention output is the vector o_i = sum_j w_ij v_j of one head, as in eq. 1, before Wo; a
layer's divergence is the mean over its heads. The paper leaves these choices open. The judged
tokens are the last `judged` tokens of a prompt, the farthest beyond training; log perplexity is
over the same tokens. N_L is fitted to the even prompts and N_n to the odd ones, so the plain
divergence at n = L is the noise of the fit and of the choice of documents. Every other divergence
includes this noise, which is large with few prompts, so methods are ranked by the excess over it.
The same prompts are cut to every length, so lengths differ only in the tokens that are judged.

    kl_above_noise                             KL(N_n || N_L) - KL(plain N_L || N_L)
    kl_above_noise_low, kl_above_noise_high    95 % interval of its mean over layers: Student's, by
                                               a jackknife that leaves out one of up to `FOLDS`
                                               groups of reference and judged prompts at a time

`output_traces` (fig. 6) shows the outputs in a plane. Dots are the outputs of a layer at all tokens
of prompts of the training length, run plainly; the plane has the two directions of their largest
variance (PCA). A line follows one token beyond the training length of one longer prompt: its query
attends to every `step`-th window of keys and values of the training length (see `models.outputs`).
The longer prompt is run by LM-Infinite, so that its features are in distribution.

Select from the axis `method` by `group.sel({"method": "plain"})`: xarray reads the keyword
`method` as a way of filling. This module knows nothing about how a method works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.errors import InputError, renumber_prompts, warn
from repo_interp.experiments.experiment import (
    Experiment,
    Plan,
    Progress,
    score_texts,
    side_by_side,
    standard_error,
)
from repo_interp.experiments.grid import Grid
from repo_interp.experiments.responses import forced_responses
from repo_interp.intervals import student_quantile
from repo_interp.interventions.extension import GLOBAL_TOKENS, Method, allowed_methods, extended
from repo_interp.measures.labels import described_group
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.outputs import attention_outputs, layer_tensors, outputs_over_windows
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.side_by_side import batches
from repo_interp.plugins.lengths.gaussians import (
    VectorSums,
    fold_sums,
    gaussian_divergence,
    leave_one_out,
    principal_plane,
    vector_sums,
)
from repo_interp.plugins.lengths.prompt_lengths import LEAST, prompts_by_length
from repo_interp.run import with_schemes
from repo_interp.storage.store import NOT_KEPT, Store
from repo_interp.tasks import Prompt, Response
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, CountOrNone, Seed, Tokens, TokensOrNone

REFERENCE_POINTS = 2000
"""Most reference outputs kept for drawing, evenly spaced. The plane is fitted to all outputs."""
FOLDS = 8
"""Most groups of prompts for the jackknife interval of divergences."""
CELLS = 2**22
"""Most numbers of products of outputs of one layer that exist at a time."""
MOSTLY = 0.5
"""Share of noise in a divergence above which a warning is issued."""
_TEXTS = {
    "kl": (
        "divergence of attention outputs from those at the training length, mean over heads [nat]"
    ),
    "kl_above_noise": (
        "that divergence less the plain one at the training length, mean over heads [nat]"
    ),
    "kl_above_noise_low": (
        "lower end of the 95 % interval of kl_above_noise, mean over layers [nat]"
    ),
    "kl_above_noise_high": (
        "upper end of the 95 % interval of kl_above_noise, mean over layers [nat]"
    ),
    "log_perplexity": "mean of -log p over the judged targets [nat]",
    "task_score": "{metric}, mean over prompts [{units}]",
    "task_score_error": "standard error of {metric} over prompts [{units}]",
}
_TRACES = {
    "pca_reference": "attention outputs at training lengths in their plane [output units]",
    "pca_trace": "outputs of a query over sliding windows [output units]",
    "pca_share": "share of the variance of outputs at training lengths",
    "trace_outside": "share of a trace beyond 99 % of outputs at training lengths",
}


def judged_outputs(
    decoder: Decoder, scoring: Scoring, prompts: Sequence[Prompt], judged: int, batch_size: int
) -> tuple[dict[int, VectorSums], np.ndarray, float]:
    """Compute outputs, scores and losses at the last `judged` tokens of every prompt.

    Args:
        decoder: Decoder of the model.
        scoring: Names the targets and scores the answers.
        prompts: Prompt n belongs to group n modulo `FOLDS`.
        judged: Last tokens of a prompt that are read.
        batch_size: Prompts side by side.

    Returns:
        Sums of every head's outputs over these tokens, by layer and group of prompts; scores; and
        the mean of -log p over the targets among these tokens, NaN without targets.
    """
    widths = {attention.layer_idx: attention.d_head for attention in decoder.layers}
    # No more folds than prompts, so that no fold is empty
    sums, folds = dict[int, VectorSums](), min(FOLDS, len(prompts))
    # Filled in place before every pass: the hook receives outputs without prompt numbers.
    numbers: list[int] = []
    lengths = [len(prompt.tokens) for prompt in prompts]

    def receive(layer: int, outputs: Tensor) -> None:
        # Prompts are padded on the right, so the last tokens of a prompt end before its padding.
        rows = dict[int, list[int]]()
        for row, number in enumerate(numbers):
            rows.setdefault(lengths[number], []).append(row)
        # So many at a time that their products have at most `CELLS` numbers
        most = max(1, CELLS // (outputs.shape[-1] * widths[layer]))
        for length, alike in rows.items():
            for start in range(0, len(alike), most):
                some = alike[start : start + most]
                last = outputs[some, max(0, length - judged) : length]
                # [prompt, token, head * d_head] -> [prompt, head, token, d_head]: one Gaussian per
                # head. Prompts are assigned to the folds in turn.
                of_heads = last.unflatten(-1, (-1, widths[layer])).transpose(1, 2)
                found = fold_sums(of_heads, [numbers[row] % folds for row in some], folds)
                # Sums of a fold add exactly, so no output is kept.
                sums[layer] = sums[layer] + found if layer in sums else found

    asked, answered = list[Prompt](), list[Response]()
    with attention_outputs(decoder, receive):
        for part in batches(range(len(prompts)), lengths, batch_size):
            part = sorted(part, key=lengths.__getitem__)
            # Assigned into the same list, which `receive` reads while the pass runs
            for numbers[:] in batches(part, lengths, batch_limit(decoder, batch_size)):
                some = [prompts[number] for number in numbers]
                with renumber_prompts(numbers):
                    answered += forced_responses(decoder.module, scoring, some, len(some))
                asked += some
    log_likelihoods = [
        value
        for prompt, answer in zip(asked, answered, strict=True)
        for target, value in zip(scoring.targets(prompt), answer.log_probabilities, strict=True)
        # The same tokens as for the divergence
        if target >= len(prompt.tokens) - judged
    ]
    return (
        sums,
        np.asarray(scoring.score(answered, asked), dtype=np.float64),
        -float(np.mean(log_likelihoods)) if log_likelihoods else float("nan"),
    )


def _divergences(judged: VectorSums, reference: VectorSums) -> list[float]:
    """KL of the sums of all groups, then without one shared group at a time; mean over heads.

    NaN if too few vectors are left.
    """
    groups = min(len(judged.total), len(reference.total))
    of, to = leave_one_out(judged, groups), leave_one_out(reference, groups)
    # One vector has no covariance.
    known = [
        number
        for number, counts in enumerate(zip(of.counts, to.counts, strict=True))
        if min(counts) > 1
    ]
    found = np.full(1 + groups, np.nan)
    if known:
        found[known] = gaussian_divergence(of[known], to[known]).mean(-1).cpu().numpy()
    return found.tolist()


@torch.inference_mode()
def output_traces(
    decoder: Decoder,
    reference: Sequence[Prompt],
    longer: Prompt,
    training_length: int,
    layer: int,
    queries: int = 4,
    step: int = 32,
    global_tokens: int = GLOBAL_TOKENS,
) -> xr.Dataset:
    """Trace attention outputs of long prompts in the plane of those at the training length.

    Args:
        decoder: Decoder of the model.
        reference: Prompts, cut to the training length.
        longer: Prompt longer than the training length.
        training_length: Tokens of the longest training sequence.
        layer: Layer whose outputs are traced.
        queries: Number of traced tokens of `longer`, evenly spaced beyond the training length.
        step: Tokens from one window to the next. A window has `training_length` keys, or the
            sliding window of the layer if that is shorter.
        global_tokens: First tokens that LM-Infinite always shows.

    Returns:
        The group `output_traces`: `pca_reference [point, axis]`, `pca_trace [trace, step, axis]`,
        `pca_share [axis]`, and `trace_outside [trace]`, the share of a trace's outputs farther from
        the mean than 99 % of the reference, by Mahalanobis distance in the whole space.

    Raises:
        InputError: `longer` is not longer than the training length, or the layer is unknown.
    """
    (attention,) = decoder.attentions([layer])
    tokens = len(longer.tokens)
    if tokens <= training_length:
        raise InputError(
            f"a prompt longer than {training_length} tokens, the training length, was "
            f"wanted; got {tokens}"
        )
    outputs: list[Tensor] = []
    with attention_outputs(decoder, lambda _, some: outputs.append(some.flatten(0, 1)), [layer]):
        rows = [prompt.tokens[:training_length] for prompt in reference]
        lengths = [len(row) for row in rows]
        # Without padding, since padding has outputs too
        limits = replace(batch_limit(decoder, "auto"), padding=0)
        for numbers in batches(range(len(rows)), lengths, limits):
            _run(decoder, [rows[number] for number in numbers], layer)
    # In float64: the covariance is a difference of large sums.
    normal = torch.cat(outputs).double()
    sums = vector_sums(normal)
    plane, shares = principal_plane(sums)
    with (
        layer_tensors(decoder, layer) as tensors,
        extended(decoder.module, "lm_infinite", tokens, training_length, global_tokens),
    ):
        _run(decoder, [longer.tokens], layer)
    # With a sliding window a layer sees fewer keys in training than the training length.
    window = min(attention.sliding_window or training_length, training_length)
    starts = range(0, tokens - window + 1, step)
    # With few tokens beyond the training length, rounding may choose one twice.
    asked = np.unique(np.linspace(training_length, tokens - 1, queries).round().astype(int))
    traces = torch.stack(
        [
            outputs_over_windows(decoder, layer, tensors, int(query), starts, window)
            for query in asked
        ]
    ).double()
    # An even sample for drawing; mean, plane and covariance above are of all outputs.
    drawn = normal[:: max(1, len(normal) // REFERENCE_POINTS)]
    # An empirical limit: outputs are not Gaussian, so a chi-square quantile would be off.
    limit = torch.quantile(_distances(drawn, sums), 0.99)
    outside = (
        (_distances(traces.flatten(0, 1), sums) > limit)
        .double()
        .unflatten(0, traces.shape[:2])
        .mean(-1)
    )
    values = {
        "pca_reference": (("point", "axis"), (drawn - sums.mean) @ plane),
        "pca_trace": (("trace", "step", "axis"), (traces - sums.mean) @ plane),
        "pca_share": (("axis",), shares),
        "trace_outside": (("trace",), outside),
    }
    on_cpu = {name: (axes, value.cpu().numpy()) for name, (axes, value) in values.items()}
    group = described_group(on_cpu, _TRACES, {"trace": asked, "step": list(starts)})
    group["trace"].attrs = {"long_name": "token whose query it is", "units": "tokens"}
    group["step"].attrs = {"long_name": "first key of the window", "units": "tokens"}
    return group.assign_attrs(layer=layer, window=window, method="lm_infinite", length=tokens)


def _of_layers(traces: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join traces along an axis `layer`; layers with shorter windows have more steps."""
    # Layer and window differ by trace, so they become coordinates before joining.
    stated = [
        one.assign_coords({name: one.attrs[name] for name in ("layer", "window")}) for one in traces
    ]
    return xr.concat(
        stated, "layer", coords=["window"], join="outer", combine_attrs="drop_conflicts"
    )


def _run(decoder: Decoder, rows: Sequence[Sequence[int]], layer: int) -> None:
    """Run rows of one length up to and including the attention of a layer."""
    tokens = torch.tensor(rows, device=decoder.device)
    following = next((other for other in decoder.by_layer if other > layer), None)
    decode(decoder, tokens, last_layer=following)


def _distances(vectors: Tensor, sums: VectorSums) -> Tensor:
    """Mahalanobis distance from the Gaussian of `sums` with a small ridge."""
    covariance = sums.covariance
    # A ridge of 1e-4 of the mean variance, since outputs may not span all dimensions.
    covariance = covariance + 1e-4 * covariance.trace() / len(covariance) * torch.eye(
        len(covariance)
    ).to(covariance)
    factor = torch.linalg.cholesky(covariance)
    # With covariance L L^T, |L^-1 (x - mean)| is the Mahalanobis distance.
    return torch.linalg.solve_triangular(factor, (vectors - sums.mean).mT, upper=False).norm(dim=0)


@dataclass(frozen=True)
class Extrapolation(Experiment):
    """The experiment `extrapolation` (Position Generalization sec. 4.2)."""

    methods: tuple[Method, ...] = ()
    """Methods of extension to compare with the plain model: lm_infinite, infllm, interpolation,
    yarn; empty: all that the model's positions allow, without infllm, which computes every distant
    key.
    """
    lengths: tuple[Tokens, ...] = ()
    """Lengths in tokens; empty: the training length and its doublings up to four times it, or test
    sets of the task.
    """
    sequences: Annotated[int, Interval(ge=LEAST, le=1_000_000)] = 32
    """Number of prompts of each length. Half of them are measured; the other half of the prompts of
    the training length are the reference.
    """
    judged: TokensOrNone = 0
    """Number of measured tokens at the end of a prompt; 0: a quarter of the training length."""
    global_tokens: Tokens = GLOBAL_TOKENS
    """First tokens that LM-Infinite always shows."""
    traced_layers: tuple[CountOrNone, ...] = ()
    """Layers whose outputs are traced over sliding windows; empty: the middle one."""
    traced_queries: Count = 4
    """Queries beyond the training length whose outputs are traced."""
    seed: Seed = 0
    """Seed of the longer prompts."""
    name: ClassVar[str] = "extrapolation"
    describes: ClassVar[str] = "beyond the training length, on longer prompts of the same task"

    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """Plan every method at every length.

        Raises InputError for methods and lengths that the model or the task lacks.
        """
        decoder = as_decoder(model)
        table, allowed = decoder.longest_prompt, allowed_methods(decoder)
        if table is not None and table <= training_length:
            raise InputError(
                f"extrapolation needs longer prompts than the {table} tokens of this model's "
                "learned table; leave it out"
            )
        wrong = [method for method in self.methods if method not in allowed]
        if wrong:
            raise InputError(
                f"extrapolation by {wrong[0]!r}: this model's positions allow {', '.join(allowed)}"
            )
        layers = list(decoder.by_layer)
        # Called for its error: an unknown layer is refused before any pass.
        decoder.attentions(self.traced_layers)
        chosen = sorted(set(self.traced_layers)) or [layers[len(layers) // 2]]
        judge, by_length = prompts_by_length(
            scoring, prompts, training_length, self.lengths, self.sequences, self.seed
        )
        first, last = min(by_length), max(by_length)
        # Even prompts are the reference and odd prompts are judged, so that no text is compared
        # with itself.
        half = [len(prompt.tokens) for some in by_length.values() for prompt in some[1::2]]
        reference = [len(prompt.tokens) for prompt in by_length[first]]
        # Traces need features that are in distribution at every length; only this method gives
        # them.
        traced = "lm_infinite" in allowed

        def run(batch_size: int, store: Store, progress: Progress | None) -> dict[str, xr.Dataset]:
            size = side_by_side(batch_size, last)
            groups = {
                self.name: self.measured(decoder, judge, by_length, first, size, progress, store)
            }
            if traced:
                # A test set has shorter prompts too, without the last positions of training.
                normal = [prompt for prompt in by_length[first] if len(prompt.tokens) == first]
                longer = max(by_length[last], key=lambda prompt: len(prompt.tokens))
                traces = [
                    output_traces(
                        decoder,
                        normal,
                        longer,
                        first,
                        layer,
                        self.traced_queries,
                        max(1, first // 8),
                        global_tokens=self.global_tokens,
                    )
                    for layer in chosen
                ]
                groups["output_traces"] = traces[0] if len(traces) == 1 else _of_layers(traces)
            return groups

        # As many tokens of prompts as `measured` runs: the reference once,
        # then every method at every length
        passes = (
            *reference[::2],
            *half * len(self._methods(decoder)),
            *((*reference, last) * len(chosen) if traced else ()),
        )
        return Plan(self, passes, run)

    def _methods(self, decoder: Decoder) -> list[str]:
        # Plain comes first: `measured` reads the noise of the fit at method 0.
        default = (method for method in allowed_methods(decoder) if method != "infllm")
        return list(dict.fromkeys(("plain", *(self.methods or default))))

    def measured(
        self,
        decoder: Decoder,
        scoring: Scoring,
        prompts: Mapping[int, Sequence[Prompt]],
        training_length: int,
        batch_size: int = 4,
        progress: Progress | None = None,
        store: Store = NOT_KEPT,
    ) -> xr.Dataset:
        """Measure every method at every length.

        Warns where most of a divergence beyond the training length is noise.

        Args:
            decoder: Decoder of the model.
            scoring: Names the targets of a prompt and scores the answers.
            prompts: Prompts by length in tokens; at least `LEAST` of the training length.
            training_length: Tokens of the longest training sequence.
            batch_size: Prompts side by side.
            progress: Called with finished points and all points.
            store: Keeps finished points.

        Returns:
            The group `extrapolation` of a run: `kl [method, length, layer]` in nats,
            `kl_above_noise` with an interval of its mean over layers [method, length],
            `log_perplexity [method, length]` of the judged tokens in nats, `task_score [method,
            length]` with `task_score_error` over prompts.

        Raises:
            InputError: There are too few prompts of the training length, or the model cannot use a
                method.
        """
        if training_length not in prompts or len(prompts[training_length]) < LEAST:
            raise InputError(
                f"at least {LEAST} prompts of the training length, {training_length} tokens, "
                "were wanted to compare with"
            )
        methods, lengths = self._methods(decoder), sorted(prompts)
        judged = self.judged or max(2, training_length // 4)
        # Computed for the first point missing in the store, and not at all if none is missing
        reference = cache(
            lambda: judged_outputs(
                decoder, scoring, prompts[training_length][::2], judged, batch_size
            )[0]
        )

        def point(method: str, length: int) -> dict[str, Any]:
            normal = reference()
            with extended(decoder.module, method, length, training_length, self.global_tokens):
                fits, scores, log_perplexity = judged_outputs(
                    decoder, scoring, prompts[length][1::2], judged, batch_size
                )
            kl = [_divergences(fits[layer], normal[layer]) for layer in sorted(normal)]
            return {
                "kl": [of_layer[0] for of_layer in kl],
                "without": [of_layer[1:] for of_layer in kl],
                "log_perplexity": log_perplexity,
                "task_score": float(scores.mean()),
                "task_score_error": standard_error(scores),
            }

        inner = {"kl": ("layer",), "without": ("layer", "group")}
        found = Grid({"method": methods, "length": lengths}, point, inner).compute(store, progress)
        first = lengths.index(training_length)
        # The divergences of the plain model, method 0, are the noise
        noise = found["kl"].values[0, first]
        # The jackknife needs pairs, so the noise is subtracted fold by fold.
        above, without = (found[name].values - found[name].values[0, first] for name in inner)
        # Mean over layers: [method, length, group]
        jackknife = without.mean(-2)
        freedom = jackknife.shape[-1] - 1
        # The jackknife's standard error is (n - 1) times that of a mean of its n values.
        error = freedom * jackknife.std(-1, ddof=1) / np.sqrt(freedom + 1)
        width = student_quantile(freedom) * error
        # Lengths up to the training length are left out: only noise is expected there.
        beyond = found["kl"].values.mean(-1)[:, first + 1 :]
        mostly = [
            method
            for method, of_method in zip(methods, beyond, strict=True)
            if (noise.mean() > MOSTLY * of_method).any()
        ]
        if mostly:
            warn(
                f"most of extrapolation.kl is noise, {noise.mean():.3g} nats at the training "
                f"length, for {', '.join(mostly)}: it ranks no "
                "methods; read kl_above_noise with its interval, or take more prompts "
                "(extrapolation.sequences)"
            )
        axes = ("method", "length", "layer")
        found = found.assign(
            kl_above_noise=(axes, above),
            kl_above_noise_low=(axes[:2], above.mean(-1) - width),
            kl_above_noise_high=(axes[:2], above.mean(-1) + width),
        ).assign_coords(layer=list(decoder.by_layer))
        group = described_group(found, score_texts(_TEXTS, scoring))
        group = with_schemes(group, decoder.schemes, decoder.learned_schemes)
        return group.assign_attrs(
            scoring.attributes,
            training_length=training_length,
            judged=judged,
            global_tokens=self.global_tokens,
            prompts=len(prompts[training_length]),
        )
