"""Everything that a function computes with, as a digest: the code it reaches in its own file, and the files of ours that this code imports.

    closure(f) = f and the names of its file that f reaches (annotations among them: they say whose methods are called),
                 the files of ours that those names are imported from, and all that those files import, to the end

What is imported by name counts too: an object of ours that stands in a string ("repo_interp.measures.positions:Positions"), unless it is
a drawing, and all files beside one that calls `import_module`. Imports under `if TYPE_CHECKING` of the function's own file do not count.

Docstrings, comments and captions are no part of it: the code is read as a syntax tree, so that a new wording, a drawing in the same file or
a blank line changes nothing, and a changed constant, kernel or model changes everything that rests on it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[2]
_LIBRARIES = ("torch", "numpy", "scipy", "transformers", "transformer_lens")
_OBJECT = re.compile(rf"{_PACKAGE.name}(\.\w+)+(:\w+)?")
"""An object of ours in a string, as entry points name it."""
_DRAWN = re.compile(rf"{_PACKAGE.name}\.plots(\.|$)")


def closure_digest(function: Callable[..., Any]) -> str:
    """SHA-256 over the code that `function` can reach within repo_interp, and the versions of the libraries that compute.

    `function` is a module-level function of the package. Raises ValueError for one that has no file.
    """
    return _digest(_file(function), function.__name__)


def imported_files(function: Callable[..., Any]) -> set[Path]:
    """The files of ours that `function` computes with, beside its own. Raises ValueError for one that has no file."""
    return _imported_files(_file(function), function.__name__)


def _file(function: Callable[..., Any]) -> Path:
    file = inspect.getsourcefile(function)
    if file is None:
        raise ValueError(f"{function!r} has no source file")
    return Path(file)


@functools.cache
def _digest(file: Path, name: str) -> str:
    digest = _libraries()
    for node in _reached(_tree(file), name):
        digest.update(ast.dump(node).encode())
    for path in sorted(_imported_files(file, name)):
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {_code(path)}".encode())
    return digest.hexdigest()


def _imported_files(file: Path, name: str) -> set[Path]:
    reached = _reached(_tree(file), name)
    names = {part.id for node in reached for part in ast.walk(node) if isinstance(part, ast.Name)}
    return _followed({target for node in (*reached, *_imports(_tree(file), names)) for target in _targets(node)})


def _reached(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements of a file that define `name`, and what that uses of the same file, in the order of the file."""
    defined: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for defines in _defines(node):
            defined.setdefault(defines, []).append(node)
    waiting, seen = [name], set[str]()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for node in defined.get(current, []):
            waiting += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return [node for node in tree.body if seen & set(_defines(node))]


def _defines(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


def _imports(tree: ast.Module, names: set[str]) -> Iterator[ast.stmt]:
    """The import statements of a file that bind one of `names`, reduced to those names."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            used = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in names]
            if used and isinstance(node, ast.ImportFrom):
                yield ast.ImportFrom(node.module, used, node.level)
            elif used:
                yield ast.Import(used)


def _targets(node: ast.AST) -> Iterator[str]:
    """Modules of ours that are imported somewhere below `node`, or named in a string; of what is no module, the module it is in."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and _OBJECT.fullmatch(part.value):
            if not _DRAWN.match(part.value):
                yield part.value.split(":")[0]
            continue
        if isinstance(part, ast.ImportFrom) and part.module and part.module.split(".")[0] == _PACKAGE.name:
            yield part.module
            yield from (f"{part.module}.{alias.name}" for alias in part.names)
        elif isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names if alias.name.split(".")[0] == _PACKAGE.name)


def _followed(modules: set[str]) -> set[Path]:
    """The files of `modules` and of all that they import; the facade of the package, which loads lazily, is not followed."""
    files, waiting = set[Path](), list(modules)
    while waiting:
        parts = waiting.pop().split(".")[1:]
        base = _PACKAGE.joinpath(*parts)
        path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if parts and path.is_file()), None)
        if path is not None and path not in files:
            files.add(path)
            waiting += _imported(path)
    return files


@functools.cache
def _imported(file: Path) -> tuple[str, ...]:
    """What a file imports of ours; all files beside it, where it imports by name."""
    tree = _tree(file)
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    if not any(isinstance(function, ast.Name) and function.id == "import_module" for function in called):
        return tuple(_targets(tree))
    folder = file.parent.relative_to(_PACKAGE.parent).parts
    return (*_targets(tree), *(".".join((*folder, beside.stem)) for beside in sorted(file.parent.glob("[!_]*.py"))))


@functools.cache
def _code(file: Path) -> str:
    return hashlib.sha256(ast.dump(_tree(file)).encode()).hexdigest()


@functools.cache
def _tree(file: Path) -> ast.Module:
    """The syntax tree of a file without its docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)]  # pyright: ignore[reportAttributeAccessIssue]
    return tree


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@functools.cache
def sources_digest() -> str:
    """SHA-256 over all sources of repo_interp, as they are written, and the versions of what computes: for the provenance of a figure."""
    digest = _libraries()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _libraries() -> hashlib._Hash:
    return hashlib.sha256(" ".join(f"{library}={version(library)}" for library in _LIBRARIES).encode())
