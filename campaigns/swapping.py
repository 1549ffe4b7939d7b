"""Offload to files, whose updates have to equal those of offload to host memory bit for bit, on two ranks.

The parts of the model have odd sizes and are so large that DeepSpeed swaps them, and one layer is used only in every other window. Both
train, in float32 and bf16; then each continues from the other's checkpoint. Needs libaio with its headers; the first time DeepSpeed
compiles its asynchronous input and output, which takes minutes.

    python -m campaigns.swapping               # --folder: on which disk; the system's temporary folder
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from campaigns.parity import Losses
from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import close_pools, run_ranks

STEPS, HALF = 4, 2
_MEMORY = "zero3:offload_optimizer=cpu"


class Odd(TrainModule):
    """Three layers of about a million weights, of odd sizes; the second is used by every other window."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def configure_model(self) -> None:
        sizes = (1021, 1023, 1021, 1023)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        first, second, third = self.layers
        hidden = torch.tanh(first(batch[0]))
        if self.updates % 2:
            hidden = hidden + third(torch.tanh(second(hidden)))
        loss: torch.Tensor = hidden.square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, amsgrad=True)


class Counting(Callback):
    """Sets the number of updates in the module."""

    def __init__(self, begin: int) -> None:
        self.begin = begin

    def on_fit_start(self, module: Odd) -> None:
        module.updates = self.begin

    def on_step(self, module: Odd) -> None:
        module.updates += 1


def fits(jobs: list[tuple[str, str, str, str]]) -> list[list[float]]:
    """The losses of each job: strategy, precision, run directory, and the checkpoint that it continues from. All ranks."""
    curves = []
    for strategy, precision, run_dir, checkpoint in jobs:
        losses = Losses()
        trainer = Trainer(
            strategy=strategy,
            precision=precision,
            max_steps=STEPS,
            gradient_accumulation_steps=2,
            max_grad_norm=0.1,
            seed=1,
            run_dir=run_dir,
            save_every=f"{HALF} steps",
            keep=9,
            progress=False,
            plugins=[losses, Counting(HALF if checkpoint else 0)],
        )
        rows = torch.randn(64, 1021, generator=torch.Generator().manual_seed(0))
        trainer.fit(Odd(), TensorDataset(rows), batch_size=4, resume=checkpoint or "never")
        curves.append(losses.values)
    return curves


def main() -> int:
    """Print the largest difference of each pair; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        swapping = f"zero3:offload_optimizer=nvme,nvme_path={folder}"
        for precision in ("fp32", "bf16"):
            memory, files = (f"{folder}/{precision}-{kind}" for kind in ("memory", "files"))
            jobs = [(_MEMORY, precision, memory, ""), (swapping, precision, files, "")]
            half = f"checkpoints/step-{HALF:08}"
            jobs += [(_MEMORY, precision, f"{files}-in-memory", f"{files}/{half}")]
            jobs += [(swapping, precision, f"{memory}-in-files", f"{memory}/{half}")]
            losses = run_ranks(fits, 2, jobs, timeout=3600)[0]
            wanted = load_file(f"{memory}/model/model.safetensors")
            for (strategy, _, run_dir, checkpoint), curve in zip(jobs[1:], losses[1:], strict=True):
                weights = load_file(f"{run_dir}/model/model.safetensors")
                apart = max(float((weights[name] - value).abs().max()) for name, value in wanted.items())
                apart = max(apart, *(abs(a - b) for a, b in zip(curve, losses[0][-len(curve) :], strict=True)))
                kind = strategy.partition(",")[0] + (", resumed from the other's checkpoint" if checkpoint else "")
                print(f"{precision}  {kind}: {len(curve)} updates, largest difference {apart:g}", flush=True)
                worst = max(worst, apart)
        leftovers = list(Path(folder).glob("fabricate-*"))
        print(f"folders of DeepSpeed's files left: {len(leftovers)}")
    close_pools()
    return int(worst > 0 or bool(leftovers))


if __name__ == "__main__":
    sys.exit(main())
