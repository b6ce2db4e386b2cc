"""What positions cause: exact passes from a layer on, effects against doing it by hand, screening
in closed form, refused and resumed.
"""

import dataclasses

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import without_pictures
from families import TOKENS, bridge_for, tiny
from hooks import hooks_of
from numpy.testing import assert_allclose
from scipy import stats
from torch.testing import assert_close

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.cli import main
from repo_interp.errors import InputError
from repo_interp.experiments import Effects, readings
from repo_interp.experiments.catalogue import planned
from repo_interp.experiments.effects import sets_of_heads, to_confirm
from repo_interp.experiments.position_changes import (
    KINDS,
    Strength,
    default_kinds,
    edit_prompts,
    partner,
)
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.experiments.readings import Batch
from repo_interp.experiments.responses import forced_responses
from repo_interp.models.decoder import as_decoder
from repo_interp.models.resuming import record_pass, resume_pass
from repo_interp.plots.views.effects import VIEW, effect_maps, effect_tables
from repo_interp.side_by_side import WORTHWHILE
from repo_interp.store import Store
from repo_interp.tasks import Prompt, make_task

TASK = make_task("reversal", longest=6, longest_test=12)
PROMPTS = [*TASK.prompts(2, test_set="4"), *TASK.prompts(2, seed=1, test_set="6")]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return bridge_for(TASK).original_model


@pytest.fixture(scope="module")
def group(model):
    return Effects(KINDS[:6], draws=3).measured(model, TASK, PROMPTS, batch_size=2)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "olmo3", "gemma2", "gemma3", "smollm3"])
def test_a_pass_from_a_layer_on_is_the_whole_pass_to_the_last_bit(family):
    model = ri.reposition(tiny(family), "repo@1")
    recording = record_pass(model, TOKENS)
    assert torch.equal(recording.last_hidden, model.model(TOKENS).last_hidden_state)
    before = hooks_of(model)
    for layer in range(3):
        assert torch.equal(resume_pass(model, recording, layer), recording.last_hidden)
        with iv.frozen(model, layer=layer):
            assert torch.equal(
                resume_pass(model, recording, layer), model.model(TOKENS).last_hidden_state
            )
    assert hooks_of(model) == before and torch.equal(
        model.model(TOKENS).last_hidden_state, recording.last_hidden
    )


@torch.no_grad()
def test_so_it_is_inside_a_bridge_and_after_an_error():
    bridge = ri.bridge(ri.reposition(tiny("llama"), "learned"))
    recording = record_pass(bridge, TOKENS)
    for layer in range(3):
        assert torch.equal(resume_pass(bridge, recording, layer), recording.last_hidden)
    handle = as_decoder(bridge).stack.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume_pass(bridge, recording, 1)
    handle.remove()
    assert torch.equal(as_decoder(bridge).stack(TOKENS).last_hidden_state, recording.last_hidden)


def by_hand(model, kind, heads, number, strength=None):
    """Changes of log-probability and score of one prompt, by whole passes of this prompt alone."""
    change = edit_prompts(model, kind, PROMPTS, [number], strength or Strength())
    (before,) = forced_responses(model, TASK, [PROMPTS[number]])
    with iv.replaced(model, change, heads):
        (after,) = forced_responses(model, TASK, [PROMPTS[number]])
    scores = (TASK.score([one], [PROMPTS[number]])[0] for one in (after, before))
    return np.mean(after.log_probabilities) - np.mean(before.log_probabilities), next(
        scores
    ) - next(scores)


@pytest.mark.parametrize("kind", KINDS[:6])
def test_effects_are_what_whole_passes_give(kind, group, model):
    own = group.sel(kind=kind)
    for layer, head, number in ((0, 1, 0), (1, 3, 2), (2, 2, 3)):
        log_probability, score = by_hand(model, kind, [(layer, head)], number)
        cell = own.sel(layer=layer, head=head, prompt=number)
        assert float(cell["log_probability_change"]) == pytest.approx(log_probability, abs=2e-6)
        assert float(cell["score_change"]) == score
    whole = by_hand(model, kind, [(1, head) for head in range(4)], 2)[0]
    assert float(own["layer_log_probability_change"].sel(layer=1, prompt=2)) == pytest.approx(
        whole, abs=2e-6
    )
    chosen = [(int(layer), int(head)) for layer, head in np.argwhere(own["in_set"].values)]
    assert float(own["set_log_probability_change"].sel(prompt=3)) == pytest.approx(
        by_hand(model, kind, chosen, 3)[0], abs=2e-6
    )


def test_the_group_is_consistent(group):
    change = group["log_probability_change"]
    assert_allclose(group["effect"], change.mean("prompt"), atol=1e-12)
    assert_allclose(group["effect_spread"], change.std("prompt", ddof=1), atol=1e-12)
    assert_allclose(
        group["interaction"], group["layer_effect"] - group["effect"].sum("head"), atol=1e-12
    )
    assert_allclose(
        group["control_effect"], group["control_log_probability_change"].mean("prompt"), atol=1e-12
    )
    own = group["set_log_probability_change"] - group["control_log_probability_change"].mean("draw")
    assert_allclose(group["set_less_controls_change"], own, atol=1e-12)
    ends = stats.t.interval(0.95, len(PROMPTS) - 1, own.mean("prompt"), stats.sem(own, axis=1))
    for name, end in zip(("low", "high"), ends, strict=True):
        assert_allclose(group[f"set_less_controls_{name}"], end, atol=1e-12)
    (sets, _) = effect_tables(xr.DataTree.from_dict({"/effects": group}))
    place = sets.columns.index("less the others' mean")
    assert_allclose(
        [row[place : place + 3] for row in sets.rows],
        np.transpose([own.mean("prompt"), *ends]),
        atol=1e-9,
    )
    assert (group["in_set"].sum(("layer", "head")) == 4).all() and group.attrs["set_heads"] == 4
    for kind in group["kind"].values:
        own = group.sel(kind=kind)
        assert (
            own["effect"].values[own["in_set"].values == 1].max()
            <= own["effect"].values[own["in_set"].values == 0].min()
        )
    # Positions of a RoPE layer are the index; other rows of a batch round otherwise.
    assert_allclose(group["effect"].sel(kind="linearised", layer=0), 0, atol=1e-7)
    assert (
        float(
            np.abs(
                group["effect"].sel(kind=["linearised", "frozen", "permuted"], layer=[1, 2])
            ).min()
        )
        > 0
    )
    assert group["scheme"].values.tolist() == ["rope", "repo", "repo"]


def test_many_edits_are_rows_of_one_pass(model, group, monkeypatch):
    """As many passes as there are first layers, and the same numbers as one edit at a time."""
    passes = []
    with as_decoder(model).stack.register_forward_hook(lambda *_: passes.append(1)):
        counts = {}
        for tokens in (1, 4096):
            monkeypatch.setitem(WORTHWHILE, "cpu", tokens)
            passes.clear()
            read = Effects(KINDS[:6], draws=3).measured(model, TASK, PROMPTS, batch_size=2)
            counts[tokens] = len(passes)
            for name, array in read.data_vars.items():
                assert_allclose(array, group[name], atol=1e-5, rtol=1e-4, err_msg=str(name))
    batches, kinds, screening, heads, sets = 2, 6, 2, 12, 4
    assert counts[1] == batches * (screening + 2 + kinds * (heads + 3 + sets))
    assert counts[4096] <= batches * (screening + 2 + kinds * (3 + 3))


def test_few_logits_at_a_time_read_the_same(model, group, monkeypatch):
    monkeypatch.setattr(readings, "MOST_LOGITS", 3 * model.config.vocab_size)
    read = Effects(("frozen",), draws=1).measured(model, TASK, PROMPTS, batch_size=2)
    assert_allclose(
        read["log_probability_change"][0],
        group["log_probability_change"].sel(kind="frozen"),
        atol=1e-5,
    )


def test_the_logit_difference_is_to_the_strongest_other_candidate(group, model):
    prompt = PROMPTS[3]
    with torch.no_grad():
        logits = model(torch.tensor([prompt.tokens])).logits[0]
    places = list(prompt.generated)
    answer = torch.tensor(prompt.tokens)[places]
    rows = logits[[place - 1 for place in places]]
    others = rows.clone()
    others[range(len(places)), answer] = -torch.inf
    expected = float((rows[range(len(places)), answer] - others.amax(-1)).mean())
    assert float(group["clean_logit_difference"].sel(prompt=3)) == pytest.approx(expected, abs=1e-5)


def test_where_a_prompt_has_distractors_these_are_the_candidates():
    prompt = Prompt(
        tokens=(1, 8, 8, 20, 9, 8, 8, 30, 31, 3, 20),
        spans={"needle": (1, 2, 3), "distractor": (5, 6, 7, 8)},
        generated=(10,),
    )
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), "rope")
    batch = Batch(model, answers(), [prompt, dataclasses.replace(prompt, spans={})])
    logits = torch.arange(64.0).repeat(2, 1)
    assert batch.logit_difference(logits).tolist() == [20 - 31, 20 - 63]


def test_text_that_marks_a_distractor_and_no_answer_has_a_finite_logit_difference(model):
    """Found: the token in the distractor is a target too, and had no candidate beside it: infinite,
    and its changes NaN.
    """
    prompts = [
        Prompt((1, 5, 9, 4, 7, 3), {"distractor": (2,)}),
        Prompt((1, 5, 9, 4, 8, 3), {"distractor": (2, 3)}, (5,)),
    ]
    plain = [Prompt(prompt.tokens) for prompt in prompts]
    marked, unmarked = (
        Effects(("frozen",), draws=1).measured(model, scoring_of(some), some)
        for some in (prompts, plain)
    )
    xr.testing.assert_equal(marked, unmarked)
    assert np.isfinite(marked["clean_logit_difference"]).all()


def answers():
    from repo_interp.experiments.prompt_sets import Answers

    return Answers()


def test_the_screening_is_exact_to_first_order(model):
    """For a small change estimate and effect agree; gradient times change of positions and of
    outputs are then the same.
    """
    group = (
        Effects(("scaled",), scale=1.001, draws=1)
        .measured(model, TASK, PROMPTS, batch_size=4)
        .sel(kind="scaled")
    )
    exact = group["logit_difference_change"].mean("prompt").values
    for screening in ("positions", "output"):
        estimate = group["screened_effect"].sel(screening=screening).values
        assert_allclose(estimate, exact, atol=0.03 * np.abs(exact).max(), err_msg=screening)
        assert float(group["rank_correlation"].sel(screening=screening)) > 0.9
    still = Effects(("scaled",), scale=1.0, draws=1).measured(model, TASK, PROMPTS)
    assert (
        float(np.abs(still["effect"]).max()) < 1e-6
        and float(np.abs(still["screened_effect"]).max()) == 0
    )


def test_of_many_heads_the_top_and_as_many_others_are_measured(model):
    few = Effects(("frozen", "linearised"), top=2, draws=2).measured(model, TASK, PROMPTS)
    assert (np.isfinite(few["effect"]).sum(("layer", "head")) == 4).all()
    assert np.isfinite(few["layer_effect"]).all() and np.isfinite(few["screened_effect"]).all()
    size = np.abs(few["screened_effect"].sel(kind="frozen", screening="output"))
    measured = np.isfinite(few["effect"].sel(kind="frozen"))
    assert int((size > float(size.where(~measured).max())).sum()) >= 2, (
        "the largest estimates are among the measured"
    )
    heads = [(layer, head) for layer in range(10) for head in range(10)]
    screened = np.zeros((2, 10, 10, 1))
    screened[1, 3, 4:8] = -5
    chosen = to_confirm(screened, heads, 4, 0)
    assert len(chosen) == len(set(chosen)) == 8 and {(3, 4), (3, 5), (3, 6), (3, 7)} <= set(chosen)
    assert (
        chosen != to_confirm(screened, heads, 4, 1) and len(to_confirm(screened, heads, 0, 0)) == 32
    )
    assert to_confirm(screened, heads, 100, 0) == heads


def test_controls_are_as_many_other_heads():
    effect = np.full((4, 4), np.nan)
    effect[2] = [-3, -1, -2, 0.5]
    heads = [(layer, head) for layer in range(4) for head in range(4)]
    chosen, *controls = sets_of_heads(effect, heads, 3, 5, 0)
    assert chosen == [(2, 0), (2, 2), (2, 1)]
    assert len(controls) == 5 and all(
        len(set(one)) == 3 and not set(one) & set(chosen) for one in controls
    )
    assert (
        sets_of_heads(effect, heads, 3, 5, 0)[1:]
        == controls
        != sets_of_heads(effect, heads, 3, 5, 1)[1:]
    )
    assert len(sets_of_heads(effect, heads, 9, 5, 0)[0]) == 4, "no more than were measured"
    sets = sets_of_heads(effect, heads[8:14], 2, 9, 0)
    assert len(sets) == len({tuple(one) for one in sets}) == 7, (
        "all 6 pairs of the 4 others, each once"
    )


def test_of_few_heads_every_other_set_is_measured_once_and_the_table_says_how_many_there_are():
    group = Effects(kinds=("frozen",)).measured(
        bridge_for(TASK, "n2r1").original_model, TASK, PROMPTS
    )
    controls = group["control_effect"].squeeze("kind")
    assert (
        controls.notnull().sum() == group.attrs["control_sets"] == 1 and controls.sizes["draw"] == 8
    )
    run = xr.DataTree.from_dict({"/effects": group})
    assert "There are 1 different sets of as many other heads, not 8." in effect_tables(run)[0].note
    assert "2 others together: " in effect_maps(run).axes[0].get_title("left")


def test_kinds_are_what_they_say(model):
    own = iv.positions_of(
        model,
        [
            prompt.tokens + (0,) * (len(PROMPTS[3].tokens) - len(prompt.tokens))
            for prompt in PROMPTS
        ],
    )[1]
    count = len(PROMPTS[0].tokens)

    def under(kind, **options):
        change = edit_prompts(model, kind, PROMPTS, range(4), Strength(**options))
        with iv.replaced(model, change, layer=1):
            padded = [
                prompt.tokens + (0,) * (len(PROMPTS[3].tokens) - len(prompt.tokens))
                for prompt in PROMPTS
            ]
            return iv.positions_of(model, padded)[1]

    for kind in KINDS:
        assert_close(
            under(kind)[0, :, count:], own[0, :, count:], msg=f"{kind}: padding is left alone"
        )
    assert_close(
        under("frozen")[0, :, :count], own[0, :, :count].mean(-1, keepdim=True).expand(-1, count)
    )
    low, high = own[0, :, :count].amin(-1), own[0, :, :count].amax(-1)
    clipped = under("clipped")[0, :, :count]
    assert_close(clipped.amax(-1) - clipped.amin(-1), (high - low) / 2)
    assert_close(under("swapped")[0, :, [0, 1, 2, 3]], own[0, :, [1, 0, 3, 2]])
    shifted = under("shifted", span="words", shift=2.0)[0] - own[0]
    words = list(PROMPTS[0].spans["words"])
    assert_close(shifted[:, words], (2 * (high - low))[:, None].expand(-1, len(words)))
    assert float(shifted.abs().sum()) == pytest.approx(float(shifted[:, words].abs().sum()))
    assert [partner(PROMPTS, number) for number in range(4)] == [1, 2, 3, 2]
    assert partner([PROMPTS[0], PROMPTS[0], PROMPTS[1]], 0) == 2, (
        "its own positions would change nothing"
    )
    theirs = iv.positions_of(model, [PROMPTS[1].tokens])[1]
    assert_close(under("transplanted")[0, :, :count], theirs[0], atol=1e-5, rtol=1e-4)
    ranks = own[0, :, :count].argsort(-1).argsort(-1).float()
    assert_close(under("ranked")[0, :, :count], ranks)
    starts = [end for span in PROMPTS[0].spans.values() for end in (span[0], span[-1] + 1)]
    numbers = torch.tensor([len({end for end in starts if 0 < end <= i}) for i in range(count)])
    assert_close(under("segmented")[0, 0, :count], numbers.float())
    permuted = under("permuted")[:, 0]
    assert_close(permuted[0, :count].sort().values, own[0, 0, :count].sort().values)


def test_what_is_asked_by_default_changes_something():
    assert default_kinds(bridge_for(TASK, "repo@1")) == ("linearised", "frozen", "permuted")
    assert (
        default_kinds(bridge_for(TASK, "rope"))
        == default_kinds(bridge_for(TASK, "n2r1"))
        == ("frozen", "permuted")
    )


REFUSED = {
    "no other prompt has as many tokens as prompt 1": {
        "kinds": ("transplanted",),
        "prompts": [PROMPTS[0], PROMPTS[3]],
    },
    "prompt 0 has no spans, which are its segments": {
        "kinds": ("segmented",),
        "prompts": [Prompt((3, 4, 5), generated=(2,))],
    },
    "prompt 0 has no span 'needle'": {"kinds": ("shifted",), "span": "needle"},
    "nothing stands before token 0 of prompt 0": {
        "prompts": [Prompt((3, 4, 5), generated=(0, 2))]
    },  # was read from the last token
    "nothing to predict for reversal": {"prompts": [Prompt(tokens=(3, 4, 5))]},
    "no layer of this model (nope) assigns positions": {"scheme": "nope"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_is_run(message, model):
    given = dict(REFUSED[message])
    prompts, scheme = given.pop("prompts", PROMPTS), given.pop("scheme", None)
    with pytest.raises(InputError) as refused:
        planned(
            model if scheme is None else bridge_for(TASK, scheme),
            prompts,
            (Effects(**given),),
            TASK,
        )
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_cost_that_is_said_is_near_what_is_run(model):
    asked = Effects(kinds=("frozen", "permuted"), draws=4)
    (plan,) = planned(model, PROMPTS, (asked,), TASK)
    layers = []
    handles = [
        layer.self_attn.register_forward_hook(
            lambda module, arguments, output: layers.append(len(output[0]))
        )
        for layer in model.model.layers
    ]
    plan.run(1, Store(), None)
    for handle in handles:
        handle.remove()
    backward = 2 * len(PROMPTS)  # as much as two passes
    assert sum(layers) / 3 + backward == pytest.approx(len(plan.passes), rel=0.15)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "effects"
    options = [
        "--measures",
        "positions",
        "--experiments",
        "effects",
        "--length",
        "12",
        "--count",
        "6",
        "--batch-size",
        "6",
    ]
    with without_pictures():
        assert (
            main(
                [
                    "analyze",
                    "reversal/repo",
                    *options,
                    "--set",
                    "effects.draws=4",
                    "--out",
                    str(directory),
                ]
            )
            == 0
        )
    return directory


def test_linearising_the_heads_that_matter_breaks_reversal_and_as_many_others_do_not(results):
    group = ri.read_run(results)["effects"].to_dataset()
    own = group.sel(kind="linearised")
    assert np.argwhere(own["in_set"].values).tolist() == [[2, head] for head in range(4)]
    assert (own["set_score_change"] == -1).all() and (own["control_score_change"] == 0).all()
    assert float(own["set_effect"]) < -5 and float(np.abs(own["control_effect"]).max()) < 0.01
    assert group.attrs["draws"] == 4 and group.attrs["task"] == "reversal"


def test_the_run_has_figures_tables_and_a_section(results):
    figures = {path.name for path in (results / "figures").iterdir()}
    assert {f"effects_{name}.png" for name in ("by_head", "of_sets", "screening")} <= figures
    page = (results / "report.html").read_text(encoding="utf-8")
    assert '<section id="effects"' in page and "most needed 4 heads" in page
    run = ri.read_run(results)
    summary, heads = effect_tables(run)
    assert [row[0] for row in summary.rows] == ["token index", "all the same", "in random order"]
    assert heads.rows[0][:4] == ("token index", 2, 0, "RePo") and heads.rows[0][4] == float(
        run["effects"]["effect"].sel(kind="linearised", layer=2, head=0)
    )
    assert [one.values.attrs["units"] for one in VIEW.head_maps(run)] == ["nat"] * 3


def test_an_experiment_that_is_asked_for_twice_is_refused_before_anything_is_planned(model):
    """Found: it ran twice."""
    for given in (["effects", "effects"], ["effects", Effects(kinds=("frozen",))]):
        with pytest.raises(InputError, match="the experiment 'effects' was asked for twice"):
            ri.analyze(model, PROMPTS, ["positions"], experiments=given)
    with pytest.raises(InputError, match="there is no experiment 'nonsense'"):
        planned(model, PROMPTS, [Effects(span="no such", kinds=("shifted",)), "nonsense"])
