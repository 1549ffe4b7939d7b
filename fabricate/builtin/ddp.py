"""Replicas: PyTorch's DistributedDataParallel. Must not know: other strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fabricate import ConfigurationError, Strategy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


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

    def communication_seconds(self, model: torch.nn.Module) -> float | None:
        # DDP itself times the first ten backwards and every hundredth, in nanoseconds; no public door leads there.
        measured = model._get_ddp_logging_data()  # type: ignore[operator]
        if "avg_backward_comm_time" not in measured:
            return None
        hidden = measured["avg_backward_compute_comm_overlap_time"]
        return float(max(measured["avg_backward_comm_time"] - hidden, 0)) / 1e9

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
