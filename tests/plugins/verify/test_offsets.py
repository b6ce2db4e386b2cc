"""One text at several offsets: rotation sees distances alone, but for rounding."""

import numpy as np
import pytest
import torch

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.cli import main
from repo_interp.plugins.verify.offsets import OFFSETS, TEXT


def test_a_sound_model_loses_as_much_everywhere():
    """The reference: logits of the stock call with position ids."""
    model = ri.open_model("language/rope")
    tokens = torch.tensor([model.tokenizer(TEXT)["input_ids"]])
    index = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        wanted = [
            float(model(tokens, position_ids=index + offset, labels=tokens).loss)
            for offset in OFFSETS
        ]
    found = ri.verify("language/rope", dtype="float32")
    assert np.allclose(found["offsets/loss"].values, wanted, atol=1e-5)
    assert np.ptp(wanted) < 1e-3 and found.attrs["findings"] == ""
    half = ri.verify("language/rope", dtype="bfloat16")
    assert (half.attrs["findings"], half.attrs["dtype"], half.attrs["device"]) == (
        "",
        "bfloat16",
        "cpu",
    )
    assert float(half["offsets/largest_change"].max()) > 5 * float(
        found["offsets/largest_change"].max()
    )


def test_a_tokenizer_of_a_few_words_reads_random_tokens():
    """niah's has none of the text, and raises the bare Exception of its library."""
    found = ri.verify("niah/rope", dtype="bfloat16")
    assert found["offsets"].attrs["tokens"] == 64 and np.isfinite(found["offsets/loss"]).all()


def test_positions_that_are_rounded_are_found():
    """Positions in bfloat16 are steps of 128 near 30,000."""
    model = small_model("llama")

    def rounded(module, arguments, keywords):
        if "position_ids" in keywords:  # of a pass; the audit of tables gives them by position
            keywords["position_ids"] = keywords["position_ids"].bfloat16().long()
        return arguments, keywords

    model.model.rotary_emb.register_forward_pre_hook(rounded, with_kwargs=True)
    line = ri.verify(model, dtype="float32", longest=64).attrs["findings"]
    assert line.startswith("the loss of one text is ") and "nats at offset 1,000 and" in line


def test_a_model_without_offsets_says_so():
    ran = ri.verify(small_model("gpt2"), dtype="float32", longest=8)["offsets"]
    assert ran.attrs["left_out"] == "its positions are vectors of a table"


def test_the_command_says_it_beside_the_tables(capsys):
    assert main(["verify", "language/rope", "--dtype", "bfloat16", "--longest", "8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "98 tokens at offsets in bfloat16: loss 4.95" in said and "at 30,000" in said


def test_wrapped_models_are_those_inside(tmp_path):
    peft = pytest.importorskip("peft")
    model = small_model("llama")
    wanted = ri.verify(model, dtype="float32", longest=8)
    assert ri.verify(torch.compile(model, backend="eager"), dtype="float32", longest=8).equals(
        wanted
    )
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    found = ri.verify(lora, longest=8)
    assert found.attrs["findings"] == "" and found.children.keys() == set()
