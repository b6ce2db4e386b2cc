"""HoPE's scores and ablations (H6, H7): rules on given scores, and every figure on tiny models that
were trained for a few steps.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose
from trained_tiny import trained, without_weights
from verdicts import judged as rows
from verdicts import notes_of, verdicts_of

from position_papers.hope import copying, perplexity
from position_papers.hope.copying import COPYING
from position_papers.hope.end_of_text import EndOfText
from position_papers.hope.extended_scores import METHODS, scores, side_by_side, with_methods
from position_papers.hope.perplexity import PERPLEXITY
from position_papers.kit.cache import Cache
from position_papers.kit.experiment import run
from position_papers.kit.judge.claims import FAILS, HOLDS, UNDECIDED, UNMEASURABLE, Verdict
from position_papers.kit.scores import PLAIN, Scored, ScoreOptions, score_table
from position_papers.kit.subjects import subject
from position_papers.training.configuration import TrainingConfiguration, replaced
from position_papers.training.trained import Recorded
from position_papers.zoo_directory import DIRECTORY
from repo_interp.experiments.test_set_scores import task_scores
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder

TASK = {
    "symbols": 12,
    "sequences": 2,
    "first_sequences": 1,
    "questions": 1,
    "test_from": 2,
    "test_to": 6,
    "test_step": 2,
}
SETS = ("2", "4", "6")
LONGEST = 1 + 12 * 3
"""Training ends at two sequences and a question."""


def made(
    layout: str,
    within: float,
    beyond: float,
    methods: dict[str, float] | None = None,
    task: str = "copying",
) -> Scored:
    """A checkpoint that copies a share `within` of prompts of the first test set and `beyond` of
    the others, 100 prompts each.
    """
    count, shares = 100, {PLAIN: beyond, **(methods or {})}
    rows = [[within, share, share] for share in shares.values()]
    right = np.arange(count) < count * np.array(rows)[..., None]
    live = xr.Dataset(
        {
            "score": (("method", "test_set", "prompt"), right.astype(float)),
            "tokens": ("test_set", [1 + 12 * (int(name) + 1) for name in SETS]),
        },
        coords={"method": list(shares), "test_set": list(SETS)},
    )
    configuration = replaced(TrainingConfiguration(task=task), {"scheme": layout})
    return Scored(f"{task}/{layout}", layout, configuration, LONGEST, "exact match", live, ())


def judged(scored: list[Scored]) -> dict[str, Verdict]:
    """The verdicts on copying, by claim."""
    return {evidence.claim.label: evidence for evidence in rows(copying.tabulate(scored))}


def verdicts(*scored: Scored) -> dict[str, str]:
    """What became of each claim about copying."""
    return {label: verdict.outcome for label, verdict in judged(list(scored)).items()}


# ---- the rules -----------------------------------------------------------------------------------


def test_hope_must_be_above_every_rival_beyond_training():
    beyond = {"rope": 0.1, "alibi": 0.3, "kerple": 0.5, "fire": 0.0}
    rivals = [made(layout, 1.0, share) for layout, share in beyond.items()]
    (h6, pi, _) = judged([made("hope", 0.9, 0.8), *rivals]).values()
    assert (h6.outcome, pi.outcome, h6.estimate.n) == (HOLDS, UNMEASURABLE, 200)
    assert h6.estimate.value == pytest.approx(80)
    assert notes_of(h6).count("above") == 4 and "within L: copying/hope 90 %" in notes_of(h6)
    assert verdicts(made("hope", 1.0, 0.3), *rivals)["H6"] == FAILS
    alone = judged([made("hope", 1.0, 0.5), rivals[0]])["H6"]
    assert verdicts(made("hope", 1.0, 0.5), *rivals[1:])["H6"] == UNMEASURABLE
    assert "no checkpoint of alibi, kerple, fire" in notes_of(alone)


def test_legends_call_the_papers_repo_by_its_name_alone():
    layouts = {"repo@1/3": None, "repo@2": None, "rope": {"yarn": 0.3}}
    scored = [made(layout, 1.0, 0.5, methods) for layout, methods in layouts.items()]
    names = side_by_side(with_methods(scored), score_table)["checkpoint"].values.tolist()
    assert names == ["RePo", "RePo from layer 2", "RoPE", "RoPE + YaRN"]


def test_who_does_not_copy_is_not_compared():
    for hope, rope, reason in (
        ((1.0, 0.04), (1.0, 0.0), "nobody copies 4, 6 sequences"),
        ((0.1, 0.0), (1.0, 0.5), "did not learn to copy 2; "),
    ):
        verdict = judged([made("hope", *hope), made("rope", *rope)])["H6"]
        assert verdict.outcome == UNMEASURABLE and reason in notes_of(verdict)


def test_extended_models_are_compared_with_each_other():
    hope = made("hope", 1.0, 0.2, {"interpolation": 0.5, "yarn": 0.5})
    rope = made("rope", 1.0, 0.1, {"interpolation": 0.4, "yarn": 0.9})
    found = verdicts(hope, rope)
    assert (found["H6 (PI)"], found["H6 (YaRN)"]) == (HOLDS, FAILS)


def test_ablations_are_judged_beyond_the_training_length():
    rope, first, second = (
        made(layout, 0.9, share)
        for layout, share in (("rope", 0.1), ("hope_ab1", 0.6), ("hope_ab2", 0.2))
    )
    given = judged([rope, first, second, made("hope_ab3", 0.5, 0.0)])["H7"]
    assert (given.outcome, given.estimate.value) == (HOLDS, pytest.approx(60))
    found = verdicts(rope, second, made("hope_ab1", 0.9, 0.06), made("hope_ab3", 0.9, 0.3))
    assert (found["H7"], found["H7 (removed)"]) == (FAILS, FAILS)
    assert verdicts(rope, first, second)["H7 (removed)"] == UNMEASURABLE
    # That AB3 copies worst is what the second claim says: it need not have learned to copy.
    found = judged([rope, first, second, made("hope_ab3", 0.1, 0.0)])
    assert (found["H7"].outcome, found["H7 (removed)"].outcome) == (HOLDS, HOLDS)
    assert "hope_ab3" not in notes_of(found["H7"])


def test_extended_models_are_compared_over_the_seeds_that_have_weights():
    """Found: plain scores stood for three seeds, those with PI and YaRN for the first of them,
    which was the least of the three.
    """

    def with_seeds(layout: str, *shares: float) -> Scored:
        first, *others = [
            made(layout, 1.0, share, {"interpolation": share, "yarn": share}) for share in shares
        ]
        live = {seed: other.live for seed, other in enumerate(others, start=1)}
        return dataclasses.replace(first, other_seeds=live)

    hope, rope = with_seeds("hope", 0.1, 0.7, 0.8), with_seeds("rope", 0.2, 0.2, 0.3)
    verdict = judged([hope, rope])["H6 (YaRN)"]
    assert (verdict.estimate.seeds, verdict.interval.over) == (3, "3 seeds")
    assert verdict.estimate.value == pytest.approx(100 * 1.6 / 3)
    assert "over 3 paired seeds" in notes_of(verdict) and verdict.outcome == UNDECIDED


def test_perplexity_beyond_training_is_compared_with_rope():
    def model(layout: str, short: float, long: float) -> Scored:
        values = np.array([[[short, short + 0.2], [long, long + 0.2]]])
        live = xr.Dataset(
            {"score": (("method", "test_set", "prompt"), values), "tokens": ("test_set", [32, 64])},
            coords={"method": [PLAIN], "test_set": ["32", "64"]},
        )
        return dataclasses.replace(
            made(layout, 1, 1, task="language"),
            training_length=32,
            metric="log perplexity",
            live=live,
        )

    hope = model("hope", 2.0, 2.1)
    models = [hope, model("rope", 2.0, 3.0), model("alibi", 2.0, 2.0)]
    verdict = rows(perplexity.tabulate(models))[0]
    assert verdict.outcome == HOLDS and "alibi" in verdict.estimate.control
    assert verdict.estimate.value == pytest.approx(np.exp(2.2))
    (drawing,) = perplexity.draw(models)
    assert_allclose(drawing.data["score"].sel(checkpoint="HoPE", test_set=64), [np.exp(2.2)])
    for others, outcome in (([model("rope", 2.0, 2.1)], FAILS), ([], UNMEASURABLE)):
        assert rows(perplexity.tabulate([hope, *others]))[0].outcome == outcome


def test_recorded_scores_stand_in_for_weights():
    configuration = replaced(TrainingConfiguration(task="copying"), {"scheme": "hope"})
    means = {"2": 1.0, "4": 0.9, "6": 0.8}
    run = Recorded(0, "exact match", 200, 10, means, configuration)
    hope = Scored("copying/hope", "hope", configuration, LONGEST, "exact match", None, (run,))
    h6, pi, _ = judged([hope, made("rope", 1.0, 0.1)]).values()
    assert h6.outcome == HOLDS and h6.estimate.value == pytest.approx(85)
    assert "Wilson's 95 % interval" in h6.interval.over
    assert pi.outcome == UNMEASURABLE and "weights" in notes_of(pi)


# ---- trained checkpoints -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    for scheme in ("rope", "hope", "alibi", "hope_ab1", "hope_ab2", "hope_ab3"):
        trained(root / "copying" / scheme, "copying", scheme, task_options=TASK)
    without_weights(root / "copying" / "hope_ab2")
    text = "\n".join(["the cat sees a tree", "a tree sees the cat", "a tree sees the cat"] * 60)
    documents = root / "documents"
    documents.mkdir()
    for number in range(20):
        (documents / f"{number:02d}.txt").write_text(text[: 900 + number])
    options = {"corpus": str(documents), "tokens": 270, "length": 16, "longest_test": 32}
    for scheme in ("rope", "hope"):
        trained(root / "language" / scheme, "language", scheme, task_options=options)
    return root


def test_extended_models_answer_short_prompts_plainly_and_long_ones_otherwise(root):
    rope = subject("language/rope", root / "language" / "rope", str(root / "documents"))
    (scored,) = scores([rope], ScoreOptions(count=4, language_count=4), Cache())
    assert scored.live["tokens"].values.tolist() == [16, 32]
    plain, *extended = (
        scored.live["score"].sel({"method": method}).values for method in (PLAIN, *METHODS)
    )
    for values in extended:
        assert_allclose(values[0], plain[0])
        assert not np.allclose(values[1], plain[1], rtol=1e-7, atol=1e-9)


def test_every_figure_of_tiny_checkpoints(root, tmp_path):
    subjects = [
        subject(file.parent.relative_to(root).as_posix(), file.parent, str(root / "documents"))
        for file in sorted(root.glob("*/*/training.toml"))
    ]
    options, said, results = ScoreOptions(count=4, language_count=4), [], []
    for experiment in (COPYING, PERPLEXITY):
        results += run(experiment, subjects, options, Cache(tmp_path), said.append)
    claims = {each.claim for each in verdicts_of(*results)}
    assert claims == {*COPYING.claims, *PERPLEXITY.claims}
    assert any("copying/hope_ab2" in text for text in said)
    first, second = (drawing for result in results for drawing in result.drawings)
    assert first.name.startswith("copying_") and second.name == "perplexity_by_length"
    assert [*first.data["checkpoint"].values].count("HoPE + YaRN") == 1
    for drawing in (first, second):
        drawing.figure.draw_without_rendering()
    assert len(first.figure.axes) == 3, "schemes, with PI and YaRN, ablations"


def test_other_seeds_answer_the_prompts_of_the_first(tmp_path):
    for seed, folder in enumerate(("rope", "rope/seed-1", "rope/seed-2")):
        trained(tmp_path / folder, "copying", "rope", task_options=TASK, seed=seed)
    without_weights(tmp_path / "rope/seed-2")
    together, alone = (
        scores([subject("copying/rope", tmp_path / folder)], ScoreOptions(count=4), Cache())[0]
        for folder in ("rope", "rope/seed-1")
    )
    assert alone.other_seeds == {} and list(together.other_seeds) == [1]
    xr.testing.assert_equal(together.other_seeds[1], alone.live)
    of_both, of_one = (each.sample(SETS, "yarn").seeds.tolist() for each in (together, alone))
    assert of_both[1:] == of_one


def test_the_end_of_a_text_is_scored_token_by_token():
    """HoPE fig. 5: the last tokens of the very windows of the task, by plain transformers."""
    path = str(DIRECTORY / "language/rope")
    own = subject("rope", path).task
    assert own is not None
    ended = EndOfText(**own.options(), last=20)
    model, prompts = load_model(path, "cpu"), own.prompts(2, 0, "64")
    assert [prompt.tokens for prompt in ended.prompts(2, 0, "64")] == [
        prompt.tokens for prompt in prompts
    ]
    assert ended.targets(prompts[0]) == tuple(range(44, 64))
    assert EndOfText(**own.options()).targets(prompts[0]) == tuple(range(1, 64))
    found = task_scores(as_decoder(model), ended, ["64"], count=2)["score"].values[0]
    for prompt, score in zip(prompts, found, strict=True):
        tokens = torch.tensor(prompt.tokens)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].double()
        nats = -logits.log_softmax(-1)[torch.arange(43, 63), tokens[44:]]
        assert score == pytest.approx(float(nats.mean()), abs=1e-5)
