"""A run as `analyze` writes it, made in NumPy from the official oracle arrays of `repo_mha`: 3
prompts, 6 layers (2 RoPE, 4 RePo), 4 heads.

Also a larger made-up one, for what depends on size. Knows the run's contract (definitions.md), and
nothing of the package.
"""

from __future__ import annotations

import json

import numpy as np
import xarray as xr
from places import OFFICIAL

PADDING = 4
"""Tokens of padding after every prompt."""
SPANS = (
    "needle",
    "needle.1",
    "needle.1.key",
    "needle.1.value",
    "needle.2",
    "query",
    "rest",
    "generated",
)
PATTERNS = ("constant", "mono", "hybrid")
TEXT = """the of and in to a is that was for on with as by at from it are be this which or an have not had but one all
grass green sky blue sun yellow here we go there back again special magic number mentioned text city question"""
WORDS = TEXT.split()
AWKWARD = (
    "</script>",
    "<b>&amp;",
    "\n",
    "\t",
    " ",
    "日本",
    "🙂",
    "é",
    "$x^2$",
    "\x00",
    "\u200b",
    "",
    "%{y}",
    "شمس",
    '"quote\\',
    "'",
)


def vocabulary() -> list[str]:
    """Text of the 256 token ids: words, and all the texts that break a page or a label."""
    words = [f" {WORDS[index % len(WORDS)]}" for index in range(256)]
    words[: len(AWKWARD)] = AWKWARD
    return words


def small_run() -> xr.DataTree:
    """The run of the three prompts of `repo_mha`."""
    expected = np.load(OFFICIAL / "repo_mha" / "expected.npz")
    listed = json.loads((OFFICIAL / "repo_mha" / "spans.json").read_text())
    prompts, tokens = expected["input_ids"].shape
    position = np.broadcast_to(np.arange(tokens, dtype=np.float32), (prompts, 6, 4, tokens)).copy()
    position[:, expected["repo_layers"]] = expected["pred_indices"].swapaxes(0, 1)
    members = np.zeros((len(SPANS), prompts, tokens), bool)
    for prompt, spans in enumerate(listed):
        first, second = _parts(spans["needle"])
        parts = {
            "needle.1": first,
            "needle.1.key": first[:1],
            "needle.1.value": first[1:],
            "needle.2": second,
        }
        for name, indices in {**spans, **parts}.items():
            members[SPANS.index(name), prompt, indices] = True
    texts = np.array(vocabulary(), dtype=object)[expected["input_ids"]]
    # Awkward tokens where they are sure to be drawn: beside the needle and the query.
    texts[0, 48 : 48 + len(AWKWARD)] = AWKWARD
    attention = expected["attentions"]
    return build(position, members, texts, attention, ("rope", "rope", *["repo"] * 4))


def build(position, members, texts, attention, schemes) -> xr.DataTree:
    """A run of `position` [prompt, layer, head, token], `members` [span, prompt, token] and
    attention maps or their masses.
    """
    prompts, layers, heads, tokens = position.shape
    coordinates = {
        "scheme": ("layer", np.array(schemes, dtype=object)),
        "layer": np.arange(layers),
        "head": np.arange(heads),
    }
    padded = np.pad(position, [(0, 0)] * 3 + [(0, PADDING)], constant_values=np.nan)
    positions = xr.Dataset(
        {
            "position": (
                ("prompt", "layer", "head", "token"),
                padded,
                _attributes("position", "positions"),
            ),
            "position_range": (
                ("prompt", "layer", "head"),
                np.ptp(position.astype(np.float64), axis=-1),
                _attributes("largest minus smallest position", "positions"),
            ),
            "token_text": (
                ("prompt", "token"),
                np.pad(texts, ((0, 0), (0, PADDING)), constant_values=""),
            ),
            "token_count": (
                "prompt",
                np.full(prompts, tokens),
                _attributes("tokens of the prompt", "tokens"),
            ),
            "span_mask": (
                ("span", "prompt", "token"),
                np.pad(members.astype(np.int8), ((0, 0), (0, 0), (0, PADDING)), constant_values=-1),
            ),
        },
        coords={**coordinates, "prompt": np.arange(prompts), "span": list(SPANS)},
    )
    mass = masses(attention, members)
    shares = np.where(members.any(axis=-1), members.mean(axis=-1), np.nan)
    counts = members.sum(axis=-1).T[:, None, None]
    with np.errstate(invalid="ignore"):
        per_token = np.where(counts > 0, mass / np.maximum(counts, 1), np.nan)
    known = np.isfinite(per_token)
    with np.errstate(invalid="ignore"):
        table = 100 * np.where(known, per_token, 0).sum((0, 1, 2)) / known.sum((0, 1, 2))
    attention_mass = xr.Dataset(
        {
            "mass": (
                ("prompt", "layer", "head", "span"),
                mass,
                _attributes("attention mass on the span", "1"),
            ),
            "mass_per_token": (
                ("prompt", "layer", "head", "span"),
                per_token,
                _attributes("attention mass per token of the span", "1"),
            ),
            "chance": (
                ("prompt", "layer", "span"),
                np.broadcast_to(shares.T[:, None], (prompts, layers, len(SPANS))),
                _attributes("attention to each span by equal weights", "1"),
            ),
            "span_tokens": (
                ("prompt", "span"),
                members.sum(-1).T,
                _attributes("tokens in each span", "tokens"),
            ),
            "table": ("span", table, _attributes("mean attention mass per token", "10^-2")),
        },
        coords={**coordinates, "prompt": np.arange(prompts), "span": list(SPANS)},
        attrs={"rows": "producing"},
    )
    learned = np.array([scheme == "repo" for scheme in schemes])
    labels = chunk_labels(position, 16, 0.2)
    sizes, epsilons = [8, 16, 32], [0.05, 0.1, 0.2, 0.5, 1.0]
    patterns = xr.Dataset(
        {
            "chunk_pattern": (("prompt", "layer", "head", "chunk"), labels.astype(np.int8)),
            "pattern_share": (
                ("layer", "head", "pattern"),
                np.stack([(labels == code).mean(axis=(0, 3)) for code in range(3)], axis=-1),
                _attributes("share of chunks", "1"),
            ),
            "pattern_share_all": (
                "pattern",
                [(labels[:, learned] == code).mean() for code in range(3)],
            ),
            "sensitivity": (
                ("chunk_size", "epsilon", "pattern"),
                [
                    [
                        [
                            (chunk_labels(position[:, learned], size, epsilon) == code).mean()
                            for code in range(3)
                        ]
                        for epsilon in epsilons
                    ]
                    for size in sizes
                ],
            ),
        },
        coords={
            **coordinates,
            "prompt": np.arange(prompts),
            "pattern": list(PATTERNS),
            "chunk_size": sizes,
            "epsilon": epsilons,
        },
        attrs={"chunk_size": 16, "epsilon": 0.2},
    )
    root = xr.Dataset(
        attrs={
            "checkpoint": "official/repo_mha",
            "layout": "repo@2",
            "training_length": 256,
            "provenance": json.dumps(
                {"versions": {"torch": "2.13.0"}, "dtype": "float32", "note": "</script><b>"}
            ),
        }
    )
    return xr.DataTree.from_dict(
        {
            "/": root,
            "/positions": positions,
            "/patterns": patterns,
            "/attention_mass": attention_mass,
        },
        name="run",
    )


def large_run(
    prompts: int = 6, layers: int = 16, heads: int = 16, tokens: int = 4096, seed: int = 0
) -> xr.DataTree:
    """A made-up run of the size of the paper's 1B model: heads from near-constant to wide, jumps at
    segments, heavy-tailed mass.
    """
    random = np.random.default_rng(seed)
    schemes = tuple("rope" if layer < layers // 3 else "repo" for layer in range(layers))
    first = schemes.index("repo")
    position = np.empty((prompts, layers, heads, tokens), np.float32)
    position[:] = np.arange(tokens)
    segments = np.cumsum(random.random((prompts, 1, 1, tokens)) < 12 / tokens, axis=-1)
    scale = np.exp(random.normal(1.0, 1.8, (1, layers - first, heads, 1)))
    noise = random.normal(size=(prompts, layers - first, heads, tokens)) ** 3 * 0.08
    level = random.normal(size=(layers - first, heads, 64))[..., None, :]
    steps = np.take_along_axis(level[None], np.minimum(segments, 63)[..., None], axis=-1)[..., 0]
    position[:, first:] = scale * (steps + noise)
    members = np.zeros((len(SPANS), prompts, tokens), bool)
    for prompt in range(prompts):
        start = int(random.integers(tokens // 20, tokens - 90))
        members[SPANS.index("needle"), prompt, start : start + 14] = True
        members[SPANS.index("needle.1"), prompt, start : start + 14] = True
        members[SPANS.index("needle.1.key"), prompt, start : start + 5] = True
        members[SPANS.index("needle.1.value"), prompt, start + 5 : start + 14] = True
    members[SPANS.index("query"), :, -60:-20] = True
    members[SPANS.index("generated"), :, -20:] = True
    members[SPANS.index("rest")] = ~members[[0, 5, 7]].any(axis=0)
    texts = np.array([f" {word}" for word in WORDS], dtype=object)[
        random.integers(0, len(WORDS), (prompts, tokens))
    ]
    weight = np.exp(
        random.normal(0, 1.5, (prompts, layers, heads, len(SPANS))) - [1, 1, 2, 1, 9, 1, -2, 1]
    )
    weight[:, (first + layers) // 2, heads // 2, 0] *= 40
    return build(position, members, texts, weight / weight.sum(-1, keepdims=True), schemes)


def masses(attention: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Mean over the generated rows of the weight on every span [prompt, layer, head, span], from
    maps [layer, prompt, head, query, key].
    """
    if attention.ndim == 4:
        return attention
    rows = members[SPANS.index("generated")]
    return np.stack(
        [
            np.einsum(
                "lhqk,sk->lhs",
                attention[:, prompt, :, rows[prompt]].swapaxes(0, 1).swapaxes(1, 2),
                members[:, prompt],
            )
            / rows[prompt].sum()
            for prompt in range(members.shape[1])
        ]
    ).astype(np.float64)


def chunk_labels(position: np.ndarray, size: int, epsilon: float) -> np.ndarray:
    """0 constant, 1 mono, 2 hybrid for every whole chunk of `size` tokens."""
    chunks = position.shape[-1] // size
    parts = (
        position[..., : chunks * size]
        .reshape(*position.shape[:-1], chunks, size)
        .astype(np.float64)
    )
    constant = (abs(parts - parts.mean(-1, keepdims=True)) <= epsilon).all(-1)
    steps = np.diff(parts, axis=-1)
    mono = (steps > 0).all(-1) | (steps < 0).all(-1)
    return np.where(constant, 0, np.where(mono, 1, 2))


def _parts(needle: list[int]) -> tuple[list[int], list[int]]:
    """The first contiguous stretch of `needle`, and what is left."""
    end = next(
        (place for place in range(1, len(needle)) if needle[place] != needle[place - 1] + 1),
        len(needle),
    )
    return needle[:end], needle[end:]


def _attributes(long_name: str, units: str) -> dict[str, str]:
    return {"long_name": long_name, "units": units}
