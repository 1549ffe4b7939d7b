"""A strategy or a precision that cannot work is refused before the first step, with what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from fabricate import DDP, Callback, PluginError, Precision, Strategy, Trainer, TrainModule, hookimpl


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(**arguments: Any) -> None:
    Trainer(max_steps=1, progress=False, **arguments).fit(Regression(), torch.randn(4, 4), batch_size=4)


class Mine(Strategy):
    name = "mine"


class Nameless(Strategy):
    pass


class MisspeltMethod(Mine):
    def bakward(self, loss: torch.Tensor) -> None: ...


class MisspeltFlag(Mine):
    exposes_gradient: ClassVar[bool] = False


class OtherArguments(Mine):
    def backward(self, accelerator: Any, loss: torch.Tensor) -> None: ...  # type: ignore[override]


class PreparesNothing(Mine):
    def prepare(self, *arguments: Any) -> Any: ...


class AnswersText(Mine):
    def check(self, world_size: int, device: torch.device) -> Any:
        return "cannot run"


class AnswersNothing(Mine):
    def check(self, world_size: int, device: torch.device) -> Any: ...


class DescribesText(Mine):
    def describe(self) -> Any:
        return "text"


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Nameless, "strategy: Nameless has no name; write name: ClassVar"),
        (MisspeltMethod, "MisspeltMethod.bakward is never read; did you mean 'backward'?"),
        (MisspeltFlag, "MisspeltFlag.exposes_gradient is never read; did you mean 'exposes_gradients'?"),
        (OtherArguments, "calls it as backward(loss)"),
        (PreparesNothing, "PreparesNothing.prepare returned NoneType; return the module that the loop runs"),
        (AnswersText, "AnswersText: a check returned str; it has to yield or to list the reasons"),
        (AnswersNothing, "AnswersNothing: a check returned NoneType; it has to yield or to list the reasons"),
        (DescribesText, "DescribesText.describe returned str; return a mapping"),
    ],
)
def test_a_strategy_that_could_not_work_is_refused(strategy: Callable[[], Strategy], message: str) -> None:
    with pytest.raises(PluginError) as caught:
        _fit(strategy=strategy())
    assert message in str(caught.value)


def test_a_precision_without_a_name_is_refused() -> None:
    with pytest.raises(PluginError, match="precision: Precision has no name"):
        _fit(precision=Precision())


def test_options_and_helpers_may_be_named_freely() -> None:
    @dataclasses.dataclass(eq=False)
    class Own(DDP):
        clip_: float = 1.0
        steps: int = 3  # near to `step`
        name: ClassVar[str] = "own"
        min_world_size: ClassVar[int] = 2

        def helper(self) -> None: ...

        def _prepared(self) -> None: ...

    with pytest.raises(Exception, match="strategy='own' needs 2 or more processes"):
        _fit(strategy=Own())  # refused for what it says, not for its names


def test_a_callback_that_hears_nothing_is_refused() -> None:
    class Forgot(Callback):
        def step(self) -> None: ...

    with pytest.raises(PluginError, match="implements no hook and offers no name"):
        _fit(plugins=[Forgot()])


def test_a_hook_that_would_have_to_be_awaited_is_refused() -> None:
    class Waits(Callback):
        @hookimpl
        async def on_step(self) -> None: ...

    with pytest.raises(PluginError, match=r"Waits.on_step is a coroutine and would never run; write def"):
        _fit(plugins=[Waits()])
