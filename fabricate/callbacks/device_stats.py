"""Memory and load of the process, the machine and the device, at each log boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fabricate.hooks import Callback

if TYPE_CHECKING:
    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer


class DeviceStats(Callback):
    """Adds to `trainer.rates`, to "clock" in `metrics.jsonl` and to the trackers, at each log boundary:

    process_memory_bytes: resident memory of this process; host_memory_bytes, host_memory_share: the memory that all processes of the
    machine use, and its share of the machine's memory; process_cpu_cores: the mean number of cores that this process kept busy since the
    last log boundary; host_cpu_share: the share of all cores that were busy since then. On a device: device_memory_bytes, held by tensors;
    device_reserved_bytes, held by torch's allocator; and device_utilization, in percent, if the driver reports it (on an NVIDIA GPU with
    the package nvidia-ml-py). Each rank measures its own process, machine and device; files and trackers get those of rank 0.

        Trainer(plugins=[DeviceStats()], ...)
    """

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        import psutil  # type: ignore[import-untyped]

        process = psutil.Process()
        process.cpu_percent()  # psutil measures between two calls: the first call has no value
        psutil.cpu_percent()
        on_device = _device_meter(module) if module.device.type != "cpu" else dict

        def measure(rates: Mapping[str, float]) -> dict[str, float]:
            memory = psutil.virtual_memory()
            used = memory.total - memory.available
            return {
                "process_memory_bytes": process.memory_info().rss,
                "host_memory_bytes": used,
                "host_memory_share": used / memory.total,
                "process_cpu_cores": process.cpu_percent() / 100,
                "host_cpu_share": psutil.cpu_percent() / 100,
                **on_device(),
            }

        trainer.add_meter(measure)


def _device_meter(module: TrainModule) -> Callable[[], dict[str, float]]:
    """A function that measures the device of `module`, with the meters that torch has for this kind of device."""
    import torch

    device = module.device
    own = torch.get_device_module(device)
    parts = {"device_memory_bytes": "memory_allocated", "device_reserved_bytes": "memory_reserved"}
    meters = {name: getattr(own, function) for name, function in parts.items() if hasattr(own, function)}
    if hasattr(own, "utilization"):
        try:
            own.utilization(device)
        except Exception as exc:  # its library is missing, or a container hides the device from the driver
            module.print(f"DeviceStats: device_utilization is not known here ({exc})")
        else:
            meters["device_utilization"] = own.utilization
    return lambda: {name: float(meter(device)) for name, meter in meters.items()}
