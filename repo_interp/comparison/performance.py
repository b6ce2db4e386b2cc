"""Performance of the compared models on the task: the first sentence of a comparison.

    prompts with an answer   log p of the answer, mean over its tokens, and the share of prompts
                             with the answer as the likeliest one
    plain text               loss, mean of -log p
    scores                   the score of the task

Values are means over prompts from the first of these groups that is in two runs. For two runs there
is also the difference and its 95 % interval, paired if both have the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping

import xarray as xr

from repo_interp.entry_points import EXPERIMENTS, attribute_texts
from repo_interp.intervals import paired_difference, same_prompts

_ANSWER = "log p of the answer (nats per token)"
# The most relevant first: the answer itself, then text, then readings of other experiments.
_SOURCES: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "predictions",
        {
            "answer_log_probability": _ANSWER,
            "answer_is_likeliest": "share of prompts whose answer is the likeliest one",
        },
    ),
    ("predictions", {"loss": "loss (nats per token)"}),
    *(
        (name, dict(variable.split(": ") for variable in text.split("; ")))
        for name, text in attribute_texts(EXPERIMENTS, "performance").items()
    ),
    ("scores", {"score": "{metric}"}),
)
"""Groups of a run, and their variables in words; `metric` is an attribute of the group."""
_UNKNOWN = (
    "How well these models do the task is not known: no two of the runs hold predictions of all "
    "prompts; analyze them again with predictions among the measures, as it is by default"
)
_MOST = 6
"""Most runs that the sentence names; of more runs it names the first and the last."""
_FAILS = 0.5
"""Share of right answers below which a model fails most prompts."""


def performance(
    measures: Mapping[str, xr.Dataset], alike: bool
) -> tuple[str, dict[str, xr.DataArray]]:
    """Describe the performance of runs on their task.

    Args:
        measures: Joined groups of a comparison.
        alike: Whether all runs saw the same prompts.

    Returns:
        A sentence; and means [run] by variable, for two runs with the attributes `difference`
        (second minus first) and, if it is known, `half_interval` (95 %, paired).
    """
    # Only the first source, so that the sentence never mixes two kinds of prompts
    for group, words in _SOURCES:
        dataset = measures.get(group, xr.Dataset())
        means = {name: _mean(dataset, name, alike) for name in words if name in dataset}
        if means:
            metric = dataset.attrs.get("metric", "score")
            parts = [
                f"{words[name].format(metric=metric)} {_in_words(mean)}"
                for name, mean in means.items()
            ]
            if "answer_is_likeliest" in means:
                parts += _failing(means["answer_is_likeliest"])
            runs = " and ".join(_shown(dataset["run"]).values)
            return f"How well {runs} do the task: {'; '.join(parts)}", means
    return _UNKNOWN, {}


def _mean(dataset: xr.Dataset, name: str, alike: bool) -> xr.DataArray:
    """Mean of every run; for two runs, also their difference."""
    values = dataset[name]
    # Over test sets and prompts alike: one number per run
    mean = values.mean([dim for dim in values.dims if dim != "run"], keep_attrs=True)
    if mean.size == 2:
        paired = bool(same_prompts(dataset, alike).all())
        # As attributes, so that the sentence and the page read them from one array
        difference, reach = paired_difference(values, paired)
        mean.attrs |= {"difference": difference}
        if reach is not None:
            mean.attrs |= {"half_interval": reach, "prompts": values.sizes["prompt"]}
    return mean


def _shown(by_run: xr.DataArray) -> xr.DataArray:
    return by_run if by_run.size <= _MOST else by_run[[0, -1]]


def _in_words(mean: xr.DataArray) -> str:
    """Write "-0.1 and -3 (difference -2.9 ± 0.2, 95 % interval over 20 prompts, paired)"."""
    text = " and ".join(f"{value:.3g}" for value in _shown(mean).values)
    if "difference" in mean.attrs:
        # Without an interval for a single prompt
        text += f" (difference {mean.attrs['difference']:.3g}"
        if reach := mean.attrs.get("half_interval"):
            text += f" ± {reach:.2g}, 95 % interval over {mean.attrs['prompts']} prompts, paired"
        text += ")"
    return text


def _failing(right: xr.DataArray) -> list[str]:
    """Name or count the runs that fail most prompts."""
    runs = right["run"].values[right.values < _FAILS].tolist()
    named = ", ".join(runs) if len(runs) <= _MOST else f"{len(runs)} of {right.size} runs"
    return [f"{named} fail{'s' if len(runs) == 1 else ''} most prompts"] if runs else []
