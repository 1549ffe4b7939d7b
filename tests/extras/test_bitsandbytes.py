"""Optimizers of bitsandbytes: their 8-bit state is saved and restored to the last bit, on one process and under `ddp`; `fsdp` refuses them
before the first step. On a CPU their paged forms are not paged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import optim

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
OPTIMIZERS = ["AdamW8bit", "PagedAdamW8bit", "PagedAdamW"]


class Net(TrainModule):
    """A weight that is large enough for 8 bits (4096 elements), and one that is not."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = torch.nn.Linear(64, 128), torch.nn.Linear(128, 1)
        self.optimizer = optimizer

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.small(torch.tanh(self.large(batch[0]))).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = getattr(optim, self.optimizer)(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def fit(run_dir: Path, steps: int, optimizer: str, strategy: str = "auto", rows: int = 4) -> dict[str, torch.Tensor]:
    """The weights after `steps` updates, of which those that an earlier fit saved in `run_dir` are not made again."""
    data = torch.utils.data.TensorDataset(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)))
    module, options = Net(optimizer), {"progress": False, "seed": 1, "log_every": 100}
    Trainer(max_steps=steps, run_dir=run_dir, strategy=strategy, **options).fit(module, data, batch_size=rows)
    return {name: value.clone() for name, value in module.state_dict().items()}


def resumed(folder: Path, optimizer: str, strategy: str, rows: int) -> bool:
    """Whether a run in two halves ends as one that never stopped."""
    straight = fit(folder / "straight", 5, optimizer, strategy, rows)
    fit(folder / "halves", 2, optimizer, strategy, rows)
    halves = fit(folder / "halves", 5, optimizer, strategy, rows)
    return all(map(torch.equal, straight.values(), halves.values()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_as_one_that_never_stopped(optimizer: str, tmp_path: Path) -> None:
    assert resumed(tmp_path, optimizer, "auto", 4)
    with Reader(tmp_path / "halves" / "checkpoints" / "step-00000005") as reader:
        tensors = reader.manifest.tensors
    assert tensors["optimizer/main/large.weight/state1"].dtype == ("U8" if "8bit" in optimizer else "F32")
    assert tensors["optimizer/main/small.weight/state1"].dtype == "F32"


class Allocating(optim.PagedAdamW):
    """Remembers the memory that it allocated for state; on a GPU it is paged."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.allocated: list[torch.Tensor] = []

    def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.allocated.append(super().get_state_buffer(p, dtype=dtype))
        return self.allocated[-1]


def test_a_paged_optimizer_allocates_its_restored_state_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "Allocating", Allocating, raising=False)
    fit(tmp_path, 2, "Allocating")
    optimizers: list[Any] = []
    monkeypatch.setattr(
        Net, "on_fit_end", lambda self: optimizers.extend(self.trainer.optimizers.values()), raising=False
    )
    fit(tmp_path, 4, "Allocating")
    allocated = {tensor.data_ptr() for tensor in optimizers[0].allocated}
    state = [values[key] for values in optimizers[0].state.values() for key in ("state1", "state2")]
    assert len(state) == 8
    assert {tensor.data_ptr() for tensor in state} == allocated


def on_ranks(folder: Path) -> bool:
    return resumed(folder, "AdamW8bit", "ddp", 2)


def test_two_ranks_resume_to_the_last_bit_and_train_what_one_trains(tmp_path: Path) -> None:
    assert run_ranks(on_ranks, 2, tmp_path / "two") == [True, True]
    one = fit(tmp_path / "one", 2, "PagedAdamW")
    for weights in run_ranks(fit, 2, tmp_path / "two of them", 2, "PagedAdamW", "ddp", 2):
        for name, value in one.items():
            torch.testing.assert_close(weights[name], value)


def refused(folder: Path, optimizer: str, strategy: str = "fsdp") -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit(folder, 1, optimizer, strategy)
    return str(caught.value)


def test_zero2_refuses_blockwise_optimizers_even_where_untested_optimizers_are_allowed(tmp_path: Path) -> None:
    for message in run_ranks(refused, 2, tmp_path, "AdamW8bit", "zero2:allow_untested_optimizer=true", timeout=600):
        assert "would cut the blocks (with one scale each) in which AdamW8bit keeps its state" in message


def goes_on(folder: Path) -> dict[str, torch.Tensor]:
    return fit(folder / "two", 5, "AdamW8bit", "ddp", 2)


def test_the_state_of_one_process_goes_on_on_two_ranks(tmp_path: Path) -> None:
    straight = fit(tmp_path / "one", 5, "AdamW8bit")
    fit(tmp_path / "two", 2, "AdamW8bit")
    for weights in run_ranks(goes_on, 2, tmp_path, timeout=600):
        for name, value in straight.items():
            torch.testing.assert_close(weights[name], value, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "PagedAdamW"])
def test_strategies_with_shards_refuse_bitsandbytes_optimizers_before_the_first_step(
    optimizer: str, tmp_path: Path
) -> None:
    for message in run_ranks(refused, 2, tmp_path, optimizer):
        assert f"bitsandbytes.optim.{optimizer}" in message
        assert "this optimizer does not support sharded parameters" in message
