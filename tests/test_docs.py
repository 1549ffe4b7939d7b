"""The documentation is correct: its Python runs, the errors that it explains exist, its tables and links are right."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fabricate
from fabricate import ConfigurationError, Trainer
from fabricate.registry import foreign_names
from tests.support.scripts import run_script

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"```(.*)")


def script_of(page: Path) -> str:
    """The page's ```python blocks as one script, at their own line numbers; blocks marked `no-run` are left out."""
    lines, block = [], None
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.fullmatch(line)
        if fence:
            block = fence[1] if block is None else None
        lines.append(line if block == "python" and not fence else "")
    return "\n".join(lines).rstrip()


def table_rows(page: str, heading: str) -> list[tuple[str, str]]:
    """The (first, second) cells of the table below `heading`, without the backquotes."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE)
    return [(first, second.replace("`", "")) for first, second in rows]


def messages() -> Iterator[str]:
    """Every text in the source that is no docstring, with … for what is filled in."""
    for path in sorted((ROOT / "fabricate").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                yield re.sub("…+", "…", "".join(parts))


@pytest.mark.parametrize("page", [p for p in PAGES if script_of(p)], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(script_of(page), encoding="utf-8")
    run_script(script, directory=tmp_path)


def test_the_script_in_the_readme_is_short_and_learns_the_line(tmp_path: Path) -> None:
    script = script_of(ROOT / "README.md").strip()
    assert len(script.splitlines()) <= 20
    (tmp_path / "line.py").write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "fabricate", "run", "line.py", "--nproc", "2"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-4000:]
    losses = re.findall(r"^200 steps, loss (\S+)$", process.stdout, re.MULTILINE)
    assert len(losses) == 1, "rank 0 says so"
    assert float(losses[0]) < 1e-3


def test_every_explained_error_is_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    keys = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(keys) == len(re.findall("^### ", page, re.MULTILINE)) > 30
    texts = list(messages())
    missing = [key for key in keys if not any(key in message for message in texts)]
    assert missing == []


def test_every_variable_that_the_source_names_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fabricate").rglob("*.py"))
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(FABRICATE_\w+)`", page, re.MULTILINE))
    assert set(re.findall(r"FABRICATE_[A-Z_]+[A-Z]", source)) == documented


def test_the_hooks_of_lightning_are_translated_as_the_errors_do() -> None:
    rows = table_rows("from-lightning.md", "Hooks")
    assert len(rows) > 15
    assert [(name, use) for name, use in rows if foreign_names.HOOKS.get(name) != use] == []


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Arguments of `fit`", foreign_names.FIT),
        ("Keywords of `self.log`", foreign_names.LOG),
        ("Attributes of the module", foreign_names.MODULE),
        ("Attributes of the trainer", foreign_names.TRAINER),
        ("Strategies and precisions", foreign_names.STRATEGIES | foreign_names.PRECISIONS),
    ],
)
def test_other_names_of_lightning_are_translated_as_the_errors_do(section: str, names: dict[str, str]) -> None:
    rows = table_rows("from-lightning.md", section)
    assert len(rows) >= 4
    assert [(name, use) for name, use in rows if names.get(name) != use] == []


def test_the_arguments_of_lightnings_trainer_are_translated_as_the_errors_do() -> None:
    rows = table_rows("from-lightning.md", "Arguments of the Trainer")
    assert len(rows) > 10
    for name, use in rows:
        with pytest.raises(ConfigurationError) as caught:
            Trainer(**{name: 1})
        assert str(caught.value) == f"Trainer has no argument {name!r}; use {use}"


def test_every_feature_that_the_comparison_claims_is_shown_by_a_test_or_a_page_that_exists() -> None:
    text = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    rows = [row for row in rows if row[0] != "feature"]
    assert len(rows) > 80
    for feature, lightning, transformers, ours, shown in ([*row, ""][:5] for row in rows):
        for cell in (lightning, transformers, ours):
            assert re.match(r"(yes|no|part)\b", cell), (feature, cell)
        places = re.findall(r"`([^`]+\.py)(?:::(\w+))?`", shown)
        for path, name in places:
            assert (ROOT / path).is_file(), (feature, path)
            assert Path(path).name.startswith("test_"), (feature, path)
            assert f"\ndef {name or 'test_'}" in (ROOT / path).read_text(encoding="utf-8"), (feature, name)
        pages = [ROOT / "docs" / page for page in re.findall(r"\]\(([\w/-]+\.md)", shown)]
        if ours.startswith(("yes", "part")):
            assert places or any(script_of(page) for page in pages), feature
        elif ours != "no":
            assert places or pages, feature


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))], ids=lambda p: p.name
)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, target


def test_every_distribution_has_the_newest_version_of_the_changelog() -> None:
    newest = re.findall(
        r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )[0]
    assert fabricate.__version__ == newest
    for project in ROOT.glob("plugins/*/pyproject.toml"):
        text = project.read_text(encoding="utf-8")
        assert f'\nversion = "{newest}"\n' in text, project
        assert f'"fabricate-trainer>={newest},<' in text, project


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} - {"index.md"}
    assert sorted(page for page in pages if f"({page})" not in index) == []


def test_every_event_is_on_the_page_of_the_run_directory() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "fabricate").rglob("*.py"))
    kinds = set(re.findall(r"\bevent\(\s*\"(\w+)\"", sources))
    assert {kind for kind, _ in table_rows("run-directory.md", "events.jsonl")} == kinds


def test_the_figures_of_the_promises_are_those_of_their_pages() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    combinations = (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line for line in combinations.splitlines() if line.startswith("| `")]
    refused = [line for line in rows if "| refused: " in line]
    assert f"[{len(rows)} combinations of strategy and precision]" in readme
    assert f"{len(rows) - len(refused)} ran as chosen, and {len(refused)} were refused" in readme
    kills = re.search(r"\| in all \| ([\d,]+) \|", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert kills is not None
    assert f"[{kills[1]} kills]" in readme
