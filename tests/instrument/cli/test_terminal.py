"""What the commands print: at 80 columns, without a terminal, for models whose positions say
nothing; and one grammar for --set.
"""

import io
import re
import shlex
import sys
import time

import numpy as np
import pytest
from families import tiny
from rich.console import Console
from trained_tiny import trained
from transformers import LlamaForCausalLM

import repo_interp as ri
from position_papers.commands.train import print_scores, show
from position_papers.training.folder import TrainingFolder
from repo_interp import cli, installed_points
from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.defaults import default_measures, measured_layers
from repo_interp.cli import main
from repo_interp.cli.console_tables import MOST_ROWS, print_notes, print_table, print_tables
from repo_interp.entry_points import MEASURES
from repo_interp.measures.positions import Positions
from repo_interp.measures.topics import expand_topics, topics
from repo_interp.models.decoder import as_decoder
from repo_interp.plots.marks.table import Table
from repo_interp.runtime.console import Console as OurConsole
from repo_interp.runtime.console import bold
from repo_interp.runtime.progress import steps
from repo_interp.tasks.prompt import Prompt


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def deep(layout, layers):
    """A bridge with many layers."""
    config = tiny("llama").config
    config.num_hidden_layers = layers
    return ri.bridge(ri.reposition(LlamaForCausalLM(config).eval(), layout))


def printed(run, height=None):
    """What `analyze` prints of a run; `height`: of a terminal."""
    console = Console(
        width=100, height=height, force_terminal=height is not None, color_system=None
    )
    with console.capture() as captured:
        print_tables(console, run)
    return captured.get()


PROMPTS = [
    Prompt(tokens=tuple(range(3 + i, 35 + i)), spans={"needle": (4, 5)}, generated=(31,))
    for i in range(2)
]


def test_what_says_nothing_is_one_line_and_sixteen_layers_are_twelve_rows():
    measures = ("positions", "patterns", "three_axis", "attention_mass")
    run = analyze(deep("rope", 16), PROMPTS, measures)
    text = printed(run)
    assert text.count("says little about this run (layers 0-15 rope)") == 2
    assert "Ranges of positions" not in text
    rows, tables = re.findall("^│", text, re.MULTILINE), text.count("┏")
    assert tables >= 3 and len(rows) <= tables * MOST_ROWS
    for shown in (r"│ 0 +│ RoPE", r"│ 15 +│ RoPE", r"│ all +│", r"\d+ more rows of these tables"):
        assert re.search(shown, text)
    assert len(printed(run, height=24).splitlines()) < len(text.splitlines())


def test_a_table_without_any_number_is_one_line():
    run = analyze(deep("rope", 2), PROMPTS, ("rotation",))
    closed_form = run["rotation"]["closed_form_r"]
    # as of heads in which no component dominates
    run["rotation"]["closed_form_r"] = closed_form.where(False)
    text = printed(run)
    assert "no number could be measured" in " ".join(text.split()) and "┏" not in text


def test_neighbouring_layers_with_the_same_numbers_share_a_row():
    text = printed(analyze(deep("repo@4", 6), PROMPTS, ("positions",)))
    assert re.search(r"│ 0-3 +│ RoPE", text) and re.search(r"│ 4 +│ RePo", text)


ALWAYS = {"attention_rows", "octaves", "predictions", "attention_mass"}
"""What is measured whatever the checkpoint."""
DEFAULT = {
    "rope": {"components"},
    "nope": {"components"},
    "alibi": {"components"},
    "hope@1": {"components"},
    "cope": {"position_sources", "gates"},
    "repo,cope,rope": {"positions", "patterns", "position_sources", "gates"},
    "repo@1": {"positions", "patterns", "position_sources"},
}
"""By layout what else."""


@pytest.mark.parametrize("layout", DEFAULT)
def test_default_measures_follow_the_checkpoint(layout):
    bridge = ri.bridge(ri.reposition(tiny("llama"), layout))
    assert {*default_measures(PROMPTS, measured_layers(as_decoder(bridge)))} == ALWAYS | DEFAULT[
        layout
    ]


def test_a_topic_is_all_measures_that_state_it(monkeypatch):
    topic = ("three_axis", "fake_distance", "rotation")
    assert topics(MEASURES) == {"generalization": topic}
    text = Prompt(tokens=tuple(range(3, 39)))
    run = analyze(ri.zoo("reversal/rope"), [text], "generalization")
    assert {*run.children} == {*topic}
    given = ["rotation", "octaves", "generalization", "unknown"]
    expanded = ["rotation", "octaves", "three_axis", "fake_distance", "unknown"]
    assert expand_topics(MEASURES, given) == expanded
    assert main(["analyze", "reversal/rope", "--measures", "generalisation"]) == 2
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    installed_points.register(MEASURES, "other", type("Other", (Positions,), {"topic": "mine"}))
    assert expand_topics(MEASURES, ["mine"]) == ["other"]


@pytest.mark.usefixtures("no_pictures")
def test_figures_are_written_in_the_formats_that_are_asked_for(tmp_path, capsys):
    words = (
        "analyze reversal/repo --count 1 --length 8 --measures positions --formats svg,pdf --out"
    )
    assert main([*words.split(), str(tmp_path / "a")]) == 0
    assert {file.suffix for file in (tmp_path / "a" / "figures").iterdir()} == {".svg", ".pdf"}
    assert "formats" not in ri.read_run(tmp_path / "a").attrs["asked"]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("words", ["", "niah/rope", "niah/repo"])
def test_the_terminal_shows_one_screen_with_every_finding_once(words, narrow, tmp_path, capsys):
    command = [*shlex.split(f"analyze {words} --count 2 --out"), str(tmp_path / "a")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    name = words or "reversal/repo"
    assert lines[0].startswith(f"{name}: 2 prompts") and ", on cpu" in " ".join(lines[:5])
    starts = [place for place, line in enumerate(lines) if re.match(r"\d\. ", line)]
    end = next(place for place, line in enumerate(lines) if line.startswith("Evidence"))
    assert 2 <= len(starts) <= 5
    assert max(np.diff([*starts, end])) <= 3, "no finding is longer than three lines"
    assert lines[starts[0]].startswith("1. The model ")
    sentences = [str(finding) for finding in ri.findings(ri.read_run(tmp_path / "a"))]
    said = " ".join(" ".join(lines).split())
    assert all(said.count(" ".join(sentence.split())) == 1 for sentence in sentences)


@pytest.mark.usefixtures("no_figures")
def test_all_findings_come_with_their_evidence_where_they_are_asked_for(tmp_path, capsys):
    words = "analyze reversal/repo --count 2 --length 4 --measures attention_mass,predictions"
    assert main([*words.split(), "--all-findings", "--out", str(tmp_path / "a")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = ri.findings(ri.read_run(tmp_path / "a"), most=99)
    assert len(found) == 2 and "all_findings" not in ri.read_run(tmp_path / "a").attrs["asked"]
    for finding in found:
        assert " ".join(finding.sentence.split()) in said and finding.evidence in said
    assert "--all-findings" not in said


def test_more_notes_than_fit_are_counted():
    console = Console(width=40, color_system=None)
    with console.capture() as captured:
        print_notes(console, ["a" * 100, "b" * 40, "c", "d"])
    assert captured.get().splitlines()[-2:] == ["b" * 40, "2 more notes: report.html"]
    with console.capture() as captured:
        print_notes(console, ["a" * 400, "b"])
    assert captured.get().splitlines()[10:] == ["1 more note: report.html"]


@pytest.mark.parametrize("name", ["[/red]", ":warning:"])
def test_names_are_printed_as_they_are(name, tmp_path, capsys):
    """Found: MarkupError with a traceback after a training into a directory called [/]."""
    directory = trained(tmp_path / name, "reversal", "rope")
    assert main(["inspect", str(directory)]) == 0
    assert name in capsys.readouterr().out.replace("\n", "")
    written = io.StringIO()
    console = OurConsole(width=300, color_system=None, force_terminal=True, file=written)
    with steps(console) as step:
        show(step, 3, {name: [{"step": 3, "loss": 0.5, "score": None}]})
        step(name)
    assert name in written.getvalue()
    written.truncate(0)
    print_scores(console, [TrainingFolder(directory)])
    print_table(console, Table("noted", name, (name, "value"), ((name, "1"),), name))
    console.print(bold(name, f" and {name}"))
    assert written.getvalue().count(name) >= 6


def test_lists_fit_into_eighty_columns(narrow, capsys):
    for words in (["zoo"], ["inspect", "niah/repo"], ["inspect", "niah/r2n1"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80 and not any("…" in line.split()[0] for line in lines)
    assert main(["zoo", "list", "niah"]) == 0
    assert re.search(r"niah/repo +repo +\+\d+ +1/3 +1\.000 +256 +0\.975", capsys.readouterr().out)


def test_steps_stand_under_train_and_the_old_name_still_works(tmp_path, capsys):
    for words in (["train", "steps"], ["steps"]):
        assert main([*words, str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith("repo-interp train steps: ")


def heard(capsys, work):
    """The lines that `work` says without a terminal, where it pauses."""
    with steps(Console(force_terminal=False), every=0.05) as step:
        for part in work:
            part(step)
            time.sleep(0.3)
    return capsys.readouterr().err.splitlines()


def test_without_a_terminal_lines_say_how_far_training_is(capsys):
    """Found: hours of training into a file left two lines at its beginning."""
    first = [{"step": 3, "loss": 2.5, "score": 0.5}, {"step": 4, "loss": 2.25, "score": None}]
    second = [{"step": 10, "loss": 1.0, "score": None}]
    seeds = {"seed 0": first, "seed 1": second, "seed 2": []}
    said = heard(capsys, [lambda step: show(step, 20, seeds)])
    line = "training 14/20 seed 0 loss 2.2500, score 0.500; seed 1 loss 1.0000, score - (70 %)"
    assert said and all(one.startswith(line) and one.endswith(" so far") for one in said)


def test_without_a_terminal_a_line_says_what_is_being_done(capsys):
    # resumed: 30 were there before
    work = [lambda step, done=done: step("observing layers", done, 60) for done in (30, 31, 60)]
    said = heard(capsys, [*work, lambda step: step("drawing")])
    left = re.search(r"observing layers 31/60 \(51 %\), about (\d+) s left", "\n".join(said))
    assert left and int(left[1]) >= 0.3 * 29 - 1, "one layer took at least .3 s"
    others = "observing layers 30/60 (50 %)", "observing layers 60/60 (100 %)", "drawing"
    assert {f"{words}, 1 s so far" for words in others} <= {*said}


def test_without_a_terminal_a_line_that_says_nothing_new_is_rare(capsys):
    """Found: "observing layers 300/300 (100 %)" twenty times, and ever more time left."""
    work = [lambda step: step("effects", 0, 9), lambda step: step("effects", 1, 9)]
    said = heard(capsys, [*work, *[lambda step: None] * 3])
    assert 1 <= sum(line.startswith("effects 1/9 (11 %)") for line in said) <= 4
    left = [int(one[1]) for line in said if (one := re.search(r"about (\d+) s left", line))]
    assert left == sorted(left, reverse=True)


@pytest.mark.parametrize(
    ("written", "imported", "line"),
    [
        (False, False, "repo-interp score: importing torch and the libraries around it\n"),
        (True, False, ""),
        (False, True, ""),
    ],
)
def test_a_command_that_imports_libraries_in_silence_says_so(
    monkeypatch, capsys, written, imported, line
):
    monkeypatch.setattr("repo_interp.cli.SILENCE", 0.01)
    if not imported:
        monkeypatch.delitem(sys.modules, "torch")
    output = cli._Output(io.StringIO())
    if written:
        output.write("a first line")
    with cli._announced("repo-interp score", output):
        time.sleep(0.2)
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("columns", [4, 30])
def test_no_number_of_a_table_is_cut_in_a_narrow_window(columns):
    """Found: a table of effects in 80 columns ended its numbers in dots."""
    many = (f"column {place} of many" for place in range(columns))
    names = ("intervention with a long name", "place", *many)
    rows = tuple(
        (f"a_kind_of_change_{row}", "layer 3", *[-0.001234 * 10**row] * columns) for row in range(3)
    )
    table, written = Table("table", "a title", names, rows), io.StringIO()
    print_table(Console(file=written, width=80), table)
    printed = written.getvalue()
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    assert all(printed.count(cell) == columns for row in table.formatted() for cell in set(row[2:]))
    assert ("a title" in printed) and (columns == 4) is ("┃" in printed)
