"""events.jsonl records the start and end of every fit, its checkpoint, and the updates that a resume computes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded import FAILED, HOSTILE, SAVED, SKIPPED, STEPS, record
from tests.support.runs import events, metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("events") / "run"
    record(run_dir)
    return run_dir


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["event"] == kind]


def test_every_fit_says_where_it_began_and_how_it_ended(run: Path) -> None:
    first, second = of_kind(run, "started")
    assert (first["step"], first["epoch"], first["position"]) == (0, 0, 0)
    # One update was skipped, so that the checkpoint of step 4 is at the end of the first epoch.
    assert (second["step"], second["epoch"], second["position"]) == (SAVED, 1, 0)
    assert all(0 < each["seconds"] < 60 for each in (first, second))
    assert first["versions"].keys() == {"python", "fabricate", "torch", "accelerate", "numpy"}
    (failed,) = of_kind(run, "failed")
    assert (failed["step"], failed["reason"]) == (FAILED, f"RuntimeError: {HOSTILE} fell over")
    assert [(ended["step"], ended["reason"]) for ended in of_kind(run, "ended")] == [(STEPS, "max_steps")]
    assert [skipped["step"] for skipped in of_kind(run, "skipped")] == [SKIPPED]


def test_the_data_s_order_is_described(run: Path) -> None:
    described = of_kind(run, "started")[0]["data"]
    assert len(described.pop("fingerprint")) == 16
    assert described.pop("attributes").keys() == {"tensors"}
    assert described == {
        "kind": "dataset",
        "drawn": "permutation",
        "seed": 1,
        "units": 18,
        "limit": None,
        "drop_last": False,
        "batch_size": 4,
        "accumulation": 1,
        "ranks": 1,
        "ranks_per_row": 1,
        "indices": None,
    }


def test_a_resume_records_what_is_computed_again(run: Path) -> None:
    (repeated,) = of_kind(run, "repeated")
    (failed,) = of_kind(run, "failed")
    assert (repeated["step"], repeated["through"]) == (SAVED, FAILED - 1)  # it failed before step 7 was logged
    assert repeated["seconds"] > 0
    assert repeated["until"] <= failed["time"] <= repeated["time"]
    steps = [line["step"] for line in metrics(run) if line["stage"] == "train"]
    assert steps == list(range(1, STEPS + 1))


def test_an_evaluation_says_how_long_it_took(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in lines if "evaluation_seconds" in line["clock"]} == {"validate"}
    assert all(0 < line["clock"]["evaluation_seconds"] < 60 for line in lines if line["stage"] == "validate")
