"""Sessions of the explorer: their numbers are those of the library, no hook stays attached, edits
that do not fit are refused.
"""

import re
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from families import repositioned, tiny
from forked import Forked
from hooks import hooks_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from places import OFFICIAL
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.errors import InputError
from repo_interp.explorer import Edit, Session
from repo_interp.explorer.explored import Explored
from repo_interp.explorer.messages import Asked, message
from repo_interp.models.decoder import as_decoder
from repo_interp.plots.marks.arrays import heads_where
from repo_interp.plots.marks.finding import heads_named
from repo_interp.storage.records import validate

TOKENS = [3 + (7 * place) % 50 for place in range(24)]
EDITS = {
    "linearised": {"layer": 2},
    "frozen": {"heads": [[1, 0], [2, 3]], "span": "words", "value": 4.5},
    "copied": {"heads": [[2, 1]], "tokens": [6, 7, 8], "source": 3},
    "permuted": {"layer": 2, "span": "words", "seed": 3},
    "scaled": {"layer": 1, "value": 0.5},
    "shifted": {"heads": [[0, 0]], "tokens": [5], "value": -2.0},
    "ranked": {"layer": 1},
    "segmented": {"heads": [[1, 3], [2, 0]], "starts": [4, 9]},
    "linear": {"heads": [[1, 0], [2, 3]], "value": 4.0},
    "ntk": {"layer": 1, "value": 8.0},
    "yarn": {"heads": [[1, 3], [2, 0]], "value": 16.0},
    "stopped": {"layer": 2, "pairs": [6, 7]},
    "zero_ablated": {"heads": [[0, 1]]},
    "mean_ablated": {"layer": 1},
    "pairs_ablated": {"heads": [[1, 3]], "pairs": [0, 1, 2]},
    "pairs_mean_ablated": {"heads": [[1, 0], [2, 3]], "pairs": [0, 1, 5]},
}


@pytest.fixture(scope="module")
def bridge():
    return ri.load("reversal/repo")


@pytest.fixture(scope="module")
def prompt():
    return trained_task(zoo_path("reversal/repo")).prompts(1, test_set="12")[0]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Two key-value heads of four heads, positions are the token index."""
    path = tmp_path_factory.mktemp("grouped") / "rope"
    ri.save(ri.reposition(tiny("llama"), "rope"), path)
    return ri.load(path)


def edit(kind, **further):
    return validate({"kind": kind, **(further or EDITS[kind])}, Edit)


def executed(session, heads, token):
    names = {}
    code = session.as_python(heads, token)
    exec(code.replace("print(", "(lambda *words: None)("), names)
    return names


def assert_same_as_the_cell(session, heads, token):
    seen, names = session.changed(heads, token), executed(session, heads, token)
    for state in ("clean", "changed"):
        shown, measured = seen.sel(state=state), names[state]
        found = float(shown["log_probability"])
        assert found == pytest.approx(measured["log_probability"], abs=1e-6)
        assert shown["next_token"].values.tolist() == measured["next"].indices.tolist()
        assert_allclose(shown["probability"], measured["next"].values, rtol=1e-5, atol=1e-7)
        for number, head in enumerate(heads):
            # The cell has 0 where a key is not seen
            weight = shown["weight"][number].fillna(0)
            assert_allclose(weight, measured["weight"][head], atol=1e-6)
            assert_allclose(shown["position"][number], measured["position"][head], atol=1e-5)
    return seen


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_the_cell_gives_the_same_numbers_and_the_same_continuation(bridge, prompt, first):
    heads = [(2, 0), (1, 3)]
    edits = [*map(edit, [*EDITS][first : first + 4]), Edit(kind="linearised", layer=0, on=False)]
    session = Session(bridge, prompt, edits, name="reversal/repo")
    seen = assert_same_as_the_cell(session, heads, 17)
    names = executed(session, heads, 17)
    assert list(session.continuation()) == names["changed"]["continuation"].tolist()
    assert list(session.continuation(edited=False)) == names["clean"]["continuation"].tolist()
    assert seen["curve"].values[[0, -1]].tolist() == seen["log_probability"].values.tolist()


def test_the_cell_of_heads_that_share_keys_and_of_edits_together(grouped):
    edits = [edit("scaled", heads=[(0, 1)], value=0.25), edit("copied", layer=1, source=2)]
    asked = {"answer": (20, 21), "name": str(as_decoder(grouped).origin.directory)}
    heads = [(0, 1), (1, 3)]
    seen = assert_same_as_the_cell(Session(grouped, TOKENS, edits, **asked), heads, 19)
    alone = Session(grouped, TOKENS, edits[:1], **asked).changed(heads, 19)
    assert_array_equal(seen["curve"][:2], alone["curve"])
    assert len(seen["curve"]) == 3


BY_HAND = {
    "shifted": "shifted(bridge, -2.0, heads=[(0, 0)], tokens=[5])",
    "linear": "rescaled(bridge, heads=[(1, 0), (2, 3)], linear=4.0)",
    "ntk": "rescaled(bridge, layer=1, ntk=8.0)",
    "yarn": "rescaled(bridge, heads=[(1, 3), (2, 0)], yarn=16.0)",
    "stopped": "rescaled(bridge, layer=2, factors=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])",
    "zero_ablated": "ablate(bridge, heads=[(0, 1)])",
    "mean_ablated": "ablate(bridge, heads=[(1, 0), (1, 1), (1, 2), (1, 3)], means=means)",
    "pairs_ablated": "ablate(bridge, heads=[(1, 3)], pairs=[0, 1, 2])",
    "pairs_mean_ablated": "ablate(bridge, heads=[(1, 0), (2, 3)], pairs=[0, 1, 5], "
    "means=pair_means)",
}
"""By kind the intervention that the edit of `EDITS` is."""
"""By kind an edit, and the intervention that it is."""


@pytest.mark.parametrize("kind", BY_HAND)
def test_an_edit_is_the_intervention_that_the_cell_shows(bridge, kind):
    given = edit(kind)
    assert given.python(bridge, given.tokens or None) == f"ri.interventions.{BY_HAND[kind]}"


def test_scores_of_heads_are_those_of_analyze(bridge, prompt):
    run = ri.analyze(bridge, [prompt], measures=("positions", "attention_mass"))
    scores = Session(bridge, prompt).heads()["head_score"].sel
    mass = run["attention_mass"]["mass"].sel(span="words", prompt=0)
    assert_array_equal(scores(score="attention to words"), mass)
    ranges = run["positions"]["position_range"].sel(prompt=0)
    assert_array_equal(scores(score="position range"), ranges)
    pattern, head = ri.attention_pattern(bridge, prompt, 3, 2).values, {"layer": 3, "head": 2}
    for score, weights in (
        ("attention to token 0", pattern[1:, 0]),
        ("attention to the previous token", np.diagonal(pattern, -1)),
    ):
        assert_allclose(scores(score=score, **head), weights.mean(), atol=1e-6)
    assert int(scores(score="mirror").max("head").argmax("layer")) == 2


def test_rows_and_next_tokens_are_those_of_analyze(bridge, prompt):
    run = ri.analyze(bridge, [prompt], measures=("attention_rows", "predictions"))
    rows = run["attention_rows"].sel(layer=2, head=1, query=20)
    seen = Session(bridge, prompt).look([(2, 1)], 20, selection=(5, 3))
    order = rows["key"].values[rows["key"].values >= 0]
    assert_allclose(seen["weight"][0, order], rows["weight"][: len(order)], atol=1e-6)
    assert_allclose(seen["span_mass"].sel(span="selection")[0], seen["weight"][0, 3:6].sum())
    expected = run["predictions"]["next_text"].sel(token=20)
    assert_array_equal(seen["next_text"][:8], expected)


def test_attention_to_a_selection_is_that_of_transformers():
    stock = tiny("llama").double()
    stock.set_attn_implementation("eager")
    patterns = stock(torch.tensor([TOKENS]), output_attentions=True).attentions
    prompt = ri.tasks.Prompt(tuple(TOKENS), {}, generated=(9, 10, 20))
    session = Session(ri.reposition(stock, "rope"), prompt)
    rows = torch.stack([pattern[0] for pattern in patterns])  # [layer, head, query, key]
    for token in (0, 4, 23):
        expected = rows[:, :, token, 3:8].sum(-1).detach()
        assert_allclose(session.attention_to((7, 3), token), expected, rtol=1e-6, atol=1e-12)
    expected = rows[:, :, [8, 9, 19], 3:8].sum(-1).mean(-1).detach()
    assert_allclose(session.attention_to((3, 7)), expected, rtol=1e-6)
    assert_allclose(session.attention_to((0, 23)), 1.0, rtol=1e-6)
    with refused("token 24"):
        session.attention_to((3, 24), 4)
    with refused("token 24"):
        session.attention_to((3, 4), 24)


def test_attention_to_a_selection_changes_with_edits_and_is_kept(bridge, prompt, attended):
    session = Session(bridge, prompt, [edit("linearised")])
    clean, changed = (session.attention_to((12, 14), 20, edited) for edited in (False, True))
    before = clean.sel(layer=slice(0, 1)), changed.sel(layer=slice(0, 1))
    assert_array_equal(*before)  # an edit leaves earlier layers as they are
    pattern = ri.attention_pattern(bridge, prompt, 2, 1).sel(query=20, key=slice(12, 14))
    assert float(clean.sel(layer=2, head=1)) == pytest.approx(float(pattern.sum()), abs=1e-6)
    seen = session.changed([(2, 1)], 20, selection=(12, 14))["span_mass"].sel(span="selection")
    assert_allclose(seen[:, 0], [one.sel(layer=2, head=1) for one in (clean, changed)], atol=1e-6)
    assert abs(float(seen[0, 0] - seen[1, 0])) > 0.1
    attended.clear()
    session.attention_to((1, 2), 20, edited=True)  # of the same row
    assert attended == []


def test_the_rest_of_a_prompt_has_no_selected_token(grouped):
    seen = Session(grouped, TOKENS).look([(1, 0)], 20, selection=(5, 9))
    assert seen["span"].values.tolist() == ["selection", "rest"]
    assert_allclose(seen["span_mass"].sum("span"), 1.0, rtol=1e-5)


@pytest.fixture
def attended(bridge):
    """The layers that have attended, in order."""
    layers = []
    handles = [
        attention.sites.attended.register_forward_hook(
            lambda *_, layer=attention.layer_idx: layers.append(layer)
        )
        for attention in as_decoder(bridge).layers
    ]
    yield layers
    for handle in handles:
        handle.remove()


def test_an_edit_costs_the_layers_from_its_own_on_and_is_not_computed_again(
    bridge, prompt, attended
):
    session = Session(bridge, prompt, [edit("linearised")])
    session.look([(2, 0)], 17)
    assert attended == [0, 1, 2, 3]  # and of the chosen layer nothing but what it attends with
    attended.clear()
    session.changed([(2, 0)], 17)
    assert attended == [2, 3]
    attended.clear()
    session.changed([(2, 1), (2, 3)], 20, selection=(5, 9))
    Session(bridge, prompt, [edit("linearised")], passes=session.passes).changed([(2, 0)], 17)
    assert attended == []


def test_no_hook_stays_between_answers_between_tokens_and_after_a_stop(bridge, prompt):
    before, calls = hooks_of(bridge), []
    session = Session(bridge, prompt, [edit("permuted"), edit("frozen")])
    clean = session.look([(2, 0)], 17)
    session.changed([(2, 0)], 17)
    assert hooks_of(bridge) == before
    undone = Session(bridge, prompt, passes=session.passes)
    assert undone.look([(2, 0)], 17).identical(clean)
    for _ in islice(session.continuation(), 3):
        assert hooks_of(bridge) == before

    def stop():
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt

    stopped = Session(bridge, prompt, [edit("scaled")], check=stop)
    with pytest.raises(KeyboardInterrupt):
        stopped.changed([(2, 0)], 17)
    assert hooks_of(bridge) == before


def test_the_layer_that_mirrors_is_suggested_first(suggested, bridge, prompt):
    (first, effect), *others = suggested
    assert first == Edit(kind="linearised", layer=2)
    assert effect == pytest.approx(effect_of(bridge, prompt, first), abs=1e-6)
    single = [other for each, other in others if not each.named]
    assert len(single) <= 4 and all(effect <= other <= 0 for other in single)


@pytest.fixture(scope="module")
def suggested(bridge, prompt):
    told = []
    found = Session(bridge, prompt).suggest(lambda *done: told.append(done))
    assert told[-1][0] == told[-1][1]
    return found


def effect_of(bridge, prompt, edit):
    return float(np.diff(Session(bridge, prompt, [edit]).changed([(2, 0)], 17)["curve"]).item())


def test_all_heads_of_a_kind_are_moved_by_one_suggestion(suggested, bridge, prompt):
    kinds = ri.analyze(bridge, [prompt], ("position_sources",))["position_sources"]["kind"]
    whole = {(each.kind, each.named): (each, effect) for each, effect in suggested if each.named}
    names = {
        f"{heads_named(heads_where(kinds == kind), 3)} ({kind})"
        for kind in np.unique(kinds)
        if kind not in ("", "other", "constant")
    }
    assert {named for _, named in whole} == names
    readers = tuple(heads_where(kinds == "places words"))
    name = f"{heads_named(readers)} (places words)"
    frozen, effect = whole["frozen", name]
    assert frozen.heads == readers and frozen.sentence() == f"{name}: the mean position"
    moved = Edit(kind="frozen", heads=readers)
    assert effect == pytest.approx(effect_of(bridge, prompt, moved), abs=1e-6)


REFUSED = {
    "code": ({"kind": "linearised", "layer": 0, "file": "/etc/passwd"}, "unknown key"),
    "no head": ({"kind": "linearised"}, "heads as"),
    "heads and a layer": ({"kind": "linearised", "layer": 0, "heads": [[0, 0]]}, "heads as"),
    "tokens and a span": (
        {"kind": "linearised", "layer": 0, "tokens": [1], "span": "words"},
        "tokens or a span",
    ),
    "a factor that is none": ({"kind": "scaled", "layer": 0}, "scaled needs value"),
    "a seed too many": ({"kind": "frozen", "layer": 0, "seed": 1}, "frozen takes value"),
    "a layer that is not there": ({"kind": "linearised", "layer": 9}, "layer 9"),
    "a token that is not there": ({"kind": "linearised", "layer": 0, "tokens": [99]}, "token 99"),
    "frequencies of some tokens": (
        {"kind": "linear", "layer": 0, "value": 2.0, "tokens": [1]},
        "linear is for all tokens",
    ),
    "an empty list of pairs": ({"kind": "pairs_ablated", "layer": 0, "pairs": []}, "at least 1"),
    "pairs that are not there": (
        {"kind": "pairs_ablated", "layer": 0, "pairs": [8]},
        "pairs of layer 0 are 0 to 7",
    ),
    "a span that is not there": ({"kind": "linearised", "layer": 0, "span": "needle"}, "'needle'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_edits_that_do_not_fit_are_refused_in_one_line(bridge, prompt, case):
    given, said = REFUSED[case]
    before = hooks_of(bridge)
    with refused(said):
        Session(bridge, prompt, [validate(given, Edit)])
    assert hooks_of(bridge) == before


def test_a_layer_that_rotates_nothing_is_refused_and_shown_without_positions():
    bridge = ri.load(OFFICIAL / "nope")
    layer = ri.layout(bridge).index("nope")
    with refused("assigns no positions"):
        Session(bridge, TOKENS, [Edit(kind="frozen", layer=layer)])
    seen = Session(bridge, TOKENS).look([(layer, 0)], 5)
    assert np.isnan(seen["position"]).all() and np.isfinite(seen["weight"][0, :6]).all()


@pytest.mark.parametrize("scheme", ["nope", "alibi"])
def test_a_layer_without_rotation_has_no_frequencies_and_its_heads_are_ablated(scheme):
    bridge = ri.bridge(ri.reposition(tiny("llama"), scheme))
    reason = rf"layer 1 \({scheme}\) does not rotate"
    for changed in ({"kind": "yarn", "value": 2.0}, {"kind": "stopped", "pairs": (0,)}):
        with refused(reason):
            Session(bridge, TOKENS, [Edit(layer=1, **changed)])
    opened = Explored(bridge, [TOKENS]).answer(message({"ask": "open"}))["layers"][1]["refused"]
    assert re.match(reason, opened["linear"]) and opened["linear"] == opened["yarn"]
    assert (opened["ranked"] == "") == (scheme == "alibi")
    changed = Session(bridge, TOKENS, [Edit(kind="zero_ablated", layer=1)]).changed([(1, 0)], 20)
    assert abs(float(changed["curve"][1] - changed["curve"][0])) > 1e-4


NAMES = st.sampled_from([*Asked.model_fields, *Edit.model_fields, "file"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["view", "frozen", "linear", "stopped", "token", "answer"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, VALUES, max_size=6) | VALUES)
def test_whatever_a_page_sends_is_a_message_or_refused_in_one_line(value):
    try:
        said = message(value)
    except InputError as error:
        said = str(error)
    assert isinstance(said, Asked) or (said.startswith("the request") and said.isprintable())


KERNEL = """
import warnings
warnings.simplefilter("error")
import repo_interp as ri
bridge = ri.load("reversal/repo")
one, other = ri.explore(bridge, PROMPT), ri.explore(bridge, PROMPT)
one, other
"""
WIDGETS = [1, 2, 3, 4, 5, 37, 20, 8, 31, 6, 31, 8, 20, 37]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Two widgets on one bridge in a kernel of Jupyter; asks one of them, and returns its
    answer.
    """
    from ipykernel.kernelapp import IPKernelApp
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.connect import write_connection_file

    file, _ = write_connection_file(str(tmp_path_factory.mktemp("kernel") / "kernel.json"))

    def serve():
        warnings.resetwarnings()
        IPKernelApp.launch_instance(["-f", file])

    process, client, opened = Forked(serve), BlockingKernelClient(connection_file=file), []
    client.load_connection_file()
    client.start_channels()
    client.wait_for_ready(timeout=120)

    def hear(output):
        content = output["content"]
        assert output["msg_type"] != "error", content
        if output["msg_type"] == "comm_open" and "_esm" in content["data"]["state"]:
            opened.append(content["comm_id"])

    client.execute_interactive(
        KERNEL.replace("PROMPT", str(WIDGETS)), timeout=120, output_hook=hear
    )

    def ask(widget, message):
        data = {"method": "custom", "content": {"number": 7, "message": message}}
        client.shell_channel.send(
            client.session.msg("comm_msg", {"comm_id": opened[widget], "data": data})
        )
        while True:
            said = client.get_iopub_msg(timeout=120)
            assert said["msg_type"] != "error", said["content"]
            if said["msg_type"] == "comm_msg" and said["content"]["data"].get("method") == "custom":
                assert said["content"]["comm_id"] == opened[widget]
                assert said["content"]["data"]["content"]["number"] == 7
                return said["content"]["data"]["content"]["answer"]

    ask.count = len(opened)
    yield ask
    client.stop_channels()
    process.kill()
    process.wait()


def test_two_widgets_of_a_kernel_answer_by_messages_and_do_not_disturb_each_other(kernel, bridge):
    assert kernel.count == 2
    asked = {"ask": "view", "heads": [[2, 0]], "token": 9}
    moved = asked | {"edits": [{"kind": "linearised", "layer": 2}]}
    session = Session(bridge, WIDGETS, [Edit(kind="linearised", layer=2)])
    assert kernel(0, {"ask": "open"})["checkpoint"] == "reversal/repo"
    clean = session.look([(2, 0)], 9)["position"].values.tolist()
    changed = session.changed([(2, 0)], 9)["curve"].values.tolist()
    for _ in range(2):
        assert kernel(1, asked)["numbers"]["position"]["values"] == clean
        assert kernel(0, moved)["numbers"]["curve"]["values"] == changed
    streams = [
        kernel(widget, given | {"ask": "continue"}) for widget, given in ((0, moved), (1, asked))
    ]
    events = [[stream["event"]] for stream in streams]
    for _ in range(5):
        for widget, stream in enumerate(streams):
            events[widget].append(kernel(widget, {"more": stream["stream"]})["event"])
    clean = session.continuation(edited=False, most=6)
    assert [event["token"] for event in events[1]] == list(clean)
    changed = [event["token"] for event in events[0] if event["state"] == "changed"]
    assert changed == list(session.continuation(most=3))
    assert kernel(0, {"more": 99}) == {"done": True}
    assert "unknown key" in kernel(0, {"ask": "open", "file": "x"})["refused"]


def test_the_needle_of_a_row_is_the_token_that_its_answer_copies(bridge, prompt):
    session = Session(bridge, prompt)
    row = session.look([(2, 0)], prompt.generated[3] - 1)
    at = prompt.sources[3]
    assert float(row["span_mass"].sel(span="needle")[0]) == pytest.approx(
        float(row["weight"].sel(key=at)[0])
    )
    assert float(row["span_mass"].sel(span="query")[0]) == pytest.approx(
        float(row["weight"].sel(key=prompt.generated[3] - 1)[0])
    )
    assert "needle" not in session.look([(2, 0)], 3)["span"]


@pytest.mark.parametrize("layout", ["repo", "repo@1", "rope"])
def test_a_model_opens_on_positions_that_it_learns(layout):
    """Found: an adapter opened on a RoPE head, whose range is the length of the prompt."""
    explored = Explored(ri.bridge(repositioned(layout)), [TOKENS])
    opened = explored.answer(message({"ask": "prompt"}))
    ranges = opened["heads"]["scores"]["position range"]
    by_index = opened["heads"]["by_index"]
    assert by_index[0][0] is (layout != "repo") and by_index[1][0] is (layout == "rope")
    assert (opened["score"] == "order") is (layout != "rope")
    if layout == "rope":
        assert opened["heads"]["orders"] is None
        assert np.unique(ranges["values"]).tolist() == [len(TOKENS) - 1]
        return
    layer, head = opened["head"]
    assert not by_index[layer][head]
    told = opened["heads"]["scores"]["order"]["values"]
    known = [abs(value) for row in told for value in row if value is not None]
    assert abs(told[layer][head]) == max(known) > 0
    assert max(value for row in ranges["values"] for value in row if value) == pytest.approx(
        ranges["ends"][1]
    )
    for scores in (ranges["values"], told):
        hidden = [[value is None for value in row] for row in scores]
        assert hidden == by_index, "the token index has nothing to compare"
    rows = opened["heads"]["orders"]["rows"]
    own = [
        [layer, head]
        for layer, row in enumerate(by_index)
        for head, is_one in enumerate(row)
        if not is_one
    ]
    assert sorted(head for row in rows for head in row["heads"]) == own
    assert {values["values"][-1] for values in rows} == {told[layer][head] for layer, head in own}


def test_the_map_keeps_its_scores_where_an_edit_gives_all_heads_the_token_index():
    explored = Explored(ri.bridge(repositioned("repo,rope,rope")), [TOKENS])
    opened = explored.answer(message({"ask": "prompt"}))["heads"]
    edits = [{"kind": "linearised", "layer": 0}]
    view = explored.answer(message({"ask": "view", "heads": [[0, 0]], "token": 1, "edits": edits}))
    edited = view["heads"]
    assert list(edited["scores"]) == list(opened["scores"]) and edited["orders"] is None
    assert {value for row in edited["scores"]["order"]["values"] for value in row} == {None}
    assert opened["orders"]["rows"] and opened["scores"]["order"]["values"][0][0] is not None
