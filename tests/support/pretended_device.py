"""A device that computes nothing and enforces what a GPU enforces, so that a machine without one can test for it.

Its tensors are torch's fake tensors, on a separate device (`DEVICE`); those of the host are real. While `Rules` is entered:

- an operation on tensors of two devices is an error, also a `_foreach` operation with a factor on another device, which torch's fake
  tensors accept and a GPU's kernel refuses; a host tensor without dimensions counts as a number, as it does for a GPU;
- a collective of a host tensor is an error where the group has no backend for the host, as under NCCL alone;
- a read from the device returns ones, unless `Rules` has kept the value, and is recorded in `waits`, because the host would wait there;
  so is each wait for an event, a stream or the device itself.

The other ranks of the group do the same as this one, so every value that ranks exchange is this rank's own. The name of the device cannot
be unregistered, so a process that calls `open_device` is used for nothing else: see `fabricate.testing.ranks.run_alone`.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakTensorKeyDictionary

NAME = "sdaa"  # a vendor without kernels in torch, with which Accelerate allows float16
DEVICE = torch.device("cpu")
"""The device, once `open_device` has run."""


_values = WeakTensorKeyDictionary()
"""The version counter and the value of each tensor of the device whose value is known."""


def _keep(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is not None:
        _values[tensor] = (tensor._version, value)


def _value(tensor: torch.Tensor) -> torch.Tensor:
    version, value = _values.get(tensor, (-1, None))
    return torch.ones(tensor.shape, dtype=tensor.dtype) if value is None or version != tensor._version else value


def _finished(tensors: list[torch.Tensor]) -> Any:
    """A finished collective with a result, which DDP needs: torch's fake group returns none."""
    result: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    result.set_result(tensors)
    return _create_work_from_future(result).boxed()


_kept: list[Any] = []
"""Objects that torch would drop without a reference to them."""


_entered: list[Rules] = []


def _host_waits(name: str) -> None:
    for rules in _entered:
        rules.waited(name)


class _Stream:
    """A stream of the device; there is only one, and it is always empty."""

    def __init__(self, device: object = None, priority: int = 0, **options: object) -> None:
        self.device = device

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        _host_waits("synchronize of a stream")


class _Event:
    def __init__(self, device: object = None, **options: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _host_waits("synchronize of an event")

    def elapsed_time(self, end: object) -> float:
        return 0.0


class _Module(_DummyBackendModule):
    """The module that torch uses as `torch.sdaa`."""

    Stream = _Stream
    Event = _Event

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream(device)

    def stream(self, stream: _Stream) -> _Stream:
        return stream

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        _host_waits("synchronize of the device")

    def empty_cache(self) -> None:
        pass


_MEMORY = {
    "get_memory_info": lambda device=None: (80 * 10**9, 80 * 10**9),
    "memory_reserved": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
}
"""The memory functions of `torch.accelerator` for the device: 80 GB, all of it free."""


class _Mode(FakeTensorMode):
    avoid_device_init = True  # otherwise a copy of a host tensor to the device would need the device's allocator


_IN_HALF = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention")
_IN_FLOAT = ("layer_norm", "log_softmax.int", "softmax.int", "cross_entropy_loss", "mse_loss", "nll_loss", "sum")


def _register_autocast() -> list[torch.library.Library]:
    """Register autocast as on a GPU, for the operations that the tests use: torch has no list for a custom device."""
    key = torch._C.DispatchKey.AutocastPrivateUse1
    others, ours = torch.library.Library("_", "IMPL", "AutocastPrivateUse1"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    def register(name: str, half: bool) -> None:
        operation, _, overload = name.partition(".")
        run = getattr(getattr(torch.ops.aten, operation), overload or "default")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(NAME) if half else torch.float32

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                casts = tensor.device.type == NAME and tensor.is_floating_point() and tensor.dtype != torch.float64
                return tensor.to(dtype) if casts else tensor

            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return run(*tree_map_only(torch.Tensor, cast, args), **tree_map_only(torch.Tensor, cast, kwargs))

        ours.impl(name, kernel, "AutocastPrivateUse1")

    for name in _IN_HALF:
        register(name, half=True)
    for name in _IN_FLOAT:
        register(name, half=False)
    return [others, ours]


def open_device() -> None:
    """Register the device in this process."""
    global DEVICE
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    DEVICE = torch.device(NAME, 0)
    _kept.extend(_register_autocast())
    dist.Backend.register_backend("alike", _create_fake_pg, extended_api=True, devices=["cpu", NAME])


@contextlib.contextmanager
def open_group(world_size: int, host_backend: bool = True) -> Iterator[None]:
    """Open torch's default group, of `world_size` ranks on the device; this is rank 0. host_backend: whether the group also accepts tensors
    of the host."""
    backend = f"{NAME}:alike" + (",cpu:alike" if host_backend else "")
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Rules(TorchDispatchMode):
    """While entered, the device's rules hold; `waits` has a line for each time the host waited for the device."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = _Mode(allow_non_fake_inputs=True)
        self.waits: list[str] = []

    def __enter__(self) -> Any:
        _entered.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        _entered.remove(self)
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        name = str(func)
        on_device = [t for t in tensors if isinstance(t, FakeTensor)]
        if name in ("aten._pin_memory.default", "aten.pin_memory.default"):
            return args[0]
        kwargs.pop("pin_memory", None)  # torch would need the device's allocator for such memory
        if not on_device and not any(isinstance(leaf, torch.device) and leaf.type == NAME for leaf in flat):
            return func(*args, **kwargs)
        if name.startswith("aten._foreach_"):
            self._check_foreach(name, args, kwargs)
        if name in ("aten._local_scalar_dense.default", "aten.is_nonzero.default"):
            self.waited(name)
            return _value(on_device[0]).item()
        if name == "aten.copy_.default" and not isinstance(args[0], FakeTensor):
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self.waited(name)
            return args[0].copy_(_value(args[1]))
        if name == "c10d.allreduce_.default":
            return args[0], _finished(args[0])
        with self._fake:
            result = func(*args, **kwargs)
        self._remember(func, name, args, tensors, result)
        return tree_map_only(FakeTensor, lambda t: self._read(t, name, args, kwargs), result)

    def _read(self, tensor: FakeTensor, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """Make a result on the host a real tensor."""
        if tensor.device.type == NAME:
            return tensor
        if not kwargs.get("non_blocking", False):
            self.waited(name)
        return _value(args[0] if name == "aten._to_copy.default" else tensor).to(tensor.dtype)

    def _remember(self, func: Any, name: str, args: Any, tensors: list[torch.Tensor], result: Any) -> None:
        """Keep the few values of the device that torch reads to decide something: tensors copied there, constants, and whether a gradient
        overflowed (none does). After any other change a value is not known."""
        if name in ("aten._to_copy.default", "aten.copy_.default") and not isinstance(tensors[-1], FakeTensor):
            _keep(result, tensors[-1].detach().to(result.dtype).expand(result.shape).clone())
        elif name == "aten.full.default":
            _keep(result, torch.full(args[0], args[1], dtype=result.dtype))
        elif name == "aten._amp_foreach_non_finite_check_and_unscale_.default":
            _keep(args[1], torch.zeros(args[1].shape))
        elif name == "c10d.allgather_.default":
            for output in args[0][0]:
                _keep(output, _value(args[1][0]).reshape(output.shape))
        elif name in ("aten.select.int", "aten.view.default", "aten.detach.default") and args[0] in _values:
            _keep(result, func(_value(args[0]), *args[1:]))
        elif name == "c10d.broadcast_.default":
            for tensor in args[0]:
                _keep(tensor, _values[tensor][1] if tensor in _values else None)

    def waited(self, name: str) -> None:
        """Record that the host waits for the device, in the operation `name`."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and __file__ != f.filename]
        self.waits.append(f"{name} in {frames[-1].name}: {frames[-1].line}" if frames else f"{name} in torch")

    def _check_foreach(self, name: str, args: Any, kwargs: Any) -> None:
        first = args[0]
        devices = {t.device for t in first}
        others = tree_flatten((args[1:], kwargs))[0]
        strange = {t.device for t in others if isinstance(t, torch.Tensor)} - devices
        host_scalar = all(t.device.type == "cpu" and t.ndim == 0 for t in others if isinstance(t, torch.Tensor))
        if len(devices) > 1 or (strange and not host_scalar):
            raise RuntimeError(f"{name}: expected all tensors on one device, got {sorted(map(str, devices | strange))}")


class _Alike:
    """The control connections of a rank whose peers send the same as this rank."""

    watched, closed = "", False

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([row] * self._world_size)

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row] * self._world_size

    def broadcast(self, row: torch.Tensor) -> torch.Tensor:
        return row

    def close(self) -> None:
        pass


@contextlib.contextmanager
def trained_on_the_device(world_size: int) -> Iterator[Rules]:
    """Make a `Trainer` train on the device, as rank 0 of `world_size` ranks that do the same."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from fabricate.distributed.devices import KINDS
    from fabricate.distributed.group import Group

    tensor = torch.tensor

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return tensor(*args, **kwargs)  # pinned memory would use the device's allocator, without `Rules`

    with contextlib.ExitStack() as pretended:
        patch = lambda *of: pretended.enter_context(mock.patch.object(*of))  # noqa: E731
        pretended.enter_context(mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=str(DEVICE)))
        pretended.enter_context(mock.patch.dict(KINDS, {NAME: "MULTI_GPU"}))
        patch(torch, "tensor", pageable)
        patch(torch, "Stream", _Stream)  # torch's classes use the device's guard, which has no events
        patch(torch, "Event", _Event)
        patch(torch.accelerator, "current_stream", _Stream)
        for name, answer in _MEMORY.items():  # torch uses the device's allocator, which is written in C++
            patch(torch.accelerator, name, answer)
        if world_size > 1:  # Accelerate does not check whether a group exists
            patch(PartialState, "_prepare_backend", lambda *args: ("alike", DistributedType.MULTI_GPU))
        patch(Group, "_connect", lambda self, *args: _Alike(world_size))
        patch(Group, "_exchange_hosts", lambda self, *args: None)
        yield pretended.enter_context(Rules())
