"""Probabilities of the tokens of the first prompt, and the likeliest next tokens.

Group `predictions` of a run. The note of the table has the quality over all prompts.

    p(x_{i+1} | x_0 ... x_i) against i + 1        the token that follows token i, if the run kept it

In the page the next tokens after the chosen one. This module knows nothing about how predictions
are made.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    Cell,
    Chart,
    Finding,
    Lines,
    NextTokens,
    Table,
    counted,
    first_prompt,
    group,
    number,
    ordered_spans,
    over,
    percent,
    with_run_axis,
)
from repo_interp.plots.view import View


def prediction_table(run: xr.DataTree) -> Table:
    """Tabulate the predictions of the first prompt by span.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per span: how often its tokens were the likeliest ones, and their mean probability.
    """
    predictions, prompt = group(run, "predictions"), first_prompt(run)
    # A row predicts the token after it, to which its probability belongs.
    following = predictions["token"].values + 1
    probability, rank = (
        predictions["probability_of_next"].values,
        predictions["rank_of_next"].values,
    )
    spans = (
        {}
        if prompt is None
        else {name: tokens for name, tokens in prompt.spans.items() if "." not in name}
    )
    spans = {} if set(spans) == {"rest"} else spans  # the same tokens as "all"
    rows: list[tuple[Cell, ...]] = []
    for name, tokens in [
        *((name, spans[name]) for name in ordered_spans(spans)),
        ("all", following),
    ]:
        # Rank -1: the run kept no prediction there.
        known = np.isin(following, tokens) & (rank >= 0)
        if known.any():
            rows.append(
                (
                    name,
                    int(known.sum()),
                    float(100 * (rank[known] == 0).mean()),
                    float(100 * probability[known].mean()),
                )
            )
    title = "What the model expects: tokens of the first prompt, given those before them"
    note = "likeliest: tokens of the span that the model held to be the likeliest next ones."
    for name in ("answer_log_probability", "answer_is_likeliest", "loss"):
        if name in predictions:
            array = predictions[name]
            note += f" {array.attrs['long_name'].capitalize()}, {over(array)}: {number(float(array.mean()))}."
    return Table(
        "predictions",
        title,
        ("span", "tokens", "likeliest (%)", "mean probability (%)"),
        tuple(rows),
        note,
    )


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """The line over the first prompt, and the next tokens after the chosen one."""
    predictions, prompt = group(run, "predictions"), first_prompt(run)
    following = predictions["probability_of_next"]
    # Drawn at the token that is predicted, as spans and texts are.
    index = ("token", following["token"].values + 1, {"long_name": "token index"})
    title = "probability of a token of the first prompt, given those before it"
    drawn = following.assign_coords(token=index).rename("probability")
    drawn = drawn.assign_attrs(long_name=title, units="", limits=(-0.03, 1.03))
    if drawn.notnull().any():  # a prompt of one token has no next token
        yield Lines(
            *with_run_axis(run, drawn),
            *("token", None),
            name="predictions",
            spans=prompt,
            caption="Probability that the model gave to each token of the first prompt before it came.",
        )
    ids = predictions["next_token"]
    # Runs without a tokenizer have ids only.
    numbered = np.array([f"⟨{token}⟩" for token in ids.values.ravel()], dtype=object).reshape(
        ids.shape
    )
    texts = predictions["next_text"].values if "next_text" in predictions else numbered
    number = 0 if prompt is None else prompt.prompt
    yield NextTokens(
        "Next tokens after the chosen one", predictions["probability"], texts, following, number
    )


LEAST_ABOVE = 2.0
"""Times the share of the commonest token that a finding's share of expected tokens is, at least."""
FAILS = 0.5
"""Share of right answers below which a model does not do its task."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Report the model's answers if prompts have answers, else its predictions of next tokens."""
    predictions = group(run, "predictions")
    if "answer_is_likeliest" in predictions:
        right = predictions["answer_is_likeliest"].dropna("prompt")
        if right.size:
            yield _of_answers(run, right)
            return
    yield from _of_next_tokens(run)


def _of_answers(run: xr.DataTree, right: xr.DataArray) -> Finding:
    """Report the number of right answers, and the question of the task."""
    count, does = int(right.sum()), str(run.attrs.get("does", ""))
    how = f"right in {count} of {counted(right.size, 'prompt')}"
    if right.size == 1:
        how = "its answer is right" if count else "its answer is wrong"
    sentence = f"The model answers: {how}" if right.size > 1 else f"The model's {how[4:]}"
    if does and count >= FAILS * right.size:
        sentence = f"The model {does}: {how}"
    elif does:
        sentence = f"The model fails at its task ({does}): {how}"
    probability = group(run, "predictions")["answer_log_probability"]
    evidence = (
        "an answer is right where each of its tokens is the likeliest one; log-probability "
        f"{number(float(probability.mean()))} nats per token of the answer, {over(right)}"
    )
    return Finding(sentence, evidence, 0.99, "predictions")


def _of_next_tokens(run: xr.DataTree) -> Iterator[Finding]:
    """Count the tokens of the first prompt that were the likeliest next ones.

    The null is to name its commonest token every time.
    """
    predictions, prompt = group(run, "predictions"), first_prompt(run)
    rank = predictions["rank_of_next"].values
    known = np.flatnonzero(rank >= 0)
    if prompt is None or prompt.texts is None or len(known) < 8:
        return
    following = predictions["token"].values + 1
    texts = [prompt.texts[token] for token in following[known]]
    commonest, expected = (
        max(map(texts.count, texts)) / len(texts),
        float((rank[known] == 0).mean()),
    )
    if expected < LEAST_ABOVE * commonest:
        return
    of = "the prompt" if int(run.attrs.get("prompts", 1)) == 1 else "the first prompt"
    all_tokens = len(prompt.texts) - 1
    read = (
        f"the {all_tokens:,} tokens of {of}"
        if len(known) == all_tokens
        else f"{len(known):,} of {of}'s {all_tokens:,} tokens"
    )
    sentence = f"The model's likeliest next token is right for {percent(expected)} of {read}"
    evidence = (
        f"the first token is not predicted; always naming the commonest one is right for "
        f"{percent(commonest)}"
    )
    yield Finding(sentence, evidence, 0.99, "predictions", prompt=prompt.prompt)


VIEW = View(
    "predictions",
    "What the model expects next",
    "The probability that the model gives to each token of the first prompt, and the "
    "likeliest next tokens after the chosen one. What is "
    "expected follows from all heads together: no head can be read off here.",
    _charts,
    tables=lambda run: (prediction_table(run),),
    findings=_findings,
    compared=(),
    not_averaged=("probability",),
)
