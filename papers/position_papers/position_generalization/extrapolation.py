"""Attention outputs beyond the training length, with LM-Infinite and without (Position
Generalization sec. 4.2, table 2, fig. 6): P7.

KL above that at the training length = KL(N_n || N_L) - KL(N_L || N_L)      N_n: Gaussian of the outputs at n tokens; at L only the
                                                                            noise of the fit is left

Outputs "wander within the range" of those at the training length (fig. 6) is read as: at most 5 %
of them are further from the mean than 99 % of those. The rule was written after shares of 10 to 35
% had been seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import xarray as xr

from position_papers.kit import (
    All,
    AtMost,
    Cache,
    Claim,
    Custom,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Subject,
    Values,
    each,
    evidence,
    groups_of,
    mean_of,
    over_seeds,
    unmeasured,
    why_not,
)
from position_papers.position_generalization.length_figures import extrapolation_by_length
from position_papers.position_generalization.measured import (
    MODEL,
    SOURCE,
    TEXT_MODELS,
    Measured,
    Options,
    is_language_model,
    length_of,
    prompts_of,
    task_of,
)
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.lengths.extrapolation import Extrapolation, output_traces
from repo_interp.plugins.lengths.extrapolation_view import output_traces as traces_in_plane
from repo_interp.plugins.lengths.prompt_lengths import cut
from repo_interp.storage.store import Store
from repo_interp.tasks import Prompt, digest

SHARE_OF_PLAIN = 0.5
DIVERGENCE = (
    "at the longest length, the KL above that at the training length, over the plain model's"
)
MEDIANS = "the same of the medians over layers"
LOG_PERPLEXITIES = "log perplexity with LM-Infinite and of the plain model"


def _relative(values: Values) -> str:
    """How the divergence compares with the plain model's: few layers can rule a mean."""
    if not np.isfinite(values.get(MEDIANS, np.nan)):
        return ""
    return (
        f"relative to the plain model alone: {values[DIVERGENCE]:.2g} of its KL by the mean over "
        f"layers, which few can rule, {values[MEDIANS]:.2g} by the median"
    )


P7 = Claim(
    "P7",
    "attention outputs stay in distribution at longer lengths with LM-Infinite, not without",
    f"{SOURCE} table 2, fig. 6",
    "KL 1.2 against 6.5 plain at 5120 tokens",
    All(
        AtMost(DIVERGENCE, SHARE_OF_PLAIN),
        Custom(
            lambda values: values[LOG_PERPLEXITIES][0] < values[LOG_PERPLEXITIES][1],
            "log perplexity is lower than plain",
        ),
    ),
    shows_control=True,
    says=_relative,
)

OUTSIDE = (
    "the share of outputs over sliding windows that are further from the mean than 99 "
    "% of those at the training length"
)
P7_WINDOWS = Claim(
    "P7",
    "outputs over sliding windows stay within the range of those at the training length",
    f"{SOURCE} sec. 4.2, fig. 6",
    "figure",
    AtMost(OUTSIDE, 0.05),
    "sliding windows",
)


# ---- measuring -----------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> Measured:
    """`extrapolation` to `reach` training lengths, and `output_traces` where distances can be
    capped; neither where sequences are cut below the training length.
    """
    (subject,) = subjects
    length = length_of(subject, options)
    if length < subject.training_length:
        return Measured(subject, length, xr.DataTree())
    prompts, longer = prompts_of(subject, options), longer_prompts(subject, options)
    groups = {
        "extrapolation": subject.measured_by_points(
            cache,
            measure_extrapolation,
            options,
            prompts=digest(longer),
            lengths=str(_lengths(subject, options)),
        )
    }
    if "lm_infinite" in groups["extrapolation"]["method"].values:
        both = digest([*prompts, longer[0]])
        groups["output_traces"] = subject.measured(cache, measure_traces, options, prompts=both)
    return Measured(subject, length, xr.DataTree.from_dict(groups))


def measure_extrapolation(subject: Subject, options: Options, store: Store) -> xr.Dataset:
    """The group `extrapolation` by all methods that the checkpoint's positions allow; `store` keeps
    what is finished.
    """
    model, task = load_model(subject.path, options.device), task_of(subject, options)
    by_length = cut(task.describe, longer_prompts(subject, options), _lengths(subject, options))
    return Extrapolation().measured(
        as_decoder(model),
        task,
        by_length,
        length_of(subject, options),
        options.batch_size,
        store=store,
    )


def measure_traces(subject: Subject, options: Options) -> xr.Dataset:
    """The group `output_traces` of the middle layer."""
    model = load_model(subject.path, options.device)
    layer, longer = len(as_decoder(model).layers) // 2, longer_prompts(subject, options)[0]
    return output_traces(
        as_decoder(model), prompts_of(subject, options), longer, length_of(subject, options), layer
    )


def longer_prompts(subject: Subject, options: Options) -> list[Prompt]:
    """Windows of text of the longest length."""
    return task_of(subject, options).prompts(
        options.longer, options.seed, str(_lengths(subject, options)[-1])
    )


def _lengths(subject: Subject, options: Options) -> list[int]:
    """The training length and its doublings."""
    return [length_of(subject, options) << power for power in range(options.reach.bit_length())]


# ---- tabulating and drawing -------------------------------------------------------------------------


def tabulate(measured: Measured) -> Iterator[Evidence]:
    """The verdicts on P7, where distances can be capped."""
    length = measured.subject.training_length
    if "extrapolation" not in measured.run.children:
        cut_short = (
            f"sequences have {measured.length} of its {length} training tokens; "
            "--set position-generalization.length=0 has all"
        )
        yield from (unmeasured(claim, measured.name, cut_short) for claim in (P7, P7_WINDOWS))
        return
    group = measured.group("extrapolation")
    if "lm_infinite" not in group["method"].values:
        return
    first, last = (int(tokens) for tokens in group["length"].values[[0, -1]])
    above = group["kl"].sel(length=last) - group["kl"].sel(length=first)
    plain, capped = (above.sel({"method": method}).values for method in ("plain", "lm_infinite"))
    floor = float(group["kl"].sel({"method": "plain", "length": first}).mean())
    nats = group["log_perplexity"].sel(length=last)
    nats_plain, nats_capped = (
        float(nats.sel({"method": method})) for method in ("plain", "lm_infinite")
    )
    share, medians = (
        of(capped) / of(plain) if of(plain) > 0 else np.inf for of in (np.mean, np.median)
    )
    yield evidence(
        P7,
        measured.name,
        f"KL with LM-Infinite at {last} tokens above that at {first}, nats per head",
        {DIVERGENCE: share, MEDIANS: medians, LOG_PERPLEXITIES: (nats_capped, nats_plain)},
        **mean_of(capped, "layers", group.attrs["prompts"]),
        control=f"plain {plain.mean():.3g}; at {first} tokens, where only the noise of the fit is "
        f"left, {floor:.3g}",
        note=f"log perplexity {nats_capped:.3f} against {nats_plain:.3f}; of {_judged(group)} "
        "sequences, compared with the others",
    )
    outside = measured.group("output_traces")["trace_outside"].values
    yield evidence(
        P7_WINDOWS,
        measured.name,
        "share of outputs outside, in the middle layer",
        {OUTSIDE: float(outside.mean())},
        **mean_of(outside, "queries"),
    )


def _judged(group: xr.Dataset) -> int:
    """How many sequences are judged at every length: every second one; the others, at the training
    length, are the reference.
    """
    return int(group.attrs["prompts"]) // 2


def draw(measured: Measured) -> Iterator[Drawing]:
    """Divergence and log perplexity by length (table 2), and outputs over sliding windows (fig.
    6).
    """
    name, present = measured.name, measured.run.children
    if "extrapolation" in present:
        group = measured.group("extrapolation")
        caption = (
            f"{name}: divergence of attention outputs from those at the training length, and log "
            f"perplexity, of the last {group.attrs['judged']} tokens (table 2), of "
            f"{_judged(group)} sequences: their spread is not kept. What they are compared with is "
            "other sequences of the training length."
        )
        yield Drawing(
            f"extrapolation_{name}",
            partial(extrapolation_by_length, groups_of(measured.run, extrapolation=group)),
            caption,
            group,
        )
    if "output_traces" in present:
        group = measured.group("output_traces")
        caption = (
            f"{name}: attention outputs at the training length (dots), and of a few queries over "
            "sliding windows of keys and values (lines, darker the later the window; open: the "
            "first, filled: the last), in the plane of the two largest variances (fig. 6). "
            f"{100 * float(group['trace_outside'].mean()):.2g} % of the lines' points are further "
            "from the mean than 99 % of the dots, by Mahalanobis' distance."
        )
        chart = partial(traces_in_plane, groups_of(measured.run, output_traces=group))
        yield Drawing(f"output_traces_{name}", chart, caption, group)


def _can_be_longer(subject: Subject) -> bool:
    """Whether it is judged on text and takes more tokens than in training: a table of learned
    positions ends there.
    """
    return is_language_model(subject) and "learned" not in subject.schemes


def units(measured: Measured) -> xr.Dataset:
    """What P7 rests on, of one seed: nothing where sequences are cut short."""
    parts = (("extrapolation", ["kl", "log_perplexity"]), ("output_traces", ["trace_outside"]))
    return xr.merge(
        measured.group(name)[variables]
        for name, variables in parts
        if name in measured.run.children
    )


EXTRAPOLATION = over_seeds(
    Experiment(
        "extrapolation",
        (P7, P7_WINDOWS),
        Needs(
            each(_can_be_longer),
            "needs a language model whose distances can be capped, such as language/rope",
            TEXT_MODELS[:3],
            why_not=why_not,
        ),
        measure,
        tabulate,
        draw,
        MODEL,
    ),
    units,
)
