"""Write the parts of `docs/` that come from the code: `make docs`, or `python docs/make.py`.

commands.md            every command with its options, from the parsers
all_errors.md          every message of an error or a warning, from the code that raises it
measures.md, schemes.md, tasks.md
                       the parts between <!-- made: KIND NAME --> and <!-- end -->: `variables` of a
                       group, from a run of tiny random models; `parameters` of a measure or an
                       experiment, from its fields and their docstrings; `options` of a task; the
                       `source` of a module
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = ("measures.md", "schemes.md", "tasks.md")
SPOT = re.compile(r"(<!-- made: ([\w ./-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
COMMANDS_HEAD = """# Commands

`make docs` writes this page from the parsers; `repo-interp COMMAND --help` prints the same.

A command exits with 0 on success, 1 when the numbers are written but a figure or the page failed (one line names each) and when
`verify` has a finding, 2 after one line on standard error when the input was bad, and 130 when it was interrupted.
CHECKPOINT is a directory, a hub id (`owner/name`), or a name of the [zoo](zoo.md), such as `niah/repo`.
"""
EXAMPLES = {
    "analyze": (
        "repo-interp analyze                                            # reversal/repo, on "
        "words to reverse",
        "repo-interp analyze CHECKPOINT --prompts prompts.jsonl --out runs/mine",
        "repo-interp analyze niah/rope --measures components,rotation --set "
        "components.first_token=1 --layers 2-3",
    ),
    "explore": (
        "repo-interp explore reversal/repo                              # opens with "
        "suggested edits: click one, then Undo",
        "repo-interp explore reversal/repo --against reversal/rope      # two checkpoints "
        "over the same texts",
        "repo-interp explore runs/mine                                  # the prompts and "
        "the atlas of a run",
    ),
    "inspect": ("repo-interp inspect niah/repo",),
    "verify": (
        "repo-interp verify niah/rope",
        "repo-interp verify CHECKPOINT CHECKPOINT.gguf --longest 32768 --out runs/rotation",
        "repo-interp verify CHECKPOINT --dtype bfloat16",
        "repo-interp verify CHECKPOINT --cache keys.npz --tokens ids.json",
    ),
    "train": (
        "repo-interp train reversal --scheme repo --seeds 0-2 --jobs 2",
        "repo-interp train niah --continue-from niah/rope --scheme repo@1/3 --out runs/mine",
        "repo-interp train language --continue-from CHECKPOINT --scheme repo@1/3 --set "
        "corpus=texts --set length=2048 --out runs/mine",
        "repo-interp train language --continue-from smollm2-135m --adapter --scheme repo@1/3 "
        "--set corpus=installed --out runs/mine",
        "repo-interp train --resume --out runs/mine",
    ),
    "score": (
        "repo-interp score niah/repo --test-sets 256,512 --scaling yarn:2",
        "repo-interp score runs/reversal-repo/seed-0 --count 500",
        "repo-interp score CHECKPOINT ruler --test-sets 4096,8192 --count 20",
        "repo-interp score CHECKPOINT language --set corpus=texts --set length=2048 --set "
        "longest_test=8192",
    ),
    "zoo": ("repo-interp zoo",),
    "figures": (
        "repo-interp figures hope --checkpoint rope=CHECKPOINT --checkpoint hope=CHECKPOINT",
    ),
    "compare": ("repo-interp compare runs/niah-rope runs/niah-repo",),
}


def commands_page() -> str:
    """commands.md."""
    from repo_interp.cli import _parser

    (commands,) = (
        action for action in _parser([])._actions if isinstance(action, argparse._SubParsersAction)
    )
    parsers: dict[str, argparse.ArgumentParser] = dict(commands.choices)
    lines = [
        COMMANDS_HEAD,
        *(
            f"- [`{name}`](#{name.replace(' ', '-')}): {one.description}"
            for name, one in parsers.items()
        ),
    ]
    for name, parser in parsers.items():
        lines += ["", f"## {name}", "", str(parser.description), ""]
        if name in EXAMPLES:
            lines += ["```", *EXAMPLES[name], "```", ""]
        lines += _options(parser)
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
            value = (
                formatter._metavar_formatter(action, action.dest.upper())(1)[0]
                if action.nargs != 0
                else ""
            )
            names = ", ".join(action.option_strings) or value
            written = f"{names} {value}".strip() if action.option_strings else names
            lines.append(
                _row(f"`{written}`", formatter._expand_help(action) if action.help else "")
            )
        lines.append("")
    return lines[:-1]


ERRORS_HEAD = """---
hide: [toc]
search:
  exclude: true
---

# All errors

[errors.md](errors.md) explains the most common errors. This page lists every error message and warning
of the package, from the code. The site's search excludes it: search within the page for a few words of your message. `...`
stands for a path, a name or a number in a message. Most messages state the expected value, the given value and a remedy; below each
message are its kind and the function that raises it.

| kind | meaning | remedy |
|---|---|---|
| `InputError` | bad input: a file, an option, a checkpoint (exit code 2) | see the message; nothing was written |
| `Taken` | a directory of other results, other files or another process | another directory, or `--overwrite` if the message names it |
| `Unfinished` | work stopped; finished parts are kept | fix the cause in the message and repeat the same command |
| `NotFinite` | numbers became NaN or infinite | check the layer, head and prompt in the message; `--dtype float32` rules out rounding |
| `ArgumentTypeError` | a word of the command line | `repo-interp COMMAND --help`, or [commands.md](commands.md) |
| `ValueError` | a wrong argument of a Python call; a command reports it as an `InputError` | see the message |
| a line `not measured` | one measure stopped; the run has the others, and the command exits with 1 | see the line |
| an interruption | Ctrl-C, exit code 130 | the same command continues if the message states it |
| a warning | nothing is refused, but results depend on it | read it before the numbers |

Python's argparse adds the messages `the following arguments are required`, `invalid choice`, `unrecognized arguments` and
`expected one argument`. A message that begins with a Python name, such as `KeyError`, is a
bug: please report it.
"""
THEMES = {
    "Checkpoints and models": ("checkpoint_files", "gguf", "models", "shipped", "schemes"),
    "Positions and interventions": ("positions", "interventions"),
    "Prompts and tasks": ("tasks",),
    "Measures and experiments": ("measures", "experiments", "plugins", "inputs"),
    "Analysis and scores": ("analysis",),
    "Runs, comparison and figures": ("run", "comparison", "plots", "store"),
    "The explorer": ("explorer",),
    "The command line": ("cli",),
    "Everything else": (),
}
"""Sections of all_errors.md, with the parts of the package whose messages they contain; the last
section has all other messages.
"""
KINDS = (
    "InputError",
    "Taken",
    "Unfinished",
    "NotFinite",
    "NotFinitePrediction",
    "ArgumentTypeError",
    "ValueError",
    "Fault",
    "_said",
)
WARNINGS = ("warn", "Note", "OtherQuestion", "Damaged", "RoundedPositions", "notes.append")
ASSIGNED = {"resumable": "Interrupted", "silent": "warn"}
"""Names to which the code assigns a text that it prints later, with the kind of the message."""
SHOWN = {
    "as_input_errors": "`InputError`",
    "Fault": "a line `not measured` of a run",
    "_said": "an answer of the explorer",
    "Interrupted": "an interruption (exit code 130)",
} | dict.fromkeys(WARNINGS, "a warning")
"""Names on the page for kinds that it does not call by their name in the code."""
ELLIPSIS = re.compile(r"(\.\.\.)(\W*\.\.\.)+")


def errors_page(package: Path = HERE.parent / "repo_interp") -> str:
    """all_errors.md: one heading per message, so that a search for its words finds it."""
    found: dict[str, dict[str, list[str]]] = {theme: defaultdict(list) for theme in THEMES}
    *_, rest = THEMES
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package).with_suffix("")
        theme = next((title for title, parts in THEMES.items() if place.parts[0] in parts), rest)
        module = ".".join(part for part in place.parts if part != "__init__")
        for kind, message, function in messages(file.read_text(encoding="utf-8")):
            line = f"{kind}, from `{'.'.join(filter(None, (module, function)))}`"
            if line not in found[theme][message]:
                found[theme][message].append(line)
    lines = [ERRORS_HEAD]
    for theme, by_message in found.items():
        lines += [f"## {theme}", ""]
        for message, places in sorted(
            by_message.items(), key=lambda item: item[0].strip(". ").lower()
        ):
            lines += [f"### `{message}`", "", *(f"- {place}" for place in places), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def messages(source: str) -> Iterator[tuple[str, str, str]]:
    """The messages that the code `source` can raise: kind, text with `...` for inserted values,
    function.

    The texts of local names are inserted. A message without its own words repeats another one, and
    is left out.
    """
    tree = ast.parse(source)
    remarks: dict[ast.AST, ast.expr | None] = {
        statement: statement.value
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and (ast.get_docstring(function) or "").startswith("Return a remark")
        for statement in ast.walk(function)
        if isinstance(statement, ast.Return)
    }
    within = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        kind, given = ("warn", remarks[node]) if node in remarks else _said(node)
        if given is None:
            continue
        above = [node]
        while above[-1] in within:
            above.append(within[above[-1]])
        owners = [
            each
            for each in above
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        texts = _texts_of_names(owners[0]) if owners else {}
        for argument in _alternatives(given):
            message = " ".join(ELLIPSIS.sub(r"\1", _template(argument, texts)).split())
            if "wanted" in message or len(re.findall(r"[a-z]{2,}", message)) > 2:
                function = ".".join(owner.name for owner in reversed(owners))
                yield (
                    SHOWN.get(kind, f"`{kind}`"),
                    message.replace("`", "'") + (": ..." if kind == "as_input_errors" else ""),
                    function,
                )


def _said(node: ast.AST) -> tuple[str, ast.expr | None]:
    """The kind of error or warning that a piece of code raises, and its text; None if it raises
    none.
    """
    if isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr | ast.IfExp):
        refuses = re.search(
            "wanted|; (leave|add) it|cannot be opened|is no causal", ast.unparse(node.value)
        )
        return "InputError", node.value if refuses else None
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        target = target.value if isinstance(target, ast.Subscript) else target
        name = target.id if isinstance(target, ast.Name) else ""
        return (ASSIGNED[name], node.value) if name in ASSIGNED else ("", None)
    if not isinstance(node, ast.Call) or not node.args:
        return "", None
    called = ast.unparse(node.func)
    name = called if called in WARNINGS else called.rpartition(".")[2]
    if name in ("_require", "_WrongUsage") and len(node.args) > 1:
        return "InputError", node.args[1]
    return (name, node.args[0]) if name in (*KINDS, *WARNINGS, "as_input_errors") else ("", None)


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.IfExp):
        yield from (*_alternatives(node.body), *_alternatives(node.orelse))
    else:
        yield node


def _texts_of_names(function: ast.AST) -> dict[str, ast.expr]:
    """The text of each name in a function that is assigned once."""
    given: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            given[node.targets[0].id].append(node.value)
    return {
        name: values[0]
        for name, values in given.items()
        if len(values) == 1 and isinstance(values[0], ast.JoinedStr | ast.Constant)
    }


def _template(node: ast.expr, texts: Mapping[str, ast.expr]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_template(value, texts) for value in values)
        case ast.FormattedValue(value=ast.Name() | ast.Constant() as value):
            return _template(value, texts)
        case ast.Name(id=name) if name in texts:
            return _template(
                texts[name], {other: text for other, text in texts.items() if other != name}
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left, texts) + _template(right, texts)
    return "..."


def filled(page: str, table: Callable[[str, str], str]) -> str:
    """`page` with the text between every pair of marks replaced by `table(kind, name)`."""
    return SPOT.sub(lambda found: found[1] + table(*found[2].split()) + found[3], page)


def maker_of_tables() -> Callable[[str, str], str]:
    """A function of a kind and a name that returns the table; the models run once, for the first
    table of variables.
    """
    groups: dict[str, Any] = {}

    def table(kind: str, name: str) -> str:
        if kind == "variables" and not groups:
            groups.update(tiny_run())
        rows: dict[str, Callable[[], Iterator[str]]] = {
            "variables": lambda: _variables(groups[name]),
            "parameters": lambda: _parameters(name),
            "options": lambda: _sizes(name),
            "source": lambda: _source(name),
        }
        return "".join(f"{row}\n" for row in rows[kind]())

    return table


def tiny_run() -> dict[str, Any]:
    """Every possible group of a run, with all optional variables, from tiny models with random
    weights.
    """
    from repo_interp.analysis.analyze import analyze
    from repo_interp.experiments import Atlas, Effects, Extrapolation, Kinds, Perturbation, Saliency
    from repo_interp.experiments.test_set_scores import task_scores
    from repo_interp.measures.measure_catalogue import measure_named, measure_names
    from repo_interp.models.decoder import as_decoder
    from repo_interp.plugins.lengths.extrapolation import output_traces
    from repo_interp.tasks import make_task

    task, words = make_task("random_tokens", symbols=16, length=16), make_task("reversal", words=4)
    optional: dict[str, dict[str, Any]] = {
        "components": {"curves": "head"},
        "three_axis": {
            "axes": "first_prompt",
            "extras": ("attention", "position", "shuffled", "held_out"),
        },
        "maps": {"side": 4},
    }
    measures = [
        dataclasses.replace(measure_named(name), **optional.get(name, {}))
        for name in measure_names()
    ]  # pyright: ignore
    atlas = Atlas(twins=1, sequences=2)
    run = analyze(
        _tiny_model("rope,repo,cope"),
        words.prompts(2, test_set="8"),
        measures,
        experiments=[atlas, Kinds()],
    )
    decoder, prompts = as_decoder(_tiny_model("repo")), task.prompts(4)
    longer = task.prompts(4, test_set="32")
    return {name: node.to_dataset() for name, node in run.children.items()} | {
        "effects": Effects(("frozen",), draws=1).measured(decoder, task, prompts),
        "perturbation": Perturbation(gammas=(0.1,), l_maxes=(1,)).measured(decoder, task, prompts),
        "extrapolation": Extrapolation().measured(decoder, task, {16: prompts, 32: longer}, 16),
        "output_traces": output_traces(decoder, prompts, longer[0], 16, 0, queries=2, step=4),
        "saliency": Saliency(steps=2).measured(decoder, words, words.prompts(1, test_set="3")),
        "scores": task_scores(decoder, words, ["2", "3"], 2),
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
    yield from ("| variable | axes | units | meaning |", "|---|---|---|---|")
    for name, array in group.data_vars.items():
        axes = ", ".join(map(str, array.dims)) or "-"
        yield _row(f"`{name}`", axes, array.attrs["units"], array.attrs["long_name"])


def _parameters(name: str) -> Iterator[str]:
    from repo_interp.experiments.experiment_catalogue import experiment_named, experiment_names
    from repo_interp.measures.measure_catalogue import measure_named

    measure: Any = experiment_named(name) if name in experiment_names() else measure_named(name)
    meanings = _docstrings_of_fields(type(measure))
    fields = [
        field.name
        for field in dataclasses.fields(measure)
        if field.name not in ("name", "required_spans")
    ]
    if not fields:
        yield "No parameters."
        return
    yield from ("| parameter | default | meaning |", "|---|---|---|")
    for field in fields:
        value = getattr(measure, field)
        listed = (
            ", ".join(map(str, value))
            if isinstance(value, tuple)
            else f"{value:.4g}"
            if isinstance(value, float)
            else value
        )
        yield _row(f"`{field}`", "none" if listed in ("", None) else str(listed), meanings[field])


def _docstrings_of_fields(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, by the field's name."""
    (body,) = (
        node.body
        for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        if isinstance(node, ast.ClassDef)
    )
    return {
        ast.unparse(field.target): str(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _sizes(name: str) -> Iterator[str]:
    from repo_interp.tasks import make_task

    small, paper = make_task(name), make_task(name, "paper")
    yield from ("| option | small | paper |", "|---|---|---|")
    for option, value in small.options().items():
        yield _row(f"`{option}`", *(str(one) or "none" for one in (value, paper.options()[option])))
    yield _row("tokens in training", str(small.training_length), str(paper.training_length))
    yield _row("test sets", _listed(small.test_sets), _listed(paper.test_sets))


def _source(name: str) -> Iterator[str]:
    text = (HERE.parent / "papers" / name).read_text(encoding="utf-8")
    yield from ("", "```python", *text.splitlines(), "```", "")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{names[0]}, {names[1]} ... {names[-1]}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Write every page with a part from the code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    (HERE / "commands.md").write_text(commands_page(), encoding="utf-8")
    (HERE / "all_errors.md").write_text(errors_page(), encoding="utf-8")
    table = maker_of_tables()
    for name in PAGES:
        page = HERE / name
        page.write_text(filled(page.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
