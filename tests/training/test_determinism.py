"""The same seed gives the same run bit for bit; the random values that differ between ranks, and those that do not."""

from __future__ import annotations

import hashlib
import os
import random
import traceback
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset

from fabricate import Trainer, TrainModule, seed_everything
from fabricate.testing import run_ranks
from fabricate.training import process

ROWS, GLOBAL_BATCH, STEPS = 30, 12, 5
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "zero1": 2, "zero3": 2, "ddp on 3": 3}


class Rows(Dataset[Any]):
    """Rows that know their number, and are read with some noise."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.full((4,), index / ROWS) + 0.01 * torch.rand(4)


class Dropping(TrainModule):
    """Half of its layers are built before the Trainer exists, and not alike on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
        self.first = torch.nn.Linear(4, 8)
        self.initial = self.final = ""
        self.rows: list[list[int]] = []
        self.masks: list[list[bool]] = []
        self.deterministic: set[bool] = set()

    def configure_model(self) -> None:
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)])

    def training_step(self, batch: Any) -> torch.Tensor:
        number, x = batch
        if self.trainer.step == len(self.rows):
            self.rows.append([])
        self.rows[-1] += number.tolist()
        self.masks.append((torch.nn.functional.dropout(torch.ones(16), 0.5) > 0).tolist())
        self.deterministic.add(torch.are_deterministic_algorithms_enabled())
        hidden = torch.nn.functional.dropout(torch.tanh(self.blocks[0](self.first(x))), 0.3)
        return (self.blocks[1](hidden) - x.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        torch.rand(7)  # draws of an evaluation are its own
        return {"loss": self.blocks[1](self.blocks[0](self.first(batch[1]))).mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_fit_start(self) -> None:
        self.initial = self.digest()

    def on_fit_end(self) -> None:
        self.final = self.digest()

    def digest(self) -> str:
        """Of every bit of every parameter, whole ones. All ranks."""
        checksum = hashlib.sha256()
        for parameter in self.parameters():
            checksum.update(self.trainer.strategy.gather(parameter).detach().numpy().tobytes())
        return checksum.hexdigest()


def train(strategy: str, *, seed: int = 5, workers: int = 0, validate: bool = False) -> dict[str, Any]:
    module = Dropping()
    trainer = Trainer(
        strategy=strategy.split()[0],
        precision="fp32",
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        seed=seed,
        deterministic=True,
        validate_every="1 step" if validate else None,
        progress=False,
    )
    val = Subset(Rows(), range(19)) if validate else None  # which no number of ranks shares evenly
    trainer.fit(module, Rows(), val, batch_size=GLOBAL_BATCH // 2 // STRATEGIES[strategy], num_workers=workers)
    return {
        "initial": module.initial,
        "final": module.final,
        "rows": module.rows,
        "masks": module.masks,
        "deterministic": module.deterministic,
    }


def job(world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    try:
        for strategy in (name for name, needed in STRATEGIES.items() if needed == world_size):
            before = random.getstate()
            results[strategy] = train(strategy)
            results[strategy, "generators as before"] = random.getstate() == before
            results[strategy, "again"] = train(strategy)
            results[strategy, "validated"] = train(strategy, validate=True)
            if strategy in ("single", "ddp", "fsdp"):
                results[strategy, "another seed"] = train(strategy, seed=6)
            if strategy in ("single", "ddp"):
                results[strategy, "workers"] = train(strategy, workers=2)
                results[strategy, "workers again"] = train(strategy, workers=2)
    except Exception as exception:
        results["failed"] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def answers() -> dict[str, list[dict[Any, Any]]]:
    """By strategy, what each rank answered."""
    by_world_size = {1: [job(1)], 2: run_ranks(job, 2, 2), 3: run_ranks(job, 3, 3)}
    for rank in (rank for ranks in by_world_size.values() for rank in ranks):
        assert "failed" not in rank, rank["failed"]
    return {strategy: by_world_size[needed] for strategy, needed in STRATEGIES.items()}


Answers = dict[str, list[dict[Any, Any]]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_runs_are_equal_to_the_last_bit(answers: Answers, strategy: str) -> None:
    for rank in answers[strategy]:
        assert rank[strategy] == rank[strategy, "again"]
        assert rank[strategy]["deterministic"] == {True}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_draws_on_after_a_fit_with_a_seed(answers: Answers, strategy: str) -> None:
    assert all(rank[strategy, "generators as before"] for rank in answers[strategy])


def test_a_fit_and_an_evaluation_with_a_seed_leave_every_generator_as_it_was() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), torch.rand(()).item()

    module, trainer = Dropping(), Trainer(max_steps=1, seed=5, progress=False)
    seed_everything(1)
    expected = [draws() for _ in range(3)]
    seed_everything(1)
    drawn = [draws()]
    trainer.fit(module, Rows(), batch_size=4)
    drawn.append(draws())
    trainer.validate(module, Rows(), batch_size=4)
    assert [*drawn, draws()] == expected


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_worker_processes_and_their_noise_are_repeated_too(answers: Answers, strategy: str) -> None:
    for rank in answers[strategy]:
        assert rank[strategy, "workers"] == rank[strategy, "workers again"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_another_seed_is_another_run(answers: Answers, strategy: str) -> None:
    for rank in answers[strategy]:
        for what in ("final", "rows", "masks"):
            assert rank[strategy][what] != rank[strategy, "another seed"][what]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validating_after_every_update_changes_nothing(answers: Answers, strategy: str) -> None:
    for rank in answers[strategy]:
        assert rank[strategy, "validated"] == rank[strategy]


def test_ranks_begin_alike_and_as_one_process_does(answers: Answers) -> None:
    initial = {rank[strategy]["initial"] for strategy in STRATEGIES for rank in answers[strategy]}
    assert len(initial) == 1


@pytest.mark.parametrize("strategy", [strategy for strategy, needed in STRATEGIES.items() if needed > 1])
def test_ranks_end_alike_and_draw_dropout_of_their_own(answers: Answers, strategy: str) -> None:
    ranks = [rank[strategy] for rank in answers[strategy]]
    assert len({rank["final"] for rank in ranks}) == 1
    masks = [tuple(mask) for rank in ranks for mask in rank["masks"]]
    assert len(masks) == len(ranks) * 9, "windows of 12, 12, 6, 12 and 12 rows"
    assert len(set(masks)) == len(masks)


def test_every_update_takes_the_same_rows_on_any_number_of_ranks_and_workers(answers: Answers) -> None:
    by_split = []
    for strategy, ranks in answers.items():
        for key in (strategy, (strategy, "workers")):
            if key in ranks[0]:
                by_split.append(
                    [sorted(row for rank in ranks for row in rank[key]["rows"][step]) for step in range(STEPS)]
                )
    assert all(rows == by_split[0] for rows in by_split)
    assert sorted(row for rows in by_split[0][:3] for row in rows) == list(range(ROWS))
    assert [len(rows) for rows in by_split[0]] == [12, 12, 6, 12, 12]


def test_memory_that_is_written_right_after_is_not_filled_first() -> None:
    class Looks(Dropping):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.filled = torch.utils.deterministic.fill_uninitialized_memory
            return super().training_step(batch)

    module = Looks()
    Trainer(max_steps=1, deterministic=True, progress=False).fit(module, Rows(), batch_size=4)
    assert not module.filled
    assert torch.utils.deterministic.fill_uninitialized_memory, "torch's own setting, afterwards again"


def test_a_process_that_used_cuda_before_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert [process._chose_workspace(torch.device(kind)) for kind in ("cuda", "cpu")] == [True, False]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert not process._chose_workspace(torch.device("cuda"))
