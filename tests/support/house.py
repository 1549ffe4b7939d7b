"""Figures about the structure of the package: `python -m tests.support.house` prints them, tests/test_rooms.py checks them.

Everything is read from the source with `ast`; nothing of the package is imported.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fabricate"
ROOMS = (
    *("errors", "values", "hooks", "launch", "seeding", "metrics", "data"),
    *("precisions", "strategies", "registry", "optim", "checkpoint", "module", "model", "distributed", "configuration"),
    *("training", "trainer", "callbacks", "selfcheck", "testing", "cli", "__main__"),
)
"""Files and folders of fabricate/. A module imports from rooms that come before its own, and from its own without a circle. Imports
for type checkers only and imports inside functions count like any other."""
MOST_ENTRIES, MOST_LINES, MOST_BRANCHES = 25, 60, 15


def modules(pattern: str) -> dict[str, Path]:
    """The files that match `pattern`, by their dotted names."""
    files = {path: path.relative_to(ROOT).with_suffix("") for path in sorted(ROOT.glob(pattern))}
    return {".".join(name.parts).removesuffix(".__init__"): path for path, name in files.items()}


MODULES = modules("fabricate/**/*.py")
PLUGINS = modules("plugins/*/src/**/*.py")


def entries() -> set[str]:
    """The names of the entries in the package's folder."""
    return {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}


def imports(name: str) -> Iterator[str]:
    """The dotted names that a module imports, at any place in it."""
    path = MODULES[name] if name in MODULES else PLUGINS[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)


def module_of(dotted: str) -> str:
    """The module of fabricate that has the name `dotted`: of `fabricate.hooks.Callback`, `fabricate.hooks`."""
    while dotted and dotted not in MODULES:
        dotted = dotted.rpartition(".")[0]
    return dotted


def inner_imports(name: str) -> set[str]:
    """The modules of fabricate that `name` imports, without the package itself, whose names are resolved on first use."""
    return {module_of(dotted) for dotted in imports(name)} - {"", "fabricate", name}


def room(name: str) -> str:
    """The file or folder of fabricate/ that holds a module."""
    return name.partition(".")[2].partition(".")[0]


def circle() -> list[str]:
    """The modules that import each other in a circle; empty if there is none."""
    try:
        graphlib.TopologicalSorter({n: inner_imports(n) for n in MODULES if n != "fabricate"}).prepare()
    except graphlib.CycleError as exc:
        cycle: list[str] = exc.args[1]
        return cycle
    return []


def folder_circle() -> list[str]:
    """The folders, including those inside rooms, whose modules import each other in a circle; empty if there is none."""
    above: dict[str, set[str]] = {}
    for name in MODULES.keys() - {"fabricate"}:
        here = _folder(name)
        above.setdefault(here, set()).update(map(_folder, inner_imports(name)) if here else ())
    try:
        graphlib.TopologicalSorter({here: others - {here, ""} for here, others in above.items()}).prepare()
    except graphlib.CycleError as exc:
        cycle: list[str] = exc.args[1]
        return cycle
    return []


def _folder(name: str) -> str:
    """The folder of a module below fabricate/, with dots; empty for a module in fabricate/ itself."""
    path = MODULES[name]
    inside = path.parent.relative_to(PACKAGE)
    return ".".join(inside.parts)


def functions() -> Iterator[tuple[str, int, int]]:
    """Every function of the package and the plugins: place, lines with its signature, branch points."""
    for path in (*MODULES.values(), *PLUGINS.values()):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield f"{path.relative_to(ROOT)}:{node.name}", lines, sum(map(_branches, ast.walk(node)))


def _branches(node: ast.AST) -> int:
    """The branches that a node adds: if, conditional expression, loop, except, each further operand of and/or, each `if` of a
    comprehension."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    kinds = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
    return int(isinstance(node, kinds))


def too_large() -> list[tuple[str, int, int]]:
    """The functions above the limits."""
    return [each for each in functions() if each[1] > MOST_LINES or each[2] > MOST_BRANCHES]


def run_fields() -> tuple[int, list[str]]:
    """For `Run`, the object that the loop passes around: the number of its mutable fields, and its fields that hold mutable objects."""
    tree = _tree(PACKAGE / "training" / "state" / "run_state.py")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    decorators = " ".join(ast.unparse(decorator) for decorator in classes["Run"].decorator_list)
    fields = [node for node in classes["Run"].body if isinstance(node, ast.AnnAssign)]
    owners = [f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}" for node in fields]
    changing = ("Progress", "Metrics", "Journal", "Requests", "Checkpoints", "Optimization", "Now")
    return 0 if "frozen=True" in decorators else len(fields), [o for o in owners if o.endswith(changing)]


def uses(names: set[str]) -> list[str]:
    """The places where the package calls one of the built-in functions `names`."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES.values()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def transport() -> list[str]:
    """The modules of the rooms of a run that send or receive over sockets. (A look-up of the address of a host is not counted.)"""
    talks = {"listen", "accept", "sendall", "sendmsg", "recv_into", "create_server", "create_connection", "selectors"}
    return [name for name in MODULES if room(name) in ("distributed", "training") and talks & _names(MODULES[name])]


def _names(path: Path) -> set[str]:
    """The attributes and modules that a file mentions."""
    nodes = list(ast.walk(_tree(path)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def main() -> None:
    """Print the figures."""
    every = list(functions())
    longest, widest = max(every, key=lambda each: each[1]), max(every, key=lambda each: each[2])
    mutable, owners = run_fields()
    rows = [
        ("entries in one listing of fabricate/", len(entries()), f"at most {MOST_ENTRIES}"),
        ("circles of imports, type-only ones included", " -> ".join(circle()) or 0, "none"),
        ("longest function", f"{longest[1]} lines ({longest[0]})", f"at most {MOST_LINES}"),
        ("most branch points", f"{widest[2]} ({widest[0]})", f"at most {MOST_BRANCHES}"),
        ("mutable fields of the object that the loop passes around", mutable, "0"),
        ("objects that hold what changes", ", ".join(o.partition(":")[0] for o in owners), "an owner each"),
        ("modules with a transport of their own", ", ".join(transport()) or 0, "none"),
        ("calls of exec, eval or compile", ", ".join(uses({"exec", "eval", "compile"})) or 0, "none"),
    ]
    width = max(len(name) for name, _, _ in rows)
    for name, value, goal in rows:
        print(f"{name:{width}}  {value}  [{goal}]")


if __name__ == "__main__":
    main()
