"""Our schemes are declared as another package declares its own: a name, a function of a builder."""

from __future__ import annotations

import pytest
from families import tiny

import repo_interp as ri
from repo_interp.entry_points import OWN, find
from repo_interp.entry_points import SCHEMES as GROUP
from repo_interp.models.decoder import as_decoder
from repo_interp.positions.layouts import LEARNED, SCHEMES


def test_the_layout_language_and_the_declarations_have_the_same_names():
    assert set(OWN[GROUP]) == set(SCHEMES)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_has_the_name_of_its_scheme_and_says_whether_it_learns_positions(scheme):
    assert callable(find(GROUP, scheme))
    model = ri.reposition(tiny("llama"), scheme)
    for layer in as_decoder(model).layers:
        assert (layer.scheme, layer.learned) == (scheme, scheme in LEARNED)


def test_layers_of_one_scheme_share_a_map_and_those_of_another_do_not():
    layers = as_decoder(ri.reposition(tiny("llama"), "cope,cope_rope,cope", map="model")).layers
    first, second, third = (layer.position_logits.position_map for layer in layers)
    assert first is third and first is not second
