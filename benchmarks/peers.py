"""What a user would write instead: five lines of transformers, and TransformerLens, beside ours, in
fresh processes, in turns.

    python -m benchmarks.peers JOB SIDE CHECKPOINT TOKENS FILE     one side of one job: costs as JSON, its numbers to FILE

A job is timed from an opened model to its numbers, after one call to warm up; `first ...` without
that call, `loading` from the start of the process. Each side of a job runs `TURNS` times, in turns, and its least CPU time
counts: clocks drift, and other processes come and go. The numbers of all sides agree to
`TOLERANCE`, or the part fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.process_memory import resident
from repo_interp.errors import InputError, Note

if TYPE_CHECKING:
    from benchmarks.running import Row  # which imports pandas

ROWS = 5
"""Generated tokens, whose rows are asked for."""
LONGER = ("20", "21", "25", "30")
"""Test sets of the task reversal that `extrapolation` takes."""
EIGHT = 8
"""Prompts of an experiment."""
TOLERANCE, TURNS = 1e-5, 2
DETECTED = ("induction", "previous_token", "duplicate_token", "sink")
SCORES = tuple(f"{name}_on_prompts" for name in DETECTED)
SILENT: dict[str, Any] = {"progress": lambda done, total: None}
Numbers = np.ndarray
"""[layer, head, ...]."""
Side = tuple[Callable[[str], Any], Callable[[Any, list[int]], Numbers]]
"""How a model is opened, and what is timed: numbers of a model and its tokens."""


def prompt_tokens(count: int, vocabulary: int) -> list[int]:
    """Random tokens after a first one, repeated until there are `count`."""
    drawn = np.random.default_rng([1, count]).integers(3, vocabulary, (count - 1) // 2).tolist()
    return ([0, *drawn, *drawn, *drawn])[:count]


def spans_of(tokens: list[int]) -> dict[str, list[int]]:
    """The needle, which the last `ROWS` tokens copy, and the first token."""
    begin = len(tokens) - ROWS - (len(tokens) - 1) // 2
    return {"needle": [*range(begin, begin + ROWS)], "first": [0]}


# transformers, five lines each
# ---------------------------------------------------------------------------------------


def _stock(checkpoint: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: F401

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    if (Path(checkpoint) / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(checkpoint)
    return model


def _rows_over_the_cache(model: Any, tokens: list[int]) -> tuple[Any, Any]:
    """Attention [layer, head, row, key] of the rows that produce the answer, and their logits: the
    tokens before them fused.
    """
    import torch
    from transformers import DynamicCache

    ids, cache = torch.tensor([tokens]), DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(ids[:, : -ROWS - 1], past_key_values=cache, logits_to_keep=1)
        model.set_attn_implementation("eager")
        out = model(ids[:, -ROWS - 1 : -1], past_key_values=cache, output_attentions=True)
    return torch.cat(out.attentions), out.logits[0]


def _mass_of_rows(model: Any, tokens: list[int]) -> Numbers:
    weights, _ = _rows_over_the_cache(model, tokens)
    return np.stack(
        [weights[..., places].sum(-1).mean(-1).numpy() for places in spans_of(tokens).values()],
        axis=-1,
    )


def _short_prompts(tokens: list[int], count: int = 200) -> list[list[int]]:
    """Prompts, each with other random tokens in the form of `tokens`."""
    return [prompt_tokens(len(tokens), max(tokens) - number % 7) for number in range(count)]


def _mass_of_batches(model: Any, tokens: list[int]) -> Numbers:
    """Attention of all rows in batches of 2,048 tokens, and sums of it."""
    import torch

    model.set_attn_implementation("eager")
    prompts, found = torch.tensor(_short_prompts(tokens)), []
    for some in prompts.split(2048 // len(tokens)):
        with torch.inference_mode():
            weights = torch.stack(model(some, output_attentions=True).attentions)
        rows = weights[..., -ROWS - 1 : -1, :]
        found.append(
            [rows[..., places].sum(-1).mean(-1).numpy() for places in spans_of(tokens).values()]
        )
    return np.concatenate([np.stack(one, -1) for one in found], axis=1)


def _retrieval_of_rows(model: Any, tokens: list[int]) -> Numbers:
    import torch

    weights, logits = _rows_over_the_cache(model, tokens)
    strongest, answer = weights.argmax(-1), torch.tensor(tokens[-ROWS:])
    in_needle = torch.zeros(len(tokens), dtype=torch.bool)
    in_needle[spans_of(tokens)["needle"]] = True
    copied = (
        in_needle[strongest]
        & (torch.tensor(tokens)[strongest] == answer)
        & (logits.argmax(-1) == answer)
    )
    return copied.double().mean(-1, keepdim=True).numpy()


# TransformerLens
# --------------------------------------------------------------------------------------------------


def _lens(checkpoint: str) -> Any:
    from transformer_lens.head_detector import detect_head  # noqa: F401
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import AutoModelForCausalLM

    # as boot_transformers has it
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    return build_bridge_from_module(
        model, type(model).__name__, hf_config=model.config, model_name="peer"
    )


def _patterns_of_names(tokens: list[int]) -> list[Any]:
    """What `detect_head` is asked for: three of its own, and attention to the first token."""
    import torch

    sink = torch.zeros(len(tokens), len(tokens))
    sink[:, 0] = 1
    return ["induction_head", "previous_token_head", "duplicate_token_head", sink]


def _detected(model: Any, tokens: list[int], one_cache: bool = False) -> Numbers:
    import torch
    from transformer_lens.head_detector import detect_head

    ids, cache = torch.tensor([tokens]), None
    # `detect_head` makes tokens of text by the model's `to_tokens`
    object.__setattr__(model, "to_tokens", lambda text: ids)
    if one_cache:
        _, cache = model.run_with_cache(
            ids, remove_batch_dim=True, names_filter=lambda name: name.endswith("hook_pattern")
        )
    found = [
        detect_head(model, "", each, cache=cache).numpy() for each in _patterns_of_names(tokens)
    ]
    return np.stack(found, axis=-1) * _over_occurring(tokens)


def _over_occurring(tokens: list[int]) -> Numbers:
    """All rows over those in which a pattern has a pair: `detect_head` divides by all."""
    import torch

    from repo_interp.plugins.heads.head_patterns import detection_rows

    rows = detection_rows(torch.arange(len(tokens)), torch.tensor([tokens]))
    return np.array([len(tokens) / float(rows[name]) for name in DETECTED])


# ours
# --------------------------------------------------------------------------------------------------


def _ours(checkpoint: str) -> Any:
    import repo_interp as ri

    return ri.open_model(checkpoint)


def _ours_with_analyze(checkpoint: str) -> Any:
    import repo_interp as ri

    assert ri.analyze and ri.experiments.Atlas  # what they import is loading
    return ri.open_model(checkpoint)


def _bridge(checkpoint: str) -> Any:
    import repo_interp as ri

    return ri.load(checkpoint)


def _prompt(tokens: list[int]) -> Any:
    from repo_interp.tasks.prompt import Prompt

    generated = tuple(range(len(tokens) - ROWS, len(tokens)))
    return Prompt(
        tuple(tokens), {name: tuple(places) for name, places in spans_of(tokens).items()}, generated
    )


def _our_mass(model: Any, tokens: list[int]) -> Numbers:
    import repo_interp as ri

    run = ri.analyze(model, [_prompt(tokens)], ("attention_mass",), **SILENT)
    return (
        run["attention_mass"]["mass"]
        .sel(span=list(spans_of(tokens)), prompt=0)
        .transpose("layer", "head", "span")
        .values
    )


def _our_mass_of_prompts(model: Any, tokens: list[int]) -> Numbers:
    import repo_interp as ri

    prompts = [_prompt(one) for one in _short_prompts(tokens)]
    mass = ri.analyze(model, prompts, ("attention_mass",), **SILENT)["attention_mass"]["mass"]
    return mass.sel(span=list(spans_of(tokens))).transpose("layer", "prompt", "head", "span").values


def _atlas(model: Any, tokens: list[int], names: tuple[str, ...], **options: Any) -> Numbers:
    import repo_interp as ri

    atlas = ri.experiments.Atlas(**options)
    group = ri.analyze(model, [_prompt(tokens)], (), experiments=[atlas], **SILENT)["atlas"]
    return np.stack([group[name].transpose("layer", "head").values for name in names], axis=-1)


def _atlas_of(model: Any, tokens: list[int], scores: tuple[str, ...]) -> Numbers:
    """These scores of the atlas alone, without twins."""
    return _atlas(model, tokens, scores, twins=0, scores=scores)


SCORES_OF_HEADS = (
    *DETECTED,
    "place_u",
    *SCORES,
    "source_mass",
    "retrieval",
    "contribution",
    "distance",
    "departure",
    "content",
)
"""What `experiment_scripts.head_scores` gives, in its order."""


def _eight_prompts(tokens: list[int]) -> list[Any]:
    return [_prompt(one) for one in _short_prompts(tokens, EIGHT)]


def _head_scores(model: Any, tokens: list[int]) -> Numbers:
    import torch

    from benchmarks.experiment_scripts import head_scores

    spans, answer = spans_of(tokens), [*range(len(tokens) - ROWS, len(tokens))]
    prompts = torch.tensor(_short_prompts(tokens, EIGHT))
    # <bos>, which the tokenizer puts before a text
    return head_scores(model, prompts, spans["needle"], answer, first=1)


def _atlas_of_prompts(model: Any, tokens: list[int]) -> Numbers:
    import repo_interp as ri

    asked = ri.experiments.Atlas(twins=0)
    run = ri.analyze(model, _eight_prompts(tokens), (), experiments=[asked], **SILENT)
    group = run["atlas"].to_dataset()
    return np.stack([group[name].transpose("layer", "head") for name in SCORES_OF_HEADS], -1)


def _prompts_and_answer(tokens: list[int]) -> tuple[Any, list[int]]:
    """Eight prompts as a tensor, and the tokens of their answers."""
    import torch

    return torch.tensor(_short_prompts(tokens, EIGHT)), [*range(len(tokens) - ROWS, len(tokens))]


def _derivatives(model: Any, tokens: list[int]) -> Numbers:
    from benchmarks.experiment_scripts import position_derivatives

    return position_derivatives(model, *_prompts_and_answer(tokens))


def _saliency(model: Any, tokens: list[int]) -> Numbers:
    import repo_interp as ri

    asked = ri.experiments.Saliency(steps=0)
    run = ri.analyze(model, _eight_prompts(tokens), (), experiments=[asked], **SILENT)
    return run["saliency"]["saliency"].transpose("layer", "prompt", "head", "token").values


def _tolerance(model: Any, tokens: list[int]) -> Numbers:
    from benchmarks.experiment_scripts import tolerance
    from repo_interp.plugins.lengths.disturbance import offset, transposed
    from repo_interp.plugins.lengths.perturbation import GAMMAS, L_MAX, PAPER_KINDS

    points = [*product(PAPER_KINDS, GAMMAS[1:], L_MAX)]
    draw = dict.fromkeys(PAPER_KINDS, transposed) | {"position_offset": offset}
    return tolerance(model, *_prompts_and_answer(tokens), points, draw)


def _perturbation(model: Any, tokens: list[int]) -> Numbers:
    import repo_interp as ri

    asked = ri.experiments.Perturbation()
    run = ri.analyze(model, _eight_prompts(tokens), (), experiments=[asked], **SILENT)
    group = run["perturbation"].to_dataset().isel(gamma=slice(1, None))
    points = group.stack(point=("kind", "gamma", "l_max"))
    change = points["output_change"].transpose("point", "layer", "head").values
    numbers = [points[name].values for name in ("log_perplexity", "log_perplexity_rise")]
    return np.column_stack([*numbers, change.reshape(len(change), -1)])


def _repositioned(checkpoint: str) -> Any:
    import repo_interp as ri

    return ri.load_model(checkpoint)


def _use_of_kinds(model: Any, tokens: list[int]) -> Numbers:
    """Which layers are of a kind says the measure `position_sources`, on this side too."""
    import repo_interp as ri
    from benchmarks.experiment_scripts import CASES, use_of_kinds
    from repo_interp.plugins.causes.effects import drawn_sets
    from repo_interp.plugins.sources.names import GROUP_OF, GROUPS

    named = ri.analyze(model, _eight_prompts(tokens), ("position_sources",), **SILENT)
    kind = named["position_sources"].to_dataset()["kind"].isel(head=0).values.tolist()
    kind = [GROUP_OF.get(one, one) for one in kind]
    sets = {}
    for one in (*CASES, *GROUPS):
        own = [layer for layer, known in enumerate(kind) if known == one or one in CASES]
        others = [layer for layer in range(len(kind)) if layer not in own]
        if own:
            sets[one] = [own, *drawn_sets(others, len(own), 3, 0)]
    return np.nan_to_num(use_of_kinds(model, _prompts_and_answer(tokens)[0], sets))


def _kinds(model: Any, tokens: list[int]) -> Numbers:
    import repo_interp as ri

    run = ri.analyze(model, _eight_prompts(tokens), (), experiments=["kinds"], **SILENT)
    change = run["kinds"]["loss_change"].sel(token_class="all")
    return np.nan_to_num(change.transpose("kind", "of", "bound").values)


def _effects_of_heads(model: Any, tokens: list[int]) -> Numbers:
    from benchmarks.experiment_scripts import effects
    from repo_interp.plugins.causes.effects import sets_of_heads

    return effects(model, *_prompts_and_answer(tokens), partial(sets_of_heads, draws=8, seed=0))


def _effects(model: Any, tokens: list[int]) -> Numbers:
    """Beside these numbers it reads logit differences and scores, and screens by a gradient."""
    import repo_interp as ri

    run = ri.analyze(model, _eight_prompts(tokens), (), experiments=["effects"], **SILENT)
    group = run["effects"].to_dataset()
    names = ("effect", "layer_effect", "set_effect", "control_effect")
    found = [group[name].transpose("kind", ...).values for name in names]
    return np.column_stack([values.reshape(len(values), -1) for values in found])


def _longer_prompts(tokens: list[int]) -> tuple[dict[int, Any], dict[int, list[int]]]:
    """Prompts of the task by length, of which half are measured, and the tokens of their answers."""
    import torch

    from repo_interp.tasks import make_task

    made = [make_task("reversal").prompts(32, 0, words) for words in LONGER]
    by_length = {len(some[0].tokens): some for some in made}
    return (
        {length: torch.tensor([one.tokens for one in some]) for length, some in by_length.items()},
        {length: [*some[0].generated] for length, some in by_length.items()},
    )


def _divergences(model: Any, tokens: list[int]) -> Numbers:
    from benchmarks.experiment_scripts import divergences

    prompts, answers = _longer_prompts(tokens)
    return divergences(model, prompts, answers, max(2, min(prompts) // 4))


def _extrapolation(model: Any, tokens: list[int]) -> Numbers:
    """Beside these numbers it traces outputs over sliding windows."""
    import repo_interp as ri
    from repo_interp.tasks import make_task

    task, asked = make_task("reversal"), ri.experiments.Extrapolation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)  # a few short prompts are mostly noise
        run = ri.analyze(model, task.prompts(EIGHT), (), experiments=[asked], task=task, **SILENT)
    group = run["extrapolation"].to_dataset().stack(point=("method", "length"))
    names = ("kl_above_noise_low", "kl_above_noise_high", "log_perplexity")
    layers = group["kl_above_noise"].transpose("point", "layer").values
    return np.column_stack([layers, *(group[name].values for name in names)])


def _nothing(model: Any, tokens: list[int]) -> Numbers:
    return np.zeros(0)


JOBS: Mapping[str, Mapping[str, Side]] = {
    "loading": {
        "transformers": (_stock, _nothing),
        "open_model": (_ours, _nothing),
        "open_model, and all that analyze imports": (_ours_with_analyze, _nothing),
        "load, a TransformerLens bridge": (_bridge, _nothing),
    },
    "mass on spans": {
        "rows over the cache": (_stock, _mass_of_rows),
        "attention_mass": (_ours_with_analyze, _our_mass),
    },
    "first mass on spans": {
        "rows over the cache": (_stock, _mass_of_rows),
        "attention_mass": (_ours, _our_mass),
    },
    "mass of 200 short prompts": {
        "batches of transformers": (_stock, _mass_of_batches),
        "attention_mass, as it is called": (_ours_with_analyze, _our_mass_of_prompts),
    },
    "names of heads": {
        "detect_head, called for each": (_lens, _detected),
        "atlas, twins kept": (_ours_with_analyze, partial(_atlas, names=SCORES)),
        "atlas, these scores, twins=0": (_ours_with_analyze, partial(_atlas_of, scores=SCORES)),
        "detect_head over one cache": (_lens, partial(_detected, one_cache=True)),
    },
    "retrieval scores": {
        "rows over the cache": (_stock, _retrieval_of_rows),
        "atlas, this score, twins=0": (
            _ours_with_analyze,
            partial(_atlas_of, scores=("retrieval",)),
        ),
    },
    "atlas of 8 tiny prompts": {
        "maps of transformers": (_stock, _head_scores),
        "atlas, twins=0": (_ours_with_analyze, _atlas_of_prompts),
    },
    "derivatives by positions": {
        "gradients of transformers": (_stock, _derivatives),
        "saliency, steps=0": (_ours_with_analyze, _saliency),
    },
    "disturbed positions": {
        "passes of transformers": (_stock, _tolerance),
        "perturbation": (_ours_with_analyze, _perturbation),
    },
    "longer prompts": {
        "methods in transformers": (_stock, _divergences),
        "extrapolation": (_ours_with_analyze, _extrapolation),
    },
    "kinds of heads": {
        "hooks on the maps": (_repositioned, _use_of_kinds),
        "kinds": (_ours_with_analyze, _kinds),
    },
    "effects of heads": {
        "hooks on the maps": (_repositioned, _effects_of_heads),
        "effects": (_ours_with_analyze, _effects),
    },
}
"""By job, its sides; the first is what the others are compared with."""
COLD = ("loading", "first mass on spans")
"""Jobs without a call to warm up: what a first one imports and makes counts."""
LEARNED = ("kinds of heads", "effects of heads")
"""Jobs about learned positions."""


def peers(given: Namespace, subject: str, job: str, tokens: tuple[int, ...]) -> Iterator[Row]:
    """A five-line script over transformers' cache, TransformerLens' detect_head and transformers'
    loading beside ours: fresh processes in turns, the least of two each; CPU seconds without
    loading (of `loading`, from the start), and all that the process held.

    The numbers agree to 1e-5.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = _directory(subject, folder)
        for count in tokens:
            what = job if job == "loading" else f"{job}, {count} tokens"
            yield from _in_turns(job, directory, count, Path(folder), what)


def _directory(subject: str, folder: str) -> str:
    """The directory of a fetched model or of one that comes with the package; without either, one
    with random weights of that shape.
    """
    from benchmarks.shapes import checkpoint_of
    from repo_interp.checkpoint_files.directories import known_directory
    from repo_interp.checkpoint_files.shipped import zoo_path

    with suppress(InputError):
        if found := known_directory(subject):
            return str(found)
    return str(zoo_path(subject)) if "/" in subject else checkpoint_of(subject, "float32", folder)


def _in_turns(job: str, directory: str, tokens: int, folder: Path, what: str) -> Iterator[Row]:
    spent: dict[str, list[Row]] = {side: [] for side in JOBS[job]}
    for _ in range(TURNS):
        for number, side in enumerate(JOBS[job]):
            spent[side].append(_one(job, side, directory, tokens, folder / f"{number}.npy"))
    first, *others = JOBS[job]
    expected = np.load(folder / "0.npy")
    for number, side in enumerate(others, 1):
        require_equal(
            np.load(folder / f"{number}.npy"), expected, f"{what}: {side} differs from {first}"
        )
    for side, turns in spent.items():
        beside = {} if side == first else {"beside": f"{what}: {first}"}
        least = {name: min(turn[name] for turn in turns) for name in turns[0]}
        yield {"what": f"{what}: {side}", **beside, **least}


def require_equal(found: Numbers, expected: Numbers, what: str) -> None:
    """Raise ValueError, saying `what` it is, where numbers differ by more than `TOLERANCE`, or are
    none; of numbers beyond 1, relative to them.
    """
    difference = (np.abs(found - expected) / np.maximum(1.0, np.abs(expected))).max(initial=0.0)
    if not difference <= TOLERANCE:
        raise ValueError(f"{what} by {difference:.2g}; wanted at most {TOLERANCE}")


def _one(job: str, side: str, directory: str, tokens: int, file: Path) -> Row:
    """What one side costs in a process of its own.

    Raises OSError with the last line that it said where it fails.
    """
    command = [sys.executable, *["-W", "ignore", "-m", "benchmarks.peers"], job, side, directory]
    done = subprocess.run(
        [*command, str(tokens), str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error"},
    )
    if done.returncode:
        raise OSError(
            f"{job}, {side}: {(done.stderr.strip().splitlines() or ['no word'])[-1][:200]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def main(job: str, side: str, directory: str, tokens: str, file: str) -> None:
    """Run one side of one job."""
    open_model, compute = JOBS[job][side]
    cpu, wall = 0.0, time.perf_counter()
    model = open_model(directory)
    ids = prompt_tokens(
        int(tokens),
        json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))["vocab_size"],
    )
    if job not in COLD:
        compute(model, ids)
    if job != "loading":
        cpu, wall = time.process_time(), time.perf_counter()
    np.save(file, compute(model, ids))
    spent = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    sys.stdout.write(json.dumps({**spent, "megabytes": resident("VmHWM")}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
