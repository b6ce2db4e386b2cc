"""One `Decoder` for each model or bridge: found again, through wrappers too, copied with its model,
and true after changes.
"""

import copy
import io
from pathlib import Path

import torch
from families import tiny
from refusals import refused

import repo_interp as ri
from repo_interp.models.bridge import bridge
from repo_interp.models.decoder import Origin, as_decoder

ORIGIN = Origin("a name", "a digest", 64, Path("weights"))


def test_it_is_made_once_and_says_what_the_layers_are():
    model = ri.reposition(tiny("llama"), "rope,nope,repo")
    decoder = as_decoder(model)
    assert as_decoder(model) is as_decoder(torch.compile(model, backend="eager")) is decoder
    assert decoder.schemes == ri.layout(model) == ("rope", "nope", "repo")
    assert ri.layout(ri.reposition(tiny("llama"), list(decoder.schemes))) == decoder.schemes
    assert decoder.shape == (3, decoder.layers[0].heads) and decoder.learned_layers == [2]
    assert list(decoder.positioned) == [0, 2] and list(decoder.by_layer) == [0, 1, 2]
    assert decoder.vocabulary_size == model.config.vocab_size
    assert decoder.stack is model.model and decoder.blocks is model.model.layers
    assert (decoder.device, decoder.dtype) == (model.device, model.dtype)


def test_a_stock_decoder_has_a_device_and_no_layers():
    decoder = as_decoder(tiny("llama"))
    assert decoder.repositioned == [] and decoder.device.type == "cpu"
    with refused("never repositioned"):
        _ = decoder.layers
    with refused("a model or a bridge was wanted"):
        as_decoder(torch.nn.Linear(2, 2))


def test_new_schemes_and_exchanged_modules_are_seen():
    model = ri.reposition(tiny("llama"), "rope")
    decoder = as_decoder(model)
    assert decoder.schemes == ("rope",) * 3
    ri.reposition(model, "repo,rope,rope")
    assert decoder.learned_layers == [0]
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[2]])
    assert list(decoder.by_layer) == [0, 2] and len(decoder.blocks) == 2


def test_copies_have_one_of_their_own_that_knows_the_same():
    model = ri.reposition(tiny("llama"), "repo")
    as_decoder(model).origin = ORIGIN
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    deep = copy.deepcopy(model)
    for copied in (deep, copy.copy(model), torch.load(file, weights_only=False)):
        known = as_decoder(copied)
        assert known is not as_decoder(model) and known.module is copied and known.origin == ORIGIN
    ours, theirs = ({id(each) for each in as_decoder(one).layers} for one in (model, deep))
    assert not ours & theirs


def test_a_bridge_has_the_same_layers_and_its_own_memory():
    model = ri.reposition(tiny("llama"), "repo")
    as_decoder(model).origin = ORIGIN
    wrapped = bridge(model)
    decoder, inside = as_decoder(wrapped), as_decoder(model)
    assert decoder is not inside and decoder.owner is model and decoder.layers == inside.layers
    assert decoder.origin == ORIGIN and decoder.rotations and inside.rotations is None
