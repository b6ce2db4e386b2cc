"""The main job end to end, through the command line: the authors' checkpoint in, their numbers out
of run.nc; and what users do to it.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from cProfile import Profile
from itertools import product
from pathlib import Path
from pstats import Stats

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import OFFICIAL
from drawn import without_figures
from families import tiny
from forked import Forked, say
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from transformers import LlamaForCausalLM

import repo_interp as ri
from repo_interp.analysis.faults import PASS, Fault
from repo_interp.analysis.stored_statistics import BATCHES
from repo_interp.cli import main
from repo_interp.measures.statistics import Statistics
from repo_interp.models.decoder import as_decoder
from repo_interp.models.provenance import identity
from repo_interp.plots.view_catalogue import write_figures
from repo_interp.plugins.causes.effects import Effects
from repo_interp.storage.store import OtherQuestion, Store
from repo_interp.tasks.prompt import Prompt

ANALYSIS = np.load(OFFICIAL / "expected_analysis.npz")


@pytest.fixture(scope="module")
def authors(tmp_path_factory):
    """A command that analyzes the authors' checkpoint, with their prompts and spans and the rows
    of attention that they took.
    """
    arrays = np.load(OFFICIAL / "repo_mha" / "expected.npz")
    spans = json.loads((OFFICIAL / "repo_mha" / "spans.json").read_text())
    lines = [
        {
            "tokens": tokens.tolist(),
            "spans": {"needle": s["needle"], "query": s["query"]},
            "generated": s["generated"],
        }
        for tokens, s in zip(arrays["input_ids"], spans, strict=True)
    ]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--prompts", str(file), "--set", "attention_mass.rows=generated", "--measures"]
    return ["analyze", str(OFFICIAL / "repo_mha"), *given, "positions,attention_mass,patterns"]


@pytest.fixture(scope="module")
def results(authors, tmp_path_factory):
    """What `repo-interp analyze` makes of the authors' checkpoint."""
    directory = tmp_path_factory.mktemp("runs") / "first"
    with without_figures():
        assert main([*authors, "--out", str(directory)]) == 0
    return directory


def test_the_run_file_holds_the_authors_numbers(results):
    run = xr.open_datatree(results / "run.nc", engine="h5netcdf")
    mass = run["attention_mass"]
    for name, prompt in product(("needle", "query", "rest"), range(3)):
        for kind, variable in (("total", "mass"), ("per_token", "mass_per_token")):
            expected = ANALYSIS[f"repo_mha/mass/{kind}/{name}/seq{prompt}"]
            assert_allclose(mass[variable].sel(span=name, prompt=prompt), expected, atol=1e-5)
    expected = json.loads((OFFICIAL / "expected_analysis.json").read_text())["repo_mha"]
    for name, means in expected["attention_mass"]["mean_over_sequences"].items():
        assert_allclose(mass["table"].sel(span=name), 100 * means["per_token"], atol=1e-3)
    learned = {"layer": slice(2, 5)}
    ranges = run["positions/position_range"].sel(learned).transpose("layer", ...)
    assert_allclose(ranges, ANALYSIS["repo_mha/range_d"], atol=1e-3)
    run.close()


def test_the_run_says_where_it_comes_from(results):
    run = ri.read_run(results)
    assert run.attrs["layout"] == "rope,rope,repo,repo,repo,repo"
    assert run.attrs["checkpoint"] == "repo_mha" and len(run.attrs["checkpoint_digest"]) == 64
    assert run.attrs["training_length"] == 256 and run.attrs["dtype"] == "float32"
    assert run.attrs["version_torch"].startswith("2.")
    assert run["patterns"].attrs["chunk_size"] == 16
    assert run["positions"]["scheme"].values.tolist() == run.attrs["layout"].split(",")


@pytest.mark.usefixtures("no_figures")
def test_layers_and_heads_asked_for_are_those_measured(results, authors, tmp_path):
    chosen = shlex.split("--layers 2-3 --heads 3,1 --measures positions,attention_mass --out")
    assert main([*authors, *chosen, str(tmp_path)]) == 0
    part, whole = ri.read_run(tmp_path), ri.read_run(results)
    assert set(part.children) == {"positions", "attention_mass"}
    for name in ("positions/position_range", "attention_mass/mass"):
        assert part[name]["head"].values.tolist() == [1, 3]
        assert part[name]["layer"].values.tolist() == [2, 3]
        assert_allclose(part[name], whole[name].sel(layer=[2, 3], head=[1, 3]), atol=1e-5)


def test_a_massive_activation_is_found_in_a_real_pass_and_drawn(tmp_path):
    """The embedding of one token is large in one entry; every layer but the first adds to it."""
    model = tiny("llama").eval()
    model.model.embed_tokens.weight.data[7, 3] = 5e4
    tokens = [5, 9, 7, *range(10, 30)]
    run = ri.analyze(model, [tokens], ["activations"], experiments=())
    (finding,) = [one for one in ri.findings(run) if one.group == "activations"]
    assert (
        "entry 3 of token 2 is 5" in finding.sentence and "enter 3 of 3 layers" in finding.sentence
    )
    assert finding.evidence.startswith("prompt 0, L0 to L2; that token is ")
    files = write_figures(run, tmp_path)
    assert [file.name for file in files] == ["massive_activations.png"]


def random_prompts(lengths) -> list[Prompt]:
    """Prompts of random tokens."""
    random = np.random.default_rng(0)
    rows = [random.integers(3, 64, length).tolist() for length in lengths]
    return [Prompt(tokens=tuple(row), generated=(len(row) - 1,)) for row in rows]


def interruptible(store: Path, out: Path, wait: bool = False) -> list[int]:
    """Analyse, and write the run to `out`; the steps of the progress.

    `wait`: until the process is killed, within the fourth batch.
    """
    torch.manual_seed(0)
    bridge = ri.bridge(ri.reposition(tiny("llama"), "repo@1"))
    prompts, steps = random_prompts(range(24, 30)), []

    def progress(now, total):
        steps.append(now)
        if wait and now == 9:
            say("nine")
            time.sleep(600)

    kept = {"batch_size": 1, "store": store, "progress": progress}
    ri.write_run(ri.analyze(bridge, prompts, ("positions", "predictions"), **kept), out)
    return steps


def test_an_interrupted_analysis_goes_on_and_ends_with_the_same_run(tmp_path):
    """Killed between batches, by the signal that cannot be caught; the same call again gives the
    bytes of an undisturbed one.
    """
    interruptible(tmp_path / "s1", tmp_path / "one.nc")
    killed = Forked(lambda: interruptible(tmp_path / "s2", tmp_path / "two.nc", wait=True) and 0)
    assert killed.line() == "nine"
    killed.kill()
    assert killed.wait().returncode == -signal.SIGKILL
    assert len(list((tmp_path / "s2").glob("batch-*.nc"))) in (2, 3)
    assert interruptible(tmp_path / "s2", tmp_path / "two.nc")[0] != 1, (
        "the finished batches were computed again"
    )
    assert (tmp_path / "two.nc").read_bytes() == (tmp_path / "one.nc").read_bytes()
    assert not (tmp_path / "s2").exists()


def test_batches_that_wait_are_written_when_an_analysis_is_interrupted(tmp_path):
    bridge = ri.bridge(ri.reposition(tiny("llama"), "repo@1"))
    prompts = [Prompt((*range(3 + at, 23 + at),), generated=(19,)) for at in range(5)]
    store, layers, written, steps = tmp_path / "store", 3, [], []

    def interrupt(done, total):
        written.append(len(list(store.glob("batch-*.nc"))))
        if done == 2 * layers + 1:  # within the third batch
            raise KeyboardInterrupt

    measures = ("positions", "attention_mass")
    kept = {"store": store, "store_every": 1e6, "measures": measures, "batch_size": 1}
    with pytest.raises(KeyboardInterrupt):
        ri.analyze(bridge, prompts, progress=interrupt, **kept)
    assert max(written) == 0 and len(list(store.glob("batch-*.nc"))) == 2
    again = ri.analyze(bridge, prompts, progress=lambda done, _: steps.append(done), **kept)
    assert steps[:3] == [layers, 2 * layers, 2 * layers + 1], (
        "the first two batches are not measured again, layer by layer"
    )
    xr.testing.assert_identical(again, ri.analyze(bridge, prompts, measures, batch_size=1))
    assert not store.exists()


def test_what_a_measure_cannot_see_is_refused():
    """Found: inside LM-Infinite the mass of the unmasked attention was returned; and masks were
    read as 0 and 1.
    """
    bridge = ri.zoo("niah/rope")
    prompts = ri.tasks.make_task("niah").prompts(1)
    with ri.interventions.lm_infinite(bridge, 16, 2):
        with refused("layer 0 attends otherwise while an intervention lasts"):
            ri.analyze(bridge, prompts, ("attention_mass",))
        assert "positions" in ri.analyze(bridge, prompts, ("positions",)).children
    assert "attention_mass" in ri.analyze(bridge, prompts, ("attention_mass",)).children
    with refused("wanted a list of whole numbers"):
        ri.analyze(bridge, prompts, ("positions",), heads=[np.True_, np.False_])


def test_what_is_kept_of_a_model_is_not_used_of_a_changed_one(tmp_path):
    """Found: batches from before an intervention and from within it stood in one run."""
    bridge, prompts = ri.zoo("niah/repo"), ri.tasks.make_task("niah").prompts(3)
    asked = {"measures": ("positions",), "batch_size": 1}
    whole = ri.analyze(bridge, prompts, **asked)

    def stop(done, total):
        if done > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ri.analyze(bridge, prompts, **asked, store=tmp_path / "s", progress=stop)
    with ri.interventions.linearised(bridge):
        with pytest.warns(OtherQuestion, match="another question"):
            changed = ri.analyze(bridge, prompts, **asked, store=tmp_path / "s")
        alone = ri.analyze(bridge, prompts, **asked)
        xr.testing.assert_identical(changed["positions"], alone["positions"])
    assert not changed["positions"].equals(whole["positions"])


def test_a_run_of_a_changed_model_says_so():
    """Found: it had the checkpoint's digest, and nothing else, whatever was done to the model in
    memory.
    """
    bridge, prompts = ri.zoo("reversal/rope"), ri.tasks.make_task("reversal").prompts(1)

    def said():
        return ri.analyze(bridge, prompts, ("positions",)).attrs.get("changed", "")

    bridge.run_with_cache(torch.tensor([prompts[0].tokens]))
    ri.score(bridge, test_sets=["3"], count=2)
    # hooks that libraries leave to record outputs change nothing
    assert said() == "" and said() == ""
    zeroed = ("blocks.1.hook_resid_pre", lambda values, hook: values * 0)
    for context, changed in (
        (ri.interventions.frozen(bridge, layer=1), "hooks at layers.1.self_attn.hook_positions"),
        (ri.interventions.interpolated(bridge, 2.0), "other rotation in layer 0, layer 1, layer 2"),
        (bridge.hooks(fwd_hooks=[zeroed]), "hooks at layers.1"),
    ):
        with context:
            assert said().startswith(changed)
    assert said() == ""
    weight = bridge.blocks[1].attn.o.weight
    with torch.no_grad():
        weight.add_(0.0)  # another version
        assert said() == ""
        weight.set_(weight.detach().clone())  # another place
        assert said() == ""
        weight.copy_(weight.flip(0))  # the same numbers in other places: no sum tells this
    other = "other weights in layers.1.self_attn.o_proj.weight"
    assert said() == other
    weight.data.copy_(weight.flip(0))
    weight.data[0] *= 2  # no counter of torch's tells this
    run = ri.analyze(bridge, prompts, ("positions",))
    assert run.attrs["changed"] == other
    assert "the model is not as it was loaded" in run.attrs["notes"]
    plain = ri.analyze(ri.zoo("reversal/rope"), prompts, ("positions",))
    compared = ri.compare({"plain": plain, "edited": run})
    assert "edited is of a changed model: other weights in" in compared.attrs["notes"]
    weight.data[0] /= 2
    assert said() == ""


def test_a_model_that_was_not_loaded_has_the_digest_of_its_weights():
    made = ri.bridge(ri.reposition(tiny("llama"), "rope"))
    digest = identity(as_decoder(made))["checkpoint_digest"]
    assert identity(as_decoder(made))["checkpoint_digest"] == digest
    made.original_model.lm_head.weight.data[3, 5] += 1.0
    run = ri.analyze(made, [[3, 4, 5]], ("positions",))
    assert (
        identity(as_decoder(made))["checkpoint_digest"] == run.attrs["checkpoint_digest"] != digest
    )


def test_a_store_gives_back_what_was_computed(tmp_path):
    faults = {"n": Fault("NaN"), PASS: Fault("the pass of prompt 0 ended in NaN", concluding=True)}
    sums = xr.Dataset({"s": ("layer", [1.0])}, {"layer": [0]})
    results = {**faults, "m": Statistics(sums=sums)}
    first = Store(tmp_path / "s")
    first.get_or_compute({"batch-0": lambda: results}, form=BATCHES)
    first.part("experiment").get_or_compute({"point": lambda: {"x": [0.1, float("nan")]}})
    again = Store(tmp_path / "s")
    (read,) = again.stream({"batch-0": pytest.fail}, form=BATCHES)
    xr.testing.assert_identical(read.pop("m").sums, sums)
    assert list(read.items()) == list(faults.items())
    found = again.part("experiment").get_or_compute({"point": pytest.fail})["point"]["x"]
    assert_array_equal(found, [0.1, np.nan])


def test_what_is_no_measure_no_experiment_and_no_batch_is_refused_in_a_line(tmp_path):
    bridge = ri.zoo("reversal/rope")
    for options, line in (
        ({"measures": [None]}, "None is no measure; wanted names"),
        ({"experiments": [Effects]}, "the experiment Effects is a class"),
        ({"batch_size": "all"}, "a batch is a number of prompts, or \"auto\"; got 'all'"),
        ({"measures": ["positions"] * 2}, "the measure 'positions' was asked for twice"),
    ):
        with refused(line):
            ri.analyze(bridge, [[3, 4, 5]], **{"measures": ("positions",), **options})
    for scaling, line in (
        ({"rope_type": "foo", "factor": 2.0}, "there is no rope_type 'foo'"),
        ({"factor": 2.0}, "wanted a rope_type"),
        ({"rope_type": "linear", "factor": 0.0}, '"all layers" "factor": wanted '),
        ("yarn", "rope_scaling is 'yarn'; wanted a table"),
    ):
        with refused(line):
            ri.load("reversal/rope", rope_scaling=scaling)


def test_a_call_walks_a_model_a_few_times_however_many_layers_it_has():
    """Found: 26,000 visits of modules in one call, since each question of a fact of the model
    walked it again.
    """
    config = tiny("llama").config
    config.num_hidden_layers = 12
    bridge = ri.bridge(ri.reposition(LlamaForCausalLM(config).eval(), "repo"))
    ri.analyze(bridge, [[3, 4, 5]], ("positions",))
    with Profile() as profile:
        ri.analyze(bridge, [[3, 4, 5]], ("positions",))
    stats = Stats(profile).stats.items()  # pyright: ignore[reportAttributeAccessIssue]
    calls = {(Path(file).name, name): of[1] for (file, _, name), of in stats}
    assert calls["module.py", "named_modules"] < 30 * len(list(bridge.modules()))
    assert calls["changes.py", "changes"] == 1
