"""Sparse gradients, parameters of several dtypes, optimizers that cannot work on shards: trained, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricate import FabricateError, Trainer, TrainModule
from fabricate.testing import run_ranks


class Sparse(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(8, 4, sparse=True)
        self.bags = torch.nn.EmbeddingBag(8, 4, sparse=True)
        self.head = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.head(self.words(batch) + self.bags(batch[:, None])) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Summed(Sparse):
    """The layers of a sum get one gradient together, as the biases of a matrix factorisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = torch.nn.Linear(1, 4), torch.nn.Embedding(8, 4, sparse=True)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        summed = self.first(batch[:, None].float() / 8) + self.words(batch) + self.places(batch // 2)
        return (self.head(torch.tanh(summed + self.bags(batch[:, None]))) - 1).square().mean()


class TwoDtypes(Sparse):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = torch.nn.Embedding(8, 4), torch.nn.EmbeddingBag(8, 4)
        self.head = torch.nn.Linear(4, 1, dtype=torch.bfloat16)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.head(self.words(batch).to(torch.bfloat16)) - 1).float().square().mean()


class Signs(TwoDtypes):
    """With an optimizer that writes where a mask is true."""

    def __init__(self) -> None:
        super().__init__()
        self.head.float()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(batch) + self.bags(batch[:, None])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Rprop(self.parameters(), lr=0.1)


class Decay(torch.optim.SGD):
    """An optimizer that keeps tensors of its own, of the shape of the whole weights."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(torch.ones(parameter.shape))


class Decays(Signs):
    def configure_optimizers(self) -> Any:
        return Decay(self.parameters(), lr=0.1)


def _fitted(kind: type[Sparse], strategy: str, readers: int) -> list[list[float]]:
    module = kind()
    trainer = Trainer(strategy=strategy, precision="fp32", max_steps=4, progress=False)
    trainer.fit(module, torch.arange(8), batch_size=4 // readers, shuffle=False)
    return [parameter.detach().flatten().tolist() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", [Sparse, Summed])
def test_sparse_gradients_of_replicas_train_as_in_one_process(kind: type[Sparse]) -> None:
    wanted = _fitted(kind, "single", 1)
    for parameters in run_ranks(_fitted, 2, kind, "ddp", 2):
        for values, expected in zip(parameters, wanted, strict=True):
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-7)


def _errors(cases: list[tuple[type[Sparse], str]]) -> list[str]:
    errors = []
    for kind, strategy in cases:
        with pytest.raises((FabricateError, RuntimeError)) as caught:
            _fitted(kind, strategy, 2)
        errors.append("\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
    return errors


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, when DeepSpeed is imported
def test_what_shards_cannot_take_is_refused_by_name() -> None:
    cases = {
        (
            Sparse,
            "fsdp",
        ): "strategy='fsdp' cannot add up sparse gradients, those of words, bags: set sparse=False in these layers, or use",
        (
            Sparse,
            "zero1",
        ): "DeepSpeed cannot add up sparse gradients, those of words, bags: set sparse=False in these layers, or use",
        (TwoDtypes, "fsdp"): "strategy='fsdp' gathers bags.weight (float32) and head.bias (bfloat16) together",
        (TwoDtypes, "zero3"): "DeepSpeed trains parameters of one dtype, but ",
        (Signs, "fsdp"): "use another optimizer or operation, or strategy='ddp'",
        (Decays, "fsdp"): "use another optimizer or operation, or strategy='ddp'",
    }
    for errors in run_ranks(_errors, 2, list(cases)):
        for text, (case, wanted) in zip(errors, cases.items(), strict=True):
            assert wanted in text, case


class Marked(Sparse):
    """Builds its groups by a mark on a parameter, as models with state spaces do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = torch.nn.Embedding(8, 4), torch.nn.EmbeddingBag(8, 4)
        self.words.weight._no_weight_decay = True  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for parameter in self.parameters():
            groups[getattr(parameter, "_no_weight_decay", False)].append(parameter)
        self.marked = len(groups[True])
        return torch.optim.SGD([{"params": groups[True], "weight_decay": 0.0}, {"params": groups[False]}], lr=0.5)


def marked() -> dict[str, int]:
    found = {}
    for strategy in ("ddp", "fsdp", "zero3"):
        module = Marked()
        Trainer(max_steps=1, progress=False, strategy=strategy).fit(module, torch.arange(8), batch_size=8)
        found[strategy] = module.marked
    return found


def test_a_mark_on_a_parameter_is_there_when_groups_are_built() -> None:
    assert run_ranks(marked, 2) == [{"ddp": 1, "fsdp": 1, "zero3": 1}] * 2
