"""Adapters: what is trained, what is stored, that merging gives what peft computes, and what is
refused.
"""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from numpy.testing import assert_allclose
from refusals import refused
from safetensors.torch import load_file, save_file
from trained_tiny import trained
from transformers import AutoModelForCausalLM

import repo_interp as ri
from position_papers.training.configuration import TrainingConfiguration, replaced, to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.loop import train
from position_papers.training.preparation import prepare
from position_papers.training.trained import recorded_scores, trained_configuration
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.shipped import shipped_names, zoo_names, zoo_path
from repo_interp.checkpoint_files.stored import ADAPTER
from repo_interp.cli import main
from repo_interp.models.checkpoints import load_model, load_tokenizer
from repo_interp.models.configuration import identify
from repo_interp.models.reposition import layout, reposition, with_layout
from repo_interp.models.saving import save
from repo_interp.plugins.adapters import adapter_training, adapters
from repo_interp.plugins.adapters.adapter_training import attach, round_trained, save_adapter
from repo_interp.plugins.adapters.adapters import fitting_changes
from repo_interp.tasks import make_task

LAYERS = 3
ADAPTER_FIELDS = {
    "scheme": "repo@1/3",
    "adapter": 2,
    "steps": 4,
    "batch": 2,
    "score_prompts": 2,
    "score_every": 0,
    "warm_up": 1,
}
TOKENS = torch.arange(2, 26).reshape(2, 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("base") / "rope", "reversal", "rope", layers=LAYERS)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return adapted_on(base, tmp_path_factory.mktemp("adapter") / "repo")


def configuration_on(base, **fields):
    return replaced(
        TrainingConfiguration(task="reversal"),
        {**ADAPTER_FIELDS, "continue_from": str(base), **fields},
    )


def adapted_on(base, directory, stop=lambda: False, **fields):
    configuration, folder = configuration_on(base, **fields), TrainingFolder(directory)
    folder.begin(to_toml(configuration))
    for _ in train(prepare(configuration), folder, stop):
        pass
    return directory


def changed(adapter, directory, **values):
    """A copy of the adapter with tensors exchanged, added, or (None) left out."""
    shutil.copytree(adapter, directory)
    tensors = {**load_file(adapter / ADAPTER), **values}
    save_file(
        {name: value for name, value in tensors.items() if value is not None}, directory / ADAPTER
    )
    return directory


def configured(adapter, directory, name="adapter_config.json", /, **options):
    """A copy of the adapter with options of LoRA changed, or others in the file `name`."""
    shutil.copytree(adapter, directory)
    file = directory / name
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return directory


def moved(adapter, directory, base):
    """A copy of the adapter on top of another base."""
    stated = json.loads((adapter / "config.json").read_text())["adapter"]
    return configured(adapter, directory, "config.json", adapter=stated | {"name": str(base)})


def differing(base, directory):
    """The weights of the base that another checkpoint has otherwise."""
    before, after = load_model(base).state_dict(), load_model(directory).state_dict()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("scheme", ["repo@1/3", "cope", "learned"])
def test_a_fresh_adapter_changes_positions_alone(base, tmp_path, scheme):
    model = reposition(load_model(base), scheme)
    attach(model, rank=2)
    round_trained(model)
    expected = model(TOKENS).logits
    save_adapter(model, tmp_path / "fresh", adapters.base_reference(identify(base), str(base)))
    loaded = load_model(tmp_path / "fresh")
    assert layout(loaded) == layout(model)
    assert differing(base, tmp_path / "fresh") == set()
    assert_allclose(loaded(TOKENS).logits.detach(), expected.detach(), atol=1e-5)


def test_what_is_merged_is_what_peft_computes(base, adapter, tmp_path):
    from peft import PeftModel

    named = configured(adapter, tmp_path / "as-peft-names-it", peft_type="LORA")
    positioned = reposition(load_model(base), "repo@1/3")
    # peft asks transformers for what has another name by now
    with warnings.catch_warnings(action="ignore"):
        reference = PeftModel.from_pretrained(positioned, str(named)).eval()
    merged = load_model(adapter)
    assert_allclose(merged(TOKENS).logits.detach(), reference(TOKENS).logits.detach(), atol=1e-5)
    older = load_model(named)  # as adapters once were written
    assert torch.equal(older(TOKENS).logits, merged(TOKENS).logits)
    assert (merged(TOKENS).logits - load_model(base)(TOKENS).logits).abs().max() > 1e-4


def test_the_sum_is_rounded_once(base, adapter):
    stored = {
        name.removeprefix("base_model.model."): value.double()
        for name, value in load_file(adapter / ADAPTER).items()
    }
    name = "model.layers.1.self_attn.v_proj"
    added = 2.0 * stored[f"{name}.lora_B.weight"] @ stored[f"{name}.lora_A.weight"]  # alpha = 2 r
    expected = (load_model(base).state_dict()[f"{name}.weight"].double() + added).float()
    assert torch.equal(load_model(adapter).state_dict()[f"{name}.weight"], expected)
    assert added.abs().max() > 0


def test_training_changes_what_the_adapter_holds_and_nothing_else(base, adapter):
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert differing(base, adapter) == {
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in range(LAYERS)
        for name in projections
    }
    assert (adapter / ADAPTER).stat().st_size < (base / "model.safetensors").stat().st_size
    assert not (adapter / "tokenizer.json").exists()


def test_layers_below_its_first_stay_as_they_are(base, tmp_path):
    above = adapted_on(base, tmp_path / "above", adapter_from=2)
    assert {name.split(".")[2] for name in differing(base, above)} == {"2"}
    assert json.loads((above / "adapter_config.json").read_text())["layers_to_transform"] == [2]


def test_the_same_seed_gives_the_same_bytes_however_often_it_is_interrupted(
    base, adapter, tmp_path
):
    asked = iter([False, True])
    adapted_on(base, tmp_path / "cut", lambda: next(asked))
    state = torch.load(tmp_path / "cut" / "state.pt", weights_only=True)
    assert not any("embed_tokens" in name or "base_layer" in name for name in state["model"])
    adapted_on(base, tmp_path / "cut")
    for name in (ADAPTER, "adapter_config.json", "config.json", "scores.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (adapter / name).read_bytes()


def test_the_scores_are_those_of_what_is_stored(adapter):
    from repo_interp.experiments.responses import forced_responses

    stated = json.loads((adapter / "scores.json").read_text())
    task, model = make_task("reversal"), load_model(adapter)
    test_set = task.test_sets[0]
    prompts = task.prompts(stated["prompts"], 0, test_set)
    scores = task.score(forced_responses(model, task, prompts), prompts)
    assert np.mean(scores) == stated["test_sets"][test_set]


def test_it_is_inspected_and_measured_with_the_tokenizer_and_task_of_its_base(
    adapter, base, capsys
):
    assert main(["inspect", str(adapter)]) == 0
    assert "an adapter on top of" in capsys.readouterr().out
    bridge = ri.load(adapter)
    run = ri.analyze(bridge, [tuple(range(5, 11))], ["positions"])
    assert run.attrs["layout"] == "rope,repo,repo"
    assert run.attrs["checkpoint"] == f"{adapter.parent.name}/repo"
    assert bridge.tokenizer.get_vocab() == load_tokenizer(identify(base)).get_vocab()
    assert trained_task(adapter).training_length == make_task("reversal").training_length


def test_what_is_loaded_is_whole_and_is_saved_as_that(adapter, tmp_path):
    model = load_model(adapter)
    expected = model(TOKENS).logits
    save(model, tmp_path / "whole")
    assert identify(tmp_path / "whole").base is None
    assert torch.equal(load_model(tmp_path / "whole")(TOKENS).logits, expected)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(adapter)(TOKENS).logits, expected)
    with refused("save it whole"):
        load_model(adapter, device_map="auto")


def test_learned_positions_keep_their_precision_in_a_rounded_adapter_where_asked(adapter):
    half = load_model(adapter, dtype="bfloat16", positions_dtype="float32")
    exact = load_model(adapter).state_dict()
    assert half.dtype == torch.bfloat16
    assigned = {name: value for name, value in half.state_dict().items() if ".assigner." in name}
    assert assigned and all(torch.equal(value, exact[name]) for name, value in assigned.items())


def test_products_in_bfloat16_leave_weights_as_they_are(base, tmp_path):
    directory = adapted_on(base, tmp_path / "half", precision="bfloat16")
    log = (directory / "log.jsonl").read_text().splitlines()
    assert np.isfinite([json.loads(line)["loss"] for line in log]).all()
    assert load_model(directory).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/such/place", "no checkpoint directory"),
        ("smollm2-135m", "repo-interp fetch smollm2-135m"),
        ("reversal/rope", "sha256"),
    ],
)
def test_a_base_that_is_not_there_or_another_one_is_refused_in_one_line(
    adapter, tmp_path, monkeypatch, name, said
):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    with refused(f"is an adapter on top of .*{said}"):
        load_model(moved(adapter, tmp_path / "moved", name))


PREFIX = "base_model.model.model.layers"


LEARNED = f"{PREFIX}.1.self_attn.assigner.final_map.weight"


DOWN, UP = (f"{PREFIX}.0.self_attn.q_proj.lora_{part}.weight" for part in "AB")


CHANGES = {
    "lacks 1 of its weights.*q_proj": lambda stored: {DOWN: None},
    "lacks 1 of its weights .first: model.layers.0.self_attn.q_proj": lambda stored: {
        DOWN: None,
        UP: None,
    },
    "lacks 1 of its weights.*final_map": lambda stored: {LEARNED: None},
    "changes nothing that": lambda stored: {f"{PREFIX}.0.mlp.up_proj.weight": stored[DOWN]},
    "has shape": lambda stored: {UP: stored[UP].T.contiguous()},
    "twice": lambda stored: {LEARNED.removeprefix("base_model.model."): stored[LEARNED]},
    "not finite": lambda stored: {LEARNED: torch.full_like(stored[LEARNED], torch.nan)},
}


@pytest.mark.parametrize("said", CHANGES)
def test_an_adapter_that_does_not_fit_is_refused_by_name(adapter, tmp_path, said):
    with refused(said):
        values = CHANGES[said](load_file(adapter / ADAPTER))
        load_model(changed(adapter, tmp_path / "changed", **values))


LORA = {
    "use_dora": True,
    "bias": "all",
    "alpha_pattern": {"q_proj": 32},
    "init_lora_weights": "pissa",
    "an_option_of_tomorrow": 1,
    "target_modules": "q_proj|k_proj",
}


@pytest.mark.parametrize(
    "options", [{"layers_to_transform": [1, 2]}, {"target_modules": ["q_proj"]}]
)
def test_matrices_that_are_not_named_are_refused(adapter, tmp_path, options):
    with refused("changes nothing"):
        load_model(configured(adapter, tmp_path / "changed", **options))


@pytest.mark.parametrize("option", LORA)
def test_options_of_lora_that_change_numbers_are_refused_by_name(adapter, tmp_path, option):
    with refused(option):
        load_model(configured(adapter, tmp_path / "changed", **{option: LORA[option]}))


def test_options_of_lora_that_are_off_are_taken(adapter, tmp_path):
    from peft import LoraConfig

    stated = LoraConfig().to_dict()
    for name in ("r", "lora_alpha", "target_modules"):
        del stated[name]
    loaded = load_model(configured(adapter, tmp_path / "spelt", **stated | {"peft_type": "LORA"}))
    assert torch.equal(loaded(TOKENS).logits, load_model(adapter)(TOKENS).logits)


BASES = {
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "attention_bias": True,
}


@pytest.mark.parametrize("key", BASES)
def test_a_base_of_another_configuration_is_refused_by_name(base, adapter, tmp_path, key):
    other = configured(base, tmp_path / "other", "config.json", **{key: BASES[key]})
    elsewhere = moved(adapter, tmp_path / "moved", other)
    with refused(f"on top of a model whose {key} is .*; that of .*other is"):
        load_model(elsewhere)


def test_what_cannot_be_trained_is_refused_before_anything_is_written(base, adapter, monkeypatch):
    with refused("a checkpoint to stand on"):
        replaced(TrainingConfiguration(task="reversal"), {"adapter": 2})
    for below, fields, line in (
        (adapter, {}, "an adapter itself"),
        (base, {"adapter_from": 3}, "the model's are 0 to 2"),
        (base, {"adapter": 100_000}, "rank 100,000"),
    ):
        with refused(line):
            prepare(configuration_on(below, **fields))
    monkeypatch.setattr(adapter_training, "find_spec", lambda name: None)
    with refused(r"repo-interp\[adapter\]"):
        prepare(configuration_on(base))


SHIPPED = tuple(name for name in shipped_names() if name not in zoo_names())
assert "smollm2-135m/repo" in SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_one_that_ships_has_its_record_and_wants_its_base(name, tmp_path, monkeypatch):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))
    directory = zoo_path(name)
    assert sum(file.stat().st_size for file in directory.iterdir()) < 9e6
    configuration, known = trained_configuration(directory), identify(name)
    assert known.base.name == configuration.continue_from == name.partition("/")[0]
    assert known.config.max_position_embeddings == 2048
    (scores,) = recorded_scores(directory)
    assert scores.steps == configuration.steps
    tokens = configuration.steps * configuration.batch * configuration.accumulation * 1024
    row = f"| {tokens:,} | {scores.means['1024']:.3f} | {scores.means['2048']:.3f} |\n"
    written = (directory.parent / "README.md").read_text().splitlines(keepends=True)
    assert any(line.startswith(f"| `{name}`") and line.endswith(row) for line in written)
    with init_empty_weights(include_buffers=False):
        whole = AutoModelForCausalLM.from_config(known.config)
    fitting_changes(with_layout(whole, ",".join(known.layout), **known.options), directory)
    with refused("repo-interp fetch smollm2-135m"):
        ri.load_model(name)
