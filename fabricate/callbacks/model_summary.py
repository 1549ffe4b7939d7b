"""A table of the module's layers with shapes, parameters and FLOPs, taken from the first micro-batch of a fit, in every turn."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricate.callbacks.flop_count import flop_counter
from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    import torch
    from rich.table import Table
    from torch.utils.flop_counter import FlopCounterMode

    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer


@dataclass
class LayerSummary:
    """One row of the table."""

    name: str
    kind: str
    """The class of the layer."""
    parameters: int
    """Number of elements: the whole of sharded parameters, and the original weights of quantised ones. A shared parameter counts in each of
    its layers."""
    trainable: int
    output: str = ""
    """The shape of the layer's first output in training; empty if it was not called or did not return a tensor."""
    forward_flops: int = 0
    """The FLOPs of all calls of the layer in this rank's first micro-batch."""


class ModelSummary(Callback):
    """Prints a table of the layers on rank 0 after the first update: type, output shape, parameters, FLOPs of the first micro-batch.

    depth: the number of levels of submodules that the table shows; 1: the direct children of the module.

    FLOPs are counted by `torch.utils.flop_counter.FlopCounterMode`: matrix products, convolutions and attention, with a multiplication and
    its addition as two. Afterwards, `layers` has the rows, `micro_batch_flops` the FLOPs of this rank's first forward and backward, and
    `step_flops` those of an update on all ranks, if all of its micro-batches are as large as the first. If optimizers take turns, these are
    sums over the turns.

        Trainer(plugins=[ModelSummary(depth=2)], ...)
    """

    def __init__(self, depth: int = 1) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ConfigurationError(f"ModelSummary(depth={depth!r}): give the number of levels to show, 1 or more")
        self.depth = depth
        self.layers: list[LayerSummary] = []
        self.micro_batch_flops = self.step_flops = 0
        self._counter: FlopCounterMode | None = None  # set until the first update is done
        self._counted = False  # whether the first micro-batch of this turn is done
        self._samples: int | None = None  # before the first update
        self._watching, self._counting = ExitStack(), ExitStack()

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        import torch

        self._counter, self._counted, self._samples = flop_counter(), False, None
        self.layers, self.micro_batch_flops = [], 0
        numbers = trainer.strategy.numbers_of_weights(module)
        fast = {id(layer) for layer in _on_fast_paths(module)}
        for name, layer in module.named_modules():
            if name and name.count(".") < self.depth:
                row = _describe(name, layer, numbers)
                self.layers.append(row)
                if isinstance(layer, torch.jit.ScriptModule) or id(layer) in fast:  # the first takes no hooks
                    continue
                before, after = self._watchers(row, self._counter)
                self._watching.callback(layer.register_forward_pre_hook(before).remove)
                self._watching.callback(layer.register_forward_hook(after).remove)

    def _watchers(self, row: LayerSummary, counter: FlopCounterMode) -> tuple[Callable[..., None], Callable[..., None]]:
        """The functions that run before and after a layer's forward, to fill its row."""

        def before(layer: torch.nn.Module, arguments: object) -> None:
            row.forward_flops -= counter.get_total_flops()

        def after(layer: torch.nn.Module, arguments: object, output: object) -> None:
            row.forward_flops += counter.get_total_flops()
            if self._samples is not None:  # not in a validation before the first update
                row.output = row.output or _shape(output)

        return before, after

    @hookimpl(wrapper=True)
    def train_step(self, trainer: Trainer) -> Generator[None, Any, Any]:
        if self._counter is not None and not self._counted:
            self._samples = trainer.progress.samples if self._samples is None else self._samples
            self._counting.enter_context(self._counter)
        return (yield)

    def on_accumulate(self, trainer: Trainer, num_micro_steps: int, is_last: bool) -> None:
        if self._counter is None:
            return
        if not self._counted:
            self._counting.close()
            self.micro_batch_flops += self._counter.get_total_flops()
        self._counted = not is_last  # the next turn counts too, if optimizers take turns
        world_size = trainer.accelerator.num_processes
        readers = world_size // trainer.strategy.ranks_per_row(world_size)
        self.step_flops = self.micro_batch_flops * num_micro_steps * readers

    def on_step(self, trainer: Trainer) -> None:
        self._print(trainer)

    def on_step_skipped(self, trainer: Trainer) -> None:
        self._print(trainer)

    def _print(self, trainer: Trainer) -> None:
        if self._counter is None or trainer.progress.samples == self._samples:  # not the last turn
            return
        self._stop()
        if trainer.is_main:
            drawn = random.getstate()
            from rich.console import Console  # which draws from this generator when it is imported

            Console().print(_table(self.layers, self.micro_batch_flops, self.step_flops))
            random.setstate(drawn)

    def on_teardown(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._watching.close()
        self._counting.close()
        self._counter = None


def _on_fast_paths(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers inside of encoders in eval mode: with a hook they would leave torch's fast path for padded rows, in which FLOPs cannot be
    counted outside of it."""
    import torch

    for encoder in module.modules():
        if isinstance(encoder, torch.nn.TransformerEncoder) and not encoder.training:
            yield from encoder.layers.modules()


def _describe(name: str, layer: torch.nn.Module, numbers: Mapping[torch.nn.Parameter, int]) -> LayerSummary:
    trained = sum(numbers[p] for p in layer.parameters() if p.requires_grad)
    return LayerSummary(name, type(layer).__name__, sum(numbers[p] for p in layer.parameters()), trained)


def _shape(output: object) -> str:
    """The shape of `output`, or of the first tensor in it if it is a tuple, a list or a mapping; else empty."""
    import torch

    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        return next((_shape(item) for item in output if isinstance(item, torch.Tensor)), "")
    return " x ".join(str(size) for size in output.shape) if isinstance(output, torch.Tensor) else ""


def _table(layers: list[LayerSummary], micro_batch_flops: int, step_flops: int) -> Table:
    from rich.table import Table

    counts = f"{_short(micro_batch_flops)} FLOPs per micro-batch, {_short(step_flops)} per update"
    table = Table(title="Model", caption=f"{counts}, forward and backward")
    for column in ("layer", "type", "output"):
        table.add_column(column)
    for column in ("parameters", "trainable", "forward FLOPs"):
        table.add_column(column, justify="right")
    for row in layers:
        numbers = (f"{row.parameters:,}", f"{row.trainable:,}", _short(row.forward_flops))
        table.add_row(row.name, row.kind, row.output, *numbers)
    return table


def _short(number: float) -> str:
    """`number` as short text: "1.23 M" for 1234567."""
    for unit in ("", " k", " M", " G", " T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"
