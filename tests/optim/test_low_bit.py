"""Optimizers whose state is in tensor subclasses, as torchao's are: counted in their real size, saved and restored bit for bit, or refused
before the first step. Their steps run uncompiled here, which computes the same without the time to compile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from fabricate import DDP, FSDP, ConfigurationError, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.model.memory import need
from fabricate.strategies.sharding import inner_tensors
from fabricate.training.preparation import unsaved_state

LOW_BIT = [AdamW8bit, AdamW4bit, AdamWFp8]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with torch.compiler.set_stance("force_eager"):
        yield


class Net(TrainModule):
    """A weight large enough to be kept in few bits, and one that is not."""

    def __init__(self, optimizer: Any = AdamW8bit) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
        self.optimizer = optimizer
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.small(torch.tanh(self.large(batch[0]))).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def on_fit_end(self) -> None:
        for state in self.trainer.optimizers["main"].state.values():
            self.kept.extend(inner.clone() for _, value in sorted(state.items()) for inner in inner_tensors(value))


def fit(run_dir: Path, steps: int, optimizer: Any, **options: Any) -> tuple[Net, list[torch.Tensor]]:
    """The module, and every number that the optimizer keeps."""
    rows = torch.utils.data.TensorDataset(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)))
    module = Net(optimizer)
    Trainer(max_steps=steps, run_dir=run_dir, progress=False, seed=1, log_every=100, **options).fit(
        module, rows, batch_size=4
    )
    return module, module.kept


@pytest.mark.parametrize("optimizer", LOW_BIT)
@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_resumed_run_ends_as_one_that_never_stopped(optimizer: Any, save: str, tmp_path: Path) -> None:
    straight, state = fit(tmp_path / "straight", 5, optimizer, save=save)
    fit(tmp_path / "run", 2, optimizer, save=save)
    resumed, restored = fit(tmp_path / "run", 5, optimizer, save=save)
    assert all(map(torch.equal, straight.state_dict().values(), resumed.state_dict().values()))
    assert len(restored) == len(state) > 8
    assert all(map(torch.equal, state, restored))
    assert {inner.dtype for inner in state} - {torch.float32}, "few bits"
    with Reader(tmp_path / "run" / "checkpoints" / "step-00000005") as reader:
        assert "optimizer/main/large.weight/exp_avg.codes" in reader.manifest.tensors


@pytest.mark.parametrize("optimizer", LOW_BIT)
def test_the_plan_counts_what_a_step_really_leaves(optimizer: Any, tmp_path: Path) -> None:
    module, states = fit(tmp_path, 1, optimizer)
    memory = need(module, {"main": optimizer(module.parameters(), lr=0.01)})
    assert memory.counted == f"state of {optimizer.__name__}"
    assert memory.whole["optimizer state"] == sum(inner.nbytes for inner in states)


def test_another_kind_of_state_than_was_saved_is_an_error(tmp_path: Path) -> None:
    def blocks_of(size: int) -> Any:
        return lambda parameters, lr: AdamW8bit(parameters, lr=lr, block_size=size)

    fit(tmp_path, 1, blocks_of(256))
    with pytest.raises(
        Exception,
        match=r"large.weight/exp_avg: OptimState8bit has the inner tensors .*\. Build the optimizer as before",
    ):
        fit(tmp_path, 2, blocks_of(128))


class Opaque(torch.Tensor):
    """A kind of tensor that does not say what it is made of."""


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = torch.zeros_like(parameter).as_subclass(Opaque)


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="Odd keeps Opaque tensors, which no checkpoint can hold; use another optimizer"
    ):
        fit(tmp_path, 1, Odd)
    assert not list(tmp_path.glob("*/step-*"))


class Projector:
    """An object that an optimizer keeps for a parameter, as GaLore does."""


class Projecting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {"scale": torch.ones(()), "projector": Projector()}


class Scaled(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["projector"] = Projector()


@pytest.mark.parametrize(("optimizer", "where"), [(Projecting, "state"), (Scaled, "a group")])
def test_objects_of_an_optimizer_that_no_checkpoint_can_hold_are_refused_before_the_first_step(
    tmp_path: Path, optimizer: Any, where: str
) -> None:
    refused = (
        rf"{optimizer.__name__}: {where}.projector is a \S*Projector, which a checkpoint cannot hold.*leave out run_dir"
    )
    with pytest.raises(ConfigurationError, match=refused):
        fit(tmp_path, 1, optimizer)
    assert not list(tmp_path.glob("*/step-*"))


def test_state_that_a_strategy_cannot_save_in_parts_is_refused_by_name() -> None:
    module = Net()
    needed = need(module, {"main": AdamW8bit(module.parameters())})
    assert list(unsaved_state(needed, DDP())) == []
    assert list(unsaved_state(needed, FSDP())) == [
        "AdamW8bit keeps OptimState8bit tensors, which strategy='fsdp' cannot save in parts; use strategy='ddp', another optimizer, "
        "or leave out run_dir, so that nothing is saved"
    ]
    plain = need(module, {"main": torch.optim.AdamW(module.parameters())})
    assert list(unsaved_state(plain, FSDP())) == []
