"""What measuring asks of an accelerator: operators, which cost a launch each whatever their size,
and waits.
"""

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs
from families import repositioned
from numpy.testing import assert_array_equal
from refusals import refused
from torch.utils._python_dispatch import TorchDispatchMode

import repo_interp as ri
from repo_interp.measures.kernels.heads import Reduction, reduced
from repo_interp.measures.kernels.solvers import dissect
from repo_interp.measures.labels import Arrays, _Awaited
from repo_interp.plugins.three_axis.three_axis import ThreeAxis
from repo_interp.tasks.prompt import Prompt

SEVEN = (
    "positions",
    "patterns",
    "attention_mass",
    "components",
    ThreeAxis(extras=()),
    "fake_distance",
    "rotation",
)
"""Without the fit over learned positions, whose steps depend on how fast it converges."""
MOST = 925
"""Operators of one layer more and its forward pass, within the memory of an accelerator, on a
processor, where no layer waits for others: 919 in a small RePo layer.
"""
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "masked_select",
    "bincount",
)
"""Operators after which the processor has a number of the device, or must know one."""


class Counted(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        """Call `operator`."""
        masks = operator is torch.ops.aten.index.Tensor and any(
            at is not None and at.dtype == torch.bool for at in arguments[1]
        )
        self.counts["nonzero" if masks else operator._schema.name.removeprefix("aten::")] += 1
        return operator(*arguments, **(keywords or {}))


def launches(model, tokens, memory, layers=(0,)):
    drawn = torch.randint(3, 60, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = Prompt(
        tokens=tuple(drawn), spans={"needle": (3, 4)}, generated=(tokens - 2, tokens - 1)
    )
    with ri.working_memory(memory), Counted() as counted:
        ri.analyze(model, [prompt], SEVEN, layers=layers, progress=lambda done, total: None)
    return counted.counts


def of_one_layer(model, tokens, memory):
    """Operators that a second layer takes."""
    launches(model, tokens, memory)  # tables that depend on a length or a size are made once
    first, both = launches(model, tokens, memory), launches(model, tokens, memory, (0, 1))
    return both - first


def test_an_accelerators_memory_takes_few_launches_whatever_the_length():
    """Found: 33,436 in a layer of 4,096 tokens, 9,380 in one of 1,024."""
    model = repositioned("repo")
    short, long = (of_one_layer(model, tokens, 2**31) for tokens in (256, 512))
    assert short == long
    assert long.total() <= MOST
    few, many = (launches(model, 256, memory).total() for memory in (2**31, 2**16))
    assert many > few + MOST / 2
    # Whether the inputs are finite, whether a head needs float64, how many components a head has
    # for its closed form.
    assert {name: count for name, count in long.items() if name in WAITING} == {
        "_local_scalar_dense": 3
    }


def test_a_triangle_is_solved_by_few_launches_whatever_its_length():
    for tokens in (256, 512):
        system = dissect(tokens, 1e-6, torch.device("cpu"))
        sums = torch.ones(3 * tokens, 4, dtype=torch.float64)
        with Counted() as counted:
            system.solve(sums)
        assert counted.counts.total() <= 80


def test_arrays_leave_an_accelerator_together():
    """Those of one kind in one copy, in the places that were kept for them."""
    both, other = torch.arange(12.0).view(2, 2, 3), torch.arange(4).double()
    given = {
        "a": (("layer", "head", "token"), _Awaited(both, (0,), 0)),
        "b": (("head", "layer", "token"), _Awaited(both, (1,), 1)),
        "c": (("token", "layer"), _Awaited(other, (), 1)),
        "d": (("layer",), np.ones(1)),
    }
    names = (("a", "b"), ("c", "d"))  # of two measures
    parts = [Arrays({name: given[name] for name in some}) for some in names]
    values = {name: array for part in parts for name, (_, array) in part.values.items()}
    for name, expected in (("a", both[None, 0]), ("b", both[1][:, None]), ("c", other[:, None])):
        assert_array_equal(values[name], expected)
    assert_array_equal(values["d"], np.ones(1))


ROOT = Path(ri.__file__).parent
METHODS = {"item", "tolist", "cpu", "nonzero", "argwhere", "unique", "masked_select", "bincount"}
REDUCED = {"all", "any", "max", "min", "sum", "amax", "amin", "argmax", "count_nonzero"}
TEXTS = {
    "attention_rows",
    "conversion",
    "dumped_tables",
    "gaussians",
    "gates",
    "maps",
    "position_sources",
    "predictions",
    "segments",
}
"""Measures of a few rows, heads or words by name, or of what a prompt says, which numpy knows; what
reads files, and what experiments add up on the processor.
"""
AUDITS = ("verify_axes", "verify_cache", "verify_scheme")
"""Plug-ins that compare single numbers with one another, on the processor."""
ALLOWED = {
    # Once per batch: masks and spans are the same in all its layers.
    "seen_pairs.py is_whole": "bool",
    "seen_pairs.py on_host": "cpu",
    # numpy's, of what `on_host` read.
    "seen_pairs.py extents.found": "tolist",
    "samples.py places_of.listed": "tolist",
    # Where prompts are packed documents: which ones there are.
    "samples.py first_tokens": "unique int",
    "octaves.py Octaves.observe": "tolist",
    "samples.py spread_places": "unique",  # numpy's
    "components.py _decay_bound": "unique",  # numpy's
    "rotation_angles.py counts_below": "bincount",  # numpy's
    # Once per layer and pass: whether a cache that drops keys numbers them rightly.
    "streaming_cache.py _Layer.numbers_of": "bool",
    # Where heads have frequencies of their own: which bands there are.
    "rotary_components.py _of_equal_bands": "unique tolist",
    # Once for the frequencies of a pass.
    "causal_pairs.py _of_bands": "cpu int",
    "causal_pairs.py _runs": "tolist",
    "capture.py _run_stack": "tolist",
    "capture.py _require_taken": "int",
    # Once per layer, where prompts have position ids: whether the pass follows them.
    "observing.py _with_documents": "bool",
    # Once per layer that attends in chunks or selects keys: whether it hid any.
    "observing.py observing.observe": "bool",
    # Once per layer, or less: sizes of what is made next.
    "closed_form.py ClosedForm.most": "int",
    "closed_form.py ClosedForm.by_rows": "nonzero",
    "heads.py _well_conditioned": "bool",
    "heads.py HeadBlock.heads": "nonzero",
    "position_cells.py _blocks": "tolist",
    "fake_distance.py bias_by_distance": "unique",
    # Every few steps, by `steps_at_once`.
    "solvers.py conjugate_gradients": "bool",
    # Where statistics leave a device, and what comes after.
    "labels.py _fetch": "cpu",
    "labels.py Arrays.at": "mask",
    "labels.py _align": "unique",
    "labels.py arrays": "tolist",
    "statistics.py _concatenate_prompts": "unique tolist",
    "components.py Components.conclude": "bool",
    # Controls, on request; and numpy's kernels of the measures in `TEXTS`.
    "three_axis.py shuffle_distances": "cpu nonzero",
    "three_axis.py draw_rows": "cpu nonzero",
    "head_patterns.py ContentSums.add": "nonzero",  # of rows on the processor
    "mirror.py mirror": "bool float",
    "probe_measure.py PositionProbe.conclude": "int nonzero unique",  # numpy's
    "mirror.py mirror_score": "float",
    "segmentation.py segment_edges": "nonzero mask",
    "segmentation.py shuffled_edges": "cpu",
    "segmentation.py has_ties": "bool",
    "segmentation.py match_share": "bool",
}
"""By function, in which words it waits for a device, or seems to."""


def waits(node, place=""):
    """(function, word) of calls that wait for a device where their argument is there, and of
    indices of unknown length.
    """
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{place}.{child.name}".lstrip(".") if named else place
        inside = list(ast.walk(child))
        match child:
            case ast.Call(func=ast.Attribute(attr=word)) if word in METHODS:
                yield place, word
            case ast.Call(func=ast.Name(id="int" | "float" | "bool" as word)):
                methods = {each.attr for each in inside if isinstance(each, ast.Attribute)}
                names = word == "bool" and isinstance(child.args[0], ast.Name)
                parts = any(isinstance(each, ast.Subscript) for each in inside)
                if names or parts or methods & REDUCED:
                    yield place, word
            case ast.Subscript() if any(
                isinstance(each, ast.Compare) for each in ast.walk(child.slice)
            ):
                yield place, "mask"
        yield from waits(child, inner)


def is_arithmetic(path: Path) -> bool:
    """Whether a file has a measure or a kernel."""
    text = path.read_text()
    with_torch = "import torch" in text and "from repo_interp.models" not in text
    return with_torch or "measures" in path.parts


def test_nothing_waits_for_a_device_but_where_a_line_says_why():
    roots = (ROOT / "measures", ROOT / "plugins")
    files = [
        path
        for root in roots
        for path in sorted(root.rglob("*.py"))
        if path.stem not in TEXTS and path.parent.name not in AUDITS and is_arithmetic(path)
    ]
    found = {}
    of_passes = [ROOT / "models" / f"{name}.py" for name in ("capture", "observing")]
    for path in (*files, *of_passes):
        for function, word in waits(ast.parse(path.read_text())):
            found.setdefault(f"{path.name} {function}", set()).add(word)
    assert found == {function: set(words.split()) for function, words in ALLOWED.items()}


def test_waits_are_found():
    code = """def f(x):
        y = x.cpu()
        if bool(x.any()): z = x[x > 0]
        return x.sum().item(), int(x[0]), bool(y), float(x.max())"""
    found = {word for _, word in waits(ast.parse(code))}
    assert found == {"cpu", "bool", "mask", "item", "int", "float"}


class TooLarge(Reduction):
    """Runs out of memory for more than one key at a time, as a small card does."""

    def start(self, inputs):
        return torch.zeros(inputs.heads)

    def add(self, result, inputs, block):
        if block.head.shape[0] > 1:
            raise torch.OutOfMemoryError
        result[block.head.flatten()] += 1

    __hash__ = object.__hash__


def test_out_of_memory_halves_the_blocks_and_begins_again():
    inputs = random_inputs(prompts=1, heads=4, kv_heads=4, tokens=2048, d_head=64)
    (counts,) = reduced(inputs, [TooLarge()])
    assert counts.tolist() == [1.0] * 4


@pytest.mark.parametrize("bytes", [0, 1.5, True, "1 GiB"])
def test_working_memory_is_a_number_of_bytes(bytes):
    with (
        refused("positive whole number of bytes"),
        ri.working_memory(bytes),
    ):
        pass
