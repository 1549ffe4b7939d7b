"""A search with Optuna: every trial is one fit in this process, and trials that are worse than the median end early.

pip install optuna python examples/sweep.py --trials 12 --study sqlite:///sweep.db (again: continues the study)
"""

from __future__ import annotations

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, random_split

from fabricate import Callback, Trainer, TrainModule, seed_everything


class Digits(TrainModule):
    def __init__(self, width: int, learning_rate: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
        self.learning_rate = learning_rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, digits = batch
        return torch.nn.functional.cross_entropy(self.layers(images), digits)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        images, digits = batch
        return {"accuracy": (self.layers(images).argmax(1) == digits).float().mean()}


class Prune(Callback):
    """Reports each validation to Optuna, and ends the fit if Optuna prunes the trial."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.pruned = trial, False

    def on_eval_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.trial.report(metrics["val_accuracy"], trainer.step)
        if self.trial.should_prune():
            self.pruned = True
            trainer.stop("pruned")


def accuracy(trial: optuna.Trial, train: TensorDataset, val: TensorDataset, epochs: int) -> float:
    """The validation accuracy of one fit."""
    seed_everything(0)
    width = trial.suggest_int("width", 8, 128, log=True)
    module = Digits(width, trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True))
    prune = Prune(trial)
    trainer = Trainer(max_epochs=epochs, seed=0, progress=False, print_plan="none", plugins=[prune])
    result = trainer.fit(module, train, val, batch_size=64)
    if prune.pruned:
        raise optuna.TrialPruned
    return result.metrics["val_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--study", default="sqlite:///sweep.db", help="where the study lies; the same one goes on")
    options = parser.parse_args()

    images, digits = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    train, val = random_split(rows, [0.8, 0.2], torch.Generator().manual_seed(0))

    study = optuna.create_study(
        study_name="digits",
        storage=options.study,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=20),
    )
    # Another seed when the study goes on: the same one would draw its first trials again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    study.optimize(lambda trial: accuracy(trial, train, val, options.max_epochs), n_trials=options.trials)
    ended = [trial.state.name for trial in study.trials]
    print(
        f"{len(ended)} trials, {ended.count('PRUNED')} pruned; best accuracy {study.best_value:.4f} with {study.best_params}"
    )


if __name__ == "__main__":
    main()
