"""`fabricate report` prints the content of a run's files, sums that can be checked by hand, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import TensorDataset

from fabricate import Trainer, TrainModule
from fabricate.cli.main import main

STEPS = 6


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = (self.layer(batch[0]) - 1).square().mean()
        return loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"val_loss": self.training_step(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `STEPS` updates in two goes."""
    root = tmp_path_factory.mktemp("report") / "run"
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 4))
    for steps in (4, STEPS):
        trainer = Trainer(
            max_steps=steps, seed=1, run_dir=root, save_every=2, validate_every=2, log_every=2, progress=False
        )
        trainer.fit(Net(), data, data, batch_size=4)
    return root


@pytest.fixture
def run_dir(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def report(run_dir: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["report", str(run_dir), *options])


def content(run_dir: Path) -> dict[str, Any]:
    shown = report(run_dir, "--json")
    assert shown.exit_code == 0, shown.stderr
    values: dict[str, Any] = json.loads(shown.output)
    return values


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_report_agrees_with_the_files(run: Path) -> None:
    values = content(run)
    assert values["plan"] == {
        "strategy": "single",
        "world_size": 1,
        "precision": "fp32",
        "global_batch_size": 4,
        "total_steps": 6,
    }
    assert values["progress"] == {"steps": 6, "epoch": 1, "samples": 24, "skipped": 0}
    assert values["checkpoints"]["count"] == 3
    assert values["checkpoints"]["newest"] == "step 6"
    size = sum(f.stat().st_size for f in run.glob("checkpoints/step-*/*") if f.name != "manifest.json")
    assert values["checkpoints"]["size"] == size
    recorded = lines(run / "metrics.jsonl")
    losses = {line["step"]: line["metrics"]["val_loss"] for line in recorded if "val_loss" in line["metrics"]}
    lowest = min(losses, key=lambda step: losses[step])
    assert values["metrics"]["val_loss"]["lowest"] == {"value": losses[lowest], "step": lowest}
    assert values["metrics"]["val_loss"]["last"] == {"value": losses[6], "step": 6}
    saved = json.loads((run / "checkpoints/step-00000006/manifest.json").read_text())["manifest"]["progress"]
    assert values["time"]["in_fit"] == saved["seconds"] >= recorded[-1]["clock"]["seconds"]
    assert [incident["event"] for incident in values["incidents"]] == ["resumed", "note"]
    clocks = [line["clock"] for line in recorded if line["stage"] == "train"]
    laps = [clock["seconds_per_step"] for clock in clocks]  # of two steps each
    assert values["rates"]["seconds_per_step"] == pytest.approx(sum(laps) / len(laps))
    waited = sum(clock["data_share"] * lap for clock, lap in zip(clocks, laps, strict=True)) / sum(laps)
    assert values["shares"] == {"waiting_for_data": pytest.approx(waited)}


def test_the_page_says_the_same_in_words(run: Path) -> None:
    page = report(run).output
    for line in (
        r"  plan +strategy single, world size 1, precision fp32, global batch size 4, total steps 6",
        r"  progress +steps 6, epoch 1, samples 24, skipped 0",
        r"  time +in fit \d+\.\d s, saving \d+\.\d s, from 20\d\d-",
        r"  rates +steps per second [\d,.]+, samples per second [\d,.]+, seconds per step",
        r"  shares +waiting for data \d+\.\d %",
        r"  checkpoints +count 3, newest step 6, size [\d.]+ KiB",
        r"  resumed +step 4, path step-00000004",
        r"  val_loss +[\d.]+ +[\d.]+ at step \d +[\d.]+ at step \d",
    ):
        assert re.search(f"^{line}", page, re.MULTILINE), line


def test_intervals_count_as_long_as_they_took(run_dir: Path) -> None:
    def line(step: int, seconds: float, data: float, communication: float | None = None) -> str:
        clock = {"time": 1.0, "seconds": 0.0, "seconds_per_step": seconds, "steps_per_second": 1 / seconds}
        clock |= {"samples_per_second": 8 / seconds, "data_share": data}
        clock |= {} if communication is None else {"communication_share": communication}
        return json.dumps({"step": step, "epoch": 0, "stage": "train", "metrics": {"loss": 1.0}, "clock": clock}) + "\n"

    (run_dir / "metrics.jsonl").write_text(line(10, 1.0, 0.5) + line(20, 3.0, 0.1, 0.2))
    values = content(run_dir)
    assert values["rates"] == {"steps_per_second": 0.5, "samples_per_second": 4.0, "seconds_per_step": 2.0}
    assert values["shares"] == pytest.approx({"waiting_for_data": (10 * 0.5 + 30 * 0.1) / 40, "communication": 0.2})
    assert values["progress"]["steps"] == 20


def test_incidents_that_are_alike_are_told_once(run_dir: Path) -> None:
    events = [
        {"event": "skipped", "step": 3, "reason": "loss scale overflow", "time": 1.0},
        {"event": "skipped", "step": 9, "reason": "loss scale overflow", "time": 2.0},
        {"event": "skipped", "step": 9, "reason": "non-finite gradients", "time": 2.0},
        {"event": "rejected", "step": 0, "path": "step-00000007", "reason": "data: block 0", "time": 3.0},
        {"event": "saved", "step": 10, "path": "step-00000010", "time": 4.0},
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert content(run_dir)["incidents"] == [
        {"event": "skipped", "step": 3, "reason": "loss scale overflow", "count": 2, "last_step": 9},
        {"event": "skipped", "step": 9, "reason": "non-finite gradients", "count": 1},
        {"event": "rejected", "step": 0, "reason": "data: block 0", "path": "step-00000007", "count": 1},
    ]
    assert "skipped     step 3, reason loss scale overflow, last_step 9 x 2" in report(run_dir).output


def test_what_was_not_recorded_is_left_out(run_dir: Path, tmp_path: Path) -> None:
    for name in ("plan.json", "events.jsonl"):
        (run_dir / name).unlink()
    shutil.rmtree(run_dir / "checkpoints")
    values = content(run_dir)
    assert (values["plan"], values["checkpoints"], values["incidents"]) == ({}, {}, [])
    assert (values["progress"], "saving" in values["time"]) == ({"steps": 6}, False)
    (run_dir / "metrics.jsonl").unlink()
    shown = report(run_dir)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "holds no run" in shown.stderr


def test_damaged_checkpoints_are_counted_and_a_line_that_was_being_written_is_not(run_dir: Path) -> None:
    (run_dir / "checkpoints/step-00000006/manifest.json").unlink()
    (run_dir / "checkpoints/.bad-step-00000005").mkdir()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "epoch": 1, "stage": "tr')
    values = content(run_dir)
    checkpoints = values["checkpoints"]
    assert (checkpoints["count"], checkpoints["newest"], checkpoints["damaged"], checkpoints["set_aside"]) == (
        2,
        "step 4",
        1,
        1,
    )
    assert values["progress"]["steps"] == 6


@pytest.mark.parametrize(
    ("name", "text"), [("metrics.jsonl", "nonsense\n"), ("events.jsonl", '{"a": 1}\n'), ("plan.json", "[]")]
)
def test_a_file_that_is_no_run_s_is_named(name: str, text: str, run_dir: Path) -> None:
    (run_dir / name).write_text(text)
    shown = report(run_dir)
    assert shown.exit_code == 2
    assert f"{run_dir / name}" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_a_report_needs_no_torch(run: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from fabricate.cli.main import main
main(["report", {str(run)!r}], standalone_mode=False)
"""
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "val_loss" in process.stdout


class Diverges(Net):
    """Its val_loss is nan from step 4 on, and val_empty always."""

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": 0.5 if self.trainer.step < 4 else float("nan"), "empty": float("nan")}


def test_a_metric_that_ends_with_nan_is_reported_as_nan(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(16, 4))
    trainer = Trainer(max_steps=4, seed=1, run_dir=tmp_path / "run", validate_every=2, sanity_batches=0, progress=False)
    trainer.fit(Diverges(), data, data, batch_size=4)
    metrics = content(tmp_path / "run")["metrics"]
    half = {"value": 0.5, "step": 2}
    assert metrics["val_loss"] == {"last": {"value": "nan", "step": 4}, "lowest": half, "highest": half}
    assert metrics["val_empty"] == {"last": {"value": "nan", "step": 4}, "lowest": None, "highest": None}
    text = report(tmp_path / "run").output
    assert re.search(r"val_loss +nan +0\.5 at step 2 +0\.5 at step 2", text)
    assert re.search(r"val_empty +nan +none is finite +none is finite", text)
