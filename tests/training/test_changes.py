"""Changes of a script since the checkpoint from which it resumes: named, refused or accepted, and then in effect."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optimi
import pytest
import torch
from fabricate_ema import EMA
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabricate import Callback, CheckpointError, ConfigurationError, FitResult, Trainer, TrainModule
from fabricate.testing import run_ranks
from tests.support.runs import events

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Decay:
    """A rate that falls to zero."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        return 1 - step / self.length


class Falling(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the script, whose length has a name of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, horizon: int) -> None:
        self.horizon = horizon
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * (1 - self.last_epoch / self.horizon) for rate in self.base_lrs]


class Gradual(torch.optim.lr_scheduler.LRScheduler):
    """A warm-up that holds the schedule after it, as GradualWarmupScheduler of pytorch-gradual-warmup-lr does."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_epoch: int, after: Any) -> None:
        self.total_epoch, self.after = total_epoch, after
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        if self.last_epoch > self.total_epoch:
            return self.after.get_last_lr()  # type: ignore[no-any-return]
        return [rate * (self.last_epoch + 1) / (self.total_epoch + 1) for rate in self.base_lrs]

    def step(self, epoch: Any = None, metrics: Any = None) -> None:
        if self.last_epoch >= self.total_epoch:
            self.after.step()
        super().step()


class Tuned(TrainModule):
    def __init__(
        self, lr: float = 0.1, decay: float = 0.0, schedule: str = "", gamma: float = 0.5, width: int = 1
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.lr, self.decay, self.schedule, self.gamma, self.width = lr, decay, schedule, gamma, width

    def training_step(self, batch: Any) -> torch.Tensor:
        return 1e-3 * torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=self.decay)
        if self.schedule == "cosine":
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1)
            rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.total_steps - 1)
            return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, rest], milestones=[1])
        total = self.trainer.total_steps
        if self.schedule in ("share", "three parts"):
            length = total // 4
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=length)
            held = [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, length)] * (self.schedule == "three parts")
            ends = [length * (number + 1) for number in range(1 + len(held))]
            rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - ends[-1])
            return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, *held, rest], ends)
        if self.schedule == "object":
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, Decay(total))
        if self.schedule == "method":
            self.horizon = total
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.falling)
        if self.schedule == "own class":
            return optimizer, Falling(optimizer, total)
        if self.schedule == "lambda inside":
            warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 2)
            rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - 2)
            return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, rest], [2])
        if self.schedule == "restarts":
            return optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, total * 3 // 4)
        if self.schedule == "there and back":
            cyclic = torch.optim.lr_scheduler.CyclicLR
            return optimizer, cyclic(optimizer, 0.1, 1.0, step_size_up=total * 3 // 4, cycle_momentum=False)
        if self.schedule == "step sizes":
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, total // 4)
        if self.schedule == "anneal":
            return optimizer, torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=total * 3 // 4)
        if self.schedule == "chained":
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
            return optimizer, torch.optim.lr_scheduler.ChainedScheduler(
                [warmup, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)]
            )
        if self.schedule == "nested":
            after = torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)
            return optimizer, Gradual(optimizer, 1, after)
        if self.schedule == "nested cosine":
            after_warmup = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - 2)
            return optimizer, Gradual(optimizer, 1, after_warmup)
        if self.schedule == "cycle":
            return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, self.trainer.total_steps)
        if self.schedule == "sequence":
            parts = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma) for gamma in (self.gamma, 1.0)]
            return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[self.width])
        if self.schedule == "steps":
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)
        return (optimizer, self.schedule) if self.schedule else optimizer

    def falling(self, step: int) -> float:
        return 1 - step / self.horizon


class Rates(Callback):
    """The options that each update was made with."""

    def __init__(self) -> None:
        self.used: list[tuple[float, float]] = []

    def on_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        self.used.append((round(float(group["lr"]), 9), group["weight_decay"]))


def fit(run_dir: Path, module: Tuned, steps: int = 2, **options: Any) -> tuple[list[tuple[float, float]], FitResult]:
    rates = Rates()
    trainer = Trainer(max_steps=steps, seed=1, run_dir=run_dir, progress=False, plugins=[rates], **options)
    return rates.used, trainer.fit(module, ROWS, batch_size=2)


@pytest.mark.parametrize(
    ("first", "then", "options", "named", "accept", "used"),
    [
        ({}, {"lr": 0.01}, {}, "lr of group 0 of optimizer 'main' 0.1 -> 0.01", ("optimizer", "module"), (0.01, 0.0)),
        (
            {},
            {"decay": 0.5},
            {},
            "weight_decay of group 0 of optimizer 'main' 0.0 -> 0.5",
            ("optimizer", "module"),
            (0.1, 0.5),
        ),
        ({}, {"width": 2}, {}, "argument width of Tuned 1 -> 2", ("module",), (0.1, 0.0)),
        ({}, {}, {"max_grad_norm": 0.5}, "max_grad_norm None -> 0.5", ("max_grad_norm",), (0.1, 0.0)),
        (
            {"schedule": "steps"},
            {"schedule": "steps", "gamma": 0.1},
            {},
            "gamma of scheduler 'main' 0.5 -> 0.1",
            ("scheduler", "module"),
            (0.025, 0.0),
        ),
        (
            {"schedule": "steps"},
            {"schedule": "steps", "lr": 0.4},
            {},
            "lr of group 0 of optimizer 'main' 0.1 -> 0.4",
            ("optimizer", "module"),
            (0.1, 0.0),
        ),
        (
            {"schedule": "linear:total=4"},
            {"schedule": "cosine:total=4"},
            {},
            "kind of scheduler 'main' linear:total=4 -> cosine:total=4",
            ("scheduler", "module"),
            (0.05, 0.0),
        ),
    ],
    ids=["lr", "decay", "argument", "clipping", "gamma", "lr under a schedule", "schedule"],
)
def test_what_changes_how_training_goes_on_is_refused_by_name_or_in_effect(
    first: dict[str, Any],
    then: dict[str, Any],
    options: dict[str, Any],
    named: str,
    accept: tuple[str, ...],
    used: tuple[float, float],
    tmp_path: Path,
) -> None:
    fit(tmp_path, Tuned(**first))
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, Tuned(**then), 3, **options)
    assert named in str(caught.value)
    assert f"Trainer(accept_changes={accept!r})" in str(caught.value)
    assert fit(tmp_path, Tuned(**then), 3, accept_changes=accept, **options)[0] == [used]
    # The new values are those of the run from here on.
    assert len(fit(tmp_path, Tuned(**then), 4, **options)[0]) == 1


def test_a_schedule_that_holds_another_one_goes_on_after_a_resume_and_a_change_of_the_other_is_named(
    tmp_path: Path,
) -> None:
    whole, _ = fit(tmp_path / "whole", Tuned(schedule="nested"), 6)
    fit(tmp_path / "parts", Tuned(schedule="nested"), 3)
    rest, _ = fit(tmp_path / "parts", Tuned(schedule="nested"), 6)
    assert rest == whole[3:]
    assert len({rate for rate, _ in rest}) == 3
    with pytest.raises(CheckpointError, match=r"gamma of part 1 of scheduler 'main' 0.5 -> 0.1"):
        fit(tmp_path / "parts", Tuned(schedule="nested", gamma=0.1), 8)


def test_a_cycle_that_is_made_longer_ends_at_the_new_end(tmp_path: Path) -> None:
    fit(tmp_path, Tuned(schedule="cycle"), 4)
    with pytest.raises(CheckpointError, match=r"phases of scheduler 'main' \[.*total_steps of scheduler 'main' 4 -> 8"):
        fit(tmp_path, Tuned(schedule="cycle"), 8)
    accept = ("scheduler", "optimizer")
    rates, _ = fit(tmp_path, Tuned(schedule="cycle"), 8, accept_changes=accept)
    whole, _ = fit(tmp_path / "whole", Tuned(schedule="cycle"), 8)
    assert rates == whole[4:]


@pytest.mark.parametrize(
    "schedule",
    [
        *("cosine", "share", "three parts", "chained", "lambda inside", "object", "restarts", "there and back"),
        *("step sizes", "anneal", "method", "own class", "nested cosine"),
    ],
)
def test_a_schedule_that_had_come_to_its_end_goes_on_when_it_is_made_longer(tmp_path: Path, schedule: str) -> None:
    fit(tmp_path, Tuned(schedule=schedule), 4)
    rates, _ = fit(tmp_path, Tuned(schedule=schedule), 8, accept_changes=("scheduler",))
    longer, _ = fit(tmp_path, Tuned(schedule=schedule), 16, accept_changes=("scheduler",))
    whole, _ = fit(tmp_path / "whole", Tuned(schedule=schedule), 8)
    assert rates == whole[4:]
    assert longer == fit(tmp_path / "longer", Tuned(schedule=schedule), 16)[0][8:]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"width": 3}, "milestones of scheduler 'main' [1] -> [3]"),
        ({"gamma": 0.1}, "gamma of part 1 of scheduler 'main' 0.5 -> 0.1"),
    ],
)
def test_what_changed_inside_a_sequence_is_named(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    fit(tmp_path, Tuned(schedule="sequence"))
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, Tuned(schedule="sequence", **changed), 3)
    assert named in str(caught.value)


def test_what_may_change_is_named_where_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Tuned(schedule="linear"))
    capsys.readouterr()
    rates, _ = fit(tmp_path, Tuned(schedule="linear", lr=0.1), 4, log_every="2 steps")
    assert rates == [(0.05, 0.0), (0.025, 0.0)]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since it was saved: ")]
    assert "max_steps 2 -> 4" in line
    assert "log_every 10 steps -> 2 steps" in line
    (event,) = [event for event in events(tmp_path) if event["event"] == "resumed"]
    assert "max_steps 2 -> 4" in event["changed"]


def test_reading_in_the_main_process_instead_of_workers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, workers in ((1, 1), (2, 2), (3, 0)):
        capsys.readouterr()
        trainer = Trainer(max_steps=steps, seed=1, run_dir=tmp_path, progress=False)
        trainer.fit(Tuned(), ROWS, batch_size=2, num_workers=workers)
        named = "random numbers for augmentation of worker processes -> of the main process (num_workers=0)"
        assert (named in capsys.readouterr().out) == (steps == 3)


def test_changed_options_of_plugins_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Warms(Callback):
        """Changes attributes, also one that an argument sets."""

        def __init__(self, factor: float, kind: object = None, best: float = 9.0) -> None:
            self.factor, self.kind, self.seen, self.best = factor, kind, 0, best

        def on_step(self) -> None:
            self.seen, self.best = self.seen + 1, self.best - 1

        def on_save(self, state: dict[str, Any]) -> None:
            state["best"] = self.best

        def on_load(self, state: dict[str, Any]) -> None:
            self.best = state["best"]

    for steps, plugins in ((2, [EMA(0.9), Warms(0.5)]), (4, [EMA(0.99), Warms(0.25)])):
        trainer = Trainer(max_steps=steps, seed=1, run_dir=tmp_path, progress=False, plugins=plugins)
        trainer.fit(Tuned(), ROWS, batch_size=2)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since it was saved: ")]
    assert "decay of plugin 'EMA' 0.9 -> 0.99" in line
    assert "factor of plugin 'Warms' 0.5 -> 0.25" in line
    assert not any(name in line for name in ("start of", "seen", "best"))


def test_a_run_that_is_complete_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Tuned())
    capsys.readouterr()
    rates, result = fit(tmp_path, Tuned())
    assert (rates, result.steps, result.stop_reason) == ([], 2, "max_steps")
    assert "already complete: nothing to train (max_steps reached at step 2)" in capsys.readouterr().out


def test_another_accumulation_of_batches_of_ones_own_is_refused(tmp_path: Path) -> None:
    def run(steps: int, **options: Any) -> FitResult:
        batches = [(torch.ones(2, 3), torch.ones(2, 1))] * 8
        return Trainer(max_steps=steps, run_dir=tmp_path, progress=False, **options).fit(Tuned(), batches)

    run(1, gradient_accumulation_steps=2)
    with pytest.raises(CheckpointError, match="was saved with 2 batches of train per update, but this run has 4"):
        run(2, gradient_accumulation_steps=4)
    accept = ("global_batch_size",)
    assert run(2, gradient_accumulation_steps=4, accept_changes=accept).steps == 2


def test_another_accumulation_of_the_same_global_batch_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, accumulated in ((1, 1), (2, 2)):
        trainer = Trainer(
            max_steps=steps, gradient_accumulation_steps=accumulated, run_dir=tmp_path, progress=False, seed=1
        )
        trainer.fit(Tuned(), ROWS, batch_size=4 // accumulated)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since it was saved: ")]
    assert "gradient_accumulation_steps 1 -> 2" in line
    assert "max_steps 1 -> 2" in line


def test_another_sampler_is_refused(tmp_path: Path) -> None:
    from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

    def run(steps: int, sampler: Any, **options: Any) -> FitResult:
        rows: Any = DataLoader(ROWS, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        return Trainer(max_steps=steps, run_dir=tmp_path, progress=False, **options).fit(Tuned(), rows)

    run(1, WeightedRandomSampler([1.0] * 8, 8))
    with pytest.raises(CheckpointError, match=r"'WeightedRandomSampler'.*'SubsetRandomSampler'"):
        run(2, SubsetRandomSampler(range(8)))
    with pytest.raises(
        ConfigurationError,
        match="gives its rows in another order than when the checkpoint was saved, at row 2 of this epoch",
    ) as caught:
        run(2, WeightedRandomSampler([1.0, 0.0] * 4, 8))
    assert any("epoch 0, step 1, micro-batch" in note for note in caught.value.__notes__)
    assert run(2, WeightedRandomSampler([1.0] * 8, 8)).steps == 2
    assert run(3, WeightedRandomSampler([1.0, 0.0] * 4, 8), accept_changes=("train",)).steps == 3
    assert run(5, WeightedRandomSampler([0.0, 1.0] * 4, 8), accept_changes=("train",)).steps == 5


def test_other_batches_of_a_batch_sampler_are_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def run(steps: int, batches: Any) -> FitResult:
        rows: Any = DataLoader(ROWS, batch_sampler=batches)  # type: ignore[arg-type]
        return Trainer(max_steps=steps, run_dir=tmp_path, progress=False).fit(Tuned(), rows)

    batches = [[0, 1], [2, 3], [4, 5, 6], [7]]
    run(1, batches)
    with pytest.raises(ConfigurationError, match="in another order"):
        run(2, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert run(4, batches).steps == 4  # the end of an epoch: the next may be another one
    assert run(5, batches[::-1]).steps == 5


class Stream(IterableDataset[Any]):
    """ROWS, divided over the worker processes of a loader."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return itertools.islice(ROWS, *((worker.id, None, worker.num_workers) if worker else (0, None)))


def test_another_number_of_processes_that_read_a_stream_is_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def run(steps: int, workers: int, **options: Any) -> FitResult:
        rows = DataLoader(Stream(), batch_size=2, num_workers=workers)
        return Trainer(max_steps=steps, run_dir=tmp_path, progress=False, **options).fit(Tuned(), rows)

    run(1, 1)
    with pytest.raises(CheckpointError, match=r"a stream that 1 process\(es\) of its DataLoader read; now 2 would"):
        run(2, 2)
    assert run(2, 0).steps == 2
    assert run(3, 2, accept_changes=("train",)).steps == 3
    assert run(4, 2).steps == 4  # the end of an epoch
    assert run(5, 0).steps == 5


def test_other_validation_data_gets_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Validated(Tuned):
        def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": self.training_step(batch)}

    for steps, val in ((1, ROWS[:4]), (2, list(ROWS[:4])), (3, ROWS[4:]), (4, ROWS[4:6]), (5, ROWS[4:6])):
        Trainer(max_steps=steps, run_dir=tmp_path, progress=False).fit(Validated(), ROWS, val, batch_size=2)
        assert ("note: val has other rows than when" in capsys.readouterr().err) == (steps in (3, 4))


def test_other_rows_that_lie_in_memory_get_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, rows in ((1, ROWS), (2, list(ROWS)), (3, ROWS[::-1])):
        Trainer(max_steps=steps, run_dir=tmp_path, progress=False).fit(Tuned(), rows, batch_size=2)
        assert ("but train now has fingerprint" in capsys.readouterr().err) == (steps == 3)


class Dies(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int) -> None:
        if step == self.step:
            raise InterruptedError


class Total(Callback):
    """The number of all updates, as each fit was told it."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.told.append(trainer.total_steps)


@pytest.mark.parametrize("died", [3, 6, 7])  # within an epoch of 6 updates, at its end, and in the next
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (4, 2), (4, 3), (4, 8, 2)])
def test_a_schedule_ends_with_the_fit_if_the_batch_changes(tmp_path: Path, died: int, sizes: tuple[int, ...]) -> None:
    def run(size: int, *plugins: Callback) -> FitResult:
        accept = ("global_batch_size",)
        options: Any = {"max_epochs": 4, "save_every": "1 step", "accept_changes": accept, "seed": 1}
        trainer = Trainer(run_dir=tmp_path, progress=False, plugins=[rates, total, *plugins], **options)
        return trainer.fit(Tuned(schedule="linear"), ROWS * 3, batch_size=size)

    rates, total = Rates(), Total()
    for number, size in enumerate(sizes[:-1]):
        with pytest.raises(InterruptedError):
            run(size, Dies(died + 2 * number))
    steps = run(sizes[-1]).steps
    assert total.told[-1] == steps
    assert total.told[0] == 24
    assert rates.used[-1][0] == pytest.approx(0.1 / steps)


class Batches(torch.utils.data.Sampler[list[int]]):
    """24 rows in batches of one's own size."""

    def __init__(self, rows: int) -> None:
        self.batch_size = rows

    def __len__(self) -> int:
        return 24 // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(row, row + self.batch_size)) for row in range(0, 24, self.batch_size)])


@pytest.mark.parametrize("died", [3, 6, 7])
@pytest.mark.parametrize("per_update", [(2, 2), (2, 4), (2, 1), (2, 4, 1)])
@pytest.mark.parametrize("made", ["by a sampler", "in a list"])
def test_a_schedule_ends_with_the_fit_if_the_number_of_batches_per_update_changes(
    tmp_path: Path, died: int, per_update: tuple[int, ...], made: str
) -> None:
    def run(number: int, *plugins: Callback) -> FitResult:
        accept = ("global_batch_size",)
        options: Any = {"max_epochs": 4, "save_every": "1 step", "accept_changes": accept, "seed": 1}
        options["gradient_accumulation_steps"] = number
        trainer = Trainer(run_dir=tmp_path, progress=False, plugins=[rates, total, *plugins], **options)
        loader: Any = DataLoader(ROWS * 3, batch_sampler=Batches(2))  # type: ignore[arg-type]
        return trainer.fit(Tuned(schedule="linear"), loader if made == "by a sampler" else list(loader))

    rates, total = Rates(), Total()
    for place, number in enumerate(per_update[:-1]):
        with pytest.raises(InterruptedError):
            run(number, Dies(died + 2 * place))
    steps = run(per_update[-1]).steps
    assert total.told[-1] == steps
    assert total.told[0] == 24
    assert rates.used[-1][0] == pytest.approx(0.1 / steps)


def test_other_batches_at_the_end_of_an_epoch_are_accepted_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(epochs: int, rows: int, **options: Any) -> list[tuple[float, float]]:
        rates = Rates()
        loader: Any = DataLoader(ROWS * 3, batch_sampler=Batches(rows))  # type: ignore[arg-type]
        trainer = Trainer(max_epochs=epochs, run_dir=tmp_path, progress=False, plugins=[rates], **options)
        trainer.fit(Tuned(schedule="linear"), loader)
        return rates.used

    run(2, 2)
    with pytest.raises(
        CheckpointError, match=r"with batches of 2 rows, but this run has batches of 4. Use the same batch_s"
    ):
        run(4, 4)
    rates = run(4, 4, accept_changes=("global_batch_size",))
    assert "rows per batch 2 -> 4; batches per epoch 12 -> 6" in capsys.readouterr().out
    assert len(rates) == 12
    assert rates[-1][0] == pytest.approx(0.1 / 36)


class Weighted(TrainModule):
    """Class weights in a buffer, a frozen teacher, and a batch norm, whose buffers training changes."""

    def __init__(self, weight: float, teacher: float) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight]))
        self.teacher = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
        torch.nn.init.constant_(self.teacher.weight, teacher)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.layer(batch[0]), (batch[1][:, 0] > 3).long())
        return loss + (self.layer(batch[0]) - self.teacher(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), 1e-3)


KEPT = "loss.weight, teacher.weight: the script sets other values than when the checkpoint was saved"


def test_buffers_and_frozen_weights_that_a_script_sets_otherwise_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int, weight: float, teacher: float, **options: Any) -> Weighted:
        # the arguments are recorded, but this is about values that a script reads from anywhere
        torch.manual_seed(0)
        module = Weighted(weight, teacher)
        object.__setattr__(module, "_arguments", ((1.0, 1.0), {}))
        capsys.readouterr()
        Trainer(max_steps=steps, run_dir=tmp_path, progress=False, **options).fit(module, ROWS, batch_size=4)
        return module

    def said() -> str:
        return "".join(capsys.readouterr())

    run(1, 2.0, 2.0)
    run(2, 2.0, 2.0)
    assert "the script sets" not in said()
    for steps in (3, 4):  # said until the script is put right
        module = run(steps, 5.0, 6.0)
        assert KEPT in said()
        assert module.loss.weight is not None
        assert (module.loss.weight[1], module.teacher.weight[0, 0]) == (2, 2)
    run(5, 2.0, 2.0)
    assert "the script sets" not in said()
    module = run(6, 5.0, 6.0, accept_changes=("constants",))
    assert "teacher.weight as in the checkpoint -> as in the script" in said()
    assert module.loss.weight is not None
    assert (module.loss.weight[1], module.teacher.weight[0, 0]) == (5, 6)
    run(7, 5.0, 6.0)
    assert "the script sets" not in said()
    trainer = Trainer(progress=False)
    trainer.validate(Evaluated(2.0, 6.0), ROWS, checkpoint=tmp_path, batch_size=4)
    assert "loss.weight: the script sets other values" in said()
    loaded = Weighted.load_from_checkpoint(tmp_path, weight=9.0, teacher=6.0)
    assert "loss.weight: the script sets other values" in said()
    assert loaded.loss.weight[1] == 5


class Evaluated(Weighted):
    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}


def test_accepted_changes_of_the_data_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Tuned(), steps=1)
    accept = ("global_batch_size", "train", "seed")
    options: Any = {"max_steps": 2, "seed": 2, "run_dir": tmp_path, "progress": False, "accept_changes": accept}
    Trainer(**options).fit(Tuned(), ROWS[:6], batch_size=3)
    assert (
        "changed since it was saved: global_batch_size 2 -> 3; num_samples 8 -> 6; seed 1 -> 2"
        in capsys.readouterr().out
    )


def test_equal_numbers_of_another_type_are_no_change(tmp_path: Path) -> None:
    fit(tmp_path, Tuned(lr=1.0, decay=0.0), steps=1, max_grad_norm=1.0)
    module = Tuned(lr=1, decay=0)
    object.__setattr__(module, "_arguments", ((), {"lr": 1.0}))
    assert fit(tmp_path, module, max_grad_norm=1)[1].steps == 2


def test_a_complete_run_that_is_started_again_has_the_same_lines(tmp_path: Path) -> None:
    lines = []
    for _ in range(2):
        result = fit(tmp_path, Tuned(), steps=7, max_grad_norm=1.0, log_every=3)[1]
        written = (tmp_path / "metrics.jsonl").read_text().splitlines()
        lines.append(([{**json.loads(line), "clock": 0} for line in written], result.metrics))
    assert lines[0] == lines[1]
    assert lines[0][0][-1]["metrics"]["grad_norm"] == lines[0][1]["grad_norm"]


class Compensated(Weighted):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimi.AdamW(self.layer.parameters(), lr=1e-3)


def test_constants_that_a_precision_converts_are_named_and_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, value, accept in ((1, 2.1, ()), (2, 6.3, ()), (3, 6.3, ("constants",))):
        capsys.readouterr()
        torch.manual_seed(0)
        module = Compensated(value, value)
        object.__setattr__(module, "_arguments", ((1.0, 1.0), {}))
        options: Any = {"run_dir": tmp_path, "precision": "bf16-true", "accept_changes": accept, "progress": False}
        Trainer(max_steps=steps, **options).fit(module, ROWS, batch_size=4)
        assert (KEPT in "".join(capsys.readouterr())) == (steps == 2)
    assert torch.equal(module.teacher.weight, torch.full((2, 3), 6.3).bfloat16().float())


def _constants_on_a_rank(directory: Path) -> list[Any]:
    held = []
    for strategy in ("fsdp", "zero3"):
        for steps, accept in ((1, ()), (2, ()), (3, ("constants",))):
            torch.manual_seed(0)
            module = Weighted(*((2.0, 2.0) if steps == 1 else (5.0, 6.0)))
            object.__setattr__(module, "_arguments", ((1.0, 1.0), {}))
            trainer = Trainer(
                max_steps=steps,
                run_dir=directory / strategy,
                strategy=strategy,
                accept_changes=accept,
                plugins=[whole := Whole()],
                progress=False,
            )
            trainer.fit(module, ROWS, batch_size=2)
            held.append((whole.teacher, float(module.loss.weight[1])))
    return held


class Whole(Callback):
    teacher = 0.0

    def on_fit_end(self, trainer: Trainer, module: Weighted) -> None:
        self.teacher = float(trainer.strategy.gather(module.teacher.weight).mean())


def test_sharded_constants_are_those_of_the_checkpoint_or_the_script(tmp_path: Path) -> None:
    assert run_ranks(_constants_on_a_rank, 2, tmp_path) == [[(2, 2), (2, 2), (6, 5)] * 2] * 2
