"""Two real workers of Ray on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from fabricate_ray import RayTrain, resume_from_ray
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from safetensors.torch import load_file

from fabricate import Callback, ConfigurationError, FitResult, Trainer, TrainModule

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]  # Ray warns about itself
UPDATES = 12


class Regression(TrainModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(batch).square().mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Dies(Callback):
    """The worker of rank 1 is killed after update `at`, once."""

    def __init__(self, at: int, mark: Path) -> None:
        self.at, self.mark = at, mark

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == self.at and ray.train.get_context().get_world_rank() == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fit(config: dict[str, Any]) -> FitResult:
    """What every worker runs."""
    if "first" in config:  # another fit before, in the same workers
        fit({**config.pop("first"), "run_dir": config["run_dir"] + "-first"})
    run_dir = Path(config["run_dir"])
    plugins: list[Any] = [RayTrain(look_every=2)] if config.get("ray", True) else []
    if "dies_at" in config:
        plugins.append(Dies(config["dies_at"], run_dir.with_suffix(".died")))
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        plugins=plugins,
        strategy=config.get("strategy", "auto"),
        max_steps=UPDATES,
        run_dir=run_dir,
        save_every=4,
        validate_every=6,
        log_every=2,
        seed=5,
        global_batch_size=8,
        progress=False,
    )
    resume = resume_from_ray(run_dir) if config.get("ray", True) else "auto"
    return trainer.fit(Regression(config.get("dropout", 0.0)), rows, rows[:10], batch_size=2, resume=resume)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process without Ray."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    fit({"run_dir": str(run_dir), "ray": False})
    return run_dir


def train(folder: Path, config: dict[str, Any], *, workers: int | tuple[int, int] = 2, failures: int = 0) -> Result:
    trainer = TorchTrainer(
        fit,
        train_loop_config={"run_dir": str(folder / "run"), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), name="r", failure_config=FailureConfig(max_failures=failures)
        ),
    )
    handler = signal.getsignal(signal.SIGINT)
    try:
        return trainer.fit()
    finally:
        signal.signal(signal.SIGINT, handler)  # Ray leaves one of its own


def test_a_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = train(whole, {"dropout": 0.2})
    again = train(killed, {"dropout": 0.2, "dies_at": 7}, failures=1)
    assert (killed / "run.died").exists()
    for name, value in weights(whole / "run").items():
        assert torch.equal(value, weights(killed / "run")[name]), name
    for each in (result, again):
        assert each.metrics is not None
        assert each.checkpoint is not None
        assert each.metrics["step"] == UPDATES
        assert "val_loss" in each.metrics
        assert Path(each.checkpoint.path).name == f"run-step-{UPDATES:08}"


def test_another_number_of_workers_goes_on_with_the_same_batches(tmp_path: Path, undisturbed: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError):
        train(tmp_path, {"dies_at": 6})
    assert not (tmp_path / "run" / "model").exists()
    train(tmp_path, {}, workers=1)
    for name, value in weights(undisturbed).items():
        assert torch.allclose(value, weights(tmp_path / "run")[name], rtol=0, atol=1e-5), name


def test_one_group_of_workers_fits_replicas_and_then_shards(tmp_path: Path, undisturbed: Path) -> None:
    train(tmp_path, {"strategy": "fsdp", "first": {"strategy": "ddp"}})
    for run_dir in (tmp_path / "run-first", tmp_path / "run"):
        for name, value in weights(undisturbed).items():
            assert torch.allclose(value, weights(run_dir)[name], rtol=0, atol=1e-5), name


def test_a_run_directory_that_ray_deletes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError, match="is in the folder of Ray's session"):
        train(tmp_path, {"run_dir": "relative"}, workers=1)


def test_the_plugin_outside_of_ray_says_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="this process is not one of its workers; leave the plugin out"):
        Trainer(plugins=["ray"], max_steps=1, run_dir=tmp_path, progress=False).fit(
            Regression(0.0), torch.randn(4, 4), batch_size=2
        )
