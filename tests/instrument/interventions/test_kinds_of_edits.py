"""A kind of position edit is one class: what is offered of it follows, and its parameter is given
as that of any other.
"""

import inspect
import sys

import pytest
import torch
from families import repositioned
from forked import forked
from refusals import refused

from repo_interp import interventions as iv
from repo_interp.experiments.position_changes import KINDS as MEASURED
from repo_interp.explorer.session_edits import POSITIONS
from repo_interp.interventions.position_edit import KINDS

TOKENS = torch.arange(3, 23)[None]
SCRATCH = '''
from repo_interp.interventions.position_edit import FormRow, PositionEdit, bounded
from repo_interp.values import Finite


class Mirrored(PositionEdit):
    """Mirror positions at a place: z_i <- 2 at - z_i.

    Args:
        at: The place.
    """

    at: Finite = bounded("the place that positions are mirrored at", default=0.0)
    words = "mirrored at {at:g}"
    form = FormRow("mirrored", "at", "place")
    become, does = "mirrored", "mirroring them"

    def edited(self, z, here):
        return 2 * self.at - z
'''
USE = """
import pytest
import torch
import xarray as xr

import repo_interp as ri
from repo_interp.errors import InputError
from repo_interp.experiments import Effects
from repo_interp.explorer.explored import Explored
from repo_interp.explorer.messages import message
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.causes.effects_view import effect_tables
from repo_interp.tasks import make_task
from repo_interp.runtime.option_texts import value_of

iv, bridge = ri.interventions, ri.load("reversal/repo")
task = make_task("reversal")
prompts = task.prompts(2, test_set="5")
tokens = torch.tensor([prompts[0].tokens])
assert "mirrored" in dir(iv) and "at: The place." in iv.mirrored.__doc__

def under(context):
    with context, torch.no_grad():
        return bridge(tokens)

for edit in (iv.mirrored(bridge, 3.0, layer=2), iv.mirrored(bridge, at=3.0, layer=2)):
    changed = under(edit)
    assert torch.equal(changed, under(iv.set_positions(bridge, 2, values=lambda z: 6.0 - z)))
with pytest.raises(InputError, match="the place that positions are mirrored at is 'x'"):
    iv.mirrored(bridge, "x")

explored = Explored(bridge, prompts)
row = explored.answer(message({"ask": "open"}))["edits"]["mirrored"]
assert (row["says"], row["field"], row["label"]) == ("mirrored", "value", "place")
asked = {"heads": [[2, 0]], "token": 5, "edits": [{"kind": "mirrored", "layer": 2, "value": 3.0}]}
seen = explored.answer(message({"ask": "view"} | asked))
assert seen["sentences"] == ["layer 2: mirrored at 3"]
code = explored.answer(message({"ask": "python"} | asked))["python"]
assert "ri.interventions.mirrored(bridge, 3.0, layer=2)" in code

effects = Effects(kinds=("mirrored",), draws=1)
group = effects.measured(as_decoder(bridge), task, prompts)
assert group["kind"].values.tolist() == ["mirrored"]
with iv.mirrored(bridge, layer=2), torch.no_grad():
    by_hand = bridge(tokens)[0].log_softmax(-1)
targets = list(task.targets(prompts[0]))
expected = by_hand[[place - 1 for place in targets], tokens[0, targets]].mean()
found = (group["clean_log_probability"] + group["layer_log_probability_change"]).sel(
    layer=2, prompt=0, kind="mirrored"
)
assert abs(float(found) - float(expected)) < 1e-5
tables = effect_tables(xr.DataTree.from_dict({"/effects": group}))
assert "'mirrored'" in repr(tables)
"""


def test_a_new_kind_is_one_class():
    """In a process of its own, so that the kind is gone afterwards; one that imports this package
    anew, and not torch.
    """

    def use() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "repo_interp"]:
            del sys.modules[name]
        exec(compile(SCRATCH + USE, "a new kind", "exec"), {"__name__": "__main__"})

    done = forked(use)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return repositioned("repo")


def logits(model, context):
    with context, torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("name", ["scaled", "rounded", "shifted"])
def test_a_number_is_given_before_the_heads_or_by_name(name, model):
    function, heads = getattr(iv, name), [(1, 0), (1, 1)]
    (_, field, *_) = inspect.signature(function).parameters
    by_place = logits(model, function(model, 2.0, heads, tokens=[5, 9]))
    by_name = logits(model, function(model, heads=heads, tokens=[5, 9], **{field: 2.0}))
    assert torch.equal(by_place, by_name)
    assert not torch.equal(by_place, model(TOKENS).logits)
    with refused(r"is \[\(1, 0\), \(1, 1\)\]; wanted a number from"):
        function(model, heads)


def test_positions_are_set_in_all_heads_where_none_is_named(model):
    values = torch.arange(20.0) / 2
    expected = logits(model, iv.set_positions(model, 1, None, values))
    assert torch.equal(logits(model, iv.set_positions(model, layer=1, values=values)), expected)
    with refused("to set in layer 1 are no numbers"):
        logits(model, iv.set_positions(model, 1))


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_says_what_each_of_its_doors_needs(name):
    kind = KINDS[name]
    assert (name in iv.__all__) == kind.is_function
    assert (name in MEASURED) == bool(kind.does) and (name in POSITIONS) == bool(kind.form)
    assert kind.form is None or (kind.asked() is None) == (kind.form.parameter == "")
    for field in inspect.signature(kind).parameters:
        if kind.is_function and field != "tokens":
            assert f"\n    {field}: " in getattr(iv, name).__doc__
