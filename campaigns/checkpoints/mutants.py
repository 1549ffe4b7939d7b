"""The code of the checkpoint format with one line removed, to test whether the campaigns notice it.

One at a time, this removes every call that makes data durable or gives a file its name, and every check: calls of checking functions, and
`if ...: raise`. Each variant runs in a separate process, with the changed module in place of the real one: first a short form of the other
campaigns, then, if nothing was noticed, the tests of the format.
"""

from __future__ import annotations

import ast
import concurrent.futures
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent
MODULES = ("directory", "manifest", "writing", "files")
DURABLE = {"fsync", "fsync_directory", "rename"}
CHECKS = {
    "require",
    "integer",
    "text",
    "_tensor_name",
    "_check_directory",
    "_prove_coverage",
    "_check_header",
    "_check_range",
}
COVERAGE = {"_prove_coverage", "_check_directory", "tensors_of"}
"""Functions whose checks, and calls of which, all belong to the kind "coverage": every tensor is there completely, and only once."""
DIGEST = ("digest", "sealed", "_is_content")
VITAL = ("durable", "digest", "coverage")
KINDS = (*VITAL, "check")
_TESTS = ("checkpoint/test_directory", "checkpoint/test_damage", "checkpoint/test_kills")
_SECONDS = 300


@dataclass(frozen=True)
class Site:
    """A statement that can be removed, of one of the `KINDS`."""

    module: str
    line: int
    kind: str
    code: str

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line} {self.code}"


def sites(module: str) -> list[Site]:
    """The statements that can be removed from a module of fabricate, in order."""
    places = []
    tree = ast.parse(_source(module))
    inside = {
        id(node): function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        kind = _kind(node)
        if kind:
            assert isinstance(node, ast.stmt)
            code = " ".join(ast.unparse(node.test if isinstance(node, ast.If) else node).split())
            if kind == "check" and any(word in code for word in DIGEST):
                kind = "digest"
            elif kind == "check" and (inside.get(id(node)) in COVERAGE or code.partition("(")[0] in COVERAGE):
                kind = "coverage"
            places.append(Site(module, node.lineno, kind, code[:100]))
    return sorted(places, key=lambda site: site.line)


def _source(module: str) -> str:
    return (ROOT / "fabricate" / "checkpoint" / "format" / f"{module}.py").read_text(encoding="utf-8")


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
        return "check"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        name = (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        return "durable" if name in DURABLE else "check" if name in CHECKS else ""
    return ""


class _Without(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self.line = line
        self.removed = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.stmt) and node.lineno == self.line and _kind(node):
            self.removed += 1
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module of fabricate without one of its lines."""

    def __init__(self, module: str, line: int) -> None:
        self.name, self.line = f"fabricate.checkpoint.format.{module}", line

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        without = _Without(self.line)
        tree = without.visit(ast.parse(_source(self.name.rpartition(".")[2])))
        assert without.removed == 1, f"{self.name} has no such line: {self.line}"
        exec(
            compile(ast.fix_missing_locations(tree), f"<{self.name} without line {self.line}>", "exec"), module.__dict__
        )


def probe() -> None:
    """Run the short form of the campaigns, and the cases that a commit has to refuse. Raises the first error found."""
    from campaigns.checkpoints import corruption, crashes, refusals

    crashes.system_calls()
    refusals.run()
    corruption.run(1500)
    crashes.run(states=2)


def run(kinds: Sequence[str] = KINDS, modules: Sequence[str] = MODULES, jobs: int | None = None) -> dict[Site, str]:
    """The last line of the error by which each variant was noticed; empty if it was not noticed."""
    wanted = [site for module in modules for site in sites(module) if site.kind in kinds]
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(_noticed, wanted), strict=True))


def _noticed(site: Site) -> str:
    return _end_of("probe", site) or _end_of("tests", site)


def _end_of(what: str, site: Site) -> str:
    command = [sys.executable, "-m", "campaigns.checkpoints.mutants", what, site.module, str(site.line)]
    with tempfile.TemporaryDirectory() as folder:  # for files that a variant leaves behind
        environment = os.environ | {"TMPDIR": folder}
        try:
            process = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"it did not end in {_SECONDS} seconds"
    lines: Iterator[str] = (line for line in reversed((process.stdout + process.stderr).splitlines()) if line.strip())
    return next(lines, f"exit code {process.returncode}") if process.returncode else ""


if __name__ == "__main__":
    sys.meta_path.insert(0, _Finder(sys.argv[2], int(sys.argv[3])))
    if sys.argv[1] == "tests":
        import pytest

        sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(f"tests/{name}.py" for name in _TESTS)]))
    probe()
