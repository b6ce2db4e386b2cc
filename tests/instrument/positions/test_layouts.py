"""The layout language."""

import itertools

import pytest

from repo_interp.positions.layouts import format_layout, named_schemes, parse_layout


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "repo": "repo repo repo",
        "repo@1/3": "rope repo repo repo",
        "repo@2": "rope rope repo repo",
        "r2n1": "rope rope nope rope rope",
        "n2r1@1": "rope nope nope rope nope",
        "r3n1": "rope rope rope nope rope rope",
        "r2n1@1/3": "rope rope rope rope nope rope",
        " rope, nope ,repo": "rope nope repo",
    }.items(),
)
def test_layouts_mean_what_they_say(text, expected):
    schemes = expected.split()
    assert parse_layout(text, len(schemes)) == tuple(schemes)


@pytest.mark.parametrize(
    ("schemes", "name"),
    {
        "rope rope repo repo": "repo@2",
        "repo rope": "repo,rope",
        "rope rope nope": "r2n1",
        "rope rope rope nope": "nope@3",
        "rope rope rope nope rope rope rope nope": "r3n1",
        "rope rope rope nope rope": "r2n1@1",
        "rope nope nope rope": "n2r1@1",
        "rope rope nope nope nope": "nope@2",
        "another's another's": "another's",
        "repo rope another's": "repo,rope,another's",
        "rope another's": "another's@1",
    }.items(),
)
def test_the_shortest_name_is_used(schemes, name):
    assert format_layout(schemes.split()) == name


def test_every_pattern_of_rope_and_nope_is_read_back():
    for layers in range(1, 8):
        for schemes in itertools.product(("rope", "nope"), repeat=layers):
            assert parse_layout(format_layout(schemes), layers) == schemes


@pytest.mark.parametrize(
    ("text", "named"),
    {"r2n1@5": ("rope", "nope"), "rope,cope, rope": ("rope", "cope"), " nope ": ("nope",)}.items(),
)
def test_a_layout_names_schemes_whatever_the_number_of_layers(text, named):
    assert named_schemes(text) == named
    with pytest.raises(ValueError, match="unknown position scheme 'never'"):
        named_schemes("rope,never")
