"""Manual optimization: the module calls backward and steps its optimizers, as under Lightning."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from fabricate_lightning import adapt
from lightning_shapes import Classifier, apart, both, by_fabricate, loader, regression_loss
from torch.nn.functional import binary_cross_entropy_with_logits

import fabricate
from fabricate import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


class GAN(lightning.LightningModule):
    """Two optimizers on one batch, of which each trains its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> None:
        real = batch[0]
        noise = torch.arange(2.0 * len(real)).reshape(-1, 2).sin()
        generating, discriminating = self.optimizers()
        self.toggle_optimizer(generating)
        image = self.generator(noise)
        loss = binary_cross_entropy_with_logits(self.discriminator(image), torch.ones(len(real), 1))
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        assert all(p.grad is None for p in self.discriminator.parameters()) or self.global_step
        generating.step()
        generating.zero_grad()
        self.untoggle_optimizer(generating)
        with self.toggled_optimizer(discriminating):
            logits = torch.cat([self.discriminator(real), self.discriminator(self.generator(noise).detach())])
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            other = binary_cross_entropy_with_logits(logits, labels)
            discriminating.zero_grad()
            self.manual_backward(other)
            self.clip_gradients(discriminating, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            discriminating.step()
        self.losses += [float(loss), float(other)]

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.generator, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]


def data() -> tuple[Any, ...]:
    return (loader(),)


def test_a_gan_with_two_optimizers_is_trained_as_by_lightning() -> None:
    theirs, ours = both(GAN, data)
    assert apart(theirs, ours) < 1e-6
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)


class Waits(GAN):
    """A schedule by a metric, which only the module itself advances."""

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0, threshold=10.0)
        return optimizers, [{"scheduler": plateau, "monitor": "g_loss"}]

    def on_train_epoch_end(self) -> None: ...


def test_fabricate_advances_no_schedule_of_a_module_that_optimizes_manually() -> None:
    assert apart(*both(Waits, data)) < 1e-6


class Accumulates(Classifier):
    """Two batches per step, by hand, with gradients that live from one call to the next, and a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer | lightning.pytorch.core.optimizer.LightningOptimizer)
        loss = regression_loss(self, batch) / 2
        self.losses.append(float(loss))
        if batch_idx % 2 == 0:
            self.manual_backward(loss)
        else:

            def closure() -> torch.Tensor:
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)
            optimizer.zero_grad()
            self.lr_schedulers().step()
        return {"loss": loss}

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.calls.append("before_backward")

    def on_after_backward(self) -> None:
        self.calls.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("before_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"end {batch_idx}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)}


def test_gradients_are_accumulated_by_hand_as_under_lightning() -> None:
    theirs, ours = both(Accumulates, lambda: (loader(), loader(number=20)))
    assert apart(theirs, ours) < 1e-6
    assert ours.module.calls == theirs.module.calls
    assert ours.trainer.optimizers[0].param_groups[0]["lr"] == theirs.trainer.optimizers[0].param_groups[0]["lr"] < 0.1


class StepsAtTheEnd(Accumulates):
    """Steps after two batches, and after the last one of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, optimizer = regression_loss(self, batch), self.optimizers()
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        if batch_idx % 2 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("limit", ["limit_train_batches", "overfit_batches"])
def test_the_last_batch_of_a_limited_epoch_is_that_of_lightning(limit: str) -> None:
    theirs, ours = both(StepsAtTheEnd, lambda: (loader(), loader(number=20)), **{limit: 3})
    assert apart(theirs, ours) < 1e-6


class Clears(Classifier):
    """Clears the gradients after its step, and has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.unused = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(regression_loss(self, batch))
        optimizer.step()
        optimizer.zero_grad()


def test_only_parameters_that_no_backward_reached_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    by_fabricate(Clears(), *data(), max_epochs=1, log_every_n_steps=2)
    printed = capsys.readouterr()
    assert "gradients float32; optimizer state float32" in printed.out
    assert "no gradient reached unused.weight, unused.bias in the updates" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_clip_val": 1.0}, "max_grad_norm: GAN optimizes manually; call self.clip_gradients"),
        ({"accumulate_grad_batches": 2}, "accumulate in training_step"),
        ({"precision": "16-mixed"}, "GAN optimizes manually, for which fabricate does not scale the"),
        ({"strategy": "fsdp"}, "strategy='fsdp' does not support"),
        ({"strategy": "deepspeed_stage_2"}, "strategy='zero2'"),
    ],
    ids=str,
)
def test_what_manual_optimization_cannot_do_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        by_fabricate(GAN(), *data(), **arguments)


def test_fabricates_own_trainer_runs_manual_optimization() -> None:
    theirs, _ = both(GAN, data, max_epochs=2)
    torch.manual_seed(0)
    module = GAN()
    result = fabricate.Trainer(max_epochs=2, progress=False, precision="fp32").fit(adapt(module), *data())
    assert result.steps == 14
    assert result.metrics["epoch_loss"] == pytest.approx(sum(module.losses[15::2]) / 7, rel=0.05)  # weighed by rows
    assert max(abs(a - b) for a, b in zip(theirs.module.losses, module.losses, strict=True)) < 1e-6


def test_manual_backward_needs_manual_optimization() -> None:
    class Wrong(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(regression_loss(self, batch))

    with pytest.raises(ConfigurationError, match=r"manual_backward: set self\.automatic_optimization = False"):
        by_fabricate(Wrong(), *data())
