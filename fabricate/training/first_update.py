"""The dtypes of activations, parameters, gradients and optimizer state, as observed in the first update.

Forward hooks watch the layers during one window, and are then removed. Must not know: the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fabricate.data.transfer import tensors
from fabricate.errors import ConfigurationError, few
from fabricate.model.compiling import is_compiled
from fabricate.training.halves import compare_halves
from fabricate.training.state.run_state import Run
from fabricate.training.updates.losses import WindowLosses
from fabricate.training.written import Written

_WITH_FAST_PATHS = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


class Activations:
    """Records the dtypes of the outputs of a module's layers until it is closed. Not watched are layers inside a compiled module, modules
    of torch.jit, which take no hooks, and encoders in eval mode, which a hook would keep from torch's fast path."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._found: dict[str, set[str]] = {}
        self.whole = not any(is_compiled(layer) or _is_scripted(layer) for layer in module.modules())
        """Whether every layer is watched."""
        self._hooks = [layer.register_forward_hook(self._heard) for layer in _layers(module)]

    def _heard(self, layer: torch.nn.Module, inputs: object, output: Any) -> None:
        if torch.compiler.is_compiling():  # a traced hook would become part of the compiled code
            return
        for tensor in tensors(output):
            if tensor.is_floating_point():
                self._found.setdefault(_name_of(tensor.dtype), set()).add(type(layer).__name__)

    def close(self) -> dict[str, list[str]]:
        """Stop watching; return the types of layers per dtype of their output."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return {dtype: sorted(layers) for dtype, layers in sorted(self._found.items())}


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The innermost submodules, and the compiled modules that can be watched from outside."""
    if _is_scripted(module) or (isinstance(module, _WITH_FAST_PATHS) and not module.training):
        return
    if is_compiled(module):  # hooks inside would be traced, and their removal would cause another compilation
        if "forward" in vars(module):
            yield module
        return
    children = list(module.children())
    for child in children:
        yield from _layers(child)
    if not children:
        yield module


def _is_scripted(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


_SEVERAL = 10
"""The updates after which a parameter without any gradient is reported: parts of a model may take turns."""
_WHEN = {"step": "update", "epoch": "epoch"}
_WEIGHED = {"given": "as training_step says", "counted": "by the labels it counts", "rows": "by rows"}


class FirstUpdate:
    """Reports once the dtypes in which a fit computes, the trainable parameters that received no gradient, and the optimizers and
    schedulers that other code steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._activations: Activations | None = Activations(run.module)
        run.closing.callback(self._activations.close)
        self._written: Written | None = None
        """None after the first step, and where a layer is compiled: its removal would cause another compilation."""
        keeps = run.engine.strategy.keeps_written
        if self._activations.whole and not all(keeps(parameter) for parameter in run.module.parameters()):
            self._written = Written(run.module, run.engine)
            run.closing.callback(self._written.close)
        self._stepped = False
        self._watched: list[RemovableHandle] = []
        if run.calls.train_step is None:  # a plugin that takes the place of training_step may step optimizers
            self._watch_optimizers()
        self._schedules = list(run.optim.schedules.values())
        """Those of which no step in other code has been reported."""
        self._began_at = run.progress.step
        self._trains = run.module.training
        self._training = {name: part for name, part in run.module.named_modules() if name and part.training}
        """The parts that were in training mode when the fit began, until one is reported that is not any more."""
        self._without_gradient: dict[str, torch.nn.Parameter] = {}
        """Trainable parameters that received no gradient in any update so far, until that is reported."""

    @property
    def under_way(self) -> bool:
        """Whether no update has been applied yet."""
        return self._activations is not None

    def _watch_optimizers(self) -> None:
        """Remember, until the first update was applied, whether an optimizer made a step."""

        def stepped(*_: object) -> None:
            self._stepped = True

        for optimizer in self._run.optim.optimizers.values():
            self._watched.append(optimizer.register_step_pre_hook(stepped))
        self._run.closing.callback(self._unwatch_optimizers)

    def _unwatch_optimizers(self) -> None:
        for hook in self._watched:
            hook.remove()
        self._watched = []

    def after_forward(self, micro_step: int) -> None:
        """In the first update, raise an error if code outside the loop stepped an optimizer, or computed or cleared gradients. Does not
        wait for the device."""
        strategy = self._run.engine.strategy
        if self._stepped:
            raise ConfigurationError(
                f"{type(self._run.module).__name__}.training_step, or a hook before it, calls step of an optimizer. Remove that call: the "
                "loop steps the optimizer once per update, with the gradients of the global batch"
            )
        if self._activations is None or not strategy.exposes_gradients:
            return
        there = any(p.grad is not None for p in self._run.module.parameters())
        step = f"{type(self._run.module).__name__}.training_step"
        if micro_step == 0 and there:
            raise ConfigurationError(
                f"there were gradients before the loop called backward: {step}, or a hook before it, calls backward, and the "
                "gradients would be added twice. Return the loss, and leave backward to the loop"
            )
        # A strategy that shards may keep them elsewhere.
        if micro_step and not there and not strategy.shards_parameters:
            raise ConfigurationError(
                f"the gradients of earlier micro-batches of this update are gone: {step}, or on_accumulate, calls zero_grad. "
                "Remove that call; the loop clears gradients after each update"
            )

    def look(self, losses: WindowLosses, applied: bool) -> None:
        """Inspect an update before its gradients are cleared. Does not wait for the device."""
        self._stepped = False  # a fused optimizer makes its step even if the gradients overflowed
        if self._trains and not self._run.module.training:
            self._trains = False
            self._run.journal.note(
                f"{type(self._run.module).__name__} is in eval mode since step {self._run.progress.step}, because a step or a "
                "hook called self.eval() and not self.train() afterwards. Dropout and batch normalisation work as in an "
                "evaluation; call self.train() after it, or keep it if that is meant"
            )
        if self._written is not None and self._run.progress.step > self._began_at:
            self._written.close()
            self._written = None
        if self._activations is not None and applied:
            layers, whole = self._activations.close(), self._activations.whole
            self._activations = None
            self._unwatch_optimizers()
            self._observe(layers, whole, losses)
        elif self._without_gradient:
            self._without_gradient = {n: p for n, p in self._without_gradient.items() if p.grad is None}

    def report(self, last: bool) -> None:
        """Report, once each, the schedulers that other code steps, and the parameters that have received no gradient in any update so far.
        `last`: whether this is the last update of an epoch or of the fit."""
        moved = [each for each in self._schedules if each.advanced_elsewhere]
        self._schedules = [each for each in self._schedules if not each.advanced_elsewhere]
        for schedule in moved:
            name, when = type(schedule.made).__name__, _WHEN.get(schedule.advances, "validation")
            self._run.journal.note(
                f"your code calls {name}.step(), and so does the loop, after each {when}: the "
                "learning rate changes faster than its schedule says. Remove that call, or do not return the scheduler from "
                "configure_optimizers, and save its state in on_save"
            )
        if self._trains:
            self._report_eval_mode()
        if self._without_gradient and (last or self._run.progress.step - self._began_at >= _SEVERAL):
            self._run.journal.note(
                f"no gradient reached {few(list(self._without_gradient))} in the updates up to step {self._run.progress.step}: they do "
                "not train. Use them in training_step, not under no_grad or behind detach(); if that is meant, freeze them with "
                "requires_grad_(False)"
            )
            self._without_gradient = {}

    def _report_eval_mode(self) -> None:
        """Report parts that were put into eval mode, unless they are frozen: an evaluation by hand may have left them there."""
        stopped = [
            name
            for name, part in self._training.items()
            if not part.training and any(p.requires_grad for p in part.parameters())
        ]
        if stopped:
            self._training = {}
            self._run.journal.note(
                f"{few(stopped)} went into eval mode up to step {self._run.progress.step}, because a hook or a step called eval() and not "
                "train() afterwards. Dropout and batch normalisation work there as in an evaluation; call train() after it, or keep it if "
                "that is meant"
            )

    def _observe(self, layers: dict[str, list[str]], whole: bool, losses: WindowLosses) -> None:
        run = self._run
        observed = _observed(run, layers, losses, [p for p in run.module.parameters() if p.requires_grad])
        run.journal.event("observed", **observed)
        if run.settings.fast_dev_run and (text := compare_halves(run)):
            run.journal.note(text)
        if run.engine.rank == 0 and run.settings.print_plan != "none":
            print(f"observed in the first update: {_told(observed)}", flush=True)
        if new := self._new_parameters():
            run.journal.note(
                f"{few(new)} were created in the first update, and no optimizer has them: they do not train. Create all layers in "
                "__init__ or configure_model"
            )
        precision = run.engine.precision
        # Layers inside a compiled module are not seen, and its output may be float32, for example a residual sum.
        if layers and whole and precision.compute_dtype not in (*layers, "float32"):
            run.journal.note(
                f"precision={precision.name!r} computes in {precision.compute_dtype}, but no layer returned a tensor of this "
                "dtype. Check whether the module turns autocast off or converts to another dtype"
            )
        if run.engine.moment.detached:
            run.journal.note(
                "training_step calls gather or reduce of trainer.accelerator with a tensor that requires a gradient, but the "
                "result has no gradient (as in Accelerate). For a loss over the rows of all ranks, use "
                "torch.distributed.nn.functional.all_gather and drop_last=True. For a value that is only logged, use self.log, "
                "or call detach() first"
            )
        if run.engine.strategy.exposes_gradients:
            self._without_gradient = self._unreached()

    def _unreached(self) -> dict[str, torch.nn.Parameter]:
        """The trainable parameters without a gradient, but none of which an optimizer keeps state: it was trained before a resume. Without
        the averages of torch's AveragedModel, which follow other parameters."""
        averages = [
            each for each in self._run.module.modules() if isinstance(each, torch.optim.swa_utils.AveragedModel)
        ]
        following = {p for each in averages for p in each.parameters()}
        trained = {p for o in self._run.optim.optimizers.values() for p, state in o.state.items() if state}
        parameters = self._run.module.named_parameters()
        return {n: p for n, p in parameters if p.requires_grad and p.grad is None and p not in trained | following}

    def _new_parameters(self) -> list[str]:
        """The names of trainable parameters that a step or a hook has created, and that no optimizer holds."""
        optim = self._run.optim
        held = {p for o in optim.optimizers.values() for group in o.param_groups for p in group["params"]}
        earlier = optim.trained.keys() | optim.frozen.keys()
        parameters = self._run.module.named_parameters()
        return [name for name, p in parameters if p.requires_grad and name not in earlier and p not in held]


def _observed(
    run: Run, layers: dict[str, list[str]], losses: WindowLosses, trainable: list[torch.nn.Parameter]
) -> dict[str, Any]:
    """The dtypes that the update used, by topic."""
    gradients = _dtypes(p.grad for p in trainable)
    observed: dict[str, Any] = {
        "activations": layers or "not seen",
        "loss": [*_dtypes([losses.values[-1]]), f"weighed {_WEIGHED[losses.rule.source]}"],
        "parameters": _dtypes(trainable),
        "gradients": gradients or "kept by the engine",
        "optimizer_state": _dtypes(t for o in run.optim.optimizers.values() for t in _state_of(o)) or "none",
    }
    if run.engine.world_size > 1 and gradients:
        kinds = (p.grad.dtype for p in trainable if p.grad is not None)
        reduced = {_name_of(run.engine.strategy.reduction_dtype(kind)) for kind in kinds}
        observed["averaged_over_ranks_in"] = sorted(reduced)
    return observed


def _dtypes(tensors: Iterable[torch.Tensor | None]) -> list[str]:
    """The dtypes of the floating-point tensors among `tensors`."""
    return sorted({_name_of(t.dtype) for t in tensors if t is not None and t.is_floating_point()})


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer keeps per parameter, without counters."""
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, Mapping) else ():
            if isinstance(value, torch.Tensor) and value.ndim:
                yield value


def _name_of(dtype: torch.dtype) -> str:
    """The name of `dtype` without "torch."."""
    return str(dtype).removeprefix("torch.")


def _told(observed: Mapping[str, Any]) -> str:
    """`observed` as one line for people."""
    parts = []
    for topic, value in observed.items():
        if isinstance(value, Mapping):
            value = [f"{dtype} ({few(layers)})" for dtype, layers in value.items()]
        parts.append(f"{topic.replace('_', ' ')} {', '.join(value) if isinstance(value, list) else value}")
    return "; ".join(parts)
