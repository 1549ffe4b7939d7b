"""`Trainer(activation_checkpointing=True)`: blocks run twice per micro-batch, and the trained weights are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricate import FSDP, ConfigurationError, Trainer, TrainModule
from fabricate.testing import run_ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(6, 6), torch.nn.Dropout(0.4)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.dropout(self.layer(x).tanh())


class Deep(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(6, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Flat(Deep):
    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.head = torch.nn.Linear(6, 1)
        self.blocks = torch.nn.Sequential()


def weights(strategy: Any, module: Deep | None = None, **arguments: Any) -> tuple[list[list[float]], int]:
    """The weights after a fit, those that this rank has, and how often the first block ran."""
    module = module or Deep()
    torch.manual_seed(1)
    defaults = {"max_steps": 3, "seed": 2, "progress": False, "print_plan": "none", "strategy": strategy}
    Trainer(**defaults, **arguments).fit(module, torch.randn(24, 6), batch_size=4)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    assert not any("forward" in vars(child) for child in module.modules())
    return [part.detach().flatten().tolist() for part in parts], getattr(module.blocks[0], "runs", 0) if len(
        module.blocks
    ) else 0  # type: ignore[arg-type]


def both(strategy: str) -> tuple[bool, int, int]:
    first, once = weights(strategy)
    again, twice = weights(strategy, activation_checkpointing=True)
    return first == again, once, twice


def test_blocks_run_again_in_backward_and_the_weights_are_the_same() -> None:
    assert both("single") == (True, 3, 6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_on_two_ranks_blocks_run_again_in_backward_and_the_weights_are_the_same(strategy: str) -> None:
    assert run_ranks(both, 2, strategy) == [(True, 3, 6)] * 2


def test_with_the_option_of_fsdp_blocks_run_twice_not_more() -> None:
    assert weights(FSDP(activation_checkpointing=True), activation_checkpointing=True)[1] == 6


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="activation_checkpointing=True: Flat has no transformers model and no ModuleList"
    ):
        weights("single", Flat(), activation_checkpointing=True)


class Counting(torch.nn.Module):
    """Buffers that a forward changes: running statistics, one in the place of another, through `.data`, and from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(()))
        self.register_buffer("book", torch.zeros(2**17))
        self.register_buffer("later", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.book.data.add_(x.mean().item())
        if self.calls > 1:
            self.later.add_(x.mean().item())
        result: torch.Tensor = self.norm(x) * self.fixed * self.calls + self.book[0] + self.later
        return result


def test_buffers_that_a_block_changes_change_once() -> None:
    states = []
    for again in (False, True):
        module = Deep()
        module.blocks.append(Counting())
        weights("single", module, activation_checkpointing=again)
        states.append([*module.state_dict().values()])
    assert all(map(torch.equal, *states))
    assert float(module.blocks[2].calls) == 3


class Logs(torch.nn.Module):
    def __init__(self, owner: TrainModule) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        object.__setattr__(self, "owner", owner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.owner.log("calls", 1.0, reduce="sum")
        result: torch.Tensor = self.layer(x)
        return result


def test_what_a_block_logs_is_logged_once() -> None:
    module = Deep()
    module.blocks.append(Logs(module))
    trainer = Trainer(max_steps=3, activation_checkpointing=True, progress=False)
    assert trainer.fit(module, torch.randn(24, 6), batch_size=4).metrics["calls"] == 3


def test_a_forward_of_the_users_own_is_there_afterwards() -> None:
    module = Deep()
    plain = module.blocks[0].forward
    module.blocks[0].forward = own = lambda x: 2 * plain(x)
    Trainer(max_steps=1, activation_checkpointing=True, progress=False).fit(module, torch.randn(8, 6), batch_size=4)
    assert module.blocks[0].forward is own
