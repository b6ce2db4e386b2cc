"""Change the computation of attention during forward passes, inside a `with` block.

Public as `ri.interventions`.

    replacing    replace positions of heads and tokens by a function (`replaced`); edits build on it
    edits        kinds of position edits: linearised, frozen, scaled, ...; each class of `edits` is also a function of this module
    positions    record positions, set them, and exchange them between tokens or heads
    patching     patch positions from a clean prompt into a corrupted one, as TransformerLens does
    keys         exchange or move keys alone, for the experiment `perturbation`
    ablation     replace outputs of heads, or rotary pairs of queries and keys, by zero or their mean
    hard         attend only to the key with the largest logit
    key_masks    hide keys from queries, by a function of pairs of tokens or a mask
    pair_distances  change the distance of pairs of tokens
    values       scale the values of tokens
    paths        remove the direct path from heads into queries, keys, values or positions of later heads
    extension    position interpolation, YaRN, LM-Infinite, InfLLM
    frequencies  rotate heads, layers or the model by other frequencies

Interventions are context managers. They are undone at the end of the block, also if the pass
raises. They nest, `with frozen(...), shifted(...):`, and may end in any order. They can be added,
`frozen(...) + shifted(...)`, and entered again. While one is active, its model cannot be copied
(`copy.deepcopy`), since the copy would keep the changes permanently. They work on repositioned
models and on bridges of these. This package knows no task and no measure.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from repo_interp.interventions.ablation import ablate, query_key_means
from repo_interp.interventions.extension import infllm, interpolated, lm_infinite, yarn
from repo_interp.interventions.frequencies import rescaled
from repo_interp.interventions.hard import hard_attention
from repo_interp.interventions.key_masks import hidden_keys
from repo_interp.interventions.keys import Shift, exchanged_keys, moved_keys
from repo_interp.interventions.pair_distances import distances
from repo_interp.interventions.patching import (
    get_act_patch_positions_all_pos,
    get_act_patch_positions_by_pos,
)
from repo_interp.interventions.position_edit import KINDS, as_function
from repo_interp.interventions.positions import (
    positions_of,
    set_positions,
    swapped_heads,
    swapped_tokens,
)
from repo_interp.interventions.replacing import Change, PassContext, heads_with_positions, replaced
from repo_interp.interventions.token_pairs import TokenPairs
from repo_interp.models.lasting import ModelEdit

if TYPE_CHECKING:
    from repo_interp.plugins.moved_values.value_edit import scaled_values
    from repo_interp.plugins.paths.paths import ablate_paths

__all__ = [
    "Change",
    "ModelEdit",
    "PassContext",
    "Shift",
    "TokenPairs",
    "ablate",
    "ablate_paths",
    "distances",
    "exchanged_keys",
    "get_act_patch_positions_all_pos",
    "get_act_patch_positions_by_pos",
    "hard_attention",
    "heads_with_positions",
    "hidden_keys",
    "infllm",
    "interpolated",
    "lm_infinite",
    "moved_keys",
    "positions_of",
    "query_key_means",
    "replaced",
    "rescaled",
    "scaled_values",
    "set_positions",
    "swapped_heads",
    "swapped_tokens",
    "yarn",
]


_OF_PLUGINS = {"ablate_paths": "paths.paths", "scaled_values": "moved_values.value_edit"}
"""Interventions of plug-ins, by module."""


def _edits() -> list[str]:
    return [name for name, kind in KINDS.items() if kind.is_function]


__all__ += [*_edits()]


def __getattr__(name: str) -> Any:
    if name in _OF_PLUGINS:
        # Imported late: these modules import names that are defined above.
        return getattr(import_module(f"repo_interp.plugins.{_OF_PLUGINS[name]}"), name)
    if name in _edits():
        return as_function(KINDS[name])
    if name != "Here":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The name in version 0.1; a later version will drop it.
    warnings.warn("Here is now PassContext", DeprecationWarning, stacklevel=2)
    return PassContext


def __dir__() -> list[str]:
    # Only functions, since `dir` should list the interventions.
    return sorted({name for name in (*__all__, *_edits()) if name[0].islower()})
