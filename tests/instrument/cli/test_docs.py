"""The pages of docs/ are true: tables match the code, examples run, links and pictures exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import fields
from functools import cache

import pytest
from bad_inputs import cases
from places import DOCS

import repo_interp as ri
from repo_interp import installed_points
from repo_interp.checkpoint_files.options import SchemeOptions
from repo_interp.cli import _parser, main
from repo_interp.cli.results import _REMEDY
from repo_interp.entry_points import COMMANDS, EXPERIMENTS, MEASURES, OWN, attribute_texts, names
from repo_interp.experiments.experiment_catalogue import experiment_named, experiment_names
from repo_interp.measures.measure_catalogue import measure_named, measure_names
from repo_interp.plugins.causes import effects
from repo_interp.plugins.heads import atlas
from repo_interp.positions.layouts import SCHEMES
from repo_interp.tasks import task_names

PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MANY = re.compile(r"(?<=\.prompts\()\d+|(?<=count=)\d+")
"""Numbers of prompts, of which three are run."""
BIN = ".venv/bin/"
LARGEST_PICTURE = 200_000


def script(name):
    """A program of docs/ as a module."""
    specification = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make():
    """docs/make.py, which reads the messages of a source once: two tests read those of all files."""
    module = script("make")
    module.messages = cache(lambda source, of=module.messages: tuple(of(source)))
    return module


@pytest.fixture
def quickly(no_figures, monkeypatch):
    """No figures; names of heads are held to one random model in place of ten, and positions
    changed in one way in place of three.
    """
    monkeypatch.setattr(atlas, "default_twins", lambda model: 1)
    monkeypatch.setattr(effects, "default_kinds", lambda model: ("linearised",))


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page, language):
    return [
        code for name, code in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language
    ]


def test_the_page_of_commands_is_what_the_parsers_say(make):
    assert read("commands.md") == make.commands_page(), "commands.md is stale: make docs"


def test_the_page_of_all_errors_is_what_the_code_says(make):
    assert read("all_errors.md") == make.errors_page(), "all_errors.md is stale: make docs"


LEAST_FIXED = 15
"""Letters of a message's own words, without which it would fit most quotations."""


def test_every_message_quoted_on_the_page_of_errors_is_one_that_the_code_gives(make):
    """`...` stands for what a message fills in, on the page as in the code."""
    package = DOCS.parent / "repo_interp"
    found = {
        message
        for file in sorted(package.rglob("*.py"))
        for _, message, _ in make.messages(file.read_text(encoding="utf-8"))
    }
    patterns = [
        re.escape(one).replace(re.escape("..."), ".*")
        for one in found
        if len(re.sub(r"\.{3}|\W", "", one)) >= LEAST_FIXED
    ]
    quoted = [line for block in blocks(DOCS / "errors.md", "text") for line in block.splitlines()]
    # What the command puts before a message that it prints, and what a command adds to it
    words = [re.sub(r"^(interrupted|not measured: \w+): ", "", line) for line in quoted]
    words = [line.removesuffix(f"; {_REMEDY}") for line in words]
    assert len(words) > 20
    assert [line for line in words if not re.fullmatch("|".join(patterns), line)] == []


def test_the_page_of_errors_is_short_and_the_list_is_not_searched(make):
    sections = read("errors.md").split("\n## ")[1:]
    assert len(sections) == 20
    long = [section.splitlines()[0] for section in sections if len(section.split()) > 120]
    assert long == []
    assert read("all_errors.md").startswith("---\nhide: [toc]\nsearch:\n  exclude: true\n---\n")


def test_every_refusal_of_the_catalogue_is_on_the_page_of_errors():
    """But for those of Python's argparse, which the page names."""
    templates = [
        re.escape(found).replace(re.escape("..."), ".*")
        for found in re.findall(r"^### `(.*)`$", read("all_errors.md"), re.M)
    ]
    known = [one for one in templates if "wanted" in one or len(one) > 20]
    known += ["arguments are required", "invalid choice", "unrecognized arguments"]
    known += ["expected one argument", "ignored explicit"]
    lines = {
        case.line.replace("`", "'")
        for case in cases()
        if case.command and case.command[0] not in ("figures", "train", "zoo")
    }
    assert {line for line in lines if not re.search("|".join(known), line)} == set()


def test_the_site_has_every_page_and_every_public_name():
    site = script("build_site")
    staged = {file.relative_to(site.ROOT).as_posix() for file in site.reachable()}
    navigation = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    reference = dict(site.api_pages())
    shown = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    made = {f"docs/{name}" for name in reference}
    assert {f"docs/{page.name}" for page in PAGES} | made <= shown <= staged | made
    assert "papers/zoo/README.md" in staged
    assert not [name for name in staged if name.startswith(("build/", "runs/"))]
    listed = re.findall(r"heading: ri\.(\w+)$", reference["api/index.md"], re.MULTILINE)
    modules = {name.removeprefix("api/").removesuffix(".md") for name in reference}
    assert set(ri.__all__) == {*listed, *modules} - {"index"}


@pytest.fixture(scope="module")
def tables(make):
    return make.maker_of_tables()


@pytest.mark.filterwarnings("ignore:most of extrapolation.kl is noise")
@pytest.mark.parametrize("name", ["measures.md", "schemes.md", "tasks.md"])
def test_tables_are_what_the_code_says(make, tables, name):
    page = read(name)
    assert (
        page.count("<!-- made:") == page.count("<!-- end -->") == len(make.SPOT.findall(page)) > 0
    )
    assert page == make.filled(page, tables), f"{name} is stale: make docs"


def test_nothing_is_left_out():
    measures, schemes, tasks = read("measures.md"), read("schemes.md"), read("tasks.md")
    measured = (*measure_names(), *experiment_names())
    made = [f"<!-- made: {part} NAME -->" for part in ("variables", "parameters")]
    options = [field.name for field in fields(SchemeOptions)]
    commands = [name.replace("-", " ") for name in names(COMMANDS)]
    for page, listed, parts in (
        (measures, measured, ["\n## NAME\n", "(#NAME)", *made]),
        (schemes, [*SCHEMES, *options], ["| `NAME` |"]),
        (tasks, task_names(), ["\n## NAME\n", "<!-- made: options NAME -->"]),
        (read("commands.md"), commands, ["\n## NAME\n"]),
        (read("README.md"), {page.name for page in PAGES} - {"README.md"}, ["(NAME)"]),
    ):
        wanted = [part.replace("NAME", name) for name in listed for part in parts]
        assert [part for part in wanted if part not in page] == []
    for section in measures.split("\n## ")[1:]:
        assert "**Means.**" in section and "**Caveat.**" in section, section[:40]


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("name", ["../README.md", "python.md", "run_file.md", "tasks.md", "zoo.md"])
def test_the_python_of_a_page_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # what a page registers is gone after it
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    code = [block for block in blocks(DOCS / name, "python") if '"CHECKPOINT"' not in block]
    assert code
    names: dict = {}
    for number, block in enumerate(code):
        fewer = MANY.sub(lambda found: str(min(3, int(found[0]))), block)
        exec(compile(fewer, f"{name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "README.md"], ids=lambda page: page.name)
def test_the_commands_of_a_page_are_commands(page):
    inline = re.findall("`(repo-interp figures [^`]+)`", page.read_text(encoding="utf-8"))
    lines = [line for block in blocks(page, "") for line in block.splitlines()] + inline
    shown = [line for line in lines if line.removeprefix(BIN).startswith("repo-interp ")]
    for line in shown:
        words = shlex.split(line.removeprefix(BIN), comments=True)[1:]
        assert _parser(words).parse_args(words).command == words[0], line


@pytest.mark.usefixtures("quickly")
def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """On a checkpoint that ships, and beside the run that `make figures` leaves; what `make
    analyze` calls is tested as its default.

    Not `explore`, which waits for its page (tests/browser/test_explorer.py), and not `fetch`.
    """
    readme = DOCS.parent / "README.md"
    monkeypatch.chdir(tmp_path)
    first = "analyze reversal/repo --length 8 --measures attention_mass --count 2 --out runs/first"
    assert main(first.split()) == 0
    prompts = ri.tasks.make_task("reversal").prompts(2, test_set="5")
    ri.write_prompts(prompts, tmp_path / "prompts.jsonl")
    lines = re.findall(
        "^repo-interp (?!explore|fetch).*$", "".join(blocks(readme, "")), re.MULTILINE
    )
    assert len(lines) >= 3
    for line in lines:
        # a network, and minutes
        line = line.replace("CHECKPOINT", "reversal/repo").replace("smollm2-135m", "reversal/rope")
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "analyze" and "--prompts" not in words:
            words += ["--count", "2"]  # in place of twenty
        if words[0] == "train":
            words += ["--steps", "2", "--score-prompts", "4"]  # in place of minutes
        assert main(words) == 0, line
    written = {file.name for file in (tmp_path / "runs" / "mine").iterdir()}
    assert written == {"run.nc", "report.html", "figures"}
    assert list((tmp_path / "runs").glob("compare-*/report.html"))


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_pictures_are_small_and_all_shown():
    pictures = sorted((DOCS / "pictures").glob("*"))
    assert pictures
    links = {target for page in PAGES for target in LINK.findall(page.read_text(encoding="utf-8"))}
    shown = {target for target in links if target.startswith("pictures/")}
    assert shown == {f"pictures/{picture.name}" for picture in pictures}
    assert [each.name for each in pictures if each.stat().st_size > LARGEST_PICTURE] == []


@pytest.mark.parametrize(
    ("group", "made"), [(MEASURES, measure_named), (EXPERIMENTS, experiment_named)]
)
def test_help_says_what_every_measure_and_experiment_is(group, made):
    said = {name: made(name).describes for name in OWN[group]}
    assert attribute_texts(group, "describes") == said and all(said.values())
