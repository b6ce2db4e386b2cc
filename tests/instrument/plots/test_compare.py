"""Runs side by side: aligned by labels, runs of one checkpoint put together, steps in order, what
differs said; and the command.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from places import tree
from refusals import refused
from run_fixture import small_run
from scipy import stats

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.comparison.align import compare_named
from repo_interp.comparison.comparison_notes import notes
from repo_interp.plots.view_catalogue import tables
from repo_interp.plots.views.positions_beside import positions_beside


def tree_of(checkpoint, digest, groups, layout="rope", **attributes):
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = {"checkpoint": checkpoint, "checkpoint_digest": digest, "dtype": "float32"}
    tree.attrs |= {"layout": layout, **attributes}
    return tree


def run(
    checkpoint,
    layout="rope",
    layers=2,
    shift=0.0,
    prompts="same",
    digest=None,
    **attributes,
):
    """A run with one measure: `r` = shift + 10 layer + head + prompt / 10."""
    layer, head, prompt = np.arange(layers), np.arange(2), np.arange(3)
    values = shift + 10.0 * layer[None, :, None] + head + prompt[:, None, None] / 10
    group = xr.Dataset(
        {"r": (("prompt", "layer", "head"), values, {"long_name": "correlation", "units": "1"})},
        {"prompt": prompt, "layer": layer, "head": head, "scheme": ("layer", [layout] * layers)},
        {"ridge": 1e-6, **attributes},
    )
    digest = digest or f"digest of {checkpoint} {layout}"
    stated = {"layout": ",".join([layout] * layers), "prompts_digest": prompts}
    return tree_of(checkpoint, digest, {"three_axis": group}, **stated)


def scored(checkpoint, digest, value=0.5):
    """What `repo-interp score` leaves."""
    described, means = {"long_name": "exact match", "units": "1"}, np.array([value, value / 2])
    group = xr.Dataset(
        {
            "score": (("test_set", "prompt"), np.outer(means, [0.9, 1.1]), described),
            "mean_score": ("test_set", means, described),
            "standard_error": ("test_set", [0.05, 0.05], described),
        },
        {"test_set": ["64", "128"]},
        {"metric": "exact match", "count": 20},
    )
    return tree_of(checkpoint, digest, {"scores": group}, scaling="none")


def written(directory: Path, tree: xr.DataTree) -> str:
    directory.mkdir(parents=True)
    ri.write_run(tree, directory / "run.nc")
    return str(directory)


def test_every_value_is_found_again_under_its_run_and_labels():
    one, other = run("one"), run("other", "nope", shift=100.0)
    found = ri.compare([one, other])
    r = found["three_axis/r"]
    assert r.dims == ("run", "prompt", "layer", "head")
    np.testing.assert_array_equal(r.sel(run="one"), one["three_axis/r"])
    np.testing.assert_array_equal(r.sel(run="other"), other["three_axis/r"])
    assert found["three_axis"].coords["scheme"].sel(run="other", layer=1).item() == "nope"
    assert (r.attrs, notes(found)) == ({"long_name": "correlation", "units": "1"}, [])
    assert found["layout"].values.tolist() == ["rope", "nope"]


def test_a_difference_beyond_its_interval_is_a_finding_and_one_within_is_none():
    """Of three paired differences d the interval is mean(d) +- t(2) s / sqrt(3), in closed form."""
    first, second = run("a/x"), run("b/x")
    for changes in ([0.9, 1.0, 1.1], [0.9, -1.0, 1.1]):
        second["three_axis"]["r"][:] = first["three_axis"]["r"] + np.reshape(changes, (3, 1, 1))
        reach = stats.t.ppf(0.975, 2) * np.std(changes, ddof=1) / 3**0.5
        _, *found = ri.findings(ri.compare([first, second]))
        assert len(found) == (np.mean(changes) > reach)
        for finding in found:
            assert "r is higher in b/x (6.60) than in a/x (5.60)" in finding.sentence
            assert f"{1 - reach:.3f} to {1 + reach:.2f}; 1 of 1 differences" in finding.evidence
    # of other prompts the means are subtracted, without an interval
    other = run("b/x", shift=1.0, prompts="others")
    assert len(ri.findings(ri.compare([first, other]))) == 1


def predicted(checkpoint, **given):
    """A run that is predicted so well: variables [prompt]."""
    values = {name: ("prompt", np.array(values), {"units": "1"}) for name, values in given.items()}
    group = xr.Dataset(values, {"prompt": range(3)})
    return run(checkpoint).assign(predictions=xr.DataTree(group))


def test_a_comparison_opens_with_how_well_the_models_do_the_task():
    """The interval of the paired differences -2, -3, -4 is -3 +- t(2) / sqrt(3), in closed form."""
    good = predicted("a/x", answer_log_probability=[-1.0] * 3, answer_is_likeliest=[1.0] * 3)
    bad = predicted("b/x", answer_log_probability=[-3.0, -4, -5], answer_is_likeliest=[1.0, 0, 0])
    compared = ri.compare([good, bad])
    reach = stats.t.ppf(0.975, 2) / 3**0.5
    first, *others = ri.findings(compared)
    assert first.sentence == compared.attrs["performance"]
    for part in (
        f"-1 and -4 (difference -3 ± {reach:.2g}, 95 % interval over 3 prompts, paired)",
        "1 and 0.333 (difference -0.667 ± 1.4,",
        "b/x fails most prompts",
    ):
        assert part in first.sentence
    assert not any("nswer" in finding.sentence for finding in others)
    rows = {row[0]: row for table in tables(compared) for row in table.rows}
    assert rows["answer log probability"][1:] == (-1, -4, -3, pytest.approx(reach))
    bad.attrs["prompts_digest"] = "others"  # of other prompts there is no interval
    assert "-1 and -4 (difference -3);" in ri.compare([good, bad]).attrs["performance"]


def test_it_opens_with_losses_scores_or_what_would_tell():
    texts = [predicted(f"{number}/x", loss=[2.0, 2, 2 + 3 * number]) for number in range(8)]
    compared = ri.compare(texts[:3])
    assert compared.attrs["performance"].endswith("loss (nats per token) 2 and 3 and 4")
    assert {table.columns for table in tables(compared)} == {("variable", "0/x", "1/x", "2/x")}
    assert "0/x and 7/x do the task" in ri.compare(texts).attrs["performance"]
    compared = ri.compare([scored("a/x", "1"), scored("b/x", "2", 0.25)])
    assert "exact match 0.375 and 0.188 (difference -0.188)" in compared.attrs["performance"]
    compared = ri.compare([run("a/x"), run("b/x")])
    assert "predictions among the measures" in ri.findings(compared)[0].sentence


def test_labels_align_where_places_do_not_and_what_is_lacking_is_empty_and_said():
    whole, part = run("whole", layers=4), run("part", layers=4)
    part["three_axis"] = part["three_axis"].to_dataset().sel(layer=[2, 3])
    found = ri.compare([part, whole])
    r = found["three_axis/r"]
    assert r["layer"].values.tolist() == [0, 1, 2, 3]
    assert np.isnan(r.sel(run="part", layer=[0, 1])).all()
    np.testing.assert_array_equal(r.sel(run="part", layer=[2, 3]), r.sel(run="whole", layer=[2, 3]))
    assert found["three_axis/scheme"].sel(run="part").values.tolist() == ["", "", "rope", "rope"]
    assert notes(found) == ["layer: 2 in part, 4 in whole; what a run lacks is left empty"]


def test_names_of_an_axis_keep_their_order_and_text_stays_text():
    first = small_run()
    second = first.sel(span=["query", "rest", "generated"])
    found = ri.compare({"first": first, "second": second})
    spans, texts = first["attention_mass/span"], first["positions/token_text"]
    assert found["attention_mass/span"].values.tolist() == spans.values.tolist()
    assert np.isnan(found["attention_mass/mass"].sel(run="second", span="needle")).all()
    np.testing.assert_array_equal(found["positions/token_text"].sel(run="second"), texts)


def test_other_prompts_parameters_and_precision_are_a_line_each():
    other = run("other", prompts="another text", ridge=0.5)
    other.attrs["dtype"] = "bfloat16"
    found = ri.compare([run("one", prompts="some text"), other])
    prompts, precision, ridge = notes(found)
    assert "some tex for one; another  for other" in prompts
    assert "float32 for one; bfloat16 for other" in precision
    assert "ridge differs, 1e-06 for one; 0.5 for other" in ridge
    assert (found.attrs["same_prompts"], "ridge" in found["three_axis"].attrs) == ("no", False)


def test_a_measure_of_one_run_other_axes_and_other_units_are_left_out_and_said():
    one, other = run("one"), run("other")
    group = one["patterns"] = one["three_axis"].to_dataset()
    extra = group["r"].mean("head").assign_attrs(units="1")
    mean, angle = extra[0].assign_attrs(units="1"), extra.assign_attrs(units="rad")
    one["three_axis"] = group.assign(extra=extra, axes=extra, angle=angle)
    other["three_axis"] = group.assign(axes=mean.drop_vars("prompt"), angle=extra)
    found = ri.compare([one, other])
    assert list(found.children) == ["three_axis"] and list(found["three_axis"].data_vars) == ["r"]
    assert [note.partition(";")[0] for note in notes(found)] == [
        "three_axis: axes has other axes in other",
        "three_axis: angle has other units in other",
        "three_axis: only one has extra",
        "patterns: only one has it",
    ]


def test_a_page_leaves_out_what_the_last_run_lacks_and_a_figure_says_that_it_draws_one_run(
    tmp_path,
):
    """Found: the page ended in a traceback, with a measure that all but the last run have."""
    one, other, last = (small_run() for _ in range(3))
    for each in (one, other, last):
        each.attrs["prompts_digest"] = "same"
    for each in (one, other):
        each["three_axis"] = run("fits", layers=6)["three_axis"]
    tree = ri.compare({"one": one, "other": other, "last": last})
    ri.plots.report_page(tree, tmp_path / "page.html")
    assert 'id="side-1"' in (tmp_path / "page.html").read_text()
    # Heads 2 and 3 read one row of positions: one of them has a panel.
    positions = tree["positions"].to_dataset()
    for name in ("position", "position_range"):
        positions[name].loc[{"head": 3}] = positions[name].sel(head=2).values
    tree["positions"] = positions
    shown = [ax.get_title(loc="left") for ax in positions_beside(tree).axes]
    assert not any({f"layer {n}, head 2", f"layer {n}, head 3"} <= {*shown} for n in range(6))
    with refused("position_grid cannot draw a comparison"):
        ri.plots.position_grid(tree)


def test_labels_and_values_of_another_kind_are_no_tracebacks():
    """Found, in runs that other programs had changed: texts beside numbers, and a layer that stood
    there twice.
    """
    one, other = run("one"), run("other")
    group = one["three_axis"].to_dataset()
    for one_run, said in ((one, group["r"]), (other, group["r"].astype(str))):
        one_run["three_axis"] = group.assign(said=said.assign_attrs(units="1"))
    assert any("said has other units" in note for note in notes(ri.compare([one, other])))
    other["three_axis"] = group.assign_coords(layer=["first", "second"])
    with pytest.raises(ri.InputError, match="no measure in common"):
        ri.compare([one, other])
    other["three_axis"] = group.assign_coords(layer=[0, 0])
    with pytest.raises(ri.InputError, match="other has a label of the axis 'layer' twice"):
        ri.compare([one, other])


def asked_and_scored(scores, prompts, **options):
    """A run of scores of one test set and `prompts` of another."""
    tree = scored("zoo/a", "a")
    group = tree["scores"].to_dataset().assign_attrs(options)
    group["score"] = ("test_set", "prompt"), [[0.2, 0.4, 0.9], scores], group["score"].attrs
    group["prompts_digest"] = "test_set", ["same", prompts], {"units": "1"}
    return tree.assign(scores=xr.DataTree(group))


@pytest.mark.parametrize("prompts", ["same", "others"])
def test_scores_of_the_same_prompts_are_paired_test_set_by_test_set(prompts):
    """Where prompts are the same, options of the task that made them are no difference."""
    one = asked_and_scored([0.5, 0.6, 0.7], "same", task_file="a")
    other = asked_and_scored([0.6, 0.8, 0.7], prompts, task_file="b")
    found = ri.compare({"one": one, "other": other})
    (table,) = (table for table in tables(found) if table.name == "scores")
    rows = {row[:2]: row[4:] for row in table.rows}
    assert set(rows) == {("score", "64"), ("score", "128")} and rows["score", "64"] == (0, 0)
    mean, error = rows["score", "128"]
    assert mean == pytest.approx(0.1)
    if prompts == "same":
        assert error == pytest.approx(4.30265273 * np.std([0.1, 0.2, 0.0], ddof=1) / 3**0.5)
        assert notes(found) == []
    else:
        said = [note.split(" differ")[0] for note in notes(found)]
        assert error is None and said == ["scores: task_file", "scores: the prompts of 128"]


def test_maps_whose_blocks_count_other_numbers_of_tokens_are_not_compared():
    one, other = run("one"), run("other")
    for one_run, size in ((one, 2), (other, 4)):
        one_run["maps/block_size"] = xr.DataArray(size, attrs={"units": "tokens"})
    found = ri.compare([one, other])
    assert list(found.children) == ["three_axis"] and "block_size differs" in notes(found)[0]


def test_an_analysis_and_the_scores_of_one_checkpoint_are_one_run(tmp_path):
    directories = [written(tmp_path / name, run(name, digest=name)) for name in ("a", "b")]
    written(tmp_path / "a" / "scores", scored("zoo/a", "a"))
    found = ri.compare([*directories, scored("zoo/b", "b", 0.9)])
    assert found["run"].values.tolist() == ["a", "b"]
    assert list(found.children) == ["three_axis", "scores"]
    assert found["scores/mean_score"].sel(run="b", test_set="64") == 0.9


def test_steps_of_one_training_stand_in_their_order_and_others_are_checkpoints():
    steps = [run(f"{step:06d}") for step in (1000, 100, 500)]
    found = ri.compare(steps)
    assert found.attrs["runs"] == "steps of one training"
    assert found["training_step"].values.tolist() == [100, 500, 1000]
    assert found["run"].values.tolist() == ["000100", "000500", "001000"]
    for other in (run("000200", "nope"), run("last")):
        assert ri.compare([*steps, other]).attrs["runs"] == "checkpoints"


def test_names_are_the_given_ones_the_checkpoints_or_the_directories(tmp_path):
    trees = run("same"), run("same", shift=1.0)
    one, other = written(tmp_path / "left", trees[0]), written(tmp_path / "right", trees[1])
    assert compare_named([("A", one), (None, other)])["run"].values.tolist() == ["A", "right"]
    assert ri.compare(trees)["run"].values.tolist() == ["same", "same-2"]
    with pytest.raises(ri.InputError, match="the name 'A' was given to two runs"):
        compare_named([("A", one), ("A", other)])


def test_components_that_turn_at_other_frequencies_are_said():
    def rotating(base):
        tree = run(str(base))
        values = base ** -np.array([[0.0, 1.0], [0.0, np.nan]])
        tree["components/frequency"] = xr.DataArray(values, dims=("layer", "component"))
        tree["components/frequency"].attrs["units"] = "rad"
        return tree

    assert notes(ri.compare({"a": rotating(10.0), "b": rotating(10.0)})) == []
    (note,) = notes(ri.compare({"a": rotating(10.0), "b": rotating(20.0)}))
    assert "not the same frequency" in note


def test_the_command_writes_the_same_bytes_twice_and_prints_tables_and_warnings(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    written(Path("one"), run("one", digest="1"))
    written(Path("other"), run("other", "nope", shift=3.0, prompts="others", digest="2"))
    scores = [written(Path("scores") / digest, scored("x", digest)) for digest in ("1", "2")]
    for _ in range(2):
        assert main(["compare", "one", "other", *scores, "--formats", "svg"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in ("the prompts differ", "Three axis", "Score: exact match.", "3.00"):
        assert part in out
    first = Path("runs") / "compare-one-other"
    files = tree(first)
    figures = {"figures/three_axis_r.svg", "figures/scores_mean_score.svg"}
    assert {"compare.nc", "report.html", *figures} <= {*files}
    assert files == tree(Path("runs") / "compare-one-other-2")
    with xr.open_datatree(first / "compare.nc", engine="h5netcdf") as stored:
        assert stored["three_axis/r"].sel(run="other", prompt=0, layer=1, head=1) == 14.0
    page = files["report.html"].decode()
    assert "the prompts differ" in page and "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_runs_that_cannot_be_compared_leave_nothing(tmp_path, monkeypatch, capsys):
    """What is no run at all is in the catalogue of bad inputs."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        written(Path(name), run(name))
    Path("file").write_text("")
    before = tree(tmp_path)
    for arguments, message in (
        ("one", "two runs or more were wanted"),
        ("one two --out file", "file is a file"),
        ("one two --out one", "holds other things (run.nc)"),
    ):
        assert main(["compare", *arguments.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert tree(tmp_path) == before


@pytest.mark.usefixtures("no_figures")
def test_a_comparison_is_replaced_only_when_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for shift, name in enumerate(("one", "two", "three")):
        written(Path(name), run(name, shift=shift))
    assert main(["compare", "one", "two", "--out", "made"]) == 0
    assert main(["compare", "one", "three", "--out", "made"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["compare", "one", "three", "--out", "made", "--overwrite"]) == 0
    with xr.open_datatree("made/compare.nc", engine="h5netcdf") as stored:
        assert stored["run"].values.tolist() == ["one", "three"]
