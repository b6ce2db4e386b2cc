"""`repo-interp figures [PAPER ...]`: reproduce the papers' figures, judge their claims, and write a
page that lists all of them.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from position_papers import ALL, FORMATS, PAPERS, named, require_papers
from position_papers.items import items_of, require_items
from repo_interp.cli.arguments import add_settings, count, require_device_kind, seed
from repo_interp.cli.checkpoint import find_checkpoint, find_readable
from repo_interp.errors import InputError
from repo_interp.runtime import processes
from repo_interp.storage.files import require_directory, require_writable

SHARED = True
OUT = "runs/figures"
SUMMARY = (
    "Reproduce the papers' figures, with data, captions and a verdict on each claim: "
    "from the zoo, or on your own checkpoints."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "papers",
        nargs="*",
        metavar="PAPER",
        help=f"which: {', '.join(PAPERS)}, or {ALL} (default: {ALL})",
    )
    parser.add_argument(
        "--checkpoint",
        type=_named,
        action="append",
        default=[],
        dest="checkpoints",
        metavar="NAME=CHECKPOINT",
        help="a checkpoint and its name in the figures: a directory, a hub id, or a name of the zoo. "
        "It replaces the zoo's checkpoint of the same name, "
        "such as language/rope=DIR, or is added; its other training seeds are in "
        "DIR/seed-N, as `train --seeds` writes them; may be "
        "repeated",
    )
    no_zoo = "only the checkpoints given, none that come with the package"
    parser.add_argument("--no-zoo", action="store_false", dest="zoo", help=no_zoo)
    experiment = "only this experiment of the papers, such as fits; may be repeated (default: all)"
    parser.add_argument(
        "--experiment",
        action="append",
        default=[],
        dest="experiments",
        metavar="NAME",
        help=experiment,
    )
    item = (
        "only this figure or table of the papers, such as 3, 3a or 'table 1'; may be repeated "
        "(default: all)"
    )
    parser.add_argument(
        "--figure", action="append", default=[], dest="items", metavar="NUMBER", help=item
    )
    parser.add_argument("--fast", action="store_true", help="measure less: a quick look")
    plan = (
        "read papers, checkpoints, zoo, experiments, settings, fast and out from the tables "
        "[[figures]] of a TOML file, one after the other, instead of these options"
    )
    parser.add_argument("--plan", metavar="FILE", help=plan)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help=f"directory of the figures, each paper in DIR/PAPER (default: {OUT}). Two levels below "
        "a page over all figures they appear on it: figures/SUBJECT/DATA",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="directory of stored measurements (default: .cache in --out)",
    )
    written = "formats of every figure; nc: all drawn numbers, as netCDF (default: png)"
    parser.add_argument(
        "--formats", type=_formats, default=("png",), metavar="png,svg,pdf,nc", help=written
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace other figures of these papers in --out; with --experiment or "
        "--figure only their figures",
    )
    settings = (
        "amount of measurements, such as sequences=5000 for every paper that has it, "
        "or hope.controls=2 for one"
    )
    add_settings(parser, "options", settings)
    jobs = (
        "processes that measure, with one thread each; the results do not depend on it "
        "(default: one per core, if memory allows)"
    )
    parser.add_argument("--jobs", type=count, metavar="N", help=jobs)
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of all random numbers (default: 0)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="device of the models: cpu, cuda, cuda:1, mps (default: auto: cuda, else cpu)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, draw and write; print the verdicts."""
    calls = list(_calls(arguments))
    for place, call in calls:
        with _at(place):
            require_papers(name for name in call.papers if name != ALL)
            asked = [name for name in call.papers if name != ALL]
            whole = PAPERS if not asked or ALL in call.papers else asked
            require_items({name: items_of(name) for name in PAPERS if name in whole}, call.items)
            for _, checkpoint in call.checkpoints:
                # A directory may hold training records without a model.
                if not Path(checkpoint).is_dir():
                    find_readable(checkpoint)
            require_directory(Path(call.out))
            require_writable(Path(call.out))
    require_device_kind(arguments.device)
    from repo_interp.models.checkpoints import device_named
    from repo_interp.runtime.console import Console

    device = str(device_named(arguments.device))
    if processes.count() > 1 and (arguments.jobs or 1) > 1:
        raise InputError(
            "--jobs is for one process; several that were launched together share the work: "
            "leave it out"
        )
    if processes.count() > 1 and arguments.plan:
        raise InputError(
            "--plan is for one process; give several that were launched together one call at a time"
        )
    prepared, taken = [], {}
    for place, call in calls:
        call.device = device
        with _at(place):
            cache = Path(call.cache) if call.cache else Path(call.out) / ".cache"
            require_directory(cache)
            require_writable(cache)
            builds = _builds(call, Path(call.out))
            for build in builds:
                where = build.directory.absolute()
                if where in taken:
                    raise InputError(
                        f"{build.directory} is where {taken[where]} puts its figures; give "
                        "another out"
                    )
                taken[where] = place
            prepared.append((call, builds, cache))
    console = Console()  # not earlier: an input error prints one line and nothing before it
    console.print(f"models run on {device}", highlight=False)
    return max(_execute(console, *each) for each in prepared)


def _calls(arguments: argparse.Namespace) -> Iterator[tuple[str, argparse.Namespace]]:
    """The requested calls, each with the prefix of its error messages: one call with the options
    themselves, or one for each row of a plan.
    """
    options = {
        "PAPER": arguments.papers, "--checkpoint": arguments.checkpoints, "--no-zoo": not arguments.zoo,
        "--experiment": arguments.experiments, "--figure": arguments.items,
        "--set": arguments.options, "--fast": arguments.fast, "--out": arguments.out is not None,
    }  # fmt: skip
    if arguments.plan is None:
        yield (
            "",
            argparse.Namespace(
                **vars(arguments) | {"out": OUT if arguments.out is None else arguments.out}
            ),
        )
        return
    stated = [name for name, value in options.items() if value]
    if stated:
        raise InputError(
            f"--plan says which figures are made, and {stated[0]} says it too; leave one of "
            "the two out"
        )
    from position_papers.kit.figure_plan import read_plan

    for number, row in enumerate(read_plan(arguments.plan), start=1):
        call = row.model_dump(include={"papers", "zoo", "experiments", "fast", "out"})
        call |= {"checkpoints": list(row.checkpoints.items()), "options": row.stated_settings()}
        yield f"{arguments.plan}, item {number}", argparse.Namespace(**vars(arguments) | call)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Prefix the message of an InputError raised inside the block with `place`."""
    try:
        yield
    except InputError as error:
        raise (InputError(f"{place}: {error}") if place else error) from None


def _execute(console, arguments: argparse.Namespace, builds, cache: Path) -> int:
    """Measure for one call, keeping the measurements in `cache`, then write its figures."""
    from position_papers.kit.build import fitting_jobs, measure_together
    from repo_interp.runtime.progress import steps

    processes.meet()
    try:
        with steps(console) as step:
            for line in processes.from_first(lambda: _announced(builds)):
                console.print(line, highlight=False, soft_wrap=True)
            wanted = [build for build in builds if _is_made(build, arguments)]
            jobs = arguments.jobs or fitting_jobs(wanted)
            measure_together(
                wanted, cache, jobs, lambda done, total, name: step("measuring", done, total, name)
            )
        if not processes.is_first():
            return 0
        with processes.alone():
            return _made(console, builds, arguments, cache)
    except processes.Deserted:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what was measured is kept in {cache}; the same command goes on"
        ) from None


def _made(console, builds, arguments: argparse.Namespace, cache: Path) -> int:
    """Measure everything that is not in `cache` yet, draw and write; print the outcome of every
    claim.
    """
    from position_papers.kit.gallery import headlines, judge_again, page_above, write_gallery
    from repo_interp.runtime.console import bold
    from repo_interp.runtime.progress import steps

    out, papers = Path(arguments.out), list(named(()).values())
    over_all, again = page_above(out) or out, []
    in_part = bool(arguments.experiments or arguments.items)
    for build in builds:
        if not _is_made(build, arguments):
            again.append(build.directory)
            if build.changes:
                text = f"  measured with another {', '.join(build.changes)}; --overwrite measures again"
                console.print(bold(build.directory, text), highlight=False, soft_wrap=True)
            continue
        with steps(console) as step:
            step(build.name)
            made = build.make(
                cache,
                lambda doing, *done, name=build.name, step=step: step(f"{name}: {doing}", *done),
            )
        if in_part:
            for picture in made.pictures:
                console.print(bold(picture), highlight=False, soft_wrap=True)
            _print_rows(console, build.directory, made.rows)
        text = f"  verdicts and figures; {len(list(build.directory.iterdir()))} files"
        console.print(bold(build.directory / "README.md", text), highlight=False, soft_wrap=True)
        write_gallery(over_all, papers)
    for directory, stay in judge_again(over_all, again, papers).items():
        text = "  stands already; judged and drawn again"
        if stay:
            text = f"  stands already; judged again. Not stored, so not drawn: {', '.join(stay)}"
        console.print(bold(directory, text), highlight=False, soft_wrap=True)
    if not in_part:
        _print(console, headlines(over_all, papers))
    console.print(
        bold(write_gallery(over_all, papers), "  every claim and every page"),
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _builds(arguments: argparse.Namespace, out: Path):
    """One build for each paper, with its checkpoints and options.

    Raises InputError for every problem that can be detected before measuring.
    """
    from position_papers.kit.build import Build, stated_options, with_experiments, with_items
    from position_papers.kit.gallery import require_own
    from position_papers.kit.paper_directory import require_free
    from position_papers.kit.subjects import given
    from repo_interp.analysis.publication import RUN

    whole = named(arguments.papers)
    papers = with_experiments(with_items(whole, arguments.items), arguments.experiments)
    of_all = argparse.Namespace(**vars(arguments) | {"experiments": [], "items": []})
    in_part = bool(arguments.experiments or arguments.items)
    users = {name: find_checkpoint(path) for name, path in arguments.checkpoints}
    if len(users) < len(arguments.checkpoints):
        raise InputError(
            "two checkpoints have the same name; give each its own: --checkpoint rope=... "
            "--checkpoint rope_2=..."
        )
    fields = {name: dict(paper.fast) if arguments.fast else {} for name, paper in papers.items()}
    values = [*arguments.options, ("seed", str(arguments.seed)), ("device", arguments.device)]
    options = stated_options(papers, values, fields)
    require_own(out)
    if (out / RUN).exists():
        raise InputError(
            f"{out} holds an analysis ({RUN}); give another --out for figures of the papers"
        )
    builds = []
    for name, paper in papers.items():
        checkpoints = given(paper.zoo if arguments.zoo else (), users)
        build = Build(
            paper,
            checkpoints,
            options[name],
            _command(name, arguments),
            out / name,
            arguments.formats,
            (whole[name], _command(name, of_all)) if in_part else None,
        )
        require_free(build.directory)
        if not (build.is_free or build.changes is not None or arguments.overwrite):
            raise InputError(
                f"{build.directory} holds other figures already; give another --out, or "
                "--overwrite to replace them"
            )
        builds.append(build)
    _require_asked(builds, users)
    return builds


def _require_asked(builds, users: dict[str, str]) -> None:
    """Raise InputError when the user's checkpoints fit none of the requested experiments, since
    only checkpoints of the zoo would be measured.
    """
    fitting = {
        subject.name
        for build in builds
        for experiment in build.paper.experiments
        for group in experiment.needs.groups(build.subjects)
        for subject in group
    }
    if users and not fitting & set(users):
        name, first = next(iter(users)), builds[0].paper.experiments[0]
        why = f"{first.name}: {first.needs.otherwise}; give another checkpoint"
        raise InputError(f"{name} ({users[name]}) fits no experiment that is asked for; {why}")


def _is_made(build, arguments: argparse.Namespace) -> bool:
    """Whether this call measures the paper. A paper that is stored already is only judged and drawn
    again.
    """
    return arguments.overwrite or build.changes is None


def _announced(builds) -> list[str]:
    """Lines with the number of checkpoints of each paper that is not stored yet."""
    lines = []
    for build in builds:
        if build.changes is None:
            count = len(build.given.paths)
            lines.append(f"{build.name}: {count} checkpoint{'' if count == 1 else 's'}")
            if build.given.missing:
                lines.append(f"  not in this package: {', '.join(build.given.missing)}")
    return lines


def _print_rows(console, directory: Path, keys) -> None:
    """Print the verdict for every measured pair of a claim and a checkpoint."""
    from rich.table import Table
    from rich.text import Text

    from position_papers.kit.judge.outcomes import read_table, records
    from position_papers.kit.paper_directory import VERDICTS

    table = Table(
        "claim",
        "checkpoint",
        "outcome",
        "ours",
        "",
        box=None,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for row in records(read_table(directory / VERDICTS)):
        if (row["claim"], row["checkpoint"]) in keys:
            spread = f"± {row['spread']}" if row["spread"] else ""
            cells = (row["claim"], row["checkpoint"], row["outcome"], row["ours"] or "–", spread)
            table.add_row(*map(Text, cells))
    console.print(table)


def _print(console, rows) -> None:
    """Print the outcome of every claim, on the small models and on real ones, in a table at most 80
    characters wide. "(toy)" marks an outcome for which no real model could be measured.
    """
    from rich.table import Table
    from rich.text import Text

    titles = list(rows[0]["columns"])
    table = Table("claim", "outcome", *titles, box=None, padding=(0, 1, 0, 0), show_edge=False)
    for row in rows:
        numbers = (
            ", ".join(own["ours"] for own in row["columns"][title]["rows"] if own["ours"]) or "–"
            for title in titles
        )
        outcome = "not measured yet" if row["verdict"] is None else row["verdict"].outcome
        outcome += " (toy)" * (row["verdict"] is not None and not row["real"])
        table.add_row(*map(Text, (row["claim"].id, outcome, *numbers)))
    console.print(table)


def _command(paper: str, arguments: argparse.Namespace) -> str:
    """The command that makes this paper's figures again, without an output directory."""
    words = ["repo-interp", "figures", paper]
    for flag, pairs in (("--checkpoint", arguments.checkpoints), ("--set", arguments.options)):
        words += [word for name, value in pairs for word in (flag, f"{name}={value}")]
    words += [word for name in arguments.experiments for word in ("--experiment", name)]
    words += [word for name in arguments.items for word in ("--figure", name)]
    words += ["--no-zoo"] * (not arguments.zoo) + ["--fast"] * arguments.fast
    words += ["--formats", ",".join(arguments.formats)] * (arguments.formats != ("png",))
    words += ["--seed", str(arguments.seed)] * bool(arguments.seed)
    return shlex.join(words + ["--device", arguments.device] * (arguments.device != "cpu"))


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"wanted NAME=VALUE, not {text!r}")
    return name, value


def _formats(text: str) -> tuple[str, ...]:
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown:
        raise argparse.ArgumentTypeError(f"wanted some of {','.join(FORMATS)}, not {unknown[0]!r}")
    return tuple(name for name in FORMATS if name in wanted)
