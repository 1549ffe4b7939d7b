"""Settings that depend on a validation or a metric that never occurs are refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, EarlyStopping, Trainer
from tests.support.regression import ROWS, Regression, fit


class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


class Steps(Regression):
    """Refuses to train."""

    def training_step(self, batch: Any) -> torch.Tensor:
        raise AssertionError("a step ran")


def refused(message: str, *plugins: Any, module: Any = None, **arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(module or Steps(), *plugins, **arguments)


@pytest.mark.parametrize("arguments", [{}, {"val": ROWS, "validate_every": None}, {"val": ROWS}])
def test_early_stopping_without_a_validation_is_refused(arguments: dict[str, Any]) -> None:
    refused("EarlyStopping.*: this fit runs no validation. Pass val= to fit", EarlyStopping(), **arguments)


@pytest.mark.parametrize("arguments", [{}, {"val": ROWS, "validate_every": None}, {"val": ROWS, "max_steps": 3}])
def test_a_plateau_without_a_validation_is_refused(arguments: dict[str, Any]) -> None:
    refused("and this fit has no validation; pass val= to fit and set validate_every", module=Plateau(), **arguments)


@pytest.mark.parametrize(
    "arguments", [{"validate_every": 500}, {"validate_every": "3 epochs", "max_steps": None, "max_epochs": 2}]
)
def test_a_validation_that_does_not_come_round_is_refused(arguments: dict[str, Any]) -> None:
    refused(r"validate_every='\d+ \w+' is longer than this fit of \d updates", val=ROWS, **arguments)


def test_the_default_in_a_fit_shorter_than_an_epoch_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    fit(val=ROWS)
    assert "validate_every='1 epoch' is longer than this fit of 2 updates" in capsys.readouterr().out
    fit(val=ROWS, max_steps=4)
    assert "is longer than this fit" not in capsys.readouterr().out


def test_data_smaller_than_the_batch_of_an_update_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    note = f"train has {len(ROWS)} rows, fewer than the 64 rows of an update, so each update has {len(ROWS)}"
    trainer = Trainer(max_steps=1, progress=False)
    trainer.fit(Regression(), ROWS, batch_size=64)
    assert note in capsys.readouterr().out
    trainer.fit(Regression(), ROWS, batch_size=len(ROWS))
    assert "fewer than" not in capsys.readouterr().out


def test_a_metric_of_a_validation_that_never_comes_keeps_no_checkpoint(tmp_path: Path) -> None:
    keep = {"best": 2, "metric": "val_loss"}
    refused(
        "keep: the best checkpoints are chosen by 'val_loss', but this fit has no validation",
        keep=keep,
        run_dir=tmp_path,
    )


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("val_accuracy", "keep: validation gives val_error, val_loss, but not 'val_accuracy'"),
        ("error", "keep: the best checkpoints are chosen by 'error', but validation gives val_error; use this name"),
    ],
)
def test_a_metric_that_validation_does_not_give_keeps_no_checkpoint(metric: str, message: str, tmp_path: Path) -> None:
    class Measures(Steps):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": 1.0, "error": 2.0}

    keep = {"best": 2, "metric": metric, "mode": "max"}
    refused(message, module=Measures(), val=ROWS, validate_every=1, validate_first=True, keep=keep, run_dir=tmp_path)


def test_while_a_metric_of_the_training_has_not_come_no_checkpoint_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(max_steps=4, save_every=1, keep={"best": 1, "metric": "acuracy"}, run_dir=tmp_path)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4
    text = "to be kept by 'acuracy', but no checkpoint has this metric yet, and until one has it, none is deleted"
    assert text in capsys.readouterr().err
