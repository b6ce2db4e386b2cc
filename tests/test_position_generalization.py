"""The paper's recipes on small random models of every kind of position: verdicts by rule, and none where there is nothing to judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from families import tiny
from repo_interp.papers.kit.figure_directory import write_figures
from repo_interp.papers.position_generalization.measurements import Measured, measure_checkpoint
from repo_interp.papers.position_generalization.rules import CLAIMS

import repo_interp as ri
from repo_interp.errors import InputError
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import UNMEASURED
from repo_interp.papers.position_generalization import recipe as paper
from repo_interp.papers.position_generalization.tolerance import rope_twin
from repo_interp.tasks import make_task

LENGTH = 32


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    torch.manual_seed(0)
    home = tmp_path_factory.mktemp("language")
    text = home / "text.txt"
    text.write_text("\n".join(f"sentence {number} says that {number * 7 % 101} comes next." for number in range(4000)))
    task = make_task("language", corpus=str(text), tokens=300, length=LENGTH, longest_test=2 * LENGTH)
    checkpoints = {}
    for scheme in ("rope", "repo@1", "learned", "nope"):
        stock = tiny("llama")
        stock.resize_token_embeddings(task.vocabulary_size, mean_resizing=False)
        stock.config.max_position_embeddings = LENGTH
        model = ri.reposition(stock, scheme)
        checkpoints[scheme] = home / scheme.replace("@", "_")
        ri.save(model, checkpoints[scheme], task.tokenizer())
    for scheme in ("rope", "repo"):  # trained on another task, as far as they say
        other = make_task("reversal", longest=6, longest_test=12)
        stock = tiny("llama")
        stock.resize_token_embeddings(other.vocabulary_size, mean_resizing=False)
        directory = checkpoints[f"reversal {scheme}"] = home / f"reversal_{scheme}"
        ri.save(ri.reposition(stock, scheme), directory, other.tokenizer())
        (directory / "training.toml").write_text('task = "reversal"\n[task_options]\nlongest = 6\nlongest_test = 12\n')
    checkpoints["scores alone"] = home / "scores"
    checkpoints["scores alone"].mkdir()
    (checkpoints["scores alone"] / "scores.json").write_text("{}")
    options = paper.Options(
        sequences=2, prompts=4, controls=1, draws=2, gammas=(0.5,), l_maxes=(5,), longer=8, reach=2, corpus=str(text)
    )
    said, again = [], []
    cache = Cache(home / "cache")
    results = paper.figures(checkpoints, options, said.append, cache)
    repeated = measure_checkpoint("rope", checkpoints["rope"], options, again.append, cache)
    return results, home, checkpoints, said, repeated, again


def test_every_claim_is_judged_where_it_can_be(found):
    results, _, checkpoints, said, _, _ = found
    verdicts = {(one.claim.id, one.checkpoint): one for result in results for one in result.verdicts}
    asked = {claim: {name for (of, name) in verdicts if of == claim} for claim in {claim.id for claim in CLAIMS}}
    others = {"reversal rope", "reversal repo"}
    checkpoints = set(checkpoints) - others - {"scores alone"}
    assert asked["P1"] == asked["P3"] == asked["P6"] == checkpoints
    assert asked["P6 (task)"] == asked["P6 (task, features)"] == asked["P6 (task, positions)"] == others
    assert asked["P2"] == {"rope", "repo@1"}  # the others' fake logits are additive by construction
    assert asked["P4"] == {"rope", "repo@1"}
    assert asked["P6 (learned)"] == {"repo@1", "learned", "reversal repo"}  # each against RoPE on its own task
    assert asked["P7"] == checkpoints - {"learned"}  # its table ends at the training length
    assert asked["P6 (positions)"] == checkpoints - {"nope"}
    measured = [one for one in verdicts.values() if one.verdict != UNMEASURED]
    assert len(measured) >= len(verdicts) - 1, "only of the last comparison there may be nothing to compare"
    assert all(np.isfinite(one.ours) for one in measured)
    assert {one.claim.id for one in paper.unmeasured(results)} == {claim for claim, names in asked.items() if not names}
    assert "nope: longer prompts" in said


def test_figures_and_verdicts_are_written(found):
    results, home, _, _, _, _ = found
    few = [result for result in results if result.name in ("fits_rope", "perturbation_rope")]
    files = {file.name for file in write_figures(home / "figures", paper.TITLE, few, paper.unmeasured(few), "command", {})}
    assert {"README.md", "verdicts.csv"} < files
    names = {result.name for result in results}
    for stem in ("three_axis", "fake_distance", "rotation", "extrapolation", "output_traces"):
        assert f"{stem}_rope" in names
    for stem in ("fits", "perturbation"):
        assert {f"{stem}_rope.png", f"{stem}_rope.svg", f"{stem}_rope.pdf", f"{stem}_rope.nc"} <= files
    assert "Position Generalization" in (home / "figures" / "README.md").read_text()


def test_what_was_measured_is_not_measured_again(found):
    results, _, _, said, repeated, again = found
    assert "rope: fits" in said and again == []
    kept = next(result.data for result in results if result.name == "perturbation_rope")
    np.testing.assert_array_equal(repeated.run["perturbation"]["log_perplexity"], kept["log_perplexity"])
    assert set(repeated.run.children) >= {"three_axis", "fake_distance", "maps", "rotation", "extrapolation", "output_traces"}


def test_the_module_keeps_to_the_protocol_of_papers():
    assert paper.Options(**paper.FAST).sequences < paper.Options().sequences
    assert paper.CLAIMS is CLAIMS and {"language/rope", "language/repo", "niah/rope", "niah/repo"} <= set(paper.ZOO)
    assert all(one.verdict == UNMEASURED and one.note.startswith("needs ") for one in paper.unmeasured([]))
    assert [one.claim for one in paper.unmeasured([])] == list(CLAIMS)


def test_too_little_to_judge_on_is_refused():
    for wrong in ({"draws": 1}, {"longer": 2}, {"reach": 3}):
        with pytest.raises(InputError):
            paper.Options(**wrong)  # pyright: ignore[reportArgumentType]


def test_the_twin_is_a_rope_model_of_the_same_task_and_budget():
    def measured(name, layout, task, continued):
        nothing = xr.DataTree()
        return Measured(name, layout, 16, task, nothing, (), xr.Dataset(), continued, paper.Options())

    fresh, continued = (measured(name, ("rope", "rope"), "language", name == "continued") for name in ("fresh", "continued"))
    other, mixed = measured("other", ("rope", "rope"), "niah", True), measured("mixed", ("rope", "repo"), "language", True)
    everyone = [other, mixed, fresh, continued]
    assert rope_twin(mixed, everyone) is continued
    assert rope_twin(measured("learned", ("learned", "learned"), "language", False), everyone) is fresh
    assert rope_twin(mixed, [other, mixed, fresh]) is fresh
    assert rope_twin(mixed, [other, mixed]) is None
