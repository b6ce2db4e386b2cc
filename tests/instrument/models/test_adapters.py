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
from repo_interp.checkpoint_files.stored import ADAPTER
from repo_interp.cli import main
from repo_interp.models import adapters
from repo_interp.models.adapters import attach, fitting_changes, save_adapter
from repo_interp.models.checkpoints import load_model, load_tokenizer, save
from repo_interp.models.configuration import identify
from repo_interp.models.reposition import layout, reposition, with_layout
from repo_interp.shipped import shipped_names, zoo_names, zoo_path
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


def test_a_fresh_adapter_changes_positions_alone(base, tmp_path):
    model = load_model(base)
    reposition(model, "repo@1/3")
    attach(model, rank=2)
    expected = model(TOKENS).logits
    adapters.round_trained(model)
    save_adapter(model, tmp_path / "fresh", adapters.base_reference(identify(base), str(base)))
    loaded = load_model(tmp_path / "fresh")
    assert layout(loaded) == ("rope", "repo", "repo")
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
    steps = []

    def after_two():
        steps.append(1)
        return len(steps) == 2

    adapted_on(base, tmp_path / "cut", after_two)
    state = torch.load(tmp_path / "cut" / "state.pt", weights_only=True)
    assert not any("embed_tokens" in name or "base_layer" in name for name in state["model"])
    adapted_on(base, tmp_path / "cut")
    for name in (ADAPTER, "adapter_config.json", "config.json", "scores.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (adapter / name).read_bytes()


def test_the_scores_are_those_of_what_is_stored(adapter):
    from repo_interp.experiments.responses import forced_responses

    stated = json.loads((adapter / "scores.json").read_text())
    task, model = make_task("reversal"), load_model(adapter)
    for test_set in task.test_sets[:3]:
        prompts = task.prompts(stated["prompts"], 0, test_set)
        assert (
            np.mean(task.score(forced_responses(model, task, prompts), prompts))
            == stated["test_sets"][test_set]
        )


@pytest.mark.usefixtures("no_figures")
def test_every_command_takes_it(adapter, base, tmp_path, capsys):
    assert main(["inspect", str(adapter)]) == 0
    assert "an adapter on top of" in capsys.readouterr().out
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text('{"tokens": [5, 6, 7, 8, 9, 10]}\n')
    asked = ["--measures", "positions", "--prompts", str(prompts), "--out", str(out)]
    assert main(["analyze", str(adapter), *asked]) == 0
    run = ri.read_run(out)
    assert run.attrs["layout"] == "rope,repo,repo"
    assert run.attrs["checkpoint"] == f"{adapter.parent.name}/repo"
    bridge = ri.load(adapter)
    assert bridge.tokenizer.get_vocab() == load_tokenizer(identify(base)).get_vocab()
    assert trained_task(adapter).training_length == make_task("reversal").training_length


def test_what_is_loaded_is_whole_and_is_saved_as_that(adapter, tmp_path):
    model = load_model(adapter)
    save(model, tmp_path / "whole")
    assert identify(tmp_path / "whole").base is None
    assert torch.equal(load_model(tmp_path / "whole")(TOKENS).logits, model(TOKENS).logits)
    half = load_model(adapter, dtype="bfloat16", positions_dtype="float32")
    exact = model.state_dict()
    assert half.dtype == torch.bfloat16
    assigned = {name: value for name, value in half.state_dict().items() if ".assigner." in name}
    assert assigned and all(torch.equal(value, exact[name]) for name, value in assigned.items())
    with refused("save it whole"):
        load_model(adapter, device_map="auto")
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(adapter)(TOKENS).logits, model(TOKENS).logits
    )


@pytest.mark.parametrize("scheme", ["cope", "learned"])
def test_other_schemes_make_adapters_too(base, tmp_path, scheme):
    directory = adapted_on(base, tmp_path / scheme, scheme=scheme, steps=2)
    assert layout(load_model(directory)) == (scheme,) * LAYERS


def test_products_in_bfloat16_leave_positions_and_weights_as_they_are(base, tmp_path):
    from repo_interp.positions.assigners import LearnedPositions

    assign, hidden = LearnedPositions(16, 2), torch.randn(1, 5, 16) * 30
    with torch.autocast("cpu", torch.bfloat16):
        positions = assign(hidden, torch.arange(5)[None])
        assert assign.gate_map(hidden).dtype == torch.bfloat16
    assert torch.equal(positions, assign(hidden, torch.arange(5)[None]))
    directory = adapted_on(base, tmp_path / "half", precision="bfloat16")
    losses = [
        json.loads(line)["loss"] for line in (directory / "log.jsonl").read_text().splitlines()
    ]
    assert np.isfinite(losses).all()
    assert load_model(directory).dtype == torch.float32


def test_a_base_that_is_not_there_or_another_one_is_refused_in_one_line(
    base, adapter, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "cache"))
    other = trained(tmp_path / "other", "reversal", "rope", layers=LAYERS, seed=1)
    cases = {
        "no/such/place": "no checkpoint directory",
        "smollm2-135m": "repo-interp fetch smollm2-135m",
        str(other): "sha256",
    }
    for number, (name, said) in enumerate(cases.items()):
        elsewhere = moved(adapter, tmp_path / str(number), name)
        assert main(["score", str(elsewhere), "--out", str(tmp_path / "scores")]) == 2
        error = capsys.readouterr().err
        assert "is an adapter on top of" in error and said in error and error.count("\n") == 1


def test_an_adapter_that_does_not_fit_is_refused_by_name(base, adapter, tmp_path):
    prefix = "base_model.model.model.layers"
    down, up = (f"{prefix}.0.self_attn.q_proj.lora_{part}.weight" for part in "AB")
    learned = f"{prefix}.1.self_attn.assigner.final_map.weight"
    stored = load_file(adapter / ADAPTER)
    cases = {
        "lacks 1 of its weights.*q_proj": {down: None},
        "lacks 1 of its weights.*final_map": {learned: None},
        "changes nothing": {f"{prefix}.9.self_attn.q_proj.lora_A.weight": stored[down]},
        "changes nothing that": {f"{prefix}.0.mlp.up_proj.weight": stored[down]},
        "has shape": {up: stored[up].T.contiguous()},
        "twice": {learned.removeprefix("base_model.model."): stored[learned]},
        "not finite": {learned: torch.full_like(stored[learned], torch.nan)},
    }
    for number, (said, values) in enumerate(cases.items()):
        with refused(said):
            load_model(changed(adapter, tmp_path / str(number), **values))


LORA = {
    "use_dora": True,
    "use_rslora": True,
    "fan_in_fan_out": True,
    "lora_bias": True,
    "bias": "all",
    "alpha_pattern": {"q_proj": 32},
    "rank_pattern": {"q_proj": 1},
    "layer_replication": [[0, 2], [1, 3]],
    "trainable_token_indices": [1],
    "target_parameters": ["q_proj.weight"],
    "exclude_modules": ["q_proj"],
    "init_lora_weights": "pissa",
    "layers_pattern": "blocks",
    "an_option_of_tomorrow": 1,
    "target_modules": "q_proj|k_proj",
}


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


def test_matrices_that_are_not_there_or_not_named_are_refused(adapter, tmp_path):
    both = [f"base_model.model.model.layers.1.self_attn.v_proj.lora_{part}.weight" for part in "AB"]
    with refused(r"lacks 1 of its weights \(first: model.layers.1.self_attn.v_proj"):
        load_model(changed(adapter, tmp_path / "lost", **dict.fromkeys(both)))
    for name, options in {
        "layers": {"layers_to_transform": [1, 2]},
        "modules": {"target_modules": ["q_proj"]},
    }.items():
        with refused("changes nothing"):
            load_model(configured(adapter, tmp_path / name, **options))


BASES = {
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "rms_norm_eps": 0.1,
    "hidden_act": "relu",
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
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with refused(r"repo-interp\[adapter\]"):
        prepare(configuration_on(base))


SHIPPED = tuple(name for name in shipped_names() if name not in zoo_names())


@pytest.mark.parametrize("name", SHIPPED)
def test_one_that_ships_has_its_record_and_wants_its_base(name, tmp_path, monkeypatch):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))
    directory = zoo_path(name)
    assert sum(file.stat().st_size for file in directory.iterdir()) < 9e6
    configuration, known = trained_configuration(directory), identify(name)
    assert known.base.name == configuration.continue_from == name.partition("/")[0]
    assert known.config.max_position_embeddings == 2048
    (scores,) = recorded_scores(directory)
    row = next(
        line
        for line in (directory.parent / "README.md").read_text().splitlines()
        if line.startswith(f"| `{name}`")
    )
    tokens = configuration.steps * configuration.batch * configuration.accumulation * 1024
    assert row.endswith(f"| {tokens:,} | {scores.means['1024']:.3f} | {scores.means['2048']:.3f} |")
    assert scores.steps == configuration.steps
    with init_empty_weights(include_buffers=False):
        whole = with_layout(
            AutoModelForCausalLM.from_config(known.config), ",".join(known.layout), **known.options
        )
    fitting_changes(whole, directory)
    with refused("repo-interp fetch smollm2-135m"):
        ri.load(name)


def test_one_of_them_at_least_ships():
    assert "smollm2-135m/repo" in SHIPPED
