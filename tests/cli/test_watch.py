"""`fabricate watch` shows a run in progress, and reads only new lines."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from fabricate.cli.main import main
from fabricate.cli.recorded.following import Following
from fabricate.cli.recorded.terminal import sparkline, view
from tests.support.recorded import HOSTILE, STEPS, record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("watch") / "run"
    record(run_dir, fails=False)
    return run_dir


@pytest.fixture
def run_dir(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "run")


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)


def logged(run_dir: Path, step: int, loss: float) -> str:
    """A line as the run would write it."""
    line: dict[str, Any] = json.loads(lines(run_dir)[0])
    return json.dumps({**line, "step": step, "metrics": {"loss": loss}}) + "\n"


def test_without_a_terminal_the_run_is_printed_once(run_dir: Path) -> None:
    shown = CliRunner().invoke(main, ["watch", str(run_dir)])
    assert shown.exit_code == 0
    for text in (
        "complete (max_steps)\n",
        f"{'█' * 60}\nstep {STEPS} of {STEPS}",
        "steps/s",
        HOSTILE,
        "val_loss",
        "ended",
    ):
        assert text in shown.stdout, text
    assert "started" not in shown.stdout, "the last few events only"


def test_in_a_terminal_new_lines_appear_and_ctrl_c_ends_the_command(run_dir: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fabricate", "watch", str(run_dir), "--every", "0.1"]
    environment = os.environ | {"COLUMNS": "160", "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        limit = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < limit, shown[-2000:]
            shown += os.read(ours, 65536).decode(errors="replace")

    try:
        until(f"step {STEPS} of {STEPS}")
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(logged(run_dir, STEPS + 7, 123.5))
        until("123.5")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_only_whole_lines_are_taken_and_a_cut_log_is_read_anew(run_dir: Path) -> None:
    file, entries = run_dir / "metrics.jsonl", lines(run_dir)
    following = Following(run_dir)
    assert len(following.look().lines) == len(entries)
    with file.open("a") as handle:
        handle.write(logged(run_dir, 11, 1.0)[:-5])
    assert len(following.look().lines) == len(entries)
    with file.open("a") as handle:
        handle.write(logged(run_dir, 11, 1.0)[-5:])
    assert [line["step"] for line in following.look().lines][-1] == 11
    file.write_text("".join(entries[:4]))
    assert len(following.look().lines) == 4
    other = [logged(run_dir, step, 2.0) for step in range(3, 40)]  # cut and longer than before
    file.write_text("".join(entries[:2] + other))
    assert [line["step"] for line in following.look().lines][-1] == 39


def test_a_run_that_has_written_nothing_yet_is_shown(tmp_path: Path) -> None:
    assert "no fit has begun" in CliRunner().invoke(main, ["watch", str(tmp_path)]).stdout


def test_no_text_of_a_run_reaches_the_terminal_as_a_command(run_dir: Path) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "note", "time": 1.0, "step": 1, "text": "\x1b]0;owned\x07[bold]"}) + "\n")
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(Following(run_dir).look()))
    console.file.close()
    shown = console.export_text()
    assert "\x1b" not in shown
    assert "?]0;owned?[bold]" in shown


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([1.0, 2.0, float("nan"), 8.0]) == "▁▂ █"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert len(sparkline([float(n) for n in range(1000)])) == 32
    assert sparkline([float("inf")]) == " "
