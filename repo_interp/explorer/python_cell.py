"""The notebook cell that computes the numbers of the explorer with the library only.

    python_cell(...)    code that defines `clean` and `changed`: of the model without and with edits, the
                        log-probability of the answer, the likeliest next tokens, positions and
                        attention of the chosen heads, and the continuation

This module knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from repo_interp.explorer.session_edits import listed
from repo_interp.measures.kernels.heads import WHOLE_PATTERN

_WEIGHT = """\
        "weight": {
            (layer, head): ri.attention_pattern(bridge, tokens[0], layer, head).sel(query=token) for layer, head in heads
        },
"""
_NO_WEIGHT = "        # attention: patterns are made of up to 512 tokens\n"
_CELL = '''\
import torch
import repo_interp as ri
from contextlib import ExitStack
from transformers import GenerationConfig

bridge = ri.load({name!r})
bridge.original_model.generation_config = GenerationConfig(eos_token_id={ends})  # no other settings
tokens = torch.tensor([{tokens}])
answer, token, heads = list({answer}), {token}, {heads}


def measured():
    """The answer's log-probability, the likeliest next tokens, and positions and attention of the chosen heads."""
    with torch.no_grad():
        expected = bridge(tokens)[0].double().log_softmax(-1)
    positions = ri.interventions.positions_of(bridge, tokens)
    rows = {{layer: z[0].repeat_interleave(bridge.cfg.n_heads // z.shape[1], 0) for layer, z in positions.items()}}
    return {{
        "log_probability": float(expected[[place - 1 for place in answer], tokens[0, answer]].mean()),
        "next": expected[token].exp().topk({count}),
        "position": {{(layer, head): rows[layer][head] for layer, head in heads if layer in rows}},
{weight}        "continuation": bridge.original_model.generate(tokens[:, :{start}], max_new_tokens={most}, do_sample=False)[0, {start}:],
    }}


clean = measured()
{means}with ExitStack() as edits:
{edits}
    changed = measured()
print(clean["log_probability"], "->", changed["log_probability"])
'''


def python_cell(
    name: str,
    tokens: Sequence[int],
    answer: Sequence[int],
    heads: Sequence[tuple[int, int]],
    token: int,
    count: int,
    start: int,
    most: int,
    ends: Sequence[int],
    edits: Sequence[str],
    means: Mapping[str, str],
) -> str:
    """Write the cell.

    Args:
        name: Argument of `ri.load`.
        tokens: Tokens of the prompt.
        answer: Indices of the tokens of the answer, at least one.
        heads: (layer, head) pairs.
        token: Index of the query token.
        count: Likeliest next tokens.
        start: First token that the continuation replaces.
        most: Most tokens of the continuation.
        ends: Tokens that end a text.
        edits: Calls of `ri.interventions`, in order.
        means: Calls that make arguments of the edits, by the name of the argument.

    Returns:
        Code.
    """
    whole = len(tokens) <= WHOLE_PATTERN
    return _CELL.format(
        name=name,
        ends=ends or None,
        tokens=list(tokens),
        answer=listed(answer),
        heads=list(heads),
        token=token,
        count=count,
        start=start,
        most=most,
        weight=_WEIGHT if whole else _NO_WEIGHT,
        means="".join(f"{argument} = {call}\n" for argument, call in means.items()),
        edits="\n".join(f"    edits.enter_context({call})" for call in edits)
        or "    # no edit is on",
    )
