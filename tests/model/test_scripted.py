"""Modules of torch.jit inside a module: they take no hooks, and their tensors are in C++."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, ModelSummary, Trainer, TrainModule
from fabricate.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
ROWS = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 60).reshape(10, 6))


def scripted(net: torch.nn.Module) -> Any:
    return torch.jit.script(net)


def traced(net: torch.nn.Module) -> Any:
    return torch.jit.trace(net, torch.ones(2, 6))


def frozen(net: torch.nn.Module) -> Any:
    return torch.jit.freeze(torch.jit.script(net))


KINDS = [scripted, traced, frozen]


class Student(TrainModule):
    """A head on an encoder that is not trained: the original one, or what `kind` makes of it."""

    def __init__(self, kind: Callable[[torch.nn.Module], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(6, 1)
        encoder = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)).eval().requires_grad_(False)
        self.encoder = encoder if kind is None else kind(encoder)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.encoder(batch[0])).square().mean()
        return loss

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(batch)}

    def predict_step(self, batch: Any) -> Any:
        return self.head(self.encoder(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.1)


def trained(kind: Any, folder: Path, strategy: str = "auto", **options: Any) -> list[float]:
    """The weights of the head after a fit that is resumed once, and what validate and predict return before and after."""
    arguments: dict[str, Any] = {"strategy": strategy, "progress": False, "print_plan": "none", "seed": 1} | options
    module = Student(kind)
    before = Trainer(**arguments).validate(module, ROWS, batch_size=4)
    for epochs in (1, 2):
        module = Student(kind)
        Trainer(max_epochs=epochs, run_dir=folder, **arguments).fit(module, ROWS, ROWS, batch_size=4)
    after = Trainer(**arguments).validate(module, ROWS, batch_size=4)
    predictions = Trainer(**arguments).predict(module, ROWS, batch_size=4) or []
    return [before["val_loss"], after["val_loss"], *module.head.weight[0].tolist(), *map(float, predictions)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_of_torch_jit_trains_its_head_as_the_original_does(kind: Any, tmp_path: Path) -> None:
    assert trained(kind, tmp_path / "jit") == pytest.approx(trained(None, tmp_path / "original"), abs=1e-6)


@pytest.mark.parametrize("kind", [scripted, traced])
def test_under_ddp_too(kind: Any, tmp_path: Path) -> None:
    first, *_ = run_ranks(trained, 2, kind, tmp_path / "jit", "ddp")
    expected, *_ = run_ranks(trained, 2, None, tmp_path / "original", "ddp")
    assert first == pytest.approx(expected, abs=1e-6)


def test_precision_compilation_and_the_summary_leave_it_as_it_is(tmp_path: Path) -> None:
    options = {"compile": {"backend": "eager"}, "plugins": [ModelSummary(depth=2)], "precision": "bf16"}
    trained(scripted, tmp_path, **options)


@pytest.mark.parametrize("kind", [scripted, traced])
def test_fsdp_refuses_it_by_name(kind: Any) -> None:
    trainer = Trainer(max_steps=1, strategy="fsdp", progress=False, print_plan="none")
    with pytest.raises(ConfigurationError, match=r"cannot replace the weights of encoder, a module of torch.jit"):
        trainer.fit(Student(kind), ROWS, batch_size=4)
