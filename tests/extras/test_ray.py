"""Two real workers of Ray on the CPU, each on its own node, of which one is removed at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from fabricate_ray import RayTrain, resume_from_ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from safetensors.torch import load_file

from fabricate import Callback, ConfigurationError, FitResult, Trainer, TrainModule

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]  # Ray warns about itself
UPDATES = 12
FITS: dict[str, dict[str, Any]] = {"dropout": {"dropout": 0.2}, "replicas": {}, "shards": {"strategy": "fsdp"}}
EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "ray_sweep.py"


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
    """The worker of rank 1 gets SIGTERM two updates before `at`, and is killed after update `at`, once."""

    def __init__(self, at: int, mark: Path) -> None:
        self.at, self.mark = at, mark

    def on_step(self, trainer: Trainer, step: int) -> None:
        if ray.train.get_context().get_world_rank() == 1 and not self.mark.exists():
            if step == self.at - 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(2)  # until Ray's main thread has let Python handle it
            if step == self.at:
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class SlowRows(Callback):
    """Leaves the rows of every update in a file, and takes its time from one update on."""

    def __init__(self, folder: Path, slow_from: int) -> None:
        self.folder, self.slow_from = folder, slow_from
        self.rows: list[float] = []

    def on_accumulate(self, batch: torch.Tensor, weight: Any) -> None:
        self.rows += batch[:, 0].tolist() if weight else []

    def on_step(self, trainer: Trainer, step: int) -> None:
        rank, ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
        (self.folder / f"update-{step:02}-of-{ranks}-{rank}.json").write_text(json.dumps(self.rows))
        self.rows = []
        if ranks == 2 and step >= self.slow_from:
            time.sleep(1)


def fit(config: dict[str, Any]) -> FitResult:
    """A fit in a worker of Ray, or here."""
    run_dir = Path(config["run_dir"])
    plugins: list[Any] = [RayTrain(look_every=1)] if config.get("ray", True) else []
    if "dies_at" in config:
        plugins.append(Dies(config["dies_at"], run_dir.with_suffix(".died")))
    if "seen" in config:
        plugins.append(SlowRows(Path(config["seen"]), slow_from=3))
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        plugins=plugins,
        strategy=config.get("strategy", "auto"),
        max_steps=UPDATES,
        run_dir=run_dir,
        save_every=config.get("save_every", 4),
        validate_every=6,
        log_every=2,
        seed=5,
        global_batch_size=8,
        progress=False,
    )
    resume = resume_from_ray(run_dir) if config.get("ray", True) else "auto"
    return trainer.fit(Regression(config.get("dropout", 0.0)), rows, rows[:10], batch_size=2, resume=resume)


def several_fits(config: dict[str, Any]) -> None:
    """In every worker: one that is refused, then replicas twice, then shards."""
    with pytest.raises(ConfigurationError, match="is in the folder of Ray's session"):
        fit({"run_dir": "relative"})
    for name, options in FITS.items():
        fit({"run_dir": f"{config['folder']}/{name}", **options})


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """Two nodes with a core each."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process without Ray."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    fit({"run_dir": str(run_dir), "ray": False, "seen": str(run_dir.parent)})
    return run_dir


def train(
    folder: Path,
    config: dict[str, Any],
    *,
    function: Callable[[dict[str, Any]], Any] = fit,
    workers: int | tuple[int, int] = 2,
    failures: int = 0,
) -> Result:
    trainer = TorchTrainer(
        function,
        train_loop_config=config,
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


@pytest.fixture(scope="module")
def one_group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fits that two workers made one after another."""
    folder = tmp_path_factory.mktemp("one_group")
    train(folder, {"folder": str(folder)}, function=several_fits)
    return folder


def test_one_group_of_workers_fits_replicas_and_then_shards(one_group: Path, undisturbed: Path) -> None:
    for name in ("replicas", "shards"):
        for parameter, value in weights(undisturbed).items():
            assert torch.allclose(value, weights(one_group / name)[parameter], rtol=0, atol=1e-5), (name, parameter)


def test_a_worker_that_is_killed_costs_nothing(tmp_path: Path, one_group: Path) -> None:
    run_dir = tmp_path / "run"
    result = train(tmp_path, {"run_dir": str(run_dir), "dropout": 0.2, "dies_at": 7}, failures=1)
    assert run_dir.with_suffix(".died").exists()
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (saved,) = {event["step"] for event in events if event["event"] == "saved"} - {4, 8, 12}
    assert saved in (5, 6), "after the SIGTERM, at the next update"
    assert [Path(event["path"]).name for event in events if event["event"] == "resumed"] == [f"step-{saved:08}"]
    for name, value in weights(one_group / "dropout").items():
        assert torch.equal(value, weights(run_dir)[name]), name
    assert result.metrics is not None
    assert result.checkpoint is not None
    assert result.metrics["step"] == UPDATES
    assert "val_loss" in result.metrics
    assert Path(result.checkpoint.path).name == f"run-step-{UPDATES:08}"


def test_the_plugin_outside_of_ray_says_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="but this process is neither a worker nor a trial of Ray; leave the plugin out"
    ):
        Trainer(plugins=["ray"], max_steps=1, run_dir=tmp_path, progress=False).fit(
            Regression(0.0), torch.randn(4, 4), batch_size=2
        )


def test_a_sweep_of_four_trials_finds_the_best_and_its_checkpoint(tmp_path: Path, cluster: Cluster) -> None:
    process = subprocess.run(
        [sys.executable, str(EXAMPLE), "--folder", str(tmp_path)],
        env=os.environ | {"RAY_ADDRESS": cluster.address, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    losses = {}
    for rate in ("0.001", "0.01", "0.1", "0.3"):
        lines = (tmp_path / f"lr-{rate}" / "metrics.jsonl").read_text().splitlines()
        losses[rate] = [json.loads(line)["metrics"]["val_loss"] for line in lines if "val_loss" in line][-1]
        assert f"lr {rate}: val_loss {losses[rate]:.3g} after 32 steps" in process.stdout
        assert (tmp_path / f"lr-{rate}" / "model" / "model.safetensors").exists()
    best, copy = re.findall(r"^best: lr (\S+), checkpoint (.*)$", process.stdout, re.MULTILINE)[0]
    assert best == min(losses, key=lambda rate: losses[rate])
    original = tmp_path / f"lr-{best}" / "checkpoints" / "step-00000032" / "manifest.json"
    assert (Path(copy) / "manifest.json").read_bytes() == original.read_bytes()


def rows_of_updates(folder: Path) -> list[list[float]]:
    """By update, the rows of all ranks of the group of workers that made it last."""
    by_update: list[list[float]] = []
    for step in range(1, UPDATES + 1):
        files = sorted(folder.glob(f"update-{step:02}-of-*.json"))  # of one rank before those of two
        last = files[:1] if "-of-1-" in files[0].name else files
        by_update.append(sorted(row for file in last for row in json.loads(file.read_text())))
    return by_update


def taken_away(cluster: Cluster, run_dir: Path) -> int:
    """Drain the second node as a cloud does that takes it back, wait for the save, and end its processes. The step of the save."""
    deadline = time.monotonic() + 300
    while not list(run_dir.parent.glob("update-03-of-2-*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (node,) = cluster.worker_nodes
    drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    drain += ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back"]
    subprocess.run([*drain, "--deadline-remaining-seconds", "10"], check=True, capture_output=True, timeout=60)
    while not (saved := list(run_dir.glob("checkpoints/step-*/manifest.json"))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.5)  # an update goes by: training continues
    cluster.remove_node(node, allow_graceful=False)
    return int(saved[0].parent.name.removeprefix("step-"))


def test_workers_go_from_two_to_one_when_a_node_is_taken_away(
    tmp_path: Path, cluster: Cluster, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of this file: the second node does not come back."""
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.2")
    config = {"run_dir": str(tmp_path / "run"), "seen": str(tmp_path), "save_every": None}
    with ThreadPoolExecutor(1) as thread:
        removed = thread.submit(taken_away, cluster, tmp_path / "run")
        train(tmp_path, config, workers=(1, 2))
    saved = removed.result()
    assert 3 < saved < UPDATES
    assert list(tmp_path.glob(f"update-{saved + 1:02}-of-2-*.json")), "trained on after the save"
    assert not list(tmp_path.glob(f"update-{saved:02}-of-1-*.json")), "began after the save"
    assert rows_of_updates(tmp_path) == rows_of_updates(undisturbed.parent)
    for name, value in weights(undisturbed).items():
        assert torch.allclose(value, weights(tmp_path / "run")[name], rtol=0, atol=1e-5), name
