"""What the first update really computed in: the dtypes of activations, parameters, gradients and optimizer state.

Layers are watched by forward hooks during one window, and never again. Must not know: the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fabricate.data.transfer import tensors
from fabricate.errors import few

if TYPE_CHECKING:
    from fabricate.training.run_state import Run


class Activations:
    """While open, remembers in which dtypes the layers of a module answered. Layers inside a compiled module are left alone."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._found: dict[str, set[str]] = {}
        self._hooks = [layer.register_forward_hook(self._heard) for layer in _layers(module)]

    def _heard(self, layer: torch.nn.Module, inputs: object, output: Any) -> None:
        if torch.compiler.is_compiling():  # what is traced here would stay in what is compiled
            return
        for tensor in tensors(output):
            if tensor.is_floating_point():
                self._found.setdefault(_name_of(tensor.dtype), set()).add(type(layer).__name__)

    def close(self) -> dict[str, list[str]]:
        """Stop watching. By dtype, the kinds of layers that answered in it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return {dtype: sorted(layers) for dtype, layers in sorted(self._found.items())}


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The innermost submodules."""
    if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
        return
    # A forward of its own is a compiled unit's: hooks inside would be traced, and the unit compiled again without them.
    children = [] if "forward" in vars(module) else list(module.children())
    for child in children:
        yield from _layers(child)
    if not children:
        yield module


_WEIGHED = {"given": "as training_step says", "counted": "by the labels it counts", "rows": "by rows"}


def observe(run: Run, activations: Activations, loss: torch.Tensor, how: str) -> dict[str, torch.nn.Parameter]:
    """After the first update, before its gradients are cleared: say what it was computed in. No wait. Returns the parameters
    that no gradient reached, by name."""
    layers = activations.close()
    parameters = [p for p in run.module.parameters() if p.requires_grad]
    gradients = _dtypes(p.grad for p in parameters)
    observed: dict[str, Any] = {
        "activations": layers or "not seen",
        "loss": [*_dtypes([loss]), f"weighed {_WEIGHED[how]}"],
        "parameters": _dtypes(parameters),
        "gradients": gradients or "kept by the engine",
        "optimizer_state": _dtypes(t for o in run.optimizers.values() for t in _state_of(o)) or "none",
    }
    if run.engine.world_size > 1 and gradients:
        kinds = (p.grad.dtype for p in parameters if p.grad is not None)
        observed["averaged_over_ranks_in"] = sorted(
            {_name_of(run.engine.strategy.reduction_dtype(kind)) for kind in kinds}
        )
    run.event("observed", **observed)
    if run.engine.rank == 0:
        print(f"observed in the first update: {_told(observed)}", flush=True)
    precision = run.engine.precision
    if layers and precision.compute_dtype not in (*layers, "float32"):
        run.note(
            f"precision={precision.name!r} computes in {precision.compute_dtype}, and no layer answered in it: is autocast off in the "
            "module, or does it convert to another dtype?"
        )
    if not run.engine.strategy.exposes_gradients:
        return {}
    return {n: p for n, p in run.module.named_parameters() if p.requires_grad and p.grad is None}


def tell_unreached(run: Run, names: Iterable[str]) -> None:
    """Say which parameters no gradient has reached in any update so far."""
    run.note(
        f"no gradient reached {few(list(names))} in the updates up to step {run.progress.step}: they do not train. Use them in "
        "training_step, not under no_grad or behind detach(); if that is meant, freeze them with requires_grad_(False)"
    )


def _dtypes(tensors: Iterable[torch.Tensor | None]) -> list[str]:
    """The dtypes of the floating-point tensors among `tensors`."""
    return sorted({_name_of(t.dtype) for t in tensors if t is not None and t.is_floating_point()})


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer keeps per parameter, without counters."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                yield value


def _name_of(dtype: torch.dtype) -> str:
    """As torch writes it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def _told(observed: Mapping[str, Any]) -> str:
    """One line for people."""
    parts = []
    for topic, value in observed.items():
        if isinstance(value, Mapping):
            value = [f"{dtype} ({few(layers)})" for dtype, layers in value.items()]
        parts.append(f"{topic.replace('_', ' ')} {', '.join(value) if isinstance(value, list) else value}")
    return "; ".join(parts)
