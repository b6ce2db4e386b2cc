"""What Python can be given and no command line: each is refused in one line, or measured; none ends
in another error.
"""

import json
import zipfile

import pytest
import torch
import xarray as xr

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


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_a_damaged_log_is_one_line(method, tmp_path):
    """Found: errors of zlib, for an archive with a changed byte."""
    content, refused = archive(tmp_path, method), 0
    assert inspect_samples(bytes(content))
    for place in range(2, len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        try:
            inspect_samples(bytes(damaged))
        except ri.InputError:
            refused += 1
    assert refused > len(content) // 3


def test_an_encrypted_log_is_one_line(tmp_path):
    content = archive(tmp_path)
    for header, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.find(header) + flags] |= 1
    with pytest.raises(ri.InputError, match="the archive is encrypted"):
        inspect_samples(bytes(content))


@pytest.mark.parametrize("measure", [name for name in OWN[MEASURES] if name != "segments"])
def test_a_prompt_of_one_token_is_measured_and_shown_or_refused(bridge, measure):
    """Found: the figures of components."""
    prompts = [Prompt(tokens=(5,), spans={"needle": (0,)}), Prompt(tokens=(5,), generated=(0,))]
    for prompt in prompts:
        try:
            run = ri.analyze(bridge, [prompt], measures=(measure,))
        except ri.InputError:
            continue
        ri.findings(run)
        assert ri.show(run) is not None


def test_none_in_the_place_of_a_checkpoint_or_model_is_refused():
    asks = (
        ri.verify,
        lambda none: ri.verify("niah/repo", 3),
        lambda none: ri.save(none, "x"),
        lambda none: ri.measure_step(none, 0, [[1]]),
    )
    for ask in asks:
        with pytest.raises(ri.InputError, match="wanted"):
            ask(None)


def test_a_file_in_the_place_of_a_directory_of_runs_is_refused_at_once(bridge, tmp_path):
    (tmp_path / "file").write_text("text")
    for out in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(ri.InputError, match="is a file; wanted a directory"):
            ri.PositionsCallback(prompts=[[1, 2]], out=out)
        with pytest.raises(ri.InputError, match="is a file; wanted a directory"):
            ri.measure_step(bridge, 0, [[1, 2, 3]], out=out)


UNREADABLE = {
    "meta": lambda: torch.zeros(1, 5, dtype=torch.long, device="meta"),
    "sparse": lambda: torch.tensor([[1, 2, 3, 4, 5]]).to_sparse(),
    "rows": lambda: torch.eye(5).long().to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(1, 5), 1, 0, torch.quint8),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning", "ignore:.*quantize:UserWarning"
)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_tokens_and_positions_whose_numbers_cannot_be_read_are_refused(bridge, kind):
    given = UNREADABLE[kind]()
    for ask in (
        lambda: ri.analyze(bridge, given),
        lambda: ri.tokens(given, bridge),
        lambda: ri.interventions.positions_of(bridge, given),
    ):
        with pytest.raises(ri.InputError, match=r"wanted a Prompt|tokens are a table"):
            ask()
    with (
        pytest.raises(ri.InputError, match="are no numbers"),
        ri.set_positions(bridge, 1, 0, given),
    ):
        bridge(torch.tensor([[1, 2, 3, 4, 5]]))


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": 1},
        True,
        object(),
        [[1], [2, 3]],
        torch.tensor(1.0),
        [1, "a"],
        "a\0b",
        "\ud800",
        1 << 80,
    ],
)
@pytest.mark.parametrize("place", ["/", "/predictions", "/predictions/probability"])
def test_an_attribute_that_no_file_holds_is_named(run, tmp_path, value, place):
    given = run.copy(deep=True)
    group = given["predictions"].to_dataset()
    owners = {"/": given, "/predictions": group, "/predictions/probability": group["probability"]}
    owners[place].attrs["mine"] = value
    given["predictions"] = xr.DataTree(group)
    with pytest.raises(ri.InputError, match=f"the attribute 'mine' of {place} is .*, which no"):
        ri.write_run(given, tmp_path / "run.nc")
    assert not list(tmp_path.iterdir())


def test_text_where_numbers_should_be_is_named(run):
    for group in run.children:
        for name, array in run[group].to_dataset().data_vars.items():
            if array.dtype.kind not in "fi":
                continue
            given = run.copy(deep=True)
            given[f"{group}/{name}"] = xr.full_like(array, "text", dtype=object)
            for ask in (ri.findings, ri.show):
                with pytest.raises(ri.InputError, match=f"{group}/{name} of the run holds text"):
                    ask(given)
