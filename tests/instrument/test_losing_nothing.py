"""Work that must not be lost, and results that must not be mixed: two writers, kills, full disks,
and what stands beside our own files.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import forked, say
from packages import install
from places import tree
from trained_tiny import COMMAND as TINY

import repo_interp as ri
from position_papers.training.folder import TrainingFolder
from repo_interp.cli import main
from repo_interp.models.checkpoints import identify, load_tokenizer
from repo_interp.plots.pages.report import write_report
from repo_interp.storage.claims import claim

SHORT = ["analyze", "reversal/repo", "--length", "8", "--count", "3", "--measures", "positions"]


def full(room: int) -> None:
    """Let the system refuse to write more than `room` bytes to any file, as it does when a disk is
    full.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))


def train(out: Path, *more: str) -> int:
    return main(["train", *TINY, "--out", str(out), *more])


# Two writers of one directory


def test_a_second_training_into_one_directory_is_refused_and_changes_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    held = claim(out)
    assert train(out, "--steps", "2") == 2
    assert f"another process writes to {out}; wait for it" in capsys.readouterr().err
    assert os.listdir(out) == [".lock"]
    held.release()
    assert train(out, "--steps", "2") == 0 and not (out / ".lock").exists()
    before, held = tree(out), claim(out)
    assert train(out, "--seed", "0", "--overwrite") == 2
    assert train(out, "--steps", "2", "--resume") == 0  # a finished run is only read
    held.release()
    assert tree(out) == before


# What stands beside a training run


def test_overwriting_a_run_removes_what_it_wrote_and_nothing_else(tmp_path):
    out, fresh = tmp_path / "run", tmp_path / "fresh"
    assert train(out, "--steps", "4", "--checkpoint-every", "2") == 0
    kept = ("notes.md", "analysis/run.nc", "steps/mine.txt")
    for name in kept:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("years of work")
    (out / "vocab.txt").write_text("of another tokenizer")
    assert train(out, "--steps", "2", "--overwrite", "--seed", "1") == 0
    assert train(fresh, "--steps", "2", "--seed", "1") == 0
    here, new = tree(out), tree(fresh)
    assert all(here.pop(name) == b"years of work" for name in kept)
    assert here.keys() == new.keys() and here["model.safetensors"] == new["model.safetensors"]


# A state that was changed


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile",)


CHANGES = {
    "text for weights": lambda state: state.update(model="weights"),
    "another shape": lambda state: state["model"].update(
        {next(iter(state["model"])): torch.zeros(1)}
    ),
    "an earlier step": lambda state: state["moment"].update(step=1),
    "a step beyond the last": lambda state: state["moment"].update(step=10**6),
    "no moment": lambda state: state.update(moment={}),
    "a longer log": lambda state: state["moment"].update(log_size=10**6),
    "an optimiser that forgot": lambda state: state["optimizer"].update(state={}),
    "no generator": lambda state: state.update(random=torch.zeros(3)),
    "code": lambda state: state.update(model=Hostile()),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """A training run that was interrupted."""
    folder = TrainingFolder(tmp_path_factory.mktemp("interrupted") / "run")

    def interrupt() -> None:
        while not folder.log.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert train(folder.directory, "--steps", "300") == 130
    thread.join()
    return folder.directory


@pytest.mark.parametrize("change", [*CHANGES, "half"])
def test_a_changed_state_does_not_resume(change, interrupted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(interrupted, "run")
    file = Path("run/state.pt")
    if change == "half":
        os.truncate(file, file.stat().st_size // 2)
    else:
        state = torch.load(file, weights_only=True)
        CHANGES[change](state)
        torch.save(state, file)
    before = tree(Path("run"))
    assert main(["train", "--resume", "--out", "run"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("repo-interp train: run/") and "begin anew with --overwrite" in said
    assert tree(Path("run")) == before and not Path("hostile").exists()


# A checkpoint over another one


def saved(directory: Path, scheme: str, tokenizer: bool = False) -> torch.nn.Module:
    """Save a checkpoint of the zoo with all layers of `scheme`."""
    torch.manual_seed(0)
    model = ri.reposition(ri.load_model("reversal/rope"), scheme)
    ri.save(model, directory, load_tokenizer(identify("reversal/rope")) if tokenizer else None)
    return model


def test_a_checkpoint_is_replaced_as_a_whole_and_other_files_stay(tmp_path):
    place, fresh = tmp_path / "model", tmp_path / "fresh"
    saved(place, "nope", tokenizer=True)
    (place / "model-00001-of-00002.safetensors").write_bytes(b"of another one")
    (place / "notes").mkdir()
    (place / "notes" / "README.md").write_text("years of work")
    (place / "link").symlink_to("notes")
    saved(place, "repo")
    saved(fresh, "repo")
    here = tree(place)
    assert here.pop("notes/README.md") == b"years of work" and (place / "link").is_symlink()
    assert here == tree(fresh) and not (place / "tokenizer.json").exists()
    assert sorted(os.listdir(tmp_path)) == ["fresh", "model"]


def save_until(limit: int, model: torch.nn.Module, place: Path) -> None:
    """Save `model` over the checkpoint in `place`, and die at its operation number `limit` on
    files.
    """
    count = 0

    def watch(event, arguments):
        nonlocal count
        if "model" in str(arguments[:1]) or "renameat2" in arguments:
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    ri.save(model, place)


def test_a_save_that_is_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    old, new, place = tmp_path / "old", tmp_path / "new", tmp_path / "model"
    saved(old, "nope", tokenizer=True)
    model = saved(new, "repo")
    states, ended = [], False
    while not ended:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(old, place)
        ended = forked(lambda: save_until(len(states) + 1, model, place)).returncode == 0
        states.append(tree(place))
    assert len(states) > 5 and all(state in (tree(old), tree(new)) for state in states)
    assert states[0] == tree(old) and states[-1] == tree(new)


@pytest.mark.parametrize("room", [0, 100_000])
def test_a_save_on_a_full_disk_is_one_line_and_leaves_the_old_checkpoint(room, tmp_path):
    place = tmp_path / "model"
    saved(place, "nope", tokenizer=True)
    before = tree(place)

    def save() -> None:
        full(room)
        try:
            saved(place, "repo", tokenizer=True)
        except OSError as error:
            say(error)

    done = forked(save)
    assert "File too large" in done.stdout and done.stdout.count("\n") == 1, done.stderr
    assert tree(place) == before and os.listdir(tmp_path) == ["model"]


def test_a_directory_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for place in (".", "..", tmp_path / "here", "/proc"):
        with pytest.raises(ri.InputError, match="cannot be replaced as a whole"):
            saved(Path(place), "nope")
    with pytest.raises(ri.InputError, match="a path was wanted"):
        saved(Path("a\0b"), "nope")
    assert os.listdir(tmp_path) == ["here"]


# Full disks


def test_figures_on_a_full_disk_are_one_line(tmp_path):
    """HDF5 ends the interpreter after a write that fails."""
    command = (
        "figures hope --no-zoo --fast --set count=2 --experiment copying --out out "
        "--checkpoint copying/rope_scattered=copying/rope_scattered"
    )

    def draw() -> int:
        full(3000)
        return main(command.split())

    done = forked(draw, tmp_path)
    assert done.returncode == 2 and "File too large" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.nc"))


@pytest.mark.usefixtures("no_figures")
def test_a_full_standard_output_costs_what_is_printed_and_nothing_else(tmp_path):
    with open("/dev/full", "w") as nowhere:
        done = forked(lambda: main([*SHORT, "--out", "o"]), tmp_path, nowhere)
    (line,) = (said for said in done.stderr.splitlines() if "so far" not in said)
    assert done.returncode == 1 and "standard output cannot be written" in line
    assert forked(lambda: main([*SHORT, "--out", "other"]), tmp_path).returncode == 0
    assert tree(tmp_path / "o") == tree(tmp_path / "other")


# Finished work of an analysis

PLUGIN = {
    "pyproject.toml": """
[project]
name = "late-extras"
version = "1.0"
[project.entry-points."repo_interp.measures"]
late = "late_extras:Late"
""",
    "late_extras.py": '''
"""A measure that fails when all was observed, until it is mended."""
from dataclasses import dataclass
from pathlib import Path
import torch
import xarray as xr
from repo_interp.measures.labels import with_attrs, of_layer
from repo_interp.measures.statistics import Statistics

HERE = Path(__file__).parent

@dataclass(frozen=True)
class Late:
    name: str = "late"
    required_spans: tuple[str, ...] = ()
    parameters = {}

    def observe(self, inputs, spans):
        with (HERE / "observed").open("a") as log:
            log.write("x")
        values = torch.ones(inputs.queries.shape[:2])
        return Statistics(per_prompt=xr.Dataset({"one": of_layer(inputs, ("prompt", "layer", "head"), values)}))

    def conclude(self, statistics):
        if statistics.per_prompt.sizes["prompt"] == 3 and not (HERE / "mended").exists():
            raise KeyError("no such\\nname")
        return xr.Dataset({"one": with_attrs(statistics.per_prompt["one"], "one", "1")})
''',
}


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("measures", ["positions,late", "late"])
def test_a_measure_that_cannot_conclude_loses_nothing(measures, tmp_path, monkeypatch, capsys):
    install(tmp_path, PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    out, log = tmp_path / "out", tmp_path / "observed"
    command = [*SHORT[:-1], measures, "--out", str(out), "--batch-size", "1"]
    several = "positions" in measures
    try:
        assert main(command) == (1 if several else 2)
        said = " ".join("".join(capsys.readouterr()).split())
        assert "cannot conclude (KeyError: 'no such" in said and "Traceback" not in said
        assert "finished batches are kept" in said
        if several:
            run = ri.read_run(out)
            assert set(run.children) == {"positions"}
            assert "late: it cannot conclude" in run.attrs["stopped"]
        observed = log.stat().st_size
        (tmp_path / "mended").touch()
        assert main([*command, "--resume"]) == 0
    finally:
        sys.modules.pop("late_extras", None)
    # the probe of the cost again, and none of 3 prompts in 4 layers
    assert log.stat().st_size == 2 * observed - 3 * 4
    assert "late" in ri.read_run(out).children and not (out / ".batches").exists()


@pytest.mark.parametrize(
    "damage", [lambda whole: b"", lambda whole: whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]]
)
def test_damaged_batches_and_points_are_measured_again_and_said(damage, tmp_path):
    task = ri.tasks.make_task("reversal")
    analyze = partial(
        ri.analyze,
        *(ri.load("reversal/repo"), task.prompts(1, test_set="3"), ["positions"]),
        experiments=[ri.experiments.Saliency()],
        task=task,
    )

    def interrupt(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(store=tmp_path, finished=interrupt)
    kept = [path for path in tmp_path.rglob("*") if path.suffix in (".nc", ".json")]
    assert {path.suffix for path in kept} == {".nc", ".json"}
    for path in kept:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=r"again"):
        found = analyze(store=tmp_path)
    assert found.identical(analyze())


def test_a_page_is_the_same_bytes_from_memory_and_from_the_file(tmp_path):
    """However the page is reached: in one go, or by `--resume` from the numbers of a killed
    command.
    """
    task = ri.tasks.make_task("reversal")
    run = ri.analyze(
        ri.load("reversal/repo"), task.prompts(1, test_set="3"), ["patterns"], layers=[2],
        experiments=[ri.experiments.Perturbation(gammas=(0.5,), l_maxes=(2,))], task=task,
    )  # fmt: skip
    ri.write_run(run, tmp_path / "run.nc")
    read = ri.read_run(tmp_path / "run.nc")
    for name, each in (("memory", run), ("file", read)):
        assert write_report(each, tmp_path / f"{name}.html", tmp_path / name, ("svg",)) == []
    assert (tmp_path / "memory.html").read_bytes() == (tmp_path / "file.html").read_bytes()
    assert tree(tmp_path / "memory") == tree(tmp_path / "file")
    attributes = [{name: node.attrs for name, node in one.children.items()} for one in (run, read)]
    assert attributes[0] == attributes[1]
