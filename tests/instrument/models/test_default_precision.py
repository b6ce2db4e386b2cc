"""Another default precision of torch changes no number and no weight."""

import math
from contextlib import contextmanager
from copy import deepcopy
from threading import Barrier, Thread

import pytest
import torch
import xarray as xr
from families import TOKENS, tiny
from torch.testing import assert_close

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.errors import NotFinite
from repo_interp.models.precision import float32_by_default

OTHERS = (torch.bfloat16, torch.float16, torch.float64)
LONG = torch.randint(3, 64, (1, 300), generator=torch.Generator().manual_seed(1))
PROMPT = ri.tasks.Prompt(tuple(TOKENS[0].tolist()), spans={"needle": (3, 4)}, generated=(18, 19))


@contextmanager
def default(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stored")
    tiny("llama").save_pretrained(directory)
    return directory


def logits(model, tokens=LONG):
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_a_checkpoint_opens_and_is_measured_in_float32(dtype, stored):
    """Found: "does not run on its own"."""
    names = ("positions", "rotation", "components", "predictions")
    right = ri.load_model(stored)
    expected = ri.analyze(right, PROMPT, names, experiments=("atlas",))
    with default(dtype):
        model = ri.load_model(stored)
        assert model.dtype == torch.float32
        run = ri.analyze(model, PROMPT, names, experiments=("atlas",))
        verified = ri.verify(stored, longest=16)
    assert_close(logits(model), logits(right), rtol=0, atol=0)
    for name in expected.children:
        xr.testing.assert_allclose(run[name].to_dataset(), expected[name].to_dataset(), 1e-5, 1e-6)
    assert run.attrs == expected.attrs and verified.attrs["findings"] == ""


@pytest.mark.parametrize("layout", ["repo", "alibi", "kerple", "fire", "cope_mlp", "hope", "path"])
@pytest.mark.parametrize("dtype", OTHERS[:2], ids=str)
def test_a_scheme_has_the_weights_and_logits_that_it_has_otherwise(dtype, layout):
    stock, found = tiny("llama"), []
    for kind in (torch.float32, dtype):
        with default(kind):
            torch.manual_seed(0)
            model = ri.reposition(deepcopy(stock), layout)
            found.append((model.state_dict(), logits(model)))
    assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    assert_close(found[1][1], found[0][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: iv.set_positions(model, 0, 1, [0.37 * place for place in range(300)]),
        lambda model: iv.ranked(model),
        lambda model: iv.segmented(model, [4, 9], step=0.37, jump=1.3),
        lambda model: iv.rescaled(model, factors=[0.3, 0.7, 0.9, 1.1]),
        lambda model: iv.rescaled(model, heads=[(0, 1)], yarn=2.3),
        lambda model: ri.ablate(model, [(0, 0)], pairs=[1]),
    ],
)
def test_interventions_are_those_of_float32(change):
    model = ri.reposition(tiny("llama"), "repo")
    with change(model):
        expected = logits(model)
    with default(torch.bfloat16), change(model):
        assert_close(logits(model), expected, rtol=0, atol=0)


def test_contexts_of_threads_end_in_any_order_and_leave_the_default():
    begun, ended = Barrier(2, timeout=10), Barrier(2, timeout=10)

    def first():
        with float32_by_default():
            begun.wait()
            ended.wait()

    with default(torch.bfloat16):
        thread = Thread(target=first)
        thread.start()
        begun.wait()
        with float32_by_default():
            ended.wait()
            thread.join()
            assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("dtype", "blamed"), [(torch.float32, False), (torch.float16, True)])
def test_float16_is_blamed_where_it_is_the_precision_alone(dtype, blamed):
    model = ri.reposition(tiny("llama"), "rope").to(dtype)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = math.inf
    with pytest.raises(NotFinite) as error:
        ri.analyze(model, PROMPT, ("components",))
    assert ("float16" in str(error.value)) == blamed
