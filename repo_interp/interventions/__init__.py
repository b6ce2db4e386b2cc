"""Change what attention computes during forward passes; nothing is left behind.

Public as `ri.interventions`.

    replacing    below those on positions: rows of positions replaced by a function, for heads and tokens      `replaced`
    edits        the kinds of edits of positions: linearised, frozen, scaled, ...; each class of `edits` is a function here
    positions    positions recorded, set, and exchanged between tokens or heads
    patching     positions patched from a clean prompt into a corrupted one, as TransformerLens does
    keys         keys exchanged or moved alone, as the experiment `perturbation` needs it
    ablation     outputs of heads, or pairs of their queries and keys, replaced by zero or their mean
    hard         attention to the key of the largest logit alone
    key_masks    keys hidden from queries, by a function of pairs of tokens or a mask
    pair_distances  pairs of tokens at other distances
    values       those of tokens scaled
    paths        the direct path from heads into queries, keys, values or positions of later heads
    extension    position interpolation, YaRN, LM-Infinite, InfLLM
    frequencies  other frequencies for heads, layers or the model

Changes are context managers, undone when they end, also when the pass raised. They
nest, `with frozen(...), shifted(...):`, and end in any order. They add up, `frozen(...) +
shifted(...)`, and may be entered again. While one lasts, its model cannot be
copied (`copy.deepcopy`): the copy would keep the changes for good. They work on repositioned
models and the bridges around them. Knows no task and no measure.
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
"""Edits that plug-ins have, by module."""


def _edits() -> list[str]:
    return [name for name, kind in KINDS.items() if kind.is_function]


__all__ += [*_edits()]


def __getattr__(name: str) -> Any:
    if name in _OF_PLUGINS:
        # These import what is above
        return getattr(import_module(f"repo_interp.plugins.{_OF_PLUGINS[name]}"), name)
    if name in _edits():
        return as_function(KINDS[name])
    if name != "Here":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The name in 0.1; a later version drops it.
    warnings.warn("Here is now PassContext", DeprecationWarning, stacklevel=2)
    return PassContext


def __dir__() -> list[str]:
    # Functions alone: a reader looks for what can be done
    return sorted({name for name in (*__all__, *_edits()) if name[0].islower()})
