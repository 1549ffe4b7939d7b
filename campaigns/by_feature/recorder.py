"""Runs one of Accelerate's examples like `python SCRIPT ARGUMENTS`, and records losses and weights.

A `RandomSampler` returns rows in the order of the data, because a seed gives different orders on the two sides. FILE-RANK.json contains the
loss of every `Accelerator.backward`, FILE-RANK.safetensors the final weights of the last prepared model.

    python -m campaigns.by_feature.recorder FILE SCRIPT ARGUMENTS
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

losses: list[float] = []
models: list[torch.nn.Module] = []


def record() -> None:
    """Record the losses and models from now on, and make samplers sequential."""
    torch.utils.data.RandomSampler.__iter__ = lambda self: iter(range(len(self.data_source)))  # type: ignore[method-assign]
    backward, prepare_model = Accelerator.backward, Accelerator.prepare_model

    @functools.wraps(backward)
    def noted_backward(self: Accelerator, loss: torch.Tensor, **options: Any) -> None:
        losses.append(loss.item())
        backward(self, loss, **options)

    @functools.wraps(prepare_model)
    def noted_model(self: Accelerator, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        models.append(model)
        return prepare_model(self, model, *args, **options)

    Accelerator.backward, Accelerator.prepare_model = noted_backward, noted_model


if __name__ == "__main__":
    file, *sys.argv = sys.argv[1:]
    record()
    runpy.run_path(sys.argv[0], run_name="__main__")
    place = f"{file}-{os.environ.get('RANK', '0')}"
    with open(f"{place}.json", "w", encoding="utf-8") as notes:
        json.dump(losses, notes)
    save_file({name: value.detach().clone() for name, value in models[-1].named_parameters()}, f"{place}.safetensors")
