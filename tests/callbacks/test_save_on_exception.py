"""A fit that fails leaves a checkpoint of its last whole update, from which it resumes exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from fabricate import Callback, ConfigurationError, SaveOnException, Trainer, TrainModule
from fabricate.callbacks.kept_state import kept_buffers
from fabricate.distributed import failures
from fabricate.testing import run_ranks

STEPS, FAILS_IN = 5, 3
"""The update that fails comes after this step."""


class Net(TrainModule):
    """Dropout, running statistics and a buffer that grows: what an update changes before it fails."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.register_buffer("grows", torch.zeros(0), persistent=False)
        self.register_buffer("assigned", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.grows.set_(torch.ones(len(self.grows) + 1))
        self.assigned = self.assigned + x.mean()
        self.mean.update(x.mean())
        self.log("mean", self.mean)
        loss = torch.nn.functional.mse_loss(self.net(x).squeeze(-1), y)
        self.log("noise", torch.rand(()).item())
        return loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Fails(Callback):
    """Raises once the second micro-batch of an update is done: after backward, before the optimizer."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def on_accumulate(self, trainer: Trainer, micro_step: int) -> None:
        mine = self.rank is None or trainer.accelerator.process_index == self.rank
        if mine and trainer.step == FAILS_IN and micro_step == 1:
            raise ZeroDivisionError("the user's own")


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows without end, with a state of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            row = torch.arange(4) * 0.1 + self.position * 0.01
            yield row, row.sum()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def rows() -> torch.utils.data.TensorDataset:
    torch.manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96))


def fit(run_dir: Path, *plugins: object, data: Any = None, **arguments: Any) -> None:
    trainer = Trainer(
        **{
            "max_steps": STEPS,
            "seed": 3,
            "gradient_accumulation_steps": 2,
            "run_dir": run_dir,
            "save_every": None,
            "log_every": 2,
            "progress": False,
            "print_plan": "none",
            "plugins": plugins,
            **arguments,
        }
    )
    trainer.fit(Net(), rows() if data is None else data, batch_size=4)


def fails_and_goes_on(run_dir: Path, **arguments: Any) -> tuple[str, list[str]]:
    """The notes of the error, and what differs between a fit that failed and was repeated, and one that never failed."""
    stream = arguments.pop("stream", False)
    data = lambda: Stream() if stream else None  # noqa: E731
    with pytest.raises(ZeroDivisionError) as caught:
        fit(run_dir, SaveOnException(), Fails(), data=data(), **arguments)
    on = {"plugins": (SaveOnException(),), "accept_changes": ("plugins",)}
    fit(run_dir, data=data(), **arguments, **on)
    other = run_dir.parent / "straight"
    fit(other, data=data(), **arguments, **on)
    first, second = export(run_dir), export(other)
    different = [name for name, value in second.items() if not torch.equal(first[name], value)]
    lines = zip(logged(run_dir), logged(other), strict=True)
    return "\n".join(caught.value.__notes__), different + [f"{one} {two}" for one, two in lines if one != two]


def logged(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """What metrics.jsonl holds, the clock aside."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["metrics"]) for line in lines]


def export(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "model/model.safetensors")


@pytest.mark.parametrize("stream", [False, True], ids=["data set", "stream with a state"])
def test_a_fit_that_failed_in_an_update_goes_on_exactly(tmp_path: Path, stream: bool) -> None:
    notes, different = fails_and_goes_on(tmp_path / "run", stream=stream)
    assert f"step {FAILS_IN} is saved in {tmp_path}" in notes
    assert different == []
    assert (tmp_path / f"run/checkpoints/step-{FAILS_IN:08d}").is_dir()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_ranks_that_fail_together_save_together(tmp_path: Path, strategy: str) -> None:
    for notes, different in run_ranks(fails_and_goes_on, 2, tmp_path / "run", strategy=strategy):
        assert f"step {FAILS_IN} is saved in" in notes
        assert "the same command continues from" in notes
        assert "nothing is saved" not in notes
        assert different == []


def fails_alone(run_dir: Path) -> tuple[str, str, bool]:
    failures._MEET_SECONDS = 0.5
    try:
        with pytest.raises(Exception, match="the user's own") as caught:
            fit(run_dir, SaveOnException(), Fails(rank=1), strategy="ddp")
    finally:
        failures._MEET_SECONDS = 10.0
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    return type(caught.value).__name__, notes, (run_dir / "checkpoints").exists()


def test_a_rank_that_fails_alone_saves_nothing_and_reports_its_error(tmp_path: Path) -> None:
    (first, _, saved), (second, notes, _) = run_ranks(fails_alone, 2, tmp_path / "run")
    assert (first, second, saved) == ("RankError", "ZeroDivisionError", False)
    assert (
        "SaveOnException: no checkpoint was saved: all ranks have to write a checkpoint together, but another rank is still running,"
        in notes
    )


class FailsInStep(Callback):
    def on_step(self, step: int) -> None:
        if step == FAILS_IN:
            raise ZeroDivisionError("the user's own")


class FailsInEvaluation(Net):
    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        raise ZeroDivisionError("the user's own")


@pytest.mark.parametrize("plugins", [(SaveOnException(), FailsInStep()), (FailsInStep(), SaveOnException())])
def test_an_update_that_is_not_complete_is_not_saved(tmp_path: Path, plugins: tuple[object, ...]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, *plugins)
    assert "no checkpoint was saved, because the update after step 3 was not complete" in "\n".join(
        caught.value.__notes__
    )
    assert not (tmp_path / "checkpoints").exists()


def test_a_validation_that_fails_leaves_the_state_before_it(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=1, run_dir=tmp_path, sanity_batches=0, progress=False, print_plan="none", plugins=[SaveOnException()]
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(FailsInEvaluation(), rows(), rows(), batch_size=16)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


class FailsAtTheEnd(Callback):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_eval_start(self, trainer: Trainer) -> None:
        if self.fails and trainer.step == 6:
            raise ZeroDivisionError("the user's own")

    def on_epoch_end(self, module: TrainModule, epoch: int) -> None:
        module.log("ended", float(epoch))


def test_a_validation_that_failed_is_done_again(tmp_path: Path) -> None:
    def run(folder: str, fails: bool = False) -> None:
        plugins = [SaveOnException(), FailsAtTheEnd(fails)]
        trainer = Trainer(
            max_epochs=2, seed=3, run_dir=tmp_path / folder, save_every=None, progress=False, plugins=plugins
        )
        trainer.fit(Net(), rows(), rows(), batch_size=16)

    with pytest.raises(ZeroDivisionError):
        run("run", fails=True)
    run("run")
    run("straight")
    assert logged(tmp_path / "run") == logged(tmp_path / "straight")
    assert [sum("val_loss" in metrics for _, metrics in logged(tmp_path / "run"))] == [2]


class ChangesInHooks(TrainModule):
    """Hooks between updates change buffers and torchmetrics objects. `fails`: "step 4", "end of epoch 0" or nowhere."""

    fails = "nowhere"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.counted, self.most = torchmetrics.SumMetric(), torchmetrics.MaxMetric()
        self.register_buffer("epochs", torch.zeros(()))

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.fails == f"step {self.trainer.step}":
            raise ZeroDivisionError("the user's own")
        self.counted.update(len(batch[0]))
        self.log("counted", self.counted)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any) -> dict[str, float]:
        return {"score": 100.0 - self.trainer.step}

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        self.most.update(metrics["val_score"])
        self.log("most", self.most.compute())

    def on_epoch_end(self, epoch: int) -> None:
        if self.fails == f"end of epoch {epoch}":
            raise ZeroDivisionError("the user's own")
        self.epochs += 1
        self.log("epochs", self.epochs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("fails", ["step 6", "step 7", "step 12", "end of epoch 0", "end of epoch 1"])
def test_what_hooks_between_updates_changed_is_saved(tmp_path: Path, fails: str) -> None:
    def run(folder: str, fails: str = "nowhere") -> None:
        trainer = Trainer(
            max_epochs=3,
            seed=3,
            run_dir=tmp_path / folder,
            save_every=None,
            progress=False,
            plugins=[SaveOnException()],
        )
        module = ChangesInHooks()
        module.fails = fails
        trainer.fit(module, rows(), rows(), batch_size=16)

    with pytest.raises(ZeroDivisionError):
        run("run", fails)
    run("run")
    run("straight")
    assert logged(tmp_path / "run") == logged(tmp_path / "straight")


def test_saving_on_an_exception_needs_a_run_dir() -> None:
    with pytest.raises(ConfigurationError, match=r"SaveOnException.*run_dir"):
        Trainer(max_steps=1, progress=False, plugins=[SaveOnException()]).fit(Net(), rows(), batch_size=4)


def test_weights_that_were_saved_before_they_were_measured_do_not_count_among_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Measured(Net):
        fails = True

        def validation_step(self, batch: Any) -> dict[str, float]:
            if self.fails and self.trainer.step == 4:
                raise ZeroDivisionError("the user's own")
            return {"loss": (0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 3.0)[self.trainer.step]}

    class Works(Measured):
        fails = False

    def trained(kind: type[Net]) -> Any:
        keep = {"last": "all", "best": 1, "metric": "val_loss"}
        options: dict[str, Any] = {"run_dir": tmp_path, "progress": False, "sanity_batches": 0, "keep": keep}
        trainer = Trainer(max_steps=6, seed=3, validate_every=2, plugins=[SaveOnException()], **options)
        return trainer.fit(kind(), rows(), rows(), batch_size=4)

    with pytest.raises(ZeroDivisionError):
        trained(Measured)
    result = trained(Works)
    assert (
        "note: the checkpoint of step 4 was saved before the validation that gave val_loss=1" in capsys.readouterr().err
    )
    assert result.best_score == 2


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that draw random numbers, as an augmentation does. Reading fails at the row `fails`."""

    def __init__(self, fails: int | None = None) -> None:
        self.fails, self.read = fails, 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        if self.read - 1 == self.fails:
            raise ZeroDivisionError("the user's own")
        return torch.randn(4)


class Anneals(ChangesInHooks):
    """Hooks change a buffer that the loss uses."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.scale * super().training_step([batch])

    def validation_step(self, batch: Any) -> dict[str, float]:
        return {"score": float(self.trainer.step)}

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        if self.hook == "on_eval_end":
            self.scale *= 0.5

    def on_log(self) -> None:
        if self.hook == "on_log":
            self.scale *= 0.5
            torch.randn(1)

    def on_epoch_end(self, epoch: int) -> None:
        self.epochs += 1


@pytest.mark.parametrize("hook", ["on_eval_end", "on_log"])
@pytest.mark.parametrize(("step", "row"), [("step 4", None), ("step 5", None), ("nowhere", 16), ("nowhere", 20)])
def test_a_failure_after_a_log_line_or_a_validation_is_resumed_with_the_same_rows(
    tmp_path: Path, hook: str, step: str, row: int | None
) -> None:
    def run(folder: str, fails: str = "nowhere", row: int | None = None) -> list[torch.Tensor]:
        module = Anneals(hook)
        module.fails = fails
        torch.manual_seed(1)
        Trainer(
            max_epochs=1,
            seed=3,
            run_dir=tmp_path / folder,
            log_every=4,
            validate_every="4 steps",
            sanity_batches=0,
            save_every=None,
            progress=False,
            plugins=[SaveOnException()],
        ).fit(module, Noisy(row), [torch.ones(4)], batch_size=4)
        return [module.layer.weight.detach(), module.scale]

    with pytest.raises(ZeroDivisionError):
        run("run", step, row)
    torch.testing.assert_close(run("run"), run("straight"), rtol=0, atol=0)


def test_what_wrappers_of_torchmetrics_count_beside_their_states_is_restored() -> None:
    module = torch.nn.ModuleList(
        [
            torchmetrics.MinMaxMetric(torchmetrics.SumMetric()),
            torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=2),
        ]
    )

    def counted(*numbers: float) -> list[Any]:
        for number in numbers:
            for metric in module:
                metric.update(number)
                metric._computed = None
                metric.compute()
        return [str(metric.compute()) for metric in module]

    before = counted(3.0, -1.0)
    restore = kept_buffers(module)
    counted(9.0, -20.0, 4.0)
    restore()
    assert counted() == before
    assert module[0].max_val == 3
    assert module[1]._num_vals_seen == 2
