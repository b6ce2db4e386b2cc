"""Audits of schemes find what is wrong, and nothing in schemes that are right."""

from __future__ import annotations

import pytest
import torch
import xarray as xr
from torch import nn

import repo_interp as ri
from repo_interp import installed_points
from repo_interp.analysis.defaults import default_experiments, default_prompts
from repo_interp.errors import InputError, NotFinite
from repo_interp.models.decoder import as_decoder
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.positions.assigners import RememberingAssigner, TokenIndex
from repo_interp.positions.biases import PositionBias, distances
from repo_interp.positions.learned_assigners import LearnedPositions
from repo_interp.positions.logits import PositionLogits
from repo_interp.tasks import make_task

KINDS = ("rope", "nope", "hope", "learned", "fire", "cope", "cope_rope", "repo", "repo_fire")
KINDS += ("repo_convolution", "repo_attention", "forgetting", "path", "pope", "selective_rope")
"""One scheme of every kind; what audits look for is tested of all in positions/test_schemes.py."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(installed_points, "_REGISTERED", {})


def lines_of(build):
    ri.register_scheme("mine", build)
    return ri.verify_scheme("mine").attrs["findings"].splitlines()


def findings_of(build):
    return {line.partition(":")[0] for line in lines_of(build)}


def built(parts, logits=lambda: None, learned=False):
    """A scheme of the assigner and frequencies that `parts` makes of the width and the rotation."""
    return lambda builder, rotation, d_head: SchemeParts(
        "mine",
        *parts(builder.config.hidden_size, rotation),
        learned=learned,
        position_logits=logits(),
    )


def rotating(assign, learned=False):
    """A scheme that rotates by positions that a function of hidden states and index gives."""

    class Assigner(nn.Module):
        def forward(self, hidden_states, index):
            found = assign(hidden_states.float(), index)
            return found[0] if isinstance(found, list) else found[:, None]

    return built(lambda width, rotation: (Assigner(), rotation.frequencies), learned=learned)


@pytest.mark.parametrize("scheme", KINDS)
def test_schemes_that_come_with_the_packages_have_no_finding(scheme):
    checked = ri.verify_scheme(scheme)
    assert checked.attrs["findings"] == ""
    assert checked["check"].values.tolist() == [
        *("repeated", "first", "causal", "cache", "padding", "batch", "saved", "observed", "rows"),
        *("long", "packed", "grouped", "half", "chunks"),
    ]
    # Each check compared something: sums in another order differ in the last bits.
    assert float(checked["difference"].max()) > 0


@pytest.mark.parametrize(
    ("assign", "wanted"),
    [
        # scaled by a mean over all tokens, later ones and padding too
        (lambda h, i: i * (1 + h.mean((1, 2), True)[..., 0]), {"causal", "cache", "padding"}),
        # summed from the first token of a call, which with a cache is no token of the text;
        # padding adds the same to all positions, which rotation does not see
        (lambda h, i: h[..., 0].cumsum(1), {"cache"}),
        (lambda h, i: i + h.mean((0, 2))[None].cumsum(1), {"cache", "batch"}),
        (lambda h, i: i.float() ** 1.5, set()),
    ],
)
def test_positions_that_are_wrong_are_found_by_their_check(assign, wanted):
    assert findings_of(rotating(assign)) == wanted


def mirrored(size):
    """Positions in which each whole chunk of tokens is mirrored, as its last token decides."""

    def assign(hidden_states, index):
        steps = hidden_states[..., 0].clone()
        whole = steps.shape[1] // size * size
        chunks = steps[:, :whole].unflatten(1, (-1, size)).flip(2).flatten(1)
        return index + torch.cat([chunks, steps[:, whole:]], 1)

    return assign


def first_tokens(hidden_states, index):
    known = hidden_states[..., 0] * (index < 8)
    return index + known * known.sum(1, keepdim=True)


def next_of(hidden_states, most=24):
    steps = torch.cat([hidden_states[:, 1:, 0], hidden_states[:, -1:, 0]], 1)
    return steps * (hidden_states.shape[1] >= most)


AHEAD = {f"chunks of {size}": mirrored(size) for size in (2, 3, 6, 12, 23)}
AHEAD |= {
    "among the first tokens": first_tokens,
    "by the number of tokens": lambda h, i: 20 * i / h.shape[1],
    "by a number of tokens that one token makes 0": lambda h, i: 20 * i / (h.shape[1] - 1),
    "to the next token": lambda h, i: i + next_of(h),
    "in long prompts": lambda h, i: i + next_of(h, most=20),
    "by the last token": lambda h, i: i * (1 + h[:, -1:, 0]),
}


@pytest.mark.parametrize("looks", AHEAD)
def test_lookahead_is_found_and_named_wherever_it_is(looks):
    """Found: only tokens from the 12th on were replaced, and none was left out."""
    lines = lines_of(rotating(AHEAD[looks]))
    assert any(line.startswith("causal: tokens after a token, or how many") for line in lines)
    assert not any("RememberingAssigner" in line for line in lines)


def keeping(what, positions):
    """Positions by what an assigner keeps of its first call."""

    class Assigner(nn.Module):
        kept = None

        def forward(self, hidden_states, index):
            self.kept = what(hidden_states) if self.kept is None else self.kept
            return positions(self.kept, index)[:, None]

    return built(lambda width, rotation: (Assigner(), rotation.frequencies))


FIRST = {
    "statistics": keeping(lambda h: h.std(), lambda kept, i: i * (1 + kept)),
    "a table": keeping(
        lambda h: torch.linspace(0, 9, h.shape[1]), lambda kept, i: kept[i.clamp_max(len(kept) - 1)]
    ),
    "a table that ends": keeping(lambda h: torch.arange(h.shape[1]) / 2, lambda kept, i: kept[i]),
}


@pytest.mark.parametrize("kept", FIRST)
def test_what_a_scheme_keeps_of_its_first_prompt_is_found(kept):
    assert findings_of(FIRST[kept]) - {"cache", "padding"} == {"first"}


def test_state_of_a_closure_and_of_all_calls_is_found():
    def build(builder, rotation, d_head):
        kept = []

        class Assigner(nn.Module):
            def forward(self, hidden_states, index):
                kept.append(hidden_states.std())
                return (index * (1 + kept[0]))[:, None]

        return SchemeParts("mine", Assigner(), rotation.frequencies)

    assert findings_of(build) == {"first"}
    calls = []

    def counted(hidden_states, index):
        calls.append(index)
        return index * (1 + 0.1 * len(calls))

    # Nothing else can be judged then.
    assert findings_of(rotating(counted)) == {"repeated"}
    assert findings_of(rotating(lambda h, i: i + torch.rand(i.shape))) == {"repeated"}


def scaled_in_place(hidden_states, index):
    hidden_states *= 2
    return index + hidden_states[..., 0]


def counted_in_place(hidden_states, index):
    index += 1
    return index.float()


def without_gradient_in_place(hidden_states, index):
    hidden_states.data[..., 0] = 0
    return index.float()


class Doubling(PositionLogits):
    def forward(self, queries, keys, *more):
        return 0 * queries.mul_(2).sum(-1, keepdim=True) + 0 * keys[:, :1, None, :, 0]


@pytest.mark.parametrize(
    ("scheme", "line"),
    [
        (rotating(scaled_in_place), "Assigner.forward changes hidden_states, which other parts"),
        (rotating(without_gradient_in_place), "Assigner.forward changes hidden_states"),
        (rotating(counted_in_place), "Assigner.forward changes index"),
        (built(lambda *given: (None, None), Doubling), "Doubling.forward changes queries"),
    ],
)
def test_tensors_that_are_changed_in_place_are_found(scheme, line):
    lines = lines_of(scheme)
    assert any(each.startswith("in_place: ") and line in each for each in lines)
    assert {each.partition(":")[0] for each in lines} <= {"in_place", "observed"}


class OneMemory(RememberingAssigner):
    """Sums of steps, which go on from the memory of the first prompt for all."""

    features = 1

    def __init__(self, width):
        super().__init__()
        self.step = nn.Linear(width, 1)

    def remember(self, hidden_states, past):
        begun = 0 if past is None else past[:1, -1:]
        return begun + self.step(hidden_states).exp().cumsum(1)

    def recall(self, memory, seen):
        return memory[:, -seen.shape[-2] :, 0][:, None]


class Summed(OneMemory):
    """The same of each prompt: right, and so steep that rounding shows if drawn widely."""

    def remember(self, hidden_states, past):
        begun = 0 if past is None else past[:, -1:]
        return begun + self.step(hidden_states).exp().cumsum(1)


class Anew(OneMemory):
    """Sums that begin anew with every call."""

    def remember(self, hidden_states, past):
        return self.step(hidden_states).cumsum(1)


class ChangedMemory(Summed):
    def recall(self, memory, seen):
        memory *= 1.01
        return super().recall(memory, seen)


def remembering(kind):
    return built(lambda width, rotation: (kind(width), rotation.frequencies), learned=True)


def test_memories_that_are_wrong_are_found_and_their_advice_is_to_the_point():
    for wrong in (OneMemory, Anew):
        (line,) = lines_of(remembering(wrong))
        assert line.startswith("cache:") and "what remember and recall make of a token" in line
    assert lines_of(remembering(Summed)) == []
    *_, line = lines_of(remembering(ChangedMemory))
    assert line.startswith("in_place: ChangedMemory.recall changes memory")
    (line,) = lines_of(rotating(lambda h, i: h[..., 0].cumsum(1)))
    assert "keep what later tokens need in a RememberingAssigner" in line


class GatedAnew(PositionLogits):
    """Gates that are summed from the first token of a call."""

    def gate_keys(self, hidden_states):
        return hidden_states[..., :1].cumsum(1)[:, None]

    def forward(self, queries, keys, query_index, key_index, visible, scale, values, gate_keys):
        return visible * gate_keys[:, :1, None, :, 0]


def test_gates_of_a_call_are_found():
    (line,) = lines_of(built(lambda *given: (None, None), GatedAnew))
    assert "what gate_keys make of a token" in line


def test_the_default_precision_of_the_process_changes_nothing():
    """Found: refused, as if the attention of the stock decoder did not run on its own."""
    wanted = ri.verify_scheme("repo")
    try:
        for default in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(default)
            assert ri.verify_scheme("repo").identical(wanted), default
    finally:
        torch.set_default_dtype(torch.float32)


class Wrong(PositionLogits):
    def __init__(self, added):
        super().__init__()
        self.added = added

    def forward(self, queries, keys, *more):
        return self.added(torch.ones(1, 1, queries.shape[2], keys.shape[2]))


def adding(change):
    return built(lambda *given: (None, None), lambda: Wrong(change))


REFUSED = {
    "returns NoneType; wanted positions [batch, row, token]": rotating(lambda h, i: [None]),
    "returns [1, 24, 24]; wanted [batch, head, row, key]": adding(lambda ones: ones[0]),
    "position logits of layer 0 (mine) are NaN": adding(lambda ones: ones.log().div(0)),
    "frequencies of layer 0 (mine) are NaN": built(
        lambda width, rotation: (TokenIndex(), rotation.frequencies / 0)
    ),
    "has frequencies [3]; wanted 8": built(
        lambda width, rotation: (TokenIndex(), rotation.frequencies[:3])
    ),
    "has function as assigner; wanted an nn.Module": built(lambda *given: (rotating, None)),
    "cannot be built: TypeError": lambda builder, rotation: None,
    "cannot run: code of the scheme 'mine' failed (test_scheme_audit.py, line ": rotating(
        lambda h, i: raising()
    ),
    "gave NoneType by <lambda> of test_scheme_audit.py; wanted a function that returns": lambda builder, rotation, d_head: (
        None
    ),
}


def raising():
    raise RuntimeError("mine")


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_run_is_one_line_that_names_the_part(line):
    """Found: a traceback of torch each, or the queries of the next layer were blamed."""
    ri.register_scheme("mine", REFUSED[line])
    with pytest.raises(InputError) as refusal:
        ri.verify_scheme("mine")
    assert line in str(refusal.value)


def test_numbers_of_a_last_layer_that_are_not_finite_stop_a_measure():
    """Found: octaves gave 0 for a last layer whose logits were NaN."""
    ri.register_scheme("mine", adding(lambda ones: ones.log().div(0)))
    model = ri.load_model("language/rope")
    ri.reposition(model, "rope,rope,rope,mine")
    with pytest.raises(NotFinite, match=r"position logits of layer 3 \(mine\)"):
        ri.analyze(model, torch.arange(3, 40), ("octaves",))


def test_a_checkpoint_of_a_scheme_that_is_not_registered_names_it(tmp_path, monkeypatch):
    ri.register_scheme("mine", learning(True))
    ri.save(ri.reposition(ri.load_model("language/rope"), "mine@1/3"), tmp_path / "saved")
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    with pytest.raises(InputError, match=r"scheme 'mine' of layer 1 .* ri.register_scheme"):
        ri.load_model(tmp_path / "saved")


def test_default_measures_follow_what_positions_are_and_no_change_is_noted():
    """Found: a bias of another package was measured by its positions, the token index."""
    ri.register_scheme("mine", adding(lambda ones: ones))
    model = ri.open_model("language/rope")
    run = ri.analyze(ri.reposition(model, "mine"), torch.arange(3, 60), experiments=())
    assert "components" in run.children and "positions" not in run.children
    assert "not as it was loaded" not in run.attrs.get("notes", "")
    model.model.layers[1].mlp.down_proj.weight.data += 1
    changed = ri.analyze(model, torch.arange(3, 60), ("octaves",))
    assert "other weights in layers.1.mlp.down_proj.weight)" in changed.attrs["notes"]


class Shifted(PositionLogits):
    """Logits that depend on how many rows are asked for."""

    def forward(self, queries, keys, query_index, key_index, visible, logit_scale, *more):
        return 0.1 * queries.shape[2] * keys[..., :1].mT.repeat(1, 2, queries.shape[2], 1)


def test_logits_that_depend_on_the_rows_of_a_call_are_found():
    scheme = built(lambda *given: (None, None), Shifted)
    assert "rows" in findings_of(scheme)


class Forgetful(PositionBias):
    """A bias of which one weight is used and not saved, and another is saved and not used."""

    def __init__(self):
        super().__init__(4)
        self.unsaved, self.idle = torch.randn(()), nn.Parameter(torch.zeros(3))

    def bias(self, query_index, key_index):
        return self.unsaved * distances(query_index, key_index)


def test_weights_that_are_not_saved_or_not_trained_are_found():
    scheme = built(lambda *given: (TokenIndex(), None), Forgetful)
    assert findings_of(scheme) == {"saved", "gradient"}


def learning(learned, rows=2):
    return built(
        lambda width, rotation: (LearnedPositions(width, rows), rotation.frequencies),
        learned=learned,
    )


def test_a_scheme_that_does_not_say_that_it_learns_is_found():
    assert findings_of(learning(False)) == {"learned"}
    assert findings_of(learning(True)) == set()
    assert findings_of(rotating(lambda h, i: i.float(), learned=True)) == {"learned"}


@pytest.mark.parametrize("name", ["repo", "r3n1", "Mine", "1", "", "a,b", 3])
def test_names_that_layouts_know_or_cannot_hold_are_refused(name):
    with pytest.raises(InputError, match=r"know|wanted"):
        ri.register_scheme(name, learning(True))


def test_what_is_no_function_is_not_registered():
    with pytest.raises(InputError, match="wanted a function"):
        ri.register_scheme("mine", "build")  # pyright: ignore[reportArgumentType]


def test_a_registered_scheme_that_learns_is_measured_like_repo(tmp_path):
    ri.register_scheme("mine", learning(False))
    ri.register_scheme("mine", learning(True, rows=1))  # as when a cell of a notebook runs again
    repo, model = (ri.load_model("reversal/repo") for _ in range(2))
    layout = ",".join("mine" if scheme == "repo" else scheme for scheme in ri.layout(model))
    weights = model.state_dict()
    ri.reposition(model, layout)
    model.load_state_dict(weights)
    measures = ("positions", "patterns", "position_sources")
    prompts = make_task("reversal", "small").prompts(3)
    runs = [ri.analyze(one, prompts, measures) for one in (repo, model)]
    for group in measures:
        ours, theirs = (run[group].to_dataset().drop_vars("scheme") for run in runs)
        xr.testing.assert_identical(ours, theirs)
    of_repo, of_mine = ([each.sentence for each in ri.findings(run)] for run in runs)
    assert of_mine and of_mine == of_repo
    runs[1].to_netcdf(tmp_path / "mine.nc")
    schemes = ri.compare({"repo": runs[0], "mine": tmp_path / "mine.nc"})["positions"]["scheme"]
    assert schemes.attrs["learned"] == "mine" and "mine" in schemes.values


def test_experiments_about_one_position_per_token_are_refused_before_a_pass():
    model = ri.open_model("flip_flop/rope")
    ri.reposition(model, "selective_rope")
    with pytest.raises(InputError, match=r"saliency .* in layers 0-\d"):
        ri.analyze(model, measures=("positions",), experiments=("saliency",))
    chosen = default_experiments(as_decoder(model), *default_prompts(as_decoder(model), 2))
    assert "atlas" in [each.name for each in chosen]


def test_lookahead_of_long_prompts_alone_is_found_with_its_token():
    (line,) = lines_of(rotating(lambda h, i: i + next_of(h, most=40)))
    assert line.startswith("long: of a prompt of 64 tokens")
    # Parts of fewer than 40 tokens do not look ahead; the first token sees itself alone.
    assert line.endswith("nats, first in layer 0 at token 1 of head 0")


def test_documents_that_change_those_packed_behind_them_are_found():
    (line,) = lines_of(rotating(lambda h, i: i.cummax(1).values))
    assert line.startswith("packed: documents that are packed")
    # The second token of the second document: the first one sees itself alone.
    assert line.endswith("nats, first in layer 0 at token 11 of head 0")


def rotated(q, k, positions):
    theta = 1e4 ** (-torch.arange(8).double() / 8)
    q, k = (
        torch.complex(*x.chunk(2, -1)) * torch.exp(1j * positions[..., None] * theta)
        for x in (q, k)
    )
    return (q @ k.conj().mT).real / 4


def weighed(q, k, positions):
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return rotated(q, k, positions).masked_fill(~seen, -torch.inf).softmax(-1)


@pytest.mark.parametrize("reference", [rotated, weighed])
def test_attention_is_compared_with_a_slow_reference(reference):
    checked = ri.verify_scheme("rope", reference=reference)
    assert checked.attrs["findings"] == ""
    assert 0 < float(checked["difference"].sel(check="reference")) < 1e-4


def test_attention_that_differs_from_its_reference_is_found_with_its_tokens():
    def other(q, k, positions):
        logits = rotated(q, k, positions)
        logits[0, 3, 17, 5] += 0.5
        return logits

    (line,) = ri.verify_scheme("rope", reference=other).attrs["findings"].splitlines()
    assert line.startswith("reference: logits of layer ") and "in float32" in line
    assert "by up to 0.5 (head 3, query of token 17, key of token 5)" in line
    (line,) = ri.verify_scheme("rope", reference=lambda q, k, z: q).attrs["findings"].splitlines()
    assert line.startswith("reference: the reference returns [1, 4, 24, 16]; wanted")
