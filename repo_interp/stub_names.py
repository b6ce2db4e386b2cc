"""The names that a package gives, as its stub `__init__.pyi` imports them: one list, for type
checkers and for us.

    __getattr__, __dir__, __all__ = stub_names(__name__)        in `__init__.py`

A name is imported when it is first asked for, and nothing before.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def stub_names(
    package: str, *own: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What the module `package` is to have as `__getattr__`, `__dir__` and `__all__`; `own`: names
    that it defines itself.
    """
    module = sys.modules[package]
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    where = {
        alias.asname: (str(node.module), alias.name)
        for node in imports
        for alias in node.names
        if alias.asname
    }
    listed = sorted([*where, *own])

    def asked_for(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source, there = where[name]
        value = (
            import_module(f"{source}.{there}")
            if source == package
            else getattr(import_module(source), there)
        )
        setattr(module, name, value)
        return value

    return asked_for, lambda: listed, listed
