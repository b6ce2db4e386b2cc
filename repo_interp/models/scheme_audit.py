"""Whether a position scheme is causal, and computes the same in every way of running it.

    difference(check) = max | log p - log p' |   in nats, over next tokens of a small random decoder

    causal      p' with all later tokens replaced
    cache       p' of the tokens one by one, with a cache of keys
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

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs
from repo_interp.models.capture import capture, layers_by_pair
from repo_interp.models.checkpoints import load_model, save
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import reposition, scheme_parameters

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
_FINDINGS = {
    "causal": "tokens after a token change what is predicted from it",
    "cache": "tokens one by one, with a cache, are predicted differently than in one pass",
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
        `difference [check]`, the largest one found by each check, and the findings as lines of the
        attribute `findings`; empty where all is well.

    Raises:
        InputError: The layout or an option is refused, or a check gives numbers that are not
            finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(
            LlamaConfig(**_CONFIG), attn_implementation="eager"
        )
        model = reposition(plain.eval(), layout, **options)
        of_scheme = scheme_parameters(model)
        for weight in model.parameters():  # in their order, so that every process draws the same
            if weight in of_scheme:
                weight.data += DEVIATION * torch.randn_like(weight)
        tokens = torch.randint(1, _CONFIG["vocab_size"], (3, TOKENS))
    with torch.no_grad():
        differences = {**_predictions(model, tokens), **_attention(model, tokens[:1])}
    for check, difference in differences.items():
        if not difference < float("inf"):
            raise InputError(f"{layout}: the check {check!r} gives numbers that are not finite")
    findings = [
        f"{check}: {_FINDINGS[check]}, by up to {difference:.2g}"
        f"{'' if check in ('observed', 'rows') else ' nats'}"
        for check, difference in differences.items()
        if difference > TOLERANCE
    ]
    findings += _parameters(model, tokens)
    return xr.Dataset(
        {
            "difference": (
                "check",
                list(differences.values()),
                {"long_name": "largest difference of log-probabilities or attention", "units": "1"},
            )
        },
        {"check": list(differences)},
        {"findings": "\n".join(findings)},
    )


def _predictions(model: PreTrainedModel, tokens: Tensor) -> dict[str, float]:
    """Differences of log-probabilities of the first row."""
    one = tokens[:1]

    def predicted(some: Tensor, of: PreTrainedModel = model, **arguments: Tensor) -> Tensor:
        return of(input_ids=some, use_cache=False, **arguments).logits.log_softmax(-1)

    plain = predicted(one)
    half = TOKENS // 2
    changed = torch.cat([one[:, :half], (one[:, half:] + 1) % _CONFIG["vocab_size"]], 1)
    cache, steps = None, []
    for token in one.T:
        step = model(input_ids=token[None], past_key_values=cache, use_cache=True)
        cache, steps = step.past_key_values, [*steps, step.logits.log_softmax(-1)]
    padding = 5
    padded = F.pad(one, (padding, 0))
    valid = (torch.arange(padded.shape[1]) >= padding).long()[None]
    # As `generate` gives them: the index counts tokens that are no padding.
    index = (valid.cumsum(1) - 1).clamp_min(0)
    others = {
        "causal": predicted(changed)[:, :half],
        "cache": torch.cat(steps, 1),
        "padding": predicted(padded, attention_mask=valid, position_ids=index)[:, padding:],
        "batch": predicted(tokens)[:1],
    }
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        save(model, path)
        others["saved"] = predicted(one, load_model(path))  # pyright: ignore[reportArgumentType]
    return {
        check: float((other - plain[:, : other.shape[1]]).abs().max())
        for check, other in others.items()
    }


def _attention(model: PreTrainedModel, tokens: Tensor) -> dict[str, float]:
    """Differences between the attention of layers and what their inputs give, over all layers."""
    weights = model(tokens, output_attentions=True, use_cache=False).attentions
    found: dict[str, list[Tensor]] = {"observed": [], "rows": []}

    def receive(inputs: AttentionInputs) -> None:
        rows = torch.arange(TOKENS)
        whole = inputs.pattern(rows)
        single = torch.cat([inputs.pattern(row[None]) for row in rows], 2)
        found["observed"].append((whole - weights[inputs.layer]).abs().max())
        found["rows"].append((whole - single).abs().max())

    capture(model, tokens, tokens >= 0, torch.zeros(1, dtype=torch.long), receive)
    return {check: float(torch.stack(values).max()) for check, values in found.items()}


def _parameters(model: PreTrainedModel, tokens: Tensor) -> list[str]:
    """Findings about parameters of the scheme."""
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    of_scheme = scheme_parameters(model)
    still = [
        name
        for name, weight in model.named_parameters()
        if weight in of_scheme and (weight.grad is None or not weight.grad.any())
    ]
    found = [f"gradient: the loss does not reach {', '.join(still)}"] if still else []
    by_pair = layers_by_pair(model)
    for layer, attention in as_decoder(model).by_layer.items():
        # Of positions by pair nothing is said as of learned positions.
        learns = layer not in by_pair and any(
            weight in of_scheme for weight in (attention.assigner or nn.Module()).parameters()
        )
        if learns != attention.learned:
            found.append(
                f"learned: SchemeParts of layer {layer} say learned={attention.learned}, and the "
                f"assigner has {'parameters' if learns else 'none, or positions by rotary pair'}"
            )
    return found
