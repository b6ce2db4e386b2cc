"""`repo-interp bench`: parts in processes of their own, a table that goes on where it was, bars and page from it. No time is judged."""

from __future__ import annotations

import dataclasses
import math
import os
import sys

import pytest
import torch
from attention_inputs import random_inputs

from repo_interp.benchmark import bars, page, parts, running, store
from repo_interp.benchmark.commands import _process, loading_lines
from repo_interp.benchmark.cost import Cost, cost
from repo_interp.benchmark.layer import Layer
from repo_interp.benchmark.limits import limits
from repo_interp.benchmark.parts import ALL, FORWARD, LIMITS, OLMO2, SMOLLM2, TINY, WITH_ALL, Line, Part
from repo_interp.benchmark.store import Circumstances, Measured
from repo_interp.cli import main
from repo_interp.errors import InputError
from repo_interp.measures.maps import Maps

NOW = Circumstances("0123456789ab", "torch 2", "a machine", "2026-01-01")


def part_with(part: Part, **seconds: float) -> Measured:
    lines = tuple(Line(what.replace("_", " "), Cost(value, value, 10 * value), FORWARD) for what, value in seconds.items())
    return Measured(part, lines, Cost(9.0, 9.0, 100.0), NOW)


LAYERS = [
    part_with(Part("layer", OLMO2, tokens), forward_pass=8.0 * times, all_measures=0.5 * times)
    for tokens, times in ((2048, 1.0), (4096, 2.25))
]


def test_a_table_is_read_as_it_was_written(tmp_path):
    noted = dataclasses.replace(
        LAYERS[0].lines[0], note='a "note", with commas', operations=1.5e12, cost=Cost(1.25, math.nan, 3.0)
    )
    written = [dataclasses.replace(LAYERS[0], lines=(noted,)), LAYERS[1]]
    store.write(tmp_path, written)
    assert repr(store.read(tmp_path)) == repr(written), "NaN equals nothing"
    before = (tmp_path / store.TABLE).read_bytes()
    store.write(tmp_path, store.read(tmp_path))
    assert (tmp_path / store.TABLE).read_bytes() == before
    assert store.read(tmp_path / "nowhere") == []


def test_other_tables_and_damaged_ones_are_refused(tmp_path):
    (tmp_path / store.TABLE).write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="another table"):
        store.read(tmp_path)
    store.write(tmp_path, LAYERS)
    text = (tmp_path / store.TABLE).read_text()
    for damaged in (text.replace("2048", "many"), text.replace(store.WHOLE, "nothing")):
        (tmp_path / store.TABLE).write_text(damaged)
        with pytest.raises(InputError, match="is damaged"):
            store.read(tmp_path)


def test_what_was_measured_otherwise_does_not_stand_but_stays(tmp_path):
    part = LAYERS[0].part
    assert store.standing(LAYERS, part, dataclasses.replace(NOW, day="2027-01-01")) is LAYERS[0]
    assert store.standing(LAYERS, part, dataclasses.replace(NOW, sources="other")) is None
    new = dataclasses.replace(LAYERS[0], circumstances=dataclasses.replace(NOW, sources="other"))
    assert store.with_part(LAYERS, new, [part]) == [new, LAYERS[1]]


def test_bars_are_judged_by_what_was_measured_and_by_nothing_else():
    values = {(bar.row, bar.what): (value, bar.verdict(value)) for bar, value in bars.judged(LAYERS)}
    beside, growth = "4,096 tokens: all measures beside the layer's forward pass", "all measures, 4,096 tokens over 2,048"
    assert values["layer", beside] == (pytest.approx(1 / 16), "met")
    assert values["layer", growth] == (pytest.approx(2.25), "met")
    assert {verdict for (row, _), (_, verdict) in values.items() if row != "layer"} == {"not measured"}
    model = [part_with(Part("model", SMOLLM2, 2048), **{FORWARD.replace(" ", "_"): 2.0, WITH_ALL.replace(" ", "_"): 5.0})]
    (value,) = [
        value for bar, value in bars.judged(model) if (bar.row, bar.subject) == ("model", SMOLLM2) and "2,048 tokens:" in bar.what
    ]
    assert value == pytest.approx(2.5)
    on_gpu = [dataclasses.replace(one, part=dataclasses.replace(one.part, device="cuda")) for one in LAYERS]
    assert all(math.isnan(value) for _, value in bars.judged(on_gpu)), "a bar is about the CPU"


def test_an_accelerator_has_columns_of_its_own_which_say_where_nothing_was_measured():
    columns = page.table_of_row("layer", LAYERS).columns
    assert columns[-2:] == ("GPU float32 s", "GPU bfloat16 s")
    assert {row[-2:] for row in page.table_of_row("layer", LAYERS).rows} == {("not measured", "not measured")}
    gpu = dataclasses.replace(LAYERS[0], part=dataclasses.replace(LAYERS[0].part, device="cuda", dtype="bfloat16"))
    rows = page.table_of_row("layer", [*LAYERS, gpu]).rows
    assert len(rows) == 4 and rows[0][-2:] == ("not measured", 8.0)


def test_what_is_between_all_measures_and_their_limit_is_said_where_the_limit_was_measured():
    assert page.table_of_limits(LAYERS).rows == ()
    alone = [
        Line(what, Cost(seconds), FORWARD, operations)
        for what, seconds, operations in zip(LIMITS, (0.125, 0.0625, 0.0625), (1e9, 5e9, 1e9), strict=True)
    ]
    with_limits = dataclasses.replace(LAYERS[0], lines=(*LAYERS[0].lines, *alone))
    (row,) = page.table_of_limits([with_limits, LAYERS[1]]).rows
    assert row == (2048, 500.0, 6.25, 250.0, 3.125, 125.0, 8.0, 62.5, 80.0, 62.5, 16.0, 250.0)


def test_the_limit_counts_every_transform_and_product_once():
    layer = Layer(TINY, 64)
    transforms, products, memory = limits(TINY, layer.inputs(), 1, "cpu")
    assert transforms.operations == 2 * (5 * 16 // 2) * 2.5 * 128 * 7, "2 heads of 16 dimensions, 128 numbers"
    assert products.operations == 2 * 64 * (5 * 32 * 16 + 4.5 * 16**2), "chunks of 32 tokens"
    assert memory.operations == 2 * 64 * 32 * 4
    assert all(line.cost.cpu_seconds >= 0 and math.isnan(line.cost.megabytes) for line in (transforms, products, memory))


def test_longer_prompts_are_expected_to_take_longer_and_what_was_measured_is_believed():
    seconds = [running.expected_seconds(Part("layer", OLMO2, tokens), [], 1e11) for tokens in (512, 2048, 16384)]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert running.expected_seconds(LAYERS[0].part, LAYERS, 1e11) == 9.0
    others = [Part("loading", name) for name in (SMOLLM2, OLMO2)]
    one, two = (running.expected_in_all([LAYERS[0].part, *others], LAYERS, 1e11, jobs) for jobs in (1, 2))
    assert one == 9.0 + 2 * (two - 9.0), "parts of the row layer have the machine for themselves"


@pytest.mark.parametrize("row", ["layer", "model", "patterns", "long"])
def test_every_row_of_a_tiny_model_has_its_lines(row, tmp_path):
    threads = torch.get_num_threads()
    lines = {line.what: line for line in parts.measure(Part(row, "tiny", 48), tmp_path)}
    assert torch.get_num_threads() == threads
    assert any(line.operations > 0 for line in lines.values())
    assert all(line.beside in lines or not line.beside for line in lines.values())
    assert all(line.cost.cpu_seconds >= 0 or math.isnan(line.cost.cpu_seconds) for line in lines.values())
    wanted = {"layer": ALL, "model": WITH_ALL, "patterns": "TransformerLens run_with_cache of patterns", "long": WITH_ALL}
    assert wanted[row] in lines


def test_loading_is_measured_beside_the_weights(tmp_path):
    weights, load = loading_lines(Part("loading", "niah/repo"), tmp_path)
    assert 0 < weights.cost.megabytes < 20 and "comes with the package" in weights.note
    assert load.beside == weights.what and load.cost.cpu_seconds > 0


def test_a_process_is_measured_as_a_whole_and_one_that_fails_is_not():
    assert _process([sys.executable, "-c", "x = bytearray(50_000_000)"]).megabytes > 50
    with pytest.raises(OSError, match="ended with 3"):
        _process([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_part_that_fails_is_one_line_and_an_interruption_leaves_no_process(tmp_path):
    with pytest.raises(running.Failed, match="KeyError: 'nothing'"):
        running.measured(Part("nothing", "tiny"), tmp_path, NOW, lambda: None)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.measured(Part("layer", "tiny", 64), tmp_path, NOW, interrupt)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_benchmark_goes_on_and_its_page_comes_from_its_table(tmp_path, capsys):
    out = tmp_path / "bench"
    command = ["bench", "--rows", "layer", "--lengths", "16,32", "--out", str(out)]
    store.write(out, [dataclasses.replace(LAYERS[0], part=Part("layer", OLMO2, 16), circumstances=store.here_and_now())])
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("1 part, 1 more stands already")
    files = {file.name: file.read_bytes() for file in out.iterdir()}
    assert set(files) == {"bench.csv", "README.md", "bench.png", "bench.svg", "bench.pdf"}
    assert [one.part.tokens for one in store.read(out)] == [16, 32]
    assert "2/1024 components" in files["README.md"].decode()
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("nothing to measure, 2 more stand already")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == files, "the same table gives the same bytes"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--rows", "layers"], "there are no rows 'layers'; there are layer, model,"),
        (["--rows", "layer", "--subjects", "gpt-2"], "there is no model 'gpt-2' in these rows; there are olmo-2-1b"),
        (["--lengths", "0"], "wanted a whole number"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options, line, tmp_path, capsys):
    assert main(["bench", *options, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["dot products", "written out"])
def test_maps_of_long_prompts_are_made_in_blocks(softcap):
    """The logits of these heads would take 268 MB."""
    inputs = dataclasses.replace(random_inputs(1, tokens=4096, dtype=torch.float32), softcap=softcap)
    assert cost(lambda: Maps().observe(inputs, {})).megabytes < 80
