"""The real W&B (offline), MLflow and Trackio: one run over a resume, with its hyper-parameters, images and text.

TensorBoard is in tests/training/test_tracking.py.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import wandb

from fabricate import Callback, Trainer
from tests.support.regression import ROWS, Regression, fit

PICTURE = np.zeros((4, 4, 3), np.uint8)
PAGE = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")


def run_page(library: str, trainer: Trainer) -> None:
    """Runs the lines about `library` that docs/trackers.md has for it."""
    (block,) = re.findall(r"```python no-run\n(.*?)```", PAGE, re.DOTALL)
    calls = [call for call in ast.parse(block).body if f"{library}." in ast.unparse(call)]
    assert calls
    names = {"trainer": trainer, "picture": PICTURE, library: sys.modules[library]}
    exec(compile(ast.Module(calls, []), "docs/trackers.md", "exec"), names)


class Draws(Callback):
    """Logs a picture and a text with a tracker's own object; keeps that object."""

    def __init__(self, name: str, log: Any) -> None:
        self.name, self.log = name, log
        self.own: Any = None

    def on_eval_end(self, trainer: Trainer) -> None:
        self.own = trainer.tracker(self.name)
        self.log(self.own, trainer.step)
        run_page(self.name, trainer)


def in_two_fits(name: str, log: Any, run_dir: Path, options: str = "") -> tuple[Any, Any]:
    """The tracker's own objects of a fit that stops after two updates, and of the one that continues from there."""
    own = []
    for steps in (2, 4):
        draws = Draws(name, log)
        settings = {"max_steps": steps, "log_every": 1, "validate_every": 2, "save_every": 2}
        fit(Regression(0.125), draws, val=ROWS, run_dir=run_dir, trackers=[f"{name}:project=mine{options}"], **settings)
        own.append(draws.own)
    return own[0], own[1]


def test_wandb_shows_two_fits_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    steps = []

    def log(own: Any, step: int) -> None:
        steps.append(own.step)
        own.log({"picture": wandb.Image(PICTURE), "sample": wandb.Html("text")}, step=step)

    try:
        first, second = in_two_fits("wandb", log, tmp_path / "wide")
    finally:
        wandb.teardown()  # its service
        os.environ.pop("WANDB_SERVICE", None)
    assert isinstance(second, wandb.Run)
    assert (first.id, first.name, first.project) == (second.id, second.name, second.project)
    assert (second.name, second.project) == ("wide", "mine")
    assert second.config["rate"] == 0.125
    folders = sorted((tmp_path / "wide" / "trackers" / "wandb").glob("offline-run-*"))
    assert [folder.name.rpartition("-")[2] for folder in folders] == [first.id] * 2
    assert 0 < steps[0] < steps[1], "the second fit continues where the first ended"
    for folder in folders:
        assert list(folder.rglob("*.png"))
        assert list(folder.rglob("*.html"))


def test_mlflow_shows_two_fits_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small distribution of MLflow has no database
    for name in ("MLFLOW_TRACKING_URI", "_MLFLOW_TELEMETRY_SESSION_ID"):
        monkeypatch.setenv(name, "")  # MLflow sets them itself
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())

    def log(own: Any, step: int) -> None:
        mlflow.log_image(PICTURE, f"picture-{step}.png")
        mlflow.log_text("text", "sample.txt")

    first, second = in_two_fits("mlflow", log, tmp_path / "wide", f",logging_dir={tmp_path / 'artifacts'}")
    assert first.info.run_id == second.info.run_id
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'mine'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "wide"
    assert run.data.params["rate"] == "0.125"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "picture-2.png",
        "picture-4.png",
        "sample.txt",
        "weights.png",
    }


class Fails(Callback):
    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            raise ZeroDivisionError("the user's own")


def test_mlflow_shows_a_fit_that_raised_as_failed_and_one_in_its_handler_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("MLFLOW_TRACKING_URI", "_MLFLOW_TELEMETRY_SESSION_ID"):
        monkeypatch.setenv(name, "")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    settings = {"max_steps": 4, "trackers": [f"mlflow:project=mine,logging_dir={tmp_path / 'artifacts'}"]}
    try:
        fit(Regression(), Fails(), run_dir=tmp_path / "first", **settings)
    except ZeroDivisionError:
        fit(Regression(), run_dir=tmp_path / "second", **settings)
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'mine'")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {"first": "FAILED", "second": "FINISHED"}


def test_wandb_shows_a_fit_that_raised_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []

    def finish(own: Any, exit_code: int | None = None, **options: Any) -> None:
        codes.append(exit_code)
        ended(own, exit_code, **options)

    ended = wandb.Run.finish
    monkeypatch.setattr(wandb.Run, "finish", finish)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    try:
        for plugins in ([Fails()], []):
            with pytest.raises(ZeroDivisionError) if plugins else contextlib.nullcontext():
                fit(Regression(), *plugins, max_steps=4, run_dir=tmp_path / str(len(plugins)), trackers=["wandb"])
    finally:
        wandb.teardown()
        os.environ.pop("WANDB_SERVICE", None)
    assert codes == [1, None]


def test_trackio_shows_two_fits_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it is read with the import
    import trackio

    def log(own: Any, step: int) -> None:
        own.log({"picture": trackio.Image(PICTURE), "sample": trackio.Markdown("text")}, step=step)

    first, second = in_two_fits("trackio", log, tmp_path / "wide")
    assert first.name == second.name == "wide"
    (database,) = (tmp_path / "trackio").glob("mine*.db")
    with sqlite3.connect(database) as connection:
        assert connection.execute("select count(distinct run_name) from metrics").fetchone() == (1,)
