"""The benchmarks that no other test runs: on tiny sizes, as far as this machine supports them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as suite
from benchmarks import ranks
from benchmarks.loops import LOOPS
from benchmarks.tables import machine
from benchmarks.targets import TARGETS
from benchmarks.works import WORKS

ROOT = Path(suite.__file__).parent.parent


def test_the_page_takes_what_was_measured_and_holds_it_against_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.overhead",
        "--rounds",
        "1",
        "--micro-batches",
        "48",
        "--only",
        "Accelerate",
    ]
    process = subprocess.run([*command, "fabricate", "--json", str(figures)], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, (
        process.stderr
    )  # which it is not where a loop trains other weights than the bare one
    by_case = json.loads(figures.read_text())
    assert by_case.keys() == WORKS.keys()
    for case in by_case.values():
        assert case["loops"].keys() == LOOPS.keys()
        assert case["loops"]["fabricate"]["weights"] == "bit-identical"

    page = tmp_path / "benchmarks.md"
    before = suite.PAGE.read_text(encoding="utf-8")
    page.write_text(before, encoding="utf-8")
    monkeypatch.setattr(suite, "PAGE", page)
    results = {"overhead": {"machine": machine(), "found": by_case, "text": ""}}
    suite.write_page(results)
    suite.write_page(results)  # in place of the first, not beside it
    after = page.read_text(encoding="utf-8")
    assert _by_hand(after) == _by_hand(before)
    for case in WORKS:
        assert f"{by_case[case]['loops']['fabricate']['micro_batch']:.1f}" in _table(after, case)
    rows = _table(after, "targets").splitlines()[2:]
    assert len(rows) == len(TARGETS)
    for target, row in zip(TARGETS, rows, strict=True):
        assert target.promise in row
        assert ("not measured" in row) == (target.part != "overhead")


def test_loops_of_two_ranks_train_the_same_weights(tmp_path: Path) -> None:
    figures = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.ranks", "quiet", "--rounds", "1", "--micro-batches", "44"]
    process = subprocess.run([*command, "--json", str(figures)], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr  # which it is not where weights differ
    assert {loop: len(times) for loop, times in json.loads(figures.read_text())["quiet"].items()} == dict.fromkeys(
        ranks.LOOPS["ddp"], 1
    )


def _table(page: str, name: str) -> str:
    return page.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0]


def _by_hand(page: str) -> str:
    return re.sub(r"(?s)(<!-- [\w ]+: begin -->\n).*?(<!-- [\w ]+: end -->)", r"\1\2", page)
