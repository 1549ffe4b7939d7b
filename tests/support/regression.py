"""A regression on eight rows, and a fit of it in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.ao import quantization

from fabricate import Callback, FitResult, Trainer, TrainModule

ROWS = [(torch.full((3,), row / 8), torch.tensor([row / 8])) for row in range(8)]


class Regression(TrainModule):
    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.rate = rate

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Hears(Callback):
    """Records the arguments of on_eval_end, on_log and on_step_skipped."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, float]] = []
        self.logs: list[tuple[int, dict[str, float]]] = []
        self.skips: list[tuple[int, str]] = []

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        self.evaluations.append(metrics)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self.logs.append((step, metrics))

    def on_step_skipped(self, step: int, reason: str) -> None:
        self.skips.append((step, reason))


def fit(
    module: TrainModule | None = None, *plugins: object, val: Any = None, train: Any = ROWS, **arguments: Any
) -> FitResult:
    arguments = {"max_steps": 2, "progress": False, "sanity_batches": 0, **arguments}
    loading = {"batch_size": 2} if train is ROWS else {}
    return Trainer(plugins=plugins, **arguments).fit(module or Regression(), train, val, **loading)


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


class Scripted(Regression):
    """A module whose validation losses are the given values, one after another."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = iter(values)

    def validation_step(self, batch: Any) -> Any:
        return {"loss": next(self.values)}


class Quantising(Regression):
    """Quantisation-aware training of two channels, whose observer grows with its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[0.5], [2.0]]))
        self.fake_quantise = quantization.default_fused_per_channel_wt_fake_quant()

    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step(batch) + (self.fake_quantise(self.weight) - 1).square().mean()


def exploding(at: int, *, gradient_only: bool = False) -> Any:
    """A module whose loss, or its gradient only, is infinite in the update after the first `at` updates, once."""

    class Explodes(Regression):
        exploded = False

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            if self.trainer.step == at and not self.exploded:
                self.exploded = True
                weight = self.layers[2].weight
                return loss + 1e38 * (weight - weight.detach()).sum() if gradient_only else loss * torch.inf
            return loss

    return Explodes()
