"""The parameters that a hook uses: DeepSpeed trains copies of them, to which changes by the hook have to be copied."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fabricate import FabricateError

_HARMLESS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("requires_grad", "dtype", "device", "grad", "is_leaf", "layout")
    ),
    *(torch.Tensor.__hash__, torch.Tensor.requires_grad_, torch.Tensor.register_post_accumulate_grad_hook),
}
"""Functions that neither read nor change a value."""


class Uses(TorchFunctionMode):
    """While entered, records the parameters that any function of torch uses, also through `.data`, which no version counter shows.

    The use of a parameter that is empty, because it is partitioned over the ranks, is an error that names it. settle: the function that the
    method `settle` calls with the used parameters.
    """

    def __init__(self, strategy: str, settle: Callable[[Iterable[torch.nn.Parameter]], None]) -> None:
        super().__init__()
        self._strategy, self._settle = strategy, settle
        self._names: dict[int, str] = {}
        self._used: dict[int, torch.nn.Parameter] = {}
        self._hook, self._paused = "", False

    def watch(self, module: torch.nn.Module) -> None:
        """Record uses of the parameters of `module` from now on."""
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def forget(self) -> None:
        """Stop recording, and discard the recorded uses."""
        self._names, self._used = {}, {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record uses inside the context: they are not by the code of a hook."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def during(self, hook: str) -> During:
        """The context of one hook."""
        return During(self, hook)

    def add(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record `parameters` as used."""
        self._used |= {id(parameter): parameter for parameter in parameters if id(parameter) in self._names}

    @property
    def used(self) -> list[torch.nn.Parameter]:
        """The parameters used since the last call of `settle`."""
        return list(self._used.values())

    def settle(self) -> None:
        """Apply changes to the parameters used so far, through the function `settle`. This rank alone."""
        if self._used:
            used, self._used = self.used, {}
            with self.paused():
                self._settle(used)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused and func not in _HARMLESS:
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                if (name := self._names.get(id(tensor))) is not None:
                    self._note(name, tensor, func)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, parameter: Any, func: Any) -> None:
        status = getattr(parameter, "ds_status", None)
        if status is None or status.name == "AVAILABLE":
            self._used[id(parameter)] = parameter
        elif not _called_by_us():
            raise FabricateError(
                f"{self._hook} uses the parameter {name}, which is sharded under strategy={self._strategy!r} and empty outside of "
                "a step. To read it, call trainer.strategy.gather(parameter). To change it, do so within `with "
                "trainer.strategy.changing(module.parameters()):`. Both have to run on all ranks, and both work under any "
                "strategy"
            )


class During:
    """Enters `uses` for one hook."""

    def __init__(self, uses: Uses, hook: str) -> None:
        self._uses, self._hook = uses, hook

    def __enter__(self) -> None:
        self._uses._hook = self._hook
        self._uses.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._uses.__exit__(*exc)
        # Weights that on_eval_start puts in are removed before training continues. They are not copied, because the
        # copy would round the float32 masters.
        if self._hook != "on_eval_start" and exc[0] is None:
            self._uses.settle()


def _called_by_us() -> bool:
    """Whether code of DeepSpeed or fabricate, which handle empty parameters, called the intercepted function: directly, or through torch or
    transformers (a save in a hook reads the dtype of a transformers model, for example)."""
    frame = inspect.currentframe()
    for _ in range(3):  # this function, `_note`, `__torch_function__`
        frame = frame and frame.f_back
    while frame is not None and _module(frame).startswith(("torch.", "transformers.")):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(("deepspeed", "fabricate"))


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
