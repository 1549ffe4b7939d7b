"""The floor plan: imports inside fabricate run downwards, without cycles; what builds on it uses public names only."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import fabricate
import fabricate.testing

# Files and folders of fabricate/. A file imports from lower floors, and from its own where that makes no cycle.
FLOORS = [
    {"errors", "hooks"},
    {
        "records",
        "metrics",
        "launch",
        "order",
        "plan",
        "randomness",
        "strategy",
        "precision",
        "console",
        "control",
        "group",
    }
    | {"naming", "parallelism", "parts", "resources", "stopwatch", "transfer", "weighing", "forked"},
    {"progress", "checkpoint", "dispatch", "interfaces", "data", "settings", "schedules"},
    {"module", "registry", "optimization", "planning", "construct", "pretrained", "engine", "run"}
    | {"compiling", "explaining", "memory", "observing", "preemption", "returned"},
    {"alike", "evaluation", "loop", "state", "interop", "rehearsal", "cli", "__main__"},
    {"lifecycle", "trainer"},
    {"builtin", "testing"},  # public names only, like plugins/
]
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
MAY_IMPORT_ACCELERATE = {"engine", "builtin"}
ROOT = Path(__file__).parent.parent


def _modules(pattern: str) -> dict[str, Path]:
    files = {path: path.relative_to(ROOT).with_suffix("") for path in sorted(ROOT.glob(pattern))}
    return {".".join(name.parts).removesuffix(".__init__"): path for path, name in files.items()}


MODULES = _modules("fabricate/**/*.py")
OUTSIDE = {name: path for name, path in MODULES.items() if name.split(".")[1:2] in (["builtin"], ["testing"])}
OUTSIDE |= _modules("plugins/*/src/**/*.py")


def _imports(name: str, *, in_functions: bool, for_checkers: bool = False) -> Iterator[str]:
    """Dotted names that a module imports; those for type checkers only are left out, unless asked for."""
    path = MODULES[name] if name in MODULES else OUTSIDE[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not for_checkers:
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)


def _inner_imports(name: str) -> set[str]:
    """The modules of fabricate that importing `name` imports: of `fabricate.hooks.Callback`, `fabricate.hooks`."""
    found = set()
    for dotted in _imports(name, in_functions=False):
        while dotted and dotted not in MODULES:
            dotted = dotted.rpartition(".")[0]
        found.add(dotted)
    return found - {"", name}


def _room(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


def test_every_module_has_a_floor() -> None:
    assert {_room(name) for name in MODULES} - {""} - FLOOR_OF.keys() == set()


@pytest.mark.parametrize("name", sorted(MODULES.keys() - OUTSIDE.keys() - {"fabricate"}))
def test_imports_run_downwards(name: str) -> None:
    floor = FLOOR_OF[_room(name)]
    upwards = {other for other in _inner_imports(name) if FLOOR_OF.get(_room(other), len(FLOORS)) > floor}
    assert not upwards, f"{name} is on floor {floor}"


def test_the_package_itself_imports_nothing_of_its_own() -> None:
    assert not _inner_imports("fabricate")


def test_imports_make_no_cycle() -> None:
    graphlib.TopologicalSorter({name: _inner_imports(name) for name in MODULES}).prepare()


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_builtin_testing_and_plugins_use_public_names_only(name: str) -> None:
    public = {"fabricate", *(f"fabricate.{public}" for public in fabricate.__all__)}
    imports = _imports(name, in_functions=True, for_checkers=True)
    inner = {dotted for dotted in imports if dotted.partition(".")[0] == "fabricate"}
    own = "fabricate.builtin." if name.startswith("fabricate.builtin") else "fabricate.testing."
    public |= {dotted for dotted in inner if f"{dotted}.".startswith(own)}
    assert not inner - public


@pytest.mark.parametrize("name", sorted(MODULES))
def test_accelerate_is_imported_at_one_door(name: str) -> None:
    imports_it = any(dotted.partition(".")[0] == "accelerate" for dotted in _imports(name, in_functions=True))
    assert not imports_it or _room(name) in MAY_IMPORT_ACCELERATE
