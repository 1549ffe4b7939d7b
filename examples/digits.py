"""Handwritten digits (scikit-learn's, 8 x 8 pixels) with a small convolutional network, stopped when it no longer improves.

python examples/digits.py
python examples/digits.py --run-dir runs/digits --tensorboard
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fabricate import EarlyStopping, Trainer, TrainModule, seed_everything


class Digits(TrainModule):
    def __init__(self, channels: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, channels, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(channels, 2 * channels, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(2 * channels * 4 * 4, 10),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        # Means over the batch's rows; the Trainer weights them by rows, so the result is exact over the whole set.
        images, labels = batch
        scores = self.layers(images)
        return {"loss": cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}

    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layers(batch[0]).argmax(1)


def data() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation sets of images (rows, 1, 8, 8), 0 to 1, and labels (rows,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=30)
    parser.add_argument("--run-dir", help="write checkpoints and metrics there, and resume from there")
    parser.add_argument("--tensorboard", action="store_true", help="log for TensorBoard too; needs --run-dir")
    options = parser.parse_args()
    seed_everything(0)  # before the module draws its weights; it also determines the order of the data

    train, val = data()
    trainer = Trainer(
        max_epochs=options.max_epochs,
        run_dir=options.run_dir,
        plugins=[EarlyStopping("val_accuracy", mode="max", patience=4)],
        trackers=["tensorboard"] if options.tensorboard else (),
    )
    module = Digits()
    result = trainer.fit(module, train, val, batch_size=32)
    predicted = trainer.predict(module, val, batch_size=64)
    if predicted is not None:  # rank 0
        right = sum(int(p) == int(label) for p, (_, label) in zip(predicted, val, strict=True))
        print(f"{result.stop_reason} after {result.epochs} epochs")
        print(f"accuracy {result.metrics['val_accuracy']:.4f}, {right} of {len(val)} digits right")


if __name__ == "__main__":
    main()
