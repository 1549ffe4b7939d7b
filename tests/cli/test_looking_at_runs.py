"""The commands on the page about looking at runs work as the page describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fabricate.cli.main import main
from tests.support.recorded import SCRIPT, record

PAGE = Path(__file__).parents[2] / "docs" / "looking-at-runs.md"
COMMANDS = [
    line.partition(" #")[0].removeprefix("fabricate ").split()
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
]
EXPECTED = {"report": "wrote ", "rows": "micro-batch", "diff": "learning_rate", "watch": "complete (max_steps)"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs and the script of the first."""
    root = tmp_path_factory.mktemp("looking")
    record(root / "runs/first")
    record(root / "runs/second", learning_rate=0.03, fails=False)
    (root / "train.py").write_text(SCRIPT)
    return root


def test_the_expected_output_of_every_command_of_the_page_is_known() -> None:
    assert {command[0] for command in COMMANDS} <= set(EXPECTED)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_works(command: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == (1 if command[0] == "diff" else 0), result.output
    assert EXPECTED[command[0]] in result.stdout
    if "--html" in command:
        assert (place / command[-1]).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
