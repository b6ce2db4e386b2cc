"""The layout language."""

import itertools

import pytest

from repo_interp.positions.layouts import format_layout, named_schemes, parse_layout


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("rope", 2, ("rope", "rope")),
        ("repo", 3, ("repo",) * 3),
        ("repo@1/3", 4, ("rope", "repo", "repo", "repo")),
        ("repo@2", 4, ("rope", "rope", "repo", "repo")),
        ("nope@1/2", 4, ("rope", "rope", "nope", "nope")),
        ("r2n1", 5, ("rope", "rope", "nope", "rope", "rope")),
        ("n2r1", 4, ("nope", "nope", "rope", "nope")),
        ("r2n1@1/3", 6, ("rope", "rope", "rope", "rope", "nope", "rope")),
        ("n2r1@1", 5, ("rope", "nope", "nope", "rope", "nope")),
        ("r3n1", 6, ("rope", "rope", "rope", "nope", "rope", "rope")),
        ("n1r2@1", 4, ("rope", "nope", "rope", "rope")),
        (" rope, nope ,repo", 3, ("rope", "nope", "repo")),
    ],
)
def test_layouts_mean_what_they_say(text, layers, expected):
    assert parse_layout(text, layers) == expected


def test_the_papers_layers():
    assert parse_layout("repo@1/3", 16).index("repo") == 5
    assert parse_layout("repo@1/3", 32).index("repo") == 10


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
        "rope rope rope nope rope nope": "r1n1@2",
        "rope rope nope nope nope": "nope@2",
        "nope rope rope": "n1r2",
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
    [
        ("repo@1/3", ("repo",)),
        ("r2n1@5", ("rope", "nope")),
        ("rope,cope, rope", ("rope", "cope")),
        (" nope ", ("nope",)),
    ],
)
def test_a_layout_names_schemes_whatever_the_number_of_layers(text, named):
    assert named_schemes(text) == named
    with pytest.raises(ValueError, match="unknown position scheme 'never'"):
        named_schemes("rope,never")
