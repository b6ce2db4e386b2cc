"""`python -m benchmarks.families [FAMILY ...]`: test which causal-LM families of the installed
transformers open, and which features work on them.

Each family is built with tiny random weights in a separate process, and tested:

    logits         equal to the stock model's, within 1e-5 of the largest
    attention      each layer's output, recomputed from its captured queries, keys, positions and sinks
    generation     the same tokens as the stock model: greedy, sampled with one seed, a batch with padding on the left
    interventions  edits of positions change the logits or leave them equal, as expected; afterwards logits are bit-identical
    experiments    the atlas, and saliency of learned positions
    bridge         a TransformerBridge with the same logits, whose hook points of attention are called
    load           written by transformers and opened by `ri.load`: the same logits, and the layout read from config.json alone
    command        `repo-interp analyze` of that checkpoint ends with exit code 0
    linear, ...    the same with every kind of scaled rotation that transformers accepts, at lengths below and above the original one:
                   logits, and each layer's output
    options        the same with every option of its configuration (`benchmarks.options`)

Without names, the program tests all families and writes docs/families.md.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pandas
import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import repo_interp as ri
from benchmarks.options import (
    IDLE,
    REFUSED,
    UNKNOWN,
    lacking,
    misread,
    summed,
    tried_options,
    within,
)
from benchmarks.running import in_a_process, markdown, said_of
from benchmarks.tiny_models import SIZES, TOKENS, computed, small_configuration, small_model
from repo_interp.checkpoint_files.architectures import refusal, require_family
from repo_interp.cli import main as command
from repo_interp.errors import InputError
from repo_interp.models.checkpoints import require_fitting_headers
from repo_interp.models.configuration import identify
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import with_layout
from repo_interp.models.rotation import rotaries
from repo_interp.plugins.loading_checks.parity import parity_errors
from repo_interp.tasks.prompt import Prompt

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SECONDS = 900
COLUMNS = (
    *("logits", "attention", "generation", "interventions", "experiments", "bridge", "load"),
    "command",
)
ORIGINAL = 16
"""Original length in tokens of scaled rotations."""
SCALINGS: dict[str, dict[str, Any]] = SIZES["scalings"]
GOOD = ("yes", "no positions", "yes (ours)", "none")
MEASURES = "attention_mass,predictions"
"""Measures of the command: two without figures by head, which take seconds."""
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
INTRODUCTION = (
    Path(__file__).with_name("families_introduction.md").read_text(encoding="utf-8").rstrip("\n")
)


def scaled_configuration(family: str, scaling: str) -> Any:
    """A small configuration of `family` with a scaled rotation in every kind of layer; None if the
    configuration has no rotation.
    """
    changes: dict[str, Any] = {"original_max_position_embeddings": ORIGINAL}
    changes |= {"max_position_embeddings": ORIGINAL if scaling == "dynamic" else 4 * ORIGINAL}
    stated = getattr(small_configuration(family, **changes), "rope_parameters", None)
    if not stated:
        return None
    with init_empty_weights(include_buffers=False):
        rotary = next(rotaries(AutoModelForCausalLM.from_config(small_configuration(family))), None)

    def scaled(parameters: Any, prefix: str) -> Any:
        buffer = getattr(rotary, f"{prefix}inv_freq", None)
        # not rotated, or scaled otherwise (Gemma 4)
        if buffer is None or parameters["rope_type"] == "proportional":
            return parameters
        kept = {name: value for name, value in parameters.items() if name in SIZES["kept"]}
        if scaling == "longrope":
            pairs = range(len(buffer))
            kept |= {
                "short_factor": [1.0 + 0.1 * r for r in pairs],
                "long_factor": [1.5 + 0.2 * r for r in pairs],
            }
        return kept | {"rope_type": scaling} | SCALINGS[scaling] | SIZES["rope"].get(family, {})

    if any(isinstance(value, dict) for value in stated.values()):
        by_type = {kind: scaled(value, f"{kind}_") for kind, value in stated.items()}
        return small_configuration(family, **changes, rope_parameters=by_type)
    return small_configuration(family, **changes, rope_parameters=scaled(stated, ""))


def scaled(family: str, scaling: str) -> str:
    """Whether `family` opens with a scaled rotation and gives the stock model's logits: "yes", an
    error, or the reason why it does not open.
    """
    tokens = torch.randint(3, 120, (1, 3 * ORIGINAL), generator=torch.Generator().manual_seed(1))
    lengths = (ORIGINAL - 4, 3 * ORIGINAL)
    try:
        config = scaled_configuration(family, scaling)
        if config is None:
            return "none"
        stock = small_model(family, config)
        with torch.no_grad():
            expected = [stock(tokens[:, :length], use_cache=False).logits for length in lengths]
    except Exception as error:
        # without sets, whose order changes
        first = re.split(r": \{|\. [A-Z]", " ".join(str(error).split()))[0]
        return f"{UNKNOWN}{type(error).__name__}: {first.strip(chr(34))}"
    errors = []
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        try:
            stock.save_pretrained(directory)
            model = ri.load(directory)
            for length, logits in zip(lengths, expected, strict=True):
                given = model(tokens[:, :length])
                errors.append(float((given - logits).abs().max() / logits.abs().max()))
                errors.append(max(parity_errors(as_decoder(model), tokens[:, :length])) / 2)
        except InputError as error:
            return f"{REFUSED}{' '.join(str(error).replace(f'{directory}/', '').split())}"
        except Exception as error:
            return said_of(error)
    return within(max(errors), 1e-5)


def tried(family: str, columns: Collection[str] = COLUMNS) -> dict[str, str]:
    """The result of every test of `family`, by column: "yes", a number, or the reason why not."""
    if (reason := refusal(family)) is not None:
        raise InputError(reason)
    require_family(CONFIG_MAPPING[family]())
    stock = small_model(family)
    model = copy.deepcopy(stock)
    with_layout(model, None)
    tokens, expected = TOKENS, computed(stock)[0]
    layers = as_decoder(model).layers
    schemes = ", ".join(dict.fromkeys(each.scheme for each in layers))
    row = {"layers": f"{len(layers)}/{model.config.num_hidden_layers}", "positions": schemes}

    def as_expected(given: torch.Tensor) -> str:
        return within(float((given - expected).abs().max() / expected.abs().max()), 1e-5)

    def logits() -> str:
        with torch.no_grad():
            return as_expected(model(tokens, use_cache=False).logits)

    def attention() -> str:
        return within(max(parity_errors(as_decoder(model), tokens[:1])), 2e-5)

    def generation() -> str:
        mask = torch.ones_like(tokens)
        mask[0, :3] = 0
        wrong = []
        for name, options in {
            "greedy": {},
            "sampled": {"do_sample": True},
            "padded": {"attention_mask": mask},
        }.items():
            given = {
                "attention_mask": torch.ones_like(tokens),
                "max_new_tokens": 8,
                "do_sample": False,
            } | options
            outputs = []
            for each in (stock, model):
                torch.manual_seed(3)
                outputs.append(each.generate(tokens, **given))
            if not torch.equal(*outputs):
                wrong.append(name)
        return "yes" if not wrong else "differs: " + ", ".join(wrong)

    def interventions() -> str:
        if all(each.scheme == "nope" for each in layers):
            return "no positions"
        does, some = ri.interventions, {"tokens": range(2, 6)}
        moving = {
            "shifted": does.shifted(model, 3.0, **some),
            "frozen": does.frozen(model, **some),
            "permuted": does.permuted(model, **some),
        }
        still: dict[str, Any] = {"linearised": does.linearised(model)}
        if heads := does.heads_with_positions(model):  # none where a table at the input is all
            index = torch.arange(float(tokens.shape[1]))
            still["transplanted"] = does.transplanted(model, does.positions_of(model, tokens))
            still["set"] = does.set_positions(model, heads[0][0], None, index)
        wrong = []
        with torch.no_grad():
            before = model(tokens).logits
            for name, change in {**moving, **still}.items():
                with change:
                    inside = model(tokens).logits
                changed = float((inside - before).abs().max() / before.abs().max())
                if not (changed > 1e-4 if name in moving else changed < 1e-5):
                    wrong.append(f"{name} changes by {changed:.1e}")
                if not torch.equal(before, model(tokens).logits):
                    wrong.append(f"{name} leaves a trace")
        return "; ".join(wrong) or "yes"

    def experiments() -> str:
        prompts = [
            Prompt(tokens=tuple(row), spans={"needle": (8,)}, generated=(10, 11))
            for row in tokens.tolist()
        ]
        wanted: list[Any] = [ri.experiments.Atlas(twins=1, sequences=1)]
        learning = copy.deepcopy(model)
        if any(each.scheme == "rope" for each in layers):
            with_layout(learning, "repo")
            wanted.append(ri.experiments.Saliency(steps=2))
        run = ri.analyze(ri.bridge(learning), prompts, ["positions"], experiments=wanted)
        values = {"atlas": "source_mass", "saliency": "saliency_size"}
        found = [(abs(run[each.name][values[each.name]]) > 0).any() for each in wanted]
        return "yes" if all(found) else "nothing measured"

    def bridged() -> str:
        wrapped = ri.bridge(copy.deepcopy(model))
        with torch.no_grad():
            given, cache = wrapped.run_with_cache(tokens)
        said = lacking(layers[0].layer_idx, cache) or as_expected(given)
        ours = type(wrapped.adapter).__module__.startswith("repo_interp")
        return "yes (ours)" if ours and said == "yes" else said

    def loaded() -> str:
        with tempfile.TemporaryDirectory() as directory:
            stock.save_pretrained(directory)
            again = ri.load(directory)
            require_fitting_headers(identify(directory))  # as `inspect` holds them to the model
            said = misread(directory, again)
        with torch.no_grad():
            return said or as_expected(again(tokens))

    def commanded() -> str:
        with tempfile.TemporaryDirectory() as directory, redirect_stdout(StringIO()):
            stock.save_pretrained(directory)
            prompts = Path(directory, "prompts.jsonl")
            prompts.write_text(
                "".join(
                    json.dumps({"tokens": row, "spans": {"needle": [8]}, "generated": [10, 11]})
                    + "\n"
                    for row in tokens.tolist()
                )
            )
            with redirect_stderr(StringIO()) as said:
                given = ["--prompts", str(prompts), "--out", f"{directory}/out"]
                code = command(["analyze", directory, *given, "--measures", MEASURES])
        return "yes" if code == 0 else f"{code}: {said.getvalue()[-140:]}"

    trials: dict[str, Callable[[], str]] = dict(
        zip(
            COLUMNS,
            (logits, attention, generation, interventions, experiments, bridged, loaded, commanded),
            strict=True,
        )
    )
    for column in columns:
        try:
            row[column] = trials[column]()
        except Exception as error:
            row[column] = said_of(error)
    return row


def _child(family: str) -> dict[str, Any]:
    """`tried`, or the reason for refusing the family; a process that hangs is ended."""
    signal.alarm(SECONDS)
    warnings.filterwarnings("ignore")
    try:
        return (
            tried(family)  # first, because it refuses families
            | {scaling: scaled(family, scaling) for scaling in SCALINGS}
            | {"options": tried_options(family)}
        )
    except InputError as error:
        return {"refused": " ".join(str(error).split())}
    except Exception as error:
        return {"refused": f"fails: {said_of(error)}"}


def page(rows: dict[str, dict[str, Any]], version: str) -> str:
    """docs/families.md."""
    opened = [{"family": family, **row} for family, row in rows.items() if "refused" not in row]
    columns = (*COLUMNS, *SCALINGS)
    whole = sum(
        all(
            result in GOOD or result.startswith((UNKNOWN, IDLE))
            for result in (*(row[column] for column in columns), *row["options"].values())
        )
        for row in opened
    )
    not_taken = [
        (row["family"], name, result)
        for row in opened
        for name, result in row["options"].items()
        if not result.startswith((*GOOD, UNKNOWN, IDLE))
    ]
    for row in opened:
        row["options"] = summed(row["options"])
    counts = ", ".join(
        f"{sum(row[column].startswith('yes') for row in opened)} {column}" for column in columns
    )
    not_tried: dict[tuple[str, str], list[str]] = {}
    for row in opened:
        for scaling in SCALINGS:
            reason = row[scaling].replace("|", "/")
            if reason.startswith((REFUSED, UNKNOWN)):
                not_tried.setdefault((row["family"], reason), []).append(scaling)
                row[scaling] = reason.partition(":")[0]
    unscaled = [
        (family, ", ".join(scalings), reason) for (family, reason), scalings in not_tried.items()
    ]
    # The message of a refusal, without the family, which the table has.
    reasons = [
        (family, row["refused"].removeprefix(f"model_type {family!r} cannot be opened: "))
        for family, row in rows.items()
        if "refused" in row
    ]
    parts = [
        INTRODUCTION.format(
            version=version,
            all=len(rows),
            opened=len(opened),
            whole=whole,
            counts=counts,
            original=ORIGINAL,
            measures=MEASURES,
        ),
        markdown(
            pandas.DataFrame(opened, columns=["family", "layers", "positions", *columns, "options"])
        ),
        "## Failing options",
        markdown(pandas.DataFrame(not_taken, columns=["family", "option", "reason"])),
        "## Scaled rotations that cannot be tested",
        markdown(pandas.DataFrame(unscaled, columns=["family", "rotation", "reason"])),
        "## Refused",
        markdown(pandas.DataFrame(reasons, columns=["family", "reason"])).replace(r"\|", "/"),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Test the named families and print one line each; or test all, and write the page."""
    assert ri.load  # imported once, before processes are made
    torch.set_num_threads(1)
    rows = {}
    for family in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            rows[family] = in_a_process(_child, family, start="fork")
        except BrokenProcessPool:
            rows[family] = {"refused": f"fails: the process died, or had no end after {SECONDS} s"}
        sys.stdout.write(json.dumps({"family": family} | rows[family]) + "\n")
        sys.stdout.flush()
    if not sys.argv[1:]:
        PAGE.write_text(page(rows, transformers.__version__), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
