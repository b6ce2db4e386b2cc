"""A training with `PositionsCallback` is the same training, bit by bit, and leaves a series of runs
and a log of scalars.
"""

import re
from collections import Counter

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose
from refusals import refused
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3_5TextConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import integration_utils

import repo_interp as ri
from repo_interp.errors import Note
from repo_interp.plugins.training.training import _rows
from repo_interp.tasks.prompt import Prompt

PROMPTS = [
    Prompt(tokens=tuple(range(3, 43)), spans={"needle": (5, 6, 7)}, generated=(38, 39)),
    Prompt(tokens=tuple(range(4, 40)), spans={"needle": (9, 10)}, generated=(34, 35)),
]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
DYNAMIC = {
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}


def decoder(layout=None, **options):
    """A small decoder in training mode, with dropout; `layout` None: the stock one."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS, **options)).train()
    return model if layout is None else ri.reposition(model, layout)


def trained(
    directory, model, *callbacks, train_dataset=None, eval_dataset=None, collate=None, **options
):
    """The Trainer after six steps, on random tokens unless others are given."""
    tokens = torch.randint(3, 64, (24, 24), generator=torch.Generator().manual_seed(1))
    rows = train_dataset or [{"input_ids": each, "labels": each} for each in tokens]
    given = {"max_steps": 6, "per_device_train_batch_size": 4, "save_strategy": "no"}
    given |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True} | options
    arguments = TrainingArguments(str(directory), **given)
    trainer = Trainer(model, arguments, collate, rows, eval_dataset, callbacks=[*callbacks])
    trainer.train()
    return trainer


def state(model):
    """All that a measurement could leave behind: by module, what its attributes are, its hooks, and
    the configuration.
    """
    modules = {
        name: {
            key: (id(value), dict(value) if isinstance(value, dict) else None)
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }
    return modules, type(model.config), dict(vars(model.config)), torch.get_rng_state().tolist()


def logged(trainer, name):
    """The values of `name` in the log, by step."""
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


@pytest.mark.parametrize(("layout", "options"), [(None, DYNAMIC), ("cope", {})])
def test_a_training_with_the_callback_ends_with_the_same_bits(layout, options, tmp_path):
    without = trained(tmp_path / "a", decoder(layout, **options))
    measures = ["positions", "attention_mass" if layout else "rotation"]
    callback = ri.PositionsCallback(every=3, prompts=PROMPTS, measures=measures)
    measured = trained(tmp_path / "b", decoder(layout, **options), callback)
    assert_close(measured.model.state_dict(), without.model.state_dict(), rtol=0, atol=0)
    assert logged(measured, "train_loss") == logged(without, "train_loss")
    series = ri.compare(sorted((tmp_path / "b" / "positions").glob("step-*"), reverse=True))
    assert series.attrs["runs"] == "steps of one training"
    assert series["training_step"].values.tolist() == [0, 3, 6]


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_a_step_leaves_the_model_the_gradients_and_the_random_numbers_as_they_were(implementation):
    model = decoder()
    model.config._attn_implementation_internal = implementation
    model.model.layers[1].mlp.eval()
    handle = model.model.layers[0].register_forward_hook(lambda *given: None)
    model.model.embed_tokens(torch.arange(3, 23)).sum().backward()
    before, gradient = state(model), model.model.embed_tokens.weight.grad.clone()
    with torch.autocast("cpu", torch.bfloat16):
        run = ri.measure_step(model, 7, PROMPTS, measures=["attention_mass"])
    assert state(model) == before and torch.equal(model.model.embed_tokens.weight.grad, gradient)
    handle.remove()
    assert not model.model.layers[0]._forward_hooks
    assert run.attrs["training_step"] == 7 and "changed" not in run.attrs
    bridge = ri.bridge(ri.reposition(decoder().eval(), "rope"))
    analyzed = ri.analyze(bridge, PROMPTS, ["attention_mass"])
    assert_allclose(run["attention_mass/mass"], analyzed["attention_mass/mass"], rtol=1e-5)


# torch.compile imports what is deprecated
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_wrapped_model_is_measured_without_what_is_around_it_and_a_refusal_leaves_it_as_it_was():
    model = decoder("repo")
    names = ["positions", "attention_mass"]
    plain = ri.measure_step(model, 1, PROMPTS, measures=names)
    compiled, parallel = torch.compile(model), torch.nn.DataParallel(model)
    before = state(model)
    for wrapped in (compiled, parallel):
        assert ri.measure_step(wrapped, 1, PROMPTS, measures=names).identical(plain)
        assert state(model) == before
    assert compiled._orig_mod is model and parallel.module is model
    with refused("tokens are 0 to 63"):
        ri.measure_step(model, 1, [[99, 98]])
    assert state(model) == before
    model.model.norm.weight = torch.nn.Parameter(torch.empty(0))
    with refused("weight is sharded over processes"):
        ri.measure_step(model, 1, PROMPTS)


def test_scalars_are_those_of_the_run_and_reach_what_the_trainer_reports_to(tmp_path, monkeypatch):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **given):
            seen.append((state.global_step, dict(logs)))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    names = ["positions", "patterns", "attention_mass"]
    callback = ri.PositionsCallback(6, PROMPTS, tmp_path / "runs", names)
    trainer = trained(tmp_path, decoder("rope,repo,repo"), callback, report_to=["tensorboard"])
    run = ri.read_run(tmp_path / "runs" / "step-6")
    scalars = ri.training_scalars(run)
    mass = run["attention_mass/mass"].sel(span="needle").mean("prompt")
    shares = run["patterns/pattern_share"].sel(layer=[1, 2], pattern="hybrid")
    cells = {f"positions_{kind}_cells" for kind in ("valid", "tied", "undefined")}
    assert scalars == {
        "positions_range": float(run["positions/position_range"].sel(layer=[1, 2]).mean()),
        "positions_hybrid_share": float(shares.mean()),
        "positions_needle_mass": float(mass.max()),
        "positions_findings": len(ri.findings(run)),
        **{name: scalars[name] for name in cells},
    }
    assert [logs for step, logs in seen if step == 6 and "positions_range" in logs] == [scalars]
    assert {name: logged(trainer, name)[6] for name in scalars} == scalars


def test_a_series_refuses_two_steps_with_the_same_weights():
    model = decoder("repo")
    runs = [ri.measure_step(model, step, PROMPTS) for step in (100, 200)]
    with refused("steps 100 and 200 of a training have the same weights"):
        ri.compare(runs)


ROWS = [{"input_ids": ids, "labels": ids} for ids in (list(range(3, 27)), list(range(9, 33)))] * 3


def assert_as_analyzed(run, trainer, prompts):
    """A run measured during a training is that of `analyze` on the model that it left."""
    names = [*run.children]
    analyzed = ri.analyze(trainer.model.eval(), prompts, names, batch_size=2, experiments=())
    for name in names:
        xr.testing.assert_allclose(run[name].to_dataset(), analyzed[name].to_dataset(), rtol=1e-5)


class Counts(TrainerCallback):
    """Counts the passes of a model, in training and in evaluation, and those of its layers."""

    def __init__(self, model):
        self.passes = Counter()
        for name, module in model.named_modules():
            if name == "" or re.fullmatch(r"model\.layers\.\d", name):
                module.register_forward_pre_hook(
                    lambda module, given, name=name: self.passes.update([(name, module.training)])
                )


@pytest.mark.parametrize(("layout", "options"), [(None, DYNAMIC), ("repo@1", {})])
def test_an_evaluation_is_measured_within_its_own_passes(layout, options, tmp_path):
    """As many passes with the callback as without, the same losses and weights, and the numbers of
    `analyze` on the same batches.
    """
    ends, given = [], {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
    given |= {"per_device_eval_batch_size": 2, "eval_dataset": ROWS}
    callback = ri.PositionsCallback(
        evaluated=4, measures=["positions", "octaves", "attention_rows"]
    )
    for name, callbacks in (("without", []), ("with", [callback])):
        model = decoder(layout, **options)
        counts, before = Counts(model).passes, state(model)[0]
        trainer = trained(tmp_path / name, model, *callbacks, **given)
        assert state(model)[0].keys() == before.keys() and not model.model._forward_hooks
        ends.append((counts, logged(trainer, "eval_loss")))
        weights = [weight.detach() for weight in model.parameters()]
        before_callback = weights if name == "without" else before_callback
    assert ends[0] == ends[1] and ends[0][0]["", False] == 9
    assert all(map(torch.equal, weights, before_callback))
    runs = sorted((tmp_path / "with" / "positions").glob("step-*"))
    assert [run.name for run in runs] == ["step-0", "step-3", "step-6"]
    run = ri.read_run(runs[-1])
    assert_as_analyzed(run, trainer, [row["input_ids"] for row in ROWS[:4]])
    assert run.attrs["prompts_from"] == "the Trainer's evaluation" and "changed" not in run.attrs
    cells = logged(trainer, "positions_valid_cells")
    assert [*cells] == [0, 3, 6] and cells[6] == ri.training_scalars(run)["positions_valid_cells"]


def evaluated(directory, model, rows, position_ids):
    """A Trainer and the run of its evaluation, of batches with position ids for so many rows."""

    def collated(rows):
        tokens = torch.tensor([row["input_ids"] for row in rows])
        batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        return batch | {"position_ids": position_ids(len(rows))}

    given = {"eval_strategy": "steps", "eval_steps": 6, "eval_dataset": rows}
    given |= {"train_dataset": rows * 4, "collate": collated}
    callback = ri.PositionsCallback(measures=["attention_rows", "positions"])
    trainer = trained(directory, model, callback, **given)
    return trainer, ri.read_run(directory / "positions" / "step-6")


def test_packed_rows_are_measured_as_they_are_evaluated(tmp_path):
    """Position ids of packed documents come from the collator's batch."""
    tokens, places = tuple(range(3, 15)), (*range(7), *range(5))
    trainer, run = evaluated(
        tmp_path,
        decoder(),
        [{"input_ids": tokens}] * 2,
        lambda rows: torch.tensor([places] * rows),
    )
    assert_as_analyzed(run, trainer, [Prompt(tokens, position_ids=places)] * 2)
    assert (run["attention_rows/key"].sel(query=[7, 8]).values % 99 >= 7).all()


def test_rows_are_read_without_padding_on_the_right_and_other_rows_are_refused():
    tokens = torch.tensor([[3, 4, 5], [6, 7, 0]])
    prompts, width = _rows({"input_ids": tokens, "attention_mask": tokens > 0})
    assert [each.tokens for each in prompts] == [(3, 4, 5), (6, 7)] and width == 3
    packed = {"input_ids": tokens, "position_ids": torch.arange(3).repeat(4, 2, 1) % 2}
    for batch, line in (
        ({"input_ids": tokens, "attention_mask": tokens.flip(1) > 0}, "padded on the left"),
        (packed, "position ids of four axes pack documents; leave rows unpacked"),
    ):
        with refused(line):
            _rows(batch)


@pytest.mark.parametrize("axes", [3, 4])
def test_position_ids_by_axis_are_measured_as_they_are_evaluated(axes, tmp_path):
    """mRoPE: time, height and width of every token, after its index where there are four axes."""
    rotation = {"mrope_section": [1, 1, 2], "mrope_interleaved": True, "rope_type": "default"}
    config = Qwen3_5TextConfig(
        **SHAPE | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5} | rotation,
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.arange(10).repeat(4, 1)
    ids[1:, 2:8] = torch.tensor([[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]])
    ids[1:, 8:] -= 3
    rows = [{"input_ids": [*range(3, 13)]}, {"input_ids": [*range(12, 2, -1)]}]
    trainer, run = evaluated(
        tmp_path, model, rows, lambda count: ids[4 - axes :, None].expand(-1, count, -1)
    )
    assert run["positions/position_id"].values.tolist() == ids[1:, None].repeat(1, 2, 1).tolist()
    prompts = [Prompt(row["input_ids"], position_ids=ids[1:].T) for row in rows]
    assert_as_analyzed(run, trainer, prompts)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 6, "eval_dataset": ROWS[:2]}


def test_passes_of_others_are_not_measured(tmp_path):
    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **given):
            model.eval()
            model(torch.arange(40, 60)[None])
            model.train()

    callback = ri.PositionsCallback(measures=["positions"])
    trained(tmp_path, decoder(), Looks(), callback, Looks(), **EVALUATED)
    found = ri.read_run(tmp_path / "positions" / "step-6")["positions/token_id"]
    assert found.values.tolist() == [row["input_ids"] for row in ROWS[:2]]


def test_an_evaluation_that_cannot_be_measured_is_a_warning_and_none_is_refused(tmp_path):
    callback = ri.PositionsCallback(measures=["attention_mass"])
    with pytest.warns(Note, match="not measured at step 6: prompt 0 has no span 'generated'"):
        trainer = trained(tmp_path, decoder(), callback, **EVALUATED)
    assert trainer.state.global_step == 6 and not (tmp_path / "positions").exists()
    for measures, options, line in (
        (None, {}, "and the Trainer evaluates nothing"),
        (["predictions"], EVALUATED, "predictions needs a pass over prompts"),
    ):
        with refused(f"there are no prompts to measure, .*{line}"):
            trained(tmp_path, decoder(), ri.PositionsCallback(measures=measures), **options)


class Ends(TrainerCallback):
    """Raises at an event."""

    def __init__(self, event, error):
        def raises(*given, **more):
            raise error

        setattr(self, event, raises)


@pytest.mark.parametrize("error", [RuntimeError("power cut"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_step_end", "on_prediction_step", "on_evaluate", "forward"]
)
def test_a_training_that_raises_leaves_nothing_in_the_model(event, error, tmp_path):
    """Found: the hooks of an evaluation, which measured every later pass for nothing."""
    model = decoder("repo")
    if event == "forward":

        def act(module, given):
            if not module.training:
                raise error

        model.model.layers[1].mlp.register_forward_pre_hook(act)
    before = state(model)[0]
    callbacks = [
        ri.PositionsCallback(out=tmp_path / name, measures=["positions"]) for name in ("a", "b")
    ]
    ends = [] if event == "forward" else [Ends(event, error)]
    with pytest.raises(type(error)) as raised:
        trained(tmp_path, model, *callbacks, *ends, **EVALUATED | {"eval_steps": 1})
    assert raised.value is error
    for name, attributes in state(model)[0].items():
        for table in ("_forward_hooks", "_forward_pre_hooks", "_buffers", "_modules"):
            assert attributes[table] == before[name][table]


def test_two_evaluations_are_measured_side_by_side_and_leave_nothing(tmp_path):
    model = decoder("repo")
    before = state(model)[0]
    callbacks = [
        ri.PositionsCallback(out=tmp_path / name, measures=[name])
        for name in ("positions", "octaves")
    ]
    trainer = trained(tmp_path, model, *callbacks, **EVALUATED)
    assert {name: found["_forward_hooks"] for name, found in state(model)[0].items()} == {
        name: found["_forward_hooks"] for name, found in before.items()
    }
    rows = [row["input_ids"] for row in EVALUATED["eval_dataset"]]
    for name in ("positions", "octaves"):
        run = ri.read_run(tmp_path / name / "step-6")
        assert [*run.children] == [name]
        assert_as_analyzed(run, trainer, rows)
    assert "evaluation_loop" not in vars(trainer)


def test_two_callbacks_have_runs_and_entries_of_their_own_and_never_one_directory(tmp_path):
    """Found: the second put the first one's step 0 aside, and its entries out of the log."""
    short, long = (
        ri.PositionsCallback(3, [tuple(range(3, end))], tmp_path / f"{end}", ["positions"])
        for end in (13, 33)
    )
    trainer = trained(tmp_path, decoder("repo"), short, long)
    for end in (13, 33):
        runs = [ri.read_run(tmp_path / f"{end}" / f"step-{step}") for step in (0, 3, 6)]
        assert [run["positions"].sizes["token"] for run in runs] == [end - 3] * 3
    entries = [entry for entry in trainer.state.log_history if "positions_range" in entry]
    assert [entry["step"] for entry in entries] == [0, 0, 3, 3, 6, 6]
    for second in (
        ri.PositionsCallback(prompts=PROMPTS, out=tmp_path / "x" / ".." / "positions"),
        ri.PositionsCallback(measures=["positions"]),
    ):
        first = ri.PositionsCallback(prompts=PROMPTS)
        for callbacks in ((first, second), (first, first)):
            with refused("two PositionsCallbacks write their runs to .*positions; give each"):
                trained(tmp_path, decoder("repo"), *callbacks, **EVALUATED)
    assert not (tmp_path / "positions").exists()


def test_a_training_that_begins_again_puts_earlier_runs_aside(tmp_path):
    """Found: after a crash before the first checkpoint, and at a second `train()`, it was
    refused.
    """

    class Crash(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            raise RuntimeError("power cut")

    out = tmp_path / "runs"
    (out / "step-9").mkdir(parents=True)  # no run of ours

    def begin(*callbacks):
        callback = ri.PositionsCallback(6, PROMPTS, out, ["positions"])
        return trained(tmp_path, decoder("repo"), callback, *callbacks)

    with pytest.raises(RuntimeError, match="power cut"):
        begin(Crash())
    begun = ri.read_run(out / "step-0")
    with pytest.warns(Note, match=f"they are in {out / 'earlier-1'} now"):
        trainer = begin()
    assert ri.read_run(out / "earlier-1" / "step-0").identical(begun)
    with pytest.warns(Note, match="earlier-2 now"):
        trainer.train()
    found = {path.parent.relative_to(out).as_posix() for path in out.glob("**/run.nc")}
    steps = {"step-0", "step-6"}
    assert found == {"earlier-1/step-0", *(f"earlier-2/{step}" for step in steps), *steps}
    assert (out / "step-9").is_dir()


def test_a_resumed_training_puts_later_runs_aside_and_logs_its_first_step_once(tmp_path):
    """Found: steps of two courses made one series."""
    out = tmp_path / "runs"
    callback = ri.PositionsCallback(2, PROMPTS, out, ["positions"])
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer = trained(tmp_path, decoder("repo"), callback, **saved)
    before = ri.read_run(out / "step-6")
    with pytest.warns(Note, match="holds runs after step 4 of a training"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert ri.read_run(out / "earlier-1" / "step-6").identical(before)
    assert {path.name for path in out.iterdir()} == {
        "earlier-1",
        *(f"step-{n}" for n in (0, 2, 4, 6)),
    }
    steps = [
        entry["step"]
        for entry in trainer.state.log_history
        if any("positions" in key for key in entry)
    ]
    assert steps == [0, 2, 4, 6]


def test_cells_are_valid_tied_or_undefined():
    values = np.array([[[1.0, 2.0, 2.0, np.nan], [np.inf, 3.0, 4.0, 5.0]]])
    group = xr.Dataset(
        {"score": (("prompt", "layer", "head"), values), "other": (("layer",), [1.0, 1.0])}
    )
    scalars = ri.training_scalars(xr.DataTree.from_dict({"mine": group}))
    kinds = ("valid", "tied", "undefined")
    assert [scalars[f"positions_{kind}_cells"] for kind in kinds] == [4, 2, 2]
