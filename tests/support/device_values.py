"""Tensors with values that torch regards as on a device, on a machine without one, to count the waits for the device.

The device is called "meta". Counted are tensors that the host reads, copies for which it waits, and copies to the device from memory that
is not pinned, for which the host of a GPU waits too.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
_aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """`values`, which are in host memory, as a tensor of the device."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=DEVICE
        )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} outside of Device()")


class Device(TorchDispatchMode):
    """While entered, the device exists. waits: the waits of the host, by operator. events: the events on its streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.events: list[str] = []
        self.pinned: set[int] = set()
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(self))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())  # the first operator on "meta" sets it
        real = torch.tensor

        def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            result = real(*args, **kwargs)
            if pin_memory:
                self.pinned.add(result.data_ptr())
            return result

        as_tensor = torch.as_tensor

        def to_device(value: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if device is not None and torch.device(device) == DEVICE and not isinstance(value, torch.Tensor):
                self.waits.append("to the device")
            return as_tensor(value, *args, device=device, **kwargs)

        monkeypatch.setattr(torch, "tensor", tensor)
        monkeypatch.setattr(torch, "as_tensor", to_device)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [
            value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        ]
        target = kwargs.get("device")
        there = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        self._count(function, args, kwargs, there, target)
        inner = tree_map(lambda value: value.values if isinstance(value, DeviceTensor) else value, (args, kwargs))
        if target is not None:
            inner[1]["device"] = torch.device("cpu")
        result = function(*inner[0], **inner[1])
        if function is _aten._local_scalar_dense.default or (target is None and not there):
            return result
        if target is not None and torch.device(target).type == "cpu":
            return result
        return tree_map(lambda value: DeviceTensor(value) if isinstance(value, torch.Tensor) else value, result)

    def _count(self, function: Any, args: Any, kwargs: Any, there: bool, target: Any) -> None:
        if function is _aten._local_scalar_dense.default and there:
            self.waits.append("item")
        if (
            function is _aten.copy_.default
            and isinstance(args[1], DeviceTensor)
            and not isinstance(args[0], DeviceTensor)
        ):
            self.waits += [] if len(args) > 2 and args[2] else ["to the host"]
        if function is _aten._to_copy.default and target is not None:
            to_host = torch.device(target).type == "cpu"
            free = kwargs.get("non_blocking") and (to_host or args[0].data_ptr() in self.pinned)
            if there == to_host and not free:
                self.waits.append("to the host" if to_host else "to the device")


class Stream:
    """A stream of the device, and its events. name: empty for the stream of the computation."""

    def __init__(self, device: Device, name: str = "") -> None:
        self._device, self._name = device, name

    def _note(self, text: str) -> None:
        self._device.events.append(f"{self._name} {text}".strip())

    def record_event(self) -> Stream:
        self._note("recorded")
        return self

    def synchronize(self) -> None:
        self._note("waited for")

    def query(self) -> bool:
        self._note("asked")
        return True

    def wait_event(self, event: Stream) -> None:
        self._note(f"waits for {event._name or 'the computation'}")

    wait_stream = wait_event

    def __enter__(self) -> None:
        self._note("entered")

    def __exit__(self, *exc: object) -> None:
        self._note("left")


@contextlib.contextmanager
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device, for the tensors of `put`."""
    with Device(monkeypatch) as fake:
        yield fake


def put(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`value` on the device."""
    return DeviceTensor(torch.as_tensor(value, dtype=dtype))
