"""`trainer.accelerator`: every public name of Accelerate's gives the right value, or an error that names what to use."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from campaigns.accelerator import Recorder, observe, public_names, rows
from fabricate import Callback, FabricateError, Trainer
from fabricate.testing import run_ranks
from tests.support.wrong import ROWS, Regression, answering

PAGE = (Path(__file__).parents[2] / "docs" / "accelerator.md").read_text(encoding="utf-8")


def test_the_table_has_every_public_name_of_accelerate() -> None:
    listed = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}
    assert public_names() - listed == set(), "add a check to campaigns/accelerator.py"


def test_every_name_gives_the_right_answer_or_an_error_as_documented() -> None:
    by_case = observe()
    wrong = {
        (case, name): answer for case, each in by_case.items() for name, answer in each.items() if answer[:5] == "wrong"
    }
    assert wrong == {}
    assert [line for line in rows(by_case) if line not in PAGE.splitlines()] == [], (
        "run python -m campaigns.accelerator --out docs/accelerator.md"
    )


class Looks(Callback):
    """Calls `look` in on_step and keeps what it returns or raises."""

    def __init__(self, look: Any) -> None:
        self.look, self.answers = look, []

    def on_step(self, trainer: Trainer) -> None:
        try:
            self.answers.append(self.look(trainer.accelerator))
        except FabricateError as exc:
            self.answers.append(str(exc))


def look_at(look: Any, **options: Any) -> list[Any]:
    looks = Looks(look)
    options = {"max_steps": 1} | options
    Trainer(progress=False, plugins=[looks], **options).fit(Regression(), ROWS, batch_size=2)
    return looks.answers


def test_the_trainers_accelerator_is_an_accelerator_without_a_step() -> None:
    def look(accelerator: Any) -> Any:
        return (
            isinstance(accelerator, accelerate.Accelerator),
            hasattr(accelerator, "step"),
            getattr(accelerator, "step", 3),
        )

    assert look_at(look) == [(True, False, 3)]


@pytest.mark.parametrize("name", ["sync_gradients", "gradient_accumulation_steps", "step"])
def test_what_the_loop_sets_cannot_be_set(name: str) -> None:
    (message,) = look_at(lambda accelerator: setattr(accelerator, name, 2))
    assert message.startswith(f"trainer.accelerator.{name}")


@pytest.mark.parametrize("method", ["log", "get_tracker"])
def test_trackers_that_are_not_there_are_named(method: str) -> None:
    (message,) = look_at(lambda accelerator: getattr(accelerator, method)({}))
    assert f"{method}: this run has no trackers; name them in Trainer" in message


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_autocast_is_that_of_the_steps(precision: str, dtype: torch.dtype) -> None:
    def look(accelerator: Any) -> Any:
        with accelerator.autocast():
            inside = torch.ones(2, 2) @ torch.ones(2, 2)
        return accelerator.mixed_precision, accelerator.native_amp, inside.dtype, accelerator.scaler is not None

    assert look_at(look, precision=precision) == [(precision, True, dtype, precision == "fp16")]


def test_the_accelerator_says_whether_an_update_was_skipped() -> None:
    class Notes(Callback):
        def __init__(self) -> None:
            self.skipped: list[bool] = []

        def on_step(self, trainer: Trainer) -> None:
            self.skipped.append(trainer.accelerator.optimizer_step_was_skipped)

        on_step_skipped = on_step

    def sometimes(self: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * (float("inf") if self.trainer.progress.micro_step == 1 else 1.0)

    notes = Notes()
    Trainer(max_steps=2, progress=False, nonfinite="skip", plugins=[notes]).fit(
        answering(sometimes), ROWS, batch_size=1
    )
    assert notes.skipped == [False, True, False]


def on_two_ranks(folder: str) -> list[Any]:
    """Ranks that differ are errors; fits with trackers follow each other; precision is known under DeepSpeed."""
    rank, answers = int(os.environ["RANK"]), []
    answers += look_at(lambda accelerator: accelerator.gather(torch.ones(1 + rank)), strategy="ddp")
    answers += look_at(
        lambda accelerator: accelerator.gather(torch.ones(1)) if rank else accelerator.wait_for_everyone(),
        strategy="ddp",
    )
    answers += look_at(lambda accelerator: accelerator.reduce(torch.ones(1), "min"), strategy="ddp")
    for number in range(2):
        look_at(lambda accelerator: None, strategy="ddp", trackers=[Recorder()], run_dir=Path(folder, str(number)))
    answers += look_at(lambda accelerator: accelerator.mixed_precision, strategy="zero2", precision="bf16")
    for detach in (True, False):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            Trainer(max_steps=1, progress=False, strategy="ddp").fit(Gathering(detach), ROWS, batch_size=2)
        answers.append(stderr.getvalue())
    return answers


class Gathering(Regression):
    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.detach = detach

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = super().training_step(batch)
        self.trainer.accelerator.gather(loss.detach() if self.detach else loss)
        return loss


def test_ranks_that_differ_are_named_and_fits_with_trackers_follow_each_other(tmp_path: Path) -> None:
    for rank, answers in enumerate(run_ranks(on_two_ranks, 2, str(tmp_path))):
        shapes, methods, reduction, precision, detached, without_gradient = answers
        assert "rank 0 calls gather((1,) torch.float32) and rank 1 gather((2,) torch.float32)" in shapes
        assert "rank 0 calls wait_for_everyone() and rank 1 gather((1,) torch.float32)" in methods
        assert "reduction='min': give sum, mean, max, none" in reduction
        assert precision == "bf16"
        assert "requires a gradient" not in detached
        assert ("with a tensor that requires a gradient, but the result has no gradient" in without_gradient) is (
            rank == 0
        )
