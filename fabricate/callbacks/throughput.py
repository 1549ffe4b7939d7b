"""The speed of a fit: tokens and FLOPs per second, and the share of the devices' peak."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fabricate.callbacks.flop_count import flop_counter
from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer

PEAKS = (
    (r"GB200", 2500e12),  # NVIDIA Blackwell architecture technical brief
    (r"\bB200$", 2250e12),  # the same
    (r"\bH200$", 989e12),  # nvidia.com/en-us/data-center/h200, which gives twice the number (with sparsity)
    (r"\bH100 NVL", 835e12),  # nvidia.com/en-us/data-center/h100, the same
    (r"\bH100 (PCIe|80GB HBM2e)", 756e12),
    (r"\bH100\b", 989e12),
    (r"\bA100\b", 312e12),  # NVIDIA A100 datasheet
    (r"\bA10$", 125e12),  # NVIDIA A10 datasheet
    (r"\bL40S$", 362e12),  # NVIDIA L40S datasheet
    (r"\bL4$", 121e12),  # NVIDIA Ada GPU architecture whitepaper
    (r"\bRTX 4090$", 165e12),  # the same, with accumulation in float32
    (r"\bRTX 3090$", 71e12),  # NVIDIA GA102 GPU architecture whitepaper, with accumulation in float32
    (r"\bRTX A6000$", 155e12),  # the same
    (r"\bV100S-PCIE", 130e12),  # NVIDIA V100 datasheet
    (r"\bV100-SXM", 125e12),
    (r"\bV100-PCIE", 112e12),
    (r"\bT4$", 65e12),  # NVIDIA T4 datasheet
    (r"\bMI300X\b", 1307e12),  # amd.com/en/products/accelerators/instinct/mi300/mi300x.html
)
"""(pattern of the device's name, dense 16-bit FLOPs per second), with the manufacturer's source. The first match counts. Devices with
contradicting sources (A10G), or with slower variants of the same name (laptops), are not listed."""


class Throughput(Callback):
    """Adds to `trainer.rates`, to "clock" in `metrics.jsonl` and to the trackers, at each log boundary, next to samples_per_second:

    tokens_per_second: the weights of the losses: those that `training_step` returns, else counted labels (tokens), else rows;
    flops_per_second: the sum over all ranks; mfu: this sum as a share of the peak of all devices (model FLOPs utilisation).

    flops_per_row: the FLOPs of the forward and backward of a row; default: counted in the first update by
    `torch.utils.flop_counter.FlopCounterMode`, which counts matrix products, convolutions and attention, with a multiplication and its
    addition as two. Layers that are computed twice (activation checkpointing) count twice. It cannot count in compiled code: pass the
    number in this case. peak: FLOPs per second of one device; default: from a table of common GPUs, for bf16 and fp16; without a peak there
    is no mfu.

        Trainer(plugins=[Throughput(peak=312e12)], ...)
    """

    def __init__(self, *, peak: float | None = None, flops_per_row: float | None = None) -> None:
        for name, value in (("peak", peak), ("flops_per_row", flops_per_row)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ConfigurationError(f"Throughput({name}={value!r}): give a positive number, or None")
        self._given = peak, flops_per_row
        self.peak, self.flops_per_row = peak, flops_per_row
        self._counter: FlopCounterMode | None = None
        """The counter for the first update; None after it."""
        self._counting, self._flops = ExitStack(), 0
        self._rows: int | None = None
        """The number of rows at the last log boundary; None before the first update."""
        self._tokens = 0.0

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.peak, self.flops_per_row = self._given
        self._rows = None
        if self.peak is None:
            self.peak = _known_peak(trainer, module)
        trainer.add_meter(lambda rates: self._measure(trainer, rates))

    def on_epoch_start(self, trainer: Trainer) -> None:
        if self._rows is not None:
            return
        self._rows, self._tokens = trainer.progress.samples, trainer.progress.tokens
        if self.flops_per_row is None:
            self._counter, self._flops = flop_counter(), 0

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Any, Any]:
        if self._counter is not None:
            self._counting.enter_context(self._counter)
        return (yield)

    def on_accumulate(self) -> None:
        if self._counter is not None:
            # each micro-batch by itself, as in ModelSummary: two counters have to be closed together
            self._counting.close()
            self._flops += self._counter.get_total_flops()

    def on_step(self, trainer: Trainer) -> None:
        self._counted(trainer)

    def on_step_skipped(self, trainer: Trainer) -> None:
        self._counted(trainer)

    def _counted(self, trainer: Trainer) -> None:
        """After the first update, set `flops_per_row`: its FLOPs divided by its rows."""
        if self._counter is None or trainer.progress.samples == self._rows:  # not the last turn
            return
        assert self._rows is not None
        world_size = trainer.accelerator.num_processes
        readers = world_size // trainer.strategy.ranks_per_row(world_size)
        rows = trainer.progress.samples - self._rows
        self.flops_per_row = self._flops * readers / rows or None
        self._counter = None
        if self.flops_per_row is None and trainer.is_main:
            print(
                "Throughput: no FLOPs were counted (those of compiled code cannot be counted). Give flops_per_row=",
                flush=True,
            )

    def _measure(self, trainer: Trainer, rates: Mapping[str, float]) -> dict[str, float]:
        rows, tokens = trainer.progress.samples, trainer.progress.tokens
        speed, new = rates.get("samples_per_second"), rows - (self._rows or 0)
        if speed is None or not new:
            return {}
        measured = {"tokens_per_second": speed * (tokens - self._tokens) / new}
        self._rows, self._tokens = rows, tokens
        if self.flops_per_row is not None:
            measured["flops_per_second"] = speed * self.flops_per_row
            if self.peak is not None:
                measured["mfu"] = measured["flops_per_second"] / (self.peak * trainer.accelerator.num_processes)
        return measured

    def on_teardown(self) -> None:
        self._counting.close()
        self._counter = None


def _known_peak(trainer: Trainer, module: TrainModule) -> float | None:
    """The peak FLOPs per second of this device, if the table has it and the precision is 16-bit; else None."""
    import torch

    if module.device.type != "cuda" or trainer.precision.compute_dtype not in ("bfloat16", "float16"):
        return None
    return peak_of(torch.cuda.get_device_name(module.device))


def peak_of(name: str) -> float | None:
    """The peak FLOPs per second of the device `name`; None if it is not known."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)
