"""Whether the parts of a scheme are as exact in half precision as attention itself can be.

Each part runs twice on the inputs of a pass in half precision: as it is, and on the same numbers in
float64, with every tensor that the part creates in float64 too:

    positions, position logits, remainder    | p - p64 | <= sqrt(u v) m + 4 v z m
    transformed queries and keys             | x - x64 | <= 8 u n
    logits    | S - S64 | <= (u (6 sqrt(2) + 16 t + 2) + 4 v z) s n_i n_j + u (2 |B| + |S|)

u = 2^-8 (bfloat16) or 2^-11 (float16) and v = 2^-24 (float32) bound the relative error of one
rounding. The first line asks for float32, which positions and position logits promise: sqrt(u v) is
as far above the rounding of float32 as it is below that of the model. m is the largest position, or
the largest |B| + s n_i n_j of a row; z is the largest angle, known in float32 up to some v z.

The last line is the rounding of one layer's logits. Tables of cosines and sines, their products
and the sum of these are rounded, so an entry of a turned pair (x, y) is off by up to
3 u (|x cos| + |y sin|), and the pair by 3 sqrt(2) u |(x, y)|, of a query and of a key. A transform
(t = 1) adds 8 u to each, as it may round eight times. The product and its scaling by s add u each;
B is rounded before it is added, and so is the sum. n is the norm of a query or key, before or after
the transform, whichever is larger, times the factor of the rotation.

Prompts begin at position 1.5 / u, where half precision has no odd numbers. Queries, keys and gate
keys are inputs, which a cache holds in half precision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.verify_scheme.traced_passes import LayerTrace, first_place, trace
from repo_interp.positions.assigners import RememberingAssigner
from repo_interp.positions.rotary import by_pair, expand_heads, pair_tables, turn

HALF = (torch.bfloat16, torch.float16)
_SINGLE = 2.0**-24
"""v."""
_ROUNDINGS = 8
"""Number of successive roundings that a transform may make."""
_FLOAT32 = "float32 from the same numbers; make them in float32"
_ADVICE = {
    "positions": f"{_FLOAT32}, of an index that is never half precision",
    "transformed queries or keys": "rounding does; make angles and sums in float32",
    "position logits": f"{_FLOAT32}, as repo_interp.positions.logits.exact converts",
    "remainders": _FLOAT32,
    "logits": "rounding of one layer does",
}
"""The end of a finding, by the compared part."""


@dataclass(frozen=True)
class Comparison:
    """Numbers of a layer in half precision against float64."""

    name: str
    errors: Tensor
    """[prompt, head, token, ...]"""
    allowed: Tensor
    """Broadcasts against the errors."""

    @property
    def differs(self) -> Tensor:
        """True where an error exceeds its bound or is NaN."""
        return ~(self.errors <= self.allowed)


def in_precision(
    model: PreTrainedModel, dtype: torch.dtype, of_positions: torch.dtype
) -> PreTrainedModel:
    """Copy a model to a precision, as `load_model` does.

    Args:
        model: Repositioned model in float32.
        dtype: Precision of the weights.
        of_positions: Precision of assigners; learned parameters of the rotation stay float32.

    Returns:
        The copy.
    """
    made = copy.deepcopy(model).to(dtype)  # pyright: ignore[reportArgumentType]
    for mine, theirs in zip(as_decoder(model).layers, as_decoder(made).layers, strict=True):
        for part, wanted in (("assigner", of_positions), ("rotation_parameters", torch.float32)):
            source, target = getattr(mine.module, part), getattr(theirs.module, part)
            if source is not None:
                for old, new in zip(source.parameters(), target.parameters(), strict=True):
                    new.data = old.data.to(wanted)
    return made


def run_in_precision(
    model: PreTrainedModel, dtype: torch.dtype, prompts: Sequence[Tensor], far: int
) -> tuple[PreTrainedModel, int, list[list[LayerTrace]]]:
    """Run a copy of a model in a precision, far from position 0 and with float32 positions.

    If the scheme's table of positions ends earlier, or its maps take no hidden states of another
    precision, the copy runs from position 0, or with positions in `dtype`.

    Args:
        model: Repositioned model in float32.
        dtype: Precision of the copy.
        prompts: Token ids [1, token] of separate passes.
        far: Position of the first token.

    Returns:
        The copy, the position of the first token, and by prompt a trace of every layer.

    Raises:
        Exception: The error of the scheme in the last of these runs.
    """
    starts = [0] if as_decoder(model).longest_prompt else [far, 0]
    ways = [(start, maps) for start in starts for maps in dict.fromkeys((torch.float32, dtype))]
    *others, last = ways
    for start, maps in others:
        made = in_precision(model, dtype, maps)
        try:
            return made, start, [_traced(made, prompt, start) for prompt in prompts]
        except Exception:  # the code of a scheme may raise anything
            continue
    made = in_precision(model, dtype, last[1])
    return made, last[0], [_traced(made, prompt, last[0]) for prompt in prompts]


def _traced(model: PreTrainedModel, prompt: Tensor, start: int) -> list[LayerTrace]:
    index = torch.arange(start, start + prompt.shape[1])[None]
    return trace(model, prompt, position_ids=index, use_cache=False)


def half_precision(model: PreTrainedModel, tokens: Tensor) -> tuple[float, list[str]]:
    """Compare the parts of a scheme in half precision with the same in float64.

    Args:
        model: Repositioned model in float32 with eager attention.
        tokens: Token ids [1, token].

    Returns:
        The largest difference of logits, and at most one finding for each precision: the first part
        of the first layer that is less exact than it may be.
    """
    worst, said = 0.0, []
    for dtype in HALF:
        far = int(3 / torch.finfo(dtype).eps)
        _, start, (traces,) = run_in_precision(model, dtype, [tokens], far)
        name, found = str(dtype).removeprefix("torch."), []
        for each in traces:
            for compared in compare_with_float64(each, torch.finfo(dtype).eps / 2):
                error = float(compared.errors.max())
                worst = max(worst, error) if compared.name == "logits" else worst
                if bool(compared.differs.any()):
                    found.append(
                        f"half: {compared.name} of layer {each.layer.layer_idx} in {name} differ "
                        f"from float64 by up to {error:.2g} (first at "
                        f"{first_place(compared.differs)}, of positions from {start} on), more "
                        f"than {_ADVICE[compared.name]}"
                    )
        said += found[:1]
    return worst, said


def compare_with_float64(each: LayerTrace, u: float) -> Iterator[Comparison]:
    """Compare what a layer made in half precision with float64, in the order of computation.

    Args:
        each: Trace of the layer.
        u: Largest relative error of one rounding.

    Yields:
        Comparisons of positions, transform, position logits, remainder and logits, as far as the
        scheme has them. Errors of transforms are norms of the error of a vector.
    """
    layer, scale = each.layer, each.layer.scaling
    # Keys first: that is the order in which they are transformed.
    vectors = [
        expand_heads(each.tensors[name], layer.heads).double() for name in ("keys", "queries")
    ]
    norms = [x.norm(dim=-1) for x in vectors]
    places: list[Tensor] = []
    added, transforms, farthest = torch.zeros(()).double(), 0, 0.0
    for part, given, made in each.calls:
        wide = copy.deepcopy(getattr(layer.module, part)).double()
        with _InFloat64():
            exact = wide(*tree_map(_widened, given))
        if part == "assigner":
            places = _positions(layer.assigner, made)
            farthest = max(float(z.abs().max()) for z in places)
            for ours, z in zip(places, _positions(layer.assigner, exact), strict=True):
                allowed = torch.tensor((math.sqrt(u * _SINGLE) + 4 * _SINGLE) * farthest)
                yield Comparison("positions", (ours - z).abs(), allowed)
        elif part == "transform":
            place, before, after = transforms, given[1 - transforms], exact[1 - transforms]
            longer = before.double().norm(dim=-1).maximum(after.norm(dim=-1))
            errors = (made[1 - transforms].double() - after).norm(dim=-1)
            yield Comparison("transformed queries or keys", errors, _ROUNDINGS * u * longer)
            vectors[place], norms[place] = (expand_heads(x, layer.heads) for x in (after, longer))
            transforms += 1
        else:
            seen, far = given[4], max(farthest, float(given[2].abs().max()))
            products = scale * norms[1][..., None] * norms[0][:, :, None] * seen
            allowed = math.sqrt(u * _SINGLE) + 4 * _SINGLE * far
            if part == "remainder":
                size = exact.abs() + products.amax(-1)
                yield Comparison("remainders", (made.double() - exact).abs(), allowed * size)
            else:
                added = exact * seen
                size = (added.abs() + products).amax(-1, keepdim=True)
                errors = (made.double() - exact).abs() * seen
                yield Comparison("position logits", errors, allowed * size)
    yield _of_logits(each, vectors, norms, places, added, transforms > 0, u)


def _of_logits(
    each: LayerTrace,
    vectors: list[Tensor],
    norms: list[Tensor],
    places: list[Tensor],
    added: Tensor,
    transformed: bool,
    u: float,
) -> Comparison:
    layer, scale = each.layer, each.layer.scaling
    keys, queries = vectors
    longest = angle = 0.0
    if layer.components is not None:
        queries = queries * layer.components.repeat(2)
    if places and layer.frequencies is not None:
        frequencies, factor = layer.frequencies.double(), torch.as_tensor(layer.attention_scaling)
        longest = float(factor.abs().max())
        angle = float(frequencies.abs().max()) * max(float(z.abs().max()) for z in places)
        queries, keys = (
            turn(
                x,
                *pair_tables(
                    by_pair(expand_heads(z, layer.heads)), frequencies, factor.double(), x.dtype
                ),
            )
            for x, z in ((queries, places[0]), (keys, places[-1]))
        )
    scores = scale * queries @ keys.mT + added
    products = scale * max(1.0, longest) ** 2 * norms[1][..., None] * norms[0][:, :, None]
    roundings = 6 * math.sqrt(2) + 2 * _ROUNDINGS * transformed + 2
    allowed = (u * roundings + 4 * _SINGLE * angle) * products
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    errors = (each.tensors["scores"].double() - scores).abs().masked_fill(~seen, 0)
    return Comparison("logits", errors, allowed + u * (2 * added.abs() + scores.abs()))


def _positions(assigner: Any, made: Any) -> list[Tensor]:
    """Positions of tokens as queries, and as keys where these are others, in float64."""
    if isinstance(assigner, RememberingAssigner):
        made, _ = made
    return [z.double() for z in (made if isinstance(made, tuple) else (made,))]


def _widened(value: Any) -> Any:
    wide = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if wide else value


class _InFloat64(TorchDispatchMode):
    """Creates every floating-point tensor in float64, whatever precision the code requests."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return tree_map(_widened, function(*args, **kwargs))
