"""Lists of the installed transformers, read from its source without running it.

    named("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")["llama"] ==
    "LlamaForCausalLM"

Importing transformers' configurations imports torch, which takes seconds; parsing three files takes
a tenth of one. Values that are no literals, such as classes, read None: only their names
are wanted.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def decoders() -> dict[str, str]:
    """List the causal language models.

    Returns:
        Name of the class by `model_type`.
    """
    return _assigned("models/auto/modeling_auto.py")["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]


def activations() -> dict[str, Any]:
    """List the activations.

    Returns:
        By name; values that are no literals are None.
    """
    return _assigned("activations.py")["ACT2CLS"]


def layer_types() -> tuple[str, ...]:
    """List the kinds of layers that a configuration may name.

    Returns:
        Names.
    """
    assigned = _assigned("configuration_utils.py")
    return (*assigned["ALLOWED_ATTN_LAYER_TYPES"], *assigned["ALLOWED_MLP_LAYER_TYPES"])


def rope_types() -> tuple[str, ...]:
    """List the kinds of rotation other than the default one.

    Returns:
        Names.
    """
    return tuple(_assigned("modeling_rope_utils.py")["ROPE_INIT_FUNCTIONS"])


def class_defaults(family: str) -> dict[str, Any]:
    """Read the defaults of a configuration class.

    Args:
        family: The `model_type`.

    Returns:
        Literal values by key, and `attribute_map`, other names of keys; empty for an unknown
        family.
    """
    family = _ALIASES.get(family, family)
    # Some families are in the module of another, or have a hyphen, which a module cannot have.
    modules = _assigned("models/auto/auto_mappings.py").get("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", {})
    module = modules.get(family, family).replace("-", "_")
    file = _ROOT / "models" / module / f"configuration_{module}.py"
    if not file.is_file():
        return {}
    # The file may define several classes: vision, text, and both together.
    classes = [
        node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    return next(
        (found for found in map(_literals, classes) if found.get("model_type") == family), {}
    )


_ALIASES = {"gpt-sw3": "gpt2"}
"""Families that share the configuration class of another."""
# find_spec of a top-level package imports nothing.
_ROOT = Path((find_spec("transformers").submodule_search_locations or [""])[0])  # pyright: ignore[reportOptionalMemberAccess]


@cache
def _assigned(file: str) -> dict[str, Any]:
    return _literals(ast.parse((_ROOT / file).read_text("utf-8")))


def _literals(body: ast.Module | ast.ClassDef) -> dict[str, Any]:
    """Names that are assigned directly in `body`, with their literal values."""
    found = {}
    for node in body.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name), *_], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                found[name] = _value(value)
    return found


def _value(node: ast.expr) -> Any:
    """The value of a literal or an OrderedDict; None for anything else, also inside a dict."""
    # The pairs inside, since a call is no literal
    if isinstance(node, ast.Call) and node.args:  # OrderedDict([...])
        node = node.args[0]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key): _literal(item) for key, item in pairs}
    literal = _literal(node)
    # Lists of pairs become mappings, as they would be in the OrderedDict.
    is_pairs = isinstance(literal, list) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in literal
    )
    return dict(literal) if is_pairs and literal else literal


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal; None for anything else."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
