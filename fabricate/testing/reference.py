"""The training of the conformance kit: one small module, trained by hand in plain PyTorch and by fabricate on ranks.

Owns the module, its data, the loop by hand, and the records of a fit. It compares nothing: `judge` does.
"""

from __future__ import annotations

import hashlib
import operator
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, RankError, Trainer, TrainModule
from fabricate.testing._worker import _load

SEED = 3
TOKENS, WIDTH = 4, 16
BOOM = "raised on purpose by the conformance kit"
Part = tuple[int, torch.Tensor]
"""A rank's part of a tensor: its start in the flattened tensor, and its elements."""


@dataclass(frozen=True)
class Subject:
    """A plugin in a form that can be sent to ranks: a name for `Trainer`, or the place of a class or factory."""

    text: str
    module: str = ""
    file: str = ""
    qualname: str = ""

    def make(self) -> Any:
        """The name, or a new object, because runs must not share state."""
        return self.load()() if self.module else self.text

    def load(self) -> Any:
        """The class or factory, imported from its file."""
        return operator.attrgetter(self.qualname)(_load(self.module, self.file))

    def __str__(self) -> str:
        return self.qualname or repr(self.text)


class Learner(TrainModule):
    """Per-token regression on rows of `TOKENS` tokens; about 1,100 parameters in several units, and a buffer.

    by_token: rows have unequal numbers of tokens, and the loss is the mean over tokens. several: one optimizer for the blocks and one for
    the head, which take turns. optimizer: a function of the parameters that makes an optimizer.
    """

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        by_token: bool = False,
        several: bool = False,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.by_token, self.several, self.optimizer = by_token, several, optimizer or _momentum
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)])
        self.head = torch.nn.Linear(WIDTH, 1)
        self.dropout = torch.nn.Dropout(dropout)
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.observed = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
            self.observed = str(x.dtype).removeprefix("torch.")
            x = self.dropout(torch.tanh(x))
        out: torch.Tensor = self.head(x).squeeze(-1)
        return out

    def loss(self, batch: Any) -> torch.Tensor:
        """Mean squared error over all tokens; with `by_token`, over those that count."""
        x, y, counts = batch
        error = (self(x) - y).square()
        mean: torch.Tensor = (error * counts).sum() / counts.sum().clamp(min=1) if self.by_token else error.mean()
        return mean

    def training_step(self, batch: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {"loss": self.loss(batch)}
        if self.by_token:
            answer["weight"] = batch[2].sum()
        if self.several:
            answer["optimizer"] = self.turn(self.trainer.step)
        return answer

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(batch)}

    @staticmethod
    def turn(step: int) -> str:
        """The name of the optimizer for the update after `step`."""
        return ("blocks", "head")[step % 2]

    def configure_optimizers(self) -> Any:
        if self.several:
            return {name: self.optimizer(list(getattr(self, name).parameters())) for name in ("blocks", "head")}
        return self.optimizer(list(self.parameters()))


def _momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # unlike Adam, SGD is sensitive to the scale of gradients


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, which has state for each parameter."""
    return torch.optim.AdamW(parameters, lr=0.01)


def rows(number: int) -> TensorDataset:
    """`number` rows of float32: x (tokens, width), y (tokens,), and counts (tokens,), 1 for tokens that count. Every fourth row is full,
    others may be empty. Targets are small, so that an initial loss scale of 65536 does not overflow float16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, TOKENS, WIDTH, generator=generator)
    lengths = torch.randint(0, TOKENS + 1, (number,), generator=generator)
    lengths[::4] = TOKENS
    counts = (torch.arange(TOKENS) < lengths[:, None]).float()
    return TensorDataset(x, 0.3 * torch.tanh(x[..., :4].sum(-1)), counts)


@dataclass(frozen=True)
class Case:
    """One training task. `global_batch` is a multiple of accumulation x ranks; rows are read in order unless `shuffle`."""

    global_batch: int
    accumulation: int = 1
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    ragged: bool = False
    by_token: bool = False
    several: bool = False
    optimizer: Subject | None = None
    dropout: float = 0.0
    shuffle: bool = False
    steps: int = 6
    val_rows: int = 0

    def module(self) -> Learner:
        """The module with its initial weights, the same at each call."""
        torch.manual_seed(SEED)
        optimizer = self.optimizer.load() if self.optimizer else None
        return Learner(dropout=self.dropout, by_token=self.by_token, several=self.several, optimizer=optimizer)

    def data(self) -> TensorDataset:
        """Rows for three windows per epoch. If ragged, the third window has one row, so only one rank has data."""
        return rows(2 * self.global_batch + (1 if self.ragged else self.global_batch))


@dataclass
class Trace:
    """The records of a fit on one rank, or of the loop by hand."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    steps: list[tuple[dict[str, str], str]] = field(default_factory=list)
    """After each update: digests of this rank's weights, and of its random generators."""
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """The metrics of each log boundary, and the last value of every metric."""
    saved: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    skipped: int = 0
    gradients: dict[str, Part] = field(default_factory=dict)
    """Before the first update, if `Fit.hear_gradients`; without parameters whose `grad` is None."""
    first: dict[str, Part] = field(default_factory=dict)
    """The weights before the first update of this fit, after a checkpoint was loaded."""
    last: dict[str, Part] = field(default_factory=dict)
    bytes_held: int = 0
    observed: str = ""
    declared_dtype: str = ""
    mixed_precision: str = ""
    stop_reason: str = ""
    drifted: bool = False
    """Whether the fit ended with the error that ranks hold different weights."""


def by_hand(case: Case) -> Trace:
    """The trace of training in plain PyTorch: one process with whole global batches, without fabricate's loop and accumulation."""
    trace = Trace()
    with torch.random.fork_rng(devices=[]):
        module, data = case.module(), case.data()
    environment = dict(os.environ)
    answer = module.configure_optimizers()
    os.environ.clear()  # undo: torch sets variables of its compiler when a process builds its first optimizer
    os.environ.update(environment)
    optimizers: Mapping[str, torch.optim.Optimizer] = answer if case.several else {"": answer}
    starts = range(0, len(data), case.global_batch)
    windows = [[t[start : start + case.global_batch] for t in data.tensors] for start in starts]
    for step in range(case.steps):
        optimizer = optimizers[Learner.turn(step) if case.several else ""]
        loss = module.loss(windows[step % len(windows)])
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, case.max_grad_norm or float("inf"))
        if case.max_grad_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, case.max_grad_value)
        if step == 0:
            trace.gradients = {n: (0, p.grad.flatten().clone()) for n, p in named(module) if p.grad is not None}
        optimizer.step()
        module.zero_grad()
        trace.losses.append(loss.item())
        trace.norms.append(norm.item())
    trace.last = {n: (0, p.detach().flatten()) for n, p in named(module)}
    return trace


def named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The module's parameters, sorted by name."""
    return sorted(module.named_parameters())


@dataclass(frozen=True)
class Fit:
    """One fit of a job, the same on every rank. `label`: the name of the check in messages. `precision`: None for fp32."""

    label: str
    case: Case
    strategy: Subject
    precision: Subject | None = None
    plugins: tuple[Subject, ...] = ()
    hear_gradients: bool = False
    run_dir: str | None = None
    resume: str = "never"
    accept_changes: tuple[str, ...] = ()
    failing_rank: int | None = None


SAVE_STEP = 2  # in the middle of an epoch
MARK = "[kit] "


def run_fits(fits: list[Fit]) -> list[Trace]:
    """The job of one rank: one trace per fit. Exceptions get a note with the fit's label."""
    traces = []
    for fit in fits:
        print(f"{MARK}{fit.label}", flush=True)  # shows the parent in which fit a rank hangs
        try:
            traces.append(_run(fit))
        except BaseException as exc:
            exc.add_note(f"{MARK}{fit.label}")
            raise
        if traces[-1].drifted:
            break  # `judge` reports after which update, and what to do
    return traces


def _run(fit: Fit) -> Trace:
    case, trace = fit.case, Trace()
    recorder = (_GradientRecorder if fit.hear_gradients else _Recorder)(trace)
    extra: list[object] = [recorder]
    if fit.failing_rank == int(os.environ["RANK"]):
        extra.append(_Failing())
    elif fit.failing_rank is not None:
        extra.append(_NotFailing())
    module, data = case.module(), case.data()
    trainer = Trainer(
        strategy=fit.strategy.make(),
        precision=fit.precision.make() if fit.precision else "fp32",
        plugins=[*(plugin.make() for plugin in fit.plugins), *extra],
        max_steps=case.steps,
        gradient_accumulation_steps=case.accumulation,
        max_grad_norm=case.max_grad_norm,
        max_grad_value=case.max_grad_value,
        seed=SEED,
        run_dir=fit.run_dir,
        save_every=f"{SAVE_STEP} steps" if fit.run_dir else None,
        validate_every="2 steps" if case.val_rows else None,
        keep="all",
        progress=False,
        accept_changes=fit.accept_changes,
    )
    micro_batch = case.global_batch // case.accumulation // int(os.environ["WORLD_SIZE"])
    val = rows(case.val_rows) if case.val_rows else None
    try:
        result = trainer.fit(module, data, val, batch_size=micro_batch, shuffle=case.shuffle, resume=fit.resume)
    except RankError as exc:
        if "hold different weights" not in str(exc):
            raise
        trace.drifted = True
        # The weights that a checkpoint would hold.
        trace.saved += [(len(trace.steps), held) for held, _ in trace.steps[-1:]]
        return trace
    trace.stop_reason, trace.observed = result.stop_reason, module.observed
    return trace


class _Recorder(Callback):
    """The plugin that fills a trace. It is listed last, to see the effects of the other plugins; it changes nothing and draws no random
    numbers."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def on_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._trace.declared_dtype = trainer.precision.compute_dtype
        self._trace.mixed_precision = trainer.accelerator.mixed_precision
        if not self._trace.first:
            self._trace.first = _held(trainer, module)

    def on_step(
        self, trainer: Trainer, module: TrainModule, loss: torch.Tensor, grad_norm: torch.Tensor | None
    ) -> None:
        self._trace.losses.append(float(loss))
        self._trace.norms.append(None if grad_norm is None else float(grad_norm))
        self._trace.steps.append((digests(_held(trainer, module)), random_digest()))

    def on_step_skipped(self) -> None:
        self._trace.skipped += 1

    def on_eval_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._trace.metrics.append((trainer.step, dict(metrics)))

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        self._trace.logged.append((step, dict(metrics)))

    def on_saved(self, trainer: Trainer, module: TrainModule, step: int) -> None:
        self._trace.saved.append((step, digests(_held(trainer, module))))

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._trace.last = _held(trainer, module)
        self._trace.logged.append((trainer.step, trainer.metrics))
        memory = [trainer.strategy.local_part(p).memory.untyped_storage() for _, p in named(module)]
        self._trace.bytes_held = sum({m.data_ptr(): m.nbytes() for m in memory}.values())


class _GradientRecorder(_Recorder):
    def on_before_step(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.step == 0:
            gradients = {n: p.grad for n, p in named(module) if p.grad is not None}
            self._trace.gradients = {n: _part(trainer, gradient) for n, gradient in gradients.items()}


def _held(trainer: Trainer, module: TrainModule) -> dict[str, Part]:
    """This rank's part of each parameter, by name."""
    return {name: _part(trainer, parameter) for name, parameter in named(module)}


def _part(trainer: Trainer, tensor: torch.Tensor) -> Part:
    part = trainer.strategy.local_part(tensor)
    return part.start, part.values.detach().flatten().cpu().clone()


class _Failing(Callback):
    name = "failing"

    def on_step(self, step: int) -> None:
        if step == SAVE_STEP:
            raise ValueError(BOOM)


class _NotFailing(Callback):
    """The counterpart of `_Failing` on the other ranks, because the listeners of hooks must be the same on all ranks."""

    name = "failing"

    def on_step(self, step: int) -> None:
        pass


def digests(held: Mapping[str, Part]) -> dict[str, str]:
    """A digest of each part, by its elements, "name[begin:end]": two ranks may hold different parts of a parameter."""
    return {
        f"{name}[{start}:{start + values.numel()}]": hashlib.sha256(
            values.contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, (start, values) in held.items()
    }


def random_digest() -> str:
    """A digest of the global generators of Python, NumPy and torch."""
    numbers = torch.get_rng_state().numpy().tobytes()
    return hashlib.sha256(
        repr((random.getstate(), numpy.random.get_state(legacy=False))).encode() + numbers
    ).hexdigest()


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its logical name, flattened, on the CPU."""
    from safetensors.torch import load_file

    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in path.glob("*.safetensors"):
        for entry, values in load_file(file).items():
            name, _, start = entry.rpartition("|")
            pieces.setdefault(name, []).append((int(start), values))
    order = operator.itemgetter(0)
    return {name: torch.cat([values for _, values in sorted(found, key=order)]) for name, found in pieces.items()}
