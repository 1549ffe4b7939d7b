"""A script that a check runs has its own folder and arguments, and a Trainer that follows the check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fabricate import Trainer
from fabricate.selfcheck.requests import Rehearsal, Trial, read_requests, start_script, write_requests

SCRIPT = """
import json, sys
assert __name__ == "__main__"
if "--first" in sys.argv and "helper" not in sys.modules:
    assert not {"torch", "transformers", "accelerate"} & set(sys.modules)  # it may set variables that they read on import
import fabricate, helper
from fabricate import Trainer
assert Trainer is fabricate.Trainer is helper.Trainer
class Own(Trainer): ...
dirs = [str(kind(run_dir="/runs/a").run_dir) for kind in (Trainer, Own, helper.Trainer)]
print(json.dumps([__file__, sys.argv, sys.path[0], dirs]))
"""


def run(folder: Path, requests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(start_script(folder)), requests, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def rehearsal(runs: str) -> Rehearsal:
    return Rehearsal(runs=runs, notes="/notes", save_at=3)


def test_a_script_finds_its_place_and_the_trainer_of_each_request(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    script = own / "train.py"
    script.write_text(SCRIPT)
    (own / "helper.py").write_text("from fabricate import Trainer\n")
    requests = write_requests([rehearsal("/one"), rehearsal("/two")])
    process = run(tmp_path, requests, "own/train.py", "--first", "x")
    assert process.returncode == 0, process.stderr
    place = [str(script), [str(script), "--first", "x"], str(own)]
    assert [json.loads(line) for line in process.stdout.splitlines()] == [
        [*place, ["/one/runs/a"] * 3],
        [*place, ["/two/runs/a"] * 3],
    ]


def test_the_exit_code_of_a_script_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert run(tmp_path, write_requests([rehearsal("/one")]), "train.py", "75").returncode == 75
    trial = Trial(notes=str(tmp_path), begin="", steps=1, micro_batch=1, accumulation=1)
    assert run(tmp_path, write_requests([trial, trial]), "train.py", "0").returncode == 0
    assert run(tmp_path, write_requests([trial, trial]), "train.py", "3").returncode == 3


def test_requests_come_back_from_the_command_line_as_they_were() -> None:
    requests = [rehearsal("/one"), Trial(notes="a", begin="b", steps=1, micro_batch=2, accumulation=3)]
    assert read_requests(write_requests(requests)) == requests


def test_a_trainer_in_the_same_process_is_the_usual_one() -> None:
    """Only the runner replaces it, in a process of its own."""
    assert Trainer.__module__ == "fabricate.trainer"
    assert str(Trainer(run_dir="/runs/a").run_dir) == "/runs/a"
