"""Losses that are not finite, and the scaling that prevents them in half precision."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, FabricateError, Trainer, TrainModule
from tests.support.regression import Hears, equal, exploding, fit, weights

# --------------------------------------------------------------------------------------------------------------- loss scaling


def test_fp16_really_scales_the_loss() -> None:
    scales: list[Any] = []

    class Looks(Callback):
        def on_accumulate(self, trainer: Trainer, module: Any, loss: torch.Tensor) -> None:
            gradient = float(module.layers[2].bias.grad)
            scaler = trainer.accelerator.scaler
            assert scaler is not None
            scales.append((scaler.get_scale(), gradient))

        def on_before_step(self, module: Any) -> None:
            scales.append(float(module.layers[2].bias.grad))

    fit(None, Looks(), precision="fp16:init_scale=1024", max_steps=1)
    (scale, scaled), unscaled = scales
    assert scale == 1024
    assert scaled == pytest.approx(1024 * unscaled)


def test_an_overflow_under_fp16_skips_the_update_and_halves_the_scale(tmp_path: Path) -> None:
    hears = Hears()
    entries: list[Any] = []

    class Watch(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            entries.append((step, trainer.accelerator.scaler.get_scale()))  # type: ignore[union-attr]

        def on_step_skipped(self, module: Any) -> None:
            entries.append(weights(module))

        def on_before_step(self, module: Any) -> None:
            entries.append(weights(module))

    result = fit(
        exploding(1, gradient_only=True),
        Watch(),
        hears,
        precision="fp16:init_scale=1024",
        max_steps=3,
        run_dir=tmp_path,
    )
    assert hears.skips == [(1, "loss scale overflow")]
    assert [entry for entry in entries if isinstance(entry, tuple)] == [(1, 1024.0), (2, 512.0), (3, 512.0)]
    assert equal(entries[2], entries[3]), "weights changed in a skipped update"
    assert result.steps == 3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["reason"]) for event in events if event["event"] == "skipped"] == [
        (1, "loss scale overflow")
    ]


def test_the_scale_survives_a_resume(tmp_path: Path) -> None:
    fit(exploding(0, gradient_only=True), precision="fp16:init_scale=1024", max_steps=1, run_dir=tmp_path)
    scales: list[float] = []

    class Looks(Callback):
        def on_step(self, trainer: Trainer) -> None:
            scales.append(trainer.accelerator.scaler.get_scale())  # type: ignore[union-attr]

    fit(None, Looks(), precision="fp16:init_scale=1024", max_steps=2, run_dir=tmp_path)
    assert scales == [512.0]


# ------------------------------------------------------------------------------------------------------------ not a number


def test_a_loss_that_is_not_finite_stops_the_fit_with_the_remedy() -> None:
    with pytest.raises(
        FabricateError,
        match=r"the loss became inf in the updates up to step 2\. .* skip such updates with nonfinite='skip'",
    ):
        fit(exploding(1), max_steps=9, log_every=2)


def test_a_loss_that_is_not_finite_is_noticed_at_the_end_too(tmp_path: Path) -> None:
    with pytest.raises(FabricateError, match="the loss became inf"):
        fit(exploding(1), max_steps=2, log_every=100, run_dir=tmp_path)
    assert not (tmp_path / "model").exists()


class Root(TrainModule):
    """The gradient of a square root at nothing is infinite, the loss is not: from the third update on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.weight * (0.0 if self.trainer.step == 2 else 1.0)).sqrt().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("options", [{"save_every": 3, "max_steps": 9}, {"max_steps": 3}])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(
        FabricateError, match=r"weights are not finite after step 3 \(weight\), so no checkpoint of them is saved"
    ):
        fit(Root(), log_every=100, run_dir=tmp_path, **{"save_every": 2, **options})
    saved = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert saved == ([] if options["max_steps"] == 9 else ["step-00000002"])


def test_weights_that_are_not_finite_are_not_saved_in_the_background_either(tmp_path: Path) -> None:
    """What writes looks at its copies; by then the next loss may have ended the fit."""
    with pytest.raises(FabricateError, match=r"weights are not finite after step 3 \(weight\)|the loss became nan"):
        fit(Root(), log_every=100, run_dir=tmp_path, save="async", save_every=3, max_steps=9)
    assert not list(tmp_path.glob("checkpoints/*"))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["event"] == "save_failed"]
    assert "weights are not finite after step 3 (weight), so no checkpoint of them is saved" in failed["reason"]


def test_a_checkpoint_on_request_is_not_made_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 3:
                trainer.save(tmp_path / "mine")

    with pytest.raises(FabricateError, match=r"weights are not finite after step 3"):
        fit(Root(), Saves(), log_every=100, max_steps=9)
    assert not (tmp_path / "mine").exists()


def test_updates_that_are_not_finite_are_skipped_on_request() -> None:
    hears, module = Hears(), exploding(1)
    result = fit(module, hears, max_steps=3, nonfinite="skip")
    assert hears.skips == [(1, "non-finite gradients")]
    assert result.steps == 3
    assert all(torch.isfinite(weight).all() for weight in weights(module))


class Counting(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.log("rows", len(batch), reduce="sum")
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def on_step_skipped(self) -> None:
        self.log("skipped", 1, reduce="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_what_a_skipped_update_logs_is_left_out_and_what_its_hook_logs_is_recorded() -> None:
    rows = torch.ones(32, 3)
    rows[[5, 17]] = float("nan")
    result = Trainer(max_epochs=1, nonfinite="skip", progress=False).fit(Counting(), rows, batch_size=4, shuffle=False)
    assert (result.steps, result.metrics["epoch_rows"], result.metrics["epoch_skipped"]) == (6, 24, 2)
    assert math.isfinite(result.metrics["epoch_loss"])


def test_a_fit_whose_updates_were_all_skipped_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = torch.full((8, 3), 1e30)  # whose square is no float32
    trainer = Trainer(max_epochs=1, nonfinite="skip", progress=False)
    assert trainer.fit(Counting(), rows, batch_size=4).steps == 0
    assert "note: no update was applied: all 2 were skipped" in capsys.readouterr().err
