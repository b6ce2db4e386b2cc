"""Training: the same configuration gives the same bytes, whatever happens in between; gradients
reach what should learn.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
import tomllib
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forked
from numpy.testing import assert_allclose
from task_tokenizers import tokenizer
from torch.utils import deterministic as memory
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from position_papers.training import step as schedule
from position_papers.training.configuration import (
    TrainingConfiguration,
    read_toml,
    replaced,
    to_toml,
)
from position_papers.training.folder import TrainingFolder, load_state
from position_papers.training.loop import train, train_side_by_side
from position_papers.training.preparation import prepare, reproducible
from position_papers.training.processes import end_when_asked, side_by_side
from position_papers.training.step import (
    add_gradient,
    make_optimizer,
    take_step,
    training_question,
)
from repo_interp.analysis.trained_task import trained_task
from repo_interp.cli import main
from repo_interp.errors import InputError, Unfinished
from repo_interp.experiments.responses import to_question
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.models.fresh_weights import load_fresh
from repo_interp.models.reposition import layout, mix_with_index, with_layout
from repo_interp.tasks import Batch, make_task

TINY = TrainingConfiguration(
    task="reversal",
    task_options={"words": 6, "longest": 4, "first_longest": 3, "longest_test": 5},
    scheme="repo",
    layers=2,
    width=16,
    heads=2,
    steps=12,
    batch=4,
    warm_up=3,
    curriculum=0.5,
    log_every=4,
    score_every=0,
    score_prompts=4,
    deterministic=True,
)


MADE = {"command": "repo-interp train"}


def begun(directory: Path, configuration: TrainingConfiguration = TINY) -> TrainingFolder:
    folder = TrainingFolder(directory)
    folder.begin(to_toml(configuration))
    return folder


def go_on(folder: TrainingFolder, configuration: TrainingConfiguration = TINY, **options) -> None:
    """Train to the end, or until told to stop."""
    for _ in train(prepare(configuration), folder, **options):
        pass


def trained(configuration: TrainingConfiguration, directory: Path) -> TrainingFolder:
    folder = begun(directory, configuration)
    go_on(folder, configuration)
    return folder


def weights(folder: TrainingFolder) -> bytes:
    return (folder.directory / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> TrainingFolder:
    return trained(TINY, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def rope(tmp_path_factory) -> TrainingFolder:
    return trained(replaced(TINY, {"scheme": "rope"}), tmp_path_factory.mktemp("rope") / "run")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Forty short texts."""
    folder = tmp_path_factory.mktemp("sources")
    for number in range(40):
        (folder / f"{number}.txt").write_text(
            f"chapter {number}: " + "one of the special magic numbers is blue. " * 20
        )
    return folder


def test_the_same_configuration_gives_the_same_bytes_and_another_seed_does_not(
    undisturbed, tmp_path
):
    assert weights(trained(TINY, tmp_path / "again")) == weights(undisturbed)
    assert weights(trained(replaced(TINY, {"seed": 1}), tmp_path / "other")) != weights(undisturbed)


@pytest.mark.parametrize("at", [1, 11])
def test_a_run_that_is_stopped_anywhere_ends_with_the_same_bytes_and_log(undisturbed, tmp_path, at):
    folder, asked = begun(tmp_path / "run"), iter(range(1, 99))
    go_on(folder, stop=lambda: next(asked) == at)
    assert not folder.is_finished and folder.state.exists()
    folder.append({"step": -1})  # written after the state was saved: forgotten when the run goes on
    go_on(folder)
    assert weights(folder) == weights(undisturbed)
    assert without_times(folder) == without_times(undisturbed)
    assert not folder.state.exists()


def without_times(folder: TrainingFolder) -> list[dict]:
    return [record | {"seconds": 0} for record in folder.records()]


def test_a_run_that_is_killed_ends_with_the_same_bytes(tmp_path):
    long = replaced(TINY, {"steps": 40, "checkpoint_every": 20, "log_every": 1})
    expected = weights(trained(long, tmp_path / "undisturbed"))
    folder = begun(tmp_path / "run", long)
    process = Forked(lambda: go_on(folder, long, save_seconds=0.0))
    while steps_done(folder) < 10:
        time.sleep(0.002)
    process.kill()
    assert process.wait().returncode == -signal.SIGKILL
    assert not folder.is_finished and folder.state.exists()
    go_on(folder, long)
    assert weights(folder) == expected
    assert [record["step"] for record in folder.records()] == list(range(1, 41))
    kept = sorted((folder.directory / "steps").iterdir())
    assert [step.name for step in kept] == ["000020", "000040"]
    assert weights(TrainingFolder(kept[-1])) == expected
    assert not list(folder.directory.glob("**/*.unfinished"))


def steps_done(folder: TrainingFolder) -> int:
    records = folder.records()
    return records[-1]["step"] if records else -1


def test_a_finished_folder_loads_and_says_how_it_was_made(undisturbed):
    model = load_model(undisturbed.directory)
    assert layout(model) == ("repo", "repo")
    task = make_task("reversal", **TINY.task_options)
    assert model.config.max_position_embeddings == task.training_length
    stated = read_toml(undisturbed.configuration)
    assert replaced(TrainingConfiguration(task=stated["task"]), stated) == TINY
    assert list(json.loads(undisturbed.scores.read_text())["test_sets"]) == ["2", "3", "4", "5"]
    assert undisturbed.records()[-1]["step"] == TINY.steps


def test_fresh_twins_of_different_schemes_start_with_the_same_weights():
    repo, rope = (
        prepare(replaced(TINY, {"scheme": scheme})).model.state_dict()
        for scheme in ("repo", "rope")
    )
    assert all(torch.equal(weight, repo[name]) for name, weight in rope.items())
    assert all(".assigner." in name for name in repo.keys() - rope.keys())
    assert len(repo) - len(rope) == 2 * 3


def test_a_random_twin_is_drawn_as_the_trained_checkpoint_was(tmp_path):
    """Weights with the deviation of the model that training went on from, f_phi with its own; both
    are there when it is loaded again.
    """
    deviations = {"width": 64, "initial_deviation": 0.02, "scheme_deviation": 0.113, "steps": 1}
    began = trained(replaced(TINY, {**deviations, "scheme": "rope"}), tmp_path / "rope").directory
    went_on = replaced(TINY, {"scheme_deviation": 0.113, "steps": 1, "continue_from": str(began)})
    twin = load_fresh(trained(went_on, tmp_path / "repo").directory, 0).original_model
    for layer in twin.model.layers:
        parts = layer.self_attn.q_proj, layer.self_attn.assigner.gate_map
        assert_allclose([part.weight.std().item() for part in parts], [0.02, 0.113], rtol=0.2)


def test_gradients_reach_f_phi_and_the_loss_goes_down():
    short = {"words": 4, "longest": 2, "first_longest": 2, "longest_test": 2}
    prepared = prepare(replaced(TINY, {"task_options": short, "learning_rate": 0.01, "batch": 32}))
    question = training_question(prepared.task, prepared.configuration, 0, 1.0)
    (before,) = add_gradient(prepared.model, question)
    for attention in as_decoder(prepared.model).layers:
        for weight in attention.assigner.parameters():
            assert weight.grad.abs().max() > 0
    for _ in range(40):
        take_step(prepared.model, prepared.optimizer, [question], 0.01, 1.0)
    assert sum(add_gradient(prepared.model, question)) < 0.5 * before


@pytest.mark.parametrize("at_a_time", [1, 7])
def test_a_loss_in_parts_has_the_gradient_of_the_whole_and_never_all_logits(monkeypatch, at_a_time):
    """The mean cross-entropy of the targets alone; in float64 to the last digits, with an embedding
    that is the head too.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, tie_word_embeddings=True, **sizes, **heads)
    model: Any = with_layout(LlamaForCausalLM(config), "repo").double()
    tokens, asked = torch.randint(3, 50, (3, 12)), torch.rand(3, 12) < 0.7
    asked[:, 0] = False
    question, count = to_question(Batch(tokens.numpy(), asked.numpy())), int(asked.sum())
    logits = model(tokens).logits.log_softmax(-1)
    whole = -sum(logits[row, at - 1, tokens[row, at]] for row, at in asked.nonzero()) / count
    (whole / 3).backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()

    made: list[weakref.ref[torch.Tensor]] = []

    def note(head: Any, given: Any, logits: torch.Tensor) -> None:
        assert logits.numel() <= at_a_time * 50
        assert all(earlier() is None for earlier in made)
        made.append(weakref.ref(logits))

    model.lm_head.register_forward_hook(note)
    monkeypatch.setattr(schedule, "MOST_LOGITS", at_a_time * 50 + 3)
    # of the package they are float32
    monkeypatch.setattr(
        schedule, "next_token_logits", lambda decoder, states: model.lm_head(states)
    )
    losses = add_gradient(model, question, 3)
    assert len(losses) == len(made) == -(-count // at_a_time) and count > 7
    assert_allclose(sum(losses).item(), whole.item() / 3, rtol=1e-14)
    for name, weight in model.named_parameters():
        assert_allclose(weight.grad, wanted[name], rtol=1e-11, atol=1e-16, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*profiler:UserWarning")
@pytest.mark.parametrize("scheme", ["rope", "repo", "cope"])
def test_steps_attend_in_a_fused_kernel_with_positions_in_float32(scheme):
    sizes = {"width": 32, "heads": 4, "kv_heads": 2, "scheme": scheme}
    prepared = prepare(replaced(TINY, sizes))
    question = training_question(prepared.task, prepared.configuration, 0, 1.0)
    dtypes = set()
    for attention in as_decoder(prepared.model).layers:
        attention.sites.positions.register_forward_hook(
            lambda site, given, positions: dtypes.add(positions.dtype)
        )
    with torch.profiler.profile() as profile:
        add_gradient(prepared.model, question, precision="bfloat16")
    called = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in called or scheme in (
        "alibi",
        "cope",
    )
    assert dtypes <= {torch.float32} and (dtypes or scheme not in ("rope", "repo"))


def test_sums_have_one_order_where_that_is_asked_for(capsys):
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    for device, asked, wanted in (
        ("cpu", None, True),
        ("cuda", None, False),
        ("cpu", False, False),
        ("cuda", True, True),
    ):
        configuration = replaced(TINY, {"device": device, "deterministic": asked})
        assert recorded(configuration)["deterministic"] is wanted
        with reproducible(configuration):
            assert torch.are_deterministic_algorithms_enabled() is wanted
            assert not memory.fill_uninitialized_memory
    with (
        pytest.raises(InputError, match=r"^scheme repo cannot .* cpu .*; give --no-deterministic$"),
        reproducible(TINY),
    ):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))  # has no such algorithm
    after = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    assert after == before


def test_accumulated_halves_are_one_whole_batch():
    batch, changed = make_task("niah", length=64).batch(np.random.default_rng(0), 8), []
    for parts in ([slice(8)], [slice(4), slice(4, 8)]):
        model = prepare(replaced(TINY, {"task": "niah", "task_options": {"length": 64}})).model
        questions = [to_question(Batch(batch.tokens[rows], batch.targets[rows])) for rows in parts]
        take_step(model, torch.optim.SGD(model.parameters(), lr=1.0), questions, 1.0, 1e9)
        changed.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert_allclose(changed[0], changed[1], atol=1e-6)


def test_the_gradient_is_clipped_and_vectors_do_not_decay():
    prepared = prepare(TINY)
    model, question = prepared.model, training_question(prepared.task, TINY, 0, 1.0)
    before = [weight.detach().clone() for weight in model.parameters()]
    take_step(model, torch.optim.SGD(model.parameters(), lr=1.0), [question], 1.0, clip=1e-3)
    moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
    assert_allclose(torch.cat([part.flatten() for part in moved]).norm(), 1e-3, rtol=1e-2)
    for group, decay, axes in zip(
        make_optimizer(model, TINY).param_groups, (TINY.weight_decay, 0.0), (2, 1), strict=True
    ):
        assert group["weight_decay"] == decay
        assert {weight.ndim for weight in group["params"]} == {axes}


def test_schedules_at_their_corners():
    shape = {"steps": 100, "warm_up": 10, "learning_rate": 1.0, "final_share": 0.1}
    configuration = replaced(TINY, shape | {"curriculum": 0.4, "index_share_until": 0.5})
    for function, values in (
        (schedule.learning_rate, {1: 0.1, 10: 1, 55: 0.55, 100: 0.1}),
        (schedule.progress, {1: 0, 21: 0.5, 41: 1, 100: 1}),
        (schedule.index_share, {1: 1, 26: 0.5, 51: 0, 100: 0}),
    ):
        found = [function(configuration, step) for step in values]
        assert_allclose(found, list(values.values()), err_msg=function.__name__)
        assert max(function(configuration, step) for step in range(1, 101)) == 1.0
    assert schedule.progress(replaced(configuration, {"curriculum": 0.0}), 1) == 1.0
    assert schedule.index_share(replaced(configuration, {"index_share_until": 0.0}), 1) == 0.0
    assert schedule.learning_rate(replaced(configuration, {"warm_up": 0}), 1) < 1.0


def test_going_on_from_rope_changes_nothing_while_positions_are_the_index(rope):
    task = make_task("reversal", **TINY.task_options)
    tokens = torch.from_numpy(task.batch(np.random.default_rng(0), 4).tokens)
    before = load_model(rope.directory)(tokens).logits
    going_on = {"continue_from": str(rope.directory), "index_share_until": 0.5}
    on = prepare(replaced(TINY, going_on)).model
    mix_with_index(as_decoder(on), 1.0)
    assert_allclose(on(tokens).logits.detach(), before.detach(), atol=1e-6)
    mix_with_index(as_decoder(on), 0.0)
    assert (on(tokens).logits - before).abs().max() > 1e-4


def test_a_continued_run_anneals_to_learned_positions_and_can_be_saved(rope, tmp_path):
    going_on = {"continue_from": str(rope.directory), "index_share_until": 0.5}
    folder = trained(replaced(TINY, going_on | {"scheme": "repo@1/2"}), tmp_path / "on")
    assert layout(load_model(folder.directory)) == ("rope", "repo")


def test_configuration_survives_toml_and_refuses_what_cannot_be():
    odd = {"learning_rate": 1e-05, "continue_from": 'a "quoted" \\ path é', "deterministic": False}
    odd = replaced(
        TrainingConfiguration(task="reversal"),
        odd | {"scheme_options": {"assignment": "layer"}, "execution": "compiled"},
    )
    assert replaced(TrainingConfiguration(task="x"), recorded(odd)) == odd
    with pytest.raises(InputError, match="no TOML file"):
        read_toml(Path(os.devnull).parent)  # a directory is no file
    with pytest.raises(InputError, match="has no 'stepps'"):
        replaced(TINY, {"stepps": 3})


def test_compiled_steps_are_refused_where_they_cannot_be(monkeypatch):
    compiled = replaced(TINY, {"execution": "compiled"})
    with pytest.raises(InputError, match="wanted eager with index_share_until"):
        replaced(compiled, {"index_share_until": 0.5})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler, .* no no-such-compiler here"):
        prepare(compiled)


# within torch, when it gets ready to compile
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_a_decoder_runs_as_compiled_code_while_the_context_lasts(monkeypatch):
    """Found: torch.compile could not trace how tables become the identity, and no test traced
    it.
    """
    # traces; making code takes 40 seconds more
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    prepared = prepare(TINY)
    decoder, tokens = prepared.model.model, torch.tensor([[1, 4, 5, 6]])
    whole = decoder(tokens).last_hidden_state
    with schedule.executing(prepared.model, "compiled"):
        assert decoder.forward.__name__ == "forward" and "forward" in vars(decoder)
        assert torch.equal(decoder(tokens).last_hidden_state, whole)
    assert "forward" not in vars(decoder)


def recorded(configuration: TrainingConfiguration) -> dict:
    """What the record of a run states of its configuration."""
    stated = tomllib.loads(to_toml(configuration, MADE))
    assert stated.pop("made_with") == MADE
    return stated


def test_a_run_asked_to_stop_while_it_is_scored_is_scored_the_next_time(undisturbed, tmp_path):
    """Found: the scores at the end, minutes long for CoPE, came without a word and went on after an
    interrupt.
    """
    folder, told = begun(tmp_path / "run"), []
    note = lambda done, total: told.append((done, total))  # noqa: E731
    go_on(folder, stop=lambda: bool(told), scoring=note)
    prompts = TINY.score_prompts * len(make_task(TINY.task, **TINY.task_options).test_sets)
    assert told == [(TINY.score_prompts, prompts)]
    assert not folder.is_finished and not folder.scores.exists()
    go_on(folder, scoring=note)
    assert told[-1] == (prompts, prompts) and told[1:] == sorted(told[1:])
    assert weights(folder) == weights(undisturbed)
    assert folder.scores.read_bytes() == undisturbed.scores.read_bytes()


def lack_memory(done: int, total: int) -> None:
    torch.empty(1 << 60)


def end_now(done: int, total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("scoring", "error"),
    [
        (lack_memory, r"\(out of memory\): .*/unscored, without a score; score them by .*--resume"),
        (end_now, "^$"),
    ],
)
def test_a_run_whose_scores_fail_keeps_its_weights_and_says_where(
    undisturbed, tmp_path, scoring, error
):
    folder = begun(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt if scoring is end_now else Unfinished, match=error):
        go_on(folder, scoring=scoring)
    kept = (folder.unscored / "model.safetensors").read_bytes()
    assert kept == weights(undisturbed) and not folder.is_finished and not folder.scores.exists()
    assert layout(load_model(folder.unscored)) == ("repo", "repo")
    (folder.unscored / "model.safetensors").unlink()  # as where a process died while it moved files
    go_on(folder)
    assert weights(folder) == kept and not folder.unscored.exists()
    assert folder.scores.read_bytes() == undisturbed.scores.read_bytes()


def test_predictions_that_are_not_finite_leave_weights_without_a_score(tmp_path):
    """The score of the last record fails, before the state of the last step is saved."""
    folder, broken = begun(tmp_path / "run"), prepare(TINY)
    records = train(broken, folder)
    next(records), next(records)
    with torch.no_grad():
        broken.model.lm_head.weight[0] = math.nan
    with pytest.raises(Unfinished, match=r"are NaN or infinite.*unscored, without a score"):
        list(records)
    assert (folder.unscored / "model.safetensors").is_file()


def test_folders_refuse_what_they_would_destroy(undisturbed, tmp_path):
    with pytest.raises(InputError, match="finished training run"):
        undisturbed.require_free()
    foreign = TrainingFolder(tmp_path)
    (tmp_path / "thesis.tex").touch()
    for refused in (foreign.require_free, foreign.clear):
        with pytest.raises(InputError, match="holds no training run"):
            refused()
    unfinished = begun(tmp_path / "begun")
    with pytest.raises(InputError, match="--resume"):
        unfinished.require_free()
    unfinished.clear()
    unfinished.require_free()
    assert not unfinished.directory.exists()


def test_a_run_in_a_fresh_process_ends_with_the_same_bytes(undisturbed, tmp_path):
    folder = begun(tmp_path / "run")
    assert train_side_by_side([(TINY, folder.directory)], jobs=1, watch=lambda: None)
    assert weights(folder) == weights(undisturbed)


@pytest.mark.usefixtures("forking")
def test_runs_side_by_side_are_the_runs_one_by_one_also_when_interrupted(undisturbed, tmp_path):
    of_long = replaced(TINY, {"steps": 3000, "log_every": 10})
    short, long = begun(tmp_path / "short"), begun(tmp_path / "long", of_long)

    def interrupt() -> None:
        if steps_done(long) > 0 and short.is_finished and not interrupts:
            interrupts.append(os.kill(os.getpid(), signal.SIGINT))

    interrupts, runs = [], [(TINY, short.directory), (of_long, long.directory)]
    assert not train_side_by_side(runs, jobs=2, watch=interrupt, every=0.02)
    assert weights(short) == weights(undisturbed)
    assert not long.is_finished
    again = prepare(of_long)
    assert 0 < load_state(long.state, again.model, again.optimizer, 3000).step < 3000


def sleeping(seconds: int) -> None:
    end_when_asked()
    time.sleep(seconds)


@pytest.mark.usefixtures("forking")
def test_an_interrupt_ends_work_side_by_side_at_once_and_an_error_lets_nothing_more_begin():
    interrupts = []

    def interrupt(done: int) -> None:
        if not interrupts:
            interrupts.append(os.kill(os.getpid(), signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        side_by_side([10_000, 10_000], sleeping, 2, interrupt, every=0.02)
    counts: list[int] = []
    with pytest.raises(TypeError):
        side_by_side([0.0, "x", *[0.2] * 50], time.sleep, 1, counts.append)
    assert max(counts) < 52


def test_a_hugging_face_checkpoint_goes_on_with_its_own_tokenizer_and_is_scored(
    sources, tmp_path, capsys
):
    """The paper's way: an existing decoder, its tokenizer, its embeddings padded to more rows than
    there are tokens.
    """
    given, hub, mine = tokenizer("metaspace_bpe"), tmp_path / "hub", tmp_path / "mine"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(given) + 24, **sizes, **heads)).save_pretrained(hub)
    given.save_pretrained(hub)
    corpus = f"--set corpus={sources} --set length=16 --set longest_test=32"
    on = f"--continue-from {hub} --scheme repo@1/3 {corpus} --steps 2 --batch 2 --score-prompts 2"
    assert main(f"train language {on} --out {mine}".split()) == 0
    model = load_model(mine)
    assert layout(model) == ("rope", "repo", "repo") and model.config.vocab_size == len(given) + 24
    before = LlamaForCausalLM.from_pretrained(hub).model.embed_tokens.weight
    assert not torch.equal(model.model.embed_tokens.weight, before)
    assert AutoTokenizer.from_pretrained(mine).get_vocab() == given.get_vocab()
    assert main(f"score {hub} language {corpus} --count 3 --out {tmp_path}/scores".split()) == 0
    assert "on language" in capsys.readouterr().out


def test_a_language_model_goes_on_and_is_scored_in_its_own_tokens(sources, tmp_path):
    options = {"corpus": str(sources), "tokens": 280, "length": 16, "longest_test": 32}
    language = replaced(TINY, {"task": "language", "task_options": options, "scheme": "rope"})
    first = trained(language, tmp_path / "first").directory
    with pytest.raises(InputError, match=r"give --set corpus=CORPUS"):
        trained_task(first)  # a checkpoint names no folder of its reader
    task = trained_task(first, corpus=str(sources))
    assert task.tokenizer_file == str(first / "tokenizer.json")
    # would be another tokenizer, were it not for the checkpoint's
    other = {"task_options": options | {"tokens": 300}, "continue_from": str(first)}
    second = trained(replaced(language, other), tmp_path / "second")
    assert load_model(second.directory).config.vocab_size == task.vocabulary_size == 280
    assert set(json.loads(second.scores.read_text())["test_sets"]) == {"16", "32"}


def test_a_continued_run_records_no_sizes_of_a_fresh_model():
    """Found: the record of a run that continued 8 layers of width 256 said 4 layers of width 64."""
    sizes = {"layers", "width", "heads", "kv_heads", "feed_forward", "initial_deviation"}
    continued = recorded(replaced(TINY, {"continue_from": "runs/other"}))
    assert not sizes & set(continued) and "scheme_deviation" in continued
    assert {"layers", "width"} <= set(recorded(TINY))
