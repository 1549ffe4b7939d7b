"""ZeRO-1 and ZeRO-2: every rank computes with whole parameters; master weights, optimizer state (and gradients) in shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch

from fabricate_deepspeed.strategy import ZeRO


@dataclasses.dataclass(eq=False)
class _WholeParameters(ZeRO):
    """The common part of stages 1 and 2."""

    quantised: ClassVar[tuple[str, ...]] = ("bitsandbytes 4-bit", "bitsandbytes 8-bit")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places: dict[int, torch.Tensor] = {}
        """The place of each trained parameter, by id, in the flat tensors that DeepSpeed writes after an update."""

    def _place(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = parameter.data.to(self._device)
            self.broadcast(parameter)

    def _for_evaluation(self) -> torch.nn.Module:
        return self._root

    def _convert(self, dtype: torch.dtype | None) -> None:
        """Nothing to do: DeepSpeed converts the parameters."""

    def _give_back(self, clean: bool) -> bool:
        for parameter, (dtype, attributes) in self._before.items() if self._slices else ():
            # After a failure other ranks may be gone, and without them only the rounded weights are left.
            whole = self.gather(parameter) if clean else parameter.detach()
            parameter.data = whole.to(dtype)
            for name in set(vars(parameter)) - attributes:
                delattr(parameter, name)
        self._places = {}
        return True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        own = self._slices.get(id(tensor))
        if own is not None and own.flat.dtype == tensor.dtype:
            return tensor.detach()  # nothing is rounded: the parameter equals its master weights
        return super().gather(tensor)

    def prepare_optimizers(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> torch.nn.Module:
        engine = super().prepare_optimizers(model, optimizers)
        self._places = {id(p): p.data for p in self._root.parameters() if id(p) in self._slices}
        return engine

    def _current(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        place = self._places.get(id(parameter))
        if place is not None and parameter.data_ptr() != place.data_ptr():  # after `parameter.data = ...`
            place.copy_(parameter.data)
            parameter.data = place
        return parameter.detach().flatten()

    def after_load(self) -> None:
        if self._engine is not None:
            self._engine.optimizer.update_lp_params()

    def _scaled_norm(self) -> torch.Tensor:
        norm: torch.Tensor = self._engine.optimizer.scaled_global_norm()
        return norm

    def _discard(self) -> None:
        zero = self._engine.optimizer
        zero.micro_step_id = -1
        zero.zero_grad()
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None
        for group in zero.all_grad_tensors:
            zero.all_grad_tensors[group] = None
        if zero.cpu_offload:
            zero.reset_cpu_buffers()

    def _forget_unused(self) -> None:
        if self._engine.optimizer.cpu_offload:
            for flat in self._engine.optimizer.single_partition_of_fp32_groups:
                flat.grad.zero_()


@dataclasses.dataclass(eq=False)
class ZeRO1(_WholeParameters):
    """DeepSpeed ZeRO stage 1: optimizer state and master weights in shards over the ranks."""

    name: ClassVar[str] = "zero1"
    stage: ClassVar[int] = 1

    def _describe_shards(self) -> dict[str, str]:
        return {"parameters and gradients": "whole on every rank", "optimizer state": "in shards"}


@dataclasses.dataclass(eq=False)
class ZeRO2(_WholeParameters):
    """DeepSpeed ZeRO stage 2: optimizer state, master weights and gradients in shards over the ranks."""

    name: ClassVar[str] = "zero2"
    stage: ClassVar[int] = 2

    def _offloads_gradients(self) -> bool:
        return bool(self._engine.optimizer.cpu_offload)

    def _describe_shards(self) -> dict[str, str]:
        return {"parameters": "whole on every rank", "gradients and optimizer state": "in shards"}
