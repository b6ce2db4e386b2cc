"""What f_phi may see (RePo sec. 3.2, footnote 2): R10, on language models that go on from RoPE.

    linear        z_i = r_i W_z, of the token's hidden state alone (`repo`)
    attention     full access to earlier r_j (`repo_attention`)
    convolution   limited access, the three before it (`repo_convolution`)
    index         of the hidden state and the token index (`repo_index`)

The paper reports in words that access to earlier tokens is comparable, and that with the index as
an input the model comes to rely on it alone. Comparable: the log perplexity at the training length
differs by less than `TOLERANCE`, with the error of the difference, over training seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr

from position_papers.kit import (
    PLAIN,
    All,
    AtLeast,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Scored,
    Significant,
    Subject,
    between,
    compared,
    evidence,
    in_words,
    missing,
    note,
    numbers_of,
    of_tasks,
    on_the_same_windows,
    perplexity_table,
    score_by_length,
    score_subject,
    shortest_and_longest,
    trained_alike,
    unmeasured,
)
from position_papers.repo.checkpoints import OLMO
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.plots.marks.scores import layout_name
from repo_interp.positions.layouts import parse_layout

LINEAR, INDEX = "repo", "repo_index"
MEMORIES = {"repo_attention": "attention over", "repo_convolution": "a convolution over"}
TOLERANCE = 0.05
"""Nats: 5 % of perplexity. The paper names no number."""
FOLLOWS = 0.9
"""Size of the rank correlation of positions and token index from which a head follows the index."""
PROMPTS = 16
"""Windows of the training length that the correlation is taken on."""


def _less(scheme: str) -> str:
    return (
        f"{TOLERANCE:g} nats less the difference of log perplexity between positions by "
        f"{MEMORIES[scheme]} earlier tokens and by the token alone"
    )


R10 = Claim(
    "R10",
    "f_phi that sees earlier tokens does as well as one that sees the token alone",
    "RePo sec. 3.2",
    "comparable",
    All(*(Significant(_less(scheme)) for scheme in MEMORIES)),
)
SHARE = f"the share of learned heads with a rank correlation of at least {FOLLOWS:g} in size"
R10_INDEX = Claim(
    "R10",
    "with the token index as another input, positions come to follow it",
    "RePo footnote 2",
    "in words",
    AtLeast(SHARE, 0.5),
    "token index as an input",
)


class Assigned(NamedTuple):
    """A language model with its log perplexities, and how its learned positions follow the index."""

    scored: Scored
    scheme: str
    """Of its last layer."""
    trend: xr.DataArray | None
    """Rank correlation with the token index [prompt, layer, head]; None without weights or learned
    positions.
    """


# ---- measured ------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Assigned]:
    """Score the checkpoints on the same windows, and correlate learned positions with the index."""
    scored = on_the_same_windows(
        [score_subject(subject, options.of_scores, cache) for subject in subjects]
    )
    by_name = {subject.name: subject for subject in subjects}
    return [
        Assigned(
            each,
            _last_scheme(subject := by_name[each.name]),
            subject.measured(cache, _trend, options)["trend"]
            if subject.learned and subject.has_weights
            else None,
        )
        for each in scored
    ]


def _trend(subject: Subject, options: Options) -> xr.Dataset:
    prompts = subject.prompts(subject.training_length, PROMPTS, options.seed)
    _, bridge = next(subject.bridges(options))
    run = analyze(bridge, prompts, ("patterns",), subject.learned, batch_size=options.batch_size)
    return run["patterns"].to_dataset()[["trend"]]


# ---- tabulated -----------------------------------------------------------------------------------


def tabulate(assigned: Sequence[Assigned]) -> Iterator[Evidence]:
    """R10, of the first model of every assigner, and its part about the index."""
    models = {each.scheme: each for each in reversed(assigned)}
    wanted = (LINEAR, *MEMORIES)
    if not {*MEMORIES, INDEX} & {*models}:
        return
    if absent := [layout_name(scheme) for scheme in wanted if scheme not in models]:
        yield unmeasured(R10, assigned[0].scored.name, missing(absent, "language"))
    else:
        yield _comparable([models[scheme].scored for scheme in wanted])
    if INDEX in models and models[INDEX].trend is not None:
        yield _follows(models[INDEX], models.get(LINEAR))


def _comparable(scored: Sequence[Scored]) -> Evidence:
    linear, *others = scored
    length = shortest_and_longest(linear)[:1]
    of_linear, *samples = (each.sample(length) for each in scored)
    rises = [between(sample, of_linear) for sample in samples]
    words = "; ".join(
        f"{each.name} {in_words({linear.name: rise}, 'above', ' nats')}"
        for each, rise in zip(others, rises, strict=True)
    )
    return evidence(
        R10,
        linear.name,
        f"perplexity at {length[0]} tokens",
        {
            # equivalence by two one-sided tests: the nearer limit decides
            _less(scheme): replace(rise, margin=TOLERANCE - abs(rise.margin), samples=None)
            for scheme, rise in zip(MEMORIES, rises, strict=True)
        },
        **numbers_of(of_linear, float(np.exp(of_linear.mean)), float(np.exp(of_linear.mean))),
        control=", ".join(
            f"{each.name} {np.exp(sample.mean):.4g}"
            for each, sample in zip(others, samples, strict=True)
        ),
        note=note(scored, f"log perplexity, {words}"),
    )


def _follows(own: Assigned, linear: Assigned | None) -> Evidence:
    def share(trend: xr.DataArray) -> float:
        return float((abs(trend).mean("prompt") >= FOLLOWS).mean())

    assert own.trend is not None
    beside = "" if linear is None or linear.trend is None else f"{share(linear.trend):.2g}"
    return evidence(
        R10_INDEX,
        own.scored.name,
        "share of learned heads that follow the token index",
        {SHARE: share(own.trend)},
        share(own.trend),
        n=own.trend.sizes["prompt"],
        control=f"without the index as an input {beside}" if beside else "",
        note=f"median size of the correlation {float(abs(own.trend).mean('prompt').median()):.2g}",
    )


# ---- drawn ---------------------------------------------------------------------------------------


def draw(assigned: Sequence[Assigned]) -> Iterator[Drawing]:
    """Draw perplexity by length of every assigner, above that of the token alone."""
    scored = [each.scored for each in assigned]
    linear = next((each.scored for each in assigned if each.scheme == LINEAR), None)
    table, words = compared(
        [(each, PLAIN) for each in scored], perplexity_table(scored), linear, layout_name(LINEAR)
    )
    length = scored[0].training_length
    yield Drawing(
        "assigners",
        partial(score_by_length, table, f"trained at {length} tokens"),
        "Perplexity by length of the context, of models whose f_phi sees the token alone, earlier "
        f"tokens, or the token index (RePo sec. 3.2). Dotted: the training length. {words}",
        table,
    )


def _last_scheme(subject: Subject) -> str:
    """Scheme of the last layer, also of a model whose records alone ship."""
    assert subject.configuration is not None  # of `of_tasks`
    return parse_layout(subject.configuration.scheme, subject.configuration.layers)[-1]


def _learns_by_f_phi(subject: Subject) -> bool:
    return of_tasks("language")(subject) and _last_scheme(subject) in (LINEAR, *MEMORIES, INDEX)


ASSIGNERS = Experiment(
    "inputs of f_phi",
    (R10, R10_INDEX),
    Needs(
        trained_alike(_learns_by_f_phi),
        "no language models that learn positions from the token alone and from earlier tokens "
        "were given",
        tuple(f"language/{name}" for name in (LINEAR, *MEMORIES, INDEX)),
        "language",
    ),
    measure,
    tabulate,
    draw,
    OLMO,
)
