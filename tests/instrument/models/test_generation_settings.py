"""Settings of generation: a checkpoint keeps them, `generate` follows them, measures do not."""

import json

import pytest
import torch
from families import TOKENS, tiny
from larger import small_larger
from refusals import refused
from task_tokenizers import tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

import repo_interp as ri
from benchmarks.families import small_model
from repo_interp.checkpoint_files.fields import Base
from repo_interp.checkpoint_files.stored import stored_digest
from repo_interp.experiments.generated_scores import generated_texts
from repo_interp.explorer import Session
from repo_interp.models.decoder import as_decoder
from repo_interp.models.generation import continue_greedily, end_tokens
from repo_interp.plugins.adapters.adapter_training import attach, save_adapter
from repo_interp.tasks import Prompt

SETTINGS = {
    "eos_token_id": [5, 7],
    "pad_token_id": 1,
    "repetition_penalty": 1.8,
    "suppress_tokens": [9],
    "max_new_tokens": 6,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
}
ODD = {"eos_token_id": 5, "temperature": 0.6, "a_setting_of_tomorrow": {"x": [1]}}
"""Settings that `save_pretrained` may refuse: a temperature without sampling."""
MAKES = {
    "stock": lambda: tiny("llama"),
    "sharded": lambda: tiny("qwen3"),
    "repositioned": lambda: ri.reposition(tiny("llama"), "repo"),
    "converted": lambda: small_model("mixtral"),
    "text part": lambda: small_larger("gemma3"),
}


def settings_in(directory):
    stated = json.loads((directory / "generation_config.json").read_text())
    return {name: value for name, value in stated.items() if name != "transformers_version"}


@pytest.fixture(params=[*MAKES, "adapter"])
def checkpoint(request, tmp_path):
    """A directory whose settings can be set."""
    directory = tmp_path / "checkpoint"
    if request.param == "adapter":
        model = tiny("llama")
        model.save_pretrained(directory)
        attach(ri.reposition(model, "repo"), 2)
        base = Base(name=str(directory), weights_digest=stored_digest(directory))
        save_adapter(model, tmp_path / "adapter", base)
        return tmp_path / "adapter", directory
    model = MAKES[request.param]()
    if request.param == "repositioned":
        ri.save(model, directory)
    else:
        shards = {"max_shard_size": "20KB"} if request.param == "sharded" else {}
        model.save_pretrained(directory, **shards)
    return directory, directory


@pytest.mark.filterwarnings("ignore:.*only its text part is opened:repo_interp.errors.Note")
@pytest.mark.parametrize("settings", [SETTINGS, ODD], ids=["usual", "odd"])
def test_settings_are_kept_from_loading_to_saving(settings, checkpoint, tmp_path):
    """Found: all but special tokens were dropped."""
    directory, place = checkpoint
    (place / "generation_config.json").write_text(json.dumps(settings))
    for number, model in enumerate((ri.load_model(directory), ri.open_model(directory))):
        assert settings.items() <= vars(model.generation_config).items()
        assert end_tokens(as_decoder(model)) in ([5, 7], [5])
        ri.save(model, tmp_path / f"saved-{number}")
        assert settings_in(tmp_path / f"saved-{number}") == settings


def test_generate_gives_the_tokens_of_transformers(tmp_path):
    stock = tiny("llama")
    stock.generation_config = GenerationConfig(**SETTINGS)
    stock.save_pretrained(tmp_path)
    found = []
    bridge = ri.load(tmp_path)
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path).eval(),
        ri.load_model(tmp_path),
        bridge.original_model,
    ):
        torch.manual_seed(3)
        found.append(model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS)).tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("old", [{"repetition_penalty": 1.8, "no_repeat_ngram_size": 2}, {}])
def test_without_a_file_they_are_those_of_config_json_as_in_transformers(old, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | old | {"eos_token_id": 3}))
    settings = ri.load_model(tmp_path).generation_config
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert settings.to_dict() == expected.to_dict()
    assert settings.eos_token_id == 3 and old.items() <= vars(settings).items()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_new_tokens": -1}, "holds no settings of generation"),
        ({"pad_token_id": "end"}, '"pad_token_id": wanted a valid integer, got "end"'),
        ([1], "wanted an object"),
    ],
)
def test_settings_that_are_none_are_named_with_their_file(settings, line, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with refused(f"generation_config.json.*{line}"):
        ri.load_model(tmp_path)


def test_measures_scores_and_the_explorer_are_as_without_settings(tmp_path):
    model, plain, sampling = tiny("llama"), tmp_path / "plain", tmp_path / "sampling"
    for directory, settings in ((plain, {"eos_token_id": [5, 7]}), (sampling, SETTINGS)):
        model.save_pretrained(directory)
        tokenizer("byte_level_bpe").save_pretrained(directory)
        (directory / "generation_config.json").write_text(json.dumps(settings))
    prompts = [Prompt(tuple(row), attributes={"new_tokens": 12}) for row in TOKENS.tolist()]
    found = []
    for directory in (plain, sampling):
        decoder = as_decoder(ri.open_model(directory))
        session = Session(decoder.module, prompts[0], name=str(directory))
        names = {}
        exec(session.as_python([(0, 0)], 3).replace("print(", "(lambda *words: None)("), names)
        assert [*session.continuation()] == names["clean"]["continuation"].tolist()
        found.append(
            (
                generated_texts(decoder, decoder.tokenizer, prompts),
                continue_greedily(decoder, [prompt.tokens for prompt in prompts], [12, 12]),
                [*session.continuation()],
                ri.analyze(decoder.module, prompts, ("predictions",))["predictions"].to_dict(),
            )
        )
    assert found[0] == found[1]


def test_an_end_that_only_config_json_names_still_ends_answers(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.0}')
    model = ri.load_model(tmp_path)
    assert model.generation_config.eos_token_id is None and end_tokens(as_decoder(model)) == [2]
