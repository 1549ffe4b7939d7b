"""The messages of an update, and when they begin: no more than in a loop by hand, and during the computation that hides them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fabricate import Trainer, TrainModule
from fabricate.distributed.group import Group
from fabricate.testing import close_pools, run_ranks
from tests.distributed.test_group import joined


class Classes(TrainModule):
    """A cross-entropy, whose labels are counted, and a listener that wants the loss: both are sums over the ranks."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)])
        self.head = torch.nn.Linear(2, 3)
        self.happened = happened

    def training_step(self, batch: Any) -> Any:
        scores = self.head(self.blocks[1](self.blocks[0](batch[0])))
        loss = cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        loss.register_hook(lambda gradient: self.happened.append("backward"))
        return loss

    def on_step(self, loss: torch.Tensor) -> None:
        self.happened.append("step")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


@contextmanager
def remembered(function: str, happened: list[str]) -> Iterator[None]:
    """Calls of a function of torch.distributed are put on the list as well."""
    own = getattr(dist, function)

    def recording(*args: Any, **options: Any) -> Any:
        happened.append(function)
        return own(*args, **options)

    setattr(dist, function, recording)
    try:
        yield
    finally:
        setattr(dist, function, own)


def three_updates() -> dict[str, list[str]]:
    """By strategy, what happened."""
    happened: dict[str, list[str]] = {"ddp": [], "fsdp": []}
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
    for strategy, function, accumulation in (("ddp", "all_reduce", 2), ("fsdp", "all_gather_single", 1)):
        trainer = Trainer(
            strategy=strategy,
            max_steps=3,
            gradient_accumulation_steps=accumulation,
            log_every=100,
            seed=1,
            progress=False,
        )
        both = remembered("all_reduce", happened[strategy]) if strategy == "fsdp" else nullcontext()
        with remembered(function, happened[strategy]), both:
            trainer.fit(Classes(happened[strategy]), data, batch_size=2)
    return happened


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[str]]]:
    """What each of two saw."""
    return run_ranks(three_updates, 2)


def test_what_ranks_sum_up_is_on_its_way_while_backward_runs(ranks: list[dict[str, list[str]]]) -> None:
    checked_first = ["backward", "backward", "all_reduce", "step"]
    for happened in ranks:
        assert happened["ddp"] == [*checked_first, *(["backward", "all_reduce", "backward", "step"] * 2)]


def test_fsdp_gathers_no_more_than_fully_shard_by_hand(ranks: list[dict[str, list[str]]]) -> None:
    """Each block before its forward and before its backward, what is in no block once."""
    for happened in ranks:
        calls = [each for each in happened["fsdp"] if each not in ("backward", "all_reduce")]
        assert calls[: 3 * 6] == [*["all_gather_single"] * 5, "step"] * 3


def test_no_gather_of_a_backward_waits_behind_the_sum_over_ranks(ranks: list[dict[str, list[str]]]) -> None:
    """Messages of one process group are sent in order, and the sum is known at the end of the forward only."""
    for happened in ranks:
        updates = " ".join(happened["fsdp"]).split("step")[1:3]
        for messages in (update.split() for update in updates):
            assert "all_reduce" in messages[messages.index("backward") :]
            assert "all_gather_single" not in messages[messages.index("all_reduce") :]


def groups() -> list[tuple[int, set[int]]]:
    """After each fit: how many process groups are open, and the time-outs in minutes of those that a rank opened for strategies."""
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
    counts = []
    for strategy, minutes in (("ddp", 7), ("fsdp", 7), ("zero1", 7), ("ddp", 9), ("fsdp", 9), ("zero1", 9)):
        module = Classes([])
        trainer = Trainer(
            strategy=strategy, max_steps=1, progress=False, precision="fp32", timeout=f"{minutes} minutes"
        )
        trainer.fit(module, data, batch_size=2)
        every = dist.distributed_c10d._world.pg_map
        limits = [group._get_backend(torch.device("cpu")).options._timeout for group in every]
        counts.append((len(every), {limit.total_seconds() // 60 for limit in limits}))
    return counts


@pytest.fixture(scope="module")
def fits() -> list[list[tuple[int, set[int]]]]:
    """What each of two ranks saw, in new processes: every group that is open belongs to these fits."""
    close_pools()
    return run_ranks(groups, 2)


def test_later_fits_of_a_process_open_no_process_group(fits: list[list[tuple[int, set[int]]]]) -> None:
    """torch closes none before the process ends: each keeps threads, connections and, on a GPU, memory."""
    for rank in fits:
        numbers = [number for number, _ in rank]
        assert numbers[3:] == numbers[2:3] * 3, numbers


def test_the_time_out_of_the_trainer_reaches_every_process_group(fits: list[list[tuple[int, set[int]]]]) -> None:
    """Those of meshes and DeepSpeed's too, to which torch gives ten minutes with NCCL and thirty with gloo."""
    for rank in fits:
        assert [limits for _, limits in rank] == [{7}] * 3 + [{9}] * 3


def shared_values(group: Group) -> list[Any]:
    """This rank's values before, those that all share, and this rank's again."""
    rank = group.rank
    module = torch.nn.Module()
    module.register_buffer("counts", torch.full((3,), rank + 1, dtype=torch.int16))
    module.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t() + 10 * rank)
    module.register_buffer("flag", torch.tensor(rank == 0))
    values = [[buffer.tolist() for buffer in module.buffers()]]
    restore = group.share_buffers(module)
    values.append([buffer.tolist() for buffer in module.buffers()])
    restore()
    return [*values, [buffer.tolist() for buffer in module.buffers()], module.get_buffer("turned").is_contiguous()]


def written_values() -> list[Any]:
    """This rank's buffers after an evaluation that writes one, and after which another has a shape of its own on each rank."""
    group = joined()
    rank = group.rank
    module = torch.nn.Module()
    module.register_buffer("counts", torch.full((2,), rank + 1))
    module.register_buffer("threshold", torch.tensor(float(rank)))
    module.register_buffer("table", torch.arange(2 + rank))
    module.register_buffer("queue", torch.tensor([float("nan"), 1.0 + rank, 3.0 + rank]))
    restore = group.share_buffers(module)
    module.get_buffer("threshold").fill_(7)
    module.get_buffer("queue")[2] = 9
    restore()
    return [buffer.nan_to_num(-1).tolist() for buffer in module.buffers()]


def test_a_buffer_that_is_written_while_it_is_shared_keeps_its_value_and_unequal_shapes_are_left_alone() -> None:
    first, second = run_ranks(written_values, 2)
    assert first == [[1, 1], 7, [0, 1], [-1, 1, 9]]
    assert second == [[2, 2], 7, [0, 1, 2], [-1, 2, 9]]


def only_what_nccl_takes() -> list[Any]:
    """`shared_values`, where a broadcast takes contiguous tensors of some dtypes."""
    group, own = joined(), dist.broadcast

    def strict(tensor: torch.Tensor, **options: Any) -> Any:
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.float32, torch.int64, torch.uint8)
        return own(tensor, **options)

    dist.broadcast = strict
    try:
        return shared_values(group)
    finally:
        dist.broadcast = own


def test_buffers_of_any_dtype_and_layout_are_shared() -> None:
    first, second = run_ranks(only_what_nccl_takes, 2)
    for own, shared, again, contiguous in (first, second):
        assert shared == first[0]
        assert again == own
        assert not contiguous
