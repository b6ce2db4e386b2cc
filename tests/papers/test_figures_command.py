"""`repo-interp figures`: every claim in the table with its command, the same bytes twice,
interruptions, errors, and the zoo's part.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from places import ROOT as CHECKOUT
from transformers import LlamaConfig, LlamaForCausalLM

from position_papers import PAPERS, named
from position_papers.commands.figures import _calls
from position_papers.hope import replicates
from position_papers.kit.build import stated_options, with_experiments
from position_papers.kit.figure_plan import read_plan
from position_papers.kit.judge.claims import UNMEASURABLE
from position_papers.kit.scale import Scale, ours_and_theirs, scale_beside, scale_of
from position_papers.kit.subjects import given, stem
from position_papers.zoo_directory import DIRECTORY as ZOO
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import _parser, main
from repo_interp.errors import InputError
from repo_interp.models.reposition import reposition
from repo_interp.models.saving import save

SIZES = {
    "sequences": 2,
    "repeated_sequences": 2,
    "repeats": 2,
    "controls": 1,
    "batch_size": 2,
}
STATED = " ".join(f"--set {name}={size}" for name, size in SIZES.items())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Two tiny language models whose positions end at their training length: one figure of HoPE's;
    and one with RoPE.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 30}
    more = {"num_attention_heads": 2, "max_position_embeddings": 16, "initializer_range": 0.3}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    for seed, scheme in enumerate(("learned", "learned", "rope")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **more, **tokens)).eval()
        save(reposition(model, scheme), root / str(seed))
    return root


def command(line: str) -> int:
    return main(line.split())


def figures(checkpoint: Path, out: Path, more: str = "") -> int:
    """Make the figures of HoPE on a tiny checkpoint."""
    given = f"--no-zoo --checkpoint language/learned={checkpoint} {STATED}"
    return command(f"figures hope {given} --jobs 1 --out {out} {more}")


@pytest.fixture(scope="module")
def made(checkpoints, tmp_path_factory) -> Path:
    """The figures of the first checkpoint, made once."""
    out = tmp_path_factory.mktemp("made") / "out"
    assert figures(checkpoints / "0", out) == 0
    return out


def files(directory: Path) -> dict[str, bytes]:
    """Everything below `directory` that is no measurement kept for the next time."""
    found = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    return {name: content for name, content in found.items() if not name.startswith(".cache")}


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below `heading`, without what stands above its columns."""
    lines = re.split(r"\n##+ ", page.split(f"{heading}\n", 1)[1], maxsplit=1)[0].splitlines()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def rows_of(place: Path) -> list[dict[str, str]]:
    with (place / "verdicts.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


# ---- the papers ----------------------------------------------------------------------------------


def test_papers_are_named_once_in_our_order():
    assert list(named(["cope", "repo", "cope"])) == ["repo", "cope"]
    assert list(named([])) == list(named(["hope", "all"])) == list(PAPERS)
    with pytest.raises(InputError, match=r"no figures of 'pope'; .* hope"):
        named(["pope"])


# ---- the page over all papers --------------------------------------------------------------------


def test_a_paper_makes_its_directory_and_the_page_has_every_claim_with_its_command(made):
    page, gallery = ((made / name).read_text() for name in ("claims.md", "README.md"))
    numbers = table(page, "## Every number")
    claims = [row for each in named(()).values() for row in table(page, f"## {each.title}")]
    labels = [claim.label for each in named(()).values() for claim in each.claims]
    assert [re.sub(r"\[(.*)\].*", r"\1", row[0]) for row in claims] == labels
    assert all(row[-1] not in ("", "–") for row in claims)
    assert list(dict.fromkeys(row[0] for row in numbers)) == labels
    measured = [row for row in rows_of(made / "hope") if row["ours"]]
    assert {row["claim"].partition(" ")[0] for row in measured} == {"H1"}
    first = measured[0]
    assert (first["checkpoint"], first["n"]) == ("language/learned", "2")
    assert first["scale"].startswith("2 layers × width 16, 16 tokens; paper: 12 layers")
    assert "--out" not in first["command"] and first["ours"] in page and first["scale"] in page
    both = page + gallery
    for link in re.findall(r'(?:href|src)="([^"#]+)', both) + re.findall(r"\]\(([^)#]+)\)", both):
        assert (made / link).is_file() or not (made / link).parent.exists()
    assert "not made yet, `repo-interp figures cope`" in gallery and "| [H1][H] |" in gallery
    assert [file.suffix for file in (made / "hope").glob("logit_by_distance.*")] == [".png"]


def test_the_same_gives_the_same_bytes_elsewhere(checkpoints, made, tmp_path, capsys):
    other = tmp_path / "two" / "other"
    assert figures(checkpoints / "0", other, f"--cache {tmp_path}/kept") == 0
    assert (
        "models run on " in (said := capsys.readouterr().out) and "\nhope: 1 checkpoint\n" in said
    )
    assert files(made) == files(other) and (tmp_path / "kept" / ".gitignore").is_file()


def test_what_stands_is_judged_again_and_something_else_is_not_replaced_unasked(
    checkpoints, made, tmp_path, capsys
):
    """Of what is given only digests are read: nothing is measured."""
    out = shutil.copytree(made, tmp_path / "out")
    before = files(out)
    for touched in ("README.md", "logit_by_distance.png", "verdicts.csv"):
        (out / "hope" / touched).write_text("touched")
    assert figures(checkpoints / "0", out) == 0
    assert "stands already; judged and drawn again\n" in capsys.readouterr().out
    assert files(out) == before
    assert figures(checkpoints / "1", out) == 2, "another command"
    (out / "hope" / "evidence.csv.gz").rename(tmp_path / "evidence.csv.gz")
    assert figures(checkpoints / "0", out) == 2, "nothing to judge"
    (tmp_path / "evidence.csv.gz").rename(out / "hope" / "evidence.csv.gz")
    facts = (out / "hope" / "page.json").read_text()
    (out / "hope" / "page.json").write_text(facts.replace('"torch": "', '"torch": "0.'))
    assert figures(checkpoints / "0", out) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "measured with another torch; --overwrite measures again" in told
    assert figures(checkpoints / "0", out, "--seed 1") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert figures(checkpoints / "0", out, f"--overwrite --cache {made}/.cache") == 0
    assert files(out) == before


def test_a_plan_makes_what_its_rows_say_and_goes_on(
    checkpoints, made, tmp_path, monkeypatch, capsys
):
    """The same bytes as the options; a finished row is not measured again."""
    monkeypatch.chdir(tmp_path)
    sizes = ", ".join(f"{name} = {size}" for name, size in SIZES.items())
    row = """[[figures]]
papers = ["hope"]
zoo = false
checkpoints = {{ "language/learned" = "{}" }}
settings = {{ {} }}
out = "{}"
"""
    Path("plan.toml").write_text(
        "".join(row.format(checkpoints / name, sizes, name) for name in ("0", "1"))
    )
    load, loaded = replicates.load, []

    def until_the_second(path, device):
        loaded.append(Path(path).name)
        if loaded == ["0", "0", "1"]:
            raise KeyboardInterrupt
        return load(path, device)

    monkeypatch.setattr(replicates, "load", until_the_second)
    plan = "figures --plan plan.toml --jobs 1"
    assert command(plan) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert files(Path("0")) == files(made) and files(Path("1")) == {}
    assert command(plan) == 0
    assert loaded == ["0", "0", "1", "1", "1"]
    assert Path("1/hope/page.json").is_file() and files(Path("0")) == files(made)


def test_the_plan_of_pretrained_models_is_one():
    rows = read_plan(str(CHECKOUT / "papers" / "pretrained.toml"))
    for row in rows:
        papers = with_experiments(named(row.papers), row.experiments)
        assert stated_options(papers, row.stated_settings(), {}) and not row.zoo and row.checkpoints
        assert row.out.startswith("figures/") and set(papers) == set(row.papers)
    assert len({(row.out, *row.papers) for row in rows}) == len(rows) > 10


def test_a_part_replaces_what_it_makes_and_nothing_else(checkpoints, made, tmp_path, capsys):
    """Found: one figure with --overwrite deleted 13 pictures and the outcomes of five claims."""
    kept = f"--cache {made}/.cache"
    whole = shutil.copytree(made, tmp_path / "whole")
    assert figures(checkpoints / "0", whole, f"{kept} --figure 2 --overwrite") == 0
    assert files(whole) == files(made), "what the page's command made is made again"

    given = f"--no-zoo {STATED} --jobs 1 --checkpoint language/learned={checkpoints / '0'}"
    given += f" --checkpoint language/rope={checkpoints / '2'}"

    def part(out: Path, more: str) -> int:
        capsys.readouterr()
        return command(f"figures hope {given} --out {out} --cache {tmp_path}/kept {more}")

    both, out = tmp_path / "both", tmp_path / "out"
    assert part(both, "--experiment logit_by_distance --experiment components") == 0
    assert part(out, "--experiment components") == 0
    alone = files(out)
    # Nothing of it stands there yet, so nothing is replaced.
    assert part(out, "--figure 2") == 0
    said = capsys.readouterr().out
    assert f"{out}/hope/logit_by_distance.png\n" in said and "\nH1 " in said and "\nH5 " not in said
    one, two = files(out), files(both)
    assert {*one} == {*two} > {*alone}
    for name in one:
        if name.endswith(".png") or name == "hope/evidence.csv.gz":
            assert one[name] == two[name], name
    commands = {row["claim"][:2]: row["command"] for row in rows_of(out / "hope")}
    assert "--figure 2" in commands["H1"] and "--experiment components" in commands["H5"]
    page = (out / "hope" / "README.md").read_text()
    assert "Of these, logit_by_distance, and H1, " in page and commands["H1"] in page
    assert part(out, "--figure 2") == 0 and "stands already" in capsys.readouterr().out
    assert files(out) == one
    assert part(out, "--figure 2 --seed 1") == 2
    assert "--overwrite" in capsys.readouterr().err and files(out) == one
    assert part(out, "--figure 2 --seed 1 --overwrite") == 0
    three = files(out)
    assert {*three} == {*one}
    assert {name for name in one if name.endswith(".png") and one[name] != three[name]} == {
        "hope/logit_by_distance.png"
    }
    before = csv.DictReader(io.StringIO(one["hope/verdicts.csv"].decode()))
    changed = [old for old, new in zip(before, rows_of(out / "hope"), strict=True) if old != new]
    assert {row["claim"][:2] for row in changed} == {"H1"}


def test_figures_are_refused_before_anything_is_measured_or_torch_is_there(tmp_path, capsys):
    for words, why in (
        ("hope --out /proc/x", "/proc/x cannot be written"),
        ("hope --out /dev/null", "/dev/null is a file"),
        ("hope --cache /proc/x", "/proc/x cannot be written"),
        ("hope --figure 99", "there is no '99' in the papers"),
        ("hope --checkpoint a=nowhere", "there is no checkpoint directory nowhere"),
        ("hope --device nonsense", "no such kind of device"),
    ):
        assert command(f"figures {words}") == 2
        assert why in capsys.readouterr().err
    options = _parser(["figures"]).parse_args(["figures", "hope"])
    ((_, call),) = _calls(options)
    assert call.out == "runs/figures", "the pictures of a clone are tracked in figures"


@pytest.mark.usefixtures("forking")
def test_two_processes_leave_the_same_as_one(checkpoints, tmp_path, monkeypatch):
    given = f"figures hope --no-zoo --checkpoint language/rope={checkpoints / '2'} {STATED}"
    given += " --experiment components --experiment vaf"
    assert command(f"{given} --jobs 1 --out {tmp_path}/one") == 0
    here, load = os.getpid(), replicates.load

    def elsewhere(path, device):
        assert os.getpid() != here
        return load(path, device)

    monkeypatch.setattr(replicates, "load", elsewhere)
    assert command(f"{given} --jobs 2 --out {tmp_path}/two") == 0
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_nothing_to_work_on_is_said_of_every_claim(tmp_path):
    # RePo is left out: its parameters and times are measured on fresh models.
    asked = [name for name in PAPERS if name != "repo"]
    assert command(f"figures {' '.join(asked)} --no-zoo --jobs 1 --out {tmp_path}/out") == 0
    said = {}
    for name, each in named(()).items():
        labels = [claim.label for claim in each.claims]
        said |= dict.fromkeys(labels, UNMEASURABLE if name in asked else "not measured yet")
        if name in asked:
            verdicts = rows_of(tmp_path / "out" / name)
            assert [row["claim"] for row in verdicts] == labels
            assert all(json.loads(row["reasons"])[0]["text"] for row in verdicts)
    rows = table((tmp_path / "out" / "claims.md").read_text(), "## Every number")
    assert {row[0]: row[2] for row in rows} == said
    assert all((row[9] == "–") == (row[2] == "not measured yet") for row in rows)


def test_one_figure_of_a_paper_is_made_alone_and_in_formats_on_demand(
    checkpoints, made, tmp_path, capsys
):
    kept = f"--formats nc,svg --cache {made / '.cache'}"
    assert figures(checkpoints / "0", tmp_path, f"{kept} --figure 2") == 0
    drawn = {file.name for file in (tmp_path / "hope").iterdir() if file.suffix in (".nc", ".svg")}
    assert drawn == {"logit_by_distance.nc", "logit_by_distance.svg"}
    page = (tmp_path / "hope" / "README.md").read_text()
    assert "--figure 2" in page and "| [logit_by_distance](logit_by_distance." in page
    assert figures(checkpoints / "0", tmp_path, f"{kept} --figure 4") == 2
    assert "figure 4 of hope is not made here" in capsys.readouterr().err


def test_a_checkpoint_that_fits_no_experiment_is_one_line(tmp_path, capsys):
    given = "--no-zoo --checkpoint mine=reversal/repo"
    assert command(f"figures cope {given} --out {tmp_path}/out") == 2
    error = capsys.readouterr().err
    assert "fits no experiment that is asked for" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ---- checkpoints, options, scale -----------------------------------------------------------------


def test_a_users_checkpoint_stands_in_for_the_zoos_of_its_name(checkpoints):
    mine, other = "niah/repo", "niah/rope"
    own = str(checkpoints / "0")
    found = given([mine, other, "niah/never"], {mine: own, "other": own})
    assert dict(found.paths) == {mine: own, "other": own, other: str(ZOO / other)}
    assert found.missing == ("niah/never",)
    assert found.digests[mine] == found.digests["other"] != found.digests[other]


def test_records_without_weights_are_given_and_decide_the_digest(tmp_path):
    (tmp_path / "task").mkdir()
    made = '{{"name": "scheme", "seed": {}, "training": {{"made_with": {{"command": "{}"}}}}}}\n'
    digests = []
    for seed, words in ((1, "train"), (1, "a script"), (2, "train")):
        (tmp_path / "task" / "runs.jsonl").write_text(made.format(seed, words))
        found = given(["task/scheme"], {}, tmp_path)
        digests.append(found.digests)
        assert list(found.paths) == ["task/scheme"]
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no checkpoint at"):
        given([], {"mine": str(tmp_path / "empty")})


def test_options_are_of_one_paper_or_of_all_that_have_them():
    papers, stated = named(["hope", "cope"]), {"count": "30", "hope.sequences": "8", "seed": "3"}
    found = stated_options(papers, list(stated.items()), {"hope": {"controls": 1}})
    hope, cope = found["hope"], found["cope"]
    assert (hope.count, hope.seed, hope.sequences, hope.controls) == (30, 3, 8, 1)
    assert (cope.count, cope.seed) == (30, 3)
    assert stated_options(papers, [], {})["hope"] == papers["hope"].options()


def test_scale_is_what_the_files_say():
    ours = scale_of(zoo_path("niah/repo"))
    assert (ours.layers, ours.width, ours.length) == (4, 64, 256)
    assert ours.training == "1,200 steps of 8 sequences, continuing another"
    assert ours_and_theirs(Scale(), Scale()) == ""


def test_a_verdict_on_several_checkpoints_has_the_scale_of_all(checkpoints):
    paths = {name: str(zoo_path(name)) for name in ("niah/repo", "niah/rope", "reversal/repo")}
    theirs, paths = Scale(16, 2048), paths | {"tiny": str(checkpoints / "0")}
    line = "4 layers × width 64, 256 tokens"
    for name, begins in (
        ("niah/repo", line),
        ("niah/repo, niah/rope", line),
        ("niah", line),
        ("niah/repo tiny", "niah/repo: "),
    ):
        found = scale_beside(theirs, name, paths)
        assert found.startswith(begins) and found.endswith("; paper: 16 layers × width 2048")
    assert scale_beside(theirs, "nothing", paths) == ""


def test_files_of_figures_have_plain_names():
    assert stem("vaf_niah/repo at 2 L") == "vaf_niah_repo_at_2_L"
