"""Rotation that another runtime wrote down: tables and vectors in files, right and wrong ones."""

import zipfile

import numpy as np
import pytest
import torch
from families import TINY
from refusals import refused
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.cli import main
from repo_interp.positions.rotary import rotate

WIDTH, TOKENS, BASE = 16, 70, 500.0


def stock(**changed):
    rope = {"rope_type": "default", "rope_theta": BASE}
    changes = {"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": rope} | changed
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY, **changes})).eval()


def angles(theta=None, tokens=TOKENS):
    theta = theta_of() if theta is None else theta
    return torch.arange(tokens, dtype=torch.float64)[:, None] * theta


def tables(angle, form="pairs", scale=1.0):
    halves = {
        "pairs": lambda part: part,
        "halves": lambda part: torch.cat([part, part], -1),
        "interleaved": lambda part: part.repeat_interleave(2, -1),
    }
    both = {"cos": scale * angle.cos(), "sin": scale * angle.sin()}
    return {name: halves[form](part.float()) for name, part in both.items()}


def findings(model, arrays, folder, suffix="safetensors"):
    path = folder / f"dump.{suffix}"
    if suffix == "npz":
        np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    else:
        save_file({name: array.contiguous() for name, array in arrays.items()}, path)
    return ri.verify(model, path).attrs["findings"]


def theta_of(base=BASE, width=WIDTH):
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("form", ["pairs", "halves", "interleaved"])
def test_right_tables_have_no_finding(tmp_path, suffix, form):
    assert findings(stock(), tables(angles(), form), tmp_path, suffix) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_tables_have_no_finding(tmp_path, dtype):
    rounded = {name: part.to(dtype) for name, part in tables(angles(), "halves").items()}
    assert findings(stock(), rounded, tmp_path) == ""


def test_another_base_and_a_missing_scaling_are_found(tmp_path):
    line = findings(stock(), tables(angles(theta_of(10_000.0))), tmp_path)
    assert line.startswith("layers 0-2, pairs 1-7: expected theta") and "rad off" in line
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = stock(rope_parameters=yarn | {"rope_theta": BASE}, max_position_embeddings=128)
    lines = findings(model, tables(angles()), tmp_path)
    assert "expected theta" in lines and "lengthened by 1.139 (attention factor)" in lines
    rotary = model.model.rotary_emb
    right = tables(angles(rotary.inv_freq.double()), scale=rotary.attention_scaling)
    assert findings(model, right, tmp_path) == ""


def test_positions_that_begin_one_late_are_found(tmp_path):
    late = tables(angles(tokens=TOKENS + 1)[1:])
    assert "pairs 0-7" in findings(stock(), late, tmp_path)
    named = late | {"positions": torch.arange(1, TOKENS + 1)}
    assert findings(stock(), named, tmp_path) == ""


@pytest.mark.parametrize("shape", [(TOKENS, WIDTH), (3, TOKENS, WIDTH)])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_vectors_before_and_after(tmp_path, order, shape):
    plain = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    entries = torch.arange(WIDTH)
    if order == "interleaved":
        entries = entries.view(2, -1).T.flatten()
    right, wrong = (
        rotate(plain, torch.arange(TOKENS).double(), theta)[..., entries].float()
        for theta in (theta_of(), theta_of() / 2)
    )
    plain = plain[..., entries].float()
    said = findings(stock(), {"k": plain, "k_rotated": right}, tmp_path, "npz")
    other = (
        "layers 0-2: expected entries (0, 8), (1, 9), ... as pairs, measured (0, 1), (2, 3), ... "
        "(right only for weights that are permuted so), from distance 1 on"
    )
    assert said == (other if order == "interleaved" else "")
    assert "pairs 0-7" in findings(stock(), {"q": plain, "q_rotated": wrong}, tmp_path)


def test_pairs_of_neighbors_are_right_where_the_model_pairs_neighbors(tmp_path):
    model = small_model("cohere")
    width = model.config.hidden_size // model.config.num_attention_heads
    theta = theta_of(model.config.rope_parameters["rope_theta"], width)
    plain = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0)).double()
    halves = torch.arange(width).view(-1, 2).T.flatten()
    turned = rotate(plain[:, halves], torch.arange(TOKENS).double(), theta)[:, halves.argsort()]
    assert findings(model, {"q": plain.float(), "q_rotated": turned.float()}, tmp_path) == ""
    turned = rotate(plain, torch.arange(TOKENS).double(), theta)
    said = findings(model, {"q": plain.float(), "q_rotated": turned.float()}, tmp_path)
    assert "expected entries (0, 1), (2, 3), ... as pairs, measured (0, 8), (1, 9), ..." in said


def test_an_array_that_is_rounded_more_than_the_other(tmp_path):
    """Found: errors were held against the precision of the first array."""
    cosines, sines = tables(angles(theta_of()), "halves").values()
    arrays = {"cos": torch.as_tensor(cosines), "sin": torch.as_tensor(sines).bfloat16()}
    assert findings(stock(), arrays, tmp_path) == ""


ONES = np.ones((3, 4))


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({"cosine": ONES}, "holds cosine"),
        ({"cos": ONES, "sin": np.ones((3, 5))}, r"\[3, 4\] and sin \[3, 5\]"),
        ({"cos": np.ones(3), "sin": np.ones(3)}, "wanted two arrays"),
        ({"cos": ONES * np.nan, "sin": ONES}, "NaN"),
        ({"cos": np.ones((1, 8)), "sin": np.zeros((1, 8))}, "contains only position 0"),
        ({"cos": ONES, "sin": ONES, "positions": np.ones(2)}, "positions"),
        ({"cos": ONES, "sin": ONES, "positions": np.arange(3) + 0.5}, "whole numbers"),
        ({"cos": ONES * 1j, "sin": ONES}, "cos of .* is complex"),
        ({"cos": ONES, "sin": ONES > 0}, "sin of .* is bool; wanted float16"),
        ({"q": np.ones((3, 5)), "q_rotated": np.ones((3, 5))}, "5 entries"),
    ],
)
def test_files_that_hold_something_else(tmp_path, arrays, names):
    np.savez(tmp_path / "dump.npz", **arrays)
    with refused(names):
        ri.verify(stock(), tmp_path / "dump.npz")


class _Runs:
    def __reduce__(self):
        return (print, ("it ran",))


def test_a_file_never_runs_anything_and_unpacks_to_a_bounded_size(tmp_path, capsys, monkeypatch):
    np.savez(tmp_path / "a.npz", cos=np.array([_Runs()], dtype=object), sin=np.ones(1))
    (tmp_path / "b.npz").write_bytes(b"no archive")
    (tmp_path / "c.safetensors").write_bytes(b"no tensors")
    (tmp_path / "empty.npz").write_bytes(b"")
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }\n"
    with zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        # numpy makes room for what the header of an array states
        archive.writestr("cos.npy", b"\x93NUMPY\x01\0" + bytes((len(header), 0)) + header)
    np.savez_compressed(tmp_path / "e.npz", cos=np.zeros((300, 1000)), sin=np.zeros((300, 1000)))
    monkeypatch.setattr("repo_interp.plugins.verify.dumped_tables._MOST_BYTES", 1 << 20)
    for name in ("a.npz", "b.npz", "c.safetensors", "d.npz", "e.npz", "empty.npz", "absent.npz"):
        with refused(name):
            ri.verify(stock(), tmp_path / name)
    assert "it ran" not in capsys.readouterr().out


def test_the_command(tmp_path, capsys):
    theta = theta_of(10_000.0, ri.load_model("niah/rope").config.head_dim)
    codes = []
    for turned in (theta, theta / 2):
        np.savez(tmp_path / "dump.npz", **tables(angles(turned), "halves"))
        codes.append(main(["verify", "niah/rope", str(tmp_path / "dump.npz")]))
    assert codes == [0, 1] and "expected theta" in capsys.readouterr().out
