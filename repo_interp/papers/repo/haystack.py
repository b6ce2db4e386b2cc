"""Needle in a haystack (RePo table 1, fig. 1, 5): R9 at the training length and beyond it.

    plain     as it was trained              YaRN     from n tokens beyond the training length L on, with the factor n / L (app. B.2)

Lengths are L, 2 L and 4 L. A checkpoint of our task finds needles of that task, teacher-forced; any other one RULER's, generated. YaRN
changes nothing where no layer rotates. All checkpoints of one training length answer the same prompts, so that differences are taken
prompt by prompt - or over seeds where both have several.

Needles that NoPE finds as well say nothing about positions: where NoPE finds 0.9 of them at L there is no verdict, nor where a task of ours
comes without NoPE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from repo_interp.experiments.extrapolation import extended
from repo_interp.experiments.generated_scores import found_needles
from repo_interp.experiments.task_scores import score_map
from repo_interp.measures.labels import described
from repo_interp.models.checkpoints import load_model
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import SEEN, Claim, Evidence
from repo_interp.papers.kit.experiment import Drawing, Experiment, Needs, asked_the_same
from repo_interp.papers.kit.rules import Above, All, Below, Custom, Values, Where
from repo_interp.papers.kit.samples import Sample, between, numbers_of
from repo_interp.papers.kit.scores import PLAIN, Scored, ScoreOptions, note, score_subject
from repo_interp.papers.kit.subjects import VARIANT, Subject
from repo_interp.papers.repo.checkpoints import HAYSTACKS, NO_HAYSTACK, OLMO, finds_needles
from repo_interp.plots.marks.scores import method_panels, score_maps
from repo_interp.tasks import Prompt, niah

if TYPE_CHECKING:
    from repo_interp.papers.repo.options import Options

YARN = "yarn"
METHODS = {PLAIN: "plain", YARN: "YaRN beyond L"}
MULTIPLES = (1, 2, 4)
"""Lengths, in training lengths."""
ROTATING = ("rope", "repo", "continuous", "multihead_continuous", "hope", "cope_rope")
"""Schemes whose layers YaRN reaches."""
CEILING = 0.99
"""Score from which checkpoints cannot be told apart. For lengths beyond training and for start layers this was added when YaRN had brought
every checkpoint of the zoo to 1."""
WITHOUT_POSITIONS = 0.9
"""Share of needles from which on NoPE is said to find them, so that the task does not need positions."""
TOLD_APART = Below("the lower of both shares of needles found", CEILING)
ABOVE = Above("the share of needles found", ("RoPE",))
LONGER = "lengths"
NOPE = "the share that NoPE finds"
NEEDS_POSITIONS = Custom(
    lambda values: not values[NOPE] >= WITHOUT_POSITIONS,
    f"NoPE, where it was given, finds less than {WITHOUT_POSITIONS:g} of them at the training length",
)


def _above_at_longer(values: Values) -> bool:
    return all(ABOVE.holds(at_length) for at_length in values[LONGER] if TOLD_APART.holds(at_length))


R9 = Claim(
    "R9",
    "needle in a haystack at the training length: RePo above RoPE",
    "RePo table 1",
    "91.3 against 85.9",
    Where(All(NEEDS_POSITIONS, TOLD_APART), ABOVE),
)
R9_LONGER = Claim(
    "R9",
    "needle in a haystack at twice and four times the training length, with YaRN: RePo above RoPE",
    "RePo fig. 1, 5",
    "figure",
    Custom(
        _above_at_longer,
        f"at every longer length where {TOLD_APART.words}, {ABOVE.words}; not measurable where there is no such length, nor unless "
        f"{NEEDS_POSITIONS.words}",
    ),
    part="longer",
    written=SEEN,
)


# ---- measured -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Searched:
    """One checkpoint with the needles that it found."""

    subject: Subject
    scores: xr.Dataset
    """`score [method, length, prompt]`, `map [method, depth, length]`; method "plain", and "yarn" where a layer rotates."""
    recorded: Scored | None
    """Scores of the same checkpoint and of its other seeds, where the task is one of ours."""
    counts: xr.DataArray | None = None
    """Prompts by `[depth, length]`, where the task is one of ours and its prompts have a depth."""

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.subject.name

    @property
    def lengths(self) -> list[int]:
        """In tokens, ascending."""
        return [int(length) for length in self.scores["length"].values]

    def sample(self, lengths: Sequence[int], method: str) -> Sample:
        """Scores as means over `lengths`; plain ones with the other seeds. YaRN is plain where no layer rotates."""
        if method == PLAIN and self.recorded is not None:
            return self.recorded.sample([str(length) for length in lengths])
        known = method if method in self.scores["method"].values else PLAIN
        prompts = self.scores["score"].sel({"method": known, "length": list(lengths)}).mean("length").values
        return Sample(np.array([prompts.mean()]), prompts, len(prompts) * len(lengths), True)


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Searched]:
    """The needles that every checkpoint found. Raises InputError for one that cannot be asked."""
    return [search(subject, options, cache) for subject in subjects]


def search(subject: Subject, options: Options, cache: Cache) -> Searched:
    """The needles that one checkpoint found. Raises InputError where it cannot be asked."""
    lengths = [subject.training_length * multiple for multiple in MULTIPLES]
    rotates = bool(set(subject.schemes) & set(ROTATING))
    if subject.task is None:
        scores = subject.measured(cache, _ruler, options, lengths, rotates, prompts=options.score_prompts)
        return Searched(subject, scores, None)
    asked = ScoreOptions(options.score_prompts, batch_size=options.batch_size, seed=options.seed, device=options.device)
    scored = score_subject(subject, asked, cache, lambda _: (YARN,) if rotates else ())
    assert scored.live is not None, subject.path
    known = [length for length in lengths if str(length) in scored.test_sets]
    score = scored.live["score"].sel(test_set=[str(length) for length in known]).rename(test_set="length")
    prompts = {length: subject.prompts(length, options.score_prompts, options.seed) for length in known}
    return Searched(subject, _with_map(score.assign_coords(length=known), prompts), scored, _counts(prompts))


def _counts(prompts: Mapping[int, Sequence[Prompt]]) -> xr.DataArray | None:
    """How many prompts there are by `[depth, length]`, depths to the nearest ten per cent as in `score_map`; None where one has none."""
    if any(prompt.attributes.get("depth") is None for asked in prompts.values() for prompt in asked):
        return None
    depths = {
        length: [10 * round(float(prompt.attributes["depth"]) / 10) for prompt in asked] for length, asked in prompts.items()
    }
    known = sorted({depth for of_length in depths.values() for depth in of_length})
    counts = [[of_length.count(depth) for of_length in depths.values()] for depth in known]
    return xr.DataArray(counts, {"depth": known, "length": list(depths)}, ("depth", "length"))


def _ruler(subject: Subject, options: Options, lengths: Sequence[int], rotates: bool) -> xr.Dataset:
    model = load_model(subject.path, options.device)
    count = options.score_prompts
    prompts = {length: niah(subject.tokenizer, VARIANT, length, count, options.seed, answer="none") for length in lengths}
    methods = [PLAIN, *([YARN] if rotates else [])]
    values = np.empty((len(methods), len(lengths), count))
    for row, method in enumerate(methods):
        for column, length in enumerate(lengths):
            if row and length <= subject.training_length:
                values[row, column] = values[0, column]
                continue
            with extended(model, method, length, subject.training_length):
                values[row, column] = found_needles(model, subject.tokenizer, prompts[length], options.batch_size)
    coords = {"method": methods, "length": list(lengths), "prompt": np.arange(count)}
    return _with_map(xr.DataArray(values, coords, ("method", "length", "prompt")), prompts)


def _with_map(score: xr.DataArray, prompts: Mapping[int, Sequence[Prompt]]) -> xr.Dataset:
    """`score [method, length, prompt]` with its means over depth and length; without them where prompts have no one depth."""
    score = described(score.transpose("method", "length", "prompt"), "share of the needles found", "1")
    asked = [prompt for length in score["length"].values for prompt in prompts[int(length)]]
    if any(prompt.attributes.get("depth") is None for prompt in asked):
        return score.to_dataset(name="score")
    maps = [
        score_map(asked, score.sel({"method": method}).values.ravel(), ("depth", "length")) for method in score["method"].values
    ]
    methods = xr.IndexVariable("method", score["method"].values)
    by_method = xr.concat([part for part in maps if part is not None], dim=methods, **_TOGETHER)
    return score.to_dataset(name="score").assign(map=described(by_method, "share of the needles found", "1"))


_TOGETHER: Any = {"join": "outer", "coords": "minimal", "compat": "override"}


# ---- judged ---------------------------------------------------------------------------------------------------------


def judge(searched: Sequence[Searched]) -> Iterator[Evidence]:
    """Checkpoints with learned positions beside RoPE at L and beyond."""
    rope = next((each for each in searched if each.subject.layout == "rope"), None)
    without = found_without_positions(searched)
    for each in searched:
        if rope is not None and each.subject.learned:
            yield _at_training_length(each, rope, without)
            yield _longer(each, rope, without)


@dataclass(frozen=True)
class WithoutPositions:
    """What NoPE finds of the same needles."""

    share: float
    """At the training length; NaN where there is no NoPE."""
    why_not: str
    """Why needles say nothing about positions: NoPE finds them too, or a task of ours comes without it; empty where they do."""


def found_without_positions(searched: Sequence[Searched]) -> WithoutPositions:
    """What the first of `searched` with NoPE in every layer finds."""
    nope = next((each for each in searched if each.subject.layout == "nope"), None)
    if nope is None:
        ours = any(each.recorded is not None for each in searched)
        return WithoutPositions(np.nan, "no NoPE was given to show that the task needs positions" if ours else "")
    share = nope.sample([nope.subject.training_length], PLAIN).mean
    solved = f"{nope.name} finds {share:.3f} without positions, so the task needs none"
    return WithoutPositions(share, "" if NEEDS_POSITIONS.holds({NOPE: share}) else solved)


def _at_training_length(own: Searched, rope: Searched, without: WithoutPositions) -> Evidence:
    length = own.subject.training_length
    mine, theirs = own.sample([length], PLAIN), rope.sample([length], PLAIN)
    difference = between(mine, theirs)
    values = {NOPE: without.share, TOLD_APART.quantity: min(mine.mean, theirs.mean), ABOVE.quantity: {"RoPE": difference}}
    text = f"above by {difference.margin:+.3f} (standard error {difference.standard_error:.2g} over {difference.over})"
    both = f"{mine.mean:.3f} and {rope.name} {theirs.mean:.3f}: both find all of them, so neither is above"
    told_apart = TOLD_APART.holds(values)
    return Evidence(
        R9,
        own.name,
        f"share of needles found at {length} tokens",
        values,
        mine.mean,
        **numbers_of(mine),
        control=f"{rope.name} {theirs.mean:.3f}" if told_apart else "",
        note=_with_budgets(text, own, rope),
        unmeasurable=without.why_not or ("" if told_apart else both),
    )


def _longer(own: Searched, rope: Searched, without: WithoutPositions) -> Evidence:
    longer = [length for length in own.lengths if length > own.subject.training_length]
    mine, theirs = own.sample(longer, YARN), rope.sample(longer, YARN)
    pairs = {length: (own.sample([length], YARN), rope.sample([length], YARN)) for length in longer}
    differences = {length: between(*pair) for length, pair in pairs.items()}
    values = {
        length: {TOLD_APART.quantity: min(sample.mean for sample in pair), ABOVE.quantity: {"RoPE": differences[length]}}
        for length, pair in pairs.items()
    }
    bare = "; ".join(
        f"{length} without YaRN {own.sample([length], PLAIN).mean:.3f} and {rope.sample([length], PLAIN).mean:.3f}"
        for length in longer
    )
    by_length = "; ".join(
        f"{length}: {pairs[length][0].mean:.3f}, {rope.name} {pairs[length][1].mean:.3f} ({difference.margin:+.3f}, standard error "
        f"{difference.standard_error:.2g})"
        for length, difference in differences.items()
    )
    told_apart = any(TOLD_APART.holds(at_length) for at_length in values.values())
    both = f"{mine.mean:.3f} and {rope.name} {theirs.mean:.3f}: both find all of them, so neither is above; {bare}"
    return Evidence(
        R9_LONGER,
        own.name,
        f"share of needles found at {' and '.join(map(str, longer))} tokens with YaRN",
        {LONGER: list(values.values())},
        mine.mean,
        **numbers_of(mine),
        control=f"{rope.name} {theirs.mean:.3f}" if told_apart else "",
        note=_with_budgets(f"{by_length}; {bare}", own, rope),
        unmeasurable=f"{without.why_not}; {bare}" if without.why_not else "" if told_apart else both,
    )


def _with_budgets(text: str, *compared: Searched) -> str:
    return note([searched.recorded for searched in compared if searched.recorded is not None], text)


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw(searched: Sequence[Searched]) -> Iterator[Drawing]:
    """Fig. 1, 5 and table 1 by length, and as maps."""
    first = searched[0].subject
    group, length, count = f"{first.kind}_{first.training_length}", first.training_length, searched[0].scores.sizes["prompt"]
    by_length = _by_length(searched)
    yield Drawing(
        f"haystack_by_length_{group}",
        method_panels(by_length),
        f"Needles found by context length (RePo table 1, fig. 1, 5), {count} prompts each. Plain: mean over seeds, small dots: "
        "each; YaRN by the factor n / L beyond the training length L (dotted): one seed, standard error over prompts. Marks of one length "
        "stand beside each other so that equal ones can be seen.",
        by_length,
    )
    maps = _maps(searched)
    if maps is not None:
        counts = first_counts.reindex_like(maps[0, 0]) if (first_counts := searched[0].counts) is not None else None
        known = {} if counts is None else {"prompts": described(counts, "prompts behind a cell", "1")}
        yield Drawing(
            f"haystack_map_{group}",
            score_maps(100 * maps, length, counts),
            f"Needles found, per cent, by depth and context length (RePo fig. 1, 5), {count} prompts per length over all depths"
            + (
                ", so that a cell has few"
                if counts is None
                else "; the last column says how many a cell has, the same for all checkpoints"
            )
            + f"; grey: none there. Right of the dotted line: beyond the training length, {length} tokens.",
            described(maps, "share of the needles found", "1").to_dataset(name="score").assign(known),
        )


def _by_length(searched: Sequence[Searched]) -> xr.Dataset:
    """`score [method, checkpoint, test_set, seed]` and `standard_error`, as `plots.marks.scores` draws them."""
    lengths = searched[0].lengths
    samples = [[[each.sample([length], method) for length in lengths] for each in searched] for method in METHODS]
    seeds = max(len(sample.seeds) for rows in samples for row in rows for sample in row)
    values = np.full((len(METHODS), len(searched), len(lengths), seeds), np.nan)
    errors = np.full(values.shape[:3], np.nan)
    for method, row, place in np.ndindex(errors.shape):
        sample = samples[method][row][place]
        values[method, row, place, : len(sample.seeds)] = sample.seeds
        errors[method, row, place] = sample.prompts.std(ddof=1) / np.sqrt(len(sample.prompts))
    axes = ("method", "checkpoint", "test_set")
    return xr.Dataset(
        {
            "score": ((*axes, "seed"), values, {"long_name": "share of needles found", "units": "1"}),
            "standard_error": (axes, errors, {"long_name": "standard error over prompts", "units": "1"}),
        },
        {
            "method": list(METHODS.values()),
            "checkpoint": [each.name for each in searched],
            "test_set": lengths,
            "layout": ("checkpoint", [each.subject.layout for each in searched]),
        },
        {"axis": "tokens", "training_length": searched[0].subject.training_length},
    )


def _maps(searched: Sequence[Searched]) -> xr.DataArray | None:
    """`[checkpoint, method, depth, length]`; None where no prompts have a depth."""
    mapped = [each for each in searched if "map" in each.scores]
    if not mapped:
        return None
    parts = []
    for each in mapped:
        known = each.scores["map"]
        chosen = [known.sel({"method": name if name in known["method"].values else PLAIN}, drop=True) for name in METHODS]
        parts.append(xr.concat(chosen, dim=xr.IndexVariable("method", list(METHODS.values())), **_TOGETHER))
    maps: xr.DataArray = xr.concat(parts, dim=xr.IndexVariable("checkpoint", [each.name for each in mapped]), **_TOGETHER)
    return maps.assign_coords(layout=("checkpoint", [each.subject.layout for each in mapped]))


HAYSTACK = Experiment(
    "needles in a haystack",
    (R9, R9_LONGER),
    Needs(asked_the_same(finds_needles), NO_HAYSTACK, HAYSTACKS),
    measure,
    judge,
    draw,
    OLMO,
)
