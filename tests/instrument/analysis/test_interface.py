"""The Python interface of a newcomer: prompts in any form, positions set by hand, tables, names
that say what they hold.
"""

import inspect
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import xarray as xr
from families import TOKENS, tiny
from refusals import refused

import repo_interp as ri
from repo_interp.analysis import defaults
from repo_interp.analysis.coercion import as_prompts
from repo_interp.analysis.job import Job
from repo_interp.analysis.notes import Remark
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import _parser
from repo_interp.cli.analyze_command import _job
from repo_interp.explorer import Session
from repo_interp.models.decoder import as_decoder


@pytest.fixture(scope="module")
def niah():
    return ri.load("niah/repo")


@pytest.fixture(scope="module")
def task_prompts():
    return trained_task(zoo_path("niah/repo")).prompts(3, seed=1)


def test_every_prompt_has_a_way_into_run_with_cache(niah, task_prompts):
    prompts = [*task_prompts, ri.prompt([*range(3, 12)], niah)]
    tokens, valid = ri.tokens(prompts, niah)
    assert tokens.shape == valid.shape == (4, max(len(prompt.tokens) for prompt in prompts))
    for row, prompt in enumerate(prompts):
        assert tuple(tokens[row][valid[row]].tolist()) == prompt.tokens
        assert tokens[row][~valid[row]].abs().sum() == 0
    with torch.no_grad():
        _, cache = niah.run_with_cache(tokens)
    layers = {"layers": np.array([0, 2]), "measures": "positions"}
    measured = ri.analyze(niah, prompts, **layers)["positions/position"]
    assert measured["layer"].values.tolist() == [0, 2]
    seen = cache["blocks.2.attn.hook_positions"][:, 1].where(valid, torch.nan)
    measured = measured.sel(layer=2, head=1).transpose("prompt", "token")
    np.testing.assert_allclose(measured, seen, atol=1e-4, rtol=1e-4)


def test_a_text_is_never_cut_and_gets_no_bos_that_analysis_does_not_add(niah, task_prompts):
    long = " ".join([task_prompts[0].text] * 3)
    count = len(ri.tokens(long, niah)[0][0])
    assert count > niah.cfg.n_ctx
    with pytest.warns(
        UserWarning,
        match=rf"a text has {count} tokens, and the model was trained on up to 256; it was not cut",
    ):
        assert niah.to_tokens(long).tolist() == ri.tokens(long, niah)[0].tolist()
    assert niah.to_tokens(long, truncate=True).shape == (1, 256)
    with refused(r"begins with '<bos>', which the tokenizer puts before every text"):
        niah(f"<bos> {task_prompts[0].text}")


def test_a_tokenizer_that_puts_no_bos_gets_none(task_prompts):
    from task_tokenizers import word_tokenizer

    tokenizer = word_tokenizer(pad_token="<pad>")
    tokenizer.add_special_tokens({"bos_token": "grass"})
    model = ri.reposition(tiny("llama"), "repo")
    bridge = ri.bridge(model, tokenizer)
    for tokens in (bridge.to_tokens("sky grass"), ri.tokens("sky grass", bridge)[0]):
        assert tokens.tolist() == [[2, 1]]
    assert bridge.to_tokens("sky", prepend_bos=True).tolist() == [[1, 2]]
    with refused("has no tokenizer; give tokens"):
        ri.bridge(model).to_tokens("sky")


def test_a_prompt_is_made_of_a_text_and_its_parts(niah, task_prompts):
    words = [*dict.fromkeys(task_prompts[0].text.split()[:12])]
    text = " ".join(words)
    spans = {"needle": f"{words[2]} {words[3]}", "other": (0, len(words[0]))}
    made = ri.prompt(text, niah, generated=-2, answers=["x"], **spans)
    count = len(made.tokens)
    assert count == len(words) + 1
    assert made.spans == {"needle": (3, 4), "other": (1,)}
    assert made.generated == (count - 2, count - 1)
    assert made.answers == ("x",) and made.text == text
    assert ri.prompt(text, niah, generated=words[-1]).generated == (count - 1,)
    assert ri.prompt(text, niah, needle=[words[1], words[4]]).spans == {"needle": (2, 5)}
    unmarked = {*ri.analyze(niah, text).children}
    assert unmarked > {"positions", "octaves", "kinds"}
    assert {*ri.analyze(niah, made).children} == unmarked | {"attention_mass"}
    for parts, line in (
        ({"needle": "no such words"}, "the span 'needle': 'no such words' does not occur"),
        ({"needle": "w"}, r"the span 'needle': 'w' occurs \d+ times in the text"),
        ({"generated": 2}, "generated is 2; wanted -1 to -"),
    ):
        with refused(line):
            ri.prompt(text, niah, **parts)


def test_prompts_may_be_given_in_any_form(niah, task_prompts):
    prompt = task_prompts[0]
    ids = list(prompt.tokens)
    assert prompt.text and not prompt.text.startswith("<bos>")
    assert niah.to_tokens(prompt.text).tolist() == ri.tokens(prompt.text, niah)[0].tolist() == [ids]
    forms = [*([one] for one in (prompt, prompt.text, ids)), prompt, prompt.text, ids, tuple(ids)]
    forms += [np.array(ids), torch.tensor([ids]), [torch.tensor(ids)], iter([np.array(ids)])]
    for form in forms:
        (one,) = as_prompts(form, niah.tokenizer)
        assert one.tokens == prompt.tokens and len(one.token_text) == len(ids) and one.text
    texts = ["w1 w2 w3", "w1"]
    alone = niah.tokenizer(texts)
    assert as_prompts(np.array(texts), niah.tokenizer) == as_prompts(texts, niah.tokenizer)
    given = {"padding": "max_length", "max_length": 7, "return_tensors": "pt"}
    batches = [niah.tokenizer(texts, padding_side=side, **given) for side in ("left", "right")]
    for batch in (alone, *batches):
        assert [list(one.tokens) for one in as_prompts(batch, niah.tokenizer)] == alone["input_ids"]


PADDED = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])


@pytest.mark.parametrize("without_tokenizer", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (PADDED, r"prompt 1 ends in 2 pad tokens \(0\)"),
        (PADDED.flip(1).numpy(), r"prompt 1 begins in 2 pad tokens \(0\)"),
        ({"input_ids": PADDED}, "prompt 1 ends"),
        ([ri.tasks.Prompt((5, 0, 0, 0))], "prompt 0 ends in 3"),
        ({"input_ids": PADDED, "attention_mask": PADDED > 0}, None),
        (PADDED[:, :3], None),
    ],
)
def test_pad_tokens_that_are_measured_as_text_are_noted(given, said, without_tokenizer):
    model = tiny("llama") if without_tokenizer else ri.open_model("niah/repo")
    model.config.pad_token_id = 0
    warned = nullcontext() if said is None else pytest.warns(Remark, match=said)
    with warned:
        run = ri.analyze(model, given, ("positions",))
    assert (said is None) == ("pad tokens" not in run.attrs.get("notes", ""))


def test_prompts_that_were_not_given_are_noted(niah):
    with pytest.warns(Remark, match="no prompts were given: 20 prompts from the task niah"):
        run = ri.analyze(niah, None, ("positions",))
    assert run.attrs["notes"].startswith("no prompts were given: 20 prompts from the task niah")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "prompts are a int"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "not of one shape"),
        ([], "there are no prompts"),
        ([[1, "w1"]], "prompt 0 holds 'w1'"),
        (torch.ones(2, 3), r"prompt 0 is an array of torch.float32"),
        (np.ones((1, 2, 3), dtype=int), r"an array of \[1, 2, 3\]"),
        ([[]], "the prompt is empty"),
        ([10**9], "prompt 0 has token 1000000000"),
        (["no such words"], "the tokenizer"),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(niah, given, message):
    with refused(message):
        ri.analyze(niah, given)


@pytest.mark.parametrize("layout", ["rope", "repo", "hope"])
def test_backward_hooks_on_positions_fire(layout):
    bridge = ri.bridge(ri.reposition(tiny("llama"), layout))
    gradients = {}

    def keep(gradient, hook):
        gradients[hook.name] = gradient[0] if isinstance(gradient, tuple) else gradient.clone()

    names = [f"blocks.{layer}.attn.hook_positions" for layer in range(3)]
    with bridge.hooks(bwd_hooks=[(name, keep) for name in names]):
        bridge(TOKENS).logsumexp(-1).sum().backward()
    assert {*gradients} == {*names}
    assert all(0 < gradient.abs().max() < torch.inf for gradient in gradients.values())


def test_a_table_has_one_row_per_head(niah):
    dims = ("prompt", "layer", "head", "name", "component")
    labels = {"head": [0, 3], "name": ["a", "b"]}
    numbers = xr.DataArray(np.arange(256.0).reshape(2, 2, 2, 2, 16), labels, dims)
    long = numbers.rename(component="pair").pad(pair=(0, 1))
    few = numbers[..., :3].rename(component="token")
    kind = xr.DataArray([["a", "b"]] * 2, dims=("layer", "head"))
    group = xr.Dataset({"short": numbers, "long": long, "few": few, "kind": kind})
    table = ri.head_table(xr.DataTree.from_dict({"/m": group}))
    expected = [f"m.short[{name},{number}]" for name in "ab" for number in range(16)]
    assert table.columns.tolist() == ["layer", "head", *expected, "m.kind"]
    assert table[["layer", "head"]].values.tolist() == [[0, 0], [0, 3], [1, 0], [1, 3]]
    np.testing.assert_array_equal(table[expected], numbers.mean("prompt").values.reshape(4, 32))
    assert table["m.kind"].tolist() == ["a", "b"] * 2
    assert table.attrs["left_out"] == ["m.long (pair)", "m.few (token)"]
    with refused("no numbers per head"):
        ri.head_table(ri.score(niah, count=1))


def test_measures_are_names_of_ri():
    assert ri.measures.Components(first_token=1).parameters["first_token"] == 1
    assert {"Components", "Positions", "ThreeAxis"} <= set(dir(ri.measures))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        ri.measures.Nothing  # noqa: B018
    assert ri.interventions.set_positions is ri.set_positions


def test_the_last_tokens_are_those_that_cover_text_also_where_a_character_has_several():
    bridge = ri.zoo("language/rope")
    for text, wanted in (("😀 so 😀", "😀"), ("a = b", " b")):
        made = ri.prompt(text, bridge, generated=-1)
        (interval,) = made.characters["generated"]
        assert text[slice(*interval)] == wanted
        assert made.generated == tuple(range(made.generated[0], len(made.tokens)))
    made = ri.prompt("😀 so 😀", bridge, generated=-6)
    assert made.generated[0] > 1, "not the first face, though its pieces have the same texts"
    with refused("wanted -1 to -"):
        ri.prompt("a = b", bridge, generated=-4)


@pytest.mark.parametrize(
    "name", [name for name in ri.__all__ if inspect.isfunction(getattr(ri, name))]
)
def test_every_function_refuses_none_in_one_line(name):
    """Found: each was a traceback. A function that is new is tried as soon as it is there."""
    function = getattr(ri, name)
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    with refused("wanted|returns|has a name|heads are|positive|is None|was named"):
        # a context says so where it is entered
        function(*[None] * max(1, len(needed))).__enter__()


def test_swapped_arguments_are_named_in_a_short_line(niah, task_prompts, tmp_path):
    """Found: 1,000 characters of a model, of prompts or of a run."""
    prompts, run = list(task_prompts), ri.analyze(niah, task_prompts[0], ("positions",))
    state, file = niah.state_dict(), tmp_path / "a"
    for line, function, *given in (
        ("a model or a bridge was wanted.* got a list", ri.analyze, prompts, niah),
        ("a model or a bridge was wanted.* got a Prompt", ri.explore, prompts[0], niah),
        ("a model or a bridge was wanted.* got a Run", ri.score, run),
        ("a model or a bridge was wanted.* got a dict", ri.layout, state),
        ("prompts are a RepositionedBridge", ri.analyze, niah, niah),
        ("a run is what .* got a RepositionedBridge", ri.findings, niah),
        ("a run is what .* got a list", ri.write_run, prompts, file),
        ("a path was wanted, .* got a RepositionedBridge", ri.save, niah, niah),
        ("a path was wanted, .* got a Run", ri.plots.write_figures, file, run),
        ("a path was wanted, .* got a Run", ri.load_model, run),
        ("a path was wanted, .* got a Prompt", ri.compare, prompts),
        ("wanted a layout .* got a RepositionedBridge", ri.reposition, niah, niah),
        ("several prompts were wanted.* got a Prompt", ri.write_prompts, prompts[0], file),
        ("prompts were wanted.* got 'a text'", ri.write_prompts, ["a text"], file),
        ("a tokenizer was wanted.* got a RepositionedBridge", ri.read_prompts, "a", niah),
        ("there is no task 5; there are reversal", ri.score, niah, 5),
        (r"there is no task \['niah'\]; there are", ri.score, niah, ["niah"]),
        ("there is no task a RepositionedBridge", ri.score, niah, niah),
        ("wanted a size, one of small, paper; got 5", ri.tasks.make_task, "niah", 5),
        ("this run has no layer a Run", ri.plots.position_lines, run, run, 0),
    ):
        with refused(line) as error:
            function(*given)
        assert len(str(error.value)) < 200
    assert not list(tmp_path.iterdir())


def test_arguments_of_another_kind_are_refused_in_one_line(niah, task_prompts, tmp_path):
    """Found: each was a traceback; tokens that the model lacks went on into the pass."""
    prompt, run = task_prompts[0], ri.analyze(niah, task_prompts[0], ("positions",))
    meta = ri.reposition(tiny("llama"), "repo").to("meta")
    shared = tiny("llama")
    shared.model.layers[1] = shared.model.layers[0]
    edit = {"kind": "linearised", "layer": 2}
    for line, function, *given in (
        (r"'needle': \(3,\) is no part of", ri.prompt, "a b", niah, {"needle": (3,)}),
        ("task is 'x'; wanted a task", ri.analyze, niah, prompt, {"task": "x"}),
        ("a path was wanted, the directory of", ri.analyze, niah, prompt, {"store": 3}),
        ("this is a directory", ri.write_run, run, tmp_path),
        ("edits of a session are a list", Session, niah, [1, 2, 3], [edit]),
        ("answer is .1.5,.; wanted whole", Session, niah, [1, 2, 3], {"answer": (1.5,)}),
        ("a run is what ri.analyze returns", ri.plots.position_lines, "x", 0, 0),
        ("test_interface.py is a file", ri.plots.write_figures, run, __file__),
        ("give the model inside", ri.analyze, torch.nn.DataParallel(tiny("llama")), [[1]]),
        (
            "frequencies of this model are on 'meta'",
            ri.reposition,
            tiny("llama").to("meta"),
            "repo",
        ),
        ("on 'meta' and hold no numbers", ri.save, meta, tmp_path / "a"),
        ("llama share an attention module", ri.analyze, shared, [[1, 2]]),
    ):
        named = given.pop() if isinstance(given[-1], dict) else {}
        with refused(line):
            function(*given, **named)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrap", [lambda stock: stock, lambda stock: ri.bridge(ri.reposition(stock, "rope"))]
)
def test_a_model_in_training_mode_is_measured_without_dropout_and_autocast_and_stays_in_it(wrap):
    """Found: its numbers depended on what dropout drew, and were rounded to bfloat16 beside
    "float32".
    """
    model, runs = wrap(tiny("llama")), []
    layers = getattr(model, "original_model", model).model.layers
    for module in layers.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.9
    given = {"measures": ("attention_rows",), "experiments": ("effects",)}
    for training in (False, True):
        model.train(training)
        layers[2].eval()  # a part that the user keeps as it is
        with torch.autocast("cpu", enabled=training):
            runs.append(ri.analyze(model, [[*range(3, 23)]], **given))
        assert layers[0].training is training and not layers[2].training
    xr.testing.assert_identical(*runs)


def test_analyze_has_the_defaults_of_the_command():
    """Prompts, measures, experiments and every number; nothing of them is measured."""
    arguments = _parser(["analyze"]).parse_args(["analyze", "reversal/repo"])
    typed, called = (
        _job(arguments, "reversal/repo", lambda *step: None),
        Job(ri.zoo("reversal/repo")),
    )
    assert typed.question == called.question and typed.provenance == called.provenance
    assert typed.question["experiments"].keys() > {"atlas", "effects"}
    given = ri.zoo("reversal/rope")
    chosen = defaults.default_experiments(
        as_decoder(given), *defaults.default_prompts(as_decoder(given))
    )
    assert [each.name for each in chosen] == ["atlas"]


def test_a_stock_model_is_observed_as_it_is_and_stays_as_it_is():
    model = tiny("llama")
    prompt = ri.tasks.Prompt(tokens=(*range(3, 23),), spans={"needle": (3, 4)})
    implementation = model.config._attn_implementation
    with torch.no_grad():
        before = model(TOKENS).logits
        run = ri.analyze(model, prompt)
        assert torch.equal(model(TOKENS).logits, before)
    assert model.config._attn_implementation == implementation
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    with refused("never repositioned"):
        ri.bridge(model)
    expected = ri.analyze(ri.reposition(model, "rope"), prompt)
    for name in expected.children:
        xr.testing.assert_allclose(run[name].to_dataset(), expected[name].to_dataset())
    with refused("this model has no tokenizer, so no prompts can be made for it"):
        ri.analyze(tiny("llama"))


def test_a_cache_knows_positions_by_layer(niah):
    with torch.no_grad():
        _, cache = niah.run_with_cache(TOKENS)
    assert torch.equal(cache["positions", 2], cache["blocks.2.attn.hook_positions"])
    assert cache["q", 2].shape[1] == 20
    with refused(r"no blocks.5.attn.hook_positions"):
        cache["positions", 5]


def test_completion_shows_functions_alone():
    """Found: `ri.interventions.` offered warnings, import_module and the names of its files."""
    for module in (ri.interventions, ri.plots):
        shown = dir(module)
        assert shown == sorted(shown) and all(callable(getattr(module, name)) for name in shown)
        assert not any(isinstance(getattr(module, name), type) for name in shown)
    assert {"frozen", "replaced", "ablate_paths", "yarn"} <= set(dir(ri.interventions))
    assert {"position_lines", "atlas_names", "style"} <= set(dir(ri.plots))
    assert {"warnings", "import_module", "Any", "edits"}.isdisjoint(dir(ri.interventions))


def test_a_run_prints_as_its_groups_in_twenty_lines_and_a_group_as_xarray_prints_it(tmp_path):
    text = list(range(3, 30))
    run = ri.analyze(ri.load("reversal/repo"), [text], ("positions", "octaves"))
    lines = str(run).splitlines()
    assert lines[0].startswith("Run of reversal/repo: 1 prompt from ") and len(lines) == 4
    assert lines[1].startswith("  positions  position, position_range") and repr(run) == str(run)
    plain = str(xr.DataTree(run["positions"].to_dataset(), name="positions"))
    assert str(run["positions"]) == plain.replace("Group: /", "Group: /positions")
    ri.write_run(run, tmp_path / "run.nc")
    assert str(ri.read_run(tmp_path / "run.nc")) == str(run)
    many = type(run).from_dict({f"/g{number}": run["octaves"].to_dataset() for number in range(40)})
    assert len(str(many).splitlines()) == 20
    assert "and 23 more groups" in str(many) and max(map(len, str(many).splitlines())) <= 100
    assert "<xarray.DataTree" in str(type(run)())
