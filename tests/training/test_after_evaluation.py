"""What a module does when its mode changes, and what it writes in an evaluation, is as in a loop by hand, on one rank and on several."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import linear, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabricate import SaveOnException, Trainer, TrainModule
from fabricate.testing import run_ranks


class Merged(nn.Linear):
    """A linear layer with a low-rank part that is added to the weight in eval mode and taken out of it in train mode."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 8) * 0.3), nn.Parameter(torch.zeros(8, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.down.T @ self.up.T


class Cached(nn.Module):
    """Computes an inverse once in eval mode, and forgets it in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + 0.1 * torch.randn(8, 8))
        self.inverse: torch.Tensor | None = None

    def train(self, mode: bool = True) -> Cached:
        self.inverse = None if mode else self.inverse
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return x @ torch.linalg.inv(self.weight)
        if self.inverse is None:
            self.inverse = torch.linalg.inv(self.weight)
        return x @ self.inverse


class FreezesLater(nn.Module):
    """Its batch normalisation stays in eval mode from the second call of train on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(8), 0

    def train(self, mode: bool = True) -> FreezesLater:
        super().train(mode)
        self.calls += mode
        if self.calls > 1:
            self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return y


class Model(TrainModule):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(layer(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(batch)}

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def data() -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True) / 4)


def by_hand(module: Model) -> list[float]:
    optimizer, losses = module.configure_optimizers(), []
    for _ in range(3):
        module.train()
        for batch in DataLoader(data(), 16):
            module.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            losses.append(module.loss(data()[:]).item())
    module.train()
    return losses


@pytest.mark.parametrize("layer", [Merged, Cached])
def test_a_layer_that_overrides_train_gives_the_losses_of_a_loop_by_hand(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, expected = Model(layer), Model(layer)
    expected.load_state_dict(module.state_dict())
    Trainer(max_epochs=3, seed=0, sanity_batches=0, progress=False).fit(
        module, data(), data(), batch_size=16, shuffle=False
    )
    assert module.losses == pytest.approx(by_hand(expected), abs=1e-6)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)


def test_the_first_batch_in_halves_leaves_a_merged_layer_as_it_was() -> None:
    torch.manual_seed(0)
    module = Model(Merged)
    nn.init.normal_(module.layers[0].up)
    before = module.layers[0].weight.clone()
    Trainer(max_epochs=1, fast_dev_run=True, progress=False).fit(module, data(), batch_size=16)
    torch.testing.assert_close(module.layers[0].weight, before)
    assert not module.layers[0].merged


def test_a_part_that_train_would_freeze_after_an_evaluation_keeps_its_mode_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Model(FreezesLater)
    Trainer(max_epochs=3, seed=0, sanity_batches=0, progress=False).fit(module, data(), data(), batch_size=16)
    assert int(module.layers[0].norm.num_batches_tracked) == 12  # as without an evaluation
    assert capsys.readouterr().err.count("puts layers.0.norm into eval mode, but they were in train mode") == 1


class Thresholds(Model):
    """Keeps what an evaluation found in a buffer, and has running statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__(FreezesLater)
        self.register_buffer("threshold", torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += 1 + self.trainer.accelerator.process_index
        return self.loss(batch)

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        super().on_eval_end(metrics)
        self.get_buffer("threshold").fill_(metrics["val_loss"])


def buffers(strategies: list[str]) -> list[Any]:
    """For each strategy the last val_loss, the threshold after a fit and after an evaluation alone, and what this rank counted."""
    results = []
    for strategy in strategies:
        torch.manual_seed(0)
        module, trainer = Thresholds(), Trainer(strategy=strategy, max_epochs=2, seed=0, progress=False)
        trainer.fit(module, data(), data(), batch_size=8)
        fitted = module.losses[-1], module.threshold.item(), module.seen.item()
        module.threshold.fill_(0.25)
        results.append((*fitted, trainer.validate(module, data(), batch_size=8)["val_loss"], module.threshold.item()))
    return results


def test_a_buffer_that_a_hook_of_an_evaluation_writes_keeps_its_value_on_every_rank() -> None:
    for rank, results in enumerate(run_ranks(buffers, 2, ["ddp", "fsdp"])):
        for loss, threshold, _, later, again in results:
            assert threshold == pytest.approx(loss)
            assert again == pytest.approx(later)
        assert results[1][2] == 8 * (1 + rank)  # under fsdp; under ddp torch sends rank 0's buffers before each forward


class OnRankZero(Model):
    """Sets an attribute and a buffer in compute_metrics, and keeps a record there."""

    def __init__(self) -> None:
        super().__init__(FreezesLater)
        self.register_buffer("middle", torch.zeros(()))
        self.threshold, self.record = 0.5, list[int]()
        self.layers[0].scale = 1.0
        self.settings, self.plain = {"threshold": 0.5}, torch.zeros(())
        self.measure = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(batch), "outputs": batch[1]}

    def compute_metrics(self, outputs: list[torch.Tensor]) -> dict[str, float]:
        self.threshold = float(torch.stack(outputs).mean())
        self.get_buffer("middle").fill_(self.threshold)
        self.layers[0].scale = self.settings["threshold"] = self.threshold
        self.plain.fill_(self.threshold)
        self.record.append(self.trainer.step)
        return {"mean": self.measure(self.threshold)}


def printed() -> str:
    with redirect_stderr(io.StringIO()) as text:
        Trainer(progress=False).validate(OnRankZero(), data(), batch_size=8)
    return text.getvalue()


def test_an_attribute_that_compute_metrics_sets_gets_a_note_on_several_ranks() -> None:
    names = "self.middle, self.threshold, self.settings, self.plain, self.layers.0.scale"
    note = f"OnRankZero.compute_metrics set {names} on rank 0 only"
    assert note not in printed()
    first, second = run_ranks(printed, 2)
    assert (first.count(note), second) == (1, "")


class Swapped(torch.optim.SGD):
    """Its weights for evaluation are half of those that it trains, as of a schedule-free optimizer."""

    def _scale(self, factor: float) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.data.mul_(factor)

    def eval(self) -> None:
        self._scale(0.5)

    def train(self) -> None:
        self._scale(2.0)


class Schedulefree(Model):
    def configure_optimizers(self) -> Any:
        return Swapped([p for p in self.parameters() if p.requires_grad], lr=0.05)


def test_a_layer_that_merges_in_eval_mode_merges_the_weights_that_the_optimizer_means() -> None:
    torch.manual_seed(0)
    module = Schedulefree(Merged)
    Trainer(max_epochs=1, seed=0, sanity_batches=0, progress=False).fit(module, data(), data(), batch_size=16)
    module.eval()  # the fit ends with the weights for evaluation
    assert module.losses == pytest.approx([module.loss(data()[:]).item()])


class FailsInValidation(Model):
    def validation_step(self, batch: Any) -> dict[str, Any]:
        raise ZeroDivisionError("the user's own")


def test_a_validation_that_fails_takes_merged_weights_out_before_they_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = FailsInValidation(Merged)
    frozen = module.layers[0].weight.clone()
    trainer = Trainer(max_epochs=1, run_dir=tmp_path, sanity_batches=0, progress=False, plugins=[SaveOnException()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, data(), data(), batch_size=16)
    resumed = Model(Merged)
    trainer = Trainer(max_epochs=1, run_dir=tmp_path, sanity_batches=0, progress=False)
    trainer.fit(resumed, data(), data(), batch_size=16)
    assert resumed.layers[0].up.abs().max() > 0  # so that merging would show
    torch.testing.assert_close(resumed.layers[0].weight, frozen)


class Scratch(Model):
    """Writes its outputs into the same memory for every batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(FreezesLater)
        self.kind, self.seen = kind, torch.zeros(0)
        self.scratch = torch.zeros(8)

    def predict_step(self, batch: Any) -> Any:
        self.scratch.copy_(batch[0][:, 0])
        array = self.scratch.numpy()
        return {"tensor": self.scratch, "array": array, "list": list(self.scratch)}[self.kind]

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(batch), "outputs": self.predict_step(batch)}

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        pass

    def compute_metrics(self, outputs: list[Any]) -> dict[str, float]:
        self.seen = torch.tensor([float(each) for each in outputs])
        return {"mean": float(self.seen.mean())}


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_outputs_in_memory_that_a_step_writes_again_are_those_of_each_batch(kind: str) -> None:
    rows, module = data(), Scratch(kind)
    trainer = Trainer(progress=False)
    predicted = trainer.predict(module, rows, batch_size=8)
    assert [float(each) for each in predicted] == rows[:][0][:, 0].tolist()
    trainer.validate(module, rows, batch_size=8)
    assert torch.equal(module.seen, rows[:][0][:, 0])
