"""Manual optimization: `training_step` calls backward and steps its optimizers. One window of the loop is one call of `training_step`.

The step runs outside of DDP's forward, which could not follow several backwards; `manual_backward` averages gradients over the ranks. The
loop gets a loss without a graph, so that its own backward and update do nothing. Gradients are stored separately between two steps, because
the loop clears them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from fabricate import ConfigurationError, Trainer, hookimpl
from fabricate_lightning import optimizers
from fabricate_lightning.adapter import Adapted


class Stepping(torch.optim.Optimizer):
    """An optimizer of the module, as `self.optimizers()` returns it: `step` calls `on_before_optimizer_step` first."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: Any, before_step: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        self.optimizer, self._module, self._before_step = optimizer, module, before_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Make one step. closure: called once before it, with gradients enabled. All ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step(self.optimizer)
        self.optimizer.step(**options)
        return loss

    @contextlib.contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """While open, parameters of other optimizers require no gradient. sync_grad: gradients are averaged in `step` anyway."""
        with self._module.toggled_optimizer(self):
            yield


class Manual(Adapted):
    """For a module with `automatic_optimization = False`."""

    def __init__(self, **hparams: Any) -> None:
        super().__init__(**hparams)
        self._gradients: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._applied: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        """The gradients with which optimizers have stepped in this call of `training_step`, which may clear them afterwards."""
        self._loss: torch.Tensor | None = None
        """The loss of the last backward."""
        self._stepping: list[Any] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        settings, strategy = trainer.settings, trainer.strategy
        name = type(self.lightning).__name__
        if strategy.shards_parameters or not strategy.exposes_gradients:
            raise ConfigurationError(
                f"{name} optimizes manually, which strategy={strategy.name!r} does not support, because it shards or hides "
                "gradients or weights; use strategy='ddp' or 'single'"
            )
        if trainer.precision.name == "fp16":
            raise ConfigurationError(
                f"{name} optimizes manually, for which fabricate does not scale the loss as fp16 needs; use "
                "precision='bf16-mixed' (bf16) or fp32"
            )
        for argument in ("max_grad_norm", "max_grad_value"):
            if getattr(settings, argument) is not None:
                raise ConfigurationError(
                    f"{argument}: {name} optimizes manually; call self.clip_gradients(optimizer, gradient_clip_val=...) in training_step"
                )
        if trainer.accelerator.gradient_accumulation_steps > 1 or settings.nonfinite == "skip":
            raise ConfigurationError(
                f"{name} optimizes manually: accumulate in training_step, and leave accumulate_grad_batches and nonfinite='skip' out"
            )
        super().on_fit_start(trainer)

    def configure_optimizers(self) -> Any:
        where = f"{type(self.lightning).__name__}.configure_optimizers"
        configured = optimizers.read(where, self._original().configure_optimizers())
        self.optimizers, self.schedulers = configured.optimizers, configured.schedulers
        self._stepping = [Stepping(optimizer, self.lightning, self._before_step) for optimizer in self.optimizers]
        # The module advances its schedulers itself; fabricate only saves them.
        answer = optimizers.for_fabricate(configured, lambda config: False, lambda scheduler, metric: None)
        return {str(number): each for number, each in enumerate(answer)}

    def stepping_optimizers(self) -> list[Any]:
        return self._stepping

    def run_backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Run backward of `loss`, and average the gradients over the ranks."""
        self._loss = loss.detach()
        self.hooks("on_before_backward", loss)
        loss.backward(*arguments, **options)  # type: ignore[no-untyped-call]
        self._average([parameter for parameter in self.parameters() if parameter.requires_grad])
        self.hooks("on_after_backward")

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.hooks("on_before_optimizer_step", optimizer)
        self._applied |= {
            parameter: parameter.grad for group in optimizer.param_groups for parameter in group["params"]
        }

    def _average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace the gradients of `parameters` by their mean over the ranks; the mean of earlier calls does not change by that. A gradient
        that no rank has stays None. All ranks."""
        if self.view.world_size == 1:
            return
        by_kind: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_kind.setdefault(parameter.dtype, []).append(parameter)
        for kind, some in by_kind.items():
            present = torch.tensor([float(p.grad is not None) for p in some], dtype=kind, device=self.device)
            gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in some]
            together = torch.cat([*gradients, present])
            torch.distributed.all_reduce(together)
            *means, present = torch.split(together, [*(gradient.numel() for gradient in gradients), len(some)])
            for parameter, mean, there in zip(some, means, present.tolist(), strict=True):
                parameter.grad = (mean / self.view.world_size).reshape(parameter.shape) if there else None

    # -- one window -----------------------------------------------------------------------------------------------------------------

    @hookimpl(specname="train_step")
    def manual_step(self, trainer: Trainer, batch: Any) -> Any:
        """Run the module's step instead of the forward through the prepared model."""
        return trainer.in_forward(lambda: self.training_step(batch, trainer.progress.micro_step))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._loss, self._applied = None, {}
        super().training_step(batch, batch_idx)
        self._gradients = {parameter: parameter.grad for parameter in self.parameters()}
        for parameter in self._gradients:
            parameter.grad = None
        value = torch.zeros((), device=self.device) if self._loss is None else self._loss.float().mean()
        return {"loss": value.clone().requires_grad_(), "optimizer": "0"}

    def _loss_in(self, output: Any, batch: Any) -> Any:
        return output

    @hookimpl
    def optimizer_step(self, trainer: Trainer) -> bool:
        """Restore the gradients, for listeners that read them. Returns True: the module has made the update."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = self._applied.get(parameter) if gradient is None else gradient
        self._applied = {}
        return True

    def on_eval_start(self, trainer: Trainer, stage: str) -> None:
        self._gradients = {}  # as Lightning clears them before a validation
        super().on_eval_start(trainer, stage)

    # -- checkpoints ----------------------------------------------------------------------------------------------------------------

    def on_save(self, trainer: Trainer, state: MutableMapping[str, Any]) -> None:
        if not trainer.settings.save_weights_only:
            names = {parameter: name for name, parameter in self.named_parameters()}
            state["gradients"] = {names[p]: gradient for p, gradient in self._gradients.items() if gradient is not None}
        super().on_save(trainer, state)

    def on_load(self, trainer: Trainer, state: MutableMapping[str, Any]) -> None:
        saved: Mapping[str, torch.Tensor] = state["gradients"]
        self._gradients = {p: saved[n].to(p.device) if n in saved else None for n, p in self.named_parameters()}
        super().on_load(trainer, state)
