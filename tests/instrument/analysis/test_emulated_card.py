"""Models on an emulated GPU: no operator mixes two devices, and the numbers are those of the
processor.
"""

import copy

import numpy as np
import pytest
import torch
from emulated_card import OnCard, emulated_card
from families import TOKENS, repositioned, tiny

import repo_interp as ri
import repo_interp.interventions as iv
from repo_interp.explorer import Edit, Session
from repo_interp.measures.measure_catalogue import measure_names
from repo_interp.models import attention
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks.prompt import Prompt

PROMPTS = [
    Prompt(tuple(TOKENS[0].tolist()), {"needle": (2, 3, 4), "query": (12, 13)}, (17, 18, 19)),
    Prompt(tuple(TOKENS[1, :17].tolist()), {"needle": (5, 6), "query": (9, 10, 11)}, (14, 15, 16)),
]


@pytest.fixture(autouse=True)
def plain_tables(monkeypatch):
    """Identity tables are a subclass of Tensor, and so are tensors of the emulated GPU."""
    monkeypatch.setattr(attention, "identity_tables", lambda tables: tables)


def on_both(model, compute):
    """Compute on the processor, then on the emulated GPU."""
    here = compute(model)
    with emulated_card() as card:
        there = compute(copy.deepcopy(model).to(card))
    return here, there


def assert_same_numbers(here, there):
    assert set(here) == set(there)
    for name in here:
        for variable, expected in here[name].data_vars.items():
            found = there[name][variable]
            if expected.dtype.kind != "f":
                continue  # ranks and indices, which rounding may exchange
            largest = float(np.abs(np.nan_to_num(expected, posinf=0, neginf=0)).max(initial=0))
            np.testing.assert_allclose(
                found, expected, rtol=0, atol=2e-4 * largest, err_msg=f"{name}.{variable}"
            )


def test_the_card_refuses_what_a_card_refuses():
    with emulated_card() as card:
        ones = torch.ones(3, device=card)
        assert isinstance(ones, OnCard) and (ones + 1).cpu().tolist() == [2, 2, 2]
        for refused in (
            lambda: ones + torch.ones(3),
            lambda: torch.ones(3)[ones.long()],
            ones.numpy,
        ):
            with pytest.raises((RuntimeError, TypeError)):
                refused()


@pytest.mark.filterwarnings("ignore::repo_interp.analysis.notes.SilentMeasure")
@pytest.mark.parametrize("variant", ["repo@1", "cope", None])
def test_all_measures_have_the_numbers_of_the_processor(variant):
    torch.manual_seed(0)
    model = tiny("gemma2") if variant is None else repositioned(variant)

    assert_same_numbers(
        *on_both(
            model, lambda one: ri.analyze(one, PROMPTS, measure_names(), experiments=()).children
        )
    )


def test_layers_share_what_is_made_of_their_frequencies():
    """A copy per layer had sums over all distances made anew in each of them."""
    with emulated_card() as card:
        model = ri.open_model("niah/rope").to(card)
        decoder, tokens, seen = as_decoder(model), torch.arange(5, 25, device=card)[None], []
        valid = torch.ones_like(tokens, dtype=torch.bool)
        capture(decoder, tokens, valid, torch.arange(1), seen.append)
    assert len(seen) == 4 and isinstance(seen[0].frequencies, OnCard)
    assert len({id(one.frequencies) for one in seen}) == 1


def test_experiments_scores_and_the_explorer_have_the_numbers_of_the_processor():
    model, task = ri.open_model("reversal/repo"), ri.tasks.make_task("reversal")
    prompts = task.prompts(2, test_set="12")

    def measured(given):
        experiments = (ri.experiments.Saliency(steps=2), ri.experiments.Atlas(twins=1, sequences=2))
        run = ri.analyze(given, prompts, (), experiments=experiments, task=task)
        scores = ri.score(given, task, ["12"], 2, answers="generated")
        return {group: run[group] for group in run.children} | {"scores": scores["scores"]}

    def explored(given):
        edits = [Edit(kind="scaled", layer=1, value=2.0), Edit(kind="mean_ablated", heads=[(2, 0)])]
        session = Session(given, prompts[:1], edits)
        return session.changed([(2, 0)], token=session.start - 1)["curve"].values

    assert_same_numbers(*on_both(model, measured))
    np.testing.assert_allclose(*on_both(model, explored), atol=1e-4)


EDITS = {
    "set": lambda model: iv.set_positions(model, 1, 0, [2.0 * token for token in range(20)]),
    "permuted": lambda model: iv.permuted(model, tokens=[3, 4, 9]),
    "straightened": iv.straightened,
    "copied": lambda model: iv.copied(model, 3),
    "swapped": lambda model: iv.swapped_tokens(model, 2, 5),
    "rescaled": lambda model: iv.rescaled(model, 1, 0, factors=[1, 0.5, 0, 1]),
    "yarn": lambda model: iv.yarn(model, 4, 128),
    "LM-Infinite": lambda model: iv.lm_infinite(model, 8, 2),
    "keys": lambda model: iv.exchanged_keys(model, {1: torch.arange(20).flip(0).expand(2, -1)}),
    "hard": iv.hard_attention,
    "ablated": lambda model: iv.ablate(model, [(0, 0)], pairs=[0]),
}


def test_interventions_change_a_model_on_the_card_alike():
    torch.manual_seed(0)

    def logits(model):
        found = []
        for edit in EDITS.values():
            with torch.no_grad(), edit(model):
                found.append(model(TOKENS.to(model.device)).logits.cpu())
        return torch.stack(found)

    here, there = on_both(repositioned("repo@1"), logits)
    torch.testing.assert_close(there, here, atol=1e-4, rtol=0)
    assert len({float(one.sum()) for one in here}) == len(EDITS)
