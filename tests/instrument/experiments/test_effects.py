"""What positions cause: exact passes from a layer on, effects against doing it by hand, screening
in closed form, refused and resumed.
"""

import dataclasses
import re
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import without_pictures
from families import TOKENS, bridge_for, tiny
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused
from scipy import stats
from torch.testing import assert_close

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.cli import main
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
from repo_interp.experiments.prompt_sets import Answers, scoring_of
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
            whole = model.model(TOKENS).last_hidden_state
            assert torch.equal(resume_pass(model, recording, layer), whole)
    assert hooks_of(model) == before
    assert torch.equal(model.model(TOKENS).last_hidden_state, recording.last_hidden)


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
    changes = [
        (np.mean(one.log_probabilities), TASK.score([one], [PROMPTS[number]])[0])
        for one in (after, before)
    ]
    return np.subtract(*changes)


@pytest.mark.parametrize("kind", KINDS[:6])
def test_effects_are_what_whole_passes_give(kind, group, model):
    own = group.sel(kind=kind)
    for layer, head, number in ((0, 1, 0), (1, 3, 2), (2, 2, 3)):
        log_probability, score = by_hand(model, kind, [(layer, head)], number)
        cell = own.sel(layer=layer, head=head, prompt=number)
        assert_allclose(cell["log_probability_change"], log_probability, atol=2e-6)
        assert float(cell["score_change"]) == score
    chosen = [(int(layer), int(head)) for layer, head in np.argwhere(own["in_set"].values)]
    layer = [(1, head) for head in range(4)]
    for name, heads, place in (
        ("layer_log_probability_change", layer, {"layer": 1, "prompt": 2}),
        ("set_log_probability_change", chosen, {"prompt": 3}),
    ):
        expected, _ = by_hand(model, kind, heads, place["prompt"])
        assert_allclose(own[name].sel(place), expected, atol=2e-6)


def test_the_group_is_consistent(group):
    change, controls = group["log_probability_change"], group["control_log_probability_change"]
    own = group["set_log_probability_change"] - controls.mean("draw")
    ends = stats.t.interval(0.95, len(PROMPTS) - 1, own.mean("prompt"), stats.sem(own, axis=1))
    for name, expected in {
        "effect": change.mean("prompt"),
        "effect_spread": change.std("prompt", ddof=1),
        "interaction": group["layer_effect"] - group["effect"].sum("head"),
        "control_effect": controls.mean("prompt"),
        "set_less_controls_change": own,
        "set_less_controls_low": ends[0],
        "set_less_controls_high": ends[1],
    }.items():
        assert_allclose(group[name], expected, atol=1e-12)
    (sets, _) = effect_tables(xr.DataTree.from_dict({"/effects": group}))
    place = sets.columns.index("less the others' mean")
    assert_allclose(
        [row[place : place + 3] for row in sets.rows],
        np.transpose([own.mean("prompt"), *ends]),
        atol=1e-9,
    )
    assert (group["in_set"].sum(("layer", "head")) == 4).all() and group.attrs["set_heads"] == 4
    heads, effect = ("layer", "head"), group["effect"]
    inside, outside = (effect.where(group["in_set"] == number) for number in (1, 0))
    assert (inside.max(heads) <= outside.min(heads)).all()
    # Positions of a RoPE layer are the index; other rows of a batch round otherwise.
    assert_allclose(effect.sel(kind="linearised", layer=0), 0, atol=1e-7)
    assert (effect.sel(kind=["linearised", "frozen", "permuted"], layer=[1, 2]) != 0).all()
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
    batch = Batch(model, Answers(), [prompt, dataclasses.replace(prompt, spans={})])
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


def test_the_screening_is_exact_to_first_order(model):
    """For a small change estimate and effect agree; gradient times change of positions and of
    outputs are then the same.
    """
    asked = Effects(("scaled",), scale=1.001, draws=1)
    group = asked.measured(model, TASK, PROMPTS, batch_size=4).sel(kind="scaled")
    exact = group["logit_difference_change"].mean("prompt").values
    for screening in ("positions", "output"):
        estimate = group["screened_effect"].sel(screening=screening).values
        assert_allclose(estimate, exact, atol=0.03 * np.abs(exact).max(), err_msg=screening)
        assert float(group["rank_correlation"].sel(screening=screening)) > 0.9
    still = Effects(("scaled",), scale=1.0, draws=1).measured(model, TASK, PROMPTS)
    assert_allclose(still["effect"], 0, atol=1e-6)
    assert not still["screened_effect"].any()


def test_of_many_heads_the_top_and_as_many_others_are_measured(model):
    few = Effects(("frozen", "linearised"), top=2, draws=2).measured(model, TASK, PROMPTS)
    assert (np.isfinite(few["effect"]).sum(("layer", "head")) == 4).all()
    assert np.isfinite(few["layer_effect"]).all() and np.isfinite(few["screened_effect"]).all()
    size = np.abs(few["screened_effect"].sel(kind="frozen", screening="output"))
    measured = np.isfinite(few["effect"].sel(kind="frozen"))
    assert (size > size.where(~measured).max()).sum() >= 2, "the largest are among the measured"
    heads = [(layer, head) for layer in range(10) for head in range(10)]
    screened = np.zeros((2, 10, 10, 1))
    screened[1, 3, 4:8] = -5
    chosen = to_confirm(screened, heads, 4, 0)
    assert len(chosen) == len(set(chosen)) == 8 and {(3, 4), (3, 5), (3, 6), (3, 7)} <= set(chosen)
    assert chosen != to_confirm(screened, heads, 4, 1)
    assert len(to_confirm(screened, heads, 0, 0)) == 32
    assert to_confirm(screened, heads, 100, 0) == heads


def test_controls_are_as_many_other_heads():
    effect = np.full((4, 4), np.nan)
    effect[2] = [-3, -1, -2, 0.5]
    heads = [(layer, head) for layer in range(4) for head in range(4)]
    chosen, *controls = sets_of_heads(effect, heads, 3, 5, 0)
    assert chosen == [(2, 0), (2, 2), (2, 1)]
    assert len(controls) == 5
    assert all(len(set(one)) == 3 and not {*one} & {*chosen} for one in controls)
    assert sets_of_heads(effect, heads, 3, 5, 0) == [chosen, *controls]
    assert sets_of_heads(effect, heads, 3, 5, 1)[1:] != controls
    assert len(sets_of_heads(effect, heads, 9, 5, 0)[0]) == 4, "no more than were measured"
    sets = sets_of_heads(effect, heads[8:14], 2, 9, 0)
    assert len(sets) == len({*map(tuple, sets)}) == 7, "all 6 pairs of the 4 others, each once"


def test_of_few_heads_every_other_set_is_measured_once_and_the_table_says_how_many_there_are():
    model = bridge_for(TASK, "n2r1").original_model
    group = Effects(kinds=("frozen",)).measured(model, TASK, PROMPTS)
    controls = group["control_effect"].squeeze("kind")
    assert controls.notnull().sum() == group.attrs["control_sets"] == 1
    assert controls.sizes["draw"] == 8
    run = xr.DataTree.from_dict({"/effects": group})
    assert "There are 1 different sets of as many other heads, not 8." in effect_tables(run)[0].note
    assert "2 others together: " in effect_maps(run).axes[0].get_title("left")


def test_kinds_are_what_they_say(model):
    longest, count = (len(PROMPTS[number].tokens) for number in (3, 0))
    padded = [prompt.tokens + (0,) * (longest - len(prompt.tokens)) for prompt in PROMPTS]
    whole = iv.positions_of(model, padded)[1][0]
    own = whole[:, :count]

    def under(kind, **options):
        """Positions of the first prompt, whose padding is left alone."""
        change = edit_prompts(model, kind, PROMPTS, range(4), Strength(**options))
        with iv.replaced(model, change, layer=1):
            changed = iv.positions_of(model, padded)[1][0]
        assert_close(changed[:, count:], whole[:, count:], msg=kind)
        return changed[:, :count]

    for kind in KINDS:
        under(kind)
    assert_close(under("frozen"), own.mean(-1, keepdim=True).expand_as(own))
    spread = own.amax(-1) - own.amin(-1)
    clipped = under("clipped")
    assert_close(clipped.amax(-1) - clipped.amin(-1), spread / 2)
    assert_close(under("swapped")[:, [0, 1, 2, 3]], own[:, [1, 0, 3, 2]])
    shifted = under("shifted", span="words", shift=2.0) - own
    words = list(PROMPTS[0].spans["words"])
    assert_close(shifted[:, words], (2 * spread)[:, None].expand(-1, len(words)))
    assert float(shifted.abs().sum()) == pytest.approx(float(shifted[:, words].abs().sum()))
    assert [partner(PROMPTS, number) for number in range(4)] == [1, 2, 3, 2]
    same_twice = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    assert partner(same_twice, 0) == 2, "its own positions would change nothing"
    (theirs,) = iv.positions_of(model, [PROMPTS[1].tokens])[1]
    assert_close(under("transplanted"), theirs, atol=1e-5, rtol=1e-4)
    assert_close(under("ranked"), own.argsort(-1).argsort(-1).float())
    starts = [end for span in PROMPTS[0].spans.values() for end in (span[0], span[-1] + 1)]
    numbers = torch.tensor([len({end for end in starts if 0 < end <= i}) for i in range(count)])
    assert_close(under("segmented")[0], numbers.float())
    assert_close(under("permuted").sort(-1).values, own.sort(-1).values)


def test_what_is_asked_by_default_changes_something():
    of_index = ("frozen", "permuted")
    for layout, kinds in (
        ("repo@1", ("linearised", *of_index)),
        ("rope", of_index),
        ("n2r1", of_index),
    ):
        assert default_kinds(bridge_for(TASK, layout)) == kinds


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
    asked = model if scheme is None else bridge_for(TASK, scheme)
    with refused(re.escape(message)):
        planned(asked, prompts, (Effects(**given),), TASK)


def test_the_cost_that_is_said_is_near_what_is_run(model):
    asked = Effects(kinds=("frozen", "permuted"), draws=4)
    (plan,) = planned(model, PROMPTS, (asked,), TASK)
    layers = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            count = lambda module, given, output: layers.append(len(output[0]))  # noqa: E731
            hooks.enter_context(layer.self_attn.register_forward_hook(count))
        plan.run(1, Store(), None)
    backward = 2 * len(PROMPTS)  # as much as two passes
    assert sum(layers) / 3 + backward == pytest.approx(len(plan.passes), rel=0.15)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "effects"
    words = (
        "analyze reversal/repo --measures positions --experiments effects --set effects.draws=4 "
        "--length 12 --count 6 --batch-size 6 --out"
    )
    with without_pictures():
        assert main([*words.split(), str(directory)]) == 0
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
    effect = run["effects"]["effect"].sel(kind="linearised", layer=2, head=0)
    assert heads.rows[0][:5] == ("token index", 2, 0, "RePo", float(effect))
    assert [one.values.attrs["units"] for one in VIEW.head_maps(run)] == ["nat"] * 3


def test_an_experiment_that_is_asked_for_twice_is_refused_before_anything_is_planned(model):
    """Found: it ran twice."""
    for given in (["effects", "effects"], ["effects", Effects(kinds=("frozen",))]):
        with refused("the experiment 'effects' was asked for twice"):
            ri.analyze(model, PROMPTS, ["positions"], experiments=given)
    with refused("there is no experiment 'nonsense'"):
        planned(model, PROMPTS, [Effects(span="no such", kinds=("shifted",)), "nonsense"])
