"""Low-bit optimizers of torchao and bitsandbytes on another number of ranks: under `ddp` their state resumes bit for bit; strategies that
divide it refuse them before the first step. Steps of torchao run uncompiled here, which computes the same without the time to compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import optim
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from fabricate import CheckpointError, ConfigurationError, Trainer, TrainModule
from fabricate.strategies.sharding import inner_tensors
from fabricate.testing import run_ranks

TORCHAO: dict[str, Any] = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8}
OPTIMIZERS = {**TORCHAO, "bitsandbytes": optim.AdamW8bit, "paged": optim.PagedAdamW8bit}
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
ROWS = torch.utils.data.TensorDataset(torch.randn(48, 64, generator=torch.Generator().manual_seed(1)))


class Net(TrainModule):
    """A weight large enough to be kept in few bits, and one that is not. Remembers the optimizer's state at the start and at the end."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
        self.optimizer = optimizer
        self.start: list[torch.Tensor] = []
        self.end: list[torch.Tensor] = []
        self.kinds: set[str] = set()

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.small(torch.tanh(self.large(batch[0]))).square().mean()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=0.01)

    def state(self) -> list[torch.Tensor]:
        """Its bytes: the start and the end of a run are on different ranks, and 8-bit floats do not travel between processes."""
        entries = [v for state in self.trainer.optimizers["main"].state.values() for _, v in sorted(state.items())]
        values = [value for value in entries if isinstance(value, torch.Tensor)]
        self.kinds = {type(value).__name__ for value in values}
        return [t.clone().reshape(-1).view(torch.uint8) for value in values for t in inner_tensors(value)]

    def on_epoch_start(self) -> None:
        self.start = self.state()

    def on_fit_end(self) -> None:
        self.end = self.state()


def fit(run_dir: Path, steps: int, optimizer: str, rows: int, strategy: str = "auto") -> Net:
    module = Net(optimizer)
    trainer = Trainer(max_steps=steps, run_dir=run_dir, strategy=strategy, progress=False, seed=1, print_plan="none")
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(module, ROWS, batch_size=rows)
    return module


def goes_on(folder: Path, steps: int, rows: int) -> dict[str, list[list[torch.Tensor]]]:
    """By optimizer, the state that was restored, and the state at the end."""
    modules = {name: fit(folder / name, steps, name, rows, "ddp") for name in OPTIMIZERS}
    return {name: [module.start, module.end] for name, module in modules.items()}


def refused(folder: Path, strategy: str) -> list[str]:
    messages = []
    for name in TORCHAO:
        with pytest.raises(ConfigurationError) as caught:
            fit(folder / name, 1, name, 6, strategy)
        messages.append(str(caught.value))
    return messages


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 8 and all(map(torch.equal, left, right))


def test_the_state_goes_on_to_the_last_bit_on_two_ranks_on_three_and_on_one(tmp_path: Path) -> None:
    modules = {name: fit(tmp_path / name, 2, name, 12) for name in OPTIMIZERS}
    assert [modules[name].kinds - {"Tensor"} for name in TORCHAO] == [
        {"OptimState8bit"},
        {"OptimState4bit"},
        {"OptimStateFp8"},
    ]
    ends = {name: module.end for name, module in modules.items()}
    for ranks, steps in ((2, 4), (3, 6)):
        answers = run_ranks(goes_on, ranks, tmp_path, steps, 12 // ranks)
        for name in OPTIMIZERS:
            restored = [of_rank[name][0] for of_rank in answers]
            assert all(same(state, ends[name]) for state in restored), (name, ranks)
            ends[name] = answers[0][name][1]
            assert all(same(of_rank[name][1], ends[name]) for of_rank in answers), (name, ranks)
    for name in OPTIMIZERS:
        assert same(fit(tmp_path / name, 7, name, 12).start, ends[name]), name


@pytest.mark.parametrize("strategy", ["fsdp", "zero2:allow_untested_optimizer=true"])
def test_strategies_that_divide_the_state_refuse_low_bit_optimizers_before_the_first_step(
    strategy: str, tmp_path: Path
) -> None:
    for messages in run_ranks(refused, 2, tmp_path, strategy, timeout=600):
        for optimizer, message in zip(TORCHAO.values(), messages, strict=True):
            assert message.startswith(f"{optimizer.__name__} keeps OptimState"), message
            assert f"tensors, which strategy='{strategy.partition(':')[0]}' cannot save in parts" in message
    assert not list(tmp_path.glob("*/checkpoints/step-*"))


class Saving(Net):
    """Large enough that a half of its weight is kept in few bits."""

    def __init__(self, path: Path) -> None:
        super().__init__("8bit")
        self.large, self.small, self.path = torch.nn.Linear(64, 256), torch.nn.Linear(256, 1), path

    def on_step(self, step: int) -> None:
        self.trainer.save(self.path)


def saved(path: Path) -> str:
    trainer = Trainer(max_steps=1, strategy="fsdp", progress=False, seed=1, print_plan="none")
    with torch.compiler.set_stance("force_eager"), pytest.raises(CheckpointError) as caught:
        trainer.fit(Saving(path), ROWS, batch_size=4)
    return str(caught.value)


def test_a_hook_that_saves_low_bit_state_in_shards_gets_an_error_that_names_the_tensors(tmp_path: Path) -> None:
    for message in run_ranks(saved, 2, tmp_path / "here"):
        assert "optimizer/main/large.weight/exp_avg is OptimState8bit, which strategy='fsdp' cannot save" in message
    assert not (tmp_path / "here" / "manifest.json").exists()
