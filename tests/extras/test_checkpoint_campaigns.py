"""Short forms of the campaigns against checkpoints; `make campaign` runs the long ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from campaigns.checkpoints import corruption, crashes, memory, mutants, pairs, refusals

ROOT = Path(__file__).parents[2]


def test_no_end_of_a_process_or_a_machine_costs_a_checkpoint() -> None:
    assert crashes.system_calls()["fsync"] > 10
    ends = crashes.run(states=4)
    assert len(ends) == 4
    assert all(number > 100 for number in ends.values())


def test_every_request_of_the_refusals_campaign_is_refused() -> None:
    assert refusals.run() > 45


def test_altered_and_forged_checkpoints_are_refused() -> None:
    caught = corruption.run(4_000)
    assert caught.keys() == {*corruption.BYTES, *corruption.FILES, *corruption.FORGERIES, "duplicate key", "unchanged"}
    assert caught["unchanged"] < 200


@pytest.mark.timeout(1200)
def test_the_code_without_one_fsync_rename_digest_or_proof_of_coverage_is_noticed() -> None:
    by_site = mutants.run(mutants.VITAL)
    assert [str(site) for site, noticed in by_site.items() if not noticed] == []
    kinds = [site.kind for site in by_site]
    assert kinds.count("durable") >= 13
    assert kinds.count("digest") >= 4
    assert kinds.count("coverage") >= 8


@pytest.mark.timeout(1200)
def test_runs_that_are_killed_end_as_if_undisturbed(tmp_path: Path) -> None:
    """In a process of its own, which forks the runs: it must not have threads, and this one may."""
    file = tmp_path / "found.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "campaigns.checkpoints", "kill", "--json", str(file)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-8000:]
    kills: dict[str, Any] = json.loads(file.read_text())["kill"]
    assert kills["in all"] >= 40
    assert all(number >= 2 for number in kills["kills"].values())


LAST = """
import os, pathlib, signal, sys, time
import torch.distributed
from campaigns.checkpoints import kills, runs

def fit(*_):
    torch.distributed.init_process_group("gloo")
    while os.environ["RANK"] == "1":
        time.sleep(1)

runs.fit = fit
run_dir = pathlib.Path(sys.argv[1], "run")
try:
    children = kills.start(kills.Kind("ddp", 2, "sync"), run_dir, {})
    while not pathlib.Path(sys.argv[1], "run-0.operations").exists():
        time.sleep(0.01)
    os.kill(children[1], signal.SIGKILL)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
finally:
    print("cleans up", flush=True)
"""


def test_a_rank_whose_companion_is_killed_at_the_very_end_does_not_run_on_as_the_campaign(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", LAST, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert process.stdout == "[0, -9]\ncleans up\n", process.stderr
    assert "cleans up" not in (tmp_path / "run-0.txt").read_text()


@pytest.mark.timeout(1200)
def test_checkpoints_of_every_strategy_go_on_under_others() -> None:
    by_case = pairs.run(long=False)
    assert by_case.keys() == pairs.CASES.keys()
    assert {writer for writer in by_case["adamw"]} == {str(topology) for topology in pairs.TOPOLOGIES}


@pytest.mark.timeout(600)
def test_no_rank_holds_the_whole_state_while_it_saves_or_resumes() -> None:
    assert memory.run(("sync",)).keys() == {f"{strategy}, sync" for strategy in memory.STRATEGIES}
