"""How fast a fit is: tokens and FLOPs per second, and the share of what the devices could compute."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer

PEAKS = (
    (r"GB200", 2500e12),  # NVIDIA Blackwell architecture technical brief
    (r"\bB200$", 2250e12),  # the same
    (r"\bH200$", 989e12),  # nvidia.com/en-us/data-center/h200; figures there are with sparsity, twice the dense ones
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
"""Dense 16-bit FLOPs per second of a device, by a pattern of its name, with where the maker says so. The first that fits counts. A device
whose sources differ (A10G) or that is sold in slower forms under the same name (laptops) is not listed."""


class Throughput(Callback):
    """Adds to `trainer.rates`, to "clock" in `metrics.jsonl` and to the trackers, at each log boundary, where samples_per_second is anyway:

    tokens_per_second: the weights of the losses: those that `training_step` returns, else counted labels (tokens), else rows;
    flops_per_second: of all ranks; mfu: the share of `peak` that these are (model FLOPs utilisation).

    flops_per_row: of the forward and backward of a row; default: counted in the first update by
    `torch.utils.flop_counter.FlopCounterMode`, which sees matrix products, convolutions and attention, a multiplication and its addition as
    two. Layers that are computed twice (activation checkpointing) count twice. It does not see into compiled code: give it then.
    peak: FLOPs per second of one device; default: known for usual GPUs in bf16 and fp16, else there is no mfu.

        Trainer(plugins=[Throughput(peak=312e12)], ...)
    """

    def __init__(self, *, peak: float | None = None, flops_per_row: float | None = None) -> None:
        for name, value in (("peak", peak), ("flops_per_row", flops_per_row)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ConfigurationError(f"Throughput({name}={value!r}): give a positive number, or None")
        self._given = peak, flops_per_row
        self.peak, self.flops_per_row = peak, flops_per_row
        self._counter: FlopCounterMode | None = None
        """Counts the first update; None after it."""
        self._counting, self._counts = ExitStack(), False
        self._rows: int | None = None
        """Rows, and tokens, at the last boundary; None before the first update."""
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
            from torch.utils.flop_counter import FlopCounterMode

            self._counter, self._counts = FlopCounterMode(display=False), False

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Any, Any]:
        if self._counter is not None and not self._counts:
            self._counts = True
            self._counting.enter_context(self._counter)
        return (yield)

    def on_accumulate(self, is_last: bool) -> None:
        if is_last:  # before the optimizer, whose products are not the model's
            self._counting.close()

    def on_step(self, trainer: Trainer) -> None:
        self._counted(trainer)

    def on_step_skipped(self, trainer: Trainer) -> None:
        self._counted(trainer)

    def _counted(self, trainer: Trainer) -> None:
        """After the first update: divide its FLOPs by its rows."""
        if self._counter is None:
            return
        assert self._rows is not None
        world_size = trainer.accelerator.num_processes
        readers = world_size // trainer.strategy.ranks_per_row(world_size)
        rows = trainer.progress.samples - self._rows
        self.flops_per_row = self._counter.get_total_flops() * readers / rows or None
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
    """The FLOPs per second of this device, if the precision is one that the table is for; else None."""
    import torch

    if module.device.type != "cuda" or trainer.precision.compute_dtype not in ("bfloat16", "float16"):
        return None
    return peak_of(torch.cuda.get_device_name(module.device))


def peak_of(name: str) -> float | None:
    """Of a device with this name; None for one that is not known."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)
