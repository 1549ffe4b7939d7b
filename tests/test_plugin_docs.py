"""The plugin pages: the hook reference is complete and up to date. (That the pages' code runs is test_docs' affair.)"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from fabricate import hooks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hook_reference", DOCS / "hook_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_hook_reference_is_up_to_date() -> None:
    written = (DOCS / "hooks.md").read_text(encoding="utf-8")
    assert written == _reference().render(), "run python docs/hook_reference.py"


def test_the_hook_reference_has_every_hook_once() -> None:
    found = re.findall(r"^### `(\w+)\(", (DOCS / "hooks.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(found) == sorted(hooks.HOOKS)


@pytest.mark.parametrize("name", hooks.HOOKS)
def test_every_hook_is_documented_at_some_length(name: str) -> None:
    owner = hooks.Registrations if name in hooks.REGISTRATIONS else hooks.Events
    assert len((getattr(owner, name).__doc__ or "").split()) > 5


def test_every_registration_is_in_the_tutorial() -> None:
    text = (DOCS / "write-a-plugin.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in hooks.REGISTRATIONS)
