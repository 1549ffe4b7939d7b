"""Buffers, layers and parameter groups that a hook makes during the fit: a resume would refuse them, so the first save names them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import CheckpointError, FitResult, Trainer, TrainModule

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Growing(TrainModule):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.late, self.what = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1), what
        self.register_buffer("offset", None)
        self.register_buffer("cache", None, persistent=False)

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=1e-3)

    def on_step(self, trainer: Any, step: int) -> None:
        self.cache = torch.ones(step)
        if step == 2 and self.what == "buffer":
            self.offset = torch.ones(3)
        if step == 2 and self.what == "layer":
            self.added = torch.nn.Linear(3, 1)
        if step == 2 and self.what == "group":
            trainer.optimizers["main"].add_param_group({"params": list(self.late.parameters())})


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("buffer", "offset"),
        ("layer", "added.weight, added.bias"),
        ("group", "group 1 of optimizer 'main'"),
        ("nothing", ""),
    ],
)
def test_what_a_hook_makes_that_a_resume_would_refuse_is_named_at_the_first_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, named: str
) -> None:
    def run(steps: int) -> FitResult:
        trainer = Trainer(max_steps=steps, run_dir=tmp_path, progress=False, save_every="1 step")
        return trainer.fit(Growing(what), ROWS, batch_size=4)

    run(3)
    notes = [line for line in capsys.readouterr().err.splitlines() if "made after the fit began" in line]
    assert [line.partition(" was made")[0] for line in notes] == ([f"note: {named}"] if named else [])
    refused = pytest.raises(CheckpointError) if named else contextlib.nullcontext()
    with refused:
        assert run(4).steps == 4
