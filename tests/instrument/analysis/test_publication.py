"""Results of two processes stay apart; the numbers are written first and outlive figures, page and
other packages' code.
"""

import os
import resource
import signal
from pathlib import Path

import pytest
import xarray as xr
from forked import Forked, forked, say
from places import tree
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.publication import claim_results
from repo_interp.run import make_run

pytestmark = pytest.mark.usefixtures("no_pictures")


def tiny_run(value=1.0):
    group = xr.Dataset({"value": ("x", [value], {"long_name": "value", "units": "1"})})
    return make_run({"small": group}, {"checkpoint": "tiny"})


def draw(run, page, figures):
    page.write_text("the page")
    figures.mkdir()
    (figures / "value.png").write_text("a picture")
    return []


def start(out, folder):
    """A process that claims a directory, says which, and keeps it until it is told to end."""

    def hold():
        with claim_results(out, "niah-repo") as results:
            say(results.directory)
            signal.sigwait([signal.SIGTERM])

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return Forked(hold, folder)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def test_processes_without_out_choose_different_directories(tmp_path):
    processes = [start(None, tmp_path) for _ in range(2)]
    assert {process.line() for process in processes} == {"runs/niah-repo", "runs/niah-repo-2"}
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait().returncode == 0
    assert not list(tmp_path.glob("runs/*"))  # nothing was published, so nothing is left


def test_a_second_writer_of_one_directory_is_refused_and_a_killed_one_holds_nothing(tmp_path):
    first = start(tmp_path / "out", tmp_path)
    first.line()
    with refused(r"another process writes to .*out"):
        claim_results(tmp_path / "out", "").__enter__()
    first.kill()
    first.wait()
    with claim_results(tmp_path / "out", "") as results:
        results.publish(tiny_run(), draw)
    assert sorted(tree(tmp_path / "out")) == ["figures/value.png", "report.html", "run.nc"]


def test_results_are_replaced_as_a_whole_and_only_when_asked(tmp_path):
    with claim_results(tmp_path / "out", "") as results:
        published = results.publish(tiny_run(1.0), draw)
    assert (published.figures, published.failures, len(published.files)) == (1, (), 3)
    with refused("holds results already"):
        claim_results(tmp_path / "out", "").__enter__()
    with claim_results(tmp_path / "out", "", overwrite=True) as results:
        results.publish(tiny_run(2.0), lambda run, page, figures: [])
    assert list(tree(tmp_path / "out")) == ["run.nc"]
    assert ri.read_run(tmp_path / "out")["small/value"] == 2.0


def test_names_are_skipped_that_hold_something_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.nc").write_text("")
    (tmp_path / "runs" / "mine-2").write_text("a file")
    with claim_results(None, "mine") as results:
        assert results.directory == Path("runs/mine-3")


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (ValueError("wrong"), []),
        (OSError(5, "Input/output error"), []),
        (KeyboardInterrupt(), ["new/out/.batches/batch-00000.nc"]),
        (OSError(28, "No space left on device"), ["new/out/.batches/batch-00000.nc"]),
    ],
)
def test_finished_batches_outlive_an_interruption_and_a_full_disk_alone(error, left, tmp_path):
    def fail():
        with claim_results(tmp_path / "new" / "out", "") as results:
            results.store.mkdir()
            (results.store / "batch-00000.nc").write_text("numbers")
            raise error

    with pytest.raises((type(error), ri.InputError)) as raised:
        fail()
    assert raised.value is error or "left on device); make room" in str(raised.value)
    assert list(tree(tmp_path)) == left
    with claim_results(tmp_path / "new" / "out", "") as results:
        assert results.store.is_dir() == bool(left)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("wrong")])
def test_what_happens_while_drawing_leaves_the_numbers_alone_in_place(error, tmp_path):
    def half(run, page, figures):
        page.write_text("half a pa")
        raise error

    with claim_results(tmp_path / "out", "") as results:
        results.publish(tiny_run(1.0), draw)
    with pytest.raises(type(error)), claim_results(tmp_path / "out", "", overwrite=True) as results:
        results.publish(tiny_run(2.0), half)
    assert list(tree(tmp_path)) == ["out/run.nc"]
    assert ri.read_run(tmp_path / "out")["small/value"] == 2.0


@pytest.mark.parametrize(
    ("room", "said", "left"),
    [
        (1000, "run.nc cannot be written (File too large); nothing was changed", 1.0),
        (50_000, "figures and page cannot be written (File too large)", 2.0),
    ],
)
def test_a_full_disk_is_one_line_and_costs_no_numbers(room, said, left, tmp_path):
    with claim_results(tmp_path / "out", "") as results:
        results.publish(tiny_run(1.0), draw)
    before = tree(tmp_path)

    def draw_much(run, page, figures):
        page.write_text("p" * 100_000)

    def publish():
        # the system refuses to write more, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        try:
            with claim_results(tmp_path / "out", "", overwrite=True) as results:
                say("".join(results.publish(tiny_run(2.0), draw_much).failures))
        except ri.InputError as error:
            say(error)

    done = forked(publish)
    assert done.stdout.endswith(f"{said}\n") and done.stdout.count("\n") == 1, done.stderr
    assert ri.read_run(tmp_path / "out")["small/value"] == left
    assert tree(tmp_path) == before if left == 1.0 else list(tree(tmp_path)) == ["out/run.nc"]
