"""Models inside torch.compile and peft are measured as they compute; what they add beside their
modules is refused by name.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import tiny
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.tasks.prompt import Prompt

peft = pytest.importorskip("peft")

TOKENS = torch.arange(3, 23)[None]
PROMPTS = [Prompt(tokens=tuple(TOKENS[0].tolist()))]
LORA = {"target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def short():
    """A decoder of two layers, since compiling takes seconds per layer."""
    model = tiny("llama")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    return model


def with_lora(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).eval()


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


WRAPPERS = {
    "peft": with_lora,
    "compiled": compiled,
    "compiled peft": lambda model: compiled(with_lora(model)),
    "in place": compiled_in_place,
}


@pytest.mark.parametrize(
    ("wrap", "reposition_first"),
    [("peft", False), ("peft", True), ("compiled", False), ("in place", True)],
)
def test_a_wrapped_model_is_measured_as_it_computes(wrap, reposition_first):
    inner = short()
    if reposition_first:
        ri.reposition(inner, "rope")
    model = WRAPPERS[wrap](inner)
    with torch.no_grad():
        expected = model(TOKENS).logits[0, :-1].softmax(-1)[range(19), TOKENS[0, 1:]]
    run = ri.analyze(model, PROMPTS, measures=("predictions",))
    measured = torch.as_tensor(run["predictions"]["probability_of_next"].values)[:19]
    assert_close(measured.float(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("wrap", ["peft", "compiled peft", "in place"])
def test_an_intervention_reaches_a_wrapped_model(wrap):
    """Found: compiled code ran on without the intervention."""
    inner = ri.reposition(short(), "rope")
    model = WRAPPERS[wrap](inner)

    def moved(layer):
        return ri.set_positions(model, layer=layer, head=None, values=torch.arange(20.0) * 3)

    with torch.no_grad():
        before = model(TOKENS).logits
        with moved(1):
            expected = inner(TOKENS).logits
        first, second = moved(0), moved(1)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # they end in any order
        inside = model(TOKENS).logits
        second.__exit__(None, None, None)
        assert_close(model(TOKENS).logits, before)
    assert float((before - inside).abs().max()) > 1e-3
    assert_close(inside, expected)


def test_reposition_returns_the_model_inside():
    model = with_lora(tiny("llama"))
    inside = ri.reposition(model, "repo@1")
    assert inside is model.get_base_model()
    assert ri.layout(model) == ri.layout(compiled(inside)) == ("rope", "repo", "repo")
    assert ri.added_parameters(model) == ri.added_parameters(inside) > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
        ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 1}),
    ],
)
def test_an_adapter_beside_the_modules_is_refused(kind, options):
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tiny("llama"), config).eval()
    for ask in (ri.analyze, ri.reposition):
        with refused("which computes beside the modules of its model"):
            ask(model, "repo")


def test_an_adapter_is_merged_before_it_is_saved(tmp_path):
    model = with_lora(tiny("llama"))
    inside = ri.reposition(model, "repo@1")
    with refused(r"give what merge_and_unload\(\) of the PeftModel returns"):
        ri.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with torch.no_grad():
        wanted = inside(TOKENS).logits
        ri.save(model.merge_and_unload(), tmp_path / "saved")
        assert_close(ri.load_model(tmp_path / "saved")(TOKENS).logits, wanted)


def test_two_threads_in_one_model_get_right_numbers_or_one_line():
    """Found: wrong logits, and assertions that failed."""
    model = ri.reposition(tiny("llama"), "rope")

    def changed(number):
        with ri.set_positions(model, layer=1, head=None, values=float(number)), torch.no_grad():
            return model(TOKENS).logits

    expected, said = [changed(number) for number in range(4)], []

    def try_it(number):
        try:
            for _ in range(10):
                said.append(torch.equal(changed(number), expected[number]))
        except ri.InputError as error:
            said.append("another thread" in str(error))

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) >= 4 and all(said)
    assert torch.equal(changed(3), expected[3])  # nothing is left behind


def test_an_intervention_is_refused_while_one_of_another_thread_lasts():
    model = ri.reposition(tiny("llama"), "rope")

    def change():
        with ri.set_positions(model, layer=1, head=None, values=0.0):
            return True

    with ThreadPoolExecutor(1) as other:
        with (
            ri.set_positions(model, layer=0, head=None, values=0.0),
            refused("an intervention of another thread is active in this model"),
        ):
            other.submit(change).result()
        assert other.submit(change).result()


def test_a_pass_is_refused_while_another_thread_is_in_it():
    model = ri.reposition(tiny("llama"), "rope")

    def ask(module, arguments):
        handle.remove()
        with (
            ThreadPoolExecutor(1) as other,
            refused("another thread runs a pass of this model"),
        ):
            other.submit(model, TOKENS).result()

    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(ask)
    assert model(TOKENS).logits.isfinite().all()
    assert handle.id not in model.model.layers[1].self_attn.o_proj._forward_pre_hooks
    assert model(TOKENS).logits.isfinite().all()
