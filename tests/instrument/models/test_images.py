"""A prompt of text and an image: positions by axis, the span `image`, and the image's features."""

import json

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from refusals import refused
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, set_seed

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.explorer.explored_run import prompts_in
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.jsonl import read_prompts, write_prompts

IMAGE, START, END = 110, 111, 112
TOKENS = (*range(3, 8), START, *[IMAGE] * 6, END, *range(8, 16))
PLACES = tuple(place for place, token in enumerate(TOKENS) if token == IMAGE)
GRID = torch.tensor([[1, 4, 6]])  # patches; 2 x 3 tokens


@pytest.fixture(scope="module")
def whole():
    """A tiny model that sees images, with eager attention."""
    set_seed(0)
    text = {
        **{"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"layer_types": ["full_attention"] * 2, "max_position_embeddings": 64},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            **{"mrope_section": [1, 1, 2], "mrope_interleaved": True},
        },
        "initializer_range": 0.2,
    }
    sight = {
        **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
        **{"patch_size": 4, "temporal_patch_size": 1, "out_hidden_size": 32},
        **{"num_position_embeddings": 16},
    }
    config = Qwen3_5Config(
        text_config=text,
        vision_config=sight,
        **{"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END},
        video_token_id=113,
    )
    return Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()


def test_pairs_of_an_image_have_frequencies_and_no_turns_whatever_the_batch(whole, tmp_path):
    """Found: `turn_mean` 0 for all."""
    whole.save_pretrained(tmp_path / "whole")
    with pytest.warns(ri.errors.Note, match="only its text part is opened"):
        model = ri.open_model(tmp_path / "whole")
    ids = whole.model.get_rope_index(
        torch.tensor([TOKENS]), (torch.tensor([TOKENS]) == IMAGE).int(), GRID
    )[0][:, 0].T
    image = ri.prompt(TOKENS, model, position_ids=ids)
    text = ri.prompt(range(3, 24), model, position_ids=[[place] * 3 for place in range(21)])
    names = ("components", "symbols", "activations")
    runs = [
        ri.analyze(model, prompts, names, batch_size=size, experiments=())
        for prompts, size in (([text], 1), ([text, image], 1), ([text, image], 2), ([image], 1))
    ]
    alone, single, together, of_image = (run["components"] for run in runs)
    for found in (single, together, of_image):
        assert_allclose(found["frequency"], alone["frequency"])
        assert found["turn_mean"].isnull().all() and found["turn_share"].isnull().all()
        assert found["vaf_band"].notnull().all()
    for found in (single, together):
        for name in ("position_reach", "still_share", "vaf_band"):
            expected = alone[name].sel(prompt=0)
            assert_allclose(found[name].sel(prompt=0), expected, rtol=1e-4, atol=1e-4)
        assert found["position_reach"].sel(prompt=1).isnull().all()
    assert alone["turn_mean"].notnull().all() and "no turns" not in runs[0].attrs["notes"]
    line = "components gives no turns in layers 0-1 (rope), which turn by the axes of an image"
    for run in runs[1:]:
        assert line in run.attrs["notes"]
        assert run["symbols/position_score"].notnull().any()


@torch.no_grad()
def test_an_image_is_measured_as_the_whole_model_sees_it(whole, tmp_path, capsys):
    tokens, seen = torch.tensor([TOKENS]), torch.rand(24, 48)
    kinds = (tokens == IMAGE).int()
    given = {"pixel_values": seen, "image_grid_thw": GRID, "mm_token_type_ids": kinds}
    expected = whole(tokens, **given, output_attentions=True)
    ids = whole.model.get_rope_index(tokens, kinds, GRID)[0]
    whole.save_pretrained(tmp_path / "whole")
    with pytest.warns(ri.errors.Note, match="only its text part is opened"):
        model = ri.open_model(tmp_path / "whole")
    features = torch.cat(whole.model.get_image_features(seen, GRID).pooler_output)

    def put_in(module, arguments, embedded):
        return embedded.masked_scatter((arguments[0] == IMAGE)[..., None], features)

    span = (PLACES[0], PLACES[-1] + 1)
    prompt = ri.prompt(TOKENS, model, generated=-1, image=span, position_ids=ids[:, 0].T)
    hook = model.get_input_embeddings().register_forward_hook(put_in)
    names = ["positions", "attention_mass", "maps", "predictions", "components"]
    run = ri.analyze(model, prompt, names)
    assert "stopped" not in run.attrs
    assert run["maps/fake_map"].isnull().all()
    for layer, (attention,) in enumerate(expected.attentions):
        mass = run["attention_mass/mass"].sel(prompt=0, layer=layer, span="image")
        assert_allclose(mass, attention[:, 19, list(PLACES)].sum(-1), atol=1e-5)
        logits = torch.as_tensor(run["maps/logit_map"].sel(layer=layer).values)
        assert_allclose(logits.nan_to_num(nan=-torch.inf).softmax(-1), attention, atol=1e-5)
    next_tokens = expected.logits[0, :-1].softmax(-1)[range(20), TOKENS[1:]]
    assert_allclose(run["predictions/probability_of_next"].values[:-1], next_tokens, rtol=1e-3)
    assert run["positions/position_id"].values[:, 0].tolist() == ids[:, 0].tolist()
    by_pair = run["positions/position_by_pair"].isel(prompt=0, layer=0, head=0)
    turning = by_pair.transpose("component", "token")[:4]  # half of the pairs turn
    assert_allclose(turning, ids[[0, 1, 2, 0], 0])
    hook.remove()
    placeholders = ri.analyze(model, prompt, names)["attention_mass/mass"]
    assert float(abs(placeholders - run["attention_mass/mass"]).max()) > 0.01
    write_prompts([prompt], tmp_path / "prompts.jsonl")
    given = ["--prompts", str(tmp_path / "prompts.jsonl"), "--measures", "attention_mass"]
    assert main(["analyze", str(tmp_path / "whole"), *given, "--out", str(tmp_path / "run")]) == 0
    assert "placeholders of an image enter with their vectors" in capsys.readouterr().err
    written = ri.read_run(tmp_path / "run")["attention_mass/mass"]
    assert_allclose(written, placeholders, atol=1e-5)
    assert prompts_in(run)[0].position_ids == prompt.position_ids

    # beside text alone, padded and in batches of their kind
    text = Prompt(TOKENS[:4], {"image": (0,)}, (3,))
    beside = ri.analyze(model, [text, prompt], names, batch_size=2)
    apart = ri.analyze(model, [text, prompt], names, batch_size=1)
    for name in ("positions/position_by_pair", "attention_mass/mass"):
        assert_allclose(beside[name], apart[name], atol=1e-5, equal_nan=name[0] == "p")
    assert_allclose(beside["attention_mass/mass"].sel(prompt=1), placeholders.sel(prompt=0), 1e-4)


def test_a_file_of_prompts_has_positions_by_axis(tmp_path):
    ids = [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]]
    line = {"tokens": [3, 110, 110, 4], "spans": {"image": [1, 2]}, "position_ids": ids}
    (tmp_path / "one.jsonl").write_text(json.dumps(line) + "\n")
    (prompt,) = read_prompts(tmp_path / "one.jsonl")
    assert prompt.position_ids == tuple(map(tuple, ids)) and prompt.document_count == 1
    write_prompts([prompt], tmp_path / "two.jsonl")
    assert read_prompts(tmp_path / "two.jsonl") == [prompt]
    with refused(r"wanted whole numbers from 0, one per token, or \[time, height, width\]"):
        Prompt((3, 4), position_ids=np.array([[0, 0], [1, 1]]))


def test_a_decoder_of_one_position_per_token_refuses_three():
    model = ri.zoo("niah/rope")
    with refused("LlamaModel takes one position id per token, and a prompt has three axes"):
        ri.analyze(model, Prompt((3, 4, 5), position_ids=torch.arange(9).view(3, 3)), ["maps"])
