"""Two-layer regression on (X, y) tuples: 100 rows in batches of 8, so that every epoch ends with a batch of 4.

python examples/regression.py
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from fabricate import Trainer, TrainModule, seed_everything


class Regression(TrainModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}


def data(rows: int, seed: int) -> TensorDataset:
    """x: (rows, 10), y: (rows, 1), a linear function of x with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 10, generator=generator)
    y = x @ torch.linspace(-1, 1, 10).unsqueeze(1) + 0.1 * torch.randn(rows, 1, generator=generator)
    return TensorDataset(x, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=30)
    parser.add_argument("--run-dir", help="write checkpoints and metrics there, and resume from there")
    options = parser.parse_args()
    seed_everything(0)  # before the module draws its weights; it also determines the order of the data

    train = DataLoader(data(100, seed=1), batch_size=8, shuffle=True)
    val = DataLoader(data(50, seed=2), batch_size=8)
    trainer = Trainer(
        max_epochs=options.max_epochs,
        run_dir=options.run_dir,
        validate_first=True,
        validate_every="10 epochs",
        save_every="10 epochs",
    )
    result = trainer.fit(Regression(), train, val)
    if trainer.is_main:
        print(f"{result.steps} steps, validation loss {result.metrics['val_loss']:.4f} (noise alone: 0.0100)")


if __name__ == "__main__":
    main()
