"""How much of the three-axis fit is there before anything is learned, over shapes of a model (Position Generalization sec. 3.2): P3 again.

    chance   r of the fit to logits that are independent normal numbers: 3 n axes for n^2 / 2 pairs, sqrt(6 / n)
    excess   r with random weights on text, minus chance

P3 as the paper puts it depends on the number of tokens through chance, and on the model's shape: the same words have the same keys and
queries at every place, which query and key axes fit. So the excess over chance is judged, at 1,024 tokens, where chance is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr
from transformers import LlamaConfig

from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, verdict
from position_papers.kit.experiment import Drawing, Experiment, Needs, each
from position_papers.kit.rules import AtMost
from position_papers.kit.subjects import Subject
from position_papers.position_generalization.fits import P3
from position_papers.position_generalization.measured import MODEL, Options, prompts_of
from repo_interp.analysis.analyze import analyze
from repo_interp.measures.labels import described
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.models.bridge import bridge
from repo_interp.models.load import drawn
from repo_interp.tasks import Prompt, digest

TOKENS = 1024
EXCESS = "r with random weights on text, minus chance,"


@dataclass(frozen=True)
class Shape:
    """A decoder with RoPE, and otherwise as Llama is."""

    layers: int
    width: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}, {self.heads} heads of {self.width // self.heads}"


SHAPES = (Shape(4, 64, 4, 4), Shape(4, 256, 8, 8), Shape(4, 576, 9, 3))
"""The zoo's width with twice as many heads as its language models have, one four times as wide, and four layers of SmolLM2's."""

P3_EXCESS = Claim(
    "P3",
    "random weights are fitted little better than chance, whatever the model's shape",
    P3.source,
    "0.028",
    AtMost(EXCESS, 0.1),
    f"excess over chance at {TOKENS:,} tokens",
    about=tuple((str(shape),) for shape in SHAPES),
)


TOKENS_OF = "language/rope"
"""The checkpoint of the zoo whose tokens the text is in: the small ones, since every shape has as many embeddings."""


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """`r` [shape, draw]: the mean over heads, layers and sequences."""
    (subject,) = subjects
    prompts = digest(_prompts(subject, options))
    parts = [
        subject.measured(cache, measure_shape, options, shape, prompts=prompts, shape=str(shape), draws=options.controls)
        for shape in SHAPES
    ]
    return xr.concat(parts, dim=xr.IndexVariable("shape", list(map(str, SHAPES))))


def measure_shape(subject: Subject, options: Options, shape: Shape) -> xr.Dataset:
    """`r` [draw] of decoders of one shape, each with weights of its own."""
    prompts = _prompts(subject, options)
    config = LlamaConfig(
        vocab_size=1 + max(max(prompt.tokens) for prompt in prompts),
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=TOKENS,
    )
    models = (drawn(config, ("rope",) * shape.layers, {}, seed) for seed in range(options.controls))
    groups = (analyze(bridge(model.eval()), prompts, [ThreeAxis()])["three_axis"].to_dataset() for model in models)
    correlations = [float(group["r"].mean()) for group in groups]
    return xr.Dataset({"r": described(xr.DataArray(correlations, dims="draw"), "mean r of the three-axis fit", "1")})


def judge(data: xr.Dataset) -> Iterator[Verdict]:
    """A row for each shape."""
    chance = float(np.sqrt(6 / TOKENS))
    for shape in data["shape"].values:
        r = data["r"].sel(shape=shape).values
        excess, spread = float(r.mean() - chance), float(r.std(ddof=1)) if len(r) > 1 else None
        note = f"r {r.mean():.3g}, chance {chance:.2g}"
        measured = "r of the three-axis fit with random weights minus chance"
        yield verdict(
            P3_EXCESS, str(shape), measured, {EXCESS: excess}, excess, spread, "draws of weights", len(r), note=note, seeds=0
        )


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Nothing: three numbers need no figure."""
    yield from ()


def _prompts(subject: Subject, options: Options) -> list[Prompt]:
    return prompts_of(replace(subject, training_length=TOKENS), replace(options, length=TOKENS))


SHAPES_OF_MODELS = Experiment(
    "shapes",
    (P3_EXCESS,),
    Needs(each(lambda subject: subject.name == TOKENS_OF), f"needs the text and tokens of {TOKENS_OF}", (TOKENS_OF,)),
    measure,
    judge,
    draw,
    MODEL,
)
