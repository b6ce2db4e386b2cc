"""Models inside torch.compile and peft are measured as they compute; what they add beside their
modules is refused by name.
"""

import threading

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


def next_log_probabilities(run):
    return run["predictions"].to_dataset()["probability_of_next"].values


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("reposition_first", [False, True])
def test_a_wrapped_model_is_measured_as_it_computes(wrap, reposition_first):
    inner = tiny("llama")
    if reposition_first:
        ri.reposition(inner, "rope")
    model = WRAPPERS[wrap](inner)
    with torch.no_grad():
        probability = model(TOKENS).logits[0, :-1].softmax(-1)
    expected = probability[torch.arange(19), TOKENS[0, 1:]]
    run = ri.analyze(model, PROMPTS, measures=("predictions",))
    measured = torch.as_tensor(next_log_probabilities(run)).flatten()[:19]
    assert_close(measured.float(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_intervention_reaches_a_wrapped_model(wrap):
    """Found: compiled code ran on without the intervention."""
    inner = ri.reposition(tiny("llama"), "rope")
    model = WRAPPERS[wrap](inner)
    with torch.no_grad():
        before = model(TOKENS).logits
        first, second = (
            ri.set_positions(model, layer=layer, head=None, values=torch.arange(20.0) * 3)
            for layer in (0, 1)
        )
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # they end in any order
        inside = model(TOKENS).logits
        second.__exit__(None, None, None)
        after = model(TOKENS).logits
        with ri.set_positions(inner, layer=1, head=None, values=torch.arange(20.0) * 3):
            expected = inner(TOKENS).logits
    assert float((before - inside).abs().max()) > 1e-3
    assert_close(inside, expected)
    assert_close(after, before)


def test_reposition_returns_the_model_inside():
    model = with_lora(tiny("llama"))
    inside = ri.reposition(model, "repo@1")
    assert inside is model.get_base_model() and ri.layout(model) == ri.layout(compiled(inside)) == (
        "rope",
        "repo",
        "repo",
    )
    assert ri.added_parameters(model) == ri.added_parameters(inside) > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 3}),
        ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
        ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 1}),
    ],
)
def test_an_adapter_beside_the_modules_is_refused(kind, options):
    model = peft.get_peft_model(
        tiny("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    ).eval()
    for ask in (
        lambda: ri.analyze(model, PROMPTS),
        lambda: ri.reposition(model, "repo"),
        lambda: ri.layout(model),
    ):
        with refused("which computes beside the modules of its model"):
            ask()


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

    expected = [changed(number) for number in range(4)]
    inside, leave, said = threading.Event(), threading.Event(), []

    def stay():
        with ri.set_positions(model, layer=0, head=None, values=0.0):
            inside.set()
            leave.wait(60)

    def try_it(number):
        try:
            for _ in range(10):
                said.append(torch.equal(changed(number), expected[number]))
        except ri.InputError as error:
            said.append(str(error))

    staying = threading.Thread(target=stay)
    staying.start()
    inside.wait(60)
    with refused("an intervention of another thread lasts in this model"):
        changed(0)
    leave.set()
    staying.join()
    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = {each for each in said if isinstance(each, str)}
    assert all(each is True for each in said if not isinstance(each, str)) and any(
        each is True for each in said
    )
    assert all("another thread" in line for line in lines)
    assert torch.equal(changed(3), expected[3])  # nothing is left behind


def test_a_pass_is_refused_while_another_thread_is_in_it():
    model = ri.reposition(tiny("llama"), "rope")
    within, leave = threading.Event(), threading.Event()

    def wait(module, arguments):
        within.set()
        leave.wait(60)

    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(wait)
    passing = threading.Thread(target=lambda: model(TOKENS))
    passing.start()
    within.wait(60)
    handle.remove()
    with refused("another thread runs a pass of this model"):
        model(TOKENS)
    leave.set()
    passing.join()
    assert model(TOKENS).logits.isfinite().all()
