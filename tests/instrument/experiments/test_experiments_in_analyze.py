"""Perturbation and extrapolation within `analyze`: in run.nc, in figures and on the page; refused
early, interrupted and gone on with.
"""

import json

import numpy as np
import pytest
import xarray as xr
from attention_inputs import OFFICIAL
from drawn import without_pictures
from families import bridge_for
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.trained_task import trained_task
from repo_interp.cli import main
from repo_interp.experiments import Atlas, Effects, Extrapolation, Kinds, Perturbation, Saliency
from repo_interp.experiments.catalogue import experiment_named, experiment_names, planned
from repo_interp.experiments.prompt_sets import prompts_by_length, scoring_of
from repo_interp.models.checkpoints import identify, load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.shipped import zoo_path
from repo_interp.store import Store
from repo_interp.tasks import Prompt, Response, Task, make_task

TASK = make_task("reversal", longest=6, longest_test=12)
SMALL = Perturbation(kinds=("text_order", "position_offset"), gammas=(0.5,), l_maxes=(2, 4))


@pytest.fixture(scope="module")
def bridge():
    found = bridge_for(TASK)
    # a bridge attaches hooks of its own in its first pass
    ri.analyze(found, TASK.prompts(1), ("positions",))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `analyze` makes of a shipped checkpoint with both experiments and fig. 2."""
    directory = tmp_path_factory.mktemp("runs") / "both"
    words = (
        "analyze reversal/repo --measures maps,three_axis --count 4 "
        "--experiments perturbation,extrapolation,saliency --set perturbation.gammas=0.1,0.5 "
        "--set perturbation.l_maxes=2 --set extrapolation.sequences=4 --set saliency.steps=2 --out"
    )
    with without_pictures():
        assert main([*words.split(), str(directory)]) == 0
    return directory


def test_the_run_file_holds_what_the_experiments_find_by_themselves(results):
    run = ri.read_run(results)
    assert set(run.children) == {
        "maps",
        "three_axis",
        "perturbation",
        "extrapolation",
        "output_traces",
        "saliency",
    }
    path = zoo_path("reversal/repo")
    task = trained_task(path)
    assert task is not None
    alone = Perturbation(gammas=(0.1, 0.5), l_maxes=(2,)).measured(
        load_model(identify(path)), task, task.prompts(4)
    )
    for name in ("log_perplexity", "task_score", "log_perplexity_rise", "moved_share"):
        assert_allclose(run["perturbation"][name], alone[name], rtol=1e-4, atol=1e-6, err_msg=name)
    group = run["extrapolation"].to_dataset()
    assert group["kl"].dims == ("method", "length", "layer")
    assert group["length"].values[0] <= run.attrs["training_length"] < group["length"].values[1]
    assert group["scheme"].values.tolist() == run.attrs["layout"].split(",")
    assert group.attrs["sequences"] == 4 and run["perturbation"].attrs["metric"] == "exact match"


@pytest.mark.usefixtures("no_figures")
def test_prompts_of_a_file_are_judged_by_what_they_mark(tmp_path, capsys):
    tokens = np.random.default_rng(0).integers(3, 250, (2, 40)).tolist()
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in tokens))
    options = (
        "--measures positions --experiments perturbation --set perturbation.gammas=0.5 "
        "--set perturbation.l_maxes=3"
    )
    places = ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out")]
    assert main(["analyze", str(OFFICIAL / "repo_mha"), *places, *options.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "experiments perturbation, which run the model 14 more times" in said
    group = ri.read_run(tmp_path / "out")["perturbation"]
    assert group.attrs["metric"] == "log perplexity" and group.attrs["higher_is_better"] == "False"
    assert_allclose(group["task_score"], group["log_perplexity"], rtol=1e-6)
    marked = [Prompt(tokens=tuple(row), generated=(39,)) for row in tokens]
    run = ri.analyze(ri.load(OFFICIAL / "repo_mha"), marked, (), experiments=(SMALL,))
    assert run["perturbation"].attrs["metric"] == "exact match"


def test_a_model_that_cannot_take_longer_prompts_or_other_tokens_is_refused(bridge):
    prompts, learned, cope = TASK.prompts(4), bridge_for(TASK, "learned"), bridge_for(TASK, "cope")
    lm_infinite = Extrapolation(methods=("lm_infinite",))
    unmarked, first = (Prompt(tokens=(3, 4, 5), generated=places) for places in ((), (0, 2)))
    for model, some, experiment, line in (
        (learned, prompts, "extrapolation", "learned table; leave it out"),
        (cope, prompts, lm_infinite, "by 'lm_infinite': this model's positions allow plain"),
        (bridge, [unmarked], "perturbation", "nothing to predict for reversal"),
        (bridge, [first], "perturbation", "nothing stands before token 0 of prompt 0"),
    ):
        with refused(line):
            planned(model, some, (experiment,), TASK)


class Stopped(Exception):
    """What happens to a run in the middle."""


SMALLEST = {
    "perturbation": (SMALL, "inside a pass"),
    "extrapolation": (Extrapolation(sequences=4), "inside a pass"),
    "effects": (Effects(kinds=("frozen",), draws=2), "between points"),
    "kinds": (Kinds(draws=1), "between points"),
    "saliency": (Saliency(steps=2), "inside a pass"),
    "atlas": (Atlas(twins=2, sequences=2), "between points"),
}


def test_every_experiment_is_stopped_below():
    assert list(SMALLEST) == [experiment_named(name).name for name in experiment_names()]


@pytest.mark.filterwarnings("ignore:most of extrapolation.kl is noise")
@pytest.mark.parametrize("name", SMALLEST)
def test_an_experiment_stopped_in_the_middle_leaves_the_model_as_it_was_and_goes_on(
    name, bridge, tmp_path
):
    (asked, where), hooks = SMALLEST[name], []
    embed = as_decoder(bridge).stack.embed_tokens

    def analysed(store=None, progress=None, most=None):
        """The group, and the number of passes; stopped in the last of `most` passes."""
        hooks.clear()

        def count(*_):
            hooks.append(hooks_of(bridge))
            if len(hooks) == most:
                raise Stopped

        with embed.register_forward_hook(count):
            run = ri.analyze(
                bridge,
                TASK.prompts(4),
                (),
                store=store,
                experiments=(asked,),
                task=TASK,
                experiment_progress=progress,
            )
        return run[name].to_dataset(), len(hooks)

    def interrupt(which, done, total):
        assert which == name
        if done == min(5, total - 1):
            raise KeyboardInterrupt

    def state():
        return hooks_of(bridge), [
            (parameter.requires_grad, parameter.grad) for parameter in bridge.parameters()
        ]

    whole, passes = analysed()
    for array in whole.data_vars.values():
        assert array.attrs["long_name"] and array.attrs["units"]
    before = state()
    if where == "inside a pass":
        with pytest.raises(Stopped):
            analysed(tmp_path / "s", most=passes)
        assert max(hooks) > before[0] + 1, "the hooks of the experiment were there"
    else:
        with pytest.raises(KeyboardInterrupt):
            analysed(tmp_path / "s", interrupt)
    assert state() == before and list((tmp_path / "s" / name).glob("*.json"))
    again, passes_of_the_rest = analysed(tmp_path / "s")
    assert passes_of_the_rest < passes, "finished points were measured again"
    xr.testing.assert_identical(again, whole)
    assert not (tmp_path / "s").exists()


@pytest.mark.filterwarnings("ignore:most of extrapolation.kl is noise")
@pytest.mark.parametrize(
    "asked",
    [
        SMALL,
        Extrapolation(sequences=4),
        Extrapolation(("lm_infinite",), sequences=4),
        Extrapolation(("lm_infinite",), sequences=4, traced_layers=(1, 0)),
    ],
)
def test_the_passes_that_are_said_are_those_that_are_made(asked, bridge):
    (plan,) = planned(bridge, TASK.prompts(5), (asked,), TASK)
    rows = []
    embed = as_decoder(bridge).stack.embed_tokens
    with embed.register_forward_hook(lambda module, arguments, out: rows.append(len(out))):
        plan.run(2, Store(), None)
    assert sum(rows) == len(plan.passes)


def test_longer_prompts_of_a_task_are_those_of_its_longer_test_sets():
    judge, by_length = prompts_by_length(TASK, (), TASK.training_length, (), 4, 0)
    assert judge is TASK and min(by_length) == TASK.training_length

    def longest(some):
        return max(len(prompt.tokens) for prompt in some)

    assert {longest(some): some for some in by_length.values()} == by_length
    assert 2 <= len(by_length) <= 4 and max(by_length) == longest(TASK.prompts(4, 0, "12"))
    exact = prompts_by_length(TASK, (), TASK.training_length, (max(by_length),), 4, 0)[1]
    assert list(exact) == [TASK.training_length, max(by_length)]
    with refused("has no test set of 999 tokens"):
        prompts_by_length(TASK, (), TASK.training_length, (999,), 4, 0)
    with refused("and beyond it"):
        prompts_by_length(TASK, (), 10_000, (), 4, 0)


def test_given_text_is_cut_to_every_length():
    prompts = [Prompt(tokens=tuple(range(3, 3 + count))) for count in (70, 80, 90, 100, 20)]
    judge, by_length = prompts_by_length(scoring_of(prompts), prompts, 32, (), 16, 0)
    assert judge.metric == "log perplexity" and list(by_length) == [32, 64]
    assert [len(prompt.tokens) for prompt in by_length[64]] == [64] * 4
    assert by_length[32][0].tokens == prompts[0].tokens[:32]
    assert list(prompts_by_length(scoring_of(prompts), prompts, 50, (), 16, 0)[1]) == [50, 70]
    with refused("must reach beyond the training length, 32"):
        prompts_by_length(scoring_of(prompts), prompts, 32, (16,), 16, 0)


def test_given_prompts_are_scored_by_what_they_mark():
    marked = [Prompt(tokens=(3, 4, 5), generated=(2,)), Prompt(tokens=(3, 9), generated=(1,))]
    scoring = scoring_of(marked)
    assert (scoring.metric, scoring.higher_is_better) == ("exact match", True)
    assert scoring.targets(marked[0]) == (2,)
    assert scoring.score([Response((5,)), Response((8,))], marked).tolist() == [1, 0]
    mixed = scoring_of([*marked, Prompt(tokens=(3, 4))])
    assert (mixed.metric, mixed.units) == ("log perplexity", "nat") and not mixed.higher_is_better
    assert mixed.targets(marked[0]) == (1, 2)
    assert mixed.score([Response((0, 0), (-1.0, -3.0))], marked[:1]).tolist() == [2]
    assert not isinstance(scoring, Task) and not isinstance(mixed, Task)


def test_what_is_planned_is_not_planned_again(bridge):
    (plan,) = planned(bridge, TASK.prompts(4), (SMALL,), TASK)
    assert planned(bridge, TASK.prompts(4), (plan,), TASK)[0] is plan
    by_plan, by_object = (
        ri.analyze(bridge, TASK.prompts(4), (), experiments=(one,), task=TASK)
        for one in (plan, SMALL)
    )
    xr.testing.assert_identical(
        by_plan["perturbation"].to_dataset(), by_object["perturbation"].to_dataset()
    )


def test_an_axis_that_was_chosen_stays_as_chosen(bridge):
    from repo_interp.measures.three_axis import ThreeAxis

    prompts = TASK.prompts(2)
    named = ri.analyze(bridge, prompts, ("maps", "three_axis"))
    chosen = ri.analyze(bridge, prompts, ("maps", ThreeAxis()))  # pyright: ignore[reportArgumentType]
    alone = ri.analyze(bridge, prompts, ("three_axis",))
    assert "distance_axis" in named["three_axis"]
    assert (
        "distance_axis" not in chosen["three_axis"] and "distance_axis" not in alone["three_axis"]
    )
