"""What the site has beside the pages of this folder: the API from the docstrings, each example, and the pages of the plugins.

MkDocs calls these functions while it builds (`hooks:` in mkdocs.yml). Imports nothing of fabricate: the docstrings are read, not run.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json"}


def public_names(file: Path) -> list[str]:
    """`__all__` of a module."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise LookupError(f"{file} has no __all__")


def _api() -> str:
    """A page with the docstring of every public name."""
    parts = [
        "# API\n\nEvery public name, with its docstring. [Trainer and TrainModule](trainer.md) explains the arguments one by one.\n"
    ]
    for package in ("fabricate", "fabricate.testing"):
        file = ROOT / package.replace(".", "/") / "__init__.py"
        parts += [f"::: {package}.{name}\n" for name in public_names(file)]
    return "\n".join(parts)


def _examples() -> list[Path]:
    return sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in _LANGUAGES)


def _summary(path: Path) -> str:
    """The first sentence of a script, or the first comment of another file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
    first = next((line for line in text.splitlines() if line.startswith("# ")), "")
    return first.removeprefix("# ")


def _catalogue() -> str:
    lines = ["# Examples and plugins", "", "## Examples", ""]
    lines += [f"- [{_name(path)}]({_name(path)}.md): {_summary(path)}" for path in _examples()]
    lines += ["", "## Plugins", ""]
    lines += [f"- [{path.parent.name}](plugins/{path.parent.name}/README.md)" for path in _readmes()]
    return "\n".join(lines) + "\n"


def _readmes() -> list[Path]:
    return sorted(ROOT.glob("plugins/*/README.md"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from other files of the repository, at the paths of those."""
    pages = {"api.md": _api(), "catalogue.md": _catalogue()}
    for path in _examples():
        code = f"````{_LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}````\n"
        pages[f"{_name(path)}.md"] = f"# {_name(path)}\n\n{code}"
    for path in _readmes():
        pages[_name(path)] = path.read_text(encoding="utf-8")
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files of the repository, as they are on the disk, to the pages made from them."""
    source = page.file.src_uri
    folder = (ROOT / source).parent if source.startswith(("plugins/", "examples/")) else (ROOT / "docs" / source).parent

    def target(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[1]  # a page of the site that is not on the disk, or a broken link, which MkDocs reports
        where = path.relative_to(ROOT).as_posix()
        where = where.removeprefix("docs/") if where.startswith("docs/") else where
        if path in _examples():
            where += ".md"
        return os.path.relpath(where, os.path.dirname(source) or ".")

    return _LINK.sub(target, markdown.replace("```python no-run\n", "```python\n"))


class ParametersAsLists(griffe.Extension):
    """Docstrings explain parameters as `name: text`, one after the other; on the site each begins a line of a list."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        _list_parameters(func, [parameter.name for parameter in func.parameters])

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        own = [name for name, member in cls.members.items() if member.is_attribute]
        constructor = cls.members.get("__init__")
        taken = [p.name for p in constructor.parameters] if isinstance(constructor, griffe.Function) else []
        _list_parameters(cls, [*own, *taken])


def _list_parameters(of: griffe.Object, names: list[str]) -> None:
    if of.docstring is None or not names:
        return
    name = "|".join(map(re.escape, names))
    item = re.compile(rf"(?:^|(?<=[.;)])\s+)((?:{name})(?:, (?:{name}))*): ")
    paragraphs = of.docstring.value.split("\n\n")
    for number, text in enumerate(paragraphs):
        is_code = text.startswith((" ", ">>>"))
        if not is_code and item.search(joined := " ".join(text.splitlines())):
            paragraphs[number] = item.sub(r"\n- `\1`: ", joined).replace("\n- ", "\n\n- ", 1).strip()
    of.docstring.value = "\n\n".join(paragraphs)
