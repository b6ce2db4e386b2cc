"""What Python can be given and no command line: each is refused in one line, or measured; none ends
in another error.
"""

import json
import zipfile
from contextlib import suppress

import pytest
import torch
import xarray as xr
from refusals import refused

import repo_interp as ri
from repo_interp.entry_points import MEASURES, OWN
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.logged import inspect_samples


@pytest.fixture(scope="module")
def bridge():
    return ri.zoo("niah/repo")


@pytest.fixture(scope="module")
def run(bridge):
    prompt = Prompt(tokens=tuple(range(1, 40)), spans={"needle": (3, 4, 5)}, generated=(38,))
    return ri.analyze(bridge, [prompt], measures=("predictions", "attention_mass", "positions"))


def archive(tmp_path, method=zipfile.ZIP_DEFLATED):
    file = tmp_path / "log.eval"
    sample = {"id": 1, "input": "a b " * 30, "target": "b", "output": {"completion": "b"}}
    with zipfile.ZipFile(file, "w", method) as written:
        written.writestr("samples/1_epoch_1.json", json.dumps(sample))
    return bytearray(file.read_bytes())


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_damaged_log_is_one_line(method, tmp_path):
    """Found: errors of zlib, for an archive with a changed byte."""
    content, refusals = archive(tmp_path, method), 0
    assert inspect_samples(bytes(content))
    for place in range(2, len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        try:
            inspect_samples(bytes(damaged))
        except ri.InputError:
            refusals += 1
    assert refusals > len(content) // 3


def test_an_encrypted_log_is_one_line(tmp_path):
    content = archive(tmp_path)
    for header, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.find(header) + flags] |= 1
    with refused("the archive is encrypted"):
        inspect_samples(bytes(content))


@pytest.mark.filterwarnings("ignore::repo_interp.analysis.notes.SilentMeasure")
@pytest.mark.parametrize("measure", [name for name in OWN[MEASURES] if name != "segments"])
def test_a_prompt_of_one_token_is_measured_and_shown_or_refused(bridge, measure):
    """Found: the figures of components."""
    with suppress(ri.InputError):
        run = ri.analyze(bridge, [Prompt(tokens=(5,), generated=(0,))], measures=(measure,))
        ri.findings(run)
        assert ri.show(run) is not None


def test_a_file_in_the_place_of_a_directory_of_runs_is_refused_at_once(bridge, tmp_path):
    (tmp_path / "file").write_text("text")
    with refused("is a file; wanted a directory"):
        ri.PositionsCallback(prompts=[[1, 2]], out=tmp_path / "file")
    with refused("is a file; wanted a directory"):
        ri.measure_step(bridge, 0, [[1, 2, 3]], out=tmp_path / "file" / "runs")


UNREADABLE = {
    "meta": lambda: torch.zeros(1, 5, dtype=torch.long, device="meta"),
    "sparse": lambda: torch.tensor([[1, 2, 3, 4, 5]]).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(1, 5), 1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_tokens_and_positions_whose_numbers_cannot_be_read_are_refused(bridge, kind):
    given = UNREADABLE[kind]()
    for ask in (
        lambda: ri.analyze(bridge, given),
        lambda: ri.interventions.positions_of(bridge, given),
    ):
        with refused(r"wanted a Prompt|tokens are a table"):
            ask()
    with refused("are no numbers"), ri.set_positions(bridge, 1, 0, given):
        bridge(torch.tensor([[1, 2, 3, 4, 5]]))


@pytest.mark.parametrize("value", [None, {"a": 1}, object(), [[1], [2, 3]], "a\0b", 1 << 80])
def test_an_attribute_that_no_file_holds_is_named(run, tmp_path, value):
    given = run.copy(deep=True)
    group = given["predictions"].to_dataset()
    owners = {"/": given, "/predictions": group, "/predictions/probability": group["probability"]}
    for place, owner in owners.items():
        owner.attrs["mine"] = value
        given["predictions"] = xr.DataTree(group)
        with refused(f"the attribute 'mine' of {place} is .*, which no"):
            ri.write_run(given, tmp_path / "run.nc")
        del owner.attrs["mine"]
    assert not list(tmp_path.iterdir())


def test_text_where_numbers_should_be_is_named(run):
    for group in run.children:
        for name, array in run[group].to_dataset().data_vars.items():
            if array.dtype.kind not in "fi":
                continue
            given = run.copy()
            given[f"{group}/{name}"] = xr.full_like(array, "text", dtype=object)
            for ask in (ri.findings, ri.show):
                with refused(f"{group}/{name} of the run holds text"):
                    ask(given)
