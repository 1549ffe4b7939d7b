"""`ddp:sync_batchnorm=true`: layers are replaced for the run and restored; torch computes them on GPUs only."""

from __future__ import annotations

import pytest
import torch

from fabricate import DDP, ConfigurationError, Trainer, TrainModule
from fabricate.strategies.ddp import synchronise_batch_norm
from fabricate.testing import run_ranks


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Sequential(torch.nn.BatchNorm1d(3))
        )

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean() + self.net[0](batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: str) -> Net:
    module = Net()
    Trainer(max_steps=1, strategy=strategy, progress=False, print_plan="none").fit(
        module, torch.randn(8, 2), batch_size=4
    )
    return module


def test_batch_norm_layers_are_exchanged_and_come_back_with_their_state() -> None:
    module = Net()
    first, inner = module.net[1], module.net[2][0]  # type: ignore[index]
    names, weight = list(module.state_dict()), first.weight
    undo = synchronise_batch_norm(module)
    exchanged = module.net[1]
    assert [type(layer) for layer in (exchanged, module.net[2][0])] == [torch.nn.SyncBatchNorm] * 2  # type: ignore[index]
    assert list(module.state_dict()) == names
    assert exchanged.weight is weight
    module.to(torch.float64)  # as when a module is moved to its device: buffers become other tensors
    exchanged.running_mean += 1
    exchanged.eval()
    evaluated = exchanged(torch.ones(4, 3, dtype=torch.float64))
    undo()
    assert (module.net[1], module.net[2][0]) == (first, inner)  # type: ignore[index]
    assert first.running_mean.tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(first.eval()(torch.ones(4, 3, dtype=torch.float64)), evaluated)
    assert list(module.state_dict()) == names


def refused() -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit("ddp:sync_batchnorm=true")
    return str(caught.value)


def test_ranks_on_cpus_are_refused_by_name_and_one_process_runs() -> None:
    assert all(
        "sync_batchnorm=true: torch.nn.SyncBatchNorm computes on a GPU only" in text for text in run_ranks(refused, 2)
    )
    assert type(fit("ddp:sync_batchnorm=true").net[1]) is torch.nn.BatchNorm1d


def test_a_module_without_batch_norm_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Linear has no BatchNorm1d"):
        synchronise_batch_norm(torch.nn.Linear(1, 1))


def test_ddp_accepts_sync_batchnorm_on_cuda() -> None:
    assert list(DDP(sync_batchnorm=True).check(2, torch.device("cuda"))) == []
