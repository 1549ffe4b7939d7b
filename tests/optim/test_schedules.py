"""Learning-rate schedules: by name as transformers has them, when they advance, and lengths that are not the fit's."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from fabricate import Callback, ConfigurationError, Trainer, TrainModule, hookimpl
from fabricate.optim.named_schedules import named_schedule, schedule_names
from fabricate.optim.pace import notes_of_pace
from fabricate.optim.schedules import Schedule, own_lengths
from fabricate.testing import run_ranks

ROWS = [(torch.full((2,), row / 10), torch.tensor([row / 10])) for row in range(10)]
Configured = Callable[[Any, torch.optim.Optimizer], Any]
"""What `configure_optimizers` returns for a trainer and an optimizer."""


class Module(TrainModule):
    def __init__(self, configured: Configured) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.configured = configured

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Any:
        return {"error": 1.0, "accuracy": 0.0}

    def configure_optimizers(self) -> Any:
        return self.configured(self.trainer, torch.optim.SGD(self.parameters(), lr=0.5))


class Rates(Callback):
    """The learning rate that each update was made with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    @hookimpl
    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))


def fit(configured: Configured, val: Any = None, **options: Any) -> list[float]:
    rates = Rates()
    trainer = Trainer(progress=False, plugins=[rates], **({"max_epochs": 3} | options))
    trainer.fit(Module(configured), ROWS, val, batch_size=2)
    return rates.rates


# 10 rows, batches of 2, two to an update: 3 updates an epoch, of which the last is a single batch.
WINDOWS = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("named", "theirs"),
    [
        ("constant", lambda o: transformers.get_constant_schedule(o)),
        ("constant:warmup=3", lambda o: transformers.get_constant_schedule_with_warmup(o, 3)),
        ("linear", lambda o: transformers.get_linear_schedule_with_warmup(o, 0, 9)),
        ("linear:warmup=0.3", lambda o: transformers.get_linear_schedule_with_warmup(o, 3, 9)),
        ("cosine:warmup=2", lambda o: transformers.get_cosine_schedule_with_warmup(o, 2, 9)),
        (
            "cosine:warmup=2,minimum=0.1",
            lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, 2, 9, min_lr_rate=0.1),
        ),
        (
            "wsd:warmup=2,decay=0.4",
            lambda o: transformers.get_wsd_schedule(o, 2, 4, num_training_steps=9, decay_type="linear"),
        ),
    ],
)
def test_a_named_schedule_is_that_of_transformers_over_the_updates_that_come(
    named: str, theirs: Callable[[torch.optim.Optimizer], Any]
) -> None:
    learning_rates = fit(lambda trainer, optimizer: (optimizer, named), **WINDOWS)
    optimizer = optimizer_of_one()
    assert learning_rates == pytest.approx(rates(theirs(optimizer), optimizer, 9), abs=1e-12)


OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], int]] = {
    "linear:warmup=2": ({}, 2),
    "cosine:warmup=0.2": ({}, 2),
    "cosine_with_restarts:num_cycles=2,warmup=2": ({"num_cycles": 2}, 2),
    "polynomial:lr_end=0.01,power=2": ({"lr_end": 0.01, "power": 2.0}, 0),
    "constant": ({}, 0),
    "constant_with_warmup:warmup=3": ({}, 3),
    "inverse_sqrt:warmup=2,timescale=5": ({"timescale": 5}, 2),
    "cosine_with_min_lr:min_lr=0.1": ({"min_lr": 0.1}, 0),
    "cosine_warmup_with_min_lr:warmup=2,minimum=0.1,warmup_lr_rate=0.2": (
        {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
        2,
    ),
    "warmup_stable_decay:warmup=1,decay=4,decay_type=1-sqrt": ({"num_decay_steps": 4, "decay_type": "1-sqrt"}, 1),
}


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, updates: int) -> list[float]:
    values = []
    for _ in range(updates):
        values.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return values


def optimizer_of_one() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)


@pytest.mark.parametrize("text", OF_TRANSFORMERS)
def test_every_name_of_transformers_has_its_options(text: str) -> None:
    specific, warmup = OF_TRANSFORMERS[text]
    ours, theirs = optimizer_of_one(), optimizer_of_one()
    scheduler = transformers.get_scheduler(text.partition(":")[0], theirs, warmup, 9, specific)
    assert rates(named_schedule("here", ours, text, 9, "")[0], ours, 9) == rates(scheduler, theirs, 9)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("reduce_lr_on_plateau:factor=0.1,patience=0,mode=max", [0.5, 0.5, 0.05, 0.005]),
        ("greedy:factor=0.5,patience=0", [0.5, 1.0, 0.5, 0.25]),
    ],
)
def test_a_named_schedule_by_a_metric_advances_after_each_validation(
    name: str, wanted: list[float], tmp_path: Path
) -> None:
    """The metric stays as it is. The fourth epoch is one of a resumed run."""

    def configured(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
        return optimizer, name, "val_error"

    learning_rates = fit(configured, ROWS, run_dir=tmp_path, **WINDOWS)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["settings"]["schedule"]["value"] == f"{name}, advanced by val_error"
    learning_rates += fit(configured, ROWS, run_dir=tmp_path, max_epochs=4, **WINDOWS)
    assert learning_rates == pytest.approx([rate for rate in wanted for _ in range(3)])


def test_every_named_schedule_is_tried_in_this_file() -> None:
    tried = {text.partition(":")[0] for text in OF_TRANSFORMERS} | {"wsd", "reduce_lr_on_plateau", "greedy"}
    assert tried == set(schedule_names())


def test_a_schedule_stays_at_its_end_when_more_updates_come() -> None:
    learning_rates = fit(lambda trainer, optimizer: (optimizer, "cosine:total=3,minimum=0.1"), max_steps=6)
    assert learning_rates[3:] == pytest.approx([0.05] * 3)


def test_a_schedule_without_an_end_needs_no_number_of_updates() -> None:
    optimizer = optimizer_of_one()
    for text in ("constant", "constant:warmup=3", "inverse_sqrt:warmup=3", "constant:warmup=0.3,total=9"):
        assert named_schedule("here", optimizer, text, None, "")[1] == text
    with pytest.raises(ConfigurationError, match=r"not known \(no length\); give it: 'constant:total=1000'"):
        named_schedule("here", optimizer, "constant:warmup=0.3", None, "no length")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polynomial:power=high", "scheduler='polynomial': option power='high' is not float"),
        ("polynomial:lr_end=9", r"is 'polynomial:lr_end=9': lr_end \(9.0\) must be smaller than initial lr"),
        ("warmup_stable_decay:decay_type=steps", "Unknown decay type: steps"),
        ("greedy:warmup=high", "option warmup='high' is not int"),
        ("linear:total=soon", "total='soon' is not a number"),
        ("linear:minimum=0.1", "'linear' has no option 'minimum'; options: total, warmup"),
    ],
)
def test_options_that_transformers_does_not_take_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        named_schedule("here", optimizer_of_one(), text, 9, "")


def test_the_plan_shows_the_schedule_and_the_rate_it_rises_to(tmp_path: Path) -> None:
    fit(lambda trainer, optimizer: (optimizer, "cosine:warmup=0.5"), run_dir=tmp_path, **WINDOWS)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["settings"]["schedule"]["value"] == "cosine:warmup=0.5 over 9 updates"
    assert plan["settings"]["learning_rate"]["value"] == [0.5]
    assert plan["notes"] == []


def per_epoch(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer, lr_scheduler.StepLR(optimizer, 1, 0.1), "epoch"


def waiting(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.1, patience=0), "val_error"


def per_update(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / trainer.total_steps)


def test_a_scheduler_advances_per_epoch_on_request() -> None:
    assert fit(per_epoch, **WINDOWS) == pytest.approx([0.5] * 3 + [0.05] * 3 + [0.005] * 3)


def test_a_scheduler_waits_for_the_metric_that_is_named() -> None:
    # It stays as it is, which is a plateau from the second validation on.
    assert fit(waiting, ROWS, **WINDOWS) == pytest.approx([0.5] * 3 + [0.5] * 3 + [0.05] * 3)


def job() -> list[list[float]]:
    return [fit(configured, ROWS, **WINDOWS) for configured in (per_epoch, waiting, per_update)]


@pytest.mark.parametrize(("world_size", "updates"), [(2, 2), (3, 1)])
def test_schedules_advance_once_whatever_the_number_of_ranks(world_size: int, updates: int) -> None:
    """10 rows in windows of 4 on each rank, so the last is shorter; rates as they were asked for, not scaled."""
    for by_epoch, by_metric, by_update in run_ranks(job, world_size):
        assert by_epoch == pytest.approx([0.5] * updates + [0.05] * updates + [0.005] * updates)
        assert by_metric == pytest.approx([0.5] * 2 * updates + [0.05] * updates)
        assert by_update == pytest.approx([0.5 * (1 - step / (3 * updates)) for step in range(3 * updates)])


@pytest.mark.parametrize(
    ("scheduler", "metric", "noted"),
    [
        ("min", "val_accuracy", True),
        ("max", "val_accuracy", False),
        ("min", "val_error", False),
        ("reduce_lr_on_plateau:mode=min", "val_accuracy", False),
    ],
)
def test_a_plateau_of_a_metric_that_should_rise_is_noted_if_its_mode_is_the_default(
    scheduler: str, metric: str, noted: bool, tmp_path: Path
) -> None:
    def configured(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
        by_object = lr_scheduler.ReduceLROnPlateau(optimizer, scheduler) if scheduler in ("min", "max") else scheduler
        return optimizer, by_object, metric

    fit(configured, ROWS, run_dir=tmp_path, **WINDOWS)
    notes = json.loads((tmp_path / "plan.json").read_text())["notes"]
    assert any("mode='min', which takes a rise of val_accuracy for no improvement" in note for note in notes) == noted


def test_a_schedule_of_an_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    fit(per_epoch, run_dir=tmp_path, max_epochs=2, **WINDOWS)
    assert fit(per_epoch, run_dir=tmp_path, max_epochs=3, **WINDOWS) == pytest.approx([0.005] * 3)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((), "return an optimizer, (optimizer, scheduler) or (optimizer, scheduler, 'epoch')"),
        (("cosin",), "is 'cosin'; did you mean 'cosine'?; give constant, linear, cosine, wsd, "),
        (("cosine:warm=3",), "has no option 'warm'; did you mean 'warmup'?"),
        (("cosine:warmup=1.5",), "warmup=1.5: give a share below 1, or a whole number of updates"),
        (
            ("cosine:warmup=1.0",),
            "warmup=1.0: give a share below 1, or a whole number of updates without a decimal point",
        ),
        (("cosine:warmup=-1",), "warmup=-1: give a share below 1"),
        (("cosine:minimum=2",), "minimum=2: give a share of the learning rate"),
        (("wsd:warmup=10,decay=10",), "warmup=10 and decay=10 are more than all 15 updates"),
        (("cosine", "epoch"), "is 'cosine', and schedules with a name advance per update; leave 'epoch' out"),
        ((3,), "is int; it needs step(), state_dict(), load_state_dict(), or to be one of the names constant"),
        (("step lr", "epochs"), "cannot advance by 'epochs'; give 'step' (updates, the default) or 'epoch'"),
        (("plateau", "epoch"), "cannot advance by 'epoch'; ReduceLROnPlateau takes the name of a metric"),
        (
            ("reduce_lr_on_plateau:factor=0.5", "val_accuracy"),
            "is 'reduce_lr_on_plateau:factor=0.5': is a higher or a lower 'val_accuracy' better?",
        ),
        (
            ("reduce_lr_on_plateau:mode=max",),
            "has mode='max', and the metric by which it advances is val_loss if none is named",
        ),
        (("greedy", "val_f1"), "is 'greedy': is a higher or a lower 'val_f1' better?"),
        (("plateau",), "ReduceLROnPlateau, advanced by val_loss, and this fit has no validation; pass val= to fit"),
    ],
)
def test_what_cannot_be_a_schedule_is_refused(returned: tuple[Any, ...], message: str) -> None:
    def configured(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
        by_name = {"step lr": lr_scheduler.StepLR(optimizer, 1), "plateau": lr_scheduler.ReduceLROnPlateau(optimizer)}
        if not returned:
            return (optimizer, None, None, None)
        return optimizer, by_name.get(returned[0], returned[0]), *returned[1:]

    with pytest.raises(ConfigurationError) as caught:
        fit(configured)
    assert message in str(caught.value)


def test_a_named_schedule_needs_to_know_how_long_it_is() -> None:
    stream = ((torch.ones(2, 2), torch.ones(2, 1)) for _ in range(4))
    module = Module(lambda trainer, optimizer: (optimizer, "cosine"))
    with pytest.raises(ConfigurationError, match=r"not known \(train has no length\); give it: 'cosine:total=1000'"):
        Trainer(max_epochs=1, progress=False).fit(module, stream)
    both = Module(lambda trainer, optimizer: {"a": (optimizer, "wsd"), "b": torch.optim.SGD(module.parameters(), 0.1)})
    with pytest.raises(ConfigurationError, match=r"several optimizers share the updates\); give it: 'wsd:total=1000'"):
        Trainer(max_epochs=1, progress=False).fit(both, ROWS, batch_size=2)


def test_a_named_schedule_takes_the_length_it_is_given() -> None:
    assert fit(lambda trainer, optimizer: (optimizer, "linear:total=3"), max_steps=5)[2:] == pytest.approx(
        [0.5 / 3, 0, 0]
    )


# ------------------------------------------------------------------------------------------- somebody else's arithmetic


def _lambda(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)


def _sequence(optimizer: torch.optim.Optimizer, total: int) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, total - 2)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


MADE: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "OneCycleLR is made for {} updates (total_steps)": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n),
    "CosineAnnealingLR is made for {} updates (T_max)": lr_scheduler.CosineAnnealingLR,
    "PolynomialLR is made for {} updates (total_iters)": lr_scheduler.PolynomialLR,
    "LambdaLR is made for {} updates (num_training_steps)": lambda o, n: transformers.get_linear_schedule_with_warmup(
        o, 1, n
    ),
    "LambdaLR is made for {} updates (total)": _lambda,
    "SequentialLR is made for {} updates (T_max)": _sequence,
    "ChainedScheduler is made for {} updates (T_max)": lambda o, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, n)]
    ),
}


@pytest.mark.parametrize("advice", MADE)
def test_a_length_of_epochs_times_batches_is_pointed_out(advice: str, tmp_path: Path) -> None:
    # As in tutorials: 3 epochs of 5 batches are 15, but two batches make an update, so there are 9.
    for total, notes in ((3 * 5, [advice.format(15) + " and this fit has 9; count with"]), (9, [])):
        run_dir = tmp_path / str(total)
        fit(
            lambda trainer, optimizer, total=total: (optimizer, MADE[advice](optimizer, total)),
            run_dir=run_dir,
            **WINDOWS,
        )
        stored_notes = json.loads((run_dir / "plan.json").read_text())["notes"]
        assert [note[: len(start)] for note, start in zip(stored_notes, notes, strict=True)] == notes


def test_a_schedule_in_epochs_that_advances_per_update_is_told_how_to() -> None:
    notes: list[str] = []

    class KeepsNotes(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            notes.extend(trainer._live().notes)

    module = Module(lambda trainer, optimizer: (optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 3)))
    Trainer(max_epochs=3, progress=False, plugins=[KeepsNotes()]).fit(module, ROWS, batch_size=2)
    (note,) = notes
    assert note.endswith("advance it once per epoch: (optimizer, scheduler, 'epoch')")
    module = Module(lambda trainer, optimizer: (optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 3), "epoch"))
    Trainer(max_epochs=3, progress=False, plugins=[KeepsNotes()]).fit(module, ROWS, batch_size=2)
    assert notes == [note]


PER_EPOCH: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR advances once per update, and its step_size of 2 is less than the 5 updates of an epoch": (
        lambda o: lr_scheduler.StepLR(o, 2)
    ),
    "MultiStepLR advances once per update, and its last milestone, 4, is less than": (
        lambda o: lr_scheduler.MultiStepLR(o, [2, 4])
    ),
    "ExponentialLR advances once per update, and after 7 updates the rate is 1e-07 of its start": (
        lambda o: lr_scheduler.ExponentialLR(o, 0.1)
    ),
    "LambdaLR advances once per update, and its function takes 'epoch'": (
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch)
    ),
    "LambdaLR advances once per update, and after 7 updates the rate is 1e-07 of its start": (
        lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.1**n)
    ),
    "StepLR advances once per update, and its step_size of 1 is less than": (
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [3])
    ),
    "CosineAnnealingWarmRestarts advances once per update, and its T_0 of 3 is less than the 5 updates of an epoch": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)
    ),
}
PER_UPDATE: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 5),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 9]),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),  # restarts several times in an epoch
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 15),
    lambda o: transformers.get_cosine_schedule_with_warmup(o, 2, 15),
]


def _pace(schedule: Any, advances: str = "step") -> list[str]:
    return notes_of_pace({"main": Schedule(schedule, advances, "text")}, total_steps=15, per_epoch=5)


def test_a_schedule_that_looks_as_if_it_were_meant_per_epoch_gets_a_note() -> None:
    for advice, factory in PER_EPOCH.items():
        (note,) = _pace(factory(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)))
        assert advice.partition(" and ")[2] in note
        assert note.endswith("; if it is meant per epoch, return (optimizer, scheduler, 'epoch')")
    for factory in (*PER_EPOCH.values(), *PER_UPDATE):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        assert _pace(factory(optimizer), "epoch") == []
    for factory in PER_UPDATE:
        assert _pace(factory(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5))) == []


def test_the_note_about_the_pace_does_not_change_what_a_function_counts() -> None:
    """The rate of the middle of the fit was asked of the user's function itself, so one that counts its calls was one call ahead."""

    class Decay:
        def __init__(self) -> None:
            self.value = 1.0

        def __call__(self, step: int) -> float:
            self.value *= 0.5
            return self.value

    def decay() -> Callable[[int], float]:
        value = 1.0

        def call(step: int) -> float:
            nonlocal value
            value *= 0.5
            return value

        return call

    def with_a_variable_that_has_no_value() -> Callable[[int], float]:
        def call(step: int) -> float:
            nonlocal value
            value = 0.25
            return value

        value: float
        return call

    for function in (Decay(), decay(), partial(decay()), with_a_variable_that_has_no_value()):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = lr_scheduler.LambdaLR(optimizer, function)
        assert _pace(schedule) == []
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == [0.25]


def test_a_step_schedule_that_ends_training_within_one_epoch_gets_a_note() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    for size, noted in ((1, True), (5, False)):
        schedules = {"main": Schedule(lr_scheduler.StepLR(optimizer, size), "step", "text")}
        notes = notes_of_pace(schedules, total_steps=15, per_epoch=15)
        assert [note.partition(";")[0] for note in notes] == [
            "StepLR advances once per update, and after 7 updates the rate is 1e-07 of its start"
        ] * noted


def test_the_note_about_the_pace_is_in_the_plan(tmp_path: Path) -> None:
    fit(lambda trainer, o: (o, lr_scheduler.StepLR(o, 1)), run_dir=tmp_path)
    (note,) = json.loads((tmp_path / "plan.json").read_text())["notes"]
    assert note.startswith(
        "StepLR advances once per update, and its step_size of 1 is less than the 5 updates of an epoch"
    )


@pytest.mark.parametrize("text", ["linear:warmup=5", "cosine:warmup=5,minimum=0.1", "wsd:warmup=5,decay=2"])
def test_a_fit_that_is_cut_short_may_end_within_the_warm_up_and_says_so(text: str, tmp_path: Path) -> None:
    rates = fit(lambda trainer, optimizer: (optimizer, text), max_steps=2)
    whole = fit(lambda trainer, optimizer: (optimizer, text), max_steps=15, max_epochs=None)
    assert rates == whole[:2]
    fit(lambda trainer, optimizer: (optimizer, text), fast_dev_run=True)
    fit(lambda trainer, optimizer: (optimizer, text), max_steps=2, run_dir=tmp_path)
    (note,) = json.loads((tmp_path / "plan.json").read_text())["notes"]
    assert note == (
        f"the schedule is {text} over 2 updates, which end within the warm-up: the learning rate does not reach its full value in this fit"
    )


LONG_WARM_UPS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: transformers.get_constant_schedule_with_warmup(o, 99),
    lambda o: transformers.get_linear_schedule_with_warmup(o, 99, 15),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=99), lr_scheduler.StepLR(o, 5)], milestones=[99]
    ),
]


@pytest.mark.parametrize("schedule", LONG_WARM_UPS)
def test_a_scheduler_object_with_a_longer_warm_up_than_the_fit_gets_a_note(schedule: Any, tmp_path: Path) -> None:
    fit(lambda trainer, optimizer: (optimizer, schedule(optimizer)), run_dir=tmp_path)
    (note,) = json.loads((tmp_path / "plan.json").read_text())["notes"]
    assert " warms up over 99 updates (" in note
    assert note.endswith(" and this fit has 15: the learning rate does not reach its full value")


class Advances(Module):
    """Calls `step` of its scheduler in a hook, which the loop does too."""

    def __init__(self, hook: str, advances: str) -> None:
        super().__init__(self._configured)
        self.hook, self.advances = hook, advances

    def _configured(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> Any:
        self.scheduler = lr_scheduler.StepLR(optimizer, 6)
        return optimizer, self.scheduler, self.advances

    def on_step(self) -> None:
        if self.hook == "on_step":
            self.scheduler.step()

    def on_epoch_end(self) -> None:
        if self.hook == "on_epoch_end":
            self.scheduler.step()


@pytest.mark.parametrize(("advances", "when"), [("step", "update"), ("epoch", "epoch")])
@pytest.mark.parametrize("hook", ["on_step", "on_epoch_end", "none"])
def test_a_scheduler_that_a_hook_advances_too_gets_one_note(
    hook: str, advances: str, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(progress=False, max_epochs=3).fit(Advances(hook, advances), ROWS, batch_size=2)
    said = f"note: your code calls StepLR.step(), and so does the loop, after each {when}: "
    assert capsys.readouterr().err.count(said) == (hook != "none")


def test_a_scheduler_whose_state_was_loaded_gets_no_note_that_other_code_advanced_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def configured(trainer: Trainer, optimizer: torch.optim.Optimizer) -> Any:
        return optimizer, lr_scheduler.StepLR(optimizer, 6)

    for epochs in (1, 3):
        fit(configured, run_dir=tmp_path, max_epochs=epochs)
    assert "your code" not in capsys.readouterr().err


def test_a_schedule_that_would_raise_on_the_way_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigurationError, match=r"made for 4 updates \(total_steps\) and this fit has 9, after which"):
        fit(lambda trainer, o: (o, lr_scheduler.OneCycleLR(o, 0.1, total_steps=4)), **WINDOWS)


def test_schedules_without_an_end_say_no_length() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    for scheduler in (
        lr_scheduler.StepLR(optimizer, 3),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        transformers.get_constant_schedule_with_warmup(optimizer, 3),
    ):
        assert list(own_lengths(scheduler)) == []


def test_every_schedule_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    for name in schedule_names():
        assert f"| `{name}` |" in page
