"""The plugin pages: the hook reference is complete and up to date. (test_docs runs the pages' code.)"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers.training_args  # noqa: F401  at once: what it imports sets a variable of the environment

from fabricate import Precision, Strategy, hooks
from fabricate.testing import check_strategy

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _reference() -> ModuleType:
    return _module(DOCS / "reference.py")


def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["from-transformers.md", "hooks.md", "interfaces.md", "trainer.md"])
def test_a_generated_page_is_up_to_date(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == _reference().PAGES[page](), "run python docs/reference.py"


@pytest.mark.parametrize("kind", [Strategy, Precision])
def test_the_interfaces_page_says_of_every_method_and_attribute_what_it_is_for(kind: type) -> None:
    page = (DOCS / "interfaces.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^### `(?:Strategy\.)?(\w+)|^- `(\w+): .+: \w", section, re.MULTILINE)
    assert {name for name in vars(kind) if not name.startswith("_")} <= {
        method or attribute for method, attribute in entries
    }


@pytest.mark.parametrize("kind", [Strategy, Precision])
def test_every_method_to_override_says_what_it_is_for(kind: type) -> None:
    assert [n for n, v in vars(kind).items() if inspect.isfunction(v) and len((v.__doc__ or "").split()) < 5] == []


def test_the_hook_reference_has_every_hook_once() -> None:
    names = re.findall(r"^### `(\w+)\(", (DOCS / "hooks.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(names) == sorted(hooks.HOOKS)


@pytest.mark.parametrize("name", hooks.HOOKS)
def test_every_hook_is_documented_at_some_length(name: str) -> None:
    owner = hooks.Registrations if name in hooks.REGISTRATIONS else hooks.Events
    assert len((getattr(owner, name).__doc__ or "").split()) > 5


def test_every_registration_is_in_the_tutorial() -> None:
    text = (DOCS / "write-a-plugin.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in hooks.REGISTRATIONS)


def test_the_strategy_of_the_tutorial_keeps_what_a_strategy_promises(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.+?)```", (DOCS / "write-a-plugin.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "class InOneMessage" in block]
    file = tmp_path / "in_one_message.py"
    file.write_text("import dataclasses\nfrom typing import ClassVar\nimport torch\n" + block, encoding="utf-8")
    check_strategy(_module(file).InOneMessage, world_sizes=[2])
