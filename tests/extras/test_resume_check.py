"""`fabricate verify-resume` on scripts that resume exactly and on ones that do not: it names the right fault."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabricate.selfcheck import checked_trainer, runner
from fabricate.selfcheck.plugins import _generators, _values
from fabricate.selfcheck.requests import Rehearsal, read_requests, write_requests

SCRIPT = Path(__file__).parents[1] / "scripts" / "resumable.py"


def verify(tmp_path: Path, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fabricate", "verify-resume", str(script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_an_exact_script_passes_on_two_ranks_and_its_own_files_stay_as_they_are(tmp_path: Path) -> None:
    process = verify(tmp_path, "--at", "4", "--nproc", "2", "--strategy", "fsdp", "--into", "kept", "--", "run")
    assert process.returncode == 0, process.stdout + process.stderr
    *starts, verdict = process.stdout.splitlines()
    for line, wanted in zip(
        starts, (r"whole +to step 10,", r"killed +to step 4 and into", r"resumed +from step 4 to step 10,"), strict=True
    ):
        assert re.match(wanted, line)
    assert verdict == "exact: the run that was resumed from step 4 ends bit for bit like the run that was never stopped"
    assert os.listdir(tmp_path) == ["kept"]
    assert len(list((tmp_path / "kept/notes-killed").glob("fit-0/killed-*"))) == 2
    events = (tmp_path / "kept/killed").rglob("events.jsonl")
    assert '"resumed"' in next(events).read_text()


def test_a_callback_that_forgets_and_a_generator_that_no_checkpoint_holds_are_named(tmp_path: Path) -> None:
    process = verify(tmp_path, "--at", "4", "--json", "run", "--forgetful", "--drawing", "seeded")
    assert process.returncode == 1, process.stdout + process.stderr
    report: Any = json.loads(process.stdout)
    assert (report["exact"], report["when"], report["resumed_from"]) == (False, "after the resume", 4)
    places = [(row["component"], row["name"]) for row in report["differences"]]
    assert places[:2] == [("plugin forgetful", "average"), ("train data", "own")]
    assert ("weights", "model/layers.0.weight") in places
    # What it saved is no fault of the one, and another process id is none of the other.
    assert not [place for place in places if place[0] == "plugin careful" or place[1] == "process"]
    assert report["differences"][0]["text"].endswith("before the kill, 0.0 after the resume")
    assert os.listdir(tmp_path) == []


def test_a_script_that_is_not_deterministic_is_told_so_before_its_resume_is_blamed(tmp_path: Path) -> None:
    process = verify(tmp_path, "--at", "4", "run", "--drawing", "unseeded")
    assert process.returncode == 1, process.stdout + process.stderr
    assert "not exact: the first difference is in train data, before the kill: own\n" in process.stdout
    assert "The two starts differ before the kill" in process.stdout
    assert re.search(r"weights +model/layers\.0\.weight +\d+ of 32 elements", process.stdout)
    assert "resumed " not in process.stdout.partition("not exact")[0]


def test_a_script_that_cannot_be_checked_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello'); raise SystemExit(3)")
    process = verify(tmp_path, "--at", "4", script=script)
    assert (process.returncode, process.stdout) == (2, "")
    assert 'exit code 3 in its start "whole"' in process.stderr
    assert process.stderr.endswith("hello\n")
    script.write_text("")
    process = verify(tmp_path, "--at", "4", script=script)
    assert (process.returncode, "ended without a fit" in process.stderr) == (2, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    process = verify(tmp_path, "--at", "4", "--into", "full", script=script)
    assert (process.returncode, "not an empty folder" in process.stderr) == (2, True)


def test_a_run_that_ends_before_the_planned_kill_is_told_so(tmp_path: Path) -> None:
    process = verify(tmp_path, "--at", "10", "run")
    assert process.returncode == 2
    assert "--at 10: the run has only 10 steps. Give a smaller step" in process.stderr


# -- what is requested of the fits and what they note


def test_a_run_directory_keeps_its_place_below_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    rehearsal = Rehearsal(runs="/else", notes="/notes", save_at=3)
    assert rehearsal.run_dir(Path("runs/first")) == Path("/else", *tmp_path.parts[1:], "runs/first")
    assert rehearsal.run_dir(Path("/runs/first")) == Path("/else/runs/first")
    assert read_requests(write_requests([rehearsal])) == [rehearsal]
    monkeypatch.setattr(runner, "request", rehearsal)
    assert checked_trainer.Trainer(run_dir="/runs/first").run_dir == Path("/else/runs/first")
    assert checked_trainer.Trainer().run_dir is None


class Keeper:
    def __init__(self) -> None:
        self.number = 1.5
        self.names = ["a"]
        self.table = {"x": (1, None), 2: b"y"}
        self.set = {"q", "p"}
        self.tensor = torch.ones(2)
        self.array = np.arange(3)
        self.generator = torch.Generator().manual_seed(1)
        self.function = print
        self.itself = self


def test_notes_hold_every_plain_value_and_change_with_it() -> None:
    keeper = Keeper()
    keeper.inner = Keeper()  # type: ignore[attr-defined]
    before = dict(_values(vars(keeper), ""))
    assert before["number"] == "1.5"
    assert before["table['x'][0]"] == "1"
    assert before["inner.names[0]"] == "'a'"
    assert not [path for path in before if "function" in path]
    changes = {
        "inner.names[1]": lambda: keeper.inner.names.append("b"),  # type: ignore[attr-defined]
        "table['x'][1]": lambda: keeper.table.update(x=(1, 0)),
        "set": lambda: keeper.set.add("r"),
        "tensor": lambda: keeper.tensor.mul_(2),
        "array": lambda: keeper.array.put(0, 9),
        "generator": lambda: torch.rand(1, generator=keeper.generator),
    }
    for path, change in changes.items():
        change()
        after = dict(_values(vars(keeper), ""))
        assert before.get(path) != after[path], path
        before = after


def test_generators_of_a_data_set_are_found_and_its_caches_are_not() -> None:
    keeper = Keeper()
    generators = dict(_generators([{"k": keeper}, torch.utils.data.TensorDataset(torch.ones(2))], "", set()))
    assert list(generators) == ["[0]['k'].generator"]
