"""Check that a position scheme is causal, and that every way of running it computes the same.

    difference(check) = max | log p - log p' |   in nats, over next tokens of a small random decoder

    repeated    p' after other prompts
    first       p' of a model that read another prompt first
    causal      p' with all tokens from some index on replaced, and left out, for every index
    cache       p' of a batch in several calls with a cache: one by one, one by one after a first
                part, and in parts
    padding     p' of the tokens behind padding
    batch       p' of the tokens in a batch with others
    saved       p' after the model is saved and loaded
    observed    attention itself, of the layer against `AttentionInputs.pattern`
    rows        the same, row by row against all rows at once
    long        p' of the first tokens of a prompt of 64, against all of them
    packed      p' of two documents in one row, whose position ids begin again
    grouped     p' of a model without shared keys, whose heads have equal keys within each group
    half        logits of layers in bfloat16 and float16, against float64 from the same numbers
    chunks      logits of layers of two prompts in several calls, with a cache, one behind padding,
                in float32 and bfloat16
    reference   logits or weights of attention, against a slow formula of the user in float64

First, normal noise is added to the weights of the scheme, because a scheme that starts near zero
hides its faults. The noise is smaller where rounding alone would otherwise change predictions.
Two more faults give findings: a parameter of the scheme that gets no gradient, and an argument
that the scheme changes in place. A finding names the first layer, token and head that differ;
with a reference it names the place of the largest difference, in the layer that is farthest off.
This module knows no scheme by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from repo_interp.errors import InputError, NotFinite, one_line
from repo_interp.inputs import AttentionInputs
from repo_interp.models.capture import capture, layers_by_pair
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import patch_attribute
from repo_interp.models.precision import float32_by_default
from repo_interp.models.reposition import reposition
from repo_interp.models.saving import save
from repo_interp.plugins.verify_scheme.chunks import compare_chunks
from repo_interp.plugins.verify_scheme.grouped_heads import grouped_heads
from repo_interp.plugins.verify_scheme.half_precision import half_precision
from repo_interp.plugins.verify_scheme.traced_passes import (
    TOLERANCE,
    TracedPass,
    first_difference,
    first_place,
    joined,
    pass_difference,
    run_pass,
    trace,
)
from repo_interp.positions.assigners import RememberingAssigner
from repo_interp.positions.logits import PositionLogits
from repo_interp.positions.rotary import expand_heads
from repo_interp.runtime.failures import failure_of

DEVIATIONS = (0.3, 0.1, 0.03)
"""Standard deviations of the noise on the weights of the scheme. The first one is used at which
rounding the embeddings changes predictions by less than a tenth of the tolerance.
"""
TOKENS = 24
LONG = 64
"""Tokens of the longest prompt; the decoder takes no more."""
_DOCUMENT = 10
"""Tokens of the first of two packed documents."""
_SPLITS = ((1,) * TOKENS, (12, *(1,) * 12), (7, 9, 8))
"""Tokens of each call with a cache."""
_CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
_LONG_NAME = "largest difference of log-probabilities, attention or its logits"
_FINDINGS = {
    "repeated": (
        "the same tokens are predicted differently after other prompts, so no other difference is "
        "judged; positions and logits may depend on nothing but the arguments of the call"
    ),
    "first": (
        "what is predicted depends on the first prompt that the model saw; the scheme may keep "
        "nothing of a call"
    ),
    "causal": "tokens after a token, or how many there are, change what is predicted from it",
    "cache": "tokens in several calls, with a cache, are predicted differently than in one",
    "padding": "tokens behind padding are predicted differently than without padding",
    "batch": "tokens in a batch with others are predicted differently than alone",
    "saved": "a saved and loaded model predicts differently",
    "observed": "the attention of a layer is not that of its measured logits",
    "rows": "logits of one row are not those of the same row among all",
    "long": f"of a prompt of {LONG} tokens, those after a token change what is predicted from it",
    "packed": (
        "documents that are packed into one row, with position ids that begin again, are predicted "
        "differently than alone"
    ),
}


@float32_by_default()
def verify_scheme(
    layout: str, *, reference: Callable[..., Tensor] | None = None, **options: str | float
) -> xr.DataTree:
    """Check that a scheme is causal, and that every way of running it computes the same.

    Args:
        layout: Name of a scheme, or a layout of two layers that has it.
        reference: Slow formula of the scheme, a function of queries and keys [1, head, token,
            d_head] before transform and rotation, and of positions [1, P, token], all in float64.
            Positions are the token index where the scheme has none, and a pair (of queries, of
            keys) where these differ. A fourth argument, if the function takes one, is the layer
            with the parts of the scheme. The function returns logits [1, head, query, key], or
            attention weights. The result counts as weights if no number that a query sees is
            negative and no row sums to more than 1.
        **options: Choices within schemes, as those of `repo_interp.reposition`.

    Returns:
        `difference [check]`, the largest difference of each check: NaN where the check raised, or
        was skipped after findings of other checks. The attribute `findings` has one line per
        finding, and is empty if there are none.

    Raises:
        InputError: The layout or an option is refused, the scheme cannot be built or run, or its
            numbers are not finite.
    """
    # In float32, whatever the default of the process is
    with torch.random.fork_rng(devices=[]), local_torch_dtype(torch.float32):
        torch.manual_seed(1)
        tokens = torch.randint(1, _CONFIG["vocab_size"], (3, TOKENS))

        def run(action: str, function: Callable[..., Any], *arguments: Any) -> Any:
            return _running(partial(function, *arguments), layout, action)

        def build(deviation: float, **config: int) -> PreTrainedModel:
            return run("be built", partial(_drawn, **config), layout, options, deviation)

        deviation = next(
            (
                wide
                for wide in DEVIATIONS
                if run("run", _rounding, build(wide), tokens) < TOLERANCE / 10
            ),
            DEVIATIONS[-1],
        )
        model, twin = build(deviation), build(deviation)
        # Schemes may draw weights by other libraries than torch
        run("be built", twin.load_state_dict, model.state_dict())
        ungrouped = partial(build, deviation, num_key_value_heads=_CONFIG["num_attention_heads"])
        return _audited(layout, model, twin, ungrouped, tokens, reference)


def _drawn(
    layout: str, options: dict[str, Any], deviation: float, **config: Any
) -> PreTrainedModel:
    """Build a decoder with the scheme; every call draws the same weights."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        LlamaConfig(**_CONFIG | config), attn_implementation="eager", dtype=torch.float32
    )
    model = reposition(plain.eval(), layout, **options)
    of_scheme = as_decoder(model).scheme_parameters
    for weight in model.parameters():  # in their order, so that every process draws the same
        if weight in of_scheme:
            weight.data += deviation * torch.randn_like(weight)
    return model


@torch.no_grad()
def _rounding(model: PreTrainedModel, tokens: Tensor) -> float:
    """Return how much predictions change when embeddings are rounded differently."""
    exact, embeddings = run_pass(model, tokens), cast(nn.Embedding, model.get_input_embeddings())
    noise = torch.finfo(torch.float32).eps * torch.randn_like(embeddings.weight)
    embeddings.weight *= 1 + noise
    return float((run_pass(model, tokens).predictions - exact.predictions).abs().max())


def _audited(
    layout: str,
    model: PreTrainedModel,
    twin: PreTrainedModel,
    ungrouped: Callable[[], PreTrainedModel],
    tokens: Tensor,
    reference: Callable[..., Tensor] | None,
) -> xr.DataTree:
    differences: dict[str, float] = {}
    findings = []
    with torch.no_grad():
        alone = joined(
            [_running(partial(run_pass, model, row[None]), layout, "run") for row in tokens], 0
        )
        checks = {**_predictions(model, twin, tokens, alone), **_attention(model, tokens[:1])}
        places: dict[str, str] = {}
        for check, measure in checks.items():
            try:
                differences[check], places[check] = measure()
            except NotFinite:  # NaN in a whole prompt; the error names the part of the scheme
                raise
            except Exception as error:  # the code of a scheme may raise anything
                differences[check] = float("nan")
                findings.append(f"{check}: {_said(error)}")
        wrong = [check for check, difference in differences.items() if difference > TOLERANCE]
        wrong = ["repeated"] if "repeated" in wrong else wrong
        for check in wrong:
            unit = "" if check in ("observed", "rows") else " nats"
            advice = _advice(model, wrong) if check == "cache" else ""
            findings.append(
                f"{check}: {_FINDINGS[check]}, by up to {differences[check]:.2g}{unit}, "
                f"{places[check]}{advice}"
            )
        try:
            findings += _changed_in_place(model, tokens)
        except Exception as error:
            findings.append(f"in_place: {_said(error)}")
        # These checks would repeat an earlier finding.
        sound = not findings
        for check, measure in _following(model, ungrouped, tokens).items():
            differences[check] = float("nan")
            try:
                # Chunks also show faults of the length and of half precision.
                if sound and not (check == "chunks" and findings):
                    differences[check], said = measure()
                    findings += said
            except Exception as error:
                findings.append(f"{check}: {_said(error)}")
        if reference is not None:
            try:
                differences["reference"], said = _referenced(model, tokens[:1], reference)
                findings += said
            except Exception as error:
                differences["reference"] = float("nan")
                findings.append(f"reference: {_said(error)}")
    more = {"gradient": _untrained, "learned": _misstated}
    for check, find in more.items():
        try:
            findings += find(model, tokens)
        except Exception as error:
            findings.append(f"{check}: {_said(error)}")
    values = ("check", list(differences.values()), {"long_name": _LONG_NAME, "units": "1"})
    return xr.DataTree(
        xr.Dataset(
            {"difference": values}, {"check": list(differences)}, {"findings": "\n".join(findings)}
        )
    )


def _running(run: Callable[[], Any], layout: str, action: str) -> Any:
    """Return the result of `run`; an error in the scheme's code becomes one InputError."""
    try:
        return run()
    except InputError:
        raise
    except Exception as error:
        reason = failure_of(error) or _said(error)
        raise InputError(f"the scheme {layout!r} cannot {action}: {reason}") from error


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    return one_line(f"{kind}{error}", 200)


def _predictions(
    model: PreTrainedModel, twin: PreTrainedModel, tokens: Tensor, alone: TracedPass
) -> dict[str, Callable[[], tuple[float, str]]]:
    """Make the checks against `alone`, passes of single rows: largest difference, and its place."""
    one, padding = tokens[:1], 5

    def changed() -> Iterator[TracedPass]:
        for start in range(TOKENS - 1, 0, -1):
            later = (one[:, start:] + 1) % _CONFIG["vocab_size"]
            yield run_pass(model, torch.cat([one[:, :start], later], 1)).cut(0, start)
            yield run_pass(model, one[:, :start])

    def cached() -> Iterator[TracedPass]:
        for split in _SPLITS:
            # Several prompts, so that each must find its own memory
            cache = DynamicCache()
            yield joined([run_pass(model, part, cache) for part in tokens.split(split, 1)], 1)

    def padded() -> Iterator[TracedPass]:
        valid = (torch.arange(TOKENS + padding) >= padding).long()[None]
        # As in `generate`: the index counts tokens that are not padding.
        index = (valid.cumsum(1) - 1).clamp_min(0)
        behind = F.pad(one, (padding, 0))
        yield run_pass(model, behind, attention_mask=valid, position_ids=index).cut(padding)

    def first() -> Iterator[TracedPass]:
        run_pass(twin, tokens[1:2, : TOKENS // 2])
        yield run_pass(twin, one)

    def saved() -> Iterator[TracedPass]:
        with TemporaryDirectory() as directory:
            path = Path(directory) / "model"
            save(model, path)
            loaded = load_model(path)
            # Without traced scores the loaded model uses fused attention.
            predictions = loaded(one, use_cache=False).logits.log_softmax(-1)
            yield replace(run_pass(loaded, one), predictions=predictions)

    def difference(run: Callable[[], Iterable[TracedPass]]) -> tuple[float, str]:
        largest, place = 0.0, ""
        try:
            for found in run():
                error = pass_difference(found, alone)
                largest = max(largest, error)
                if error > TOLERANCE and not place:
                    place = first_difference(found, alone, TOLERANCE / 10)
        except Exception:
            # If predictions differ already, the difference explains more than the error.
            if largest <= TOLERANCE:
                raise
        return largest, place

    checks = {
        "repeated": lambda: [run_pass(model, one)],
        "first": first,
        "causal": changed,
        "cache": cached,
        "padding": padded,
        "batch": lambda: [run_pass(model, tokens)],
        "saved": saved,
    }
    return {check: partial(difference, run) for check, run in checks.items()}


def _following(
    model: PreTrainedModel, build: Callable[[], PreTrainedModel], tokens: Tensor
) -> dict[str, Callable[[], tuple[float, list[str]]]]:
    """Make the checks that run after all others passed: largest difference, and findings."""
    prompt = tokens.flatten()[:LONG][None]

    def found(
        check: str, pairs: Iterable[tuple[TracedPass, TracedPass]]
    ) -> tuple[float, list[str]]:
        largest, place = 0.0, ""
        for ours, wanted in pairs:
            error = pass_difference(ours, wanted)
            largest = max(largest, error)
            if error > TOLERANCE and not place:
                place = first_difference(ours, wanted, TOLERANCE / 10)
        sentence = f"{check}: {_FINDINGS[check]}, by up to {largest:.2g} nats, {place}"
        return largest, [sentence] if place else []

    def long() -> Iterator[tuple[TracedPass, TracedPass]]:
        whole = run_pass(model, prompt)
        for end in range(TOKENS + 1, LONG, 6):
            yield run_pass(model, prompt[:, :end]), whole

    def packed() -> Iterator[tuple[TracedPass, TracedPass]]:
        parts = tokens[:1, :_DOCUMENT], tokens[:1, _DOCUMENT:]
        index = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
        both = run_pass(model, tokens[:1], position_ids=index)
        alone = [run_pass(model, part) for part in parts]
        scores = [each.clone() for each in both.scores]
        for place, wanted in enumerate(scores):
            for rows, of_part in zip(
                (slice(_DOCUMENT), slice(_DOCUMENT, None)), alone, strict=True
            ):
                wanted[:, :, rows, rows] = of_part.scores[place]
        yield both, TracedPass(joined(alone, 1).predictions, scores, both.layers)

    return {
        "long": lambda: found("long", long()),
        "packed": lambda: found("packed", packed()),
        "grouped": lambda: grouped_heads(model, build, tokens[:1]),
        "half": lambda: half_precision(model, prompt),
        "chunks": lambda: compare_chunks(model, prompt),
    }


def _referenced(
    model: PreTrainedModel, tokens: Tensor, reference: Callable[..., Tensor]
) -> tuple[float, list[str]]:
    """Compare attention with the user's formula: the largest difference, and the finding."""
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    worst, findings = 0.0, []
    excess = 1.0
    for each in trace(model, tokens, use_cache=False):
        layer, found = each.layer, each.tensors
        queries, keys = (
            expand_heads(
                found[name].double().unflatten(-1, (-1, layer.d_head)).transpose(1, 2), layer.heads
            )
            for name in ("q_proj", "k_proj")
        )
        positions = found.get("positions", torch.arange(TOKENS)[None, None]).double()
        if "key_positions" in found:
            positions = positions, found["key_positions"].double()
        reference_arguments = queries, keys, positions, layer
        made = reference(
            *reference_arguments[: max(3, len(inspect.signature(reference).parameters))]
        )
        shape = [1, layer.heads, TOKENS, TOKENS]
        if not isinstance(made, Tensor) or [*made.shape] != shape:
            raise InputError(
                f"the reference returns {[*getattr(made, 'shape', ())] or type(made).__name__}; "
                f"wanted [1, head, query, key], here {shape}"
            )
        made = made.double().masked_fill(~seen, 0)
        if not made.isfinite().all():
            raise FloatingPointError("the reference is NaN or infinite where a query sees a key")
        weights = bool((made >= 0).all() and (made.sum(-1) <= 1 + 1e-6).all())
        ours = found["pattern" if weights else "scores"].double().masked_fill(~seen, 0)
        errors = (ours - made).abs()
        error, tolerance = float(errors.max()), TOLERANCE * max(1.0, float(made.abs().max()))
        worst = max(worst, error)
        if error / tolerance > excess:  # The layer that is farthest from its reference
            excess = error / tolerance
            head, query, key = (int(n) for n in torch.unravel_index(errors.argmax(), shape)[1:])
            findings = [
                f"reference: {'weights' if weights else 'logits'} of layer {layer.layer_idx} in "
                f"float32 differ from the reference by up to {error:.2g} (head {head}, query of "
                f"token {query}, key of token {key}); {tolerance:.2g} is allowed"
            ]
    return worst, findings


def _advice(model: PreTrainedModel, wrong: list[str]) -> str:
    """Suggest a fix for differences with a cache, by other faults and by the scheme's memory."""
    if others := [check for check in ("first", "causal") if check in wrong]:
        return f"; look at {others[0]} first, which a cache shows too"
    kept = {
        "remember and recall": lambda part: isinstance(part, RememberingAssigner),
        "gate_keys": lambda part: (
            isinstance(part, PositionLogits)
            and type(part).gate_keys is not PositionLogits.gate_keys
        ),
    }
    parts = as_decoder(model).scheme_modules
    if present := [name for name, keeps in kept.items() if any(map(keeps, parts))]:
        return (
            f"; what {' and '.join(present)} make of a token may depend neither on the tokens that "
            "come in one call with it, nor on other prompts"
        )
    return (
        "; keep what later tokens need in a RememberingAssigner, or by gate_keys of PositionLogits"
    )


@torch.no_grad()
def _changed_in_place(model: PreTrainedModel, tokens: Tensor) -> list[str]:
    """Find arguments that parts of the scheme change in place."""
    found: list[str] = []

    def watch(part: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(method).parameters)

        def run(*arguments: Any, **keywords: Any) -> Any:
            by_name = dict(zip(names, arguments, strict=False)) | keywords
            before = {
                name: value.clone() for name, value in by_name.items() if isinstance(value, Tensor)
            }
            result = method(*arguments, **keywords)
            found.extend(
                f"in_place: {type(part).__name__}.{method.__name__} changes {name}, which other "
                f"parts of the model are given too; change a copy, as {name}.clone() makes one"
                for name, value in before.items()
                if not torch.equal(value, by_name[name])
            )
            return result

        return run

    with ExitStack() as undo:
        for part in as_decoder(model).scheme_modules:
            for name in ("forward", "remember", "recall", "gate_keys"):
                if hasattr(part, name):
                    patch_attribute(undo, part, name, partial(watch, part))
        first = model(input_ids=tokens[:, : TOKENS // 2], use_cache=True)
        model(input_ids=tokens[:, TOKENS // 2 :], past_key_values=first.past_key_values)
    return list(dict.fromkeys(found))  # the same of every layer


def _attention(
    model: PreTrainedModel, tokens: Tensor
) -> dict[str, Callable[[], tuple[float, str]]]:
    """Compare the attention of all layers with attention recomputed from their inputs."""

    def largest(of_layer: Callable[[AttentionInputs], Tensor]) -> tuple[float, str]:
        found: dict[int, Tensor] = {}
        capture(
            as_decoder(model),
            tokens,
            tokens >= 0,
            torch.zeros(1, dtype=torch.long),
            lambda inputs: found.update({inputs.layer: of_layer(inputs).abs()}),
        )
        wrong = {layer: error > TOLERANCE for layer, error in found.items()}
        first = next((layer for layer, differs in wrong.items() if bool(differs.any())), None)
        place = "" if first is None else f"first in layer {first} at {first_place(wrong[first])}"
        return float(torch.stack([error.max() for error in found.values()]).max()), place

    def observed() -> tuple[float, str]:
        weights = model(tokens, output_attentions=True, use_cache=False).attentions
        return largest(lambda inputs: inputs.pattern(torch.arange(TOKENS)) - weights[inputs.layer])

    def row_by_row(inputs: AttentionInputs) -> Tensor:
        rows = torch.arange(TOKENS)
        return inputs.pattern(rows) - torch.cat([inputs.pattern(row[None]) for row in rows], 2)

    return {"observed": observed, "rows": partial(largest, row_by_row)}


def _untrained(model: PreTrainedModel, tokens: Tensor) -> list[str]:
    """Find parameters of the scheme that get no gradient."""
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    of_scheme = as_decoder(model).scheme_parameters
    still = [
        name
        for name, weight in model.named_parameters()
        if weight in of_scheme and (weight.grad is None or not weight.grad.any())
    ]
    return [f"gradient: the loss does not reach {', '.join(still)}"] if still else []


def _misstated(model: PreTrainedModel, tokens: Tensor) -> list[str]:
    """Find parts whose declared properties are wrong."""
    found, decoder = [], as_decoder(model)
    of_scheme, by_pair = decoder.scheme_parameters, layers_by_pair(decoder)
    for layer, attention in decoder.by_layer.items():
        # Positions by pair are not described as learned positions.
        learns = layer not in by_pair and any(
            weight in of_scheme for weight in (attention.assigner or nn.Module()).parameters()
        )
        if learns != attention.learned:
            does = "learns" if learns else "learns no"
            found.append(
                f"learned: SchemeParts say learned={attention.learned}, and the assigner {does} "
                f"one position per token: say learned={learns}"
            )
    return list(dict.fromkeys(found))  # the same of every layer
