"""Schemes of a file that the command line names: AdaRoPE of its paper, in ten lines."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from drawn import without_pictures
from families import tiny
from refusals import refused

import repo_interp as ri
from repo_interp import installed_points
from repo_interp.cli import main
from repo_interp.errors import Note
from repo_interp.models.decoder import as_decoder

ADAROPE = """
import torch
from torch import nn
from repo_interp.models.scheme_parts import SchemeParts


class HeadFrequencies(nn.Module):
    def __init__(self, rows, frequencies):
        super().__init__()
        self.log = nn.Parameter(frequencies.log().repeat(rows, 1))

    def forward(self, hidden_states, index):
        return index[:, None, :, None].to(self.log.dtype) * self.log.exp()[None, :, None]


def adarope(builder, rotation, d_head):
    rows = HeadFrequencies(rotation.kv_heads, rotation.frequencies)
    return SchemeParts("adarope", rows, torch.ones(d_head // 2))
"""
EDITED = ADAROPE.replace("frequencies.log()", "(0.01 * frequencies).log()")
TRAIN = (
    "train reversal --layers 2 --width 16 --heads 2 --steps 4 --batch 4 --warm-up 2 --log-every 2 "
    "--score-prompts 4 --set longest=4 --set first_longest=2 --set longest_test=5"
)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(installed_points, "_REGISTERED", {})


def run(command: str) -> tuple[int, str]:
    """The exit code, and the last line of standard error."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        code = main(command.split())
    # beside how far it has come, and that libraries are imported
    lines = re.findall("^repo-interp .*: (?!importing torch).*$", said.getvalue(), re.MULTILINE)
    return code, lines[-1] if lines else ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with ada.py and the checkpoint `trained` of its function."""
    folder = tmp_path_factory.mktemp("scheme-files")
    (folder / "ada.py").write_text(ADAROPE)
    with pytest.MonkeyPatch.context() as changed:
        changed.chdir(folder)
        changed.setattr(installed_points, "_REGISTERED", {})
        assert run(f"{TRAIN} --scheme ada.py:adarope@1 --out trained") == (0, "")
    return folder


@pytest.fixture
def folder(trained, monkeypatch):
    monkeypatch.chdir(trained)
    yield trained
    (trained / "ada.py").write_text(ADAROPE)


def test_a_checkpoint_keeps_the_digest_of_the_file_and_names_no_code(folder):
    digest = hashlib.sha256((folder / "ada.py").read_bytes()).hexdigest()
    layout = json.loads((folder / "trained/config.json").read_text())["position_layout"]
    assert layout["layers"] == ["rope", "adarope"]
    assert layout["functions"] == {"adarope": {"function": "adarope", "sha256": digest}}
    assert "ada.py" not in (folder / "trained/config.json").read_text()


def test_nothing_is_run_that_the_command_line_does_not_name(folder):
    (folder / "ada.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    for command in ("inspect trained", "score trained", "train --resume --out trained"):
        code, line = run(command)
        assert code == 2 and "--scheme" in line
    # a TOML file of a training may be another's
    (folder / "a.toml").write_text("scheme = 'ada.py:adarope'")
    assert run("train reversal --config a.toml")[0] == 2
    assert not (folder / "ran").exists()


def test_it_computes_what_a_function_of_the_same_file_computes_in_python(folder):
    assert run("inspect trained --scheme ada.py:adarope") == (0, "")
    tokens = torch.arange(4, 12)[None]
    of_command = ri.load_model(folder / "trained")(tokens).logits
    installed_points._REGISTERED.clear()
    with refused("the scheme 'adarope' of layer 1 is not known here"):
        ri.load_model(folder / "trained")
    spec = spec_from_file_location("ada_of_test", folder / "ada.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    ri.register_scheme("adarope", module.adarope)
    # no warning, which would be an error here: it is the same source
    assert torch.equal(ri.load_model(folder / "trained")(tokens).logits, of_command)


def test_another_function_is_said_where_the_checkpoint_is_opened_and_measured(folder):
    with without_pictures():
        asked = "analyze trained --measures positions --count 2 --scheme ada.py:adarope"
        assert run(f"{asked} --out analyzed") == (0, "")
        run_of_file = ri.read_run(folder / "analyzed")
        assert json.loads(run_of_file.attrs["functions"]).keys() == {"adarope"}
        (folder / "ada.py").write_text(EDITED)
        code, line = run("inspect trained --scheme ada.py:adarope")
        assert code == 0 and re.fullmatch(
            r"repo-interp inspect: trained/config.json was made with another function of a scheme "
            r"\('adarope' was adarope of a source with SHA-256 \w{12}\.\.\., and is adarope of a "
            r"source with SHA-256 \w{12}\.\.\. now\): what it computes may differ from what was "
            r"trained",
            line,
        )
        code, line = run(f"{asked} --out other")
        assert code == 0 and "was made with another function" in line
        assert "another function" in str(ri.read_run(folder / "other").attrs["notes"])
        code, line = run(f"{asked} --out analyzed --resume")
    assert code == 2 and "holds the answer to another question: --scheme was adarope" in line


def test_a_training_goes_on_with_its_own_function_alone(folder):
    own = "train --resume --out trained --scheme ada.py:adarope@1"
    assert run(own) == (0, "")
    (folder / "ada.py").write_text(EDITED)
    code, line = run(own)
    assert code == 2 and "trained was begun with another function: 'adarope' was" in line
    code, line = run("train --resume --out trained")
    assert code == 2 and "was begun with another function" in line
    installed_points._REGISTERED.clear()
    assert run("train --resume --out trained") == (
        2,
        "repo-interp train: trained was begun with the scheme adarope of a function that is not "
        "named here; give its file again, by --scheme FILE.py:FUNCTION",
    )


def test_an_interrupted_training_is_not_finished_by_another_function(folder, monkeypatch):
    """Found: a run resumed after the function was edited went on and finished."""
    from position_papers.training import loop

    one, several = loop._step, iter(range(9))

    def step(prepared, number):
        if next(several) == 2:
            raise KeyboardInterrupt
        return one(prepared, number)

    monkeypatch.setattr(loop, "_step", step)
    assert run(f"{TRAIN} --scheme ada.py:adarope --out begun")[0] == 130
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    (folder / "ada.py").write_text(EDITED)
    code, line = run("train --resume --out begun --scheme ada.py:adarope")
    assert code == 2 and "begun with another function" in line
    assert not (folder / "begun/config.json").exists()


def test_other_processes_run_the_file_too(folder):
    command = f"{TRAIN} --scheme ada.py:adarope --seeds 0,1 --jobs 2 --out several"
    assert run(command) == (0, "")
    for seed in (0, 1):
        model = ri.load_model(folder / f"several/seed-{seed}")
        assert as_decoder(model).schemes == ("adarope", "adarope")


def test_build_is_called_as_its_file_and_files_stand_in_lists(folder):
    (folder / "mine.py").write_text(ADAROPE.replace("def adarope(", "def build("))
    command = f"{TRAIN} --scheme mine.py:build,ada.py:adarope --out listed"
    assert run(command) == (0, "")
    layout = json.loads((folder / "listed/config.json").read_text())["position_layout"]
    assert layout["layers"] == ["mine", "adarope"]
    both = "inspect listed --scheme mine.py:build --scheme ada.py:adarope"
    assert run(both) == (0, "")


def parts_of(rate):
    def build(builder, rotation, d_head):
        from repo_interp.models.scheme_parts import SchemeParts
        from repo_interp.positions.assigners import TokenIndex

        return SchemeParts("", TokenIndex(), rate * rotation.frequencies)

    return build


def whole(builder, rotation, d_head):
    return parts_of(1.0)(builder, rotation, d_head)


def half(builder, rotation, d_head):
    return parts_of(0.5)(builder, rotation, d_head)


def test_loading_in_python_warns_of_another_function_of_the_name(tmp_path):
    """Found: a checkpoint ran with whatever function had the name."""
    ri.register_scheme("mine", whole)
    ri.save(ri.reposition(tiny("llama"), "mine"), tmp_path / "saved")
    ri.load_model(tmp_path / "saved")
    ri.register_scheme("mine", half)
    with pytest.warns(Note, match=r"'mine' was whole of .*, and is half of"):
        ri.load_model(tmp_path / "saved")


def test_a_function_that_fails_in_a_pass_is_one_line(folder):
    (folder / "fails.py").write_text(
        ADAROPE.replace("return index", "raise ValueError('of the file')\n        return index")
    )
    code, line = run(f"{TRAIN} --scheme fails.py:adarope --out failed")
    assert code == 2 and re.search(
        r"code of the scheme 'adarope' failed \(fails.py, line 13, in forward\): "
        r"ValueError: of the file; fix it",
        line,
    )
    assert "fails" not in sys.modules
