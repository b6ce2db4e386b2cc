"""Findings: each rule speaks where its number is beyond its null, names the place, and is silent
where it is not.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import xarray as xr

import repo_interp as ri
from repo_interp.errors import Note
from repo_interp.plots.marks.finding import Finding, heads_named
from repo_interp.plots.pages.report import report_page, write_report
from repo_interp.plots.view_catalogue import view_of


def tree(name: str, schemes: list[str], values: dict, **attributes) -> xr.DataTree:
    """A run of one group; axes without labels are numbered."""
    group = xr.Dataset(values, {"scheme": ("layer", schemes)}, attributes)
    numbered = {axis: range(group.sizes[axis]) for axis in {*group.sizes} - {*group.coords}}
    return xr.DataTree.from_dict({name: group.assign_coords(numbered)})


def mass(by_prompt: np.ndarray) -> xr.DataTree:
    """attention_mass of [prompt, layer, head] on the needle; equal weights give it 2 %."""
    prompts, layers, _ = by_prompt.shape
    values = {
        "mass": (("prompt", "layer", "head", "span"), by_prompt[..., None]),
        "chance": (("prompt", "layer", "span"), np.full((prompts, layers, 1), 0.02)),
        "span": ["needle"],
    }
    return tree("attention_mass", ["rope"] * layers, values, rows="producing")


def found(run: xr.DataTree, group: str) -> list[Finding]:
    view = view_of(group)
    assert view is not None
    return list(view.findings(run))


def test_heads_that_share_the_needle_are_named_although_every_mean_is_low():
    taken = np.full((4, 2, 2), 0.01)
    for prompt, head in enumerate((0, 1, 0, 1)):
        taken[prompt, 1, head] = 0.9
    (finding,) = found(mass(taken), "attention_mass")
    assert finding.sentence == (
        "L1 H0-H1 share the work: in each prompt one gives 90 % of its attention to the "
        "needle, next L0 H0 (1 % on average)"
    )
    assert "on average over prompts is 46 %; equal weights give 2 %" in finding.evidence
    assert (finding.layer, finding.prompt) == (1, 0) and finding.place == "L1 H0, prompt 0"


def test_one_head_is_named_alone_and_equal_weights_are_no_finding():
    taken = np.full((3, 2, 2), 0.02)
    assert found(mass(taken), "attention_mass") == []
    taken[:, 0, 1] = (0.3, 0.5, 0.4)
    (finding,) = found(mass(taken), "attention_mass")
    assert finding.sentence == (
        "L0 H1 gives 30 % to 50 % of its attention to the needle, next L0 H0 (2 % on average)"
    )
    taken[0] = 0.02
    run = mass(taken)
    run.attrs["needle_is"] = "the token copied"
    (some,) = found(run, "attention_mass")
    assert some.sentence == (
        "L0 H1 gives 40 % to 50 % of its attention to the token copied, in 2 of 3 prompts, "
        "next L0 H0 (2 % on average)"
    )


def test_heads_that_all_look_at_the_needle_do_not_share_it_and_each_is_named():
    taken = np.full((2, 1, 3), 0.01)
    taken[:, 0, 1], taken[:, 0, 2] = (0.97, 0.96), (0.96, 0.98)
    (finding,) = found(mass(taken), "attention_mass")
    assert finding.sentence == (
        "L0 H1-H2 each give 96 % to 98 % of their attention to the needle, next L0 H0 (1 % on average)"
    )
    assert (finding.layer, finding.head, finding.prompt) == (0, 2, 1)
    taken[0, 0, 2] = 0.8  # less than .9 of what another head gives there
    (finding,) = found(mass(taken), "attention_mass")
    assert finding.sentence.startswith("L0 H1 gives 96 % to 97 %")


def effects(changes: np.ndarray, controls: float) -> xr.DataTree:
    """effects of one kind: changes [layer, head, prompt], the same of every control."""
    layers, _, prompts = changes.shape
    drawn = np.full((1, 3, prompts), controls)
    values = {
        "log_probability_change": (("kind", "layer", "head", "prompt"), changes[None]),
        "layer_log_probability_change": (("kind", "layer", "prompt"), changes.sum(1)[None]),
        "control_effect": (("kind", "draw"), drawn[..., 0]),
        "set_log_probability_change": (("kind", "prompt"), changes.sum((0, 1))[None]),
        "control_log_probability_change": (("kind", "draw", "prompt"), drawn),
        "kind": ["linearised"],
    }
    return tree("effects", ["repo"] * layers, values, set_heads=2)


def test_prompts_that_are_too_few_to_tell_are_no_finding():
    changes = np.zeros((2, 2, 4))
    changes[0, 0, 0] = -11.5
    # one prompt of four: mean 2.875, and as much as its standard error times Student's 3.18
    assert found(effects(changes, -0.05), "effects") == []


def test_positions_that_the_answer_needs_are_beyond_noise_and_beyond_other_heads():
    changes = np.random.default_rng(0).normal(0, 0.1, (2, 2, 20))
    (none,) = found(effects(changes, -0.05), "effects")
    assert none.sentence.startswith("No change of one layer's positions moves the answer clearly")
    assert "95 % intervals over 20 prompts" in none.evidence and none.head is None
    beside = effects(changes, -0.05)
    beside["kinds"] = xr.DataTree(xr.Dataset())  # has the interval of all heads
    assert found(beside, "effects") == []
    end = float(none.sentence.split(" a loss above ")[1].split(" ")[0])
    by_layer = changes.sum(1)
    half = 2.093 * by_layer.std(-1, ddof=1) / 20**0.5  # Student's t, 19 degrees of freedom
    assert end == pytest.approx(float((half - by_layer.mean(-1)).max()), abs=0.006)
    changes[1, 0] -= 2.0
    layer, head = found(effects(changes, -0.05), "effects")
    assert "the answer needs the positions of layer 1 most" in layer.sentence
    costs = -changes.mean(-1)
    others = [float(costs[0].sum()), float(max(costs[0, 0], costs[0, 1], costs[1, 1]))]
    second = int(np.argmax(np.delete(costs, 2)))  # L1 H0 is the third of four
    for finding, name, lost in zip(
        (layer, head), ("layer 0", ("L0 H0", "L0 H1", "L1 H1")[second]), others, strict=True
    ):
        told = f"{lost:.2g}" if lost >= 0.01 else "less than 0.01"
        assert finding.sentence.endswith(f", next {name} ({told})")
    assert (layer.layer, layer.head, head.layer, head.head) == (1, None, 1, 0)
    (more,) = found(effects(changes, -3.0), "effects")  # as many other heads at random do more
    assert more.sentence.startswith("Other heads matter more than the 2 heads that seemed most")
    assert "costs 3 nats per token there, 2 here" in more.sentence


def test_names_of_the_atlas_are_sentences_with_their_null():
    values = {
        "sink": (("layer", "head"), [[0.1, 0.2, 0.1], [0.6, 0.97, 0.8]]),
        "named": (("label", "layer", "head"), [[[0, 0, 0], [1, 1, 1]]]),
        "null": (("label", "twin"), [[0.03, 0.05]]),
        "threshold": ("label", [0.5]),
        "label": ["sink"],
        "layer": [3, 5],
    }
    run = tree("atlas", ["rope", "rope"], values)
    (finding,) = found(run, "atlas")
    assert finding.sentence == (
        "Attention sink: L5 H0-H2 give more than half to token 0, from layer 5 on, most L5 H1 (97 %), "
        "next L5 H2 (80 %)"
    )
    assert finding.evidence.startswith("on random tokens; the score of a named head is above 0.5")
    assert finding.evidence.endswith("2 models with random weights reach 0.05")
    on_prompts = xr.zeros_like(run["atlas"]["sink"]) + 0.1
    on_prompts[1, 1] = 0.8
    run["atlas/sink_on_prompts"] = on_prompts
    (finding,) = found(run, "atlas")
    assert "sink: L5 H1 gives more than half to token 0, from layer 5 on" in finding.sentence
    assert finding.sentence.endswith("most L5 H1 (80 %), next L3 H0 (10 %)")
    assert finding.evidence.startswith("in the prompt; on random tokens L5 H0-H2 do; the score")
    run["atlas/named"] = run["atlas/named"] * 0
    assert found(run, "atlas") == []


def test_a_component_is_found_that_accounts_for_three_equal_shares():
    shares = np.full((1, 2, 2, 16), 5.0)
    data = {
        "vaf": (("prompt", "layer", "head", "component"), shares),
        "frequency": (("layer", "component"), np.tile(2.0 ** -np.arange(16), (2, 1))),
    }
    run = tree("components", ["rope"] * 2, data, training_length=64)
    assert found(run, "components") == []
    run["components/vaf"][..., 7], run["components/vaf"][0, 1, 0, 7] = 29.0, 55.0
    (finding,) = found(run, "components")
    assert finding.sentence == (
        "Rotary component 7 makes 29 % of the logits' variance in the median head, most in L1 H0 (55 %), next L0 H0 (29 %)"
    )
    assert "equal share of all components is 6 %; of 2 layers that rotate" in finding.evidence
    assert (finding.layer, finding.head) == (1, 0)


@pytest.mark.parametrize(
    ("tokens", "kind"), [([5, 5], "is a second sink"), ([5, 9], "and 1 other are sinks")]
)
def test_sinks_beside_the_first_token_are_named_by_the_one_that_draws_most(tokens, kind):
    axes = ("prompt", "layer", "head")
    values = {
        "sink_mass": (axes, [[[0.3, 0.5], [0.2, 0.2]]]),
        "sink_uniform": (("prompt", "layer"), [[0.02, 0.02]]),
        "sink_token": (("prompt", "layer"), [tokens]),
    }
    run = tree("octaves", ["rope", "rope"], values)
    (finding,) = found(run, "octaves")
    which = "it" if tokens[1] == 5 else "token 5"
    assert finding.sentence == (
        f"Token 5 {kind}, beside the first token: {which} draws 40 % of later tokens' attention in L0"
    )
    named = "token 5 in L0-L1" if tokens[1] == 5 else "token 5 in L0, token 9 in L1"
    assert f"mean over heads: {named}; even attention would give 2 %" in finding.evidence
    assert (finding.layer, finding.token, finding.prompt) == (0, 5, 0)
    run["octaves/sink_mass"] = run["octaves/sink_mass"] * 0.1
    assert found(run, "octaves") == []


@pytest.mark.parametrize(
    ("share", "chance", "many"), [(0.8, 0.01, 1), (0.8, 0.2, 0), (0.2, 0.01, 0)]
)
def test_gates_on_separators_are_beyond_random_tokens(share, chance, many):
    dims = ("prompt", "layer", "head")
    data = {
        "separator_share": (dims, [[[0.1, share]]] * 2),
        "separator_share_shuffled": (dims, [[[0.12, 0.12]]] * 2),
        "separator_share_chance": (dims, [[[0.6, chance]]] * 2),
        "layer": [3],
    }
    findings = found(tree("gates", ["cope"], data), "gates")
    assert len(findings) == many
    sentence = "Gates fall on separators in L3 H1: 80 % of their sum in L3 H1"
    assert all(finding.sentence == sentence for finding in findings)


def text_run(measured: xr.DataTree) -> xr.DataTree:
    """`measured` as of prompts without answers."""
    return without(measured, "predictions", "answer_is_likeliest")


def test_expected_tokens_are_beyond_the_commonest_one(measured):
    run = text_run(measured)
    (finding,) = found(run, "predictions")
    ranks = run["predictions/rank_of_next"]
    share, count = 100 * float((ranks[:-1] == 0).mean()), len(ranks) - 1
    assert finding.sentence == (
        f"The model's likeliest next token is right for {share:.0f} % of the {count} tokens of the "
        "first prompt"
    )
    assert finding.prompt == 0
    run["predictions/rank_of_next"] = ranks + (ranks == 0)
    assert found(run, "predictions") == []


@pytest.mark.parametrize(
    ("right", "does", "sentence"),
    [
        ([1, 1, 0], "says 4 words backwards", "The model says 4 words backwards: right in 2 of 3 prompts"),
        ([1, 0, 0], "says 4 words", "The model fails at its task (says 4 words): right in 1 of 3 prompts"),
        ([1, np.nan], "", "The model's answer is right"),
        ([0], "copies", "The model fails at its task (copies): its answer is wrong"),
    ],
)  # fmt: skip
def test_what_the_model_does_comes_first_and_a_failing_one_is_not_said_to_do_it(
    right, does, sentence
):
    values = {
        "answer_is_likeliest": ("prompt", np.array(right, dtype=float)),
        "answer_log_probability": ("prompt", np.full(len(right), -0.5)),
    }
    run = tree("predictions", [], {**values, "layer": ("layer", [])})
    run.attrs |= {"does": does} if does else {}
    first = ri.findings(run)[0]
    assert first.sentence == sentence and "-0.500 nats per token" in first.evidence


def kinds(score: float) -> xr.DataTree:
    """kinds with all heads frozen, which changes the score by `score`; all answers are right."""
    axes = ("kind", "token_class", "of", "bound")
    group = xr.Dataset(
        {
            "loss_change": (axes, np.full((1, 2, 3, 3), 2e-7)),
            "score_change": (("kind", "of", "bound"), np.full((1, 3, 3), score)),
            "heads": ("kind", [4]),
            "tokens": ("token_class", [9, 3]),
        },
        {"kind": ["all heads"], "token_class": ["all", "generated"],
         "of": ["change", "controls", "difference"], "bound": ["mean", "low", "high"]},
        {"metric": "exact match", "block": "prompt"},
    )  # fmt: skip
    group["loss_change"].loc[{"of": ["controls", "difference"]}] = np.nan
    answers = xr.Dataset({"answer_is_likeliest": ("prompt", np.ones(3))})
    return xr.DataTree.from_dict({"kinds": group, "predictions": answers})


def test_a_ceiling_is_said_as_one():
    (finding,) = found(kinds(0.0), "kinds")
    assert finding.sentence == (
        "The model answers all 3 prompts right with or without its positions, so this task cannot "
        "say what they are for"
    )
    assert "changes no score and costs 2.0e-07 nats" in finding.evidence
    (cost,) = found(kinds(-0.1), "kinds")
    assert cost.sentence == (
        "Freezing all learned positions (of 4 heads) costs nothing per token of the answer"
    )


def test_heads_of_a_stock_model_are_counted_in_one_sentence_and_named_in_details():
    labels = ["sink", "induction"]
    values = {
        "sink": (("layer", "head"), [[0.1, 0.9], [0.7, 0.97]]),
        "induction": (("layer", "head"), [[0.6, 0.0], [0.0, 0.0]]),
        "named": (("label", "layer", "head"), [[[0, 1], [1, 1]], [[1, 0], [0, 0]]]),
        "null": (("label", "twin"), [[0.03], [0.05]]),
        "threshold": ("label", [0.5, 0.3]),
        "name": (("layer", "head"), [["induction, sink", "sink"], ["sink", "sink"]]),
        "label": labels,
    }
    run = tree("atlas", ["rope", "rope"], values)
    (short,) = ri.findings(run)
    assert short.sentence == (
        "Of 4 heads 3 rest on token 0 (sinks), 1 looks at what followed an earlier copy (induction)"
    )
    assert "sink: 1 model with random weights reaches 0.03" in short.evidence
    assert [one.variable for one in ri.findings(run, most=9)] == ["", "induction", "sink"]
    (named,) = [one for one in view_of("atlas").head_maps(run) if one.meanings]
    data = named.data()
    assert data["texts"] == [["induction, sink", "sink"], ["sink", "sink"]]  # a row per layer
    assert len({color for row in data["colours"] for color in row}) == 2
    assert data["meanings"]["sink"] == "rests on the first token"
    learned = tree("atlas", ["repo", "rope"], values)
    assert [one.weight for one in found(learned, "atlas")] == [0.8, 0.7]


def test_heads_that_tell_the_order_of_tokens_are_named_with_the_distance():
    heads = ("layer", "head")
    values = {
        "pattern_share": (("layer", "head", "pattern"), np.tile([0.0, 0.0, 1.0], (3, 2, 1))),
        "resolution": (heads, [[1.0, 1.0], [27.0, 30.0], [74.0, np.nan]]),
        "order_told": (heads, [[1.0, 1.0], [0.9, 0.9], [0.83, 0.3]]),
        "order_prompts": (heads, np.full((3, 2), 5)),
    }
    run = tree("patterns", ["rope", "repo", "repo"], values)
    (finding,) = found(run, "patterns")
    assert finding.sentence == (
        "L1 H0 orders two tokens rightly in 90 % of pairs from 27 tokens apart, 2 further heads "
        "(L1 H1, L2 H0) from 30 to 74"
    )
    assert "in 5 prompts" in finding.evidence and "1 head within 0.05" in finding.evidence
    assert (finding.layer, finding.head) == (1, 0)
    run["patterns/resolution"] *= np.nan
    # that heads tell no order is not what the classes say
    assert found(run, "patterns") == []
    run["patterns"] = run["patterns"].to_dataset().drop_vars("resolution")
    assert found(run, "patterns") == []


def test_findings_are_ordered_by_weight_and_no_group_hides_another():
    taken = np.full((3, 2, 2), 0.02)
    taken[:, 0, 1] = 0.9
    changes = np.full((2, 2, 20), -0.001)
    changes[1, 0] = -2.0 + np.linspace(-0.1, 0.1, 20)
    run = mass(taken)
    run["effects"] = effects(changes, -0.001)["effects"]
    given = ri.findings(run)
    assert [finding.group for finding in given] == ["effects", "attention_mass", "effects"]
    assert str(given).splitlines()[1] == f"2. {given[1].sentence}  [L0 H1, prompt 0]"
    assert given._repr_html_().count("<li>") == 3 and given[0].evidence in given._repr_html_()
    weights = [finding.weight for finding in given]
    assert weights == sorted(weights, reverse=True)
    assert ri.findings(run, most=1) == given[:1]


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ([(0, 1), (0, 0), (2, 0)], "L0 H0-H1, L2 H0"),
        ([(layer, 0) for layer in range(6)], "L0 H0, L1 H0, L2 H0, L3 H0 and 2 more"),
        (
            [(1, 0), *((layer, head) for layer in (3, 5, 6, 7) for head in range(3)), (4, 1)],
            "L1 H0, L3, L4 H1, L5 and 6 more",
        ),
    ],
)
def test_heads_are_named_shortly_and_layers_with_all_of_them_alone(heads, text):
    assert heads_named(heads, per_layer=3) == text


def test_no_finding_speaks_in_names_of_the_code(measured):
    """Of runs with all that has findings: no `group.variable`, no word with an underscore."""
    given = ri.findings(measured, most=99)
    assert {"atlas", "effects", "positions", "saliency"} <= {finding.group for finding in given}
    for finding in given:
        for text in (finding.sentence, finding.evidence):
            assert not re.search(r"\w_\w|[a-z]\.[a-z]", text), text


def without(run: xr.DataTree, group: str, *names: str) -> xr.DataTree:
    groups = {f"/{name}": node.to_dataset() for name, node in run.children.items()}
    groups[f"/{group}"] = groups[f"/{group}"].drop_vars(names)
    left = xr.DataTree.from_dict({"/": xr.Dataset(), **groups})
    left.attrs = run.attrs
    return left


def notes_of(run: xr.DataTree) -> list[str]:
    """The notes about findings that are left out; the rest is found."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ri.findings(run, most=99)
    return [str(one.message) for one in said if issubclass(one.category, Note)]


def test_a_run_that_lacks_a_variable_has_the_rest_of_its_findings(measured):
    """Found: KeyError, ValueError and InvalidIndexError of libraries."""
    noted = {}
    for group, node in measured.children.items():
        for name in map(str, node.to_dataset().variables):
            # The group alone: what its view reads of others is in the next test
            own = xr.DataTree.from_dict({f"/{group}": node.to_dataset().drop_vars(name)})
            for note in notes_of(own):
                assert "\n" not in note and f"no findings of {group}: " in note
                noted[f"{group}/{name}"] = note
    assert len(noted) > 30
    named = [place for place, note in noted.items() if f": {place} is missing in the run;" in note]
    assert len(named) == len(noted), {*noted} - {*named}


@pytest.mark.parametrize(
    ("group", "name", "noted"),
    [
        ("positions", "token_count", ["no findings of positions: positions/token_count is missing"]),
        ("position_sources", "alone", ["no findings of position_sources: position_sources/alone is"]),
        ("attention_rows", "span", ["no findings of octaves: attention_rows/span is missing"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_by_its_group_and_costs_nothing_else(group, name, noted, measured):
    notes = notes_of(without(measured, group, name))
    assert [note[: len(start)] for note, start in zip(notes, noted, strict=True)] == noted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        left = {finding.group for finding in ri.findings(without(measured, group, name), most=99)}
    lost = {note.split()[3].rstrip(":") for note in noted}
    assert left == {finding.group for finding in ri.findings(measured, most=99)} - lost


def test_labels_that_stand_twice_and_empty_groups_are_noted(measured):
    twice = measured.copy(deep=True)
    group = twice["positions"].to_dataset()
    twice["positions"] = xr.DataTree(group.assign_coords(layer=[0] * group.sizes["layer"]))
    notes = notes_of(twice)
    assert any(note.startswith("no findings of positions: ") for note in notes)
    assert all("positions has a label of the axis 'layer' twice" in note for note in notes)
    for name in measured.children:
        for note in notes_of(xr.DataTree.from_dict({f"/{name}": xr.Dataset()})):
            assert re.match(rf"no findings of {name}: {name}/\w+ is missing in the run; ", note)


def test_a_page_of_a_run_that_lacks_a_variable_is_refused_in_one_line(small, tmp_path, no_pictures):
    """Found: the library's KeyError; of a comparison the group of another view was blamed."""
    for group, name in (("positions", "position"), ("attention_mass", "mass")):
        said = rf"^{group}/{name} is missing in the run; measure the run again with "
        with pytest.raises(ri.InputError, match=said):
            report_page(without(small, group, name), tmp_path / "page.html")
    tables = write_report(without(small, "positions", "position"), tmp_path / "a.html", tmp_path)
    assert tables and all("positions/position is missing in the run" in line for line in tables)
    assert not any("Error" in line for line in tables)
    assert "Attention mass" in (tmp_path / "a.html").read_text()
