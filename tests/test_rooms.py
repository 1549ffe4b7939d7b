"""The rooms of the house: imports run from a room to those listed before it, without circles; built-ins use public names only."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import fabricate
import fabricate.testing

# Files and folders of fabricate/. A module imports from rooms that come before its own, and from its own without a circle. Imports
# for type checkers only and imports inside functions count like any other.
ROOMS = (
    *("errors", "values", "hooks", "launch", "seeding", "metrics", "data"),
    *("precisions", "strategies", "registry", "optim", "checkpoint", "module", "model", "distributed", "configuration"),
    *("training", "trainer", "callbacks", "selfcheck", "testing", "cli", "__main__"),
)
MOST_ENTRIES = 25
MAY_IMPORT_ACCELERATE = {"distributed", "strategies", "module"}
PUBLIC_NAMES_ONLY = {
    "fabricate.callbacks.",
    "fabricate.testing.",
    "fabricate.strategies.",
    "fabricate.precisions.",
}
ABSTRACT = {"fabricate.strategies.base", "fabricate.strategies.sharding", "fabricate.precisions.base"}
ROOT = Path(__file__).parent.parent


def _modules(pattern: str) -> dict[str, Path]:
    files = {path: path.relative_to(ROOT).with_suffix("") for path in sorted(ROOT.glob(pattern))}
    return {".".join(name.parts).removesuffix(".__init__"): path for path, name in files.items()}


MODULES = _modules("fabricate/**/*.py")
OUTSIDE = _modules("plugins/*/src/**/*.py")
BUILTIN = {name for name in MODULES if any(name.startswith(room) for room in PUBLIC_NAMES_ONLY)} - ABSTRACT


def _imports(name: str) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it."""
    path = MODULES[name] if name in MODULES else OUTSIDE[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _module_of(dotted: str) -> str:
    """The module of fabricate that has the name `dotted`: of `fabricate.hooks.Callback`, `fabricate.hooks`."""
    while dotted and dotted not in MODULES:
        dotted = dotted.rpartition(".")[0]
    return dotted


def _inner_imports(name: str) -> set[str]:
    """The modules of fabricate that `name` imports, without the package itself, whose names are resolved on first use."""
    return {_module_of(dotted) for dotted in _imports(name)} - {"", "fabricate", name}


def _room(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


def test_one_listing_shows_the_rooms() -> None:
    entries = {path.name for path in (ROOT / "fabricate").iterdir()} - {"__pycache__"}
    assert {name.removesuffix(".py") for name in entries} - {"__init__", "py.typed"} == set(ROOMS)
    assert len(entries) <= MOST_ENTRIES


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"fabricate"}))
def test_imports_come_from_rooms_listed_before(name: str) -> None:
    place = ROOMS.index(_room(name))
    assert {other for other in _inner_imports(name) if ROOMS.index(_room(other)) > place} == set()


@pytest.mark.parametrize("room", ["errors", "values", "hooks", "launch", "seeding"])
def test_what_everybody_imports_names_the_package_nowhere(room: str) -> None:
    """`from fabricate import X` resolves X from any room, so that it would be a circle which the rule above does not see."""
    assert not [n for n in MODULES if _room(n) == room and "fabricate" in {d.rpartition(".")[0] for d in _imports(n)}]


def test_imports_make_no_circle() -> None:
    graphlib.TopologicalSorter({name: _inner_imports(name) for name in MODULES if name != "fabricate"}).prepare()


@pytest.mark.parametrize("name", sorted(BUILTIN | OUTSIDE.keys()))
def test_built_ins_testing_and_plugins_use_public_names_only(name: str) -> None:
    """Of fabricate, whatever a third party can import; and their neighbours in the same folder."""
    own = name.rpartition(".")[0] + "."
    foreign = {dotted for dotted in _imports(name) if f"{dotted}.".startswith("fabricate.")} - {"fabricate"}
    foreign = {dotted for dotted in foreign if not f"{_module_of(dotted)}.".startswith(own) or dotted == "fabricate"}
    public = {*fabricate.__all__, *fabricate.testing.__all__}
    assert {dotted for dotted in foreign if dotted.rpartition(".")[2] not in public} == set()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_accelerate_is_imported_at_one_door(name: str) -> None:
    imports_it = any(dotted.partition(".")[0] == "accelerate" for dotted in _imports(name))
    assert not imports_it or _room(name) in MAY_IMPORT_ACCELERATE
