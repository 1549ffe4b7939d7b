"""The scripts of campaigns/gpu run: the smallest is rehearsed on the CPU, and their measuring code is checked. By hand: `python -m
campaigns.gpu.SCRIPT --device cpu` for the others."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from campaigns.gpu import gpt, measuring, smoke

SCRIPTS = ("smoke", "ranks", "speed", "memory", "checkpoints", "resume", "fp8", "offload", "multi")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> measuring.Host:
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "ACCELERATE_USE_CPU",
    ):  # which `device` sets for the processes that a script starts
        monkeypatch.setenv(name, "")
    return measuring.device(argparse.Namespace(device="cpu", peak=None))


def report(place: measuring.Host, out: Path | None = None, seconds: float = 60.0) -> measuring.Report:
    return measuring.Report("trial", place, argparse.Namespace(seconds=seconds, out=out, only=None))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported_and_says_what_it_proves(name: str) -> None:
    script = importlib.import_module(f"campaigns.gpu.{name}")
    assert "Passes when" in script.__doc__ or "Passes when" in " ".join(script.__doc__.split())
    assert f"campaigns.gpu.{name} --device cpu" in script.__doc__


@pytest.mark.usefixtures("place")
def test_the_smoke_script_rehearses_a_training_as_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ["fp32, clip", "fp16, accumulate 2"]
    monkeypatch.setattr("sys.argv", ["smoke", "--device", "cpu", "--out", str(tmp_path), "--only", *cases])
    assert smoke.main() == 0
    record = json.loads((tmp_path / "smoke.json").read_text())
    assert record["verdict"] == "passed"
    assert sorted(record["cases"]) == sorted(cases)
    for figures in record["cases"].values():
        assert figures["losses_differ"] < 1e-4
        assert figures["waits_per_update"] == {"by hand": 0, "fabricate": 0}
    assert "a rehearsal" in capsys.readouterr().out


def test_figures_are_in_the_file_before_the_next_case_begins(place: measuring.Host, tmp_path: Path) -> None:
    trial = report(place, tmp_path)

    def second() -> dict[str, object]:
        assert json.loads((tmp_path / "trial.json").read_text())["cases"]["first"]["milliseconds"] == 5
        raise ValueError("this one breaks")

    trial.case("first", lambda: {"milliseconds": 5, "failed": []})
    trial.case("second", second)
    trial.case("third", lambda: {"failed": []})
    record = json.loads((tmp_path / "trial.json").read_text())
    assert record["cases"]["second"]["failed"] == ["ValueError: this one breaks"]
    assert list(record["cases"]) == ["first", "second", "third"]
    assert record["rehearsal"]
    assert trial.end(["case"], []) == 1


def test_a_script_begins_no_case_that_would_outlast_its_time_and_is_incomplete_then(place: measuring.Host) -> None:
    place.real = True  # type: ignore[misc]  # of this object: a rehearsal leaves nothing out for time
    trial = report(place, seconds=10.0)
    trial.case("short", lambda: {"failed": []}, takes=5)
    trial.case("long", lambda: {"failed": []}, takes=20)
    assert "left_out" in trial.cases["long"]
    assert trial.end(["case"], []) == 3


def test_the_idle_share_is_what_no_kernel_covers() -> None:
    assert measuring.idle_share([]) == 0
    assert measuring.idle_share([(0, 4), (2, 6), (8, 10)]) == pytest.approx(0.2)


def test_the_last_error_of_a_failed_start_is_named_and_not_torchruns_own() -> None:
    output = "[rank1]: RankError: rank 0 is gone\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert (
        measuring.last_error(argparse.Namespace(stdout=output, returncode=1))
        == "exit code 1: RankError: rank 0 is gone"
    )  # type: ignore[arg-type]


def test_the_floating_point_operations_of_an_update_are_those_of_its_matrix_products(place: measuring.Host) -> None:
    size = dataclasses.replace(gpt.SIZES["tiny"], rows=2)
    model = size.build(place.device)
    # The kernel that is counted; it computes the half that a causal mask hides as well, and so does the rule.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(size.rows, size.length, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == size.flops()


def test_a_process_that_takes_too_long_is_ended() -> None:
    sleeping = "import time; print('here', flush=True); time.sleep(60)"
    process = measuring.started([sys.executable, "-S", "-c", sleeping], 5)
    assert (process.returncode, process.stdout) == (124, "here\n")
