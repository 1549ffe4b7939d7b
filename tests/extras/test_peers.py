"""The benchmarks against other frameworks, on tiny sizes: every loop trains the same weights as the bare one, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import available
from benchmarks.works import WORKS

ROOT = Path(__file__).parents[2]
PEERS = {"Lightning", "Ignite", "pytorch-accelerated", "transformers"}


def test_every_peer_of_the_benchmarks_is_installed_here() -> None:
    names = " ".join(available())
    assert not {peer for peer in PEERS if peer.lower() not in names.lower()}, names


@pytest.mark.parametrize("case", sorted(WORKS))
def test_every_framework_trains_the_weights_of_the_bare_loop(case: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.overhead", case, "--rounds", "1", "--micro-batches", "48"]
    process = subprocess.run([*command, "--json", str(figures)], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    loops = json.loads(figures.read_text())[case]["loops"]
    assert case == "listeners" or len(loops) >= 2 + len(PEERS)  # hooks of others are not alike
    assert {loop["weights"] for loop in loops.values()} == {"bit-identical"}
