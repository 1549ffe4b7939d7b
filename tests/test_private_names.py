"""docs/development/private-names.md lists the private names of other libraries that fabricate uses, and these exist."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "development" / "private-names.md").read_text(encoding="utf-8")
SOURCES = [
    ast.parse(path.read_text(encoding="utf-8"))
    for path in [*ROOT.glob("fabricate/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
]
PYTHONS_OWN = {"_asdict", "_current_frames", "_exit", "_fields", "_replace", "_start_method"}
"""Of `os`, of named tuples and of `multiprocessing`."""


def rows(heading: str) -> list[tuple[str, str, list[str]]]:
    """Library, file and names of each row of the table under `heading`."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "]
    return [(cell[0], cell[1].strip("`"), re.findall(r"`(\w+)`", cell[2])) for cell in cells[1:]]


PRIVATE, UNDOCUMENTED = rows("Names with an underscore"), rows("Undocumented names without an underscore")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Names of functions, classes, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            yield str(getattr(node.args[1], "value", ""))


def used(tree: ast.AST) -> Iterator[str]:
    """Private names that a module reads of other objects than `self`, imports, or has as text for `getattr` or `hasattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level and not str(node.module).startswith("fabricate"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            yield str(getattr(node.args[1], "value", ""))


def imported_from_private_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(is_private(part) for part in str(node.module).split(".")):
            yield from (alias.name for alias in node.names if not str(node.module).startswith("fabricate"))


def test_the_page_lists_the_private_names_that_are_used() -> None:
    own = {name for tree in SOURCES for name in defined(tree)}
    everything = {name for tree in SOURCES for name in used(tree)}
    foreign = {name for name in everything if is_private(name)} - own - PYTHONS_OWN
    foreign |= {name for tree in SOURCES for name in imported_from_private_modules(tree)}
    listed = {name for _, _, names in PRIVATE for name in names}
    assert foreign - listed == set(), "to be added"
    assert listed - everything == set(), "to be removed"


@pytest.mark.parametrize(("library", "file", "names"), PRIVATE + UNDOCUMENTED)
def test_a_private_name_is_in_the_installed_library(library: str, file: str, names: list[str]) -> None:
    if file == "C++":
        return
    text = Path(str(importlib.metadata.distribution(library).locate_file(file))).read_text(encoding="utf-8")
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_page_names_the_versions_of_the_tests() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    tried = dict(re.findall(r"(\w+) (\d[\w.]+\w)", PAGE.partition("Tested with: ")[2].partition("\n\n")[0]))
    assert tried == {name: pins[name] for name in tried}
    assert {library for library, _, _ in PRIVATE + UNDOCUMENTED} == tried.keys()
