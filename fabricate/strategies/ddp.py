"""Replicas: PyTorch's DistributedDataParallel. Must not know: other strategies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import Strategy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

_COMMUNICATION = {
    None: "as they are",
    "bf16": "rounded to bfloat16",
    "fp16": "rounded to float16",
    "powersgd": "as products of two thin matrices (PowerSGD)",
}


@dataclasses.dataclass(eq=False)
class DDP(Strategy):
    """A full replica on every rank; gradients are averaged while backward runs.

    find_unused_parameters: look after each forward for parameters that got no gradient, so that modules which do not use
    all of them train (the same as on one process); costs a walk over the autograd graph per update. "auto" looks, but not
    under static_graph: the same parameters are used in every micro-batch, in the same order, and DDP learns it once.
    bucket_cap_mb: size of a gradient bucket in MiB. gradient_as_bucket_view: gradients live in the buckets (less memory).
    communication_hook: what travels instead of float32 gradients: "bf16", "fp16", or "powersgd" (a low rank, with what was
    left out added the next time; after powersgd_start updates with whole gradients).
    """

    find_unused_parameters: bool | str = "auto"
    static_graph: bool = False
    bucket_cap_mb: int = 25
    gradient_as_bucket_view: bool = False
    communication_hook: str | None = None
    powersgd_rank: int = 1
    powersgd_start: int = 1000
    name: ClassVar[str] = "ddp"
    min_world_size: ClassVar[int] = 2
    distributed_types: ClassVar[tuple[str, ...]] = ("MULTI_CPU", "MULTI_GPU")

    def __post_init__(self) -> None:
        if self.find_unused_parameters not in ("auto", True, False):
            raise ConfigurationError(
                f"ddp: find_unused_parameters={self.find_unused_parameters!r}: give 'auto', true or false"
            )
        if self.find_unused_parameters is True and self.static_graph:
            raise ConfigurationError(
                "ddp: static_graph=true and find_unused_parameters=true: the first says that there is nothing to look for; "
                "choose one"
            )
        if self.bucket_cap_mb < 1:
            raise ConfigurationError(f"ddp: bucket_cap_mb={self.bucket_cap_mb!r}: a bucket has at least 1 MiB")
        if self.communication_hook not in _COMMUNICATION:
            known = ", ".join(name for name in _COMMUNICATION if name)
            raise ConfigurationError(
                f"ddp: communication_hook={self.communication_hook!r}: give {known} or leave it out"
            )
        if self.powersgd_rank < 1 or self.powersgd_start < 0:
            raise ConfigurationError(
                f"ddp: powersgd_rank={self.powersgd_rank!r}, powersgd_start={self.powersgd_start!r}: the rank is at least 1, "
                "the updates before it at least 0"
            )
        self._looks = self.find_unused_parameters is not False and not self.static_graph
        if self.communication_hook == "powersgd":
            from fabricate.strategies.ddp_hooks import PowerSGD

            # A class of its own, because only this choice keeps state: other replicas' checkpoints fit every strategy.
            self.__class__ = PowerSGD

    def accelerator_arguments(self) -> dict[str, Any]:
        from accelerate.utils import DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(
            find_unused_parameters=self._looks,
            static_graph=self.static_graph,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        return {"kwargs_handlers": [handler]}

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        gradients = whole.get("gradients", 0)
        more = {} if self.gradient_as_bucket_view or not gradients else {"gradient buckets": gradients}
        return {**whole, **more, **({"powersgd errors": gradients} if self.communication_hook == "powersgd" else {})}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        if self._looks and self.find_unused_parameters == "auto":
            _warn_about_unused_once()
        model = accelerator.prepare_model(root)
        self._learned = False
        if self.communication_hook is not None:
            self.communicate(model, module)
        return cast("torch.nn.Module", model)

    def communicate(self, model: Any, module: torch.nn.Module) -> None:
        """Let something else than whole gradients travel. All ranks."""
        import torch

        from fabricate.strategies.ddp_hooks import rounded

        model.register_comm_hook(None, rounded(torch.bfloat16 if self.communication_hook == "bf16" else torch.float16))

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        if self.static_graph and not self._learned:
            return contextlib.nullcontext()  # DDP learns the graph while it averages; averaging twice changes nothing
        return cast("Callable[[], AbstractContextManager[object]]", model.no_sync)()

    def reduction_dtype(self, gradient: torch.dtype) -> torch.dtype:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(self.communication_hook), gradient)

    def clear_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._learned = True
        super().clear_gradients(parameters)

    def communication_seconds(self, model: torch.nn.Module) -> float | None:
        # DDP itself times the first ten backwards and every hundredth, in nanoseconds; no public door leads there.
        measured = model._get_ddp_logging_data()  # type: ignore[operator]
        if "avg_backward_comm_time" not in measured:
            return None
        hidden = measured["avg_backward_compute_comm_overlap_time"]
        return float(max(measured["avg_backward_comm_time"] - hidden, 0)) / 1e9

    def describe(self) -> dict[str, str]:
        looked = (
            "looked for after each forward" if self._looks else "not looked for; one without a gradient is an error"
        )
        return {
            "unused parameters": "the same in every micro-batch (static graph)" if self.static_graph else looked,
            "gradients": f"averaged in buckets of {self.bucket_cap_mb} MiB, {_COMMUNICATION[self.communication_hook]}",
        }


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
