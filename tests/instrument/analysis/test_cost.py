"""What an analysis will cost: the estimate grows as it must, never says less than is held already, and reads well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import tiny

import repo_interp as ri
from repo_interp.analysis.analyze import measures_named
from repo_interp.analysis.cost import Cost, _at_length, estimate
from repo_interp.analysis.probe import shortened
from repo_interp.analysis.room import held_bytes
from repo_interp.measures.catalogue import measure_named
from repo_interp.tasks.prompt import Prompt

MEASURES = measures_named(("positions", "patterns", "attention_mass"))


@pytest.fixture(scope="module")
def bridge():
    return ri.bridge(ri.reposition(tiny("llama"), "repo@1"))


def prompts(count: int, length: int = 64) -> list[Prompt]:
    tokens = torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    return [Prompt(tokens=tuple(row), spans={"needle": (1, 2)}, generated=(length - 1,)) for row in tokens]


@pytest.mark.usefixtures("a_millisecond_each")
def test_more_prompts_measures_passes_and_layers_cost_more(bridge):
    few = estimate(bridge, prompts(2), MEASURES)
    assert 0 < few.seconds < estimate(bridge, prompts(200), MEASURES).seconds / 20
    assert estimate(bridge, prompts(2), MEASURES[:1]).seconds < few.seconds
    assert few.seconds < estimate(bridge, prompts(2), MEASURES, passes=[64] * 2000).seconds
    assert estimate(bridge, prompts(40), MEASURES, layers=[0]).seconds < estimate(bridge, prompts(40), MEASURES).seconds


def test_memory_is_at_least_what_is_held_already_and_grows_with_what_is_kept(bridge):
    few, many = estimate(bridge, prompts(2), MEASURES), estimate(bridge, prompts(100) * 2000, MEASURES[:1])
    assert few.bytes >= held_bytes() > 0
    positions_of_a_prompt = 3 * 4 * 64 * 4  # layers, heads, tokens, bytes
    assert many.bytes - few.bytes > 0.5 * 199_998 * positions_of_a_prompt


def test_a_probe_is_short_and_has_every_span():
    prompt = Prompt(
        tokens=tuple(range(3, 2003)),
        spans={"needle": (4, 5), "needle.key": (4,), "query": (1990, 1991), "query.key": (1991,)},
        generated=(1999,),
    )
    probe = shortened(prompt, 128)
    assert len(probe.tokens) == 128 and probe.tokens == prompt.tokens[-128:]
    assert probe.spans["query"] == (118, 119) and probe.spans["query.key"] == (119,) and probe.generated == (127,)
    assert len(probe.spans["needle"]) == 1 and "needle.key" not in probe.spans
    assert shortened(prompt, 4000) is prompt


def test_times_grow_beyond_the_probe_as_within_it():
    assert _at_length(1024, (256, 1.0), (512, 4.0)) == pytest.approx(16.0)
    assert _at_length(1024, (256, 1.0), (512, 1.0)) == pytest.approx(1.0)
    assert _at_length(1024, (256, 1.0), (512, 64.0)) == pytest.approx(256.0), "no measure grows faster than the square"


@pytest.mark.parametrize("name", ["components", "three_axis", "fake_distance", "rotation", "maps", "gates", "segments"])
def test_every_measure_can_be_probed(name):
    made = ri.bridge(ri.reposition(tiny("llama"), "rope,cope,rope"))
    assert estimate(made, prompts(1, 90), [measure_named(name)]).seconds > 0


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "about 1 s"), (45, "about 45 s"), (600, "about 10 min"), (7200, "about 2.0 h")]
)
def test_durations_read_well(seconds, said):
    assert str(Cost(seconds, 3 * 2**30)) == f"{said} and 3.0 GiB of memory"


@pytest.mark.parametrize("generated", [range(100, 200), range(10, 20), (5, 199)])
def test_prompts_with_long_or_early_answers_can_be_estimated(bridge, generated):
    """The probe is the end of a prompt: none of its tokens is generated from nothing."""
    long = [replace(prompt, generated=tuple(generated)) for prompt in prompts(2, 200)]
    assert estimate(bridge, long, MEASURES).seconds > 0
    assert 0 not in shortened(long[0], 64).generated
