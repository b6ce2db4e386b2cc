"""Whether a position scheme is causal, and computes the same in every way of running it.

    difference(check) = max | log p - log p' |   in nats, over next tokens of a small random decoder

    causal      p' with all later tokens replaced
    cache       p' of the second half of the tokens one by one, with a cache, in a batch
    padding     p' of the tokens behind padding
    batch       p' of the tokens in a batch with others
    saved       p' after the model is saved and loaded
    observed    attention itself, of the layer against `AttentionInputs.pattern`
    rows        the same, row by row against all rows at once

Weights of the scheme are drawn widely before, since a scheme that is drawn as almost nothing hides
its faults. A parameter of the scheme that the loss does not reach is a finding too. Knows no scheme
by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from repo_interp.errors import InputError, one_line
from repo_interp.inputs import AttentionInputs
from repo_interp.models.capture import capture, layers_by_pair
from repo_interp.models.checkpoints import load_model, save
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import reposition

TOLERANCE = 1e-3
"""Nats, or attention: a larger difference is a finding."""
DEVIATION = 0.3
"""Standard deviation of the normal numbers that are added to weights of the scheme."""
TOKENS = 24
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
_LONG_NAME = "largest difference of log-probabilities or attention"
_FINDINGS = {
    "causal": "tokens after a token change what is predicted from it",
    "cache": (
        "tokens one by one, with a cache, are predicted differently than in one pass; keep what "
        "later tokens need in a RememberingAssigner, or by gate_keys of PositionLogits"
    ),
    "padding": "tokens behind padding are predicted differently than without padding",
    "batch": "tokens in a batch with others are predicted differently than alone",
    "saved": "a saved and loaded model predicts differently",
    "observed": "the attention of a layer is not that of its measured logits",
    "rows": "logits of one row are not those of the same row among all",
}


def verify_scheme(layout: str, **options: str | float) -> xr.Dataset:
    """Find out whether a scheme is causal, and computes the same in every way of running it.

    Args:
        layout: Name of a scheme, or a layout of two layers that has it.
        **options: Choices within schemes, as those of `repo_interp.reposition`.

    Returns:
        `difference [check]`, the largest one found by each check, NaN where it raised, and the
        findings as lines of the attribute `findings`; empty where all is well.

    Raises:
        InputError: The layout or an option is refused, the scheme cannot be built or run, or its
            numbers are not finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(
            LlamaConfig(**_CONFIG), attn_implementation="eager"
        )
        model = _running(lambda: reposition(plain.eval(), layout, **options), layout, "be built")
        of_scheme = as_decoder(model).scheme_parameters
        for weight in model.parameters():  # in their order, so that every process draws the same
            if weight in of_scheme:
                weight.data += DEVIATION * torch.randn_like(weight)
        tokens = torch.randint(1, _CONFIG["vocab_size"], (3, TOKENS))
    differences: dict[str, float] = {}
    findings = []
    with torch.no_grad():
        alone = torch.cat(
            [_running(partial(_predicted, model, row[None]), layout, "run") for row in tokens]
        )
        checks = {**_predictions(model, tokens, alone), **_attention(model, tokens[:1])}
        for check, measure in checks.items():
            try:
                differences[check] = measure()
            except InputError:  # such as numbers that are not finite
                raise
            except Exception as error:  # of code that is not ours
                differences[check] = float("nan")
                findings.append(f"{check}: {_said(error)}")
    for check, difference in differences.items():
        if difference > TOLERANCE:
            unit = "" if check in ("observed", "rows") else " nats"
            findings.append(f"{check}: {_FINDINGS[check]}, by up to {difference:.2g}{unit}")
    findings += _parameters(model, tokens)
    values = ("check", list(differences.values()), {"long_name": _LONG_NAME, "units": "1"})
    return xr.Dataset(
        {"difference": values}, {"check": list(differences)}, {"findings": "\n".join(findings)}
    )


def _running(run: Callable[[], Any], layout: str, action: str) -> Any:
    """Return the result of `run`; an error in the scheme's code becomes one InputError."""
    try:
        return run()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the scheme {layout!r} cannot {action}: {_said(error)}") from error


def _said(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 200)


def _predicted(model: PreTrainedModel, tokens: Tensor, **arguments: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False, **arguments).logits.log_softmax(-1)


def _predictions(
    model: PreTrainedModel, tokens: Tensor, alone: Tensor
) -> dict[str, Callable[[], float]]:
    """Checks of log-probabilities against those of every row `alone`."""
    one, half, padding = tokens[:1], TOKENS // 2, 5

    def changed() -> Tensor:
        later = (one[:, half:] + 1) % _CONFIG["vocab_size"]
        return _predicted(model, torch.cat([one[:, :half], later], 1))[:, :half]

    def cached() -> Tensor:
        # Several prompts, so that each must find its own memory
        cache, steps = None, []
        for part in (tokens[:, :half], *tokens[:, half:, None].unbind(1)):
            step = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache, steps = step.past_key_values, [*steps, step.logits.log_softmax(-1)]
        return torch.cat(steps, 1)

    def padded() -> Tensor:
        valid = (torch.arange(TOKENS + padding) >= padding).long()[None]
        # As `generate` gives them: the index counts tokens that are no padding.
        index = (valid.cumsum(1) - 1).clamp_min(0)
        behind = F.pad(one, (padding, 0))
        return _predicted(model, behind, attention_mask=valid, position_ids=index)[:, padding:]

    def saved() -> Tensor:
        with TemporaryDirectory() as directory:
            path = Path(directory) / "model"
            save(model, path)
            return _predicted(load_model(path), one)

    def difference(predict: Callable[[], Tensor]) -> float:
        found = predict()
        return float((found - alone[: found.shape[0], : found.shape[1]]).abs().max())

    checks = {
        "causal": changed,
        "cache": cached,
        "padding": padded,
        "batch": partial(_predicted, model, tokens),
        "saved": saved,
    }
    return {check: partial(difference, predict) for check, predict in checks.items()}


def _attention(model: PreTrainedModel, tokens: Tensor) -> dict[str, Callable[[], float]]:
    """Checks of the attention of layers against what their inputs give, over all layers."""

    def largest(of_layer: Callable[[AttentionInputs], Tensor]) -> float:
        found: list[Tensor] = []
        capture(
            as_decoder(model),
            tokens,
            tokens >= 0,
            torch.zeros(1, dtype=torch.long),
            lambda inputs: found.append(of_layer(inputs).abs().max()),
        )
        return float(torch.stack(found).max())

    def observed() -> float:
        weights = model(tokens, output_attentions=True, use_cache=False).attentions
        return largest(lambda inputs: inputs.pattern(torch.arange(TOKENS)) - weights[inputs.layer])

    def row_by_row(inputs: AttentionInputs) -> Tensor:
        rows = torch.arange(TOKENS)
        return inputs.pattern(rows) - torch.cat([inputs.pattern(row[None]) for row in rows], 2)

    return {"observed": observed, "rows": partial(largest, row_by_row)}


def _parameters(model: PreTrainedModel, tokens: Tensor) -> list[str]:
    """Findings about parameters of the scheme."""
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    decoder = as_decoder(model)
    of_scheme = decoder.scheme_parameters
    still = [
        name
        for name, weight in model.named_parameters()
        if weight in of_scheme and (weight.grad is None or not weight.grad.any())
    ]
    found = [f"gradient: the loss does not reach {', '.join(still)}"] if still else []
    by_pair = layers_by_pair(decoder)
    for layer, attention in decoder.by_layer.items():
        # Of positions by pair nothing is said as of learned positions.
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
