"""Unchanged code of a checkout: a file as a module, or only the imports, classes and functions of a file that trains on import."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Missing(Exception):
    """Raised for a missing file or package that a case needs."""


def find(sources: Iterable[Path], file: str) -> Path:
    """The checkout that holds `file`: one of `sources`, or a folder in one."""
    for source in sources:
        for root in (source, *sorted(path for path in source.iterdir() if path.is_dir())):
            if (root / file).exists():
                return root
    raise Missing(f"no checkout has {file}")


def module(path: Path) -> Any:
    """The module of the file at `path`, imported with the file's name."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    namespace = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = namespace
    try:
        specification.loader.exec_module(namespace)
    except ModuleNotFoundError as exc:
        raise Missing(f"{exc.name} is not installed") from exc
    return namespace


def definitions(path: Path, *, without: Iterable[str] = ()) -> Any:
    """Imports, classes, functions and constants of the file at `path`, without its other statements, which train or download. Packages in
    `without` that are not installed are left out: only those statements use them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds) or _constant(node)]
    tree.body = [node for node in tree.body if not (_imported(node) & set(without) and not _installed(node))]
    namespace = types.ModuleType(path.stem)
    namespace.__file__ = str(path)
    sys.modules[path.stem] = namespace
    try:
        exec(compile(tree, path, "exec"), namespace.__dict__)
    except ModuleNotFoundError as exc:
        raise Missing(f"{exc.name} is not installed") from exc
    return namespace


def _constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)


def _imported(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {str(node.module).partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def _installed(node: ast.stmt) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in _imported(node))
