"""The built-in strategies: one process, replicas (DDP), shards (FSDP2)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fabricate import ConfigurationError, Strategy, hookimpl

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclasses.dataclass(eq=False)
class Single(Strategy):
    """One process, one device, nothing around the step."""

    name: ClassVar[str] = "single"
    max_world_size: ClassVar[int | None] = 1
    distributed_types: ClassVar[tuple[str, ...]] = ("NO",)


@dataclasses.dataclass(eq=False)
class DDP(Strategy):
    """A full replica on every rank; gradients are averaged while backward runs.

    find_unused_parameters: look after each forward for parameters that got no gradient, so that modules which do not use
    all of them train (the same as on one process); costs a walk over the autograd graph per update. "auto" looks.
    bucket_cap_mb: size of a gradient bucket in MiB. gradient_as_bucket_view: gradients live in the buckets (less memory).
    """

    find_unused_parameters: bool | str = "auto"
    bucket_cap_mb: int = 25
    gradient_as_bucket_view: bool = False
    name: ClassVar[str] = "ddp"
    min_world_size: ClassVar[int] = 2
    distributed_types: ClassVar[tuple[str, ...]] = ("MULTI_CPU", "MULTI_GPU")

    def __post_init__(self) -> None:
        if self.find_unused_parameters not in ("auto", True, False):
            raise ConfigurationError(
                f"ddp: find_unused_parameters={self.find_unused_parameters!r}: give 'auto', true or false"
            )
        if self.bucket_cap_mb < 1:
            raise ConfigurationError(f"ddp: bucket_cap_mb={self.bucket_cap_mb!r}: a bucket has at least 1 MiB")

    def accelerator_arguments(self) -> dict[str, Any]:
        from accelerate.utils import DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(
            find_unused_parameters=bool(self.find_unused_parameters),
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        return {"kwargs_handlers": [handler]}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        if self.find_unused_parameters == "auto":
            _warn_about_unused_once()
        return cast("torch.nn.Module", accelerator.prepare_model(root))

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        return cast("Callable[[], AbstractContextManager[object]]", model.no_sync)()

    def describe(self) -> dict[str, str]:
        looked = (
            "looked for after each forward"
            if self.find_unused_parameters
            else "not looked for; one without a gradient is an error"
        )
        return {"unused parameters": looked, "gradients": f"averaged in buckets of {self.bucket_cap_mb} MiB"}


def _warn_about_unused_once() -> None:
    """torch warns once per process, from C++, when it looked for unused parameters and found none: not worth a user's worry
    when nobody asked for it. A throw-away module takes the warning while stderr is closed; all ranks."""
    import os

    import torch

    tiny = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), find_unused_parameters=True)
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        tiny(torch.zeros(1, 1)).sum().backward()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


@dataclasses.dataclass(eq=False)
class FSDP(Strategy):
    """Parameters, gradients and optimizer state in shards over the ranks (PyTorch's FSDP2, `fully_shard`).

    wrap: what is gathered as one unit. "auto": the transformer blocks that a transformers model names, else the children
    of every `ModuleList`; "none": the whole module at once; else class names joined by "+".
    reshard_after_forward: free gathered parameters between forward and backward. offload: "cpu" keeps shards in host memory.
    """

    wrap: str = "auto"
    reshard_after_forward: bool = True
    offload: str | None = None
    name: ClassVar[str] = "fsdp"
    min_world_size: ClassVar[int] = 2
    lockstep: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = True
    distributed_types: ClassVar[tuple[str, ...]] = ("MULTI_CPU", "MULTI_GPU")

    def __post_init__(self) -> None:
        if self.offload not in (None, "cpu"):
            raise ConfigurationError(f"fsdp: offload={self.offload!r}: give 'cpu' or leave it out")
        self._units: list[str] = []
        self._ran: list[int] = []
        self._watched: list[torch.nn.Parameter] = []

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        on_cpu = accelerator.device.type == "cpu"
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.reshard_after_forward}
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=not on_cpu)
        else:
            root.to(accelerator.device)
        for parameter in module.parameters():  # fully_shard keeps each rank's own values: they have to be rank 0's
            torch.distributed.broadcast(parameter.detach(), src=0)
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, src=0)
        units = list(self._select(module))
        self._units = [name for name, _ in units]
        for _, unit in units:
            fully_shard(unit, **options)
        fully_shard(root, **options)
        self._watched, self._ran = list(module.parameters()), []
        for number, (_, unit) in enumerate(units):
            unit.register_forward_pre_hook(functools.partial(self._runs, number))
        # Placement is done; Accelerate only has to know the model, hence evaluation mode (no second wrapper).
        return cast("torch.nn.Module", accelerator.prepare_model(root, device_placement=False, evaluation_mode=True))

    def _select(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        import torch

        if self.wrap == "none":
            return
        if self.wrap == "auto":
            named = {n for m in module.modules() for n in getattr(m, "_no_split_modules", None) or ()}
            listed = {
                id(child)
                for m in module.modules()
                if isinstance(m, torch.nn.ModuleList)
                for child in m
                if next(child.parameters(), None) is not None and not isinstance(child, torch.nn.ModuleList)
            }
            chosen = [
                (n, m) for n, m in module.named_modules() if (type(m).__name__ in named if named else id(m) in listed)
            ]
            outer = [n for n, _ in chosen]
            yield from (pair for pair in chosen if not any(pair[0].startswith(f"{n}.") for n in outer))
            return
        wanted = set(self.wrap.split("+"))
        found = [(n, m) for n, m in module.named_modules() if type(m).__name__ in wanted]
        missing = wanted - {type(m).__name__ for _, m in found}
        if missing:
            present = sorted({type(m).__name__ for m in module.modules()})
            raise ConfigurationError(
                f"fsdp: wrap={self.wrap!r}: the module has no {', '.join(sorted(missing))}; it has {', '.join(present)}"
            )
        yield from reversed(found)  # inner units first

    @contextlib.contextmanager
    def _unsynchronised(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        return self._unsynchronised(model)

    def _runs(self, number: int, unit: torch.nn.Module, given: object) -> None:
        self._ran.append(number)

    def route(self) -> int:
        # Shards of unlike layers or gradients would be gathered and added up as if they were one: wrong, without an error.
        ran, self._ran = self._ran, []
        return hash((*ran, -1, *(p.grad is not None for p in self._watched))) & (2**62 - 1)

    def after_evaluation(self, model: torch.nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for unit in model.modules():  # without a backward, units that keep what they gathered would stay whole
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def describe(self) -> dict[str, str]:
        return {
            "shards": f"{len(self._units)} units and the rest of the module"
            if self._units
            else "the whole module as one unit",
            "offload": self.offload or "none",
        }


@hookimpl
def register_strategies(register: Callable[..., None]) -> None:
    register("single", Single, summary="one process, one device")
    register("ddp", DDP, summary="a full replica per rank, gradients averaged")
    register("fsdp", FSDP, summary="parameters, gradients and optimizer state sharded (FSDP2)")
