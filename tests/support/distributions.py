"""Distributions that are installed for a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., None]


def installing(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """The generator of a fixture: `install(distribution, code, name=..., attribute=..., version=...)` writes a distribution with one plugin
    to `root`, which is on sys.path; afterwards the modules imported from there are removed."""
    monkeypatch.syspath_prepend(str(root))
    before = set(sys.modules)

    def install(
        distribution: str, code: str = "", *, name: str = "", attribute: str = "", version: str = "1.0"
    ) -> None:
        module = distribution.replace("-", "_")
        imports = "import click\nfrom fabricate import Callback, ConfigurationError, Precision, Strategy, hookimpl"
        (root / f"{module}.py").write_text(f"{imports}\n{code}\n")
        info = root / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        value = f"{module}:{attribute}" if attribute else module
        (info / "entry_points.txt").write_text(f"[fabricate]\n{name or module} = {value}\n")
        importlib.invalidate_caches()

    yield install
    for new in set(sys.modules) - before:
        if (getattr(sys.modules[new], "__file__", None) or "").startswith(str(root)):
            del sys.modules[new]
