"""The conformance kit, on replicas and on shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fabricate_ema import EMA
from torch.nn.functional import linear, mse_loss

from fabricate import Callback, ConfigurationError, LearningRateFinder, Trainer, TrainModule
from fabricate.testing import check_plugin


def test_it_keeps_what_a_plugin_promises() -> None:
    # Not neutral: what is validated is the average.
    check_plugin("ema:decay=0.9", neutral=False, strategies=("single", "ddp", "fsdp"))


class Doubling(torch.nn.Module):
    """Computes the weight that it uses once, when it is put into eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))
        self.kept = torch.eye(4)

    def train(self, mode: bool = True) -> Doubling:
        if not mode:
            self.kept = 2 * self.weight.detach()
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, 2 * self.weight if self.training else self.kept)


class Model(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Doubling()
        self.average = torch.eye(4)
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.layer(batch), 3 * batch)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(batch)}

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["val_loss"])

    def on_step(self) -> None:
        self.average = 0.9 * self.average + 0.1 * self.layer.weight.detach()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_a_layer_that_computes_its_weight_in_eval_mode_takes_the_average() -> None:
    module, x = Model(), torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(max_epochs=3, seed=0, sanity_batches=0, progress=False, plugins=["ema:decay=0.9"])
    trainer.fit(module, x, x, batch_size=8)
    assert module.losses[-1] == pytest.approx(mse_loss(linear(x, 2 * module.average), 3 * x).item(), rel=1e-5)


@pytest.mark.parametrize("finder_first", [True, False])
def test_a_range_test_leaves_the_weights_of_before_in_any_order_of_plugins(finder_first: bool) -> None:
    module, x = Model(), torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    plugins: list[Any] = [LearningRateFinder(num_training_steps=8), "ema:decay=0.9"]
    Trainer(max_steps=8, progress=False, plugins=plugins if finder_first else plugins[::-1]).fit(
        module, x, batch_size=8
    )
    assert torch.equal(module.layer.weight, torch.eye(4))


class Sees(Callback):
    """The weights that the hooks of an evaluation find."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_eval_start(self, module: Any) -> None:
        self.seen.append(module.layer.weight.detach().clone())

    on_eval_end = on_eval_start


@pytest.mark.parametrize("ema_first", [True, False])
def test_hooks_of_an_evaluation_find_the_average_in_any_order_of_plugins(ema_first: bool) -> None:
    module, sees, x = Model(), Sees(), torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    plugins: list[Any] = ["ema:decay=0.9", sees] if ema_first else [sees, "ema:decay=0.9"]
    trainer = Trainer(max_epochs=1, seed=0, sanity_batches=0, progress=False, plugins=plugins)
    trainer.fit(module, x, x, batch_size=8)
    assert len(sees.seen) == 2
    for seen in sees.seen:
        torch.testing.assert_close(seen, module.average)
    assert not torch.equal(module.layer.weight, sees.seen[0])


def test_two_averages_are_refused_and_the_module_can_be_fitted_afterwards() -> None:
    module, x = Model(), torch.randn(16, 4)
    with pytest.raises(ConfigurationError, match="each of them averages the weights, but a fit ends with one"):
        Trainer(max_steps=1, progress=False, plugins=["ema:decay=0.9", EMA(0.5)]).fit(module, x, batch_size=8)
    for _ in range(2):
        Trainer(max_steps=1, progress=False, plugins=[EMA(0.5)]).fit(module, x, batch_size=8)


class SavesAtTheEnd(Model):
    def on_fit_end(self) -> None:
        assert self.trainer is not None
        assert self.trainer.run_dir is not None
        self.trainer.save(self.trainer.run_dir / f"end-{self.trainer.step}")


def test_a_checkpoint_that_the_module_saves_at_the_end_holds_the_trained_weights_and_is_resumed(tmp_path: Path) -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))

    def fit(name: str, steps: int, **options: Any) -> torch.Tensor:
        module = SavesAtTheEnd()
        trainer = Trainer(max_steps=steps, run_dir=tmp_path / name, seed=0, progress=False, plugins=["ema:decay=0.9"])
        trainer.fit(module, x, x, batch_size=8, **options)
        return module.layer.weight.detach()

    trained = fit("first", 12)
    end = tmp_path / "first" / "end-12"
    assert torch.equal(SavesAtTheEnd.load_from_checkpoint(end).layer.weight, trained)
    assert torch.equal(fit("resumed", 20, resume=end), fit("straight", 20))
