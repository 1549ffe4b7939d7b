"""Installed distributions, made up for a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., None]


def installing(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Of a fixture: `install(distribution, code, name=..., attribute=..., version=...)` puts a distribution with one plugin
    into `root`, which is on sys.path; what was imported from there is forgotten afterwards."""
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
