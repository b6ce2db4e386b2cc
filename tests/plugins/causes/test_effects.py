"""What positions cause: exact passes from a layer on, effects against doing it by hand, screening
in closed form, refused and resumed.
"""

import re
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from families import TOKENS, bridge_for, model_for, tiny
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused
from scipy import stats
from torch.testing import assert_close

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.experiments import Effects, readings
from repo_interp.experiments.experiment_catalogue import planned
from repo_interp.experiments.position_changes import (
    KINDS,
    EditedPrompts,
    Strength,
    default_kinds,
)
from repo_interp.experiments.prompt_sets import Answers
from repo_interp.experiments.readings import AnswerBatch
from repo_interp.experiments.responses import forced_responses
from repo_interp.models.decoder import as_decoder
from repo_interp.models.resuming import record_pass, resume_pass
from repo_interp.models.side_by_side import WORTHWHILE
from repo_interp.plugins.causes.effects import drawn_sets, sets_of_heads, to_confirm
from repo_interp.plugins.causes.effects_view import VIEW, effect_maps, effect_tables
from repo_interp.storage.store import Store
from repo_interp.tasks import Prompt, make_task

TASK = make_task("reversal", longest=6, longest_test=12)
UNMARKED = Prompt((3, 4, 5), generated=(2,))
MEASURED = ("linearised", "frozen", "permuted")
PROMPTS = [*TASK.prompts(2, test_set="4"), *TASK.prompts(2, seed=1, test_set="6")]


@pytest.fixture(scope="module")
def model():
    return model_for(TASK)


@pytest.fixture(scope="module")
def group(model):
    """Read a few logits at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings, "MOST_LOGITS", 3 * model.config.vocab_size)
        return Effects(MEASURED, draws=3).measured(as_decoder(model), TASK, PROMPTS, batch_size=2)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "smollm3"])
def test_a_pass_from_a_layer_on_is_the_whole_pass_to_the_last_bit(family):
    model = ri.reposition(tiny(family), "repo@1")
    recording = record_pass(as_decoder(model), TOKENS)
    assert torch.equal(recording.last_hidden, model.model(TOKENS).last_hidden_state)
    before = hooks_of(model)
    for layer in range(3):
        assert torch.equal(resume_pass(as_decoder(model), recording, layer), recording.last_hidden)
        with iv.frozen(model, layer=layer):
            whole = model.model(TOKENS).last_hidden_state
            assert torch.equal(resume_pass(as_decoder(model), recording, layer), whole)
    assert hooks_of(model) == before
    assert torch.equal(model.model(TOKENS).last_hidden_state, recording.last_hidden)


@torch.no_grad()
def test_so_it_is_inside_a_bridge_and_after_an_error():
    bridge = ri.bridge(ri.reposition(tiny("llama"), "learned"))
    recording = record_pass(as_decoder(bridge), TOKENS)
    for layer in range(3):
        assert torch.equal(resume_pass(as_decoder(bridge), recording, layer), recording.last_hidden)
    handle = as_decoder(bridge).stack.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume_pass(as_decoder(bridge), recording, 1)
    handle.remove()
    assert torch.equal(as_decoder(bridge).stack(TOKENS).last_hidden_state, recording.last_hidden)


def by_hand(model, kind, heads, number):
    """Changes of log-probability and score of one prompt, by whole passes of this prompt alone."""
    change, prompts = (
        EditedPrompts(as_decoder(model), PROMPTS, [number], Strength()).edit(kind),
        [PROMPTS[number]],
    )
    with iv.replaced(model, change, heads):
        after = forced_responses(model, TASK, prompts)
    changes = [
        (np.mean(some[0].log_probabilities), TASK.score(some, prompts)[0])
        for some in (after, forced_responses(model, TASK, prompts))
    ]
    return np.subtract(*changes)


@pytest.mark.parametrize("kind", MEASURED)
def test_effects_are_what_whole_passes_give(kind, group, model):
    own = group.sel(kind=kind)
    chosen = [(int(layer), int(head)) for layer, head in np.argwhere(own["in_set"].values)]
    for name, heads, place in (
        ("", [(0, 1)], {"layer": 0, "head": 1, "prompt": 0}),
        ("", [(2, 2)], {"layer": 2, "head": 2, "prompt": 3}),
        ("layer_", [(1, head) for head in range(4)], {"layer": 1, "prompt": 2}),
        ("set_", chosen, {"prompt": 3}),
    ):
        found = own.sel(place)
        log_probability, score = by_hand(model, kind, heads, place["prompt"])
        assert_allclose(found[f"{name}log_probability_change"], log_probability, atol=2e-6)
        assert float(found[f"{name}score_change"]) == score


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
    sets, *_ = effect_tables(xr.DataTree.from_dict({"/effects": group}))
    place = sets.columns.index("less the others' mean")
    shown = [row[place : place + 3] for row in sets.rows]
    assert_allclose(shown, np.transpose([own.mean("prompt"), *ends]), atol=1e-9)
    heads, effect = ("layer", "head"), group["effect"]
    assert (group["in_set"].sum(heads) == 4).all() and group.attrs["set_heads"] == 4
    inside, outside = (effect.where(group["in_set"] == number) for number in (1, 0))
    assert (inside.max(heads) <= outside.min(heads)).all()
    # Positions of a RoPE layer are the index; other rows of a batch round otherwise.
    assert_allclose(effect.sel(kind="linearised", layer=0), 0, atol=1e-7)
    assert (effect.sel(layer=[1, 2]) != 0).all()
    assert group["scheme"].values.tolist() == ["rope", "repo", "repo"]


def test_many_edits_are_rows_of_one_pass(model, group, monkeypatch):
    """As many passes as there are first layers, and the same numbers as one edit at a time."""
    batches, kinds, screening, heads, sets = 2, len(MEASURED), 2, 12, 4
    passes = []
    with as_decoder(model).stack.register_forward_hook(lambda *_: passes.append(1)):
        for tokens, most in ((1, kinds * (heads + 3 + sets)), (4096, kinds * (3 + 3))):
            monkeypatch.setitem(WORTHWHILE, "cpu", tokens)
            passes.clear()
            read = Effects(MEASURED, draws=3).measured(
                as_decoder(model), TASK, PROMPTS, batch_size=2
            )
            assert len(passes) <= batches * (screening + 2 + most)
            for name, array in read.data_vars.items():
                assert_allclose(array, group[name], atol=1e-5, rtol=1e-4, err_msg=str(name))


def test_the_logit_difference_is_to_the_strongest_other_candidate(group, model):
    prompt, of_places = PROMPTS[3], []
    with torch.no_grad():
        logits = model(torch.tensor([prompt.tokens])).logits[0]
    for place in prompt.generated:
        row, answer = logits[place - 1], prompt.tokens[place]
        of_places.append(row[answer] - torch.cat([row[:answer], row[answer + 1 :]]).max())
    found = float(group["clean_logit_difference"].sel(prompt=3))
    assert found == pytest.approx(float(sum(of_places)) / len(of_places), abs=1e-5)


def test_distractors_of_a_prompt_are_the_candidates_beside_the_answer():
    """Found: an answer that stood in the only distractor had no candidate beside it: infinite."""
    tokens = (1, 8, 8, 20, 9, 8, 8, 30, 31, 3, 20)
    spans = {"needle": (1, 2, 3), "distractor": (5, 6, 7, 8)}, {}, {"distractor": (3,)}
    prompts = [Prompt(tokens, some, (10,)) for some in spans]
    batch = AnswerBatch(as_decoder(ri.reposition(tiny("llama"), "rope")), Answers(), prompts)
    logits = torch.arange(64.0).repeat(3, 1)
    assert batch.logit_difference(logits).tolist() == [20 - 31, 20 - 63, 20 - 63]


def test_the_screening_is_exact_to_first_order(model):
    """For a small change estimate and effect agree; gradient times change of positions and of
    outputs are then the same.
    """
    asked = Effects(("scaled",), scale=1.001, draws=1)
    group = asked.measured(as_decoder(model), TASK, PROMPTS, batch_size=4).sel(kind="scaled")
    exact = group["logit_difference_change"].mean("prompt").values
    for screening in ("positions", "output"):
        estimate = group["screened_effect"].sel(screening=screening).values
        assert_allclose(estimate, exact, atol=0.03 * np.abs(exact).max(), err_msg=screening)
        assert float(group["rank_correlation"].sel(screening=screening)) > 0.9
    still = Effects(("scaled",), scale=1.0, draws=1).measured(as_decoder(model), TASK, PROMPTS)
    assert_allclose(still["effect"], 0, atol=1e-6)
    assert not still["screened_effect"].any()


def test_of_many_heads_the_top_and_as_many_others_are_measured(model):
    few = (
        Effects(("frozen",), top=2, draws=2)
        .measured(as_decoder(model), TASK, PROMPTS)
        .squeeze("kind")
    )
    measured = np.isfinite(few["effect"])
    assert measured.sum() == 4
    assert np.isfinite(few["layer_effect"]).all() and np.isfinite(few["screened_effect"]).all()
    size = np.abs(few["screened_effect"].sel(screening="output"))
    assert (size > size.where(~measured).max()).sum() >= 2, "the largest are among the measured"
    heads = [(layer, head) for layer in range(10) for head in range(10)]
    screened = np.zeros((2, 10, 10, 1))
    screened[1, 3, 4:8] = -5
    chosen = to_confirm(screened, heads, 4, 0)
    assert len({*chosen}) == 8 and {(3, 4), (3, 5), (3, 6), (3, 7)} <= {*chosen}
    assert chosen != to_confirm(screened, heads, 4, 1)
    assert len(to_confirm(screened, heads, 0, 0)) == 32
    assert to_confirm(screened, heads, 100, 0) == heads


def test_controls_are_as_many_other_heads():
    effect = np.full((4, 4), np.nan)
    effect[2] = [-3, -1, -2, 0.5]
    heads = [(layer, head) for layer in range(4) for head in range(4)]
    chosen, *controls = sets_of_heads(effect, heads, 3, 5, 0)
    assert chosen == [(2, 0), (2, 2), (2, 1)] and len(controls) == 5
    assert all(len({*one}) == 3 and not {*one} & {*chosen} for one in controls)
    assert sets_of_heads(effect, heads, 3, 5, 0) == [chosen, *controls]
    assert sets_of_heads(effect, heads, 3, 5, 1)[1:] != controls
    assert len(sets_of_heads(effect, heads, 9, 5, 0)[0]) == 4, "no more than were measured"
    sets = sets_of_heads(effect, heads[8:14], 2, 9, 0)
    assert len(sets) == len({*map(tuple, sets)}) == 7, "all 6 pairs of the 4 others, each once"
    assert drawn_sets(["a"], 2, 5, 1) == [], "too few others"


def test_of_few_heads_every_other_set_is_measured_once_and_the_table_says_how_many_there_are():
    model = model_for(TASK, "n2r1")
    group = Effects(kinds=("frozen",)).measured(as_decoder(model), TASK, PROMPTS)
    controls = group["control_effect"].squeeze("kind")
    assert controls.notnull().sum() == group.attrs["control_sets"] == 1
    assert controls.sizes["draw"] == 8
    run = xr.DataTree.from_dict({"/effects": group})
    assert "There are 1 different sets of as many other heads, not 8." in effect_tables(run)[0].note
    assert "2 other heads at once: " in effect_maps(run).axes[0].get_title("left")


def test_kinds_are_the_interventions_on_the_tokens_of_each_prompt(model):
    """On the first of padded prompts, whose padding is left alone."""
    own, longest = PROMPTS[0], len(PROMPTS[3].tokens)
    padded = [prompt.tokens + (0,) * (longest - len(prompt.tokens)) for prompt in PROMPTS]
    count, strength = len(own.tokens), Strength(span="words", shift=2.0)

    def under(context, tokens):
        with context:
            return iv.positions_of(model, tokens)[1][0]

    some = EditedPrompts(as_decoder(model), PROMPTS, range(4), strength)

    def changed(kind):
        return under(iv.replaced(model, some.edit(kind), layer=1), padded)

    whole = under(torch.no_grad(), padded)
    plain = whole[:, :count]
    low, high = plain.amin(-1, keepdim=True), plain.amax(-1, keepdim=True)
    quarter = (high - low) / 4
    words = torch.isin(torch.arange(count), torch.tensor(own.spans["words"]))
    closed_forms = {
        "frozen": plain.mean(-1, keepdim=True),
        "clipped": plain.clamp(low + quarter, high - quarter),
        "shifted": plain + 2 * (high - low) * words,
    }
    pairs = [place ^ 1 if place ^ 1 < count else place for place in range(count)]
    ends = [end for span in own.spans.values() for end in (span[0], span[-1] + 1)]
    theirs = iv.positions_of(model, [PROMPTS[1].tokens])
    contexts = {
        "linearised": iv.linearised(model, layer=1),
        "straightened": iv.straightened(model, layer=1),
        "swapped": iv.permuted(model, layer=1, order=pairs),
        "scaled": iv.scaled(model, 0.5, layer=1),
        "rounded": iv.rounded(model, layer=1),
        "transplanted": iv.transplanted(model, theirs, layer=1),
        "ranked": iv.ranked(model, layer=1),
        "segmented": iv.segmented(model, sorted({*ends} - {count}), layer=1),
    }
    by_hand = {kind: under(context, [own.tokens]) for kind, context in contexts.items()}
    assert {*by_hand, *closed_forms, "permuted"} == {*KINDS}
    for kind, expected in (by_hand | closed_forms).items():
        expected = torch.cat([expected.expand_as(plain), whole[:, count:]], 1)
        assert_close(changed(kind), expected, atol=1e-5, rtol=1e-4, msg=kind)
    assert_close(changed("permuted").sort(-1).values, whole.sort(-1).values)
    assert [some.partner(number) for number in range(4)] == [1, 2, 3, 2]
    same_twice = replace(some, prompts=[own, own, PROMPTS[1]])
    assert same_twice.partner(0) == 2, "its own positions would change nothing"


@pytest.mark.parametrize(("layout", "learned"), [("repo@1", ("linearised",)), ("n2r1", ())])
def test_what_is_asked_by_default_changes_something(layout, learned):
    assert default_kinds(as_decoder(model_for(TASK, layout))) == (*learned, "frozen", "permuted")


@pytest.mark.parametrize(
    ("line", "scheme", "prompts", "asked"),
    [
        ("as many tokens as prompt 1", "repo@1", PROMPTS[::3], {"kinds": ("transplanted",)}),
        ("prompt 0 has no spans", "repo@1", [UNMARKED], {"kinds": ("segmented",)}),
        ("has no span 'needle'", "repo@1", PROMPTS, {"kinds": ("shifted",), "span": "needle"}),
        ("no layer of this model (nope) assigns positions", "nope", PROMPTS, {}),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_run(line, scheme, prompts, asked):
    with refused(re.escape(line)):
        planned(as_decoder(bridge_for(TASK, scheme)), prompts, (Effects(**asked),), TASK)


def test_the_cost_that_is_said_is_near_what_is_run(model):
    asked = Effects(kinds=("frozen", "permuted"), draws=4)
    (plan,) = planned(as_decoder(model), PROMPTS, (asked,), TASK)
    layers = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            count = lambda module, given, output: layers.append(len(output[0]))  # noqa: E731
            hooks.enter_context(layer.self_attn.register_forward_hook(count))
        plan.run(1, Store(), None)
    backward = 2 * len(PROMPTS)  # as much as two passes
    assert sum(layers) / 3 + backward == pytest.approx(len(plan.passes), rel=0.15)


@pytest.fixture(scope="module")
def run():
    asked = Effects(draws=4)
    prompts = make_task("reversal").prompts(6, test_set="12")
    return ri.analyze(ri.zoo("reversal/repo"), prompts, (), experiments=[asked], batch_size=6)


def test_linearising_the_heads_that_matter_breaks_reversal_and_as_many_others_do_not(run):
    group = run["effects"].to_dataset()
    own = group.sel(kind="linearised")
    assert np.argwhere(own["in_set"].values).tolist() == [[2, head] for head in range(4)]
    assert (own["set_score_change"] == -1).all() and (own["control_score_change"] == 0).all()
    assert float(own["set_effect"]) < -5 and float(np.abs(own["control_effect"]).max()) < 0.01
    assert group.attrs["draws"] == 4


def test_tables_have_a_row_for_each_kind_and_the_largest_effects_first(run):
    summary, heads = effect_tables(run)
    assert [row[0] for row in summary.rows] == ["token index", "all the same", "in random order"]
    effect = run["effects"]["effect"].sel(kind="linearised", layer=2, head=0)
    assert heads.rows[0][:5] == ("token index", 2, 0, "RePo", float(effect))
    # Found: rows of 5e-8 nats, in order
    few = int((run["effects"]["effect"] > -0.01).sum())
    assert max(row[4] for row in heads.rows) <= -0.01
    assert few > 0 and f" {few} of 48 changes of one head cost less than 0.01 nats" in heads.note


def test_a_run_in_which_no_head_is_needed_says_so_in_place_of_the_table(run):
    group = run["effects"].to_dataset()
    (summary,) = effect_tables(
        xr.DataTree.from_dict({"/effects": group.assign(effect=group["effect"] * 1e-4)})
    )
    assert "48 of 48 changes of one head cost less than 0.01 nats" in summary.note


def test_maps_and_figures_have_units_and_names(run):
    assert [one.values.attrs["units"] for one in VIEW.head_maps(run)] == ["nat"] * 3
    assert {"effects_by_head", "effects_of_sets", "effects_screening"} <= {*dict(VIEW.figures(run))}


def test_an_experiment_that_is_asked_for_twice_is_refused_before_anything_is_planned(model):
    """Found: it ran twice."""
    with refused("the experiment 'effects' was asked for twice"):
        planned(as_decoder(model), PROMPTS, ["effects", Effects(kinds=("frozen",))])
    with refused("there is no experiment 'nonsense'"):
        planned(
            as_decoder(model), PROMPTS, [Effects(span="no such", kinds=("shifted",)), "nonsense"]
        )
