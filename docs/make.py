"""Makes the parts of `docs/` that are not written by hand, from the code itself: `make docs`, or `python docs/make.py`.

    commands.md           every command with its options, from the parsers
    measures.md, tasks.md what stands between <!-- made: KIND NAME --> and <!-- end -->: variables and parameters of a measure, from a
                          run of a tiny random model; options of a task at its sizes
    cluster.md            what a layer costs, from figures/bench
    pictures/             figures of the checkpoints that come with the package

`tests/instrument/cli/test_docs.py` makes pages and tables again and compares.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = ("measures.md", "tasks.md", "cluster.md")
SPOT = re.compile(r"(<!-- made: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DPI = 160
COLOURS = 96
"""Of a picture's palette: figures are flat, and so a picture stays small."""
RICHEST = ("language/rope", "reversal/rope")
"""Whose frequencies and fits are shown: the first of these that comes with the package."""

LATER = {"segments": ("language/repo",), "gates": ("language/cope", "counting/cope"), "position_sources": ("niah/repo",)}
"""Measures that are shown on the first of these checkpoints that comes with the package, and not shown where none does."""
CAPTIONS = {
    "segments": "How far positions follow lines, sentences and blocks, against shuffled edges",
    "gates": "Gates, and where position alone sends attention",
    "position_sources": "What the positions of every head read: the token alone in the first layer, more and more else later",
}

EXAMPLES = {
    "analyze": (
        "repo-interp analyze                                            # a checkpoint of ours on needles in a haystack",
        "repo-interp analyze CHECKPOINT --prompts prompts.jsonl --out runs/mine",
        "repo-interp analyze niah/rope --measures components,rotation --set components.first_token=1 --layers 2-3",
    ),
    "inspect": ("repo-interp inspect niah/repo",),
    "train": (
        "repo-interp train reversal --scheme repo --seeds 0-2 --jobs 2",
        "repo-interp train niah --continue-from niah/rope --scheme repo@1/3 --out runs/mine",
        "repo-interp train language --continue-from CHECKPOINT --scheme repo@1/3 --set corpus=texts --set length=2048 --out runs/mine",
        "repo-interp train language --continue-from smollm2-135m --adapter --scheme repo@1/3 --set corpus=installed --out runs/mine",
        "repo-interp train --resume --out runs/mine",
    ),
    "score": (
        "repo-interp score niah/repo --test-sets 256,512 --scaling yarn:2",
        "repo-interp score runs/reversal-repo/seed-0 --count 500",
        "repo-interp score CHECKPOINT ruler --test-sets 4096,8192 --count 20",
        "repo-interp score CHECKPOINT language --set corpus=texts --set length=2048 --set longest_test=8192",
    ),
    "zoo": ("repo-interp zoo",),
    "figures": ("repo-interp figures hope --checkpoint rope=CHECKPOINT --checkpoint hope=CHECKPOINT",),
    "compare": ("repo-interp compare runs/niah-rope runs/niah-repo",),
}
MEANINGS = {
    "seed": "of what is random",
    "layers": "where it is measured; none: everywhere",
    "segments.kinds": "kinds of segments",
    "effects.scale": "what positions are multiplied by, for `scaled`",
    "perturbation.kinds": "what is disturbed; also `feature_placement`: keys change places with each other's positions (ours)",
    "perturbation.offset_unit": "`positions`, or `range`: offsets scaled by the reach of a head's positions",
    "traced_queries": "queries beyond the training length whose outputs are traced",
    "position_sources.kinds": "kinds of segments beside the prompts' named spans",
    "patterns.chunk_size": "C, tokens of a chunk",
    "patterns.epsilon": "tolerance of a constant chunk, in positions",
    "patterns.last_chunk": "`drop` or `keep` a last chunk of fewer tokens",
    "attention_mass.rows": "the rows `producing` the generated tokens, one earlier, or the `generated` tokens' own rows",
    "components.first_token": "tokens left out at the start of each prompt: 1 drops the beginning of the sequence",
    "rotation.prominence": "least norm product of a prominent component, in medians of its head",
    "rotation.stability": "largest deviation of a stable component, in lengths of its mean key",
    "rotation.still": "radians: how little a component that starts near $\\pi$ may turn",
    "rotation.near_pi": "radians: how near to $\\pi$ counts as near",
    "three_axis.ridge": "weight of the squared axes in the fit",
    "three_axis.held_out_share": "share of the rows that is held out",
    "fake_distance.sign": "`causal`: as the model turns; `printed`: as the paper's formula does, literally",
    "fake_distance.distances": "`tokens`: $0 .. n-1$; `positions`: $n$ steps over those that the last query sees",
}
"""What parameters mean where the code has no sentence for it."""


def commands_page() -> str:
    """commands.md."""
    from repo_interp.cli import COMMANDS, _parser

    parser = _parser([])
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    lines = [
        "# Commands",
        "",
        "Made from the parsers by `make docs`. `repo-interp COMMAND --help` says the same.",
        "",
        "Every command exits with 0 when it did what was asked, 1 when the numbers are there but a figure or the page could not be",
        "drawn (one line each says which), 2 with one line on standard error when the input was bad, 130 when it was interrupted.",
        "CHECKPOINT is a directory, a hub id (`owner/name`), or a name of the [zoo](zoo.md), such as `niah/repo`.",
        "",
        *(f"- [`{name}`](#{name.replace(' ', '-')}): {found[name].description}" for name in COMMANDS),
    ]
    for name in COMMANDS:
        lines += ["", f"## {name}", "", str(found[name].description), ""]
        if name in EXAMPLES:
            lines += ["```", *EXAMPLES[name], "```", ""]
        lines += _options(found[name])
    return "\n".join(lines) + "\n"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    formatter, lines = parser._get_formatter(), []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if "--help" not in action.option_strings]
        if not shown:
            continue
        own = group.title not in ("positional arguments", "options")
        lines += [f"*{str(group.title)[0].upper()}{str(group.title)[1:]}*", ""] if own else []
        lines += ["| | |", "|---|---|"]
        for action in shown:
            value = formatter._metavar_formatter(action, action.dest.upper())(1)[0] if action.nargs != 0 else ""
            names = ", ".join(action.option_strings) or value
            written = f"{names} {value}".strip() if action.option_strings else names
            lines.append(_row(f"`{written}`", formatter._expand_help(action) if action.help else ""))
        lines.append("")
    return lines[:-1]


def filled(page: str, tables: Callable[[str, str], str]) -> str:
    """`page` with every spot filled by `tables` of its kind and name."""
    return SPOT.sub(lambda found: found[1] + tables(*found[2].split()) + found[3], page)


def maker_of_tables() -> Callable[[str, str], str]:
    """What fills a spot: variables NAME, parameters NAME, options TASK, picture NAME, costs SUBJECT."""
    groups: dict[str, Any] = {}

    def made(kind: str, name: str) -> str:
        if kind == "variables" and not groups:
            groups.update(tiny_run())
        rows: dict[str, Callable[[], Iterator[str]]] = {
            "variables": lambda: _variables(groups[name]),
            "parameters": lambda: _parameters(name),
            "options": lambda: _sizes(name),
            "picture": lambda: _picture(name),
            "costs": _costs,
        }
        return "".join(f"{row}\n" for row in rows[kind]())

    return made


def tiny_run() -> dict[str, Any]:
    """Every group that a run can have, with all that is on request, from a model that is tiny and random."""
    from repo_interp.analysis.analyze import analyze
    from repo_interp.experiments import Atlas
    from repo_interp.experiments.effects import effects
    from repo_interp.experiments.extrapolation import extrapolation, output_traces
    from repo_interp.experiments.perturbation import perturbation
    from repo_interp.experiments.saliency import saliency
    from repo_interp.experiments.task_scores import task_scores
    from repo_interp.measures.catalogue import measure_named, measure_names
    from repo_interp.tasks import make_task

    task, words = make_task("random_tokens", symbols=16, length=16), make_task("reversal", words=4)
    asked = {
        "components": {"curves": "head"},
        "three_axis": {"axes": "first_prompt", "extras": ("attention", "position", "shuffled", "held_out")},
        "maps": {"side": 4},
    }
    measures: list[Any] = [
        dataclasses.replace(measure_named(name), **asked.get(name, {}))  # pyright: ignore[reportArgumentType]
        for name in measure_names()
    ]
    few = Atlas(twins=1, sequences=2)
    run = analyze(_tiny_model("rope,repo,cope"), words.prompts(2, test_set="8"), measures, experiments=[few])
    model, prompts = _tiny_model("repo"), task.prompts(4)
    longer = task.prompts(4, test_set="32")
    return {name: node.to_dataset() for name, node in run.children.items()} | {
        "effects": effects(model, task, prompts, ("frozen",), draws=1),
        "perturbation": perturbation(model, task, prompts, gammas=(0.1,), l_maxes=(1,)),
        "extrapolation": extrapolation(model, task, {16: prompts, 32: longer}, 16),
        "output_traces": output_traces(model, prompts, longer[0], 16, 0, queries=2, step=4),
        "saliency": saliency(model, words, words.prompts(1, test_set="3"), steps=2),
        "scores": task_scores(model, words, ["2", "3"], 2),
    }


def _tiny_model(layout: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import repo_interp as ri

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=16,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return ri.reposition(LlamaForCausalLM(config), layout).eval()


def _variables(group: Any) -> Iterator[str]:
    yield from ("| variable | axes | units | what it is |", "|---|---|---|---|")
    for name, array in group.data_vars.items():
        axes = ", ".join(map(str, array.dims)) or "-"
        yield _row(f"`{name}`", axes, array.attrs["units"], array.attrs["long_name"])


def _costs() -> Iterator[str]:
    """CPU seconds and memory of a layer's lines at two lengths, as the benchmark has them."""
    import pandas

    table = pandas.read_csv(HERE.parent / "figures" / "bench" / "bench.csv").set_index(["part", "what"])
    short, long = (table.loc[f"layer/{length}"] for length in (2048, 4096))
    yield from ("| | CPU seconds, 2,048 tokens | 4,096 tokens | peak MB, 4,096 tokens |", "|---|---:|---:|---:|")
    for what in [name for name in long.index if "textbook" not in name]:
        seconds = (f"{rows.loc[what, 'cpu_seconds']:.2g}" for rows in (short, long))
        yield _row(what, *seconds, f"{long.loc[what, 'megabytes']:,.0f}")
    passes = [rows.loc["forward pass"] for rows in (short, long)]
    rates = " and ".join(f"{one['operations'] / one['cpu_seconds'] / 1e9:.0f}" for one in passes)
    yield from ("", f"The pass ran at {rates} · 10⁹ operations per second.")


def _parameters(name: str) -> Iterator[str]:
    from repo_interp.experiments.catalogue import experiment_named, experiment_names
    from repo_interp.measures.catalogue import measure_named

    measure = experiment_named(name) if name in experiment_names() else measure_named(name)
    body = ast.parse(textwrap.dedent(inspect.getsource(type(measure)))).body[0]
    said: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said[ast.unparse(before.target)] = " ".join(str(after.value.value).split())
    fields = [field for field in dataclasses.fields(measure) if field.name not in ("name", "required_spans")]  # pyright: ignore[reportArgumentType]
    if not fields:
        yield "No parameters."
        return
    yield from ("| parameter | default | meaning |", "|---|---|---|")
    for field in fields:
        value = getattr(measure, field.name)
        value = "the checkpoint's" if field.name == "training_length" else "the end" if value is None else value
        shown = (
            ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:.4g}" if isinstance(value, float) else str(value)
        )
        meaning = MEANINGS.get(f"{name}.{field.name}") or said.get(field.name) or MEANINGS[field.name]
        yield _row(f"`{field.name}`", shown or "none", _phrase(meaning))


def _phrase(sentence: str) -> str:
    """A sentence as the cell of a table: it begins small and ends without a full stop."""
    small = sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() else sentence
    return small if ". " in small else small.removesuffix(".")


def _sizes(name: str) -> Iterator[str]:
    from repo_interp.tasks import make_task

    small, paper = make_task(name), make_task(name, "paper")
    yield from ("| option | small | paper |", "|---|---|---|")
    for option, value in small.options().items():
        yield _row(f"`{option}`", _value(value), _value(paper.options()[option]))
    yield _row("tokens in training", str(small.training_length), str(paper.training_length))
    yield _row("test sets", _listed(small.test_sets), _listed(paper.test_sets))


def _picture(name: str) -> Iterator[str]:
    if (HERE / "pictures" / f"{name}.png").is_file():
        yield f"![{CAPTIONS[name]}](pictures/{name}.png)"


def _value(value: Any) -> str:
    return str(value) if value != "" else "none"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{names[0]}, {names[1]} ... {names[-1]}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def write_pictures(directory: Path) -> None:
    """Every picture of the pages, from the checkpoints that come with the package."""
    directory.mkdir(exist_ok=True)
    for old in directory.glob("*.png"):
        old.unlink()
    for name, figure in pictures():
        write_picture(figure, directory / f"{name}.png")


def pictures() -> Iterator[tuple[str, Any]]:
    """The figures, drawn one after the other."""
    import numpy as np

    import repo_interp as ri
    from repo_interp.analysis.trained_task import trained_task
    from repo_interp.experiments import Effects, Extrapolation, Perturbation, Saliency
    from repo_interp.measures.attention_mass import AttentionMass
    from repo_interp.measures.maps import Maps
    from repo_interp.plots.catalogue import view_of
    from repo_interp.plots.views.rotation import head_to_show
    from repo_interp.plots.views.three_axis import example_heads
    from repo_interp.shipped import zoo_names, zoo_path

    def task_of(name: str) -> Any:
        return trained_task(zoo_path(name))

    words = ri.analyze(ri.zoo("reversal/repo"), task_of("reversal/repo").prompts(4, test_set="12"), ("positions",))
    position = words["positions"]["position"].sel(prompt=0)
    mirrored = position.where(position["scheme"] == "repo").std("token")
    layer, head = np.unravel_index(int(np.nanargmax(mirrored.values)), mirrored.shape)
    yield "positions", ri.plots.position_lines(words, int(layer), int(head))

    task = task_of("reversal/repo")
    changed = ri.analyze(
        ri.zoo("reversal/repo"), task.prompts(20, test_set="12"), (), experiments=(Effects(),), task=task, batch_size=20
    )
    yield "effects", ri.plots.effect_maps(changed)
    yield "effects_of_sets", ri.plots.effects_of_sets(changed)
    hanging = ri.analyze(ri.zoo("reversal/repo"), task.prompts(4), (), experiments=(Saliency(),), task=task)
    yield "saliency", ri.plots.saliency_text(hanging, *ri.plots.heads_by_saliency(hanging)[0], value="integrated_gradients")

    heads = ri.analyze(ri.zoo("reversal/repo"), task.prompts(8), ("attention_mass", "three_axis"), experiments=("atlas",))
    yield "atlas", ri.plots.atlas_overview(heads)

    niah = task_of("niah/repo").prompts(20)
    producing: Any = ("positions", "patterns", AttentionMass(rows="producing"))
    repo = ri.analyze(ri.zoo("niah/repo"), niah, producing)
    yield "pattern_shares", ri.plots.pattern_shares(repo)
    yield "position_ranges", ri.plots.position_ranges(repo)
    yield "attention_mass_by_span", ri.plots.mass_by_span(repo)

    name = next(one for one in RICHEST if one in zoo_names())
    task = task_of(name)
    fits: Any = ("components", "rotation", "fake_distance", "three_axis", Maps(side=96))
    experiments: Any = (Perturbation(gammas=(0.01, 0.05, 0.1, 0.5)), Extrapolation(sequences=32))
    rope = ri.analyze(ri.zoo(name), task.prompts(8), fits, batch_size=8, experiments=experiments, task=task)
    drawn = {"components_by_distance", "component_vaf"}
    yield from ((name, figure) for name, figure in ri.plots.figures_of_components(rope) if name in drawn)
    yield "three_axis_fit", ri.plots.three_axis_fit(rope, *example_heads(rope["three_axis"].to_dataset())[0])
    yield "fake_distance_fit", ri.plots.fake_distance_fit(rope, *example_heads(rope["fake_distance"].to_dataset())[0])
    pairs = head_to_show(rope["rotation"].to_dataset())
    if pairs is not None:
        yield "rotating_pairs", ri.plots.rotating_pairs(rope, *pairs)
    yield "perturbation", ri.plots.perturbation_grid(rope)
    yield "extrapolation", ri.plots.extrapolation_by_length(rope)
    for measure, candidates in LATER.items():
        name = next((one for one in candidates if one in zoo_names()), None)
        if name is None:
            continue
        run = ri.analyze(ri.zoo(name), task_of(name).prompts(8), ("positions", measure), batch_size=8)
        view = view_of(measure)
        yield from ((measure, figure) for _, figure in islice(view.figures(run) if view else (), 1))


def write_picture(figure: Any, path: Path) -> None:
    """`figure` as a PNG with a palette."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    Image.open(buffer).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    """Make everything."""
    parser = argparse.ArgumentParser(description="Make what is not written by hand in docs/.")
    parser.add_argument("--no-pictures", action="store_true", help="pages and tables alone: seconds in place of minutes")
    chosen = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    (HERE / "commands.md").write_text(commands_page(), encoding="utf-8")
    if not chosen.no_pictures:
        write_pictures(HERE / "pictures")
    tables = maker_of_tables()
    for name in PAGES:
        page = HERE / name
        page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
