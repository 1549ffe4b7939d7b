"""Checkpoints of weights alone: small, usable for evaluation and to load the best weights, but not to resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fabricate import CheckpointError, ConfigurationError, SaveOnException, Trainer, TrainModule
from fabricate.cli.main import main
from fabricate.testing import run_ranks

ROWS = torch.arange(24.0).reshape(8, 3) / 24


class Net(TrainModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": self.training_step(batch)}

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1.0)  # so that the loss does not fall in every epoch


def fit(run_dir: Path, weights_only: bool = True, module: Any = None, **options: Any) -> Any:
    arguments: dict[str, Any] = {"max_epochs": 3, "seed": 1, "progress": False, "save": "async"} | options
    resume = arguments.pop("resume", "auto")
    trainer = Trainer(
        run_dir=run_dir, save_weights_only=weights_only, keep={"last": 1, "best": 1, "mode": "min"}, **arguments
    )
    return trainer, trainer.fit(module or Net(), ROWS, ROWS, batch_size=2, resume=resume)


def sizes(run_dir: Path) -> int:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return sum(file.stat().st_size for file in newest.iterdir())


def test_weights_only_checkpoints_hold_the_best_epoch_and_nothing_that_a_resume_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, result = fit(tmp_path / "small")
    assert "saves weights every epoch" in capsys.readouterr().out
    fit(tmp_path / "whole", weights_only=False)
    assert sizes(tmp_path / "small") < 0.6 * sizes(tmp_path / "whole")
    best = result.best_checkpoint
    loaded = Net.load_from_checkpoint(best)
    assert trainer.validate(loaded, ROWS, batch_size=2)["val_loss"] == pytest.approx(result.best_score)
    assert trainer.test(Net(), ROWS, "best", batch_size=2)["test_loss"] == pytest.approx(result.best_score)
    state = json.loads((best / "state.json").read_text(encoding="utf-8"))
    assert sorted(state) == ["module", "weights_only"]
    assert CliRunner().invoke(main, ["ckpt", "verify", str(best)]).exit_code == 0
    assert CliRunner().invoke(main, ["ckpt", "inspect", str(best)]).exit_code == 0


def test_a_fit_does_not_resume_from_a_weights_only_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path)
    for weights_only in (True, False):
        with pytest.raises(
            CheckpointError, match=r"holds weights only, so a fit cannot resume from it. Start a new fit"
        ):
            fit(tmp_path, weights_only)
    _, result = fit(tmp_path, resume="never")
    assert result.steps == 12
    with pytest.raises(
        ConfigurationError, match=r"SaveOnException.*save_weights_only=True leaves out what a resume needs"
    ):
        fit(tmp_path, plugins=[SaveOnException()], resume="never")


def test_the_best_of_shards_is_what_the_fit_ends_with(tmp_path: Path) -> None:
    run_ranks(sharded, 2, tmp_path)
    loaded, (best,) = Net.load_from_checkpoint(tmp_path), (tmp_path / "best").read_text(encoding="utf-8").split()
    score = Trainer(progress=False).validate(Net.load_from_checkpoint(best), ROWS, batch_size=2)["val_loss"]
    assert float((tmp_path / "score").read_text(encoding="utf-8")) == pytest.approx(score, rel=1e-4)
    assert loaded.state_dict().keys() == Net().state_dict().keys()


def sharded(run_dir: Path) -> None:
    _, result = fit(run_dir, strategy="fsdp", load_best=True, save="sync")
    (run_dir / "best").write_text(str(result.best_checkpoint), encoding="utf-8")
    (run_dir / "score").write_text(str(result.best_score), encoding="utf-8")
