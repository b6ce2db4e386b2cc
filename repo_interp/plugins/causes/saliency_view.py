"""Charts of an answer's derivatives by positions.

The text of a prompt in the colors of one head's derivatives, and the mean size of the derivatives
of every head.

    shaded text    d log p(answer) / d z of every token, or its integrated gradient; both signs diverge from white; underlined: the answer

For a long prompt the text shows the surroundings of the largest values, and counts of the tokens
between. Draws the group `saliency`. This module knows nothing about how derivatives were computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from repo_interp.errors import InputError, quoted
from repo_interp.plots.glyphs import FONTS
from repo_interp.plots.marks import (
    Chart,
    Finding,
    HeadCurves,
    Heads,
    PromptTokens,
    Table,
    colour_bar,
    contiguous,
    counted,
    figures_of_heads,
    group,
    head_rows,
    layer_scheme,
    number,
    over,
    over_prompts,
    pick,
    prompt_tokens,
    ranked_heads,
    runner_up,
    strongest_head,
    table_of,
    token_label,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plots.view import View

VALUES = {"saliency": "Saliency", "integrated_gradients": "Integrated gradients"}
_SIZES = {
    "saliency": ("saliency_size", "mean |saliency| of a token", "nat/token/position"),
    "integrated_gradients": ("integrated_size", "sum of |integrated gradients|", "nat/token"),
}
CAPTIONS = {
    "saliency": "how the answer's log-probability changes when the position of a token is moved a little.",
    "integrated_gradients": "what the position of a token adds to the answer's log-probability, on the "
    "way from the baseline.",
}
"""Values of a head that are drawn."""
HEADS = 3
"""Heads with a drawn text."""
ROWS = 24
"""Heads in the table."""
MOST_TOKENS, AROUND = 320, 8
"""Most tokens of a text, and the tokens on either side of a large value in a longer prompt.
"""
LETTERS = 112
"""Letters of a line of text."""
LINE = 0.165
"""Inches from one line of text to the next."""
SIZE = 5.6
"""Font size in points."""
MONOSPACE = ["DejaVu Sans Mono", *FONTS, "monospace"]
COLOURS = "PuOr_r"


@style()
def saliency_text(
    run: xr.DataTree, layer: int, head: int, prompt: int = 0, value: str = "saliency"
) -> PaperFigure:
    """Draw the text of a prompt, tokens in the color of their value in one head.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.
        prompt: Label of the prompt.
        value: "saliency" or "integrated_gradients".

    Returns:
        The figure.

    Raises:
        InputError: The run has no saliency, `value` is neither of the two, or the prompt has no
            values for this layer and head.
    """
    dataset = group(run, "saliency")
    if value not in VALUES:
        raise InputError(f"values of saliency are {', '.join(VALUES)}, not {quoted(value)}")
    tokens = prompt_tokens(dataset, prompt)
    values = (
        pick(dataset[value], prompt=prompt, layer=layer, head=head)
        .values[: tokens.count]
        .astype(float)
    )
    if not np.isfinite(values).all():
        raise InputError(
            f"layer {layer} has no {value} in prompt {prompt}: it rotates by no positions, "
            "or the run followed no path"
        )
    answer = np.flatnonzero(dataset["answer"].sel(prompt=prompt).values[: tokens.count] == 1)
    lines = text_lines(tokens, shown_tokens(values, answer))
    figure = paper_figure(PAGE_WIDTH, 0.75 + LINE * len(lines))
    ax = figure.subplots()
    # Symmetric about 0, so that white is no effect; all zeros still need a scale.
    reach = float(np.abs(values).max()) or 1.0
    norm = Normalize(-reach, reach)
    draw_text(ax, lines, values, set(answer.tolist()), norm)
    named = f"layer {layer}, head {head} ({layer_scheme(dataset, layer)}), prompt {prompt}"
    log_probability = number(float(dataset["log_probability"].sel(prompt=prompt)))
    ax.set_title(
        f"{VALUES[value]} of {named}\n"
        f"underlined: the answer, whose log-probability is taken ({log_probability} nat)"
    )
    aspect, units = max(6, 2.2 * len(lines)), str(dataset[value].attrs["units"])
    bar = colour_bar(
        figure, ScalarMappable(norm, COLOURS), ax, units, pad=0.01, fraction=0.012, aspect=aspect
    )
    bar.set_ticks([-reach, 0, reach], labels=[number(-reach), "0", number(reach)])
    return figure


def shown_tokens(values: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Choose the tokens that a text shows.

    Args:
        values: Values [token].
        answer: Indices of the tokens of the answer.

    Returns:
        Indices of all tokens; for a long prompt, of the end of the answer and the surroundings of
        large values.
    """
    if values.size <= MOST_TOKENS:
        return np.arange(values.size)
    shown = np.zeros(values.size, dtype=bool)
    # The end of a long answer may take a quarter of the tokens.
    shown[answer[-MOST_TOKENS // 4 :]] = True
    for token in np.argsort(-np.abs(values), kind="stable"):
        around = slice(max(0, token - AROUND), token + AROUND + 1)
        # Stop at the first value that does not fit, so that no smaller value takes its place.
        if shown.sum() + (~shown[around]).sum() > MOST_TOKENS:
            break
        shown[around] = True
    return np.flatnonzero(shown)


def text_lines(tokens: PromptTokens, shown: np.ndarray) -> list[list[tuple[int | None, str]]]:
    """Break tokens into lines.

    Args:
        tokens: Tokens of the prompt.
        shown: Indices of the tokens to show.

    Returns:
        Lines of (token, label); a gap has None as its token. A line ends after a line break.
    """
    labels: list[tuple[int | None, str]] = []
    last = -1
    # The empty stretch at the end makes the gap after the last shown token.
    for first, end in [*contiguous(shown.tolist()), (tokens.count, tokens.count - 1)]:
        labels += [(None, f"… {counted(first - last - 1, 'token')} …")] if first > last + 1 else []
        labels += [(token, token_label(tokens.text(token))) for token in range(first, end + 1)]
        last = end
    lines: list[list[tuple[int | None, str]]] = [[]]
    for place, (token, label) in enumerate(labels):
        # The last gap stays in its line, even if the line becomes too long.
        is_rest = token is None and place == len(labels) - 1  # stays after the last token
        if (
            not is_rest
            and lines[-1]
            and sum(len(other) + 1 for _, other in lines[-1]) + len(label) + 1 > LETTERS
        ):
            lines.append([])
        lines[-1].append((token, label))
        if token is not None and "\n" in tokens.text(token):
            lines.append([])
    return [line for line in lines if line]


def draw_text(
    ax: Axes,
    lines: Sequence[Sequence[tuple[int | None, str]]],
    values: np.ndarray,
    answer: set[int],
    norm: Normalize,
) -> Axes:
    """Draw lines of tokens on fields in the color of their values.

    Args:
        ax: Axes to draw on.
        lines: Lines of (token, label), from `text_lines`.
        values: Values [token].
        answer: Tokens of the answer, which are underlined.
        norm: Scale of the colors.

    Returns:
        `ax`.
    """
    colours = mpl.colormaps[COLOURS]
    for row, line in enumerate(lines):
        x = 0.0
        for token, label in line:
            # The x axis counts letters, which the font makes equally wide.
            width = len(label) + 0.6
            ink = "#777777"
            if token is not None:
                shade = colours(norm(values[token]))
                ax.add_patch(
                    Rectangle(
                        (x, row - 0.42),
                        width,
                        0.84,
                        facecolor=shade,
                        linewidth=0,
                        gid=f"token {token}",
                    )
                )
                # Luma of red, green and blue (Rec. 601): dark fields get white letters.
                ink = "black" if np.dot(shade[:3], (0.3, 0.59, 0.11)) > 0.5 else "white"
            if token in answer:
                line = {
                    "color": "black",
                    "linewidth": 1.0,
                    "solid_capstyle": "butt",
                    "gid": f"answer {token}",
                }
                ax.plot([x, x + width], [row + 0.44] * 2, **line)
            ax.text(
                x + width / 2,
                row,
                label,
                ha="center",
                va="center",
                fontsize=SIZE,
                color=ink,
                family=MONOSPACE,
            )
            x += width + 0.4
    ax.set(xlim=(-0.3, LETTERS + 0.3), ylim=(len(lines) - 0.4, -0.6), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


def heads_by_saliency(run: xr.DataTree) -> list[tuple[int, int]]:
    """Sort heads by the size of their integrated gradients, or of saliencies without a path.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Labels (layer, head), the largest first.
    """
    return ranked_heads(_size(run, _values(run)[-1]))


def saliency_table(run: xr.DataTree) -> Table:
    """Tabulate the saliencies of heads, the largest first.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per head: sizes of both values, their sum, and the token of the first prompt with
        the largest value.
    """
    dataset, value = group(run, "saliency"), _values(run)[-1]
    # min_count: without a path the sum is NaN, not 0.
    net = over_prompts(dataset["integrated_gradients"].sum("token", min_count=1))
    first = int(dataset["prompt"].values[0])
    tokens, rows = prompt_tokens(dataset, first), []
    for layer, head, *numbers in head_rows(
        [*map(partial(_size, run), VALUES), net], heads_by_saliency(run)[:ROWS]
    ):
        of_head = dataset[value].sel(layer=layer, head=head, prompt=first).values[: tokens.count]
        largest = int(np.abs(of_head).argmax())
        rows.append((head, layer, *numbers, f"{largest}: {token_label(tokens.text(largest))}"))
    columns = ("head", "layer", "scheme", "saliency", "integrated", "net", "largest token")
    left = dataset.sizes["layer"] * dataset.sizes["head"] - len(rows)
    note = (
        f"Means over {counted(dataset.sizes['prompt'], 'prompt')}. Saliency: mean size over "
        "tokens, nats per token of the answer and position; integrated: sum of "
        "the sizes of integrated gradients, net: their sum, nats per token of the answer. Largest token: of prompt "
        f"{first}. "
        + (f"{counted(left, 'head')} with less, or without positions, left out." if left else "")
    )
    return Table(
        "saliency",
        "Heads by what the answer owes to their positions",
        columns,
        tuple(rows),
        note.strip(),
    )


def completeness_table(run: xr.DataTree) -> Table:
    """Tabulate the completeness of integrated gradients.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per prompt: the log-probability of the answer with the model's positions and with
        all positions at the baseline, and the completeness error.
    """
    dataset = group(run, "saliency")
    start, end = dataset["baseline_log_probability"], dataset["log_probability"]
    columns = [
        ("log p", end),
        ("at the baseline", start),
        ("difference", end - start),
        ("error", dataset["completeness_error"]),
    ]
    note = (
        f"Nats, sums over the answer's tokens. Baseline: {dataset.attrs.get('baseline')} positions; "
        f"{dataset.attrs.get('steps')} steps. Error: what the sum of all "
        "integrated gradients misses of the difference; where it is not small against the "
        "difference, more steps are needed."
    )
    return table_of("completeness", "What all positions add to the answer", columns, note)


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    dataset = group(run, "saliency")
    first = int(dataset["prompt"].values[0])
    count = int(dataset["token_count"].sel(prompt=first))
    for value in _values(run):
        draw = partial(saliency_text, run, prompt=first, value=value)
        yield from figures_of_heads(value, draw, heads_by_saliency(run)[:HEADS], CAPTIONS[value])
        caption = f"{VALUES[value]} of the positions of every head, summed up over tokens."
        yield Heads(_size(run, value), name=f"{value}_of_all_heads", caption=caption)
        title, units = (
            f"{VALUES[value]} of each token of prompt {first}",
            str(dataset[value].attrs["units"]),
        )
        curves = {
            value.replace("_", " "): dataset[value].sel(prompt=first).isel(token=slice(count))
        }
        yield HeadCurves(title, "token index", units, np.arange(count), curves)


def _values(run: xr.DataTree) -> list[str]:
    """List the values in `run`; integrated gradients, if any, are last."""
    return list(VALUES)[: 2 if np.isfinite(group(run, "saliency")["integrated_size"]).any() else 1]


def _size(run: xr.DataTree, value: str) -> xr.DataArray:
    """The size [layer, head] of `value`, the mean over prompts."""
    name, title, units = _SIZES[value]
    return over_prompts(group(run, "saliency")[name]).assign_attrs(long_name=title, units=units)


def _lead(run: xr.DataTree) -> str:
    dataset = group(run, "saliency")
    begin = (
        "How the answer's log-probability, the sum over its tokens, changes when one token's "
        "position in one head is moved a little (saliency). Where the model is "
        "certain of its answer nearly nothing changes it a little, and saliencies are near 0."
    )
    if len(_values(run)) == 1:
        return begin
    start, end = dataset["baseline_log_probability"], dataset["log_probability"]
    differences, errors = np.abs(end - start), np.abs(dataset["completeness_error"])
    # A ratio of sums, not a mean of ratios: a prompt with little change of log p would dominate.
    missed = float(errors.sum() / max(float(differences.sum()), 1e-12))
    where = (
        "the mean of their head"
        if dataset.attrs.get("baseline") == "constant"
        else "the token index"
    )
    return (
        f"{begin} Integrated gradients share out what all positions add on the straight way "
        f"from {where}: log p goes from "
        f"{number(float(start.mean()))} to {number(float(end.mean()))} nats per token of the answer. With "
        f"{dataset.attrs.get('steps')} steps they miss "
        f"{number(100 * missed)} % of "
        f"it{'; more steps are needed before they are believed' if missed > 0.05 else ''}."
    )


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find the head with the largest saliency, if it exceeds 3 times the median head's."""
    size_of = group(run, "saliency")["saliency_size"]
    size = size_of.mean("prompt")
    largest, median = float(size.max()), float(size.median())
    if largest > 3 * median > 0:
        layer, head, _ = strongest_head(size)
        times = f"{largest / median:.0f} times"
        following = runner_up(size, [(layer, head)], lambda one: f"{one / median:.0f} times")
        sentence = (
            f"The answer hangs most on the positions of L{layer} H{head}: {times} as "
            f"much as on those of the median head{following}"
        )
        evidence = (
            f"{over(size_of)}; moving a token by one position changes its log-probability by {largest:.2g} nats per "
            "token of the answer (mean size over tokens, by derivatives); 3 times the median head "
            "is needed"
        )
        yield Finding(sentence, evidence, 0.65, "saliency", layer, head)


VIEW = View(
    "saliency",
    "Positions that the answer hangs on",
    _lead,
    _charts,
    # The second table is about integrated gradients, which a run without a path does not have.
    tables=lambda run: (saliency_table(run), completeness_table(run))[: len(_values(run))],
    findings=_findings,
    compared=("saliency_size", "integrated_size"),
    not_averaged=("saliency", "integrated_gradients"),
)
