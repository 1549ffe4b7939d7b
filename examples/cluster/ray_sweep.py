"""A sweep of four trials with Ray Tune, two at a time: `python examples/cluster/ray_sweep.py --folder /shared/sweep`.

Each trial is a process with one fit, which reports metrics and checkpoints to Ray Tune, and resumes if its process is lost. For a trial of
several ranks, let the trial start a `TorchTrainer` with `RunConfig(callbacks=[TuneReportCallback()])`: the same plugin reports from there.
"""

import argparse
from pathlib import Path

import ray
import torch
from fabricate_ray import resume_from_ray
from ray import tune
from torch.nn.functional import mse_loss

from fabricate import Trainer, TrainModule


class Line(TrainModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr

    def configure_model(self):
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        return mse_loss(self.layer(batch), batch.sum(1, keepdim=True))

    def validation_step(self, batch):
        return {"loss": mse_loss(self.layer(batch), batch.sum(1, keepdim=True))}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trial(config):
    rows = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    run_dir = Path(config["folder"]) / f"lr-{config['lr']}"
    trainer = Trainer(plugins=["ray"], run_dir=run_dir, max_epochs=2, save_every="1 epoch", seed=0, progress=False)
    trainer.fit(Line(config["lr"]), rows, rows[:64], batch_size=16, resume=resume_from_ray(run_dir))


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True, help="on a file system that all nodes share")
    folder = options.parse_args().folder.resolve()
    ray.init()
    results = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),  # {"gpu": 1} for a GPU each
        param_space={"lr": tune.grid_search([0.3, 0.1, 0.01, 0.001]), "folder": str(folder)},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", max_concurrent_trials=2, reuse_actors=True),
        run_config=tune.RunConfig(
            storage_path=str(folder / "ray"), name="sweep", failure_config=tune.FailureConfig(max_failures=2)
        ),
    ).fit()
    for result in results:
        print(
            f"lr {result.config['lr']}: val_loss {result.metrics['val_loss']:.3g} after {result.metrics['step']} steps"
        )
    best = results.get_best_result()
    print(f"best: lr {best.config['lr']}, checkpoint {best.checkpoint.path}")


if __name__ == "__main__":
    main()
