"""Shards: PyTorch's FSDP2, `fully_shard`. Must not know: other strategies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fabricate import ConfigurationError, Strategy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


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
        from torch.distributed.tensor import DTensor

        device = accelerator.device
        home = torch.device("cpu") if self.offload else device
        mesh = init_device_mesh(device.type, (accelerator.num_processes,))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.reshard_after_forward}
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:  # fully_shard keeps each rank's own values: they have to be rank 0's
                values = tensor.detach().to(device)  # one at a time: fully_shard moves one unit at a time as well
                torch.distributed.broadcast(values, src=0)
                tensor.detach().copy_(values)
        units = list(self._select(module))
        self._check_shared(module, [name for name, _ in units])
        self._units = [name for name, _ in units]
        for _, unit in units:
            fully_shard(unit, **options)
        fully_shard(root, **options)

        def memory(tensor: torch.Tensor) -> torch.Tensor:
            where = home if isinstance(tensor, DTensor) else device  # buffers are not sharded and not offloaded
            return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

        root._apply(memory)  # type: ignore[no-untyped-call]
        self._watched, self._ran = list(module.parameters()), []
        for number, (_, unit) in enumerate(units):
            unit.register_forward_pre_hook(functools.partial(self._runs, number))
        # Placement is done; Accelerate only has to know the model, hence evaluation mode (no second wrapper).
        return cast("torch.nn.Module", accelerator.prepare_model(root, device_placement=False, evaluation_mode=True))

    def _select(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:

        if self.wrap == "none":
            return
        if self.wrap == "auto":
            every = list(module.named_parameters(remove_duplicate=False))
            chosen = [pair for pair in self.blocks(module) if not _shares(pair[0], every)]
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

    def _check_shared(self, module: torch.nn.Module, units: list[str]) -> None:
        """A parameter that two units hold would become two, each gathered and updated by itself."""
        homes: dict[int, tuple[str, str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            unit = max((u for u in units if name.startswith(f"{u}.")), key=len, default="")
            other, theirs = homes.setdefault(id(parameter), (name, unit))
            if theirs != unit:
                raise ConfigurationError(
                    f"fsdp: wrap={self.wrap!r} puts {other} and {name}, which are one parameter, into two units; choose "
                    "wrap= so that one unit holds both, or wrap='none'"
                )

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


def _shares(name: str, every: list[tuple[str, torch.nn.Parameter]]) -> bool:
    """Whether the submodule `name` has a parameter that lies elsewhere too (tied weights): then it cannot be a unit."""
    inside = {id(p) for n, p in every if n.startswith(f"{name}.")}
    return any(id(p) in inside for n, p in every if not n.startswith(f"{name}."))
