"""The recorder of all operations: the tensors that are alive after each, and the messages between ranks.

Must not know: the loop, strategies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabricate.selfcheck.dry_run.ledger import GATHERED, SENT, Ledger
from fabricate.selfcheck.dry_run.traffic import Traffic


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records operations. It can be entered several times, and keeps its counts."""

    def __init__(self, run: Callable[[Any, Any, Any], Any] = _as_it_is) -> None:
        """`run`: a function that runs an operation of the dispatcher with its arguments."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._inside = contextlib.ExitStack()
        self.ledger = Ledger()
        self.traffic = Traffic()

    def __enter__(self) -> Any:
        self._inside.enter_context(self.ledger.following_resizes())
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._inside.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A tensor that consists of others (such as a DTensor): operations on these are recorded.
            return NotImplemented
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        self.traffic.see(func, result, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.ledger.see(leaf)
        if func.namespace in ("c10d", "fsdp"):
            self._mark(str(func), args, kwargs)
        self.ledger.ran()
        return result

    def _mark(self, name: str, args: Any, kwargs: Any) -> None:
        """Set the kinds of tensors that FSDP gathers into, or reduces over the ranks."""
        if name == "c10d._allgather_base_.default":
            self.ledger.see(args[0], GATHERED)
        elif name == "c10d._reduce_scatter_base_.default":
            self.ledger.see(args[1], SENT)
        elif name == "fsdp.split_with_sizes_copy.default":
            for tensor in kwargs["out"]:
                self.ledger.see(tensor, GATHERED)
