"""Perturbation and extrapolation within `analyze`: in run.nc, in figures and on the page; refused
early, interrupted and gone on with.
"""

import json

import pytest
import xarray as xr
from attention_inputs import OFFICIAL
from families import bridge_for
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import main
from repo_interp.experiments import Atlas, Effects, Extrapolation, Kinds, Perturbation, Saliency
from repo_interp.experiments.experiment_catalogue import experiment_named, experiment_names, planned
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.models.checkpoints import identify, load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.lengths.prompt_lengths import prompts_by_length
from repo_interp.plugins.three_axis.three_axis import ThreeAxis
from repo_interp.storage.store import Store
from repo_interp.tasks import Prompt, Response, make_task

TASK = make_task("reversal", longest=6, longest_test=12)
ANSWERED = TASK.prompts(1)[0]
SMALL = Perturbation(kinds=("text_order", "position_offset"), gammas=(0.5,), l_maxes=(2, 4))


@pytest.fixture(scope="module")
def bridge():
    found = bridge_for(TASK)
    # a bridge attaches hooks of its own in its first pass
    ri.analyze(found, TASK.prompts(1), ("positions",))
    return found


@pytest.mark.usefixtures("no_figures")
def test_the_run_file_holds_what_the_experiments_find_by_themselves(tmp_path):
    words = (
        "analyze reversal/repo --measures positions --count 4 "
        "--experiments perturbation,extrapolation --set perturbation.gammas=0.1,0.5 "
        "--set perturbation.l_maxes=2 --set extrapolation.sequences=4 --out"
    )
    assert main([*words.split(), str(tmp_path / "out")]) == 0
    run, path = ri.read_run(tmp_path / "out"), zoo_path("reversal/repo")
    assert {*run.children} == {"positions", "perturbation", "extrapolation", "output_traces"}
    task = trained_task(path)
    assert task is not None
    model, asked = load_model(identify(path)), Perturbation(gammas=(0.1, 0.5), l_maxes=(2,))
    xr.testing.assert_allclose(
        run["perturbation"].to_dataset(),
        asked.measured(as_decoder(model), task, task.prompts(4)),
        rtol=1e-4,
    )
    group = run["extrapolation"].to_dataset()
    assert group["method"].values.tolist() == ["plain", "lm_infinite", "interpolation", "yarn"]
    assert group["length"].values[0] <= run.attrs["training_length"] < group["length"].values[1]
    assert group.attrs["sequences"] == 4 and run["perturbation"].attrs["metric"] == "exact match"


@pytest.mark.usefixtures("no_figures")
def test_prompts_of_a_file_are_judged_by_what_they_mark(tmp_path, capsys):
    rows = [{"tokens": [*range(3, 43)]}, {"tokens": [*range(43, 3, -1)]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"analyze {OFFICIAL / 'repo_mha'} --measures positions --experiments perturbation --set "
        "perturbation.gammas=0.5 --set perturbation.l_maxes=3 --prompts"
    )
    assert main([*words.split(), f"{tmp_path}/p.jsonl", "--out", f"{tmp_path}/out"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "experiments perturbation (10 more passes)" in said
    group = ri.read_run(tmp_path / "out")["perturbation"]
    assert group.attrs["metric"] == "log perplexity" and group.attrs["higher_is_better"] == "False"
    assert_allclose(group["task_score"], group["log_perplexity"], rtol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "prompt", "experiment", "line"),
    [
        ("learned", ANSWERED, Extrapolation(), "learned table; leave it out"),
        ("cope", ANSWERED, Extrapolation(("lm_infinite",)), "this model's positions allow plain"),
        ("repo", Prompt((3, 4, 5)), Perturbation(), "nothing to predict for reversal"),
        ("repo", Prompt((3, 4), generated=(0,)), Perturbation(), "no token precedes token 0"),
        ("repo", Prompt((3, 4), generated=(0,)), Effects(), "no token precedes token 0"),
    ],
)
def test_a_model_or_prompts_without_what_is_measured_are_refused(scheme, prompt, experiment, line):
    with refused(line):
        planned(as_decoder(bridge_for(TASK, scheme)), [prompt], (experiment,), TASK)


class Stopped(KeyboardInterrupt):
    """What happens to a run in the middle."""


SMALLEST = {
    "perturbation": (SMALL, "inside a pass"),
    "extrapolation": (Extrapolation(sequences=4), "inside a pass"),
    "kinds": (Kinds(draws=1), "between points"),
    "effects": (Effects(kinds=("frozen",), draws=2), "between points"),
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
    (asked, where), store, hooks = SMALLEST[name], tmp_path / "s", []
    embed = as_decoder(bridge).stack.embed_tokens

    def analyzed(most=None, **options):
        """The group, and the number of passes; stopped in the last of `most` passes."""
        hooks.clear()

        def count(*_):
            hooks.append(hooks_of(bridge))
            if len(hooks) == most:
                raise Stopped

        options |= {"experiments": (asked,), "task": TASK}
        with embed.register_forward_hook(count):
            run = ri.analyze(bridge, TASK.prompts(4), (), **options)
        return run[name].to_dataset(), len(hooks)

    def interrupt(which, done, total):
        assert which == name
        if done == min(5, total - 1):
            raise Stopped

    def state():
        return hooks_of(bridge), [(one.requires_grad, one.grad) for one in bridge.parameters()]

    whole, passes = analyzed()
    for array in whole.data_vars.values():
        assert array.attrs["long_name"] and array.attrs["units"]
    before = state()
    inside = where == "inside a pass"
    stopping = {"most": passes} if inside else {"experiment_progress": interrupt}
    with pytest.raises(Stopped):
        analyzed(store=store, **stopping)
    assert not inside or max(hooks) > before[0] + 1, "the hooks of the experiment were there"
    assert state() == before and [*(store / name).glob("*.json")]
    again, passes_of_the_rest = analyzed(store=store)
    assert passes_of_the_rest < passes, "finished points were measured again"
    xr.testing.assert_identical(again, whole)
    assert not store.exists()


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
    (plan,) = planned(as_decoder(bridge), TASK.prompts(5), (asked,), TASK)
    rows = []
    embed = as_decoder(bridge).stack.embed_tokens
    with embed.register_forward_hook(lambda module, arguments, out: rows.append(len(out))):
        plan.run(2, Store(), None)
    assert sum(rows) == len(plan.passes)


def test_longer_prompts_of_a_task_are_those_of_its_longer_test_sets():
    trained = TASK.training_length
    judge, by_length = prompts_by_length(TASK, (), trained, (), 4, 0)
    longest = [max(len(one.tokens) for one in some) for some in by_length.values()]
    assert judge is TASK and longest == [*by_length] == sorted(by_length)
    assert longest[0] == trained and 2 <= len(longest) <= 4
    assert by_length[longest[-1]] == TASK.prompts(4, 0, "12")
    exact = prompts_by_length(TASK, (), trained, (longest[-1],), 4, 0)[1]
    assert [*exact] == [trained, longest[-1]]
    with refused("has no test set of 999 tokens"):
        prompts_by_length(TASK, (), trained, (999,), 4, 0)
    with refused("and beyond it"):
        prompts_by_length(TASK, (), 10_000, (), 4, 0)


def test_given_text_is_cut_to_every_length():
    prompts = [Prompt((*range(3, 3 + count),)) for count in (70, 80, 90, 100, 20)]

    def cut(training_length, lengths=()):
        return prompts_by_length(scoring_of(prompts), prompts, training_length, lengths, 16, 0)

    judge, by_length = cut(32)
    assert judge.metric == "log perplexity" and [*by_length] == [32, 64]
    assert [len(prompt.tokens) for prompt in by_length[64]] == [64] * 4
    assert by_length[32][0].tokens == prompts[0].tokens[:32]
    assert [*cut(50)[1]] == [50, 70]
    with refused("must reach beyond the training length, 32"):
        cut(32, (16,))


def test_given_prompts_are_scored_by_what_they_mark():
    marked = [Prompt((3, 4, 5), generated=(2,)), Prompt((3, 9), generated=(1,))]
    scoring, mixed = scoring_of(marked), scoring_of([*marked, Prompt((3, 4))])
    assert (scoring.metric, scoring.higher_is_better) == ("exact match", True)
    assert (mixed.metric, mixed.higher_is_better, mixed.units) == ("log perplexity", False, "nat")
    assert (scoring.targets(marked[0]), mixed.targets(marked[0])) == ((2,), (1, 2))
    assert scoring.score([Response((5,)), Response((8,))], marked).tolist() == [1, 0]
    assert mixed.score([Response((0, 0), (-1.0, -3.0))], marked[:1]).tolist() == [2]


def test_what_is_planned_is_not_planned_again(bridge):
    (plan,) = planned(as_decoder(bridge), TASK.prompts(4), (SMALL,), TASK)
    assert planned(as_decoder(bridge), TASK.prompts(4), (plan,), TASK) == [plan]
    run = ri.analyze(bridge, TASK.prompts(4), (), experiments=(plan,))
    assert run["perturbation"].attrs["task"] == "reversal"


def test_an_axis_that_was_chosen_stays_as_chosen(bridge):
    for measures, chosen in (
        (("maps", "three_axis"), False),
        (("maps", ThreeAxis()), True),
        (("three_axis",), True),
    ):
        run = ri.analyze(bridge, TASK.prompts(2), measures)
        assert ("distance_axis" not in run["three_axis"]) == chosen
