"""The cells of a notebook: compute, train in this process, then train on two ranks. Arguments: a port, a directory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import notebook_launcher
from train import Net, fit

# The first cells: operations with two threads, and a fit of this process alone.
torch.set_num_threads(2)
rows = torch.randn(600, 600)
(rows @ rows).exp().sum()


class Wide(Net):
    def training_step(self, batch: object) -> torch.Tensor:
        (rows @ rows).exp().sum()  # would wait for threads for ever
        return super().training_step(batch)


def cell(run_dir: Path) -> None:
    fit(run_dir, 8, kind=Wide)


if __name__ == "__main__":
    port, folder = sys.argv[1], Path(sys.argv[2])
    fit(folder.with_name("alone"), 2)
    notebook_launcher(cell, (folder,), num_processes=2, mixed_precision="bf16", use_port=port)
