"""Several processes on one command: two that were launched together, one of which is killed in the
end; and what each does alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import xarray as xr
from accelerate import PartialState
from drawn import without_pictures
from forked import Forked, forked
from places import tree

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.analysis import memory_needed as memory
from repo_interp.analysis.job import Job
from repo_interp.analysis.publication import stage
from repo_interp.analysis.trained_task import task_of
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import main
from repo_interp.errors import InputError
from repo_interp.models import pass_limits
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import observable
from repo_interp.models.side_by_side import SideBySide, batches
from repo_interp.runtime import processes

ANALYZE = (
    *("analyze", "reversal/repo", "--length", "8", "--count", "5", "--batch-size", "2"),
    *("--measures", "attention_mass,predictions"),
)
SCORE = ("score", "reversal/rope", "--test-sets", "2,5", "--count", "20", "--batch-size", "8")
MEASURES = ["positions", "patterns"]
BAD = ("analyze", "niah/repo", "--measures", "entropy")


def launcher():
    """What a launcher of two processes leaves in the environment of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def of_rank(rank, launched):
    """Make this forked process one of two that a launcher started."""
    warnings.simplefilter("default")
    os.environ.update(launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    PartialState._reset_state()


def prompts():
    """Prompts of several lengths, more than there are processes."""
    task = task_of(zoo_path("niah/rope"))
    return [prompt for name in ("96", "128") for prompt in task.prompts(4, seed=2, test_set=name)]


def work_together(rank, launched, directory):
    """Four commands, what all processes share, then an analysis during which the second process is
    killed.
    """
    of_rank(rank, launched)
    commands = [
        [*ANALYZE, "--out", str(directory / "run")],
        [*SCORE, "--out", str(directory / "scores")],
        BAD,
        ("analyze", "niah/repo", "--seed", str(rank)),
    ]
    with processes.together():
        codes = [main([*command]) for command in commands]
        first = processes.from_first(lambda: rank)
        shared = processes.share_work(
            list("abc"), lambda letter: letter * 2 + str(processes.count())
        )
        (directory / f"seen-{rank}.json").write_text(json.dumps([codes, first, shared]))
        bridge = ri.zoo("niah/rope")

        def die(done, total):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            kept = {"store": directory / "store", "batch_size": 1}
            ri.analyze(bridge, prompts(), MEASURES, **kept, progress=die)
        except processes.Deserted as deserted:
            (directory / "deserted").write_text(str(deserted))


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The directory that two processes leave, their exit codes, and what both wrote to standard
    output and standard error.
    """
    directory, environment = tmp_path_factory.mktemp("launched"), launcher()
    with without_pictures():
        both = [
            Forked(lambda rank=rank: work_together(rank, environment, directory))
            for rank in range(2)
        ]
    ended = [process.wait() for process in both]
    codes = [done.returncode for done in ended]
    return directory, codes, [(done.stdout, done.stderr) for done in ended]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("name", "command"), [("run", ANALYZE), ("scores", SCORE)])
def test_two_processes_leave_the_bytes_of_one(launched, tmp_path, name, command):
    assert forked(lambda: main([*command, "--out", str(tmp_path / name)])).returncode == 0
    alone, together = tree(tmp_path / name), tree(launched[0] / name)
    assert len(alone) >= 3 and together.keys() == alone.keys()
    assert [path for path in alone if together[path] != alone[path]] == []


def test_one_process_speaks_and_all_get_all_results_in_order(launched):
    directory, _, said = launched
    for rank in range(2):
        codes, first, shared = json.loads((directory / f"seen-{rank}.json").read_text())
        assert codes == [0, 0, 2, 2]
        assert first == 0 and shared == ["aa1", "bb1", "cc1"]  # within the work each is alone
    (line,) = [line for _, errors in said for line in errors.splitlines() if "entropy" in line]
    assert line.startswith("repo-interp analyze: there is no measure 'entropy'")
    assert "the page to look at" in " ".join(said[0][0].split()) and said[1][0] == ""


def test_different_commands_are_refused_by_every_process(launched):
    """Found: an IndexError in the midst of the work."""
    given = [f"'analyze niah/repo --seed {rank}'" for rank in range(2)]
    for _, errors in launched[2]:
        assert any(all(each in line for each in given) for line in errors.splitlines()), errors


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc in the environment; wanted a whole number"),
        ({"RANK": "2"}, "RANK=2 in the environment; wanted a whole number from 0 to 1,"),
        ({"LOCAL_WORLD_SIZE": "1e3"}, "LOCAL_WORLD_SIZE=1e3 in the environment"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x in the environment"),
        ({"MASTER_ADDR": ""}, "2 processes were launched, and MASTER_ADDR is not in the"),
    ],
)
def test_an_environment_that_no_launcher_leaves_is_refused(wrong, said, monkeypatch, capsys):
    """Found: a traceback each."""
    for name, value in (launcher() | {"RANK": "1", "LOCAL_RANK": "1"} | wrong).items():
        monkeypatch.setenv(name, value)
    assert main(list(BAD)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"repo-interp analyze: {said}")


def test_a_process_whose_partner_never_comes_says_that_it_waits_and_ends(tmp_path):
    """Found: it was silent, and in the end came a stack of C++; then ten minutes, and torch's line
    in ours; then one word in a minute.
    """
    environment = launcher()

    def wait_in_vain():
        of_rank(1, environment)
        processes._MEETING, processes._SILENCE = timedelta(seconds=3), 0.5
        return main(list(BAD))

    done = forked(wait_in_vain, tmp_path)
    *waits, ends = done.stderr.splitlines()
    others = f"(2 in all) at 127.0.0.1:{environment['MASTER_PORT']}"
    assert done.returncode == 130
    assert len(waits) >= 3, "it fell silent again"
    for line in waits:
        assert line.startswith("repo-interp analyze has waited ") and others in line
        assert "for up to 3 s; launch them all together, or end this one with Ctrl-C" in line
    assert "interrupted: " in ends and f"{others} did not come" in ends


def test_a_process_that_dies_leaves_what_another_goes_on_with(launched, tmp_path):
    directory, codes, said = launched
    assert codes == [0, -9], said
    assert "another process of this command has ended" in (directory / "deserted").read_text()
    bridge = ri.zoo("niah/rope")
    given = prompts()
    kept = len(list((directory / "store").glob("batch-*.nc")))
    assert 1 <= kept <= len(given)
    steps: list[int] = []
    progress = {"store": directory / "store", "progress": lambda done, _: steps.append(done)}
    again = ri.analyze(bridge, given, MEASURES, batch_size=1, **progress)
    layers = len(ri.layout(bridge))
    assert len([step for step in steps if step % layers]) == (len(given) - kept) * (layers - 1), (
        "kept batches were observed again"
    )
    xr.testing.assert_identical(again, ri.analyze(bridge, given, MEASURES, batch_size=1))


@pytest.fixture
def refusal(capsys):
    """What a command says that is refused, in one line."""

    def refusal(command):
        capsys.readouterr()
        assert main(command.split()) == 2
        return " ".join(capsys.readouterr().err.split())

    return refusal


@pytest.mark.usefixtures("no_figures")
def test_resume_goes_on_draws_and_leaves_alone_what_is_finished(tmp_path, capsys, refusal):
    out = tmp_path / "out"
    command = f"{' '.join(SCORE)} --out {out}"
    assert "give one of them" in refusal(f"{command} --resume --overwrite")
    assert "give --out" in refusal(f"{' '.join(SCORE)} --resume")
    assert main(command.split()) == 0
    finished, resumed = tree(out), [*command.split(), "--resume"]
    capsys.readouterr()
    assert main(resumed) == 0
    assert "is finished: scores of " in " ".join(capsys.readouterr().out.split())
    assert tree(out) == finished
    (out / "report.html").unlink()
    assert stage(out) == "measured" and main(resumed) == 0
    assert tree(out) == finished


@pytest.mark.parametrize(
    "size",
    [3, 100, SideBySide(prompts=2, tokens=21), SideBySide(tokens=1)],
)
def test_batches_hold_every_prompt_once_and_no_more_than_fits(size):
    lengths = [10, 3, 3, 8, 1, 7, 2, 12]
    order = [7, 0, 3, 5, 1, 2, 6, 4]
    cut = batches(order, lengths, size)
    assert [number for some in cut for number in some] == order
    most = size if isinstance(size, SideBySide) else SideBySide(prompts=size)
    for some, following in zip(cut, [*cut[1:], None], strict=True):
        padded = len(some) * max(lengths[number] for number in some)
        assert len(some) == 1 or (len(some) <= most.prompts and padded <= most.tokens)
        if following is not None:  # none is cut where one more would fit
            more = len(some) + 1
            longest = max(lengths[number] for number in [*some, following[0]])
            assert more > most.prompts or more * longest > most.tokens
    with pytest.raises(InputError, match="at least one prompt"):
        SideBySide(prompts=0)


@pytest.mark.parametrize("family", ["gpt2", "falcon", "gemma2"])
def test_memory_is_reckoned_for_families_that_state_no_width_of_their_feed_forward_part(family):
    """Found: the command ended in a traceback for GPT-2, Falcon, OPT, MPT and Bloom."""
    decoder = as_decoder(observable(small_model(family)))
    memory.require_memory_for_run(decoder, [8, 9], SideBySide(prompts=2), [9])
    stated = getattr(decoder.config, "intermediate_size", 4 * decoder.config.hidden_size)
    assert pass_limits.bytes_per_token(decoder) == 4 * (8 * decoder.config.hidden_size + 4 * stated)


def test_automatic_batches_follow_lengths_and_memory(monkeypatch):
    bridge = ri.zoo("reversal/rope")
    assert pass_limits.batch_limit(as_decoder(bridge), 3) == SideBySide(prompts=3)
    assert (
        pass_limits.batch_limit(as_decoder(bridge), "auto").tokens == pass_limits.WORTHWHILE["cpu"]
    )
    monkeypatch.setattr(
        pass_limits,
        "machine_memory",
        lambda: 8 * 100 * pass_limits.bytes_per_token(as_decoder(bridge)),
    )
    assert pass_limits.batch_limit(as_decoder(bridge), "auto").tokens == 100
    rows = [[3 + n % 5 for n in range(length)] for length in (9, 40, 60, 12)]
    model = ri.open_model("reversal/rope").double()
    # By default as many as fit with their padding, of twice the width 50 tokens, the longest first
    job = Job(model, rows, ["components"])
    assert [batch.numbers for batch in job.batches] == [(2,), (1,), (3, 0)]
    alone, together = (
        ri.analyze(model, rows, ["components"], **size)["components"].to_dataset()
        for size in ({"batch_size": 1}, {})
    )
    xr.testing.assert_allclose(together, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("no_figures")
def test_resume_refuses_finished_results_of_another_question(tmp_path, monkeypatch, refusal):
    """Found: it said what the run holds, and ended with 0."""
    monkeypatch.chdir(tmp_path)
    prompts = Path("prompts.jsonl")
    prompts.write_text('{"tokens": [1, 5, 9, 4]}\n')
    begun = "analyze reversal/rope --measures positions --prompts prompts.jsonl --out out"
    for more in ("", "--resume --batch-size 2"):
        assert main(f"{begun} {more}".split()) == 0
    finished = tree(Path("out"))
    for command, said in (
        (f"{begun} --measures components", "--measures was positions, now components"),
        (f"{begun} --set epsilon=0.5", "--set was not given, now epsilon=0.5"),
        ("analyze reversal/nope --out out", "holds results of another checkpoint"),
        ("analyze no/such --out out", "no/such"),
        ("score reversal/rope --out out", "holds an analysis"),
    ):
        assert said in refusal(f"{command} --resume")
    prompts.write_text('{"tokens": [1, 5, 9, 5]}\n')
    assert "--prompts was another file or folder (" in refusal(f"{begun} --resume")
    assert tree(Path("out")) == finished
    run = ri.read_run("out")
    assert str(tmp_path) not in run.attrs["asked"] and "prompts.jsonl" not in run.attrs["asked"]
    del run.attrs["asked"]
    ri.write_run(run, "out/run.nc")
    assert "without its request (1 prompts, positions)" in refusal(f"{begun} --resume")
    score = "score reversal/rope --test-sets 3 --out scores --count"
    assert main(f"{score} 2".split()) == 0
    assert "--count was 2, now 3" in refusal(f"{score} 3 --resume")


@pytest.mark.usefixtures("no_figures")
def test_what_is_kept_of_another_question_is_not_thrown_away_unasked(tmp_path, capsys, refusal):
    question = f"analyze reversal/rope --measures positions --length 3 --count 1 --out {tmp_path}"
    store = tmp_path / ".batches"
    store.mkdir()
    for name, text in (("fingerprint", "of another"), ("batch-00000.nc", "statistics")):
        (store / name).write_text(text)
    for again in (question, f"{question} --resume"):
        assert "finished parts of another question" in refusal(again)
    assert (store / "batch-00000.nc").read_text() == "statistics"
    assert main([*question.split(), "--overwrite"]) == 0
    assert "another question" in " ".join(capsys.readouterr().out.split()) and not store.exists()
