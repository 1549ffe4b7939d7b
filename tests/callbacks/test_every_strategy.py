"""Under every strategy, on two ranks: callbacks that report do so and change no weight, and those that cannot work are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import (
    ConfigurationError,
    DeviceStats,
    EarlyStopping,
    GradientNorms,
    ModelSummary,
    Profiler,
    SaveOnException,
    Throughput,
    Trainer,
    TrainModule,
    UnfreezeAt,
)
from fabricate.testing import run_ranks

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
ALL = ("ddp", "fsdp", "powersgd", "diloco:every=2", "zero1", "zero2", "zero3")
HIDING = ALL[3:]
"""Those that keep gradients to themselves."""


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.first(batch))) - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(strategy: str, run_dir: Path | None, *plugins: object) -> dict[str, float]:
    """The metrics of a fit of six updates, validation among them."""
    trainer = Trainer(
        strategy=strategy, max_epochs=1, run_dir=run_dir, log_every=2, seed=3, progress=False, plugins=plugins
    )
    return trainer.fit(Net(), ROWS, ROWS[:8], batch_size=2).metrics


def reports(directory: Path) -> dict[str, Any]:
    """By strategy: whether the metrics are those of a fit without callbacks, and what was reported; or why that was refused."""
    found: dict[str, Any] = {}
    for strategy in ALL:
        run_dir = directory / strategy.partition(":")[0]
        summary = ModelSummary()
        works = [
            summary,
            Profiler(wait=1, active=2),
            DeviceStats(),
            Throughput(peak=1e9),
            SaveOnException(),
            EarlyStopping(),
        ]
        works += [] if strategy in HIDING else [GradientNorms(every=1)]
        metrics, plain = fit(strategy, run_dir, *works), fit(strategy, None)
        norms = {name for name in metrics if name.startswith("grad_norm/")}
        same = {name: metrics[name] for name in plain} == plain
        refused = [_refused(strategy, plugin) for plugin in (GradientNorms(), UnfreezeAt({"first": 2}))]
        found[strategy] = same, [layer.name for layer in summary.layers], sorted(norms), refused
    return found


def _refused(strategy: str, plugin: object) -> str:
    if strategy not in HIDING:
        return ""
    with pytest.raises(ConfigurationError) as error:
        fit(strategy, None, plugin)
    return str(error.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("reports")
    return directory, run_ranks(reports, 2, directory, timeout=300)


@pytest.mark.parametrize("strategy", ALL)
def test_what_reports_does_so_and_leaves_the_weights_alone(
    found: tuple[Path, list[dict[str, Any]]], strategy: str
) -> None:
    directory, ranks = found
    for rank in ranks:
        same, layers, norms, _ = rank[strategy]
        assert same, "validation measures the same loss to the last bit"
        assert layers == ["first", "last"]
        assert norms == ([] if strategy in HIDING else ["grad_norm/first", "grad_norm/last"])
    run_dir = directory / strategy.partition(":")[0]
    assert (run_dir / "profile/operators-rank0.txt").exists()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = [line["clock"] for line in lines if line["stage"] == "train"][-1]
    assert {"process_memory_bytes", "host_memory_share", "tokens_per_second", "flops_per_second", "mfu"} <= clock.keys()


@pytest.mark.parametrize("strategy", HIDING)
def test_what_needs_gradients_is_refused_by_name_where_they_are_hidden(
    found: tuple[Path, list[dict[str, Any]]], strategy: str
) -> None:
    name = strategy.partition(":")[0]
    for rank in found[1]:
        norms, stages = rank[strategy][3]
        assert f"strategy={name!r} hides gradients from on_before_step, which GradientNorms hears" in norms
        assert f"strategy={name!r}" in stages
